#include "engine_ahead.h"

/* A read for a guess fills time in which the disk would rest, but delays what is needed next when
 * it is wrong, and displaces something. At 0.5 and 0.85 tokens took 2 and 6 % longer (m89). */
#define LEAST_RIGHT 0.7f
#define FIRST_RIGHT 0.75f /* before anything is known */
#define LEARN_RATE  (1.0f / 64.0f)

void engine_ahead_start(struct engine_ahead *a, bool active)
{
    *a = (struct engine_ahead){
        .active = active, .trial = ENGINE_AHEAD_TRIAL_STEPS, .period = ENGINE_AHEAD_FIRST_STEPS};
}

static bool counts(const struct engine_ahead *a, uint32_t decode_rows, uint32_t prompt_rows)
{
    return a->active && prompt_rows == 0 && decode_rows > 0 &&
           decode_rows <= ENGINE_AHEAD_MOST_ROWS;
}

bool engine_ahead_wanted(const struct engine_ahead *a, uint32_t decode_rows, uint32_t prompt_rows)
{
    return counts(a, decode_rows, prompt_rows) && (a->trial > 0 ? a->trial % 2 == 0 : a->on);
}

static void decide(struct engine_ahead *a)
{
    const struct engine_ahead_rate *with = &a->with, *without = &a->without;
    const bool better = with->ns * without->rows < without->ns * with->rows;
    if (better != a->on)
        a->period = ENGINE_AHEAD_FIRST_STEPS;
    else if (a->period < ENGINE_AHEAD_MOST_STEPS)
        a->period *= 2;
    a->on = better;
    a->left = a->period;
}

/* A trial alone is short beside the spread of steps. */
static struct engine_ahead_rate half(struct engine_ahead_rate r)
{
    return (struct engine_ahead_rate){r.rows * 0.5, r.ns * 0.5};
}

bool engine_ahead_done(struct engine_ahead *a, uint32_t decode_rows, uint32_t prompt_rows,
                       uint64_t ns)
{
    if (!counts(a, decode_rows, prompt_rows))
        return false;
    if (a->trial == 0) {
        if (--a->left > 0)
            return false;
        a->trial = ENGINE_AHEAD_TRIAL_STEPS;
        a->with = half(a->with);
        a->without = half(a->without);
        return false;
    }
    struct engine_ahead_rate *r = a->trial % 2 == 0 ? &a->with : &a->without;
    r->rows += decode_rows;
    r->ns += (double)ns;
    if (--a->trial > 0)
        return false;
    decide(a);
    return true;
}

void engine_ahead_odds_start(struct engine_ahead_odds *o)
{
    for (uint32_t i = 0; i < ENGINE_AHEAD_FAR * ENGINE_AHEAD_RANKS; i++)
        o->right[i] = FIRST_RIGHT;
}

uint32_t engine_ahead_kind(uint32_t far, uint32_t rank, uint32_t n_used)
{
    return far * ENGINE_AHEAD_RANKS + rank * ENGINE_AHEAD_RANKS / n_used;
}

void engine_ahead_learn(struct engine_ahead_odds *o, uint32_t kind, bool right)
{
    o->right[kind] += LEARN_RATE * ((right ? 1.0f : 0.0f) - o->right[kind]);
}

bool engine_ahead_pays(const struct engine_ahead_odds *o, uint32_t kind)
{
    return o->right[kind] >= LEAST_RIGHT;
}

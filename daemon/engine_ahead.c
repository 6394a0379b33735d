#include "engine_ahead.h"

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
    const bool better =
        (double)with->ns * (double)without->rows < (double)without->ns * (double)with->rows;
    if (better != a->on)
        a->period = ENGINE_AHEAD_FIRST_STEPS;
    else if (a->period < ENGINE_AHEAD_MOST_STEPS)
        a->period *= 2;
    a->on = better;
    a->left = a->period;
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
        a->with = a->without = (struct engine_ahead_rate){.rows = 0};
        return false;
    }
    struct engine_ahead_rate *r = a->trial % 2 == 0 ? &a->with : &a->without;
    r->rows += decode_rows;
    r->ns += ns;
    if (--a->trial > 0)
        return false;
    decide(a);
    return true;
}

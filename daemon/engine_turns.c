#include "engine_turns.h"

#include <string.h>

void engine_turns_start(struct engine_turns *t, bool active, uint32_t width)
{
    memset(t, 0, sizeof(*t));
    t->active = active;
    t->period = ENGINE_TURNS_FIRST_STEPS;
    t->width = width < 1 ? 1 : width > ENGINE_TURNS_SEQUENCES ? ENGINE_TURNS_SEQUENCES : width;
}

static uint32_t count(uint32_t mask)
{
    return (uint32_t)__builtin_popcount(mask);
}

static uint32_t width_now(const struct engine_turns *t)
{
    return t->trial != 0 ? t->trial : t->width;
}

/* Is the turn over? It has its steps, or all its time: what keeps the others' pause short. */
static bool is_over(const struct engine_turns *t, uint32_t longest)
{
    const uint64_t turns = (t->n + width_now(t) - 1) / width_now(t); /* until all had one */
    const uint64_t most_ns = (uint64_t)ENGINE_TURNS_PAUSE_MS * 1000000u / turns;
    return t->steps >= ENGINE_TURNS_MOST_STEPS || t->prompt_ns > most_ns ||
           t->decode_ns + t->step_ns > most_ns ||
           ((t->fresh >> longest & 1) && (t->current & t->first) == 0 &&
            t->decode_ns >= ENGINE_TURNS_FIRST_MS * UINT64_C(1000000));
}

/* The one of the mask that has waited longest. */
static uint32_t longest_waiting(const struct engine_turns *t, uint32_t mask)
{
    uint32_t best = ENGINE_TURNS_SEQUENCES;
    for (uint32_t i = 0; i < ENGINE_TURNS_SEQUENCES; i++)
        if ((mask >> i & 1) && (best == ENGINE_TURNS_SEQUENCES || t->last[i] < t->last[best]))
            best = i;
    return best;
}

/* The present turn's sequences have not waited at all. */
static void stamp(struct engine_turns *t)
{
    t->clock++;
    for (uint32_t i = 0; i < ENGINE_TURNS_SEQUENCES; i++)
        if (t->current >> i & 1)
            t->last[i] = t->clock;
}

static void greet(struct engine_turns *t, uint32_t present)
{
    t->known &= present;
    t->fresh &= present;
    for (uint32_t i = 0; i < ENGINE_TURNS_SEQUENCES; i++)
        if ((present & ~t->known) >> i & 1)
            t->last[i] = ++t->clock;
    t->fresh |= present & ~t->known;
    t->known = present;
}

struct engine_turns_choice engine_turns_pick(struct engine_turns *t,
                                             const struct engine_turns_seen *seen)
{
    const uint32_t all = seen->decoding | seen->prompts;
    t->n = count(all);
    if (!t->active)
        return (struct engine_turns_choice){seen->decoding, seen->prompts};
    greet(t, seen->present | all);
    t->current &= all;
    if (t->trial > count(seen->decoding)) /* it is of decoding */
        t->trial = 0;
    if (t->n > width_now(t)) {
        while (count(t->current) > width_now(t)) /* the width shrank within a turn */
            t->current &= t->current - 1;
        if (t->current == 0 || is_over(t, longest_waiting(t, all & ~t->current))) {
            t->first = 0;
            stamp(t); /* those who came meanwhile have waited longer */
            t->current = t->steps = 0;
            t->prompt_ns = t->decode_ns = t->owed_ns = 0;
        }
        while (count(t->current) < width_now(t))
            t->current |=
                1u << longest_waiting(t, (t->trial != 0 ? seen->decoding : all) & ~t->current);
        t->first = t->current & (t->first | t->fresh);
    } else {
        t->current = all;
    }
    t->fresh &= ~t->current;
    uint32_t prompts = t->current & seen->prompts;
    if (prompts & seen->long_prompts)
        prompts |= seen->long_prompts;
    const uint32_t decoding = t->current & seen->decoding;
    return (struct engine_turns_choice){decoding, decoding != 0 && t->owed_ns > 0 ? 0 : prompts};
}

static void add(struct engine_turns_rate *r, uint32_t rows, uint64_t ns)
{
    r->rows += rows;
    r->ns += ns;
    r->steps++;
}

static double rate_of(const struct engine_turns_rate *r)
{
    return r->ns == 0 ? 0.0 : (double)r->rows / (double)r->ns;
}

/* Half or double, in turn; 0 if there is no other width. */
static uint32_t next_trial(struct engine_turns *t)
{
    const uint32_t twice = t->base_width * 2 < t->n ? t->base_width * 2 : t->n;
    const uint32_t up = twice > t->base_width ? twice : 0, down = t->base_width / 2;
    t->trial_down = !t->trial_down;
    if (t->trial_down)
        return down != 0 ? down : up;
    return up != 0 ? up : down;
}

static void measure(struct engine_turns *t, uint32_t rows, uint64_t ns)
{
    const uint32_t all = t->width < t->n ? t->width : t->n;
    if (rows != (t->trial != 0 ? t->trial : all)) { /* fewer than could: nothing to learn */
        t->trial = 0;
        return;
    }
    if (t->trial == 0) {
        if (t->base_width != rows)
            t->base = (struct engine_turns_rate){.rows = 0};
        t->base_width = rows;
        add(&t->base, rows, ns);
        if (t->base.steps < t->period)
            return;
        t->base_rate = rate_of(&t->base);
        t->base = (struct engine_turns_rate){.rows = 0};
        t->tried = t->base;
        t->trial = next_trial(t);
        return;
    }
    if (t->tried.steps++ < ENGINE_TURNS_SETTLE_STEPS) {
        t->tried.rows = t->tried.ns = 0;
        return;
    }
    t->tried.rows += rows;
    t->tried.ns += ns;
    if (t->tried.steps < ENGINE_TURNS_TRIAL_STEPS)
        return;
    if (rate_of(&t->tried) > 1.03 * t->base_rate) {
        t->width = t->base_width = t->trial;
        t->base_rate = rate_of(&t->tried);
        t->trial_down = !t->trial_down; /* this direction once more */
        t->period = ENGINE_TURNS_BASE_STEPS;
    } else if (t->period < ENGINE_TURNS_MOST_BASE_STEPS) {
        t->period *= 2;
    }
    t->trial = 0;
}

void engine_turns_done(struct engine_turns *t, uint32_t decode_rows, uint32_t prompt_rows,
                       uint64_t ns)
{
    if (!t->active)
        return;
    stamp(t);
    if (prompt_rows > 0) {
        t->prompt_ns += ns;
        t->owed_ns = decode_rows > 0 ? ns : 0;
        t->trial = 0; /* it would measure something else */
        return;
    }
    t->owed_ns = t->owed_ns > ns ? t->owed_ns - ns : 0;
    t->decode_ns += ns;
    t->step_ns = ns;
    t->steps++;
    measure(t, decode_rows, ns);
}

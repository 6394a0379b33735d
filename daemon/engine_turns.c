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

/* Steps of a turn: as many as keep the others' pause short. */
static uint32_t turn_steps(const struct engine_turns *t, uint32_t n)
{
    const uint64_t turns = (n + width_now(t) - 1) / width_now(t); /* until all had one */
    const uint64_t all = t->step_ns * turns;
    const uint64_t fit =
        all == 0 ? ENGINE_TURNS_MOST_STEPS : (uint64_t)ENGINE_TURNS_PAUSE_MS * 1000000u / all;
    return fit < 1 ? 1 : fit > ENGINE_TURNS_MOST_STEPS ? ENGINE_TURNS_MOST_STEPS : (uint32_t)fit;
}

/* The one of the mask whose last turn is longest ago. */
static uint32_t longest_waiting(const struct engine_turns *t, uint32_t mask)
{
    uint32_t best = ENGINE_TURNS_SEQUENCES;
    for (uint32_t i = 0; i < ENGINE_TURNS_SEQUENCES; i++)
        if ((mask >> i & 1) && (best == ENGINE_TURNS_SEQUENCES || t->last[i] < t->last[best]))
            best = i;
    return best;
}

uint32_t engine_turns_pick(struct engine_turns *t, uint32_t decoding)
{
    const uint32_t n = t->n = count(decoding);
    if (!t->active || n <= width_now(t)) {
        t->current = decoding;
        t->left = 0;
        return decoding;
    }
    t->current &= decoding;
    if (t->left == 0) {
        t->current = 0;
        t->left = turn_steps(t, n);
    }
    while (count(t->current) > width_now(t)) /* the width shrank within a turn */
        t->current &= t->current - 1;
    while (count(t->current) < width_now(t)) {
        const uint32_t i = longest_waiting(t, decoding & ~t->current);
        t->current |= 1u << i;
        t->last[i] = ++t->clock;
    }
    return t->current;
}

bool engine_turns_prompt(const struct engine_turns *t, uint32_t decoding,
                         const struct engine_turns_prompts *prompts)
{
    const uint32_t n = count(decoding);
    if (!t->active || n == 0)
        return true;
    if (t->owed_ns > 0)
        return false;
    return prompts->urgent || n == 1 || prompts->n >= n ||
           prompts->waited_ns / ENGINE_TURNS_COMPANY >= t->chunk_ns;
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
    if (prompt_rows > 0) {
        t->chunk_ns = ns;
        if (decode_rows > 0)
            t->owed_ns = ns;
        return;
    }
    t->owed_ns = decode_rows > 0 && t->owed_ns > ns ? t->owed_ns - ns : 0;
    t->step_ns = ns;
    if (t->left > 0)
        t->left--;
    measure(t, decode_rows, ns);
}

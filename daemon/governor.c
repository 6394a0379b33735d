#include "governor.h"

#include <stdio.h>

#include "units.h"

#define LARGEST (UINT64_C(1) << 46) /* memory of a device; what says more does not know it */

enum {
    HOTTEST = 150,     /* C; what says more, or 0, is no thermometer */
    HOPELESS = 2,      /* readings */
    RISE_SHARE = 1000, /* of the memory: less than this is no rise */
    MS = 1000000       /* ns */
};

void governor_start(struct governor *g, const struct governor_limits *limits)
{
    *g = (struct governor){.limits = *limits,
                           .temperature = GOVERNOR_UNKNOWN,
                           .steady = GOVERNOR_STEADY,
                           .hold_ms = GOVERNOR_HOLD_MS};
    if (g->limits.temp_low > g->limits.temp_high)
        g->limits.temp_low = g->limits.temp_high;
    if (g->limits.warn_percent > g->limits.critical_percent)
        g->limits.warn_percent = g->limits.critical_percent;
}

static uint64_t percent(uint64_t total, uint32_t n)
{
    return total / 100 * n + total % 100 * n / 100;
}

/* What use is to fall to: a point below where it warns. */
static uint64_t goal(const struct governor *g)
{
    return percent(g->total, g->limits.warn_percent - 1);
}

/* ---- heat ---- */

static void feel(struct governor *g, int32_t celsius, uint64_t now_ns)
{
    if (celsius > 0 && celsius <= HOTTEST) {
        g->temperature = celsius;
        g->heat_ns = now_ns;
        if (celsius > g->limits.temp_high)
            g->hot = true;
        else if (celsius < g->limits.temp_low)
            g->hot = false;
    } else if (now_ns - g->heat_ns >= (uint64_t)GOVERNOR_FORGET_MS * MS) {
        g->temperature = GOVERNOR_UNKNOWN;
        g->hot = false;
    }
}

/* ---- memory ---- */

static enum governor_memory level_of(const struct governor *g)
{
    const uint64_t critical = percent(g->total, g->limits.critical_percent);
    const uint64_t point = g->total / 100;
    if (g->limits.critical_percent < 100 && g->used > critical)
        return GOVERNOR_MEMORY_CRITICAL;
    if (g->memory == GOVERNOR_MEMORY_CRITICAL && g->used > critical - point)
        return GOVERNOR_MEMORY_CRITICAL;
    if (g->limits.warn_percent < 100 && g->used > percent(g->total, g->limits.warn_percent))
        return GOVERNOR_MEMORY_WARN;
    if (g->memory != GOVERNOR_MEMORY_FINE && g->used > goal(g))
        return GOVERNOR_MEMORY_WARN;
    return GOVERNOR_MEMORY_FINE;
}

/* Chunks that bring use down to the goal, as far as there are any. */
static void give_back(struct governor *g, uint32_t held, uint64_t now_ns,
                      struct governor_actions *ret)
{
    const uint64_t too_many = g->used - goal(g), each = g->limits.chunk_bytes;
    const uint64_t wanted = too_many / each + (too_many % each != 0);
    ret->chunks_return = wanted < held ? (uint32_t)wanted : held;
    if (ret->chunks_return == 0 || g->taken_ns == 0)
        return;
    /* Those who come and go should not have the same chunks copied again and again. */
    const bool soon = now_ns - g->taken_ns < g->hold_ms * MS;
    const uint64_t more =
        g->hold_ms > GOVERNOR_MOST_HOLD_MS / 2 ? GOVERNOR_MOST_HOLD_MS : g->hold_ms * 2;
    g->hold_ms = soon ? more : GOVERNOR_HOLD_MS;
    g->taken_ns = 0;
}

static void take_again(struct governor *g, uint32_t missing, uint64_t now_ns,
                       struct governor_actions *ret)
{
    const uint64_t room = g->used < goal(g) ? (goal(g) - g->used) / g->limits.chunk_bytes : 0;
    if (missing == 0 || room == 0) {
        g->room_ns = 0;
        return;
    }
    if (g->room_ns == 0)
        g->room_ns = now_ns;
    if (now_ns - g->room_ns < g->hold_ms * MS)
        return;
    ret->chunks_take = room < missing ? (uint32_t)room : missing;
    g->taken_ns = now_ns;
    g->room_ns = 0;
}

static bool is_good(const struct governor_readings *r)
{
    return r->vram_total >= 100 && r->vram_total <= LARGEST && r->vram_free <= r->vram_total;
}

static void measure(struct governor *g, const struct governor_readings *r, uint32_t held,
                    uint64_t now_ns)
{
    const enum governor_memory before = g->memory;
    g->used = r->vram_total - r->vram_free;
    g->total = r->vram_total;
    g->memory_ns = now_ns;
    g->memory = level_of(g);
    const bool rose = before == GOVERNOR_MEMORY_FINE || g->used > g->peak + g->total / RISE_SHARE;
    if (rose)
        g->peak = g->used;
    g->steady = rose ? 0 : g->steady + (g->steady < GOVERNOR_STEADY);
    g->pressed = g->memory != GOVERNOR_MEMORY_FINE &&
                 (g->pressed || (before != GOVERNOR_MEMORY_FINE && rose));
    g->hopeless = g->memory == GOVERNOR_MEMORY_CRITICAL && held == 0 ? g->hopeless + 1 : 0;
}

void governor_update(struct governor *g, const struct governor_readings *r, uint32_t chunks,
                     uint32_t held, uint64_t now_ns, struct governor_actions *ret)
{
    *ret = (struct governor_actions){.batch = 0};
    feel(g, r->temperature, now_ns);
    if (is_good(r)) {
        measure(g, r, held, now_ns);
        ret->drop = g->hopeless >= HOPELESS;
        if (g->limits.warn_percent < 100 && g->used > percent(g->total, g->limits.warn_percent))
            give_back(g, held, now_ns, ret);
        if (g->memory == GOVERNOR_MEMORY_FINE)
            take_again(g, chunks - held, now_ns, ret);
        else
            g->room_ns = 0;
    } else if (now_ns - g->memory_ns >= (uint64_t)GOVERNOR_FORGET_MS * MS) {
        g->memory = GOVERNOR_MEMORY_FINE;
        g->pressed = false;
        g->hopeless = 0;
        g->room_ns = 0;
    }
    ret->pause = g->memory == GOVERNOR_MEMORY_CRITICAL ||
                 (g->memory == GOVERNOR_MEMORY_WARN && g->steady < GOVERNOR_STEADY);
    ret->batch = g->hot || g->pressed ? GOVERNOR_BATCH : 0;
}

void governor_refused(struct governor *g, uint64_t now_ns)
{
    g->room_ns = now_ns;
    g->taken_ns = 0;
    g->hold_ms = g->hold_ms > GOVERNOR_MOST_HOLD_MS / 2 ? GOVERNOR_MOST_HOLD_MS : g->hold_ms * 2;
}

void governor_describe(const struct governor *g, uint32_t chunks, uint32_t held, char *ret,
                       size_t n)
{
    const uint64_t each = g->limits.chunk_bytes;
    char heat[96] = "", memory[128] = "";
    if (g->hot)
        snprintf(heat, sizeof heat, "the GPU was over %d C: %d sequences a step until below %d C",
                 g->limits.temp_high, GOVERNOR_BATCH, g->limits.temp_low);
    if (held < chunks)
        snprintf(memory, sizeof memory, "%s of %s of islands given back to other programs",
                 units_bytes((chunks - held) * each).s, units_bytes(chunks * each).s);
    else if (g->memory != GOVERNOR_MEMORY_FINE)
        snprintf(memory, sizeof memory, "over %u %% of the GPU's memory is in use",
                 g->limits.warn_percent);
    snprintf(ret, n, "%s%s%s", memory, memory[0] != '\0' && heat[0] != '\0' ? "; " : "", heat);
}

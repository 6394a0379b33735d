/* What becomes of readings of the GPU: how much of its memory all programs use, and how hot it is.
 * Pure: readings and the time in, actions out, with hysteresis; no I/O, no clock.
 *
 * Memory. Over `warn_percent` whole chunks of islands are given back, so many that use falls a
 * point below it, and the gateway admits nothing new until it rises no more. What still rises after
 * that has fewer sequences in a step. Over `critical_percent` with no island left, twice, the GPU
 * is given up. Once there has been room for a while, chunks are taken again.
 * Heat. Over `temp_high` a step has fewer sequences, until below `temp_low`.
 *
 * A reading that is missing or absurd changes nothing; when none came for GOVERNOR_FORGET_MS, what
 * the last one had led to ends. */
#ifndef ISLET_GOVERNOR_H
#define ISLET_GOVERNOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    GOVERNOR_BATCH = 2,             /* sequences of a step while it is hot or memory runs out */
    GOVERNOR_STEADY = 5,            /* readings without a rise before admission goes on */
    GOVERNOR_HOLD_MS = 30000,       /* that room must last before chunks are taken again; doubled */
    GOVERNOR_MOST_HOLD_MS = 600000, /* up to this when they had to be given back at once */
    GOVERNOR_FORGET_MS = 60000,
    GOVERNOR_UNKNOWN = -1
};

struct governor_limits {
    uint32_t warn_percent, critical_percent; /* of the device's memory; 100: never */
    int32_t temp_high, temp_low;             /* C */
    uint64_t chunk_bytes;
};

struct governor_readings {
    uint64_t vram_free, vram_total;        /* of the device; total 0: unknown */
    int32_t temperature;                   /* C; these three: or GOVERNOR_UNKNOWN */
    int32_t power_mw, utilization_percent; /* only shown */
};

enum governor_memory {
    GOVERNOR_MEMORY_FINE,
    GOVERNOR_MEMORY_WARN,
    GOVERNOR_MEMORY_CRITICAL
};

struct governor {
    struct governor_limits limits;
    enum governor_memory memory;
    bool hot, pressed;           /* pressed: memory rose after chunks were given back */
    uint64_t used, total;        /* of the last good reading */
    uint64_t peak;               /* what it rose to since it was fine */
    uint32_t steady;             /* readings since memory rose */
    uint32_t hopeless;           /* critical ones without an island */
    uint64_t memory_ns, heat_ns; /* of the last good readings */
    int32_t temperature;         /* of the last good one, or GOVERNOR_UNKNOWN */
    uint64_t room_ns;            /* since when there is room for a chunk; 0: there is not */
    uint64_t taken_ns;           /* when chunks were taken again; 0: never */
    uint64_t hold_ms;
};

struct governor_actions {
    uint32_t chunks_return, chunks_take; /* one of them is 0 */
    uint32_t batch;                      /* sequences of a step; 0: no limit */
    bool pause;                          /* no admission */
    bool drop;                           /* the GPU is to be given up */
};

/* temp_low is at most temp_high, warn_percent at most critical_percent: larger ones are cut. */
void governor_start(struct governor *g, const struct governor_limits *limits);
/* `held` of the islands' `chunks` have memory. now_ns never falls, and is over 0. */
void governor_update(struct governor *g, const struct governor_readings *r, uint32_t chunks,
                     uint32_t held, uint64_t now_ns, struct governor_actions *ret);
/* The device did not give the chunks that were to be taken. */
void governor_refused(struct governor *g, uint64_t now_ns);
/* Why answers are slower than they could be, in one line, or "". */
void governor_describe(const struct governor *g, uint32_t chunks, uint32_t held, char *ret,
                       size_t n);

#endif

/* Which rows a step computes, whom to let in next, and whom to pre-empt. Pure: state and time are
 * arguments. */
#ifndef ISLET_ENGINE_SCHED_H
#define ISLET_ENGINE_SCHED_H

#include <stdbool.h>
#include <stdint.h>

enum {
    ENGINE_SCHED_STEP_MS = 200,   /* a step's time at most while someone decodes */
    ENGINE_SCHED_FIRST_ROWS = 32, /* prompt rows beside decoding ones before a rate is known */
    ENGINE_SCHED_AGE_ROWS = 2,    /* rows that a millisecond of waiting is worth */
    ENGINE_SCHED_PRIORITY_ROWS = 1024
};

struct engine_sched_sequence {
    uint64_t order;     /* of submission: smaller is older */
    uint64_t waited_ms; /* since submission */
    uint32_t remaining; /* rows that are to be computed before the next token */
    uint32_t max_rows;  /* of one step; 0: none now */
    int8_t priority;    /* smaller is earlier */
    bool decoding;      /* one row a step */
    bool holds_pages;
    uint64_t served; /* number of the last step in which it had rows; 0: none */
};

struct engine_sched_limits {
    uint32_t prefill_chunk; /* prompt rows of a step */
    uint64_t row_ns;        /* measured time of a row in steps with prompt rows; 0: unknown */
    bool whole;             /* prompt rows share what is read from the SSD: chunks are not cut to
                             * keep the step short (engine_turns does that) */
};

/* Rows of each of n sequences (at most 64) in the next step; returns their sum. */
uint32_t engine_sched_plan(const struct engine_sched_sequence *sequences, uint32_t n,
                           const struct engine_sched_limits *limits, uint32_t *ret_rows);
/* Takes the turn from all but `most` of those that want rows (0: all may): those that had some longest
 * ago go first, the oldest first among these. */
void engine_sched_limit(struct engine_sched_sequence *sequences, uint32_t n, uint32_t most);
/* Lower is earlier: short prompts first, then by priority; waiting makes everyone earlier. */
int64_t engine_sched_urgency(uint32_t remaining, int8_t priority, uint64_t waited_ms);
/* The youngest that holds pages, but never the oldest of all: n if there is none. */
uint32_t engine_sched_victim(const struct engine_sched_sequence *sequences, uint32_t n);

#endif

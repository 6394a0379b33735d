/* Whether the experts of the next layer are read before it chooses them: pure; measured times come
 * in as arguments. The next layer's router on this layer's residual names most of them, and a disk
 * that is idle while a layer computes can bring them early; a wrong guess costs a read, so it loses
 * where the disk is busy all the time and guesses are poor. So it is tried: in turn on and off, step
 * by step, and the faster stays until the next trial. */
#ifndef ISLET_ENGINE_AHEAD_H
#define ISLET_ENGINE_AHEAD_H

#include <stdbool.h>
#include <stdint.h>

enum {
    ENGINE_AHEAD_MOST_ROWS = 4,    /* of a step: the union of more rows' guesses is poor */
    ENGINE_AHEAD_TRIAL_STEPS = 32, /* of a trial, half of them with it */
    ENGINE_AHEAD_FIRST_STEPS =
        256, /* before the next trial; doubled while its result is the same */
    ENGINE_AHEAD_MOST_STEPS = 4096
};

struct engine_ahead_rate {
    uint64_t rows, ns;
};

struct engine_ahead {
    bool active;     /* false: every expert has a place in memory, nothing is ever guessed */
    bool on;         /* what the last trial found */
    uint32_t trial;  /* steps of a trial that are left; 0: none runs */
    uint32_t left;   /* steps before the next trial */
    uint32_t period; /* steps between the last two */
    struct engine_ahead_rate with, without;
};

void engine_ahead_start(struct engine_ahead *a, bool active);
/* Does the next step, of so many rows, guess? */
bool engine_ahead_wanted(const struct engine_ahead *a, uint32_t decode_rows, uint32_t prompt_rows);
/* That step took ns. True: a trial ended with it; a->on is its result, with and without its times. */
bool engine_ahead_done(struct engine_ahead *a, uint32_t decode_rows, uint32_t prompt_rows,
                       uint64_t ns);

#endif

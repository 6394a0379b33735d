/* Whether experts of the next layers are read before these choose them, and which: pure; measured
 * times come in as arguments. Their routers on this layer's residual name most of them
 * (engine_guess), and a disk that is idle while a layer computes can bring them early; a wrong
 * guess costs a read, so it loses where guesses are poor. So it is tried: in turn on and off, step
 * by step, and the faster stays until the next trial. And of each kind of guess (so many layers
 * ahead, of such a rank) it is learned how often it is right. */
#ifndef ISLET_ENGINE_AHEAD_H
#define ISLET_ENGINE_AHEAD_H

#include <stdbool.h>
#include <stdint.h>

enum {
    ENGINE_AHEAD_MOST_ROWS = 4,    /* of a step: the union of more rows' guesses is poor */
    ENGINE_AHEAD_TRIAL_STEPS = 32, /* of a trial, half of them with it */
    ENGINE_AHEAD_FIRST_STEPS =
        256, /* before the next trial; doubled while its result is the same */
    ENGINE_AHEAD_MOST_STEPS = 4096,
    ENGINE_AHEAD_FAR = 3,  /* layers ahead at most */
    ENGINE_AHEAD_RANKS = 8 /* parts of a choice's ranks that are told apart */
};

/* How often guesses of each kind were right of late. */
struct engine_ahead_odds {
    float right[ENGINE_AHEAD_FAR * ENGINE_AHEAD_RANKS];
};

struct engine_ahead_rate {
    double rows, ns; /* earlier trials count less */
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
/* That step took ns. True: a trial ended with it; a->on is its result, `with` and `without` its
 * times. */
bool engine_ahead_done(struct engine_ahead *a, uint32_t decode_rows, uint32_t prompt_rows,
                       uint64_t ns);

void engine_ahead_odds_start(struct engine_ahead_odds *o);
/* Of a guess `far` + 1 layers ahead that gives an expert the rank, 0..n_used - 1. */
uint32_t engine_ahead_kind(uint32_t far, uint32_t rank, uint32_t n_used);
void engine_ahead_learn(struct engine_ahead_odds *o, uint32_t kind, bool right);
/* Is an expert that is missing to be read for such a guess? */
bool engine_ahead_pays(const struct engine_ahead_odds *o, uint32_t kind);

#endif

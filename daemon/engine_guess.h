/* Which experts the next layers will choose, guessed before they do, so that those that are missing
 * are read while the disk would rest. A layer's router is asked for the residual as it is some
 * layers before it, plus what the attention of the layers between added for the row before of the
 * same text: attention changes little from token to token, and much of that change is its own.
 * Of a trained model's choices 86 % are named so one layer ahead, and 78 % without; of a random
 * model's 92 and 76 %.
 *
 * How often each rank of a guess was right for an expert that was missing is learned
 * (engine_ahead_odds), and only what will probably be needed is read. Only where the CPU computes.
 * The engine thread's. */
#ifndef ISLET_ENGINE_GUESS_H
#define ISLET_ENGINE_GUESS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine_ahead.h"
#include "err.h"
#include "kernels.h"
#include "model.h"

struct engine_forward;

/* Missing experts that a layer was guessed to choose, each time that it was. */
struct engine_guess_list {
    uint32_t layer, n;
    struct engine_guess_entry {
        uint32_t expert, kind; /* kind: engine_ahead_kind */
    } * of;                    /* [ENGINE_AHEAD_FAR * ENGINE_AHEAD_MOST_ROWS * n_used] */
};

struct engine_guess {
    /* On the device, for ENGINE_AHEAD_MOST_ROWS rows. */
    struct k_act act;
    struct k_span x, logits, weights, ids;
    struct k_span faults; /* nobody looks: a guess must not end a request */
    struct k_span kept;   /* f32 [n_layer][rows][n_embd]: what attention added in the step before */

    /* Of the host. */
    uint32_t *host_ids;                               /* [rows][n_used] */
    struct engine_guess_list lists[ENGINE_AHEAD_FAR]; /* of a layer: layer % ENGINE_AHEAD_FAR */
    uint32_t n_kept;                                  /* rows of the step, if they are few, */
    uint32_t sequence[ENGINE_AHEAD_MOST_ROWS];        /* and whose they are */
    bool ready; /* to guess: the step before had rows of the same sequences */
    struct engine_ahead_odds odds;
};

/* Bytes of the host, aligned to 8, that engine_guess_start is given. */
uint64_t engine_guess_host_bytes(const struct model *m);
void engine_guess_start(struct engine_guess *g, const struct model *m, void *host);

/* A step begins, whose rows are known. */
void engine_guess_step(struct engine_forward *f);
/* The layer's attention has run, and its choice is known but not yet taken up: learns from it. */
void engine_guess_layer(struct engine_forward *f, uint32_t layer, const struct k_group *groups,
                        uint32_t n_groups);
/* Guesses `layer` and those behind it until there is enough to read; engine_experts reads. The
 * residual is what has gone through all layers before `layer`, but for the last one's experts. */
enum err_code engine_guess_from(struct engine_forward *f, uint32_t layer)
    __attribute__((warn_unused_result));

#endif

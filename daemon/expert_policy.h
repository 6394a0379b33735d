/* What an expert in memory is worth: how likely the next pass through its layer uses it, over how
 * long its bytes are held until then. Layers come in a fixed cycle, so the distance to that pass is
 * known; the likelihood is estimated from decayed counts of use, kept for absent experts too.
 * Time is counted in layers and rows: the same calls give the same figures. The expert cache's. */
#ifndef ISLET_EXPERT_POLICY_H
#define ISLET_EXPERT_POLICY_H

#include <stdint.h>

#include "err.h"

enum {
    EXPERT_POLICY_SPANS = 4 /* half-lives of the counts, and one that never decays */
};

struct expert_policy_layer {
    float grown[EXPERT_POLICY_SPANS]; /* what a use counts now; it grows, so that older ones count
                                       * less without being touched */
    float seen[EXPERT_POLICY_SPANS];  /* decayed rows */
    uint32_t rows;                    /* of the pass under way or of the last one */
};

struct expert_policy {
    uint32_t n_layer, n_expert, n_used;
    uint32_t now, n_rows;               /* layer and rows of the pass under way */
    struct expert_policy_layer *layers; /* [n_layer] */
    float *counts;                      /* [n_layer][n_expert][EXPERT_POLICY_SPANS] */
    float decay[EXPERT_POLICY_SPANS], fill[EXPERT_POLICY_SPANS]; /* over n_rows rows */
};

enum err_code expert_policy_start(struct expert_policy *p, uint32_t n_layer, uint32_t n_expert,
                                  uint32_t n_used, struct err *e)
    __attribute__((warn_unused_result));
void expert_policy_done(struct expert_policy *p); /* of zeroes is fine */

/* A pass of n_rows rows through `layer` begins. */
void expert_policy_pass(struct expert_policy *p, uint32_t layer, uint32_t n_rows);
/* It uses `expert` for `rows` of them. */
void expert_policy_use(struct expert_policy *p, uint32_t layer, uint32_t expert, uint32_t rows);

/* Estimated share of rows that use the expert, 0..1. Changes only by passes of its own layer. */
float expert_policy_rate(const struct expert_policy *p, uint32_t layer, uint32_t expert);
/* Worth now of a byte of an expert of `layer` with that rate. Grows with the rate. */
float expert_policy_worth(const struct expert_policy *p, uint32_t layer, float rate);

#endif

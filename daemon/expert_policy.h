/* What an expert in memory is worth: how likely the next pass through its layer uses it, over how
 * long its bytes are held until then. Layers come in a fixed cycle, so the distance to that pass is
 * known. The likelihood is estimated from counts of use that decay at several speeds, kept for
 * absent experts too, and from the last passes' pattern of use; how much each of them says is
 * learned while serving, by comparing what was foreseen for some experts of each pass with what
 * came. Time is counted in passes and rows: the same calls give the same figures. The expert
 * cache's. */
#ifndef ISLET_EXPERT_POLICY_H
#define ISLET_EXPERT_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

enum {
    EXPERT_POLICY_SPANS = 6, /* half-lives of the counts; the last one never decays */
    EXPERT_POLICY_INPUTS = EXPERT_POLICY_SPANS + 1,
    EXPERT_POLICY_PATTERNS = 80, /* kinds of recent use: the last 6 passes, or how long ago */
    EXPERT_POLICY_SAMPLES = 16   /* experts of a pass that are learned from */
};

struct expert_policy_layer {
    float grown[EXPERT_POLICY_SPANS]; /* what a use counts now; it grows, so that older ones count
                                       * less without being touched */
    float seen[EXPERT_POLICY_SPANS];  /* decayed rows */
    float scale[EXPERT_POLICY_SPANS], base[EXPERT_POLICY_SPANS]; /* rate = count * scale + base */
    uint32_t passes;
};

struct expert_policy_record {
    float counts[EXPERT_POLICY_SPANS];
    uint32_t pass;   /* of the layer, of the last use; 0: never used */
    uint8_t history; /* bit i: used i passes before that one */
};

/* An expert whose use was foreseen when its pass began. */
struct expert_policy_sample {
    uint32_t expert, pattern;
    float x[EXPERT_POLICY_INPUTS], rate;
};

struct expert_policy {
    uint32_t n_layer, n_expert, n_used;
    uint32_t now, n_rows;                 /* layer and rows of the pass under way */
    struct expert_policy_layer *layers;   /* [n_layer] */
    struct expert_policy_record *records; /* [n_layer][n_expert] */
    float decay[EXPERT_POLICY_SPANS], fill[EXPERT_POLICY_SPANS]; /* over n_rows rows */

    /* odds (log2) = sum of weights[s] * odds of span s, + patterns[pattern] */
    float weights[EXPERT_POLICY_INPUTS], weight_squares[EXPERT_POLICY_INPUTS];
    float patterns[EXPERT_POLICY_PATTERNS], pattern_seen[EXPERT_POLICY_PATTERNS],
        pattern_used[EXPERT_POLICY_PATTERNS];
    struct expert_policy_sample samples[EXPERT_POLICY_SAMPLES];
    uint32_t n_samples, next_sample;
    float *shares; /* [n_expert] rows of the pass under way that use each, as a share */
    float alike;   /* odds if all experts are alike; inputs and patterns count from there */
    uint32_t idle; /* passes since somebody asked for odds; nothing is learned for nobody */
};

enum err_code expert_policy_start(struct expert_policy *p, uint32_t n_layer, uint32_t n_expert,
                                  uint32_t n_used, struct err *e)
    __attribute__((warn_unused_result));
void expert_policy_done(struct expert_policy *p); /* of zeroes is fine */

/* A pass of n_rows rows through `layer` begins. */
void expert_policy_pass(struct expert_policy *p, uint32_t layer, uint32_t n_rows);
/* It uses `expert` for `rows` of them. */
void expert_policy_use(struct expert_policy *p, uint32_t layer, uint32_t expert, uint32_t rows);

/* Odds (log2 of yes over no) that a row uses the expert. Changes only by passes of its layer. */
float expert_policy_odds(struct expert_policy *p, uint32_t layer, uint32_t expert);
/* Worth now of a byte of an expert of `layer` with those odds. Grows with them. */
float expert_policy_worth(const struct expert_policy *p, uint32_t layer, float odds);

#endif

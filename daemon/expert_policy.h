/* What an expert in memory is worth: how likely the next pass through its layer uses it, less the
 * price of holding its bytes until then. Layers come in a fixed cycle, so the distance to that pass
 * is known; the price is what the experts that were evicted lately would have brought. The
 * likelihood is estimated from counts of use that decay at several speeds, kept for absent experts
 * too, and from the last passes' pattern of use; how much each of them says, of experts used
 * lately and of others, is learned while serving, by comparing what was foreseen for some experts
 * of each pass (at first for all) with what came. Time is counted in passes and rows: the same
 * calls give the same figures. The expert cache's. */
#ifndef ISLET_EXPERT_POLICY_H
#define ISLET_EXPERT_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

enum {
    EXPERT_POLICY_LANES = 4,                        /* experts that are computed together */
    EXPERT_POLICY_SPANS = 6,                        /* half-lives of the counts */
    EXPERT_POLICY_INPUTS = EXPERT_POLICY_SPANS + 1, /* and the pattern */
    EXPERT_POLICY_OWN = 2,       /* of the inputs, the first: what they say differs by layer */
    EXPERT_POLICY_PATTERNS = 80, /* kinds of recent use: the last 6 passes, or how long ago */
    EXPERT_POLICY_AGES = 4       /* classes of the time since an expert's last use */
};

typedef float expert_policy_lanes __attribute__((vector_size(4 * EXPERT_POLICY_LANES)));

struct expert_policy_layer {
    float grown[EXPERT_POLICY_SPANS]; /* what a use counts now; it grows, so that older ones count
                                       * less without being touched */
    float seen[EXPERT_POLICY_SPANS];  /* decayed rows */
    float scale[EXPERT_POLICY_SPANS], base[EXPERT_POLICY_SPANS]; /* rate = count * scale + base */
    float own[EXPERT_POLICY_OWN], squares[EXPERT_POLICY_OWN];    /* added to the weights */
    uint32_t passes;
};

struct expert_policy_use {
    uint32_t pass;   /* of the layer, of the last use; 0: never used */
    uint8_t history; /* bit i: used i passes before that one */
};

/* Experts whose use was foreseen when their pass began. */
struct expert_policy_sample {
    uint32_t group; /* its first expert / LANES */
    uint32_t patterns[EXPERT_POLICY_LANES], ages[EXPERT_POLICY_LANES]; /* ages: classes */
    expert_policy_lanes x[EXPERT_POLICY_INPUTS], odds;
};

struct expert_policy {
    uint32_t n_layer, n_expert, n_used;
    uint32_t n_groups;                  /* of LANES experts, the last one may be filled up */
    uint32_t now, n_rows;               /* layer and rows of the pass under way */
    struct expert_policy_layer *layers; /* [n_layer] */
    struct expert_policy_use *uses;     /* [n_layer][n_groups * LANES] */
    expert_policy_lanes *counts;        /* [n_layer][n_groups][SPANS] */
    expert_policy_lanes *odds;          /* [n_layer][n_groups] when last scored */
    float price;                        /* hits to be had for holding an expert for a pass */
    float n_evicted;                    /* that it was learned from */
    float decay[EXPERT_POLICY_SPANS], fill[EXPERT_POLICY_SPANS]; /* over the step's rows */

    /* odds (log2) = alike + sum of (weights[i][age] + the layer's own[i]) * x[i]; x: odds by a
     * span's rate or by the pattern's, counted from `alike`, the odds if all experts are alike. */
    float alike, weights[EXPERT_POLICY_INPUTS][EXPERT_POLICY_AGES];
    float squares[EXPERT_POLICY_INPUTS][EXPERT_POLICY_AGES];
    float patterns[EXPERT_POLICY_PATTERNS]; /* x of each */
    float pattern_seen[EXPERT_POLICY_PATTERNS], pattern_used[EXPERT_POLICY_PATTERNS];
    struct expert_policy_sample *samples; /* [n_groups] */
    uint32_t n_samples, next_group;
    float *shares; /* [n_groups * LANES] rows of the pass under way that use each, as a share */
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

/* Sets the odds (log2 of yes over no) that a row uses each expert of the layer. Only the layer's
 * own passes change them. */
void expert_policy_score(struct expert_policy *p, uint32_t layer);
/* [n_expert] odds of a layer when last scored; lent. */
const float *expert_policy_odds(const struct expert_policy *p, uint32_t layer);
/* Likelihood that a pass like the one under way uses an expert with those odds. Grows with them. */
float expert_policy_chance(const struct expert_policy *p, float odds);
/* Passes until the layer's next one. */
uint32_t expert_policy_ahead(const struct expert_policy *p, uint32_t layer);
/* Worth of an expert with that chance when its layer's next pass is `ahead` passes away: hits to be
 * expected of holding it, beyond what its place would bring otherwise. */
float expert_policy_worth(const struct expert_policy *p, uint32_t ahead, float chance);
/* Such an expert was evicted to make room. */
void expert_policy_evicted(struct expert_policy *p, uint32_t ahead, float chance);

#endif

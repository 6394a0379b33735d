#include "expert_policy.h"

#include <math.h>
#include <string.h>

#include "alloc.h"

/* Rows until a use counts half. The longest is no infinity: float would stop counting rows. */
static const float half_lives[EXPERT_POLICY_SPANS] = {4, 16, 64, 256, 1024, 65536};
/* Weight of "all experts alike" in a rate, in rows: a short text's luck is not followed far. */
static const float prior_rows[EXPERT_POLICY_SPANS] = {2, 2, 16, 16, 16, 16};
static const float first_weights[EXPERT_POLICY_INPUTS] = {0.1f, 0.1f, 0.1f, 0.1f, 0.1f, 0.1f, 0.5f};

enum {
    LEARN_ROWS = 32,     /* longer steps are prompts: decoding is not learned from them */
    PROMPT_ROWS = 16,    /* what a prompt counts as at most: its answer uses other experts */
    PATTERN_PRIOR = 32,  /* weight of "all experts alike" in a pattern's rate */
    PATTERN_SEEN = 2048, /* samples of a pattern; more are halved, so that old ones fade */
    IDLE_PASSES = 512    /* nobody asked for so long: learning rests */
};

#define MOST_RATE  0.999f
#define LEARN_STEP 0.2f
#define PRICE_STEP 0.01f /* the first evictions move it more: it is their mean then */
/* A layer has a part of the evidence alone: it departs from the others slowly. */
#define OWN_STEP 0.05f
#define OWN_EASE 10.0f

typedef expert_policy_lanes lanes;
typedef int32_t int_lanes __attribute__((vector_size(4 * EXPERT_POLICY_LANES)));

/* Odds of a rate above 0 as log2, within 0.004; rates above MOST_RATE count as that. */
static lanes odds_of(lanes rate)
{
    const lanes most = {MOST_RATE, MOST_RATE, MOST_RATE, MOST_RATE};
    const int_lanes below = rate < most;
    rate = (lanes)(((int_lanes)rate & below) | ((int_lanes)most & ~below));
    const int_lanes bits = (int_lanes)(rate / (1.0f - rate));
    const lanes exponent = __builtin_convertvector((bits >> 23) - 127, lanes);
    const lanes m = (lanes)((bits & 0x7fffff) | 0x3f800000);
    return exponent + (m - 1.0f) * (1.0f + (2.0f - m) * (0.58f - 0.16f * m));
}

static float odds_of_one(float rate)
{
    return odds_of((lanes){rate, rate, rate, rate})[0];
}

static float rate_of(float odds)
{
    return 1.0f / (1.0f + exp2f(-odds));
}

static size_t group_at(const struct expert_policy *p, uint32_t layer, uint32_t group)
{
    return (size_t)layer * p->n_groups + group;
}

static size_t expert_at(const struct expert_policy *p, uint32_t layer, uint32_t expert)
{
    return (size_t)layer * p->n_groups * EXPERT_POLICY_LANES + expert;
}

static float *count_of(const struct expert_policy *p, uint32_t layer, uint32_t expert,
                       uint32_t span)
{
    const size_t group = group_at(p, layer, expert / EXPERT_POLICY_LANES);
    return (float *)&p->counts[group * EXPERT_POLICY_SPANS + span] + expert % EXPERT_POLICY_LANES;
}

static void set_rows(struct expert_policy *p, uint32_t n_rows)
{
    if (p->n_rows == n_rows)
        return;
    p->n_rows = n_rows;
    const float counted = (float)(n_rows <= LEARN_ROWS ? n_rows : PROMPT_ROWS);
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++) {
        const float row = exp2f(-1.0f / half_lives[s]);
        p->decay[s] = exp2f(-counted / half_lives[s]);
        p->fill[s] = (1.0f - p->decay[s]) / (1.0f - row);
    }
}

/* What turns counts into rates, from grown and seen. */
static void set_scale(struct expert_policy *p, struct expert_policy_layer *l)
{
    const float alike = (float)p->n_used / (float)p->n_expert;
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++) {
        const float all = 1.0f / (l->seen[s] + prior_rows[s]);
        l->base[s] = alike * prior_rows[s] * all;
        l->scale[s] = all / l->grown[s];
    }
}

enum err_code expert_policy_start(struct expert_policy *p, uint32_t n_layer, uint32_t n_expert,
                                  uint32_t n_used, struct err *e)
{
    *p = (struct expert_policy){.n_layer = n_layer, .n_expert = n_expert, .n_used = n_used};
    p->n_groups = (n_expert + EXPERT_POLICY_LANES - 1) / EXPERT_POLICY_LANES;
    const size_t n_groups = (size_t)n_layer * p->n_groups;
    p->layers = alloc_zero(ALLOC_MISC, n_layer, sizeof *p->layers);
    p->uses = alloc_zero(ALLOC_MISC, n_groups, EXPERT_POLICY_LANES * sizeof *p->uses);
    p->counts = alloc_zero(ALLOC_MISC, n_groups, EXPERT_POLICY_SPANS * sizeof *p->counts);
    p->odds = alloc_zero(ALLOC_MISC, n_groups, sizeof *p->odds);
    p->shares = alloc_zero(ALLOC_MISC, p->n_groups, EXPERT_POLICY_LANES * sizeof *p->shares);
    if (p->layers == NULL || p->uses == NULL || p->counts == NULL || p->odds == NULL ||
        p->shares == NULL)
        return err_set(e, ERR_NOMEM, "expert cache: no memory for the counts of %u x %u experts",
                       n_layer, n_expert);
    memcpy(p->weights, first_weights, sizeof p->weights);
    for (uint32_t l = 0; l < n_layer; l++) {
        for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++)
            p->layers[l].grown[s] = 1.0f;
        set_scale(p, &p->layers[l]);
    }
    set_rows(p, 1);
    p->price = (float)n_used / (float)n_expert / (float)n_layer;
    p->alike = odds_of_one((float)n_used / ((float)n_expert + 1.0f));
    return ERR_OK;
}

void expert_policy_done(struct expert_policy *p)
{
    alloc_free(p->layers);
    alloc_free(p->uses);
    alloc_free(p->counts);
    alloc_free(p->odds);
    alloc_free(p->shares);
    *p = (struct expert_policy){.n_layer = 0};
}

/* Counts of a span back to what they mean, so that `grown` stays within float. */
static void settle(struct expert_policy *p, uint32_t layer, uint32_t span, float factor)
{
    for (uint32_t g = 0; g < p->n_groups; g++)
        p->counts[group_at(p, layer, g) * EXPERT_POLICY_SPANS + span] *= factor;
    p->layers[layer].grown[span] = 1.0f;
}

/* Kind of an expert's recent use, seen from the next pass: which of the last six passes used it, or
 * how long ago the last use is (by halves of powers of two), or that there was none. */
static uint32_t pattern_of(const struct expert_policy_use *use, uint32_t passes)
{
    const uint32_t age = passes - use->pass; /* 0: the last pass used it */
    if (use->pass == 0)
        return 0;
    if (age < 6)
        return ((uint32_t)use->history << age) & 63;
    const uint32_t log = 31 - (uint32_t)__builtin_clz(age);
    const uint32_t kind = 64 + 2 * (log - 2) + (age >> (log - 1) & 1);
    return kind < EXPERT_POLICY_PATTERNS ? kind : EXPERT_POLICY_PATTERNS - 1;
}

/* Odds of a group's experts, and what they are made of. */
static lanes foresee(const struct expert_policy *p, uint32_t layer, uint32_t group, lanes *x,
                     uint32_t *patterns)
{
    const struct expert_policy_layer *l = &p->layers[layer];
    const struct expert_policy_use *uses = &p->uses[expert_at(p, layer, 0)];
    const lanes *counts = &p->counts[group_at(p, layer, group) * EXPERT_POLICY_SPANS];
    lanes by_pattern = {0};
    for (uint32_t i = 0; i < EXPERT_POLICY_LANES; i++) {
        patterns[i] = pattern_of(&uses[group * EXPERT_POLICY_LANES + i], l->passes);
        by_pattern[i] = p->patterns[patterns[i]];
    }
    x[EXPERT_POLICY_SPANS] = by_pattern;
    lanes odds = p->alike + p->weights[EXPERT_POLICY_SPANS] * by_pattern;
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++) {
        const float weight = p->weights[s] + (s < EXPERT_POLICY_OWN ? l->own[s] : 0.0f);
        x[s] = odds_of(counts[s] * l->scale[s] + l->base[s]) - p->alike;
        odds += weight * x[s];
    }
    return odds;
}

/* Foresees some experts of the pass that begins, in turn. */
static void sample(struct expert_policy *p, uint32_t layer)
{
    const uint32_t n = p->n_groups < EXPERT_POLICY_GROUPS ? p->n_groups : EXPERT_POLICY_GROUPS;
    memset(p->shares, 0, p->n_expert * sizeof *p->shares);
    for (uint32_t i = 0; i < n; i++) {
        struct expert_policy_sample *to = &p->samples[i];
        to->group = p->next_group;
        to->odds = foresee(p, layer, to->group, to->x, to->patterns);
        p->next_group = p->next_group + 1 < p->n_groups ? p->next_group + 1 : 0;
    }
    p->n_samples = n;
    /* The next step does not meet the same experts again where passes and groups keep time. */
    if (layer + 1 == p->n_layer && ++p->next_group >= p->n_groups)
        p->next_group = 0;
}

static void learn_pattern(struct expert_policy *p, uint32_t pattern, float share)
{
    float *seen = &p->pattern_seen[pattern], *used = &p->pattern_used[pattern];
    *seen += 1.0f;
    *used += share;
    if (*seen > PATTERN_SEEN) {
        *seen *= 0.5f;
        *used *= 0.5f;
    }
    const float alike = (float)p->n_used / (float)p->n_expert;
    const float rate = (*used + PATTERN_PRIOR * alike) / (*seen + PATTERN_PRIOR);
    p->patterns[pattern] = odds_of_one(rate) - p->alike;
}

/* One step down the slope of the log loss; steps shrink with the slopes seen. */
static void step(struct expert_policy *p, const float *slopes)
{
    struct expert_policy_layer *l = &p->layers[p->now];
    for (uint32_t s = 0; s < EXPERT_POLICY_INPUTS; s++) {
        p->squares[s] += slopes[s] * slopes[s];
        p->weights[s] += LEARN_STEP * slopes[s] / sqrtf(p->squares[s] + 1.0f);
    }
    for (uint32_t s = 0; s < EXPERT_POLICY_OWN; s++) {
        l->squares[s] += slopes[s] * slopes[s];
        l->own[s] += OWN_STEP * slopes[s] / sqrtf(l->squares[s] + OWN_EASE);
    }
}

/* From the experts of the last pass whose use was foreseen. */
static void learn(struct expert_policy *p)
{
    float slopes[EXPERT_POLICY_INPUTS] = {0};
    for (uint32_t n = 0; n < p->n_samples; n++) {
        const struct expert_policy_sample *from = &p->samples[n];
        for (uint32_t i = 0; i < EXPERT_POLICY_LANES; i++) {
            const uint32_t expert = from->group * EXPERT_POLICY_LANES + i;
            if (expert >= p->n_expert)
                break;
            const float wrong = p->shares[expert] - rate_of(from->odds[i]);
            for (uint32_t s = 0; s < EXPERT_POLICY_INPUTS; s++)
                slopes[s] += wrong * from->x[s][i];
            learn_pattern(p, from->patterns[i], p->shares[expert]);
        }
    }
    if (p->n_samples > 0)
        step(p, slopes);
    p->n_samples = 0;
}

void expert_policy_pass(struct expert_policy *p, uint32_t layer, uint32_t n_rows)
{
    struct expert_policy_layer *l = &p->layers[layer];
    learn(p);
    set_rows(p, n_rows);
    p->now = layer;
    if (p->idle < IDLE_PASSES) {
        p->idle++;
        if (n_rows <= LEARN_ROWS)
            sample(p, layer);
    }
    l->passes++;
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++) {
        l->seen[s] = l->seen[s] * p->decay[s] + p->fill[s];
        if (l->grown[s] < 1e12f * p->decay[s])
            l->grown[s] /= p->decay[s];
        else
            settle(p, layer, s, p->decay[s] / l->grown[s]);
    }
    set_scale(p, l);
}

void expert_policy_use(struct expert_policy *p, uint32_t layer, uint32_t expert, uint32_t rows)
{
    const struct expert_policy_layer *l = &p->layers[layer];
    struct expert_policy_use *use = &p->uses[expert_at(p, layer, expert)];
    const float share = (float)rows / (float)p->n_rows;
    const uint32_t age = use->pass == 0 ? 8 : l->passes - use->pass;
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++)
        *count_of(p, layer, expert, s) += share * p->fill[s] * l->grown[s];
    use->history = (uint8_t)((age < 8 ? (uint32_t)use->history << age : 0) | 1);
    use->pass = l->passes;
    p->shares[expert] = share;
}

void expert_policy_score(struct expert_policy *p, uint32_t layer)
{
    lanes x[EXPERT_POLICY_INPUTS];
    uint32_t patterns[EXPERT_POLICY_LANES];
    p->idle = 0;
    for (uint32_t g = 0; g < p->n_groups; g++)
        p->odds[group_at(p, layer, g)] = foresee(p, layer, g, x, patterns);
}

const float *expert_policy_odds(const struct expert_policy *p, uint32_t layer)
{
    return (const float *)&p->odds[group_at(p, layer, 0)];
}

float expert_policy_chance(const struct expert_policy *p, float odds)
{
    const float rate = rate_of(odds);
    if (p->n_rows == 1)
        return rate;
    /* A long chunk uses nearly all: what single rows use too is worth more. */
    return 0.5f * (1.0f - powf(1.0f - rate, (float)p->n_rows) + rate);
}

uint32_t expert_policy_ahead(const struct expert_policy *p, uint32_t layer)
{
    return layer > p->now ? layer - p->now : layer + p->n_layer - p->now;
}

float expert_policy_worth(const struct expert_policy *p, uint32_t ahead, float chance)
{
    if (p->n_rows > LEARN_ROWS)
        return chance / (float)ahead;
    /* If that pass does not use it, it can be held for the next ones, or else let go. Used or not,
     * its chance is taken to stay the same. */
    const float later = 1.0f - p->price * (float)p->n_layer / chance;
    const float now = chance - p->price * (float)ahead;
    return later > 0.0f ? now + (1.0f - chance) * later : now;
}

void expert_policy_evicted(struct expert_policy *p, uint32_t ahead, float chance)
{
    if (p->n_rows > LEARN_ROWS)
        return;
    p->n_evicted++;
    p->price += fmaxf(PRICE_STEP, 1.0f / p->n_evicted) * (chance / (float)ahead - p->price);
}

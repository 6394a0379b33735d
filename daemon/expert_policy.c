#include "expert_policy.h"

#include <math.h>
#include <string.h>

#include "alloc.h"

/* Rows until a use counts half. */
static const float half_lives[EXPERT_POLICY_SPANS] = {4, 16, 64, 256, 1024, INFINITY};
static const float first_weights[EXPERT_POLICY_INPUTS] = {0.1f, 0.1f, 0.1f, 0.1f, 0.1f, 0.1f, 0.5f};

enum {
    PRIOR_ROWS = 1,      /* weight of "all experts alike" in a rate */
    LEARN_ROWS = 32,     /* longer steps are prompts: decoding is not learned from them */
    PATTERN_PRIOR = 8,   /* weight of "all experts alike" in a pattern's rate */
    PATTERN_SEEN = 2048, /* samples of a pattern; more are halved, so that old ones fade */
    IDLE_PASSES = 512    /* nobody asked for so long: learning rests */
};

static const float learn_weight = 0.05f;

/* log2 within 0.002, for normal x > 0. */
static float log2_near(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const float exponent = (float)((int32_t)(bits >> 23) - 127);
    bits = (bits & 0x7fffff) | 0x3f800000;
    float m;
    memcpy(&m, &bits, sizeof m);
    return exponent + (m - 1.0f) * (1.0f + (2.0f - m) * (0.58f - 0.16f * m));
}

static float odds_of(float rate)
{
    return log2_near(rate / (1.0f - rate));
}

static float rate_of(float odds)
{
    return 1.0f / (1.0f + exp2f(-odds));
}

static struct expert_policy_record *record_of(const struct expert_policy *p, uint32_t layer,
                                              uint32_t expert)
{
    return &p->records[(size_t)layer * p->n_expert + expert];
}

static void set_rows(struct expert_policy *p, uint32_t n_rows)
{
    if (p->n_rows == n_rows)
        return;
    p->n_rows = n_rows;
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++) {
        const float row = exp2f(-1.0f / half_lives[s]);
        p->decay[s] = exp2f(-(float)n_rows / half_lives[s]);
        p->fill[s] = row < 1.0f ? (1.0f - p->decay[s]) / (1.0f - row) : (float)n_rows;
    }
}

/* What turns counts into rates, from grown and seen. */
static void set_scale(struct expert_policy *p, struct expert_policy_layer *l)
{
    const float alike = (float)p->n_used / (float)p->n_expert;
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++) {
        const float all = 1.0f / (l->seen[s] + PRIOR_ROWS);
        l->base[s] = alike * PRIOR_ROWS * all;
        l->scale[s] = all / l->grown[s];
    }
}

enum err_code expert_policy_start(struct expert_policy *p, uint32_t n_layer, uint32_t n_expert,
                                  uint32_t n_used, struct err *e)
{
    *p = (struct expert_policy){.n_layer = n_layer, .n_expert = n_expert, .n_used = n_used};
    p->layers = alloc_zero(ALLOC_MISC, n_layer, sizeof *p->layers);
    p->records = alloc_zero(ALLOC_MISC, (size_t)n_layer * n_expert, sizeof *p->records);
    p->shares = alloc_zero(ALLOC_MISC, n_expert, sizeof *p->shares);
    if (p->layers == NULL || p->records == NULL || p->shares == NULL)
        return err_set(e, ERR_NOMEM, "expert cache: no memory for the counts of %u x %u experts",
                       n_layer, n_expert);
    memcpy(p->weights, first_weights, sizeof p->weights);
    for (uint32_t l = 0; l < n_layer; l++) {
        for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++)
            p->layers[l].grown[s] = 1.0f;
        set_scale(p, &p->layers[l]);
    }
    set_rows(p, 1);
    p->alike = odds_of((float)n_used / ((float)n_expert + 1.0f));
    return ERR_OK;
}

void expert_policy_done(struct expert_policy *p)
{
    alloc_free(p->layers);
    alloc_free(p->records);
    alloc_free(p->shares);
    *p = (struct expert_policy){.n_layer = 0};
}

/* Counts of a span back to what they mean, so that `grown` stays within float. */
static void settle(struct expert_policy *p, uint32_t layer, uint32_t span, float factor)
{
    for (uint32_t i = 0; i < p->n_expert; i++)
        record_of(p, layer, i)->counts[span] *= factor;
    p->layers[layer].grown[span] = 1.0f;
}

/* Kind of the expert's recent use, seen from the next pass: which of the last six passes used it,
 * or how long ago the last use is (by halves of powers of two), or that there was none. */
static uint32_t pattern_of(const struct expert_policy_record *r, uint32_t passes)
{
    const uint32_t age = passes - r->pass; /* 0: the last pass used it */
    if (r->pass == 0)
        return 0;
    if (age < 6)
        return ((uint32_t)r->history << age) & 63;
    const uint32_t log = 31 - (uint32_t)__builtin_clz(age);
    const uint32_t kind = 64 + 2 * (log - 2) + (age >> (log - 1) & 1);
    return kind < EXPERT_POLICY_PATTERNS ? kind : EXPERT_POLICY_PATTERNS - 1;
}

/* Gives the odds and what they are made of. */
static float foresee(const struct expert_policy *p, uint32_t layer,
                     const struct expert_policy_record *r, float *x, uint32_t *ret_pattern)
{
    const struct expert_policy_layer *l = &p->layers[layer];
    *ret_pattern = pattern_of(r, l->passes);
    x[EXPERT_POLICY_SPANS] = p->patterns[*ret_pattern];
    float odds = p->alike + p->weights[EXPERT_POLICY_SPANS] * x[EXPERT_POLICY_SPANS];
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++) {
        const float rate = r->counts[s] * l->scale[s] + l->base[s];
        x[s] = odds_of(rate < 0.999f ? rate : 0.999f) - p->alike;
        odds += p->weights[s] * x[s];
    }
    return odds;
}

/* Foresees some experts of the pass that begins, in turn. */
static void sample(struct expert_policy *p, uint32_t layer)
{
    const uint32_t n = p->n_expert < EXPERT_POLICY_SAMPLES ? p->n_expert : EXPERT_POLICY_SAMPLES;
    const uint32_t stride = p->n_expert / n;
    memset(p->shares, 0, p->n_expert * sizeof *p->shares);
    for (uint32_t i = 0; i < n; i++) {
        struct expert_policy_sample *to = &p->samples[i];
        to->expert = (p->next_sample + i * stride) % p->n_expert;
        to->rate = rate_of(foresee(p, layer, record_of(p, layer, to->expert), to->x, &to->pattern));
    }
    p->n_samples = n;
    if (layer == 0)
        p->next_sample = (p->next_sample + 1) % p->n_expert;
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
    p->patterns[pattern] = odds_of(rate < 0.999f ? rate : 0.999f) - p->alike;
}

/* One step down the slope of the log loss; steps shrink with the slopes seen. */
static void learn(struct expert_policy *p)
{
    float slopes[EXPERT_POLICY_INPUTS] = {0};
    for (uint32_t i = 0; i < p->n_samples; i++) {
        const struct expert_policy_sample *from = &p->samples[i];
        const float wrong = p->shares[from->expert] - from->rate;
        for (uint32_t s = 0; s < EXPERT_POLICY_INPUTS; s++)
            slopes[s] += wrong * from->x[s];
        learn_pattern(p, from->pattern, p->shares[from->expert]);
    }
    for (uint32_t s = 0; s < EXPERT_POLICY_INPUTS && p->n_samples > 0; s++) {
        p->weight_squares[s] += slopes[s] * slopes[s];
        p->weights[s] += learn_weight * slopes[s] / sqrtf(p->weight_squares[s] + 0.01f);
    }
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
        else if (p->decay[s] < 1.0f)
            settle(p, layer, s, p->decay[s] / l->grown[s]);
    }
    set_scale(p, l);
}

void expert_policy_use(struct expert_policy *p, uint32_t layer, uint32_t expert, uint32_t rows)
{
    const struct expert_policy_layer *l = &p->layers[layer];
    struct expert_policy_record *r = record_of(p, layer, expert);
    const float share = (float)rows / (float)p->n_rows;
    const uint32_t age = r->pass == 0 ? 8 : l->passes - r->pass;
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++)
        r->counts[s] += share * p->fill[s] * l->grown[s];
    r->history = (uint8_t)((age < 8 ? (uint32_t)r->history << age : 0) | 1);
    r->pass = l->passes;
    p->shares[expert] = share;
}

float expert_policy_odds(struct expert_policy *p, uint32_t layer, uint32_t expert)
{
    float x[EXPERT_POLICY_INPUTS];
    uint32_t pattern;
    p->idle = 0;
    return foresee(p, layer, record_of(p, layer, expert), x, &pattern);
}

float expert_policy_worth(const struct expert_policy *p, uint32_t layer, float odds)
{
    const uint32_t ahead = layer > p->now ? layer - p->now : layer + p->n_layer - p->now;
    const float rate = rate_of(odds);
    if (p->n_rows == 1)
        return rate / (float)ahead;
    /* A long chunk uses nearly all: what single rows use too is worth more. */
    return 0.5f * (1.0f - powf(1.0f - rate, (float)p->n_rows) + rate) / (float)ahead;
}

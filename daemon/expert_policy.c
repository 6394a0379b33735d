#include "expert_policy.h"

#include <math.h>

#include "alloc.h"

/* Rows until a use counts half; the last span never forgets. */
static const float half_lives[EXPERT_POLICY_SPANS] = {8, 64, 512, INFINITY};
static const float shares[EXPERT_POLICY_SPANS] = {0.3f, 0.3f, 0.3f, 0.1f};

enum {
    PRIOR_ROWS = 1 /* weight of "all experts alike" in the estimate */
};

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

enum err_code expert_policy_start(struct expert_policy *p, uint32_t n_layer, uint32_t n_expert,
                                  uint32_t n_used, struct err *e)
{
    *p = (struct expert_policy){.n_layer = n_layer, .n_expert = n_expert, .n_used = n_used};
    p->layers = alloc_zero(ALLOC_MISC, n_layer, sizeof *p->layers);
    p->counts =
        alloc_zero(ALLOC_MISC, (size_t)n_layer * n_expert, EXPERT_POLICY_SPANS * sizeof *p->counts);
    if (p->layers == NULL || p->counts == NULL)
        return err_set(e, ERR_NOMEM, "expert cache: no memory for the counts of %u x %u experts",
                       n_layer, n_expert);
    for (uint32_t l = 0; l < n_layer; l++)
        for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++)
            p->layers[l].grown[s] = 1.0f;
    set_rows(p, 1);
    return ERR_OK;
}

void expert_policy_done(struct expert_policy *p)
{
    alloc_free(p->layers);
    alloc_free(p->counts);
    *p = (struct expert_policy){.n_layer = 0};
}

/* Counts of a span back to what they mean, so that `grown` stays within float. */
static void settle(struct expert_policy *p, uint32_t layer, uint32_t span, float factor)
{
    float *count = p->counts + (size_t)layer * p->n_expert * EXPERT_POLICY_SPANS + span;
    for (uint32_t i = 0; i < p->n_expert; i++, count += EXPERT_POLICY_SPANS)
        *count *= factor;
    p->layers[layer].grown[span] = 1.0f;
}

void expert_policy_pass(struct expert_policy *p, uint32_t layer, uint32_t n_rows)
{
    struct expert_policy_layer *l = &p->layers[layer];
    set_rows(p, n_rows);
    p->now = layer;
    l->rows = n_rows;
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++) {
        l->seen[s] = l->seen[s] * p->decay[s] + p->fill[s];
        if (l->grown[s] < 1e12f * p->decay[s])
            l->grown[s] /= p->decay[s];
        else if (p->decay[s] < 1.0f)
            settle(p, layer, s, p->decay[s] / l->grown[s]);
    }
}

void expert_policy_use(struct expert_policy *p, uint32_t layer, uint32_t expert, uint32_t rows)
{
    const struct expert_policy_layer *l = &p->layers[layer];
    float *count = p->counts + ((size_t)layer * p->n_expert + expert) * EXPERT_POLICY_SPANS;
    const float share = (float)rows / (float)p->n_rows;
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++)
        count[s] += share * p->fill[s] * l->grown[s];
}

float expert_policy_rate(const struct expert_policy *p, uint32_t layer, uint32_t expert)
{
    const struct expert_policy_layer *l = &p->layers[layer];
    const float *count = p->counts + ((size_t)layer * p->n_expert + expert) * EXPERT_POLICY_SPANS;
    const float prior = (float)p->n_used / (float)p->n_expert * PRIOR_ROWS;
    float rate = 0.0f;
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++)
        rate += shares[s] * (count[s] / l->grown[s] + prior) / (l->seen[s] + PRIOR_ROWS);
    return rate < 1.0f ? rate : 1.0f;
}

float expert_policy_worth(const struct expert_policy *p, uint32_t layer, float rate)
{
    const uint32_t ahead = layer > p->now ? layer - p->now : layer + p->n_layer - p->now;
    const float n = (float)p->n_rows;
    const float used = p->n_rows == 1 ? rate : 1.0f - powf(1.0f - rate, n);
    /* A long chunk uses nearly all: what is used by single rows too is worth more. */
    return (used + rate) / (float)ahead;
}

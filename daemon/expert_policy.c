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
    STEADY = EXPERT_POLICY_SPANS - 1 /* the longest span */
};

enum {
    YOUNG_PASSES = 64,   /* of a layer: so long all groups are learned from */
    LEAST_GROUPS = 4,    /* and these at last */
    LEARN_ROWS = 32,     /* longer steps are prompts: decoding is not learned from them */
    PROMPT_ROWS = 16,    /* what a prompt counts as at most: its answer uses other experts */
    PATTERN_PRIOR = 32,  /* weight of "all experts alike" in a pattern's rate */
    PATTERN_SEEN = 2048, /* samples of a pattern; more are halved, so that old ones fade */
    IDLE_PASSES = 512    /* nobody asked for so long: learning rests */
};

#define MOST_RATE  0.999f
#define LEARN_STEP 0.2f
#define LEAST_PART 0.1f  /* of a use, where all is foretold */
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
    p->samples = alloc_zero(ALLOC_MISC, p->n_groups, sizeof *p->samples);
    if (p->layers == NULL || p->uses == NULL || p->counts == NULL || p->odds == NULL ||
        p->shares == NULL || p->samples == NULL)
        return err_set(e, ERR_NOMEM, "expert cache: no memory for the counts of %u x %u experts",
                       n_layer, n_expert);
    for (uint32_t i = 0; i < EXPERT_POLICY_INPUTS; i++)
        for (uint32_t age = 0; age < EXPERT_POLICY_AGES; age++)
            p->weights[i][age] = first_weights[i];
    for (uint32_t l = 0; l < n_layer; l++) {
        for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++)
            p->layers[l].grown[s] = 1.0f;
        set_scale(p, &p->layers[l]);
    }
    set_rows(p, 1);
    p->price = (float)n_used / (float)n_expert / (float)n_layer;
    p->alike = odds_of_one((float)n_used / ((float)n_expert + 1.0f));
    for (size_t g = 0; g < n_groups; g++)
        p->odds[g] = (lanes){0} + p->alike;
    return ERR_OK;
}

void expert_policy_done(struct expert_policy *p)
{
    alloc_free(p->layers);
    alloc_free(p->uses);
    alloc_free(p->counts);
    alloc_free(p->odds);
    alloc_free(p->shares);
    alloc_free(p->samples);
    *p = (struct expert_policy){.n_layer = 0};
}

/* Counts of a span back to what they mean, so that `grown` stays within float. */
static void settle(struct expert_policy *p, uint32_t layer, uint32_t span, float factor)
{
    for (uint32_t g = 0; g < p->n_groups; g++)
        p->counts[group_at(p, layer, g) * EXPERT_POLICY_SPANS + span] *= factor;
    p->layers[layer].grown[span] = 1.0f;
}

/* Kind of an expert's recent use: which of the last six passes used it, or how long ago the last
 * use is (by halves of powers of two), or that there was none. age: passes since the last use, 0:
 * the last pass. Both here and below no branches: what comes is hard to foretell. */
static uint32_t pattern_of(const struct expert_policy_use *use, uint32_t age)
{
    const uint32_t log = 31 - (uint32_t)__builtin_clz(age | 4);
    const uint32_t late = 64 + 2 * (log - 2) + (age >> (log - 1) & 1);
    const uint32_t kind = late < EXPERT_POLICY_PATTERNS ? late : EXPERT_POLICY_PATTERNS - 1;
    const uint32_t recent = ((uint32_t)use->history << (age & 7)) & 63;
    const uint32_t used = age < 6 ? recent : kind;
    return use->pass == 0 ? 0 : used;
}

/* The same evidence says another thing of an expert that is in use than of others. */
static uint32_t age_class(const struct expert_policy_use *use, uint32_t age)
{
    const uint32_t used = (uint32_t)(age < 1) + (uint32_t)(age < 16) + (uint32_t)(age < 32);
    return use->pass == 0 ? 0 : used;
}

static lanes pick(const float *from, const uint32_t *at)
{
    return (lanes){from[at[0]], from[at[1]], from[at[2]], from[at[3]]};
}

/* Odds of a group's experts, and what they are made of. */
static void foresee(const struct expert_policy *p, uint32_t layer, uint32_t group,
                    struct expert_policy_sample *ret)
{
    const struct expert_policy_layer *l = &p->layers[layer];
    const struct expert_policy_use *uses =
        &p->uses[expert_at(p, layer, group * EXPERT_POLICY_LANES)];
    const lanes *counts = &p->counts[group_at(p, layer, group) * EXPERT_POLICY_SPANS];
    ret->group = group;
    for (uint32_t i = 0; i < EXPERT_POLICY_LANES; i++) {
        const uint32_t age = l->passes - uses[i].pass;
        ret->patterns[i] = pattern_of(&uses[i], age);
        ret->ages[i] = age_class(&uses[i], age);
    }
    ret->x[EXPERT_POLICY_SPANS] = pick(p->patterns, ret->patterns);
    lanes odds =
        p->alike + pick(p->weights[EXPERT_POLICY_SPANS], ret->ages) * ret->x[EXPERT_POLICY_SPANS];
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++) {
        const lanes weight =
            pick(p->weights[s], ret->ages) + (s < EXPERT_POLICY_OWN ? l->own[s] : 0.0f);
        ret->x[s] = odds_of(counts[s] * l->scale[s] + l->base[s]) - p->alike;
        odds += weight * ret->x[s];
    }
    ret->odds = odds;
}

/* Foresees some experts of the pass that begins, in turn; the fewer, the more was learned. */
static void sample(struct expert_policy *p, uint32_t layer)
{
    const uint32_t passes = p->layers[layer].passes;
    uint32_t n = p->n_groups;
    if (passes > YOUNG_PASSES)
        n = (uint32_t)((uint64_t)n * YOUNG_PASSES / passes);
    n = n > LEAST_GROUPS ? n : LEAST_GROUPS < p->n_groups ? LEAST_GROUPS : p->n_groups;
    memset(p->shares, 0, p->n_expert * sizeof *p->shares);
    for (uint32_t i = 0; i < n; i++) {
        foresee(p, layer, p->next_group, &p->samples[i]);
        p->next_group = p->next_group + 1 < p->n_groups ? p->next_group + 1 : 0;
    }
    p->n_samples = n;
    /* The next step does not meet the same experts again where passes and groups keep time. */
    if (layer + 1 == p->n_layer && ++p->next_group >= p->n_groups)
        p->next_group = 0;
}

static void count_pattern(struct expert_policy *p, uint32_t pattern, float share)
{
    float *seen = &p->pattern_seen[pattern], *used = &p->pattern_used[pattern];
    *seen += 1.0f;
    *used += share;
    if (*seen > PATTERN_SEEN) {
        *seen *= 0.5f;
        *used *= 0.5f;
    }
}

static void learn_patterns(struct expert_policy *p)
{
    const float alike = (float)p->n_used / (float)p->n_expert;
    for (uint32_t i = 0; i < EXPERT_POLICY_PATTERNS; i += EXPERT_POLICY_LANES) {
        lanes seen, used;
        memcpy(&seen, &p->pattern_seen[i], sizeof seen);
        memcpy(&used, &p->pattern_used[i], sizeof used);
        const lanes x =
            odds_of((used + PATTERN_PRIOR * alike) / (seen + (float)PATTERN_PRIOR)) - p->alike;
        memcpy(&p->patterns[i], &x, sizeof x);
    }
}

/* One step down the slope of the log loss; steps shrink with the slopes seen. */
static void step(struct expert_policy *p, float slopes[][EXPERT_POLICY_AGES])
{
    struct expert_policy_layer *l = &p->layers[p->now];
    for (uint32_t s = 0; s < EXPERT_POLICY_INPUTS; s++) {
        float all = 0.0f;
        for (uint32_t age = 0; age < EXPERT_POLICY_AGES; age++) {
            const float slope = slopes[s][age];
            p->squares[s][age] += slope * slope;
            p->weights[s][age] += LEARN_STEP * slope / sqrtf(p->squares[s][age] + 1.0f);
            all += slope;
        }
        if (s < EXPERT_POLICY_OWN) {
            l->squares[s] += all * all;
            l->own[s] += OWN_STEP * all / sqrtf(l->squares[s] + OWN_EASE);
        }
    }
}

/* From the experts of the last pass whose use was foreseen. */
static void learn(struct expert_policy *p)
{
    float slopes[EXPERT_POLICY_INPUTS][EXPERT_POLICY_AGES] = {{0}};
    if (p->n_samples == 0)
        return;
    for (uint32_t n = 0; n < p->n_samples; n++) {
        const struct expert_policy_sample *from = &p->samples[n];
        for (uint32_t i = 0; i < EXPERT_POLICY_LANES; i++) {
            const uint32_t expert = from->group * EXPERT_POLICY_LANES + i;
            if (expert >= p->n_expert)
                break;
            const float wrong = p->shares[expert] - rate_of(from->odds[i]);
            for (uint32_t s = 0; s < EXPERT_POLICY_INPUTS; s++)
                slopes[s][from->ages[i]] += wrong * from->x[s][i];
            count_pattern(p, from->patterns[i], p->shares[expert]);
        }
    }
    learn_patterns(p);
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

/* Part of a use that tells of steady use; the rest is what recent use made likely: an expert that
 * is drawn now and then, and then used in a row, is not often used. */
static float steady_part(const struct expert_policy *p, uint32_t layer, uint32_t expert)
{
    const struct expert_policy_layer *l = &p->layers[layer];
    const float steady = *count_of(p, layer, expert, STEADY) * l->scale[STEADY] + l->base[STEADY];
    const float rate = rate_of(expert_policy_odds(p, layer)[expert]);
    if (rate <= steady || p->n_rows > LEARN_ROWS)
        return 1.0f;
    return fmaxf(steady / rate, LEAST_PART);
}

void expert_policy_use(struct expert_policy *p, uint32_t layer, uint32_t expert, uint32_t rows)
{
    const struct expert_policy_layer *l = &p->layers[layer];
    struct expert_policy_use *use = &p->uses[expert_at(p, layer, expert)];
    const float share = (float)rows / (float)p->n_rows;
    const float steady = share * steady_part(p, layer, expert);
    const uint32_t age = use->pass == 0 ? 8 : l->passes - use->pass;
    for (uint32_t s = 0; s < EXPERT_POLICY_SPANS; s++)
        *count_of(p, layer, expert, s) += (s == STEADY ? steady : share) * p->fill[s] * l->grown[s];
    use->history = (uint8_t)((age < 8 ? (uint32_t)use->history << age : 0) | 1);
    use->pass = l->passes;
    p->shares[expert] = share;
}

void expert_policy_score(struct expert_policy *p, uint32_t layer)
{
    struct expert_policy_sample of;
    p->idle = 0;
    for (uint32_t g = 0; g < p->n_groups; g++) {
        foresee(p, layer, g, &of);
        p->odds[group_at(p, layer, g)] = of.odds;
    }
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

#include "sample.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "alloc.h"
#include "kernels.h"
#include "rng.h"

enum {
    PIECE = 4096 /* logits that are weighed at a time: the weights stay near */
};

enum err_code sample_start(struct sample *s, uint32_t n_vocab, struct err *e)
{
    *s = (struct sample){.n_vocab = n_vocab};
    s->x = alloc_zero(ALLOC_WORK, n_vocab, sizeof(*s->x));
    s->weight = alloc_zero(ALLOC_WORK, n_vocab, sizeof(*s->weight));
    s->order = alloc_zero(ALLOC_WORK, n_vocab, sizeof(*s->order));
    s->count = alloc_zero(ALLOC_WORK, n_vocab, sizeof(*s->count));
    s->keep = alloc_zero(ALLOC_WORK, n_vocab, sizeof(*s->keep));
    s->sum = alloc_zero(ALLOC_WORK, n_vocab / PIECE + 1, sizeof(*s->sum));
    if (s->x != NULL && s->weight != NULL && s->order != NULL && s->count != NULL &&
        s->keep != NULL && s->sum != NULL)
        return ERR_OK;
    sample_done(s);
    return err_set(e, ERR_NOMEM, "no memory to sample from %u tokens", n_vocab);
}

void sample_done(struct sample *s)
{
    alloc_free(s->x);
    alloc_free(s->weight);
    alloc_free(s->order);
    alloc_free(s->count);
    alloc_free(s->keep);
    alloc_free(s->sum);
    *s = (struct sample){.n_vocab = 0};
}

/* ---- bias and penalties ---- */

static void penalise_repeats(struct sample *s, float repeat, const uint32_t *window, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t id = window[i];
        if (s->count[id]++ == 0)
            s->x[id] = s->x[id] > 0 ? s->x[id] / repeat : s->x[id] * repeat;
    }
    for (uint32_t i = 0; i < n; i++)
        s->count[window[i]] = 0;
}

static void penalise_counts(struct sample *s, const struct proto_run *run, const uint32_t *window,
                            uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        s->count[window[i]]++;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t id = window[i];
        if (s->count[id] == 0)
            continue;
        const float drop = (float)s->count[id] * run->frequency;
        s->x[id] = s->x[id] - run->presence;
        s->x[id] = s->x[id] - drop;
        s->count[id] = 0;
    }
}

static bool adjusts(const struct proto_run *run)
{
    return run->n_bias > 0 || (run->repeat != 1.0f && run->repeat_last_n != 0) ||
           run->presence != 0.0f || run->frequency != 0.0f;
}

static void adjust(struct sample *s, const float *logits, const struct proto_run *run,
                   const uint32_t *tokens, uint32_t n)
{
    memcpy(s->x, logits, s->n_vocab * sizeof(*logits));
    for (uint16_t i = 0; i < run->n_bias; i++)
        s->x[run->bias[i].id] = s->x[run->bias[i].id] + run->bias[i].value;
    if (run->repeat != 1.0f && run->repeat_last_n != 0) {
        const uint32_t last = run->repeat_last_n < 0 || (uint32_t)run->repeat_last_n > n
                                  ? n
                                  : (uint32_t)run->repeat_last_n;
        penalise_repeats(s, run->repeat, tokens + (n - last), last);
    }
    if (run->presence != 0.0f || run->frequency != 0.0f)
        penalise_counts(s, run, tokens + run->n_prompt, n - run->n_prompt);
}

/* ---- filters ---- */

/* The order of top-k and top-p: logit descending, id ascending. */
static bool before(const struct sample *s, uint32_t a, uint32_t b)
{
    return s->x[a] != s->x[b] ? s->x[a] > s->x[b] : a < b;
}

static void swap(uint32_t *a, uint32_t *b)
{
    const uint32_t t = *a;
    *a = *b;
    *b = t;
}

/* Partitions order[lo, hi), hi - lo >= 1, about a median of three; returns the pivot's place: what
 * comes before it in the order stands before it. */
static uint32_t partition(struct sample *s, uint32_t lo, uint32_t hi)
{
    uint32_t *o = s->order;
    const uint32_t mid = lo + (hi - lo) / 2, last = hi - 1;
    if (before(s, o[mid], o[lo]))
        swap(&o[mid], &o[lo]);
    if (before(s, o[last], o[lo]))
        swap(&o[last], &o[lo]);
    if (before(s, o[last], o[mid]))
        swap(&o[last], &o[mid]);
    swap(&o[mid], &o[last]);
    uint32_t place = lo;
    for (uint32_t i = lo; i < last; i++)
        if (before(s, o[i], o[last]))
            swap(&o[place++], &o[i]);
    swap(&o[place], &o[last]);
    return place;
}

/* Brings the first k of order[n] to its front. */
static void select_count(struct sample *s, uint32_t n, uint32_t k)
{
    uint32_t lo = 0, hi = n;
    while (hi - lo > 1) {
        const uint32_t m = partition(s, lo, hi);
        if (m == k)
            return;
        if (m > k)
            hi = m;
        else
            lo = m + 1;
    }
}

/* Brings the shortest prefix of order[n] that holds the share p of the weight to the front; returns
 * its length, at least 1. */
static uint32_t select_share(struct sample *s, uint32_t n, float p)
{
    unsigned __int128 total = 0;
    for (uint32_t i = 0; i < n; i++)
        total += s->weight[s->order[i]];
    unsigned __int128 target = total * (uint64_t)(p * 1073741824.0f);
    if (target == 0)
        target = 1;
    uint32_t lo = 0, hi = n;
    unsigned __int128 sum = 0; /* of order[0, lo) */
    while (hi - lo > 1) {
        const uint32_t m = partition(s, lo, hi);
        unsigned __int128 upper = sum;
        for (uint32_t i = lo; i < m; i++)
            upper += s->weight[s->order[i]];
        if (upper << 30 >= target) {
            hi = m;
            continue;
        }
        sum = upper + s->weight[s->order[m]];
        lo = m + 1;
        if (sum << 30 >= target)
            return lo;
    }
    return hi;
}

/* Marks the survivors of top-k, top-p and min-p in keep[]. */
static void filter(struct sample *s, const struct proto_run *run, float best)
{
    uint32_t n = s->n_vocab;
    for (uint32_t i = 0; i < n; i++)
        s->order[i] = i;
    (void)k_weigh(s->x, n, best, 1.0f, s->weight);
    if (run->top_k > 0 && (uint32_t)run->top_k < n) {
        select_count(s, n, (uint32_t)run->top_k);
        n = (uint32_t)run->top_k;
    }
    if (run->top_p < 1.0f)
        n = select_share(s, n, run->top_p);
    uint64_t least = 0;
    if (run->min_p > 0.0f) {
        least = (uint64_t)(run->min_p * K_WEIGHT_ONE);
        least = least == 0 ? 1 : least;
    }
    memset(s->keep, 0, s->n_vocab);
    for (uint32_t i = 0; i < n; i++)
        s->keep[s->order[i]] = s->weight[s->order[i]] >= least;
}

static bool filters(const struct proto_run *run)
{
    return run->top_k > 0 || run->top_p < 1.0f || run->min_p > 0.0f;
}

/* Weighs the logits from `first` on, those that the filters left; returns their sum. */
static uint64_t weigh(const struct sample *s, const float *x, uint32_t first, bool all, float best,
                      float temperature, uint64_t ret[PIECE])
{
    const uint32_t n = s->n_vocab - first < PIECE ? s->n_vocab - first : PIECE;
    uint64_t sum = k_weigh(x + first, n, best, temperature, ret);
    for (uint32_t i = 0; i < n && !all; i++)
        if (!s->keep[first + i]) {
            sum -= ret[i];
            ret[i] = 0;
        }
    return sum;
}

static uint32_t draw(struct sample *s, const float *x, const struct proto_run *run, uint32_t best,
                     uint32_t index)
{
    const bool all = !filters(run);
    const float highest = x[best];
    uint64_t piece[PIECE], total = 0, sum = 0;
    if (!all)
        filter(s, run, highest);
    for (uint32_t first = 0; first < s->n_vocab; first += PIECE) {
        s->sum[first / PIECE] = weigh(s, x, first, all, highest, run->temperature, piece);
        total += s->sum[first / PIECE];
    }
    const uint64_t r = (uint64_t)(((unsigned __int128)rng_draw(run->seed, index) * total) >> 64);
    for (uint32_t first = 0; first < s->n_vocab; first += PIECE) {
        sum += s->sum[first / PIECE];
        if (sum <= r)
            continue;
        sum -= weigh(s, x, first, all, highest, run->temperature, piece);
        for (uint32_t i = 0; i < PIECE && first + i < s->n_vocab; i++) {
            sum += piece[i];
            if (sum > r)
                return first + i;
        }
    }
    return best; /* only where the best logit is +inf: all weights are 0 */
}

bool sample_plain(const struct proto_run *run)
{
    const bool greedy = run->temperature < FLT_MIN;
    return !adjusts(run) && (greedy || !filters(run)) && (run->flags & PROTO_RUN_LOGPROBS) == 0;
}

enum err_code sample_pick(struct sample *s, const float *logits, const struct proto_run *run,
                          const uint32_t *tokens, uint32_t n, uint32_t index, uint32_t *ret,
                          struct err *e)
{
    const bool greedy = run->temperature < FLT_MIN;
    const float *x = logits; /* most of the time they need not be copied */
    if (adjusts(run) || (!greedy && filters(run))) {
        adjust(s, logits, run, tokens, n);
        x = s->x;
    }
    const uint32_t best = k_highest(x, s->n_vocab);
    if (x[best] == -INFINITY)
        return err_set(e, ERR_ARGUMENT,
                       "bias: every token is forbidden (-inf) at place %u of the answer", index);
    *ret = greedy ? best : draw(s, x, run, best, index);
    return ERR_OK;
}

/* ---- log-probabilities ---- */

static float logprob(float x, float highest, double log_z)
{
    return (float)((double)x - (double)highest - log_z);
}

/* Ids of the n highest logits (ties: lower id first), by insertion: n is at most 20. */
static void find_top(const float *x, uint32_t n_vocab, uint8_t n, struct proto_token *ret)
{
    ret->n_top = 0;
    for (uint32_t i = 0; i < n_vocab; i++) {
        if (ret->n_top == n && !(x[i] > x[ret->top[n - 1].id]))
            continue;
        uint8_t at = ret->n_top < n ? ret->n_top++ : (uint8_t)(n - 1);
        for (; at > 0 && x[i] > x[ret->top[at - 1].id]; at--)
            ret->top[at] = ret->top[at - 1];
        ret->top[at].id = i;
    }
}

void sample_logprobs(const float *logits, uint32_t n_vocab, uint8_t n_top, struct proto_token *ret)
{
    const float highest = logits[k_highest(logits, n_vocab)];
    uint64_t piece[PIECE], z = 0;
    for (uint32_t i = 0; i < n_vocab; i += PIECE)
        z += k_weigh(logits + i, n_vocab - i < PIECE ? n_vocab - i : PIECE, highest, 1.0f, piece);
    const double log_z = k_log64((double)z * 0x1p-40);
    ret->flags |= PROTO_TOKEN_LOGPROB;
    ret->logprob = logprob(logits[ret->id], highest, log_z);
    ret->n_top = 0;
    if (n_top == 0)
        return;
    find_top(logits, n_vocab, n_top, ret);
    for (uint8_t i = 0; i < ret->n_top; i++)
        ret->top[i].logprob = logprob(logits[ret->top[i].id], highest, log_z);
}

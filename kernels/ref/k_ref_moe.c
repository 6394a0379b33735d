/* Router and grouping of the oracle (A13). */
#include <string.h>

#include "k_float.h"
#include "k_ref.h"

float k_ref_softmax(const float *x, uint32_t n, float *e)
{
    float m = x[0], lanes[32] = {0};
    for (uint32_t i = 1; i < n; i++)
        m = x[i] > m ? x[i] : m;
    for (uint32_t i = 0; i < n; i++) {
        e[i] = k_float_exp32(x[i] - m);
        lanes[i % 32] = lanes[i % 32] + e[i];
    }
    return k_float_tree32(lanes);
}

void k_ref_router_choose(const struct k_router *a, const float *logits, const float *e, float sum,
                         uint32_t *ids, float *weights)
{
    /* The best not yet taken, by (logit falling, index rising): what comes after (last,
     * last_id). */
    float last = 0.0f, chosen = 0.0f;
    uint32_t last_id = 0;
    for (uint32_t r = 0; r < a->n_used; r++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t i = 0; i < a->n_expert; i++) {
            if (r > 0 && (logits[i] > last || (logits[i] == last && i <= last_id)))
                continue;
            if (best == UINT32_MAX || logits[i] > logits[best])
                best = i;
        }
        last = logits[best];
        last_id = best;
        ids[r] = best;
        weights[r] = e[best] / sum;
        chosen = r == 0 ? weights[0] : chosen + weights[r];
    }
    for (uint32_t r = 0; r < a->n_used; r++) {
        if (a->normalise)
            weights[r] = weights[r] / chosen;
        if (a->scale != 1.0f)
            weights[r] = weights[r] * a->scale;
    }
}

void k_ref_router_fault(const struct k_router *a, uint32_t *ids, float *weights)
{
    for (uint32_t r = 0; r < a->n_used; r++) {
        ids[r] = r;
        weights[r] = 0.0f;
    }
}

bool k_ref_router(const struct k_router *a, const float *logits, float *work, uint32_t *ids,
                  float *weights)
{
    for (uint32_t i = 0; i < a->n_expert; i++)
        if (!k_float_finite(logits[i])) {
            k_ref_router_fault(a, ids, weights);
            return true;
        }
    const float sum = k_ref_softmax(logits, a->n_expert, work);
    k_ref_router_choose(a, logits, work, sum, ids, weights);
    return false;
}

void k_ref_grouping(const struct k_grouping *a, uint32_t n_rows)
{
    const uint32_t *ids = k_host_at(a->ids);
    struct k_group *groups = k_host_at(a->groups);
    uint32_t *order = k_host_at(a->order), *n_groups = k_host_at(a->n_groups);
    const uint32_t n_pairs = n_rows * a->n_used;
    uint32_t count[K_MAX_EXPERTS], first = 0, n = 0;
    memset(count, 0, a->n_expert * sizeof count[0]);
    for (uint32_t p = 0; p < n_pairs; p++)
        count[ids[p]]++;
    for (uint32_t x = 0; x < a->n_expert; x++) {
        const uint32_t of_expert = count[x];
        count[x] = first; /* from here: where the next pair of x goes */
        if (of_expert == 0)
            continue;
        groups[n++] = (struct k_group){.expert = x, .first = first, .count = of_expert};
        first += of_expert;
    }
    for (uint32_t p = 0; p < n_pairs; p++)
        order[count[ids[p]]++] = p;
    *n_groups = n;
}

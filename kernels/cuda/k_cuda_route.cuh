/* Router and grouping (A13) as the kernels have them that do one, the other or both. */
#ifndef ISLET_K_CUDA_ROUTE_CUH
#define ISLET_K_CUDA_ROUTE_CUH

#include "k_cuda.cuh"
#include "k_cuda_warp.cuh"

enum {
    FEW_PAIRS = 256 /* grouping: up to so many each pair compares itself with all others */
};

/* ---- router ---------------------------------------------------------------------------------- */

struct router_args {
    struct k_cuda_rows rows;
    const float *logits;
    uint32_t *ids;
    float *weights;
    uint32_t n_expert, n_used;
    float scale;
    bool normalise;
};

/* A row's logits, element lane + 32 * k in k: in registers when there are few, otherwise in shared
 * memory. A key of 0 is one that was taken. */
template <int VALUES> struct router_keys {
    uint32_t key[VALUES];

    __device__ __forceinline__ void set(uint32_t k, uint32_t value)
    {
        key[k] = value;
    }
    __device__ __forceinline__ uint32_t get(uint32_t k) const
    {
        return key[k];
    }
};

template <> struct router_keys<0> {
    uint32_t *key; /* [n_expert], this lane's every 32nd */

    __device__ __forceinline__ void set(uint32_t k, uint32_t value)
    {
        key[32 * k] = value;
    }
    __device__ __forceinline__ uint32_t get(uint32_t k) const
    {
        return key[32 * k];
    }
};

/* The lane's best that was not taken: largest key, lowest index. */
template <int VALUES>
static __device__ __forceinline__ void router_best(const struct router_keys<VALUES> &keys,
                                                   uint32_t n_expert, uint32_t *ret_key,
                                                   uint32_t *ret_id)
{
    const uint32_t lane = threadIdx.x % 32, count = VALUES > 0 ? VALUES : (n_expert + 31) / 32;
    uint32_t best = 0, id = lane;
#pragma unroll
    for (uint32_t k = 0; k < count; k++) {
        const uint32_t key = lane + 32 * k < n_expert ? keys.get(k) : 0;
        id = key > best ? lane + 32 * k : id;
        best = max(best, key);
    }
    *ret_key = best;
    *ret_id = id;
}

/* Takes the best of the row; every lane gets its index. */
template <int VALUES>
static __device__ __forceinline__ uint32_t router_take(struct router_keys<VALUES> &keys,
                                                       uint32_t n_expert, uint32_t *key,
                                                       uint32_t *id)
{
    const uint32_t best = __reduce_max_sync(K_CUDA_WARP_ALL, *key);
    const uint32_t winner = __reduce_min_sync(K_CUDA_WARP_ALL, *key == best ? *id : UINT32_MAX);
    if (winner == *id && *key == best) {
        if constexpr (VALUES > 0) {
#pragma unroll
            for (uint32_t k = 0; k < VALUES; k++)
                keys.set(k, k == winner / 32 ? 0 : keys.get(k));
        } else {
            keys.set(winner / 32, 0);
        }
        router_best(keys, n_expert, key, id);
    }
    return winner;
}

static __device__ __forceinline__ float router_weight(const struct router_args &a, float w,
                                                      float chosen)
{
    if (a.normalise)
        w = k_float_div(w, chosen);
    return a.scale != 1.0f ? k_float_mul(w, a.scale) : w;
}

/* The chosen in rank order, 32 ranks at a time, one a lane; then their weights. */
template <int VALUES>
static __device__ __forceinline__ void router_choose(const struct router_args &a,
                                                     struct router_keys<VALUES> &keys,
                                                     const float *logits, float m, float sum,
                                                     uint32_t *ids, float *weights)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t key, id;
    float chosen = 0.0f;
    router_best(keys, a.n_expert, &key, &id);
    for (uint32_t first = 0; first < a.n_used; first += 32) {
        const uint32_t count = min(32u, a.n_used - first);
        uint32_t mine = 0;
        for (uint32_t r = 0; r < count; r++) {
            const uint32_t winner = router_take(keys, a.n_expert, &key, &id);
            mine = r == lane ? winner : mine;
        }
        const float w = k_float_div(k_cuda_warp_exp(k_float_sub(logits[mine], m)), sum);
        for (uint32_t r = 0; r < count; r++) {
            const float next = __shfl_sync(K_CUDA_WARP_ALL, w, r);
            chosen = first + r == 0 ? next : k_float_add(chosen, next);
        }
        if (lane < count) {
            ids[first + lane] = mine;
            if (first + count == a.n_used) /* the last ones: `chosen` is whole */
                weights[first + lane] = router_weight(a, w, chosen);
            else
                weights[first + lane] = w;
        }
    }
    for (uint32_t r = lane; r < (a.n_used - 1) / 32 * 32; r += 32) /* those that this lane wrote */
        weights[r] = router_weight(a, weights[r], chosen);
}

/* One of n_rows rows by one warp, to ids and the row's weights; none beyond them. VALUES: keys of a
 * lane in registers, 0: `shared` holds them. */
template <int VALUES>
static __device__ __forceinline__ void router_row(const struct router_args &a, uint32_t row,
                                                  uint32_t n_rows, const float *logits,
                                                  uint32_t *ids, uint32_t *shared)
{
    const uint32_t lane = threadIdx.x % 32, count = VALUES > 0 ? VALUES : (a.n_expert + 31) / 32;
    float *weights = a.weights + (uint64_t)row * a.n_used;
    struct router_keys<VALUES> keys;
    if constexpr (VALUES == 0)
        keys.key = shared + lane;
    bool finite = true;
    uint32_t top = 0;
#pragma unroll
    for (uint32_t k = 0; k < count; k++) {
        const float x = lane + 32 * k < a.n_expert ? logits[lane + 32 * k] : 0.0f;
        const uint32_t key = k_cuda_warp_key(x);
        finite &= k_float_finite(x);
        if (lane + 32 * k < a.n_expert) {
            keys.set(k, key);
            top = max(top, key);
        }
    }
    if (row >= n_rows)
        return;
    if (!__all_sync(K_CUDA_WARP_ALL, finite)) {
        for (uint32_t r = lane; r < a.n_used; r += 32) {
            ids[r] = r;
            weights[r] = 0.0f;
        }
        if (lane == 0)
            a.rows.faults[row] = 1;
        return;
    }
    const float m = k_cuda_warp_of_key(__reduce_max_sync(K_CUDA_WARP_ALL, top));
    float sum = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < count; k++)
        if (lane + 32 * k < a.n_expert)
            sum =
                k_float_add(sum, k_cuda_warp_exp(k_float_sub(k_cuda_warp_of_key(keys.get(k)), m)));
    router_choose(a, keys, logits, m, k_cuda_warp_tree(sum), ids, weights);
}

static struct router_args router_args_of(const struct k_router *a)
{
    struct router_args args;
    args.rows = k_cuda_rows_of(&a->rows);
    args.logits = (const float *)k_cuda_at(a->logits);
    args.ids = (uint32_t *)k_cuda_at(a->ids);
    args.weights = (float *)k_cuda_at(a->weights);
    args.n_expert = a->n_expert;
    args.n_used = a->n_used;
    args.scale = a->scale;
    args.normalise = a->normalise;
    return args;
}

/* ---- grouping -------------------------------------------------------------------------------- */

struct grouping_args {
    const uint32_t *n_rows, *ids;
    uint32_t *n_groups, *order;
    struct k_group *groups;
    uint32_t n_expert, n_used;
};

/* A thread a pair, whose expert is id. What comes before a pair: pairs of lower experts, and
 * earlier ones of its own. */
static __device__ __forceinline__ void grouping_pairs(const struct grouping_args &a,
                                                      uint32_t n_pairs, uint32_t id)
{
    __shared__ uint32_t ids[FEW_PAIRS];
    __shared__ bool leads[FEW_PAIRS]; /* the first pair of its expert */
    const uint32_t p = threadIdx.x;
    ids[p] = id;
    __syncthreads();
    uint32_t lower = 0, earlier = 0, count = 0;
#pragma unroll 8
    for (uint32_t i = 0; i < n_pairs; i++) {
        const uint32_t other = ids[i];
        lower += other < id;
        earlier += other == id && i < p;
        count += other == id;
    }
    const bool lead = p < n_pairs && earlier == 0;
    leads[p] = lead;
    const uint32_t n_groups = (uint32_t)__syncthreads_count(lead);
    if (p == 0)
        *a.n_groups = n_groups;
    if (p >= n_pairs)
        return;
    a.order[lower + earlier] = p;
    if (!lead)
        return;
    uint32_t group = 0;
#pragma unroll 8
    for (uint32_t i = 0; i < n_pairs; i++)
        group += leads[i] && ids[i] < id;
    a.groups[group].expert = id;
    a.groups[group].first = lower;
    a.groups[group].count = count;
}

static struct grouping_args grouping_args_of(const struct k_grouping *a)
{
    struct grouping_args args;
    args.n_rows = (const uint32_t *)k_cuda_at(a->rows.n_rows);
    args.ids = (const uint32_t *)k_cuda_at(a->ids);
    args.n_groups = (uint32_t *)k_cuda_at(a->n_groups);
    args.order = (uint32_t *)k_cuda_at(a->order);
    args.groups = (struct k_group *)k_cuda_at(a->groups);
    args.n_expert = a->n_expert;
    args.n_used = a->n_used;
    return args;
}

#endif

/* Router and grouping (A13): which experts a row uses, and which rows an expert has. */
#include "k_cuda.cuh"
#include "k_cuda_norm.cuh"
#include "k_cuda_quantise.cuh"
#include "k_cuda_warp.cuh"

enum {
    ROUTER_WARPS = 4,   /* rows of a block */
    FEW_PAIRS = 256,    /* grouping: up to so many each pair compares itself with all others */
    SORT_THREADS = 256, /* above: a block counts all pairs and places those of its experts, */
    SORT_EXPERTS = 8    /* one expert a warp */
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
                if (k == winner / 32)
                    keys.set(k, 0);
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

/* One row by one warp. VALUES: logits of a lane in registers, 0: `shared` holds them. */
template <int VALUES>
static __device__ __forceinline__ void router_row(const struct router_args &a, uint32_t row,
                                                  uint32_t *shared)
{
    const uint32_t lane = threadIdx.x % 32, count = VALUES > 0 ? VALUES : (a.n_expert + 31) / 32;
    const float *logits = a.logits + (uint64_t)row * a.n_expert;
    uint32_t *ids = a.ids + (uint64_t)row * a.n_used;
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
    if (row >= *a.rows.n_rows)
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

template <int VALUES> static __global__ void router_few(const struct router_args a)
{
    const uint32_t row = blockIdx.x * ROUTER_WARPS + threadIdx.x / 32;
    if (row < a.rows.max_rows)
        router_row<VALUES>(a, row, NULL);
}

static __global__ void router_many(const struct router_args a)
{
    __shared__ uint32_t keys[K_MAX_EXPERTS];
    router_row<0>(a, blockIdx.x, keys);
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

extern "C" enum err_code k_cuda_router(const struct k_router *a, struct k_stream *s)
{
    const struct router_args args = router_args_of(a);
    const uint32_t blocks = (a->rows.max_rows + ROUTER_WARPS - 1) / ROUTER_WARPS;
    if (a->n_expert <= 128)
        K_CUDA_LAUNCH(s, router_few<4>, blocks, 32 * ROUTER_WARPS, 0, args);
    else if (a->n_expert <= 512)
        K_CUDA_LAUNCH(s, router_few<16>, blocks, 32 * ROUTER_WARPS, 0, args);
    else
        K_CUDA_LAUNCH(s, router_many, a->rows.max_rows, 32, 0, args);
    return ERR_OK;
}

/* ---- grouping -------------------------------------------------------------------------------- */

struct grouping_args {
    const uint32_t *n_rows, *ids;
    uint32_t *n_groups, *order;
    struct k_group *groups;
    uint32_t n_expert, n_used;
};

/* A thread a pair. What comes before a pair: pairs of lower experts, and earlier ones of its own. */
static __device__ __forceinline__ void grouping_pairs(const struct grouping_args &a)
{
    __shared__ uint32_t ids[FEW_PAIRS];
    __shared__ bool leads[FEW_PAIRS]; /* the first pair of its expert */
    const uint32_t p = threadIdx.x, n_pairs = *a.n_rows * a.n_used;
    const uint32_t id = p < n_pairs ? a.ids[p] : UINT32_MAX;
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

static __global__ void __launch_bounds__(FEW_PAIRS) grouping_few(const struct grouping_args a)
{
    grouping_pairs(a);
}

/* Experts of pairs p .. p + 3; UINT32_MAX: there is no such pair. */
static __device__ __forceinline__ uint4 grouping_four(const struct grouping_args &a, uint32_t p,
                                                      uint32_t n_pairs)
{
    if (p + 4 <= n_pairs)
        return *(const uint4 *)(const void *)(a.ids + p);
    return make_uint4(p < n_pairs ? a.ids[p] : UINT32_MAX,
                      p + 1 < n_pairs ? a.ids[p + 1] : UINT32_MAX,
                      p + 2 < n_pairs ? a.ids[p + 2] : UINT32_MAX, UINT32_MAX);
}

/* Writes the pairs of one expert in their order, by one warp; four neighbours a lane. */
static __device__ __forceinline__ void grouping_place(const struct grouping_args &a,
                                                      uint32_t expert, uint32_t n_pairs,
                                                      uint32_t first)
{
    const uint32_t lane = threadIdx.x % 32, before = (1u << lane) - 1;
#pragma unroll 4
    for (uint32_t base = 0; base < n_pairs; base += 128) {
        const uint32_t p = base + 4 * lane;
        const uint4 ids = grouping_four(a, p, n_pairs);
        const bool here[4] = {ids.x == expert, ids.y == expert, ids.z == expert, ids.w == expert};
        uint32_t at = first;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t all = __ballot_sync(K_CUDA_WARP_ALL, here[k]);
            at += (uint32_t)__popc(all & before);
            first += (uint32_t)__popc(all);
        }
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            if (here[k])
                a.order[at++] = p + k;
    }
}

/* Each block counts the pairs of all experts (integers: any order), then each of its warps sums what
 * lies below its expert and places that expert's pairs. */
static __global__ void __launch_bounds__(SORT_THREADS) grouping_many(const struct grouping_args a)
{
    __shared__ uint32_t count[K_MAX_EXPERTS];
    const uint32_t t = threadIdx.x, lane = t % 32, n_pairs = *a.n_rows * a.n_used;
    for (uint32_t x = t; x < a.n_expert; x += SORT_THREADS)
        count[x] = 0;
    __syncthreads();
#pragma unroll 2
    for (uint32_t p = 4 * t; p < n_pairs; p += 4 * SORT_THREADS) {
        const uint4 ids = grouping_four(a, p, n_pairs);
        atomicAdd(&count[ids.x], 1u);
        if (p + 1 < n_pairs)
            atomicAdd(&count[ids.y], 1u);
        if (p + 2 < n_pairs)
            atomicAdd(&count[ids.z], 1u);
        if (p + 3 < n_pairs)
            atomicAdd(&count[ids.w], 1u);
    }
    __syncthreads();
    const uint32_t expert = blockIdx.x * SORT_EXPERTS + t / 32;
    if (expert >= a.n_expert)
        return;
    uint32_t first = 0, group = 0;
    for (uint32_t x = lane; x < expert; x += 32) {
        first += count[x];
        group += count[x] != 0;
    }
    first = __reduce_add_sync(K_CUDA_WARP_ALL, first);
    group = __reduce_add_sync(K_CUDA_WARP_ALL, group);
    const uint32_t mine = count[expert];
    if (lane == 0 && expert == a.n_expert - 1)
        *a.n_groups = group + (mine != 0);
    if (mine == 0)
        return;
    if (lane == 0) {
        a.groups[group].expert = expert;
        a.groups[group].first = first;
        a.groups[group].count = mine;
    }
    grouping_place(a, expert, n_pairs, first);
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

extern "C" enum err_code k_cuda_grouping(const struct k_grouping *a, struct k_stream *s)
{
    const struct grouping_args args = grouping_args_of(a);
    const uint64_t pairs = (uint64_t)a->rows.max_rows * a->n_used;
    if (pairs <= FEW_PAIRS)
        K_CUDA_LAUNCH(s, grouping_few, 1, (uint32_t)(pairs + 31) / 32 * 32, 0, args);
    else
        K_CUDA_LAUNCH(s, grouping_many, (a->n_expert + SORT_EXPERTS - 1) / SORT_EXPERTS,
                      SORT_THREADS, 0, args);
    return ERR_OK;
}

/* ---- one row: norm, product, router and grouping --------------------------------------------- */

enum {
    PRODUCT_WARPS = 4,  /* of a block, an expert each */
    PRODUCT_GROUPS = 2, /* of weights that are asked for before the activations are there */
    PRODUCT_GROUP = 32, /* of a lane */
    PRODUCT_THREADS = 32 * PRODUCT_WARPS
};

struct product_args {
    const float *weights; /* [n_expert][n_in] */
    float *logits;
    uint32_t n_in;
    uint32_t *arrived; /* blocks that are done; 0 before and after */
};

/* A lane's weights of the warp's expert, as far as they are asked for early. */
struct product_ahead {
    float w[PRODUCT_GROUPS][PRODUCT_GROUP];
};

static __device__ __forceinline__ void product_ask(const struct product_args &p, uint32_t expert,
                                                   struct product_ahead &ret)
{
    const float *w = p.weights + (uint64_t)expert * p.n_in + threadIdx.x % 32;
#pragma unroll
    for (uint32_t g = 0; g < PRODUCT_GROUPS; g++)
        if ((g + 1) * PRODUCT_GROUP <= p.n_in / 32)
#pragma unroll
            for (uint32_t k = 0; k < PRODUCT_GROUP; k++)
                ret.w[g][k] = w[32 * (g * PRODUCT_GROUP + k)];
}

/* The expert's logit of the row x (A8), loads in groups. */
static __device__ __forceinline__ float product_row(const struct product_args &p, uint32_t expert,
                                                    const struct product_ahead &ahead,
                                                    const float *x)
{
    const uint32_t lane = threadIdx.x % 32, count = p.n_in / 32;
    const float *w = p.weights + (uint64_t)expert * p.n_in + lane;
    float sum = 0.0f;
    x += lane;
#pragma unroll
    for (uint32_t g = 0; g < PRODUCT_GROUPS; g++)
        if ((g + 1) * PRODUCT_GROUP <= count) {
            float v[PRODUCT_GROUP];
#pragma unroll
            for (uint32_t k = 0; k < PRODUCT_GROUP; k++)
                v[k] = x[32 * (g * PRODUCT_GROUP + k)];
#pragma unroll
            for (uint32_t k = 0; k < PRODUCT_GROUP; k++)
                sum = k_float_fma(ahead.w[g][k], v[k], sum);
        }
#pragma unroll 8
    for (uint32_t k = min(count / PRODUCT_GROUP, (uint32_t)PRODUCT_GROUPS) * PRODUCT_GROUP;
         k < count; k++)
        sum = k_float_fma(w[32 * k], x[32 * k], sum);
    return k_cuda_warp_tree(sum);
}

/* True in all threads of the block that is done last, once the others' stores are seen. */
static __device__ __forceinline__ bool product_is_last(const struct product_args &p)
{
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(p.arrived, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last)
        return false;
    __threadfence();
    if (threadIdx.x == 0)
        *p.arrived = 0;
    return true;
}

enum {
    ONE_MOST = 4096, /* inputs: a thread has at most ONE_VALUES of them */
    ONE_VALUES = ONE_MOST / PRODUCT_THREADS
};

struct one_args {
    float *x, *y; /* the residual; its norm */
    const float *out, *norm;
    uint8_t *q32, *q256;
    float eps;
};

/* A thread's values; nothing beyond n. */
static __device__ __forceinline__ void one_load(const float *from, uint32_t n,
                                                float (&v)[ONE_VALUES])
{
#pragma unroll
    for (uint32_t k = 0; k < ONE_VALUES; k++)
        v[k] =
            threadIdx.x + PRODUCT_THREADS * k < n ? from[threadIdx.x + PRODUCT_THREADS * k] : 0.0f;
}

static __device__ __forceinline__ void one_store(float *to, uint32_t n,
                                                 const float (&v)[ONE_VALUES])
{
#pragma unroll
    for (uint32_t k = 0; k < ONE_VALUES; k++)
        if (threadIdx.x + PRODUCT_THREADS * k < n)
            to[threadIdx.x + PRODUCT_THREADS * k] = v[k];
}

/* The norm of the row of sums v, to tile. */
static __device__ __forceinline__ void one_norm(const struct one_args &e, uint32_t n, float *tile,
                                                const float (&v)[ONE_VALUES],
                                                const float (&weight)[ONE_VALUES])
{
    __shared__ float factor;
    float y[ONE_VALUES];
    one_store(tile, n, v);
    __syncthreads();
    if (threadIdx.x < 32) {
        const float sum = k_cuda_warp_tree(k_cuda_norm_fold(tile, n, 0.0f));
        if (threadIdx.x == 0)
            factor = k_cuda_norm_factor(sum, n, e.eps);
    }
    __syncthreads();
#pragma unroll
    for (uint32_t k = 0; k < ONE_VALUES; k++)
        y[k] = k_float_mul(k_float_mul(v[k], factor), weight[k]);
    one_store(tile, n, y);
    __syncthreads();
}

/* This block's part of the norm and its forms, by the first warp: 256 values of every gridDim.x-th
 * such. */
static __device__ __forceinline__ void one_forms(const struct one_args &e, uint32_t n,
                                                 const float *tile, uint32_t *faults)
{
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t block = blockIdx.x; block * 256 < n; block += gridDim.x) {
        const uint32_t first = block * 256 + lane * K_CUDA_QUANTISE_VALUES;
        float v[K_CUDA_QUANTISE_VALUES];
#pragma unroll
        for (int i = 0; i < K_CUDA_QUANTISE_VALUES; i++) {
            v[i] = first < n ? tile[first + i] : 0.0f;
            if (first < n)
                e.y[first + i] = v[i];
        }
        if (!k_cuda_quantise_block(v, e.q32, e.q256, n, block, first < n))
            faults[0] = 1;
    }
}

/* Every block makes the norm for itself. The one that is done last stores the sum, which the others
 * have read by then. */
template <int VALUES>
static __global__ void __launch_bounds__(PRODUCT_THREADS)
    route_one(const struct one_args e, const struct product_args p, const struct router_args a,
              const struct grouping_args g)
{
    __shared__ __align__(16) float tile[ONE_MOST];
    const uint32_t expert = blockIdx.x * PRODUCT_WARPS + threadIdx.x / 32,
                   mine = min(expert, a.n_expert - 1);
    struct product_ahead ahead;
    float v[ONE_VALUES], weight[ONE_VALUES];
    product_ask(p, mine, ahead);
    one_load(e.norm, p.n_in, weight);
    k_cuda_await(); /* weights are nobody's result */
    k_cuda_release();
    const bool present = *a.rows.n_rows > 0;
    one_load(e.x, p.n_in, v);
    if (e.out != NULL) {
        float more[ONE_VALUES];
        one_load(e.out, p.n_in, more);
#pragma unroll
        for (uint32_t k = 0; k < ONE_VALUES; k++)
            v[k] = k_float_add(v[k], more[k]);
    }
    one_norm(e, p.n_in, tile, v, weight);
    const float logit = product_row(p, mine, ahead, tile);
    if (threadIdx.x % 32 == 0 && expert < a.n_expert && present)
        p.logits[expert] = logit;
    if (threadIdx.x < 32 && present)
        one_forms(e, p.n_in, tile, a.rows.faults);
    if (!product_is_last(p))
        return;
    if (e.out != NULL && present)
        one_store(e.x, p.n_in, v);
    if (threadIdx.x < 32)
        router_row<VALUES>(a, 0, NULL);
    __syncthreads();
    grouping_pairs(g);
}

static enum err_code route_apart(const struct k_matmul *m, const struct k_router *a,
                                 const struct k_grouping *g, struct k_stream *s)
{
    enum err_code code = k_cuda_matmul(m, s);
    if (code == ERR_OK)
        code = k_cuda_router(a, s);
    return code == ERR_OK ? k_cuda_grouping(g, s) : code;
}

static struct one_args one_args_of(const struct k_enter *e)
{
    struct one_args one;
    one.x = (float *)k_cuda_at(e->x);
    one.y = (float *)k_cuda_at(e->act.f32);
    one.out = (const float *)k_cuda_at(e->out);
    one.norm = (const float *)k_cuda_at(e->norm);
    one.q32 = (uint8_t *)k_cuda_at(e->act.q32);
    one.q256 = (uint8_t *)k_cuda_at(e->act.q256);
    one.eps = e->eps;
    return one;
}

/* One row goes through one kernel. */
extern "C" enum err_code k_cuda_route(const struct k_enter *e, const struct k_matmul *m,
                                      const struct k_router *a, const struct k_grouping *g,
                                      struct k_stream *s)
{
    const struct k_matrix *w = &m->w[0];
    if (a->rows.max_rows > 1 || w->format != K_F32 || w->n_in % 32 != 0 || w->n_in > ONE_MOST ||
        a->n_used > PRODUCT_THREADS || a->n_expert > 512 || e->weights.buffer != NULL) {
        const enum err_code code = k_cuda_enter(e, s);
        return code == ERR_OK ? route_apart(m, a, g, s) : code;
    }
    const struct product_args p = {(const float *)k_cuda_at(w->data), (float *)k_cuda_at(m->y[0]),
                                   w->n_in, s->arrived};
    const uint32_t blocks = (a->n_expert + PRODUCT_WARPS - 1) / PRODUCT_WARPS;
    if (a->n_expert <= 128)
        K_CUDA_LAUNCH_AHEAD(s, route_one<4>, blocks, PRODUCT_THREADS, 0, one_args_of(e), p,
                            router_args_of(a), grouping_args_of(g));
    else
        K_CUDA_LAUNCH_AHEAD(s, route_one<16>, blocks, PRODUCT_THREADS, 0, one_args_of(e), p,
                            router_args_of(a), grouping_args_of(g));
    return ERR_OK;
}

/* Router and grouping (A13): which experts a row uses, and which rows an expert has. */
#include "k_cuda.cuh"
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

/* ---- product, router and grouping -------------------------------------------------------------- */

enum {
    PRODUCT_WARPS = 4,  /* of a block, an expert each */
    PRODUCT_GROUPS = 2, /* of weights that are asked for before the activations are there */
    PRODUCT_GROUP = 32, /* of a lane */
    PRODUCT_THREADS = 32 * PRODUCT_WARPS
};

struct product_args {
    const float *weights, *x; /* [n_expert][n_in], [rows][n_in] */
    float *logits;
    uint32_t n_in;
    uint32_t *arrived; /* blocks that are done; 0 before and after */
};

/* The logits of the warp's expert (A8). Loads go in groups of PRODUCT_GROUP. */
template <int COLUMNS>
static __device__ __forceinline__ void product_rows(const struct product_args &p, uint32_t expert,
                                                    const uint32_t *n_rows, float (&logit)[COLUMNS])
{
    const uint32_t lane = threadIdx.x % 32, count = p.n_in / 32;
    const float *w = p.weights + (uint64_t)expert * p.n_in + lane;
    float ahead[PRODUCT_GROUPS][PRODUCT_GROUP];
#pragma unroll
    for (uint32_t g = 0; g < PRODUCT_GROUPS; g++)
        if ((g + 1) * PRODUCT_GROUP <= count)
#pragma unroll
            for (uint32_t k = 0; k < PRODUCT_GROUP; k++)
                ahead[g][k] = w[32 * (g * PRODUCT_GROUP + k)];
    k_cuda_await(); /* weights are nobody's result */
    k_cuda_release();
    const uint32_t rows = min(*n_rows, (uint32_t)COLUMNS);
    const uint32_t whole = min(count / PRODUCT_GROUP, (uint32_t)PRODUCT_GROUPS) * PRODUCT_GROUP;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        const float *x = p.x + (uint64_t)c * p.n_in + lane;
        float sum = 0.0f;
        if (c >= rows)
            break;
#pragma unroll
        for (uint32_t g = 0; g < PRODUCT_GROUPS; g++)
            if ((g + 1) * PRODUCT_GROUP <= count) {
                float v[PRODUCT_GROUP];
#pragma unroll
                for (uint32_t k = 0; k < PRODUCT_GROUP; k++)
                    v[k] = x[32 * (g * PRODUCT_GROUP + k)];
#pragma unroll
                for (uint32_t k = 0; k < PRODUCT_GROUP; k++)
                    sum = k_float_fma(ahead[g][k], v[k], sum);
            }
#pragma unroll 8
        for (uint32_t k = whole; k < count; k++)
            sum = k_float_fma(w[32 * k], x[32 * k], sum);
        logit[c] = k_cuda_warp_tree(sum);
    }
}

/* The block that is done last routes all rows: a warp a row, then a thread a pair. */
template <int COLUMNS, int VALUES>
static __global__ void __launch_bounds__(PRODUCT_THREADS)
    route_rows(const struct product_args p, const struct router_args a,
               const struct grouping_args g)
{
    __shared__ bool last;
    const uint32_t expert = blockIdx.x * PRODUCT_WARPS + threadIdx.x / 32;
    float logit[COLUMNS] = {0.0f};
    product_rows<COLUMNS>(p, min(expert, a.n_expert - 1), a.rows.n_rows, logit);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
        if (threadIdx.x % 32 == 0 && expert < a.n_expert && c < a.rows.max_rows)
            p.logits[(uint64_t)c * a.n_expert + expert] = logit[c];
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(p.arrived, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last)
        return;
    __threadfence();
    if (threadIdx.x == 0)
        *p.arrived = 0;
    for (uint32_t row = threadIdx.x / 32; row < a.rows.max_rows; row += PRODUCT_WARPS)
        router_row<VALUES>(a, row, NULL);
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

extern "C" enum err_code k_cuda_route(const struct k_matmul *m, const struct k_router *a,
                                      const struct k_grouping *g, struct k_stream *s)
{
    const struct k_matrix *w = &m->w[0];
    const uint32_t rows = a->rows.max_rows;
    if (w->format != K_F32 || w->n_in % 32 != 0 || rows > 8 ||
        (uint64_t)rows * a->n_used > PRODUCT_THREADS || a->n_expert > 512)
        return route_apart(m, a, g, s);
    const struct router_args router = router_args_of(a);
    const struct grouping_args grouping = grouping_args_of(g);
    const struct product_args p = {(const float *)k_cuda_at(w->data),
                                   (const float *)k_cuda_at(m->act.f32),
                                   (float *)k_cuda_at(m->y[0]), w->n_in, s->arrived};
    const uint32_t blocks = (a->n_expert + PRODUCT_WARPS - 1) / PRODUCT_WARPS;
    const bool few = a->n_expert <= 128;
    if (rows == 1 && few)
        K_CUDA_LAUNCH_AHEAD(s, (route_rows<1, 4>), blocks, PRODUCT_THREADS, 0, p, router, grouping);
    else if (rows == 1)
        K_CUDA_LAUNCH_AHEAD(s, (route_rows<1, 16>), blocks, PRODUCT_THREADS, 0, p, router,
                            grouping);
    else if (few)
        K_CUDA_LAUNCH_AHEAD(s, (route_rows<8, 4>), blocks, PRODUCT_THREADS, 0, p, router, grouping);
    else
        K_CUDA_LAUNCH_AHEAD(s, (route_rows<8, 16>), blocks, PRODUCT_THREADS, 0, p, router,
                            grouping);
    return ERR_OK;
}

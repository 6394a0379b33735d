/* `route`: norm, the router's product, router and grouping of a row as one kernel, of up to eight
 * rows as two, the norm (enter) first.
 *
 * The product's results go to the last block, which chooses and groups, as words of 64 bits that
 * carry what they say and that it is said: the block looks at them until all are there. No fence
 * has to be waited for. Blocks come in the order of their numbers, so that those it waits for are
 * there or done. It puts the words back to 0. */
#include "k_cuda_norm.cuh"
#include "k_cuda_quantise.cuh"
#include "k_cuda_route.cuh"

enum {
    FEW_ROWS = 8,
    MOST_EXPERTS = 512,
    MOST_INPUTS = 4096,
    ONE_WARPS = 4,  /* of a block, an expert each */
    ONE_GROUPS = 2, /* of weights that are asked for before the activations are there */
    ONE_GROUP = 32, /* of a lane */
    ONE_THREADS = 32 * ONE_WARPS,
    ONE_VALUES = MOST_INPUTS / ONE_THREADS, /* of a row: a thread's, at most */
    FEW_EXPERTS = 2,                        /* of a block: each warp has a row, and all of them */
    FEW_GROUP = 64                          /* of a lane's values that are asked for at once */
};
static_assert(K_CUDA_ROUTE_WORDS >= FEW_ROWS * MOST_EXPERTS, "a word a row and expert");

struct product_args {
    const float *weights; /* [n_expert][n_in] */
    float *logits;        /* [n_rows][n_expert] */
    uint64_t *words;      /* the same to the last block; 0 before and after */
    uint32_t n_in, n_expert;
};

/* ---- from the product to the last block ------------------------------------------------------ */

static __device__ __forceinline__ void product_put(const struct product_args &p, uint32_t row,
                                                   uint32_t expert, float logit)
{
    const uint32_t at = row * p.n_expert + expert;
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p.words + at),
                 "l"(UINT64_C(1) << 32 | k_float_bits(logit))
                 : "memory");
    p.logits[at] = logit;
}

/* A row's logits to `to`, in shared memory, by one warp. VALUES: of a lane. */
template <int VALUES>
static __device__ __forceinline__ void product_take(const struct product_args &p, uint32_t row,
                                                    float *to)
{
    const uint32_t lane = threadIdx.x % 32;
    uint64_t *words = p.words + row * p.n_expert + lane, word[VALUES];
    bool there;
    do {
        there = true;
#pragma unroll
        for (uint32_t k = 0; k < VALUES; k++) {
            word[k] = UINT64_C(1) << 32;
            if (lane + 32 * k < p.n_expert)
                asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                             : "=l"(word[k])
                             : "l"(words + 32 * k)
                             : "memory");
        }
#pragma unroll
        for (uint32_t k = 0; k < VALUES; k++)
            there &= word[k] >> 32 != 0;
    } while (!__all_sync(K_CUDA_WARP_ALL, there));
#pragma unroll
    for (uint32_t k = 0; k < VALUES; k++)
        if (lane + 32 * k < p.n_expert) {
            words[32 * k] = 0;
            to[lane + 32 * k] = k_float_of_bits((uint32_t)word[k]);
        }
    __syncwarp();
}

/* Router of each row by a warp of the last block, then grouping. logits: room for those of all rows
 * in shared memory, which no thread uses any more. Blocks have a thread a pair at least. */
template <int VALUES>
static __device__ __forceinline__ void choose_and_group(const struct product_args &p,
                                                        const struct router_args &a,
                                                        const struct grouping_args &g,
                                                        uint32_t n_rows, float *logits)
{
    __shared__ uint32_t ids[FEW_PAIRS];
    const uint32_t row = threadIdx.x / 32, pair = threadIdx.x, n_pairs = n_rows * a.n_used;
    if (row < n_rows) {
        float *mine = logits + row * a.n_expert;
        product_take<VALUES>(p, row, mine);
        router_row<VALUES>(a, row, n_rows, mine, ids + row * a.n_used, NULL);
    }
    __syncthreads();
    const uint32_t id = pair < n_pairs ? ids[pair] : UINT32_MAX;
    if (pair < n_pairs)
        a.ids[pair] = id;
    grouping_pairs(g, n_pairs, id);
}

/* ---- one row --------------------------------------------------------------------------------- */

/* A lane's weights of the warp's expert, as far as they are asked for early. */
struct one_ahead {
    float w[ONE_GROUPS][ONE_GROUP];
};

static __device__ __forceinline__ void one_ask(const struct product_args &p, uint32_t expert,
                                               struct one_ahead &ret)
{
    const float *w = p.weights + (uint64_t)expert * p.n_in + threadIdx.x % 32;
#pragma unroll
    for (uint32_t g = 0; g < ONE_GROUPS; g++)
        if ((g + 1) * ONE_GROUP <= p.n_in / 32)
#pragma unroll
            for (uint32_t k = 0; k < ONE_GROUP; k++)
                ret.w[g][k] = w[32 * (g * ONE_GROUP + k)];
}

/* The expert's logit of the row x (A8), loads in groups. */
static __device__ __forceinline__ float one_product(const struct product_args &p, uint32_t expert,
                                                    const struct one_ahead &ahead, const float *x)
{
    const uint32_t lane = threadIdx.x % 32, count = p.n_in / 32;
    const float *w = p.weights + (uint64_t)expert * p.n_in + lane;
    float sum = 0.0f;
    x += lane;
#pragma unroll
    for (uint32_t g = 0; g < ONE_GROUPS; g++)
        if ((g + 1) * ONE_GROUP <= count) {
            float v[ONE_GROUP];
#pragma unroll
            for (uint32_t k = 0; k < ONE_GROUP; k++)
                v[k] = x[32 * (g * ONE_GROUP + k)];
#pragma unroll
            for (uint32_t k = 0; k < ONE_GROUP; k++)
                sum = k_float_fma(ahead.w[g][k], v[k], sum);
        }
#pragma unroll 8
    for (uint32_t k = min(count / ONE_GROUP, (uint32_t)ONE_GROUPS) * ONE_GROUP; k < count; k++)
        sum = k_float_fma(w[32 * k], x[32 * k], sum);
    return k_cuda_warp_tree(sum);
}

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
        v[k] = threadIdx.x + ONE_THREADS * k < n ? from[threadIdx.x + ONE_THREADS * k] : 0.0f;
}

static __device__ __forceinline__ void one_store(float *to, uint32_t n,
                                                 const float (&v)[ONE_VALUES])
{
#pragma unroll
    for (uint32_t k = 0; k < ONE_VALUES; k++)
        if (threadIdx.x + ONE_THREADS * k < n)
            to[threadIdx.x + ONE_THREADS * k] = v[k];
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

/* Every block makes the norm for itself. The last one stores the sum: the others have read its
 * parts by the time that it has their words. */
template <int VALUES>
static __global__ void __launch_bounds__(ONE_THREADS, 1)
    route_one(const struct one_args e, const struct product_args p, const struct router_args a,
              const struct grouping_args g)
{
    __shared__ __align__(16) float tile[MOST_INPUTS];
    const uint32_t expert = blockIdx.x * ONE_WARPS + threadIdx.x / 32,
                   mine = min(expert, p.n_expert - 1);
    struct one_ahead ahead;
    float v[ONE_VALUES], weight[ONE_VALUES];
    one_ask(p, mine, ahead);
    one_load(e.norm, p.n_in, weight);
    k_cuda_await(); /* weights are nobody's result */
    k_cuda_release();
    const uint32_t n_rows = *a.rows.n_rows;
    one_load(e.x, p.n_in, v);
    if (e.out != NULL) {
        float more[ONE_VALUES];
        one_load(e.out, p.n_in, more);
#pragma unroll
        for (uint32_t k = 0; k < ONE_VALUES; k++)
            v[k] = k_float_add(v[k], more[k]);
    }
    one_norm(e, p.n_in, tile, v, weight);
    const float logit = one_product(p, mine, ahead, tile);
    if (threadIdx.x % 32 == 0 && expert < p.n_expert && n_rows > 0)
        product_put(p, 0, expert, logit);
    if (threadIdx.x < 32 && n_rows > 0)
        one_forms(e, p.n_in, tile, a.rows.faults);
    if (blockIdx.x + 1 < gridDim.x)
        return;
    __syncthreads(); /* the tile is used */
    choose_and_group<VALUES>(p, a, g, n_rows, tile);
    if (e.out != NULL && n_rows > 0)
        one_store(e.x, p.n_in, v);
}

/* ---- several rows ---------------------------------------------------------------------------- */

/* The block's experts' logits of the row x (A8). w: their weights in shared memory, the lane's
 * first. */
static __device__ __forceinline__ void few_product(const float *w, const float *x, uint32_t n_in,
                                                   float (&sum)[FEW_EXPERTS])
{
    const uint32_t lane = threadIdx.x % 32, count = n_in / 32;
#pragma unroll
    for (uint32_t e = 0; e < FEW_EXPERTS; e++)
        sum[e] = 0.0f;
    for (uint32_t first = 0; first < count; first += FEW_GROUP) {
        float v[FEW_GROUP];
#pragma unroll
        for (uint32_t k = 0; k < FEW_GROUP; k++)
            v[k] = first + k < count ? x[32 * (first + k) + lane] : 0.0f;
        if (first == 0) {
            k_cuda_warp_copied<0>();
            __syncthreads(); /* the weights are here */
        }
#pragma unroll
        for (uint32_t k = 0; k < FEW_GROUP; k++)
            if (first + k < count)
#pragma unroll
                for (uint32_t e = 0; e < FEW_EXPERTS; e++)
                    sum[e] = k_float_fma(w[e * n_in + 32 * (first + k) + lane], v[k], sum[e]);
    }
#pragma unroll
    for (uint32_t e = 0; e < FEW_EXPERTS; e++)
        sum[e] = k_cuda_warp_tree(sum[e]);
}

/* x: the rows' norms; rows that are not there are computed and not put. */
template <int VALUES>
static __global__ void __launch_bounds__(32 * FEW_ROWS)
    route_few(const float *x, const struct product_args p, const struct router_args a,
              const struct grouping_args g)
{
    __shared__ __align__(16) float tile[FEW_EXPERTS * MOST_INPUTS];
    const uint32_t first = blockIdx.x * FEW_EXPERTS, row = threadIdx.x / 32;
    const uint32_t count = min(p.n_expert - first, (uint32_t)FEW_EXPERTS);
    const float *weights = p.weights + (uint64_t)first * p.n_in;
    float logit[FEW_EXPERTS];
    for (uint32_t i = 4 * threadIdx.x; i < count * p.n_in; i += 4 * blockDim.x)
        k_cuda_warp_copy16(tile + i, weights + i);
    k_cuda_warp_commit();
    k_cuda_await(); /* weights are nobody's result */
    k_cuda_release();
    const uint32_t n_rows = *a.rows.n_rows;
    few_product(tile, x + (uint64_t)row * p.n_in, p.n_in, logit);
#pragma unroll
    for (uint32_t e = 0; e < FEW_EXPERTS; e++)
        if (threadIdx.x % 32 == 0 && e < count && row < n_rows)
            product_put(p, row, first + e, logit[e]);
    if (blockIdx.x + 1 < gridDim.x)
        return;
    __syncthreads(); /* the tile is used */
    choose_and_group<VALUES>(p, a, g, n_rows, tile);
}

/* ---- host side ------------------------------------------------------------------------------- */

static enum err_code route_apart(const struct k_enter *e, const struct k_matmul *m,
                                 const struct k_router *a, const struct k_grouping *g,
                                 struct k_stream *s)
{
    enum err_code code = k_cuda_enter(e, s);
    if (code == ERR_OK)
        code = k_cuda_matmul(m, s);
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

extern "C" enum err_code k_cuda_route(const struct k_enter *e, const struct k_matmul *m,
                                      const struct k_router *a, const struct k_grouping *g,
                                      struct k_stream *s)
{
    const struct k_matrix *w = &m->w[0];
    const bool one = a->rows.max_rows == 1 && e->weights.buffer == NULL;
    if (a->rows.max_rows > FEW_ROWS || w->format != K_F32 || w->n_in % 32 != 0 ||
        w->n_in > MOST_INPUTS || a->n_used > 32 || a->n_expert > MOST_EXPERTS)
        return route_apart(e, m, a, g, s);
    const struct product_args p = {(const float *)k_cuda_at(w->data), (float *)k_cuda_at(m->y[0]),
                                   s->words, w->n_in, a->n_expert};
    const struct router_args router = router_args_of(a);
    const struct grouping_args group = grouping_args_of(g);
    const bool small = a->n_expert <= 128;
    if (one) {
        const uint32_t blocks = (a->n_expert + ONE_WARPS - 1) / ONE_WARPS;
        if (small)
            K_CUDA_LAUNCH_AHEAD(s, route_one<4>, blocks, ONE_THREADS, 0, one_args_of(e), p, router,
                                group);
        else
            K_CUDA_LAUNCH_AHEAD(s, route_one<16>, blocks, ONE_THREADS, 0, one_args_of(e), p, router,
                                group);
        return ERR_OK;
    }
    const enum err_code code = k_cuda_enter(e, s);
    if (code != ERR_OK)
        return code;
    const float *x = (const float *)k_cuda_at(m->act.f32);
    const uint32_t blocks = (a->n_expert + FEW_EXPERTS - 1) / FEW_EXPERTS;
    const uint32_t threads = 32 * a->rows.max_rows;
    if (small)
        K_CUDA_LAUNCH_AHEAD(s, route_few<4>, blocks, threads, 0, x, p, router, group);
    else
        K_CUDA_LAUNCH_AHEAD(s, route_few<16>, blocks, threads, 0, x, p, router, group);
    return ERR_OK;
}

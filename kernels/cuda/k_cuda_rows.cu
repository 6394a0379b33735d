/* The small operations on rows: norm, quantiser, rope, sums, gather and check.
 *
 * In a decode step each lasts about as long as its loads take to arrive, so for few rows a kernel
 * asks for a row's values and for the row count at once, computes, and leaves the stores out where
 * the row does not exist: the memory of max_rows rows is always there. */
#include "k_cuda.cuh"
#include "k_cuda_norm.cuh"
#include "k_cuda_quantise.cuh"
#include "k_cuda_warp.cuh"

enum {
    FEW_ROWS = 8,   /* up to so many the row count is looked at last */
    VALUES = 8,     /* of a thread, held in registers */
    VECTORS = 4,    /* norm: warps of a block, each with its own vector */
    THREADS = 128,  /* of the operations that go element by element */
    BLOCK_WARPS = 4 /* quantiser: a warp has 256 elements */
};

static __device__ __forceinline__ bool row_absent(const struct k_cuda_rows &rows, uint32_t row)
{
    return rows.max_rows > FEW_ROWS && row >= *rows.n_rows;
}

static uint32_t pieces(uint64_t n, uint32_t size)
{
    return (uint32_t)((n + size - 1) / size);
}

/* ---- norm (A10) ------------------------------------------------------------------------------ */

struct norm_args {
    struct k_cuda_rows rows;
    const float *x, *weight;
    float *y;
    uint32_t n, groups;
    float eps;
};

/* Short vectors, as heads are: a warp each. */
static __global__ void norm_vectors(const struct norm_args a)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t vector = (uint64_t)blockIdx.x * VECTORS + threadIdx.x / 32;
    if (vector >= (uint64_t)a.rows.max_rows * a.groups)
        return;
    const uint64_t vectors = (uint64_t)*a.rows.n_rows * a.groups;
    if (a.rows.max_rows > FEW_ROWS && vector >= vectors)
        return;
    const float *x = a.x + vector * a.n;
    float v[VALUES], weight[VALUES], sum = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < VALUES; k++) {
        const uint32_t i = lane + 32 * k;
        v[k] = i < a.n ? x[i] : 0.0f; /* fma(0, 0, sum) is sum */
        weight[k] = i < a.n ? a.weight[i] : 0.0f;
    }
#pragma unroll
    for (uint32_t k = 0; k < VALUES; k++)
        sum = k_float_fma(v[k], v[k], sum);
    const float r = k_cuda_norm_factor(k_cuda_warp_tree(sum), a.n, a.eps);
#pragma unroll
    for (uint32_t k = 0; k < VALUES; k++)
        if (lane + 32 * k < a.n && vector < vectors)
            a.y[vector * a.n + lane + 32 * k] = k_float_mul(k_float_mul(v[k], r), weight[k]);
}

/* Long vectors: all warps of a block load, the first one folds. What does not fit the tile is read
 * twice. */
template <int BLOCK>
static __global__ void __launch_bounds__(BLOCK) norm_rows(const struct norm_args a)
{
    enum {
        TILE = BLOCK * VALUES
    };
    __shared__ float tile[TILE], factor;
    const uint32_t vector = blockIdx.x, t = threadIdx.x, n_rows = *a.rows.n_rows;
    if (a.rows.max_rows > FEW_ROWS && vector / a.groups >= n_rows)
        return;
    const float *x = a.x + (uint64_t)vector * a.n;
    float *y = a.y + (uint64_t)vector * a.n;
    float weight[VALUES], sum = 0.0f;
    for (uint32_t first = 0; first < a.n; first += TILE) {
        const uint32_t size = a.n - first < TILE ? a.n - first : TILE;
        if (first > 0)
            __syncthreads();
        float v[VALUES];
#pragma unroll
        for (uint32_t k = 0; k < VALUES; k++) {
            v[k] = t + BLOCK * k < size ? x[first + t + BLOCK * k] : 0.0f;
            if (first == 0)
                weight[k] = t + BLOCK * k < size ? a.weight[t + BLOCK * k] : 0.0f;
        }
#pragma unroll
        for (uint32_t k = 0; k < VALUES; k++)
            tile[t + BLOCK * k] = v[k];
        __syncthreads();
        if (t < 32)
            sum = k_cuda_norm_fold(tile, size, sum);
    }
    if (t < 32) {
        const float r = k_cuda_norm_factor(k_cuda_warp_tree(sum), a.n, a.eps);
        if (t == 0)
            factor = r;
    }
    __syncthreads();
    if (vector / a.groups >= n_rows)
        return;
    if (a.n <= TILE) {
#pragma unroll
        for (uint32_t k = 0; k < VALUES; k++)
            if (t + BLOCK * k < a.n)
                y[t + BLOCK * k] = k_float_mul(k_float_mul(tile[t + BLOCK * k], factor), weight[k]);
        return;
    }
    for (uint32_t i = t; i < a.n; i += BLOCK)
        y[i] = k_float_mul(k_float_mul(x[i], factor), a.weight[i]);
}

extern "C" enum err_code k_cuda_norm(const struct k_norm *a, struct k_stream *s)
{
    struct norm_args args;
    args.rows = k_cuda_rows_of(&a->rows);
    args.x = (const float *)k_cuda_at(a->x);
    args.weight = (const float *)k_cuda_at(a->weight);
    args.y = (float *)k_cuda_at(a->y);
    args.n = a->n;
    args.groups = a->groups;
    args.eps = a->eps;
    const uint64_t vectors = (uint64_t)a->rows.max_rows * a->groups;
    if (a->n <= 32 * VALUES)
        K_CUDA_LAUNCH(s, norm_vectors, pieces(vectors, VECTORS), 32 * VECTORS, 0, args);
    else if (a->n <= 256 * VALUES)
        K_CUDA_LAUNCH(s, norm_rows<256>, (uint32_t)vectors, 256, 0, args);
    else
        K_CUDA_LAUNCH(s, norm_rows<1024>, (uint32_t)vectors, 1024, 0, args);
    return ERR_OK;
}

/* ---- quantiser (A4) -------------------------------------------------------------------------- */

/* A warp takes 256 values of a row, a lane eight of them, and makes each form that is asked for. */
static __global__ void quantise_rows(const struct k_cuda_rows rows, const float *x, uint8_t *q32,
                                     uint8_t *q256, uint32_t n)
{
    const uint32_t row = blockIdx.x, lane = threadIdx.x % 32;
    const uint32_t block = blockIdx.y * BLOCK_WARPS + threadIdx.x / 32,
                   first = block * 256 + lane * 8;
    k_cuda_await();
    k_cuda_release();
    if (block * 256 >= n || row_absent(rows, row))
        return;
    float v[VALUES] = {0.0f};
    if (first < n) {
        const float4 *from = (const float4 *)(const void *)(x + (uint64_t)row * n + first);
        const float4 low = from[0], high = from[1];
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    }
    const bool present = row < *rows.n_rows && first < n;
    const bool finite = k_cuda_quantise_block(
        v, q32 == NULL ? NULL : q32 + row * k_cuda_act_stride(K_FORM_Q32, n),
        q256 == NULL ? NULL : q256 + row * k_cuda_act_stride(K_FORM_Q256, n), n, block, present);
    if (present && !finite)
        rows.faults[row] = 1;
}

extern "C" enum err_code k_cuda_quantise(const struct k_quantise *a, struct k_stream *s)
{
    uint8_t *q32 = (uint8_t *)k_cuda_at(a->act.q32), *q256 = (uint8_t *)k_cuda_at(a->act.q256);
    if (q32 == NULL && q256 == NULL)
        return ERR_OK;
    K_CUDA_LAUNCH_AHEAD(s, quantise_rows,
                        dim3(a->rows.max_rows, pieces(a->act.n, 256 * BLOCK_WARPS)),
                        32 * BLOCK_WARPS, 0, k_cuda_rows_of(&a->rows),
                        (const float *)k_cuda_at(a->act.f32), q32, q256, a->act.n);
    return ERR_OK;
}

/* ---- rope (A15) ------------------------------------------------------------------------------ */

static __global__ void rope_pairs(const struct k_cuda_rows rows, float *x, const float2 *table,
                                  uint32_t heads, uint32_t head_dim, uint32_t half)
{
    const uint32_t row = blockIdx.x, pair = blockIdx.y * THREADS + threadIdx.x;
    if (pair >= heads * half)
        return;
    const uint32_t i = pair % half;
    float *v = x + ((uint64_t)row * heads + pair / half) * head_dim + i;
    const uint32_t n_rows = *rows.n_rows, position = rows.position[row];
    const float x0 = v[0], x1 = v[half];
    if (row >= n_rows)
        return;
    const float2 turn = table[(uint64_t)position * half + i];
    v[0] = k_float_fma(x0, turn.x, -k_float_mul(x1, turn.y));
    v[half] = k_float_fma(x1, turn.x, k_float_mul(x0, turn.y));
}

extern "C" enum err_code k_cuda_rope(const struct k_rope *a, struct k_stream *s)
{
    const uint32_t half = a->rope_dim / 2;
    K_CUDA_LAUNCH(s, rope_pairs, dim3(a->rows.max_rows, pieces(a->heads * half, THREADS)), THREADS,
                  0, k_cuda_rows_of(&a->rows), (float *)k_cuda_at(a->x),
                  (const float2 *)k_cuda_at(a->table), a->heads, a->head_dim, half);
    return ERR_OK;
}

/* ---- sums (A14, A16) ------------------------------------------------------------------------- */

/* Four values a thread, over all rows at once. */
static __global__ void add_flat(const struct k_cuda_rows rows, float *x, const float *y, uint32_t n)
{
    const uint64_t i = 4 * ((uint64_t)blockIdx.x * THREADS + threadIdx.x);
    if (i >= (uint64_t)rows.max_rows * n)
        return;
    const uint64_t end = (uint64_t)*rows.n_rows * n;
    if (rows.max_rows > FEW_ROWS && i >= end)
        return;
    if (i + 4 <= (uint64_t)rows.max_rows * n) {
        float4 *at = (float4 *)(void *)(x + i), v = *at;
        const float4 w = *(const float4 *)(const void *)(y + i);
        v.x = k_float_add(v.x, w.x);
        v.y = k_float_add(v.y, w.y);
        v.z = k_float_add(v.z, w.z);
        v.w = k_float_add(v.w, w.w);
        if (i + 4 <= end) {
            *at = v;
            return;
        }
    }
    for (uint64_t k = i; k < i + 4 && k < end; k++)
        x[k] = k_float_add(x[k], y[k]);
}

extern "C" enum err_code k_cuda_add(const struct k_add *a, struct k_stream *s)
{
    K_CUDA_LAUNCH(s, add_flat, pieces((uint64_t)a->rows.max_rows * a->n, 4 * THREADS), THREADS, 0,
                  k_cuda_rows_of(&a->rows), (float *)k_cuda_at(a->x),
                  (const float *)k_cuda_at(a->y), a->n);
    return ERR_OK;
}

static __global__ void moe_sum_rows(const struct k_cuda_rows rows, const float *weights,
                                    const float *out, float *x, uint32_t n, uint32_t n_used)
{
    const uint32_t row = blockIdx.x, i = blockIdx.y * THREADS + threadIdx.x;
    if (i >= n || row_absent(rows, row))
        return;
    const uint32_t n_rows = *rows.n_rows;
    const uint64_t pair = (uint64_t)row * n_used, at = (uint64_t)row * n + i;
    const float residual = x[at];
    float y = 0.0f;
#pragma unroll 8
    for (uint32_t k = 0; k < n_used; k++)
        y = k_float_fma(weights[pair + k], out[(pair + k) * n + i], y);
    if (row < n_rows)
        x[at] = k_float_add(residual, y);
}

extern "C" enum err_code k_cuda_moe_sum(const struct k_moe_sum *a, struct k_stream *s)
{
    K_CUDA_LAUNCH(s, moe_sum_rows, dim3(a->rows.max_rows, pieces(a->n, THREADS)), THREADS, 0,
                  k_cuda_rows_of(&a->rows), (const float *)k_cuda_at(a->weights),
                  (const float *)k_cuda_at(a->out), (float *)k_cuda_at(a->x), a->n, a->n_used);
    return ERR_OK;
}

/* ---- gather, check --------------------------------------------------------------------------- */

static __global__ void gather_rows(const struct k_cuda_rows rows, const struct k_cuda_rows to_rows,
                                   const uint32_t *index, const float *x, float *y, uint32_t width)
{
    const uint32_t to = blockIdx.x, i = blockIdx.y * THREADS + threadIdx.x;
    const uint32_t count = *to_rows.n_rows, row = index[to];
    if (to >= count)
        return;
    if (i < width)
        y[(uint64_t)to * width + i] = x[(uint64_t)row * width + i];
    if (i == 0 && rows.faults[row] != 0)
        to_rows.faults[to] = 1;
}

extern "C" enum err_code k_cuda_gather(const struct k_gather *a, struct k_stream *s)
{
    K_CUDA_LAUNCH(s, gather_rows, dim3(a->to_rows.max_rows, pieces(a->width, THREADS)), THREADS, 0,
                  k_cuda_rows_of(&a->rows), k_cuda_rows_of(&a->to_rows),
                  (const uint32_t *)k_cuda_at(a->index), (const float *)k_cuda_at(a->x),
                  (float *)k_cuda_at(a->y), a->width);
    return ERR_OK;
}

static __global__ void check_rows(const struct k_cuda_rows rows, const float *x, uint32_t n)
{
    const uint32_t row = blockIdx.x, first = blockIdx.y * THREADS * VALUES + threadIdx.x;
    if (row_absent(rows, row))
        return;
    bool finite = true;
#pragma unroll
    for (uint32_t k = 0; k < VALUES; k++)
        if (first + k * THREADS < n)
            finite &= k_float_finite(x[(uint64_t)row * n + first + k * THREADS]);
    if (!finite && row < *rows.n_rows)
        rows.faults[row] = 1;
}

extern "C" enum err_code k_cuda_check(const struct k_check *a, struct k_stream *s)
{
    K_CUDA_LAUNCH(s, check_rows, dim3(a->rows.max_rows, pieces(a->n, THREADS * VALUES)), THREADS, 0,
                  k_cuda_rows_of(&a->rows), (const float *)k_cuda_at(a->x), a->n);
    return ERR_OK;
}

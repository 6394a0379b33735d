/* Products of weights in the file's order: F32, F16 and BF16 (A8), and quantised shapes that do not
 * fill tiles (k_cuda_tile_arranged). A warp computes one output for up to COLUMNS columns; every
 * lane gets the results. */
#ifndef ISLET_K_CUDA_PLAIN_CUH
#define ISLET_K_CUDA_PLAIN_CUH

#include "k_cuda.cuh"
#include "k_cuda_tile.h"
#include "k_cuda_warp.cuh"

enum {
    K_CUDA_PLAIN_WARPS = 8, /* of a block */
    K_CUDA_PLAIN_THREADS = 32 * K_CUDA_PLAIN_WARPS
};

/* ---- floats (A8): lane l is lane l of the rule ----------------------------------------------- */

template <enum k_format F>
static __device__ __forceinline__ float k_cuda_plain_weight(const uint8_t *w, uint32_t i)
{
    if (F == K_F32)
        return __ldg((const float *)(const void *)w + i);
    const uint16_t half = __ldg((const uint16_t *)(const void *)w + i);
    return F == K_F16 ? k_cuda_warp_of_f16(half) : k_float_of_bf16(half);
}

/* Elements first, first + 32, ... of N rounds. */
template <enum k_format F, int COLUMNS, int N, typename Row>
static __device__ __forceinline__ void k_cuda_plain_rounds(const uint8_t *w, uint32_t first,
                                                           uint32_t count, Row row,
                                                           float (&a)[COLUMNS])
{
    float v[N];
#pragma unroll
    for (int k = 0; k < N; k++)
        v[k] = k_cuda_plain_weight<F>(w, first + 32 * k);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        if (c >= count)
            continue;
        const float *x = (const float *)(const void *)row(c) + first;
#pragma unroll
        for (int k = 0; k < N; k++)
            a[c] = __fmaf_rn(v[k], __ldg(x + 32 * k), a[c]);
    }
}

template <enum k_format F, int COLUMNS, typename Row>
static __device__ __forceinline__ void k_cuda_plain_float(const uint8_t *w, uint32_t n,
                                                          uint32_t count, Row row,
                                                          float (&ret)[COLUMNS])
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t i = lane;
    for (int c = 0; c < COLUMNS; c++)
        ret[c] = 0.0f;
    for (; i - lane + 32 * 16 <= n; i += 32 * 16)
        k_cuda_plain_rounds<F, COLUMNS, 16>(w, i, count, row, ret);
    for (; i < n; i += 32)
        k_cuda_plain_rounds<F, COLUMNS, 1>(w, i, count, row, ret);
    for (int c = 0; c < COLUMNS; c++)
        ret[c] = k_cuda_warp_tree(ret[c]);
}

/* ---- quantised (A5, A6): a lane has a block's t, all fold in block order --------------------- */

/* Four bytes of which only two are aligned. */
static __device__ __forceinline__ int k_cuda_plain_word(const uint8_t *p)
{
    const uint16_t *h = (const uint16_t *)(const void *)p;
    return (int)((uint32_t)h[0] | (uint32_t)h[1] << 16);
}

static __device__ __forceinline__ float k_cuda_plain_half(const uint8_t *p)
{
    return k_cuda_warp_of_f16(*(const uint16_t *)(const void *)p);
}

template <enum k_format F>
static __device__ __forceinline__ float k_cuda_plain_block32(const uint8_t *block, const int8_t *q,
                                                             const int16_t *sum)
{
    const int *x = (const int *)(const void *)q;
    int s = 0;
    if (F == K_Q8_0) {
        for (int i = 0; i < 8; i++)
            s = __dp4a(k_cuda_plain_word(block + 2 + 4 * i), x[i], s);
    } else {
        for (int i = 0; i < 4; i++) {
            const int v = k_cuda_plain_word(block + 2 + 4 * i);
            s = __dp4a(v & 0x0f0f0f0f, x[i], s);
            s = __dp4a(v >> 4 & 0x0f0f0f0f, x[i + 4], s);
        }
        s -= 8 * sum[0];
    }
    return __fmul_rn(k_cuda_plain_half(block), __int2float_rn(s));
}

/* Sum of 16 weights from i on times q's. */
template <enum k_format F>
static __device__ __forceinline__ int k_cuda_plain_dot16(const uint8_t *block, const int8_t *q,
                                                         uint32_t i)
{
    int s = 0;
    for (uint32_t k = i; k < i + 16; k++)
        s += k_cuda_tile_file_weight(F, block, k) * q[k];
    return s;
}

static __device__ __forceinline__ float k_cuda_plain_q6_k(const uint8_t *block, const int8_t *q)
{
    int s = 0;
    for (uint32_t j = 0; j < 16; j++)
        s += (int8_t)block[192 + j] * k_cuda_plain_dot16<K_Q6_K>(block, q, 16 * j);
    return __fmul_rn(k_cuda_plain_half(block + 208), __int2float_rn(s));
}

template <enum k_format F>
static __device__ __forceinline__ float k_cuda_plain_with_mins(const uint8_t *block,
                                                               const int8_t *q, const int16_t *sums)
{
    int s = 0, m = 0;
    for (uint32_t j = 0; j < 8; j++) {
        uint32_t scale, min;
        k_cuda_tile_scale_min(block + 4, j, &scale, &min);
        s += (int)scale * (k_cuda_plain_dot16<F>(block, q, 32 * j) +
                           k_cuda_plain_dot16<F>(block, q, 32 * j + 16));
        m += (int)min * sums[j];
    }
    const float minus = __fmul_rn(k_cuda_plain_half(block + 2), __int2float_rn(m));
    return __fmaf_rn(k_cuda_plain_half(block), __int2float_rn(s), -minus);
}

template <enum k_format F>
static __device__ __forceinline__ float k_cuda_plain_block(const uint8_t *block, const int8_t *q,
                                                           const int16_t *sums)
{
    if constexpr (F == K_Q8_0 || F == K_Q4_0)
        return k_cuda_plain_block32<F>(block, q, sums);
    else if constexpr (F == K_Q6_K)
        return k_cuda_plain_q6_k(block, q);
    else
        return k_cuda_plain_with_mins<F>(block, q, sums);
}

template <enum k_format F, int COLUMNS, typename Row>
static __device__ __forceinline__ void k_cuda_plain_blocks(const uint8_t *w, uint32_t n,
                                                           uint32_t count, Row row,
                                                           float (&ret)[COLUMNS])
{
    constexpr bool small = F == K_Q8_0 || F == K_Q4_0;
    constexpr enum k_form form = small ? K_FORM_Q32 : K_FORM_Q256;
    constexpr uint32_t size = small ? 32 : 256;
    const uint32_t lane = threadIdx.x % 32, blocks = n / size;
    const uint32_t bytes = k_cuda_tile_bytes(F) / K_CUDA_TILE_OUTPUTS / (256 / size);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
        ret[c] = 0.0f;
    for (uint32_t first = 0; first < blocks; first += 32)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            if (c >= count)
                continue;
            uint8_t *x = (uint8_t *)(uintptr_t)row(c);
            const uint32_t b = first + lane;
            const int16_t *sums = k_cuda_act_sum(form, x, n) + b * (size / 32);
            float t = 0.0f, dx = 0.0f;
            if (b < blocks) {
                const uint8_t *block = w + (uint64_t)b * bytes;
                const int8_t *q = k_cuda_act_q(x) + b * size;
                t = k_cuda_plain_block<F>(block, q, sums);
                dx = k_cuda_act_dx(x, n)[b];
            }
            for (uint32_t i = 0; i < min(blocks - first, 32u); i++)
                ret[c] = __fmaf_rn(__shfl_sync(K_CUDA_WARP_ALL, dx, i),
                                   __shfl_sync(K_CUDA_WARP_ALL, t, i), ret[c]);
        }
}

/* ret[c] = w . column c for c < count (the same in all lanes); row(c): the column's row in the form
 * that F reads. Called by whole warps. */
template <enum k_format F, int COLUMNS, typename Row>
static __device__ __forceinline__ void k_cuda_plain(const uint8_t *w, uint32_t n, uint32_t count,
                                                    Row row, float (&ret)[COLUMNS])
{
    if constexpr (F == K_F32 || F == K_F16 || F == K_BF16)
        k_cuda_plain_float<F, COLUMNS>(w, n, count, row, ret);
    else
        k_cuda_plain_blocks<F, COLUMNS>(w, n, count, row, ret);
}

#endif

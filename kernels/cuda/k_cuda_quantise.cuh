/* The activation quantiser (A4) of a warp: 256 values of a row, eight next to each other a lane,
 * into the forms of k_cuda_act.h. */
#ifndef ISLET_K_CUDA_QUANTISE_CUH
#define ISLET_K_CUDA_QUANTISE_CUH

#include "k_cuda_act.h"
#include "k_cuda_warp.cuh"

enum {
    K_CUDA_QUANTISE_VALUES = 8 /* of a lane */
};

/* Where a block of 256 goes: 256 q's, 8 sums of 32, and 1 (Q256) or 8 (Q32) scales. */
struct k_cuda_quantise_to {
    int8_t *q;
    int16_t *sum;
    float *dx;
};

/* The lane's values scaled to the block's largest magnitude m (as bits); a lane beyond the row
 * stores nothing. */
template <enum k_form FORM>
static __device__ __forceinline__ void k_cuda_quantise_put(const float (&v)[8], uint32_t m,
                                                           const struct k_cuda_quantise_to &to,
                                                           bool present)
{
    const uint32_t lane = threadIdx.x % 32;
    uint2 q = make_uint2(0, 0);
    float dx = 0.0f;
    int32_t sum = 0;
    if (m < 0x7f800000u && m >= 0x0d800000u) { /* finite, not below 2^-100 */
        const float largest = k_float_of_bits(m), inv = k_float_div(127.0f, largest);
        uint32_t integer[K_CUDA_QUANTISE_VALUES];
#pragma unroll
        for (int i = 0; i < K_CUDA_QUANTISE_VALUES; i++) {
            const int32_t rounded = k_float_rint(k_float_mul(v[i], inv));
            sum += rounded;
            integer[i] = (uint32_t)rounded;
        }
        q.x = __byte_perm(__byte_perm(integer[0], integer[1], 0x0040),
                          __byte_perm(integer[2], integer[3], 0x0040), 0x5410);
        q.y = __byte_perm(__byte_perm(integer[4], integer[5], 0x0040),
                          __byte_perm(integer[6], integer[7], 0x0040), 0x5410);
        dx = k_float_div(largest, 127.0f);
    }
    sum += __shfl_xor_sync(K_CUDA_WARP_ALL, sum, 1);
    sum += __shfl_xor_sync(K_CUDA_WARP_ALL, sum, 2);
    if (!present)
        return;
    *(uint2 *)(void *)(to.q + lane * 8) = q;
    if (lane % 4 == 0)
        to.sum[lane / 4] = (int16_t)sum;
    if (FORM == K_FORM_Q32 && lane % 4 == 0)
        to.dx[lane / 4] = dx;
    if (FORM == K_FORM_Q256 && lane == 0)
        to.dx[0] = dx;
}

/* The same into block `block` of a row of n. */
template <enum k_form FORM>
static __device__ __forceinline__ void k_cuda_quantise_store(const float (&v)[8], uint32_t m,
                                                             uint8_t *row, uint32_t n,
                                                             uint32_t block, bool present)
{
    const struct k_cuda_quantise_to to = {
        k_cuda_act_q(row) + (size_t)block * 256, k_cuda_act_sum(FORM, row, n) + block * 8,
        k_cuda_act_dx(row, n) + block * (FORM == K_FORM_Q32 ? 8 : 1)};
    k_cuda_quantise_put<FORM>(v, m, to, present);
}

/* Largest magnitude, as bits, of the lane's values and of the four lanes' that have a block of
 * 32. */
static __device__ __forceinline__ uint32_t k_cuda_quantise_most(const float (&v)[8])
{
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < K_CUDA_QUANTISE_VALUES; i++)
        m = max(m, k_float_bits(v[i]) & 0x7fffffffu);
    return m;
}

static __device__ __forceinline__ uint32_t k_cuda_quantise_most_of_32(uint32_t m)
{
    m = max(m, __shfl_xor_sync(K_CUDA_WARP_ALL, m, 1));
    return max(m, __shfl_xor_sync(K_CUDA_WARP_ALL, m, 2));
}

/* Makes the forms that are asked for (row32, row256: the row in each, or NULL) of block `block`; v
 * is zero in a lane beyond the row. False: one of the lane's values is not finite. Called by whole
 * warps. */
static __device__ __forceinline__ bool k_cuda_quantise_block(const float (&v)[8], uint8_t *row32,
                                                             uint8_t *row256, uint32_t n,
                                                             uint32_t block, bool present)
{
    const uint32_t m = k_cuda_quantise_most(v);
    if (row32 != NULL)
        k_cuda_quantise_store<K_FORM_Q32>(v, k_cuda_quantise_most_of_32(m), row32, n, block,
                                          present);
    if (row256 != NULL)
        k_cuda_quantise_store<K_FORM_Q256>(v, __reduce_max_sync(K_CUDA_WARP_ALL, m), row256, n,
                                           block, present);
    return m < 0x7f800000u;
}

/* One form of 256 values that are all there. False as above. */
template <enum k_form FORM>
static __device__ __forceinline__ bool k_cuda_quantise_one(const float (&v)[8],
                                                           const struct k_cuda_quantise_to &to)
{
    const uint32_t m = k_cuda_quantise_most(v);
    k_cuda_quantise_put<FORM>(v,
                              FORM == K_FORM_Q32 ? k_cuda_quantise_most_of_32(m)
                                                 : __reduce_max_sync(K_CUDA_WARP_ALL, m),
                              to, true);
    return m < 0x7f800000u;
}

#endif

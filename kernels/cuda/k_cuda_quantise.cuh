/* The activation quantiser (A4) of a warp: 256 values of a row, eight next to each other a lane, into
 * the forms of k_cuda_act.h. */
#ifndef ISLET_K_CUDA_QUANTISE_CUH
#define ISLET_K_CUDA_QUANTISE_CUH

#include "k_cuda_act.h"
#include "k_cuda_warp.cuh"

enum {
    K_CUDA_QUANTISE_VALUES = 8 /* of a lane */
};

/* The lane's values scaled to the block's largest magnitude m (as bits): stores q's, sums and dx of
 * block `block` (256 values) of a row of n; a lane beyond the row stores nothing. */
template <enum k_form FORM>
static __device__ __forceinline__ void k_cuda_quantise_store(const float (&v)[8], uint32_t m,
                                                             uint8_t *row, uint32_t n,
                                                             uint32_t block, bool present)
{
    const uint32_t lane = threadIdx.x % 32, part = block * 8 + lane / 4;
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
    *(uint2 *)(void *)(k_cuda_act_q(row) + (size_t)block * 256 + lane * 8) = q;
    if (lane % 4 == 0)
        k_cuda_act_sum(FORM, row, n)[part] = (int16_t)sum;
    if (FORM == K_FORM_Q32 && lane % 4 == 0)
        k_cuda_act_dx(row, n)[part] = dx;
    if (FORM == K_FORM_Q256 && lane == 0)
        k_cuda_act_dx(row, n)[block] = dx;
}

/* Makes the forms that are asked for (row32, row256: the row in each, or NULL) of block `block`; v
 * is zero in a lane beyond the row. False: one of the lane's values is not finite. Called by whole
 * warps. */
static __device__ __forceinline__ bool k_cuda_quantise_block(const float (&v)[8], uint8_t *row32,
                                                             uint8_t *row256, uint32_t n,
                                                             uint32_t block, bool present)
{
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < K_CUDA_QUANTISE_VALUES; i++)
        m = max(m, k_float_bits(v[i]) & 0x7fffffffu);
    if (row32 != NULL) {
        uint32_t m32 = max(m, __shfl_xor_sync(K_CUDA_WARP_ALL, m, 1));
        m32 = max(m32, __shfl_xor_sync(K_CUDA_WARP_ALL, m32, 2));
        k_cuda_quantise_store<K_FORM_Q32>(v, m32, row32, n, block, present);
    }
    if (row256 != NULL)
        k_cuda_quantise_store<K_FORM_Q256>(v, __reduce_max_sync(K_CUDA_WARP_ALL, m), row256, n,
                                           block, present);
    return m < 0x7f800000u;
}

#endif

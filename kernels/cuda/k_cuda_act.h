/* A quantised activation row (A4) as the CUDA kernels keep it; plain C, so that the checker reads
 * it too. Row of n elements, n a multiple of the form's block B (32 or 256), in this order:
 *   int8  q[n]          at 0; rows begin at multiples of 64 bytes, so 16-byte loads are whole
 *   float dx[n / B]     at n, a multiple of 32
 *   int16 sum[n / 32]   sums of 32 q's each, both forms, at the next multiple of 16
 * Sums of 16 (Q6_K) are made from q where they are needed. The stride is a multiple of 64. */
#ifndef ISLET_K_CUDA_ACT_H
#define ISLET_K_CUDA_ACT_H

#include <stdint.h>

#include "kernels.h"

#if defined(__CUDACC__)
#define K_CUDA_ACT_INLINE static __host__ __device__ __forceinline__
#else
#define K_CUDA_ACT_INLINE static inline
#endif

/* n / B of the form. */
K_CUDA_ACT_INLINE uint32_t k_cuda_act_blocks(enum k_form form, uint32_t n)
{
    return form == K_FORM_Q32 ? n / 32 : n / 256;
}

/* Byte offsets in a row. */
K_CUDA_ACT_INLINE uint32_t k_cuda_act_dx_offset(uint32_t n)
{
    return n;
}

K_CUDA_ACT_INLINE uint32_t k_cuda_act_sum_offset(enum k_form form, uint32_t n)
{
    return n + (k_cuda_act_blocks(form, n) * 4 + 15) / 16 * 16;
}

/* Bytes of a row; K_FORM_F32: n floats without padding, as k_act.f32 has them. */
K_CUDA_ACT_INLINE uint64_t k_cuda_act_stride(enum k_form form, uint32_t n)
{
    if (form == K_FORM_F32)
        return (uint64_t)n * 4;
    return ((uint64_t)k_cuda_act_sum_offset(form, n) + n / 32 * 2 + 63) / 64 * 64;
}

K_CUDA_ACT_INLINE int8_t *k_cuda_act_q(void *row)
{
    return (int8_t *)row;
}

K_CUDA_ACT_INLINE float *k_cuda_act_dx(void *row, uint32_t n)
{
    return (float *)(void *)((uint8_t *)row + k_cuda_act_dx_offset(n));
}

K_CUDA_ACT_INLINE int16_t *k_cuda_act_sum(enum k_form form, void *row, uint32_t n)
{
    return (int16_t *)(void *)((uint8_t *)row + k_cuda_act_sum_offset(form, n));
}

#endif

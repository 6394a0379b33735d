/* RMS norm (A10): what the kernel of the operation and those it is joined with share. */
#ifndef ISLET_K_CUDA_NORM_CUH
#define ISLET_K_CUDA_NORM_CUH

#include "k_cuda_warp.cuh"

/* sum: of the squares. */
static __device__ __forceinline__ float k_cuda_norm_factor(float sum, uint32_t n, float eps)
{
    const float mean = k_float_div(sum, (float)n);
    return k_float_div(1.0f, __fsqrt_rn(k_float_add(mean, eps)));
}

/* The lane's part of the sum of squares goes on over `n` values at tile; called by the first
 * warp. */
static __device__ __forceinline__ float k_cuda_norm_fold(const float *tile, uint32_t n, float sum)
{
#pragma unroll 32
    for (uint32_t i = threadIdx.x; i < n; i += 32)
        sum = k_float_fma(tile[i], tile[i], sum);
    return sum;
}

#endif

/* What the kernels for rows, routing and attention share: sums and maxima over the lanes of a warp
 * in the order of ARITHMETIC.md, exact conversions in one or two instructions, and copies to shared
 * memory. Whole warps call them. */
#ifndef ISLET_K_CUDA_WARP_CUH
#define ISLET_K_CUDA_WARP_CUH

#include <cuda_fp16.h>
#include <stdint.h>

#include "k_float.h"

#define K_CUDA_WARP_INLINE static __device__ __forceinline__

#define K_CUDA_WARP_ALL 0xffffffffu /* mask of all lanes */

/* tree32 over the lanes (A8), in every lane: a + b = b + a, so the exchange may be symmetric. */
K_CUDA_WARP_INLINE float k_cuda_warp_tree(float a)
{
    for (int o = 16; o >= 1; o >>= 1)
        a = k_float_add(a, __shfl_xor_sync(K_CUDA_WARP_ALL, a, o));
    return a;
}

/* Bits of a finite float as an unsigned number of the same order; 0 and -0 are equal. Above 0. */
K_CUDA_WARP_INLINE uint32_t k_cuda_warp_key(float x)
{
    const uint32_t u = x == 0.0f ? 0u : k_float_bits(x);
    return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}

K_CUDA_WARP_INLINE float k_cuda_warp_of_key(uint32_t key)
{
    return k_float_of_bits((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

K_CUDA_WARP_INLINE float k_cuda_warp_of_f16(uint32_t h)
{
    return __half2float(__ushort_as_half((unsigned short)h));
}

/* The two f16 of a word. */
K_CUDA_WARP_INLINE float2 k_cuda_warp_of_f16x2(uint32_t w)
{
    return make_float2(k_cuda_warp_of_f16(w & 0xffffu), k_cuda_warp_of_f16(w >> 16));
}

K_CUDA_WARP_INLINE void k_cuda_warp_of_f16x4(uint2 w, float ret[4])
{
    const float2 low = k_cuda_warp_of_f16x2(w.x), high = k_cuda_warp_of_f16x2(w.y);
    ret[0] = low.x, ret[1] = low.y, ret[2] = high.x, ret[3] = high.y;
}

/* Nearest even; a NaN as k_float_to_f16 writes it. */
K_CUDA_WARP_INLINE uint16_t k_cuda_warp_to_f16(float x)
{
    const uint32_t u = k_float_bits(x);
    return (u & 0x7fffffffu) > 0x7f800000u ? (uint16_t)((u >> 16 & 0x8000u) | 0x7e00u)
                                           : __half_as_ushort(__float2half_rn(x));
}

/* A11 without branches: k_float_exp32's, which become two jumps a call. */
K_CUDA_WARP_INLINE float k_cuda_warp_exp(float x)
{
    const float low = x > 88.0f ? 88.0f : x;
    const float z = k_float_fma(low, 1.44269502f, 12582912.0f);
    const float n = k_float_sub(z, 12582912.0f);
    float r = k_float_fma(n, -0.693359375f, low);
    r = k_float_fma(n, 0.00021219444f, r);
    float q = k_float_fma(0x1.6a2410p-10f, r, 0x1.1239f8p-7f);
    q = k_float_fma(q, r, 0x1.5558f2p-5f);
    q = k_float_fma(q, r, 0x1.555492p-3f);
    q = k_float_fma(q, r, 0x1.fffffcp-2f);
    const float y = k_float_add(1.0f, k_float_fma(k_float_mul(r, r), q, r));
    const uint32_t shift = (k_float_bits(z) - 0x4b400000u) << 23;
    return x >= -87.0f ? k_float_of_bits(k_float_bits(y) + shift) : 0.0f;
}

/* f32(i) for |i| < 2^22, without the slow conversion unit. */
K_CUDA_WARP_INLINE float k_cuda_warp_of_int(int32_t i)
{
    return k_float_sub(k_float_of_bits(0x4b400000u + (uint32_t)i), 12582912.0f);
}

/* The four int8 of a word, likewise. */
K_CUDA_WARP_INLINE void k_cuda_warp_of_bytes(uint32_t word, float ret[4])
{
    const uint32_t flipped = word ^ 0x80808080u;
    for (uint32_t i = 0; i < 4; i++) /* 2^23 + 128 + the byte */
        ret[i] = k_float_sub(k_float_of_bits(__byte_perm(flipped, 0x4b000000u, 0x7440u + i)),
                             8388736.0f);
}

/* Starts a copy of 16 bytes into shared memory; k_cuda_warp_copied waits for this thread's. */
K_CUDA_WARP_INLINE void k_cuda_warp_copy16(void *shared, const void *global)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(global)
                 : "memory");
}

K_CUDA_WARP_INLINE void k_cuda_warp_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most LATER groups committed by this thread are under way. */
template <int LATER> K_CUDA_WARP_INLINE void k_cuda_warp_copied(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

#endif

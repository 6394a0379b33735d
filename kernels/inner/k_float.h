/* The only ordered sums and the functions on the data path (A1, A8, A11, A12). C and CUDA alike:
 * plain binary32 operations and fmaf, nothing else. Everything here must be compiled without
 * contraction; on a GPU each operation is the intrinsic that rounds to nearest, so that no flag of
 * the compiler can fuse or loosen it. */
#ifndef ISLET_K_FLOAT_H
#define ISLET_K_FLOAT_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define K_FLOAT_INLINE static __host__ __device__ __forceinline__
#else
#define K_FLOAT_INLINE static inline
#endif

K_FLOAT_INLINE uint32_t k_float_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

K_FLOAT_INLINE float k_float_of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

#if defined(__CUDA_ARCH__)
K_FLOAT_INLINE float k_float_fma(float a, float b, float c)
{
    return __fmaf_rn(a, b, c);
}

K_FLOAT_INLINE float k_float_mul(float a, float b)
{
    return __fmul_rn(a, b);
}

K_FLOAT_INLINE float k_float_add(float a, float b)
{
    return __fadd_rn(a, b);
}

K_FLOAT_INLINE float k_float_sub(float a, float b)
{
    return __fsub_rn(a, b);
}

K_FLOAT_INLINE float k_float_div(float a, float b)
{
    return __fdiv_rn(a, b);
}
#else
K_FLOAT_INLINE float k_float_fma(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}

K_FLOAT_INLINE float k_float_mul(float a, float b)
{
    return a * b;
}

K_FLOAT_INLINE float k_float_add(float a, float b)
{
    return a + b;
}

K_FLOAT_INLINE float k_float_sub(float a, float b)
{
    return a - b;
}

K_FLOAT_INLINE float k_float_div(float a, float b)
{
    return a / b;
}
#endif

K_FLOAT_INLINE bool k_float_finite(float x)
{
    return (k_float_bits(x) & 0x7fffffffu) < 0x7f800000u;
}

/* f16 -> f32, exact (subnormals, infinities and NaN included). */
K_FLOAT_INLINE float k_float_of_f16(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 31u;
    uint32_t fraction = h & 0x3ffu;
    if (exponent == 31)
        return k_float_of_bits(sign | 0x7f800000u | (fraction << 13));
    if (exponent != 0)
        return k_float_of_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
    /* subnormal: fraction * 2^-24, exact in f32 */
    const float magnitude = k_float_mul((float)fraction, 0x1p-24f);
    return k_float_of_bits(sign | k_float_bits(magnitude));
}

/* f32 -> f16, nearest even; magnitudes from 65520 up give infinity. */
K_FLOAT_INLINE uint16_t k_float_to_f16(float x)
{
    const uint32_t u = k_float_bits(x);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (a >= 0x477ff000u) /* 65520 */
        return (uint16_t)(sign | 0x7c00u);
    if (a < 0x38800000u) { /* below 2^-14: the result is a multiple of 2^-24 */
        const float scaled = k_float_add(k_float_of_bits(a), 0x1p-1f); /* ulp of [0.5, 1): 2^-24 */
        return (uint16_t)(sign | (k_float_bits(scaled) - 0x3f000000u));
    }
    const uint32_t odd = (a >> 13) & 1u;
    return (uint16_t)(sign | ((a - 0x38000000u + 0xfffu + odd) >> 13));
}

K_FLOAT_INLINE float k_float_of_bf16(uint16_t h)
{
    return k_float_of_bits((uint32_t)h << 16);
}

/* Nearest even, for |x| < 2^22. */
K_FLOAT_INLINE int32_t k_float_rint(float x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23 */
    return (int32_t)(k_float_bits(k_float_add(x, magic)) - k_float_bits(magic));
}

/* A8: folds 32 lanes; a is destroyed. */
K_FLOAT_INLINE float k_float_tree32(float a[32])
{
    for (int o = 16; o >= 1; o >>= 1)
        for (int l = 0; l < o; l++)
            a[l] = k_float_add(a[l], a[l + o]);
    return a[0];
}

/* A11. Largest error 1.01 ulp; monotonic; results are normal or zero. */
K_FLOAT_INLINE float k_float_exp32(float x)
{
    if (!(x >= -87.0f))
        return 0.0f;
    if (x > 88.0f)
        x = 88.0f;
    const float z = k_float_fma(x, 1.44269502f, 12582912.0f);
    const float n = k_float_sub(z, 12582912.0f);
    float r = k_float_fma(n, -0.693359375f, x);
    r = k_float_fma(n, 0.00021219444f, r);
    float q = k_float_fma(0x1.6a2410p-10f, r, 0x1.1239f8p-7f);
    q = k_float_fma(q, r, 0x1.5558f2p-5f);
    q = k_float_fma(q, r, 0x1.555492p-3f);
    q = k_float_fma(q, r, 0x1.fffffcp-2f);
    const float y = k_float_add(1.0f, k_float_fma(k_float_mul(r, r), q, r));
    const uint32_t shift = (k_float_bits(z) - 0x4b400000u) << 23;
    return k_float_of_bits(k_float_bits(y) + shift);
}

/* A12: silu(g) * u. */
K_FLOAT_INLINE float k_float_swiglu(float g, float u)
{
    const float s = k_float_div(g, k_float_add(1.0f, k_float_exp32(-g)));
    return k_float_mul(s, u);
}

#endif

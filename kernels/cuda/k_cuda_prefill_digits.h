/* The integer schemes of the prefill kernels, as plain C for nvcc and gcc: products and sums taken
 * apart into digits of 8 bits, four to a word, so that the tensor core's int8 products give them
 * exactly. */
#ifndef ISLET_K_CUDA_PREFILL_DIGITS_H
#define ISLET_K_CUDA_PREFILL_DIGITS_H

#include <stdint.h>

#if defined(__CUDACC__)
#define K_PREFILL_DIGITS_INLINE static __host__ __device__ __forceinline__
#else
#define K_PREFILL_DIGITS_INLINE static inline
#endif

/* Four bytes of x (0..3) and y (4..7), lowest nibble of the selector first. */
K_PREFILL_DIGITS_INLINE uint32_t k_prefill_pick(uint32_t x, uint32_t y, uint32_t selector)
{
#if defined(__CUDA_ARCH__)
    return __byte_perm(x, y, selector);
#else
    const uint64_t both = (uint64_t)y << 32 | x;
    uint32_t word = 0;
    for (int e = 0; e < 4; e++)
        word |= ((uint32_t)(both >> (8 * (selector >> (4 * e) & 7))) & 255u) << (8 * e);
    return word;
#endif
}

/* Q4_K, Q5_K: a six-bit scale is digit 0 + 8 * digit 1, both 0..7; four scales a word. A weight of
 * 5 bits times a digit is at most 217, so four weights are multiplied at once, as uint8. */
enum {
    K_PREFILL_SCALE_BASE = 8
};
K_PREFILL_DIGITS_INLINE uint32_t k_prefill_scale_digit(uint32_t scales, int digit)
{
    return scales >> (3 * digit) & 0x07070707u;
}

/* Q6_K: 4 * weight * scale for four weights of -32..31 (`four`: 4 * weight, two's complement) is
 * low (uint8) + 256 * high (int8). */
enum {
    K_PREFILL_SIX_BASE = 256
};
K_PREFILL_DIGITS_INLINE void k_prefill_six_digits(uint32_t four, int32_t scale, uint32_t *ret_low,
                                                  uint32_t *ret_high)
{
    /* In each half of a word: 4 * (weight + 32) * scale - 128 * scale + 2^15, which is positive. */
    const uint32_t offset = 0x80008000u - 0x00800080u * (uint32_t)scale;
    const uint32_t unsigned4 = four ^ 0x80808080u;
    const uint32_t even = (unsigned4 & 0x00ff00ffu) * (uint32_t)scale + offset;
    const uint32_t odd = (unsigned4 >> 8 & 0x00ff00ffu) * (uint32_t)scale + offset;
    *ret_low = k_prefill_pick(even, odd, 0x6240);
    *ret_high = k_prefill_pick(even, odd, 0x7351) ^ 0x80808080u;
}

/* Four sums of 32 activations (int16, two a word; abs <= 4064): sum = low (0..31) + 32 * high
 * (int8). A minimum m of 6 bits times it is m * low + 8 * (4 * m) * high. */
K_PREFILL_DIGITS_INLINE uint32_t k_prefill_sum_low(uint32_t first, uint32_t second)
{
    return k_prefill_pick(first & 0x001f001fu, second & 0x001f001fu, 0x6420);
}

K_PREFILL_DIGITS_INLINE uint32_t k_prefill_sum_high(uint32_t first, uint32_t second)
{
    return k_prefill_pick(first >> 5, second >> 5, 0x6420);
}

/* The same for mma.sync: sum = low (0..63) + 64 * high (int8). */
K_PREFILL_DIGITS_INLINE uint32_t k_prefill_sum_digit(uint32_t first, uint32_t second, int digit)
{
    return digit == 0 ? k_prefill_pick(first & 0x003f003fu, second & 0x003f003fu, 0x6420)
                      : k_prefill_pick(first >> 6, second >> 6, 0x6420);
}

#endif

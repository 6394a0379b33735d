/* Weight blocks to bytes by AVX2, for the products with one row and with many. */
#ifndef ISLET_K_AVX2_UNPACK_H
#define ISLET_K_AVX2_UNPACK_H
#if defined(__AVX2__)

#include <immintrin.h>

#include "k_format.h"
#include "k_stream.h"

K_STREAM_INLINE __m256i k_avx2_load(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

K_STREAM_INLINE void k_avx2_nibbles(const uint8_t *q, __m256i w[8])
{
    const __m256i mask = _mm256_set1_epi8(15);
    K_STREAM_UNROLL
    for (int p = 0; p < 4; p++) {
        const __m256i bytes = k_avx2_load(q + 32 * p);
        w[2 * p] = _mm256_and_si256(bytes, mask);
        w[2 * p + 1] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
    }
}

K_STREAM_INLINE void k_avx2_unpack_q5_k(const uint8_t *block, __m256i w[8])
{
    const struct k_format_q5_k *b = (const void *)block;
    k_avx2_nibbles(b->q, w);
    const __m256i high = k_avx2_load(b->high), bit = _mm256_set1_epi8(16);
    K_STREAM_UNROLL
    for (int j = 0; j < 8; j++) {
        const __m256i moved =
            j < 4 ? _mm256_slli_epi16(high, 4 - j) : _mm256_srli_epi16(high, j - 4);
        w[j] = _mm256_or_si256(w[j], _mm256_and_si256(moved, bit));
    }
}

K_STREAM_INLINE void k_avx2_unpack_q6_k(const uint8_t *block, __m256i w[8])
{
    const struct k_format_q6_k *b = (const void *)block;
    const __m256i four = _mm256_set1_epi8(15), two = _mm256_set1_epi8(0x30);
    K_STREAM_UNROLL
    for (int half = 0; half < 2; half++) {
        const __m256i low0 = k_avx2_load(b->low + 64 * half);
        const __m256i low1 = k_avx2_load(b->low + 64 * half + 32);
        const __m256i high = k_avx2_load(b->high + 32 * half);
        __m256i *out = w + 4 * half;
        out[0] = _mm256_or_si256(_mm256_and_si256(low0, four),
                                 _mm256_and_si256(_mm256_slli_epi16(high, 4), two));
        out[1] = _mm256_or_si256(_mm256_and_si256(low1, four),
                                 _mm256_and_si256(_mm256_slli_epi16(high, 2), two));
        out[2] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low0, 4), four),
                                 _mm256_and_si256(high, two));
        out[3] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low1, 4), four),
                                 _mm256_and_si256(_mm256_srli_epi16(high, 2), two));
    }
}

/* 256 weights in element order, as unsigned bytes: Q4_K, Q5_K as they are, Q6_K plus 32. */
K_STREAM_INLINE void k_avx2_unpack256(enum k_format format, const uint8_t *block, __m256i w[8])
{
    if (format == K_Q4_K)
        k_avx2_nibbles(((const struct k_format_q4_k *)(const void *)block)->q, w);
    else if (format == K_Q5_K)
        k_avx2_unpack_q5_k(block, w);
    else
        k_avx2_unpack_q6_k(block, w);
}

/* 32 signed weights. */
K_STREAM_INLINE __m256i k_avx2_unpack32(enum k_format format, const uint8_t *block)
{
    if (format == K_Q8_0)
        return k_avx2_load(block + 2);
    const __m128i nibbles = _mm_loadu_si128((const __m128i *)(const void *)(block + 2));
    const __m128i mask = _mm_set1_epi8(15);
    const __m256i q = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_and_si128(nibbles, mask)),
                                              _mm_and_si128(_mm_srli_epi16(nibbles, 4), mask), 1);
    return _mm256_sub_epi8(q, _mm256_set1_epi8(8));
}

#endif
#endif

/* Weight blocks to bytes and scales by AVX-512, for the products with one row and with many. */
#ifndef ISLET_K_AVX512_UNPACK_H
#define ISLET_K_AVX512_UNPACK_H
#if defined(__AVX512VNNI__)

#include <immintrin.h>

#include "k_format.h"
#include "k_stream.h"

K_STREAM_INLINE __m512i k_avx512_join(__m256i low, __m256i high)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

K_STREAM_INLINE void k_avx512_nibbles(const uint8_t *q, __m512i w[4])
{
    const __m256i mask = _mm256_set1_epi8(15);
    K_STREAM_UNROLL
    for (int p = 0; p < 4; p++) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)(q + 32 * p));
        w[p] = k_avx512_join(_mm256_and_si256(bytes, mask),
                             _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask));
    }
}

K_STREAM_INLINE void k_avx512_unpack_q5_k(const uint8_t *block, __m512i w[4])
{
    const struct k_format_q5_k *b = (const void *)block;
    k_avx512_nibbles(b->q, w);
    const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)b->high);
    const __m512i high = k_avx512_join(bits, bits);
    K_STREAM_UNROLL
    for (int p = 0; p < 4; p++) {
        const __m512i select = k_avx512_join(_mm256_set1_epi8((char)(1 << (2 * p))),
                                             _mm256_set1_epi8((char)(2 << (2 * p))));
        w[p] = _mm512_mask_add_epi8(w[p], _mm512_test_epi8_mask(high, select), w[p],
                                    _mm512_set1_epi8(16));
    }
}

K_STREAM_INLINE void k_avx512_unpack_q6_k(const uint8_t *block, __m512i w[4])
{
    const struct k_format_q6_k *b = (const void *)block;
    K_STREAM_UNROLL
    for (int half = 0; half < 2; half++) {
        const __m512i low = _mm512_loadu_si512(b->low + 64 * half);
        const __m256i h = _mm256_loadu_si256((const __m256i *)(const void *)(b->high + 32 * half));
        const __m512i high = k_avx512_join(h, _mm256_srli_epi16(h, 2));
        const __m512i four = _mm512_set1_epi8(15), two = _mm512_set1_epi8(0x30);
        w[2 * half] = _mm512_or_si512(_mm512_and_si512(low, four),
                                      _mm512_and_si512(_mm512_slli_epi16(high, 4), two));
        w[2 * half + 1] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(low, 4), four),
                                          _mm512_and_si512(high, two));
    }
}

/* 256 weights in element order, as unsigned bytes: Q4_K, Q5_K as they are, Q6_K plus 32. */
K_STREAM_INLINE void k_avx512_unpack256(enum k_format format, const uint8_t *block, __m512i w[4])
{
    if (format == K_Q4_K)
        k_avx512_nibbles(((const struct k_format_q4_k *)(const void *)block)->q, w);
    else if (format == K_Q5_K)
        k_avx512_unpack_q5_k(block, w);
    else
        k_avx512_unpack_q6_k(block, w);
}

/* 32 weights as unsigned bytes: Q8_0 plus 128, Q4_0 plus 8. */
K_STREAM_INLINE __m256i k_avx512_unpack32(enum k_format format, const uint8_t *block)
{
    if (format == K_Q8_0)
        return _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(const void *)(block + 2)),
                                _mm256_set1_epi8((char)0x80));
    const __m128i nibbles = _mm_loadu_si128((const __m128i *)(const void *)(block + 2));
    const __m128i mask = _mm_set1_epi8(15);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_and_si128(nibbles, mask)),
                                   _mm_and_si128(_mm_srli_epi16(nibbles, 4), mask), 1);
}

#endif
#endif

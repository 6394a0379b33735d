/* Transposing add trees, for both AVX levels (B1). Included by k_<level>_matmul.c only. */
#ifndef ISLET_K_AVX_TREES_H
#define ISLET_K_AVX_TREES_H

#include <immintrin.h>
#include <stdint.h>

enum {
    LANES = 8,
    T_MAX = 8192
};

/* Sums of eight int32 vectors, lane i = sum of v[i]. */
static inline __m256i tree8(const __m256i v[8])
{
    const __m256i a =
        _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    const __m256i b =
        _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                            _mm256_permute2x128_si256(a, b, 0x31));
}

static inline __m256i tree8_128(const __m128i v[8])
{
    const __m128i a = _mm_hadd_epi32(_mm_hadd_epi32(v[0], v[1]), _mm_hadd_epi32(v[2], v[3]));
    const __m128i b = _mm_hadd_epi32(_mm_hadd_epi32(v[4], v[5]), _mm_hadd_epi32(v[6], v[7]));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}

#endif

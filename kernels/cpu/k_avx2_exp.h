/* A11 for eight values. */
#ifndef ISLET_K_AVX2_EXP_H
#define ISLET_K_AVX2_EXP_H
#if defined(__AVX2__)

#include <immintrin.h>

static inline __attribute__((always_inline)) __m256 k_avx2_exp(__m256 x)
{
    const __m256 magic = _mm256_set1_ps(12582912.0f);
    const __m256 keep = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_GE_OQ);
    x = _mm256_min_ps(x, _mm256_set1_ps(88.0f));
    const __m256 z = _mm256_fmadd_ps(x, _mm256_set1_ps(1.44269502f), magic);
    const __m256 n = _mm256_sub_ps(z, magic);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-0.693359375f), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(0.00021219444f), r);
    __m256 q = _mm256_fmadd_ps(_mm256_set1_ps(0x1.6a2410p-10f), r, _mm256_set1_ps(0x1.1239f8p-7f));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(0x1.5558f2p-5f));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(0x1.555492p-3f));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(0x1.fffffcp-2f));
    const __m256 p = _mm256_fmadd_ps(_mm256_mul_ps(r, r), q, r);
    const __m256 y = _mm256_add_ps(_mm256_set1_ps(1.0f), p);
    const __m256i shift = _mm256_slli_epi32(
        _mm256_sub_epi32(_mm256_castps_si256(z), _mm256_set1_epi32(0x4b400000)), 23);
    return _mm256_and_ps(keep,
                         _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), shift)));
}

#endif
#endif

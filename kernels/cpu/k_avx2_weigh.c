#include "k_avx2_weigh.h"

#include <immintrin.h>

#include "k_avx2_exp.h"
#include "k_float.h"
#include "kernels.h"

/* The integer below each of four numbers from 0 to 2^40. */
static __m256i whole(__m128 x)
{
    const __m256d magic = _mm256_set1_pd(0x1p52);
    const __m256d y = _mm256_round_pd(_mm256_cvtps_pd(x), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    return _mm256_xor_si256(_mm256_castpd_si256(_mm256_add_pd(y, magic)),
                            _mm256_castpd_si256(magic));
}

uint64_t k_avx2_weigh(const float *x, uint32_t n, float best, float temperature, uint64_t *ret)
{
    const __m256 top = _mm256_set1_ps(best), over = _mm256_set1_ps(temperature),
                 one = _mm256_set1_ps(K_WEIGHT_ONE);
    __m256i sum = _mm256_setzero_si256();
    uint32_t i = 0;
    for (; n - i >= 8; i += 8) {
        const __m256 z = _mm256_div_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), top), over);
        const __m256 w = _mm256_mul_ps(k_avx2_exp(z), one);
        const __m256i low = whole(_mm256_castps256_ps128(w)),
                      high = whole(_mm256_extractf128_ps(w, 1));
        _mm256_storeu_si256((__m256i *)(void *)(ret + i), low);
        _mm256_storeu_si256((__m256i *)(void *)(ret + i + 4), high);
        sum = _mm256_add_epi64(sum, _mm256_add_epi64(low, high));
    }
    uint64_t lanes[4], total = 0;
    _mm256_storeu_si256((__m256i *)(void *)lanes, sum);
    for (; i < n; i++)
        total += ret[i] = (uint64_t)(k_float_exp32((x[i] - best) / temperature) * K_WEIGHT_ONE);
    return total + lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

/* The value of the highest, then its place. */
uint32_t k_avx2_weigh_highest(const float *x, uint32_t n)
{
    __m256 m[4];
    for (int k = 0; k < 4; k++)
        m[k] = _mm256_set1_ps(x[0]);
    uint32_t i = 0;
    for (; n - i >= 32; i += 32)
        for (uint32_t k = 0; k < 4; k++) /* what is not a number gives the second */
            m[k] = _mm256_max_ps(_mm256_loadu_ps(x + i + 8 * k), m[k]);
    float lanes[8], best = x[0];
    _mm256_storeu_ps(lanes, _mm256_max_ps(_mm256_max_ps(m[0], m[1]), _mm256_max_ps(m[2], m[3])));
    for (; i < n; i++)
        best = x[i] > best ? x[i] : best;
    for (i = 0; i < 8; i++)
        best = lanes[i] > best ? lanes[i] : best;
    const __m256 all = _mm256_set1_ps(best);
    for (i = 0; n - i >= 8; i += 8) {
        const int equal =
            _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), all, _CMP_EQ_OQ));
        if (equal != 0)
            return i + (uint32_t)__builtin_ctz((unsigned)equal);
    }
    for (; i < n; i++)
        if (x[i] == best)
            return i;
    return 0;
}

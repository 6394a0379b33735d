/* Products by AVX2: few rows as B1 has it, more by k_avx2_panel.c, float weights as A8. */
#include <immintrin.h>
#include <string.h>

#include "k_avx2_panel.h"
#include "k_avx2_unpack.h"
#include "k_cpu_inner.h"
#include "k_float.h"
#include "k_format.h"
#include "k_stream.h"

/* acc[r] += scale * (w . q[r]). Few registers: each scale is made when it is needed. */
K_STREAM_INLINE void scaled_dot(__m256i w, __m256i scale, const int8_t *const q[K_STREAM_ROWS],
                                int at, const int R, __m256i acc[K_STREAM_ROWS])
{
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++) {
        const __m256i dot = _mm256_maddubs_epi16(w, k_avx2_load(q[r] + at));
        acc[r] = _mm256_add_epi32(acc[r], _mm256_madd_epi16(dot, scale));
    }
}

K_STREAM_INLINE void dot_mins(enum k_format format, const uint8_t *block, const struct k_act_row *x,
                              const int R, uint32_t xb, uint32_t lane, struct k_stream_sums *ret)
{
    const int8_t *q[K_STREAM_ROWS];
    __m256i w[8], acc[K_STREAM_ROWS];
    k_avx2_unpack256(format, block, w);
    const __m128i both = k_stream_scale_min(block);
    const __m128i scales = _mm_cvtepu8_epi16(both);
    const __m128i mins = _mm_cvtepu8_epi16(_mm_srli_si128(both, 8));
    const __m256i twice = _mm256_inserti128_si256(_mm256_castsi128_si256(scales), scales, 1);
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++) {
        const int16_t *sums = x[r].sum + 8 * (size_t)xb;
        q[r] = x[r].q + 256 * (size_t)xb;
        acc[r] = _mm256_setzero_si256();
        ret->m[r][lane] =
            _mm_madd_epi16(mins, _mm_loadu_si128((const __m128i *)(const void *)sums));
    }
    K_STREAM_UNROLL
    for (int j = 0; j < 8; j++) {
        const __m256i scale =
            _mm256_shuffle_epi8(twice, _mm256_set1_epi16((short)(2 * j + 256 * (2 * j + 1))));
        scaled_dot(w[j], scale, q, 32 * j, R, acc);
    }
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++)
        ret->s[r][lane] = acc[r];
}

K_STREAM_INLINE void dot_q6_k(const uint8_t *block, const struct k_act_row *x, const int R,
                              uint32_t xb, uint32_t lane, struct k_stream_sums *ret)
{
    const int8_t *q[K_STREAM_ROWS];
    __m256i w[8], acc[K_STREAM_ROWS];
    k_avx2_unpack256(K_Q6_K, block, w);
    const struct k_format_q6_k *b = (const void *)block;
    const __m256i scales =
        _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)b->scales));
    const __m256i low = _mm256_permute4x64_epi64(scales, 0x44);  /* scales 0..7 in both halves */
    const __m256i high = _mm256_permute4x64_epi64(scales, 0xee); /* 8..15 */
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++) {
        const __m256i offset = _mm256_madd_epi16(scales, k_avx2_load(x[r].sum16 + 16 * (size_t)xb));
        q[r] = x[r].q + 256 * (size_t)xb;
        /* the weights are 32 too large */
        acc[r] = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(offset, 5));
    }
    K_STREAM_UNROLL
    for (int j = 0; j < 8; j++) { /* scales 2j and 2j + 1, each for 16 weights */
        const int first = 4 * (j % 4);
        const __m256i index = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_set1_epi16((short)(first + 256 * (first + 1)))),
            _mm_set1_epi16((short)(first + 2 + 256 * (first + 3))), 1);
        scaled_dot(w[j], _mm256_shuffle_epi8(j < 4 ? low : high, index), q, 32 * j, R, acc);
    }
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++)
        ret->s[r][lane] = acc[r];
}

/* Signed by signed: |w| as unsigned times q with w's sign. */
K_STREAM_INLINE void dot_32(enum k_format format, const uint8_t *block, const struct k_act_row *x,
                            const int R, uint32_t xb, uint32_t lane, struct k_stream_sums *ret)
{
    const __m256i w = k_avx2_unpack32(format, block), size = _mm256_abs_epi8(w);
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++) {
        const __m256i q = _mm256_sign_epi8(k_avx2_load(x[r].q + 32 * (size_t)xb), w);
        ret->s[r][lane] = _mm256_madd_epi16(_mm256_maddubs_epi16(size, q), _mm256_set1_epi16(1));
    }
}

K_STREAM_INLINE void dot_block(enum k_format format, const uint8_t *block,
                               const struct k_act_row *x, const int R, uint32_t xb, uint32_t lane,
                               struct k_stream_sums *ret)
{
    if (k_stream_has_mins(format))
        dot_mins(format, block, x, R, xb, lane, ret);
    else if (format == K_Q6_K)
        dot_q6_k(block, x, R, xb, lane, ret);
    else
        dot_32(format, block, x, R, xb, lane, ret);
}

/* A8: 32 lanes are four vectors; the tree's first two steps add them. */
K_STREAM_INLINE float tree32(const __m256 a[4])
{
    const __m256 v8 = _mm256_add_ps(_mm256_add_ps(a[0], a[2]), _mm256_add_ps(a[1], a[3]));
    const __m128 v4 = _mm_add_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
    const __m128 v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
    return _mm_cvtss_f32(_mm_add_ss(v2, _mm_movehdup_ps(v2)));
}

K_STREAM_INLINE __m256 load_float(enum k_format format, const uint8_t *w, uint32_t i)
{
    if (format == K_F32)
        return _mm256_loadu_ps((const float *)(const void *)w + i);
    const __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(w + 2 * (size_t)i));
    if (format == K_F16)
        return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

K_STREAM_INLINE float dot_float(enum k_format format, const uint8_t *w, const float *x, uint32_t n)
{
    __m256 a[4];
    K_STREAM_UNROLL
    for (int l = 0; l < 4; l++)
        a[l] = _mm256_setzero_ps();
    uint32_t i = 0;
    for (; i + 32 <= n; i += 32) {
        K_STREAM_UNROLL
        for (uint32_t l = 0; l < 4; l++)
            a[l] = _mm256_fmadd_ps(load_float(format, w, i + 8 * l), _mm256_loadu_ps(x + i + 8 * l),
                                   a[l]);
    }
    if (i == n)
        return tree32(a);
    float lanes[32];
    memcpy(lanes, a, sizeof lanes);
    for (uint32_t l = 0; i < n; i++, l++) {
        uint16_t half;
        float v;
        memcpy(&half, w + 2 * (size_t)i, 2);
        if (format == K_F32)
            memcpy(&v, w + 4 * (size_t)i, 4);
        else
            v = format == K_F16 ? k_float_of_f16(half) : k_float_of_bf16(half);
        lanes[l] = k_float_fma(v, x[i], lanes[l]);
    }
    return k_float_tree32(lanes);
}

K_STREAM_INLINE void mul_float(enum k_format format, const uint8_t *w, uint32_t n_out,
                               uint32_t n_in, const void *const *x, float *const *y,
                               uint32_t n_rows)
{
    const size_t stride = (size_t)n_in * (format == K_F32 ? 4 : 2);
    for (uint32_t o = 0; o < n_out; o++, w += stride)
        for (uint32_t r = 0; r < n_rows; r++)
            y[r][o] = dot_float(format, w, x[r], n_in);
}

void k_avx2_matmul_float(enum k_format format, const void *w, uint32_t n_out, uint32_t n_in,
                         const void *const *x, float *const *y, uint32_t n_rows, void *work)
{
    (void)work;
    if (format == K_F32)
        mul_float(K_F32, w, n_out, n_in, x, y, n_rows);
    else if (format == K_F16)
        mul_float(K_F16, w, n_out, n_in, x, y, n_rows);
    else
        mul_float(K_BF16, w, n_out, n_in, x, y, n_rows);
}

/* clang-format off */
K_STREAM_KERNEL(q4_0_rows1, K_Q4_0, dot_block, 1)
K_STREAM_KERNEL(q4_0_rows2, K_Q4_0, dot_block, 2)
K_STREAM_KERNEL(q4_0_rows3, K_Q4_0, dot_block, 3)
K_STREAM_KERNEL(q8_0_rows1, K_Q8_0, dot_block, 1)
K_STREAM_KERNEL(q8_0_rows2, K_Q8_0, dot_block, 2)
K_STREAM_KERNEL(q8_0_rows3, K_Q8_0, dot_block, 3)
K_STREAM_KERNEL(q4_k_rows1, K_Q4_K, dot_block, 1)
K_STREAM_KERNEL(q4_k_rows2, K_Q4_K, dot_block, 2)
K_STREAM_KERNEL(q4_k_rows3, K_Q4_K, dot_block, 3)
K_STREAM_KERNEL(q5_k_rows1, K_Q5_K, dot_block, 1)
K_STREAM_KERNEL(q5_k_rows2, K_Q5_K, dot_block, 2)
K_STREAM_KERNEL(q5_k_rows3, K_Q5_K, dot_block, 3)
K_STREAM_KERNEL(q6_k_rows1, K_Q6_K, dot_block, 1)
K_STREAM_KERNEL(q6_k_rows2, K_Q6_K, dot_block, 2)
K_STREAM_KERNEL(q6_k_rows3, K_Q6_K, dot_block, 3)
/* clang-format on */

static void mul(enum k_format format, const void *w, uint32_t n_out, uint32_t n_in,
                const void *const *x, float *const *y, uint32_t n_rows, void *work)
{
    if (k_format_form(format) != K_FORM_F32 && n_rows > K_STREAM_ROWS) {
        k_avx2_panel_mul(format, w, n_out, n_in, x, y, n_rows, work);
        return;
    }
    switch (format) {
    case K_F32:
    case K_F16:
    case K_BF16:
        k_avx2_matmul_float(format, w, n_out, n_in, x, y, n_rows, work);
        break;
    case K_Q4_0:
        (n_rows == 1   ? q4_0_rows1
         : n_rows == 2 ? q4_0_rows2
                       : q4_0_rows3)(w, n_out, n_in, x, y, work);
        break;
    case K_Q8_0:
        (n_rows == 1   ? q8_0_rows1
         : n_rows == 2 ? q8_0_rows2
                       : q8_0_rows3)(w, n_out, n_in, x, y, work);
        break;
    case K_Q4_K:
        (n_rows == 1   ? q4_k_rows1
         : n_rows == 2 ? q4_k_rows2
                       : q4_k_rows3)(w, n_out, n_in, x, y, work);
        break;
    case K_Q5_K:
        (n_rows == 1   ? q5_k_rows1
         : n_rows == 2 ? q5_k_rows2
                       : q5_k_rows3)(w, n_out, n_in, x, y, work);
        break;
    case K_Q6_K:
        (n_rows == 1   ? q6_k_rows1
         : n_rows == 2 ? q6_k_rows2
                       : q6_k_rows3)(w, n_out, n_in, x, y, work);
        break;
    }
}

void k_avx2_matmul_fill(struct k_cpu_inner *ret)
{
    ret->mul = mul;
}

/* Products by AVX-512 VNNI: few rows as B1 has it, more by k_avx512_panel.c. Float weights are left
 * to AVX2. */
#include <immintrin.h>
#include <string.h>

#include "k_avx512_panel.h"
#include "k_avx512_unpack.h"
#include "k_cpu_inner.h"
#include "k_float.h"
#include "k_format.h"
#include "k_stream.h"

K_STREAM_INLINE __m256i halves(__m512i v)
{
    return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
}

/* Four dot products of 4 fit 16 bits in each format here (at most 4 * 63 * 127), so that vpdpwssd
 * can multiply them by their scale: 32-bit lanes with the upper half zero. */
K_STREAM_INLINE __m256i scaled_dot(const __m512i w[4], const __m512i scale[4], const int8_t *q)
{
    __m512i acc = _mm512_setzero_si512();
    K_STREAM_UNROLL
    for (int p = 0; p < 4; p++) {
        const __m512i x = _mm512_loadu_si512(q + 64 * p);
        const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w[p], x);
        acc = _mm512_dpwssd_epi32(acc, dot, scale[p]);
    }
    return halves(acc);
}

K_STREAM_INLINE void dot_mins(enum k_format format, const uint8_t *block, const struct k_act_row *x,
                              const int R, uint32_t xb, uint32_t lane, struct k_stream_sums *ret)
{
    __m512i w[4], scale[4];
    k_avx512_unpack256(format, block, w);
    const __m128i both = k_stream_scale_min(block);
    const __m512i wide = _mm512_castsi256_si512(_mm256_cvtepu8_epi32(both));
    const __m128i mins = _mm_cvtepu8_epi16(_mm_srli_si128(both, 8));
    K_STREAM_UNROLL
    for (int p = 0; p < 4; p++)
        scale[p] = _mm512_permutexvar_epi32(
            k_avx512_join(_mm256_set1_epi32(2 * p), _mm256_set1_epi32(2 * p + 1)), wide);
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++) {
        const int16_t *sums = x[r].sum + 8 * (size_t)xb;
        ret->s[r][lane] = scaled_dot(w, scale, x[r].q + 256 * (size_t)xb);
        ret->m[r][lane] =
            _mm_madd_epi16(mins, _mm_loadu_si128((const __m128i *)(const void *)sums));
    }
}

K_STREAM_INLINE void dot_q6_k(const uint8_t *block, const struct k_act_row *x, const int R,
                              uint32_t xb, uint32_t lane, struct k_stream_sums *ret)
{
    __m512i w[4], scale[4];
    k_avx512_unpack256(K_Q6_K, block, w);
    const struct k_format_q6_k *b = (const void *)block;
    const __m128i scales = _mm_loadu_si128((const __m128i *)(const void *)b->scales);
    const __m512i wide = _mm512_and_si512(_mm512_cvtepi8_epi32(scales), _mm512_set1_epi32(0xffff));
    K_STREAM_UNROLL
    for (int p = 0; p < 4; p++)
        scale[p] = _mm512_permutexvar_epi32(
            _mm512_add_epi32(_mm512_set1_epi32(4 * p),
                             _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0)),
            wide);
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++) {
        const __m256i sums =
            _mm256_loadu_si256((const __m256i *)(const void *)(x[r].sum16 + 16 * (size_t)xb));
        const __m256i offset = _mm256_madd_epi16(_mm256_cvtepi8_epi16(scales), sums);
        /* the weights were 32 too large */
        ret->s[r][lane] = _mm256_sub_epi32(scaled_dot(w, scale, x[r].q + 256 * (size_t)xb),
                                           _mm256_slli_epi32(offset, 5));
    }
}

K_STREAM_INLINE void dot_32(enum k_format format, const uint8_t *block, const struct k_act_row *x,
                            const int R, uint32_t xb, uint32_t lane, struct k_stream_sums *ret)
{
    const int32_t offset = format == K_Q8_0 ? -128 : -8;
    const __m256i w = k_avx512_unpack32(format, block);
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++) {
        const __m256i start = _mm256_zextsi128_si256(_mm_cvtsi32_si128(offset * x[r].sum[xb]));
        const int8_t *q = x[r].q + 32 * (size_t)xb;
        ret->s[r][lane] =
            _mm256_dpbusd_epi32(start, w, _mm256_loadu_si256((const __m256i *)(const void *)q));
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

/* clang-format off */
K_STREAM_KERNEL(q4_0_rows1, K_Q4_0, dot_block, 1)
K_STREAM_KERNEL(q8_0_rows1, K_Q8_0, dot_block, 1)
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
    /* 32-blocks are unpacked so cheaply that a panel pays from two rows on. */
    if ((k_stream_small(format) && n_rows > 1) ||
        (k_format_form(format) == K_FORM_Q256 && n_rows > K_STREAM_ROWS)) {
        k_avx512_panel_mul(format, w, n_out, n_in, x, y, n_rows, work);
        return;
    }
    switch (format) {
    case K_F32: /* from memory, 512-bit loads were measured to be half as fast here */
    case K_F16:
    case K_BF16:
        k_avx2_matmul_float(format, w, n_out, n_in, x, y, n_rows, work);
        break;
    case K_Q4_0:
        q4_0_rows1(w, n_out, n_in, x, y, work);
        break;
    case K_Q8_0:
        q8_0_rows1(w, n_out, n_in, x, y, work);
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

void k_avx512_matmul_fill(struct k_cpu_inner *ret)
{
    ret->mul = mul;
}

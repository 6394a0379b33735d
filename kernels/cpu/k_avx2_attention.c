/* Attention by AVX2 (A18, B6): lane = position for scores, lane = d for values; no reduction
 * anywhere. Two heads at a time share the conversion of keys and values. */
#include <immintrin.h>
#include <string.h>

#include "k_attention.h"
#include "k_avx2_attention.h"
#include "k_cpu_inner.h"
#include "k_ref.h"

enum {
    Q8_HEAD_BYTES = K_ATTENTION_DIM + 64 + 64 /* a quantised head: integers, scales, sums */
};

K_ATTENTION_INLINE __m256 half8(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}

/* H heads, positions first .. first + 31. */
K_ATTENTION_INLINE void scores32(const float *q, const int H, uint32_t dim, const uint16_t *keys,
                                 float scale, float *s)
{
    __m256 acc[2][4];
    K_STREAM_UNROLL
    for (int h = 0; h < H; h++)
        K_STREAM_UNROLL
    for (int i = 0; i < 4; i++)
        acc[h][i] = _mm256_setzero_ps();
    for (uint32_t d = 0; d < dim; d++) {
        __m256 k[4];
        K_STREAM_UNROLL
        for (int i = 0; i < 4; i++)
            k[i] = half8(keys + (size_t)d * K_PAGE + 8 * i);
        K_STREAM_UNROLL
        for (int h = 0; h < H; h++) {
            const __m256 x = _mm256_set1_ps(q[(uint32_t)h * dim + d]);
            K_STREAM_UNROLL
            for (int i = 0; i < 4; i++)
                acc[h][i] = _mm256_fmadd_ps(x, k[i], acc[h][i]);
        }
    }
    K_STREAM_UNROLL
    for (int h = 0; h < H; h++)
        K_STREAM_UNROLL
    for (int i = 0; i < 4; i++)
        _mm256_storeu_ps(s + h * K_PAGE + 8 * i, _mm256_mul_ps(acc[h][i], _mm256_set1_ps(scale)));
}

static void scores_f16(const float *q, uint32_t n_heads, uint32_t dim,
                       const struct k_attention_page *page, uint32_t n, float scale, float *s)
{
    const uint16_t *keys = page->keys;
    for (uint32_t first = 0; first < n; first += 32) {
        uint32_t h = 0;
        for (; h + 2 <= n_heads; h += 2)
            scores32(q + (size_t)h * dim, 2, dim, keys + first, scale, s + h * K_PAGE + first);
        if (h < n_heads)
            scores32(q + (size_t)h * dim, 1, dim, keys + first, scale, s + h * K_PAGE + first);
    }
}

/* H heads, dimensions first .. first + 31. */
K_ATTENTION_INLINE void values32(const float *e, const int H, uint32_t dim, const uint16_t *values,
                                 uint32_t n, float *o, size_t stride)
{
    __m256 acc[2][4];
    K_STREAM_UNROLL
    for (int h = 0; h < H; h++)
        K_STREAM_UNROLL
    for (int i = 0; i < 4; i++)
        acc[h][i] = _mm256_setzero_ps();
    for (uint32_t j = 0; j < n; j++) {
        __m256 v[4];
        K_STREAM_UNROLL
        for (int i = 0; i < 4; i++)
            v[i] = half8(values + (size_t)j * dim + 8 * i);
        K_STREAM_UNROLL
        for (int h = 0; h < H; h++) {
            const __m256 x = _mm256_set1_ps(e[h * K_PAGE + (int)j]);
            K_STREAM_UNROLL
            for (int i = 0; i < 4; i++)
                acc[h][i] = _mm256_fmadd_ps(x, v[i], acc[h][i]);
        }
    }
    K_STREAM_UNROLL
    for (int h = 0; h < H; h++)
        K_STREAM_UNROLL
    for (int i = 0; i < 4; i++)
        _mm256_storeu_ps(o + (size_t)h * stride + 8 * i, acc[h][i]);
}

static void values_f16(const float *e, uint32_t n_heads, uint32_t dim,
                       const struct k_attention_page *page, uint32_t n, float *o, size_t stride)
{
    const uint16_t *values = page->values;
    for (uint32_t d = 0; d < dim; d += 32) {
        uint32_t h = 0;
        for (; h + 2 <= n_heads; h += 2)
            values32(e + h * K_PAGE, 2, dim, values + d, n, o + h * stride + d, stride);
        if (h < n_heads)
            values32(e + h * K_PAGE, 1, dim, values + d, n, o + h * stride + d, stride);
    }
}

/* Exact dots of 32 dimensions with 32 positions. Signed by signed: |q| as unsigned times the key
 * with q's sign. */
K_ATTENTION_INLINE void dot32(const int8_t *q, const int8_t *keys, __m256i ret[4])
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i acc[4];
    K_STREAM_UNROLL
    for (int i = 0; i < 4; i++)
        acc[i] = _mm256_setzero_si256();
    for (int d = 0; d < 32; d += 4) {
        int32_t four;
        memcpy(&four, q + d, 4);
        const __m256i x = _mm256_set1_epi32(four), size = _mm256_abs_epi8(x);
        __m256i k[4], v[4];
        K_STREAM_UNROLL
        for (int i = 0; i < 4; i++)
            k[i] = _mm256_loadu_si256((const __m256i *)(const void *)(keys + (d + i) * K_PAGE));
        const __m256i low01 = _mm256_unpacklo_epi8(k[0], k[1]);
        const __m256i high01 = _mm256_unpackhi_epi8(k[0], k[1]);
        const __m256i low23 = _mm256_unpacklo_epi8(k[2], k[3]);
        const __m256i high23 = _mm256_unpackhi_epi8(k[2], k[3]);
        v[0] = _mm256_unpacklo_epi16(low01, low23);
        v[1] = _mm256_unpackhi_epi16(low01, low23);
        v[2] = _mm256_unpacklo_epi16(high01, high23);
        v[3] = _mm256_unpackhi_epi16(high01, high23);
        K_STREAM_UNROLL
        for (int i = 0; i < 4; i++)
            acc[i] = _mm256_add_epi32(
                acc[i],
                _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(v[i], x)), ones));
    }
    /* acc[i]: positions 4i .. 4i + 3 and 16 + 4i .. 16 + 4i + 3. */
    ret[0] = _mm256_permute2x128_si256(acc[0], acc[1], 0x20);
    ret[1] = _mm256_permute2x128_si256(acc[2], acc[3], 0x20);
    ret[2] = _mm256_permute2x128_si256(acc[0], acc[1], 0x31);
    ret[3] = _mm256_permute2x128_si256(acc[2], acc[3], 0x31);
}

static void scores_q8(const float *q, uint32_t n_heads, uint32_t dim,
                      const struct k_attention_page *page, uint32_t n, float scale, float *s)
{
    const int8_t *keys = page->keys;
    for (uint32_t h = 0; h < n_heads; h++) {
        /* In q's place stand the quantised heads; see attention(). */
        const struct k_act_row x = k_format_act_row(
            K_FORM_Q32, (uint8_t *)(uintptr_t)q + h * k_format_act_bytes(K_FORM_Q32, dim), dim);
        for (uint32_t first = 0; first < n; first += 32) {
            __m256 acc[4];
            K_STREAM_UNROLL
            for (int i = 0; i < 4; i++)
                acc[i] = _mm256_setzero_ps();
            for (uint32_t b = 0; b < dim / 32; b++) {
                __m256i dot[4];
                dot32(x.q + 32 * b, keys + (size_t)32 * b * K_PAGE + first, dot);
                K_STREAM_UNROLL
                for (int i = 0; i < 4; i++) {
                    const __m256 dk = half8(page->key_scales + (size_t)b * K_PAGE + first + 8 * i);
                    acc[i] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_set1_ps(x.dx[b]), dk),
                                             _mm256_cvtepi32_ps(dot[i]), acc[i]);
                }
            }
            K_STREAM_UNROLL
            for (int i = 0; i < 4; i++)
                _mm256_storeu_ps(s + h * K_PAGE + first + 8 * i,
                                 _mm256_mul_ps(acc[i], _mm256_set1_ps(scale)));
        }
    }
}

static void values_q8(const float *e, uint32_t n_heads, uint32_t dim,
                      const struct k_attention_page *page, uint32_t n, float *o, size_t stride)
{
    const int8_t *values = page->values;
    for (uint32_t h = 0; h < n_heads; h++)
        for (uint32_t d = 0; d < dim; d += 32) {
            __m256 acc[4];
            K_STREAM_UNROLL
            for (int i = 0; i < 4; i++)
                acc[i] = _mm256_setzero_ps();
            for (uint32_t j = 0; j < n; j++) {
                const float dv =
                    k_float_of_f16(page->value_scales[(size_t)j * (dim / 32) + d / 32]);
                const __m256 x = _mm256_set1_ps(e[h * K_PAGE + j] * dv);
                K_STREAM_UNROLL
                for (int i = 0; i < 4; i++) {
                    const __m128i v = _mm_loadl_epi64(
                        (const __m128i *)(const void *)(values + (size_t)j * dim + d + 8 * i));
                    acc[i] =
                        _mm256_fmadd_ps(x, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), acc[i]);
                }
            }
            K_STREAM_UNROLL
            for (int i = 0; i < 4; i++)
                _mm256_storeu_ps(o + h * stride + d + 8 * i, acc[i]);
        }
}

bool k_avx2_attention_q8(const float *q, uint32_t n_heads, const uint8_t *const *pages,
                         uint32_t n_visible, const struct k_kv *kv, uint32_t head_kv, float scale,
                         float *work, float *y)
{
    const uint32_t dim = kv->head_dim;
    const uint64_t bytes = k_format_act_bytes(K_FORM_Q32, dim);
    _Alignas(64) float heads[K_CPU_HEADS * Q8_HEAD_BYTES / 4];
    bool fault = false;
    for (uint32_t h = 0; h < n_heads; h++)
        fault |= k_ref_quantise32(q + (size_t)h * dim, dim, (uint8_t *)heads + bytes * h);
    return fault | k_attention_run(heads, n_heads, pages, n_visible, kv, head_kv, scale, work, y,
                                   scores_q8, values_q8);
}

static bool attention(const float *q, uint32_t n_heads, const uint8_t *const *pages,
                      uint32_t n_visible, const struct k_kv *kv, uint32_t head_kv, float scale,
                      float *work, float *y)
{
    if (!k_attention_fits(kv))
        return k_attention_plain(q, n_heads, pages, n_visible, kv, head_kv, scale, work, y);
    if (kv->type == K_KV_Q8_0)
        return k_avx2_attention_q8(q, n_heads, pages, n_visible, kv, head_kv, scale, work, y);
    return k_attention_run(q, n_heads, pages, n_visible, kv, head_kv, scale, work, y, scores_f16,
                           values_f16);
}

void k_avx2_attention_fill(struct k_cpu_inner *ret)
{
    ret->attention = attention;
}

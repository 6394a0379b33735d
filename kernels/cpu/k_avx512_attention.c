/* Attention over f16 pages by AVX-512 (A18, B6): as k_avx2_attention.c, with four heads at a
 * time. */
#include <immintrin.h>

#include "k_attention.h"
#include "k_avx2_attention.h"
#include "k_cpu_inner.h"

K_ATTENTION_INLINE __m512 half16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

/* H heads, all 64 positions. */
K_ATTENTION_INLINE void scores64(const float *q, const int H, uint32_t dim, const uint16_t *keys,
                                 float scale, float *s)
{
    __m512 acc[4][4];
    K_STREAM_UNROLL
    for (int h = 0; h < H; h++)
        K_STREAM_UNROLL
    for (int i = 0; i < 4; i++)
        acc[h][i] = _mm512_setzero_ps();
    for (uint32_t d = 0; d < dim; d++) {
        __m512 k[4];
        K_STREAM_UNROLL
        for (int i = 0; i < 4; i++)
            k[i] = half16(keys + (size_t)d * K_PAGE + 16 * i);
        K_STREAM_UNROLL
        for (int h = 0; h < H; h++) {
            const __m512 x = _mm512_set1_ps(q[(uint32_t)h * dim + d]);
            K_STREAM_UNROLL
            for (int i = 0; i < 4; i++)
                acc[h][i] = _mm512_fmadd_ps(x, k[i], acc[h][i]);
        }
    }
    K_STREAM_UNROLL
    for (int h = 0; h < H; h++)
        K_STREAM_UNROLL
    for (int i = 0; i < 4; i++)
        _mm512_storeu_ps(s + h * K_PAGE + 16 * i, _mm512_mul_ps(acc[h][i], _mm512_set1_ps(scale)));
}

static void scores(const float *q, uint32_t n_heads, uint32_t dim,
                   const struct k_attention_page *page, uint32_t n, float scale, float *s)
{
    (void)n;
    uint32_t h = 0;
    for (; h + 4 <= n_heads; h += 4)
        scores64(q + (size_t)h * dim, 4, dim, page->keys, scale, s + h * K_PAGE);
    for (; h < n_heads; h++)
        scores64(q + (size_t)h * dim, 1, dim, page->keys, scale, s + h * K_PAGE);
}

/* H heads, N * 16 dimensions. */
K_ATTENTION_INLINE void weighted(const float *e, const int H, const int N, uint32_t dim,
                                 const uint16_t *values, uint32_t n, float *o, size_t stride)
{
    __m512 acc[4][4];
    K_STREAM_UNROLL
    for (int h = 0; h < H; h++)
        K_STREAM_UNROLL
    for (int i = 0; i < N; i++)
        acc[h][i] = _mm512_setzero_ps();
    for (uint32_t j = 0; j < n; j++) {
        __m512 v[4];
        K_STREAM_UNROLL
        for (int i = 0; i < N; i++)
            v[i] = half16(values + (size_t)j * dim + 16 * i);
        K_STREAM_UNROLL
        for (int h = 0; h < H; h++) {
            const __m512 x = _mm512_set1_ps(e[h * K_PAGE + (int)j]);
            K_STREAM_UNROLL
            for (int i = 0; i < N; i++)
                acc[h][i] = _mm512_fmadd_ps(x, v[i], acc[h][i]);
        }
    }
    K_STREAM_UNROLL
    for (int h = 0; h < H; h++)
        K_STREAM_UNROLL
    for (int i = 0; i < N; i++)
        _mm512_storeu_ps(o + (size_t)h * stride + 16 * i, acc[h][i]);
}

static void values(const float *e, uint32_t n_heads, uint32_t dim,
                   const struct k_attention_page *page, uint32_t n, float *o, size_t stride)
{
    const uint16_t *v = page->values;
    for (uint32_t d = 0; d < dim;) {
        const uint32_t wide = dim - d >= 64 ? 64 : 32;
        uint32_t h = 0;
        for (; h + 4 <= n_heads; h += 4) {
            if (wide == 64)
                weighted(e + h * K_PAGE, 4, 4, dim, v + d, n, o + h * stride + d, stride);
            else
                weighted(e + h * K_PAGE, 4, 2, dim, v + d, n, o + h * stride + d, stride);
        }
        for (; h < n_heads; h++) {
            if (wide == 64)
                weighted(e + h * K_PAGE, 1, 4, dim, v + d, n, o + h * stride + d, stride);
            else
                weighted(e + h * K_PAGE, 1, 2, dim, v + d, n, o + h * stride + d, stride);
        }
        d += wide;
    }
}

static bool attention(const float *q, uint32_t n_heads, const uint8_t *const *pages,
                      uint32_t n_visible, const struct k_kv *kv, uint32_t head_kv, float scale,
                      float *work, float *y)
{
    if (!k_attention_fits(kv))
        return k_attention_plain(q, n_heads, pages, n_visible, kv, head_kv, scale, work, y);
    if (kv->type == K_KV_Q8_0)
        return k_avx2_attention_q8(q, n_heads, pages, n_visible, kv, head_kv, scale, work, y);
    return k_attention_run(q, n_heads, pages, n_visible, kv, head_kv, scale, work, y, scores,
                           values);
}

void k_avx512_attention_fill(struct k_cpu_inner *ret)
{
    ret->attention = attention;
}

/* What the attention kernels of the levels share: the chunks of a sequence, and the merges of A19.
 * A level brings the scores and the weighted values of a chunk. Only for files compiled with a
 * level's flags. */
#ifndef ISLET_K_ATTENTION_H
#define ISLET_K_ATTENTION_H
#if defined(__AVX2__)

#include <immintrin.h>
#include <string.h>

#include "k_avx2_exp.h"
#include "k_cpu_inner.h"
#include "k_float.h"
#include "k_format.h"
#include "k_ref.h"
#include "k_stream.h"

#define K_ATTENTION_INLINE static inline __attribute__((always_inline))

enum {
    K_ATTENTION_DIM = 256 /* largest head */
};

/* One layer's part of a page, as k_ref_kv.c lays it out; pointers of one kv head. */
struct k_attention_page {
    const void *keys, *values;                 /* f16 or int8 */
    const uint16_t *key_scales, *value_scales; /* 8-bit only */
};

K_ATTENTION_INLINE struct k_attention_page k_attention_page_of(const uint8_t *layer,
                                                               const struct k_kv *kv,
                                                               uint32_t head_kv)
{
    const size_t head = (size_t)kv->head_dim * K_PAGE, all = head * kv->n_head_kv;
    if (kv->type == K_KV_F16)
        return (struct k_attention_page){.keys = layer + 2 * head * head_kv,
                                         .values = layer + 2 * (all + head * head_kv)};
    const uint16_t *scales = (const uint16_t *)(const void *)(layer + 2 * all);
    return (struct k_attention_page){.keys = layer + head * head_kv,
                                     .values = layer + all + head * head_kv,
                                     .key_scales = scales + head / 32 * head_kv,
                                     .value_scales = scales + (all + head * head_kv) / 32};
}

K_ATTENTION_INLINE bool k_attention_fits(const struct k_kv *kv)
{
    return kv->head_dim % 32 == 0 && kv->head_dim <= K_ATTENTION_DIM;
}

/* Heads of other sizes: as the reference. */
static inline bool k_attention_plain(const float *q, uint32_t n_heads, const uint8_t *const *pages,
                                     uint32_t n_visible, const struct k_kv *kv, uint32_t head_kv,
                                     float scale, float *work, float *y)
{
    bool fault = false;
    for (uint32_t h = 0; h < n_heads; h++)
        fault |= k_ref_attention_head(q + (size_t)h * kv->head_dim, pages, n_visible, kv, head_kv,
                                      scale, work, y + (size_t)h * kv->head_dim);
    return fault;
}

/* Running maximum, sum of weights and weighted values of one head: a chunk's, a group's, or the
 * whole. */
struct k_attention_part {
    float m, l;
    float *o; /* [dim] */
    bool empty;
};

/* One step of the fold of A19. */
K_ATTENTION_INLINE void k_attention_merge(struct k_attention_part *into,
                                          const struct k_attention_part *next, uint32_t dim)
{
    if (into->empty) {
        into->m = next->m;
        into->l = next->l;
        memcpy(into->o, next->o, dim * sizeof(float));
        into->empty = false;
        return;
    }
    const float m = into->m > next->m ? into->m : next->m;
    const float a = k_float_exp32(into->m - m), b = k_float_exp32(next->m - m);
    const float lb = next->l * b;
    into->l = k_float_fma(into->l, a, lb);
    const __m256 va = _mm256_set1_ps(a), vb = _mm256_set1_ps(b);
    for (uint32_t d = 0; d < dim; d += 8)
        _mm256_storeu_ps(into->o + d,
                         _mm256_fmadd_ps(_mm256_loadu_ps(into->o + d), va,
                                         _mm256_mul_ps(_mm256_loadu_ps(next->o + d), vb)));
    into->m = m;
}

/* s[64] -> e in place, m and l (A18); positions from n on are invisible. True: a score was not
 * finite. */
K_ATTENTION_INLINE bool k_attention_weigh(float *s, uint32_t n, struct k_attention_part *ret)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i inf = _mm256_set1_epi32(0x7f800000), magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256 v[8], visible[8], top = _mm256_set1_ps(s[0]);
    __m256i wrong = _mm256_setzero_si256();
    K_STREAM_UNROLL
    for (int i = 0; i < 8; i++) {
        v[i] = _mm256_loadu_ps(s + 8 * i);
        visible[i] =
            _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)n - 8 * i), lane));
        const __m256i size = _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude);
        const __m256i infinite =
            _mm256_or_si256(_mm256_cmpgt_epi32(size, inf), _mm256_cmpeq_epi32(size, inf));
        wrong = _mm256_or_si256(wrong, _mm256_and_si256(infinite, _mm256_castps_si256(visible[i])));
        top = _mm256_max_ps(top, _mm256_blendv_ps(top, v[i], visible[i]));
    }
    const bool fault = !_mm256_testz_si256(wrong, wrong);
    float tops[8], m = s[0];
    _mm256_storeu_ps(tops, top);
    K_STREAM_UNROLL
    for (int i = 0; i < 8; i++)
        m = tops[i] > m ? tops[i] : m;
    float a[32];
    const __m256 vm = _mm256_set1_ps(m);
    K_STREAM_UNROLL
    for (int i = 0; i < 8; i++) {
        v[i] = _mm256_and_ps(k_avx2_exp(_mm256_sub_ps(v[i], vm)), visible[i]);
        if (fault)
            v[i] = _mm256_setzero_ps();
        _mm256_storeu_ps(s + 8 * i, v[i]);
    }
    K_STREAM_UNROLL
    for (int i = 0; i < 4; i++)
        _mm256_storeu_ps(a + 8 * i, _mm256_add_ps(v[i], v[i + 4]));
    ret->m = fault ? 0.0f : m;
    ret->l = k_float_tree32(a);
    ret->empty = false;
    return fault;
}

/* Scores of n_heads heads over the chunk, scaled: s[h][64]; lanes from n on may hold anything. */
typedef void k_attention_scores_fn(const float *q, uint32_t n_heads, uint32_t dim,
                                   const struct k_attention_page *page, uint32_t n, float scale,
                                   float *s);
/* o[h][d] = fold over j < n of e[h][j] * V[j][d]; o[h] = o + h * stride. */
typedef void k_attention_values_fn(const float *e, uint32_t n_heads, uint32_t dim,
                                   const struct k_attention_page *page, uint32_t n, float *o,
                                   size_t stride);

K_ATTENTION_INLINE bool k_attention_run(const float *q, uint32_t n_heads,
                                        const uint8_t *const *pages, uint32_t n_visible,
                                        const struct k_kv *kv, uint32_t head_kv, float scale,
                                        float *work, float *y, k_attention_scores_fn *scores,
                                        k_attention_values_fn *values)
{
    const uint32_t dim = kv->head_dim, n_pages = (n_visible + K_PAGE - 1) / K_PAGE;
    float *s = work, *o = s + (size_t)n_heads * K_PAGE;
    struct k_attention_part total[K_CPU_HEADS], group[K_CPU_HEADS], chunk[K_CPU_HEADS];
    bool fault = false;
    for (uint32_t h = 0; h < n_heads; h++) {
        chunk[h] = (struct k_attention_part){.o = o + (size_t)h * dim};
        group[h] = (struct k_attention_part){.o = o + (size_t)(n_heads + h) * dim, .empty = true};
        total[h] =
            (struct k_attention_part){.o = o + (size_t)(2 * n_heads + h) * dim, .empty = true};
    }
    for (uint32_t c = 0; c < n_pages; c++) {
        const uint32_t left = n_visible - c * K_PAGE, n = left < K_PAGE ? left : K_PAGE;
        const struct k_attention_page page = k_attention_page_of(pages[c], kv, head_kv);
        scores(q, n_heads, dim, &page, n, scale, s);
        for (uint32_t h = 0; h < n_heads; h++)
            fault |= k_attention_weigh(s + (size_t)h * K_PAGE, n, &chunk[h]);
        values(s, n_heads, dim, &page, n, o, dim);
        const bool last = c % K_CHUNK_GROUP == K_CHUNK_GROUP - 1 || c + 1 == n_pages;
        for (uint32_t h = 0; h < n_heads; h++) {
            k_attention_merge(&group[h], &chunk[h], dim);
            if (last) {
                k_attention_merge(&total[h], &group[h], dim);
                group[h].empty = true;
            }
        }
    }
    for (uint32_t h = 0; h < n_heads; h++) {
        const __m256 l = _mm256_set1_ps(total[h].l);
        for (uint32_t d = 0; d < dim; d += 8)
            _mm256_storeu_ps(y + (size_t)h * dim + d,
                             _mm256_div_ps(_mm256_loadu_ps(total[h].o + d), l));
    }
    return fault;
}

#endif
#endif

/* Work on a row by AVX2: quantiser, norm, gate, expert sum, attention. Also what the AVX-512 level uses: these loops are
 * bound by memory or by latency, not by the width of a vector. */
#include <immintrin.h>
#include <string.h>

#include "k_cpu_inner.h"
#include "k_float.h"
#include "k_format.h"
#include "k_ref.h"

static inline __m256 exp8(__m256 x)
{
    const __m256 keep = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_GE_OQ);
    const __m256 magic = _mm256_set1_ps(12582912.0f);
    x = _mm256_min_ps(x, _mm256_set1_ps(88.0f));
    const __m256 z = _mm256_fmadd_ps(x, _mm256_set1_ps(1.44269502f), magic);
    const __m256 n = _mm256_sub_ps(z, magic);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-0.693359375f), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(0.00021219444f), r);
    __m256 q = _mm256_fmadd_ps(_mm256_set1_ps(0x1.6a2410p-10f), r, _mm256_set1_ps(0x1.1239f8p-7f));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(0x1.5558f2p-5f));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(0x1.555492p-3f));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(0x1.fffffcp-2f));
    const __m256 y =
        _mm256_add_ps(_mm256_set1_ps(1.0f), _mm256_fmadd_ps(_mm256_mul_ps(r, r), q, r));
    const __m256i shift = _mm256_slli_epi32(
        _mm256_sub_epi32(_mm256_castps_si256(z), _mm256_set1_epi32(0x4b400000)), 23);
    const __m256 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), shift));
    return _mm256_and_ps(scaled, keep);
}

/* A8's tree over lanes 0-7, 8-15, 16-23, 24-31. */
static inline float tree32(__m256 a, __m256 b, __m256 c, __m256 d)
{
    const __m256 v8 = _mm256_add_ps(_mm256_add_ps(a, c), _mm256_add_ps(b, d));
    const __m128 v4 = _mm_add_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
    const __m128 v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
    return _mm_cvtss_f32(_mm_add_ss(v2, _mm_movehdup_ps(v2)));
}

/* Largest magnitude of n values (n a multiple of 8), as bits. */
static inline uint32_t largest_bits(const float *x, uint32_t n)
{
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i m = _mm256_setzero_si256();
    for (uint32_t i = 0; i < n; i += 8)
        m = _mm256_max_epu32(
            m, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(const void *)(x + i)), mask));
    __m128i h = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    h = _mm_max_epu32(h, _mm_shuffle_epi32(h, 0x4e));
    h = _mm_max_epu32(h, _mm_shuffle_epi32(h, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(h);
}

/* 32 values to integers; their sums per 16. */
static inline void quantise_32(const float *x, __m256 inv, int8_t *q, int16_t sum16[2])
{
    __m256i v[4];
    for (int i = 0; i < 4; i++)
        v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), inv));
    const __m256i w0 = _mm256_packs_epi32(v[0], v[1]), w1 = _mm256_packs_epi32(v[2], v[3]);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(w0, w1),
                                                      _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)(void *)q, bytes);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    __m256i s = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    s = _mm256_hadd_epi32(s, s);
    s = _mm256_hadd_epi32(s, s);
    sum16[0] = (int16_t)_mm256_extract_epi32(s, 0);
    sum16[1] = (int16_t)_mm256_extract_epi32(s, 4);
}

static inline __attribute__((always_inline)) bool quantise(enum k_form form, const float *x,
                                                           uint32_t n, void *ret)
{
    const uint32_t block = form == K_FORM_Q32 ? K_BLOCK32 : K_BLOCK256;
    const struct k_act_row row = k_format_act_row(form, ret, n);
    bool fault = false;
    for (uint32_t b = 0; b < n / block; b++) {
        uint32_t m = largest_bits(x + b * block, block);
        fault |= m >= 0x7f800000u;
        if (m >= 0x7f800000u)
            m = 0;
        float inv = 0.0f;
        row.dx[b] = 0.0f;
        if (m >= 0x0d800000u) {
            inv = 127.0f / k_float_of_bits(m);
            row.dx[b] = k_float_of_bits(m) / 127.0f;
        }
        for (uint32_t i = b * block; i < (b + 1) * block; i += 32) {
            int16_t sums[2] = {0, 0};
            if (m >= 0x0d800000u)
                quantise_32(x + i, _mm256_set1_ps(inv), row.q + i, sums);
            else
                memset(row.q + i, 0, 32);
            row.sum[i / 32] = (int16_t)(sums[0] + sums[1]);
            if (form == K_FORM_Q256)
                memcpy(row.sum16 + i / 16, sums, sizeof sums);
        }
    }
    return fault;
}

static bool quantise32(const float *x, uint32_t n, void *ret)
{
    return quantise(K_FORM_Q32, x, n, ret);
}

static bool quantise256(const float *x, uint32_t n, void *ret)
{
    return quantise(K_FORM_Q256, x, n, ret);
}

static void norm(const float *x, const float *weight, float *y, uint32_t n, float eps)
{
    if (n % 32 != 0) {
        k_ref_norm(x, weight, y, n, eps);
        return;
    }
    __m256 a[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                   _mm256_setzero_ps()};
    for (uint32_t i = 0; i < n; i += 32)
        for (int k = 0; k < 4; k++) {
            const __m256 v = _mm256_loadu_ps(x + i + 8 * k);
            a[k] = _mm256_fmadd_ps(v, v, a[k]);
        }
    const float mean = tree32(a[0], a[1], a[2], a[3]) / (float)n;
    const float r = 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps)));
    for (uint32_t i = 0; i < n; i += 8)
        _mm256_storeu_ps(y + i,
                         _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(r)),
                                       _mm256_loadu_ps(weight + i)));
}

static void swiglu(float *h, const float *up, uint32_t n)
{
    const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 g = _mm256_loadu_ps(h + i);
        const __m256 s = _mm256_div_ps(g, _mm256_add_ps(one, exp8(_mm256_xor_ps(g, sign))));
        _mm256_storeu_ps(h + i, _mm256_mul_ps(s, _mm256_loadu_ps(up + i)));
    }
    for (; i < n; i++)
        h[i] = k_float_swiglu(h[i], up[i]);
}

static void moe_sum(const float *weights, const float *out, size_t stride, uint32_t n_used,
                    uint32_t n, float *x)
{
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 y = _mm256_setzero_ps();
        for (uint32_t k = 0; k < n_used; k++)
            y = _mm256_fmadd_ps(_mm256_set1_ps(weights[k]), _mm256_loadu_ps(out + k * stride + i),
                                y);
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), y));
    }
    for (; i < n; i++) {
        float y = 0.0f;
        for (uint32_t k = 0; k < n_used; k++)
            y = k_float_fma(weights[k], out[k * stride + i], y);
        x[i] = x[i] + y;
    }
}

/* ---- attention (A18, A19): scores with lane = position, values with lane = dimension ------------------------------- */

static inline __m256 half8(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}

static void scores(const float *q, const uint16_t *keys, uint32_t dim, float scale, float *s)
{
    __m256 acc[8];
    for (int i = 0; i < 8; i++)
        acc[i] = _mm256_setzero_ps();
    for (uint32_t d = 0; d < dim; d++) {
        const __m256 qd = _mm256_set1_ps(q[d]);
        for (int i = 0; i < 8; i++)
            acc[i] = _mm256_fmadd_ps(qd, half8(keys + (size_t)d * K_PAGE + 8 * i), acc[i]);
    }
    for (int i = 0; i < 8; i++)
        _mm256_storeu_ps(s + 8 * i, _mm256_mul_ps(acc[i], _mm256_set1_ps(scale)));
}

/* s[64] -> e, m and l of the first n. True: not finite. */
static bool weigh(float *s, uint32_t n, float *ret_m, float *ret_l)
{
    float m = s[0];
    bool fault = false;
    for (uint32_t j = 0; j < n; j++) {
        fault |= !k_float_finite(s[j]);
        m = s[j] > m ? s[j] : m;
    }
    for (uint32_t j = fault ? 0 : n; j < K_PAGE; j++)
        s[j] = -__builtin_inff(); /* exp32 gives 0 */
    m = fault ? 0.0f : m;
    __m256 e[8];
    for (int i = 0; i < 8; i++) {
        e[i] = exp8(_mm256_sub_ps(_mm256_loadu_ps(s + 8 * i), _mm256_set1_ps(m)));
        _mm256_storeu_ps(s + 8 * i, e[i]);
    }
    *ret_m = m;
    *ret_l = tree32(_mm256_add_ps(e[0], e[4]), _mm256_add_ps(e[1], e[5]), _mm256_add_ps(e[2], e[6]),
                    _mm256_add_ps(e[3], e[7]));
    return fault;
}

/* o[d] = fold over j < n of e[j] * V[j][d]; 64 dimensions at a time. */
static void weighted(const float *e, uint32_t n, const uint16_t *values, uint32_t dim, float *o)
{
    for (uint32_t d = 0; d < dim; d += 64) {
        __m256 acc[8];
        for (int i = 0; i < 8; i++)
            acc[i] = _mm256_setzero_ps();
        for (uint32_t j = 0; j < n; j++) {
            const __m256 ej = _mm256_set1_ps(e[j]);
            for (int i = 0; i < 8; i++)
                acc[i] = _mm256_fmadd_ps(ej, half8(values + (size_t)j * dim + d + 8 * i), acc[i]);
        }
        for (int i = 0; i < 8; i++)
            _mm256_storeu_ps(o + d + 8 * i, acc[i]);
    }
}

/* A19's step: Y = Y * a + o * b. */
static void rescale(float *y, const float *o, float a, float b, uint32_t dim)
{
    for (uint32_t d = 0; d < dim; d += 8)
        _mm256_storeu_ps(y + d,
                         _mm256_fmadd_ps(_mm256_loadu_ps(y + d), _mm256_set1_ps(a),
                                         _mm256_mul_ps(_mm256_loadu_ps(o + d), _mm256_set1_ps(b))));
}

struct part {
    float m, l;
    float *o;
    bool empty;
};

static void merge(struct part *into, float m_next, float l_next, const float *o, uint32_t dim)
{
    if (into->empty) {
        into->m = m_next;
        into->l = l_next;
        memcpy(into->o, o, dim * sizeof(float));
        into->empty = false;
        return;
    }
    const float m = into->m > m_next ? into->m : m_next;
    const float a = k_float_exp32(into->m - m), b = k_float_exp32(m_next - m);
    const float lb = l_next * b;
    into->l = k_float_fma(into->l, a, lb);
    rescale(into->o, o, a, b, dim);
    into->m = m;
}

static bool attention_head(const float *q, const uint8_t *const *pages, uint32_t n_visible,
                           const struct k_kv *kv, uint32_t head_kv, float scale, float *work,
                           float *y)
{
    const uint32_t dim = kv->head_dim, n_pages = (n_visible + K_PAGE - 1) / K_PAGE;
    if (kv->type != K_KV_F16 || dim % 64 != 0)
        return k_ref_attention_head(q, pages, n_visible, kv, head_kv, scale, work, y);
    const size_t head = (size_t)head_kv * dim * K_PAGE;
    struct part total = {.o = work, .empty = true}, group = {.o = work + dim, .empty = true};
    float *o = work + 2 * dim, *s = work + 3 * dim;
    bool fault = false;
    for (uint32_t c = 0; c < n_pages; c++) {
        const uint32_t left = n_visible - c * K_PAGE, n = left < K_PAGE ? left : K_PAGE;
        const uint16_t *keys = (const uint16_t *)(const void *)pages[c] + head;
        const uint16_t *values = keys + (size_t)kv->n_head_kv * dim * K_PAGE;
        float m, l;
        scores(q, keys, dim, scale, s);
        fault |= weigh(s, n, &m, &l);
        weighted(s, n, values, dim, o);
        merge(&group, m, l, o, dim);
        if (c % K_CHUNK_GROUP == K_CHUNK_GROUP - 1 || c + 1 == n_pages) {
            merge(&total, group.m, group.l, group.o, dim);
            group.empty = true;
        }
    }
    for (uint32_t d = 0; d < dim; d += 8)
        _mm256_storeu_ps(y + d,
                         _mm256_div_ps(_mm256_loadu_ps(total.o + d), _mm256_set1_ps(total.l)));
    return fault;
}

void k_avx2_rows_fill(struct k_cpu_inner *ret)
{
    ret->quantise32 = quantise32;
    ret->quantise256 = quantise256;
    ret->norm = norm;
    ret->swiglu = swiglu;
    ret->moe_sum = moe_sum;
    ret->attention_head = attention_head;
}

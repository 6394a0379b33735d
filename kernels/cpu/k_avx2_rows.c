/* Operations on vectors of a row by AVX2: quantiser (A4), norm (A10), gate (A12), sum of experts
 * (A14). They are small beside the products, so the AVX-512 level uses them as well. */
#include <immintrin.h>
#include <string.h>

#include "k_avx2_exp.h"
#include "k_cpu_inner.h"
#include "k_float.h"
#include "k_format.h"
#include "k_stream.h"

/* Largest magnitude among 32 * n values, as bits. */
K_STREAM_INLINE uint32_t largest(const float *x, int n)
{
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i m = _mm256_setzero_si256();
    for (int i = 0; i < 4 * n; i++)
        m = _mm256_max_epu32(
            m, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + 8 * i)), mask));
    __m128i h = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    h = _mm_max_epu32(h, _mm_shuffle_epi32(h, 0x4e));
    h = _mm_max_epu32(h, _mm_shuffle_epi32(h, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(h);
}

/* Rounds 32 values to bytes; ret_sums: eight lanes each of the first and the second sixteen. */
K_STREAM_INLINE void round32(const float *x, __m256 inv, int8_t *q, __m256i ret_sums[2])
{
    __m256i v[4];
    K_STREAM_UNROLL
    for (int i = 0; i < 4; i++)
        v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), inv));
    ret_sums[0] = _mm256_add_epi32(v[0], v[1]);
    ret_sums[1] = _mm256_add_epi32(v[2], v[3]);
    const __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i *)(void *)q, _mm256_permutevar8x32_epi32(bytes, order));
}

/* Scale and its inverse of a block whose largest magnitude is m; 0 and 0 for a block that counts as
 * zero. */
K_STREAM_INLINE float scale_of(uint32_t m, float *ret_inv, bool *fault)
{
    *ret_inv = 0.0f;
    if (m >= 0x7f800000u) {
        *fault = true;
        return 0.0f;
    }
    if (m < 0x0d800000u)
        return 0.0f;
    *ret_inv = 127.0f / k_float_of_bits(m);
    return k_float_of_bits(m) / 127.0f;
}

static bool quantise32(const float *x, uint32_t n, uint32_t first, uint32_t count, void *ret)
{
    const struct k_act_row row = k_format_act_row(K_FORM_Q32, ret, n);
    bool fault = false;
    x += first;
    for (uint32_t b = first / 32; b < (first + count) / 32; b++, x += 32) {
        float inv;
        row.dx[b] = scale_of(largest(x, 1), &inv, &fault);
        if (inv == 0.0f) { /* inf * 0 must not get into q */
            memset(row.q + 32 * (size_t)b, 0, 32);
            row.sum[b] = 0;
            continue;
        }
        __m256i sums[2];
        round32(x, _mm256_set1_ps(inv), row.q + 32 * (size_t)b, sums);
        const __m256i s = _mm256_add_epi32(sums[0], sums[1]);
        __m128i h = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
        h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
        h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1));
        row.sum[b] = (int16_t)_mm_cvtsi128_si32(h);
    }
    return fault;
}

static bool quantise256(const float *x, uint32_t n, uint32_t first, uint32_t count, void *ret)
{
    const struct k_act_row row = k_format_act_row(K_FORM_Q256, ret, n);
    bool fault = false;
    x += first;
    for (uint32_t b = first / 256; b < (first + count) / 256; b++, x += 256) {
        int8_t *q = row.q + 256 * (size_t)b;
        int16_t *sum = row.sum + 8 * (size_t)b, *sum16 = row.sum16 + 16 * (size_t)b;
        float inv;
        row.dx[b] = scale_of(largest(x, 8), &inv, &fault);
        if (inv == 0.0f) {
            memset(q, 0, 256);
            memset(sum, 0, 8 * sizeof *sum);
            memset(sum16, 0, 16 * sizeof *sum16);
            continue;
        }
        __m256i lanes[16];
        K_STREAM_UNROLL
        for (int j = 0; j < 8; j++)
            round32(x + 32 * j, _mm256_set1_ps(inv), q + 32 * j, lanes + 2 * j);
        const __m256i low = k_stream_tree(lanes), high = k_stream_tree(lanes + 8);
        const __m256i all = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        _mm256_storeu_si256((__m256i *)(void *)sum16, all);
        const __m256i two = _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xd8);
        _mm_storeu_si128((__m128i *)(void *)sum, _mm_packs_epi32(_mm256_castsi256_si128(two),
                                                                 _mm256_extracti128_si256(two, 1)));
    }
    return fault;
}

static void norm(const float *x, const float *weight, float *y, uint32_t n, float eps)
{
    float lanes[32];
    __m256 a[4];
    K_STREAM_UNROLL
    for (int l = 0; l < 4; l++)
        a[l] = _mm256_setzero_ps();
    uint32_t i = 0;
    for (; i + 32 <= n; i += 32)
        K_STREAM_UNROLL
    for (uint32_t l = 0; l < 4; l++) {
        const __m256 v = _mm256_loadu_ps(x + i + 8 * l);
        a[l] = _mm256_fmadd_ps(v, v, a[l]);
    }
    memcpy(lanes, a, sizeof lanes);
    for (uint32_t l = 0; i + l < n; l++)
        lanes[l] = k_float_fma(x[i + l], x[i + l], lanes[l]);
    const float mean = k_float_tree32(lanes) / (float)n;
    const float r = 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + eps)));
    const __m256 factor = _mm256_set1_ps(r);
    for (i = 0; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), factor),
                                              _mm256_loadu_ps(weight + i)));
    for (; i < n; i++) {
        const float scaled = x[i] * r;
        y[i] = scaled * weight[i];
    }
}

static void swiglu(float *h, const float *up, uint32_t n)
{
    const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 g = _mm256_loadu_ps(h + i);
        const __m256 e = k_avx2_exp(_mm256_xor_ps(g, sign));
        const __m256 s = _mm256_div_ps(g, _mm256_add_ps(one, e));
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

static void rope(float *x, const float *table, uint32_t half)
{
    uint32_t i = 0;
    for (; i + 8 <= half; i += 8) {
        const __m256 low = _mm256_loadu_ps(table + 2 * i),
                     high = _mm256_loadu_ps(table + 2 * i + 8);
        /* a: pairs 0 1 4 5, b: pairs 2 3 6 7 */
        const __m256 a = _mm256_permute2f128_ps(low, high, 0x20);
        const __m256 b = _mm256_permute2f128_ps(low, high, 0x31);
        const __m256 c = _mm256_shuffle_ps(a, b, 0x88);
        const __m256 s = _mm256_shuffle_ps(a, b, 0xdd);
        const __m256 x0 = _mm256_loadu_ps(x + i), x1 = _mm256_loadu_ps(x + half + i);
        _mm256_storeu_ps(x + i, _mm256_fmsub_ps(x0, c, _mm256_mul_ps(x1, s)));
        _mm256_storeu_ps(x + half + i, _mm256_fmadd_ps(x1, c, _mm256_mul_ps(x0, s)));
    }
    for (; i < half; i++) {
        const float x0 = x[i], x1 = x[i + half], c = table[2 * i], s = table[2 * i + 1];
        const float x1s = x1 * s, x0s = x0 * s;
        x[i] = k_float_fma(x0, c, -x1s);
        x[i + half] = k_float_fma(x1, c, x0s);
    }
}

static bool kv_write_f16(void *layer, uint32_t n_head_kv, uint32_t dim, uint32_t slot,
                         const float *k, const float *v)
{
    uint16_t *keys = layer, *values = keys + (size_t)n_head_kv * dim * K_PAGE;
    const __m128i infinite = _mm_set1_epi16(0x7c00);
    __m128i wrong = _mm_setzero_si128();
    bool fault = false;
    for (uint32_t h = 0; h < n_head_kv; h++, k += dim, v += dim) {
        uint16_t *key = keys + (size_t)h * dim * K_PAGE + slot;
        uint16_t *value = values + ((size_t)h * K_PAGE + slot) * dim;
        uint32_t d = 0;
        for (; d + 8 <= dim; d += 8) {
            const __m128i k16 = _mm256_cvtps_ph(_mm256_loadu_ps(k + d), _MM_FROUND_TO_NEAREST_INT);
            const __m128i v16 = _mm256_cvtps_ph(_mm256_loadu_ps(v + d), _MM_FROUND_TO_NEAREST_INT);
            uint16_t each[8];
            _mm_storeu_si128((__m128i *)(void *)each, k16);
            for (uint32_t i = 0; i < 8; i++)
                key[(size_t)(d + i) * K_PAGE] = each[i];
            _mm_storeu_si128((__m128i *)(void *)(value + d), v16);
            wrong = _mm_or_si128(
                wrong, _mm_or_si128(_mm_cmpeq_epi16(_mm_and_si128(k16, infinite), infinite),
                                    _mm_cmpeq_epi16(_mm_and_si128(v16, infinite), infinite)));
        }
        for (; d < dim; d++) {
            key[(size_t)d * K_PAGE] = k_float_to_f16(k[d]);
            value[d] = k_float_to_f16(v[d]);
            fault |= (key[(size_t)d * K_PAGE] & 0x7c00) == 0x7c00 || (value[d] & 0x7c00) == 0x7c00;
        }
    }
    return fault || !_mm_testz_si128(wrong, wrong);
}

static float softmax(const float *x, uint32_t n, float *e)
{
    float m = x[0], lanes[32] = {0};
    for (uint32_t i = 1; i < n; i++)
        m = x[i] > m ? x[i] : m;
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 v = k_avx2_exp(_mm256_sub_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(m)));
        float *lane = lanes + i % 32;
        _mm256_storeu_ps(e + i, v);
        _mm256_storeu_ps(lane, _mm256_add_ps(_mm256_loadu_ps(lane), v));
    }
    for (; i < n; i++) {
        e[i] = k_float_exp32(x[i] - m);
        lanes[i % 32] = lanes[i % 32] + e[i];
    }
    return k_float_tree32(lanes);
}

static void add(float *x, const float *y, uint32_t n)
{
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
    for (; i < n; i++)
        x[i] = x[i] + y[i];
}

static bool finite(const float *x, uint32_t n)
{
    const __m256i inf = _mm256_set1_epi32(0x7f800000);
    __m256i wrong = _mm256_setzero_si256();
    uint32_t i = 0;
    bool ok = true;
    for (; i + 8 <= n; i += 8) {
        const __m256i bits = _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), inf);
        wrong = _mm256_or_si256(wrong, _mm256_cmpeq_epi32(bits, inf));
    }
    for (; i < n; i++)
        ok &= k_float_finite(x[i]);
    return ok && _mm256_testz_si256(wrong, wrong);
}

void k_avx2_rows_fill(struct k_cpu_inner *ret)
{
    ret->quantise32 = quantise32;
    ret->quantise256 = quantise256;
    ret->norm = norm;
    ret->swiglu = swiglu;
    ret->rope = rope;
    ret->kv_write_f16 = kv_write_f16;
    ret->softmax = softmax;
    ret->add = add;
    ret->finite = finite;
    ret->moe_sum = moe_sum;
}

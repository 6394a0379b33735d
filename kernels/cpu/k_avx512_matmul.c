/* Products by AVX-512 VNNI (B1). One row: weight blocks in memory order, eight at a time, int32 vectors reduced together by
 * a transposing add tree. More rows: a block is unpacked once for a tile of up to 8 rows, lane = row after the tree. */
#include <immintrin.h>
#include <string.h>

#include "k_cpu_inner.h"
#include "k_float.h"
#include "k_format.h"
#include "k_ref.h"

static inline __m256i halves(__m512i v)
{
    return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
}

static inline __m512i join(__m256i low, __m256i high)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

#include "k_avx_trees.h"

/* A super-block ready for dot products: weights 0..63 as bytes, scales as 32-bit lanes with the upper half zero (so that
 * vpdpwssd multiplies a dot that fits 16 bits), and what the minimum or the offset needs. */
struct unpacked {
    __m512i w[4], scale[4];
    __m256i offset; /* Q6_K: int16 scales; Q4_K, Q5_K: mins in the lower half */
};

static inline void unpack_scales_k(const uint8_t *scales, struct unpacked *u)
{
    uint32_t part[3];
    memcpy(part, scales, 12);
    const uint32_t m1 = 0x3f3f3f3fu, m2 = 0x0f0f0f0fu, m3 = 0x03030303u;
    const uint32_t s0 = part[0] & m1, s1 = (part[2] & m2) | (((part[0] >> 6) & m3) << 4);
    const uint32_t n0 = part[1] & m1, n1 = ((part[2] >> 4) & m2) | (((part[1] >> 6) & m3) << 4);
    const __m128i all = _mm_set_epi32((int)n1, (int)n0, (int)s1, (int)s0);
    const __m512i s = _mm512_castsi256_si512(_mm256_cvtepu8_epi32(all));
    for (int p = 0; p < 4; p++)
        u->scale[p] = _mm512_permutexvar_epi32(
            join(_mm256_set1_epi32(2 * p), _mm256_set1_epi32(2 * p + 1)), s);
    u->offset = _mm256_castsi128_si256(_mm_cvtepu8_epi16(_mm_srli_si128(all, 8)));
}

static inline void unpack_nibbles(const uint8_t *q, struct unpacked *u)
{
    const __m256i mask = _mm256_set1_epi8(15);
    for (int p = 0; p < 4; p++) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)(q + 32 * p));
        u->w[p] = join(_mm256_and_si256(bytes, mask),
                       _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask));
    }
}

static inline void unpack_q4_k(const void *block, struct unpacked *u)
{
    const struct k_format_q4_k *b = block;
    unpack_scales_k(b->scales, u);
    unpack_nibbles(b->q, u);
}

static inline void unpack_q5_k(const void *block, struct unpacked *u)
{
    const struct k_format_q5_k *b = block;
    unpack_scales_k(b->scales, u);
    unpack_nibbles(b->q, u);
    const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)b->high);
    const __m512i high = join(bits, bits);
    for (int p = 0; p < 4; p++) {
        const __m512i select =
            join(_mm256_set1_epi8((char)(1 << (2 * p))), _mm256_set1_epi8((char)(2 << (2 * p))));
        u->w[p] = _mm512_mask_add_epi8(u->w[p], _mm512_test_epi8_mask(high, select), u->w[p],
                                       _mm512_set1_epi8(16));
    }
}

static inline void unpack_q6_k(const void *block, struct unpacked *u)
{
    const struct k_format_q6_k *b = block;
    const __m128i scales = _mm_loadu_si128((const __m128i *)(const void *)b->scales);
    const __m512i s = _mm512_and_si512(_mm512_cvtepi8_epi32(scales), _mm512_set1_epi32(0xffff));
    u->offset = _mm256_cvtepi8_epi16(scales);
    for (int half = 0; half < 2; half++) {
        const __m512i low = _mm512_loadu_si512(b->low + 64 * half);
        const __m256i h = _mm256_loadu_si256((const __m256i *)(const void *)(b->high + 32 * half));
        const __m512i high = join(h, _mm256_srli_epi16(h, 2));
        const __m512i four = _mm512_set1_epi8(15), two = _mm512_set1_epi8(0x30);
        u->w[2 * half] = _mm512_or_si512(_mm512_and_si512(low, four),
                                         _mm512_and_si512(_mm512_slli_epi16(high, 4), two));
        u->w[2 * half + 1] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(low, 4), four),
                                             _mm512_and_si512(high, two));
    }
    for (int p = 0; p < 4; p++) {
        const __m512i index = _mm512_set_epi32(
            4 * p + 3, 4 * p + 3, 4 * p + 3, 4 * p + 3, 4 * p + 2, 4 * p + 2, 4 * p + 2, 4 * p + 2,
            4 * p + 1, 4 * p + 1, 4 * p + 1, 4 * p + 1, 4 * p, 4 * p, 4 * p, 4 * p);
        u->scale[p] = _mm512_permutexvar_epi32(index, s);
    }
}

/* sum of scale * (w . q) over the block, as eight lanes yet to be added. */
static inline __m256i dot256(const struct unpacked *u, const int8_t *q)
{
    __m512i acc = _mm512_setzero_si512();
    for (int p = 0; p < 4; p++) {
        const __m512i x = _mm512_loadu_si512(q + 64 * p);
        const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u->w[p], x);
        acc = _mm512_dpwssd_epi32(acc, dot, u->scale[p]);
    }
    return halves(acc);
}

/* Q6_K's weights are q - 32: takes 32 * scale * sum16 away. */
static inline __m256i less_offset(const struct unpacked *u, __m256i dot, const int16_t *sum16)
{
    const __m256i sums = _mm256_loadu_si256((const __m256i *)(const void *)sum16);
    return _mm256_sub_epi32(dot, _mm256_slli_epi32(_mm256_madd_epi16(u->offset, sums), 5));
}

static inline __m128i mins_dot(const struct unpacked *u, const int16_t *sum)
{
    return _mm_madd_epi16(_mm256_castsi256_si128(u->offset),
                          _mm_loadu_si128((const __m128i *)(const void *)sum));
}

static inline void unpack256(enum k_format format, const void *block, struct unpacked *u)
{
    if (format == K_Q4_K)
        unpack_q4_k(block, u);
    else if (format == K_Q5_K)
        unpack_q5_k(block, u);
    else
        unpack_q6_k(block, u);
}

static inline __m256 f16_lanes(__m256i bits)
{
    return _mm256_cvtph_ps(_mm256_cvtepi32_epi16(bits));
}

/* Q8_0: (w + 128) as unsigned, less 128 * sum. Q4_0: nibbles, less 8 * sum. */
static inline __m256i weights32(enum k_format format, const uint8_t *block)
{
    if (format == K_Q8_0)
        return _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(const void *)(block + 2)),
                                _mm256_set1_epi8((char)0x80));
    const __m128i nibbles = _mm_loadu_si128((const __m128i *)(const void *)(block + 2));
    const __m128i mask = _mm_set1_epi8(15);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_and_si128(nibbles, mask)),
                                   _mm_and_si128(_mm_srli_epi16(nibbles, 4), mask), 1);
}

static inline __m256i dot32(enum k_format format, __m256i w, const int8_t *q, int16_t sum)
{
    const int32_t offset = format == K_Q8_0 ? -128 : -8;
    const __m256i start = _mm256_zextsi128_si256(_mm_cvtsi32_si128(offset * sum));
    return _mm256_dpbusd_epi32(start, w, _mm256_loadu_si256((const __m256i *)(const void *)q));
}

#include "k_avx_matmul.h"

/* A8: 32 lanes are two vectors; the tree's first step adds them. */
static inline float tree32_512(__m512 a, __m512 b)
{
    const __m512 v16 = _mm512_add_ps(a, b);
    const __m256 v8 = _mm256_add_ps(_mm512_castps512_ps256(v16), _mm512_extractf32x8_ps(v16, 1));
    const __m128 v4 = _mm_add_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
    const __m128 v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
    return _mm_cvtss_f32(_mm_add_ss(v2, _mm_movehdup_ps(v2)));
}

static inline __m512 load_float(enum k_format format, const uint8_t *w, uint32_t i, __mmask16 mask)
{
    if (format == K_F32)
        return _mm512_maskz_loadu_ps(mask, (const float *)(const void *)w + i);
    const __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)(const void *)w + i);
    if (format == K_F16)
        return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline __attribute__((always_inline)) void mul_float(enum k_format format, const uint8_t *w,
                                                            uint32_t n_out, uint32_t n_in,
                                                            const void *const *x, float *const *y,
                                                            uint32_t n_rows)
{
    const uint64_t stride = k_format_bytes(format, 1, n_in);
    for (uint32_t o = 0; o < n_out; o++, w += stride)
        for (uint32_t r = 0; r < n_rows; r++) {
            const float *row = x[r];
            __m512 a = _mm512_setzero_ps(), b = _mm512_setzero_ps();
            uint32_t i = 0;
            for (; i + 32 <= n_in; i += 32) {
                a = _mm512_fmadd_ps(load_float(format, w, i, 0xffff), _mm512_loadu_ps(row + i), a);
                b = _mm512_fmadd_ps(load_float(format, w, i + 16, 0xffff),
                                    _mm512_loadu_ps(row + i + 16), b);
            }
            /* A missing element leaves its lane as it is: masked, not fma(0, 0, lane). */
            const uint32_t left = n_in - i, left_a = left < 16 ? left : 16;
            const __mmask16 ka = (__mmask16)((1u << left_a) - 1);
            const __mmask16 kb = (__mmask16)((1u << (left - left_a)) - 1);
            a = _mm512_mask3_fmadd_ps(load_float(format, w, i, ka),
                                      _mm512_maskz_loadu_ps(ka, row + i), a, ka);
            b = _mm512_mask3_fmadd_ps(load_float(format, w, i + 16, kb),
                                      _mm512_maskz_loadu_ps(kb, row + i + 16), b, kb);
            y[r][o] = tree32_512(a, b);
        }
}

#include "k_avx_dispatch.h"

void k_avx512_matmul_fill(struct k_cpu_inner *ret)
{
    ret->mul = mul;
}

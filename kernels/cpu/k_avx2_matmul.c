/* Products by AVX2 (B1): unsigned by signed bytes with vpmaddubsw, which never saturates here (largest pair sum 32,512),
 * then vpmaddwd with the sub-block's scale. */
#include <immintrin.h>
#include <string.h>

#include "k_cpu_inner.h"
#include "k_float.h"
#include "k_format.h"
#include "k_ref.h"

#include "k_avx_trees.h"

/* A super-block ready for dot products: unsigned weights by 32, and per 32 the int16 scales (two of 16 in Q6_K). */
struct unpacked {
    __m256i w[8], scale[8];
    __m256i offset; /* Q6_K: int16 scales; Q4_K, Q5_K: mins in the lower half */
};

static inline __m256i load32(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

static inline void unpack_scales_k(const uint8_t *scales, struct unpacked *u)
{
    uint32_t part[3];
    memcpy(part, scales, 12);
    const uint32_t m1 = 0x3f3f3f3fu, m2 = 0x0f0f0f0fu, m3 = 0x03030303u;
    const uint32_t s0 = part[0] & m1, s1 = (part[2] & m2) | (((part[0] >> 6) & m3) << 4);
    const uint32_t n0 = part[1] & m1, n1 = ((part[2] >> 4) & m2) | (((part[1] >> 6) & m3) << 4);
    const __m128i all = _mm_set_epi32((int)n1, (int)n0, (int)s1, (int)s0);
    const __m128i s = _mm_cvtepu8_epi16(all);
    const __m256i both = _mm256_broadcastsi128_si256(s);
    for (int j = 0; j < 8; j++)
        u->scale[j] =
            _mm256_shuffle_epi8(both, _mm256_set1_epi16((short)(((2 * j + 1) << 8) | (2 * j))));
    u->offset = _mm256_castsi128_si256(_mm_cvtepu8_epi16(_mm_srli_si128(all, 8)));
}

static inline void unpack_nibbles(const uint8_t *q, struct unpacked *u)
{
    const __m256i mask = _mm256_set1_epi8(15);
    for (int p = 0; p < 4; p++) {
        const __m256i bytes = load32(q + 32 * p);
        u->w[2 * p] = _mm256_and_si256(bytes, mask);
        u->w[2 * p + 1] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
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
    const __m256i high = load32(b->high);
    for (int j = 0; j < 8; j++) {
        const __m256i bit = _mm256_set1_epi8((char)(1 << j));
        const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(high, bit), bit);
        u->w[j] = _mm256_or_si256(u->w[j], _mm256_and_si256(set, _mm256_set1_epi8(16)));
    }
}

static inline void unpack_q6_k(const void *block, struct unpacked *u)
{
    const struct k_format_q6_k *b = block;
    const __m256i four = _mm256_set1_epi8(15), two = _mm256_set1_epi8(0x30);
    u->offset = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)b->scales));
    for (int half = 0; half < 2; half++) {
        const __m256i l0 = load32(b->low + 64 * half), l1 = load32(b->low + 64 * half + 32);
        const __m256i h = load32(b->high + 32 * half);
        __m256i *w = u->w + 4 * half;
        w[0] = _mm256_or_si256(_mm256_and_si256(l0, four),
                               _mm256_and_si256(_mm256_slli_epi16(h, 4), two));
        w[1] = _mm256_or_si256(_mm256_and_si256(l1, four),
                               _mm256_and_si256(_mm256_slli_epi16(h, 2), two));
        w[2] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l0, 4), four),
                               _mm256_and_si256(h, two));
        w[3] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l1, 4), four),
                               _mm256_and_si256(_mm256_srli_epi16(h, 2), two));
    }
    /* Scales 2j and 2j + 1 in the halves of vector j. */
    const __m256i low = _mm256_permute4x64_epi64(u->offset, 0x44);
    const __m256i high = _mm256_permute4x64_epi64(u->offset, 0xee);
    for (int j = 0; j < 8; j++) {
        const int first = 4 * (j % 4); /* byte of scale 2j in its eight */
        const __m256i pick =
            _mm256_set_m128i(_mm_set1_epi16((short)(((first + 3) << 8) | (first + 2))),
                             _mm_set1_epi16((short)(((first + 1) << 8) | first)));
        u->scale[j] = _mm256_shuffle_epi8(j < 4 ? low : high, pick);
    }
}

static inline __m256i dot256(const struct unpacked *u, const int8_t *q)
{
    __m256i acc = _mm256_setzero_si256();
    for (int j = 0; j < 8; j++) {
        const __m256i pairs = _mm256_maddubs_epi16(u->w[j], load32(q + 32 * j));
        acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, u->scale[j]));
    }
    return acc;
}

/* Q6_K's weights are q - 32: takes 32 * scale * sum16 away. */
static inline __m256i less_offset(const struct unpacked *u, __m256i dot, const int16_t *sum16)
{
    return _mm256_sub_epi32(dot, _mm256_slli_epi32(_mm256_madd_epi16(u->offset, load32(sum16)), 5));
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
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}

/* Q8_0: signed as stored. Q4_0: nibbles, less 8 * sum. */
static inline __m256i weights32(enum k_format format, const uint8_t *block)
{
    if (format == K_Q8_0)
        return load32(block + 2);
    const __m128i nibbles = _mm_loadu_si128((const __m128i *)(const void *)(block + 2));
    const __m128i mask = _mm_set1_epi8(15);
    return _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(nibbles, 4), mask),
                            _mm_and_si128(nibbles, mask));
}

static inline __m256i dot32(enum k_format format, __m256i w, const int8_t *q, int16_t sum)
{
    const __m256i one = _mm256_set1_epi16(1), x = load32(q);
    if (format == K_Q8_0) {
        /* |w| * (x with w's sign): |-128| is 128 as an unsigned byte, and x is never -128. */
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        return _mm256_madd_epi16(pairs, one);
    }
    const __m256i start = _mm256_zextsi128_si256(_mm_cvtsi32_si128(-8 * sum));
    return _mm256_add_epi32(start, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), one));
}

#include "k_avx_matmul.h"

static inline __m256 load_float(enum k_format format, const uint8_t *w, uint32_t i)
{
    if (format == K_F32)
        return _mm256_loadu_ps((const float *)(const void *)w + i);
    const __m128i half =
        _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)(const void *)w + i));
    if (format == K_F16)
        return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

static inline __attribute__((always_inline)) void mul_float(enum k_format format, const uint8_t *w,
                                                            uint32_t n_out, uint32_t n_in,
                                                            const void *const *x, float *const *y,
                                                            uint32_t n_rows)
{
    const uint64_t stride = k_format_bytes(format, 1, n_in);
    for (uint32_t o = 0; o < n_out; o++, w += stride)
        for (uint32_t r = 0; r < n_rows; r++) {
            if (n_in % 32 != 0) {
                y[r][o] = k_ref_dot(format, w, x[r], n_in);
                continue;
            }
            const float *row = x[r];
            __m256 a[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                           _mm256_setzero_ps()};
            for (uint32_t i = 0; i < n_in; i += 32)
                for (uint32_t k = 0; k < 4; k++)
                    a[k] = _mm256_fmadd_ps(load_float(format, w, i + 8 * k),
                                           _mm256_loadu_ps(row + i + 8 * k), a[k]);
            const __m256 v8 = _mm256_add_ps(_mm256_add_ps(a[0], a[2]), _mm256_add_ps(a[1], a[3]));
            const __m128 v4 = _mm_add_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
            const __m128 v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
            y[r][o] = _mm_cvtss_f32(_mm_add_ss(v2, _mm_movehdup_ps(v2)));
        }
}

#include "k_avx_dispatch.h"

void k_avx2_matmul_fill(struct k_cpu_inner *ret)
{
    ret->mul = mul;
}

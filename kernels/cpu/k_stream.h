/* What AVX2 and AVX-512 share: reductions of int32 vectors, scales, and the product with few rows
 * (B1): weight blocks in memory order, one stream, eight at a time; their vectors are reduced
 * together by a transposing add tree, and the terms of each output are folded in order afterwards.
 * Each level brings its own dot product of a block. Only for files compiled with a level's
 * flags. */
#ifndef ISLET_K_STREAM_H
#define ISLET_K_STREAM_H
#if defined(__AVX2__)

#include <immintrin.h>
#include <stddef.h>
#include <string.h>

#include "k_cpu_inner.h"
#include "k_float.h"
#include "k_format.h"

#define K_STREAM_INLINE static inline __attribute__((always_inline))
/* Before a loop of constant length whose arrays are meant to live in registers. */
#if defined(__clang__)
#define K_STREAM_UNROLL _Pragma("unroll")
#else
#define K_STREAM_UNROLL _Pragma("GCC unroll 64")
#endif

enum {
    K_STREAM_LANES = 8,
    K_STREAM_ROWS = 3, /* most rows at once; more rows are better off with a panel */
    K_STREAM_T = 4096, /* terms of a row held before a fold */
    K_STREAM_AHEAD = 1024
};

/* Sums of eight int32 vectors, lane i = sum of v[i]. */
K_STREAM_INLINE __m256i k_stream_tree(const __m256i v[8])
{
    const __m256i a =
        _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    const __m256i b =
        _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                            _mm256_permute2x128_si256(a, b, 0x31));
}

K_STREAM_INLINE __m256i k_stream_tree128(const __m128i v[8])
{
    const __m128i a = _mm_hadd_epi32(_mm_hadd_epi32(v[0], v[1]), _mm_hadd_epi32(v[2], v[3]));
    const __m128i b = _mm_hadd_epi32(_mm_hadd_epi32(v[4], v[5]), _mm_hadd_epi32(v[6], v[7]));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}

K_STREAM_INLINE bool k_stream_small(enum k_format format)
{
    return format == K_Q8_0 || format == K_Q4_0;
}

K_STREAM_INLINE bool k_stream_has_mins(enum k_format format)
{
    return format == K_Q4_K || format == K_Q5_K;
}

K_STREAM_INLINE uint32_t k_stream_bytes(enum k_format format)
{
    switch (format) {
    case K_Q4_0:
        return sizeof(struct k_format_q4_0);
    case K_Q8_0:
        return sizeof(struct k_format_q8_0);
    case K_Q4_K:
        return sizeof(struct k_format_q4_k);
    case K_Q5_K:
        return sizeof(struct k_format_q5_k);
    default:
        return sizeof(struct k_format_q6_k);
    }
}

/* Scales of a block as f16 bits: d in the low half, dmin in the high one (Q4_K, Q5_K); others d
 * alone. */
K_STREAM_INLINE uint32_t k_stream_scales(enum k_format format, const uint8_t *block)
{
    uint32_t both = 0;
    if (k_stream_has_mins(format))
        memcpy(&both, block, 4);
    else
        memcpy(&both, block + (format == K_Q6_K ? offsetof(struct k_format_q6_k, d) : 0), 2);
    return both;
}

/* Eight six-bit scales, then eight six-bit mins, as bytes (Q4_K, Q5_K; k_format_scale_min has the
 * packing). `block` begins with d and dmin. */
K_STREAM_INLINE __m128i k_stream_scale_min(const uint8_t *block)
{
    const __m128i v = _mm_loadu_si128((const __m128i *)(const void *)block);
    const __m128i own = _mm_shuffle_epi32(v, 0xa5);  /* dwords 1 1 2 2: scales, mins */
    const __m128i rest = _mm_shuffle_epi32(v, 0xff); /* dword 3: low bits of the later ones */
    const __m128i high =
        _mm_and_si128(_mm_srlv_epi32(own, _mm_setr_epi32(0, 2, 0, 2)),
                      _mm_setr_epi32(0x3f3f3f3f, 0x30303030, 0x3f3f3f3f, 0x30303030));
    const __m128i low = _mm_and_si128(_mm_srlv_epi32(rest, _mm_setr_epi32(0, 0, 0, 4)),
                                      _mm_setr_epi32(0, 0x0f0f0f0f, 0, 0x0f0f0f0f));
    return _mm_or_si128(high, low);
}

K_STREAM_INLINE __m256 k_stream_f16(__m256i bits)
{
    const __m256i packed = _mm256_packus_epi32(bits, bits);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}

/* t of eight blocks (A5) from their S, M and scales. The scales come as words, not by memory: eight
 * small stores and one wide load would wait for each other. */
K_STREAM_INLINE __m256 k_stream_term(enum k_format format, __m256i s, __m256i m,
                                     const int32_t d[K_STREAM_LANES])
{
    const __m128i first = _mm_setr_epi32(d[0], d[1], d[2], d[3]);
    const __m128i second = _mm_setr_epi32(d[4], d[5], d[6], d[7]);
    if (!k_stream_has_mins(format)) {
        const __m256 scale = _mm256_cvtph_ps(_mm_packus_epi32(first, second));
        return _mm256_mul_ps(scale, _mm256_cvtepi32_ps(s));
    }
    const __m128i apart = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m128i low = _mm_shuffle_epi8(first, apart), high = _mm_shuffle_epi8(second, apart);
    const __m256 scale = _mm256_cvtph_ps(_mm_unpacklo_epi64(low, high));
    const __m256 min = _mm256_cvtph_ps(_mm_unpackhi_epi64(low, high));
    return _mm256_fmsub_ps(scale, _mm256_cvtepi32_ps(s), _mm256_mul_ps(min, _mm256_cvtepi32_ps(m)));
}

/* acc = fma(dx[b], t[b], acc) for each output; eight outputs at a time hide the latency (A6). */
static inline void k_stream_fold(const float *t, uint32_t n_blocks, const float *dx, uint32_t n_out,
                                 float *y)
{
    for (uint32_t o = 0; o < n_out; o += K_STREAM_LANES) {
        const uint32_t n = n_out - o < K_STREAM_LANES ? n_out - o : K_STREAM_LANES;
        const float *row[K_STREAM_LANES];
        float acc[K_STREAM_LANES] = {0};
        K_STREAM_UNROLL
        for (uint32_t i = 0; i < K_STREAM_LANES; i++)
            row[i] = t + (size_t)(o + (i < n ? i : n - 1)) * n_blocks;
        for (uint32_t b = 0; b < n_blocks; b++)
            K_STREAM_UNROLL
        for (uint32_t i = 0; i < K_STREAM_LANES; i++)
            acc[i] = k_float_fma(dx[b], row[i][b], acc[i]);
        memcpy(y + o, acc, n * sizeof(float));
    }
}

/* Sums of eight blocks with R rows, as lanes yet to be added: S as eight, M as four. */
struct k_stream_sums {
    __m256i s[K_STREAM_ROWS][K_STREAM_LANES];
    __m128i m[K_STREAM_ROWS][K_STREAM_LANES];
};
/* Fills [r][lane] for r < R from one weight block. `xb`: the activations' block. */
typedef void k_stream_block_fn(enum k_format format, const uint8_t *block,
                               const struct k_act_row *x, const int R, uint32_t xb, uint32_t lane,
                               struct k_stream_sums *ret);

/* Terms of n consecutive blocks, of whatever outputs they are; t[r] = t + r * K_STREAM_T. `even`: n
 * and n_blocks are multiples of 8, so that eight blocks belong to one output and every address is
 * known. */
K_STREAM_INLINE void k_stream_terms(enum k_format format, k_stream_block_fn *dot, const bool even,
                                    const uint8_t *w, uint32_t n, uint32_t n_blocks,
                                    const struct k_act_row *x, const int R, float *t)
{
    const uint32_t bytes = k_stream_bytes(format);
    const uint8_t *block = w;
    uint32_t xb = 0;
    for (uint32_t i = 0; i < n; i += K_STREAM_LANES) {
        struct k_stream_sums sums;
        int32_t d[K_STREAM_LANES];
        for (uint32_t at = 0; at < K_STREAM_LANES * bytes; at += 64)
            _mm_prefetch((const char *)block + at + K_STREAM_AHEAD, _MM_HINT_T0);
        K_STREAM_UNROLL
        for (uint32_t l = 0; l < K_STREAM_LANES; l++) {
            dot(format, block, x, R, xb, l, &sums);
            d[l] = (int32_t)k_stream_scales(format, block);
            if (even) {
                block += bytes;
                xb++;
            } else { /* past the end the last block is computed again; t has room for it */
                block += i + l + 1 < n ? bytes : 0;
                xb = xb + 1 == n_blocks ? 0 : xb + 1;
            }
        }
        if (even)
            xb = xb == n_blocks ? 0 : xb;
        K_STREAM_UNROLL
        for (int r = 0; r < R; r++) {
            __m256i mins = _mm256_setzero_si256();
            if (k_stream_has_mins(format))
                mins = k_stream_tree128(sums.m[r]);
            _mm256_storeu_ps(t + r * K_STREAM_T + i,
                             k_stream_term(format, k_stream_tree(sums.s[r]), mins, d));
        }
    }
}

/* R rows; with format, dot and R constant this is one kernel. */
K_STREAM_INLINE void k_stream_some(enum k_format format, k_stream_block_fn *dot, const uint8_t *w,
                                   uint32_t n_out, uint32_t n_in, const void *const *x,
                                   float *const *y, const int R, float *t)
{
    const enum k_form form = k_stream_small(format) ? K_FORM_Q32 : K_FORM_Q256;
    const uint32_t n_blocks = n_in / (k_stream_small(format) ? 32 : 256);
    const size_t stride = (size_t)n_blocks * k_stream_bytes(format);
    const uint32_t fits = K_STREAM_T / n_blocks, tile = fits < 64 ? fits : 64;
    struct k_act_row rows[K_STREAM_ROWS];
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++)
        rows[r] = k_format_act_row(form, (void *)(uintptr_t)x[r], n_in);
    for (uint32_t o = 0; o < n_out; o += tile) {
        const uint32_t n = n_out - o < tile ? n_out - o : tile;
        const uint8_t *first = w + stride * o;
        if (n_blocks % K_STREAM_LANES == 0)
            k_stream_terms(format, dot, true, first, n * n_blocks, n_blocks, rows, R, t);
        else
            k_stream_terms(format, dot, false, first, n * n_blocks, n_blocks, rows, R, t);
        K_STREAM_UNROLL
        for (int r = 0; r < R; r++)
            k_stream_fold(t + r * K_STREAM_T, n_blocks, rows[r].dx, n, y[r] + o);
    }
}

/* Defines one kernel as a function of its own, which keeps the compiler's registers apart. */
#define K_STREAM_KERNEL(name, format, dot, R)                                                   \
    static __attribute__((noinline)) void name(const uint8_t *w, uint32_t n_out, uint32_t n_in, \
                                               const void *const *x, float *const *y, float *t) \
    {                                                                                           \
        k_stream_some(format, dot, w, n_out, n_in, x, y, R, t);                                 \
    }

#endif
#endif

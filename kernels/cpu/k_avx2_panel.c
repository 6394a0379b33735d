#include "k_avx2_panel.h"

#include <immintrin.h>

#include "k_avx2_unpack.h"
#include "k_format.h"
#include "k_stream.h"

enum {
    LANES = 8,
    DEPTH = 256 /* inputs of a panel: one super-block or eight 32-blocks */
};

/* In `work`. Lane = output everywhere. */
struct panel {
    __m256i w[DEPTH / 4];    /* four inputs a lane; unsigned (super-blocks) or signed */
    __m256i size[DEPTH / 4]; /* 32-blocks: magnitudes of w, as unsigned bytes */
    __m256i scale[16];       /* of each sub-block, the same int16 twice */
    __m256i pair[8];         /* int16 pairs: mins of 32-sub-blocks (Q4_K, Q5_K), scales (Q6_K) */
    __m256 d[8], dmin;       /* 32-blocks: d of each */
    __m256 acc[K_CPU_TILE_ROWS];
    struct k_act_row x[K_CPU_TILE_ROWS];
};
_Static_assert(sizeof(struct panel) <= K_CPU_WORK_BYTES, "the panel lies in the thread's scratch");

/* 8 vectors of 8 dwords -> dword k of each in out[k]. */
K_STREAM_INLINE void transpose8(const __m256i in[8], __m256i out[8])
{
    __m256i a[8], b[8];
    K_STREAM_UNROLL
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(in[i], in[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(in[i], in[i + 1]);
    }
    K_STREAM_UNROLL
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    K_STREAM_UNROLL
    for (int k = 0; k < 4; k++) {
        out[k] = _mm256_permute2x128_si256(b[k], b[4 + k], 0x20);
        out[k + 4] = _mm256_permute2x128_si256(b[k], b[4 + k], 0x31);
    }
}

/* Dword `at` of each output's 16 bytes. */
K_STREAM_INLINE __m256i column(const uint8_t bytes[LANES][16], int at)
{
    const __m256i index = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    return _mm256_i32gather_epi32((const int *)(const void *)((const uint8_t *)bytes + 4 * at),
                                  index, 4);
}

/* Low halves of `low` and of `high`, as pairs of int16. */
K_STREAM_INLINE __m256i pairs(__m256i low, __m256i high)
{
    return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
}

K_STREAM_INLINE void fill_scales(enum k_format format, const uint8_t *const block[LANES],
                                 struct panel *p)
{
    _Alignas(32) uint8_t bytes[LANES][16];
    _Alignas(32) uint32_t d[LANES];
    for (int o = 0; o < LANES; o++) {
        const struct k_format_q6_k *q6 = (const void *)block[o];
        const __m128i scales = format == K_Q6_K
                                   ? _mm_loadu_si128((const __m128i *)(const void *)q6->scales)
                                   : k_stream_scale_min(block[o]);
        _mm_store_si128((__m128i *)(void *)bytes[o], scales);
        d[o] = k_stream_scales(format, block[o]);
    }
    const __m256i both = k_avx2_load(d);
    p->d[0] = k_stream_f16(_mm256_and_si256(both, _mm256_set1_epi32(0xffff)));
    p->dmin = k_stream_f16(_mm256_srli_epi32(both, 16));
    __m256i value[16]; /* scales, then mins (Q4_K, Q5_K) */
    K_STREAM_UNROLL
    for (int j = 0; j < 4; j++) {
        const __m256i c = column(bytes, j);
        K_STREAM_UNROLL
        for (int i = 0; i < 4; i++) {
            const __m256i top = _mm256_slli_epi32(c, 24 - 8 * i);
            value[4 * j + i] =
                format == K_Q6_K ? _mm256_srai_epi32(top, 24) : _mm256_srli_epi32(top, 24);
        }
    }
    const int subs = format == K_Q6_K ? 16 : 8;
    K_STREAM_UNROLL
    for (int j = 0; j < subs; j++)
        p->scale[j] = pairs(value[j], value[j]);
    K_STREAM_UNROLL
    for (int j = 0; j < subs / 2; j++)
        p->pair[j] = format == K_Q6_K ? pairs(value[2 * j], value[2 * j + 1])
                                      : pairs(value[8 + 2 * j], value[9 + 2 * j]);
}

K_STREAM_INLINE void fill256(enum k_format format, const uint8_t *const block[LANES],
                             struct panel *p)
{
    __m256i rows[8][LANES];
    for (int o = 0; o < LANES; o++) {
        __m256i w[8];
        k_avx2_unpack256(format, block[o], w);
        K_STREAM_UNROLL
        for (int part = 0; part < 8; part++)
            rows[part][o] = w[part];
    }
    for (int part = 0; part < 8; part++)
        transpose8(rows[part], p->w + 8 * part);
    fill_scales(format, block, p);
}

/* n 32-blocks (up to 8) of 8 outputs. */
K_STREAM_INLINE void fill32(enum k_format format, const uint8_t *const block[LANES], uint32_t n,
                            struct panel *p)
{
    const uint32_t bytes = k_stream_bytes(format);
    for (uint32_t b = 0; b < n; b++) {
        __m256i rows[LANES];
        _Alignas(32) uint32_t d[LANES];
        for (int o = 0; o < LANES; o++) {
            const uint8_t *one = block[o] + (size_t)b * bytes;
            rows[o] = k_avx2_unpack32(format, one);
            d[o] = k_stream_scales(format, one);
        }
        transpose8(rows, p->w + 8 * b);
        K_STREAM_UNROLL
        for (int i = 0; i < 8; i++)
            p->size[8 * b + (uint32_t)i] = _mm256_abs_epi8(p->w[8 * b + (uint32_t)i]);
        p->d[b] = k_stream_f16(k_avx2_load(d));
    }
}

K_STREAM_INLINE __m256i four_inputs(const int8_t *q)
{
    int32_t four;
    memcpy(&four, q, 4);
    return _mm256_set1_epi32(four);
}

K_STREAM_INLINE __m256i two_sums(const int16_t *sums)
{
    int32_t two;
    memcpy(&two, sums, 4);
    return _mm256_set1_epi32(two);
}

/* As many pair sums of vpmaddubsw as fit int16 are added before the multiplication by the scale: a
 * pair is at most 2 * 127 * 15 (Q4_K: 8), 31 (Q5_K: 4), 63 (Q6_K: 2). */
K_STREAM_INLINE void run256(enum k_format format, struct panel *p, uint32_t first, const int R,
                            uint32_t b)
{
    const int subs = format == K_Q6_K ? 16 : 8, steps = 64 / subs;
    const int run = format == K_Q4_K ? 8 : format == K_Q5_K ? 4 : 2;
    __m256i s[4], m[4];
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++)
        s[r] = m[r] = _mm256_setzero_si256();
    for (int i = 0; i < 64; i += run) {
        __m256i dot[4];
        K_STREAM_UNROLL
        for (int r = 0; r < R; r++)
            dot[r] = _mm256_setzero_si256();
        K_STREAM_UNROLL
        for (int k = i; k < i + run; k++)
            K_STREAM_UNROLL
        for (int r = 0; r < R; r++) {
            const __m256i x = four_inputs(p->x[first + (uint32_t)r].q + 256 * (size_t)b + 4 * k);
            dot[r] = _mm256_add_epi16(dot[r], _mm256_maddubs_epi16(p->w[k], x));
        }
        K_STREAM_UNROLL
        for (int r = 0; r < R; r++)
            s[r] = _mm256_add_epi32(s[r], _mm256_madd_epi16(dot[r], p->scale[i / steps]));
    }
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++) {
        const struct k_act_row *x = &p->x[first + (uint32_t)r];
        const int16_t *sums = format == K_Q6_K ? x->sum16 + 16 * (size_t)b : x->sum + 8 * (size_t)b;
        K_STREAM_UNROLL
        for (int j = 0; j < subs / 2; j++)
            m[r] = _mm256_add_epi32(m[r], _mm256_madd_epi16(p->pair[j], two_sums(sums + 2 * j)));
        __m256 t;
        if (format == K_Q6_K) {
            s[r] = _mm256_sub_epi32(s[r], _mm256_slli_epi32(m[r], 5));
            t = _mm256_mul_ps(p->d[0], _mm256_cvtepi32_ps(s[r]));
        } else {
            t = _mm256_fmsub_ps(p->d[0], _mm256_cvtepi32_ps(s[r]),
                                _mm256_mul_ps(p->dmin, _mm256_cvtepi32_ps(m[r])));
        }
        p->acc[first + (uint32_t)r] =
            _mm256_fmadd_ps(_mm256_set1_ps(x->dx[b]), t, p->acc[first + (uint32_t)r]);
    }
}

/* Signed by signed: |w| as unsigned times x with w's sign. |w| is at most 128, a pair sum
 * 32,512. */
K_STREAM_INLINE void run32(struct panel *p, uint32_t first, const int R, uint32_t b, uint32_t n)
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 acc[4];
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++)
        acc[r] = p->acc[first + (uint32_t)r];
    for (uint32_t j = 0; j < n; j++) {
        __m256i dot[4];
        K_STREAM_UNROLL
        for (int r = 0; r < R; r++)
            dot[r] = _mm256_setzero_si256();
        K_STREAM_UNROLL
        for (uint32_t i = 8 * j; i < 8 * j + 8; i++)
            K_STREAM_UNROLL
        for (int r = 0; r < R; r++) {
            const __m256i x =
                four_inputs(p->x[first + (uint32_t)r].q + 32 * (size_t)b + 4 * (size_t)i);
            const __m256i two = _mm256_maddubs_epi16(p->size[i], _mm256_sign_epi8(x, p->w[i]));
            dot[r] = _mm256_add_epi32(dot[r], _mm256_madd_epi16(two, ones));
        }
        K_STREAM_UNROLL
        for (int r = 0; r < R; r++) {
            const __m256 t = _mm256_mul_ps(p->d[j], _mm256_cvtepi32_ps(dot[r]));
            acc[r] =
                _mm256_fmadd_ps(_mm256_set1_ps(p->x[first + (uint32_t)r].dx[b + j]), t, acc[r]);
        }
    }
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++)
        p->acc[first + (uint32_t)r] = acc[r];
}

/* All rows over the panel of blocks b .. b + n - 1. */
K_STREAM_INLINE void run(enum k_format format, struct panel *p, uint32_t n_rows, uint32_t b,
                         uint32_t n)
{
    uint32_t r = 0;
    for (; r + 4 <= n_rows; r += 4) {
        if (k_stream_small(format))
            run32(p, r, 4, b, n);
        else
            run256(format, p, r, 4, b);
    }
    for (; r < n_rows; r++) {
        if (k_stream_small(format))
            run32(p, r, 1, b, n);
        else
            run256(format, p, r, 1, b);
    }
}

K_STREAM_INLINE void panel_mul(enum k_format format, const uint8_t *w, uint32_t n_out,
                               uint32_t n_in, const void *const *x, float *const *y,
                               uint32_t n_rows, void *work)
{
    struct panel *p = work;
    const bool small = k_stream_small(format);
    const uint32_t n_blocks = n_in / (small ? 32 : 256), step = small ? 8 : 1;
    const uint32_t bytes = k_stream_bytes(format);
    const size_t stride = (size_t)n_blocks * bytes;
    for (uint32_t r = 0; r < n_rows; r++)
        p->x[r] = k_format_act_row(small ? K_FORM_Q32 : K_FORM_Q256, (void *)(uintptr_t)x[r], n_in);
    for (uint32_t o = 0; o < n_out; o += LANES) {
        const uint32_t lanes = n_out - o < LANES ? n_out - o : LANES;
        for (uint32_t r = 0; r < n_rows; r++)
            p->acc[r] = _mm256_setzero_ps();
        for (uint32_t b = 0; b < n_blocks; b += step) {
            const uint8_t *block[LANES];
            const uint32_t n = n_blocks - b < step ? n_blocks - b : step;
            /* Two panels ahead: further along the outputs, or at the start of the next ones. */
            const size_t ahead =
                2 * (size_t)step * bytes + (b + 2 * step < n_blocks ? 0 : (LANES - 1) * stride);
            for (uint32_t l = 0; l < LANES; l++) {
                block[l] = w + stride * (o + (l < lanes ? l : lanes - 1)) + (size_t)b * bytes;
                for (uint32_t at = 0; at < step * bytes; at += 64)
                    _mm_prefetch((const char *)block[l] + ahead + at, _MM_HINT_T0);
            }
            if (small)
                fill32(format, block, n, p);
            else
                fill256(format, block, p);
            run(format, p, n_rows, b, n);
        }
        for (uint32_t r = 0; r < n_rows; r++)
            memcpy(y[r] + o, &p->acc[r], lanes * sizeof(float));
    }
}

/* Each format a function of its own, which keeps the compiler's registers apart. */
#define PANEL_KERNEL(name, format)                                                              \
    static __attribute__((noinline)) void name(const uint8_t *w, uint32_t n_out, uint32_t n_in, \
                                               const void *const *x, float *const *y,           \
                                               uint32_t n_rows, void *work)                     \
    {                                                                                           \
        panel_mul(format, w, n_out, n_in, x, y, n_rows, work);                                  \
    }
/* clang-format off */
PANEL_KERNEL(q4_0, K_Q4_0)
PANEL_KERNEL(q8_0, K_Q8_0)
PANEL_KERNEL(q4_k, K_Q4_K)
PANEL_KERNEL(q5_k, K_Q5_K)
PANEL_KERNEL(q6_k, K_Q6_K)
/* clang-format on */

void k_avx2_panel_mul(enum k_format format, const void *w, uint32_t n_out, uint32_t n_in,
                      const void *const *x, float *const *y, uint32_t n_rows, void *work)
{
    switch (format) {
    case K_Q4_0:
        q4_0(w, n_out, n_in, x, y, n_rows, work);
        break;
    case K_Q8_0:
        q8_0(w, n_out, n_in, x, y, n_rows, work);
        break;
    case K_Q4_K:
        q4_k(w, n_out, n_in, x, y, n_rows, work);
        break;
    case K_Q5_K:
        q5_k(w, n_out, n_in, x, y, n_rows, work);
        break;
    case K_Q6_K:
        q6_k(w, n_out, n_in, x, y, n_rows, work);
        break;
    case K_F32:
    case K_F16:
    case K_BF16:
        break;
    }
}

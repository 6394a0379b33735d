#include "k_avx512_panel.h"

#include <immintrin.h>

#include "k_avx512_unpack.h"
#include "k_format.h"
#include "k_stream.h"

enum {
    LANES = 16,
    DEPTH = 256 /* inputs of a panel: one super-block or eight 32-blocks */
};

/* In `work`. Lane = output everywhere. */
struct panel {
    __m512i w[DEPTH / 4]; /* unsigned weights, four inputs a lane */
    __m512i scale[16];    /* of each sub-block */
    __m512i pair[8];      /* int16 pairs: mins of 32-sub-blocks (Q4_K, Q5_K), scales (Q6_K) */
    __m512 d[8], dmin;    /* 32-blocks: d of each */
    __m512 acc[K_CPU_TILE_ROWS];
    struct k_act_row x[K_CPU_TILE_ROWS];
};
_Static_assert(sizeof(struct panel) <= K_CPU_WORK_BYTES, "the panel lies in the thread's scratch");

/* 16 vectors of 16 dwords -> dword k of each in out[k]. */
K_STREAM_INLINE void transpose16(const __m512i in[16], __m512i out[16])
{
    __m512i a[16], b[16];
    K_STREAM_UNROLL
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
    K_STREAM_UNROLL
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    /* b[4 * g + k]: dwords k, k + 4, k + 8, k + 12 (one 128-bit part each) of outputs 4g .. 4g +
     * 3. */
    K_STREAM_UNROLL
    for (int k = 0; k < 4; k++) {
        const __m512i low01 = _mm512_shuffle_i32x4(b[k], b[4 + k], 0x44);
        const __m512i high01 = _mm512_shuffle_i32x4(b[k], b[4 + k], 0xee);
        const __m512i low23 = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0x44);
        const __m512i high23 = _mm512_shuffle_i32x4(b[8 + k], b[12 + k], 0xee);
        out[k] = _mm512_shuffle_i32x4(low01, low23, 0x88);
        out[k + 4] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
        out[k + 8] = _mm512_shuffle_i32x4(high01, high23, 0x88);
        out[k + 12] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
    }
}

/* f16 bits in the low halves of 16 lanes. */
K_STREAM_INLINE __m512 f16_lanes(__m512i bits)
{
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits));
}

/* Dword `at` of each output's 16 bytes. */
K_STREAM_INLINE __m512i column(const uint8_t bytes[LANES][16], int at)
{
    const __m512i index =
        _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                           _mm512_set1_epi32(4));
    return _mm512_i32gather_epi32(index, (const uint8_t *)bytes + 4 * at, 4);
}

K_STREAM_INLINE void fill_scales(enum k_format format, const uint8_t *const block[LANES],
                                 struct panel *p)
{
    _Alignas(64) uint8_t bytes[LANES][16];
    _Alignas(64) uint32_t d[LANES];
    for (int o = 0; o < LANES; o++) {
        const struct k_format_q6_k *q6 = (const void *)block[o];
        const __m128i scales = format == K_Q6_K
                                   ? _mm_loadu_si128((const __m128i *)(const void *)q6->scales)
                                   : k_stream_scale_min(block[o]);
        _mm_store_si128((__m128i *)(void *)bytes[o], scales);
        d[o] = k_stream_scales(format, block[o]);
    }
    const __m512i both = _mm512_load_si512(d);
    p->d[0] = f16_lanes(both);
    if (format == K_Q6_K) {
        K_STREAM_UNROLL
        for (int j = 0; j < 4; j++) {
            const __m512i c = column(bytes, j);
            K_STREAM_UNROLL
            for (int i = 0; i < 4; i++)
                p->scale[4 * j + i] =
                    _mm512_srai_epi32(_mm512_sllv_epi32(c, _mm512_set1_epi32(24 - 8 * i)), 24);
        }
        K_STREAM_UNROLL
        for (int j = 0; j < 8; j++)
            p->pair[j] = _mm512_mask_blend_epi16(0xaaaaaaaau, p->scale[2 * j],
                                                 _mm512_slli_epi32(p->scale[2 * j + 1], 16));
        return;
    }
    p->dmin = f16_lanes(_mm512_srli_epi32(both, 16));
    const __m512i byte = _mm512_set1_epi32(255);
    for (int j = 0; j < 2; j++) {
        const __m512i c = column(bytes, j), m = column(bytes, 2 + j);
        K_STREAM_UNROLL
        for (int i = 0; i < 4; i++)
            p->scale[4 * j + i] =
                _mm512_and_si512(_mm512_srlv_epi32(c, _mm512_set1_epi32(8 * i)), byte);
        p->pair[2 * j] =
            _mm512_or_si512(_mm512_and_si512(m, byte),
                            _mm512_slli_epi32(_mm512_and_si512(m, _mm512_set1_epi32(0xff00)), 8));
        const __m512i upper = _mm512_srli_epi32(m, 16);
        p->pair[2 * j + 1] = _mm512_or_si512(
            _mm512_and_si512(upper, byte),
            _mm512_slli_epi32(_mm512_and_si512(upper, _mm512_set1_epi32(0xff00)), 8));
    }
}

/* Block b of 16 outputs: super-block formats. */
K_STREAM_INLINE void fill256(enum k_format format, const uint8_t *const block[LANES],
                             struct panel *p)
{
    __m512i rows[4][LANES];
    for (int o = 0; o < LANES; o++) {
        __m512i w[4];
        k_avx512_unpack256(format, block[o], w);
        K_STREAM_UNROLL
        for (int part = 0; part < 4; part++)
            rows[part][o] = w[part];
    }
    for (int part = 0; part < 4; part++)
        transpose16(rows[part], p->w + 16 * part);
    fill_scales(format, block, p);
}

/* n 32-blocks (up to 8) of 16 outputs. */
K_STREAM_INLINE void fill32(enum k_format format, const uint8_t *const block[LANES], uint32_t n,
                            struct panel *p)
{
    const uint32_t bytes = k_stream_bytes(format);
    for (uint32_t b = 0; b < n; b += 2) {
        const uint32_t second = b + 1 < n ? b + 1 : b;
        __m512i rows[LANES];
        _Alignas(64) uint32_t d[2][LANES];
        for (int o = 0; o < LANES; o++) {
            const uint8_t *one = block[o] + (size_t)b * bytes;
            const uint8_t *two = block[o] + (size_t)second * bytes;
            rows[o] = k_avx512_join(k_avx512_unpack32(format, one), k_avx512_unpack32(format, two));
            d[0][o] = k_stream_scales(format, one);
            d[1][o] = k_stream_scales(format, two);
        }
        transpose16(rows, p->w + 8 * b);
        p->d[b] = f16_lanes(_mm512_load_si512(d[0]));
        p->d[second] = f16_lanes(_mm512_load_si512(d[1]));
    }
}

K_STREAM_INLINE __m512i four_inputs(const int8_t *q)
{
    int32_t four;
    memcpy(&four, q, 4);
    return _mm512_set1_epi32(four);
}

K_STREAM_INLINE __m512i two_sums(const int16_t *sums)
{
    int32_t two;
    memcpy(&two, sums, 4);
    return _mm512_set1_epi32(two);
}

/* Rows first .. first + R - 1 over a super-block; lane = output, so S and M need no reduction and
 * A6 is one fma. */
K_STREAM_INLINE void run256(enum k_format format, struct panel *p, uint32_t first, const int R,
                            uint32_t b)
{
    const int subs = format == K_Q6_K ? 16 : 8, steps = 64 / subs;
    __m512i s[4], m[4];
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++)
        s[r] = m[r] = _mm512_setzero_si512();
    for (int j = 0; j < subs; j++) {
        __m512i dot[4];
        K_STREAM_UNROLL
        for (int r = 0; r < R; r++)
            dot[r] = _mm512_setzero_si512();
        K_STREAM_UNROLL
        for (int i = j * steps; i < (j + 1) * steps; i++)
            K_STREAM_UNROLL
        for (int r = 0; r < R; r++)
            dot[r] = _mm512_dpbusd_epi32(
                dot[r], p->w[i],
                four_inputs(p->x[first + (uint32_t)r].q + 256 * (size_t)b + 4 * i));
        K_STREAM_UNROLL
        for (int r = 0; r < R; r++)
            s[r] = _mm512_add_epi32(s[r], _mm512_mullo_epi32(dot[r], p->scale[j]));
    }
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++) {
        const struct k_act_row *x = &p->x[first + (uint32_t)r];
        const int16_t *sums = format == K_Q6_K ? x->sum16 + 16 * (size_t)b : x->sum + 8 * (size_t)b;
        K_STREAM_UNROLL
        for (int j = 0; j < subs / 2; j++)
            m[r] = _mm512_dpwssd_epi32(m[r], p->pair[j], two_sums(sums + 2 * j));
        __m512 t;
        if (format == K_Q6_K) {
            s[r] = _mm512_sub_epi32(s[r], _mm512_slli_epi32(m[r], 5));
            t = _mm512_mul_ps(p->d[0], _mm512_cvtepi32_ps(s[r]));
        } else {
            t = _mm512_fmsub_ps(p->d[0], _mm512_cvtepi32_ps(s[r]),
                                _mm512_mul_ps(p->dmin, _mm512_cvtepi32_ps(m[r])));
        }
        p->acc[first + (uint32_t)r] =
            _mm512_fmadd_ps(_mm512_set1_ps(x->dx[b]), t, p->acc[first + (uint32_t)r]);
    }
}

K_STREAM_INLINE void run32(enum k_format format, struct panel *p, uint32_t first, const int R,
                           uint32_t b, uint32_t n)
{
    const int32_t offset = format == K_Q8_0 ? -128 : -8;
    __m512 acc[4];
    K_STREAM_UNROLL
    for (int r = 0; r < R; r++)
        acc[r] = p->acc[first + (uint32_t)r];
    for (uint32_t j = 0; j < n; j++) {
        __m512i dot[4];
        K_STREAM_UNROLL
        for (int r = 0; r < R; r++)
            dot[r] = _mm512_set1_epi32(offset * p->x[first + (uint32_t)r].sum[b + j]);
        K_STREAM_UNROLL
        for (int i = 0; i < 8; i++)
            K_STREAM_UNROLL
        for (int r = 0; r < R; r++)
            dot[r] = _mm512_dpbusd_epi32(
                dot[r], p->w[8 * j + (uint32_t)i],
                four_inputs(p->x[first + (uint32_t)r].q + 32 * (size_t)(b + j) + 4 * i));
        K_STREAM_UNROLL
        for (int r = 0; r < R; r++) {
            const __m512 t = _mm512_mul_ps(p->d[j], _mm512_cvtepi32_ps(dot[r]));
            acc[r] =
                _mm512_fmadd_ps(_mm512_set1_ps(p->x[first + (uint32_t)r].dx[b + j]), t, acc[r]);
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
            run32(format, p, r, 4, b, n);
        else
            run256(format, p, r, 4, b);
    }
    for (; r < n_rows; r++) {
        if (k_stream_small(format))
            run32(format, p, r, 1, b, n);
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
            p->acc[r] = _mm512_setzero_ps();
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
            _mm512_mask_storeu_ps(y[r] + o, (__mmask16)((1u << lanes) - 1), p->acc[r]);
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

void k_avx512_panel_mul(enum k_format format, const void *w, uint32_t n_out, uint32_t n_in,
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

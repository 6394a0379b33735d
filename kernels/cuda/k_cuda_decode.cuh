/* Products of arranged weights (k_cuda_tile.h) with at most eight columns: what `matmul` and the
 * experts' operations share. Bound by the reading of weights, so everything else is arranged around
 * it:
 *
 * A block of eight warps owns some stripes. An *item* is one tile of one stripe; warps take items in
 * turn, each with one 16-byte load per lane and 512 bytes. The first item's loads leave before the
 * activations are fetched to shared memory. A tile's integer sums come from the tensor core (A5),
 * become t's (16 outputs x columns x blocks) in shared memory, and after a barrier one thread per
 * (stripe, output, column) folds them in block order (A6). Inputs beyond K_CUDA_DECODE_TILES tiles
 * are taken in chunks; the accumulators wait in shared memory.
 *
 * COLUMNS is 1 or 8. With 1 every column of operand B is the same one, so that the lanes t of a row
 * all have its sum: lane t keeps row g + 8 * (t & 1). */
#ifndef ISLET_K_CUDA_DECODE_CUH
#define ISLET_K_CUDA_DECODE_CUH

#include "k_cuda.cuh"
#include "k_cuda_mma.cuh"
#include "k_cuda_tile.h"

enum {
    K_CUDA_DECODE_WARPS = 8,
    K_CUDA_DECODE_THREADS = 32 * K_CUDA_DECODE_WARPS,
    K_CUDA_DECODE_ANY = -1 /* as a template's format: whatever the stripes say */
};

/* What a launch chooses. */
struct k_cuda_decode_shape {
    uint32_t stripes; /* of a block, per set */
    uint32_t tiles;   /* of a chunk */
};

/* Up to two sets of equally many neighbouring stripes (an expert's gate and up). */
struct k_cuda_decode_stripes {
    const uint8_t *first[2]; /* first stripe of each */
    enum k_format format[2];
    uint32_t sets, count; /* count per set */
};

/* Shared memory of a block, carved from `base`. `stripes` counts all sets. */
struct k_cuda_decode_shared {
    int8_t *q;      /* [columns][tiles * 256 + 16]: the 16 spread ldmatrix's rows over the banks */
    int16_t *sum;   /* [columns][tiles * 8 + 8] */
    float *dx;      /* [columns][tiles * blocks + 1] */
    float *t;       /* [stripes][tiles * blocks][16][columns] */
    float *acc;     /* [sets' stripes][16][columns] */
    uint32_t bytes; /* in all */
};

/* blocks: of a tile (1 or 8), the largest that occurs; acc_stripes: those whose results are kept. */
static inline __host__ __device__ struct k_cuda_decode_shared k_cuda_decode_carve(
    void *base, uint32_t columns, uint32_t tiles, uint32_t blocks, uint32_t stripes)
{
    struct k_cuda_decode_shared s;
    uint8_t *p = (uint8_t *)base;
    s.q = (int8_t *)p;
    p += columns * (tiles * 256 + 16);
    s.sum = (int16_t *)(void *)p;
    p += columns * (tiles * 16 + 16);
    s.t = (float *)(void *)p;
    p += (size_t)stripes * tiles * blocks * 16 * columns * 4;
    s.acc = (float *)(void *)p;
    p += stripes * 16 * columns * 4;
    s.dx = (float *)(void *)p;
    p += columns * (tiles * blocks + 1) * 4;
    s.bytes = (uint32_t)(p - (uint8_t *)base);
    return s;
}

static inline __host__ __device__ uint32_t k_cuda_decode_blocks(enum k_format format)
{
    return format == K_Q8_0 || format == K_Q4_0 ? 8 : 1;
}

/* k_format_form of an arranged format, for kernels. */
static inline __host__ __device__ enum k_form k_cuda_decode_form(enum k_format format)
{
    return k_cuda_decode_blocks(format) == 8 ? K_FORM_Q32 : K_FORM_Q256;
}

/* ---- one tile -------------------------------------------------------------------------------- */

/* A lane's words of a tile: 16 bytes of each load; headers of outputs g and g + 8 (COLUMNS = 1: one,
 * of g + 8 * (t & 1)). */
template <int COLUMNS> struct k_cuda_decode_words {
    uint4 load[8];
    uint4 head[COLUMNS == 1 ? 1 : 2];
    uint32_t d[COLUMNS == 1 ? 1 : 2]; /* Q6_K */
};

/* Output of a lane's header i. */
template <int COLUMNS> static __device__ __forceinline__ uint32_t k_cuda_decode_row(int i)
{
    const uint32_t l = threadIdx.x % 32;
    return COLUMNS == 1 ? l / 4 + 8 * (l & 1) : l / 4 + 8 * i;
}

/* Weights are read once: past the first-level cache. */
static __device__ __forceinline__ uint4 k_cuda_decode_fetch(const uint8_t *p)
{
    return __ldcs((const uint4 *)(const void *)p);
}

template <int COLUMNS>
static __device__ __forceinline__ void k_cuda_decode_load(struct k_cuda_decode_words<COLUMNS> &w,
                                                          enum k_format f, const uint8_t *tile)
{
    const uint32_t loads = f == K_Q8_0 ? 8 : f == K_Q6_K ? 6 : f == K_Q5_K ? 5 : 4;
    const uint32_t l = threadIdx.x % 32, head = k_cuda_tile_head(f);
#pragma unroll
    for (uint32_t c = 0; c < 8; c++)
        if (c < loads)
            w.load[c] = k_cuda_decode_fetch(tile + 512 * c + 16 * l);
#pragma unroll
    for (int i = 0; i < (COLUMNS == 1 ? 1 : 2); i++) {
        const uint32_t row = k_cuda_decode_row<COLUMNS>(i);
        w.head[i] = __ldg((const uint4 *)(const void *)(tile + head + 16 * row));
        if (f == K_Q6_K)
            w.d[i] = __ldg((const uint16_t *)(const void *)(tile + K_CUDA_TILE_Q6_K_D + 2 * row));
    }
}

/* The sums of a lane that it goes on with: COLUMNS = 1: one; 8: four as operand C has them. */
template <int COLUMNS> struct k_cuda_decode_sums {
    int s[COLUMNS == 1 ? 1 : 4];
};

template <int COLUMNS>
static __device__ __forceinline__ void k_cuda_decode_take(struct k_cuda_decode_sums<COLUMNS> &r,
                                                          const int (&c)[4])
{
    if (COLUMNS == 1) {
        r.s[0] = threadIdx.x & 1 ? c[2] : c[0];
    } else {
#pragma unroll
        for (int i = 0; i < (COLUMNS == 1 ? 1 : 4); i++)
            r.s[i] = c[i];
    }
}

/* s += scale of the result's row * sum; scales[i]: that of header i. */
template <int COLUMNS>
static __device__ __forceinline__ void k_cuda_decode_scale(struct k_cuda_decode_sums<COLUMNS> &s,
                                                           const int (&c)[4], const int *scale)
{
    struct k_cuda_decode_sums<COLUMNS> r;
    k_cuda_decode_take<COLUMNS>(r, c);
#pragma unroll
    for (int i = 0; i < (COLUMNS == 1 ? 1 : 4); i++)
        s.s[i] += scale[COLUMNS == 1 ? 0 : i / 2] * r.s[i];
}

/* Stores the results of one block of 16 outputs: t[16][columns]. */
template <int COLUMNS>
static __device__ __forceinline__ void k_cuda_decode_put(const float *r, float *t)
{
    const uint32_t l = threadIdx.x % 32, g = l / 4;
    if (COLUMNS == 8) {
        *(float2 *)(void *)(t + 8 * g + 2 * (l % 4)) = make_float2(r[0], r[1]);
        *(float2 *)(void *)(t + 64 + 8 * g + 2 * (l % 4)) = make_float2(r[2], r[3]);
    } else if (l % 4 < 2) {
        t[k_cuda_decode_row<1>(0)] = r[0];
    }
}

/* Byte i of a word of scales, unsigned and signed. */
static __device__ __forceinline__ int k_cuda_decode_byte(uint32_t word, uint32_t i)
{
    return (int)__byte_perm(word, 0, 0x4440 + i);
}

static __device__ __forceinline__ int k_cuda_decode_signed(uint32_t word, uint32_t i)
{
    int r; /* a selector's bit 3 repeats the byte's sign */
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(word), "r"(i | (8 | i) * 0x1110));
    return r;
}

static __device__ __forceinline__ uint32_t k_cuda_decode_word(const uint4 &v, int i)
{
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/* Operand R[j][a] of Q5_K from its nibbles (already shifted down) and fifth bits. */
static __device__ __forceinline__ uint32_t k_cuda_decode_five(uint32_t nibbles, uint32_t fifth,
                                                              int j)
{
    const uint32_t bit = j <= 4 ? fifth << (4 - j) : fifth >> (j - 4);
    return (nibbles & 0x0f0f0f0fu) | (bit & 0x10101010u);
}

/* S of Q4_K and Q5_K. Q4_K's high nibbles stay where they are: their sums are 16-fold and kept
 * apart (below 2^29), so that the shift down comes once. */
template <enum k_format F, int COLUMNS>
static __device__ __forceinline__ void k_cuda_decode_fives(
    struct k_cuda_decode_sums<COLUMNS> &s, const struct k_cuda_decode_words<COLUMNS> &w,
    const int8_t *x, const uint32_t (*scales)[2])
{
    struct k_cuda_decode_sums<COLUMNS> high = {
    };
    const uint4 h = w.load[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const uint4 v = w.load[c];
        uint32_t b[4];
        int low_sum[4], high_sum[4], scale[2][2];
        k_cuda_mma_load(b, x + 64 * c);
#pragma unroll
        for (int i = 0; i < (COLUMNS == 1 ? 1 : 2); i++)
#pragma unroll
            for (int k = 0; k < 2; k++)
                scale[k][i] = k_cuda_decode_byte(scales[i][c / 2], 2 * (c % 2) + k);
        if (F == K_Q4_K) {
            k_cuda_mma_u8(low_sum, v.x & 0x0f0f0f0fu, v.y & 0x0f0f0f0fu, v.z & 0x0f0f0f0fu,
                          v.w & 0x0f0f0f0fu, b[0], b[1]);
            k_cuda_mma_u8(high_sum, v.x & 0xf0f0f0f0u, v.y & 0xf0f0f0f0u, v.z & 0xf0f0f0f0u,
                          v.w & 0xf0f0f0f0u, b[2], b[3]);
            k_cuda_decode_scale<COLUMNS>(high, high_sum, scale[1]);
        } else {
            const int j = 2 * c;
            k_cuda_mma_u8(low_sum, k_cuda_decode_five(v.x, h.x, j), k_cuda_decode_five(v.y, h.y, j),
                          k_cuda_decode_five(v.z, h.z, j), k_cuda_decode_five(v.w, h.w, j), b[0],
                          b[1]);
            k_cuda_mma_u8(high_sum, k_cuda_decode_five(v.x >> 4, h.x, j + 1),
                          k_cuda_decode_five(v.y >> 4, h.y, j + 1),
                          k_cuda_decode_five(v.z >> 4, h.z, j + 1),
                          k_cuda_decode_five(v.w >> 4, h.w, j + 1), b[2], b[3]);
            k_cuda_decode_scale<COLUMNS>(s, high_sum, scale[1]);
        }
        k_cuda_decode_scale<COLUMNS>(s, low_sum, scale[0]);
    }
    if (F == K_Q4_K) {
#pragma unroll
        for (int i = 0; i < (COLUMNS == 1 ? 1 : 4); i++)
            s.s[i] += high.s[i] >> 4;
    }
}

/* M of one output and one column: mins by the sums of eight 32's. */
static __device__ __forceinline__ int k_cuda_decode_mins(const uint32_t mins[2], const uint4 &sum)
{
    int m = __dp2a_lo((int)sum.x, (int)mins[0], 0);
    m = __dp2a_hi((int)sum.y, (int)mins[0], m);
    m = __dp2a_lo((int)sum.z, (int)mins[1], m);
    return __dp2a_hi((int)sum.w, (int)mins[1], m);
}

/* t's of a Q4_K or Q5_K tile. sum: the tile's sums of column 0, the next column sum_stride on. */
template <enum k_format F, int COLUMNS>
static __device__ __forceinline__ void k_cuda_decode_k_with_mins(
    const struct k_cuda_decode_words<COLUMNS> &w, const int8_t *x, const int16_t *sum,
    uint32_t sum_stride, float *t)
{
    enum {
        HEADS = COLUMNS == 1 ? 1 : 2,
        SUMS = COLUMNS == 1 ? 1 : 4
    };
    const uint32_t l = threadIdx.x % 32;
    struct k_cuda_decode_sums<COLUMNS> s = {
    };
    uint32_t scales[HEADS][2], mins[HEADS][2];
    float d[HEADS], dmin[HEADS], r[SUMS];
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
        const uint4 h = w.head[i]; /* d and dmin, then scales[12]: k_format_scale_min */
        d[i] = k_cuda_mma_of_f16(h.x & 0xffffu);
        dmin[i] = k_cuda_mma_of_f16(h.x >> 16);
        scales[i][0] = h.y & 0x3f3f3f3fu;
        mins[i][0] = h.z & 0x3f3f3f3fu;
        scales[i][1] = (h.w & 0x0f0f0f0fu) | (h.y >> 2 & 0x30303030u);
        mins[i][1] = (h.w >> 4 & 0x0f0f0f0fu) | (h.z >> 2 & 0x30303030u);
    }
    k_cuda_decode_fives<F, COLUMNS>(s, w, x, scales);
    uint4 of[COLUMNS == 1 ? 1 : 2];
#pragma unroll
    for (int k = 0; k < (COLUMNS == 1 ? 1 : 2); k++)
        of[k] =
            *(const uint4 *)(const void *)(sum + (COLUMNS == 1 ? 0 : 2 * (l % 4) + k) * sum_stride);
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const int m = k_cuda_decode_mins(mins[COLUMNS == 1 ? 0 : i / 2], of[i % 2]);
        const float minus = __fmul_rn(dmin[COLUMNS == 1 ? 0 : i / 2], __int2float_rn(m));
        r[i] = __fmaf_rn(d[COLUMNS == 1 ? 0 : i / 2], __int2float_rn(s.s[i]), -minus);
    }
    k_cuda_decode_put<COLUMNS>(r, t);
}

/* t's of a Q6_K tile. Operands are 4-fold, as the layout has them, and so is S (below 2^30); d / 4 is
 * exact and takes it back, the product being the same number. */
template <int COLUMNS>
static __device__ __forceinline__ void k_cuda_decode_six(
    const struct k_cuda_decode_words<COLUMNS> &w, const int8_t *x, float *t)
{
    enum {
        HEADS = COLUMNS == 1 ? 1 : 2,
        SUMS = COLUMNS == 1 ? 1 : 4
    };
    struct k_cuda_decode_sums<COLUMNS> s = {
    };
    float r[SUMS];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        uint32_t b[4];
        k_cuda_mma_load(b, x + 64 * c);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int j = 2 * c + k;
            uint32_t v[3];
            int first[4], second[4], scale[2][2];
#pragma unroll
            for (int p = 0; p < 3; p++)
                v[p] = k_cuda_decode_word(w.load[(3 * j + p) / 4], (3 * j + p) % 4);
            const uint32_t rest =
                (v[0] << 6 & 0xc0c0c0c0u) | (v[1] << 4 & 0x30303030u) | (v[2] << 2 & 0x0c0c0c0cu);
            k_cuda_mma_half(first, v[0] & 0xfcfcfcfcu, v[1] & 0xfcfcfcfcu, b[2 * k]);
            k_cuda_mma_half(second, v[2] & 0xfcfcfcfcu, rest, b[2 * k + 1]);
#pragma unroll
            for (int i = 0; i < HEADS; i++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    scale[half][i] = k_cuda_decode_signed(k_cuda_decode_word(w.head[i], j / 2),
                                                          2 * (j % 2) + half);
            k_cuda_decode_scale<COLUMNS>(s, first, scale[0]);
            k_cuda_decode_scale<COLUMNS>(s, second, scale[1]);
        }
    }
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const float d = k_cuda_mma_of_f16(w.d[COLUMNS == 1 ? 0 : i / 2]);
        r[i] = __fmul_rn(__fmul_rn(d, 0.25f), __int2float_rn(s.s[i]));
    }
    k_cuda_decode_put<COLUMNS>(r, t);
}

/* Sums of 32-blocks 2 c and 2 c + 1. Q4_0's operands are 16-fold, as int8 without shifting apart the
 * sign; d / 16 is exact and takes it back. */
template <enum k_format F, int COLUMNS>
static __device__ __forceinline__ void k_cuda_decode_pair(
    const struct k_cuda_decode_words<COLUMNS> &w, const int8_t *x, int c, int (&even)[4],
    int (&odd)[4])
{
    uint32_t b[4];
    k_cuda_mma_load(b, x + 64 * c);
    if (F == K_Q8_0) {
        const uint4 v = w.load[2 * c], u = w.load[2 * c + 1];
        k_cuda_mma_s8(even, v.x, v.y, v.z, v.w, b[0], b[1]);
        k_cuda_mma_s8(odd, u.x, u.y, u.z, u.w, b[2], b[3]);
    } else {
        const uint32_t m = 0xf0f0f0f0u, sign = 0x80808080u;
        const uint4 v = w.load[c];
        k_cuda_mma_s8(even, (v.x << 4 & m) ^ sign, (v.y << 4 & m) ^ sign, (v.z << 4 & m) ^ sign,
                      (v.w << 4 & m) ^ sign, b[0], b[1]);
        k_cuda_mma_s8(odd, (v.x & m) ^ sign, (v.y & m) ^ sign, (v.z & m) ^ sign, (v.w & m) ^ sign,
                      b[2], b[3]);
    }
}

template <enum k_format F> static __device__ __forceinline__ float k_cuda_decode_d(uint32_t half)
{
    const float d = k_cuda_mma_of_f16(half & 0xffffu);
    return F == K_Q4_0 ? __fmul_rn(d, 0.0625f) : d;
}

/* t's of 32-blocks 2 c and 2 c + 1; t: of the tile. With one column, lanes t = 0, 1 go on with the
 * even block and t = 2, 3 with the odd one. */
template <enum k_format F>
static __device__ __forceinline__ void k_cuda_decode_pair_of_one(
    const struct k_cuda_decode_words<1> &w, int c, const int (&even)[4], const int (&odd)[4],
    float *t)
{
    const uint32_t l = threadIdx.x % 32, both = k_cuda_decode_word(w.head[0], c);
    const int upper = l & 2 ? odd[2] : even[2], lower = l & 2 ? odd[0] : even[0];
    t[(2 * c + (l >> 1 & 1)) * 16 + k_cuda_decode_row<1>(0)] = __fmul_rn(
        k_cuda_decode_d<F>(l & 2 ? both >> 16 : both), __int2float_rn(l & 1 ? upper : lower));
}

template <enum k_format F>
static __device__ __forceinline__ void k_cuda_decode_pair_of_eight(
    const struct k_cuda_decode_words<8> &w, int c, const int (&even)[4], const int (&odd)[4],
    float *t)
{
    float r[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t both = k_cuda_decode_word(w.head[i / 2], c);
        r[0][i] = __fmul_rn(k_cuda_decode_d<F>(both), __int2float_rn(even[i]));
        r[1][i] = __fmul_rn(k_cuda_decode_d<F>(both >> 16), __int2float_rn(odd[i]));
    }
    k_cuda_decode_put<8>(r[0], t + 2 * c * 128);
    k_cuda_decode_put<8>(r[1], t + (2 * c + 1) * 128);
}

/* t's of a Q8_0 or Q4_0 tile: eight blocks. */
template <enum k_format F, int COLUMNS>
static __device__ __forceinline__ void k_cuda_decode_32s(
    const struct k_cuda_decode_words<COLUMNS> &w, const int8_t *x, float *t)
{
#pragma unroll
    for (int c = 0; c < 4; c++) {
        int even[4], odd[4];
        k_cuda_decode_pair<F, COLUMNS>(w, x, c, even, odd);
        if constexpr (COLUMNS == 1)
            k_cuda_decode_pair_of_one<F>(w, c, even, odd, t);
        else
            k_cuda_decode_pair_of_eight<F>(w, c, even, odd, t);
    }
}

template <int COLUMNS>
static __device__ __forceinline__ void k_cuda_decode_tile(
    enum k_format f, const struct k_cuda_decode_words<COLUMNS> &w, const int8_t *x,
    const int16_t *sum, uint32_t sum_stride, float *t)
{
    switch (f) {
    case K_Q4_K:
        k_cuda_decode_k_with_mins<K_Q4_K, COLUMNS>(w, x, sum, sum_stride, t);
        break;
    case K_Q5_K:
        k_cuda_decode_k_with_mins<K_Q5_K, COLUMNS>(w, x, sum, sum_stride, t);
        break;
    case K_Q6_K:
        k_cuda_decode_six<COLUMNS>(w, x, t);
        break;
    case K_Q8_0:
        k_cuda_decode_32s<K_Q8_0, COLUMNS>(w, x, t);
        break;
    case K_Q4_0:
        k_cuda_decode_32s<K_Q4_0, COLUMNS>(w, x, t);
        break;
    default:
        break;
    }
}

/* ---- a block's stripes ----------------------------------------------------------------------- */

/* A6 over a chunk's t's: `blocks` of each stripe. */
template <int COLUMNS>
static __device__ __forceinline__ void k_cuda_decode_fold(const struct k_cuda_decode_shared &s,
                                                          uint32_t n_stripes, uint32_t blocks,
                                                          uint32_t dx_stride, uint32_t count,
                                                          bool first, float *acc)
{
    for (uint32_t i = threadIdx.x; i < n_stripes * 16 * COLUMNS; i += K_CUDA_DECODE_THREADS) {
        const uint32_t column = i % COLUMNS, stripe = i / (16 * COLUMNS);
        const float *t = s.t + (size_t)stripe * blocks * 16 * COLUMNS + i % (16 * COLUMNS);
        const float *dx = s.dx + column * dx_stride;
        float sum = first ? 0.0f : acc[i];
        if (column >= count)
            continue;
#pragma unroll 8
        for (uint32_t b = 0; b < blocks; b++)
            sum = __fmaf_rn(dx[b], t[b * 16 * COLUMNS], sum);
        acc[i] = sum;
    }
}

/* Fetches `tiles` tiles from tile `b` on of the columns' rows. */
template <int COLUMNS, typename Row>
static __device__ __forceinline__ void k_cuda_decode_fetch_columns(
    const struct k_cuda_decode_shared &s, uint32_t chunk_tiles, enum k_form form, uint32_t n_in,
    uint32_t count, Row row, uint32_t b, uint32_t tiles)
{
    const uint32_t warp = threadIdx.x / 32, l = threadIdx.x % 32;
    const uint32_t c = COLUMNS == 1 ? 0 : warp, from = COLUMNS == 1 ? threadIdx.x : l;
    const uint32_t step = COLUMNS == 1 ? K_CUDA_DECODE_THREADS : 32;
    const uint32_t blocks = form == K_FORM_Q32 ? 8 : 1;
    if (c >= count)
        return;
    const uint8_t *r = row(c);
    const uint8_t *sums = r + k_cuda_act_sum_offset(form, n_in) + b * 16;
    const uint8_t *dx = r + k_cuda_act_dx_offset(n_in) + b * blocks * 4;
    for (uint32_t i = from; i < tiles * 16; i += step)
        k_cuda_mma_copy16(s.q + c * (chunk_tiles * 256 + 16) + i * 16, r + b * 256 + i * 16);
    for (uint32_t i = from; form == K_FORM_Q256 && i < tiles; i += step)
        k_cuda_mma_copy16(s.sum + c * (chunk_tiles * 8 + 8) + i * 8, sums + i * 16);
    for (uint32_t i = from; i < tiles * blocks; i += step)
        k_cuda_mma_copy4(s.dx + c * (chunk_tiles * blocks + 1) + i, dx + i * 4);
}

/* acc[stripe][16][COLUMNS] = the stripes' products with the columns; `acc` is complete after a
 * barrier. All sets read `form`. row(c): column c's activation, c < count; asked after the first
 * weights are on their way. F: the format if all have the same one. */
template <int F, int COLUMNS, typename Row>
static __device__ __forceinline__ void k_cuda_decode(const struct k_cuda_decode_shared &s,
                                                     uint32_t chunk_tiles,
                                                     const struct k_cuda_decode_stripes &stripes,
                                                     enum k_form form, uint32_t n_in,
                                                     uint32_t count, Row row, float *acc)
{
    const uint32_t warp = threadIdx.x / 32, l = threadIdx.x % 32;
    const uint32_t all_tiles = n_in / K_CUDA_TILE_INPUTS, blocks = form == K_FORM_Q32 ? 8 : 1;
    const uint32_t n_stripes = stripes.sets * stripes.count;
    const uint32_t x_column = COLUMNS == 1 ? 0 : min(l % 8, count - 1);
    const int8_t *x = s.q + x_column * (chunk_tiles * 256 + 16) + l / 8 * 16;
    for (uint32_t b = 0; b < all_tiles; b += chunk_tiles) {
        const uint32_t tiles = min(chunk_tiles, all_tiles - b), items = n_stripes * tiles;
        struct k_cuda_decode_words<COLUMNS> w;
        uint32_t item = warp, stripe = item / tiles, tile = item % tiles;
        enum k_format f = F == K_CUDA_DECODE_ANY ? stripes.format[0] : (enum k_format)F;
        auto begin = [&]() {
            const uint32_t set = stripe >= stripes.count;
            if (F == K_CUDA_DECODE_ANY)
                f = set ? stripes.format[1] : stripes.format[0];
            const uint64_t nth = (uint64_t)(stripe - set * stripes.count) * all_tiles + b + tile;
            k_cuda_decode_load<COLUMNS>(
                w, f, (set ? stripes.first[1] : stripes.first[0]) + nth * k_cuda_tile_bytes(f));
        };
        if (item < items)
            begin();
        if (b > 0)
            __syncthreads(); /* the last chunk has been folded */
        k_cuda_decode_fetch_columns<COLUMNS>(s, chunk_tiles, form, n_in, count, row, b, tiles);
        k_cuda_mma_arrived();
        __syncthreads();
        while (item < items) {
            k_cuda_decode_tile<COLUMNS>(f, w, x + tile * 256, s.sum + tile * 8, chunk_tiles * 8 + 8,
                                        s.t + (size_t)item * blocks * 16 * COLUMNS);
            item += K_CUDA_DECODE_WARPS;
            stripe = item / tiles;
            tile = item % tiles;
            if (item < items)
                begin();
        }
        __syncthreads();
        k_cuda_decode_fold<COLUMNS>(s, n_stripes, tiles * blocks, chunk_tiles * blocks + 1, count,
                                    b == 0, acc);
    }
}

/* ---- what a launch chooses ------------------------------------------------------------------- */

/* Tiles of a chunk: all, if activations and t's then leave room for several blocks on a
 * multiprocessor; else equal parts. Stripes of a block: so many that each warp has an item, and up
 * to three where the launch has blocks enough, which spreads a block's start over more of them.
 * all_stripes: of one set, in the launch. */
static inline struct k_cuda_decode_shape k_cuda_decode_choose(uint32_t columns, uint32_t blocks,
                                                              uint32_t sets, uint32_t n_tiles,
                                                              uint64_t all_stripes,
                                                              uint32_t sm_count)
{
    const uint32_t most_tiles = columns == 1 ? 16 : blocks == 1 ? 8 : 4;
    const uint32_t chunks = (n_tiles + most_tiles - 1) / most_tiles;
    const uint32_t most_items = 32 * 1024 / (blocks * 64 * columns);
    struct k_cuda_decode_shape shape;
    shape.tiles = (n_tiles + chunks - 1) / chunks;
    const uint32_t a_stripe = shape.tiles * sets; /* items that a stripe of each set brings */
    uint32_t stripes = K_CUDA_DECODE_WARPS / a_stripe;
    if (stripes == 0)
        stripes = 1;
    while ((stripes + 1) * a_stripe <= 3 * K_CUDA_DECODE_WARPS &&
           (stripes + 1) * a_stripe <= most_items &&
           all_stripes / (stripes + 1) >= 8 * (uint64_t)sm_count)
        stripes++;
    shape.stripes = stripes;
    return shape;
}

static inline uint32_t k_cuda_decode_bytes(struct k_cuda_decode_shape shape, uint32_t columns,
                                           uint32_t blocks, uint32_t sets)
{
    return k_cuda_decode_carve(NULL, columns, shape.tiles, blocks, sets * shape.stripes).bytes;
}

#endif

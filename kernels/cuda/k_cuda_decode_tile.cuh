/* The t's (A5) of one tile of arranged weights (k_cuda_tile.h) with up to eight columns, by the
 * tensor core, a warp each. Tile and activations lie in shared memory.
 *
 * COLUMNS is 1 or 8. With 1 every column of operand B is the same one, so that the lanes t of a row
 * all have its sum: lane t keeps row g + 8 * (t & 1). */
#ifndef ISLET_K_CUDA_DECODE_TILE_CUH
#define ISLET_K_CUDA_DECODE_TILE_CUH

#include "k_cuda_mma.cuh"
#include "k_cuda_tile.h"
#include "k_cuda_warp.cuh"

/* Output of a lane's header i: g and g + 8; COLUMNS = 1: one header, of g + 8 * (t & 1). */
template <int COLUMNS> static __device__ __forceinline__ uint32_t k_cuda_decode_row(int i)
{
    const uint32_t l = threadIdx.x % 32;
    return COLUMNS == 1 ? l / 4 + 8 * (l & 1) : l / 4 + 8 * i;
}

/* A lane's 16 bytes of load c of a tile. */
static __device__ __forceinline__ uint4 k_cuda_decode_load(const uint8_t *tile, int c)
{
    return *(const uint4 *)(const void *)(tile + 512 * c + 16 * (threadIdx.x % 32));
}

template <int COLUMNS>
static __device__ __forceinline__ uint4 k_cuda_decode_head(const uint8_t *heads, int i)
{
    return *(const uint4 *)(const void *)(heads + 16 * k_cuda_decode_row<COLUMNS>(i));
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

/* Where a tile's results go: as t's to shared memory, or, with eight columns, into the lane's sums
 * of outputs g and g + 8 and columns 2 t and 2 t + 1 at once (A6). */
template <int COLUMNS> struct k_cuda_decode_to {
    float *t;

    __device__ __forceinline__ void operator()(int block, const float *r) const
    {
        k_cuda_decode_put<COLUMNS>(r, t + block * 16 * COLUMNS);
    }
};

struct k_cuda_decode_into {
    float (&sum)[4];
    const float *dx; /* of the tile's first block, column 2 t; column 2 t + 1's are `next` on */
    uint32_t next;

    __device__ __forceinline__ void operator()(int block, const float *r) const
    {
        const float even = dx[block], odd = dx[next + block];
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[i] = __fmaf_rn(i & 1 ? odd : even, r[i], sum[i]);
    }
};

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
static __device__ __forceinline__ void k_cuda_decode_fives(struct k_cuda_decode_sums<COLUMNS> &s,
                                                           const uint8_t *tile, const int8_t *x,
                                                           const uint32_t (*scales)[2])
{
    struct k_cuda_decode_sums<COLUMNS> high = {
    };
    const uint4 h = F == K_Q5_K ? k_cuda_decode_load(tile, 4) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const uint4 v = k_cuda_decode_load(tile, c);
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
template <enum k_format F, int COLUMNS, typename To>
static __device__ __forceinline__ void k_cuda_decode_k_with_mins(const uint8_t *tile,
                                                                 const int8_t *x,
                                                                 const int16_t *sum,
                                                                 uint32_t sum_stride, const To &to)
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
        /* d and dmin, then scales[12]: k_format_scale_min */
        const uint4 h = k_cuda_decode_head<COLUMNS>(tile + k_cuda_tile_head(F), i);
        d[i] = k_cuda_warp_of_f16(h.x & 0xffffu);
        dmin[i] = k_cuda_warp_of_f16(h.x >> 16);
        scales[i][0] = h.y & 0x3f3f3f3fu;
        mins[i][0] = h.z & 0x3f3f3f3fu;
        scales[i][1] = (h.w & 0x0f0f0f0fu) | (h.y >> 2 & 0x30303030u);
        mins[i][1] = (h.w >> 4 & 0x0f0f0f0fu) | (h.z >> 2 & 0x30303030u);
    }
    k_cuda_decode_fives<F, COLUMNS>(s, tile, x, scales);
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
    to(0, r);
}

/* Adds the two sub-blocks of 32 inputs, number k of half a tile. v: the half's loads; b: operand B
 * of each 16 inputs. */
template <int COLUMNS>
static __device__ __forceinline__ void k_cuda_decode_six_32(struct k_cuda_decode_sums<COLUMNS> &s,
                                                            const uint4 (&v)[3],
                                                            const uint4 *scales, int half, int k,
                                                            const uint32_t *b)
{
    const int j = 4 * half + k;
    uint32_t w[3];
    int first[4], second[4], scale[2][2];
#pragma unroll
    for (int p = 0; p < 3; p++)
        w[p] = k_cuda_decode_word(v[(3 * k + p) / 4], (3 * k + p) % 4);
    const uint32_t rest =
        (w[0] << 6 & 0xc0c0c0c0u) | (w[1] << 4 & 0x30303030u) | (w[2] << 2 & 0x0c0c0c0cu);
    k_cuda_mma_half(first, w[0] & 0xfcfcfcfcu, w[1] & 0xfcfcfcfcu, b[0]);
    k_cuda_mma_half(second, w[2] & 0xfcfcfcfcu, rest, b[1]);
#pragma unroll
    for (int i = 0; i < (COLUMNS == 1 ? 1 : 2); i++)
#pragma unroll
        for (int n = 0; n < 2; n++)
            scale[n][i] =
                k_cuda_decode_signed(k_cuda_decode_word(scales[i], j / 2), 2 * (j % 2) + n);
    k_cuda_decode_scale<COLUMNS>(s, first, scale[0]);
    k_cuda_decode_scale<COLUMNS>(s, second, scale[1]);
}

/* t's of a Q6_K tile. Operands are 4-fold, as the layout has them, and so is S (below 2^30); d / 4
 * is exact and takes it back, the product being the same number. */
template <int COLUMNS, typename To>
static __device__ __forceinline__ void k_cuda_decode_six(const uint8_t *tile, const int8_t *x,
                                                         const To &to)
{
    enum {
        HEADS = COLUMNS == 1 ? 1 : 2,
        SUMS = COLUMNS == 1 ? 1 : 4
    };
    struct k_cuda_decode_sums<COLUMNS> s = {
    };
    uint4 scales[HEADS];
    float r[SUMS];
#pragma unroll
    for (int i = 0; i < HEADS; i++)
        scales[i] = k_cuda_decode_head<COLUMNS>(tile + K_CUDA_TILE_Q6_K_HEAD, i);
#pragma unroll
    for (int half = 0; half < 2; half++) { /* of the inputs: three loads */
        uint4 v[3];
#pragma unroll
        for (int i = 0; i < 3; i++)
            v[i] = k_cuda_decode_load(tile, 3 * half + i);
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
            uint32_t b[4];
            k_cuda_mma_load(b, x + 128 * half + 32 * k);
            k_cuda_decode_six_32<COLUMNS>(s, v, scales, half, k, b);
            k_cuda_decode_six_32<COLUMNS>(s, v, scales, half, k + 1, b + 2);
        }
    }
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        const uint32_t row = k_cuda_decode_row<COLUMNS>(i / 2);
        const float d = k_cuda_warp_of_f16(
            *(const uint16_t *)(const void *)(tile + K_CUDA_TILE_Q6_K_D + 2 * row));
        r[i] = __fmul_rn(__fmul_rn(d, 0.25f), __int2float_rn(s.s[i]));
    }
    to(0, r);
}

/* Sums of 32-blocks 2 c and 2 c + 1. Q4_0's operands are 16-fold, as int8 without shifting apart
 * the sign; d / 16 is exact and takes it back. */
template <enum k_format F, int COLUMNS>
static __device__ __forceinline__ void k_cuda_decode_pair(const uint8_t *tile, const int8_t *x,
                                                          int c, int (&even)[4], int (&odd)[4])
{
    uint32_t b[4];
    k_cuda_mma_load(b, x + 64 * c);
    if (F == K_Q8_0) {
        const uint4 v = k_cuda_decode_load(tile, 2 * c), u = k_cuda_decode_load(tile, 2 * c + 1);
        k_cuda_mma_s8(even, v.x, v.y, v.z, v.w, b[0], b[1]);
        k_cuda_mma_s8(odd, u.x, u.y, u.z, u.w, b[2], b[3]);
    } else {
        const uint32_t m = 0xf0f0f0f0u, sign = 0x80808080u;
        const uint4 v = k_cuda_decode_load(tile, c);
        k_cuda_mma_s8(even, (v.x << 4 & m) ^ sign, (v.y << 4 & m) ^ sign, (v.z << 4 & m) ^ sign,
                      (v.w << 4 & m) ^ sign, b[0], b[1]);
        k_cuda_mma_s8(odd, (v.x & m) ^ sign, (v.y & m) ^ sign, (v.z & m) ^ sign, (v.w & m) ^ sign,
                      b[2], b[3]);
    }
}

template <enum k_format F> static __device__ __forceinline__ float k_cuda_decode_d(uint32_t half)
{
    const float d = k_cuda_warp_of_f16(half & 0xffffu);
    return F == K_Q4_0 ? __fmul_rn(d, 0.0625f) : d;
}

/* t's of 32-blocks 2 c and 2 c + 1; t: of the tile. With one column, lanes t = 0, 1 go on with the
 * even block and t = 2, 3 with the odd one. */
template <enum k_format F>
static __device__ __forceinline__ void k_cuda_decode_pair_of_one(const uint4 *d, int c,
                                                                 const int (&even)[4],
                                                                 const int (&odd)[4], float *t)
{
    const uint32_t l = threadIdx.x % 32, both = k_cuda_decode_word(d[0], c);
    const int upper = l & 2 ? odd[2] : even[2], lower = l & 2 ? odd[0] : even[0];
    t[(2 * c + (l >> 1 & 1)) * 16 + k_cuda_decode_row<1>(0)] = __fmul_rn(
        k_cuda_decode_d<F>(l & 2 ? both >> 16 : both), __int2float_rn(l & 1 ? upper : lower));
}

template <enum k_format F, typename To>
static __device__ __forceinline__ void k_cuda_decode_pair_of_eight(const uint4 *d, int c,
                                                                   const int (&even)[4],
                                                                   const int (&odd)[4],
                                                                   const To &to)
{
    float r[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t both = k_cuda_decode_word(d[i / 2], c);
        r[0][i] = __fmul_rn(k_cuda_decode_d<F>(both), __int2float_rn(even[i]));
        r[1][i] = __fmul_rn(k_cuda_decode_d<F>(both >> 16), __int2float_rn(odd[i]));
    }
    to(2 * c, r[0]);
    to(2 * c + 1, r[1]);
}

/* t's of a Q8_0 or Q4_0 tile: eight blocks. */
template <enum k_format F, int COLUMNS, typename To>
static __device__ __forceinline__ void k_cuda_decode_32s(const uint8_t *tile, const int8_t *x,
                                                         const To &to)
{
    uint4 d[COLUMNS == 1 ? 1 : 2];
#pragma unroll
    for (int i = 0; i < (COLUMNS == 1 ? 1 : 2); i++)
        d[i] = k_cuda_decode_head<COLUMNS>(tile + k_cuda_tile_head(F), i);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        int even[4], odd[4];
        k_cuda_decode_pair<F, COLUMNS>(tile, x, c, even, odd);
        if constexpr (COLUMNS == 1)
            k_cuda_decode_pair_of_one<F>(d, c, even, odd, to.t);
        else
            k_cuda_decode_pair_of_eight<F>(d, c, even, odd, to);
    }
}

/* A tile's results to `to`. x: the tile's q's of the column whose rows this lane gives
 * ldmatrix, at its 16 bytes; sum: the tile's sums of column 0, the next column's sum_stride on. */
template <int COLUMNS, typename To>
static __device__ __forceinline__ void k_cuda_decode_tile(enum k_format f, const uint8_t *tile,
                                                          const int8_t *x, const int16_t *sum,
                                                          uint32_t sum_stride, const To &to)
{
    switch (f) {
    case K_Q4_K:
        k_cuda_decode_k_with_mins<K_Q4_K, COLUMNS>(tile, x, sum, sum_stride, to);
        break;
    case K_Q5_K:
        k_cuda_decode_k_with_mins<K_Q5_K, COLUMNS>(tile, x, sum, sum_stride, to);
        break;
    case K_Q6_K:
        k_cuda_decode_six<COLUMNS>(tile, x, to);
        break;
    case K_Q8_0:
        k_cuda_decode_32s<K_Q8_0, COLUMNS>(tile, x, to);
        break;
    case K_Q4_0:
        k_cuda_decode_32s<K_Q4_0, COLUMNS>(tile, x, to);
        break;
    default:
        break;
    }
}

#endif

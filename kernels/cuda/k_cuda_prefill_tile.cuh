/* What the prefill kernels' ways of multiplying share. A warp takes 2 tiles of 16 outputs
 * (k_cuda_tile.h) and 8 * NT activation rows through the inputs, 256 at a time, all in shared
 * memory, onto float sums in registers (A5, A6).
 *
 * Q8_0, Q4_0 are multiplied here: blocks of 32 have float scales, so each block's sum D goes
 * straight into two fma. D starts at the bits of 1.5 * 2^23, which makes it that float plus D,
 * without a conversion. Products by such a float are exact until their one rounding: fma(d, 1.5 *
 * 2^23 + D, -d * 1.5 * 2^23) rounds d * D once, since d has 11 bits. (The sign of a zero t may
 * differ from A5's; it cannot reach the sum, which starts at +0 and is never -0: a nonzero dx * t
 * is at least 2^-131.)
 *
 * Some weights are carried as a multiple, taken back by their exact scale d / multiple: 4 for Q6_K
 * (abs(S) < 2^29.99), 16 for Q4_0. */
#ifndef ISLET_K_CUDA_PREFILL_TILE_CUH
#define ISLET_K_CUDA_PREFILL_TILE_CUH

#include "k_cuda_prefill_mma.cuh"
#include "k_cuda_tile.h"
#include "kernels.h"

enum {
    K_PREFILL_TILES = 2,                              /* of a warp */
    K_PREFILL_MAGIC = 0x4b400000,                     /* bits of 1.5 * 2^23 */
    K_PREFILL_PANEL_BYTES = 128 * 8,                  /* of 8 rows' 128 inputs */
    K_PREFILL_EIGHT_BYTES = 2 * K_PREFILL_PANEL_BYTES /* from 8 rows to the next 8 */
};
#define K_PREFILL_MAGIC_FLOAT 12582912.0f

/* A super-block's activations in shared memory, 8 rows after 8. q: two panels of 128 inputs, in a
 * panel 128 bytes a row, 16-byte piece c of the row at place c ^ (row % 8), so that 8 rows' same
 * piece lies in all banks (and as wgmma's 128-byte swizzle wants it). dx: [blocks][8 rows]. sums:
 * 16 bytes a row. */
struct k_prefill_acts {
    const uint8_t *q;
    const float *dx;
    const uint8_t *sums;
};

/* Where piece `piece` (of 16) of a row of q lies. */
static __device__ __forceinline__ uint32_t k_prefill_place(uint32_t row, uint32_t piece)
{
    return row / 8 * K_PREFILL_EIGHT_BYTES + piece / 8 * K_PREFILL_PANEL_BYTES + row % 8 * 128 +
           ((piece % 8) ^ (row % 8)) * 16;
}

/* Operands B of 16 rows for inputs 32 j..: r[0], r[1] of the first 8, r[2], r[3] of the others. */
static __device__ __forceinline__ void k_prefill_columns(uint32_t (&r)[4], const uint8_t *q, int j,
                                                         uint32_t lane)
{
    k_prefill_ldmatrix(r, q + k_prefill_place(lane / 16 * 8 + lane % 8, 2 * j + lane / 8 % 2));
}

__host__ __device__ constexpr bool k_prefill_has_min(enum k_format f)
{
    return f == K_Q4_K || f == K_Q5_K;
}

__host__ __device__ constexpr bool k_prefill_is_256(enum k_format f)
{
    return k_prefill_has_min(f) || f == K_Q6_K;
}

__host__ __device__ constexpr uint32_t k_prefill_tile_bytes(enum k_format f)
{
    return f == K_Q8_0   ? K_CUDA_TILE_Q8_0_BYTES
           : f == K_Q5_K ? K_CUDA_TILE_Q5_K_BYTES
           : f == K_Q6_K ? K_CUDA_TILE_Q6_K_BYTES
                         : K_CUDA_TILE_Q4_K_BYTES; /* and Q4_0 */
}

static __device__ __forceinline__ void k_prefill_words(uint32_t (&w)[4], const uint4 &load)
{
    w[0] = load.x, w[1] = load.y, w[2] = load.z, w[3] = load.w;
}

/* Q6_K: words V[6c..6c+5] of the tile, 4 * weight in the upper six bits of each byte. */
static __device__ __forceinline__ void k_prefill_six(uint32_t (&a)[2][4], const uint8_t *tile,
                                                     int c, uint32_t lane)
{
    const uint4 whole = ((const uint4 *)(const void *)tile)[32 * (c / 2 * 3 + 2 * (c & 1)) + lane];
    const uint2 half =
        ((const uint2 *)(const void *)tile)[2 * (32 * (c / 2 * 3 + 1) + lane) + (c & 1)];
    const bool odd = c & 1;
    const uint32_t v[6] = {odd ? half.x : whole.x,  odd ? half.y : whole.y, odd ? whole.x : whole.z,
                           odd ? whole.y : whole.w, odd ? whole.z : half.x, odd ? whole.w : half.y};
    for (int h = 0; h < 2; h++) {
        for (int p = 0; p < 3; p++)
            a[h][p] = v[3 * h + p] & 0xfcfcfcfcu;
        a[h][3] = (v[3 * h] << 6 & 0xc0c0c0c0u) | (v[3 * h + 1] << 4 & 0x30303030u) |
                  (v[3 * h + 2] << 2 & 0x0c0c0c0cu);
    }
}

/* Q5_K: sets the fifth bits. */
static __device__ __forceinline__ void k_prefill_fifth(uint32_t (&a)[2][4], const uint4 &load,
                                                       int c)
{
    uint32_t high[4];
    k_prefill_words(high, load);
    for (int h = 0; h < 2; h++)
        for (int p = 0; p < 4; p++) {
            const int j = 2 * c + h;
            const uint32_t at4 = j < 4 ? high[p] << (4 - j) : high[p] >> (j - 4);
            a[h][p] |= at4 & 0x10101010u;
        }
}

/* Sub-blocks 2c and 2c + 1 of a tile as this lane's operands A (times the format's multiple). */
template <enum k_format F>
static __device__ __forceinline__ void k_prefill_operands(uint32_t (&a)[2][4], const uint8_t *tile,
                                                          int c, uint32_t lane)
{
    const uint4 *loads = (const uint4 *)(const void *)tile + lane; /* load i: loads[32 * i] */
    if constexpr (F == K_Q8_0) {
        k_prefill_words(a[0], loads[32 * (2 * c)]);
        k_prefill_words(a[1], loads[32 * (2 * c + 1)]);
    } else if constexpr (F == K_Q6_K) {
        k_prefill_six(a, tile, c, lane);
    } else {
        uint32_t w[4];
        k_prefill_words(w, loads[32 * c]);
        for (int p = 0; p < 4; p++)
            if (F == K_Q4_0) {
                a[0][p] = (w[p] << 4 & 0xf0f0f0f0u) ^ 0x80808080u;
                a[1][p] = (w[p] & 0xf0f0f0f0u) ^ 0x80808080u;
            } else {
                a[0][p] = w[p] & 0x0f0f0f0fu;
                a[1][p] = w[p] >> 4 & 0x0f0f0f0fu;
            }
        if constexpr (F == K_Q5_K)
            k_prefill_fifth(a, loads[32 * 4], c);
    }
}

/* The file's 12 bytes of six-bit scales and minima, a byte each. */
static __device__ __forceinline__ void k_prefill_scales(const uint4 &head, uint32_t (&scale)[2])
{
    scale[0] = head.y & 0x3f3f3f3fu;
    scale[1] = (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u);
}

static __device__ __forceinline__ void k_prefill_mins(const uint4 &head, uint32_t (&min)[2])
{
    min[0] = head.z & 0x3f3f3f3fu;
    min[1] = (head.w >> 4 & 0x0f0f0f0fu) | (head.z >> 2 & 0x30303030u);
}

/* A tile's scales of a super-block for outputs g and g + 8. */
struct k_prefill_head {
    float d[2], dmin[2];
};

template <enum k_format F>
static __device__ __forceinline__ uint4 k_prefill_head_bytes(const uint8_t *tile, uint32_t output)
{
    return *(const uint4 *)(const void *)(tile + k_cuda_tile_head(F) + 16 * output);
}

template <enum k_format F>
static __device__ __forceinline__ void k_prefill_head_read(struct k_prefill_head &head,
                                                           const uint8_t *tile, uint32_t g)
{
    for (int r = 0; r < 2; r++) {
        if (F == K_Q6_K) {
            const uint8_t *d = tile + K_CUDA_TILE_Q6_K_D + 2 * (g + 8 * r);
            head.d[r] = __fmul_rn(k_prefill_half(*(const uint16_t *)(const void *)d), 0.25f);
        } else {
            const uint32_t both = k_prefill_head_bytes<F>(tile, g + 8 * r).x;
            head.d[r] = k_prefill_half(both & 0xffffu);
            head.dmin[r] = k_prefill_half(both >> 16);
        }
    }
}

/* acc = fma(dx, t, acc) for 8 rows and one tile (A5, A6); minus: dmin * f32(M). */
template <enum k_format F>
static __device__ __forceinline__ void k_prefill_fold(float (&acc)[4], const int32_t (&sum)[4],
                                                      const struct k_prefill_head &head,
                                                      const float (&minus)[4], const float2 &dx)
{
    for (int i = 0; i < 4; i++) {
        const float s = __int2float_rn(sum[i]), d = head.d[i >> 1];
        const float t = k_prefill_has_min(F) ? __fmaf_rn(d, s, -minus[i]) : __fmul_rn(d, s);
        acc[i] = __fmaf_rn(i & 1 ? dx.y : dx.x, t, acc[i]);
    }
}

/* dx of this lane's two of rows 8n.., block `block` of BLOCKS. */
template <int BLOCKS>
static __device__ __forceinline__ float2 k_prefill_dx(const struct k_prefill_acts &x, int block,
                                                      int n, uint32_t lane)
{
    return *(const float2 *)(const void *)(x.dx + 8 * (BLOCKS * n + block) + 2 * (lane % 4));
}

/* Eight blocks of 32; `tiles`: the warp's two, one behind the other. */
template <enum k_format F, int NT>
static __device__ __forceinline__ void k_prefill_blocks(float (&acc)[K_PREFILL_TILES][NT][4],
                                                        const uint8_t *tiles,
                                                        const struct k_prefill_acts &x,
                                                        uint32_t lane)
{
    const uint32_t g = lane / 4, bytes = k_prefill_tile_bytes(F);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        uint32_t a[K_PREFILL_TILES][2][4], d16[K_PREFILL_TILES][2];
        for (int m = 0; m < K_PREFILL_TILES; m++) {
            k_prefill_operands<F>(a[m], tiles + m * bytes, c, lane);
            for (int r = 0; r < 2; r++)
                d16[m][r] =
                    *(const uint32_t *)(const void *)(tiles + m * bytes + k_cuda_tile_head(F) +
                                                      16 * (g + 8 * r) + 4 * c);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int j = 2 * c + h;
            float d[K_PREFILL_TILES][2], minus[K_PREFILL_TILES][2];
            uint32_t b[4];
            for (int m = 0; m < K_PREFILL_TILES; m++)
                for (int r = 0; r < 2; r++) {
                    const float whole = k_prefill_half(d16[m][r] >> (16 * h) & 0xffffu);
                    d[m][r] = F == K_Q4_0 ? __fmul_rn(whole, 0.0625f) : whole;
                    minus[m][r] = __fmul_rn(d[m][r], -K_PREFILL_MAGIC_FLOAT);
                }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                if (n % 2 == 0)
                    k_prefill_columns(b, x.q + n * K_PREFILL_EIGHT_BYTES, j, lane);
                const float2 dx = k_prefill_dx<8>(x, j, n, lane);
                for (int m = 0; m < K_PREFILL_TILES; m++) {
                    int32_t s[4];
                    k_prefill_mma32(s, a[m][h], b[n % 2 * 2], b[n % 2 * 2 + 1], K_PREFILL_MAGIC);
                    for (int i = 0; i < 4; i++) {
                        const float product =
                            __fmaf_rn(d[m][i >> 1], __int_as_float(s[i]), minus[m][i >> 1]);
                        acc[m][n][i] = __fmaf_rn(i & 1 ? dx.y : dx.x, product, acc[m][n][i]);
                    }
                }
            }
        }
    }
}

#endif

/* What one warp of the prefill kernels does with a super-block (256 inputs): 2 tiles of 16 outputs
 * (k_cuda_tile.h) times 8 * NT activation rows, all in shared memory, onto float sums in registers
 * (A5, A6). One sub-block's exact sum D comes from one mma; the rest costs, per sub-block and value:
 *   Q4_K, Q5_K, Q6_K   one integer multiply-add by the sub-block's scale; per super-block one
 *                      conversion and two or three fma. The minima are two mma16 more: the sums of 32
 *                      go in as `sum & 63` and `sum >> 6`, M = L + 64 * H
 *   Q8_0, Q4_0         two fma, no conversion: D starts at the bits of 1.5 * 2^23, so that it is that
 *                      float plus D
 * Products by such a float are exact until their one rounding: fma(d, 1.5 * 2^23 + D, -d * 1.5 * 2^23)
 * rounds d * D once, since d has 11 bits. (The sign of a zero t may differ from A5's; it cannot reach
 * the sum, which starts at +0 and is never -0: a nonzero dx * t is at least 2^-131.)
 *
 * Some weights are carried as a multiple, taken back by their exact scale d / multiple: 4 for Q6_K
 * (abs(S) < 2^29.99), 16 for Q4_0. */
#ifndef ISLET_K_CUDA_PREFILL_TILE_CUH
#define ISLET_K_CUDA_PREFILL_TILE_CUH

#include "k_cuda_prefill_mma.cuh"
#include "k_cuda_tile.h"
#include "kernels.h"

enum {
    K_PREFILL_TILES = 2,                       /* of a warp */
    K_PREFILL_PITCH = K_CUDA_TILE_INPUTS + 16, /* of a row of q: 8 rows lie in 8 groups of banks */
    K_PREFILL_MAGIC = 0x4b400000               /* bits of 1.5 * 2^23 */
};
#define K_PREFILL_MAGIC_FLOAT 12582912.0f

/* A super-block's activations in shared memory, as the warp's first row sees them: q rows K_PREFILL_PITCH
 * apart; dx [blocks][rows of the block], `dx_pitch` floats a block; sums 16 bytes a row. */
struct k_prefill_acts {
    const uint8_t *q;
    const float *dx;
    const uint8_t *sums;
};

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

/* Sub-blocks 2c and 2c + 1 of a tile as this lane's operands A (times the format's multiple). */
template <enum k_format F>
static __device__ __forceinline__ void k_prefill_operands(uint32_t (&a)[2][4], const uint8_t *tile,
                                                          int c, uint32_t lane)
{
    const uint4 *loads = (const uint4 *)(const void *)tile + lane; /* load i: loads[32 * i] */
    if (F == K_Q8_0) {
        for (int h = 0; h < 2; h++) {
            const uint4 w = loads[32 * (2 * c + h)];
            a[h][0] = w.x, a[h][1] = w.y, a[h][2] = w.z, a[h][3] = w.w;
        }
        return;
    }
    if (F == K_Q6_K) {
        const uint2 *halves = (const uint2 *)(const void *)tile + 2 * lane;
        const uint4 whole = loads[32 * (c / 2 * 3 + 2 * (c & 1))];
        const uint2 half = halves[64 * (c / 2 * 3 + 1) + (c & 1)];
        const uint32_t even[6] = {whole.x, whole.y, whole.z, whole.w, half.x, half.y};
        const uint32_t odd[6] = {half.x, half.y, whole.x, whole.y, whole.z, whole.w};
        for (int h = 0; h < 2; h++) {
            const uint32_t *v = (c & 1 ? odd : even) + 3 * h;
            for (int p = 0; p < 3; p++)
                a[h][p] = v[p] & 0xfcfcfcfcu;
            a[h][3] = (v[0] << 6 & 0xc0c0c0c0u) | (v[1] << 4 & 0x30303030u) |
                      (v[2] << 2 & 0x0c0c0c0cu);
        }
        return;
    }
    const uint4 w = loads[32 * c];
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    if (F == K_Q4_0) {
        for (int p = 0; p < 4; p++) {
            a[0][p] = (words[p] << 4 & 0xf0f0f0f0u) ^ 0x80808080u;
            a[1][p] = (words[p] & 0xf0f0f0f0u) ^ 0x80808080u;
        }
        return;
    }
    for (int p = 0; p < 4; p++) {
        a[0][p] = words[p] & 0x0f0f0f0fu;
        a[1][p] = words[p] >> 4 & 0x0f0f0f0fu;
    }
    if (F == K_Q5_K) {
        const uint4 fifth = loads[32 * 4];
        const uint32_t high[4] = {fifth.x, fifth.y, fifth.z, fifth.w};
        for (int p = 0; p < 4; p++)
            for (int h = 0; h < 2; h++) {
                const int j = 2 * c + h;
                const uint32_t at4 = j < 4 ? high[p] << (4 - j) : high[p] >> (j - 4);
                a[h][p] |= at4 & 0x10101010u;
            }
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

/* Scales of tile m's outputs g (0) and g + 8 (1): what the sub-blocks need all along. */
template <enum k_format F>
struct k_prefill_sub_scales {
    uint32_t words[2][2];

    __device__ __forceinline__ void open(const uint8_t *tile, uint32_t g)
    {
        if (k_prefill_has_min(F))
            for (int r = 0; r < 2; r++)
                k_prefill_scales(*(const uint4 *)(const void *)(tile + k_cuda_tile_head(F) +
                                                                16 * (g + 8 * r)),
                                 words[r]);
    }
    /* Sub-blocks 4c.. of Q6_K. */
    __device__ __forceinline__ void step(const uint8_t *tile, uint32_t g, int c)
    {
        if (F == K_Q6_K)
            for (int r = 0; r < 2; r++)
                words[r][0] = *(const uint32_t *)(const void *)(tile + K_CUDA_TILE_Q6_K_HEAD +
                                                                16 * (g + 8 * r) + 4 * c);
    }
    __device__ __forceinline__ int32_t of(int r, int j) const
    {
        if (F == K_Q6_K)
            return (int8_t)(words[r][0] >> (8 * (j & 3)));
        return (int32_t)(words[r][j >> 2] >> (8 * (j & 3)) & 255u);
    }
};

/* sum += scale * (product over 32 inputs), or two scales over 16 each; `first`: sum = ... */
template <enum k_format F>
static __device__ __forceinline__ void k_prefill_accumulate(int32_t (&sum)[4],
                                                            const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1,
                                                            const k_prefill_sub_scales<F> &scales,
                                                            int j, bool first)
{
    const int32_t zero[4] = {0, 0, 0, 0};
    int32_t d[4];
    if (F == K_Q6_K) {
        k_prefill_mma16(d, a[0], a[1], b0, zero);
        for (int i = 0; i < 4; i++)
            sum[i] = (first ? 0 : sum[i]) + scales.of(i >> 1, 2 * j) * d[i];
        k_prefill_mma16(d, a[2], a[3], b1, zero);
        for (int i = 0; i < 4; i++)
            sum[i] += scales.of(i >> 1, 2 * j + 1) * d[i];
        return;
    }
    k_prefill_mma32(d, a, b0, b1, 0);
    for (int i = 0; i < 4; i++)
        sum[i] = (first ? 0 : sum[i]) + scales.of(i >> 1, j) * d[i];
}

/* A tile's scales of the super-block and operand A of its minima, for this lane. */
struct k_prefill_head {
    float d[2], dmin[2], minus[2];  /* of outputs g, g + 8; minus = -dmin * 1.5 * 2^23 */
    uint32_t low[2], high[2];       /* minima at k = 0..7, at k = 8..15 */
};

template <enum k_format F>
static __device__ __forceinline__ void k_prefill_head_read(k_prefill_head &head, const uint8_t *tile,
                                                           uint32_t lane)
{
    const uint32_t g = lane / 4, t = lane % 4;
    for (int r = 0; r < 2; r++) {
        if (F == K_Q6_K) {
            const uint8_t *d = tile + K_CUDA_TILE_Q6_K_D + 2 * (g + 8 * r);
            head.d[r] = __fmul_rn(k_prefill_half(*(const uint16_t *)(const void *)d), 0.25f);
            continue;
        }
        const uint4 h =
            *(const uint4 *)(const void *)(tile + k_cuda_tile_head(F) + 16 * (g + 8 * r));
        uint32_t mins[2];
        k_prefill_mins(h, mins);
        head.d[r] = k_prefill_half(h.x & 0xffffu);
        head.dmin[r] = k_prefill_half(h.x >> 16);
        head.minus[r] = __fmul_rn(head.dmin[r], -K_PREFILL_MAGIC_FLOAT);
        const uint32_t word = t & 1 ? mins[1] : mins[0];
        head.low[r] = t < 2 ? word : 0;
        head.high[r] = t < 2 ? 0 : word;
    }
}

/* Operand B of the minima for 8 rows: low digits of the 8 sums at k = 0..7, high ones after. */
static __device__ __forceinline__ uint32_t k_prefill_digits(const uint8_t *sums, uint32_t lane)
{
    const uint32_t g = lane / 4, t = lane % 4;
    const uint2 four = *(const uint2 *)(const void *)(sums + 16 * g + 8 * (t & 1));
    const uint32_t shift = t < 2 ? 0 : 6, mask = t < 2 ? 0x003f003fu : 0x00ff00ffu;
    return k_prefill_even_bytes(four.x >> shift & mask, four.y >> shift & mask);
}

/* dmin * f32(M) of the four values, M = L + 64 * H. */
static __device__ __forceinline__ void k_prefill_min_product(float (&product)[4],
                                                             const k_prefill_head &head, uint32_t b)
{
    const int32_t zero[4] = {0, 0, 0, 0};
    int32_t high[4], m[4];
    k_prefill_mma16(high, head.high[0], head.high[1], b, zero);
    for (int i = 0; i < 4; i++)
        high[i] = high[i] * 64 + K_PREFILL_MAGIC;
    k_prefill_mma16(m, head.low[0], head.low[1], b, high);
    for (int i = 0; i < 4; i++)
        product[i] = __fmaf_rn(head.dmin[i >> 1], __int_as_float(m[i]), head.minus[i >> 1]);
}

/* acc = fma(dx, t, acc) for 8 rows and one tile (A5, A6). */
template <enum k_format F>
static __device__ __forceinline__ void k_prefill_fold(float (&acc)[4], const int32_t (&sum)[4],
                                                      const k_prefill_head &head, uint32_t digits,
                                                      const float2 &dx)
{
    float minus[4];
    if (k_prefill_has_min(F))
        k_prefill_min_product(minus, head, digits);
    for (int i = 0; i < 4; i++) {
        const float s = __int2float_rn(sum[i]), d = head.d[i >> 1];
        const float t = k_prefill_has_min(F) ? __fmaf_rn(d, s, -minus[i]) : __fmul_rn(d, s);
        acc[i] = __fmaf_rn(i & 1 ? dx.y : dx.x, t, acc[i]);
    }
}

/* One super-block of a format of 256; `tiles`: the warp's two, one behind the other. */
template <enum k_format F, int NT>
static __device__ __forceinline__ void k_prefill_super(float (&acc)[K_PREFILL_TILES][NT][4],
                                                       const uint8_t *tiles,
                                                       const k_prefill_acts &x, uint32_t lane)
{
    const uint32_t g = lane / 4, t = lane % 4, bytes = k_prefill_tile_bytes(F);
    const uint8_t *q = x.q + (lane / 16 * 8 + lane % 8) * K_PREFILL_PITCH + lane / 8 % 2 * 16;
    k_prefill_sub_scales<F> scales[K_PREFILL_TILES];
    int32_t sum[K_PREFILL_TILES][NT][4];
    for (int m = 0; m < K_PREFILL_TILES; m++)
        scales[m].open(tiles + m * bytes, g);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        uint32_t a[K_PREFILL_TILES][2][4];
        for (int m = 0; m < K_PREFILL_TILES; m++) {
            k_prefill_operands<F>(a[m], tiles + m * bytes, c, lane);
            scales[m].step(tiles + m * bytes, g, c);
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                const int j = 2 * c + h;
                uint32_t b[4];
                k_prefill_ldmatrix(b, q + n * 8 * K_PREFILL_PITCH + 32 * j);
                for (int m = 0; m < K_PREFILL_TILES; m++) {
                    k_prefill_accumulate<F>(sum[m][n], a[m][h], b[0], b[1], scales[m], j, j == 0);
                    k_prefill_accumulate<F>(sum[m][n + 1], a[m][h], b[2], b[3], scales[m], j,
                                            j == 0);
                }
            }
    }
    k_prefill_head head[K_PREFILL_TILES];
    for (int m = 0; m < K_PREFILL_TILES; m++)
        k_prefill_head_read<F>(head[m], tiles + m * bytes, lane);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 dx = *(const float2 *)(const void *)(x.dx + 8 * n + 2 * t);
        const uint32_t digits =
            k_prefill_has_min(F) ? k_prefill_digits(x.sums + 8 * 16 * n, lane) : 0;
        for (int m = 0; m < K_PREFILL_TILES; m++)
            k_prefill_fold<F>(acc[m][n], sum[m][n], head[m], digits, dx);
    }
}

/* Eight blocks of 32; `pitch`: floats of dx from a block to the next. */
template <enum k_format F, int NT>
static __device__ __forceinline__ void k_prefill_blocks(float (&acc)[K_PREFILL_TILES][NT][4],
                                                        const uint8_t *tiles,
                                                        const k_prefill_acts &x, uint32_t pitch,
                                                        uint32_t lane)
{
    const uint32_t g = lane / 4, t = lane % 4, bytes = k_prefill_tile_bytes(F);
    const uint8_t *q = x.q + (lane / 16 * 8 + lane % 8) * K_PREFILL_PITCH + lane / 8 % 2 * 16;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        uint32_t a[K_PREFILL_TILES][2][4], d16[K_PREFILL_TILES][2];
        for (int m = 0; m < K_PREFILL_TILES; m++) {
            k_prefill_operands<F>(a[m], tiles + m * bytes, c, lane);
            for (int r = 0; r < 2; r++)
                d16[m][r] = *(const uint32_t *)(const void *)(tiles + m * bytes +
                                                              k_cuda_tile_head(F) +
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
                    k_prefill_ldmatrix(b, q + n * 8 * K_PREFILL_PITCH + 32 * j);
                const float2 dx =
                    *(const float2 *)(const void *)(x.dx + j * pitch + 8 * n + 2 * t);
                for (int m = 0; m < K_PREFILL_TILES; m++) {
                    int32_t s[4];
                    k_prefill_mma32(s, a[m][h], b[n % 2 * 2], b[n % 2 * 2 + 1], K_PREFILL_MAGIC);
                    for (int i = 0; i < 4; i++) {
                        const float product = __fmaf_rn(d[m][i >> 1], __int_as_float(s[i]),
                                                        minus[m][i >> 1]);
                        acc[m][n][i] = __fmaf_rn(i & 1 ? dx.y : dx.x, product, acc[m][n][i]);
                    }
                }
            }
        }
    }
}

#endif

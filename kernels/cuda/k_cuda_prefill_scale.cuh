/* Super-blocks of Q4_K, Q5_K, Q6_K by mma.sync: one sub-block an instruction, then one integer
 * multiply-add by the sub-block's scale per value; one conversion per super-block (B5). The minima
 * are two mma16 more: the sums of 32 go in as `sum & 63` and `sum >> 6`, M = L + 64 * H. */
#ifndef ISLET_K_CUDA_PREFILL_SCALE_CUH
#define ISLET_K_CUDA_PREFILL_SCALE_CUH

#include "k_cuda_prefill_digits.h"
#include "k_cuda_prefill_tile.cuh"

/* What the thread that fetched a row's 8 sums makes of them: nothing. */
static __device__ __forceinline__ void k_prefill_sums_prepare(uint8_t *) {}

/* Scales of tile m's outputs g (0) and g + 8 (1): what the sub-blocks need all along. */
template <enum k_format F> struct k_prefill_sub_scales {
    uint32_t words[2][2];

    __device__ __forceinline__ void open(const uint8_t *tile, uint32_t g)
    {
        if (k_prefill_has_min(F))
            for (int r = 0; r < 2; r++)
                k_prefill_scales(
                    *(const uint4 *)(const void *)(tile + k_cuda_tile_head(F) + 16 * (g + 8 * r)),
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

/* Operand A of a tile's minima: at k = 0..7, and at k = 8..15. */
struct k_prefill_min_operand {
    uint32_t low[2], high[2];
};

template <enum k_format F>
static __device__ __forceinline__ void k_prefill_min_read(struct k_prefill_min_operand &a,
                                                          const uint8_t *tile, uint32_t lane)
{
    const uint32_t g = lane / 4, t = lane % 4;
    for (int r = 0; r < 2; r++) {
        uint32_t mins[2];
        k_prefill_mins(k_prefill_head_bytes<F>(tile, g + 8 * r), mins);
        const uint32_t word = t & 1 ? mins[1] : mins[0];
        a.low[r] = t < 2 ? word : 0;
        a.high[r] = t < 2 ? 0 : word;
    }
}

/* Operand B of the minima for 8 rows: low digits of the 8 sums at k = 0..7, high ones after. */
static __device__ __forceinline__ uint32_t k_prefill_min_digits(const uint8_t *sums, uint32_t lane)
{
    const uint32_t g = lane / 4, t = lane % 4;
    const uint2 four = *(const uint2 *)(const void *)(sums + 16 * g + 8 * (t & 1));
    return t < 2 ? k_prefill_sum_digit(four.x, four.y, 0) : k_prefill_sum_digit(four.x, four.y, 1);
}

/* dmin * f32(M) of the four values, M = L + 64 * H, as the products in k_prefill_blocks. */
static __device__ __forceinline__ void k_prefill_min_product(float (&product)[4],
                                                             const struct k_prefill_min_operand &a,
                                                             const float (&dmin)[2], uint32_t b)
{
    const int32_t zero[4] = {0, 0, 0, 0};
    int32_t high[4], m[4];
    k_prefill_mma16(high, a.high[0], a.high[1], b, zero);
    for (int i = 0; i < 4; i++)
        high[i] = high[i] * 64 + K_PREFILL_MAGIC;
    k_prefill_mma16(m, a.low[0], a.low[1], b, high);
    for (int i = 0; i < 4; i++) {
        const float d = dmin[i >> 1];
        product[i] = __fmaf_rn(d, __int_as_float(m[i]), __fmul_rn(d, -K_PREFILL_MAGIC_FLOAT));
    }
}

/* One super-block of a format of 256; `tiles`: the warp's two, one behind the other. `between` is
 * called once. */
template <enum k_format F, int NT, class Between>
static __device__ __forceinline__ void k_prefill_super(float (&acc)[K_PREFILL_TILES][NT][4],
                                                       const uint8_t *tiles,
                                                       const struct k_prefill_acts &x,
                                                       uint32_t lane, const Between &between)
{
    between();
    const uint32_t g = lane / 4, bytes = k_prefill_tile_bytes(F);
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
                k_prefill_columns(b, x.q + n * K_PREFILL_EIGHT_BYTES, j, lane);
                for (int m = 0; m < K_PREFILL_TILES; m++) {
                    k_prefill_accumulate<F>(sum[m][n], a[m][h], b[0], b[1], scales[m], j, j == 0);
                    k_prefill_accumulate<F>(sum[m][n + 1], a[m][h], b[2], b[3], scales[m], j,
                                            j == 0);
                }
            }
    }
    struct k_prefill_head head[K_PREFILL_TILES];
    struct k_prefill_min_operand mins[K_PREFILL_TILES];
    for (int m = 0; m < K_PREFILL_TILES; m++) {
        k_prefill_head_read<F>(head[m], tiles + m * bytes, g);
        if (k_prefill_has_min(F))
            k_prefill_min_read<F>(mins[m], tiles + m * bytes, lane);
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 dx = k_prefill_dx<1>(x, 0, n, lane);
        const uint32_t b =
            k_prefill_has_min(F) ? k_prefill_min_digits(x.sums + 16 * 8 * n, lane) : 0;
        for (int m = 0; m < K_PREFILL_TILES; m++) {
            float minus[4];
            if (k_prefill_has_min(F))
                k_prefill_min_product(minus, mins[m], head[m].dmin, b);
            k_prefill_fold<F>(acc[m][n], sum[m][n], head[m], minus, dx);
        }
    }
}

#endif

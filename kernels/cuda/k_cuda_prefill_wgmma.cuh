/* Super-blocks of Q4_K, Q5_K, Q6_K by wgmma (sm_90a): operand A from registers, B from shared
 * memory, asynchronous. A block's four warps are one warpgroup; each gives its own 16 outputs.
 *
 * The tensor core multiplies by the sub-blocks' scales too, since it has time to spare. A weight
 * times its scale has 10 to 14 bits and goes in as two digits, one operand each, so that two
 * integer sums over the whole super-block, S = low + BASE * high, need no work per sub-block and
 * value:
 *   Q4_K, Q5_K   scale = low + 8 * high, digits 0..7; weight * digit <= 217 is uint8
 *   Q6_K         4 * weight * scale, 16 bits: low byte uint8, high byte int8, base 256
 * M comes from the sums of 32: as `sum & 31` and `sum >> 5`, 8 bytes each, they are operand B of
 * four more, M = sum of m * low + 8 * (4 m) * high. */
#ifndef ISLET_K_CUDA_PREFILL_WGMMA_CUH
#define ISLET_K_CUDA_PREFILL_WGMMA_CUH

#include "k_cuda_prefill_digits.h"
#include "k_cuda_prefill_tile.cuh"

/* Descriptor of inputs 32 j.. of the rows at q: 128-byte swizzle. */
static __device__ __forceinline__ uint64_t k_prefill_wgmma_rows(const uint8_t *q, int j)
{
    const uint32_t at =
        (uint32_t)__cvta_generic_to_shared(q) + j / 4 * K_PREFILL_PANEL_BYTES + j % 4 * 32;
    return (uint64_t)1 << 62 | (uint64_t)(K_PREFILL_EIGHT_BYTES / 16) << 32 | (uint64_t)1 << 16 |
           (at & 0x3ffffu) >> 4;
}

/* Descriptor of the digits of the rows' sums: no swizzle, 16 bytes a row. Inputs 16..31 of the
 * operand are the same 16 bytes once more. */
static __device__ __forceinline__ uint64_t k_prefill_wgmma_sums(const uint8_t *sums)
{
    return (uint64_t)(8 * 16 / 16) << 32 |
           ((uint32_t)__cvta_generic_to_shared(sums) & 0x3ffffu) >> 4;
}

/* What the thread that fetched a row's 8 sums makes of them before it publishes: low digits, high
 * digits. */
static __device__ __forceinline__ void k_prefill_sums_prepare(uint8_t *sums)
{
    uint4 &s = *(uint4 *)(void *)sums;
    const uint4 x = s;
    s.x = k_prefill_sum_low(x.x, x.y);
    s.y = k_prefill_sum_low(x.z, x.w);
    s.z = k_prefill_sum_high(x.x, x.y);
    s.w = k_prefill_sum_high(x.z, x.w);
}

/* Begins d = a * rows, or d += where `accumulate`. */
#define K_PREFILL_WGMMA_16(A_TYPE)                                                            \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0; "                                    \
                 "wgmma.mma_async.sync.aligned.m64n16k32.s32." A_TYPE ".s8 {"                 \
                 "%0,%1,%2,%3,%4,%5,%6,%7"                                                    \
                 "}, {%8,%9,%10,%11}, %12, p; }"                                              \
                 : "+r"(d[0][0]), "+r"(d[0][1]), "+r"(d[0][2]), "+r"(d[0][3]), "+r"(d[1][0]), \
                   "+r"(d[1][1]), "+r"(d[1][2]), "+r"(d[1][3])                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"((int)accumulate))

template <bool UNSIGNED>
static __device__ __forceinline__ void k_prefill_wgmma(int32_t (&d)[2][4], const uint32_t (&a)[4],
                                                       uint64_t rows, bool accumulate)
{
    if (UNSIGNED) {
        K_PREFILL_WGMMA_16("u8");
    } else {
        K_PREFILL_WGMMA_16("s8");
    }
}

#define K_PREFILL_WGMMA_32(A_TYPE)                                                            \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0; "                                    \
                 "wgmma.mma_async.sync.aligned.m64n32k32.s32." A_TYPE ".s8 {"                 \
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"                      \
                 "}, {%16,%17,%18,%19}, %20, p; }"                                            \
                 : "+r"(d[0][0]), "+r"(d[0][1]), "+r"(d[0][2]), "+r"(d[0][3]), "+r"(d[1][0]), \
                   "+r"(d[1][1]), "+r"(d[1][2]), "+r"(d[1][3]), "+r"(d[2][0]), "+r"(d[2][1]), \
                   "+r"(d[2][2]), "+r"(d[2][3]), "+r"(d[3][0]), "+r"(d[3][1]), "+r"(d[3][2]), \
                   "+r"(d[3][3])                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"((int)accumulate))

template <bool UNSIGNED>
static __device__ __forceinline__ void k_prefill_wgmma(int32_t (&d)[4][4], const uint32_t (&a)[4],
                                                       uint64_t rows, bool accumulate)
{
    if (UNSIGNED) {
        K_PREFILL_WGMMA_32("u8");
    } else {
        K_PREFILL_WGMMA_32("s8");
    }
}

#define K_PREFILL_WGMMA_48(A_TYPE)                                                            \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %29, 0; "                                    \
                 "wgmma.mma_async.sync.aligned.m64n48k32.s32." A_TYPE ".s8 {"                 \
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                     \
                 "%16,%17,%18,%19,%20,%21,%22,%23"                                            \
                 "}, {%24,%25,%26,%27}, %28, p; }"                                            \
                 : "+r"(d[0][0]), "+r"(d[0][1]), "+r"(d[0][2]), "+r"(d[0][3]), "+r"(d[1][0]), \
                   "+r"(d[1][1]), "+r"(d[1][2]), "+r"(d[1][3]), "+r"(d[2][0]), "+r"(d[2][1]), \
                   "+r"(d[2][2]), "+r"(d[2][3]), "+r"(d[3][0]), "+r"(d[3][1]), "+r"(d[3][2]), \
                   "+r"(d[3][3]), "+r"(d[4][0]), "+r"(d[4][1]), "+r"(d[4][2]), "+r"(d[4][3]), \
                   "+r"(d[5][0]), "+r"(d[5][1]), "+r"(d[5][2]), "+r"(d[5][3])                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"((int)accumulate))

template <bool UNSIGNED>
static __device__ __forceinline__ void k_prefill_wgmma(int32_t (&d)[6][4], const uint32_t (&a)[4],
                                                       uint64_t rows, bool accumulate)
{
    if (UNSIGNED) {
        K_PREFILL_WGMMA_48("u8");
    } else {
        K_PREFILL_WGMMA_48("s8");
    }
}

#define K_PREFILL_WGMMA_64(A_TYPE)                                                            \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; "                                    \
                 "wgmma.mma_async.sync.aligned.m64n64k32.s32." A_TYPE ".s8 {"                 \
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                     \
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"            \
                 "}, {%32,%33,%34,%35}, %36, p; }"                                            \
                 : "+r"(d[0][0]), "+r"(d[0][1]), "+r"(d[0][2]), "+r"(d[0][3]), "+r"(d[1][0]), \
                   "+r"(d[1][1]), "+r"(d[1][2]), "+r"(d[1][3]), "+r"(d[2][0]), "+r"(d[2][1]), \
                   "+r"(d[2][2]), "+r"(d[2][3]), "+r"(d[3][0]), "+r"(d[3][1]), "+r"(d[3][2]), \
                   "+r"(d[3][3]), "+r"(d[4][0]), "+r"(d[4][1]), "+r"(d[4][2]), "+r"(d[4][3]), \
                   "+r"(d[5][0]), "+r"(d[5][1]), "+r"(d[5][2]), "+r"(d[5][3]), "+r"(d[6][0]), \
                   "+r"(d[6][1]), "+r"(d[6][2]), "+r"(d[6][3]), "+r"(d[7][0]), "+r"(d[7][1]), \
                   "+r"(d[7][2]), "+r"(d[7][3])                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows), "r"((int)accumulate))

template <bool UNSIGNED>
static __device__ __forceinline__ void k_prefill_wgmma(int32_t (&d)[8][4], const uint32_t (&a)[4],
                                                       uint64_t rows, bool accumulate)
{
    if (UNSIGNED) {
        K_PREFILL_WGMMA_64("u8");
    } else {
        K_PREFILL_WGMMA_64("s8");
    }
}

static __device__ __forceinline__ void k_prefill_wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;");
}

static __device__ __forceinline__ void k_prefill_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;");
}

/* Waits until at most LATER committed groups are under way. */
template <int LATER> static __device__ __forceinline__ void k_prefill_wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER));
}

/* Keeps reads of finished sums behind the wait. */
template <int NT> static __device__ __forceinline__ void k_prefill_wgmma_take(int32_t (&x)[NT][4])
{
#pragma unroll
    for (int n = 0; n < NT; n++)
        for (int i = 0; i < 4; i++)
            asm volatile("" : "+r"(x[n][i]));
}

/* A tile's sub-block scales for this lane's outputs g (0) and g + 8 (1), and the multiplication by
 * them. */
template <enum k_format F> struct k_prefill_digits {
    static constexpr int BASE = F == K_Q6_K ? K_PREFILL_SIX_BASE : K_PREFILL_SCALE_BASE;
    uint32_t low[2][2], high[2][2]; /* a byte a sub-block; Q6_K: the scales of 4c.. in low[][0] */

    __device__ __forceinline__ void open(const uint8_t *tile, uint32_t g)
    {
        for (int r = 0; F != K_Q6_K && r < 2; r++) {
            const uint4 head = k_prefill_head_bytes<F>(tile, g + 8 * r);
            uint32_t scale[2];
            k_prefill_scales(head, scale);
            for (int i = 0; i < 2; i++) {
                low[r][i] = k_prefill_scale_digit(scale[i], 0);
                high[r][i] = k_prefill_scale_digit(scale[i], 1);
            }
        }
    }
    __device__ __forceinline__ void step(const uint8_t *tile, uint32_t g, int c)
    {
        if (F == K_Q6_K)
            for (int r = 0; r < 2; r++)
                low[r][0] = *(const uint32_t *)(const void *)(tile + K_CUDA_TILE_Q6_K_HEAD +
                                                              16 * (g + 8 * r) + 4 * c);
    }
    /* x + BASE * y = a * scale, for inputs 32 j.. */
    __device__ __forceinline__ void multiply(uint32_t (&x)[4], uint32_t (&y)[4],
                                             const uint32_t (&a)[4], int j) const
    {
        for (int p = 0; p < 4; p++)
            if (F == K_Q6_K) {
                const int32_t scale = (int8_t)(low[p & 1][0] >> (8 * (2 * (j & 1) + (p >> 1))));
                k_prefill_six_digits(a[p], scale, &x[p], &y[p]);
            } else {
                x[p] = a[p] * (low[p & 1][j >> 2] >> (8 * (j & 3)) & 255u);
                y[p] = a[p] * (high[p & 1][j >> 2] >> (8 * (j & 3)) & 255u);
            }
    }
};

/* Begins M of one tile; within a fence and a commit. */
template <enum k_format F, int NT>
static __device__ __forceinline__ void k_prefill_wgmma_mins(int32_t (&m)[NT][4],
                                                            const uint8_t *tile,
                                                            const uint8_t *sums, uint32_t lane)
{
    const uint32_t g = lane / 4, t = lane % 4;
    const uint64_t rows = k_prefill_wgmma_sums(sums);
    uint32_t first[4], next[4]; /* operands: minima at k = 0..7, four times them at 8..15, 24..31 */
    for (int r = 0; r < 2; r++) {
        uint32_t mins[2];
        k_prefill_mins(k_prefill_head_bytes<F>(tile, g + 8 * r), mins);
        const uint32_t word = t & 1 ? mins[1] : mins[0];
        next[r] = next[r + 2] = first[r + 2] = t < 2 ? 0 : word << 2;
        first[r] = t < 2 ? word : word << 2;
    }
    k_prefill_wgmma<true>(m, first, rows, false);
#pragma unroll
    for (int i = 0; i < 3; i++)
        k_prefill_wgmma<true>(m, next, rows, true);
}

/* acc = fma(dx, t, acc) for one tile and 8 * NT rows. */
template <enum k_format F, int NT>
static __device__ __forceinline__ void k_prefill_wgmma_fold(
    float (&acc)[NT][4], const int32_t (&sum)[NT][4], const int32_t (&m)[NT][4],
    const uint8_t *tile, const struct k_prefill_acts &x, uint32_t lane)
{
    struct k_prefill_head head;
    k_prefill_head_read<F>(head, tile, lane / 4);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 dx = k_prefill_dx<1>(x, 0, n, lane);
        float minus[4];
        for (int i = 0; k_prefill_has_min(F) && i < 4; i++)
            minus[i] = __fmul_rn(head.dmin[i >> 1], __int2float_rn(m[n][i]));
        k_prefill_fold<F>(acc[n], sum[n], head, minus, dx);
    }
}

/* One super-block of a format of 256; `tiles`: the warp's two, one behind the other. What is not a
 * product is done while products are under way: `between` behind the first of the first tile, that
 * tile's fold behind the first of the second. */
template <enum k_format F, int NT, class Between>
static __device__ __forceinline__ void k_prefill_super(float (&acc)[K_PREFILL_TILES][NT][4],
                                                       const uint8_t *tiles,
                                                       const struct k_prefill_acts &x,
                                                       uint32_t lane, const Between &between)
{
    constexpr uint32_t bytes = k_prefill_tile_bytes(F);
    int32_t sum[K_PREFILL_TILES][NT][4], min[K_PREFILL_TILES][NT][4];
#pragma unroll
    for (int m = 0; m < K_PREFILL_TILES; m++) {
        struct k_prefill_digits<F> digits;
        int32_t high[NT][4];
        uint32_t a[2][4];
        digits.open(tiles + m * bytes, lane / 4);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint64_t rows = k_prefill_wgmma_rows(x.q, j);
            uint32_t a_low[4], a_high[4];
            if (j % 2 == 0) {
                k_prefill_operands<F>(a, tiles + m * bytes, j / 2, lane);
                digits.step(tiles + m * bytes, lane / 4, j / 2);
            }
            digits.multiply(a_low, a_high, a[j % 2], j);
            k_prefill_wgmma_fence();
            k_prefill_wgmma<true>(sum[m], a_low, rows, j > 0);
            k_prefill_wgmma<F != K_Q6_K>(high, a_high, rows, j > 0);
            if (k_prefill_has_min(F) && j == 1)
                k_prefill_wgmma_mins<F, NT>(min[m], tiles + m * bytes, x.sums, lane);
            k_prefill_wgmma_commit();
            if (j == 0 && m == 0)
                between();
            if (j == 0 && m > 0)
                k_prefill_wgmma_fold<F, NT>(acc[m - 1], sum[m - 1], min[m - 1],
                                            tiles + (m - 1) * bytes, x, lane);
            k_prefill_wgmma_wait<1>(); /* frees the operands of j - 1 */
        }
        k_prefill_wgmma_wait<0>();
        k_prefill_wgmma_take(sum[m]);
        k_prefill_wgmma_take(high);
        if (k_prefill_has_min(F))
            k_prefill_wgmma_take(min[m]);
#pragma unroll
        for (int n = 0; n < NT; n++)
            for (int i = 0; i < 4; i++)
                sum[m][n][i] += high[n][i] * digits.BASE;
    }
    constexpr int last = K_PREFILL_TILES - 1;
    k_prefill_wgmma_fold<F, NT>(acc[last], sum[last], min[last], tiles + last * bytes, x, lane);
}

#endif

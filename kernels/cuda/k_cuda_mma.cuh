/* The tensor core's integer product and what feeds it. Fragments, for lane l, g = l / 4, t = l % 4:
 *   A   as k_cuda_tile.h's operands
 *   B   b[0]: k = 4 t .. 4 t + 3 of column g, b[1]: k = 16 + 4 t ..
 *   C   c[0], c[1]: row g, columns 2 t, 2 t + 1; c[2], c[3]: row g + 8
 * Sums are exact: |sum| <= 32 * 255 * 127. */
#ifndef ISLET_K_CUDA_MMA_CUH
#define ISLET_K_CUDA_MMA_CUH

#include <stdint.h>

/* c = A * B, 16 x 8 x 32, from zero; weights int8. */
static __device__ __forceinline__ void k_cuda_mma_s8(int (&c)[4], uint32_t a0, uint32_t a1,
                                                     uint32_t a2, uint32_t a3, uint32_t b0,
                                                     uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}

/* The same with weights uint8. */
static __device__ __forceinline__ void k_cuda_mma_u8(int (&c)[4], uint32_t a0, uint32_t a1,
                                                     uint32_t a2, uint32_t a3, uint32_t b0,
                                                     uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}

/* 16 x 8 x 16, weights int8. */
static __device__ __forceinline__ void k_cuda_mma_half(int (&c)[4], uint32_t a0, uint32_t a1,
                                                       uint32_t b0)
{
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%7,%7,%7,%7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a0), "r"(a1), "r"(b0), "r"(0));
}

/* Four 8 x 16-byte matrices of shared memory: lanes 8 i .. 8 i + 7 give the rows of matrix i, lane
 * l gets bytes 4 t .. 4 t + 3 of row g of each. */
static __device__ __forceinline__ void k_cuda_mma_load(uint32_t (&r)[4], const void *row)
{
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

#endif

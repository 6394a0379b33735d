/* The few PTX instructions of the prefill kernels: exact integer products of the tensor cores,
 * their operands from shared memory, asynchronous copies into it. sm_80 and later.
 *
 * Fragments (lane = 4 * g + t): A holds rows g and g + 8, bytes 4t.. of each 16 along k: a[0] row
 * g, a[1] row g + 8, a[2], a[3] the same rows 16 further; B holds column g, b[0] bytes 4t.., b[1]
 * 16 further; C and D hold rows g (0, 1) and g + 8 (2, 3), columns 2t and 2t + 1. */
#ifndef ISLET_K_CUDA_PREFILL_MMA_CUH
#define ISLET_K_CUDA_PREFILL_MMA_CUH

#include <stdint.h>

/* d = a * b + c, 16 x 8 x 32. */
static __device__ __forceinline__ void k_prefill_mma32(int32_t (&d)[4], const uint32_t (&a)[4],
                                                       uint32_t b0, uint32_t b1, int32_t c)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%10,%10,%10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c));
}

/* d = a * b + c, 16 x 8 x 16. */
static __device__ __forceinline__ void k_prefill_mma16(int32_t (&d)[4], uint32_t a0, uint32_t a1,
                                                       uint32_t b, const int32_t (&c)[4])
{
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%7,%8,%9,%10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

/* Four 8 x 16-byte matrices: lane l gives the address of row l % 8 of matrix l / 8 and receives
 * bytes 4t.. of row g of each. */
static __device__ __forceinline__ void k_prefill_ldmatrix(uint32_t (&r)[4], const void *row)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

static __device__ __forceinline__ void k_prefill_copy16(void *shared, const void *global)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(global) : "memory");
}

static __device__ __forceinline__ void k_prefill_copy4(void *shared, const void *global)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(global) : "memory");
}

/* Closes the copies begun so far; at once, since a late mark makes the wait for it long. */
static __device__ __forceinline__ void k_prefill_copy_mark(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits for this thread's marked copies; others see them after a barrier. */
static __device__ __forceinline__ void k_prefill_copy_wait(void)
{
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

/* What this thread wrote to shared memory is also for wgmma to read; before the barrier. */
static __device__ __forceinline__ void k_prefill_publish(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* f16 to f32, exact. */
static __device__ __forceinline__ float k_prefill_half(uint32_t bits)
{
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((uint16_t)bits));
    return x;
}

#endif

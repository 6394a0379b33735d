/* A block of the prefill kernels: 4 warps, each 2 tiles of 16 outputs (128 outputs, or 64 of gate and
 * the same 64 of up), times up to 64 activation rows gathered by index. Super-blocks come through
 * shared memory by asynchronous copies, one ahead of the one being computed. Rows are computed in
 * 64s, 32s or 16s, whichever holds the block's; rows beyond repeat the last and are not stored. */
#ifndef ISLET_K_CUDA_PREFILL_BLOCK_CUH
#define ISLET_K_CUDA_PREFILL_BLOCK_CUH

#include "k_cuda_act.h"
#include "k_cuda_prefill_tile.cuh"

enum {
    K_PREFILL_WARPS = 4,
    K_PREFILL_THREADS = 32 * K_PREFILL_WARPS,
    K_PREFILL_OUTPUTS = K_PREFILL_WARPS * K_PREFILL_TILES * K_CUDA_TILE_OUTPUTS,
    K_PREFILL_ROWS = 64
};

/* The rows of a block: row numbers of its activations and of its results. */
struct k_prefill_rows {
    uint32_t from[K_PREFILL_ROWS], to[K_PREFILL_ROWS];
};

/* Shared memory of a block: the rows, then two stages of tiles, q, dx and sums. */
template <enum k_format F>
struct k_prefill_stage {
    uint8_t tiles[K_PREFILL_WARPS * K_PREFILL_TILES * k_prefill_tile_bytes(F)];
    uint8_t q[K_PREFILL_ROWS * K_PREFILL_PITCH];
    float dx[(k_prefill_is_256(F) ? 1 : 8) * K_PREFILL_ROWS];
    uint8_t sums[k_prefill_has_min(F) ? 16 * K_PREFILL_ROWS : 16];
};

template <enum k_format F>
struct k_prefill_shared {
    struct k_prefill_rows rows;
    struct k_prefill_stage<F> stage[2];
};

/* What a block multiplies. */
struct k_prefill_job {
    const uint8_t *tiles[K_PREFILL_TILES]; /* this warp's stripes */
    const uint8_t *act;                    /* rows of n_in elements in the format's form */
    uint32_t n_in;
    uint32_t n_rows; /* of the block, 1..K_PREFILL_ROWS */
};

/* This lane's part of the warp's two tiles of super-block b. */
template <enum k_format F>
static __device__ __forceinline__ void k_prefill_copy_tiles(uint8_t *to,
                                                            const struct k_prefill_job &job,
                                                            uint32_t b, uint32_t lane)
{
    constexpr uint32_t bytes = k_prefill_tile_bytes(F);
    for (uint32_t at = 16 * lane; at < K_PREFILL_TILES * bytes; at += 16 * 32) {
        const uint8_t *from = at < bytes ? job.tiles[0] + at : job.tiles[1] + (at - bytes);
        k_prefill_copy16(to + at, from + (uint64_t)b * bytes);
    }
}

/* This thread's part of 8 * NT rows' super-block b. */
template <enum k_format F, int NT>
static __device__ __forceinline__ void k_prefill_copy_acts(struct k_prefill_stage<F> &to,
                                                           const struct k_prefill_rows &rows,
                                                           const struct k_prefill_job &job,
                                                           uint32_t b)
{
    const enum k_form form = k_prefill_is_256(F) ? K_FORM_Q256 : K_FORM_Q32;
    const uint64_t stride = k_cuda_act_stride(form, job.n_in);
    const uint32_t thread = threadIdx.x, row16 = thread / 16, at = thread % 16 * 16;
#pragma unroll
    for (uint32_t r = row16; r < 8 * NT; r += K_PREFILL_THREADS / 16)
        k_prefill_copy16(to.q + r * K_PREFILL_PITCH + at,
                         job.act + stride * rows.from[r] + K_CUDA_TILE_INPUTS * b + at);
    const uint32_t blocks = k_prefill_is_256(F) ? 1 : 8;
    for (uint32_t i = thread; i < 8 * NT * blocks; i += K_PREFILL_THREADS) {
        const uint32_t r = i % (8 * NT), block = i / (8 * NT);
        k_prefill_copy4(&to.dx[block * K_PREFILL_ROWS + r],
                        job.act + stride * rows.from[r] + k_cuda_act_dx_offset(job.n_in) +
                            4 * (blocks * b + block));
    }
    const uint32_t r = K_PREFILL_THREADS - 1 - thread; /* others than those of dx */
    if (k_prefill_has_min(F) && r < 8 * NT)
        k_prefill_copy16(to.sums + 16 * r, job.act + stride * rows.from[r] +
                                               k_cuda_act_sum_offset(form, job.n_in) + 16 * b);
}

/* acc = the products of the warp's tiles and 8 * NT rows. Called by the whole block; shared.rows is
 * filled in and visible. */
template <enum k_format F, int NT>
static __device__ __forceinline__ void k_prefill_product(float (&acc)[K_PREFILL_TILES][NT][4],
                                                         struct k_prefill_shared<F> &shared,
                                                         const struct k_prefill_job &job)
{
    const uint32_t lane = threadIdx.x % 32, n_blocks = job.n_in / K_CUDA_TILE_INPUTS;
    const uint32_t mine = threadIdx.x / 32 * K_PREFILL_TILES * k_prefill_tile_bytes(F);
#pragma unroll
    for (int m = 0; m < K_PREFILL_TILES; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
            for (int i = 0; i < 4; i++)
                acc[m][n][i] = 0.0f;
    k_prefill_copy_tiles<F>(shared.stage[0].tiles + mine, job, 0, lane);
    k_prefill_copy_acts<F, NT>(shared.stage[0], shared.rows, job, 0);
#pragma unroll 1
    for (uint32_t b = 0; b < n_blocks; b++) {
        struct k_prefill_stage<F> &now = shared.stage[b % 2], &next = shared.stage[(b + 1) % 2];
        k_prefill_copy_wait();
        __syncthreads(); /* `now` has come for all, and nobody reads `next` any more */
        if (b + 1 < n_blocks) {
            k_prefill_copy_tiles<F>(next.tiles + mine, job, b + 1, lane);
            k_prefill_copy_acts<F, NT>(next, shared.rows, job, b + 1);
        }
        const struct k_prefill_acts x = {now.q, now.dx, now.sums};
        if constexpr (k_prefill_is_256(F))
            k_prefill_super<F, NT>(acc, now.tiles + mine, x, lane);
        else
            k_prefill_blocks<F, NT>(acc, now.tiles + mine, x, K_PREFILL_ROWS, lane);
    }
}

#endif

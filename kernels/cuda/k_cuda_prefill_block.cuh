/* A block of the prefill kernels: 4 warps, each 2 tiles of 16 outputs (128 outputs, or 64 of gate and
 * the same 64 of up), times up to 64 activation rows gathered by index. Super-blocks come through
 * shared memory by asynchronous copies, one ahead of the one being computed. Rows are computed in
 * 64s, 32s or 16s, whichever holds the block's; rows beyond repeat the last and are not stored. */
#ifndef ISLET_K_CUDA_PREFILL_BLOCK_CUH
#define ISLET_K_CUDA_PREFILL_BLOCK_CUH

#include "k_cuda_act.h"
#include "k_cuda_prefill_tile.cuh"
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "k_cuda_prefill_wgmma.cuh"
#else
#include "k_cuda_prefill_scale.cuh"
#endif

enum {
    K_PREFILL_WARPS = 4,
    K_PREFILL_THREADS = 32 * K_PREFILL_WARPS,
    K_PREFILL_OUTPUTS = K_PREFILL_WARPS * K_PREFILL_TILES * K_CUDA_TILE_OUTPUTS
};

/* The rows of a block: row numbers of its activations and of its results. */
struct k_prefill_rows {
    uint32_t from[K_PREFILL_ROWS], to[K_PREFILL_ROWS];
};

/* Shared memory of a block. */
template <enum k_format F> struct __align__(1024) k_prefill_stage
{
    uint8_t q[2 * K_PREFILL_PANEL_BYTES];
    uint8_t tiles[K_PREFILL_WARPS * K_PREFILL_TILES * k_prefill_tile_bytes(F)];
    float dx[(k_prefill_is_256(F) ? 1 : 8) * K_PREFILL_ROWS];
    uint8_t sums[k_prefill_has_min(F) ? 16 * K_PREFILL_ROWS : 16];
};

template <enum k_format F> struct k_prefill_shared {
    struct k_prefill_stage<F> stage[2];
    struct k_prefill_rows rows;
};

enum {
    K_PREFILL_BESIDE = 2 /* blocks of a multiprocessor for which registers are shared out */
};

/* Bytes of shared memory that a block of the format needs. */
static inline size_t k_prefill_shared_bytes(enum k_format f)
{
    switch (f) {
    case K_Q4_0:
        return sizeof(struct k_prefill_shared<K_Q4_0>);
    case K_Q8_0:
        return sizeof(struct k_prefill_shared<K_Q8_0>);
    case K_Q4_K:
        return sizeof(struct k_prefill_shared<K_Q4_K>);
    case K_Q5_K:
        return sizeof(struct k_prefill_shared<K_Q5_K>);
    default:
        return sizeof(struct k_prefill_shared<K_Q6_K>);
    }
}

/* Is there a kernel for such a matrix, and has the device the shared memory for it? */
static inline bool k_prefill_takes(const struct k_stream *s, enum k_format f, uint32_t n_out,
                                   uint32_t n_in)
{
    return k_cuda_tile_arranged(f, n_out, n_in) &&
           k_prefill_shared_bytes(f) <= k_cuda_of(s->device)->shared_bytes;
}

/* What a block multiplies. */
struct k_prefill_job {
    const uint8_t *tiles[K_PREFILL_TILES]; /* this warp's stripes */
    const uint8_t *act;                    /* rows of n_in elements in the format's form */
    uint32_t n_in;
    uint32_t n_rows; /* of the block, 1..K_PREFILL_ROWS */
};

/* A thread's share of the copying, moved on by one super-block after each. q: 4 threads a row, a thread
 * every fourth piece of 16 bytes of up to two rows; dx and sums: half of the threads each, a row each. */
template <enum k_format F, int NT> struct k_prefill_copier {
    static constexpr uint32_t Q_ROWS = K_PREFILL_THREADS / 4;       /* at once */
    static constexpr uint32_t BLOCKS = k_prefill_is_256(F) ? 1 : 8; /* of a super-block */
    const uint8_t *tiles[K_PREFILL_TILES], *q[2], *dx, *sums;
    uint32_t q_place, row; /* row: of dx or sums */

    __device__ __forceinline__ void open(const struct k_prefill_job &job,
                                         const struct k_prefill_rows &rows)
    {
        const enum k_form form = k_prefill_is_256(F) ? K_FORM_Q256 : K_FORM_Q32;
        const uint64_t stride = k_cuda_act_stride(form, job.n_in);
        const uint32_t thread = threadIdx.x;
        for (int m = 0; m < K_PREFILL_TILES; m++)
            tiles[m] = job.tiles[m] + 16 * (thread % 32);
        for (uint32_t i = 0; i < 2; i++)
            q[i] = job.act + stride * rows.from[(thread / 4 + Q_ROWS * i) % (8 * NT)] +
                   16 * (thread % 4);
        q_place = k_prefill_place(thread / 4, thread % 4);
        row = thread % K_PREFILL_ROWS;
        const uint8_t *scalars = job.act + stride * rows.from[row % (8 * NT)];
        dx = scalars + k_cuda_act_dx_offset(job.n_in);
        sums = scalars + k_cuda_act_sum_offset(form, job.n_in);
    }

    /* Copies the super-block; `mine`: the warp's tiles in a stage. */
    __device__ __forceinline__ void copy(struct k_prefill_stage<F> &to, uint32_t mine) const
    {
        constexpr uint32_t bytes = k_prefill_tile_bytes(F);
        const uint32_t thread = threadIdx.x, at = 16 * (thread % 32);
#pragma unroll
        for (uint32_t m = 0; m < K_PREFILL_TILES; m++)
#pragma unroll
            for (uint32_t i = 0; i < bytes; i += 512)
                if (i + 512 <= bytes || i + at < bytes)
                    k_prefill_copy16(to.tiles + mine + m * bytes + at + i, tiles[m] + i);
#pragma unroll
        for (uint32_t i = 0; i < (NT + 3) / 4; i++)
            if (8 * NT >= Q_ROWS || thread / 4 < 8 * NT)
#pragma unroll
                for (uint32_t k = 0; k < 4; k++)
                    k_prefill_copy16(to.q + (q_place ^ (k % 2 * 64)) + Q_ROWS * 128 * i +
                                         k / 2 * K_PREFILL_PANEL_BYTES,
                                     q[i] + 64 * k);
        if (row >= 8 * NT)
            return;
        if (BLOCKS == 8)
#pragma unroll
            for (uint32_t b = 0; b < 4; b++) { /* four blocks each */
                const uint32_t block = first_half() ? b : b + 4;
                k_prefill_copy4(&to.dx[block * K_PREFILL_ROWS + row], dx + 4 * block);
            }
        else if (first_half())
            k_prefill_copy4(&to.dx[row], dx);
        else if (k_prefill_has_min(F))
            k_prefill_copy16(to.sums + 16 * row, sums);
    }

    /* To the next super-block; not at once after `copy`, which reads its addresses late. */
    __device__ __forceinline__ void advance(void)
    {
        for (int m = 0; m < K_PREFILL_TILES; m++)
            tiles[m] += k_prefill_tile_bytes(F);
        for (int i = 0; i < 2; i++)
            q[i] += K_CUDA_TILE_INPUTS;
        dx += 4 * BLOCKS;
        sums += 16;
    }

    /* After this thread's copies came, before it publishes them. */
    __device__ __forceinline__ void prepare(struct k_prefill_stage<F> &to) const
    {
        if (k_prefill_has_min(F) && !first_half() && row < 8 * NT)
            k_prefill_sums_prepare(to.sums + 16 * row);
    }

    static __device__ __forceinline__ bool first_half(void)
    {
        return threadIdx.x < K_PREFILL_ROWS;
    }
};

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
    struct k_prefill_copier<F, NT> copier;
    copier.open(job, shared.rows);
    copier.copy(shared.stage[0], mine);
    copier.advance();
#pragma unroll 1
    for (uint32_t b = 0; b < n_blocks; b++) {
        struct k_prefill_stage<F> &now = shared.stage[b % 2], &next = shared.stage[(b + 1) % 2];
        const struct k_prefill_acts x = {now.q, now.dx, now.sums};
        const auto fetch = [&] {
            if (b + 1 < n_blocks)
                copier.copy(next, mine);
        };
        k_prefill_copy_wait();
        copier.prepare(now);
        k_prefill_publish();
        __syncthreads(); /* `now` has come for all, and nobody reads `next` any more */
        if constexpr (k_prefill_is_256(F)) {
            k_prefill_super<F, NT>(acc, now.tiles + mine, x, lane, fetch);
        } else {
            fetch();
            k_prefill_blocks<F, NT>(acc, now.tiles + mine, x, lane);
        }
        copier.advance();
    }
}

#endif

/* A block of the prefill kernels: 4 warps, each 2 tiles of 16 outputs (128 outputs, or 64 of gate
 * and the same 64 of up), times up to ROWS activation rows gathered by index, 64 or 32.
 * Super-blocks come through shared memory by asynchronous copies, one ahead of the one being
 * computed. Rows are computed in the smallest multiple of 16 that holds the block's; rows beyond
 * repeat and are not stored. */
#ifndef ISLET_K_CUDA_PREFILL_BLOCK_CUH
#define ISLET_K_CUDA_PREFILL_BLOCK_CUH

#include "k_cuda.cuh"
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
template <uint32_t ROWS> struct k_prefill_rows {
    uint32_t from[ROWS], to[ROWS];
};

/* Blocks of 32 or 256 in a super-block. */
__host__ __device__ constexpr uint32_t k_prefill_blocks_of(enum k_format f)
{
    return k_prefill_is_256(f) ? 1 : 8;
}

/* Shared memory of a block. */
template <enum k_format F, uint32_t ROWS> struct __align__(1024) k_prefill_stage
{
    uint8_t q[ROWS / 8 * K_PREFILL_EIGHT_BYTES];
    uint8_t tiles[K_PREFILL_WARPS * K_PREFILL_TILES * k_prefill_tile_bytes(F)];
    float dx[k_prefill_blocks_of(F) * ROWS];
    uint8_t sums[k_prefill_has_min(F) ? 16 * ROWS : 16];
};

template <enum k_format F, uint32_t ROWS> struct k_prefill_shared {
    struct k_prefill_stage<F, ROWS> stage[2];
    struct k_prefill_rows<ROWS> rows;
};

/* Rows that a block can take, as a power of 2: 64, or 32 where the device lends a block too little
 * shared memory for more. */
static inline uint32_t k_prefill_most_shift(enum k_format format, const struct k_cuda *device)
{
    const size_t bytes = format == K_Q8_0   ? sizeof(struct k_prefill_shared<K_Q8_0, 64>)
                         : format == K_Q4_0 ? sizeof(struct k_prefill_shared<K_Q4_0, 64>)
                         : format == K_Q4_K ? sizeof(struct k_prefill_shared<K_Q4_K, 64>)
                         : format == K_Q5_K ? sizeof(struct k_prefill_shared<K_Q5_K, 64>)
                                            : sizeof(struct k_prefill_shared<K_Q6_K, 64>);
    return bytes <= device->shared_bytes ? 6 : 5;
}

/* Blocks of a multiprocessor for which registers are shared out. */
__host__ __device__ constexpr uint32_t k_prefill_beside(uint32_t rows)
{
    return rows == 64 ? 2 : 3;
}

/* What a block multiplies. */
struct k_prefill_job {
    const uint8_t *tiles[K_PREFILL_TILES]; /* this warp's stripes */
    const uint8_t *act;                    /* rows of n_in elements in the format's form */
    uint32_t n_in;
    uint32_t n_rows; /* of the block, 1..ROWS */
};

/* A thread's share of the copying, moved on by one super-block after each. q: 4 threads a row, a
 * thread every fourth piece of 16 bytes. Scalars: a thread a row's dx or sums, or a part of eight
 * dx. */
template <enum k_format F, uint32_t ROWS, int NT> struct k_prefill_copier {
    static constexpr uint32_t Q_ROWS = K_PREFILL_THREADS / 4,
                              Q_TURNS = (8 * NT + Q_ROWS - 1) / Q_ROWS;
    static constexpr uint32_t BLOCKS = k_prefill_blocks_of(F);
    static constexpr uint32_t PARTS = K_PREFILL_THREADS / ROWS; /* threads for a row's scalars */
    const uint8_t *tiles[K_PREFILL_TILES], *q[Q_TURNS], *scalars;
    uint32_t q_place, row, part; /* row, part: of the scalars */

    __device__ __forceinline__ void open(const struct k_prefill_job &job,
                                         const struct k_prefill_rows<ROWS> &rows)
    {
        const enum k_form form = k_prefill_is_256(F) ? K_FORM_Q256 : K_FORM_Q32;
        const uint64_t stride = k_cuda_act_stride(form, job.n_in);
        const uint32_t thread = threadIdx.x;
        for (int m = 0; m < K_PREFILL_TILES; m++)
            tiles[m] = job.tiles[m] + 16 * (thread % 32);
        for (uint32_t i = 0; i < Q_TURNS; i++)
            q[i] =
                job.act + stride * rows.from[(thread / 4 + Q_ROWS * i) % ROWS] + 16 * (thread % 4);
        q_place = k_prefill_place(thread / 4, thread % 4);
        row = thread % ROWS;
        part = thread / ROWS;
        scalars = job.act + stride * rows.from[row] +
                  (BLOCKS == 8 || part == 0 ? k_cuda_act_dx_offset(job.n_in)
                                            : k_cuda_act_sum_offset(form, job.n_in));
    }

    /* Copies the super-block; `mine`: the warp's tiles in a stage. */
    __device__ __forceinline__ void copy(struct k_prefill_stage<F, ROWS> &to, uint32_t mine) const
    {
        constexpr uint32_t bytes = k_prefill_tile_bytes(F);
        const uint32_t thread = threadIdx.x, at = 16 * (thread % 32);
#pragma unroll
        for (uint32_t m = 0; m < K_PREFILL_TILES; m++) {
#pragma unroll
            for (uint32_t i = 0; i < bytes / 512; i++)
                k_prefill_copy16(to.tiles + mine + m * bytes + at + 512 * i, tiles[m] + 512 * i);
            if (at < bytes % 512)
                k_prefill_copy16(to.tiles + mine + m * bytes + at + bytes / 512 * 512,
                                 tiles[m] + bytes / 512 * 512);
        }
#pragma unroll
        for (uint32_t i = 0; i < Q_TURNS; i++)
            if (8 * NT >= Q_ROWS * (i + 1) || thread / 4 + Q_ROWS * i < 8 * NT)
#pragma unroll
                for (uint32_t k = 0; k < 4; k++)
                    k_prefill_copy16(to.q + (q_place ^ (k % 2 * 64)) +
                                         Q_ROWS / 8 * K_PREFILL_EIGHT_BYTES * i +
                                         k / 2 * K_PREFILL_PANEL_BYTES,
                                     q[i] + 64 * k);
        if (row < 8 * NT)
            copy_scalars(to);
        k_prefill_copy_mark();
    }

    __device__ __forceinline__ void copy_scalars(struct k_prefill_stage<F, ROWS> &to) const
    {
        float *dx = to.dx + row / 8 * 8 * BLOCKS + row % 8;
        if (BLOCKS == 8)
#pragma unroll
            for (uint32_t b = 0; b < 8; b += PARTS)
                k_prefill_copy4(dx + 8 * (b + part), scalars + 4 * (b + part));
        else if (part == 0)
            k_prefill_copy4(dx, scalars);
        else if (k_prefill_has_min(F) && part == 1)
            k_prefill_copy16(to.sums + 16 * row, scalars);
    }

    /* To the next super-block; not at once after `copy`, which reads its addresses late. */
    __device__ __forceinline__ void advance(void)
    {
        for (int m = 0; m < K_PREFILL_TILES; m++)
            tiles[m] += k_prefill_tile_bytes(F);
        for (uint32_t i = 0; i < Q_TURNS; i++)
            q[i] += K_CUDA_TILE_INPUTS;
        scalars += BLOCKS == 8 ? 32 : part == 0 ? 4 : 16;
    }

    /* After this thread's copies came, before it publishes them. */
    __device__ __forceinline__ void prepare(struct k_prefill_stage<F, ROWS> &to) const
    {
        if (k_prefill_has_min(F) && part == 1 && row < 8 * NT)
            k_prefill_sums_prepare(to.sums + 16 * row);
    }
};

/* acc = the products of the warp's tiles and 8 * NT rows. Called by the whole block; shared.rows is
 * filled in and visible. */
template <enum k_format F, uint32_t ROWS, int NT>
static __device__ __forceinline__ void k_prefill_product(float (&acc)[K_PREFILL_TILES][NT][4],
                                                         struct k_prefill_shared<F, ROWS> &shared,
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
    struct k_prefill_copier<F, ROWS, NT> copier;
    copier.open(job, shared.rows);
    copier.copy(shared.stage[0], mine);
    copier.advance();
#pragma unroll 1
    for (uint32_t b = 0; b < n_blocks; b++) {
        struct k_prefill_stage<F, ROWS> &now = shared.stage[b % 2],
                                        &next = shared.stage[(b + 1) % 2];
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

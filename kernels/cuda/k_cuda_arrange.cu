/* Weights into the order of k_cuda_tile.h. A block of threads per tile gathers the tile's words from
 * the 16 outputs' blocks in the file's order, so that what is written is whole lines. */
#include "k_cuda.cuh"
#include "k_cuda_tile.h"

enum {
    THREADS = 128
};

template <enum k_format F>
__global__ void __launch_bounds__(THREADS)
    arrange(const uint8_t *from, uint8_t *to, uint64_t row_bytes, uint32_t n_tiles)
{
    const uint32_t bytes = k_cuda_tile_bytes(F);
    const uint32_t s = blockIdx.x / n_tiles, b = blockIdx.x % n_tiles;
    const uint8_t *row0 =
        from + (uint64_t)s * K_CUDA_TILE_OUTPUTS * row_bytes + b * (bytes / K_CUDA_TILE_OUTPUTS);
    uint32_t *tile = (uint32_t *)(void *)(to + (uint64_t)blockIdx.x * bytes);
    for (uint32_t w = threadIdx.x; w < bytes / 4; w += THREADS)
        tile[w] = k_cuda_tile_word(F, row0, row_bytes, w);
}

/* Launched in full order after weights were written: kernels that read weights before k_cuda_await
 * find this one before them at the least, and so the weights whole. */
__global__ void settle(uint32_t) {}

static void arrange_tiles(const struct k_arrange *a, const uint8_t *from, uint8_t *to,
                          struct k_stream *s)
{
    const uint64_t row_bytes = k_format_bytes(a->format, 1, a->n_in);
    const uint32_t n_tiles = a->n_in / K_CUDA_TILE_INPUTS;
    const dim3 grid(a->n_out / K_CUDA_TILE_OUTPUTS * n_tiles);
    switch (a->format) {
    case K_Q8_0:
        K_CUDA_LAUNCH(s, arrange<K_Q8_0>, grid, THREADS, 0, from, to, row_bytes, n_tiles);
        return;
    case K_Q4_0:
        K_CUDA_LAUNCH(s, arrange<K_Q4_0>, grid, THREADS, 0, from, to, row_bytes, n_tiles);
        return;
    case K_Q4_K:
        K_CUDA_LAUNCH(s, arrange<K_Q4_K>, grid, THREADS, 0, from, to, row_bytes, n_tiles);
        return;
    case K_Q5_K:
        K_CUDA_LAUNCH(s, arrange<K_Q5_K>, grid, THREADS, 0, from, to, row_bytes, n_tiles);
        return;
    case K_Q6_K:
        K_CUDA_LAUNCH(s, arrange<K_Q6_K>, grid, THREADS, 0, from, to, row_bytes, n_tiles);
        return;
    default:
        return;
    }
}

extern "C" enum err_code k_cuda_arrange(const struct k_arrange *a, struct k_stream *s)
{
    const uint8_t *from = (const uint8_t *)k_cuda_at(a->from);
    uint8_t *to = (uint8_t *)k_cuda_at(a->to);
    if (k_cuda_tile_arranged(a->format, a->n_out, a->n_in)) {
        arrange_tiles(a, from, to, s);
        K_CUDA_LAUNCH(s, settle, dim3(1), dim3(1), 0, 0);
    } else {
        (void)K_CUDA_CALL(k_cuda_of(s->device), s,
                          cudaMemcpyAsync(to, from, k_format_bytes(a->format, a->n_out, a->n_in),
                                          cudaMemcpyDeviceToDevice, s->stream));
    }
    return ERR_OK;
}

/* ---- an expert ------------------------------------------------------------------------------- */

struct place_part {
    const uint8_t *from;
    uint8_t *to;
    uint64_t row_bytes, offset;
    uint32_t n_tiles, tiles; /* of a stripe, and of it and the parts before it */
    enum k_format format;
};

struct place_args {
    struct place_part parts[3];
    uint64_t *slot;
};

template <enum k_format F>
static __device__ __forceinline__ void place_tile(const struct place_part &p, uint32_t tile)
{
    const uint32_t bytes = k_cuda_tile_bytes(F);
    const uint32_t s = tile / p.n_tiles, b = tile % p.n_tiles;
    const uint8_t *row0 = p.from + (uint64_t)s * K_CUDA_TILE_OUTPUTS * p.row_bytes +
                          b * (bytes / K_CUDA_TILE_OUTPUTS);
    uint32_t *to = (uint32_t *)(void *)(p.to + (uint64_t)tile * bytes);
    for (uint32_t w = threadIdx.x; w < bytes / 4; w += THREADS)
        to[w] = k_cuda_tile_word(F, row0, p.row_bytes, w);
}

/* A block a tile of any part. Whoever reads the weights waits for the whole of this kernel. */
static __global__ void __launch_bounds__(THREADS) place_expert(const struct place_args a)
{
    const uint32_t i = blockIdx.x < a.parts[0].tiles ? 0 : blockIdx.x < a.parts[1].tiles ? 1 : 2;
    const struct place_part p = i == 0 ? a.parts[0] : i == 1 ? a.parts[1] : a.parts[2];
    const uint32_t before = i == 0 ? 0 : i == 1 ? a.parts[0].tiles : a.parts[1].tiles;
    if (blockIdx.x == 0 && threadIdx.x < 3)
        a.slot[threadIdx.x] = threadIdx.x == 0   ? a.parts[0].offset
                              : threadIdx.x == 1 ? a.parts[1].offset
                                                 : a.parts[2].offset;
    if (blockIdx.x >= a.parts[2].tiles)
        return;
    switch (p.format) {
    case K_Q8_0:
        place_tile<K_Q8_0>(p, blockIdx.x - before);
        break;
    case K_Q4_0:
        place_tile<K_Q4_0>(p, blockIdx.x - before);
        break;
    case K_Q4_K:
        place_tile<K_Q4_K>(p, blockIdx.x - before);
        break;
    case K_Q5_K:
        place_tile<K_Q5_K>(p, blockIdx.x - before);
        break;
    case K_Q6_K:
        place_tile<K_Q6_K>(p, blockIdx.x - before);
        break;
    default:
        break;
    }
}

/* What is not arranged is copied, and has no tiles here. */
extern "C" enum err_code k_cuda_place(const struct k_place *a, struct k_stream *s)
{
    struct place_args args;
    uint32_t tiles = 0;
    for (int i = 0; i < 3; i++) {
        const struct k_arrange *from = &a->parts[i];
        struct place_part *p = &args.parts[i];
        p->from = (const uint8_t *)k_cuda_at(from->from);
        p->to = (uint8_t *)k_cuda_at(from->to);
        p->row_bytes = k_format_bytes(from->format, 1, from->n_in);
        p->offset = from->to.offset;
        p->n_tiles = from->n_in / K_CUDA_TILE_INPUTS;
        p->format = from->format;
        if (k_cuda_tile_arranged(from->format, from->n_out, from->n_in))
            tiles += from->n_out / K_CUDA_TILE_OUTPUTS * p->n_tiles;
        else if (k_cuda_arrange(from, s) != ERR_OK)
            return ERR_DEVICE;
        p->tiles = tiles;
    }
    args.slot = (uint64_t *)k_cuda_at(a->slot);
    K_CUDA_LAUNCH(s, place_expert, dim3(tiles > 0 ? tiles : 1), THREADS, 0, args);
    return ERR_OK;
}

/* Weights into the order of k_cuda_tile.h. A block of threads per tile gathers the tile's words
 * from the 16 outputs' blocks in the file's order, so that what is written is whole lines. */
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

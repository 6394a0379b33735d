/* Embedding: a row of the table dequantised as its format defines (A8b), from a table in the file's
 * order or an arranged one. A thread per element; every product and difference rounds by itself. */
#include "k_cuda.cuh"
#include "k_cuda_tile.h"

enum {
    THREADS = 256
};

/* The integer and the scales of one element, wherever they lie. */
struct element {
    int weight;          /* as k_cuda_tile_file_weight */
    const uint8_t *head; /* d (Q8_0, Q4_0); d, dmin, scales (Q4_K, Q5_K); int8 scales (Q6_K) */
    const uint8_t *d;    /* Q6_K */
};

static __device__ struct element in_file(enum k_format f, const uint8_t *row, uint32_t i)
{
    struct element e = {};
    /* 256 elements take the bytes of a tile's output; a ragged end of 32-blocks is read by
     * block. */
    const uint8_t *block = row + (uint64_t)(i / 256) * (k_cuda_tile_bytes(f) / K_CUDA_TILE_OUTPUTS);
    e.weight = k_cuda_tile_file_weight(f, block, i % 256);
    e.head = block;
    if (f == K_Q8_0 || f == K_Q4_0)
        e.head = block + i % 256 / 32 * (f == K_Q8_0 ? 34 : 18);
    if (f == K_Q6_K) {
        e.head = block + 192;
        e.d = block + 208;
    }
    return e;
}

static __device__ struct element in_tile(enum k_format f, const uint8_t *table, uint32_t n_in,
                                         uint32_t output, uint32_t i)
{
    struct element e = {};
    const uint32_t r = output % K_CUDA_TILE_OUTPUTS;
    const uint8_t *tile =
        table + k_cuda_tile_offset(f, n_in, output / K_CUDA_TILE_OUTPUTS, i / K_CUDA_TILE_INPUTS);
    e.weight = k_cuda_tile_weight(f, tile, r, i % K_CUDA_TILE_INPUTS);
    e.head = tile + k_cuda_tile_head(f) + 16 * r;
    if (f == K_Q8_0 || f == K_Q4_0)
        e.head += i % K_CUDA_TILE_INPUTS / 32 * 2;
    e.d = tile + K_CUDA_TILE_Q6_K_D + 2 * r;
    return e;
}

static __device__ float half_at(const uint8_t *p)
{
    return k_float_of_f16((uint16_t)k_cuda_tile_file_half(p));
}

static __device__ float value(enum k_format f, struct element e, uint32_t i)
{
    if (f == K_Q8_0 || f == K_Q4_0)
        return k_float_mul(half_at(e.head), (float)(e.weight - (f == K_Q4_0 ? 8 : 0)));
    if (f == K_Q6_K) {
        const float scale = (float)(int8_t)e.head[i % 256 / 16];
        return k_float_mul(k_float_mul(half_at(e.d), scale), (float)e.weight);
    }
    uint32_t scale, min;
    k_cuda_tile_scale_min(e.head + 4, i % 256 / 32, &scale, &min);
    const float ds = k_float_mul(half_at(e.head), (float)scale);
    const float dm = k_float_mul(half_at(e.head + 2), (float)min);
    return k_float_sub(k_float_mul(ds, (float)e.weight), dm);
}

template <enum k_format F>
__global__ void __launch_bounds__(THREADS)
    embed(struct k_cuda_rows rows, const uint8_t *table, uint32_t n_in, uint64_t row_bytes,
          bool arranged, float *x)
{
    const uint32_t row = blockIdx.y, i = blockIdx.x * THREADS + threadIdx.x;
    if (row >= *rows.n_rows || i >= n_in)
        return;
    const uint32_t token = rows.token[row];
    const uint8_t *w = table + token * row_bytes;
    float v;
    if (F == K_F32)
        v = ((const float *)(const void *)w)[i];
    else if (F == K_F16)
        v = k_float_of_f16(((const uint16_t *)(const void *)w)[i]);
    else if (F == K_BF16)
        v = k_float_of_bf16(((const uint16_t *)(const void *)w)[i]);
    else
        v = value(F, arranged ? in_tile(F, table, n_in, token, i) : in_file(F, w, i), i);
    x[(uint64_t)row * n_in + i] = v;
}

extern "C" enum err_code k_cuda_embed(const struct k_embed *a, struct k_stream *s)
{
    const struct k_matrix *m = &a->table;
    const struct k_cuda_rows rows = k_cuda_rows_of(&a->rows);
    const uint8_t *table = (const uint8_t *)k_cuda_at(m->data);
    float *x = (float *)k_cuda_at(a->x);
    const uint64_t row_bytes = k_format_bytes(m->format, 1, m->n_in);
    const bool arranged = k_cuda_tile_arranged(m->format, m->n_out, m->n_in);
    const dim3 grid((m->n_in + THREADS - 1) / THREADS, a->rows.max_rows);
#define ROW(F)                                                                                  \
    case F:                                                                                     \
        K_CUDA_LAUNCH(s, embed<F>, grid, THREADS, 0, rows, table, m->n_in, row_bytes, arranged, \
                      x);                                                                       \
        return ERR_OK;
    switch (m->format) {
        ROW(K_F32)
        ROW(K_F16)
        ROW(K_BF16)
        ROW(K_Q4_0)
        ROW(K_Q8_0)
        ROW(K_Q4_K)
        ROW(K_Q5_K)
        ROW(K_Q6_K)
    }
#undef ROW
    return ERR_UNSUPPORTED;
}

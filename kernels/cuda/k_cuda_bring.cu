/* What comes out of the host's memory. Experts: by the copy engine, which disturbs what is computed
 * least and uses the link best (a kernel that reads over the link reaches half its rate where its
 * lines are not aligned, and what else runs then waits for them), then one kernel that arranges
 * them all. Rows of results, which are short and many: by a kernel that reads them, whole lines and
 * few under way at a time. */
#include "k_cuda.cuh"
#include "k_cuda_tile.h"

enum {
    THREADS = 128,
    ROW_THREADS = 256,
    ROW_BLOCKS = 32,
    SLICES = K_BRING_SLICES,
    OUTPUTS = K_CUDA_TILE_OUTPUTS,
    STAGED = 256 /* alignment of slices in the staging area */
};

struct bring_part {
    enum k_format format;
    uint64_t row_bytes;
    uint32_t row_tiles, end; /* tiles of a stripe; of an expert up to the end of this slice */
};

struct bring_args {
    struct bring_part parts[SLICES];
    struct k_bring_expert experts[K_BRING_MOST]; /* from: in the staging area */
    uint8_t *arena;
    uint64_t *slots;
    uint32_t n, tiles; /* tiles of an expert */
};

template <enum k_format F>
static __device__ __forceinline__ void arrange_tile(const struct bring_part &p, const uint8_t *from,
                                                    uint8_t *to, uint32_t i)
{
    const uint32_t bytes = k_cuda_tile_bytes(F), s = i / p.row_tiles, b = i % p.row_tiles;
    const uint8_t *row0 = from + (uint64_t)s * OUTPUTS * p.row_bytes + b * (bytes / OUTPUTS);
    uint32_t *tile = (uint32_t *)(void *)(to + (uint64_t)i * bytes);
    for (uint32_t w = threadIdx.x; w < bytes / 4; w += THREADS)
        tile[w] = k_cuda_tile_word(F, row0, p.row_bytes, w);
}

static __global__ void __launch_bounds__(THREADS) bring(const __grid_constant__ struct bring_args a)
{
    const uint32_t t = threadIdx.x;
    if (blockIdx.x == 0 && t < a.n * SLICES) {
        const struct k_bring_expert &x = a.experts[t / SLICES];
        a.slots[x.expert * SLICES + t % SLICES] = x.to[t % SLICES];
    }
    if (a.tiles == 0)
        return;
    const struct k_bring_expert &x = a.experts[blockIdx.x / a.tiles];
    const uint32_t k = blockIdx.x % a.tiles;
    const uint32_t part = k < a.parts[0].end ? 0 : k < a.parts[1].end ? 1 : 2;
    const struct bring_part &p = a.parts[part];
    const uint32_t i = k - (part == 0 ? 0 : a.parts[part - 1].end);
    const uint8_t *from = x.from[part];
    uint8_t *to = a.arena + x.to[part];
    switch (p.format) {
    case K_Q8_0:
        arrange_tile<K_Q8_0>(p, from, to, i);
        break;
    case K_Q4_0:
        arrange_tile<K_Q4_0>(p, from, to, i);
        break;
    case K_Q4_K:
        arrange_tile<K_Q4_K>(p, from, to, i);
        break;
    case K_Q5_K:
        arrange_tile<K_Q5_K>(p, from, to, i);
        break;
    case K_Q6_K:
        arrange_tile<K_Q6_K>(p, from, to, i);
        break;
    default:
        break;
    }
}

struct bring_copies {
    const void *to[K_BRING_MOST * SLICES], *from[K_BRING_MOST * SLICES];
    size_t bytes[K_BRING_MOST * SLICES];
    size_t n;
};

/* One call where the CUDA library has it: each costs the host some microseconds. None after an
 * error of the stream: it no longer waits for those who use the places. */
static void copy(struct bring_copies *c, struct k_stream *s)
{
    struct k_cuda *cuda = k_cuda_of(s->device);
    if (s->error != cudaSuccess)
        return;
#if CUDART_VERSION >= 13000
    cudaMemcpyAttributes how = {};
    how.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
    (void)K_CUDA_CALL(
        cuda, s, cudaMemcpyBatchAsync(c->to, c->from, c->bytes, c->n, &how, &first, 1, s->stream));
#else
    for (size_t i = 0; i < c->n; i++)
        (void)K_CUDA_CALL(cuda, s,
                          cudaMemcpyAsync((void *)(uintptr_t)c->to[i], c->from[i], c->bytes[i],
                                          cudaMemcpyHostToDevice, s->stream));
#endif
}

extern "C" enum err_code k_cuda_bring(const struct k_bring *a, struct k_stream *s)
{
    const struct k_experts *l = &a->layer;
    const enum k_format formats[SLICES] = {l->gate, l->up, l->down};
    uint8_t *staging = (uint8_t *)k_cuda_at(a->staging);
    struct bring_args args = {};
    struct bring_copies copies = {};
    for (uint32_t i = 0; i < a->n; i++)
        args.experts[i] = a->experts[i];
    for (int k = 0; k < SLICES; k++) {
        const uint32_t n_out = k < 2 ? l->n_ff : l->n_embd, n_in = k < 2 ? l->n_embd : l->n_ff;
        const bool arranged = k_cuda_tile_arranged(formats[k], n_out, n_in);
        const size_t bytes = k_format_bytes(formats[k], n_out, n_in);
        struct bring_part *p = &args.parts[k];
        p->format = formats[k];
        p->row_bytes = k_format_bytes(formats[k], 1, n_in);
        p->row_tiles = n_in / K_CUDA_TILE_INPUTS;
        args.tiles += arranged ? n_out / OUTPUTS * p->row_tiles : 0;
        p->end = args.tiles;
        for (uint32_t i = 0; i < a->n; i++) {
            const struct k_bring_expert *x = &a->experts[i];
            uint8_t *to = arranged ? staging : l->arena->data + x->to[k];
            args.experts[i].from[k] = to;
            copies.to[copies.n] = to;
            copies.from[copies.n] = x->from[k];
            copies.bytes[copies.n++] = bytes;
            staging += (bytes + STAGED - 1) / STAGED * STAGED;
        }
    }
    args.arena = l->arena->data;
    args.slots = (uint64_t *)k_cuda_at(l->slots);
    args.n = a->n;
    copy(&copies, s);
    const uint32_t blocks = args.n * args.tiles;
    K_CUDA_LAUNCH(s, bring, dim3(blocks == 0 ? 1 : blocks), THREADS, 0, args);
    return ERR_OK;
}

static __global__ void __launch_bounds__(ROW_THREADS)
    fetch_rows(uint8_t *to, const uint8_t *from, const uint32_t *rows, uint32_t n, uint32_t bytes)
{
    for (uint32_t i = blockIdx.x; i < n; i += gridDim.x) {
        const uint64_t at = (uint64_t)rows[i] * bytes;
        for (uint32_t k = threadIdx.x * 16; k < bytes; k += ROW_THREADS * 16)
            *(uint4 *)(void *)(to + at + k) = *(const uint4 *)(const void *)(from + at + k);
    }
}

extern "C" enum err_code k_cuda_fetch_rows(const struct k_fetch_rows *a, struct k_stream *s)
{
    const uint32_t most = ROW_BLOCKS;
    if (a->n > 0)
        K_CUDA_LAUNCH(s, fetch_rows, dim3(a->n < most ? a->n : most), ROW_THREADS, 0,
                      (uint8_t *)k_cuda_at(a->to), (const uint8_t *)a->from, a->rows, a->n,
                      a->bytes);
    return ERR_OK;
}

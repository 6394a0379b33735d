/* Experts out of the host's memory into the order of k_cuda_tile.h. The kernel itself reads over
 * the link: one launch for many experts, where copies would take calls for each slice of each.
 * Blocks are few, so that computing goes on beside them; a block has the next piece under way while
 * it arranges one. */
#include "k_cuda.cuh"
#include "k_cuda_tile.h"

enum {
    THREADS = 512,
    BLOCKS = 32,       /* 18 KiB each under way is eight times what the link's latency asks for */
    PIECE = 20 * 1024, /* bytes of shared memory, twice */
    WIDE = 16,         /* bytes of one read */
    OUTPUTS = K_CUDA_TILE_OUTPUTS
};

/* How a slice is cut: a piece is some tiles of a stripe, all of them if they fit. */
struct bring_part {
    uint64_t row_bytes;
    uint32_t row_tiles, tiles;   /* of a stripe, of a piece */
    uint32_t stripe_pieces, end; /* end: pieces of an expert up to the end of this slice */
    uint32_t rows, pitch;        /* as a piece is read: rows, and from one output to the next */
    enum k_format format;
};

struct bring_args {
    struct bring_part parts[K_BRING_SLICES];
    struct k_bring_expert experts[K_BRING_MOST];
    uint8_t *arena;
    uint64_t *slots;
    uint32_t n, pieces; /* pieces of an expert */
};

struct bring_piece {
    const uint8_t *from;
    uint8_t *to;
    uint32_t part, tiles;
};

static __device__ __forceinline__ struct bring_piece find_piece(const struct bring_args &a,
                                                                uint32_t i)
{
    const struct k_bring_expert &x = a.experts[i / a.pieces];
    const uint32_t k = i % a.pieces;
    const uint32_t part = k < a.parts[0].end ? 0 : k < a.parts[1].end ? 1 : 2;
    const struct bring_part &p = a.parts[part];
    const uint32_t at = k - (part == 0 ? 0 : a.parts[part - 1].end);
    const uint32_t s = at / p.stripe_pieces, b = at % p.stripe_pieces * p.tiles;
    const uint32_t bytes = k_cuda_tile_bytes(p.format);
    const uint32_t left = p.row_tiles - b;
    struct bring_piece ret;
    ret.from = x.from[part] + (uint64_t)s * OUTPUTS * p.row_bytes + b * (bytes / OUTPUTS);
    ret.to = a.arena + x.to[part] + ((uint64_t)s * p.row_tiles + b) * bytes;
    ret.part = part;
    ret.tiles = left < p.tiles ? left : p.tiles;
    return ret;
}

/* Wide reads of whole lines, which may begin and end a little outside of the piece, but in no 16
 * bytes without some of it. In shared memory every row lies as far from a multiple of 16 as it does
 * in the host's. */
static __device__ __forceinline__ void read_piece(const struct bring_args &a, uint32_t i,
                                                  uint8_t *buffer)
{
    const struct bring_piece piece = find_piece(a, i);
    const struct bring_part &p = a.parts[piece.part];
    const uint32_t row = piece.tiles * (k_cuda_tile_bytes(p.format) / OUTPUTS);
    const uint32_t bytes = p.rows == 1 ? row * OUTPUTS : row;
    const uint32_t most = bytes / WIDE + 2; /* reads of a row */
    const uint32_t shift = (uint32_t)((uintptr_t)piece.from % WIDE);
    for (uint32_t k = threadIdx.x; k < p.rows * most; k += THREADS) {
        const uint32_t r = k / most, first = shift + r * p.pitch;
        const uint8_t *begin = piece.from + r * p.row_bytes;
        const uint8_t *from = begin - first % WIDE + k % most * WIDE;
        if (from >= begin + bytes)
            continue;
        const uint32_t to =
            (uint32_t)__cvta_generic_to_shared(buffer + first / WIDE * WIDE + k % most * WIDE);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    }
}

template <enum k_format F>
static __device__ __forceinline__ void arrange_piece(const struct bring_piece &piece,
                                                     const uint8_t *row0, uint32_t pitch)
{
    const uint32_t bytes = k_cuda_tile_bytes(F), words = bytes / 4;
    uint32_t *to = (uint32_t *)(void *)piece.to;
    for (uint32_t w = threadIdx.x; w < piece.tiles * words; w += THREADS)
        to[w] = k_cuda_tile_word(F, row0 + w / words * (bytes / OUTPUTS), pitch, w % words);
}

static __device__ __forceinline__ void write_piece(const struct bring_args &a, uint32_t i,
                                                   const uint8_t *buffer)
{
    const struct bring_piece piece = find_piece(a, i);
    const struct bring_part &p = a.parts[piece.part];
    const uint8_t *row0 = buffer + (uintptr_t)piece.from % WIDE;
    switch (p.format) {
    case K_Q8_0:
        arrange_piece<K_Q8_0>(piece, row0, p.pitch);
        break;
    case K_Q4_0:
        arrange_piece<K_Q4_0>(piece, row0, p.pitch);
        break;
    case K_Q4_K:
        arrange_piece<K_Q4_K>(piece, row0, p.pitch);
        break;
    case K_Q5_K:
        arrange_piece<K_Q5_K>(piece, row0, p.pitch);
        break;
    case K_Q6_K:
        arrange_piece<K_Q6_K>(piece, row0, p.pitch);
        break;
    default:
        break;
    }
}

static __global__ void __launch_bounds__(THREADS) bring(const __grid_constant__ struct bring_args a)
{
    __shared__ __align__(WIDE) uint8_t buffers[2][PIECE];
    const uint32_t n = a.n * a.pieces, t = threadIdx.x;
    if (blockIdx.x == 0 && t < a.n * K_BRING_SLICES) {
        const struct k_bring_expert &x = a.experts[t / K_BRING_SLICES];
        a.slots[x.expert * K_BRING_SLICES + t % K_BRING_SLICES] = x.to[t % K_BRING_SLICES];
    }
    if (blockIdx.x < n)
        read_piece(a, blockIdx.x, buffers[0]);
    asm volatile("cp.async.commit_group;" ::: "memory");
    for (uint32_t i = blockIdx.x, b = 0; i < n; i += gridDim.x, b ^= 1) {
        if (i + gridDim.x < n)
            read_piece(a, i + gridDim.x, buffers[b ^ 1]);
        asm volatile("cp.async.commit_group;" ::: "memory");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        write_piece(a, i, buffers[b]);
        __syncthreads();
    }
}

/* A matrix that is not arranged has no pieces. */
static struct bring_part cut(enum k_format format, uint32_t n_out, uint32_t n_in, uint32_t before)
{
    struct bring_part p = {};
    p.format = format;
    p.row_bytes = k_format_bytes(format, 1, n_in);
    p.end = before;
    if (!k_cuda_tile_arranged(format, n_out, n_in))
        return p;
    const uint32_t tile_row = k_cuda_tile_bytes(format) / OUTPUTS;
    p.row_tiles = p.tiles = n_in / K_CUDA_TILE_INPUTS;
    p.rows = 1; /* a stripe is one piece of the file: whole lines come over the link */
    p.pitch = (uint32_t)p.row_bytes;
    if (p.row_bytes * OUTPUTS > PIECE - 2 * WIDE) {
        /* rows lie apart, so that what is read beyond one's ends is no other's place */
        p.tiles = ((PIECE - 2 * WIDE) / OUTPUTS - 4 * WIDE) / tile_row;
        p.rows = OUTPUTS;
        p.pitch = (p.tiles * tile_row + 3 * WIDE - 1) / WIDE * WIDE + p.row_bytes % WIDE;
    }
    p.stripe_pieces = (p.row_tiles + p.tiles - 1) / p.tiles;
    p.end += n_out / OUTPUTS * p.stripe_pieces;
    return p;
}

/* Slices that are not arranged come by copies. */
static void copy_slices(const struct k_bring *a, int slice, uint64_t bytes, struct k_stream *s)
{
    for (uint32_t i = 0; i < a->n; i++)
        (void)K_CUDA_CALL(k_cuda_of(s->device), s,
                          cudaMemcpyAsync(a->layer.arena->data + a->experts[i].to[slice],
                                          a->experts[i].from[slice], bytes, cudaMemcpyHostToDevice,
                                          s->stream));
}

extern "C" enum err_code k_cuda_bring(const struct k_bring *a, struct k_stream *s)
{
    const struct k_experts *l = &a->layer;
    const enum k_format formats[K_BRING_SLICES] = {l->gate, l->up, l->down};
    struct bring_args args = {};
    for (int i = 0; i < K_BRING_SLICES; i++) {
        const uint32_t n_out = i < 2 ? l->n_ff : l->n_embd, n_in = i < 2 ? l->n_embd : l->n_ff;
        args.parts[i] = cut(formats[i], n_out, n_in, args.pieces);
        if (args.parts[i].end == args.pieces)
            copy_slices(a, i, k_format_bytes(formats[i], n_out, n_in), s);
        args.pieces = args.parts[i].end;
    }
    for (uint32_t i = 0; i < a->n; i++)
        args.experts[i] = a->experts[i];
    args.arena = l->arena->data;
    args.slots = (uint64_t *)k_cuda_at(l->slots);
    args.n = a->n;
    const uint32_t n = args.n * args.pieces;
    const uint32_t most = BLOCKS, some = n < most ? n : most;
    K_CUDA_LAUNCH(s, bring, dim3(n == 0 ? 1 : some), THREADS, 0, args);
    return ERR_OK;
}

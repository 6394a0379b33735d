/* Products of arranged weights (k_cuda_tile.h) with few columns: what `matmul` and the experts'
 * operations share. Bound by the reading of weights, so everything else is arranged around it.
 *
 * The work of a launch is a list of *units*: neighbouring stripes (16 outputs), of one matrix or of
 * an expert's gate and up at once (two sets). Every block has an equal part of the list, as many
 * blocks as the device holds, so that reading goes on while results are made. A part is cut where
 * the matrix or the columns change (a *piece*). Within a piece, an *item* is one tile of one
 * stripe; warps take items in turn, each through a ring of its own in shared memory that
 * asynchronous copies fill, up to K_CUDA_DECODE_RING tiles ahead. A *batch* of items makes t's (A5)
 * in one of two buffers; after a barrier one thread per output and column folds them in block order
 * (A6) while other warps are at the next batch. Where a batch is not a stripe's whole width,
 * accumulators wait in shared memory. */
#ifndef ISLET_K_CUDA_DECODE_CUH
#define ISLET_K_CUDA_DECODE_CUH

#include "k_cuda.cuh"
#include "k_cuda_decode_tile.cuh"
#include "k_cuda_quantise.cuh"

enum {
    K_CUDA_DECODE_WARPS = 8,
    K_CUDA_DECODE_THREADS = 32 * K_CUDA_DECODE_WARPS,
    K_CUDA_DECODE_BLOCKS = 2, /* on a multiprocessor: 128 registers a thread, none spilled */
    K_CUDA_DECODE_RING = 3,   /* most tiles of a warp's ring */
    K_CUDA_DECODE_ANY = -1    /* as a template's format: whatever the piece says */
};

/* What a launch chooses. */
struct k_cuda_decode_shape {
    uint32_t grid;
    uint32_t stripes; /* of a batch, per set */
    uint32_t tiles;   /* of a batch, per stripe */
    uint32_t inverse; /* of tiles: k_cuda_decode_inverse */
    uint32_t staged;  /* tiles of activations in shared memory: a row's, or a batch's */
    uint32_t ring;    /* slots of a warp's ring: K_CUDA_DECODE_RING, or as many as it ever needs */
    uint32_t slot;    /* bytes of one: the largest tile that occurs */
    uint32_t blocks;  /* of a tile, 1 or 8: the most that occur */
    uint32_t sets;
};

/* Neighbouring stripes of one matrix, or of two of the same format, against the same columns. */
struct k_cuda_decode_piece {
    const uint8_t *first[2]; /* first stripe of each set */
    enum k_format format;
    uint32_t n_in, count; /* stripes per set */
    uint32_t columns;     /* any number; taken in eights */
};

/* Shared memory of a block, carved from `base`. */
struct k_cuda_decode_shared {
    uint8_t *ring;  /* [warps][ring][slot] */
    int8_t *q;      /* [columns][staged * 256 + 16]: the 16 spread ldmatrix's rows over the banks */
    int16_t *sum;   /* [columns][staged * 8 + 8] */
    float *t[2];    /* two of [sets][stripes][tiles * blocks][16][columns] */
    float *acc;     /* [sets][stripes][16][columns] */
    float *dx;      /* [columns][k_cuda_decode_dx_stride] */
    uint32_t bytes; /* in all */
};

/* Floats from one column's dx's to the next's: multiples of four for the blocks of 32, which are
 * read in fours; never one of 32, the banks. */
static inline __host__ __device__ uint32_t
k_cuda_decode_dx_stride(const struct k_cuda_decode_shape &shape)
{
    return shape.blocks == 8 ? shape.staged * 8 + 4 : shape.staged + 1;
}

static inline __host__ __device__ struct k_cuda_decode_shared k_cuda_decode_carve(
    void *base, const struct k_cuda_decode_shape &shape, uint32_t columns)
{
    struct k_cuda_decode_shared s;
    const uint32_t stripes = shape.sets * shape.stripes;
    uint8_t *p = (uint8_t *)base;
    s.ring = p;
    p += K_CUDA_DECODE_WARPS * shape.ring * shape.slot;
    s.q = (int8_t *)p;
    p += columns * (shape.staged * 256 + 16);
    s.sum = (int16_t *)(void *)p;
    p += columns * (shape.staged * 16 + 16);
    for (int i = 0; i < 2; i++) {
        s.t[i] = (float *)(void *)p;
        p += stripes * shape.tiles * shape.blocks * 16 * columns * 4;
    }
    s.acc = (float *)(void *)p;
    p += stripes * 16 * columns * 4;
    s.dx = (float *)(void *)p;
    p += columns * k_cuda_decode_dx_stride(shape) * 4;
    s.bytes = (uint32_t)(p - (uint8_t *)base);
    return s;
}

static inline __host__ __device__ uint32_t k_cuda_decode_blocks(enum k_format format)
{
    return format == K_Q8_0 || format == K_Q4_0 ? 8 : 1;
}

/* k_format_form of an arranged format, for kernels. */
static inline __host__ __device__ enum k_form k_cuda_decode_form(enum k_format format)
{
    return k_cuda_decode_blocks(format) == 8 ? K_FORM_Q32 : K_FORM_Q256;
}

/* ---- batches --------------------------------------------------------------------------------- */

/* A batch of a piece: stripes [stripe, stripe + stripes) of each set, tiles [tile, tile + tiles):
 * all tiles, or one stripe, so that its items lie one after the other. Item i is tile i % tiles of
 * stripe i / tiles, the second set's after the first's. */
struct k_cuda_decode_batch {
    uint32_t stripe, tile, stripes, tiles;
    uint32_t items; /* of a set */
    uint32_t inverse;
};

/* i * inverse >> 16 is i / tiles, for i < 1024 and tiles <= 64. */
static inline __host__ __device__ uint32_t k_cuda_decode_inverse(uint32_t tiles)
{
    return 65536 / tiles + 1;
}

static __device__ __forceinline__ void k_cuda_decode_size(struct k_cuda_decode_batch &b,
                                                          const struct k_cuda_decode_shape &shape,
                                                          uint32_t count, uint32_t all_tiles)
{
    const uint32_t tiles = min(shape.tiles, all_tiles - b.tile);
    b.inverse = tiles == shape.tiles ? shape.inverse : k_cuda_decode_inverse(tiles);
    b.tiles = tiles;
    b.stripes = min(shape.stripes, count - b.stripe);
    b.items = b.stripes * tiles;
}

/* The next batch; stripe == count or more: none. */
static __device__ __forceinline__ void k_cuda_decode_next(struct k_cuda_decode_batch &b,
                                                          const struct k_cuda_decode_shape &shape,
                                                          uint32_t count, uint32_t all_tiles)
{
    b.tile += shape.tiles;
    if (b.tile >= all_tiles) {
        b.tile = 0;
        b.stripe += shape.stripes;
    }
    if (b.stripe < count)
        k_cuda_decode_size(b, shape, count, all_tiles);
}

/* One value to shared memory. */
template <bool ASYNC, typename T>
static __device__ __forceinline__ void k_cuda_decode_move(T *to, const T *from)
{
    if constexpr (!ASYNC)
        *to = *from;
    else if constexpr (sizeof(T) == 16)
        k_cuda_warp_copy16(to, from);
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                         (uint32_t)__cvta_generic_to_shared(to)),
                     "l"(from)
                     : "memory");
}

/* Fetches the q's, sums and dx's of `tiles` tiles from tile `first` on of the columns' rows. With
 * eight columns a warp has one. ASYNC: as a group of copies, else the thread waits. */
template <int COLUMNS, bool ASYNC, typename Row>
static __device__ __forceinline__ void k_cuda_decode_stage(const struct k_cuda_decode_shared &s,
                                                           const struct k_cuda_decode_shape &shape,
                                                           enum k_format format, uint32_t n_in,
                                                           uint32_t count, Row row, uint32_t first,
                                                           uint32_t tiles)
{
    const uint32_t c = COLUMNS == 1 ? 0 : threadIdx.x / 32;
    const uint32_t from = COLUMNS == 1 ? threadIdx.x : threadIdx.x % 32;
    const uint32_t step = COLUMNS == 1 ? K_CUDA_DECODE_THREADS : 32;
    const enum k_form form = k_cuda_decode_form(format);
    const uint32_t blocks = k_cuda_decode_blocks(format);
    if (c < count) {
        const uint8_t *r = row(c);
        const uint4 *q = (const uint4 *)(const void *)(r + first * 256);
        const uint4 *sums =
            (const uint4 *)(const void *)(r + k_cuda_act_sum_offset(form, n_in) + first * 16);
        const float *dx =
            (const float *)(const void *)(r + k_cuda_act_dx_offset(n_in)) + first * blocks;
        uint4 *to = (uint4 *)(void *)(s.q + c * (shape.staged * 256 + 16));
        uint4 *to_sums = (uint4 *)(void *)(s.sum + c * (shape.staged * 8 + 8));
        float *to_dx = s.dx + c * k_cuda_decode_dx_stride(shape);
#pragma unroll 4
        for (uint32_t i = from; i < tiles * 16; i += step)
            k_cuda_decode_move<ASYNC>(to + i, q + i);
        for (uint32_t i = from; i < tiles; i += step)
            k_cuda_decode_move<ASYNC>(to_sums + i, sums + i);
        for (uint32_t i = from; i < tiles * blocks; i += step)
            k_cuda_decode_move<ASYNC>(to_dx + i, dx + i);
    }
    if (ASYNC)
        k_cuda_warp_commit();
}

/* The same from rows of floats (A4), by whole warps: row(c) is one of them. Calls bad() for a
 * column with a value that is not finite. */
template <int COLUMNS, typename Row, typename Bad>
static __device__ __forceinline__ void k_cuda_decode_quantise(
    const struct k_cuda_decode_shared &s, const struct k_cuda_decode_shape &shape,
    enum k_format format, uint32_t count, Row row, Bad bad, uint32_t first, uint32_t tiles)
{
    const uint32_t warp = threadIdx.x / 32, c = COLUMNS == 1 ? 0 : warp;
    const bool small = k_cuda_decode_blocks(format) == 8;
    if (c >= count)
        return;
    const float *x = (const float *)(const void *)row(c);
    x += first * 256 + threadIdx.x % 32 * K_CUDA_QUANTISE_VALUES;
    int8_t *q = s.q + c * (shape.staged * 256 + 16);
    int16_t *sum = s.sum + c * (shape.staged * 8 + 8);
    float *dx = s.dx + c * k_cuda_decode_dx_stride(shape);
    for (uint32_t i = COLUMNS == 1 ? warp : 0; i < tiles;
         i += COLUMNS == 1 ? K_CUDA_DECODE_WARPS : 1) {
        const float4 low = *(const float4 *)(const void *)(x + 256 * i),
                     high = *(const float4 *)(const void *)(x + 256 * i + 4);
        const float v[K_CUDA_QUANTISE_VALUES] = {low.x,  low.y,  low.z,  low.w,
                                                 high.x, high.y, high.z, high.w};
        const struct k_cuda_quantise_to to = {q + 256 * i, sum + 8 * i, dx + (small ? 8 * i : i)};
        if (!(small ? k_cuda_quantise_one<K_FORM_Q32>(v, to)
                    : k_cuda_quantise_one<K_FORM_Q256>(v, to)))
            bad();
    }
}

/* A6 over a batch's t's, then source.emit(column, output of the piece, sum, the second set's sum)
 * if that was the rest of the outputs' inputs. `turn` says which warp begins, so that the few folds
 * of one column do not fall to the same. dx: of the batch's first tile. */
template <int COLUMNS, int SETS, typename Source>
static __device__ __forceinline__ void k_cuda_decode_fold(const struct k_cuda_decode_shared &s,
                                                          const struct k_cuda_decode_batch &b,
                                                          const float *t, const float *dx,
                                                          uint32_t dx_stride, uint32_t blocks,
                                                          uint32_t count, bool last, uint32_t turn,
                                                          const Source &source)
{
    const uint32_t results = b.stripes * 16 * COLUMNS, n = b.tiles * blocks;
    for (uint32_t i = (threadIdx.x + 32 * turn) % K_CUDA_DECODE_THREADS; i < results;
         i += K_CUDA_DECODE_THREADS) {
        const uint32_t column = i % COLUMNS;
        if (column >= count)
            continue;
        const float *from = t + i / (16 * COLUMNS) * n * 16 * COLUMNS + i % (16 * COLUMNS);
        const float *scale = dx + column * dx_stride;
        float sum[SETS];
#pragma unroll
        for (int k = 0; k < SETS; k++)
            sum[k] = b.tile == 0 ? 0.0f : s.acc[k * results + i];
        const auto step = [&](float dx_of, uint32_t j) {
#pragma unroll
            for (int k = 0; k < SETS; k++)
                sum[k] = __fmaf_rn(dx_of, from[(k * b.stripes * n + j) * 16 * COLUMNS], sum[k]);
        };
        if (blocks == 8) {
#pragma unroll 2
            for (uint32_t j = 0; j < n; j += 4) {
                const float4 four = *(const float4 *)(const void *)(scale + j);
                step(four.x, j);
                step(four.y, j + 1);
                step(four.z, j + 2);
                step(four.w, j + 3);
            }
        } else {
#pragma unroll 4
            for (uint32_t j = 0; j < n; j++)
                step(scale[j], j);
        }
        if (last)
            source.emit(column, b.stripe * 16 + i / COLUMNS, sum[0], sum[SETS - 1]);
        else
            for (int k = 0; k < SETS; k++)
                s.acc[k * results + i] = sum[k];
    }
}

/* Starts a lane's part of the copy of a tile; `to` (in shared memory) and `from` are the lane's. */
static __device__ __forceinline__ void k_cuda_decode_copy(uint32_t to, const uint8_t *from,
                                                          uint32_t bytes)
{
    const uint32_t at = 16 * (threadIdx.x % 32);
#pragma unroll
    for (uint32_t k = 0; k < K_CUDA_TILE_Q8_0_BYTES; k += 512) /* the longest */
        if (k + 512 <= bytes || k + at < bytes)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + k), "l"(from + k)
                         : "memory");
}

/* Waits until at most `newer` groups of copies, 0 to 3, are under way. */
static __device__ __forceinline__ void k_cuda_decode_arrived(uint32_t newer)
{
    if (newer == 3)
        k_cuda_warp_copied<3>();
    else if (newer == 2)
        k_cuda_warp_copied<2>();
    else if (newer == 1)
        k_cuda_warp_copied<1>();
    else
        k_cuda_warp_copied<0>();
}

/* A piece with up to COLUMNS columns. The caller's next use of shared memory comes after a
 * barrier. */
template <int F, int COLUMNS, int SETS, typename Source>
static __device__ __forceinline__ void k_cuda_decode_piece_of(
    const struct k_cuda_decode_shared &s, const struct k_cuda_decode_shape &shape,
    const struct k_cuda_decode_piece &piece, uint32_t count, const Source &source)
{
    const uint32_t warp = threadIdx.x / 32, l = threadIdx.x % 32;
    const enum k_format f = F != K_CUDA_DECODE_ANY ? (enum k_format)F : piece.format;
    const uint32_t blocks = k_cuda_decode_blocks(f), bytes = k_cuda_tile_bytes(f);
    const uint32_t all_tiles = piece.n_in / K_CUDA_TILE_INPUTS, n_stripes = piece.count;
    const uint32_t x_column = COLUMNS == 1 ? 0 : min(l % 8, count - 1);
    const uint32_t x_stride = shape.staged * 256 + 16, sum_stride = shape.staged * 8 + 8;
    const uint32_t dx_stride = k_cuda_decode_dx_stride(shape);
    const int8_t *x = s.q + x_column * x_stride + l / 8 * 16;
    const uint8_t *ring = s.ring + warp * shape.ring * shape.slot;
    const uint32_t ring_of_lane = (uint32_t)__cvta_generic_to_shared(ring) + 16 * l;
    const uint8_t *first = piece.first[0] + 16 * l, *second = piece.first[SETS - 1] + 16 * l;
    struct k_cuda_decode_batch ahead = {}, b;
    k_cuda_decode_size(ahead, shape, n_stripes, all_tiles);
    b = ahead;
    uint32_t next = warp; /* item of `ahead` that this warp copies next */
    /* Starts the copy of the warp's next item, if there is one, and closes a group. */
    auto copy = [&](uint32_t slot) {
        while (next >= SETS * ahead.items && ahead.stripe < n_stripes) {
            k_cuda_decode_next(ahead, shape, n_stripes, all_tiles);
            next = warp;
        }
        if (ahead.stripe < n_stripes) {
            const bool other = SETS == 2 && next >= ahead.items;
            const uint32_t nth =
                ahead.stripe * all_tiles + ahead.tile + next - (other ? ahead.items : 0);
            k_cuda_decode_copy(ring_of_lane + slot * shape.slot,
                               (other ? second : first) + (uint64_t)nth * bytes, bytes);
            next += K_CUDA_DECODE_WARPS;
        }
        k_cuda_warp_commit();
    };
    const auto row = [&](uint32_t c) { return source.row(c); };
    const auto stage = [&](uint32_t tile, uint32_t tiles) {
        if constexpr (Source::FLOATS)
            k_cuda_decode_quantise<COLUMNS>(
                s, shape, f, count, row, [&]() { source.bad(); }, tile, tiles);
        else
            k_cuda_decode_stage<COLUMNS, false>(s, shape, f, piece.n_in, count, row, tile, tiles);
    };
    const bool whole = shape.staged >= all_tiles;
    if (!Source::LATE && whole && !Source::ONE_ROW)
        k_cuda_decode_stage<COLUMNS, true>(s, shape, f, piece.n_in, count, row, 0, all_tiles);
    for (uint32_t k = 0; k < shape.ring; k++)
        copy(k);
    if (Source::LATE) {
        k_cuda_await(); /* weights are nobody's result */
        k_cuda_release();
        if (whole)
            stage(0, all_tiles);
    } else {
        k_cuda_decode_arrived(shape.ring);
    }
    uint32_t slot = 0, turn = 0;
    for (; b.stripe < n_stripes; k_cuda_decode_next(b, shape, n_stripes, all_tiles), turn++) {
        if (!whole) {
            __syncthreads(); /* the last batch is folded */
            stage(b.tile, b.tiles);
        }
        if (!whole || turn == 0)
            __syncthreads();
        const uint32_t staged = whole ? b.tile : 0; /* place of the batch's first tile */
        float *t = turn & 1 ? s.t[1] : s.t[0];
        for (uint32_t i = warp; i < SETS * b.items; i += K_CUDA_DECODE_WARPS) {
            const uint32_t tile = staged + i - (i * b.inverse >> 16) * b.tiles;
            k_cuda_decode_arrived(shape.ring - 1);
            __syncwarp();
            k_cuda_decode_tile<COLUMNS>(f, ring + slot * shape.slot, x + tile * 256,
                                        s.sum + tile * 8, sum_stride,
                                        k_cuda_decode_to<COLUMNS>{t + i * blocks * 16 * COLUMNS});
            __syncwarp();
            copy(slot);
            slot = slot + 1 == shape.ring ? 0 : slot + 1;
        }
        __syncthreads();
        k_cuda_decode_fold<COLUMNS, SETS>(s, b, t, s.dx + staged * blocks, dx_stride, blocks, count,
                                          b.tile + b.tiles == all_tiles, turn, source);
    }
}

/* A piece of few tiles a stripe with up to eight columns: a warp takes whole stripes and keeps the
 * sums itself, so that warps wait for each other only once, when the activations are there. */
template <int F, typename Source>
static __device__ __forceinline__ void k_cuda_decode_piece_alone(
    const struct k_cuda_decode_shared &s, const struct k_cuda_decode_shape &shape,
    const struct k_cuda_decode_piece &piece, uint32_t count, const Source &source)
{
    static_assert(Source::LATE && Source::FLOATS, "the others are not needed");
    const enum k_format f = (enum k_format)F;
    const uint32_t warp = threadIdx.x / 32, l = threadIdx.x % 32;
    const uint32_t blocks = k_cuda_decode_blocks(f), bytes = k_cuda_tile_bytes(f);
    const uint32_t tiles = piece.n_in / K_CUDA_TILE_INPUTS;
    const uint32_t x_stride = shape.staged * 256 + 16, sum_stride = shape.staged * 8 + 8;
    const uint32_t dx_stride = k_cuda_decode_dx_stride(shape);
    const int8_t *x = s.q + min(l % 8, count - 1) * x_stride + l / 8 * 16;
    const float *dx = s.dx + 2 * (l % 4) * dx_stride;
    const uint8_t *ring = s.ring + warp * shape.ring * shape.slot;
    const uint32_t ring_of_lane = (uint32_t)__cvta_generic_to_shared(ring) + 16 * l;
    const uint8_t *from = piece.first[0] + (uint64_t)(warp * tiles) * bytes + 16 * l;
    uint32_t next_stripe = warp, next_tile = 0;
    auto copy = [&](uint32_t slot) { /* the warp's next tile, if there is one */
                                     if (next_stripe < piece.count) {
                                         k_cuda_decode_copy(ring_of_lane + slot * shape.slot, from,
                                                            bytes);
                                         from += bytes;
                                         if (++next_tile == tiles) {
                                             next_tile = 0;
                                             next_stripe += K_CUDA_DECODE_WARPS;
                                             from += (K_CUDA_DECODE_WARPS - 1) * tiles * bytes;
                                         }
                                     }
                                     k_cuda_warp_commit();
    };
    for (uint32_t k = 0; k < shape.ring; k++)
        copy(k);
    k_cuda_await(); /* weights are nobody's result */
    k_cuda_release();
    k_cuda_decode_quantise<8>(
        s, shape, f, count, [&](uint32_t c) { return source.row(c); }, [&]() { source.bad(); }, 0,
        tiles);
    __syncthreads();
    uint32_t slot = 0;
    for (uint32_t stripe = warp; stripe < piece.count; stripe += K_CUDA_DECODE_WARPS) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (uint32_t tile = 0; tile < tiles; tile++) {
            k_cuda_decode_arrived(shape.ring - 1);
            __syncwarp();
            k_cuda_decode_tile<8>(f, ring + slot * shape.slot, x + tile * 256, s.sum + tile * 8,
                                  sum_stride,
                                  k_cuda_decode_into{sum, dx + tile * blocks, dx_stride});
            __syncwarp();
            copy(slot);
            slot = slot + 1 == shape.ring ? 0 : slot + 1;
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            if (2 * (l % 4) + i % 2 < count)
                source.emit(2 * (l % 4) + i % 2, stripe * 16 + l / 4 + i / 2 * 8, sum[i], sum[i]);
    }
}

/* A block's part of the launch. The source says what is to be done:
 *   LATE           activations are known late: weights are asked for first, before k_cuda_await.
 *                  Else the source has called it, and activations come first, ahead of the crowd
 *   ONE_ROW        every piece has the one column row(0), known before find
 *   ALONE          k_cuda_decode_piece_alone
 *   FLOATS         row(c) is a row of floats, which each block quantises for itself, once awaited;
 *                  bad() is then called for a column with a value that is not finite
 *   units()        stripes of the launch, per set
 *   find(unit, piece)               the piece from that unit on
 *   take(first, count)              goes on with columns [first, first + count) of the piece
 *   row(c)                          column first + c's activation row
 *   emit(c, output, sum, second)    a result of that column; output: from the piece's first on */
template <int F, int COLUMNS, int SETS, typename Source>
static __device__ __forceinline__ void k_cuda_decode(const struct k_cuda_decode_shape &shape,
                                                     uint32_t n_in, void *memory, Source &source)
{
    const struct k_cuda_decode_shared s = k_cuda_decode_carve(memory, shape, COLUMNS);
    const uint32_t all_tiles = n_in / K_CUDA_TILE_INPUTS;
    if (Source::ONE_ROW && shape.staged >= all_tiles)
        k_cuda_decode_stage<COLUMNS, true>(
            s, shape, (enum k_format)F, n_in, 1, [&](uint32_t c) { return source.row(c); }, 0,
            all_tiles);
    const uint32_t units = source.units(), each = units / gridDim.x, more = units % gridDim.x;
    uint32_t unit = blockIdx.x * each + min(blockIdx.x, more);
    const uint32_t end = unit + each + (blockIdx.x < more);
    while (unit < end) {
        struct k_cuda_decode_piece piece;
        source.find(unit, piece);
        piece.count = min(piece.count, end - unit);
        for (uint32_t first = 0; first < piece.columns; first += COLUMNS) {
            const uint32_t count = min(piece.columns - first, (uint32_t)COLUMNS);
            source.take(first, count);
            if constexpr (Source::ALONE)
                k_cuda_decode_piece_alone<F>(s, shape, piece, count, source);
            else
                k_cuda_decode_piece_of<F, COLUMNS, SETS>(s, shape, piece, count, source);
            __syncthreads();
        }
        unit += piece.count;
    }
}

/* ---- what a launch chooses ------------------------------------------------------------------- */

static inline uint32_t k_cuda_decode_parts(uint32_t n, uint32_t part)
{
    return (n + part - 1) / part;
}

/* Stripes of a batch, `items` of each, of a block's `each`, up to `most`: so many that the block's
 * warps have the fewest rounds; of equals the most, for fewer barriers. */
static inline uint32_t k_cuda_decode_batch_stripes(uint32_t items, uint32_t each, uint32_t most)
{
    uint32_t best = 1, best_rounds = UINT32_MAX;
    for (uint32_t n = 1; n <= most && n <= each; n++) {
        const uint32_t rounds = each / n * k_cuda_decode_parts(n * items, K_CUDA_DECODE_WARPS) +
                                k_cuda_decode_parts(each % n * items, K_CUDA_DECODE_WARPS);
        if (rounds <= best_rounds) {
            best = n;
            best_rounds = rounds;
        }
    }
    return best;
}

/* For k_cuda_decode_piece_alone, eight columns: no batches. */
static inline struct k_cuda_decode_shape k_cuda_decode_choose_alone(const struct k_cuda *c,
                                                                    enum k_format format,
                                                                    uint32_t n_tiles,
                                                                    uint32_t units)
{
    struct k_cuda_decode_shape shape = {};
    uint32_t fit = 0;
    shape.slot = k_cuda_tile_bytes(format);
    shape.blocks = k_cuda_decode_blocks(format);
    shape.sets = 1;
    shape.staged = n_tiles;
    for (shape.ring = K_CUDA_DECODE_RING; shape.ring > 1; shape.ring--) {
        fit = c->shared_bytes / (k_cuda_decode_carve(NULL, shape, 8).bytes + 1024);
        if (fit >= K_CUDA_DECODE_BLOCKS)
            break;
    }
    const uint32_t blocks = c->sm_count * (fit >= K_CUDA_DECODE_BLOCKS ? K_CUDA_DECODE_BLOCKS : 1);
    shape.grid = blocks < units ? blocks : units;
    return shape;
}

/* slot, blocks: of the largest format; units: at most so many in the launch. Tiles of a batch: a
 * stripe's, as far as 24 items and the room for t's go, else equal parts of it. */
static inline struct k_cuda_decode_shape k_cuda_decode_choose(const struct k_cuda *c,
                                                              uint32_t columns, uint32_t slot,
                                                              uint32_t blocks, uint32_t sets,
                                                              uint32_t n_tiles, uint32_t units)
{
    const uint32_t room = c->shared_bytes / 7 < 32768 ? c->shared_bytes / 7 : 32768;
    const uint32_t widest = columns == 1 ? 64 : c->shared_bytes < 131072 ? 8 : 16;
    const uint32_t most_blocks = K_CUDA_DECODE_BLOCKS;
    const uint32_t fitting = room / (blocks * 64 * columns), full = 3 * K_CUDA_DECODE_WARPS;
    const uint32_t items = fitting < full ? fitting : full;
    struct k_cuda_decode_shape shape = {};
    shape.slot = slot;
    shape.blocks = blocks;
    shape.sets = sets;
    shape.tiles = k_cuda_decode_parts(n_tiles, k_cuda_decode_parts(n_tiles * sets, items));
    shape.inverse = k_cuda_decode_inverse(shape.tiles);
    shape.staged = n_tiles <= widest ? n_tiles : shape.tiles;
    const uint32_t a_stripe = shape.tiles * sets;
    const uint32_t most = shape.tiles < n_tiles ? 1 : items / a_stripe;
    uint32_t each = k_cuda_decode_parts(units, c->sm_count * most_blocks);
    shape.stripes = k_cuda_decode_batch_stripes(a_stripe, each, most);
    for (shape.ring = K_CUDA_DECODE_RING;; shape.ring--) {
        const uint32_t bytes = k_cuda_decode_carve(NULL, shape, columns).bytes;
        const uint32_t fit = c->shared_bytes / (bytes + 1024);
        const uint32_t blocks_each = fit > most_blocks ? most_blocks : fit > 0 ? fit : 1;
        each = k_cuda_decode_parts(units, c->sm_count * blocks_each);
        shape.grid = c->sm_count * blocks_each < units ? c->sm_count * blocks_each : units;
        const uint32_t rounds = k_cuda_decode_parts(each * n_tiles * sets, K_CUDA_DECODE_WARPS);
        if (shape.ring == 1 || (rounds >= shape.ring && fit > 1) || (shape.ring == 2 && fit == 1))
            return shape;
    }
}

#endif

/* Drawing the next token (A21) where the logits are: its sums are of integers, so that blocks may
 * make them in any order. A block has a piece of a row's logits, a thread neighbouring ones. */
#include "k_cuda.cuh"
#include "k_cuda_warp.cuh"

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    VALUES = K_PICK_PIECE / THREADS
};

struct piece {
    uint64_t sum; /* of weights */
    uint32_t key; /* k_cuda_warp_key of its best, */
    uint32_t id;  /* the first such */
};

struct pick_args {
    struct k_cuda_rows rows;
    const float *logits;
    const struct k_pick_row *how;
    uint32_t *ids;
    struct piece *pieces; /* [max_rows][n_pieces] */
    uint32_t n_vocab, n_pieces;
};

static __device__ __forceinline__ bool is_greedy(const struct k_pick_row &how)
{
    return how.temperature < 0x1p-126f;
}

/* A thread's values are i, i + THREADS, ... where `spread`, otherwise neighbours. */
static __device__ __forceinline__ uint32_t place_of(uint32_t piece, uint32_t k, bool spread)
{
    const uint32_t t = threadIdx.x;
    return piece * K_PICK_PIECE + (spread ? k * THREADS + t : t * VALUES + k);
}

static __device__ __forceinline__ void take_better(uint32_t &key, uint32_t &id, uint32_t other_key,
                                                   uint32_t other_id)
{
    const bool better = other_key > key || (other_key == key && other_id < id);
    key = better ? other_key : key;
    id = better ? other_id : id;
}

static __device__ __forceinline__ void warp_better(uint32_t &key, uint32_t &id)
{
    for (int o = 16; o >= 1; o >>= 1)
        take_better(key, id, __shfl_xor_sync(K_CUDA_WARP_ALL, key, o),
                    __shfl_xor_sync(K_CUDA_WARP_ALL, id, o));
}

static __global__ void __launch_bounds__(THREADS) pick_best(const struct pick_args a)
{
    __shared__ uint32_t keys[WARPS], ids[WARPS];
    const uint32_t row = blockIdx.y, piece = blockIdx.x, t = threadIdx.x;
    k_cuda_await();
    k_cuda_release();
    if (row >= *a.rows.n_rows)
        return;
    const float *x = a.logits + (uint64_t)row * a.n_vocab;
    uint32_t key = 0, id = UINT32_MAX;
#pragma unroll
    for (uint32_t k = 0; k < VALUES; k++) {
        const uint32_t i = place_of(piece, k, true);
        if (i < a.n_vocab)
            take_better(key, id, k_cuda_warp_key(x[i]), i);
    }
    warp_better(key, id);
    if (t % 32 == 0) {
        keys[t / 32] = key;
        ids[t / 32] = id;
    }
    __syncthreads();
    if (t >= 32)
        return;
    key = t < WARPS ? keys[t] : 0;
    id = t < WARPS ? ids[t] : UINT32_MAX;
    warp_better(key, id);
    if (t == 0) {
        struct piece *p = &a.pieces[(uint64_t)row * a.n_pieces + piece];
        p->key = key;
        p->id = id;
    }
}

/* The row's best, by the first warp; every thread gets it. */
static __device__ __forceinline__ void row_best(const struct pick_args &a, uint32_t row,
                                                uint32_t shared[2])
{
    const struct piece *p = a.pieces + (uint64_t)row * a.n_pieces;
    if (threadIdx.x < 32) {
        uint32_t key = 0, id = UINT32_MAX;
        for (uint32_t i = threadIdx.x; i < a.n_pieces; i += 32)
            take_better(key, id, p[i].key, p[i].id);
        warp_better(key, id);
        if (threadIdx.x == 0) {
            shared[0] = key;
            shared[1] = id;
        }
    }
    __syncthreads();
}

static __device__ __forceinline__ uint64_t weight_of(float x, float best, float temperature)
{
    const float z = k_float_div(k_float_sub(x, best), temperature);
    return __float2ull_rz(k_float_mul(k_float_exp32(z), K_WEIGHT_ONE));
}

static __device__ __forceinline__ uint64_t warp_sum(uint64_t sum)
{
    for (int o = 16; o >= 1; o >>= 1)
        sum += __shfl_xor_sync(K_CUDA_WARP_ALL, sum, o);
    return sum;
}

/* Weighs the pieces; where the best is wanted, tells it. */
static __global__ void __launch_bounds__(THREADS) pick_weigh(const struct pick_args a)
{
    __shared__ uint32_t best[2];
    __shared__ uint64_t sums[WARPS];
    const uint32_t row = blockIdx.y, piece = blockIdx.x, t = threadIdx.x;
    k_cuda_await();
    k_cuda_release();
    if (row >= *a.rows.n_rows)
        return;
    const struct k_pick_row how = a.how[row];
    row_best(a, row, best);
    if (is_greedy(how)) {
        if (piece == 0 && t == 0)
            a.ids[row] = best[1];
        return;
    }
    const float *x = a.logits + (uint64_t)row * a.n_vocab, top = k_cuda_warp_of_key(best[0]);
    uint64_t sum = 0;
#pragma unroll
    for (uint32_t k = 0; k < VALUES; k++) {
        const uint32_t i = place_of(piece, k, true);
        if (i < a.n_vocab)
            sum += weight_of(x[i], top, how.temperature);
    }
    sum = warp_sum(sum);
    if (t % 32 == 0)
        sums[t / 32] = sum;
    __syncthreads();
    if (t >= 32)
        return;
    sum = warp_sum(t < WARPS ? sums[t] : 0);
    if (t == 0)
        a.pieces[(uint64_t)row * a.n_pieces + piece].sum = sum;
}

/* What stands before each thread's values: exclusive sums over the block. */
static __device__ __forceinline__ uint64_t sum_before(uint64_t mine, uint64_t warps[WARPS])
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t sum = mine;
    for (uint32_t o = 1; o < 32; o *= 2) {
        const uint64_t other = __shfl_up_sync(K_CUDA_WARP_ALL, sum, o);
        sum += lane >= o ? other : 0;
    }
    if (lane == 31)
        warps[warp] = sum;
    __syncthreads();
    uint64_t before = sum - mine;
    for (uint32_t i = 0; i < warp; i++)
        before += warps[i];
    return before;
}

/* A block a row: in which piece the drawn one is, then which of it. */
static __global__ void __launch_bounds__(THREADS) pick_draw(const struct pick_args a)
{
    __shared__ uint32_t best[2], piece;
    __shared__ uint64_t warps[WARPS], left; /* left: of the drawn number, in the piece */
    const uint32_t row = blockIdx.x, t = threadIdx.x;
    k_cuda_await();
    k_cuda_release();
    if (row >= *a.rows.n_rows)
        return;
    const struct k_pick_row how = a.how[row];
    if (is_greedy(how))
        return;
    const struct piece *p = a.pieces + (uint64_t)row * a.n_pieces;
    row_best(a, row, best);
    if (t < 32) {
        uint64_t total = 0;
        for (uint32_t i = t; i < a.n_pieces; i += 32)
            total += p[i].sum;
        total = warp_sum(total);
        uint64_t r = __umul64hi(how.random, total);
        uint32_t i = 0;
        while (i + 1 < a.n_pieces && r >= p[i].sum)
            r -= p[i++].sum;
        if (t == 0) {
            piece = i;
            left = r;
            a.ids[row] = best[1]; /* stays only where no weight is above 0 */
        }
    }
    __syncthreads();
    const float *x = a.logits + (uint64_t)row * a.n_vocab, top = k_cuda_warp_of_key(best[0]);
    uint64_t weight[VALUES], mine = 0;
#pragma unroll
    for (uint32_t k = 0; k < VALUES; k++) {
        const uint32_t i = place_of(piece, k, false);
        weight[k] = i < a.n_vocab ? weight_of(x[i], top, how.temperature) : 0;
        mine += weight[k];
    }
    uint64_t sum = sum_before(mine, warps);
    if (left < sum || left - sum >= mine)
        return;
#pragma unroll
    for (uint32_t k = 0; k < VALUES; k++) {
        if (left >= sum && left - sum < weight[k])
            a.ids[row] = place_of(piece, k, false);
        sum += weight[k];
    }
}

extern "C" enum err_code k_cuda_pick(const struct k_pick *a, struct k_stream *s)
{
    struct pick_args args;
    args.rows = k_cuda_rows_of(&a->rows);
    args.logits = (const float *)k_cuda_at(a->logits);
    args.how = (const struct k_pick_row *)k_cuda_at(a->how);
    args.ids = (uint32_t *)k_cuda_at(a->ids);
    args.pieces = (struct piece *)k_cuda_at(a->scratch);
    args.n_vocab = a->n_vocab;
    args.n_pieces = (a->n_vocab + K_PICK_PIECE - 1) / K_PICK_PIECE;
    const dim3 grid(args.n_pieces, a->rows.max_rows);
    K_CUDA_LAUNCH_AHEAD(s, pick_best, grid, THREADS, 0, args);
    K_CUDA_LAUNCH_AHEAD(s, pick_weigh, grid, THREADS, 0, args);
    K_CUDA_LAUNCH_AHEAD(s, pick_draw, a->rows.max_rows, THREADS, 0, args);
    return ERR_OK;
}

/* Router and grouping (A13): which experts a row uses, and which rows an expert has. */
#include "k_cuda_route.cuh"

enum {
    ROUTER_WARPS = 4, /* rows of a block */
    SORT_THREADS =
        256,         /* grouping many: a block counts all pairs and places those of its experts, */
    SORT_EXPERTS = 8 /* one expert a warp */
};

/* ---- router ---------------------------------------------------------------------------------- */

template <int VALUES> static __global__ void router_few(const struct router_args a)
{
    const uint32_t row = blockIdx.x * ROUTER_WARPS + threadIdx.x / 32;
    if (row < a.rows.max_rows)
        router_row<VALUES>(a, row, *a.rows.n_rows, a.logits + (uint64_t)row * a.n_expert,
                           a.ids + (uint64_t)row * a.n_used, NULL);
}

static __global__ void router_many(const struct router_args a)
{
    __shared__ uint32_t keys[K_MAX_EXPERTS];
    router_row<0>(a, blockIdx.x, *a.rows.n_rows, a.logits + (uint64_t)blockIdx.x * a.n_expert,
                  a.ids + (uint64_t)blockIdx.x * a.n_used, keys);
}

extern "C" enum err_code k_cuda_router(const struct k_router *a, struct k_stream *s)
{
    const struct router_args args = router_args_of(a);
    const uint32_t blocks = (a->rows.max_rows + ROUTER_WARPS - 1) / ROUTER_WARPS;
    if (a->n_expert <= 128)
        K_CUDA_LAUNCH(s, router_few<4>, blocks, 32 * ROUTER_WARPS, 0, args);
    else if (a->n_expert <= 512)
        K_CUDA_LAUNCH(s, router_few<16>, blocks, 32 * ROUTER_WARPS, 0, args);
    else
        K_CUDA_LAUNCH(s, router_many, a->rows.max_rows, 32, 0, args);
    return ERR_OK;
}

/* ---- grouping -------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(FEW_PAIRS) grouping_few(const struct grouping_args a)
{
    const uint32_t n_pairs = *a.n_rows * a.n_used;
    grouping_pairs(a, n_pairs, threadIdx.x < n_pairs ? a.ids[threadIdx.x] : UINT32_MAX);
}

/* Experts of pairs p .. p + 3; UINT32_MAX: there is no such pair. */
static __device__ __forceinline__ uint4 grouping_four(const struct grouping_args &a, uint32_t p,
                                                      uint32_t n_pairs)
{
    if (p + 4 <= n_pairs)
        return *(const uint4 *)(const void *)(a.ids + p);
    return make_uint4(p < n_pairs ? a.ids[p] : UINT32_MAX,
                      p + 1 < n_pairs ? a.ids[p + 1] : UINT32_MAX,
                      p + 2 < n_pairs ? a.ids[p + 2] : UINT32_MAX, UINT32_MAX);
}

/* Writes the pairs of one expert in their order, by one warp; four neighbours a lane. */
static __device__ __forceinline__ void grouping_place(const struct grouping_args &a,
                                                      uint32_t expert, uint32_t n_pairs,
                                                      uint32_t first)
{
    const uint32_t lane = threadIdx.x % 32, before = (1u << lane) - 1;
#pragma unroll 4
    for (uint32_t base = 0; base < n_pairs; base += 128) {
        const uint32_t p = base + 4 * lane;
        const uint4 ids = grouping_four(a, p, n_pairs);
        const bool here[4] = {ids.x == expert, ids.y == expert, ids.z == expert, ids.w == expert};
        uint32_t at = first;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t all = __ballot_sync(K_CUDA_WARP_ALL, here[k]);
            at += (uint32_t)__popc(all & before);
            first += (uint32_t)__popc(all);
        }
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            if (here[k])
                a.order[at++] = p + k;
    }
}

/* Each block counts the pairs of all experts (integers: any order), then each of its warps sums
 * what lies below its expert and places that expert's pairs. */
static __global__ void __launch_bounds__(SORT_THREADS) grouping_many(const struct grouping_args a)
{
    __shared__ uint32_t count[K_MAX_EXPERTS];
    const uint32_t t = threadIdx.x, lane = t % 32, n_pairs = *a.n_rows * a.n_used;
    for (uint32_t x = t; x < a.n_expert; x += SORT_THREADS)
        count[x] = 0;
    __syncthreads();
#pragma unroll 2
    for (uint32_t p = 4 * t; p < n_pairs; p += 4 * SORT_THREADS) {
        const uint4 ids = grouping_four(a, p, n_pairs);
        atomicAdd(&count[ids.x], 1u);
        if (p + 1 < n_pairs)
            atomicAdd(&count[ids.y], 1u);
        if (p + 2 < n_pairs)
            atomicAdd(&count[ids.z], 1u);
        if (p + 3 < n_pairs)
            atomicAdd(&count[ids.w], 1u);
    }
    __syncthreads();
    const uint32_t expert = blockIdx.x * SORT_EXPERTS + t / 32;
    if (expert >= a.n_expert)
        return;
    uint32_t first = 0, group = 0;
    for (uint32_t x = lane; x < expert; x += 32) {
        first += count[x];
        group += count[x] != 0;
    }
    first = __reduce_add_sync(K_CUDA_WARP_ALL, first);
    group = __reduce_add_sync(K_CUDA_WARP_ALL, group);
    const uint32_t mine = count[expert];
    if (lane == 0 && expert == a.n_expert - 1)
        *a.n_groups = group + (mine != 0);
    if (mine == 0)
        return;
    if (lane == 0) {
        a.groups[group].expert = expert;
        a.groups[group].first = first;
        a.groups[group].count = mine;
    }
    grouping_place(a, expert, n_pairs, first);
}

extern "C" enum err_code k_cuda_grouping(const struct k_grouping *a, struct k_stream *s)
{
    const struct grouping_args args = grouping_args_of(a);
    const uint64_t pairs = (uint64_t)a->rows.max_rows * a->n_used;
    if (pairs <= FEW_PAIRS)
        K_CUDA_LAUNCH(s, grouping_few, 1, (uint32_t)(pairs + 31) / 32 * 32, 0, args);
    else
        K_CUDA_LAUNCH(s, grouping_many, (a->n_expert + SORT_EXPERTS - 1) / SORT_EXPERTS,
                      SORT_THREADS, 0, args);
    return ERR_OK;
}

/* The work list of the expert kernels: which rows of which expert a block computes, found on the
 * device from the step's groups. */
#ifndef ISLET_K_CUDA_PREFILL_GROUPS_CUH
#define ISLET_K_CUDA_PREFILL_GROUPS_CUH

#include "k_cuda.cuh"

/* Device addresses. */
struct k_prefill_groups {
    const struct k_group *groups;
    const uint32_t *order, *n_selected, *selected;
    const uint64_t *slots;
    const uint8_t *arena;
    uint32_t n_used;
};

static inline struct k_prefill_groups k_prefill_groups_of(const struct k_experts *x,
                                                          struct k_span groups, struct k_span order,
                                                          struct k_span n_selected,
                                                          struct k_span selected)
{
    struct k_prefill_groups g;
    g.groups = (const struct k_group *)k_cuda_at(groups);
    g.order = (const uint32_t *)k_cuda_at(order);
    g.n_selected = (const uint32_t *)k_cuda_at(n_selected);
    g.selected = (const uint32_t *)k_cuda_at(selected);
    g.slots = (const uint64_t *)k_cuda_at(x->slots);
    g.arena = x->arena->data;
    g.n_used = x->n_used;
    return g;
}

/* No more than this many pieces of `rows` rows cover the pairs of every grouping: each group's last
 * piece may be short. */
static inline uint32_t k_prefill_groups_bound(const struct k_experts *x, uint32_t max_rows,
                                              uint32_t rows)
{
    const uint32_t pairs = max_rows * x->n_used, groups = pairs < x->n_expert ? pairs : x->n_expert;
    return pairs / rows + groups;
}

/* Pairs a block takes, as a power of 2: `most`, or 32 where an expert has no more on average. */
static inline uint32_t k_prefill_groups_shift(const struct k_experts *x, uint32_t max_rows,
                                              uint32_t most)
{
    return (uint64_t)max_rows * x->n_used > (uint64_t)32 * x->n_expert ? most : 5;
}

struct k_prefill_piece {
    uint32_t expert, first, count; /* pairs order[first .. first + count) */
};

/* Cuts the selected groups into pieces of 1 << shift pairs and gives number `index` of them; false:
 * there are fewer. Called by whole warps. */
static __device__ __forceinline__ bool k_prefill_groups_find(const struct k_prefill_groups &g,
                                                             uint32_t index, uint32_t shift,
                                                             struct k_prefill_piece &ret)
{
    const uint32_t lane = threadIdx.x % 32, n = *g.n_selected;
    uint32_t before = 0; /* pieces of the groups seen */
    for (uint32_t base = 0; base < n; base += 32) {
        struct k_group mine = {0, 0, 0};
        if (base + lane < n)
            mine = g.groups[g.selected[base + lane]];
        const uint32_t pieces = (mine.count + (1u << shift) - 1) >> shift;
        uint32_t upto = pieces; /* of lanes 0..lane */
        for (uint32_t o = 1; o < 32; o *= 2) {
            const uint32_t other = __shfl_up_sync(0xffffffffu, upto, o);
            upto += lane >= o ? other : 0;
        }
        const uint32_t all = __shfl_sync(0xffffffffu, upto, 31);
        if (index < before + all) {
            const uint32_t owners = __ballot_sync(0xffffffffu, index < before + upto);
            const int owner = __ffs((int)owners) - 1;
            const uint32_t skipped = __shfl_sync(0xffffffffu, before + upto - pieces, owner);
            const uint32_t at = (index - skipped) << shift;
            const uint32_t left = __shfl_sync(0xffffffffu, mine.count, owner) - at;
            ret.expert = __shfl_sync(0xffffffffu, mine.expert, owner);
            ret.first = __shfl_sync(0xffffffffu, mine.first, owner) + at;
            ret.count = left < 1u << shift ? left : 1u << shift;
            return true;
        }
        before += all;
    }
    return false;
}

#endif

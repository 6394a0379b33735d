/* Prefill of the experts' first half: h = swiglu(gate . x, up . x) for the selected groups' pairs.
 * A warp computes the same 16 outputs of gate and of up. */
#include "k_cuda_prefill.cuh"
#include "k_cuda_prefill_block.cuh"
#include "k_cuda_prefill_groups.cuh"

namespace
{

struct gate_up {
    struct k_prefill_groups groups;
    const uint8_t *act;
    float *h; /* [pairs][n_ff] */
    uint32_t n_embd, n_ff;
    uint32_t shift; /* rows a block: 1 << shift */
};

template <enum k_format F, uint32_t ROWS, int NT>
__device__ __forceinline__ void compute(struct k_prefill_shared<F, ROWS> &shared,
                                        const struct k_prefill_job &job, const struct gate_up &p,
                                        uint32_t stripe)
{
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float acc[K_PREFILL_TILES][NT][4];
    k_prefill_product<F, ROWS, NT>(acc, shared, job);
    if (16 * stripe >= p.n_ff)
        return;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint32_t r = 8 * n + 2 * t + c;
            if (r >= job.n_rows)
                continue;
            float *h = p.h + (uint64_t)shared.rows.to[r] * p.n_ff + 16 * stripe + g;
            h[0] = k_float_swiglu(acc[0][n][c], acc[1][n][c]);
            h[8] = k_float_swiglu(acc[0][n][c + 2], acc[1][n][c + 2]);
        }
}

template <enum k_format F, uint32_t ROWS>
__global__ void __launch_bounds__(K_PREFILL_THREADS, k_prefill_beside(ROWS))
    gate_up_rows(const struct gate_up p)
{
    extern __shared__ __align__(1024) uint8_t k_prefill_memory[];
    struct k_prefill_shared<F, ROWS> &shared =
        *(struct k_prefill_shared<F, ROWS> *)(void *)k_prefill_memory;
    struct k_prefill_piece piece;
    if (!k_prefill_groups_find(p.groups, blockIdx.y, p.shift, piece))
        return;
    if (threadIdx.x < ROWS) {
        const uint32_t last = piece.count - 1, i = threadIdx.x < last ? threadIdx.x : last;
        const uint32_t pair = p.groups.order[piece.first + i];
        shared.rows.from[threadIdx.x] = pair / p.groups.n_used;
        shared.rows.to[threadIdx.x] = pair;
    }
    __syncthreads();
    const uint32_t last = p.n_ff / K_CUDA_TILE_OUTPUTS - 1;
    const uint32_t stripe = blockIdx.x * K_PREFILL_WARPS + threadIdx.x / 32;
    struct k_prefill_job job;
    for (uint32_t m = 0; m < K_PREFILL_TILES; m++) /* gate, up */
        job.tiles[m] = p.groups.arena + p.groups.slots[3 * piece.expert + m] +
                       k_cuda_tile_offset(F, p.n_embd, stripe < last ? stripe : last, 0);
    job.act = p.act;
    job.n_in = p.n_embd;
    job.n_rows = piece.count;
    if constexpr (ROWS == 64) {
        if (piece.count > 48)
            return compute<F, ROWS, 8>(shared, job, p, stripe);
        if (piece.count > 32)
            return compute<F, ROWS, 6>(shared, job, p, stripe);
    }
    if (ROWS == 64 || piece.count > 16)
        return compute<F, ROWS, 4>(shared, job, p, stripe);
    return compute<F, ROWS, 2>(shared, job, p, stripe);
}

template <enum k_format F> void launch(const struct gate_up &p, uint32_t pieces, struct k_stream *s)
{
    const uint32_t outputs = K_PREFILL_OUTPUTS / K_PREFILL_TILES;
    const dim3 grid((p.n_ff + outputs - 1) / outputs, pieces), block(K_PREFILL_THREADS);
    if (p.shift == 6)
        K_CUDA_LAUNCH(s, (gate_up_rows<F, 64>), grid, block, sizeof(struct k_prefill_shared<F, 64>),
                      p);
    else
        K_CUDA_LAUNCH(s, (gate_up_rows<F, 32>), grid, block, sizeof(struct k_prefill_shared<F, 32>),
                      p);
}

void launch_format(enum k_format format, const struct gate_up &p, uint32_t pieces,
                   struct k_stream *s)
{
    switch (format) {
    case K_Q4_0:
        return launch<K_Q4_0>(p, pieces, s);
    case K_Q8_0:
        return launch<K_Q8_0>(p, pieces, s);
    case K_Q4_K:
        return launch<K_Q4_K>(p, pieces, s);
    case K_Q5_K:
        return launch<K_Q5_K>(p, pieces, s);
    case K_Q6_K:
        return launch<K_Q6_K>(p, pieces, s);
    default:
        return;
    }
}

} // namespace

extern "C" enum err_code k_cuda_moe_gate_up_prefill(const struct k_moe_gate_up *a,
                                                    struct k_stream *s)
{
    const struct k_experts *x = &a->experts;
    if (x->gate != x->up || !k_cuda_tile_arranged(x->gate, x->n_ff, x->n_embd))
        return ERR_UNSUPPORTED;
    const struct k_span act = k_format_form(x->gate) == K_FORM_Q32 ? a->x.q32 : a->x.q256;
    struct gate_up p = {};
    p.groups = k_prefill_groups_of(x, a->groups, a->order, a->n_selected, a->selected);
    p.act = (const uint8_t *)k_cuda_at(act);
    p.h = (float *)k_cuda_at(a->h.f32);
    p.n_embd = x->n_embd;
    p.n_ff = x->n_ff;
    p.shift = k_prefill_groups_shift(x, a->rows.max_rows,
                                     k_prefill_most_shift(x->gate, k_cuda_of(s->device)));
    launch_format(x->gate, p, k_prefill_groups_bound(x, a->rows.max_rows, 1u << p.shift), s);

    return ERR_OK;
}

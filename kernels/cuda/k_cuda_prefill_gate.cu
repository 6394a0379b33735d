/* Prefill of the experts' first half: h = swiglu(gate . x, up . x) for the selected groups' pairs, then
 * h quantised for `down`. A warp computes the same 16 outputs of gate and of up. */
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

template <enum k_format F, int NT>
__device__ __forceinline__ void compute(struct k_prefill_shared<F> &shared,
                                        const struct k_prefill_job &job, const struct gate_up &p,
                                        uint32_t stripe)
{
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float acc[K_PREFILL_TILES][NT][4];
    k_prefill_product<F, NT>(acc, shared, job);
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

template <enum k_format F>
__global__ void __launch_bounds__(K_PREFILL_THREADS, K_PREFILL_BESIDE)
    gate_up_rows(const struct gate_up p)
{
    extern __shared__ __align__(1024) uint8_t k_prefill_memory[];
    struct k_prefill_shared<F> &shared = *(struct k_prefill_shared<F> *)(void *)k_prefill_memory;
    struct k_prefill_piece piece;
    if (!k_prefill_groups_find(p.groups, blockIdx.y, p.shift, piece))
        return;
    if (threadIdx.x < K_PREFILL_ROWS) {
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
    if (piece.count > 32)
        compute<F, 8>(shared, job, p, stripe);
    else if (piece.count > 16)
        compute<F, 4>(shared, job, p, stripe);
    else
        compute<F, 2>(shared, job, p, stripe);
}

template <enum k_format F> void launch(const struct gate_up &p, uint32_t pieces, struct k_stream *s)
{
    const uint32_t outputs = K_PREFILL_OUTPUTS / K_PREFILL_TILES;
    K_CUDA_LAUNCH(s, (gate_up_rows<F>), dim3((p.n_ff + outputs - 1) / outputs, pieces),
                  dim3(K_PREFILL_THREADS), sizeof(struct k_prefill_shared<F>), p);
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

/* ---- h in the form that `down` reads (A4) ---------------------------------------------------- */

enum {
    QUANTISE_WARPS = 8, /* of a block: a pair each */
    QUANTISE_SHIFT = 3,
    VALUES = 8 /* of a lane, next to each other */
};

struct quantise {
    struct k_prefill_groups groups;
    const float *h;
    uint8_t *q32, *q256; /* NULL: not wanted */
    uint32_t *faults;
    uint32_t n_ff;
};

/* Eight values of a block whose largest magnitude is m (as bits): q's, their sum; gives dx. */
__device__ __forceinline__ float quantise_eight(const float (&x)[VALUES], uint32_t m,
                                                uint32_t (&q)[2], int32_t &sum)
{
    q[0] = q[1] = 0;
    sum = 0;
    if (m >= 0x7f800000u || m < 0x0d800000u) /* not finite, or below 2^-100 */
        return 0.0f;
    const float largest = k_float_of_bits(m), inv = k_float_div(127.0f, largest);
    for (int i = 0; i < VALUES; i++) {
        const int32_t v = k_float_rint(k_float_mul(x[i], inv));
        sum += v;
        q[i / 4] |= ((uint32_t)v & 255u) << (8 * (i % 4));
    }
    return k_float_div(largest, 127.0f);
}

/* Block `b` of 256 values of a pair's h, `mine` those of this lane; a lane beyond the row has zeros and
 * writes nothing. Called by whole warps. */
template <enum k_form FORM>
__device__ __forceinline__ void quantise_block(const float (&mine)[VALUES], uint32_t m,
                                               uint8_t *row, uint32_t n, uint32_t b)
{
    const uint32_t lane = threadIdx.x % 32, first = 256 * b + VALUES * lane;
    uint32_t q[2];
    int32_t sum;
    const float dx = quantise_eight(mine, m, q, sum);
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (first >= n)
        return;
    *(uint2 *)(void *)(k_cuda_act_q(row) + first) = make_uint2(q[0], q[1]);
    if (lane % 4 == 0)
        k_cuda_act_sum(FORM, row, n)[first / 32] = (int16_t)sum;
    if (FORM == K_FORM_Q32 && lane % 4 == 0)
        k_cuda_act_dx(row, n)[first / 32] = dx;
    if (FORM == K_FORM_Q256 && lane == 0)
        k_cuda_act_dx(row, n)[b] = dx;
}

__global__ void __launch_bounds__(32 * QUANTISE_WARPS) quantise_pairs(const struct quantise p)
{
    struct k_prefill_piece piece;
    if (!k_prefill_groups_find(p.groups, blockIdx.x, QUANTISE_SHIFT, piece))
        return;
    const uint32_t lane = threadIdx.x % 32, n = p.n_ff;
    if (threadIdx.x / 32 >= piece.count)
        return;
    const uint32_t pair = p.groups.order[piece.first + threadIdx.x / 32];
    const float *h = p.h + (uint64_t)pair * n;
    bool fault = false;
    for (uint32_t b = 0; 256 * b < n; b++) {
        const uint32_t first = 256 * b + VALUES * lane;
        float mine[VALUES];
        uint32_t m = 0;
        for (int i = 0; i < VALUES; i++) {
            mine[i] = first < n ? h[first + i] : 0.0f;
            const uint32_t magnitude = k_float_bits(mine[i]) & 0x7fffffffu;
            m = magnitude > m ? magnitude : m;
        }
        m = max(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = max(m, __shfl_xor_sync(0xffffffffu, m, 2));
        if (p.q32 != NULL)
            quantise_block<K_FORM_Q32>(mine, m, p.q32 + k_cuda_act_stride(K_FORM_Q32, n) * pair, n,
                                       b);
        m = __reduce_max_sync(0xffffffffu, m);
        if (p.q256 != NULL)
            quantise_block<K_FORM_Q256>(mine, m, p.q256 + k_cuda_act_stride(K_FORM_Q256, n) * pair,
                                        n, b);
        fault |= m >= 0x7f800000u;
    }
    if (fault && lane == 0)
        p.faults[pair / p.groups.n_used] = 1;
}

} // namespace

extern "C" enum err_code k_cuda_moe_gate_up_prefill(const struct k_moe_gate_up *a,
                                                    struct k_stream *s)
{
    const struct k_experts *x = &a->experts;
    if (x->gate != x->up || !k_prefill_takes(s, x->gate, x->n_ff, x->n_embd))
        return ERR_UNSUPPORTED;
    const struct k_span act = k_format_form(x->gate) == K_FORM_Q32 ? a->x.q32 : a->x.q256;
    struct gate_up p = {};
    p.groups = k_prefill_groups_of(x, a->groups, a->order, a->n_selected, a->selected);
    p.act = (const uint8_t *)k_cuda_at(act);
    p.h = (float *)k_cuda_at(a->h.f32);
    p.n_embd = x->n_embd;
    p.n_ff = x->n_ff;
    p.shift = 6;
    launch_format(x->gate, p, k_prefill_groups_bound(x, a->rows.max_rows, 1u << p.shift), s);

    struct quantise q = {};
    q.groups = p.groups;
    q.h = p.h;
    q.q32 = (uint8_t *)k_cuda_at(a->h.q32);
    q.q256 = (uint8_t *)k_cuda_at(a->h.q256);
    q.faults = (uint32_t *)k_cuda_at(a->rows.faults);
    q.n_ff = x->n_ff;
    if (q.q32 != NULL || q.q256 != NULL)
        K_CUDA_LAUNCH(s, quantise_pairs,
                      dim3(k_prefill_groups_bound(x, a->rows.max_rows, 1u << QUANTISE_SHIFT)),
                      dim3(32 * QUANTISE_WARPS), 0, q);
    return ERR_OK;
}

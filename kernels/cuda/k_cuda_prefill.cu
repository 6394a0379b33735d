/* Prefill products of dense matrices and of the experts' `down`: one kernel a format, for up to
 * four matrices of that format with the same input. */
#include "k_cuda_prefill.cuh"
#include "k_cuda_prefill_block.cuh"
#include "k_cuda_prefill_groups.cuh"

namespace
{

struct part {
    const uint8_t *weights; /* arranged; unused with experts */
    float *y;
    uint32_t n_out, first; /* block column at which it begins */
};

struct product {
    struct part parts[K_MATMUL_MAX];
    uint32_t n_parts;
    const uint8_t *act;
    uint32_t n_in;
    uint32_t shift;                 /* rows a block: 1 << shift, 16 to 64 */
    const uint32_t *n_rows;         /* dense; NULL with experts */
    struct k_prefill_groups groups; /* experts: rows are pairs */
};

/* The block's piece of rows; false if there is none. Of dense rows `first` is the row itself. */
__device__ __forceinline__ bool find_rows(const struct product &p, struct k_prefill_piece &piece)
{
    if (p.n_rows == NULL)
        return k_prefill_groups_find(p.groups, blockIdx.y, p.shift, piece);
    const uint32_t n = *p.n_rows, first = blockIdx.y << p.shift;
    piece.expert = 0;
    piece.first = first;
    piece.count = n - first < 1u << p.shift ? n - first : 1u << p.shift;
    return first < n;
}

template <enum k_format F, uint32_t ROWS, int NT>
__device__ __forceinline__ void compute(struct k_prefill_shared<F, ROWS> &shared,
                                        const struct k_prefill_job &job, const struct part &part,
                                        uint32_t stripe)
{
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float acc[K_PREFILL_TILES][NT][4];
    k_prefill_product<F, ROWS, NT>(acc, shared, job);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint32_t r = 8 * n + 2 * t + c;
            if (r >= job.n_rows)
                continue;
            float *y = part.y + (uint64_t)shared.rows.to[r] * part.n_out + 16 * stripe + g;
            for (int m = 0; m < K_PREFILL_TILES; m++)
                if (16 * (stripe + m) < part.n_out) {
                    y[16 * m] = acc[m][n][c];
                    y[16 * m + 8] = acc[m][n][c + 2];
                }
        }
}

template <enum k_format F, uint32_t ROWS>
__global__ void __launch_bounds__(K_PREFILL_THREADS, k_prefill_beside(ROWS))
    multiply(const struct product p)
{
    extern __shared__ __align__(1024) uint8_t k_prefill_memory[];
    struct k_prefill_shared<F, ROWS> &shared =
        *(struct k_prefill_shared<F, ROWS> *)(void *)k_prefill_memory;
    struct k_prefill_piece piece;
    if (!find_rows(p, piece))
        return;
    if (threadIdx.x < ROWS) {
        const uint32_t last = piece.count - 1, i = threadIdx.x < last ? threadIdx.x : last;
        const uint32_t row = p.n_rows == NULL ? p.groups.order[piece.first + i] : piece.first + i;
        shared.rows.from[threadIdx.x] = shared.rows.to[threadIdx.x] = row;
    }
    __syncthreads();
    uint32_t which = 0;
    while (which + 1 < p.n_parts && blockIdx.x >= p.parts[which + 1].first)
        which++;
    const struct part &part = p.parts[which];
    const uint32_t last = part.n_out / K_CUDA_TILE_OUTPUTS - 1;
    const uint32_t stripe =
        ((blockIdx.x - part.first) * K_PREFILL_WARPS + threadIdx.x / 32) * K_PREFILL_TILES;
    const uint8_t *weights =
        p.n_rows == NULL ? p.groups.arena + p.groups.slots[3 * piece.expert + 2] : part.weights;
    struct k_prefill_job job;
    for (uint32_t m = 0; m < K_PREFILL_TILES; m++)
        job.tiles[m] =
            weights + k_cuda_tile_offset(F, p.n_in, stripe + m < last ? stripe + m : last, 0);
    job.act = p.act;
    job.n_in = p.n_in;
    job.n_rows = piece.count;
    if constexpr (ROWS == 64) {
        if (piece.count > 48)
            return compute<F, ROWS, 8>(shared, job, part, stripe);
        if (piece.count > 32)
            return compute<F, ROWS, 6>(shared, job, part, stripe);
    }
    if (ROWS == 64 || piece.count > 16)
        return compute<F, ROWS, 4>(shared, job, part, stripe);
    return compute<F, ROWS, 2>(shared, job, part, stripe);
}

template <enum k_format F>
void launch(const struct product &p, uint32_t columns, uint32_t pieces, struct k_stream *s)
{
    const dim3 grid(columns, pieces), block(K_PREFILL_THREADS);
    if (p.shift == 6)
        K_CUDA_LAUNCH(s, (multiply<F, 64>), grid, block, sizeof(struct k_prefill_shared<F, 64>), p);
    else
        K_CUDA_LAUNCH(s, (multiply<F, 32>), grid, block, sizeof(struct k_prefill_shared<F, 32>), p);
}

void launch_format(enum k_format format, const struct product &p, uint32_t columns, uint32_t pieces,
                   struct k_stream *s)
{
    switch (format) {
    case K_Q4_0:
        return launch<K_Q4_0>(p, columns, pieces, s);
    case K_Q8_0:
        return launch<K_Q8_0>(p, columns, pieces, s);
    case K_Q4_K:
        return launch<K_Q4_K>(p, columns, pieces, s);
    case K_Q5_K:
        return launch<K_Q5_K>(p, columns, pieces, s);
    case K_Q6_K:
        return launch<K_Q6_K>(p, columns, pieces, s);
    default:
        return;
    }
}

/* Rows a block takes of dense matrices, as a power of 2: as many as it can, fewer while that leaves
 * multiprocessors without a block. */
uint32_t dense_shift(const struct k_stream *s, enum k_format format, uint32_t columns,
                     uint32_t max_rows)
{
    const struct k_cuda *device = k_cuda_of(s->device);
    uint32_t shift = k_prefill_most_shift(format, device);
    while (shift > 4 &&
           (uint64_t)columns * ((max_rows + (1u << shift) - 1) >> shift) < device->sm_count)
        shift--;
    return shift;
}

const uint8_t *act_of(const struct k_act *act, enum k_format format)
{
    return (const uint8_t *)k_cuda_at(k_format_form(format) == K_FORM_Q32 ? act->q32 : act->q256);
}

uint32_t columns_of(uint32_t n_out)
{
    return (n_out + K_PREFILL_OUTPUTS - 1) / K_PREFILL_OUTPUTS;
}

/* Multiplies those of the matrices that have this format. */
void multiply_format(const struct k_matmul *a, enum k_format format, struct k_stream *s)
{
    struct product p = {};
    uint32_t columns = 0;
    for (uint32_t m = 0; m < a->n_matrices; m++) {
        const struct k_matrix *w = &a->w[m];
        if (w->format != format)
            continue;
        struct part *part = &p.parts[p.n_parts++];
        part->weights = (const uint8_t *)k_cuda_at(w->data);
        part->y = (float *)k_cuda_at(a->y[m]);
        part->n_out = w->n_out;
        part->first = columns;
        columns += columns_of(w->n_out);
    }
    if (p.n_parts == 0)
        return;
    p.act = act_of(&a->act, format);
    p.n_in = a->act.n;
    p.shift = dense_shift(s, format, columns, a->rows.max_rows);
    p.n_rows = (const uint32_t *)k_cuda_at(a->rows.n_rows);
    launch_format(format, p, columns, (a->rows.max_rows + (1u << p.shift) - 1) >> p.shift, s);
}

} // namespace

extern "C" enum err_code k_cuda_matmul_prefill(const struct k_matmul *a, struct k_stream *s)
{
    static const enum k_format formats[] = {K_Q4_0, K_Q8_0, K_Q4_K, K_Q5_K, K_Q6_K};
    for (uint32_t m = 0; m < a->n_matrices; m++)
        if (!k_cuda_tile_arranged(a->w[m].format, a->w[m].n_out, a->w[m].n_in))
            return ERR_UNSUPPORTED;
    for (const enum k_format format : formats)
        multiply_format(a, format, s);
    return ERR_OK;
}

extern "C" enum err_code k_cuda_moe_down_prefill(const struct k_moe_down *a, struct k_stream *s)
{
    const struct k_experts *x = &a->experts;
    if (!k_cuda_tile_arranged(x->down, x->n_embd, x->n_ff))
        return ERR_UNSUPPORTED;
    struct product p = {};
    p.n_parts = 1;
    p.parts[0].y = (float *)k_cuda_at(a->out);
    p.parts[0].n_out = x->n_embd;
    p.act = act_of(&a->h, x->down);
    p.n_in = x->n_ff;
    p.shift = k_prefill_groups_shift(x, a->rows.max_rows,
                                     k_prefill_most_shift(x->down, k_cuda_of(s->device)));
    p.groups = k_prefill_groups_of(x, a->groups, a->order, a->n_selected, a->selected);
    launch_format(x->down, p, columns_of(x->n_embd),
                  k_prefill_groups_bound(x, a->rows.max_rows, 1u << p.shift), s);
    return ERR_OK;
}

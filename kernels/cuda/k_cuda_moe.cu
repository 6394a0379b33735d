/* The experts' products for the groups that `selected` names, few rows each: arranged weights by the
 * decode kernels, what is not arranged by the plain ones; with many rows the prefill kernels take over
 * where they can. A block belongs to one group; blocks beyond *n_selected return at once. */
#include "k_cuda_decode.cuh"
#include "k_cuda_plain.cuh"
#include "k_cuda_prefill.cuh"
#include "k_cuda_prefill_groups.cuh"
#include "k_cuda_quantise.cuh"

namespace
{

/* What a block finds out about its group. */
struct found {
    struct k_group group;
    const uint8_t *slice[2];
};

/* `which`: slices of an expert, 0 gate, 1 up, 2 down. False: no such group. */
__device__ __forceinline__ bool find(const struct k_prefill_groups &g, uint32_t index,
                                     uint32_t which, struct found &ret)
{
    if (index >= *g.n_selected)
        return false;
    ret.group = g.groups[g.selected[index]];
    const uint64_t *slots = g.slots + 3 * (uint64_t)ret.group.expert;
    ret.slice[0] = g.arena + slots[which];
    ret.slice[1] = g.arena + slots[which == 0 ? 1 : which];
    return true;
}

uint32_t groups_bound(const struct k_experts *x, uint32_t max_rows)
{
    const uint64_t pairs = (uint64_t)max_rows * x->n_used;
    return pairs < x->n_expert ? (uint32_t)pairs : x->n_expert;
}

/* ---- gate and up of one format, together ----------------------------------------------------- */

struct gate_up {
    struct k_prefill_groups groups;
    const uint8_t *act;
    float *h; /* [pairs][n_ff] */
    uint32_t n_embd, n_ff;
    struct k_cuda_decode_shape shape;
};

template <enum k_format F, int COLUMNS>
__global__ void __launch_bounds__(K_CUDA_DECODE_THREADS, K_CUDA_DECODE_BLOCKS)
    gate_up_few(const struct gate_up p)
{
    extern __shared__ __align__(128) uint8_t k_cuda_decode_memory[];
    struct found e;
    if (!find(p.groups, blockIdx.y, 0, e))
        return;
    const uint32_t stripe = blockIdx.x * p.shape.stripes;
    struct k_cuda_decode_stripes stripes;
    stripes.sets = 2;
    stripes.count = min(p.shape.stripes, p.n_ff / K_CUDA_TILE_OUTPUTS - stripe);
    stripes.format = F;
    for (int m = 0; m < 2; m++)
        stripes.first[m] = e.slice[m] + k_cuda_tile_offset(F, p.n_embd, stripe, 0);
    const struct k_cuda_decode_shared shared =
        k_cuda_decode_carve(k_cuda_decode_memory, p.shape, 2, COLUMNS);
    const uint64_t act_stride = k_cuda_act_stride(k_cuda_decode_form(F), p.n_embd);
    const uint32_t results = stripes.count * 16 * COLUMNS;
    const uint32_t *pairs = p.groups.order + e.group.first;
    auto row = [&](uint32_t c) { return p.act + pairs[c] / p.groups.n_used * act_stride; };
    k_cuda_decode<F, COLUMNS>(shared, p.shape, stripes, p.n_embd, e.group.count, row);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < results; i += K_CUDA_DECODE_THREADS)
        if (i % COLUMNS < e.group.count)
            p.h[(uint64_t)pairs[i % COLUMNS] * p.n_ff + stripe * 16 + i / COLUMNS] =
                k_float_swiglu(shared.acc[i], shared.acc[i + results]);
}

/* ---- one matrix of each expert --------------------------------------------------------------- */

struct product {
    struct k_prefill_groups groups;
    const uint8_t *act;
    float *y;         /* [pairs][n_out] */
    uint32_t which;   /* slice of the expert */
    bool act_by_pair; /* activations are rows of pairs (h), not of tokens */
    bool with_gate;   /* y has gate's results, this is up: y = swiglu(y, result) */
    uint32_t n_in, n_out;
    uint64_t row_bytes, act_stride; /* plain kernels */
    struct k_cuda_decode_shape shape;
};

__device__ __forceinline__ const uint8_t *act_of_pair(const struct product &p, uint32_t pair)
{
    return p.act + (p.act_by_pair ? pair : pair / p.groups.n_used) * p.act_stride;
}

__device__ __forceinline__ void put(const struct product &p, uint32_t pair, uint32_t o, float value)
{
    float *y = p.y + (uint64_t)pair * p.n_out + o;
    *y = p.with_gate ? k_float_swiglu(*y, value) : value;
}

template <enum k_format F, int COLUMNS>
__global__ void __launch_bounds__(K_CUDA_DECODE_THREADS, K_CUDA_DECODE_BLOCKS)
    product_few(const struct product p)
{
    extern __shared__ __align__(128) uint8_t k_cuda_decode_memory[];
    struct found e;
    if (!find(p.groups, blockIdx.y, p.which, e))
        return;
    const uint32_t stripe = blockIdx.x * p.shape.stripes;
    struct k_cuda_decode_stripes stripes;
    stripes.sets = 1;
    stripes.count = min(p.shape.stripes, p.n_out / K_CUDA_TILE_OUTPUTS - stripe);
    stripes.format = F;
    stripes.first[0] = e.slice[0] + k_cuda_tile_offset(F, p.n_in, stripe, 0);
    stripes.first[1] = NULL;
    const struct k_cuda_decode_shared shared =
        k_cuda_decode_carve(k_cuda_decode_memory, p.shape, 1, COLUMNS);
    for (uint32_t first = 0; first < e.group.count; first += COLUMNS) {
        const uint32_t *pairs = p.groups.order + e.group.first + first;
        const uint32_t count = min(e.group.count - first, (uint32_t)COLUMNS);
        auto row = [&](uint32_t c) { return act_of_pair(p, pairs[c]); };
        if (first > 0)
            __syncthreads();
        k_cuda_decode<F, COLUMNS>(shared, p.shape, stripes, p.n_in, count, row);
        for (uint32_t i = threadIdx.x; i < stripes.count * 16 * COLUMNS; i += K_CUDA_DECODE_THREADS)
            if (i % COLUMNS < count)
                put(p, pairs[i % COLUMNS], stripe * 16 + i / COLUMNS, shared.acc[i]);
    }
}

template <enum k_format F, int COLUMNS>
__global__ void __launch_bounds__(K_CUDA_PLAIN_THREADS) product_plain(const struct product p)
{
    struct found e;
    const uint32_t o = blockIdx.x * K_CUDA_PLAIN_WARPS + threadIdx.x / 32;
    if (o >= p.n_out || !find(p.groups, blockIdx.y, p.which, e))
        return;
    for (uint32_t first = 0; first < e.group.count; first += COLUMNS) {
        const uint32_t *pairs = p.groups.order + e.group.first + first;
        const uint32_t count = min(e.group.count - first, (uint32_t)COLUMNS);
        auto row = [&](uint32_t c) { return act_of_pair(p, pairs[c]); };
        float r[COLUMNS];
        k_cuda_plain<F, COLUMNS>(e.slice[0] + o * p.row_bytes, p.n_in, count, row, r);
        for (uint32_t c = 0; c < COLUMNS; c++)
            if (threadIdx.x % 32 == 0 && c < count)
                put(p, pairs[c], o, r[c]);
    }
}

/* ---- h in the form that `down` reads (A4) ---------------------------------------------------- */

struct quantise {
    struct k_prefill_groups groups;
    const float *h;
    uint8_t *q32, *q256; /* NULL: not wanted */
    uint32_t *faults;
    uint32_t n_ff;
};

enum {
    QUANTISE_WARPS = 8 /* of a block: each another pair */
};

/* Block (x, y): values 256 x .. of the pairs of group y. */
__global__ void __launch_bounds__(32 * QUANTISE_WARPS) quantise_pairs(const struct quantise p)
{
    struct found e;
    if (!find(p.groups, blockIdx.y, 0, e))
        return;
    const uint32_t first = blockIdx.x * 256 + threadIdx.x % 32 * K_CUDA_QUANTISE_VALUES;
    const bool present = first < p.n_ff;
    for (uint32_t i = threadIdx.x / 32; i < e.group.count; i += QUANTISE_WARPS) {
        const uint32_t pair = p.groups.order[e.group.first + i];
        const float4 *h = (const float4 *)(const void *)(p.h + (uint64_t)pair * p.n_ff + first);
        const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float4 low = present ? h[0] : zero, high = present ? h[1] : zero;
        const float v[K_CUDA_QUANTISE_VALUES] = {low.x,  low.y,  low.z,  low.w,
                                                 high.x, high.y, high.z, high.w};
        uint8_t *q32 = p.q32 == NULL ? NULL : p.q32 + pair * k_cuda_act_stride(K_FORM_Q32, p.n_ff);
        uint8_t *q256 =
            p.q256 == NULL ? NULL : p.q256 + pair * k_cuda_act_stride(K_FORM_Q256, p.n_ff);
        if (!k_cuda_quantise_block(v, q32, q256, p.n_ff, blockIdx.x, present))
            p.faults[pair / p.groups.n_used] = 1;
    }
}

void quantise_h(const struct k_moe_gate_up *a, const struct k_prefill_groups &groups,
                struct k_stream *s)
{
    struct quantise q = {};
    q.groups = groups;
    q.h = (const float *)k_cuda_at(a->h.f32);
    q.q32 = (uint8_t *)k_cuda_at(a->h.q32);
    q.q256 = (uint8_t *)k_cuda_at(a->h.q256);
    q.faults = (uint32_t *)k_cuda_at(a->rows.faults);
    q.n_ff = a->experts.n_ff;
    if (q.q32 != NULL || q.q256 != NULL)
        K_CUDA_LAUNCH(s, quantise_pairs,
                      dim3((q.n_ff + 255) / 256, groups_bound(&a->experts, a->rows.max_rows)),
                      dim3(32 * QUANTISE_WARPS), 0, q);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Everything of a launch but its kernel. */
struct launch {
    struct k_stream *stream;
    dim3 grid;
    uint32_t shared_bytes;
    bool one; /* column */
};

template <enum k_format F> void gate_up_launch(const struct launch &l, const struct gate_up &p)
{
    if (l.one)
        K_CUDA_LAUNCH(l.stream, (gate_up_few<F, 1>), l.grid, dim3(K_CUDA_DECODE_THREADS),
                      l.shared_bytes, p);
    else
        K_CUDA_LAUNCH(l.stream, (gate_up_few<F, 8>), l.grid, dim3(K_CUDA_DECODE_THREADS),
                      l.shared_bytes, p);
}

template <enum k_format F> void few_launch(const struct launch &l, const struct product &p)
{
    if (l.one)
        K_CUDA_LAUNCH(l.stream, (product_few<F, 1>), l.grid, dim3(K_CUDA_DECODE_THREADS),
                      l.shared_bytes, p);
    else
        K_CUDA_LAUNCH(l.stream, (product_few<F, 8>), l.grid, dim3(K_CUDA_DECODE_THREADS),
                      l.shared_bytes, p);
}

template <enum k_format F> void plain_launch(const struct launch &l, const struct product &p)
{
    if (l.one)
        K_CUDA_LAUNCH(l.stream, (product_plain<F, 1>), l.grid, dim3(K_CUDA_PLAIN_THREADS), 0, p);
    else
        K_CUDA_LAUNCH(l.stream, (product_plain<F, 8>), l.grid, dim3(K_CUDA_PLAIN_THREADS), 0, p);
}

/* The grid for `sets` matrices of n_out x n_in per group, and p's shape (of `gate_up` or
 * `product`). */
template <typename P>
struct launch few_of(P &p, const struct k_experts *x, uint32_t max_rows, enum k_format format,
                     uint32_t sets, uint32_t n_out, uint32_t n_in, struct k_stream *s)
{
    struct launch l = {};
    const uint32_t columns = max_rows == 1 ? 1 : 8, groups = groups_bound(x, max_rows);
    const uint32_t stripes = n_out / K_CUDA_TILE_OUTPUTS;
    p.shape = k_cuda_decode_choose(columns, k_cuda_tile_bytes(format), k_cuda_decode_blocks(format),
                                   sets, n_in / K_CUDA_TILE_INPUTS, (uint64_t)stripes * groups,
                                   k_cuda_of(s->device)->sm_count);
    l.stream = s;
    l.grid = dim3((stripes + p.shape.stripes - 1) / p.shape.stripes, groups);
    l.shared_bytes = k_cuda_decode_carve(NULL, p.shape, sets, columns).bytes;
    l.one = columns == 1;
    return l;
}

void multiply_few(struct product p, const struct k_experts *x, uint32_t max_rows,
                  enum k_format format, struct k_stream *s)
{
    const struct launch l = few_of(p, x, max_rows, format, 1, p.n_out, p.n_in, s);
    switch (format) {
    case K_Q4_0:
        return few_launch<K_Q4_0>(l, p);
    case K_Q8_0:
        return few_launch<K_Q8_0>(l, p);
    case K_Q4_K:
        return few_launch<K_Q4_K>(l, p);
    case K_Q5_K:
        return few_launch<K_Q5_K>(l, p);
    case K_Q6_K:
        return few_launch<K_Q6_K>(l, p);
    default:
        return;
    }
}

void multiply_plain(const struct product &p, const struct k_experts *x, uint32_t max_rows,
                    enum k_format format, struct k_stream *s)
{
    struct launch l = {};
    l.stream = s;
    l.grid =
        dim3((p.n_out + K_CUDA_PLAIN_WARPS - 1) / K_CUDA_PLAIN_WARPS, groups_bound(x, max_rows));
    l.one = max_rows == 1;
    switch (format) {
    case K_F32:
        return plain_launch<K_F32>(l, p);
    case K_F16:
        return plain_launch<K_F16>(l, p);
    case K_BF16:
        return plain_launch<K_BF16>(l, p);
    case K_Q4_0:
        return plain_launch<K_Q4_0>(l, p);
    case K_Q8_0:
        return plain_launch<K_Q8_0>(l, p);
    case K_Q4_K:
        return plain_launch<K_Q4_K>(l, p);
    case K_Q5_K:
        return plain_launch<K_Q5_K>(l, p);
    case K_Q6_K:
        return plain_launch<K_Q6_K>(l, p);
    }
}

/* p: all but what follows from the format and the activations. */
void multiply(struct product p, const struct k_experts *x, uint32_t max_rows, enum k_format format,
              const struct k_act *act, struct k_stream *s)
{
    const enum k_form form = k_format_form(format);
    p.act = (const uint8_t *)k_cuda_at(form == K_FORM_F32   ? act->f32
                                       : form == K_FORM_Q32 ? act->q32
                                                            : act->q256);
    p.act_stride = k_cuda_act_stride(form, p.n_in);
    p.row_bytes = k_format_bytes(format, 1, p.n_in);
    if (k_cuda_tile_arranged(format, p.n_out, p.n_in))
        multiply_few(p, x, max_rows, format, s);
    else
        multiply_plain(p, x, max_rows, format, s);
}

void gate_up_together(const struct k_moe_gate_up *a, const struct k_prefill_groups &groups,
                      struct k_stream *s)
{
    const struct k_experts *x = &a->experts;
    struct gate_up p = {};
    p.groups = groups;
    p.act = (const uint8_t *)k_cuda_at(k_format_form(x->gate) == K_FORM_Q32 ? a->x.q32 : a->x.q256);
    p.h = (float *)k_cuda_at(a->h.f32);
    p.n_embd = x->n_embd;
    p.n_ff = x->n_ff;
    const struct launch l = few_of(p, x, a->rows.max_rows, x->gate, 2, x->n_ff, x->n_embd, s);
    switch (x->gate) {
    case K_Q4_0:
        return gate_up_launch<K_Q4_0>(l, p);
    case K_Q8_0:
        return gate_up_launch<K_Q8_0>(l, p);
    case K_Q4_K:
        return gate_up_launch<K_Q4_K>(l, p);
    case K_Q5_K:
        return gate_up_launch<K_Q5_K>(l, p);
    case K_Q6_K:
        return gate_up_launch<K_Q6_K>(l, p);
    default:
        return;
    }
}

} // namespace

extern "C" enum err_code k_cuda_moe_gate_up(const struct k_moe_gate_up *a, struct k_stream *s)
{
    const struct k_experts *x = &a->experts;
    const bool together = x->gate == x->up && k_cuda_tile_arranged(x->gate, x->n_ff, x->n_embd);
    if (together && a->rows.max_rows > 8)
        return k_cuda_moe_gate_up_prefill(a, s);
    const struct k_prefill_groups groups =
        k_prefill_groups_of(x, a->groups, a->order, a->n_selected, a->selected);
    if (together) {
        gate_up_together(a, groups, s);
    } else {
        struct product p = {};
        p.groups = groups;
        p.y = (float *)k_cuda_at(a->h.f32);
        p.n_in = x->n_embd;
        p.n_out = x->n_ff;
        multiply(p, x, a->rows.max_rows, x->gate, &a->x, s);
        p.which = 1;
        p.with_gate = true;
        multiply(p, x, a->rows.max_rows, x->up, &a->x, s);
    }
    quantise_h(a, groups, s);
    return ERR_OK;
}

extern "C" enum err_code k_cuda_moe_down(const struct k_moe_down *a, struct k_stream *s)
{
    const struct k_experts *x = &a->experts;
    if (a->rows.max_rows > 8 && k_cuda_tile_arranged(x->down, x->n_embd, x->n_ff))
        return k_cuda_moe_down_prefill(a, s);
    struct product p = {};
    p.groups = k_prefill_groups_of(x, a->groups, a->order, a->n_selected, a->selected);
    p.y = (float *)k_cuda_at(a->out);
    p.which = 2;
    p.act_by_pair = true;
    p.n_in = x->n_ff;
    p.n_out = x->n_embd;
    multiply(p, x, a->rows.max_rows, x->down, &a->h, s);
    return ERR_OK;
}

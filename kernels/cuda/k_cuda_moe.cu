/* The experts' products for the groups that `selected` names, few rows each: arranged weights by
 * the decode kernels, what is not arranged by the plain ones; with many rows the prefill kernels
 * take over where they can. A block belongs to one group; blocks beyond *n_selected return at
 * once. */
#include "k_cuda_decode.cuh"
#include "k_cuda_plain.cuh"
#include "k_cuda_prefill.cuh"
#include "k_cuda_prefill_groups.cuh"
#include "k_cuda_quantise.cuh"

namespace
{

enum {
    ALONE_TILES = 4 /* of a stripe: so many a warp takes alone */
};

/* What a block finds out about its group. */
struct found {
    struct k_group group;
    const uint8_t *slice[2];
};

/* Fills in the slices of the group's expert: `which` 0 gate (and up), 1 up, 2 down. */
__device__ __forceinline__ void find_slices(const struct k_prefill_groups &g, uint32_t which,
                                            struct found &ret)
{
    const uint64_t *slots = g.slots + 3 * (uint64_t)ret.group.expert;
    ret.slice[0] = g.arena + slots[which];
    ret.slice[1] = g.arena + slots[which == 0 ? 1 : which];
}

/* Group number `index` of the selected ones. */
__device__ __forceinline__ void find(const struct k_prefill_groups &g, uint32_t index,
                                     uint32_t which, struct found &ret)
{
    ret.group = g.groups[g.selected[index]];
    find_slices(g, which, ret);
}

uint32_t groups_bound(const struct k_experts *x, uint32_t max_rows)
{
    const uint64_t pairs = (uint64_t)max_rows * x->n_used;
    return pairs < x->n_expert ? (uint32_t)pairs : x->n_expert;
}

/* One matrix of each expert, or gate and up together. */
struct product {
    struct k_prefill_groups groups;
    const uint8_t *act;
    float *y;                /* [pairs][n_out] */
    uint32_t which;          /* slice of the expert */
    bool act_by_pair;        /* activations are rows of pairs (h), not of tokens */
    bool with_gate;          /* y has gate's results, this is up: y = swiglu(y, result) */
    bool alone;              /* a warp a stripe */
    uint32_t n_expert, most; /* most: groups that there can be */
    uint32_t n_in, n_out;
    uint64_t row_bytes, act_stride; /* of weights in the file's order; of activations */
    uint32_t *faults;
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

/* SETS: 1 a matrix, 2 gate and up; 0: down, whose activations are gate_up's floats. ALONE_: down, a
 * warp a stripe. */
template <enum k_format F, int COLUMNS, int SETS, bool ALONE_> struct few_source {
    static constexpr bool LATE = SETS == 0, ONE_ROW = COLUMNS == 1 && SETS == 2, FLOATS = SETS == 0,
                          ALONE = ALONE_;
    /* With several columns gate and up want the activations ahead of the weights, not both at
     * once. */
    static constexpr bool NEAR = COLUMNS == 1 || SETS == 0;
    const struct product &p;
    const uint32_t stripes;
    const uint32_t *pairs; /* of the group found */
    uint32_t output;       /* first of the piece */
    const uint8_t *act;    /* row of the column that this thread fetches */
    uint32_t pair;         /* of that column */
    float *y[2]; /* where this thread's results go: its column is the same in all, or its two are */
    /* Of the lane: an entry of the list, and a group, all asked for at once. */
    uint32_t n_selected, selected;
    struct k_group group;

    /* What does not hang on the kernel before: the list, and the experts' slots, which come
     * near. */
    __device__ void look_before()
    {
        const uint32_t lane = threadIdx.x % 32;
        const uint8_t *slots = (const uint8_t *)p.groups.slots;
        if (!NEAR)
            return;
        selected = lane < p.most ? p.groups.selected[lane] : 0;
        for (uint32_t i = 32 * threadIdx.x; i < 24 * p.n_expert; i += 32 * K_CUDA_DECODE_THREADS) {
            uint32_t unused;
            asm volatile("ld.global.u32 %0, [%1];" : "=r"(unused) : "l"(slots + i));
        }
    }
    __device__ void look()
    {
        const uint32_t lane = threadIdx.x % 32;
        group = {};
        if (NEAR && lane < p.most)
            group = p.groups.groups[lane];
        n_selected = *p.groups.n_selected;
    }
    /* As ::find, from the lanes where they have it. */
    __device__ void find_near(uint32_t index, struct found &ret) const
    {
        const uint32_t at = __shfl_sync(K_CUDA_WARP_ALL, selected, index % 32);
        if (!NEAR || index >= 32 || at >= 32)
            return ::find(p.groups, index, p.which, ret);
        ret.group.expert = __shfl_sync(K_CUDA_WARP_ALL, group.expert, at);
        ret.group.first = __shfl_sync(K_CUDA_WARP_ALL, group.first, at);
        ret.group.count = __shfl_sync(K_CUDA_WARP_ALL, group.count, at);
        find_slices(p.groups, p.which, ret);
    }
    __device__ uint32_t units() const
    {
        return n_selected * stripes;
    }
    __device__ void find(uint32_t unit, struct k_cuda_decode_piece &ret)
    {
        struct found e;
        const uint32_t stripe = unit % stripes;
        find_near(unit / stripes, e);
        pairs = p.groups.order + e.group.first;
        output = stripe * K_CUDA_TILE_OUTPUTS;
        for (int k = 0; k < 2; k++)
            ret.first[k] = e.slice[k] + k_cuda_tile_offset(F, p.n_in, stripe, 0);
        ret.format = F;
        ret.n_in = p.n_in;
        ret.count = stripes - stripe;
        ret.columns = e.group.count;
    }
    __device__ void take(uint32_t first, uint32_t count)
    {
        const uint32_t fetched = COLUMNS == 1 ? 0 : min(threadIdx.x / 32, count - 1);
        const uint32_t made = ALONE ? threadIdx.x % 4 * 2 : threadIdx.x % COLUMNS;
        pair = pairs[first + fetched];
        act = act_of_pair(p, pair);
        for (uint32_t i = 0; i < (ALONE ? 2 : 1); i++)
            y[i] = p.y + (uint64_t)pairs[first + min(made + i, count - 1)] * p.n_out + output;
    }
    __device__ const uint8_t *row(uint32_t) const
    {
        return ONE_ROW ? p.act : act;
    }
    __device__ void bad() const
    {
        p.faults[pair / p.groups.n_used] = 1;
    }
    __device__ void emit(uint32_t column, uint32_t o, float sum, float second) const
    {
        float *to = y[ALONE ? column % 2 : 0] + o;
        if (SETS == 2)
            *to = k_float_swiglu(sum, second);
        else
            *to = p.with_gate ? k_float_swiglu(*to, sum) : sum;
    }
};

template <enum k_format F, int COLUMNS, int SETS, bool ALONE = false>
__global__ void __launch_bounds__(K_CUDA_DECODE_THREADS, K_CUDA_DECODE_BLOCKS)
    product_few(const struct product p)
{
    extern __shared__ __align__(128) uint8_t k_cuda_decode_memory[];
    struct few_source<F, COLUMNS, SETS, ALONE> source = {
        p, p.n_out / K_CUDA_TILE_OUTPUTS, NULL, 0, NULL, 0, {}, 0, 0, {}
    };
    source.look_before();
    if (SETS > 0) { /* groups are a result; of down's they are not the last kernel's, but h is */
        k_cuda_await();
        k_cuda_release();
    }
    source.look();
    k_cuda_decode<F, COLUMNS, SETS == 2 ? 2 : 1>(p.shape, p.n_in, k_cuda_decode_memory, source);
}

template <enum k_format F, int COLUMNS>
__global__ void __launch_bounds__(K_CUDA_PLAIN_THREADS) product_plain(const struct product p)
{
    struct found e;
    const uint32_t o = blockIdx.x * K_CUDA_PLAIN_WARPS + threadIdx.x / 32;
    k_cuda_await();
    k_cuda_release();
    if (o >= p.n_out || blockIdx.y >= *p.groups.n_selected)
        return;
    find(p.groups, blockIdx.y, p.which, e);
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
    k_cuda_await();
    k_cuda_release();
    if (blockIdx.y >= *p.groups.n_selected)
        return;
    find(p.groups, blockIdx.y, 0, e);
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

/* Not where `down` quantises for itself. */
void quantise_h(const struct k_moe_gate_up *a, const struct k_prefill_groups &groups,
                struct k_stream *s)
{
    const struct k_experts *x = &a->experts;
    struct quantise q = {};
    if (a->rows.max_rows <= 8 && k_cuda_tile_arranged(x->down, x->n_embd, x->n_ff))
        return;
    q.groups = groups;
    q.h = (const float *)k_cuda_at(a->h.f32);
    q.q32 = (uint8_t *)k_cuda_at(a->h.q32);
    q.q256 = (uint8_t *)k_cuda_at(a->h.q256);
    q.faults = (uint32_t *)k_cuda_at(a->rows.faults);
    q.n_ff = a->experts.n_ff;
    if (q.q32 != NULL || q.q256 != NULL)
        K_CUDA_LAUNCH_AHEAD(s, quantise_pairs,
                            dim3((q.n_ff + 255) / 256, groups_bound(x, a->rows.max_rows)),
                            dim3(32 * QUANTISE_WARPS), 0, q);
}

/* ---- launches -------------------------------------------------------------------------------- */

template <enum k_format F>
void few_launch(const struct product &p, uint32_t columns, struct k_stream *s)
{
    const dim3 grid(p.shape.grid), block(K_CUDA_DECODE_THREADS);
    const uint32_t bytes = k_cuda_decode_carve(NULL, p.shape, columns).bytes;
    if (p.alone)
        K_CUDA_LAUNCH_AHEAD(s, (product_few<F, 8, 0, true>), grid, block, bytes, p);
    else if (p.act_by_pair)
        columns == 1 ? K_CUDA_LAUNCH_AHEAD(s, (product_few<F, 1, 0>), grid, block, bytes, p)
                     : K_CUDA_LAUNCH_AHEAD(s, (product_few<F, 8, 0>), grid, block, bytes, p);
    else if (p.shape.sets == 1)
        columns == 1 ? K_CUDA_LAUNCH_AHEAD(s, (product_few<F, 1, 1>), grid, block, bytes, p)
                     : K_CUDA_LAUNCH_AHEAD(s, (product_few<F, 8, 1>), grid, block, bytes, p);
    else
        columns == 1 ? K_CUDA_LAUNCH_AHEAD(s, (product_few<F, 1, 2>), grid, block, bytes, p)
                     : K_CUDA_LAUNCH_AHEAD(s, (product_few<F, 8, 2>), grid, block, bytes, p);
}

/* sets: 2 for gate and up together. */
void multiply_few(struct product p, const struct k_experts *x, uint32_t max_rows,
                  enum k_format format, uint32_t sets, struct k_stream *s)
{
    const uint32_t columns = max_rows == 1 ? 1 : 8;
    p.n_expert = x->n_expert;
    p.most = groups_bound(x, max_rows);
    const uint32_t n_tiles = p.n_in / K_CUDA_TILE_INPUTS;
    const uint32_t units = p.most * (p.n_out / K_CUDA_TILE_OUTPUTS);
    p.alone = p.act_by_pair && columns == 8 && n_tiles <= ALONE_TILES;
    p.shape = p.alone
                  ? k_cuda_decode_choose_alone(k_cuda_of(s->device), format, n_tiles, units)
                  : k_cuda_decode_choose(k_cuda_of(s->device), columns, k_cuda_tile_bytes(format),
                                         k_cuda_decode_blocks(format), sets, n_tiles, units);
    switch (format) {
    case K_Q4_0:
        return few_launch<K_Q4_0>(p, columns, s);
    case K_Q8_0:
        return few_launch<K_Q8_0>(p, columns, s);
    case K_Q4_K:
        return few_launch<K_Q4_K>(p, columns, s);
    case K_Q5_K:
        return few_launch<K_Q5_K>(p, columns, s);
    case K_Q6_K:
        return few_launch<K_Q6_K>(p, columns, s);
    default:
        return;
    }
}

template <enum k_format F>
void plain_launch(const struct product &p, dim3 grid, bool one, struct k_stream *s)
{
    if (one)
        K_CUDA_LAUNCH_AHEAD(s, (product_plain<F, 1>), grid, dim3(K_CUDA_PLAIN_THREADS), 0, p);
    else
        K_CUDA_LAUNCH_AHEAD(s, (product_plain<F, 8>), grid, dim3(K_CUDA_PLAIN_THREADS), 0, p);
}

void multiply_plain(const struct product &p, const struct k_experts *x, uint32_t max_rows,
                    enum k_format format, struct k_stream *s)
{
    const dim3 grid((p.n_out + K_CUDA_PLAIN_WARPS - 1) / K_CUDA_PLAIN_WARPS,
                    groups_bound(x, max_rows));
    const bool one = max_rows == 1;
    switch (format) {
    case K_F32:
        return plain_launch<K_F32>(p, grid, one, s);
    case K_F16:
        return plain_launch<K_F16>(p, grid, one, s);
    case K_BF16:
        return plain_launch<K_BF16>(p, grid, one, s);
    case K_Q4_0:
        return plain_launch<K_Q4_0>(p, grid, one, s);
    case K_Q8_0:
        return plain_launch<K_Q8_0>(p, grid, one, s);
    case K_Q4_K:
        return plain_launch<K_Q4_K>(p, grid, one, s);
    case K_Q5_K:
        return plain_launch<K_Q5_K>(p, grid, one, s);
    case K_Q6_K:
        return plain_launch<K_Q6_K>(p, grid, one, s);
    }
}

/* p: all but what follows from the format and the activations. */
void multiply(struct product p, const struct k_experts *x, uint32_t max_rows, enum k_format format,
              uint32_t sets, const struct k_act *act, struct k_stream *s)
{
    const bool few = k_cuda_tile_arranged(format, p.n_out, p.n_in);
    const enum k_form form = few && p.act_by_pair ? K_FORM_F32 : k_format_form(format);
    p.act = (const uint8_t *)k_cuda_at(form == K_FORM_F32   ? act->f32
                                       : form == K_FORM_Q32 ? act->q32
                                                            : act->q256);
    p.act_stride = k_cuda_act_stride(form, p.n_in);
    p.row_bytes = k_format_bytes(format, 1, p.n_in);
    if (few)
        multiply_few(p, x, max_rows, format, sets, s);
    else
        multiply_plain(p, x, max_rows, format, s);
}

} // namespace

extern "C" enum err_code k_cuda_moe_gate_up(const struct k_moe_gate_up *a, struct k_stream *s)
{
    const struct k_experts *x = &a->experts;
    const bool together = x->gate == x->up && k_cuda_tile_arranged(x->gate, x->n_ff, x->n_embd);
    struct product p = {};
    p.groups = k_prefill_groups_of(x, a->groups, a->order, a->n_selected, a->selected);
    if (together && a->rows.max_rows > 8) {
        const enum err_code code = k_cuda_moe_gate_up_prefill(a, s);
        if (code == ERR_OK)
            quantise_h(a, p.groups, s);
        return code;
    }
    p.y = (float *)k_cuda_at(a->h.f32);
    p.n_in = x->n_embd;
    p.n_out = x->n_ff;
    multiply(p, x, a->rows.max_rows, x->gate, together ? 2 : 1, &a->x, s);
    if (!together) {
        p.which = 1;
        p.with_gate = true;
        multiply(p, x, a->rows.max_rows, x->up, 1, &a->x, s);
    }
    quantise_h(a, p.groups, s);
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
    p.faults = (uint32_t *)k_cuda_at(a->rows.faults);
    p.n_in = x->n_ff;
    p.n_out = x->n_embd;
    multiply(p, x, a->rows.max_rows, x->down, 1, &a->h, s);
    return ERR_OK;
}

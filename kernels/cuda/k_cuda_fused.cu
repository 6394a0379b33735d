/* What lies between a step's matrix products, as one kernel each: in a decode step an operation on
 * rows lasts as long as its launch and its loads, so that fewer of them is all that helps. Each
 * lets the next kernel come at once: a product's blocks ask for their weights meanwhile. */
#include "k_cuda.cuh"
#include "k_cuda_kv.cuh"
#include "k_cuda_norm.cuh"
#include "k_cuda_quantise.cuh"
#include "k_cuda_warp.cuh"

enum {
    FEW_ROWS = 8,
    VALUES = K_CUDA_QUANTISE_VALUES, /* of a thread, next to each other */
    MOST_THREADS = 1024,
    HEAD_WARPS = 4 /* of a block, a head each */
};

static __device__ __forceinline__ void load_eight(const float *from, float (&ret)[VALUES])
{
    const float4 low = ((const float4 *)(const void *)from)[0],
                 high = ((const float4 *)(const void *)from)[1];
    ret[0] = low.x, ret[1] = low.y, ret[2] = low.z, ret[3] = low.w;
    ret[4] = high.x, ret[5] = high.y, ret[6] = high.z, ret[7] = high.w;
}

static __device__ __forceinline__ void store_eight(float *to, const float (&v)[VALUES])
{
    ((float4 *)(void *)to)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4 *)(void *)to)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

/* ---- enter (A16 or A14, A10, A4) ------------------------------------------------------------- */

struct enter_args {
    struct k_cuda_rows rows;
    float *x, *y;
    const float *out, *weights, *norm;
    uint8_t *q32, *q256;
    uint32_t n, n_used;
    float eps;
};

/* What is added to the row's values first .. first + 7. */
static __device__ __forceinline__ void enter_sum(const struct enter_args &a, uint32_t row,
                                                 uint32_t first, float (&v)[VALUES])
{
    float y[VALUES] = {0.0f}, from[VALUES];
    if (a.weights == NULL) {
        load_eight(a.out + (uint64_t)row * a.n + first, y);
    } else {
        const uint64_t pair = (uint64_t)row * a.n_used;
#pragma unroll 8
        for (uint32_t k = 0; k < a.n_used; k++) {
            const float w = a.weights[pair + k];
            load_eight(a.out + (pair + k) * a.n + first, from);
#pragma unroll
            for (int i = 0; i < VALUES; i++)
                y[i] = k_float_fma(w, from[i], y[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++)
        v[i] = k_float_add(v[i], y[i]);
}

/* A block a row, a thread eight values; the first warp folds the squares. THREADS: at most; the
 * fewer, the more loads are under way. */
template <int THREADS>
static __global__ void __launch_bounds__(THREADS, 1) enter_rows(const struct enter_args a)
{
    extern __shared__ float4 shared[];
    float *tile = (float *)(void *)shared;
    __shared__ float factor;
    const uint32_t row = blockIdx.x, t = threadIdx.x, first = VALUES * t;
    const bool inside = first < a.n;
    float weight[VALUES] = {0.0f}, v[VALUES] = {0.0f};
    if (inside) /* it is nobody's result */
        load_eight(a.norm + first, weight);
    k_cuda_await();
    k_cuda_release();
    const uint32_t n_rows = *a.rows.n_rows;
    if (a.rows.max_rows > FEW_ROWS && row >= n_rows)
        return;
    float *x = a.x + (uint64_t)row * a.n + first;
    if (inside) {
        load_eight(x, v);
        if (a.out != NULL)
            enter_sum(a, row, first, v);
        store_eight(tile + first, v);
    }
    __syncthreads();
    const bool present = inside && row < n_rows;
    if (present && a.out != NULL)
        store_eight(x, v);
    if (t < 32) {
        const float sum = k_cuda_norm_fold(tile, a.n, 0.0f);
        const float r = k_cuda_norm_factor(k_cuda_warp_tree(sum), a.n, a.eps);
        if (t == 0)
            factor = r;
    }
    __syncthreads();
    const float r = factor;
#pragma unroll
    for (int i = 0; i < VALUES; i++)
        v[i] = k_float_mul(k_float_mul(v[i], r), weight[i]);
    if (present)
        store_eight(a.y + (uint64_t)row * a.n + first, v);
    if (a.q32 == NULL && a.q256 == NULL)
        return;
    uint8_t *row32 = a.q32 == NULL ? NULL : a.q32 + row * k_cuda_act_stride(K_FORM_Q32, a.n);
    uint8_t *row256 = a.q256 == NULL ? NULL : a.q256 + row * k_cuda_act_stride(K_FORM_Q256, a.n);
    if (!k_cuda_quantise_block(v, row32, row256, a.n, t / 32, present) && present)
        a.rows.faults[row] = 1;
}

static enum err_code enter_apart(const struct k_enter *a, struct k_stream *s)
{
    struct k_moe_sum sum = {};
    struct k_add add = {};
    struct k_norm norm = {};
    struct k_quantise quantise = {};
    enum err_code code = ERR_OK;
    if (a->out.buffer != NULL && a->weights.buffer != NULL) {
        sum.rows = a->rows;
        sum.weights = a->weights;
        sum.out = a->out;
        sum.x = a->x;
        sum.n = a->act.n;
        sum.n_used = a->n_used;
        code = k_cuda_moe_sum(&sum, s);
    } else if (a->out.buffer != NULL) {
        add.rows = a->rows;
        add.x = a->x;
        add.y = a->out;
        add.n = a->act.n;
        code = k_cuda_add(&add, s);
    }
    norm.rows = a->rows;
    norm.x = a->x;
    norm.y = a->act.f32;
    norm.weight = a->norm;
    norm.n = a->act.n;
    norm.groups = 1;
    norm.eps = a->eps;
    if (code == ERR_OK)
        code = k_cuda_norm(&norm, s);
    quantise.rows = a->rows;
    quantise.act = a->act;
    return code == ERR_OK ? k_cuda_quantise(&quantise, s) : code;
}

extern "C" enum err_code k_cuda_enter(const struct k_enter *a, struct k_stream *s)
{
    struct enter_args args;
    const uint32_t n = a->act.n, threads = (n / VALUES + 31) / 32 * 32;
    if (n % VALUES != 0 || threads > MOST_THREADS)
        return enter_apart(a, s);
    args.rows = k_cuda_rows_of(&a->rows);
    args.x = (float *)k_cuda_at(a->x);
    args.y = (float *)k_cuda_at(a->act.f32);
    args.out = (const float *)k_cuda_at(a->out);
    args.weights = (const float *)k_cuda_at(a->weights);
    args.norm = (const float *)k_cuda_at(a->norm);
    args.q32 = (uint8_t *)k_cuda_at(a->act.q32);
    args.q256 = (uint8_t *)k_cuda_at(a->act.q256);
    args.n = n;
    args.n_used = a->n_used;
    args.eps = a->eps;
    if (threads <= MOST_THREADS / 4)
        K_CUDA_LAUNCH_AHEAD(s, enter_rows<MOST_THREADS / 4>, a->rows.max_rows, threads,
                            n * sizeof(float), args);
    else
        K_CUDA_LAUNCH_AHEAD(s, enter_rows<MOST_THREADS>, a->rows.max_rows, threads,
                            n * sizeof(float), args);
    return ERR_OK;
}

/* ---- heads (A10, A15, A17) ------------------------------------------------------------------- */

struct heads_args {
    struct k_cuda_rows rows;
    float *q;
    const float *k, *v, *q_norm, *k_norm;
    const float2 *table;
    struct k_cuda_kv kv;
    uint32_t n_head;
    float eps;
};

/* A head's values, element lane + 32 * k in k: normed where there is a weight, and turned. */
template <int PARTS>
static __device__ __forceinline__ void heads_turn(const struct heads_args &a, float (&v)[PARTS],
                                                  const float (&weight)[PARTS], bool normed,
                                                  uint32_t position)
{
    const uint32_t lane = threadIdx.x % 32;
    float2 turn[PARTS / 2];
#pragma unroll
    for (int k = 0; k < PARTS / 2; k++)
        turn[k] = a.table[(uint64_t)position * (16 * PARTS) + lane + 32 * k];
    if (normed) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < PARTS; k++)
            sum = k_float_fma(v[k], v[k], sum);
        const float r = k_cuda_norm_factor(k_cuda_warp_tree(sum), 32 * PARTS, a.eps);
#pragma unroll
        for (int k = 0; k < PARTS; k++)
            v[k] = k_float_mul(k_float_mul(v[k], r), weight[k]);
    }
#pragma unroll
    for (int k = 0; k < PARTS / 2; k++) {
        const float x0 = v[k], x1 = v[k + PARTS / 2];
        v[k] = k_float_fma(x0, turn[k].x, -k_float_mul(x1, turn[k].y));
        v[k + PARTS / 2] = k_float_fma(x1, turn[k].x, k_float_mul(x0, turn[k].y));
    }
}

/* A head of k or v into its page. False: a value that f16 does not hold. */
template <int PARTS>
static __device__ __forceinline__ bool heads_write(const struct heads_args &a,
                                                   const float (&v)[PARTS], bool key, uint32_t head,
                                                   uint32_t sequence, uint32_t position)
{
    const uint32_t lane = threadIdx.x % 32, slot = position % K_PAGE;
    const struct k_cuda_kv_head h =
        k_cuda_kv_head_f16(a.kv, k_cuda_kv_page(a.kv, sequence, position / K_PAGE), head);
    uint16_t *to = key ? (uint16_t *)h.keys + slot : (uint16_t *)h.values + slot * (32 * PARTS);
    bool good = true;
#pragma unroll
    for (int k = 0; k < PARTS; k++) {
        const uint16_t value = k_cuda_warp_to_f16(v[k]);
        good &= (value & 0x7c00u) != 0x7c00u;
        to[(lane + 32 * k) * (key ? K_PAGE : 1)] = value;
    }
    return good;
}

/* A warp a head: q's of a row, then k's, then v's. PARTS: of 32 values. */
template <int PARTS> static __global__ void heads_few(const struct heads_args a)
{
    const uint32_t lane = threadIdx.x % 32, each = a.n_head + 2 * a.kv.n_head_kv;
    const uint32_t vector = blockIdx.x * HEAD_WARPS + threadIdx.x / 32;
    const uint32_t row = vector / each, i = vector % each;
    const bool is_q = i < a.n_head, is_k = !is_q && i < a.n_head + a.kv.n_head_kv;
    const uint32_t head = is_q ? i : is_k ? i - a.n_head : i - a.n_head - a.kv.n_head_kv;
    const float *norm = is_q ? a.q_norm : is_k ? a.k_norm : NULL;
    float weight[PARTS] = {0.0f}, v[PARTS];
#pragma unroll
    for (int k = 0; k < PARTS; k++)
        if (norm != NULL) /* nobody's result */
            weight[k] = norm[lane + 32 * k];
    k_cuda_await();
    k_cuda_release();
    if (row >= a.rows.max_rows)
        return;
    const uint32_t n_rows = *a.rows.n_rows, position = a.rows.position[row];
    const uint32_t sequence = a.rows.sequence[row];
    const float *x = is_q ? a.q + (uint64_t)row * a.n_head * (32 * PARTS)
                          : (is_k ? a.k : a.v) + (uint64_t)row * a.kv.n_head_kv * (32 * PARTS);
    x += head * (32 * PARTS);
#pragma unroll
    for (int k = 0; k < PARTS; k++)
        v[k] = x[lane + 32 * k];
    if (row >= n_rows)
        return;
    if (is_q || is_k)
        heads_turn(a, v, weight, norm != NULL, position);
    if (is_q) {
        float *y = a.q + (uint64_t)row * a.n_head * (32 * PARTS) + head * (32 * PARTS);
#pragma unroll
        for (int k = 0; k < PARTS; k++)
            y[lane + 32 * k] = v[k];
    } else if (!heads_write(a, v, is_k, head, sequence, position)) {
        a.rows.faults[row] = 1;
    }
}

static enum err_code heads_turn_apart(const struct k_heads *a, struct k_span x,
                                      struct k_span weight, uint32_t heads, struct k_stream *s)
{
    struct k_norm norm = {};
    struct k_rope rope = {};
    enum err_code code = ERR_OK;
    norm.rows = rope.rows = a->rows;
    norm.x = norm.y = rope.x = x;
    norm.weight = weight;
    norm.n = rope.head_dim = a->kv.head_dim;
    norm.groups = rope.heads = heads;
    norm.eps = a->eps;
    rope.table = a->table;
    rope.rope_dim = a->rope_dim;
    if (weight.buffer != NULL)
        code = k_cuda_norm(&norm, s);
    return code == ERR_OK ? k_cuda_rope(&rope, s) : code;
}

static enum err_code heads_apart(const struct k_heads *a, struct k_stream *s)
{
    struct k_kv_write write = {};
    enum err_code code = heads_turn_apart(a, a->q, a->q_norm, a->n_head, s);
    if (code == ERR_OK)
        code = heads_turn_apart(a, a->k, a->k_norm, a->kv.n_head_kv, s);
    write.rows = a->rows;
    write.k = a->k;
    write.v = a->v;
    write.kv = a->kv;
    return code == ERR_OK ? k_cuda_kv_write(&write, s) : code;
}

/* With many rows neighbouring positions of the keys are better written together. */
extern "C" enum err_code k_cuda_heads(const struct k_heads *a, struct k_stream *s)
{
    struct heads_args args;
    const uint32_t dim = a->kv.head_dim;
    if (a->rows.max_rows > FEW_ROWS || a->kv.type != K_KV_F16 || a->rope_dim != dim ||
        (dim != 64 && dim != 128 && dim != 256))
        return heads_apart(a, s);
    args.rows = k_cuda_rows_of(&a->rows);
    args.q = (float *)k_cuda_at(a->q);
    args.k = (const float *)k_cuda_at(a->k);
    args.v = (const float *)k_cuda_at(a->v);
    args.q_norm = (const float *)k_cuda_at(a->q_norm);
    args.k_norm = (const float *)k_cuda_at(a->k_norm);
    args.table = (const float2 *)k_cuda_at(a->table);
    args.kv = k_cuda_kv_of(&a->kv);
    args.n_head = a->n_head;
    args.eps = a->eps;
    const uint32_t vectors = a->rows.max_rows * (a->n_head + 2 * a->kv.n_head_kv);
    const uint32_t blocks = (vectors + HEAD_WARPS - 1) / HEAD_WARPS;
    if (dim == 64)
        K_CUDA_LAUNCH_AHEAD(s, heads_few<2>, blocks, 32 * HEAD_WARPS, 0, args);
    else if (dim == 128)
        K_CUDA_LAUNCH_AHEAD(s, heads_few<4>, blocks, 32 * HEAD_WARPS, 0, args);
    else
        K_CUDA_LAUNCH_AHEAD(s, heads_few<8>, blocks, 32 * HEAD_WARPS, 0, args);
    return ERR_OK;
}

/* Attention for any head size: a warp takes one query head of one row, lanes are positions for the
 * scores and dimensions for the values. Exact, and no faster than it must be. */
#include "k_cuda_attention.cuh"

/* The head's query: as it is, or as integers with a scale per 32. */
struct plain_query {
    float *f32;
    int32_t *q;
    float *dx;
};

/* Partial results of the fold, of dim values in shared memory (a lane's every 32nd). */
struct plain_part {
    float m, l, *o;
    bool empty;
};

static __device__ __forceinline__ void plain_merge(struct plain_part *into,
                                                   const struct plain_part *next, uint32_t dim)
{
    const uint32_t lane = threadIdx.x;
    const struct k_cuda_attention_step s = k_cuda_attention_meet(into->m, next->m);
    for (uint32_t d = lane; d < dim; d += 32)
        into->o[d] =
            into->empty ? next->o[d] : k_cuda_attention_fold(into->o[d], s.a, next->o[d], s.b);
    into->l = into->empty ? next->l : k_cuda_attention_fold(into->l, s.a, next->l, s.b);
    into->m = into->empty ? next->m : s.m;
    into->empty = false;
}

template <enum k_kv_type TYPE>
static __device__ __forceinline__ float plain_score(const struct plain_query &q,
                                                    const struct k_cuda_kv_head &h, uint32_t dim,
                                                    uint32_t j)
{
    float acc = 0.0f;
    if (TYPE == K_KV_F16) {
        const uint16_t *keys = (const uint16_t *)h.keys + j;
#pragma unroll 8
        for (uint32_t d = 0; d < dim; d++)
            acc = k_float_fma(q.f32[d], k_cuda_warp_of_f16(keys[(size_t)d * K_PAGE]), acc);
        return acc;
    }
    const int8_t *keys = (const int8_t *)h.keys + j;
    for (uint32_t b = 0; b < dim / 32; b++) {
        int32_t dot = 0;
#pragma unroll 8
        for (uint32_t i = 32 * b; i < 32 * b + 32; i++)
            dot += q.q[i] * keys[(size_t)i * K_PAGE];
        const float d = k_float_mul(q.dx[b], k_cuda_warp_of_f16(h.key_scales[b * K_PAGE + j]));
        acc = k_float_fma(d, k_cuda_warp_of_int(dot), acc);
    }
    return acc;
}

template <enum k_kv_type TYPE>
static __device__ __forceinline__ void plain_values(const float *e, const struct k_cuda_kv_head &h,
                                                    uint32_t dim, uint32_t n, float *o)
{
    for (uint32_t d = threadIdx.x; d < dim; d += 32) {
        float acc = 0.0f;
#pragma unroll 4
        for (uint32_t j = 0; j < n; j++) {
            const size_t at = (size_t)j * dim + d;
            if (TYPE == K_KV_F16) {
                acc = k_float_fma(e[j], k_cuda_warp_of_f16(((const uint16_t *)h.values)[at]), acc);
            } else {
                const float scale = k_cuda_warp_of_f16(h.value_scales[j * (dim / 32) + d / 32]);
                acc = k_float_fma(k_float_mul(e[j], scale),
                                  k_cuda_warp_of_int(((const int8_t *)h.values)[at]), acc);
            }
        }
        o[d] = acc;
    }
}

/* Loads a query and, for the 8-bit cache, quantises it. True: a value is not finite there. */
template <enum k_kv_type TYPE>
static __device__ __forceinline__ bool plain_load(const float *x, uint32_t dim,
                                                  const struct plain_query &q)
{
    bool fault = false;
    for (uint32_t d = threadIdx.x; d < dim; d += 32)
        q.f32[d] = x[d];
    __syncwarp();
    for (uint32_t base = 0; TYPE == K_KV_Q8_0 && base < dim; base += 128) {
        const uint32_t d = base + 4 * threadIdx.x;
        float v[4] = {0.0f}, dx;
        uint32_t word;
        for (uint32_t i = 0; i < 4 && d < dim; i++)
            v[i] = q.f32[d + i];
        fault |= k_cuda_attention_quantise(v, &word, &dx);
        for (uint32_t i = 0; i < 4 && d < dim; i++)
            q.q[d + i] = (int8_t)(word >> 8 * i);
        if (d % 32 == 0 && d < dim)
            q.dx[d / 32] = dx;
    }
    __syncwarp();
    return __any_sync(K_CUDA_WARP_ALL, fault);
}

template <enum k_kv_type TYPE>
static __global__ void attention_plain(const struct k_cuda_attention_args a)
{
    extern __shared__ float shared[]; /* f32, q, dx of the query; e; three parts */
    const uint32_t dim = a.kv.head_dim, row = blockIdx.x, head = blockIdx.y, lane = threadIdx.x;
    if (row >= *a.rows.n_rows)
        return;
    const struct plain_query q = {shared, (int32_t *)(void *)(shared + dim), shared + 2 * dim};
    float *e = shared + 3 * dim, *o = e + K_PAGE;
    struct plain_part chunk = {0.0f, 0.0f, o, true}, group = {0.0f, 0.0f, o + dim, true},
                      total = {0.0f, 0.0f, o + 2 * dim, true};
    const uint64_t at = ((uint64_t)row * a.n_head + head) * dim;
    const uint32_t n_visible = a.rows.position[row] + 1, sequence = a.rows.sequence[row];
    const uint32_t n_pages = (n_visible + K_PAGE - 1) / K_PAGE;
    bool fault = plain_load<TYPE>(a.q + at, dim, q);
    for (uint32_t c = 0; c < n_pages; c++) {
        const uint32_t n = min(n_visible - c * K_PAGE, (uint32_t)K_PAGE);
        uint8_t *layer = k_cuda_kv_page(a.kv, sequence, c);
        const struct k_cuda_kv_head h = TYPE == K_KV_F16
                                            ? k_cuda_kv_head_f16(a.kv, layer, head / a.shared)
                                            : k_cuda_kv_head_of(a.kv, layer, head / a.shared);
        float e0, e1;
        fault |=
            k_cuda_attention_weigh(k_float_mul(plain_score<TYPE>(q, h, dim, 2 * lane), a.scale),
                                   k_float_mul(plain_score<TYPE>(q, h, dim, 2 * lane + 1), a.scale),
                                   n, &e0, &e1, &chunk.m, &chunk.l);
        e[2 * lane] = e0;
        e[2 * lane + 1] = e1;
        __syncwarp();
        plain_values<TYPE>(e, h, dim, n, chunk.o);
        __syncwarp();
        plain_merge(&group, &chunk, dim);
        if (c % K_CHUNK_GROUP == K_CHUNK_GROUP - 1 || c + 1 == n_pages) {
            plain_merge(&total, &group, dim);
            group.empty = true;
        }
    }
    for (uint32_t d = lane; d < dim; d += 32)
        a.y[at + d] = k_float_div(total.o[d], total.l);
    if (fault && lane == 0)
        a.rows.faults[row] = 1;
}

void k_cuda_attention_plain(const struct k_cuda_attention_args *a, enum k_kv_type type,
                            struct k_stream *s)
{
    const size_t shared = (6 * (size_t)a->kv.head_dim + K_PAGE) * sizeof(float);
    const dim3 grid(a->rows.max_rows, a->n_head);
    if (type == K_KV_F16)
        K_CUDA_LAUNCH(s, attention_plain<K_KV_F16>, grid, 32, shared, *a);
    else
        K_CUDA_LAUNCH(s, attention_plain<K_KV_Q8_0>, grid, 32, shared, *a);
}

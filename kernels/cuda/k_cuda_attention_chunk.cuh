/* A chunk of one row and the query heads of a block, a warp each: copied to shared memory once for
 * all of them, then with lanes as positions the scores, with lanes as dimensions the weighted
 * values (A18). */
#ifndef ISLET_K_CUDA_ATTENTION_CHUNK_CUH
#define ISLET_K_CUDA_ATTENTION_CHUNK_CUH

#include "k_cuda_attention.cuh"

enum {
    HEADS = 8, /* of a block */
    THREADS = 32 * HEADS
};

enum extent {
    EXTENT_CHUNK,
    EXTENT_GROUP,
    EXTENT_ROW
};

/* A block's piece of work: chunks first .. end of a row's n_chunks; query heads from first_head on,
 * n_heads of them. */
struct work {
    enum extent extent;
    uint32_t row, sequence, n_visible, n_chunks, head_kv, first_head, n_heads, first, end;
};

template <enum k_kv_type TYPE, int D> struct chunk_stage {
    alignas(16) uint8_t keys[D * K_PAGE * (TYPE == K_KV_F16 ? 2 : 1)];
    alignas(16) uint8_t values[D * K_PAGE * (TYPE == K_KV_F16 ? 2 : 1)];
    /* 8-bit only */
    alignas(16) uint16_t key_scales[TYPE == K_KV_F16 ? 8 : D / 32 * K_PAGE];
    alignas(16) uint16_t value_scales[TYPE == K_KV_F16 ? 8 : D / 32 * K_PAGE];
};

template <enum k_kv_type TYPE, int D> struct chunk_memory {
    enum {
        STAGES = D > 128 ? 1 : 2
    };
    struct chunk_stage<TYPE, D> stage[STAGES];
    union {
        alignas(16) float f32[HEADS][D];
        struct {
            alignas(16) uint32_t word[HEADS][D / 4]; /* four dimensions each */
            float dx[HEADS][D / 32];
        } q8;
    } q;
    alignas(16) float e[HEADS][K_PAGE]; /* weights */
};

/* A head's result of a chunk, a group or all: a lane has N = D / 32 neighbouring dimensions. */
template <int N> struct part {
    float m, l, y[N];
};

template <int N>
static __device__ __forceinline__ void part_fold(struct part<N> *into, const struct part<N> &next,
                                                 bool first)
{
    const struct k_cuda_attention_step s = k_cuda_attention_meet(into->m, next.m);
    into->m = first ? next.m : s.m;
    into->l = first ? next.l : k_cuda_attention_fold(into->l, s.a, next.l, s.b);
#pragma unroll
    for (int i = 0; i < N; i++)
        into->y[i] = first ? next.y[i] : k_cuda_attention_fold(into->y[i], s.a, next.y[i], s.b);
}

/* ---- a chunk comes --------------------------------------------------------------------------- */

static __device__ __forceinline__ void copy_bytes(void *to, const void *from, uint32_t n)
{
    for (uint32_t i = 16 * threadIdx.x; i < n; i += 16 * THREADS)
        k_cuda_warp_copy16((uint8_t *)to + i, (const uint8_t *)from + i);
}

/* Starts the copies of a chunk, first of its keys, then of its values at visible positions: two
 * groups, empty ones beyond the end. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void chunk_load(const struct k_cuda_attention_args &a,
                                                  const struct work &p, uint32_t c,
                                                  struct chunk_stage<TYPE, D> *stage)
{
    const bool present = c < p.end;
    const uint32_t n = present ? min(p.n_visible - c * K_PAGE, (uint32_t)K_PAGE) : 0;
    struct k_cuda_kv_head h = {};
    if (present) {
        uint8_t *layer = k_cuda_kv_page(a.kv, p.sequence, c);
        h = TYPE == K_KV_F16 ? k_cuda_kv_head_f16(a.kv, layer, p.head_kv)
                             : k_cuda_kv_head_of(a.kv, layer, p.head_kv);
        copy_bytes(stage->keys, h.keys, sizeof stage->keys);
        if (TYPE == K_KV_Q8_0)
            copy_bytes(stage->key_scales, h.key_scales, sizeof stage->key_scales);
    }
    k_cuda_warp_commit();
    if (present) {
        copy_bytes(stage->values, h.values, (uint32_t)sizeof stage->values / K_PAGE * n);
        if (TYPE == K_KV_Q8_0)
            copy_bytes(stage->value_scales, h.value_scales, sizeof stage->value_scales);
    }
    k_cuda_warp_commit();
}

/* Puts the warp's query into shared memory, where the warp alone reads it. True: not finite. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ bool chunk_query(const struct k_cuda_attention_args &a,
                                                   const struct work &p,
                                                   struct chunk_memory<TYPE, D> *memory)
{
    const uint32_t h = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float *q = a.q + ((uint64_t)p.row * a.n_head + p.first_head + h) * D;
    bool fault = false;
    for (uint32_t base = 0; base < D / 4 && h < p.n_heads; base += 32) {
        const uint32_t w = base + lane;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (w < D / 4)
            x = *(const float4 *)(const void *)(q + 4 * w);
        if constexpr (TYPE == K_KV_F16) {
            if (w < D / 4)
                *(float4 *)(void *)&memory->q.f32[h][4 * w] = x;
        } else {
            const float v[4] = {x.x, x.y, x.z, x.w};
            uint32_t word;
            float dx;
            fault |= k_cuda_attention_quantise(v, &word, &dx);
            if (w < D / 4) {
                memory->q.q8.word[h][w] = word;
                memory->q.q8.dx[h][w / 8] = dx;
            }
        }
    }
    __syncwarp();
    return fault;
}

/* ---- one chunk, one head, one warp ----------------------------------------------------------- */

/* Scores of positions 2 * lane and 2 * lane + 1, dimensions ascending (A18). */
template <int D>
static __device__ __forceinline__ void scores_f16(const float *q,
                                                  const struct chunk_stage<K_KV_F16, D> &stage,
                                                  float acc[2])
{
    const uint32_t *keys = (const uint32_t *)(const void *)stage.keys + threadIdx.x % 32;
#pragma unroll 8
    for (int d = 0; d < D; d += 4) {
        const float4 x = *(const float4 *)(const void *)(q + d);
        const float qd[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 k = k_cuda_warp_of_f16x2(keys[(d + i) * (K_PAGE / 2)]);
            acc[0] = k_float_fma(qd[i], k.x, acc[0]);
            acc[1] = k_float_fma(qd[i], k.y, acc[1]);
        }
    }
}

/* The same on integers: 32 dimensions are one exact sum. */
template <int D>
static __device__ __forceinline__ void scores_q8(const uint32_t *words, const float *dx,
                                                 const struct chunk_stage<K_KV_Q8_0, D> &stage,
                                                 float acc[2])
{
    const uint32_t lane = threadIdx.x % 32;
    const uint16_t *keys = (const uint16_t *)(const void *)stage.keys + lane;
#pragma unroll 1
    for (int b = 0; b < D / 32; b++) {
        int32_t dot[2] = {0, 0};
#pragma unroll
        for (int w = 8 * b; w < 8 * b + 8; w++) {
            const uint16_t *at = keys + 4 * w * (K_PAGE / 2);
            const uint32_t low = __byte_perm(at[0], at[K_PAGE / 2], 0x5140);
            const uint32_t high = __byte_perm(at[K_PAGE], at[K_PAGE / 2 * 3], 0x5140);
            const int32_t q = (int32_t)words[w];
            dot[0] = __dp4a(q, (int32_t)__byte_perm(low, high, 0x5410), dot[0]);
            dot[1] = __dp4a(q, (int32_t)__byte_perm(low, high, 0x7632), dot[1]);
        }
        const uint32_t scales =
            ((const uint32_t *)(const void *)stage.key_scales)[b * (K_PAGE / 2) + lane];
        const float2 dk = k_cuda_warp_of_f16x2(scales);
        acc[0] = k_float_fma(k_float_mul(dx[b], dk.x), k_cuda_warp_of_int(dot[0]), acc[0]);
        acc[1] = k_float_fma(k_float_mul(dx[b], dk.y), k_cuda_warp_of_int(dot[1]), acc[1]);
    }
}

/* The lane's N values of position j, and what the weights are multiplied by (8-bit). */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ float value_get(const struct chunk_stage<TYPE, D> &stage,
                                                  uint32_t j, float v[D / 32])
{
    enum {
        N = D / 32
    };
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (TYPE == K_KV_F16) {
        const uint8_t *at = stage.values + (j * 32 + lane) * 2 * N;
        if constexpr (N >= 4) {
#pragma unroll
            for (int i = 0; i < N; i += 4)
                k_cuda_warp_of_f16x4(*(const uint2 *)(const void *)(at + 2 * i), v + i);
        } else {
            const float2 w = k_cuda_warp_of_f16x2(*(const uint32_t *)(const void *)at);
            v[0] = w.x;
            v[1] = w.y;
        }
        return 1.0f;
    } else {
        const uint8_t *at = stage.values + (j * 32 + lane) * N;
        if constexpr (N >= 4) {
#pragma unroll
            for (int i = 0; i < N; i += 4)
                k_cuda_warp_of_bytes(*(const uint32_t *)(const void *)(at + i), v + i);
        } else {
            float w[4];
            k_cuda_warp_of_bytes(*(const uint16_t *)(const void *)at, w);
            v[0] = w[0];
            v[1] = w[1];
        }
        return k_cuda_warp_of_f16(stage.value_scales[j * N + lane * N / 32]);
    }
}

/* y = fma(e, V[j], y). */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void value_add(const struct chunk_stage<TYPE, D> &stage,
                                                 uint32_t j, float e, float y[D / 32])
{
    float v[D / 32];
    const float scale = value_get<TYPE, D>(stage, j, v);
    const float w = TYPE == K_KV_F16 ? e : k_float_mul(e, scale);
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        y[i] = k_float_fma(w, v[i], y[i]);
}

/* The same over the n visible positions, ascending (A18). */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void chunk_values(const struct chunk_stage<TYPE, D> &stage,
                                                    const float *e, uint32_t n, float y[D / 32])
{
#pragma unroll 4
    for (uint32_t j = 0; j + 4 <= n; j += 4) {
        const float4 four = *(const float4 *)(const void *)(e + j);
        const float ej[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (uint32_t k = 0; k < 4; k++)
            value_add<TYPE, D>(stage, j + k, ej[k], y);
    }
#pragma unroll 1
    for (uint32_t j = n / 4 * 4; j < n; j++)
        value_add<TYPE, D>(stage, j, e[j], y);
}

/* Scores to weights; m and l of the chunk. True: a score is not finite. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ bool chunk_weigh(const struct chunk_stage<TYPE, D> &stage,
                                                   struct chunk_memory<TYPE, D> *memory, uint32_t n,
                                                   float scale, struct part<D / 32> *ret)
{
    const uint32_t h = threadIdx.x / 32, lane = threadIdx.x % 32;
    float acc[2] = {0.0f, 0.0f};
    float2 e;
    if constexpr (TYPE == K_KV_F16)
        scores_f16<D>(memory->q.f32[h], stage, acc);
    else
        scores_q8<D>(memory->q.q8.word[h], memory->q.q8.dx[h], stage, acc);
    const bool fault = k_cuda_attention_weigh(
        k_float_mul(acc[0], scale), k_float_mul(acc[1], scale), n, &e.x, &e.y, &ret->m, &ret->l);
    *(float2 *)(void *)&memory->e[h][2 * lane] = e;
    __syncwarp();
    return fault;
}

#endif

/* Attention for many rows of one sequence.
 *
 * A block has 64 query vectors of one kv head, those of R = 64 / shared rows times its `shared`
 * heads, and walks the sequence's chunks. As in a product of matrices a thread has a tile in
 * registers: 8 vectors by some positions of scores, then 8 vectors by 8 dimensions of values; each
 * number is still one chain in its order (A18). The chunk's values are folded into the group's in
 * registers, the groups' into y (A19). Keys of the next chunk come while this one's values are
 * used, and values while its scores are made. */
#include "k_cuda_attention.cuh"

enum {
    VECTORS = 64,
    SIDE = 8 /* vectors of a thread, and dimensions of its values */
};

template <enum k_kv_type TYPE, int D> struct tile_memory {
    enum {
        BYTES = TYPE == K_KV_F16 ? 2 : 1,
        THREADS = D,
        SHARES = THREADS / VECTORS, /* threads of a vector when weights are made */
        COLUMNS = D / SIDE,         /* threads side by side */
        SPAN = K_PAGE / COLUMNS     /* positions of a thread */
    };
    union {
        float f32[D][VECTORS];
        struct {
            uint32_t word[D / 4][VECTORS];
            float dx[D / 32][VECTORS];
        } q8;
    } q;
    alignas(16) uint8_t keys[D * K_PAGE * BYTES];
    alignas(16) uint8_t values[D * K_PAGE * BYTES];
    alignas(16) uint16_t key_scales[D / 32 * K_PAGE];
    alignas(16) uint16_t value_scales[D / 32 * K_PAGE];
    alignas(16) float s[K_PAGE * VECTORS]; /* [position][vector], see score_at */
    float top[SHARES][VECTORS], l[SHARES][VECTORS];
    float a[VECTORS], b[VECTORS];             /* factors to fold a chunk */
    float group_a[VECTORS], group_b[VECTORS]; /* and a group */
    float sum[VECTORS];                       /* l of all groups so far */
    uint32_t n_visible[VECTORS];

    /* Where a score lies: groups of four vectors change places by position, so that neighbours in
     * either direction are in different banks. */
    static __device__ __forceinline__ uint32_t score_at(uint32_t position, uint32_t vector)
    {
        return position * VECTORS + ((vector / 4 ^ position / SPAN) * 4 | vector % 4);
    }
};

/* What a block works on. */
struct tile {
    uint32_t first_row, n_rows, head_kv, sequence;
    uint32_t n_pages, least; /* least n_visible */
};

/* What the first thread of a vector keeps of its group, and of all groups so far. */
struct tile_sum {
    float m, l;
};

template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void tile_copy(void *to, const void *from)
{
    enum {
        BYTES = tile_memory < TYPE,
        D > ::BYTES *D *K_PAGE
    };
#pragma unroll
    for (int i = 0; i < BYTES / 16 / D; i++)
        k_cuda_warp_copy16((uint4 *)to + i * D + threadIdx.x,
                           (const uint4 *)from + i * D + threadIdx.x);
}

static __device__ __forceinline__ void tile_copy_scales(uint16_t *to, const uint16_t *from,
                                                        uint32_t n)
{
    if (threadIdx.x < n / 8)
        k_cuda_warp_copy16(to + 8 * threadIdx.x, from + 8 * threadIdx.x);
}

template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void tile_load(const struct k_cuda_attention_args &a,
                                                 const struct tile &t, uint8_t *layer, bool keys,
                                                 struct tile_memory<TYPE, D> *memory)
{
    if constexpr (TYPE == K_KV_F16) {
        const struct k_cuda_kv_head h = k_cuda_kv_head_f16(a.kv, layer, t.head_kv);
        tile_copy<TYPE, D>(keys ? memory->keys : memory->values, keys ? h.keys : h.values);
    } else {
        const struct k_cuda_kv_head h = k_cuda_kv_head_of(a.kv, layer, t.head_kv);
        tile_copy<TYPE, D>(keys ? memory->keys : memory->values, keys ? h.keys : h.values);
        tile_copy_scales(keys ? memory->key_scales : memory->value_scales,
                         keys ? h.key_scales : h.value_scales, D / 32 * K_PAGE);
    }
}

/* Offset of a vector in q and y; false: there is no such vector. */
static __device__ __forceinline__ bool tile_vector(const struct k_cuda_attention_args &a,
                                                   const struct tile &t, uint32_t vector,
                                                   uint64_t *ret_at)
{
    const uint32_t row = vector / a.shared;
    *ret_at =
        ((uint64_t)(t.first_row + row) * a.n_head + t.head_kv * a.shared + vector % a.shared) *
        a.kv.head_dim;
    return row < t.n_rows;
}

/* Puts the queries into shared memory, transposed; those that do not exist are 0. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void tile_query(const struct k_cuda_attention_args &a,
                                                  const struct tile &t,
                                                  struct tile_memory<TYPE, D> *memory)
{
    for (uint32_t base = 0; base < VECTORS * D / 4; base += D) {
        const uint32_t i = base + threadIdx.x;
        /* f16: neighbours take neighbouring vectors; 8-bit: eight neighbours take 32 dimensions. */
        const uint32_t v = TYPE == K_KV_F16 ? i % VECTORS : i / 8 % VECTORS;
        const uint32_t w = TYPE == K_KV_F16 ? i / VECTORS : i % 8 + i / (8 * VECTORS) * 8;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        uint64_t at;
        if (tile_vector(a, t, v, &at))
            x = *(const float4 *)(const void *)(a.q + at + 4 * w);
        const float in[4] = {x.x, x.y, x.z, x.w};
        if constexpr (TYPE == K_KV_F16) {
#pragma unroll
            for (int k = 0; k < 4; k++)
                memory->q.f32[4 * w + k][v] = in[k];
        } else {
            if (k_cuda_attention_quantise(in, &memory->q.q8.word[w][v], &memory->q.q8.dx[w / 8][v]))
                a.rows.faults[t.first_row + v / a.shared] = 1;
        }
    }
}

/* Eight floats of shared memory. */
static __device__ __forceinline__ void tile_eight(const float *from, float to[SIDE])
{
    const float4 low = ((const float4 *)(const void *)from)[0];
    const float4 high = ((const float4 *)(const void *)from)[1];
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

/* N / 2 words of shared memory, 2 or 4. */
template <int N> struct tile_words {
    uint32_t w[N / 2];

    __device__ __forceinline__ void load(const void *from)
    {
        if constexpr (N == 8) {
            const uint4 x = *(const uint4 *)from;
            w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
        } else {
            const uint2 x = *(const uint2 *)from;
            w[0] = x.x, w[1] = x.y;
        }
    }
    /* As N f16. */
    __device__ __forceinline__ void halves(float to[N]) const
    {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const float2 v = k_cuda_warp_of_f16x2(w[i]);
            to[2 * i] = v.x;
            to[2 * i + 1] = v.y;
        }
    }
};

/* What a step multiplies is loaded one step before. */
template <int D>
static __device__ __forceinline__ void tile_scores_f16(
    const struct tile_memory<K_KV_F16, D> &memory, uint32_t vector, uint32_t position,
    float (*acc)[tile_memory<K_KV_F16, D>::SPAN])
{
    enum {
        SPAN = tile_memory < K_KV_F16,
        D > ::SPAN
    };
    const uint16_t *keys = (const uint16_t *)(const void *)memory.keys + position;
    float next[SIDE];
    struct tile_words<SPAN> next_keys;
    tile_eight(&memory.q.f32[0][vector], next);
    next_keys.load(keys);
#pragma unroll 4
    for (int d = 0; d < D; d++) {
        float q[SIDE], k[SPAN];
#pragma unroll
        for (int v = 0; v < SIDE; v++)
            q[v] = next[v];
        next_keys.halves(k);
        tile_eight(&memory.q.f32[(d + 1) % D][vector], next);
        next_keys.load(keys + (d + 1) % D * K_PAGE);
#pragma unroll
        for (int v = 0; v < SIDE; v++)
#pragma unroll
            for (int i = 0; i < SPAN; i++)
                acc[v][i] = k_float_fma(q[v], k[i], acc[v][i]);
    }
}

/* Bytes [dimension][position] of four words to words of one position each. */
static __device__ __forceinline__ void tile_transpose(const uint32_t in[4], uint32_t out[4])
{
    const uint32_t low01 = __byte_perm(in[0], in[1], 0x5140);
    const uint32_t high01 = __byte_perm(in[0], in[1], 0x7362);
    const uint32_t low23 = __byte_perm(in[2], in[3], 0x5140);
    const uint32_t high23 = __byte_perm(in[2], in[3], 0x7362);
    out[0] = __byte_perm(low01, low23, 0x5410);
    out[1] = __byte_perm(low01, low23, 0x7632);
    out[2] = __byte_perm(high01, high23, 0x5410);
    out[3] = __byte_perm(high01, high23, 0x7632);
}

template <int D>
static __device__ __forceinline__ void tile_scores_q8(
    const struct tile_memory<K_KV_Q8_0, D> &memory, uint32_t vector, uint32_t position,
    float (*acc)[tile_memory<K_KV_Q8_0, D>::SPAN])
{
    enum {
        SPAN = tile_memory < K_KV_Q8_0,
        D > ::SPAN
    };
#pragma unroll 1
    for (int b = 0; b < D / 32; b++) {
        int32_t dot[SIDE][SPAN];
#pragma unroll
        for (int v = 0; v < SIDE; v++)
#pragma unroll
            for (int i = 0; i < SPAN; i++)
                dot[v][i] = 0;
#pragma unroll 2
        for (int w = 8 * b; w < 8 * b + 8; w++) {
            uint32_t k[SPAN], q[SIDE];
#pragma unroll
            for (int i = 0; i < SPAN; i += 4) {
                const uint8_t *at = memory.keys + 4 * w * K_PAGE + position + i;
                const uint32_t in[4] = {*(const uint32_t *)(const void *)at,
                                        *(const uint32_t *)(const void *)(at + K_PAGE),
                                        *(const uint32_t *)(const void *)(at + 2 * K_PAGE),
                                        *(const uint32_t *)(const void *)(at + 3 * K_PAGE)};
                tile_transpose(in, k + i);
            }
#pragma unroll
            for (int v = 0; v < SIDE; v++)
                q[v] = memory.q.q8.word[w][vector + v];
#pragma unroll
            for (int v = 0; v < SIDE; v++)
#pragma unroll
                for (int i = 0; i < SPAN; i++)
                    dot[v][i] = __dp4a((int32_t)q[v], (int32_t)k[i], dot[v][i]);
        }
        float dq[SIDE], dk[SPAN];
        tile_eight(&memory.q.q8.dx[b][vector], dq);
        struct tile_words<SPAN> scales;
        scales.load(&memory.key_scales[b * K_PAGE + position]);
        scales.halves(dk);
#pragma unroll
        for (int v = 0; v < SIDE; v++)
#pragma unroll
            for (int i = 0; i < SPAN; i++)
                acc[v][i] = k_float_fma(k_float_mul(dq[v], dk[i]), k_cuda_warp_of_int(dot[v][i]),
                                        acc[v][i]);
    }
}

/* Scores of the thread's vectors and positions, scaled, into shared memory. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void tile_scores(struct tile_memory<TYPE, D> *memory, float scale)
{
    typedef struct tile_memory<TYPE, D> M;
    const uint32_t vector = threadIdx.x / M::COLUMNS * SIDE;
    const uint32_t position = threadIdx.x % M::COLUMNS * M::SPAN;
    float acc[SIDE][M::SPAN];
#pragma unroll
    for (int v = 0; v < SIDE; v++)
#pragma unroll
        for (int i = 0; i < M::SPAN; i++)
            acc[v][i] = 0.0f;
    if constexpr (TYPE == K_KV_F16)
        tile_scores_f16<D>(*memory, vector, position, acc);
    else
        tile_scores_q8<D>(*memory, vector, position, acc);
#pragma unroll
    for (int i = 0; i < M::SPAN; i++)
#pragma unroll
        for (int v = 0; v < SIDE; v += 4)
            *(float4 *)(void *)&memory->s[M::score_at(position + i, vector + v)] =
                make_float4(k_float_mul(acc[v][i], scale), k_float_mul(acc[v + 1][i], scale),
                            k_float_mul(acc[v + 2][i], scale), k_float_mul(acc[v + 3][i], scale));
}

/* Visible positions of chunk c. */
static __device__ __forceinline__ uint32_t tile_visible(uint32_t n_visible, uint32_t c)
{
    return n_visible > c * K_PAGE ? min(n_visible - c * K_PAGE, (uint32_t)K_PAGE) : 0;
}

/* Turns the scores into weights (A18). SHARES threads have a vector, each every SHARES-th position,
 * so that all steps of the tree but the last stay within a thread. True: a score is not finite. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ bool tile_weights(struct tile_memory<TYPE, D> *memory, uint32_t c,
                                                    float *ret_m)
{
    typedef struct tile_memory<TYPE, D> M;
    enum {
        N = 32 / M::SHARES
    };
    const uint32_t v = threadIdx.x % VECTORS, share = threadIdx.x / VECTORS;
    const uint32_t n = tile_visible(memory->n_visible[v], c);
    const float infinity = k_float_of_bits(0x7f800000u);
    float low[N], high[N], m = -infinity;
    bool fault = false;
#pragma unroll
    for (int k = 0; k < N; k++) {
        const uint32_t i = share + M::SHARES * k;
        low[k] = i < n ? memory->s[M::score_at(i, v)] : -infinity;
        high[k] = i + 32 < n ? memory->s[M::score_at(i + 32, v)] : -infinity;
        fault |= (i < n && !k_float_finite(low[k])) || (i + 32 < n && !k_float_finite(high[k]));
        m = fmaxf(m, fmaxf(low[k], high[k]));
    }
    memory->top[share][v] = fault ? infinity : m;
    __syncthreads();
    for (int i = 0; i < M::SHARES; i++)
        m = fmaxf(m, memory->top[i][v]);
    fault = m == infinity;
    float a[N];
#pragma unroll
    for (int k = 0; k < N; k++) {
        const uint32_t i = share + M::SHARES * k;
        const float e0 = i < n && !fault ? k_cuda_warp_exp(k_float_sub(low[k], m)) : 0.0f;
        const float e1 = i + 32 < n && !fault ? k_cuda_warp_exp(k_float_sub(high[k], m)) : 0.0f;
        memory->s[M::score_at(i, v)] = e0;
        memory->s[M::score_at(i + 32, v)] = e1;
        a[k] = k_float_add(e0, e1);
    }
#pragma unroll
    for (int step = 1; step < N; step *= 2)
#pragma unroll
        for (int k = 0; k < N / 2; k++)
            if (k < N / 2 / step)
                a[k] = k_float_add(a[k], a[k + N / 2 / step]);
    memory->l[share][v] = a[0];
    *ret_m = fault ? 0.0f : m;
    return fault;
}

/* Weights of eight vectors at position j, and a thread's eight values there. */
template <enum k_kv_type TYPE, int D> struct tile_step {
    float e[SIDE];
    struct tile_words<TYPE == K_KV_F16 ? SIDE : SIDE / 2> values;
    uint16_t scale;

    __device__ __forceinline__ void load(const struct tile_memory<TYPE, D> &memory, uint32_t j,
                                         uint32_t vector, uint32_t d)
    {
        typedef struct tile_memory<TYPE, D> M;
        const float4 low = *(const float4 *)(const void *)&memory.s[M::score_at(j, vector)];
        const float4 high = *(const float4 *)(const void *)&memory.s[M::score_at(j, vector + 4)];
        e[0] = low.x, e[1] = low.y, e[2] = low.z, e[3] = low.w;
        e[4] = high.x, e[5] = high.y, e[6] = high.z, e[7] = high.w;
        values.load(memory.values + M::BYTES * (j * D + d));
        if constexpr (TYPE == K_KV_Q8_0)
            scale = memory.value_scales[j * (D / 32) + d / 32];
    }
    /* Weights by which x is multiplied: with the scale, if there is one. */
    __device__ __forceinline__ void get(float w[SIDE], float x[SIDE]) const
    {
        if constexpr (TYPE == K_KV_F16) {
            values.halves(x);
        } else {
            k_cuda_warp_of_bytes(values.w[0], x);
            k_cuda_warp_of_bytes(values.w[1], x + 4);
        }
        const float dv = TYPE == K_KV_F16 ? 0.0f : k_cuda_warp_of_f16(scale);
#pragma unroll
        for (int v = 0; v < SIDE; v++)
            w[v] = TYPE == K_KV_F16 ? e[v] : k_float_mul(e[v], dv);
    }
};

/* o = fma(e[j], V[j], o) over the chunk's positions (A18); ALL: every vector sees all 64. */
template <enum k_kv_type TYPE, int D, bool ALL>
static __device__ __forceinline__ void tile_values(const struct tile_memory<TYPE, D> &memory,
                                                   uint32_t c, float o[SIDE][SIDE])
{
    typedef struct tile_memory<TYPE, D> M;
    const uint32_t vector = threadIdx.x / M::COLUMNS * SIDE, d = threadIdx.x % M::COLUMNS * SIDE;
    uint32_t n[SIDE];
#pragma unroll
    for (int v = 0; v < SIDE; v++) {
        n[v] = ALL ? (uint32_t)K_PAGE : tile_visible(memory.n_visible[vector + v], c);
#pragma unroll
        for (int i = 0; i < SIDE; i++)
            o[v][i] = 0.0f;
    }
    struct tile_step<TYPE, D> next;
    next.load(memory, 0, vector, d);
#pragma unroll 4
    for (uint32_t j = 0; j < K_PAGE; j++) {
        float w[SIDE], x[SIDE];
        next.get(w, x);
        next.load(memory, (j + 1) % K_PAGE, vector, d);
#pragma unroll
        for (int v = 0; v < SIDE; v++)
            if (ALL || j < n[v])
#pragma unroll
                for (int i = 0; i < SIDE; i++)
                    o[v][i] = k_float_fma(w[v], x[i], o[v][i]);
    }
}

/* Folds the chunk's values into the group's (A19). */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void tile_fold(const struct tile_memory<TYPE, D> &memory,
                                                 uint32_t c, const float o[SIDE][SIDE],
                                                 float y[SIDE][SIDE])
{
    const uint32_t vector = threadIdx.x / tile_memory<TYPE, D>::COLUMNS * SIDE;
    const bool first = c % K_CHUNK_GROUP == 0;
#pragma unroll
    for (int v = 0; v < SIDE; v++) {
        const float a = memory.a[vector + v], b = memory.b[vector + v];
        const bool seen = memory.n_visible[vector + v] > c * K_PAGE;
#pragma unroll
        for (int i = 0; i < SIDE; i++) {
            const float folded = first ? o[v][i] : k_cuda_attention_fold(y[v][i], a, o[v][i], b);
            y[v][i] = seen ? folded : y[v][i];
        }
    }
}

/* Folds group g into what y has; a vector that ends in it gets its result. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void tile_store(const struct k_cuda_attention_args &a,
                                                  const struct tile &t,
                                                  const struct tile_memory<TYPE, D> &memory,
                                                  uint32_t g, const float y[SIDE][SIDE])
{
    typedef struct tile_memory<TYPE, D> M;
    const uint32_t vector = threadIdx.x / M::COLUMNS * SIDE, d = threadIdx.x % M::COLUMNS * SIDE;
#pragma unroll
    for (int v = 0; v < SIDE; v++) {
        const uint32_t n = memory.n_visible[vector + v];
        uint64_t at;
        if (!tile_vector(a, t, vector + v, &at) || n <= g * K_CUDA_ATTENTION_GROUP)
            continue;
        float *to = a.y + at + d, r[SIDE];
        if (g > 0)
            tile_eight(to, r);
#pragma unroll
        for (int i = 0; i < SIDE; i++)
            r[i] = g == 0 ? y[v][i]
                          : k_cuda_attention_fold(r[i], memory.group_a[vector + v], y[v][i],
                                                  memory.group_b[vector + v]);
        if (n <= (g + 1) * K_CUDA_ATTENTION_GROUP)
#pragma unroll
            for (int i = 0; i < SIDE; i++)
                r[i] = k_float_div(r[i], memory.sum[vector + v]);
        ((float4 *)(void *)to)[0] = make_float4(r[0], r[1], r[2], r[3]);
        ((float4 *)(void *)to)[1] = make_float4(r[4], r[5], r[6], r[7]);
    }
}

/* The first thread of vector v: a chunk's maximum meets its group's. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void tile_meet(struct tile_memory<TYPE, D> *memory, uint32_t v,
                                                 uint32_t c, float m, struct tile_sum *group)
{
    if (memory->n_visible[v] <= c * K_PAGE)
        return;
    if (c % K_CHUNK_GROUP == 0) {
        group->m = m;
        return;
    }
    const struct k_cuda_attention_step s = k_cuda_attention_meet(group->m, m);
    memory->a[v] = s.a;
    memory->b[v] = s.b;
    group->m = s.m;
}

/* Then its sum, when all shares of it are there; at the end of a group also the whole's. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void tile_add(struct tile_memory<TYPE, D> *memory, uint32_t v,
                                                uint32_t c, bool ends, struct tile_sum *group,
                                                struct tile_sum *total)
{
    const uint32_t n_visible = memory->n_visible[v], g = c / K_CHUNK_GROUP;
    if (n_visible > c * K_PAGE) {
        float l = memory->l[0][v];
        if constexpr (tile_memory<TYPE, D>::SHARES == 2)
            l = k_float_add(l, memory->l[1][v]);
        group->l = c % K_CHUNK_GROUP == 0
                       ? l
                       : k_cuda_attention_fold(group->l, memory->a[v], l, memory->b[v]);
    }
    if (!ends || n_visible <= g * K_CUDA_ATTENTION_GROUP)
        return;
    if (g == 0) {
        *total = *group;
    } else {
        const struct k_cuda_attention_step s = k_cuda_attention_meet(total->m, group->m);
        memory->group_a[v] = s.a;
        memory->group_b[v] = s.b;
        total->m = s.m;
        total->l = k_cuda_attention_fold(total->l, s.a, group->l, s.b);
    }
    memory->sum[v] = total->l;
}

/* Walks the chunks of a tile whose queries are in place. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void tile_run(const struct k_cuda_attention_args &a,
                                                const struct tile &t,
                                                struct tile_memory<TYPE, D> *memory)
{
    const uint32_t v = threadIdx.x % VECTORS;
    const bool leads = threadIdx.x < VECTORS;
    struct tile_sum group = {0.0f, 0.0f}, total = {0.0f, 0.0f};
    float y[SIDE][SIDE] = {};
    uint8_t *layer = k_cuda_kv_page(a.kv, t.sequence, 0);
    tile_load(a, t, layer, true, memory);
    k_cuda_warp_commit();
#pragma unroll 1
    for (uint32_t c = 0; c < t.n_pages; c++) {
        const bool last = c + 1 == t.n_pages, ends = last || c % K_CHUNK_GROUP == K_CHUNK_GROUP - 1;
        uint8_t *next = k_cuda_kv_page(a.kv, t.sequence, last ? c : c + 1);
        k_cuda_warp_copied<0>();
        __syncthreads(); /* the keys are here; the weights and values before are used */
        tile_load(a, t, layer, false, memory);
        k_cuda_warp_commit();
        tile_scores(memory, a.scale);
        __syncthreads(); /* the scores are here, the keys are used */
        if (!last)
            tile_load(a, t, next, true, memory);
        k_cuda_warp_commit();
        float m, o[SIDE][SIDE];
        if (tile_weights(memory, c, &m) && v / a.shared < t.n_rows)
            a.rows.faults[t.first_row + v / a.shared] = 1;
        if (leads)
            tile_meet(memory, v, c, m, &group);
        k_cuda_warp_copied<1>();
        __syncthreads(); /* the weights and values are here */
        if (leads)
            tile_add(memory, v, c, ends, &group, &total);
        if (t.least >= (c + 1) * K_PAGE)
            tile_values<TYPE, D, true>(*memory, c, o);
        else
            tile_values<TYPE, D, false>(*memory, c, o);
        tile_fold(*memory, c, o, y);
        if (ends) {
            __syncthreads(); /* the factors of the group are here */
            tile_store(a, t, *memory, c / K_CHUNK_GROUP, y);
        }
        layer = next;
    }
}

template <enum k_kv_type TYPE, int D>
static __global__ void __launch_bounds__(D, 256 / D)
    attention_tiles(const struct k_cuda_attention_args a)
{
    extern __shared__ uint4 shared[];
    struct tile_memory<TYPE, D> *memory = (struct tile_memory<TYPE, D> *)(void *)shared;
    const uint32_t n_rows = *a.rows.n_rows, i = gridDim.x - 1 - blockIdx.x; /* long ones first */
    const uint32_t lane = threadIdx.x % 32;
    struct tile t;
    t.first_row = i / a.kv.n_head_kv * a.tile_rows;
    t.head_kv = i % a.kv.n_head_kv;
    if (t.first_row >= n_rows || !k_cuda_attention_tile(a, t.first_row, n_rows))
        return;
    t.n_rows = min(a.tile_rows, n_rows - t.first_row);
    t.sequence = a.rows.sequence[t.first_row];
    if (threadIdx.x < VECTORS) {
        /* A vector that does not exist sees what the first one sees, and is not written. */
        const uint32_t row = threadIdx.x / a.shared;
        memory->n_visible[threadIdx.x] =
            a.rows.position[t.first_row + (row < t.n_rows ? row : 0)] + 1;
    }
    tile_query(a, t, memory);
    __syncthreads();
    const uint32_t n0 = memory->n_visible[lane], n1 = memory->n_visible[lane + 32];
    t.n_pages = (__reduce_max_sync(K_CUDA_WARP_ALL, max(n0, n1)) + K_PAGE - 1) / K_PAGE;
    t.least = __reduce_min_sync(K_CUDA_WARP_ALL, min(n0, n1));
    tile_run(a, t, memory);
}

template <enum k_kv_type TYPE, int D>
static void launch(const struct k_cuda_attention_args *a, struct k_stream *s)
{
    const uint32_t tiles = (a->rows.max_rows + a->tile_rows - 1) / a->tile_rows;
    K_CUDA_LAUNCH(s, (attention_tiles<TYPE, D>), tiles * a->kv.n_head_kv, D,
                  sizeof(struct tile_memory<TYPE, D>), *a);
}

uint32_t k_cuda_attention_prefill_rows(const struct k_attention *a, struct k_stream *s)
{
    const uint32_t shared = a->n_head / a->kv.n_head_kv, dim = a->kv.head_dim;
    const size_t bytes = dim == 64    ? sizeof(struct tile_memory<K_KV_F16, 64>)
                         : dim == 128 ? sizeof(struct tile_memory<K_KV_F16, 128>)
                                      : SIZE_MAX;
    return bytes <= k_cuda_of(s->device)->shared_bytes && shared <= VECTORS / 2 ? VECTORS / shared
                                                                                : 0;
}

void k_cuda_attention_prefill(const struct k_cuda_attention_args *a, enum k_kv_type type,
                              struct k_stream *s)
{
    if (a->kv.head_dim == 64 && type == K_KV_F16)
        launch<K_KV_F16, 64>(a, s);
    else if (a->kv.head_dim == 64)
        launch<K_KV_Q8_0, 64>(a, s);
    else if (type == K_KV_F16)
        launch<K_KV_F16, 128>(a, s);
    else
        launch<K_KV_Q8_0, 128>(a, s);
}

/* Attention by chunks: for few rows, and for rows of many sequences.
 *
 * A block takes chunks of one row and up to eight query heads of one kv head, a warp each. A chunk
 * comes into shared memory once for all of them; a warp then works alone: with lanes as positions it
 * makes the scores, with lanes as dimensions the weighted values, and it folds them in registers.
 *
 * How many chunks a block takes depends on how many there are: one, while that does no more than keep
 * the device busy; a group of eight; or, with many rows, all of a row. Results of single chunks or
 * groups go to the scratch, and a second kernel folds them: chunks to groups, groups to the whole
 * (A19). */
#include "k_cuda_attention.cuh"

enum {
    HEADS = 8, /* of a block */
    THREADS = 32 * HEADS,
    FEW_ROWS = 8,
    CHUNK_SLOTS = 128, /* chunks of a row up to which each may be a piece of work */
    GROUP_SLOTS = CHUNK_SLOTS / K_CHUNK_GROUP,
    MERGERS = 4 /* groups that a block of the second kernel makes at a time */
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

/* ---- a chunk comes ---------------------------------------------------------------------------- */

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

/* ---- one chunk, one head, one warp ------------------------------------------------------------- */

/* Scores of positions 2 * lane and 2 * lane + 1, dimensions ascending (A18). */
template <int D>
static __device__ __forceinline__ void scores_f16(const float *q,
                                                  const struct chunk_stage<K_KV_F16, D> &stage,
                                                  float acc[2])
{
    const uint32_t *keys = (const uint32_t *)(const void *)stage.keys + threadIdx.x % 32;
#pragma unroll 4
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
#pragma unroll 2
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

/* ---- a block's work --------------------------------------------------------------------------- */

template <int N> static __device__ __forceinline__ void store_lane(float *to, const float y[N])
{
    if constexpr (N == 2)
        *(float2 *)(void *)to = make_float2(y[0], y[1]);
    else
#pragma unroll
        for (int i = 0; i < N; i += 4)
            *(float4 *)(void *)(to + i) = make_float4(y[i], y[i + 1], y[i + 2], y[i + 3]);
}

/* The result of the warp's head: of the whole row into y, otherwise into its slot of the scratch. */
template <int D>
static __device__ __forceinline__ void work_store(const struct k_cuda_attention_args &a,
                                                  const struct work &p, struct part<D / 32> *r)
{
    enum {
        N = D / 32
    };
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t head = (uint64_t)p.row * a.n_head + p.first_head + threadIdx.x / 32;
    if (p.end - p.first == p.n_chunks) {
#pragma unroll
        for (int i = 0; i < N; i++)
            r->y[i] = k_float_div(r->y[i], r->l);
        store_lane<N>(a.y + head * D + lane * N, r->y);
        return;
    }
    const uint32_t slot =
        p.extent == EXTENT_CHUNK ? p.first : a.chunk_slots + p.first / K_CHUNK_GROUP;
    const uint64_t at = head * (a.chunk_slots + a.max_groups) + slot;
    store_lane<N>(a.parts + at * D + lane * N, r->y);
    if (lane == 0)
        a.sums[at] = make_float2(r->m, r->l);
}

template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void work_run(const struct k_cuda_attention_args &a,
                                                const struct work &p,
                                                struct chunk_memory<TYPE, D> *memory)
{
    typedef struct chunk_memory<TYPE, D> M;
    const bool mine = threadIdx.x / 32 < p.n_heads; /* this warp has a head */
    struct part<D / 32> chunk = {}, group = {}, total = {
    };
    chunk_load<TYPE, D>(a, p, p.first, &memory->stage[0]);
    bool fault = chunk_query(a, p, memory);
#pragma unroll 1
    for (uint32_t c = p.first; c < p.end; c++) {
        const uint32_t i = (c - p.first) % M::STAGES,
                       n = min(p.n_visible - c * K_PAGE, (uint32_t)K_PAGE);
        const struct chunk_stage<TYPE, D> &stage = memory->stage[i];
        k_cuda_warp_copied<1>();
        __syncthreads(); /* the keys are here, and the chunk before is used */
        if (M::STAGES == 2)
            chunk_load<TYPE, D>(a, p, c + 1, &memory->stage[1 - i]);
        if (mine)
            fault |= chunk_weigh<TYPE, D>(stage, memory, n, a.scale, &chunk);
        k_cuda_warp_copied<M::STAGES == 2 ? 2 : 0>();
        __syncthreads(); /* the values are here */
        if (mine) {
#pragma unroll
            for (int k = 0; k < D / 32; k++)
                chunk.y[k] = 0.0f;
            chunk_values<TYPE, D>(stage, memory->e[threadIdx.x / 32], n, chunk.y);
            part_fold(&group, chunk, c == p.first || c % K_CHUNK_GROUP == 0);
            if (c % K_CHUNK_GROUP == K_CHUNK_GROUP - 1 || c + 1 == p.end)
                part_fold(&total, group, c - p.first < K_CHUNK_GROUP);
        }
        if (M::STAGES == 1) {
            __syncthreads();
            chunk_load<TYPE, D>(a, p, c + 1, &memory->stage[0]);
        }
    }
    if (mine)
        work_store<D>(a, p, &total);
    if (fault)
        a.rows.faults[p.row] = 1;
    __syncthreads(); /* the next piece of work uses the memory again */
}

/* ---- which work ------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t chunks_of(uint32_t position)
{
    return position / K_PAGE + 1;
}

/* Few rows, as all blocks read them at once. */
struct few {
    uint32_t n_rows, n_chunks[FEW_ROWS], sequence[FEW_ROWS];
};

static __device__ __forceinline__ void few_read(const struct k_cuda_attention_args &a,
                                                struct few *few)
{
    if (threadIdx.x < min(a.rows.max_rows, (uint32_t)FEW_ROWS)) {
        few->n_chunks[threadIdx.x] = chunks_of(a.rows.position[threadIdx.x]);
        few->sequence[threadIdx.x] = a.rows.sequence[threadIdx.x];
    }
    if (threadIdx.x == 0)
        few->n_rows = *a.rows.n_rows;
    __syncthreads();
}

/* Chunks that are one piece of work, 1 or a group: all blocks of both kernels agree. */
static __device__ __forceinline__ enum extent few_extent(const struct k_cuda_attention_args &a,
                                                         const struct few &few)
{
    uint32_t sum = 0, most = 0;
    for (uint32_t r = 0; r < few.n_rows; r++) {
        sum += few.n_chunks[r];
        most = max(most, few.n_chunks[r]);
    }
    const uint32_t parts = a.kv.n_head_kv * ((a.shared + HEADS - 1) / HEADS);
    return most <= a.chunk_slots && sum * parts <= a.busy * K_CHUNK_GROUP / 2 ? EXTENT_CHUNK
                                                                              : EXTENT_GROUP;
}

/* Fills in the heads of piece i of a step, and which chunks of the row it has: the n-th `chunks`. */
static __device__ __forceinline__ void work_fill(const struct k_cuda_attention_args &a, uint32_t i,
                                                 uint32_t n, uint32_t chunks, struct work *p)
{
    const uint32_t of_head = (a.shared + HEADS - 1) / HEADS, part = i % of_head;
    p->head_kv = i / of_head % a.kv.n_head_kv;
    p->first_head = p->head_kv * a.shared + part * HEADS;
    p->n_heads = min((uint32_t)HEADS, a.shared - part * HEADS);
    p->n_visible = a.rows.position[p->row] + 1;
    p->n_chunks = chunks_of(p->n_visible - 1);
    p->first = n * chunks;
    p->end = p->first + min(p->n_chunks - p->first, chunks);
}

/* Piece i of few rows; false: there are not so many. */
static __device__ __forceinline__ bool work_of_few(const struct k_cuda_attention_args &a,
                                                   const struct few &few, uint32_t i,
                                                   struct work *p)
{
    const uint32_t chunks = p->extent == EXTENT_CHUNK ? 1 : (uint32_t)K_CHUNK_GROUP;
    uint32_t n = i / (a.kv.n_head_kv * ((a.shared + HEADS - 1) / HEADS));
    for (uint32_t row = 0; row < few.n_rows; row++) {
        const uint32_t pieces = (few.n_chunks[row] + chunks - 1) / chunks;
        if (n < pieces) {
            p->row = row;
            p->sequence = few.sequence[row];
            work_fill(a, i, n, chunks, p);
            return true;
        }
        n -= pieces;
    }
    return false;
}

template <enum k_kv_type TYPE, int D>
static __global__ void __launch_bounds__(THREADS, 3)
    attention_chunks(const struct k_cuda_attention_args a)
{
    extern __shared__ uint4 shared[];
    struct chunk_memory<TYPE, D> *memory = (struct chunk_memory<TYPE, D> *)(void *)shared;
    struct work p = {};
    k_cuda_await();
    k_cuda_release();
    if (a.rows.max_rows <= FEW_ROWS) {
        __shared__ struct few few;
        few_read(a, &few);
        p.extent = few_extent(a, few);
        for (uint32_t i = blockIdx.x; work_of_few(a, few, i, &p); i += gridDim.x)
            work_run(a, p, memory);
        return;
    }
    /* Many rows: those of which the prefill kernel does not take the tile. */
    const uint32_t n_rows = *a.rows.n_rows;
    const uint32_t parts = a.kv.n_head_kv * ((a.shared + HEADS - 1) / HEADS);
    p.extent = EXTENT_ROW;
    for (uint32_t i = blockIdx.x; i < n_rows * parts; i += gridDim.x) {
        p.row = i / parts;
        if (a.tile_rows != 0 && k_cuda_attention_tile(a, p.row - p.row % a.tile_rows, n_rows))
            continue;
        p.sequence = a.rows.sequence[p.row];
        work_fill(a, i, 0, UINT32_MAX, &p);
        work_run(a, p, memory);
    }
}

/* ---- the second kernel ------------------------------------------------------------------------ */

/* Folds `count` results (A19), the thread's dimension of each at parts, D apart. A lane makes the
 * factors of one of 32, from maxima that are exact in any order; meanwhile the first values come. */
template <int D>
static __device__ __forceinline__ struct part<1> merge_fold(const float2 *sums, const float *parts,
                                                            uint32_t count) {
    enum {
        AHEAD = 8
    };
    const uint32_t lane = threadIdx.x % 32;
    struct part<1> r = {
    };
    for (uint32_t base = 0; base < count; base += 32) {
        const uint32_t n = min(32u, count - base);
        const float2 sum = sums[base + min(lane, n - 1)];
        float next[AHEAD];
#pragma unroll
        for (uint32_t k = 0; k < AHEAD; k++)
            next[k] = k < n ? parts[(size_t)(base + k) * D] : 0.0f;
        float top = sum.x; /* of this one and those before it */
        for (uint32_t o = 1; o < 32; o *= 2) {
            const float other = __shfl_up_sync(K_CUDA_WARP_ALL, top, o);
            top = lane >= o && other > top ? other : top;
        }
        if (base > 0)
            top = r.m > top ? r.m : top;
        const float above = __shfl_up_sync(K_CUDA_WARP_ALL, top, 1);
        const struct k_cuda_attention_step s = k_cuda_attention_meet(lane > 0   ? above
                                                                     : base > 0 ? r.m
                                                                                : sum.x,
                                                                     sum.x);
        for (uint32_t i = 0; i < n; i += AHEAD) {
#pragma unroll
            for (uint32_t k = 0; k < AHEAD; k++) {
                const float a = __shfl_sync(K_CUDA_WARP_ALL, s.a, i + k);
                const float b = __shfl_sync(K_CUDA_WARP_ALL, s.b, i + k);
                const float l = __shfl_sync(K_CUDA_WARP_ALL, sum.y, i + k);
                const bool first = base + i + k == 0;
                if (i + k < n) {
                    r.y[0] = first ? next[k] : k_cuda_attention_fold(r.y[0], a, next[k], b);
                    r.l = first ? l : k_cuda_attention_fold(r.l, a, l, b);
                }
            }
#pragma unroll
            for (uint32_t k = 0; k < AHEAD; k++)
                next[k] = i + AHEAD + k < n ? parts[(size_t)(base + i + AHEAD + k) * D] : 0.0f;
        }
        r.m = __shfl_sync(K_CUDA_WARP_ALL, top, n - 1);
    }
    return r;
}

/* Few rows: from the slots to the result of a query head. */
template <int D>
static __global__ void __launch_bounds__(MERGERS *D)
    attention_merge(const struct k_cuda_attention_args a)
{
    __shared__ float2 sums[GROUP_SLOTS];
    __shared__ float ys[GROUP_SLOTS][D];
    __shared__ struct few few;
    const uint32_t row = blockIdx.x, d = threadIdx.x % D;
    k_cuda_await();
    k_cuda_release();
    few_read(a, &few);
    const uint32_t n_chunks = few.n_chunks[row];
    const uint32_t n_groups = (n_chunks + K_CHUNK_GROUP - 1) / K_CHUNK_GROUP;
    if (row >= few.n_rows || n_chunks == 1)
        return;
    const uint64_t head = (uint64_t)row * a.n_head + blockIdx.y;
    const float2 *from = a.sums + head * (a.chunk_slots + a.max_groups);
    const float *parts = a.parts + head * (a.chunk_slots + a.max_groups) * D + d;
    struct part<1> r;
    if (few_extent(a, few) == EXTENT_GROUP) {
        if (n_groups == 1 || threadIdx.x >= D)
            return;
        r = merge_fold<D>(from + a.chunk_slots, parts + (size_t)a.chunk_slots * D, n_groups);
    } else {
        for (uint32_t g = threadIdx.x / D; g < n_groups; g += MERGERS) {
            const uint32_t first = g * K_CHUNK_GROUP;
            r = merge_fold<D>(from + first, parts + (size_t)first * D,
                              min(n_chunks - first, (uint32_t)K_CHUNK_GROUP));
            ys[g][d] = r.y[0];
            if (d == 0)
                sums[g] = make_float2(r.m, r.l);
        }
        __syncthreads();
        if (threadIdx.x >= D)
            return;
        r = merge_fold<D>(sums, &ys[0][d], n_groups);
    }
    a.y[head * D + d] = k_float_div(r.y[0], r.l);
}

/* ---- host side ------------------------------------------------------------------------------- */

static uint32_t groups_of(uint32_t max_pages)
{
    return (max_pages + K_CHUNK_GROUP - 1) / K_CHUNK_GROUP;
}

static uint32_t chunk_slots_of(uint32_t max_pages)
{
    return max_pages < CHUNK_SLOTS ? max_pages : (uint32_t)CHUNK_SLOTS;
}

extern "C" uint64_t k_cuda_attention_bytes(const struct k_device *d, uint32_t n_head,
                                           uint32_t head_dim, uint32_t max_rows, uint32_t max_pages)
{
    (void)d;
    const uint64_t rows = max_rows < FEW_ROWS ? max_rows : (uint32_t)FEW_ROWS;
    const uint64_t slots = n_head * rows * (chunk_slots_of(max_pages) + groups_of(max_pages));
    return slots * (head_dim * sizeof(float) + sizeof(float2)) + 64;
}

template <enum k_kv_type TYPE, int D>
static void launch(const struct k_cuda_attention_args *a, struct k_stream *s)
{
    const uint32_t rows = a->rows.max_rows;
    const bool few = rows <= FEW_ROWS;
    const uint64_t most = (uint64_t)rows * (few ? a->kv.max_pages : 1) * a->kv.n_head_kv *
                          ((a->shared + HEADS - 1) / HEADS);
    K_CUDA_LAUNCH_AHEAD(s, (attention_chunks<TYPE, D>),
                        (uint32_t)(most < 2 * a->busy ? most : 2 * a->busy), THREADS,
                        sizeof(struct chunk_memory<TYPE, D>), *a);
    if (few && a->kv.max_pages > 1)
        K_CUDA_LAUNCH_AHEAD(s, (attention_merge<D>), dim3(rows, a->n_head), MERGERS * D, 0, *a);
}

/* False: there is no kernel of chunks for this head size. */
template <enum k_kv_type TYPE>
static bool launch_chunks(const struct k_cuda_attention_args *a, struct k_stream *s)
{
    switch (a->kv.head_dim) {
    case 64:
        launch<TYPE, 64>(a, s);
        return true;
    case 128:
        launch<TYPE, 128>(a, s);
        return true;
    case 256:
        launch<TYPE, 256>(a, s);
        return true;
    default:
        return false;
    }
}

extern "C" enum err_code k_cuda_attention(const struct k_attention *a, struct k_stream *s)
{
    struct k_cuda_attention_args args;
    args.rows = k_cuda_rows_of(&a->rows);
    args.q = (const float *)k_cuda_at(a->q);
    args.y = (float *)k_cuda_at(a->y);
    args.kv = k_cuda_kv_of(&a->kv);
    args.n_head = a->n_head;
    args.shared = a->n_head / a->kv.n_head_kv;
    args.scale = a->scale;
    args.busy = 2 * k_cuda_of(s->device)->sm_count;
    args.max_groups = groups_of(a->kv.max_pages);
    args.tile_rows = a->rows.max_rows > FEW_ROWS ? k_cuda_attention_prefill_rows(a, s) : 0;
    args.chunk_slots = chunk_slots_of(a->kv.max_pages);
    /* Scratch: results of up to FEW_ROWS rows, then their sums. */
    const uint64_t rows = a->rows.max_rows < FEW_ROWS ? a->rows.max_rows : (uint32_t)FEW_ROWS;
    const uint64_t slots = rows * a->n_head * (args.chunk_slots + args.max_groups);
    args.parts = (float *)k_cuda_at(a->scratch);
    args.sums = (float2 *)(void *)(args.parts + (slots * a->kv.head_dim + 1) / 2 * 2);
    if (args.tile_rows != 0)
        k_cuda_attention_prefill(&args, a->kv.type, s);
    if (a->kv.type == K_KV_F16 ? !launch_chunks<K_KV_F16>(&args, s)
                               : !launch_chunks<K_KV_Q8_0>(&args, s))
        k_cuda_attention_plain(&args, a->kv.type, s);
    return ERR_OK;
}

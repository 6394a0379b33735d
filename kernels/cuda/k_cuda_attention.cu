/* Attention by groups: for few rows, and for rows of many sequences.
 *
 * A block has eight warps. For one group of 512 positions, each warp takes a chunk and some query
 * heads of one kv head: with lanes as positions it makes the scores, with lanes as dimensions the
 * weighted values; then all threads fold the chunks in order. A warp's keys and values come once, in
 * pieces through a ring of its own in shared memory, so that some are always on their way. */
#include "k_cuda_attention.cuh"

enum {
    WARPS = K_CHUNK_GROUP,
    THREADS = 32 * WARPS,
    FEW_ROWS = 8,
    RING = 4,    /* pieces of keys or values that a warp's ring holds */
    PIECE = 2048 /* bytes of one, without scales */
};

/* A block's piece of the work: heads first_head .. first_head + n_heads of one kv head, groups
 * first .. first + count of a row's n_groups. */
struct work {
    uint32_t row, sequence, n_visible, head_kv, first_head, n_heads, first, count, n_groups;
};

/* How a chunk is cut into pieces: first its keys, 2 KiB each with the scales of so many, then its
 * values. */
template <enum k_kv_type TYPE, int D> struct group_ring {
    enum {
        SIZE = TYPE == K_KV_F16 ? 2 : 1,     /* of a value */
        SCALES = TYPE == K_KV_F16 ? 0 : 128, /* bytes */
        STRIDE = PIECE + SCALES,
        PIECES = D * K_PAGE * SIZE / PIECE, /* of keys, and of values */
        DIMS = PIECE / (K_PAGE * SIZE),     /* dimensions of a piece of keys */
        POSITIONS = PIECE / (D * SIZE)      /* positions of a piece of values */
    };
};

/* Shared memory. Where a warp's ring was, its values go when the chunk is done. */
template <enum k_kv_type TYPE, int D, int HEADS> struct group_memory {
    union {
        float f32[D][HEADS];
        struct {
            uint32_t word[D / 4][HEADS]; /* four dimensions each */
            float dx[D / 32][HEADS];
        } q8;
    } q;
    union {
        alignas(16) uint8_t ring[RING * group_ring<TYPE, D>::STRIDE];
        float o[HEADS][D];
    } chunk[WARPS];
    float s[WARPS][HEADS][K_PAGE]; /* scores, then weights */
    float m[WARPS][HEADS], l[WARPS][HEADS], a[WARPS][HEADS], b[WARPS][HEADS];
};

/* A chunk of one kv head, n positions of it visible. */
struct group_source {
    struct k_cuda_kv_head kv;
    uint32_t n;
};

/* Starts the copy of piece i, if there is one; positions that nobody sees stay away. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void ring_issue(const struct group_source &from, uint32_t i,
                                                  uint8_t *ring)
{
    typedef struct group_ring<TYPE, D> R;
    const bool keys = i < R::PIECES;
    const uint32_t k = keys ? i : i - R::PIECES, lane = threadIdx.x % 32;
    if (keys || (k < R::PIECES && k * R::POSITIONS < from.n)) {
        uint8_t *to = ring + i % RING * R::STRIDE;
        const uint8_t *at = (const uint8_t *)(keys ? from.kv.keys : from.kv.values) + k * PIECE;
#pragma unroll
        for (int w = 0; w < PIECE / 512; w++)
            k_cuda_warp_copy16(to + 512 * w + 16 * lane, at + 512 * w + 16 * lane);
        if (R::SCALES != 0 && lane < R::SCALES / 16)
            k_cuda_warp_copy16(to + PIECE + 16 * lane,
                               (const uint8_t *)(keys ? from.kv.key_scales : from.kv.value_scales) +
                                   k * R::SCALES + 16 * lane);
    }
    k_cuda_warp_commit();
}

/* Waits for piece i, and starts that which follows what is on its way. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ const uint8_t *ring_next(const struct group_source &from,
                                                           uint32_t i, uint8_t *ring)
{
    k_cuda_warp_copied<RING - 2>();
    __syncwarp();
    ring_issue<TYPE, D>(from, i + RING - 1, ring);
    return ring + i % RING * group_ring<TYPE, D>::STRIDE;
}

/* Puts the heads' queries into shared memory. Heads that do not exist are 0. True: not finite. */
template <enum k_kv_type TYPE, int D, int HEADS>
static __device__ __forceinline__ bool group_query(const struct k_cuda_attention_args &a,
                                                   const struct work &p,
                                                   struct group_memory<TYPE, D, HEADS> *memory)
{
    const float *q = a.q + ((uint64_t)p.row * a.n_head + p.head_kv * a.shared + p.first_head) * D;
    bool fault = false;
#pragma unroll
    for (uint32_t base = 0; base < HEADS * D / 4; base += THREADS) {
        const uint32_t i = base + threadIdx.x, h = i / (D / 4), w = i % (D / 4);
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (h < p.n_heads)
            x = *(const float4 *)(const void *)(q + (size_t)h * D + 4 * w);
        const float v[4] = {x.x, x.y, x.z, x.w};
        if constexpr (TYPE == K_KV_F16) {
            if (h < HEADS)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    memory->q.f32[4 * w + k][h] = v[k];
        } else {
            uint32_t word;
            float dx;
            fault |= k_cuda_attention_quantise(v, &word, &dx);
            if (h < HEADS) {
                memory->q.q8.word[w][h] = word;
                memory->q.q8.dx[w / 8][h] = dx;
            }
        }
    }
    return fault;
}

/* Scores of a chunk, f16: a lane has positions 2 * lane and 2 * lane + 1, one sum a head and
 * position, dimensions ascending (A18). */
template <int D, int HEADS>
static __device__ __forceinline__ void group_scores_f16(const struct group_source &from,
                                                        uint8_t *ring, const float (*q)[HEADS],
                                                        float scale, float (*s)[K_PAGE])
{
    typedef struct group_ring<K_KV_F16, D> R;
    const uint32_t lane = threadIdx.x % 32;
    float acc[HEADS][2];
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        acc[h][0] = acc[h][1] = 0.0f;
#pragma unroll 1
    for (uint32_t i = 0; i < R::PIECES; i++, q += R::DIMS) {
        const uint32_t *keys =
            (const uint32_t *)(const void *)ring_next<K_KV_F16, D>(from, i, ring) + lane;
#pragma unroll
        for (int d = 0; d < R::DIMS; d++) {
            const float2 k = k_cuda_warp_of_f16x2(keys[d * (K_PAGE / 2)]);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                acc[h][0] = k_float_fma(q[d][h], k.x, acc[h][0]);
                acc[h][1] = k_float_fma(q[d][h], k.y, acc[h][1]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        *(float2 *)(void *)&s[h][2 * lane] =
            make_float2(k_float_mul(acc[h][0], scale), k_float_mul(acc[h][1], scale));
}

/* Scores of a chunk, 8-bit: half a warp has half of the heads, a lane four positions; 32 dimensions
 * are one exact integer. */
template <int D, int HEADS>
static __device__ __forceinline__ void group_scores_q8(
    const struct group_source &from, uint8_t *ring,
    const struct group_memory<K_KV_Q8_0, D, HEADS> &memory, float scale, float (*s)[K_PAGE])
{
    enum {
        H = HEADS / 2
    };
    const uint32_t lane = threadIdx.x % 32, quad = lane % 16, first = lane / 16 * H;
    float acc[H][4];
#pragma unroll
    for (int h = 0; h < H; h++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[h][i] = 0.0f;
#pragma unroll 1
    for (uint32_t b = 0; b < D / 32; b++) {
        const uint8_t *piece = ring_next<K_KV_Q8_0, D>(from, b, ring);
        const uint32_t *keys = (const uint32_t *)(const void *)piece + quad;
        float dk[4];
        k_cuda_warp_of_f16x4(((const uint2 *)(const void *)(piece + PIECE))[quad], dk);
        int32_t dot[H][4] = {};
#pragma unroll
        for (int w = 0; w < 8; w++) {
            uint32_t word[4], k[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                word[i] = keys[(4 * w + i) * (K_PAGE / 4)];
            k_cuda_attention_transpose(word, k);
#pragma unroll
            for (int h = 0; h < H; h++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    dot[h][i] = __dp4a((int32_t)memory.q.q8.word[8 * b + w][first + h],
                                       (int32_t)k[i], dot[h][i]);
        }
#pragma unroll
        for (int h = 0; h < H; h++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                acc[h][i] = k_float_fma(k_float_mul(memory.q.q8.dx[b][first + h], dk[i]),
                                        k_cuda_warp_of_int(dot[h][i]), acc[h][i]);
    }
#pragma unroll
    for (int h = 0; h < H; h++)
        *(float4 *)(void *)&s[first + h][4 * quad] =
            make_float4(k_float_mul(acc[h][0], scale), k_float_mul(acc[h][1], scale),
                        k_float_mul(acc[h][2], scale), k_float_mul(acc[h][3], scale));
}

/* A lane's D / 32 neighbouring values of one position, and their scale. */
template <enum k_kv_type TYPE, int D> struct group_value {
    enum {
        N = D / 32,
        BYTES = TYPE == K_KV_F16 ? 2 * N : N,
        WORDS = (BYTES + 3) / 4
    };
    uint32_t word[WORDS];
    uint16_t scale;

    /* Position j of a piece. */
    __device__ __forceinline__ void load(const uint8_t *piece, uint32_t j)
    {
        const uint32_t lane = threadIdx.x % 32;
        const uint8_t *at = piece + (j * 32 + lane) * BYTES;
        if constexpr (BYTES == 16) {
            const uint4 w = *(const uint4 *)(const void *)at;
            word[0] = w.x, word[1] = w.y, word[2] = w.z, word[3] = w.w;
        } else if constexpr (BYTES == 8) {
            const uint2 w = *(const uint2 *)(const void *)at;
            word[0] = w.x, word[1] = w.y;
        } else if constexpr (BYTES == 4) {
            word[0] = *(const uint32_t *)(const void *)at;
        } else {
            word[0] = *(const uint16_t *)(const void *)at;
        }
        if constexpr (TYPE == K_KV_Q8_0)
            scale = ((const uint16_t *)(const void *)(piece + PIECE))[j * N + lane * N / 32];
    }
    __device__ __forceinline__ void get(float v[N]) const
    {
        if constexpr (TYPE == K_KV_F16) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                const float2 w = k_cuda_warp_of_f16x2(word[i]);
                v[2 * i] = w.x;
                v[2 * i + 1] = w.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                float w[4];
                k_cuda_warp_of_bytes(word[i], w);
#pragma unroll
                for (int k = 0; k < 4 && 4 * i + k < N; k++)
                    v[4 * i + k] = w[k];
            }
        }
    }
};

/* o = fma(e[j], V[j], o) for four positions from j on, those below n or ALL of them (A18). */
template <enum k_kv_type TYPE, int D, int HEADS, bool ALL>
static __device__ __forceinline__ void group_weighted(const struct group_value<TYPE, D> value[4],
                                                      const float (*e)[K_PAGE], uint32_t j,
                                                      uint32_t n, float (*o)[D / 32])
{
    enum {
        N = D / 32
    };
    float v[4][N], dv[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        value[k].get(v[k]);
        if (TYPE == K_KV_Q8_0)
            dv[k] = k_cuda_warp_of_f16(value[k].scale);
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        const float4 x = *(const float4 *)(const void *)&e[h][j];
        const float ej[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float w = TYPE == K_KV_Q8_0 ? k_float_mul(ej[k], dv[k]) : ej[k];
            if (ALL || j + k < n)
#pragma unroll
                for (int i = 0; i < N; i++)
                    o[h][i] = k_float_fma(w, v[k][i], o[h][i]);
        }
    }
}

template <enum k_kv_type TYPE, int D, int HEADS>
static __device__ __forceinline__ void group_values(const struct group_source &from, uint8_t *ring,
                                                    const float (*e)[K_PAGE], float (*o)[D / 32])
{
    typedef struct group_ring<TYPE, D> R;
    const uint32_t n = from.n;
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            o[h][i] = 0.0f;
#pragma unroll 1
    for (uint32_t i = 0; i < R::PIECES && i * R::POSITIONS < n; i++) {
        const uint8_t *piece = ring_next<TYPE, D>(from, R::PIECES + i, ring);
#pragma unroll
        for (uint32_t k = 0; k < R::POSITIONS; k += 4) {
            const uint32_t j = i * R::POSITIONS + k;
            struct group_value<TYPE, D> value[4];
#pragma unroll
            for (int p = 0; p < 4; p++)
                value[p].load(piece, k + p);
            if (j + 4 <= n)
                group_weighted<TYPE, D, HEADS, true>(value, e, j, n, o);
            else
                group_weighted<TYPE, D, HEADS, false>(value, e, j, n, o);
        }
    }
}

/* The warp's chunk c of a piece; its first keys are on their way. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ struct group_source group_start(
    const struct k_cuda_attention_args &a, const struct work &p, uint32_t c, uint8_t *ring)
{
    struct group_source from = {};
    if (c * K_PAGE >= p.n_visible)
        return from;
    uint8_t *layer = k_cuda_kv_page(a.kv, p.sequence, c);
    from.n = min(p.n_visible - c * K_PAGE, (uint32_t)K_PAGE);
    from.kv = TYPE == K_KV_F16 ? k_cuda_kv_head_f16(a.kv, layer, p.head_kv)
                               : k_cuda_kv_head_of(a.kv, layer, p.head_kv);
    for (uint32_t i = 0; i < RING - 1; i++)
        ring_issue<TYPE, D>(from, i, ring);
    return from;
}

/* One chunk by one warp: m, l and o of each head into shared memory. True: a score is not finite. */
template <enum k_kv_type TYPE, int D, int HEADS>
static __device__ __forceinline__ bool group_chunk(const struct k_cuda_attention_args &a,
                                                   const struct work &p,
                                                   const struct group_source &from,
                                                   struct group_memory<TYPE, D, HEADS> *memory)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t *ring = memory->chunk[warp].ring;
    float(*s)[K_PAGE] = memory->s[warp];
    if constexpr (TYPE == K_KV_F16)
        group_scores_f16<D, HEADS>(from, ring, memory->q.f32, a.scale, s);
    else
        group_scores_q8<D, HEADS>(from, ring, *memory, a.scale, s);
    __syncwarp();
    bool fault = false;
#pragma unroll
    for (uint32_t h = 0; h < HEADS; h++) {
        float e0, e1, m, l;
        const bool wrong =
            k_cuda_attention_weigh(s[h][lane], s[h][lane + 32], from.n, &e0, &e1, &m, &l);
        fault |= wrong && h < p.n_heads;
        s[h][lane] = e0;
        s[h][lane + 32] = e1;
        if (lane == 0) {
            memory->m[warp][h] = m;
            memory->l[warp][h] = l;
        }
    }
    __syncwarp();
    float o[HEADS][D / 32];
    group_values<TYPE, D, HEADS>(from, ring, s, o);
    k_cuda_warp_copied<0>();
    __syncwarp();
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            memory->chunk[warp].o[h][lane * (D / 32) + i] = o[h][i];
    return fault;
}

/* The factors with which chunk w of the group is folded, one thread a chunk and head: the maxima
 * before and after it are exact in any order. */
template <enum k_kv_type TYPE, int D, int HEADS>
static __device__ __forceinline__ void group_factors(struct group_memory<TYPE, D, HEADS> *memory)
{
    const uint32_t w = threadIdx.x % WARPS, h = threadIdx.x / WARPS;
    if (h >= HEADS)
        return;
    float m = memory->m[0][h];
    for (uint32_t i = 1; i < w; i++)
        m = m > memory->m[i][h] ? m : memory->m[i][h];
    const struct k_cuda_attention_step s = k_cuda_attention_meet(m, memory->m[w][h]);
    memory->a[w][h] = s.a;
    memory->b[w][h] = s.b;
}

/* One head and dimension of a group, and of all groups so far. */
struct group_sum {
    float m, l, y;
};

/* Folds the group's chunks (A19). */
template <enum k_kv_type TYPE, int D, int HEADS>
static __device__ __forceinline__ struct group_sum group_fold(
    const struct group_memory<TYPE, D, HEADS> &memory, uint32_t h, uint32_t d, uint32_t n_chunks)
{
    struct group_sum r = {memory.m[0][h], memory.l[0][h], memory.chunk[0].o[h][d]};
#pragma unroll
    for (uint32_t w = 1; w < WARPS; w++)
        if (w < n_chunks) {
            const float a = memory.a[w][h], b = memory.b[w][h], m = memory.m[w][h];
            r.y = k_cuda_attention_fold(r.y, a, memory.chunk[w].o[h][d], b);
            r.l = k_cuda_attention_fold(r.l, a, memory.l[w][h], b);
            r.m = r.m > m ? r.m : m;
        }
    return r;
}

static __device__ __forceinline__ void group_into(struct group_sum *into,
                                                  const struct group_sum &next)
{
    const struct k_cuda_attention_step s = k_cuda_attention_meet(into->m, next.m);
    into->y = k_cuda_attention_fold(into->y, s.a, next.y, s.b);
    into->l = k_cuda_attention_fold(into->l, s.a, next.l, s.b);
    into->m = s.m;
}

/* Writes a head and dimension: the result, or that of a group for group_merge. */
template <int D>
static __device__ __forceinline__ void group_store(const struct k_cuda_attention_args &a,
                                                   const struct work &p, uint32_t h, uint32_t d,
                                                   const struct group_sum &r)
{
    const uint64_t head = (uint64_t)p.row * a.n_head + p.head_kv * a.shared + p.first_head + h;
    if (p.count == p.n_groups) {
        a.y[head * D + d] = k_float_div(r.y, r.l);
        return;
    }
    const uint64_t at = head * a.max_groups + p.first;
    a.parts[at * D + d] = r.y;
    if (d == 0)
        a.sums[at] = make_float2(r.m, r.l);
}

/* The factors of up to 32 groups from `base` on for the head of this warp, a lane each, from maxima
 * that are exact in any order; m: the maximum before them, then after them. */
static __device__ __forceinline__ struct k_cuda_attention_step merge_factors(const float2 *sums,
                                                                             uint32_t base,
                                                                             uint32_t count,
                                                                             float *m, float *ret_l)
{
    const uint32_t lane = threadIdx.x % 32;
    const float2 sum = __ldcg(&sums[base + min(lane, count - 1)]);
    float top = sum.x; /* of this group and those before it */
    for (uint32_t o = 1; o < 32; o *= 2) {
        const float other = __shfl_up_sync(K_CUDA_WARP_ALL, top, o);
        top = lane >= o && other > top ? other : top;
    }
    if (base > 0)
        top = *m > top ? *m : top;
    const float above = __shfl_up_sync(K_CUDA_WARP_ALL, top, 1);
    const float before = lane > 0 ? above : base > 0 ? *m : sum.x;
    *m = __shfl_sync(K_CUDA_WARP_ALL, top, count - 1);
    *ret_l = sum.y;
    return k_cuda_attention_meet(before, sum.x);
}

/* Folds all groups of the heads, whose results lie in a.parts and a.sums (A19). */
template <enum k_kv_type TYPE, int D, int HEADS>
static __device__ __forceinline__ void group_merge(const struct k_cuda_attention_args &a,
                                                   const struct work &p,
                                                   struct group_memory<TYPE, D, HEADS> *memory)
{
    enum {
        SUMS = (HEADS * D + THREADS - 1) / THREADS
    };
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint64_t head = (uint64_t)p.row * a.n_head + p.head_kv * a.shared + p.first_head;
    float(*factor)[HEADS][3] = (float(*)[HEADS][3])(void *)memory->s; /* [32]: a, b, l */
    float m = 0.0f, l[SUMS], y[SUMS];
    for (uint32_t base = 0; base < p.n_groups; base += 32) {
        const uint32_t count = min(32u, p.n_groups - base);
        if (warp < p.n_heads) {
            float next;
            const struct k_cuda_attention_step s =
                merge_factors(a.sums + (head + warp) * a.max_groups, base, count, &m, &next);
            factor[lane][warp][0] = s.a;
            factor[lane][warp][1] = s.b;
            factor[lane][warp][2] = next;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SUMS; k++) {
            const uint32_t i = threadIdx.x + THREADS * k, h = i / D, d = i % D;
            if (h >= p.n_heads)
                continue;
            const float *part = a.parts + ((head + h) * a.max_groups + base) * D + d;
#pragma unroll 8
            for (uint32_t g = 0; g < count; g++) {
                const float next = __ldcg(part + g * D), *f = factor[g][h];
                const bool first = base + g == 0;
                y[k] = first ? next : k_cuda_attention_fold(y[k], f[0], next, f[1]);
                l[k] = first ? f[2] : k_cuda_attention_fold(l[k], f[0], f[2], f[1]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < SUMS; k++) {
        const uint32_t i = threadIdx.x + THREADS * k, h = i / D, d = i % D;
        if (h < p.n_heads)
            a.y[(head + h) * D + d] = k_float_div(y[k], l[k]);
    }
}

/* True for the block that comes last of those with the same heads: the others' results are there. */
static __device__ __forceinline__ bool group_last(const struct k_cuda_attention_args &a,
                                                  const struct work &p)
{
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t *arrived = a.arrived + p.row * a.n_head + p.head_kv * a.shared + p.first_head;
        last = atomicAdd(arrived, 1u) == p.n_groups - 1;
        if (last)
            *arrived = 0; /* for the next time */
        __threadfence();
    }
    __syncthreads();
    return last;
}

/* A piece by a block: its groups one after the other. */
template <enum k_kv_type TYPE, int D, int HEADS>
static __device__ __forceinline__ void group_work(const struct k_cuda_attention_args &a,
                                                  const struct work &p, void *shared)
{
    enum {
        SUMS = (HEADS * D + THREADS - 1) / THREADS
    };
    struct group_memory<TYPE, D, HEADS> *memory = (struct group_memory<TYPE, D, HEADS> *)shared;
    const uint32_t n_chunks = (p.n_visible + K_PAGE - 1) / K_PAGE, warp = threadIdx.x / 32;
    uint8_t *ring = memory->chunk[warp].ring;
    struct group_sum total[SUMS];
    struct group_source from = group_start<TYPE, D>(a, p, p.first * K_CHUNK_GROUP + warp, ring);
    bool fault = group_query<TYPE, D, HEADS>(a, p, memory);
    __syncthreads();
#pragma unroll 1
    for (uint32_t g = p.first; g < p.first + p.count; g++) {
        const uint32_t count = min(n_chunks - g * K_CHUNK_GROUP, (uint32_t)WARPS);
        if (from.n != 0)
            fault |= group_chunk<TYPE, D, HEADS>(a, p, from, memory);
        __syncthreads();
        group_factors(memory);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < SUMS; k++) {
            const uint32_t i = threadIdx.x + THREADS * k, h = i / D, d = i % D;
            if (h >= HEADS)
                continue;
            const struct group_sum r = group_fold(*memory, h, d, count);
            if (g == p.first)
                total[k] = r;
            else
                group_into(&total[k], r);
            if (g + 1 == p.first + p.count && h < p.n_heads)
                group_store<D>(a, p, h, d, total[k]);
        }
        __syncthreads(); /* the next group, or piece, uses the memory again */
        if (g + 1 < p.first + p.count)
            from = group_start<TYPE, D>(a, p, (g + 1) * K_CHUNK_GROUP + warp, ring);
    }
    if (p.count != p.n_groups && group_last(a, p))
        group_merge(a, p, memory);
    if (fault)
        a.rows.faults[p.row] = 1;
}

/* Query heads of a piece: fewer, and so more pieces that read the same keys, while the pieces of all
 * heads would leave most of the device idle. units: pieces if each had all heads of a kv head. */
template <int HEADS>
static __device__ __forceinline__ uint32_t work_heads(const struct k_cuda_attention_args &a,
                                                      uint32_t units)
{
    if (units * ((a.shared + 1) / 2) <= a.busy / 4)
        return 2;
    if (units * ((a.shared + 3) / 4) <= a.busy / 2)
        return 4;
    return HEADS;
}

/* Few rows: each group is a piece. Many: a row is, if the prefill kernel does not take its tile. */
template <enum k_kv_type TYPE, int D, int HEADS>
static __global__ void __launch_bounds__(THREADS, 2)
    attention_groups(const struct k_cuda_attention_args a)
{
    extern __shared__ uint4 shared[];
    __shared__ uint32_t groups[FEW_ROWS]; /* of each of few rows */
    const uint32_t n_rows = *a.rows.n_rows;
    const bool few = a.rows.max_rows <= FEW_ROWS;
    uint32_t units = n_rows;
    if (few) {
        if (threadIdx.x < a.rows.max_rows) {
            const uint32_t position = a.rows.position[threadIdx.x];
            groups[threadIdx.x] = threadIdx.x < n_rows ? position / K_CUDA_ATTENTION_GROUP + 1 : 0;
        }
        __syncthreads();
        units = 0;
        for (uint32_t r = 0; r < n_rows; r++)
            units += groups[r];
    }
    units *= a.kv.n_head_kv;
    const uint32_t heads = work_heads<HEADS>(a, units), parts = (a.shared + heads - 1) / heads;
    for (uint32_t i = blockIdx.x; i < units * parts; i += gridDim.x) {
        struct work p;
        uint32_t row = i / parts / a.kv.n_head_kv, first = 0;
        if (few) {
            first = row;
            for (row = 0; first >= groups[row]; row++)
                first -= groups[row];
        } else if (a.tile_rows != 0 && k_cuda_attention_tile(a, row - row % a.tile_rows, n_rows)) {
            continue;
        }
        p.row = row;
        p.sequence = a.rows.sequence[row];
        p.n_visible = a.rows.position[row] + 1;
        p.n_groups = (p.n_visible + K_CUDA_ATTENTION_GROUP - 1) / K_CUDA_ATTENTION_GROUP;
        p.first = first;
        p.count = few ? 1 : p.n_groups;
        p.head_kv = i / parts % a.kv.n_head_kv;
        p.first_head = i % parts * heads;
        p.n_heads = min(heads, a.shared - p.first_head);
        if (heads == 2)
            group_work<TYPE, D, 2>(a, p, shared);
        else if (HEADS > 4 && heads > 4)
            group_work<TYPE, D, HEADS>(a, p, shared);
        else
            group_work<TYPE, D, 4>(a, p, shared);
    }
}

/* ---- host side ------------------------------------------------------------------------------- */

static uint32_t groups_of(uint32_t max_pages)
{
    return (max_pages + K_CHUNK_GROUP - 1) / K_CHUNK_GROUP;
}

/* Counters at the head of the scratch, one a row and query head. */
static uint64_t arrived_bytes(uint32_t n_head)
{
    return ((uint64_t)FEW_ROWS * n_head * sizeof(uint32_t) + 15) / 16 * 16;
}

extern "C" uint64_t k_cuda_attention_bytes(const struct k_device *d, uint32_t n_head,
                                           uint32_t head_dim, uint32_t max_rows, uint32_t max_pages)
{
    (void)d;
    const uint64_t rows = max_rows < FEW_ROWS ? max_rows : (uint32_t)FEW_ROWS;
    const uint64_t parts = n_head * rows * groups_of(max_pages);
    return parts * (head_dim * sizeof(float) + sizeof(float2)) + arrived_bytes(n_head);
}

template <enum k_kv_type TYPE, int D, int HEADS>
static void launch(const struct k_cuda_attention_args *a, struct k_stream *s)
{
    const uint32_t rows = a->rows.max_rows;
    const bool few = rows <= FEW_ROWS;
    const uint64_t most =
        (uint64_t)rows * a->kv.n_head_kv * ((a->shared + 1) / 2) * (few ? a->max_groups : 1);
    K_CUDA_LAUNCH(s, (attention_groups<TYPE, D, HEADS>),
                  (uint32_t)(most < a->busy ? most : a->busy), THREADS,
                  sizeof(struct group_memory<TYPE, D, HEADS>), *a);
}

/* False: there is no kernel of groups for this head size. */
template <enum k_kv_type TYPE>
static bool launch_groups(const struct k_cuda_attention_args *a, struct k_stream *s)
{
    const uint32_t left = a->shared % 8; /* of the last block of eight heads */
    const bool four = a->shared <= 4 || (left >= 1 && left <= 4 && a->shared < 16);
    switch (a->kv.head_dim) {
    case 64:
        if (four)
            launch<TYPE, 64, 4>(a, s);
        else
            launch<TYPE, 64, 8>(a, s);
        return true;
    case 128:
        if (four)
            launch<TYPE, 128, 4>(a, s);
        else
            launch<TYPE, 128, 8>(a, s);
        return true;
    case 256:
        launch<TYPE, 256, 4>(a, s);
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
    /* Scratch, for up to FEW_ROWS rows: counters, sums, parts. */
    const uint64_t rows = a->rows.max_rows < FEW_ROWS ? a->rows.max_rows : (uint32_t)FEW_ROWS;
    args.arrived = (uint32_t *)k_cuda_at(a->scratch);
    args.sums = (float2 *)(void *)((uint8_t *)args.arrived + arrived_bytes(a->n_head));
    args.parts = (float *)(args.sums + rows * a->n_head * args.max_groups);
    if (args.tile_rows != 0)
        k_cuda_attention_prefill(&args, a->kv.type, s);
    if (a->kv.type == K_KV_F16 ? !launch_groups<K_KV_F16>(&args, s)
                               : !launch_groups<K_KV_Q8_0>(&args, s))
        k_cuda_attention_plain(&args, a->kv.type, s);
    return ERR_OK;
}

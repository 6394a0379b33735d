/* Attention by groups: for few rows, and for rows of many sequences.
 *
 * A block has eight warps. For one group of 512 positions, each warp takes a chunk and some query
 * heads of one kv head: with lanes as positions it makes the scores, with lanes as dimensions the
 * weighted values; then all threads fold the chunks in order. Keys and values are read once, straight
 * into registers. With few rows the groups of a row go to different blocks, and a second kernel folds
 * their results; with many a block walks its row's groups. */
#include "k_cuda_attention.cuh"

enum {
    WARPS = K_CHUNK_GROUP,
    THREADS = 32 * WARPS,
    FEW_ROWS = 8,
    AHEAD = 16 /* dimensions of keys on their way while as many are used */
};

/* A block's piece of the work: heads first_head .. first_head + n_heads of one kv head, groups
 * first .. first + count of a row's n_groups. */
struct piece {
    uint32_t row, sequence, n_visible, head_kv, first_head, n_heads, first, count, n_groups;
};

/* Shared memory. A chunk's scores and weights lie where its values o go afterwards. */
template <int D, int HEADS> struct group_memory {
    union {
        float f32[D][HEADS];
        struct {
            uint32_t word[D / 4][HEADS]; /* four dimensions each */
            float dx[D / 32][HEADS];
        } q8;
    } q;
    union {
        float s[HEADS][K_PAGE];
        float o[HEADS][D];
    } chunk[WARPS];
    float m[WARPS][HEADS], l[WARPS][HEADS], a[WARPS][HEADS], b[WARPS][HEADS];
};

/* Puts the heads' queries into shared memory. Heads that do not exist are 0. True: not finite. */
template <enum k_kv_type TYPE, int D, int HEADS>
static __device__ __forceinline__ bool group_query(const struct k_cuda_attention_args &a,
                                                   const struct piece &p,
                                                   struct group_memory<D, HEADS> *memory)
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
static __device__ __forceinline__ void group_scores_f16(const struct k_cuda_kv_head &kv,
                                                        const float (*q)[HEADS], float scale,
                                                        float (*s)[K_PAGE])
{
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t *keys = (const uint32_t *)kv.keys + lane;
    uint32_t now[AHEAD], next[AHEAD];
    float acc[HEADS][2];
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        acc[h][0] = acc[h][1] = 0.0f;
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        next[i] = keys[i * (K_PAGE / 2)];
#pragma unroll 1
    for (int first = 0; first < D; first += AHEAD) {
        keys += AHEAD * (K_PAGE / 2);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            now[i] = next[i];
            if (first + AHEAD < D)
                next[i] = keys[i * (K_PAGE / 2)];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const float2 k = k_cuda_warp_of_f16x2(now[i]);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const float x = q[first + i][h];
                acc[h][0] = k_float_fma(x, k.x, acc[h][0]);
                acc[h][1] = k_float_fma(x, k.y, acc[h][1]);
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
static __device__ __forceinline__ void group_scores_q8(const struct k_cuda_kv_head &kv,
                                                       const struct group_memory<D, HEADS> &memory,
                                                       float scale, float (*s)[K_PAGE])
{
    enum {
        H = HEADS / 2
    };
    const uint32_t lane = threadIdx.x % 32, quad = lane % 16, first = lane / 16 * H;
    const uint32_t *keys = (const uint32_t *)kv.keys + quad;
    const uint2 *scales = (const uint2 *)(const void *)kv.key_scales + quad;
    float acc[H][4];
#pragma unroll
    for (int h = 0; h < H; h++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            acc[h][i] = 0.0f;
#pragma unroll 1
    for (int b = 0; b < D / 32; b++) {
        const uint2 packed = scales[b * (K_PAGE / 4)];
        const float2 low = k_cuda_warp_of_f16x2(packed.x), high = k_cuda_warp_of_f16x2(packed.y);
        const float dk[4] = {low.x, low.y, high.x, high.y};
        int32_t dot[H][4] = {};
#pragma unroll
        for (int w = 0; w < 8; w++) {
            uint32_t word[4], k[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                word[i] = keys[(32 * b + 4 * w + i) * (K_PAGE / 4)];
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

    __device__ __forceinline__ void load(const struct k_cuda_kv_head &kv, uint32_t j)
    {
        const uint32_t lane = threadIdx.x % 32;
        const uint8_t *at = (const uint8_t *)kv.values + ((size_t)j * 32 + lane) * BYTES;
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
            scale = kv.value_scales[j * N + lane * N / 32];
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
static __device__ __forceinline__ void group_values(const struct k_cuda_kv_head &kv, uint32_t n,
                                                    const float (*e)[K_PAGE], float (*o)[D / 32])
{
    struct group_value<TYPE, D> now[4], next[4];
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            o[h][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; k++)
        next[k].load(kv, k);
#pragma unroll 1
    for (uint32_t j = 0; j < n; j += 4) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            now[k] = next[k];
            if (j + 4 < n)
                next[k].load(kv, j + 4 + k);
        }
        if (j + 4 <= n)
            group_weighted<TYPE, D, HEADS, true>(now, e, j, n, o);
        else
            group_weighted<TYPE, D, HEADS, false>(now, e, j, n, o);
    }
}

/* One chunk by one warp: m, l and o of each head into shared memory. True: a score is not finite. */
template <enum k_kv_type TYPE, int D, int HEADS>
static __device__ __forceinline__ bool group_chunk(const struct k_cuda_attention_args &a,
                                                   const struct piece &p, uint32_t c,
                                                   struct group_memory<D, HEADS> *memory)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t n = min(p.n_visible - c * K_PAGE, (uint32_t)K_PAGE);
    uint8_t *layer = k_cuda_kv_page(a.kv, p.sequence, c);
    float(*s)[K_PAGE] = memory->chunk[warp].s;
    struct k_cuda_kv_head kv;
    if constexpr (TYPE == K_KV_F16) {
        kv = k_cuda_kv_head_f16(a.kv, layer, p.head_kv);
        group_scores_f16<D, HEADS>(kv, memory->q.f32, a.scale, s);
    } else {
        kv = k_cuda_kv_head_of(a.kv, layer, p.head_kv);
        group_scores_q8<D, HEADS>(kv, *memory, a.scale, s);
    }
    __syncwarp();
    bool fault = false;
#pragma unroll
    for (uint32_t h = 0; h < HEADS; h++) {
        float e0, e1, m, l;
        const bool wrong = k_cuda_attention_weigh(s[h][lane], s[h][lane + 32], n, &e0, &e1, &m, &l);
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
    group_values<TYPE, D, HEADS>(kv, n, s, o);
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
template <int D, int HEADS>
static __device__ __forceinline__ void group_factors(struct group_memory<D, HEADS> *memory)
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
template <int D, int HEADS>
static __device__ __forceinline__ struct group_sum group_fold(
    const struct group_memory<D, HEADS> &memory, uint32_t h, uint32_t d, uint32_t n_chunks)
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

/* Writes a head and dimension: the result, or that of a group for attention_merge. */
template <int D>
static __device__ __forceinline__ void group_store(const struct k_cuda_attention_args &a,
                                                   const struct piece &p, uint32_t h, uint32_t d,
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

/* A piece by a block: its groups one after the other. */
template <enum k_kv_type TYPE, int D, int HEADS>
static __device__ __forceinline__ void group_piece(const struct k_cuda_attention_args &a,
                                                   const struct piece &p, void *shared)
{
    enum {
        SUMS = (HEADS * D + THREADS - 1) / THREADS
    };
    struct group_memory<D, HEADS> *memory = (struct group_memory<D, HEADS> *)shared;
    const uint32_t n_chunks = (p.n_visible + K_PAGE - 1) / K_PAGE;
    struct group_sum total[SUMS];
    bool fault = group_query<TYPE, D, HEADS>(a, p, memory);
#pragma unroll 1
    for (uint32_t g = p.first; g < p.first + p.count; g++) {
        const uint32_t chunk = g * K_CHUNK_GROUP, count = min(n_chunks - chunk, (uint32_t)WARPS);
        __syncthreads();
        if (threadIdx.x / 32 < count)
            fault |= group_chunk<TYPE, D, HEADS>(a, p, chunk + threadIdx.x / 32, memory);
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
    }
    __syncthreads(); /* the next piece uses the memory again */
    if (fault)
        a.rows.faults[p.row] = 1;
}

/* Query heads of a piece: fewer, and so more pieces that read the same keys, while the pieces of all
 * heads would leave most of the device idle. units: pieces if each had all heads of a kv head. */
template <int HEADS>
static __device__ __forceinline__ uint32_t piece_heads(const struct k_cuda_attention_args &a,
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
    const uint32_t heads = piece_heads<HEADS>(a, units), parts = (a.shared + heads - 1) / heads;
    for (uint32_t i = blockIdx.x; i < units * parts; i += gridDim.x) {
        struct piece p;
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
            group_piece<TYPE, D, 2>(a, p, shared);
        else if (HEADS > 4 && heads > 4)
            group_piece<TYPE, D, HEADS>(a, p, shared);
        else
            group_piece<TYPE, D, 4>(a, p, shared);
    }
}

/* Folds the groups of a row's head, where there are several: a warp has 32 dimensions. Its lanes make
 * the factors of 32 groups at once, from maxima that are exact in any order. */
static __global__ void attention_merge(const struct k_cuda_attention_args a)
{
    const uint32_t row = blockIdx.x, dim = a.kv.head_dim, d = threadIdx.x, lane = d % 32;
    const uint32_t n_rows = *a.rows.n_rows, position = a.rows.position[row];
    const uint32_t n_groups = position / K_CUDA_ATTENTION_GROUP + 1;
    if (row >= n_rows || n_groups == 1)
        return;
    const uint64_t head = (uint64_t)row * a.n_head + blockIdx.y, at = head * a.max_groups;
    const float *parts = a.parts + at * dim + d;
    float m = 0.0f, l = 0.0f, y = 0.0f;
    for (uint32_t base = 0; base < n_groups; base += 32) {
        const uint32_t count = min(32u, n_groups - base);
        const float2 sum = a.sums[at + base + min(lane, count - 1)];
        float top = sum.x; /* of this group and those before it */
        for (uint32_t o = 1; o < 32; o *= 2) {
            const float other = __shfl_up_sync(K_CUDA_WARP_ALL, top, o);
            top = lane >= o && other > top ? other : top;
        }
        if (base > 0)
            top = m > top ? m : top;
        const float above = __shfl_up_sync(K_CUDA_WARP_ALL, top, 1);
        const float before = lane > 0 ? above : base > 0 ? m : sum.x;
        const struct k_cuda_attention_step s = k_cuda_attention_meet(before, sum.x);
#pragma unroll 8
        for (uint32_t g = 0; g < count; g++) {
            const float next = parts[(uint64_t)(base + g) * dim];
            const float ag = __shfl_sync(K_CUDA_WARP_ALL, s.a, g);
            const float bg = __shfl_sync(K_CUDA_WARP_ALL, s.b, g);
            const float lg = __shfl_sync(K_CUDA_WARP_ALL, sum.y, g);
            const bool first = base + g == 0;
            y = first ? next : k_cuda_attention_fold(y, ag, next, bg);
            l = first ? lg : k_cuda_attention_fold(l, ag, lg, bg);
        }
        m = __shfl_sync(K_CUDA_WARP_ALL, top, count - 1);
    }
    a.y[head * dim + d] = k_float_div(y, l);
}

/* ---- host side ------------------------------------------------------------------------------- */

static uint32_t groups_of(uint32_t max_pages)
{
    return (max_pages + K_CHUNK_GROUP - 1) / K_CHUNK_GROUP;
}

extern "C" uint64_t k_cuda_attention_bytes(const struct k_device *d, uint32_t n_head,
                                           uint32_t head_dim, uint32_t max_rows, uint32_t max_pages)
{
    (void)d;
    const uint64_t rows = max_rows < FEW_ROWS ? max_rows : (uint32_t)FEW_ROWS;
    return rows * n_head * groups_of(max_pages) * (head_dim * sizeof(float) + sizeof(float2)) + 64;
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
                  sizeof(struct group_memory<D, HEADS>), *a);
    if (few && a->max_groups > 1)
        K_CUDA_LAUNCH(s, attention_merge, dim3(rows, a->n_head), D, 0, *a);
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
    const uint64_t rows = a->rows.max_rows < FEW_ROWS ? a->rows.max_rows : (uint32_t)FEW_ROWS;
    args.parts = (float *)k_cuda_at(a->scratch);
    args.sums =
        (float2 *)(void *)(args.parts +
                           (rows * a->n_head * args.max_groups * a->kv.head_dim + 1) / 2 * 2);
    if (args.tile_rows != 0)
        k_cuda_attention_prefill(&args, a->kv.type, s);
    if (a->kv.type == K_KV_F16 ? !launch_groups<K_KV_F16>(&args, s)
                               : !launch_groups<K_KV_Q8_0>(&args, s))
        k_cuda_attention_plain(&args, a->kv.type, s);
    return ERR_OK;
}

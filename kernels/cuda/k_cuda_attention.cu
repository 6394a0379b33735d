/* Attention by chunks: for few rows, and for rows of many sequences.
 *
 * A block takes chunks of one row and up to eight query heads of one kv head, a warp each. A chunk
 * comes into shared memory once for all of them; a warp then works alone: with lanes as positions
 * it makes the scores, with lanes as dimensions the weighted values, and it folds them in
 * registers.
 *
 * How many chunks a block takes depends on how many there are: one, while that does no more than
 * keep the device busy; a group of eight; or, with many rows, all of a row. Results of single
 * chunks or groups go to the scratch, and a second kernel folds them: chunks to groups, groups to
 * the whole (A19). */
#include "k_cuda_attention.cuh"
#include "k_cuda_attention_chunk.cuh"
#include "k_cuda_quantise.cuh"

enum {
    FEW_ROWS = 8,
    CHUNK_SLOTS = 128, /* chunks of a row up to which each may be a piece of work */
    GROUP_SLOTS = CHUNK_SLOTS / K_CHUNK_GROUP,
    MERGERS = 4, /* groups that a block of the second kernel makes at a time */
    MERGED = 256 /* values of a row that it makes: a block of the quantiser */
};

/* ---- a block's work -------------------------------------------------------------------------- */

template <int N> static __device__ __forceinline__ void store_lane(float *to, const float y[N])
{
    if constexpr (N == 2)
        *(float2 *)(void *)to = make_float2(y[0], y[1]);
    else
#pragma unroll
        for (int i = 0; i < N; i += 4)
            *(float4 *)(void *)(to + i) = make_float4(y[i], y[i + 1], y[i + 2], y[i + 3]);
}

/* The result of the warp's head: of the whole row into y, otherwise into its slot of the
 * scratch. */
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

/* loaded: its first chunk is on the way. */
template <enum k_kv_type TYPE, int D>
static __device__ __forceinline__ void work_run(const struct k_cuda_attention_args &a,
                                                const struct work &p, bool loaded,
                                                struct chunk_memory<TYPE, D> *memory)
{
    typedef struct chunk_memory<TYPE, D> M;
    const bool mine = threadIdx.x / 32 < p.n_heads; /* this warp has a head */
    struct part<D / 32> chunk = {}, group = {}, total = {
    };
    if (!loaded)
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

/* ---- which work ------------------------------------------------------------------------------ */

static __device__ __forceinline__ uint32_t chunks_of(uint32_t position)
{
    return position / K_PAGE + 1;
}

/* Few rows, as all blocks read them at once. They are the host's: no kernel before has a part in
 * them. */
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

/* Is the chunk one that this step writes nothing to, in whatever sequence? */
static __device__ __forceinline__ bool chunk_is_old(const struct few &few, uint32_t chunk)
{
    bool old = true;
    for (uint32_t r = 0; r < few.n_rows; r++)
        old &= chunk + 1 < few.n_chunks[r];
    return old;
}

/* Fills in the heads of piece i of a step, and which chunks of the row it has: the n-th
 * `chunks`. */
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
    if (a.rows.max_rows <= FEW_ROWS) {
        __shared__ struct few few;
        few_read(a, &few);
        p.extent = few_extent(a, few);
        bool there = work_of_few(a, few, blockIdx.x, &p);
        bool loaded = there && chunk_is_old(few, p.first);
        if (loaded)
            chunk_load<TYPE, D>(a, p, p.first, &memory->stage[0]);
        k_cuda_await();
        k_cuda_release();
        for (uint32_t i = blockIdx.x; there; there = work_of_few(a, few, i += gridDim.x, &p)) {
            work_run(a, p, loaded, memory);
            loaded = false;
        }
        return;
    }
    k_cuda_await();
    k_cuda_release();
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
        work_run(a, p, false, memory);
    }
}

/* ---- the second kernel ----------------------------------------------------------------------- */

/* Folds `count` results (A19), the thread's dimension of each at parts, D apart. A lane makes the
 * factors of one of 32, from maxima that are exact in any order; meanwhile the first values
 * come. */
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

/* Block blockIdx.y of the row's forms, by the first warp; v: the lane's values. */
static __device__ __forceinline__ void
merge_quantise(const struct k_cuda_attention_args &a, uint32_t row, const float *from, uint32_t n)
{
    float v[K_CUDA_QUANTISE_VALUES];
#pragma unroll
    for (int i = 0; i < K_CUDA_QUANTISE_VALUES; i++)
        v[i] = from[i];
    uint8_t *q32 = a.q32 == NULL ? NULL : a.q32 + row * k_cuda_act_stride(K_FORM_Q32, n);
    uint8_t *q256 = a.q256 == NULL ? NULL : a.q256 + row * k_cuda_act_stride(K_FORM_Q256, n);
    if (!k_cuda_quantise_block(v, q32, q256, n, blockIdx.y, true))
        a.rows.faults[row] = 1;
}

/* Few rows: from the slots to the results of as many query heads as have MERGED values, and the
 * forms of these, where they are asked for. A thread has a value of every MERGERS-th group. */
template <int D>
static __global__ void __launch_bounds__(MERGERS *MERGED)
    attention_merge(const struct k_cuda_attention_args a)
{
    __shared__ float2 sums[MERGED / D][GROUP_SLOTS];
    __shared__ __align__(16) float ys[GROUP_SLOTS][MERGED];
    __shared__ struct few few;
    const uint32_t row = blockIdx.x, column = threadIdx.x % MERGED, merger = threadIdx.x / MERGED;
    const uint32_t head = blockIdx.y * (MERGED / D) + column / D;
    few_read(a, &few);
    const bool groups = few_extent(a, few) == EXTENT_GROUP;
    k_cuda_await();
    k_cuda_release();
    if (row >= few.n_rows)
        return;
    const bool present = head < a.n_head;
    const uint32_t n_chunks = few.n_chunks[row],
                   n_groups = (n_chunks + K_CHUNK_GROUP - 1) / K_CHUNK_GROUP;
    const uint64_t slots = (uint64_t)row * a.n_head + (present ? head : 0);
    const float2 *from = a.sums + slots * (a.chunk_slots + a.max_groups);
    const float *parts = a.parts + slots * (a.chunk_slots + a.max_groups) * D + column % D;
    float *y = a.y + slots * D + column % D;
    const bool whole =
        n_chunks == 1 || (groups && n_groups == 1); /* the first kernel has stored it */
    struct part<1> r = {
    };
    if (!groups && !whole) {
        for (uint32_t g = merger; g < n_groups; g += MERGERS) {
            const uint32_t first = g * K_CHUNK_GROUP;
            r = merge_fold<D>(from + first, parts + (size_t)first * D,
                              min(n_chunks - first, (uint32_t)K_CHUNK_GROUP));
            ys[g][column] = r.y[0];
            if (column % D == 0)
                sums[column / D][g] = make_float2(r.m, r.l);
        }
        __syncthreads();
    }
    if (merger == 0) {
        float value = *y;
        if (!whole) {
            r = groups ? merge_fold<D>(from + a.chunk_slots, parts + (size_t)a.chunk_slots * D,
                                       n_groups)
                       : merge_fold<MERGED>(sums[column / D], &ys[0][column], n_groups);
            value = k_float_div(r.y[0], r.l);
        }
        if (!whole && present)
            *y = value;
        ys[0][column] = value; /* its group was this thread's alone */
    }
    if (a.q32 == NULL && a.q256 == NULL)
        return;
    __syncthreads();
    if (threadIdx.x < 32)
        merge_quantise(a, row, &ys[0][threadIdx.x * K_CUDA_QUANTISE_VALUES], a.n_head * D);
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
    if (few && (a->kv.max_pages > 1 || a->q32 != NULL || a->q256 != NULL))
        K_CUDA_LAUNCH_AHEAD(s, (attention_merge<D>),
                            dim3(rows, (a->n_head * D + MERGED - 1) / MERGED), MERGERS * MERGED, 0,
                            *a);
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

/* y: forms that the result is wanted in too, or NULL. */
static void attention(const struct k_attention *a, const struct k_act *y, struct k_stream *s)
{
    struct k_cuda_attention_args args;
    args.q32 = y == NULL ? NULL : (uint8_t *)k_cuda_at(y->q32);
    args.q256 = y == NULL ? NULL : (uint8_t *)k_cuda_at(y->q256);
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
}

extern "C" enum err_code k_cuda_attention(const struct k_attention *a, struct k_stream *s)
{
    attention(a, NULL, s);
    return ERR_OK;
}

extern "C" enum err_code k_cuda_attend(const struct k_attention *a, const struct k_act *y,
                                       struct k_stream *s)
{
    const uint32_t dim = a->kv.head_dim;
    if (a->rows.max_rows <= FEW_ROWS && y->n % MERGED == 0 &&
        (dim == 64 || dim == 128 || dim == 256)) {
        attention(a, y, s);
        return ERR_OK;
    }
    struct k_quantise quantise = {};
    quantise.rows = a->rows;
    quantise.act = *y;
    attention(a, NULL, s);
    return k_cuda_quantise(&quantise, s);
}

/* Writing keys and values into the pages (A17). */
#include "k_cuda.cuh"
#include "k_cuda_kv.cuh"
#include "k_cuda_warp.cuh"

enum {
    THREADS = 128,
    FEW_ROWS = 8,
    BLOCK = 32 /* values of one scale of the 8-bit cache */
};

struct kv_write_args {
    struct k_cuda_rows rows;
    const float *k, *v;
    struct k_cuda_kv kv;
};

/* Which part of which row a thread has. Keys lie by position, so with many rows neighbouring
 * threads take neighbouring rows; otherwise they take neighbouring parts. */
static __device__ __forceinline__ bool kv_part(const struct kv_write_args &a, uint32_t parts,
                                               bool keys, uint32_t *ret_row, uint32_t *ret_part)
{
    const uint32_t f = blockIdx.x * THREADS + threadIdx.x;
    if (keys && a.rows.max_rows > FEW_ROWS) {
        *ret_row = f / 32 / parts * 32 + f % 32;
        *ret_part = f / 32 % parts;
    } else {
        *ret_row = f / parts;
        *ret_part = f % parts;
    }
    return *ret_row < a.rows.max_rows;
}

/* SIZE values of one head a thread: 8, or 1 where the head is no multiple of it. */
template <int SIZE> static __global__ void kv_write_f16(const struct kv_write_args a)
{
    const uint32_t dim = a.kv.head_dim, parts = a.kv.n_head_kv * dim / SIZE;
    const bool keys = blockIdx.y == 0;
    uint32_t row, part;
    if (!kv_part(a, parts, keys, &row, &part))
        return;
    const uint32_t n_rows = *a.rows.n_rows, position = a.rows.position[row];
    const uint32_t sequence = a.rows.sequence[row];
    const float *x = (keys ? a.k : a.v) + ((uint64_t)row * parts + part) * SIZE;
    float in[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++)
        in[i] = x[i];
    if (row >= n_rows)
        return;
    uint32_t bad = 0;
    uint16_t out[SIZE];
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        out[i] = k_cuda_warp_to_f16(in[i]);
        bad |= (out[i] & 0x7c00u) == 0x7c00u;
    }
    const uint32_t slot = position % K_PAGE, head = part * SIZE / dim, d = part * SIZE % dim;
    const struct k_cuda_kv_head h =
        k_cuda_kv_head_f16(a.kv, k_cuda_kv_page(a.kv, sequence, position / K_PAGE), head);
    if (keys) {
        uint16_t *to = (uint16_t *)h.keys + (size_t)d * K_PAGE + slot;
#pragma unroll
        for (int i = 0; i < SIZE; i++)
            to[i * K_PAGE] = out[i];
    } else {
        uint16_t *to = (uint16_t *)h.values + (size_t)slot * dim + d;
        if constexpr (SIZE == 8)
            *(uint4 *)(void *)to =
                make_uint4(out[0] | (uint32_t)out[1] << 16, out[2] | (uint32_t)out[3] << 16,
                           out[4] | (uint32_t)out[5] << 16, out[6] | (uint32_t)out[7] << 16);
        else
            to[0] = out[0];
    }
    if (bad)
        a.rows.faults[row] = 1;
}

/* 32 values to int8 with an f16 scale, packed by fours. True: the scale overflowed or a value was
 * not finite. */
static __device__ __forceinline__ bool kv_quantise(const float in[BLOCK], uint32_t ret_q[BLOCK / 4],
                                                   uint16_t *ret_scale)
{
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < BLOCK; i++)
        m = max(m, k_float_bits(in[i]) & 0x7fffffffu);
    bool fault = m >= 0x7f800000u;
    uint16_t scale =
        fault ? (uint16_t)0 : k_cuda_warp_to_f16(k_float_div(k_float_of_bits(m), 127.0f));
    fault |= scale >= 0x7c00u;
    if (fault || scale < 0x0400u) /* below 2^-14 */
        scale = 0;
    const float inv = k_float_div(1.0f, k_cuda_warp_of_f16(scale));
#pragma unroll
    for (int i = 0; i < BLOCK / 4; i++) {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int32_t q = k_float_rint(k_float_mul(in[4 * i + k], inv));
            word |= ((uint32_t)max(-127, min(127, q)) & 0xffu) << 8 * k;
        }
        ret_q[i] = scale == 0 ? 0 : word;
    }
    *ret_scale = scale;
    return fault;
}

/* A thread has 32 values, that is one scale. */
static __global__ void kv_write_q8(const struct kv_write_args a)
{
    const uint32_t dim = a.kv.head_dim, blocks = dim / BLOCK, parts = a.kv.n_head_kv * blocks;
    const bool keys = blockIdx.y == 0;
    uint32_t row, part;
    if (!kv_part(a, parts, keys, &row, &part))
        return;
    const uint32_t n_rows = *a.rows.n_rows, position = a.rows.position[row];
    const uint32_t sequence = a.rows.sequence[row];
    const float4 *x =
        (const float4 *)(const void *)((keys ? a.k : a.v) + ((uint64_t)row * parts + part) * BLOCK);
    float in[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK / 4; i++) {
        const float4 w = x[i];
        in[4 * i] = w.x, in[4 * i + 1] = w.y, in[4 * i + 2] = w.z, in[4 * i + 3] = w.w;
    }
    if (row >= n_rows)
        return;
    uint32_t q[BLOCK / 4];
    uint16_t scale;
    const bool fault = kv_quantise(in, q, &scale);
    const uint32_t slot = position % K_PAGE, head = part / blocks, block = part % blocks;
    const struct k_cuda_kv_head h =
        k_cuda_kv_head_of(a.kv, k_cuda_kv_page(a.kv, sequence, position / K_PAGE), head);
    if (keys) {
        uint8_t *to = (uint8_t *)h.keys + (size_t)block * BLOCK * K_PAGE + slot;
#pragma unroll
        for (int i = 0; i < BLOCK; i++)
            to[i * K_PAGE] = (uint8_t)(q[i / 4] >> 8 * (i % 4));
        h.key_scales[block * K_PAGE + slot] = scale;
    } else {
        uint4 *to = (uint4 *)(void *)((uint8_t *)h.values + (size_t)slot * dim + block * BLOCK);
        to[0] = make_uint4(q[0], q[1], q[2], q[3]);
        to[1] = make_uint4(q[4], q[5], q[6], q[7]);
        h.value_scales[slot * blocks + block] = scale;
    }
    if (fault)
        a.rows.faults[row] = 1;
}

extern "C" enum err_code k_cuda_kv_write(const struct k_kv_write *a, struct k_stream *s)
{
    struct kv_write_args args;
    args.rows = k_cuda_rows_of(&a->rows);
    args.k = (const float *)k_cuda_at(a->k);
    args.v = (const float *)k_cuda_at(a->v);
    args.kv = k_cuda_kv_of(&a->kv);
    const uint32_t rows = (a->rows.max_rows + 31) / 32 * 32;
    const uint32_t size = a->kv.type == K_KV_Q8_0 ? BLOCK : a->kv.head_dim % 8 == 0 ? 8 : 1;
    const uint64_t n = (uint64_t)(a->rows.max_rows > FEW_ROWS ? rows : a->rows.max_rows) *
                       (a->kv.n_head_kv * a->kv.head_dim / size);
    const dim3 grid((uint32_t)((n + THREADS - 1) / THREADS), 2);
    if (size == BLOCK)
        K_CUDA_LAUNCH(s, kv_write_q8, grid, THREADS, 0, args);
    else if (size == 8)
        K_CUDA_LAUNCH(s, kv_write_f16<8>, grid, THREADS, 0, args);
    else
        K_CUDA_LAUNCH(s, kv_write_f16<1>, grid, THREADS, 0, args);
    return ERR_OK;
}

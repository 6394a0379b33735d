/* What the attention kernels share (A17 to A19). Three of them give the same bits:
 *   chunks   (k_cuda_attention.cu) a block takes one or more chunks of one row and some query heads
 *            of one kv head
 *   prefill  (k_cuda_attention_prefill.cu) a block takes some rows of one sequence and walks all
 *            chunks
 *   plain    (k_cuda_attention_plain.cu) a warp takes one query head; any head size */
#ifndef ISLET_K_CUDA_ATTENTION_CUH
#define ISLET_K_CUDA_ATTENTION_CUH

#include "k_cuda_kv.cuh"
#include "k_cuda_warp.cuh"

enum {
    K_CUDA_ATTENTION_GROUP = K_PAGE * K_CHUNK_GROUP, /* positions of a group */
    K_CUDA_ATTENTION_LONG = 1024 /* positions from which on few tiles are too slow */
};

struct k_cuda_attention_args {
    struct k_cuda_rows rows;
    const float *q;
    float *y;
    struct k_cuda_kv kv;
    /* In the scratch of k_cuda_attention.cu: results of chunks and groups, D values and (m, l)
     * each, [rows][n_head][chunk_slots + max_groups]. */
    float *parts;
    float2 *sums;
    uint32_t chunk_slots, max_groups;
    uint8_t *q32, *q256;     /* forms of y that the second kernel makes; NULL: not wanted */
    uint32_t n_head, shared; /* shared: query heads of a kv head */
    uint32_t tile_rows;      /* rows that the prefill kernel takes together; 0: it takes none */
    uint32_t busy;           /* blocks that fill the device */
    float scale;
};

extern "C" {
/* For kv types and head sizes without a better kernel. */
void k_cuda_attention_plain(const struct k_cuda_attention_args *a, enum k_kv_type type,
                            struct k_stream *s);
/* Rows that a block of the prefill kernel takes together; 0: it has no form for this. */
uint32_t k_cuda_attention_prefill_rows(const struct k_attention *a, struct k_stream *s);
/* Those tiles of tile_rows rows that lie in one sequence (k_cuda_attention_tile). */
void k_cuda_attention_prefill(const struct k_cuda_attention_args *a, enum k_kv_type type,
                              struct k_stream *s);
}

/* Does the prefill kernel take the tile of rows from `first` on? If they lie in one sequence and
 * fill more than half of it, and, as a tile walks its chunks one after the other, if there are
 * tiles for half of the device or not many chunks. All threads of a warp ask. */
static __device__ __forceinline__ bool k_cuda_attention_tile(const struct k_cuda_attention_args &a,
                                                             uint32_t first, uint32_t n_rows)
{
    const uint32_t end = min(first + a.tile_rows, n_rows);
    const uint32_t tiles = (n_rows + a.tile_rows - 1) / a.tile_rows;
    if ((end - first) * 2 <= a.tile_rows ||
        (tiles * a.kv.n_head_kv < a.busy / 2 && a.rows.position[first] >= K_CUDA_ATTENTION_LONG))
        return false;
    const uint32_t sequence = a.rows.sequence[first];
    bool same = true;
    for (uint32_t r = first + threadIdx.x % 32; r < end; r += 32)
        same &= a.rows.sequence[r] == sequence;
    return __all_sync(K_CUDA_WARP_ALL, same);
}

/* One chunk's scores, of positions 2 * lane and 2 * lane + 1, n of the 64 visible: weights, maximum
 * and sum (A18). True: a score is not finite; the weights are then 0. */
static __device__ __forceinline__ bool k_cuda_attention_weigh(float x0, float x1, uint32_t n,
                                                              float *ret_e0, float *ret_e1,
                                                              float *ret_m, float *ret_l)
{
    const uint32_t j = threadIdx.x % 32 * 2;
    const bool seen0 = j < n, seen1 = j + 1 < n;
    const bool fault = __any_sync(K_CUDA_WARP_ALL,
                                  (seen0 && !k_float_finite(x0)) || (seen1 && !k_float_finite(x1)));
    const uint32_t key = max(seen0 ? k_cuda_warp_key(x0) : 0u, seen1 ? k_cuda_warp_key(x1) : 0u);
    const float m = k_cuda_warp_of_key(__reduce_max_sync(K_CUDA_WARP_ALL, key));
    float a0 = seen0 && !fault ? k_cuda_warp_exp(k_float_sub(x0, m)) : 0.0f;
    float a1 = seen1 && !fault ? k_cuda_warp_exp(k_float_sub(x1, m)) : 0.0f;
    *ret_e0 = a0;
    *ret_e1 = a1;
    *ret_m = fault ? 0.0f : m;
    /* a[i] = e[i] + e[i + 32], then tree32: i and i + 2 * o are o lanes apart, i and i + 1 are
     * one. */
#pragma unroll
    for (int o = 16; o >= 1; o /= 2) {
        a0 = k_float_add(a0, __shfl_xor_sync(K_CUDA_WARP_ALL, a0, o));
        a1 = k_float_add(a1, __shfl_xor_sync(K_CUDA_WARP_ALL, a1, o));
    }
    *ret_l = k_float_add(a0, a1);
    return fault;
}

/* Running maximum, and the factors of one step of the fold (A19): L = fma(L, a, l * b). */
struct k_cuda_attention_step {
    float m, a, b;
};
static __device__ __forceinline__ struct k_cuda_attention_step k_cuda_attention_meet(float m,
                                                                                     float next)
{
    struct k_cuda_attention_step s;
    s.m = m > next ? m : next;
    s.a = k_cuda_warp_exp(k_float_sub(m, s.m));
    s.b = k_cuda_warp_exp(k_float_sub(next, s.m));
    return s;
}
static __device__ __forceinline__ float k_cuda_attention_fold(float y, float a, float next, float b)
{
    return k_float_fma(y, a, k_float_mul(next, b));
}

/* Four values of a block of 32 that eight neighbouring lanes hold, to int8 (A4). True: not
 * finite. */
static __device__ __forceinline__ bool k_cuda_attention_quantise(const float v[4], uint32_t *ret_q,
                                                                 float *ret_dx)
{
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        m = max(m, k_float_bits(v[i]) & 0x7fffffffu);
#pragma unroll
    for (int o = 1; o < 8; o *= 2)
        m = max(m, __shfl_xor_sync(K_CUDA_WARP_ALL, m, o));
    const bool fault = m >= 0x7f800000u, zero = fault || m < 0x0d800000u;
    const float largest = k_float_of_bits(zero ? 0x3f800000u : m),
                inv = k_float_div(127.0f, largest);
    uint32_t q = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        q |= ((uint32_t)k_float_rint(k_float_mul(v[i], inv)) & 0xffu) << 8 * i;
    *ret_q = zero ? 0 : q;
    *ret_dx = zero ? 0.0f : k_float_div(largest, 127.0f);
    return fault;
}

#endif

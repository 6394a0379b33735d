/* KV pages as the kernels see them; the layout is k_ref_kv.c's. */
#ifndef ISLET_K_CUDA_KV_CUH
#define ISLET_K_CUDA_KV_CUH

#include "k_cuda.cuh"

struct k_cuda_kv {
    uint8_t *pool;
    const uint32_t *table;
    uint64_t page_bytes, layer_offset;
    uint32_t max_pages, n_head_kv, head_dim;
};

/* One kv head's part of a page's layer. */
struct k_cuda_kv_head {
    void *keys, *values;                 /* f16 or int8: [D][64] and [64][D] */
    uint16_t *key_scales, *value_scales; /* 8-bit only: [D / 32][64] and [64][D / 32] */
};

static inline struct k_cuda_kv k_cuda_kv_of(const struct k_kv *kv)
{
    struct k_cuda_kv r;
    r.pool = (uint8_t *)k_cuda_at(kv->pool);
    r.table = (const uint32_t *)k_cuda_at(kv->table);
    r.page_bytes = kv->page_bytes;
    r.layer_offset = kv->layer_offset;
    r.max_pages = kv->max_pages;
    r.n_head_kv = kv->n_head_kv;
    r.head_dim = kv->head_dim;
    return r;
}

/* The layer's part of a page of a sequence. */
static __device__ __forceinline__ uint8_t *k_cuda_kv_page(const struct k_cuda_kv &kv,
                                                          uint32_t sequence, uint32_t page)
{
    const uint32_t id = kv.table[(uint64_t)sequence * kv.max_pages + page];
    return kv.pool + kv.page_bytes * id + kv.layer_offset;
}

static __device__ __forceinline__ struct k_cuda_kv_head k_cuda_kv_head_of(
    const struct k_cuda_kv &kv, uint8_t *layer, uint32_t head)
{
    const uint64_t size = (uint64_t)kv.head_dim * K_PAGE, all = size * kv.n_head_kv;
    uint16_t *scales = (uint16_t *)(void *)(layer + 2 * all);
    struct k_cuda_kv_head r;
    r.keys = layer + size * head;
    r.values = layer + all + size * head;
    r.key_scales = scales + size / 32 * head;
    r.value_scales = scales + (all + size * head) / 32;
    return r;
}

/* The same for an f16 page. */
static __device__ __forceinline__ struct k_cuda_kv_head k_cuda_kv_head_f16(
    const struct k_cuda_kv &kv, uint8_t *layer, uint32_t head)
{
    const uint64_t size = (uint64_t)kv.head_dim * K_PAGE;
    struct k_cuda_kv_head r = {};
    r.keys = layer + 2 * size * head;
    r.values = layer + 2 * size * (kv.n_head_kv + head);
    return r;
}

#endif

/* The inner loops of a CPU level. The threaded backend (k_cpu_ops.c) splits operations and calls
 * these. All give the bits of the reference. */
#ifndef ISLET_K_CPU_INNER_H
#define ISLET_K_CPU_INNER_H

#include "kernels.h"

enum {
    K_CPU_TILE_ROWS = 64, /* rows of a product at once */
    K_CPU_HEADS = 8,      /* query heads of attention at once */
    K_CPU_WORK_BYTES = 64 * 1024
};

/* y[r][o] = w[o] . x[r] for o < n_out, r < n_rows <= K_CPU_TILE_ROWS. x[r]: the row in the form
 * that `format` reads. y[r]: float [n_out]. work: per-thread scratch of K_CPU_WORK_BYTES, aligned
 * to 64. */
typedef void k_cpu_mul_fn(enum k_format format, const void *w, uint32_t n_out, uint32_t n_in,
                          const void *const *x, float *const *y, uint32_t n_rows, void *work);

/* Attention of n_heads <= K_CPU_HEADS query heads of one row that share a kv head: q, y float
 * [n_heads][dim]. pages[i]: the layer's part of page i. work: float [n_heads][3 * dim + K_PAGE],
 * aligned to 64. True: a score was not finite. */
typedef bool k_cpu_attention_fn(const float *q, uint32_t n_heads, const uint8_t *const *pages,
                                uint32_t n_visible, const struct k_kv *kv, uint32_t head_kv,
                                float scale, float *work, float *y);

struct k_cpu_inner {
    const char *name;
    k_cpu_mul_fn *mul;
    /* A4 for elements first .. first + count - 1 (whole blocks) of a row of n; ret: the row's
     * blocks. True: not finite. */
    bool (*quantise32)(const float *x, uint32_t n, uint32_t first, uint32_t count, void *ret);
    bool (*quantise256)(const float *x, uint32_t n, uint32_t first, uint32_t count, void *ret);
    void (*norm)(const float *x, const float *weight, float *y, uint32_t n, float eps);
    /* h[i] = silu(h[i]) * up[i] */
    void (*swiglu)(float *h, const float *up, uint32_t n);
    /* A15 for one head: pairs (x[i], x[i + half]); table: cos, sin [half][2]. */
    void (*rope)(float *x, const float *table, uint32_t half);
    /* A17 for one position of an f16 page of one layer. True: a value overflowed. */
    bool (*kv_write_f16)(void *layer, uint32_t n_head_kv, uint32_t dim, uint32_t slot,
                         const float *k, const float *v);
    k_cpu_attention_fn *attention;
    /* A13: e[i] = exp32(x[i] - largest); returns their sum. Finite x only. */
    float (*softmax)(const float *x, uint32_t n, float *e);
    void (*add)(float *x, const float *y, uint32_t n);
    bool (*finite)(const float *x, uint32_t n);
    /* y = fold over ranks; x += y (A14, A16). out[k] = out + k * stride. */
    void (*moe_sum)(const float *weights, const float *out, size_t stride, uint32_t n_used,
                    uint32_t n, float *x);
};

k_cpu_mul_fn k_avx2_matmul_float; /* F32, F16, BF16 (A8) */
void k_avx2_matmul_fill(struct k_cpu_inner *ret);
void k_avx2_rows_fill(struct k_cpu_inner *ret);
void k_avx2_attention_fill(struct k_cpu_inner *ret);
void k_avx512_matmul_fill(struct k_cpu_inner *ret);
void k_avx512_attention_fill(struct k_cpu_inner *ret);

#endif

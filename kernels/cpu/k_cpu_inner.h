/* The inner loops that a CPU level may replace. The threaded backend (k_cpu_ops.c) splits operations and calls these; the
 * reference fills every entry, each level overwrites what it does faster. All give the bits of the reference. */
#ifndef ISLET_K_CPU_INNER_H
#define ISLET_K_CPU_INNER_H

#include "kernels.h"

/* y[r][o] = w[o] . x[r] for o < n_out, r < n_rows. x[r]: the row in the form that `format` reads. y[r]: float [n_out].
 * work: per-thread scratch of K_CPU_WORK_BYTES. */
typedef void k_cpu_mul_fn(enum k_format format, const void *w, uint32_t n_out, uint32_t n_in,
                          const void *const *x, float *const *y, uint32_t n_rows, void *work);

struct k_cpu_inner {
    const char *name;
    k_cpu_mul_fn *mul;
    bool (*quantise32)(const float *x, uint32_t n, void *ret);
    bool (*quantise256)(const float *x, uint32_t n, void *ret);
    void (*norm)(const float *x, const float *weight, float *y, uint32_t n, float eps);
    /* h[i] = silu(h[i]) * up[i] */
    void (*swiglu)(float *h, const float *up, uint32_t n);
    bool (*attention_head)(const float *q, const uint8_t *const *pages, uint32_t n_visible,
                           const struct k_kv *kv, uint32_t head_kv, float scale, float *work,
                           float *y);
    /* y = fold over ranks; x += y (A14, A16). out[k] = out + k * stride. */
    void (*moe_sum)(const float *weights, const float *out, size_t stride, uint32_t n_used,
                    uint32_t n, float *x);
};

enum {
    K_CPU_TILE_ROWS = 16,
    K_CPU_MAX_INPUTS = 65536
};
/* t values of a tile of outputs, and dx transposed for a tile of rows. */
enum {
    K_CPU_WORK_BYTES = 32768 + K_CPU_MAX_INPUTS / 32 * K_CPU_TILE_ROWS * 4
};

void k_avx2_matmul_fill(struct k_cpu_inner *ret);
void k_avx2_rows_fill(struct k_cpu_inner *ret);
void k_avx512_matmul_fill(struct k_cpu_inner *ret);

#endif

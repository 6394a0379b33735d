/* The scalar oracle, one function per inner piece of ARITHMETIC.md, and the whole table made of
 * them. Plain C, one thread, written to be read: the other backends are compared with it bit for
 * bit, and reuse its pieces where speed does not matter. */
#ifndef ISLET_K_REF_H
#define ISLET_K_REF_H

#include "k_host.h"
#include "kernels.h"

const struct k_ops *k_ref_ops(void);

/* A4. x[n] -> blocks; true if a value is not finite. The row's f32 values are untouched. */
bool k_ref_quantise32(const float *x, uint32_t n, void *ret);
bool k_ref_quantise256(const float *x, uint32_t n, void *ret);
/* A5, A6, A8: one output. `act` is the row in the form that the format reads. */
float k_ref_dot(enum k_format format, const void *weights, const void *act, uint32_t n);
/* A10. */
void k_ref_norm(const float *x, const float *weight, float *y, uint32_t n, float eps);
/* A17, f16 page of one layer: K [n_head_kv][D][64], V [n_head_kv][64][D]; 8-bit: see k_ref_kv.c.
 * True: overflow. */
bool k_ref_kv_write(void *layer, enum k_kv_type type, uint32_t n_head_kv, uint32_t dim,
                    uint32_t slot, const float *k, const float *v);
/* A18, A19 for one query head: positions 0..n_visible-1. pages[i] = the layer's part of the i-th
 * page. work: float [3 * dim + 64]. True: a score was not finite. */
bool k_ref_attention_head(const float *q, const uint8_t *const *pages, uint32_t n_visible,
                          const struct k_kv *kv, uint32_t head_kv, float scale, float *work,
                          float *y);
/* A13: e[i] = exp32(x[i] - largest); returns the sum of e. Finite x only. */
float k_ref_softmax(const float *x, uint32_t n, float *e);
/* A13 for one row. True: a logit was not finite. work: float [n_expert]. */
bool k_ref_router(const struct k_router *a, const float *logits, float *work, uint32_t *ids,
                  float *weights);
/* The rest of it: from finite logits, e and their sum to the chosen. */
void k_ref_router_choose(const struct k_router *a, const float *logits, const float *e, float sum,
                         uint32_t *ids, float *weights);
/* What a row with a fault gets, so that its experts exist. */
void k_ref_router_fault(const struct k_router *a, uint32_t *ids, float *weights);
void k_ref_grouping(const struct k_grouping *a, uint32_t n_rows);

#endif

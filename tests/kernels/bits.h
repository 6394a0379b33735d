/* The checker of the seam: every operation of a backend against the reference, bit for bit, over
 * random shapes. */
#ifndef ISLET_BITS_H
#define ISLET_BITS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels.h"

struct bits_random {
    uint64_t state;
};
uint64_t bits_next(struct bits_random *r);
uint32_t bits_below(struct bits_random *r, uint32_t n);               /* 0..n-1 */
uint32_t bits_between(struct bits_random *r, uint32_t a, uint32_t b); /* a..b */

/* Kinds of inputs: what activations look like, and what weights look like. */
enum bits_kind {
    BITS_NORMAL,
    BITS_ZERO,
    BITS_SUBNORMAL,
    BITS_SPIKES,
    BITS_WIDE,
    BITS_KINDS
};
void bits_fill(struct bits_random *r, enum bits_kind kind, float *x, size_t n);
/* Valid random blocks: any finite scale, subnormal, zero and huge ones among them, weights at their
 * bounds. */
void bits_blocks(struct bits_random *r, enum k_format format, void *blocks, size_t n_blocks);

/* One backend at work, and buffers guarded at both ends. */
struct bits_side {
    struct k_device *device;
    struct k_stream *stream;
    const struct k_ops *ops;
};

struct bits_run {
    struct bits_random random;
    struct bits_side reference, tried;
    uint64_t compared; /* values */
    uint32_t passed, failed;
    bool full;
};

struct k_span bits_span(struct bits_side *side, const void *bytes, size_t n); /* NULL: zeros */
void *bits_host(struct k_span span);
/* Frees, after looking at the guard bytes before and behind the n bytes asked for; false:
 * overwritten. */
bool bits_drop(struct bits_side *side, struct k_span span, size_t n);

/* Each runs one random case; the result is counted by the caller. On a difference prints what the
 * parameters were. */
typedef bool bits_case(struct bits_run *run);
bits_case bits_matmul, bits_quantise, bits_norm, bits_rope, bits_attention, bits_router,
    bits_experts, bits_small, bits_nonfinite;

/* Compares n floats as bits; prints the first difference under `what`. */
bool bits_equal(struct bits_run *run, const char *what, const float *a, const float *b, size_t n);

/* Row by row, leaving out row `without` (BITS_NO_ROW: none). */
enum {
    BITS_NO_ROW = 0x7fffffff
};
bool bits_rows_equal(struct bits_run *run, const char *what, const float *a, const float *b,
                     size_t width, uint32_t n_rows, uint32_t without);
/* Row `bad` alone has its fault set (BITS_NO_ROW: none has). */
bool bits_only_fault(const char *what, const uint32_t *faults, uint32_t n_rows, uint32_t bad);
/* An infinity or a NaN. */
float bits_not_finite(struct bits_random *r);

/* A wrong order of a sum must be seen: true if two accumulators give other bits than one. */
bool bits_mutation_is_seen(struct bits_random *r);

#endif

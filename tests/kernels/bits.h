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

/* One backend at work, and buffers guarded at both ends. Where the CPU does not see the device's
 * memory, what bits_host gives is a copy, made at its first call and dropped with its buffer. */
struct bits_mirror {
    struct k_buffer *buffer;
    uint8_t *copy;
    size_t bytes; /* of the buffer */
};
enum {
    BITS_MIRRORS = 128,
    BITS_GUARD = 256 /* bytes before and behind; a span begins at this offset of its buffer */
};
struct bits_side {
    struct k_device *device;
    struct k_stream *stream;
    const struct k_ops *ops;
    bool record; /* operations go through a recorded graph */
    uint32_t n_mirrors;
    struct bits_mirror mirror[BITS_MIRRORS];
};

struct bits_run {
    struct bits_random random;
    struct bits_side reference, tried;
    uint64_t compared; /* values */
    uint32_t passed, failed;
    bool full;
    const char *only; /* kind of case, or NULL: all */
    uint32_t cases;   /* of each kind; 0: as many as its table says */
    bool device; /* a GPU is tried: larger and arranged shapes, room for more rows than there are */
};

struct k_span bits_span(struct bits_side *side, const void *bytes, size_t n); /* NULL: zeros */
/* As bits_span, with zeros behind the n bytes up to `total`. */
struct k_span bits_span_of(struct bits_side *side, const void *bytes, size_t n, size_t total);
/* Weights in the order in which the side computes. */
struct k_span bits_weights(struct bits_side *side, enum k_format format, uint32_t n_out,
                           uint32_t n_in, const void *blocks);
/* Arranges n_out x n_in weights that lie at both spans. False: an error. */
bool bits_arrange(struct bits_side *side, struct k_span from, struct k_span to,
                  enum k_format format, uint32_t n_out, uint32_t n_in);
/* What the span holds once the operations so far have run; not to be written to. */
const void *bits_host(struct bits_side *side, struct k_span span);
/* Around operations: everything between runs directly or is recorded and replayed. bits_end waits;
 * false: an error. */
bool bits_begin(struct bits_side *side);
bool bits_end(struct bits_side *side);
/* True if an operation gave ERR_OK; else prints which did not. */
bool bits_done(const struct bits_side *side, const char *what, enum err_code code);
/* Rows that buffers have room for: n, or more where a GPU is tried. */
uint32_t bits_max_rows(struct bits_run *run, uint32_t n);
/* 1..n rows; now and then hundreds, where a GPU is tried. */
uint32_t bits_some_rows(struct bits_run *run, uint32_t n);
/* Frees, after looking at the guard bytes before and behind the n bytes asked for; false:
 * overwritten. */
bool bits_drop(struct bits_side *side, struct k_span span, size_t n);

/* Each runs one random case; the result is counted by the caller. On a difference prints what the
 * parameters were. */
typedef bool bits_case(struct bits_run *run);
bits_case bits_matmul, bits_quantise, bits_norm, bits_rope, bits_attention, bits_router,
    bits_experts, bits_small, bits_nonfinite, bits_enter, bits_heads, bits_attend, bits_route,
    bits_pick, bits_device;

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

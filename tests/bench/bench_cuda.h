/* What the parts of bench_cuda share: the device, inputs made at random, and recordings timed by the
 * device's events. */
#ifndef ISLET_BENCH_CUDA_H
#define ISLET_BENCH_CUDA_H

#include <stdio.h>

#include "kernels.h"

enum {
    BENCH_CUDA_LAUNCHES = 24, /* in a graph */
    BENCH_CUDA_REPEATS = 9    /* of which the median counts */
};

struct bench_cuda {
    struct k_device *device;
    const struct k_ops *ops;
    struct k_stream *stream;
    struct k_event *from, *to;
    double copy_gbs; /* read + written */
    uint64_t random;
    FILE *json;
};

/* Ends the program after an error. */
void bench_cuda_die(const char *what);
void bench_cuda_must(struct bench_cuda *b, enum err_code code, const char *what);

uint64_t bench_cuda_next(struct bench_cuda *b); /* at random */
struct k_span bench_cuda_span(struct bench_cuda *b, uint64_t bytes);
struct k_span bench_cuda_span_of(struct bench_cuda *b, const void *bytes, size_t n);
struct k_span bench_cuda_floats(struct bench_cuda *b, size_t n); /* from -1 to 1 */
/* Random valid weights of one matrix, arranged. */
void bench_cuda_weights(struct bench_cuda *b, enum k_format format, uint32_t n_out, uint32_t n_in,
                        struct k_span to);
struct k_rows bench_cuda_rows(struct bench_cuda *b, uint32_t n);
void bench_cuda_rows_free(struct bench_cuda *b, const struct k_rows *r);
struct k_act bench_cuda_act(struct bench_cuda *b, uint32_t n, uint32_t n_rows);
void bench_cuda_act_free(struct bench_cuda *b, const struct k_act *a);

double bench_cuda_median(double *values, size_t n); /* sorts them */

/* Operations between them are recorded; finish gives the median time of a replay, divided by
 * `launches`, in us. */
void bench_cuda_begin(struct bench_cuda *b);
double bench_cuda_finish(struct bench_cuda *b, uint32_t launches);

/* A whole layer, and each of its operations (bench_cuda_layer.c). */
void bench_cuda_layer(struct bench_cuda *b, uint32_t n_rows, uint32_t position);

#endif

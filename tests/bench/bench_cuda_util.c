#include "bench_cuda.h"

#include <stdlib.h>
#include <string.h>

#include "k_format.h"

void bench_cuda_die(const char *what)
{
    fprintf(stderr, "bench_cuda: %s\n", what);
    exit(1);
}

void bench_cuda_must(struct bench_cuda *b, enum err_code code, const char *what)
{
    struct err why = {0};
    if (code == ERR_OK)
        return;
    (void)b->ops->lost(b->device, &why);
    fprintf(stderr, "bench_cuda: %s: %s %s\n", what, err_code_name(code), why.text);
    exit(1);
}

uint64_t bench_cuda_next(struct bench_cuda *b)
{
    b->random = b->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return b->random ^ (b->random >> 29);
}

struct k_span bench_cuda_span(struct bench_cuda *b, uint64_t bytes)
{
    struct k_span span = {0};
    struct err e = {0};
    if (b->ops->buffer_new(b->device, bytes, &span.buffer, &e) != ERR_OK)
        bench_cuda_die(e.text);
    return span;
}

struct k_span bench_cuda_span_of(struct bench_cuda *b, const void *bytes, size_t n)
{
    const struct k_span span = bench_cuda_span(b, n);
    b->ops->upload(b->stream, span, bytes, n);
    return span;
}

struct k_span bench_cuda_floats(struct bench_cuda *b, size_t n)
{
    float *x = malloc(n * sizeof *x);
    if (x == NULL)
        bench_cuda_die("no memory");
    for (size_t i = 0; i < n; i++)
        x[i] = (float)((double)(bench_cuda_next(b) >> 40) * 0x1p-23 - 1.0);
    const struct k_span span = bench_cuda_span_of(b, x, n * sizeof *x);
    free(x);
    return span;
}

void bench_cuda_weights(struct bench_cuda *b, enum k_format format, uint32_t n_out, uint32_t n_in,
                        struct k_span to)
{
    const uint64_t bytes = k_format_bytes(format, n_out, n_in);
    const uint32_t block = k_format_block_bytes(format);
    uint8_t *host = malloc(bytes);
    if (host == NULL)
        bench_cuda_die("no memory");
    for (uint64_t i = 0; i < bytes; i++)
        host[i] = (uint8_t)(bench_cuda_next(b) >> 24);
    for (uint64_t at = 0; at < bytes; at += block) {
        const uint16_t d[2] = {(uint16_t)(0x0c00 | (bench_cuda_next(b) & 0x3ff)),
                               0x0800}; /* about 0.0003 */
        memcpy(host + at + (format == K_Q6_K ? offsetof(struct k_format_q6_k, d) : 0), d,
               format == K_Q4_K ? 4 : 2);
    }
    const struct k_span file = bench_cuda_span_of(b, host, bytes);
    bench_cuda_must(b,
                    b->ops->arrange(&(struct k_arrange){file, to, format, n_out, n_in}, b->stream),
                    "arrange");
    bench_cuda_must(b, b->ops->wait(b->stream), "weights");
    b->ops->buffer_free(file.buffer);
    free(host);
}

struct k_rows bench_cuda_rows(struct bench_cuda *b, uint32_t n)
{
    return (struct k_rows){.n_rows = bench_cuda_span_of(b, &n, sizeof n),
                           .token = bench_cuda_span(b, n * 4),
                           .position = bench_cuda_span(b, n * 4),
                           .sequence = bench_cuda_span(b, n * 4),
                           .faults = bench_cuda_span(b, n * 4),
                           .max_rows = n};
}

void bench_cuda_rows_free(struct bench_cuda *b, const struct k_rows *r)
{
    b->ops->buffer_free(r->n_rows.buffer);
    b->ops->buffer_free(r->token.buffer);
    b->ops->buffer_free(r->position.buffer);
    b->ops->buffer_free(r->sequence.buffer);
    b->ops->buffer_free(r->faults.buffer);
}

struct k_act bench_cuda_act(struct bench_cuda *b, uint32_t n, uint32_t n_rows)
{
    return (struct k_act){.f32 = bench_cuda_floats(b, (size_t)n * n_rows),
                          .q32 = bench_cuda_span(b, b->ops->act_bytes(K_FORM_Q32, n, n_rows)),
                          .q256 = bench_cuda_span(b, b->ops->act_bytes(K_FORM_Q256, n, n_rows)),
                          .n = n};
}

void bench_cuda_act_free(struct bench_cuda *b, const struct k_act *a)
{
    b->ops->buffer_free(a->f32.buffer);
    b->ops->buffer_free(a->q32.buffer);
    b->ops->buffer_free(a->q256.buffer);
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_cuda_median(double *values, size_t n)
{
    qsort(values, n, sizeof values[0], by_size);
    return values[n / 2];
}

double bench_cuda_finish(struct bench_cuda *b, uint32_t launches)
{
    struct k_graph *graph = NULL;
    double us[BENCH_CUDA_REPEATS];
    bench_cuda_must(b, b->ops->capture_end(b->stream, &graph), "recording");
    for (int i = 0; i < 2; i++)
        bench_cuda_must(b, b->ops->replay(graph, b->stream), "replay");
    for (int i = 0; i < BENCH_CUDA_REPEATS; i++) {
        b->ops->event_record(b->from, b->stream);
        bench_cuda_must(b, b->ops->replay(graph, b->stream), "replay");
        b->ops->event_record(b->to, b->stream);
        bench_cuda_must(b, b->ops->wait(b->stream), "replay");
        us[i] = b->ops->event_us(b->from, b->to) / launches;
    }
    b->ops->graph_free(graph);
    return bench_cuda_median(us, BENCH_CUDA_REPEATS);
}

void bench_cuda_begin(struct bench_cuda *b)
{
    bench_cuda_must(b, b->ops->wait(b->stream), "before a recording");
    bench_cuda_must(b, b->ops->capture_begin(b->stream), "capture_begin");
}

/* The CUDA kernels by themselves: GB/s of weights of the products with few rows, TOPS of those with
 * many, beside the copy bandwidth of the same run. Each figure is the median of several replays of a
 * graph of launches over rotating weights (more bytes than the cache holds), timed by the device's
 * events. A markdown table to stdout, one JSON object a row to build/bench/cuda.json.
 *   bench_cuda [--file islet-cuda.so] [--json file] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "k_format.h"
#include "kernels.h"

enum {
    N_EMBD = 2048,
    N_FF = 768,
    LAUNCHES = 24, /* in a graph */
    REPEATS = 9,
    MAX_EXPERTS = 128
};
#define ROTATE_BYTES (UINT64_C(1) << 30) /* of weights at least, where they fit */

static const struct {
    enum k_format format;
    const char *name;
} formats[] = {{K_Q4_K, "Q4_K"}, {K_Q6_K, "Q6_K"}, {K_Q8_0, "Q8_0"}};

struct bench {
    struct k_device *device;
    const struct k_ops *ops;
    struct k_stream *stream;
    struct k_event *from, *to;
    double copy_gbs; /* read + written */
    uint64_t random;
    FILE *json;
};

static void die(const char *what)
{
    fprintf(stderr, "bench_cuda: %s\n", what);
    exit(1);
}

static void must(struct bench *b, enum err_code code, const char *what)
{
    struct err why = {0};
    if (code == ERR_OK)
        return;
    (void)b->ops->lost(b->device, &why);
    fprintf(stderr, "bench_cuda: %s: %s %s\n", what, err_code_name(code), why.text);
    exit(1);
}

static uint64_t next(struct bench *b)
{
    b->random = b->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return b->random ^ (b->random >> 29);
}

static struct k_span span_new(struct bench *b, uint64_t bytes)
{
    struct k_span span = {0};
    struct err e = {0};
    if (b->ops->buffer_new(b->device, bytes, &span.buffer, &e) != ERR_OK)
        die(e.text);
    return span;
}

static struct k_span span_of(struct bench *b, const void *bytes, size_t n)
{
    const struct k_span span = span_new(b, n);
    b->ops->upload(b->stream, span, bytes, n);
    return span;
}

static struct k_span floats(struct bench *b, size_t n)
{
    float *x = malloc(n * sizeof *x);
    if (x == NULL)
        die("no memory");
    for (size_t i = 0; i < n; i++)
        x[i] = (float)((double)(next(b) >> 40) * 0x1p-23 - 1.0);
    const struct k_span span = span_of(b, x, n * sizeof *x);
    free(x);
    return span;
}

/* Random valid weights of one matrix, arranged. */
static void weights(struct bench *b, enum k_format format, uint32_t n_out, uint32_t n_in,
                    struct k_span to)
{
    const uint64_t bytes = k_format_bytes(format, n_out, n_in);
    const uint32_t block = k_format_block_bytes(format);
    uint8_t *host = malloc(bytes);
    if (host == NULL)
        die("no memory");
    for (uint64_t i = 0; i < bytes; i++)
        host[i] = (uint8_t)(next(b) >> 24);
    for (uint64_t at = 0; at < bytes; at += block) {
        const uint16_t d[2] = {(uint16_t)(0x0c00 | (next(b) & 0x3ff)), 0x0800}; /* about 0.0003 */
        memcpy(host + at + (format == K_Q6_K ? offsetof(struct k_format_q6_k, d) : 0), d,
               format == K_Q4_K ? 4 : 2);
    }
    const struct k_span file = span_of(b, host, bytes);
    must(b, b->ops->arrange(&(struct k_arrange){file, to, format, n_out, n_in}, b->stream),
         "arrange");
    must(b, b->ops->wait(b->stream), "weights");
    b->ops->buffer_free(file.buffer);
    free(host);
}

static struct k_rows rows_new(struct bench *b, uint32_t n)
{
    return (struct k_rows){.n_rows = span_of(b, &n, sizeof n),
                           .token = span_new(b, n * 4),
                           .position = span_new(b, n * 4),
                           .sequence = span_new(b, n * 4),
                           .faults = span_new(b, n * 4),
                           .max_rows = n};
}

static void rows_free(struct bench *b, const struct k_rows *r)
{
    b->ops->buffer_free(r->n_rows.buffer);
    b->ops->buffer_free(r->token.buffer);
    b->ops->buffer_free(r->position.buffer);
    b->ops->buffer_free(r->sequence.buffer);
    b->ops->buffer_free(r->faults.buffer);
}

static struct k_act act_new(struct bench *b, uint32_t n, uint32_t n_rows)
{
    return (struct k_act){.f32 = floats(b, (size_t)n * n_rows),
                          .q32 = span_new(b, b->ops->act_bytes(K_FORM_Q32, n, n_rows)),
                          .q256 = span_new(b, b->ops->act_bytes(K_FORM_Q256, n, n_rows)),
                          .n = n};
}

static void act_free(struct bench *b, const struct k_act *a)
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

/* Median time of one of the `launches` recorded since capture_begin, in us. */
static double finish(struct bench *b, uint32_t launches)
{
    struct k_graph *graph = NULL;
    double us[REPEATS];
    must(b, b->ops->capture_end(b->stream, &graph), "recording");
    for (int i = 0; i < 2; i++)
        must(b, b->ops->replay(graph, b->stream), "replay");
    for (int i = 0; i < REPEATS; i++) {
        b->ops->event_record(b->from, b->stream);
        must(b, b->ops->replay(graph, b->stream), "replay");
        b->ops->event_record(b->to, b->stream);
        must(b, b->ops->wait(b->stream), "replay");
        us[i] = b->ops->event_us(b->from, b->to) / launches;
    }
    b->ops->graph_free(graph);
    qsort(us, REPEATS, sizeof us[0], by_size);
    return us[REPEATS / 2];
}

static void begin(struct bench *b)
{
    must(b, b->ops->wait(b->stream), "before a recording");
    must(b, b->ops->capture_begin(b->stream), "capture_begin");
}

/* A row of both tables. share and tops: 0 where they say nothing. */
static void row(struct bench *b, const char *what, const char *format, const char *phase,
                uint32_t batch, double us, double bytes, double operations)
{
    const double gbs = bytes / us / 1e3, tops = operations / us / 1e6;
    const bool decode = operations == 0.0;
    printf("| %s | %s | %u | %.1f |", what, format, batch, us);
    if (decode)
        printf(" %.0f | %.0f %% | |\n", gbs, 100.0 * gbs / b->copy_gbs);
    else
        printf(" | | %.0f |\n", tops);
    fflush(stdout);
    fprintf(b->json,
            "{\"model\": \"kernel %s %s\", \"vram_budget\": null, \"router\": null, \"phase\": "
            "\"%s\", \"batch\": %u, \"tok_s\": null, \"peer_tok_s\": null, \"ratio\": null, "
            "\"us\": %.2f, ",
            what, format, phase, batch, us);
    if (decode)
        fprintf(b->json, "\"gb_s\": %.1f, \"bandwidth_share\": %.3f, ", gbs, gbs / b->copy_gbs);
    else
        fprintf(b->json, "\"tops\": %.1f, \"bandwidth_share\": null, ", tops);
    fprintf(b->json, "\"share_of_limit\": null, \"host_us_per_token\": null}\n");
}

/* Times of what copies 1 GiB on the device, in us: by the copy that the driver chooses, recorded and
 * not, and by a kernel. The best counts: a share of a poor copy would say little. */
static void device_copies(struct bench *b, struct k_span x, struct k_span y, double us[3])
{
    enum {
        WIDTH = 2048
    };
    const uint64_t bytes = UINT64_C(1) << 30;
    const uint32_t n_rows = (uint32_t)(bytes / 4 / WIDTH);
    begin(b);
    for (int i = 0; i < LAUNCHES; i++)
        b->ops->copy(b->stream, i % 2 ? x : y, i % 2 ? y : x, bytes);
    us[0] = finish(b, LAUNCHES);
    double direct[REPEATS];
    for (int k = 0; k < REPEATS; k++) {
        b->ops->event_record(b->from, b->stream);
        for (int i = 0; i < LAUNCHES; i++)
            b->ops->copy(b->stream, i % 2 ? x : y, i % 2 ? y : x, bytes);
        b->ops->event_record(b->to, b->stream);
        must(b, b->ops->wait(b->stream), "copy");
        direct[k] = b->ops->event_us(b->from, b->to) / LAUNCHES;
    }
    qsort(direct, REPEATS, sizeof direct[0], by_size);
    us[1] = direct[REPEATS / 2];
    uint32_t *index = malloc(n_rows * sizeof *index);
    if (index == NULL)
        die("no memory");
    for (uint32_t i = 0; i < n_rows; i++)
        index[i] = i;
    const struct k_rows rows = rows_new(b, n_rows);
    const struct k_span at = span_of(b, index, n_rows * sizeof *index);
    begin(b);
    for (int i = 0; i < LAUNCHES; i++)
        must(b,
             b->ops->gather(&(struct k_gather){rows, rows, at, i % 2 ? y : x, i % 2 ? x : y, WIDTH},
                            b->stream),
             "gather");
    us[2] = finish(b, LAUNCHES);
    free(index);
    b->ops->buffer_free(at.buffer);
    rows_free(b, &rows);
}

static void copies(struct bench *b)
{
    const uint64_t bytes = UINT64_C(1) << 30;
    const struct k_span x = span_new(b, bytes), y = span_new(b, bytes);
    double us[3];
    device_copies(b, x, y, us);
    for (int i = 0; i < 3; i++) {
        const double gbs = 2.0 * (double)bytes / us[i] / 1e3;
        b->copy_gbs = gbs > b->copy_gbs ? gbs : b->copy_gbs;
        us[i] = gbs;
    }
    printf("Copy on the device, GB/s read + written: %.0f (driver, recorded), %.0f (driver), %.0f "
           "(kernel); shares are of the best.",
           us[0], us[1], us[2]);
    static const uint32_t sizes[] = {512 << 10, 1536 << 10, 6 << 20};
    struct k_span host = {0};
    struct err e = {0};
    if (b->ops->pinned_new(b->device, sizes[2], &host.buffer, &e) != ERR_OK)
        die(e.text);
    printf(" From pinned memory, queued:");
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        begin(b);
        for (int k = 0; k < LAUNCHES; k++)
            b->ops->fetch(b->stream, x, b->ops->buffer_host(host.buffer), sizes[i]);
        const double each = finish(b, LAUNCHES);
        printf(" %u KiB %.1f us, %.1f GB/s%s", sizes[i] >> 10, each, sizes[i] / each / 1e3,
               i < 2 ? ";" : ".\n\n");
    }
    b->ops->buffer_free(host.buffer);
    b->ops->buffer_free(x.buffer);
    b->ops->buffer_free(y.buffer);
}

/* ---- experts --------------------------------------------------------------------------------- */

struct experts {
    struct k_experts of;
    uint64_t gate_bytes, down_bytes; /* of one slice, without the room behind it */
    uint32_t sets;
    struct k_span slots[LAUNCHES]; /* of each set of weights */
};

static uint64_t round256(uint64_t n)
{
    return (n + 255) / 256 * 256;
}

/* Sets of weights that rotate: enough to leave the cache, no more than fit. */
static uint32_t sets_of(struct bench *b, uint64_t bytes)
{
    uint64_t available, total;
    b->ops->memory(b->device, &available, &total);
    uint64_t n = ROTATE_BYTES / bytes + 2;
    if (n > available * 3 / 4 / bytes)
        n = available * 3 / 4 / bytes;
    return n == 0 ? 1 : n > LAUNCHES ? LAUNCHES : (uint32_t)n;
}

static void experts_new(struct bench *b, enum k_format format, uint32_t n_expert,
                        struct experts *ret)
{
    ret->gate_bytes = k_format_bytes(format, N_FF, N_EMBD);
    ret->down_bytes = k_format_bytes(format, N_EMBD, N_FF);
    const uint64_t gate = round256(ret->gate_bytes), one = 2 * gate + round256(ret->down_bytes);
    ret->sets = sets_of(b, one * n_expert);
    const struct k_span arena = span_new(b, one * n_expert * ret->sets);
    weights(b, format, N_FF, N_EMBD, arena);
    weights(b, format, N_FF, N_EMBD, (struct k_span){arena.buffer, gate});
    weights(b, format, N_EMBD, N_FF, (struct k_span){arena.buffer, 2 * gate});
    for (uint64_t i = 1; i < (uint64_t)n_expert * ret->sets; i++)
        b->ops->copy(b->stream, (struct k_span){arena.buffer, i * one}, arena, one);
    for (uint32_t s = 0; s < ret->sets; s++) {
        uint64_t slots[MAX_EXPERTS][3];
        for (uint32_t e = 0; e < n_expert; e++) {
            const uint64_t at = (s * (uint64_t)n_expert + e) * one;
            slots[e][0] = at;
            slots[e][1] = at + gate;
            slots[e][2] = at + 2 * gate;
        }
        ret->slots[s] = span_of(b, slots, n_expert * sizeof slots[0]);
    }
    ret->of = (struct k_experts){.arena = arena.buffer,
                                 .gate = format,
                                 .up = format,
                                 .down = format,
                                 .n_embd = N_EMBD,
                                 .n_ff = N_FF,
                                 .n_expert = n_expert};
}

static void experts_free(struct bench *b, struct experts *x)
{
    for (uint32_t s = 0; s < x->sets; s++)
        b->ops->buffer_free(x->slots[s].buffer);
    b->ops->buffer_free(x->of.arena);
}

/* Row r uses n_used of the experts: all of them, or as many different ones from a random start. */
static struct k_span choose(struct bench *b, uint32_t n_expert, uint32_t n_used, uint32_t n_rows)
{
    uint32_t *ids = calloc((size_t)n_rows * n_used, sizeof *ids);
    if (ids == NULL)
        die("no memory");
    for (uint32_t r = 0; r < n_rows; r++) {
        const uint32_t first = (uint32_t)(next(b) >> 33) % n_expert;
        const uint32_t step = 2 * ((uint32_t)(next(b) >> 33) % (n_expert / 2)) + 1;
        for (uint32_t k = 0; k < n_used; k++) /* n_expert is a power of two, step is odd */
            ids[r * n_used + k] = (first + k * step) % n_expert;
    }
    const struct k_span span = span_of(b, ids, (size_t)n_rows * n_used * sizeof *ids);
    free(ids);
    return span;
}

static void experts_run(struct bench *b, struct experts *x, const char *format, uint32_t n_rows,
                        uint32_t n_used, bool decode)
{
    const uint32_t pairs = n_rows * n_used, n_expert = x->of.n_expert;
    const struct k_rows rows = rows_new(b, n_rows);
    const struct k_span ids = choose(b, n_expert, n_used, n_rows), n_groups = span_new(b, 4),
                        groups = span_new(b, n_expert * sizeof(struct k_group)),
                        order = span_new(b, pairs * 4),
                        out = span_new(b, (uint64_t)pairs * N_EMBD * 4);
    uint32_t all[MAX_EXPERTS];
    for (uint32_t i = 0; i < n_expert; i++)
        all[i] = i;
    const struct k_span selected = span_of(b, all, n_expert * 4);
    const struct k_act in = act_new(b, N_EMBD, n_rows), h = act_new(b, N_FF, pairs);
    x->of.n_used = n_used;
    must(b,
         b->ops->grouping(
             &(struct k_grouping){rows, ids, n_groups, groups, order, n_expert, n_used}, b->stream),
         "grouping");
    must(b, b->ops->quantise(&(struct k_quantise){rows, in}, b->stream), "quantise");
    struct k_moe_gate_up gate = {rows, x->of, groups, order, n_groups, selected, in, h};
    struct k_moe_down down = {rows, x->of, groups, order, n_groups, selected, h, out};
    const double operations = decode ? 0.0 : 2.0 * pairs * N_FF * N_EMBD;
    char what[64];
    begin(b);
    for (uint32_t i = 0; i < LAUNCHES; i++) {
        gate.experts.slots = x->slots[i % x->sets];
        must(b, b->ops->moe_gate_up(&gate, b->stream), "moe_gate_up");
    }
    double us = finish(b, LAUNCHES);
    snprintf(what, sizeof what, "%u experts gate+up", n_expert);
    row(b, what, format, decode ? "matvec" : "prefill", n_rows, us,
        2.0 * (double)x->gate_bytes * n_expert, 2 * operations);
    begin(b);
    for (uint32_t i = 0; i < LAUNCHES; i++) {
        down.experts.slots = x->slots[i % x->sets];
        must(b, b->ops->moe_down(&down, b->stream), "moe_down");
    }
    us = finish(b, LAUNCHES);
    snprintf(what, sizeof what, "%u experts down", n_expert);
    row(b, what, format, decode ? "matvec" : "prefill", n_rows, us,
        (double)x->down_bytes * n_expert, operations);
    const struct k_span spans[] = {ids, n_groups, groups, order, out, selected};
    for (size_t i = 0; i < sizeof spans / sizeof spans[0]; i++)
        b->ops->buffer_free(spans[i].buffer);
    act_free(b, &in);
    act_free(b, &h);
    rows_free(b, &rows);
}

/* ---- dense ----------------------------------------------------------------------------------- */

static void dense(struct bench *b, size_t f, uint32_t n_out, const uint32_t *n_rows, size_t n)
{
    const uint64_t bytes = k_format_bytes(formats[f].format, n_out, N_EMBD);
    const uint32_t sets = sets_of(b, bytes);
    const struct k_span w = span_new(b, round256(bytes) * sets);
    weights(b, formats[f].format, n_out, N_EMBD, w);
    for (uint32_t s = 1; s < sets; s++)
        b->ops->copy(b->stream, (struct k_span){w.buffer, round256(bytes) * s}, w, bytes);
    for (size_t k = 0; k < n; k++) {
        const struct k_rows rows = rows_new(b, n_rows[k]);
        const struct k_act in = act_new(b, N_EMBD, n_rows[k]);
        const struct k_span y = span_new(b, (uint64_t)n_out * n_rows[k] * 4);
        must(b, b->ops->quantise(&(struct k_quantise){rows, in}, b->stream), "quantise");
        begin(b);
        for (uint32_t i = 0; i < LAUNCHES; i++) {
            const struct k_matmul a = {
                .rows = rows,
                .act = in,
                .n_matrices = 1,
                .w = {{{w.buffer, round256(bytes) * (i % sets)}, formats[f].format, n_out, N_EMBD}},
                .y = {y}};
            must(b, b->ops->matmul(&a, b->stream), "matmul");
        }
        const double us = finish(b, LAUNCHES);
        char what[64];
        snprintf(what, sizeof what, "dense %u x %d", n_out, N_EMBD);
        const bool decode = n_rows[k] <= 8;
        row(b, what, formats[f].name, decode ? "matvec" : "prefill", n_rows[k], us, (double)bytes,
            decode ? 0.0 : 2.0 * n_rows[k] * n_out * N_EMBD);
        b->ops->buffer_free(y.buffer);
        act_free(b, &in);
        rows_free(b, &rows);
    }
    b->ops->buffer_free(w.buffer);
}

int main(int argc, char **argv)
{
    struct bench b = {.random = 20261130};
    struct k_cuda_options options = {.ordinal = -1};
    const char *json = "build/bench/cuda.json";
    struct err e = {0};
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 < argc && strcmp(argv[i], "--file") == 0)
            options.file = argv[i + 1];
        else if (i + 1 < argc && strcmp(argv[i], "--json") == 0)
            json = argv[i + 1];
        else
            die("usage: bench_cuda [--file islet-cuda.so] [--json file]");
    }
    const enum err_code code = k_open_cuda(&options, &b.device, &e);
    if (code == ERR_UNSUPPORTED) {
        printf("skip: no CUDA device (%s)\n", e.text);
        return 0;
    }
    if (code != ERR_OK)
        die(e.text);
    b.ops = k_ops(b.device);
    b.json = fopen(json, "w");
    if (b.json == NULL)
        die("the JSON file cannot be written");
    if (b.ops->stream_new(b.device, &b.stream, &e) != ERR_OK ||
        b.ops->event_new(b.device, &b.from, &e) != ERR_OK ||
        b.ops->event_new(b.device, &b.to, &e) != ERR_OK)
        die(e.text);
    printf("%s. Median of %d replays of %d launches over rotating weights.\n\n",
           b.ops->describe(b.device), REPEATS, LAUNCHES);
    copies(&b);
    printf("| launch | format | rows | us | GB/s | share of copy | TOPS |\n"
           "| --- | --- | --- | --- | --- | --- | --- |\n");
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        for (uint32_t n_expert = 8; n_expert <= MAX_EXPERTS; n_expert *= 16) {
            struct experts x;
            experts_new(&b, formats[f].format, n_expert, &x);
            experts_run(&b, &x, formats[f].name, 1, n_expert, true);
            experts_run(&b, &x, formats[f].name, 8, n_expert, true);
            if (n_expert == MAX_EXPERTS) {
                experts_run(&b, &x, formats[f].name, 512, 8, false);
                experts_run(&b, &x, formats[f].name, 2048, 8, false);
            }
            experts_free(&b, &x);
        }
        dense(&b, f, 8192, (const uint32_t[]){1, 8, 512, 2048}, 4);
        dense(&b, f, 32000, (const uint32_t[]){1, 8}, 2);
    }
    b.ops->event_free(b.from);
    b.ops->event_free(b.to);
    b.ops->stream_free(b.stream);
    k_close(b.device);
    return fclose(b.json) != 0;
}

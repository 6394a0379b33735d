/* The CUDA kernels by themselves: GB/s of weights of the products with few rows, TOPS of those with
 * many, beside the copy bandwidth of the same run. Each figure is the median of several replays of a
 * graph of launches over rotating weights (more bytes than the cache holds), timed by the device's
 * events. A markdown table to stdout, one JSON object a row to build/bench/cuda.json.
 *   bench_cuda [--file islet-cuda.so] [--json file] [--only matvec | prefill | layer] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_cuda.h"
#include "k_format.h"
#include "kernels.h"

enum {
    N_EMBD = 2048,
    N_FF = 768,
    MAX_EXPERTS = 128
};
#define ROTATE_BYTES (UINT64_C(1) << 30) /* of weights at least, where they fit */

static const struct {
    enum k_format format;
    const char *name;
} formats[] = {{K_Q4_K, "Q4_K"}, {K_Q6_K, "Q6_K"}, {K_Q8_0, "Q8_0"}};

/* A row of both tables. share and tops: 0 where they say nothing. */
static void row(struct bench_cuda *b, const char *what, const char *format, const char *phase,
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
static void device_copies(struct bench_cuda *b, struct k_span x, struct k_span y, double us[3])
{
    enum {
        WIDTH = 2048
    };
    const uint64_t bytes = UINT64_C(1) << 30;
    const uint32_t n_rows = (uint32_t)(bytes / 4 / WIDTH);
    bench_cuda_begin(b);
    for (int i = 0; i < BENCH_CUDA_LAUNCHES; i++)
        b->ops->copy(b->stream, i % 2 ? x : y, i % 2 ? y : x, bytes);
    us[0] = bench_cuda_finish(b, BENCH_CUDA_LAUNCHES);
    double direct[BENCH_CUDA_REPEATS];
    for (int k = 0; k < BENCH_CUDA_REPEATS; k++) {
        b->ops->event_record(b->from, b->stream);
        for (int i = 0; i < BENCH_CUDA_LAUNCHES; i++)
            b->ops->copy(b->stream, i % 2 ? x : y, i % 2 ? y : x, bytes);
        b->ops->event_record(b->to, b->stream);
        bench_cuda_must(b, b->ops->wait(b->stream), "copy");
        direct[k] = b->ops->event_us(b->from, b->to) / BENCH_CUDA_LAUNCHES;
    }
    us[1] = bench_cuda_median(direct, BENCH_CUDA_REPEATS);
    uint32_t *index = malloc(n_rows * sizeof *index);
    if (index == NULL)
        bench_cuda_die("no memory");
    for (uint32_t i = 0; i < n_rows; i++)
        index[i] = i;
    const struct k_rows rows = bench_cuda_rows(b, n_rows);
    const struct k_span at = bench_cuda_span_of(b, index, n_rows * sizeof *index);
    bench_cuda_begin(b);
    for (int i = 0; i < BENCH_CUDA_LAUNCHES; i++)
        bench_cuda_must(
            b,
            b->ops->gather(&(struct k_gather){rows, rows, at, i % 2 ? y : x, i % 2 ? x : y, WIDTH},
                           b->stream),
            "gather");
    us[2] = bench_cuda_finish(b, BENCH_CUDA_LAUNCHES);
    free(index);
    b->ops->buffer_free(at.buffer);
    bench_cuda_rows_free(b, &rows);
}

static void copies(struct bench_cuda *b)
{
    const uint64_t bytes = UINT64_C(1) << 30;
    const struct k_span x = bench_cuda_span(b, bytes), y = bench_cuda_span(b, bytes);
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
        bench_cuda_die(e.text);
    printf(" From pinned memory, queued:");
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        bench_cuda_begin(b);
        for (int k = 0; k < BENCH_CUDA_LAUNCHES; k++)
            b->ops->fetch(b->stream, x, b->ops->buffer_host(host.buffer), sizes[i]);
        const double each = bench_cuda_finish(b, BENCH_CUDA_LAUNCHES);
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
    struct k_span slots[BENCH_CUDA_LAUNCHES]; /* of each set of weights */
};

static uint64_t round256(uint64_t n)
{
    return (n + 255) / 256 * 256;
}

/* Sets of weights that rotate: enough to leave the cache, no more than fit. */
static uint32_t sets_of(struct bench_cuda *b, uint64_t bytes)
{
    uint64_t available, total;
    b->ops->memory(b->device, &available, &total);
    uint64_t n = ROTATE_BYTES / bytes + 2;
    if (n > available * 3 / 4 / bytes)
        n = available * 3 / 4 / bytes;
    return n == 0 ? 1 : n > BENCH_CUDA_LAUNCHES ? BENCH_CUDA_LAUNCHES : (uint32_t)n;
}

static void experts_new(struct bench_cuda *b, enum k_format format, uint32_t n_expert,
                        struct experts *ret)
{
    ret->gate_bytes = k_format_bytes(format, N_FF, N_EMBD);
    ret->down_bytes = k_format_bytes(format, N_EMBD, N_FF);
    const uint64_t gate = round256(ret->gate_bytes), one = 2 * gate + round256(ret->down_bytes);
    ret->sets = sets_of(b, one * n_expert);
    const struct k_span arena = bench_cuda_span(b, one * n_expert * ret->sets);
    bench_cuda_weights(b, format, N_FF, N_EMBD, arena);
    bench_cuda_weights(b, format, N_FF, N_EMBD, (struct k_span){arena.buffer, gate});
    bench_cuda_weights(b, format, N_EMBD, N_FF, (struct k_span){arena.buffer, 2 * gate});
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
        ret->slots[s] = bench_cuda_span_of(b, slots, n_expert * sizeof slots[0]);
    }
    ret->of = (struct k_experts){.arena = arena.buffer,
                                 .gate = format,
                                 .up = format,
                                 .down = format,
                                 .n_embd = N_EMBD,
                                 .n_ff = N_FF,
                                 .n_expert = n_expert};
}

static void experts_free(struct bench_cuda *b, struct experts *x)
{
    for (uint32_t s = 0; s < x->sets; s++)
        b->ops->buffer_free(x->slots[s].buffer);
    b->ops->buffer_free(x->of.arena);
}

/* Row r uses n_used of the experts: all of them, or as many different ones from a random start. */
static struct k_span choose(struct bench_cuda *b, uint32_t n_expert, uint32_t n_used,
                            uint32_t n_rows)
{
    uint32_t *ids = calloc((size_t)n_rows * n_used, sizeof *ids);
    if (ids == NULL)
        bench_cuda_die("no memory");
    for (uint32_t r = 0; r < n_rows; r++) {
        const uint32_t first = (uint32_t)(bench_cuda_next(b) >> 33) % n_expert;
        const uint32_t step = 2 * ((uint32_t)(bench_cuda_next(b) >> 33) % (n_expert / 2)) + 1;
        for (uint32_t k = 0; k < n_used; k++) /* n_expert is a power of two, step is odd */
            ids[r * n_used + k] = (first + k * step) % n_expert;
    }
    const struct k_span span = bench_cuda_span_of(b, ids, (size_t)n_rows * n_used * sizeof *ids);
    free(ids);
    return span;
}

static void experts_run(struct bench_cuda *b, struct experts *x, const char *format,
                        uint32_t n_rows, uint32_t n_used, bool decode)
{
    const uint32_t pairs = n_rows * n_used, n_expert = x->of.n_expert;
    const struct k_rows rows = bench_cuda_rows(b, n_rows);
    const struct k_span ids = choose(b, n_expert, n_used, n_rows), n_groups = bench_cuda_span(b, 4),
                        groups = bench_cuda_span(b, n_expert * sizeof(struct k_group)),
                        order = bench_cuda_span(b, pairs * 4),
                        out = bench_cuda_span(b, (uint64_t)pairs * N_EMBD * 4);
    uint32_t all[MAX_EXPERTS];
    for (uint32_t i = 0; i < n_expert; i++)
        all[i] = i;
    const struct k_span selected = bench_cuda_span_of(b, all, n_expert * 4);
    const struct k_act in = bench_cuda_act(b, N_EMBD, n_rows), h = bench_cuda_act(b, N_FF, pairs);
    x->of.n_used = n_used;
    bench_cuda_must(
        b,
        b->ops->grouping(&(struct k_grouping){rows, ids, n_groups, groups, order, n_expert, n_used},
                         b->stream),
        "grouping");
    bench_cuda_must(b, b->ops->quantise(&(struct k_quantise){rows, in}, b->stream), "quantise");
    struct k_moe_gate_up gate = {rows, x->of, groups, order, n_groups, selected, in, h};
    struct k_moe_down down = {rows, x->of, groups, order, n_groups, selected, h, out};
    const double operations = decode ? 0.0 : 2.0 * pairs * N_FF * N_EMBD;
    char what[64];
    bench_cuda_begin(b);
    for (uint32_t i = 0; i < BENCH_CUDA_LAUNCHES; i++) {
        gate.experts.slots = x->slots[i % x->sets];
        bench_cuda_must(b, b->ops->moe_gate_up(&gate, b->stream), "moe_gate_up");
    }
    double us = bench_cuda_finish(b, BENCH_CUDA_LAUNCHES);
    snprintf(what, sizeof what, "%u experts gate+up", n_expert);
    row(b, what, format, decode ? "matvec" : "prefill", n_rows, us,
        2.0 * (double)x->gate_bytes * n_expert, 2 * operations);
    bench_cuda_begin(b);
    for (uint32_t i = 0; i < BENCH_CUDA_LAUNCHES; i++) {
        down.experts.slots = x->slots[i % x->sets];
        bench_cuda_must(b, b->ops->moe_down(&down, b->stream), "moe_down");
    }
    us = bench_cuda_finish(b, BENCH_CUDA_LAUNCHES);
    snprintf(what, sizeof what, "%u experts down", n_expert);
    row(b, what, format, decode ? "matvec" : "prefill", n_rows, us,
        (double)x->down_bytes * n_expert, operations);
    const struct k_span spans[] = {ids, n_groups, groups, order, out, selected};
    for (size_t i = 0; i < sizeof spans / sizeof spans[0]; i++)
        b->ops->buffer_free(spans[i].buffer);
    bench_cuda_act_free(b, &in);
    bench_cuda_act_free(b, &h);
    bench_cuda_rows_free(b, &rows);
}

/* ---- dense ----------------------------------------------------------------------------------- */

static void dense(struct bench_cuda *b, size_t f, uint32_t n_out, const uint32_t *n_rows, size_t n)
{
    const uint64_t bytes = k_format_bytes(formats[f].format, n_out, N_EMBD);
    const uint32_t sets = sets_of(b, bytes);
    const struct k_span w = bench_cuda_span(b, round256(bytes) * sets);
    bench_cuda_weights(b, formats[f].format, n_out, N_EMBD, w);
    for (uint32_t s = 1; s < sets; s++)
        b->ops->copy(b->stream, (struct k_span){w.buffer, round256(bytes) * s}, w, bytes);
    for (size_t k = 0; k < n; k++) {
        const struct k_rows rows = bench_cuda_rows(b, n_rows[k]);
        const struct k_act in = bench_cuda_act(b, N_EMBD, n_rows[k]);
        const struct k_span y = bench_cuda_span(b, (uint64_t)n_out * n_rows[k] * 4);
        bench_cuda_must(b, b->ops->quantise(&(struct k_quantise){rows, in}, b->stream), "quantise");
        bench_cuda_begin(b);
        for (uint32_t i = 0; i < BENCH_CUDA_LAUNCHES; i++) {
            const struct k_matmul a = {
                .rows = rows,
                .act = in,
                .n_matrices = 1,
                .w = {{{w.buffer, round256(bytes) * (i % sets)}, formats[f].format, n_out, N_EMBD}},
                .y = {y}};
            bench_cuda_must(b, b->ops->matmul(&a, b->stream), "matmul");
        }
        const double us = bench_cuda_finish(b, BENCH_CUDA_LAUNCHES);
        char what[64];
        snprintf(what, sizeof what, "dense %u x %d", n_out, N_EMBD);
        const bool decode = n_rows[k] <= 8;
        row(b, what, formats[f].name, decode ? "matvec" : "prefill", n_rows[k], us, (double)bytes,
            decode ? 0.0 : 2.0 * n_rows[k] * n_out * N_EMBD);
        b->ops->buffer_free(y.buffer);
        bench_cuda_act_free(b, &in);
        bench_cuda_rows_free(b, &rows);
    }
    b->ops->buffer_free(w.buffer);
}

/* Parts of the bench. */
enum part {
    PART_MATVEC = 1,
    PART_PREFILL = 2,
    PART_LAYER = 4
};

static unsigned part_of(const char *name)
{
    static const char *const names[] = {"matvec", "prefill", "layer"};
    for (unsigned i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(name, names[i]) == 0)
            return 1u << i;
    bench_cuda_die("--only takes matvec, prefill or layer");
    return 0;
}

static void products(struct bench_cuda *b, size_t f, unsigned parts)
{
    static const uint32_t few[] = {1, 8}, many[] = {512, 2048};
    for (uint32_t n_expert = 8; n_expert <= MAX_EXPERTS; n_expert *= 16) {
        struct experts x;
        experts_new(b, formats[f].format, n_expert, &x);
        for (size_t i = 0; i < 2 && parts & PART_MATVEC; i++)
            experts_run(b, &x, formats[f].name, few[i], n_expert, true);
        for (size_t i = 0; i < 2 && parts & PART_PREFILL && n_expert == MAX_EXPERTS; i++)
            experts_run(b, &x, formats[f].name, many[i], 8, false);
        experts_free(b, &x);
    }
    if (parts & PART_MATVEC) {
        dense(b, f, 8192, few, 2);
        dense(b, f, 32000, few, 2);
    }
    if (parts & PART_PREFILL)
        dense(b, f, 8192, many, 2);
}

static void run(struct bench_cuda *b, unsigned parts)
{
    printf("%s. Median of %d replays of %d launches over rotating weights.\n\n",
           b->ops->describe(b->device), BENCH_CUDA_REPEATS, BENCH_CUDA_LAUNCHES);
    if (parts & (PART_MATVEC | PART_PREFILL)) {
        copies(b);
        printf("| launch | format | rows | us | GB/s | share of copy | TOPS |\n"
               "| --- | --- | --- | --- | --- | --- | --- |\n");
        for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++)
            products(b, f, parts);
    }
    if (parts & PART_LAYER) {
        bench_cuda_layer(b, 1, 200);
        bench_cuda_layer(b, 1, 2047);
        bench_cuda_layer(b, 8, 1000);
    }
}

int main(int argc, char **argv)
{
    struct bench_cuda b = {.random = 20261130};
    struct k_cuda_options options = {.ordinal = -1};
    const char *json = "build/bench/cuda.json";
    unsigned parts = PART_MATVEC | PART_PREFILL | PART_LAYER;
    struct err e = {0};
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 < argc && strcmp(argv[i], "--file") == 0)
            options.file = argv[i + 1];
        else if (i + 1 < argc && strcmp(argv[i], "--json") == 0)
            json = argv[i + 1];
        else if (i + 1 < argc && strcmp(argv[i], "--only") == 0)
            parts = part_of(argv[i + 1]);
        else
            bench_cuda_die("usage: bench_cuda [--file islet-cuda.so] [--json file] [--only part]");
    }
    const enum err_code code = k_open_cuda(&options, &b.device, &e);
    if (code == ERR_UNSUPPORTED) {
        printf("skip: no CUDA device (%s)\n", e.text);
        return 0;
    }
    if (code != ERR_OK)
        bench_cuda_die(e.text);
    b.ops = k_ops(b.device);
    b.json = fopen(json, "w");
    if (b.json == NULL)
        bench_cuda_die("the JSON file cannot be written");
    if (b.ops->stream_new(b.device, &b.stream, &e) != ERR_OK ||
        b.ops->event_new(b.device, &b.from, &e) != ERR_OK ||
        b.ops->event_new(b.device, &b.to, &e) != ERR_OK)
        bench_cuda_die(e.text);
    run(&b, parts);
    b.ops->event_free(b.from);
    b.ops->event_free(b.to);
    b.ops->stream_free(b.stream);
    k_close(b.device);
    return fclose(b.json) != 0;
}

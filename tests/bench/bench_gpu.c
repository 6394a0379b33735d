/* bench_gpu MODEL.gguf [--vram GiB,GiB...] [--ram GiB] [--rows 1,8] [--prefill ROWS,...]
 *           [--tokens N] [--threads N] [--router NAME] [--peer CLASS] [--json FILE] [--fake]
 * Tokens a second of the engine with a GPU beside the CPU, at each budget of VRAM (0: auto; -1: the
 * CPU alone), prompts and answers apart; answers are drawn at temperature 1, so that random weights
 * do not run in circles. One line a phase; --json adds an object a line to a file:
 *   bandwidth_share  bytes of weights that a step reads in VRAM, a second, over the rate at which a
 *                    copy inside VRAM reads and writes
 *   share_of_limit   the time in which the tiers could have given a step's weights, all at once and
 *                    each at its measured rate, over the step's time
 *   peer_tok_s       llama.cpp's rate as once recorded on an H200 (tests/bench/RESULTS.md); ratio:
 *                    ours over it. --peer: resident, 12gib, cpu or none
 * --fake: the stand-in of the unit tests, to try the program. Fails on a value that is not finite,
 * and where the GPU is not used. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine_rates.h"
#include "engine_rig.h"
#include "fake_gpu.h"
#include "model.h"
#include "ticks.h"

enum {
    MAX_BUDGETS = 16,
    MAX_ROWS = 8,
    MAX_PREFILL = 8192,
    SHORT_PROMPT = 32,
    SETTLE_US = 300 * 1000,
    COPY_BYTES = 1 << 30, /* of the bandwidths that are measured */
    COPIES = 8,
    RAM_NS = 100 * 1000 * 1000
};

struct options {
    const char *model, *router, *peer, *json;
    double vram[MAX_BUDGETS], ram;
    uint32_t rows[MAX_ROWS], prefill[MAX_ROWS], n_vram, n_rows, n_prefill, tokens, threads;
    bool fake;
};

/* Of the model and of the machine; bytes a second. */
struct figures {
    uint32_t n_vocab;
    double dense_bytes, expert_bytes; /* that a step reads whatever it is; of one expert */
    double vram, link, ram;           /* vram: read and written */
};

/* One phase between two looks at the engine. */
struct phase {
    double vram;
    const char *name;
    uint32_t rows;
    double tokens, us;
    struct proto_status from, to;
};

static struct engine_rig rig;

static void die(const char *text)
{
    fprintf(stderr, "bench_gpu: %s\n", text);
    exit(1);
}

static enum err_code open_gpu(void *context, struct k_device **ret, struct err *e)
{
    const struct options *o = context;
    if (o->fake)
        return fake_gpu_open(&(struct fake_gpu_options){.memory = 8ull << 30}, ret, e);
    return k_open_cuda(&(struct k_cuda_options){.ordinal = -1}, ret, e);
}

static uint32_t longest(const struct options *o)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < o->n_prefill; i++)
        most = o->prefill[i] > most ? o->prefill[i] : most;
    return most;
}

static struct engine_config config_of(struct options *o, double vram)
{
    struct engine_config c = engine_rig_config(o->model);
    c.threads = o->threads;
    c.ram_budget = (uint64_t)(o->ram * (double)(1ull << 30));
    c.prefill_chunk = longest(o) < 4096 ? longest(o) : 4096;
    c.max_sequences = 8;
    c.kv_budget = 1ull << 30;
    c.context = 2 * longest(o) + o->tokens + SHORT_PROMPT;
    c.gpu = vram < 0 ? ENGINE_GPU_OFF : ENGINE_GPU_ON;
    c.open_gpu = open_gpu;
    c.open_gpu_context = o;
    if (vram > 0)
        c.vram_budget = (uint64_t)(vram * (double)(1ull << 30));
    return c;
}

static struct proto_status status(void)
{
    static struct engine_snapshot s;
    engine_get_snapshot(rig.engine, &s);
    return s.status;
}

/* Until no more experts come to memory while nobody asks. */
static struct proto_status settle(void)
{
    struct proto_status before, now = status();
    do {
        before = now;
        usleep(SETTLE_US);
        now = status();
    } while (now.vram_islands_used_bytes != before.vram_islands_used_bytes ||
             now.ram_slots_used_bytes != before.ram_slots_used_bytes || now.experts_total == 0);
    return now;
}

/* `n` requests at a time, each of its own text. Waits for all; returns microseconds. */
static double ask(const struct figures *f, uint32_t n, uint32_t prompt, uint32_t tokens)
{
    static uint32_t seed;
    const uint64_t start = ticks_ns(ticks_real());
    for (uint32_t i = 0; i < n; i++) {
        uint32_t ids[MAX_PREFILL];
        seed++;
        for (uint32_t k = 0; k < prompt; k++)
            ids[k] = (seed * 7919 + k * 104729 + k * k * 31) % f->n_vocab;
        struct proto_run run = engine_rig_run(ids, prompt);
        run.max_new = tokens;
        run.temperature = 1;
        run.seed = seed;
        run.flags = PROTO_RUN_NO_CACHE;
        engine_rig_submit(&rig, &run);
    }
    engine_rig_finish(&rig);
    const double us = (double)(ticks_ns(ticks_real()) - start) / 1e3;
    for (uint32_t i = 0; i < n; i++)
        if (rig.answers[i].failed)
            die(rig.answers[i].error.text);
    engine_rig_forget(&rig);
    return us;
}

/* Tokens a second of llama.cpp with this model on an H200, 16 threads; 0: not recorded. */
static double peer_rate(const struct options *o, const struct phase *p)
{
    static const struct {
        const char *name;
        double decode, prefill;
    } recorded[] = {{"resident", 295, 6820}, {"12gib", 87, 491}, {"cpu", 42, 242}};
    const bool decode = strcmp(p->name, "decode") == 0;
    for (size_t i = 0; i < sizeof(recorded) / sizeof(recorded[0]); i++)
        if (strcmp(o->peer, recorded[i].name) == 0 && (!decode || p->rows == 1))
            return decode ? recorded[i].decode : recorded[i].prefill;
    return 0;
}

#define SINCE(p, field) ((double)(p)->to.field - (double)(p)->from.field)

static void write_json(const struct options *o, const struct phase *p, const double values[5])
{
    char peer[64] = "null,\"ratio\":null";
    FILE *out = o->json != NULL ? fopen(o->json, "ae") : NULL;
    if (o->json == NULL)
        return;
    if (out == NULL)
        die(o->json);
    if (peer_rate(o, p) > 0)
        snprintf(peer, sizeof(peer), "%.0f,\"ratio\":%.2f", peer_rate(o, p),
                 values[0] / peer_rate(o, p));
    const char *slash = strrchr(o->model, '/');
    fprintf(out,
            "{\"model\":\"%s\",\"vram_budget\":%.0f,\"router\":\"%s\",\"phase\":\"%s\","
            "\"batch\":%u,\"tok_s\":%.2f,\"peer_tok_s\":%s,\"bandwidth_share\":%.3f,"
            "\"share_of_limit\":%.3f,\"host_us_per_token\":%.2f,\"experts_per_step\":%.1f}\n",
            slash != NULL ? slash + 1 : o->model, (double)p->to.vram_budget_bytes, o->router,
            p->name, p->rows, values[0], peer, values[1], values[2], values[3], values[4]);
    if (fclose(out) != 0)
        die(o->json);
}

/* What a phase did, from the figures before and after it. */
static void report(const struct options *o, const struct figures *f, const struct phase *p)
{
    const double steps = SINCE(p, steps_total), groups = SINCE(p, expert_groups_total);
    const double hits = SINCE(p, expert_hits_vram_total), misses = SINCE(p, expert_misses_total);
    const double all = hits + SINCE(p, expert_hits_ram_total) + misses;
    const double resident = all > 0 ? hits / all : 0, seconds = p->us / 1e6;
    const bool gpu = p->to.vram_budget_bytes > 0;
    /* uses stand for experts: all that a step needs are used about as often */
    const double needed = groups * f->expert_bytes;
    const double in_vram = gpu ? steps * f->dense_bytes + resident * needed : 0;
    const double beside = gpu ? (1 - resident) * needed : steps * f->dense_bytes + needed;
    const double limit_vram = in_vram / f->vram,
                 limit_beside = beside / (gpu ? f->link + f->ram : f->ram);
    const double limit = limit_vram > limit_beside ? limit_vram : limit_beside;
    const double values[5] = {1e6 * p->tokens / p->us, in_vram / f->vram / seconds, limit / seconds,
                              SINCE(p, host_us_total) / p->tokens, groups / steps};
    printf("  vram %6.2f GiB  %-7s %4u rows: %9.1f tok/s; a token: host %6.1f us, CPU experts "
           "%7.1f us, GPU waited for %7.1f us, %7.2f MB copied; %5.1f %% of VRAM's rate, %5.1f %% "
           "of the limit; uses: VRAM %5.1f %%, SSD %5.2f %%; %.0f experts a step\n",
           p->vram, p->name, p->rows, values[0], values[3],
           SINCE(p, cpu_experts_us_total) / p->tokens, SINCE(p, gpu_wait_us_total) / p->tokens,
           SINCE(p, expert_copy_bytes_total) / p->tokens / 1e6, 100 * values[1], 100 * values[2],
           100 * resident, all > 0 ? 100 * misses / all : 0, values[4]);
    fflush(stdout);
    write_json(o, p, values);
}

/* The difference of two phases: answers with their prompts, and the prompts alone. */
static void take_off(struct phase *p, const struct phase *prompts)
{
    p->us -= prompts->us;
#define TAKE_OFF(field) p->from.field += prompts->to.field - prompts->from.field
    TAKE_OFF(gpu_wait_us_total);
    TAKE_OFF(cpu_experts_us_total);
    TAKE_OFF(host_us_total);
    TAKE_OFF(steps_total);
    TAKE_OFF(expert_groups_total);
    TAKE_OFF(expert_hits_vram_total);
    TAKE_OFF(expert_hits_ram_total);
    TAKE_OFF(expert_misses_total);
    TAKE_OFF(expert_copy_bytes_total);
#undef TAKE_OFF
}

static struct phase run_phase(const struct figures *f, struct phase p, uint32_t n, uint32_t prompt,
                              uint32_t tokens)
{
    p.from = settle();
    p.us = ask(f, n, prompt, tokens);
    p.to = settle();
    return p;
}

static void bench(struct options *o, const struct figures *f, double vram)
{
    const struct engine_config config = config_of(o, vram);
    struct engine_facts facts;
    engine_rig_start(&rig, &config);
    if (engine_rig_wait_loaded(&rig) != PROTO_SERVING) {
        engine_get_facts(rig.engine, &facts);
        die(facts.reason);
    }
    const struct proto_status start = settle();
    printf("  vram %6.2f GiB  %u of %u experts in islands, %u in RAM\n", vram,
           (unsigned)start.experts_in_vram, (unsigned)start.experts_total,
           (unsigned)start.experts_resident);
    for (uint32_t i = 0; i < o->n_prefill; i++) {
        const uint32_t n = o->prefill[i];
        (void)ask(f, 1, n, 0); /* warms up */
        const struct phase p = run_phase(
            f, (struct phase){.vram = vram, .name = "prefill", .rows = n, .tokens = n}, 1, n, 0);
        report(o, f, &p);
    }
    for (uint32_t i = 0; i < o->n_rows; i++) {
        const uint32_t n = o->rows[i];
        const struct phase decode = {
            .vram = vram, .name = "decode", .rows = n, .tokens = (double)n * o->tokens};
        (void)ask(f, n, SHORT_PROMPT, o->tokens); /* warms up, with another text */
        const struct phase prompts = run_phase(f, decode, n, SHORT_PROMPT, 1);
        struct phase p = run_phase(f, decode, n, SHORT_PROMPT, o->tokens + 1);
        take_off(&p, &prompts);
        report(o, f, &p);
    }
    engine_rig_stop(&rig);
}

/* Seconds of one copy, the best of a few. */
static double copy_seconds(const struct k_ops *ops, struct k_stream *s, struct k_span to,
                           struct k_span from, const void *host)
{
    double best = 1e9;
    for (int i = 0; i < COPIES; i++) {
        const uint64_t start = ticks_ns(ticks_real());
        if (host != NULL)
            ops->fetch(s, to, host, COPY_BYTES);
        else
            ops->copy(s, to, from, COPY_BYTES);
        if (ops->wait(s) != ERR_OK)
            die("the GPU failed while it was measured");
        const double seconds = (double)(ticks_ns(ticks_real()) - start) / 1e9;
        best = seconds < best ? seconds : best;
    }
    return best;
}

static void measure_gpu(struct options *o, struct figures *f)
{
    struct k_device *device = NULL;
    struct k_stream *s = NULL;
    struct k_buffer *memory = NULL, *pinned = NULL;
    struct err e = {.code = ERR_OK};
    if (open_gpu(o, &device, &e) != ERR_OK)
        die(e.text);
    const struct k_ops *ops = k_ops(device);
    if (ops->stream_new(device, &s, &e) != ERR_OK ||
        ops->buffer_new(device, 2ull * COPY_BYTES, &memory, &e) != ERR_OK ||
        ops->pinned_new(device, COPY_BYTES, &pinned, &e) != ERR_OK)
        die(e.text);
    const struct k_span low = {memory, 0}, high = {memory, COPY_BYTES};
    f->vram = 2.0 * COPY_BYTES / copy_seconds(ops, s, high, low, NULL);
    f->link = COPY_BYTES / copy_seconds(ops, s, low, low, ops->buffer_host(pinned));
    ops->buffer_free(pinned);
    ops->buffer_free(memory);
    ops->stream_free(s);
    k_close(device);
}

static void measure(struct options *o, struct figures *f)
{
    struct k_device *device = NULL;
    struct model *m = NULL;
    struct err e = {.code = ERR_OK};
    bool gpu = false;
    if (k_open(K_LEVEL_AUTO, o->threads, &device, &e) != ERR_OK ||
        model_open(&(struct model_loading){.path = o->model, .device = device}, &m, &e) != ERR_OK ||
        engine_rates_ram(device, COPY_BYTES, RAM_NS, ticks_real(), &f->ram, &e) != ERR_OK)
        die(e.text);
    const struct k_matrix *t = &m->token_embd;
    f->n_vocab = m->shape.n_vocab;
    f->expert_bytes = (double)m->experts_bytes / m->shape.n_layer / m->shape.n_expert;
    f->dense_bytes = (double)m->weights_bytes;
    if (m->token_embd.data.offset != m->output.data.offset) /* a few of its rows are read */
        f->dense_bytes -= (double)k_format_bytes(t->format, t->n_out, t->n_in);
    model_close(m);
    k_close(device);
    f->vram = f->link = 1;
    for (uint32_t i = 0; i < o->n_vram; i++)
        gpu |= o->vram[i] >= 0;
    if (gpu)
        measure_gpu(o, f);
    printf("%s\n  VRAM %.0f GB/s (read and written), link %.1f, RAM %.1f\n", o->model,
           f->vram / 1e9, f->link / 1e9, f->ram / 1e9);
}

static uint32_t numbers(const char *at, uint32_t *ret)
{
    uint32_t n = 0;
    for (char *end; *at != '\0' && n < MAX_ROWS; at = end + (*end == ','), n++)
        ret[n] = (uint32_t)strtoul(at, &end, 10);
    return n;
}

static void read_option(struct options *o, const char *name, const char *value)
{
    char *at;
    if (strcmp(name, "--vram") == 0)
        for (o->n_vram = 0; *value != '\0' && o->n_vram < MAX_BUDGETS; value = at + (*at == ','))
            o->vram[o->n_vram++] = strtod(value, &at);
    else if (strcmp(name, "--rows") == 0)
        o->n_rows = numbers(value, o->rows);
    else if (strcmp(name, "--prefill") == 0)
        o->n_prefill = numbers(value, o->prefill);
    else if (strcmp(name, "--ram") == 0)
        o->ram = strtod(value, NULL);
    else if (strcmp(name, "--tokens") == 0)
        o->tokens = (uint32_t)strtoul(value, NULL, 10);
    else if (strcmp(name, "--threads") == 0)
        o->threads = (uint32_t)strtoul(value, NULL, 10);
    else if (strcmp(name, "--router") == 0)
        o->router = value;
    else if (strcmp(name, "--peer") == 0)
        o->peer = value;
    else if (strcmp(name, "--json") == 0)
        o->json = value;
    else
        die("see the head of tests/bench/bench_gpu.c");
}

int main(int argc, char **argv)
{
    struct figures f = {.n_vocab = 0};
    struct options o = {.n_vram = 1,
                        .n_rows = 2,
                        .rows = {1, 8},
                        .n_prefill = 1,
                        .prefill = {512},
                        .tokens = 128,
                        .router = "uniform",
                        .peer = "none"};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--fake") == 0)
            o.fake = true;
        else if (strncmp(argv[i], "--", 2) != 0)
            o.model = argv[i];
        else if (i + 1 < argc)
            read_option(&o, argv[i], argv[i + 1]), i++;
    }
    if (o.model == NULL || longest(&o) > MAX_PREFILL || o.tokens == 0)
        die("bench_gpu MODEL.gguf [--vram GiB,...] [--rows 1,8] [--prefill 512,...]: see the head "
            "of tests/bench/bench_gpu.c");
    measure(&o, &f);
    for (uint32_t i = 0; i < o.n_vram; i++)
        bench(&o, &f, o.vram[i]);
    return 0;
}

/* bench_gpu MODEL.gguf [--vram GiB,GiB...] [--placement NAME,...] [--ram GiB] [--rows 1,8]
 *           [--prefill ROWS,...] [--tokens N] [--threads N] [--cold 1] [--router NAME]
 *           [--peer CLASS] [--json FILE] [--fake]
 * Tokens a second of the engine with a GPU beside the CPU, at each budget of VRAM (0: auto; -1: the
 * CPU alone), prompts and answers apart; answers are drawn at temperature 1, so that random weights
 * do not run in circles. --placement: best (what the engine does), and to compare it with: cpu, all
 * experts; copy, all that are in no island, when they are needed; layers, the first ones' in islands
 * for good, the CPU the others'. --cold: the first text of each kind is told too, otherwise it only
 * warms up. One line a phase; --json adds an object a line to a file:
 *   bandwidth_share  bytes of weights that a step reads in VRAM, a second, over the rate at which a
 *                    copy inside VRAM reads and writes
 *   share_of_limit   the time in which the tiers could have given a step's weights, all at once and
 *                    each at its measured rate, over the step's time
 *   step_p50_us, step_p99_us   between tokens of one answer, which began when all had one
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
#include "engine_split.h"
#include "fake_gpu.h"
#include "model.h"
#include "ticks.h"

enum {
    MAX_BUDGETS = 16,
    MAX_ROWS = 8,
    MAX_PREFILL = 8192,
    MAX_TOKENS = 4096,
    PLACEMENTS = ENGINE_PLACEMENT_COPY + 1,
    SHORT_PROMPT = 32,
    SETTLE_US = 300 * 1000,
    COPY_BYTES = 1 << 30, /* of the bandwidths that are measured */
    COPIES = 8,
    RAM_NS = 100 * 1000 * 1000,
    SSD_NS = 1000 * 1000 * 1000
};

static const char *const placements[PLACEMENTS] = {"best", "cpu", "layers", "copy"};

struct options {
    const char *model, *router, *peer, *json;
    double vram[MAX_BUDGETS], ram;
    uint32_t rows[MAX_ROWS], prefill[MAX_ROWS], n_vram, n_rows, n_prefill, tokens, threads;
    unsigned placements[PLACEMENTS];
    uint32_t n_placements;
    bool fake, cold;
};

/* Of the model and of the machine; bytes a second. */
struct figures {
    uint32_t n_vocab;
    double dense_bytes, expert_bytes; /* that a step reads whatever it is; of one expert */
    double vram, link, ram;           /* vram: read and written */
    double ssd;                       /* 0: RAM holds all experts, or was not limited */
};

/* One phase between two looks at the engine. */
struct phase {
    double vram;
    unsigned placement;
    const char *name;
    bool cold;
    uint32_t rows;
    double tokens, us;
    struct proto_status from, to;
    uint32_t n_steps;
    double *step_us; /* [n_steps], rising; NULL: a prompt */
};

static struct engine_rig rig;
static double step_us[MAX_TOKENS];

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

static struct engine_config config_of(struct options *o, double vram, unsigned placement)
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
    c.placement = placement;
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

static uint64_t now_ns(void)
{
    return ticks_ns(ticks_real());
}

/* `n` requests at a time, each of its own text. */
static void submit(const struct figures *f, uint32_t n, uint32_t prompt, uint32_t tokens)
{
    static uint32_t seed;
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
}

/* Waits for all. */
static void finish(void)
{
    engine_rig_finish(&rig);
    for (uint32_t i = 0; i < rig.n; i++)
        if (rig.answers[i].failed)
            die(rig.answers[i].error.text);
    engine_rig_forget(&rig);
}

static struct phase prefill(const struct figures *f, struct phase p)
{
    p.tokens = p.rows;
    p.from = settle();
    const uint64_t start = now_ns();
    submit(f, 1, p.rows, 0);
    engine_rig_finish(&rig);
    p.us = (double)(now_ns() - start) / 1e3;
    finish();
    p.to = settle();
    return p;
}

static uint32_t count_tokens(void)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < rig.n; i++)
        n += rig.answers[i].n_tokens;
    return n;
}

/* All have a first token; or, with `ended`, one has no more to come. */
static bool all_begun(bool ended)
{
    bool all = true, any = false;
    for (uint32_t i = 0; i < rig.n; i++) {
        all &= rig.answers[i].n_tokens > 0 || rig.answers[i].ended;
        any |= rig.answers[i].ended;
    }
    return ended ? any : all;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* From the moment when all answers have begun to the first end of one. */
static struct phase decode(const struct figures *f, struct phase p, uint32_t tokens)
{
    (void)settle();
    submit(f, p.rows, SHORT_PROMPT, tokens + 1);
    while (!all_begun(false))
        engine_rig_pump(&rig);
    p.from = status();
    const uint64_t start = now_ns();
    const uint32_t before = count_tokens();
    uint32_t seen = rig.answers[0].n_tokens;
    uint64_t last = start;
    p.step_us = step_us;
    while (!all_begun(true)) {
        engine_rig_pump(&rig);
        const uint32_t n = rig.answers[0].n_tokens - seen;
        const uint64_t now = now_ns();
        for (uint32_t i = 0; i < n && p.n_steps < MAX_TOKENS; i++)
            step_us[p.n_steps++] = (double)(now - last) / 1e3 / n;
        last = n > 0 ? now : last;
        seen += n;
    }
    p.tokens = count_tokens() - before;
    p.us = (double)(last - start) / 1e3;
    p.to = status();
    finish();
    qsort(step_us, p.n_steps, sizeof(step_us[0]), by_size);
    return p;
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

/* What a phase came to; a token where nothing else is said. */
struct result {
    double tok_s, bandwidth, limit, host_us, ssd_bytes, experts /* a step */, p50, p99;
};

static void write_json(const struct options *o, const struct phase *p, const struct result *r)
{
    char peer[64] = "null,\"ratio\":null", steps[64] = "null,\"step_p99_us\":null";
    FILE *out = o->json != NULL ? fopen(o->json, "ae") : NULL;
    if (o->json == NULL)
        return;
    if (out == NULL)
        die(o->json);
    if (peer_rate(o, p) > 0)
        snprintf(peer, sizeof(peer), "%.0f,\"ratio\":%.2f", peer_rate(o, p),
                 r->tok_s / peer_rate(o, p));
    if (p->n_steps > 0)
        snprintf(steps, sizeof(steps), "%.1f,\"step_p99_us\":%.1f", r->p50, r->p99);
    const char *slash = strrchr(o->model, '/');
    fprintf(out,
            "{\"model\":\"%s\",\"vram_budget\":%.0f,\"placement\":\"%s\",\"router\":\"%s\","
            "\"phase\":\"%s\",\"cold\":%s,\"batch\":%u,\"tok_s\":%.2f,\"peer_tok_s\":%s,"
            "\"bandwidth_share\":%.3f,\"share_of_limit\":%.3f,\"host_us_per_token\":%.2f,"
            "\"step_p50_us\":%s,\"ssd_bytes_per_token\":%.0f,\"experts_per_step\":%.1f}\n",
            slash != NULL ? slash + 1 : o->model, (double)p->to.vram_budget_bytes,
            placements[p->placement], o->router, p->name, p->cold ? "true" : "false", p->rows,
            r->tok_s, peer, r->bandwidth, r->limit, r->host_us, steps, r->ssd_bytes, r->experts);
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
    const double limit_ssd = f->ssd > 0 ? SINCE(p, ssd_bytes_total) / f->ssd : 0;
    double limit = limit_vram > limit_beside ? limit_vram : limit_beside;
    limit = limit > limit_ssd ? limit : limit_ssd;
    const struct result r = {.tok_s = 1e6 * p->tokens / p->us,
                             .bandwidth = in_vram / f->vram / seconds,
                             .limit = limit / seconds,
                             .host_us = SINCE(p, host_us_total) / p->tokens,
                             .ssd_bytes = SINCE(p, ssd_bytes_total) / p->tokens,
                             .experts = groups / steps,
                             .p50 = p->n_steps > 0 ? p->step_us[p->n_steps / 2] : 0,
                             .p99 = p->n_steps > 0 ? p->step_us[p->n_steps * 99ull / 100] : 0};
    printf(
        "  vram %6.2f GiB  %-6s %-7s%s %4u rows: %9.1f tok/s; a token: host %6.1f us, CPU "
        "experts %7.1f us, GPU waited for %7.1f us, %7.2f MB copied, %7.2f MB of SSD; %5.1f %% of "
        "VRAM's rate, %5.1f %% of the limit; uses: VRAM %5.1f %%, SSD %5.2f %%; %.0f experts a "
        "step",
        p->vram, placements[p->placement], p->name, p->cold ? " (cold)" : "", p->rows, r.tok_s,
        r.host_us, SINCE(p, cpu_experts_us_total) / p->tokens,
        SINCE(p, gpu_wait_us_total) / p->tokens,
        SINCE(p, expert_copy_bytes_total) / p->tokens / 1e6, r.ssd_bytes / 1e6, 100 * r.bandwidth,
        100 * r.limit, 100 * resident, all > 0 ? 100 * misses / all : 0, r.experts);
    if (p->n_steps > 0)
        printf("; a step: p50 %.0f us, p99 %.0f us, ratio %.2f", r.p50, r.p99, r.p99 / r.p50);
    putchar('\n');
    fflush(stdout);
    write_json(o, p, &r);
}

/* The first text only warms up, unless it is to be told of. */
static void bench_prefill(const struct options *o, const struct figures *f, struct phase p)
{
    p.name = "prefill";
    p.cold = true;
    const struct phase cold = prefill(f, p);
    if (o->cold)
        report(o, f, &cold);
    p.cold = false;
    const struct phase warm = prefill(f, p);
    report(o, f, &warm);
}

static void bench_decode(const struct options *o, const struct figures *f, struct phase p)
{
    p.name = "decode";
    p.cold = true;
    const struct phase cold = decode(f, p, o->tokens);
    if (o->cold)
        report(o, f, &cold);
    p.cold = false;
    const struct phase warm = decode(f, p, o->tokens);
    report(o, f, &warm);
}

static void bench(struct options *o, const struct figures *f, double vram, unsigned placement)
{
    const struct engine_config config = config_of(o, vram, placement);
    struct engine_facts facts;
    engine_rig_start(&rig, &config);
    if (engine_rig_wait_loaded(&rig) != PROTO_SERVING) {
        engine_get_facts(rig.engine, &facts);
        die(facts.reason);
    }
    const struct proto_status start = settle();
    printf("  vram %6.2f GiB  %-6s %u of %u experts in islands, %u in RAM\n", vram,
           placements[placement], (unsigned)start.experts_in_vram, (unsigned)start.experts_total,
           (unsigned)start.experts_resident);
    struct phase p = {.vram = vram, .placement = placement};
    for (uint32_t i = 0; i < o->n_rows && o->cold; i++) { /* before prompts have warmed anything */
        p.rows = o->rows[i];
        bench_decode(o, f, p);
    }
    for (uint32_t i = 0; i < o->n_prefill; i++) {
        p.rows = o->prefill[i];
        bench_prefill(o, f, p);
    }
    for (uint32_t i = 0; i < o->n_rows && !o->cold; i++) {
        p.rows = o->rows[i];
        bench_decode(o, f, p);
    }
    engine_rig_stop(&rig);
}

/* Seconds of one copy, the best of a few. */
static double copy_seconds(const struct k_ops *ops, struct k_stream *s, struct k_span to,
                           struct k_span from, const void *host)
{
    double best = 1e9;
    for (int i = 0; i < COPIES; i++) {
        const uint64_t start = now_ns();
        if (host != NULL)
            ops->fetch(s, to, host, COPY_BYTES);
        else
            ops->copy(s, to, from, COPY_BYTES);
        if (ops->wait(s) != ERR_OK)
            die("the GPU failed while it was measured");
        const double seconds = (double)(now_ns() - start) / 1e9;
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
    struct engine_rates_ssd ssd = {.rate = 0};
    if (o->ram > 0 && engine_rates_ssd(device, m, TIER_SSD_AUTO, config_of(o, 0, 0).ssd_depth,
                                       SSD_NS, ticks_real(), &ssd, &e) != ERR_OK)
        die(e.text);
    f->ssd = ssd.rate;
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
    printf("%s\n  VRAM %.0f GB/s (read and written), link %.1f, RAM %.1f, SSD %.2f%s\n", o->model,
           f->vram / 1e9, f->link / 1e9, f->ram / 1e9, f->ssd / 1e9,
           ssd.rate > 0 && !ssd.direct ? " (through the page cache)" : "");
}

static uint32_t numbers(const char *at, uint32_t *ret)
{
    uint32_t n = 0;
    for (char *end; *at != '\0' && n < MAX_ROWS; at = end + (*end == ','), n++)
        ret[n] = (uint32_t)strtoul(at, &end, 10);
    return n;
}

static void read_placements(struct options *o, const char *at)
{
    for (o->n_placements = 0; *at != '\0' && o->n_placements < PLACEMENTS; at += *at == ',') {
        const size_t n = strcspn(at, ",");
        unsigned i = 0;
        while (i < PLACEMENTS && (strlen(placements[i]) != n || strncmp(at, placements[i], n) != 0))
            i++;
        if (i == PLACEMENTS)
            die("--placement best,cpu,layers,copy");
        o->placements[o->n_placements++] = i;
        at += n;
    }
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
    else if (strcmp(name, "--placement") == 0)
        read_placements(o, value);
    else if (strcmp(name, "--cold") == 0)
        o->cold = strcmp(value, "0") != 0;
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
                        .n_placements = 1,
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
    if (o.model == NULL || longest(&o) > MAX_PREFILL || o.tokens == 0 || o.tokens > MAX_TOKENS)
        die("bench_gpu MODEL.gguf [--vram GiB,...] [--rows 1,8] [--prefill 512,...]: see the head "
            "of tests/bench/bench_gpu.c");
    measure(&o, &f);
    for (uint32_t i = 0; i < o.n_vram; i++)
        for (uint32_t k = 0; k < (o.vram[i] < 0 ? 1 : o.n_placements); k++)
            bench(&o, &f, o.vram[i], o.placements[k]);
    return 0;
}

/* bench_gpu MODEL.gguf [--vram GiB,GiB...] [--ram GiB] [--rows 1,8] [--prefill ROWS] [--tokens N]
 *                      [--threads N] [--fake]
 * Tokens a second of the engine with a GPU beside the CPU, at each budget of VRAM (0: auto; -1: the
 * CPU alone), prompts and answers apart. One line a phase, then one JSON object a line on the last
 * lines. --fake: the stand-in of the unit tests, to try the program. Fails on a value that is not
 * finite, and where the GPU is not used. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine_rig.h"
#include "fake_gpu.h"
#include "model.h"
#include "ticks.h"

enum {
    MAX_BUDGETS = 16,
    MAX_ROWS = 8,
    SHORT_PROMPT = 32,
    SETTLE_US = 300 * 1000,
    JSON_BYTES = 1 << 16
};

struct options {
    const char *model;
    double vram[MAX_BUDGETS], ram;
    uint32_t rows[MAX_ROWS], n_vram, n_rows, prefill, tokens, threads, n_vocab;
    bool fake;
};

static struct engine_rig rig;
static char json[JSON_BYTES];
static size_t json_size;

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

static struct engine_config config_of(struct options *o, double vram)
{
    struct engine_config c = engine_rig_config(o->model);
    c.threads = o->threads;
    c.ram_budget = (uint64_t)(o->ram * (double)(1ull << 30));
    c.prefill_chunk = o->prefill < 4096 ? o->prefill : 4096;
    c.max_sequences = 8;
    c.kv_budget = 1ull << 30;
    c.context = 2 * o->prefill + o->tokens + SHORT_PROMPT;
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
static double ask(const struct options *o, uint32_t n, uint32_t prompt, uint32_t tokens)
{
    static uint32_t seed;
    const uint64_t start = ticks_ns(ticks_real());
    for (uint32_t i = 0; i < n; i++) {
        uint32_t ids[8192];
        seed++;
        for (uint32_t k = 0; k < prompt; k++)
            ids[k] = (seed * 7919 + k * 104729 + k * k * 31) % o->n_vocab;
        struct proto_run run = engine_rig_run(ids, prompt);
        run.max_new = tokens;
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

/* What a phase did, from the figures before and after it. */
static void report(const struct options *o, double vram, const char *phase, uint32_t rows,
                   double tokens, double us, const struct proto_status *a,
                   const struct proto_status *b)
{
    const double wait = (double)(b->gpu_wait_us_total - a->gpu_wait_us_total);
    const double cpu = (double)(b->cpu_experts_us_total - a->cpu_experts_us_total);
    const double vram_hits = (double)(b->expert_hits_vram_total - a->expert_hits_vram_total);
    const double ram_hits = (double)(b->expert_hits_ram_total - a->expert_hits_ram_total);
    const double misses = (double)(b->expert_misses_total - a->expert_misses_total);
    const double copied = (double)(b->expert_copy_bytes_total - a->expert_copy_bytes_total);
    const double groups = (double)(b->expert_groups_total - a->expert_groups_total);
    const double steps = (double)(b->steps_total - a->steps_total);
    const double all = vram_hits + ram_hits + misses;
    const double rate = 1e6 * tokens / us, host = (us - wait - cpu) / tokens;
    printf(
        "  vram %6.2f GiB  %-7s %4u rows: %9.1f tok/s; host %7.1f us/token, CPU experts %7.1f, "
        "GPU waited for %7.1f; VRAM %5.1f %%, SSD %5.2f %%; %8.2f MB copied/token; %.0f experts a "
        "step\n",
        vram, phase, rows, rate, host, cpu / tokens, wait / tokens, 100 * vram_hits / all,
        100 * misses / all, copied / tokens / 1e6, groups / steps);
    fflush(stdout);
    const int n =
        snprintf(json + json_size, sizeof(json) - json_size,
                 "{\"model\":\"%s\",\"vram_budget\":%.0f,\"phase\":\"%s\",\"batch\":%u,"
                 "\"tok_s\":%.2f,\"host_us_per_token\":%.2f,\"cpu_us_per_token\":%.2f,"
                 "\"gpu_wait_us_per_token\":%.2f,\"vram_hits\":%.4f,\"misses\":%.4f,"
                 "\"copied_bytes_per_token\":%.0f,\"experts_per_step\":%.1f}\n",
                 o->model, vram * (double)(1ull << 30), phase, rows, rate, host, cpu / tokens,
                 wait / tokens, vram_hits / all, misses / all, copied / tokens, groups / steps);
    if (n < 0 || (size_t)n >= sizeof(json) - json_size)
        die("too many rows");
    json_size += (size_t)n;
}

static void bench(struct options *o, double vram)
{
    const struct engine_config config = config_of(o, vram);
    struct engine_facts facts;
    engine_rig_start(&rig, &config);
    if (engine_rig_wait_loaded(&rig) != PROTO_SERVING) {
        engine_get_facts(rig.engine, &facts);
        die(facts.reason);
    }
    struct proto_status a = settle(), b;
    printf("  vram %6.2f GiB  %u of %u experts in islands, %u in RAM\n", vram,
           (unsigned)a.experts_in_vram, (unsigned)a.experts_total, (unsigned)a.experts_resident);
    (void)ask(o, 1, o->prefill, 0); /* warms up */
    a = settle();
    double us = ask(o, 1, o->prefill, 0);
    us += ask(o, 1, o->prefill, 0);
    b = settle();
    report(o, vram, "prefill", o->prefill, 2.0 * o->prefill, us, &a, &b);
    for (uint32_t i = 0; i < o->n_rows; i++) {
        (void)ask(o, o->rows[i], SHORT_PROMPT, o->tokens); /* warms up, with another text */
        /* prompts alone, then prompts and answers: the difference is the answers */
        a = settle();
        us = -ask(o, o->rows[i], SHORT_PROMPT, 1);
        const struct proto_status prompts = settle();
        us += ask(o, o->rows[i], SHORT_PROMPT, o->tokens + 1);
        b = settle();
        struct proto_status from = prompts;
        from.gpu_wait_us_total += prompts.gpu_wait_us_total - a.gpu_wait_us_total;
        from.cpu_experts_us_total += prompts.cpu_experts_us_total - a.cpu_experts_us_total;
        from.steps_total += prompts.steps_total - a.steps_total;
        from.expert_groups_total += prompts.expert_groups_total - a.expert_groups_total;
        report(o, vram, "decode", o->rows[i], (double)o->rows[i] * o->tokens, us, &from, &b);
    }
    engine_rig_stop(&rig);
}

static uint32_t vocabulary_of(const char *path)
{
    struct k_device *device = NULL;
    struct model *m = NULL;
    struct err e = {.code = ERR_OK};
    if (k_open(K_LEVEL_AUTO, 1, &device, &e) != ERR_OK ||
        model_open(&(struct model_loading){.path = path, .device = device}, &m, &e) != ERR_OK)
        die(e.text);
    const uint32_t n = m->shape.n_vocab;
    model_close(m);
    k_close(device);
    return n;
}

static void read_options(int argc, char **argv, struct options *o)
{
    *o = (struct options){.n_vram = 1, .n_rows = 2, .rows = {1, 8}, .prefill = 512, .tokens = 128};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        char *at = argv[i + (i + 1 < argc)];
        if (strcmp(argv[i], "--fake") == 0) {
            o->fake = true;
            continue;
        }
        if (strncmp(argv[i], "--", 2) != 0) {
            o->model = argv[i];
            continue;
        }
        if (strcmp(argv[i], "--vram") == 0)
            for (o->n_vram = 0; *at != '\0' && o->n_vram < MAX_BUDGETS; at += *at == ',')
                o->vram[o->n_vram++] = strtod(at, &at);
        else if (strcmp(argv[i], "--rows") == 0)
            for (o->n_rows = 0; *at != '\0' && o->n_rows < MAX_ROWS; at += *at == ',')
                o->rows[o->n_rows++] = (uint32_t)strtoul(at, &at, 10);
        else if (strcmp(argv[i], "--ram") == 0)
            o->ram = strtod(value, NULL);
        else if (strcmp(argv[i], "--prefill") == 0)
            o->prefill = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(argv[i], "--tokens") == 0)
            o->tokens = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(argv[i], "--threads") == 0)
            o->threads = (uint32_t)strtoul(value, NULL, 10);
        else
            die("see the head of tests/bench/bench_gpu.c");
        i++;
    }
    if (o->model == NULL || o->prefill == 0 || o->prefill > 8192 || o->tokens == 0)
        die("bench_gpu MODEL.gguf [--vram GiB,...] [--ram GiB] [--rows 1,8] [--prefill 512] "
            "[--tokens 128] [--threads N] [--fake]");
}

int main(int argc, char **argv)
{
    struct options o;
    read_options(argc, argv, &o);
    o.n_vocab = vocabulary_of(o.model);
    printf("%s\n", o.model);
    for (uint32_t i = 0; i < o.n_vram; i++)
        bench(&o, o.vram[i]);
    printf("%s", json);
    return 0;
}

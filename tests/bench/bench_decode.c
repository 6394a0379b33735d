/* bench_decode MODEL.gguf [--level L] [--threads N] [--rows 1,4,16]: tokens a second of the engine
 * by itself, with different text in each row, beside what reading the weights alone would allow.
 * Fails on a value that is not finite.
 *
 * Limit of a decode step: bytes read (dense weights, distinct experts as counted) over the read
 * bandwidth measured in the same run with the same threads. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine_rates.h"
#include "engine_rig.h"
#include "gguf_file.h"
#include "kernels.h"
#include "shape.h"

enum {
    PROMPT = 64,
    ANSWER = 96,
    PREFILL = 512,
    READ_BYTES = 512 << 20,
    MAX_THREADS = 64
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Bytes a second that the threads of the engine read from RAM. */
static double read_rate(const struct engine_config *config)
{
    struct k_device *device = NULL;
    struct err e = {.code = ERR_OK};
    double rate = 0;
    if (k_open((enum k_level)config->cpu_level, config->threads, &device, &e) != ERR_OK ||
        engine_rates_ram(device, READ_BYTES, UINT64_MAX, config->ticks, &rate, &e) != ERR_OK) {
        fprintf(stderr, "bench_decode: %s\n", e.text);
        exit(1);
    }
    k_close(device);
    return rate;
}

struct weights {
    uint64_t dense, expert; /* bytes read by every step; bytes of one expert (mean over layers) */
    struct model_shape shape;
};

static struct weights weigh(const char *path)
{
    struct gguf_file *file = NULL;
    struct err e = {.code = ERR_OK};
    struct weights w = {0};
    if (gguf_file_open(path, &file, &e) != ERR_OK ||
        shape_from_file(file, &w.shape, &e) != ERR_OK) {
        fprintf(stderr, "bench_decode: %s\n", e.text);
        exit(1);
    }
    uint64_t experts = 0;
    for (size_t i = 0; i < file->n_tensors; i++) {
        const struct gguf_tensor *t = file->tensors[i];
        char name[128];
        snprintf(name, sizeof name, "%.*s", (int)t->name.size, t->name.data);
        if (strstr(name, "_exps.") != NULL)
            experts += t->bytes;
        else if (strcmp(name, "token_embd.weight") != 0 || w.shape.tied_head)
            w.dense += t->bytes;
    }
    w.expert = experts / ((uint64_t)w.shape.n_layer * w.shape.n_expert);
    gguf_file_close(file);
    return w;
}

static uint32_t draw(uint64_t *state, uint32_t n)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((*state >> 33) % n);
}

static struct proto_status status_of(struct engine_rig *rig)
{
    static struct engine_snapshot snapshot;
    engine_get_snapshot(rig->engine, &snapshot);
    return snapshot.status;
}

static void check_answers(const struct engine_rig *rig)
{
    for (uint32_t i = 0; i < rig->n; i++)
        if (rig->answers[i].failed) {
            printf("FAIL: %s\n", rig->answers[i].error.text);
            exit(1);
        }
}

/* Runs `rows` answers of n tokens each after prompts of different text; returns tokens a second of
 * the pure decode. */
static void decode(struct engine_rig *rig, const struct weights *w, uint32_t rows, double rate,
                   FILE *json, const char *model)
{
    static uint32_t prompts[32][PROMPT];
    uint64_t state = 7 + rows;
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t i = 0; i < PROMPT; i++)
            prompts[r][i] = draw(&state, w->shape.n_vocab);
    /* Warm prefixes first, so that the measured runs decode only. */
    for (int pass = 0; pass < 2; pass++) {
        const struct proto_status before = status_of(rig);
        const double start = now();
        for (uint32_t r = 0; r < rows; r++) {
            struct proto_run run = engine_rig_run(prompts[r], PROMPT);
            run.max_new = pass == 0 ? 1 : ANSWER;
            run.temperature = 1.0f;
            run.seed = r;
            engine_rig_submit(rig, &run);
        }
        engine_rig_finish(rig);
        const double seconds = now() - start;
        check_answers(rig);
        const struct proto_status after = status_of(rig);
        engine_rig_forget(rig);
        if (pass == 0)
            continue;
        const double tokens = (double)rows * ANSWER;
        const double steps = (double)(after.steps_total - before.steps_total);
        const double groups = (double)(after.expert_groups_total - before.expert_groups_total);
        const double bytes = (double)w->dense + groups / steps * (double)w->expert;
        const double limit = rate / bytes * tokens / steps;
        printf(
            "  decode, %2u rows: %7.1f tok/s, limit %7.1f (%.0f %%), %.1f distinct experts a layer, %.0f MB a step\n",
            rows, tokens / seconds, limit, 100 * tokens / seconds / limit,
            groups / steps / w->shape.n_layer, bytes / 1e6);
        if (json != NULL)
            fprintf(
                json,
                "{\"model\":\"%s\",\"phase\":\"decode\",\"rows\":%u,\"tok_s\":%.2f,\"limit_tok_s\":%.2f,"
                "\"share_of_limit\":%.3f,\"distinct_experts\":%.2f,\"read_gb_s\":%.2f}\n",
                model, rows, tokens / seconds, limit, tokens / seconds / limit,
                groups / steps / w->shape.n_layer, rate / 1e9);
    }
}

static void prefill(struct engine_rig *rig, const struct weights *w, FILE *json, const char *model)
{
    static uint32_t prompt[PREFILL];
    uint64_t state = 99;
    for (uint32_t i = 0; i < PREFILL; i++)
        prompt[i] = draw(&state, w->shape.n_vocab);
    struct proto_run run = engine_rig_run(prompt, PREFILL);
    run.max_new = 1;
    run.flags = PROTO_RUN_NO_CACHE;
    const struct proto_status before = status_of(rig);
    const double start = now();
    engine_rig_submit(rig, &run);
    engine_rig_finish(rig);
    const double seconds = now() - start;
    check_answers(rig);
    engine_rig_forget(rig);
    const struct proto_status after = status_of(rig);
    const double steps = (double)(after.steps_total - before.steps_total);
    printf("  prefill %d: %.1f tok/s, %.1f distinct experts a layer and step\n", PREFILL,
           PREFILL / seconds,
           (double)(after.expert_groups_total - before.expert_groups_total) / steps /
               w->shape.n_layer);
    if (json != NULL)
        fprintf(json, "{\"model\":\"%s\",\"phase\":\"prefill\",\"rows\":%d,\"tok_s\":%.2f}\n",
                model, PREFILL, PREFILL / seconds);
}

int main(int argc, char **argv)
{
    static const char *const levels[] = {"auto", "reference", "avx2", "avx512"};
    if (argc < 2) {
        fprintf(
            stderr,
            "usage: bench_decode MODEL.gguf [--level auto|reference|avx2|avx512] [--threads N]\n");
        return 2;
    }
    struct engine_config config = engine_rig_config(argv[1]);
    for (int i = 2; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--threads") == 0)
            config.threads = (uint32_t)atoi(argv[i + 1]);
        for (unsigned l = 0; strcmp(argv[i], "--level") == 0 && l < 4; l++)
            if (strcmp(argv[i + 1], levels[l]) == 0)
                config.cpu_level = l;
    }
    if (config.threads == 0 || config.threads > MAX_THREADS)
        config.threads = 1;
    const struct weights w = weigh(argv[1]);
    static struct engine_rig rig;
    const double start = now();
    engine_rig_start(&rig, &config);
    if (engine_rig_wait_loaded(&rig) != PROTO_SERVING) {
        fprintf(stderr, "bench_decode: %s could not be loaded\n", argv[1]);
        return 1;
    }
    const double loaded = now() - start, rate = read_rate(&config);
    const char *name = strrchr(argv[1], '/') != NULL ? strrchr(argv[1], '/') + 1 : argv[1];
    printf("%s: %s, %u threads, loaded in %.2f s; read bandwidth %.1f GB/s\n", name,
           levels[config.cpu_level], config.threads, loaded, rate / 1e9);
    FILE *json = fopen(ISLET_BUILD_DIR "/bench/decode.json", "a");
    decode(&rig, &w, 1, rate, json, name);
    decode(&rig, &w, 4, rate, json, name);
    decode(&rig, &w, 16, rate, json, name);
    prefill(&rig, &w, json, name);
    if (json != NULL)
        fclose(json);
    engine_rig_stop(&rig);
    return 0;
}

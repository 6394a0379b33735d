/* CPU = GPU = both together: the logits of thousands of positions have the same bits whoever
 * computes which experts. On a GPU where there is one, and on the stand-in of the unit tests in any
 * case.   model_gpu [--cuda] [FILE.gguf ...]   --cuda: without a GPU it is skipped (exit 77) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "fake_gpu.h"
#include "forward_rig.h"

enum {
    SEQUENCES = 8,
    PAGES = 4, /* of a sequence */
    CHUNK = 61,
    PREFILL = 2 * CHUNK,
    DECODE = 24,
    POSITIONS = PREFILL + DECODE,
    MAX_ROWS = CHUNK + SEQUENCES,
    SKIPPED = 77
};

/* Of each position's logits. */
static uint64_t expected[SEQUENCES][POSITIONS];
static unsigned passed, failed;

static void die(const struct err *e)
{
    printf("  %s\n0 passed, 1 failed\n", e->text);
    exit(1);
}

static uint64_t hash_of(const float *x, uint32_t n)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof(bits));
        h = (h ^ bits) * 0x100000001b3u;
    }
    return h;
}

static void add_row(struct engine_forward *f, uint32_t sequence, uint32_t position)
{
    const uint32_t i = f->n_rows++;
    f->token[i] =
        (7 + 131 * sequence + 37 * position + position * position) % f->model->shape.n_vocab;
    f->position[i] = position;
    f->sequence[i] = sequence;
    f->logit_row[f->n_logits++] = i;
}

/* Computes the rows; returns how many of them have other logits than were expected, or with `keep`
 * keeps them. */
static uint32_t compute(struct forward_rig *s, bool keep)
{
    struct engine_forward *f = s->forward;
    struct err e = {.code = ERR_OK};
    const uint32_t n = f->model->shape.n_vocab;
    uint32_t wrong = 0;
    if (engine_forward_step(f, &e) != ERR_OK)
        die(&e);
    for (uint32_t i = 0; i < f->n_rows; i++) {
        uint64_t *at = &expected[f->sequence[i]][f->position[i]];
        const uint64_t hash = hash_of(f->logits + (size_t)i * n, n);
        wrong += f->faults[i] != 0 || f->logit_faults[i] != 0 || (!keep && hash != *at);
        if (keep)
            *at = hash;
    }
    f->n_rows = f->n_logits = 0;
    return wrong;
}

/* All sequences: prompts in chunks beside those that decode, then all decode, fewer and fewer. */
static uint32_t run_all(struct forward_rig *s, bool keep)
{
    struct engine_forward *f = s->forward;
    uint32_t pages[PAGES], wrong = 0, next[SEQUENCES] = {0};
    f->n_rows = f->n_logits = 0;
    for (uint32_t q = 0; q < SEQUENCES; q++) {
        for (uint32_t i = 0; i < PAGES; i++)
            pages[i] = i * SEQUENCES + q;
        engine_forward_set_pages(f, q, pages, PAGES);
    }
    for (uint32_t q = 0; q < SEQUENCES; q++)
        while (next[q] < PREFILL) {
            for (uint32_t i = 0; i < CHUNK; i++)
                add_row(f, q, next[q]++);
            for (uint32_t other = 0; other < q; other++)
                if (next[other] < POSITIONS - SEQUENCES)
                    add_row(f, other, next[other]++);
            wrong += compute(s, keep);
        }
    for (;;) {
        for (uint32_t q = 0; q < SEQUENCES; q++)
            if (next[q] < POSITIONS)
                add_row(f, q, next[q]++);
        if (f->n_rows == 0)
            return wrong;
        wrong += compute(s, keep);
    }
}

static void rig_open(struct forward_rig *s, const char *path, const struct forward_rig_gpu *gpu)
{
    const struct engine_forward_sizes sizes = {.max_rows = MAX_ROWS,
                                               .max_logits = MAX_ROWS,
                                               .max_sequences = SEQUENCES,
                                               .max_pages = PAGES};
    struct err e = {.code = ERR_OK};
    if (forward_rig_open(path, 0, NULL, &sizes, gpu, s, &e) != ERR_OK)
        die(&e);
}

/* A way to split the experts. */
struct split {
    const char *name;
    unsigned eighths; /* of all experts that have islands */
    struct engine_split_rates rates;
    bool early; /* in prefill, experts are copied before their layer chooses them */
};

static const struct split splits[] = {
    {"all experts on the CPU", 0, {1e3, 1e15, 1e15, 1e15, 0, 0}, false},
    {"all experts copied when they are needed", 0, {1e15, 1e3, 1e3, 1e15, 0, 0}, true},
    {"half of them in islands, the others on the CPU", 4, {1e3, 1e15, 1e15, 1e15, 0, 0}, false},
    {"half of them in islands, the others on both", 4, {1e9, 1e9, 3e9, 1e12, 0, 0}, false},
    {"all experts in islands", 8, {1e9, 1e9, 3e9, 1e12, 0, 0}, false}};

static uint64_t all_islands(const char *path)
{
    struct forward_rig s;
    uint64_t n = 0;
    rig_open(&s, path, NULL);
    for (uint32_t i = 0; i < s.model->shape.n_layer; i++)
        n += s.model->shape.n_expert * tier_vram_island_bytes(s.model, i);
    forward_rig_close(&s);
    return n;
}

static void check_split(const char *path, const struct split *split, uint64_t all, bool cuda)
{
    struct forward_rig s;
    struct err e = {.code = ERR_OK};
    struct forward_rig_gpu gpu = {.rates = split->rates};
    enum err_code code = cuda
                             ? k_open_cuda(&(struct k_cuda_options){.ordinal = -1}, &gpu.device, &e)
                             : fake_gpu_open(&(struct fake_gpu_options){0}, &gpu.device, &e);
    if (code != ERR_OK)
        die(&e);
    gpu.islands_bytes = split->eighths == 8 ? UINT64_MAX : all / 8 * split->eighths;
    rig_open(&s, path, &gpu);
    while (engine_islands_idle(&s.islands, &code)) {
    }
    uint32_t wrong = run_all(&s, false);
    wrong += split->early && s.islands.counts.early == 0;
    *(wrong == 0 ? &passed : &failed) += 1;
    printf("  %-4s %s: %s: %u of %u positions differ; %llu hits of the last step's first row, %llu "
           "copies (%llu early), CPU %llu ms\n",
           wrong == 0 ? "ok" : "FAIL", k_ops(s.gpu)->name, split->name, wrong,
           SEQUENCES * POSITIONS, (unsigned long long)s.islands.row_hits[0],
           (unsigned long long)s.islands.counts.copies, (unsigned long long)s.islands.counts.early,
           (unsigned long long)(s.hybrid.cpu_ns / 1000000));
    fflush(stdout);
    forward_rig_close(&s);
}

static void check_model(const char *path, bool cuda)
{
    struct forward_rig s;
    const uint64_t all = all_islands(path);
    printf("%s\n", path);
    rig_open(&s, path, NULL);
    if (run_all(&s, true) != 0)
        die(&(struct err){.text = "a value of the CPU is not finite"});
    forward_rig_close(&s);
    for (size_t i = 0; i < sizeof(splits) / sizeof(splits[0]); i++)
        check_split(path, &splits[i], all, cuda);
}

/* Why there is no GPU, or NULL. */
static const char *no_cuda(struct err *e)
{
    struct k_device *device = NULL;
    if (k_open_cuda(&(struct k_cuda_options){.ordinal = -1}, &device, e) != ERR_OK)
        return e->text;
    printf("GPU: %s\n", k_ops(device)->describe(device));
    k_close(device);
    return NULL;
}

int main(int argc, char **argv)
{
    static const char *const shipped[] = {ISLET_TEST_DIR "/models/tinymoe-q4_k_m.gguf",
                                          ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf",
                                          ISLET_TEST_DIR "/models/random/qwen3moe-f32.gguf"};
    struct err e = {.code = ERR_OK};
    const bool only = argc > 1 && strcmp(argv[1], "--cuda") == 0;
    const char *reason = no_cuda(&e);
    const int first = only ? 2 : 1;
    if (only && reason != NULL) {
        printf("skip: no CUDA device: %s\n", reason);
        return SKIPPED;
    }
    const int n = argc > first ? argc - first : (int)(sizeof(shipped) / sizeof(shipped[0]));
    for (int i = 0; i < n; i++)
        for (int cuda = only; cuda <= (reason == NULL); cuda++)
            check_model(argc > first ? argv[first + i] : shipped[i], cuda);
    if (reason != NULL)
        printf("skip: no CUDA device: %s\n", reason);
    printf("%u passed, %u failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}

/* The same 20 requests, greedy and sampled, must give the same tokens and the same bits of every
 * log-probability whatever else runs: order, chunks, threads, kernels, pre-emption, shared
 * prefixes. Without arguments every pair of choices is tried once; --full tries all
 * combinations. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "engine_rig.h"
#include "kernels.h"

enum {
    REQUESTS = 20,
    MAX_PROMPT = 200,
    MAX_NEW = 144, /* of every fifth request: crosses pages, so that a tight pool runs out */
    FEW_NEW = 12,
    TOP = 3,
    N_KINDS = 5,
    MAX_CHOICES = 4
};

static const char *const orders[] = {"alone", "together", "shuffled"};
static const uint32_t chunks[] = {512, 64, 7, 1};
static const uint32_t threads[] = {2, 1, 4};
static const struct {
    const char *name;
    enum k_level level;
} levels[] = {{"reference", K_LEVEL_REFERENCE}, {"avx2", K_LEVEL_AVX2}, {"avx512", K_LEVEL_AVX512}};
static const char *const pools[] = {"roomy", "tight"};
static const uint32_t n_choices[N_KINDS] = {3, 4, 3, 3, 2};

struct request {
    uint32_t prompt[MAX_PROMPT], n_prompt;
};

struct answer {
    uint32_t n;
    struct {
        uint32_t id;
        float logprob, top[TOP];
        uint32_t top_id[TOP];
    } tokens[MAX_NEW];
};

struct bits {
    struct request requests[REQUESTS];
    struct answer expected[REQUESTS];
    bool covered[N_KINDS][MAX_CHOICES][N_KINDS][MAX_CHOICES];
    unsigned passed, failed;
    uint64_t preempted, shared;
    char model[512];
};

static void read_requests(struct bits *b)
{
    char path[512];
    json_error_t error;
    snprintf(path, sizeof(path), "%s/models/robust_chat-q4_k_m.json", ISLET_TEST_DIR);
    json_t *file = json_load_file(path, 0, &error);
    const json_t *chats = json_object_get(file, "chats");
    uint32_t n = 0;
    for (size_t c = 0; c < json_array_size(chats) && n < REQUESTS; c++) {
        const json_t *turns = json_object_get(json_array_get(chats, c), "turns");
        for (size_t t = 0; t < json_array_size(turns) && n < REQUESTS; t++) {
            const json_t *ids = json_object_get(json_array_get(turns, t), "prompt_tokens");
            const size_t size = json_array_size(ids);
            if (size == 0 || size > MAX_PROMPT || (t == 0 && n % 3 == 2))
                continue;
            struct request *r = &b->requests[n++];
            r->n_prompt = (uint32_t)size;
            for (size_t i = 0; i < size; i++)
                r->prompt[i] = (uint32_t)json_integer_value(json_array_get(ids, i));
        }
    }
    json_decref(file);
    if (n < REQUESTS) {
        printf("  %s holds %u usable prompts, %d are needed\n0 passed, 1 failed\n", path, n,
               REQUESTS);
        exit(1);
    }
}

/* Every second request samples, each with other filters and penalties. */
static struct proto_run run_of(const struct bits *b, uint32_t i)
{
    struct proto_run run = engine_rig_run(b->requests[i].prompt, b->requests[i].n_prompt);
    run.max_new = i % 5 == 0 ? MAX_NEW : FEW_NEW;
    run.flags = PROTO_RUN_LOGPROBS;
    run.n_top = TOP;
    run.seed = 1000 + i;
    if (i % 2 == 0)
        return run;
    run.temperature = 0.7f + 0.2f * (float)(i % 5);
    run.top_k = i % 3 == 0 ? 40 : 0;
    run.top_p = i % 4 == 1 ? 0.9f : 1.0f;
    run.min_p = i % 8 == 3 ? 0.02f : 0.0f;
    run.presence = i % 4 == 3 ? 0.5f : 0.0f;
    run.frequency = i % 6 == 5 ? 0.25f : 0.0f;
    run.repeat = i % 6 == 1 ? 1.2f : 1.0f;
    run.repeat_last_n = 64;
    return run;
}

static struct answer answer_of(const struct engine_rig_answer *from)
{
    struct answer a;
    memset(&a, 0, sizeof(a));
    a.n = from->failed ? UINT32_MAX : from->n_tokens;
    for (uint32_t i = 0; i < from->n_tokens && i < MAX_NEW; i++) {
        a.tokens[i].id = from->tokens[i].id;
        a.tokens[i].logprob = from->tokens[i].logprob;
        for (uint32_t t = 0; t < TOP; t++) {
            a.tokens[i].top[t] = from->tokens[i].top[t].logprob;
            a.tokens[i].top_id[t] = from->tokens[i].top[t].id;
        }
    }
    return a;
}

static struct engine_config config_of(const struct bits *b, const uint32_t *choice)
{
    struct engine_config config = engine_rig_config(b->model);
    config.prefill_chunk = chunks[choice[1]];
    config.threads = threads[choice[2]];
    config.cpu_level = levels[choice[3]].level;
    if (choice[4] == 1) { /* 7 pages of 64 positions for all */
        config.context = 512;
        config.kv_budget = 7ull * 4 * k_kv_layer_bytes(K_KV_F16, 2, 64);
    }
    return config;
}

/* The oracle has no threads, so that the thread sanitizer finds nothing in it, at twenty times its
 * time. */
#if defined(__SANITIZE_THREAD__)
enum {
    WITHOUT_ORACLE = 1
};
#else
enum {
    WITHOUT_ORACLE = 0
};
#endif

static bool choice_possible(const uint32_t *choice)
{
    if (WITHOUT_ORACLE && levels[choice[3]].level == K_LEVEL_REFERENCE)
        return false;
    return strstr(k_levels_available(), levels[choice[3]].name) != NULL;
}

static void run_all(struct bits *b, const uint32_t *choice, struct answer *ret)
{
    static struct engine_rig rig;
    const struct engine_config config = config_of(b, choice);
    engine_rig_start(&rig, &config);
    for (uint32_t k = 0; k < REQUESTS; k++) {
        const uint32_t i = choice[0] == 2 ? (k * 7 + 3) % REQUESTS : k;
        const struct proto_run run = run_of(b, i);
        engine_rig_submit(&rig, &run);
        if (choice[0] == 0)
            engine_rig_finish(&rig);
    }
    engine_rig_finish(&rig);
    for (uint32_t k = 0; k < REQUESTS; k++) {
        const uint32_t i = choice[0] == 2 ? (k * 7 + 3) % REQUESTS : k;
        ret[i] = answer_of(&rig.answers[k]);
        b->preempted += rig.answers[k].done.usage.preempted;
        b->shared += rig.answers[k].done.usage.cached;
        if (rig.answers[k].failed)
            printf("  request %u: %s\n", i, rig.answers[k].error.text);
    }
    engine_rig_stop(&rig);
}

static void check_choice(struct bits *b, const uint32_t *choice)
{
    static struct answer answers[REQUESTS];
    run_all(b, choice, answers);
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < REQUESTS; i++)
        wrong += memcmp(&answers[i], &b->expected[i], sizeof(answers[i])) != 0;
    *(wrong == 0 ? &b->passed : &b->failed) += 1;
    printf("  %-4s %-9s chunk %-3u threads %u %-9s %-5s", wrong == 0 ? "ok" : "FAIL",
           orders[choice[0]], chunks[choice[1]], threads[choice[2]], levels[choice[3]].name,
           pools[choice[4]]);
    if (wrong > 0)
        printf("  %u of %d answers differ", wrong, REQUESTS);
    printf("\n");
    fflush(stdout);
}

/* Pairs of choices that `choice` would cover for the first time; with `mark` they are covered. */
static unsigned new_pairs(struct bits *b, const uint32_t *choice, bool mark)
{
    unsigned n = 0;
    for (uint32_t i = 0; i < N_KINDS; i++)
        for (uint32_t j = i + 1; j < N_KINDS; j++) {
            bool *seen = &b->covered[i][choice[i]][j][choice[j]];
            n += !*seen;
            *seen = *seen || mark;
        }
    return n;
}

static bool next_choice(uint32_t *choice)
{
    for (uint32_t k = 0; k < N_KINDS; k++) {
        if (++choice[k] < n_choices[k])
            return true;
        choice[k] = 0;
    }
    return false;
}

/* The combination that covers most new pairs; false: all pairs are covered. */
static bool best_choice(struct bits *b, uint32_t *ret)
{
    uint32_t choice[N_KINDS] = {0};
    unsigned best = 0;
    do {
        const unsigned n = choice_possible(choice) ? new_pairs(b, choice, false) : 0;
        if (n > best) {
            best = n;
            memcpy(ret, choice, sizeof(choice));
        }
    } while (next_choice(choice));
    return best > 0;
}

int main(int argc, char **argv)
{
    static struct bits b;
    const bool full = argc > 1 && strcmp(argv[1], "--full") == 0;
    uint32_t choice[N_KINDS] = {0, 0, 0, WITHOUT_ORACLE, 0};
    snprintf(b.model, sizeof(b.model), "%s/models/tinymoe-q4_k_m.gguf", ISLET_TEST_DIR);
    read_requests(&b);
    run_all(&b, choice, b.expected); /* alone, by the first level */
    if (full) {
        do {
            if (choice_possible(choice))
                check_choice(&b, choice);
        } while (next_choice(choice));
    } else {
        new_pairs(&b, choice, true); /* what was expected was computed so */
        while (best_choice(&b, choice)) {
            new_pairs(&b, choice, true);
            check_choice(&b, choice);
        }
    }
    printf("  levels: %s; %llu pre-emptions, %llu shared prompt tokens\n", k_levels_available(),
           (unsigned long long)b.preempted, (unsigned long long)b.shared);
    if (b.preempted == 0 || b.shared == 0) {
        printf("  FAIL pre-emption or sharing did not happen\n");
        b.failed++;
    }
    printf("%u passed, %u failed\n", b.passed, b.failed);
    return b.failed == 0 ? 0 : 1;
}

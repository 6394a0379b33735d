/* A model larger than its memory gives the same bits as one that is resident: every budget, every
 * way to read, 1 to 16 requests at a time; the budget is never exceeded, and what was read is
 * counted. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "engine_rig.h"
#include "tier_ssd.h"

enum {
    REQUESTS = 16,
    MAX_PROMPT = 160,
    NEW = 24,
    TOP = 2,
    KV_BYTES = 16 << 20
};

struct answer {
    uint32_t n;
    struct {
        uint32_t id, top_id[TOP];
        float logprob, top[TOP];
    } tokens[NEW];
    uint64_t hits, misses, ssd_bytes;
};

struct tiers {
    char model[512];
    uint32_t prompts[REQUESTS][MAX_PROMPT], n_prompt[REQUESTS];
    struct answer expected[REQUESTS];
    uint64_t uses[REQUESTS]; /* expert uses of the resident run */
    unsigned passed, failed;
};

static void read_prompts(struct tiers *t)
{
    char path[512];
    json_error_t error;
    snprintf(path, sizeof(path), "%s/models/robust_chat-q4_k_m.json", ISLET_TEST_DIR);
    json_t *file = json_load_file(path, 0, &error);
    const json_t *chats = json_object_get(file, "chats");
    uint32_t n = 0;
    for (size_t c = 0; c < json_array_size(chats) && n < REQUESTS; c++) {
        const json_t *turns = json_object_get(json_array_get(chats, c), "turns");
        const json_t *ids = json_object_get(json_array_get(turns, 0), "prompt_tokens");
        const size_t size = json_array_size(ids);
        if (size == 0 || size > MAX_PROMPT)
            continue;
        t->n_prompt[n] = (uint32_t)size;
        for (size_t i = 0; i < size; i++)
            t->prompts[n][i] = (uint32_t)json_integer_value(json_array_get(ids, i));
        n++;
    }
    json_decref(file);
    if (n < REQUESTS) {
        printf("  %s holds %u usable prompts, %d are needed\n0 passed, 1 failed\n", path, n,
               REQUESTS);
        exit(1);
    }
}

static struct proto_status status_of(struct engine_rig *rig)
{
    static struct engine_snapshot snapshot;
    engine_get_snapshot(rig->engine, &snapshot);
    return snapshot.status;
}

static struct answer answer_of(const struct engine_rig_answer *from)
{
    struct answer a;
    memset(&a, 0, sizeof(a));
    a.n = from->failed ? UINT32_MAX : from->n_tokens;
    for (uint32_t i = 0; i < from->n_tokens && i < NEW; i++) {
        a.tokens[i].id = from->tokens[i].id;
        a.tokens[i].logprob = from->tokens[i].logprob;
        for (uint32_t k = 0; k < TOP; k++) {
            a.tokens[i].top_id[k] = from->tokens[i].top[k].id;
            a.tokens[i].top[k] = from->tokens[i].top[k].logprob;
        }
    }
    a.hits = from->done.usage.hits_ram;
    a.misses = from->done.usage.misses;
    a.ssd_bytes = from->done.usage.ssd_bytes;
    return a;
}

/* All requests, `batch` at a time. */
static void run_all(struct tiers *t, const struct engine_config *config, uint32_t batch,
                    struct answer *ret, struct proto_status *ret_status)
{
    static struct engine_rig rig;
    engine_rig_start(&rig, config);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        struct proto_run run = engine_rig_run(t->prompts[i], t->n_prompt[i]);
        run.max_new = NEW;
        run.flags = PROTO_RUN_LOGPROBS;
        run.n_top = TOP;
        run.seed = 7 + i;
        run.temperature = i % 2 == 0 ? 0.0f : 0.8f;
        engine_rig_submit(&rig, &run);
        if ((i + 1) % batch == 0)
            engine_rig_finish(&rig);
    }
    engine_rig_finish(&rig);
    for (uint32_t i = 0; i < REQUESTS; i++) {
        ret[i] = answer_of(&rig.answers[i]);
        if (rig.answers[i].failed)
            printf("  request %u: %s\n", i, rig.answers[i].error.text);
    }
    *ret_status = status_of(&rig);
    engine_rig_stop(&rig);
}

static void report(struct tiers *t, bool good, const char *what)
{
    *(good ? &t->passed : &t->failed) += 1;
    printf("  %-4s %s\n", good ? "ok" : "FAIL", what);
    fflush(stdout);
}

/* What the model needs with this chunk. */
static struct proto_status needs_of(const struct engine_config *config)
{
    static struct engine_rig rig;
    engine_rig_start(&rig, config);
    if (engine_rig_wait_loaded(&rig) != PROTO_SERVING)
        abort();
    /* the snapshot is taken after the state is told; a request's end comes after one */
    const uint32_t token = 1;
    struct proto_run run = engine_rig_run(&token, 1);
    run.max_new = 1;
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    const struct proto_status s = status_of(&rig);
    engine_rig_stop(&rig);
    return s;
}

/* The same requests with `percent` of the experts' bytes in slots. */
static void check_budget(struct tiers *t, unsigned percent, enum tier_ssd_io io, uint32_t batch,
                         uint32_t chunk)
{
    static const char *const ios[] = {"auto", "uring", "pread", "buffered"};
    static struct answer answers[REQUESTS];
    struct engine_config config = engine_rig_config(t->model);
    struct proto_status s;
    char what[256];
    config.kv_budget = KV_BYTES;
    config.prefill_chunk = chunk;
    const struct proto_status needs = needs_of(&config);
    config.ram_budget = needs.ram_budget_bytes - needs.ram_slots_bytes +
                        needs.ram_slots_bytes / 100 * percent + (1 << 20);
    config.ssd_io = io;
    run_all(t, &config, batch, answers, &s);
    uint32_t wrong = 0;
    uint64_t misses = 0, bytes = 0;
    for (uint32_t i = 0; i < REQUESTS; i++) {
        const struct answer *a = &answers[i], *x = &t->expected[i];
        wrong += a->n != x->n || memcmp(a->tokens, x->tokens, sizeof(a->tokens)) != 0;
        misses += a->misses;
        bytes += a->ssd_bytes;
        wrong += a->misses != 0 && a->ssd_bytes == 0; /* a wrong guess alone is no miss */
    }
    const bool bounded = s.ram_slots_used_bytes <= s.ram_slots_bytes &&
                         s.ram_budget_bytes <= config.ram_budget &&
                         s.experts_resident < s.experts_total;
    snprintf(what, sizeof(what),
             "%2u %% in slots (%u of %u experts), %-8s %2u at a time, chunk %3u: %u wrong, %.1f %% "
             "hits, %llu evictions, %.1f MB read",
             percent, (unsigned)s.experts_resident, (unsigned)s.experts_total, ios[io], batch,
             chunk, wrong,
             100.0 * (double)s.expert_hits_ram_total /
                 (double)(s.expert_hits_ram_total + s.expert_misses_total),
             (unsigned long long)s.expert_evictions_total, (double)s.ssd_bytes_total / 1e6);
    report(t,
           wrong == 0 && bounded && s.expert_evictions_total > 0 && misses > 0 &&
               misses == s.expert_misses_total && bytes > 0 && bytes < s.ssd_bytes_total &&
               s.ssd_errors_total == 0,
           what);
}

static void check_too_small(struct tiers *t)
{
    static struct engine_rig rig;
    struct engine_config config = engine_rig_config(t->model);
    struct engine_facts facts;
    config.ram_budget = 16 << 20;
    engine_rig_start(&rig, &config);
    const enum proto_state state = engine_rig_wait_loaded(&rig);
    engine_get_facts(rig.engine, &facts);
    report(t, state == PROTO_FAILED && strstr(facts.reason, "the least that works") != NULL,
           facts.reason);
    engine_rig_stop(&rig);
}

int main(void)
{
    static struct tiers t;
    struct proto_status resident;
    snprintf(t.model, sizeof(t.model), "%s/models/tinymoe-q4_k_m.gguf", ISLET_TEST_DIR);
    read_prompts(&t);
    struct engine_config config = engine_rig_config(t.model);
    config.kv_budget = KV_BYTES;
    run_all(&t, &config, 1, t.expected, &resident);
    report(&t,
           resident.expert_misses_total == 0 && resident.expert_hits_ram_total > 0 &&
               resident.experts_resident == resident.experts_total,
           "resident: every use is a hit");
    check_budget(&t, 75, TIER_SSD_AUTO, 1, 512);
    check_budget(&t, 40, TIER_SSD_URING, 16, 64);
    check_budget(&t, 25, TIER_SSD_PREAD, 4, 512);
    check_budget(&t, 12, TIER_SSD_BUFFERED, 16, 7);
    check_budget(&t, 0, TIER_SSD_AUTO, 1, 512);
    check_budget(&t, 0, TIER_SSD_AUTO, 16, 512);
    check_too_small(&t);
    printf("%u passed, %u failed\n", t.passed, t.failed);
    return t.failed == 0 ? 0 : 1;
}

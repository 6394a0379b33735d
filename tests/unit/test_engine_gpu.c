/* An engine with a GPU: the same answers at every budget, without it where it cannot be had, and when
 * it fails at any time. With a stand-in, and what does not need one with the machine's own too. */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "alloc.h"
#include "engine_commands.h"
#include "engine_rig.h"
#include "engine_split.h"
#include "fake_gpu.h"

#define TINY ISLET_TEST_DIR "/models/tinymoe-q4_k_m.gguf"
#define FAKE ISLET_BUILD_DIR "/tests/fake-cuda.so" /* one call fails, the next ones may not */
#define MIB  (UINT64_C(1) << 20)

#if defined(__SANITIZE_THREAD__) /* gcc: twenty times as slow */
enum {
    DENSITY = 2,
    LEAST = 2
};
#else
enum {
    DENSITY = 6, /* of the calls that fail */
    LEAST = 6    /* of them before answers, and while answering */
};
#endif

enum {
    CUDA_DENSITY = 4,
    CUDA_LEAST = 2,
    REQUESTS = 4,
    PROMPT = 40,
    NEW = 12,
    MANY = 100,
    FEW = 6, /* tokens of each of many prompts and answers */
    DEVICE_ERROR = 46,
    LOST_ERROR = 700
};

static struct engine_rig rig;
static struct proto_token expected[REQUESTS][NEW]; /* of the CPU alone */

/* How the engine gets its GPU. */
static struct opener {
    struct fake_gpu_options options;
    bool cuda;             /* of islet-cuda.so, with the options' fault: the machine's own, */
    const char *file;      /* or of another such file */
    enum err_code refusal; /* ERR_OK: it is there */
    unsigned opened;
    _Atomic bool waits;      /* until it may open */
    struct k_device *device; /* the last one; the engine's */
} opener;

static enum err_code open_gpu(void *context, struct k_device **ret, struct err *e)
{
    struct opener *o = context;
    o->opened++;
    while (atomic_load(&o->waits))
        sched_yield();
    if (o->refusal != ERR_OK)
        return err_set(e, o->refusal, "there is no GPU for this test");
    const struct k_cuda_options cuda = {.file = o->file, .ordinal = -1, .fault = o->options.fault};
    const enum err_code code =
        o->cuda ? k_open_cuda(&cuda, ret, e) : fake_gpu_open(&o->options, ret, e);
    o->device = code == ERR_OK ? *ret : NULL;
    return code;
}

static struct engine_config config_of(uint64_t vram, uint64_t ram)
{
    struct engine_config c = engine_rig_config(TINY);
    c.kv_budget = 2 * MIB;
    c.prefill_chunk = 16;
    c.max_sequences = REQUESTS;
    c.vram_budget = vram;
    c.ram_budget = ram;
    c.open_gpu = open_gpu;
    c.open_gpu_context = &opener;
    return c;
}

static struct engine_snapshot *snapshot(void)
{
    static struct engine_snapshot s;
    engine_get_snapshot(rig.engine, &s);
    return &s;
}

static void ask(void)
{
    static uint32_t prompts[REQUESTS][PROMPT];
    for (uint32_t r = 0; r < REQUESTS; r++) {
        for (uint32_t i = 0; i < PROMPT; i++)
            prompts[r][i] = (11 + 97 * r + 31 * i + i * i) % 4000;
        struct proto_run run = engine_rig_run(prompts[r], PROMPT);
        run.max_new = NEW;
        run.seed = r;
        run.flags = PROTO_RUN_LOGPROBS;
        run.temperature = r % 2 == 0 ? 0.0f : 0.9f;
        engine_rig_submit(&rig, &run);
    }
}

static void check_answers(void)
{
    for (uint32_t r = 0; r < REQUESTS; r++) {
        const struct engine_rig_answer *a = &rig.answers[r];
        if (a->failed)
            fail_msg("request %u: %s", r, a->error.text);
        assert_int_equal(a->n_tokens, NEW);
        for (uint32_t i = 0; i < NEW; i++) {
            assert_int_equal(a->tokens[i].id, expected[r][i].id);
            assert_memory_equal(&a->tokens[i].logprob, &expected[r][i].logprob, sizeof(float));
        }
    }
}

static void run_on(const struct engine_config *c)
{
    engine_rig_start(&rig, c);
    ask();
    engine_rig_finish(&rig);
    check_answers();
}

static int set_expected(void **state)
{
    (void)state;
    struct engine_config c = config_of(0, 0);
    c.gpu = ENGINE_GPU_OFF;
    engine_rig_start(&rig, &c);
    ask();
    engine_rig_finish(&rig);
    for (uint32_t r = 0; r < REQUESTS; r++)
        memcpy(expected[r], rig.answers[r].tokens, sizeof(expected[r]));
    engine_rig_stop(&rig);
    assert_int_equal(opener.opened, 0);
    return 0;
}

static int reset(void **state)
{
    (void)state;
    opener = (struct opener){.refusal = ERR_OK};
    return 0;
}

/* What the GPU needs at least, as the refusal of too little says. */
static uint64_t least_vram(void)
{
    struct engine_config c = config_of(MIB, 0);
    struct engine_facts facts;
    c.gpu = ENGINE_GPU_ON;
    engine_rig_start(&rig, &c);
    assert_int_equal(engine_rig_wait_loaded(&rig), PROTO_FAILED);
    engine_get_facts(rig.engine, &facts);
    engine_rig_stop(&rig);
    const char *at = strstr(facts.reason, " MiB is the least that works");
    assert_non_null(strstr(facts.reason, "memory.vram_budget"));
    assert_non_null(at);
    while (at > facts.reason && at[-1] != ' ')
        at--;
    return (uint64_t)(strtod(at, NULL) * (double)MIB) + MIB;
}

static void test_engine_gpu_every_budget_gives_the_same_answers(void **state)
{
    (void)state;
    const uint64_t least = least_vram();
    for (uint64_t more = 0; more <= 12 * MIB; more += 3 * MIB)
        for (int eager = 0; eager < 2; eager++) {
            opener.options = (struct fake_gpu_options){.eager = eager, .memory = 256 * MIB};
            const struct engine_config c = config_of(least + more, eager ? 24 * MIB : 0);
            run_on(&c);
            const struct proto_status *s = &snapshot()->status;
            assert_true(s->vram_budget_bytes > 0 && s->vram_budget_bytes <= least + more);
            assert_int_equal(snapshot()->degraded[0], '\0');
            assert_non_null(strstr(snapshot()->backend, opener.cuda ? "cuda+" : "fake+"));
            engine_rig_stop(&rig);
        }
}

static void test_engine_gpu_every_placement_gives_the_same_answers(void **state)
{
    (void)state;
    const uint64_t least = least_vram();
    for (unsigned p = ENGINE_PLACEMENT_BEST; p <= ENGINE_PLACEMENT_COPY; p++) {
        opener.options = (struct fake_gpu_options){.memory = 256 * MIB};
        struct engine_config c = config_of(least + 4 * MIB, 0);
        c.placement = p;
        run_on(&c);
        const struct proto_status *s = &snapshot()->status;
        assert_int_equal(snapshot()->degraded[0], '\0');
        if (p == ENGINE_PLACEMENT_CPU)
            assert_int_equal(s->expert_copy_bytes_total, 0);
        if (p == ENGINE_PLACEMENT_LAYERS) { /* what is in islands came there once */
            assert_true(s->expert_hits_vram_total > 0);
            assert_true(s->expert_copy_bytes_total <= s->vram_islands_bytes);
        }
        if (p == ENGINE_PLACEMENT_COPY)
            assert_int_equal(s->cpu_experts_us_total, 0);
        else if (p != ENGINE_PLACEMENT_BEST)
            assert_true(s->cpu_experts_us_total > 0);
        engine_rig_stop(&rig);
    }
}

static void test_engine_gpu_auto_budget_holds_all_and_every_use_is_a_hit(void **state)
{
    (void)state;
    opener.options = (struct fake_gpu_options){.memory = 1024 * MIB};
    const struct engine_config c = config_of(0, 0);
    run_on(&c);
    const struct proto_status *s = &snapshot()->status;
    assert_int_equal(s->experts_in_vram, s->experts_total);
    assert_true(s->expert_hits_vram_total > 0);
    assert_int_equal(s->expert_hits_ram_total, 0);
    assert_int_equal(s->expert_misses_total, 0);
    assert_true(rig.answers[0].done.usage.hits_vram > 0);
    engine_rig_stop(&rig);
}

/* Texts of their own, drawn where the logits are. Fills ret, or compares with it. */
static void ask_hundred(uint32_t ret[MANY][FEW], bool keep)
{
    static uint32_t prompts[REQUESTS][FEW];
    for (uint32_t first = 0; first < MANY; first += REQUESTS) {
        for (uint32_t r = 0; r < REQUESTS; r++) {
            for (uint32_t i = 0; i < FEW; i++)
                prompts[r][i] = (7919 * (first + r) + 104729 * i + i * i) % 4000;
            struct proto_run run = engine_rig_run(prompts[r], FEW);
            run.max_new = FEW;
            run.seed = first + r;
            run.temperature = (first + r) % 3 == 0 ? 0.0f : 1.0f;
            engine_rig_submit(&rig, &run);
        }
        engine_rig_finish(&rig);
        for (uint32_t r = 0; r < REQUESTS; r++) {
            const struct engine_rig_answer *a = &rig.answers[r];
            if (a->failed)
                fail_msg("request %u: %s", first + r, a->error.text);
            assert_int_equal(a->n_tokens, FEW);
            for (uint32_t i = 0; i < FEW; i++) {
                if (keep)
                    ret[first + r][i] = a->tokens[i].id;
                assert_int_equal(a->tokens[i].id, ret[first + r][i]);
            }
        }
        engine_rig_forget(&rig);
    }
}

static void test_engine_gpu_a_hundred_requests_of_other_experts_all_succeed(void **state)
{
    static uint32_t ids[MANY][FEW];
    (void)state;
    struct engine_config c = config_of(0, 0);
    c.gpu = ENGINE_GPU_OFF;
    engine_rig_start(&rig, &c);
    ask_hundred(ids, true);
    engine_rig_stop(&rig);
    const uint64_t least = least_vram();
    opener.options = (struct fake_gpu_options){.eager = true, .memory = 256 * MIB};
    c = config_of(least + 2 * MIB, 6 * MIB); /* neither holds all experts */
    engine_rig_start(&rig, &c);
    ask_hundred(ids, false);
    const struct proto_status *s = &snapshot()->status;
    assert_int_equal(s->requests_done_total, MANY);
    assert_int_equal(s->requests_failed_total, 0);
    assert_true(s->experts_in_vram < s->experts_total && s->experts_resident < s->experts_total);
    assert_true(s->experts_in_vram + s->experts_resident <= s->experts_total); /* in one of them */
    assert_true(s->expert_hits_vram_total > 0 && s->expert_misses_total > MANY);
    assert_int_equal(snapshot()->degraded[0], '\0');
    engine_rig_stop(&rig);
}

static void test_engine_gpu_none_is_not_degraded(void **state)
{
    (void)state;
    opener.refusal = ERR_UNSUPPORTED;
    const struct engine_config c = config_of(0, 0);
    run_on(&c);
    assert_int_equal(snapshot()->degraded[0], '\0');
    assert_int_equal(snapshot()->status.vram_budget_bytes, 0);
    engine_rig_stop(&rig);
}

static void test_engine_gpu_that_does_not_open_is_said(void **state)
{
    (void)state;
    opener.refusal = ERR_NOMEM;
    const struct engine_config c = config_of(0, 0);
    run_on(&c);
    assert_string_equal(snapshot()->degraded, "there is no GPU for this test");
    engine_rig_stop(&rig);
}

static void test_engine_gpu_too_little_memory_leaves_the_cpu(void **state)
{
    (void)state;
    opener.options = (struct fake_gpu_options){.memory = MIB};
    const struct engine_config c = config_of(0, 0);
    run_on(&c);
    assert_non_null(strstr(snapshot()->degraded, "memory.vram_budget"));
    engine_rig_stop(&rig);
}

static void test_engine_gpu_on_does_without_no_gpu(void **state)
{
    (void)state;
    struct engine_facts facts;
    struct engine_config c = config_of(0, 0);
    c.gpu = ENGINE_GPU_ON;
    opener.refusal = ERR_UNSUPPORTED;
    engine_rig_start(&rig, &c);
    assert_int_equal(engine_rig_wait_loaded(&rig), PROTO_FAILED);
    engine_get_facts(rig.engine, &facts);
    assert_string_equal(facts.reason, "there is no GPU for this test");
    engine_rig_stop(&rig);
}

/* At ever later calls, until a run passes untouched. */
static void test_engine_gpu_failing_at_any_call_gives_the_same_answers(void **state)
{
    (void)state;
    unsigned before_answers = 0, while_answering = 0;
    const uint64_t least = least_vram();
    const unsigned density = opener.cuda ? CUDA_DENSITY : DENSITY;
    const unsigned at_least = opener.cuda ? CUDA_LEAST : LEAST;
    for (uint64_t nth = 1;; nth += 1 + nth / density) {
        opener.options = (struct fake_gpu_options){.memory = 256 * MIB,
                                                   .fault = {.nth = nth, .error = DEVICE_ERROR}};
        opener.opened = 0;
        const struct engine_config c = config_of(least + 3 * MIB, 0);
        run_on(&c);
        assert_int_equal(opener.opened, 1); /* it is not tried again */
        const struct engine_snapshot *s = snapshot();
        const bool untouched = s->degraded[0] == '\0';
        while_answering += !untouched && s->status.preemptions_total > 0;
        before_answers += !untouched && s->status.preemptions_total == 0;
        if (!untouched)
            assert_int_equal(s->status.vram_budget_bytes, 0);
        struct k_counts counts = {.calls = nth};
        if (untouched) /* or the engine did without what that call was for */
            k_ops(opener.device)->counts(opener.device, &counts);
        engine_rig_stop(&rig);
        if (counts.calls < nth)
            break;
    }
    assert_true(before_answers >= at_least && while_answering >= at_least);
}

/* Experts that come and go by command while the GPU fails: the answers are the same, and no command
 * is lost. */
static void test_engine_gpu_failing_beside_commands_answers_all(void **state)
{
    (void)state;
    static const uint64_t nths[] = {3, 40, 400};
    struct err e = {.code = ERR_OK};
    for (size_t k = 0; k < sizeof(nths) / sizeof(nths[0]); k++) {
        opener.options = (struct fake_gpu_options){.memory = 1024 * MIB};
        const struct engine_config c = config_of(0, 0);
        run_on(&c);
        engine_rig_forget(&rig);
        k_ops(opener.device)
            ->inject(opener.device, &(struct k_cuda_fault){.nth = nths[k],
                                                           .error = DEVICE_ERROR,
                                                           .forever = opener.cuda});
        for (uint32_t i = 0; i < 256; i++) {
            struct engine_command *m = alloc_zero(ALLOC_REQUEST, 1, sizeof(*m));
            assert_non_null(m);
            m->unload = i < 64 || i % 3 == 0;
            m->expert =
                (struct proto_load_expert){.expert_id = i % 64, .quant_type = PROTO_ANY_QUANT_TYPE};
            assert_int_equal(engine_submit_command(rig.engine, m, &e), ERR_OK);
        }
        ask();
        for (uint32_t n = 0; n < 256;) {
            struct engine_command *m = engine_next_command(rig.engine);
            if (m == NULL) {
                engine_rig_pump(&rig);
                continue;
            }
            n++;
            if (m->error.code != ERR_OK)
                fail_msg("expert %u: %s", m->expert.expert_id, m->error.text);
            assert_true(m->unload || m->tier != PROTO_TIER_SSD);
            alloc_free(m);
        }
        engine_rig_finish(&rig);
        check_answers();
        assert_true(snapshot()->degraded[0] != '\0');
        engine_rig_stop(&rig);
    }
}

/* What the GPU leaves has no room in RAM: nobody waits for a model that does not come. */
static void test_engine_gpu_fails_and_the_cpu_has_no_room_all_are_answered(void **state)
{
    (void)state;
    struct engine_facts facts;
    struct err e = {.code = ERR_OK};
    uint32_t n = 0;
    const struct engine_config c = config_of(least_vram() + 4 * MIB, 5 * MIB);
    opener.options = (struct fake_gpu_options){.memory = 256 * MIB};
    run_on(&c);
    engine_rig_forget(&rig);
    assert_true(snapshot()->status.experts_resident > 0);
    k_ops(opener.device)
        ->inject(opener.device, &(struct k_cuda_fault){.nth = 30, .error = DEVICE_ERROR});
    ask();
    for (; n < 256; n++) {
        struct engine_command *m = alloc_zero(ALLOC_REQUEST, 1, sizeof(*m));
        assert_non_null(m);
        m->expert =
            (struct proto_load_expert){.expert_id = n % 64, .quant_type = PROTO_ANY_QUANT_TYPE};
        if (engine_submit_command(rig.engine, m, &e) != ERR_OK) {
            alloc_free(m); /* the model went already */
            break;
        }
    }
    while (n > 0) {
        struct engine_command *m = engine_next_command(rig.engine);
        if (m == NULL) {
            engine_rig_pump(&rig);
            continue;
        }
        n--;
        assert_true(m->error.code == ERR_OK || m->error.code == ERR_BUSY);
        alloc_free(m);
    }
    engine_rig_finish(&rig);
    for (uint32_t r = 0; r < REQUESTS; r++)
        assert_true(rig.answers[r].failed);
    engine_get_facts(rig.engine, &facts);
    assert_int_equal(facts.state, PROTO_FAILED);
    assert_non_null(strstr(facts.reason, "memory.ram_budget"));
    assert_int_equal(snapshot()->status.experts_resident, 0);
    assert_int_equal(snapshot()->status.experts_in_vram, 0);
    assert_int_equal(snapshot()->status.ram_slots_used_bytes, 0);
    assert_int_equal(snapshot()->status.kv_pages_used, 0);
    engine_load_again(rig.engine); /* the GPU may be well again; there is nothing to lose */
    while (engine_rig_wait_loaded(&rig) != PROTO_SERVING)
        sched_yield();
    engine_rig_forget(&rig);
    ask();
    engine_rig_finish(&rig);
    check_answers();
    assert_non_null(strstr(snapshot()->backend, "fake+"));
    assert_int_equal(snapshot()->degraded[0], '\0');
    engine_rig_stop(&rig);
}

static void test_engine_gpu_lost_ends_the_process(void **state)
{
    (void)state;
    struct engine_facts facts;
    opener.options = (struct fake_gpu_options){.memory = 1024 * MIB};
    const struct engine_config c = config_of(0, 0);
    run_on(&c); /* so that the engine sleeps with all experts in islands */
    k_ops(opener.device)
        ->inject(opener.device, &(struct k_cuda_fault){.nth = 20, .error = LOST_ERROR});
    ask();
    do {
        engine_rig_pump(&rig);
        engine_get_facts(rig.engine, &facts);
    } while (!facts.gpu_lost);
    engine_rig_stop(&rig);
}

/* One prompt runs and one waits when the GPU fails; both are there before the model is. The CPU has
 * room for a shorter context. `longer` is the one that fills the GPU's; the other one is answered. */
static const struct engine_rig_answer *fail_with_long(uint32_t longer)
{
    static uint32_t prompt[4096];
    struct engine_facts facts;
    struct k_counts counts;
    opener.options = (struct fake_gpu_options){.memory = 1024 * MIB};
    struct engine_config c = config_of(0, 12 * MIB);
    c.kv_budget = 0;
    c.max_sequences = 1;
    engine_rig_start(&rig, &c);
    assert_int_equal(engine_rig_wait_loaded(&rig), PROTO_SERVING);
    engine_get_facts(rig.engine, &facts);
    k_ops(opener.device)->counts(opener.device, &counts);
    engine_rig_stop(&rig);
    opener.options.fault = (struct k_cuda_fault){.nth = counts.calls + 5, .error = DEVICE_ERROR};
    atomic_store(&opener.waits, true);
    engine_rig_start(&rig, &c);
    assert_true(facts.n_ctx <= 4096);
    for (uint32_t i = 0; i < facts.n_ctx; i++)
        prompt[i] = (7 + 31 * i) % 4000;
    for (uint32_t i = 0; i < 2; i++) {
        struct proto_run run = engine_rig_run(prompt, i == longer ? facts.n_ctx - 1 : PROMPT);
        run.max_new = 1;
        run.priority = i == 0 ? -100 : 0; /* it runs first */
        engine_rig_submit(&rig, &run);
    }
    atomic_store(&opener.waits, false);
    engine_rig_finish(&rig);
    assert_true(snapshot()->degraded[0] != '\0');
    assert_false(rig.answers[1 - longer].failed);
    assert_true(rig.answers[longer].failed);
    return &rig.answers[longer];
}

static void test_engine_gpu_fails_and_what_waits_is_too_long_for_the_cpu(void **state)
{
    (void)state;
    const struct engine_rig_answer *a = fail_with_long(1);
    assert_int_equal(a->error.code, ERR_ARGUMENT);
    assert_non_null(strstr(a->error.text, "the context is"));
    engine_rig_stop(&rig);
}

static void test_engine_gpu_fails_and_what_runs_is_too_long_for_the_cpu(void **state)
{
    (void)state;
    const struct engine_rig_answer *a = fail_with_long(0);
    assert_int_equal(a->error.code, ERR_DEVICE);
    assert_non_null(strstr(a->error.text, "memory.kv_budget"));
    engine_rig_stop(&rig);
}

/* Neither GPU nor model at first; both later. */
static void test_engine_gpu_that_opens_at_the_second_try_is_not_degraded(void **state)
{
    (void)state;
    char path[64];
    snprintf(path, sizeof(path), "/var/tmp/islet-gpu-XXXXXX");
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    unlink(path);
    opener.refusal = ERR_NOMEM;
    opener.options = (struct fake_gpu_options){.memory = 1024 * MIB};
    struct engine_config c = config_of(0, 0);
    c.model_path = path;
    engine_rig_start(&rig, &c);
    assert_int_equal(engine_rig_wait_loaded(&rig), PROTO_FAILED);
    opener.refusal = ERR_OK;
    assert_int_equal(symlink(TINY, path), 0);
    engine_load_again(rig.engine);
    while (engine_rig_wait_loaded(&rig) != PROTO_SERVING)
        sched_yield();
    assert_non_null(strstr(snapshot()->backend, "fake+"));
    assert_int_equal(snapshot()->degraded[0], '\0');
    engine_rig_stop(&rig);
    unlink(path);
}

static bool uses_gpu(void)
{
    return strstr(snapshot()->backend, "fake+") != NULL;
}

/* Until the engine computes with the GPU, or without. */
static void wait_gpu(bool wanted)
{
    for (int i = 0; i < 60000 && uses_gpu() != wanted; i++)
        usleep(1000);
    assert_int_equal(uses_gpu(), wanted);
}

static void fail_next_call(void)
{
    const struct k_cuda_fault fault = {.nth = 1, .error = DEVICE_ERROR};
    k_ops(opener.device)->inject(opener.device, &fault);
}

static void ask_again(void)
{
    engine_rig_forget(&rig);
    ask();
    engine_rig_finish(&rig);
    check_answers();
}

static void test_engine_gpu_that_failed_is_used_again_later(void **state)
{
    (void)state;
    struct engine_config c = config_of(0, 0);
    c.gpu_retry_ms = 20;
    opener.options.memory = 1024 * MIB;
    run_on(&c);
    assert_true(uses_gpu());
    for (unsigned failures = 1; failures <= 3; failures++) {
        struct proto_status before = snapshot()->status;
        fail_next_call();
        ask_again();
        const struct proto_status *after = &snapshot()->status;
        assert_true(before.expert_copies_total > 0);
        /* counters go on, whatever was given up */
#define COUNTER_counter(name) assert_true(after->name >= before.name);
#define COUNTER_gauge(name)
#define PROTO_STATUS(name, type, help) COUNTER_##type(name)
#include "proto_status.def"
#undef PROTO_STATUS
        if (failures < 3) {
            wait_gpu(true);
            assert_int_equal(snapshot()->degraded[0], '\0');
            ask_again();
        }
    }
    /* Three times are enough. */
    assert_false(uses_gpu());
    assert_true(snapshot()->degraded[0] != '\0');
    const unsigned opened = opener.opened;
    usleep(200000);
    assert_int_equal(opener.opened, opened);
    engine_rig_stop(&rig);
}

static void test_engine_gpu_that_comes_later_is_used(void **state)
{
    (void)state;
    struct engine_config c = config_of(0, 0);
    c.gpu_retry_ms = 20;
    opener.options.memory = 1024 * MIB;
    opener.refusal = ERR_DEVICE;
    run_on(&c);
    assert_false(uses_gpu());
    assert_non_null(strstr(snapshot()->degraded, "there is no GPU for this test"));
    while (opener.opened < 4) /* it is looked for */
        usleep(1000);
    ask_again();
    opener.refusal = ERR_OK;
    wait_gpu(true);
    assert_int_equal(snapshot()->degraded[0], '\0');
    ask_again();
    assert_true(snapshot()->status.expert_hits_vram_total > 0);
    engine_rig_stop(&rig);
}

/* One with too little memory is not loaded on for nothing. */
static void test_engine_gpu_without_room_is_only_looked_at(void **state)
{
    (void)state;
    struct engine_config c = config_of(0, 0);
    c.gpu_retry_ms = 10;
    opener.options.memory = 2 * MIB;
    run_on(&c);
    while (opener.opened < 6)
        usleep(1000);
    assert_false(uses_gpu());
    assert_int_equal(snapshot()->status.ssd_errors_total, 0);
    ask_again();
    engine_rig_stop(&rig);
}

static void test_engine_gpu_that_was_lost_too_often_rests(void **state)
{
    (void)state;
    struct engine_config c = config_of(0, 0);
    c.gpu_rest_ms = 300;
    opener.options.memory = 1024 * MIB;
    run_on(&c);
    assert_int_equal(opener.opened, 0);
    assert_non_null(strstr(snapshot()->degraded, "lost again and again"));
    wait_gpu(true);
    assert_int_equal(snapshot()->degraded[0], '\0');
    ask_again();
    engine_rig_stop(&rig);
}

/* One that was asked for, but fails in the load that should have brought it back. */
static void test_engine_gpu_on_that_fails_to_come_back_leaves_the_cpu(void **state)
{
    (void)state;
    struct engine_config c = config_of(0, 0);
    c.gpu = ENGINE_GPU_ON;
    c.gpu_rest_ms = 50;
    opener.options = (struct fake_gpu_options){.memory = 1024 * MIB,
                                               .fault = {.nth = 100, .error = DEVICE_ERROR}};
    run_on(&c);
    for (int i = 0; i < 60000 && strstr(snapshot()->degraded, "error 46 ") == NULL; i++)
        usleep(1000);
    assert_non_null(strstr(snapshot()->degraded, "error 46 "));
    assert_int_equal(snapshot()->status.state, PROTO_SERVING);
    ask_again();
    assert_false(uses_gpu());
    engine_rig_stop(&rig);
}

/* A GPU that fails while the model loads is told of with the error's number. */
static void test_engine_gpu_failing_in_a_load_says_which_error(void **state)
{
    (void)state;
    const struct engine_config c = config_of(0, 0);
    for (uint64_t nth = 60; nth <= 180; nth += 40) {
        opener.options = (struct fake_gpu_options){.memory = 1024 * MIB,
                                                   .fault = {.nth = nth, .error = DEVICE_ERROR}};
        run_on(&c);
        if (!uses_gpu())
            assert_non_null(strstr(snapshot()->degraded, "error 46 "));
        engine_rig_stop(&rig);
    }
}

/* A driver that takes its time is no hang. */
static void test_engine_gpu_that_opens_slowly_keeps_the_heartbeat(void **state)
{
    (void)state;
    const struct engine_config c = config_of(0, 0);
    atomic_store(&opener.waits, true);
    engine_rig_start(&rig, &c);
    while (opener.opened == 0)
        usleep(1000);
    uint64_t last = engine_heartbeat(rig.engine);
    for (int i = 0; i < 5; i++) {
        usleep(20000);
        const uint64_t now = engine_heartbeat(rig.engine);
        assert_true(now > last);
        last = now;
    }
    atomic_store(&opener.waits, false);
    ask();
    engine_rig_finish(&rig);
    check_answers();
    engine_rig_stop(&rig);
}

/* ---- the machine's own GPU ---- */

static void test_engine_gpu_survives_and_fails_at_any_call_gives_the_same_answers(void **state)
{
    opener.cuda = true;
    opener.file = FAKE;
    test_engine_gpu_failing_at_any_call_gives_the_same_answers(state);
}

/* Is there one? Then it is what opens from now on. */
static bool has_cuda(void)
{
    struct k_device *device = NULL;
    struct err e = {.code = ERR_OK};
    const enum err_code code = k_open_cuda(&(struct k_cuda_options){.ordinal = -1}, &device, &e);
    if (code == ERR_UNSUPPORTED) {
        print_message("skip: no CUDA device: %s\n", e.text);
        return false;
    }
    assert_int_equal(code, ERR_OK);
    k_close(device);
    opener.cuda = true;
    return true;
}

static void on_cuda(void **state, CMUnitTestFunction test)
{
    if (!has_cuda())
        skip();
    test(state);
}

static void test_engine_gpu_cuda_every_budget_gives_the_same_answers(void **state)
{
    on_cuda(state, test_engine_gpu_every_budget_gives_the_same_answers);
}

static void test_engine_gpu_cuda_auto_budget_holds_all_and_every_use_is_a_hit(void **state)
{
    on_cuda(state, test_engine_gpu_auto_budget_holds_all_and_every_use_is_a_hit);
}

static void test_engine_gpu_cuda_a_hundred_requests_of_other_experts_all_succeed(void **state)
{
    on_cuda(state, test_engine_gpu_a_hundred_requests_of_other_experts_all_succeed);
}

static void test_engine_gpu_cuda_failing_at_any_call_gives_the_same_answers(void **state)
{
    on_cuda(state, test_engine_gpu_failing_at_any_call_gives_the_same_answers);
}

static void test_engine_gpu_cuda_failing_beside_commands_answers_all(void **state)
{
    on_cuda(state, test_engine_gpu_failing_beside_commands_answers_all);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_engine_gpu_every_budget_gives_the_same_answers, reset),
        cmocka_unit_test_setup(test_engine_gpu_every_placement_gives_the_same_answers, reset),
        cmocka_unit_test_setup(test_engine_gpu_auto_budget_holds_all_and_every_use_is_a_hit, reset),
        cmocka_unit_test_setup(test_engine_gpu_a_hundred_requests_of_other_experts_all_succeed,
                               reset),
        cmocka_unit_test_setup(test_engine_gpu_none_is_not_degraded, reset),
        cmocka_unit_test_setup(test_engine_gpu_that_does_not_open_is_said, reset),
        cmocka_unit_test_setup(test_engine_gpu_too_little_memory_leaves_the_cpu, reset),
        cmocka_unit_test_setup(test_engine_gpu_on_does_without_no_gpu, reset),
        cmocka_unit_test_setup(test_engine_gpu_failing_at_any_call_gives_the_same_answers, reset),
        cmocka_unit_test_setup(test_engine_gpu_failing_beside_commands_answers_all, reset),
        cmocka_unit_test_setup(test_engine_gpu_fails_and_the_cpu_has_no_room_all_are_answered,
                               reset),
        cmocka_unit_test_setup(test_engine_gpu_lost_ends_the_process, reset),
        cmocka_unit_test_setup(test_engine_gpu_fails_and_what_waits_is_too_long_for_the_cpu, reset),
        cmocka_unit_test_setup(test_engine_gpu_fails_and_what_runs_is_too_long_for_the_cpu, reset),
        cmocka_unit_test_setup(test_engine_gpu_that_failed_is_used_again_later, reset),
        cmocka_unit_test_setup(test_engine_gpu_that_comes_later_is_used, reset),
        cmocka_unit_test_setup(test_engine_gpu_without_room_is_only_looked_at, reset),
        cmocka_unit_test_setup(test_engine_gpu_that_was_lost_too_often_rests, reset),
        cmocka_unit_test_setup(test_engine_gpu_on_that_fails_to_come_back_leaves_the_cpu, reset),
        cmocka_unit_test_setup(test_engine_gpu_failing_in_a_load_says_which_error, reset),
        cmocka_unit_test_setup(test_engine_gpu_that_opens_slowly_keeps_the_heartbeat, reset),
        cmocka_unit_test_setup(test_engine_gpu_that_opens_at_the_second_try_is_not_degraded, reset),
        cmocka_unit_test_setup(
            test_engine_gpu_survives_and_fails_at_any_call_gives_the_same_answers, reset),
        cmocka_unit_test_setup(test_engine_gpu_cuda_every_budget_gives_the_same_answers, reset),
        cmocka_unit_test_setup(test_engine_gpu_cuda_auto_budget_holds_all_and_every_use_is_a_hit,
                               reset),
        cmocka_unit_test_setup(test_engine_gpu_cuda_a_hundred_requests_of_other_experts_all_succeed,
                               reset),
        cmocka_unit_test_setup(test_engine_gpu_cuda_failing_at_any_call_gives_the_same_answers,
                               reset),
        cmocka_unit_test_setup(test_engine_gpu_cuda_failing_beside_commands_answers_all, reset),
    };
    return cmocka_run_group_tests(tests, set_expected, NULL);
}

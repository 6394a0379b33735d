/* Sixteen requests at once while experts come and go by command, requests and commands are
 * cancelled, the GPU's memory and heat change with every reading and calls of it fail: every answer
 * has the bits that it has alone, everybody is answered, and nothing is left over. With a stand-in
 * for the GPU, and with the machine's own where there is one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "engine_commands.h"
#include "engine_rig.h"
#include "fake_gpu.h"
#include "governor_sensors.h"
#include "rng.h"

#define TINY ISLET_TEST_DIR "/models/tinymoe-q4_k_m.gguf"
#define MIB  (UINT64_C(1) << 20)

#if defined(__SANITIZE_THREAD__) /* gcc: twenty times as slow */
enum {
    SEEDS = 3
};
#else
enum {
    SEEDS = 12
};
#endif

enum {
    REQUESTS = 16,
    PROMPT = 70,
    NEW = 14,
    OPEN = 300, /* commands at a time */
    BURST = 12,
    DEVICE_ERROR = 46
};

static struct engine_rig rig;
static uint32_t prompts[REQUESTS][PROMPT];
static struct proto_token expected[REQUESTS][NEW];
static uint32_t n_expected[REQUESTS];

/* ---- chance ---- */

static uint64_t seed, n_draws;

static uint32_t below(uint32_t n)
{
    return (uint32_t)(rng_draw(seed, n_draws++) % n);
}

static bool one_in(uint32_t n)
{
    return below(n) == 0;
}

/* ---- the GPU ---- */

static struct fake_gpu_options gpu_options;
static bool on_cuda; /* the machine's own, with the options' fault */

static enum err_code open_gpu(void *context, struct k_device **ret, struct err *e)
{
    (void)context;
    if (on_cuda)
        return k_open_cuda(&(struct k_cuda_options){.ordinal = -1, .fault = gpu_options.fault}, ret,
                           e);
    return fake_gpu_open(&gpu_options, ret, e);
}

static enum err_code sensors_open(const char *bus_id, void **ret, struct err *e)
{
    static _Atomic uint64_t n_readings;
    (void)bus_id;
    (void)e;
    *ret = &n_readings;
    return ERR_OK;
}

/* Heat and memory without sense; at times none is known, or more is free than there is. */
static void sensors_read(void *sensors, struct governor_readings *ret)
{
    const uint64_t x = rng_draw(77, atomic_fetch_add((_Atomic uint64_t *)sensors, 1));
    *ret = (struct governor_readings){.vram_free = x % (1100 * MIB),
                                      .vram_total = x >> 40 & 7 ? 1000 * MIB : 0,
                                      .temperature = 40 + (int32_t)(x >> 48) % 70,
                                      .power_mw = GOVERNOR_UNKNOWN,
                                      .utilization_percent = GOVERNOR_UNKNOWN};
}

static void sensors_close(void *sensors)
{
    (void)sensors;
}

static const struct governor_source sensors = {sensors_open, sensors_read, sensors_close};

/* ---- requests ---- */

static struct proto_run run_of(uint32_t r)
{
    struct proto_run run = engine_rig_run(prompts[r], 3 + r * 61 % (PROMPT - 3));
    run.max_new = NEW;
    run.seed = r * 77;
    run.temperature = r % 4 == 0 ? 0.0f : 1.0f;
    run.flags = r % 3 == 0 ? PROTO_RUN_LOGPROBS : 0;
    if (r % 4 == 2) {
        run.top_k = 40;
        run.top_p = 0.9f;
    }
    if (r % 5 == 3) {
        run.repeat = 1.1f;
        run.repeat_last_n = 64;
    }
    if (r == 7)
        run.flags |= PROTO_RUN_PROMPT_LOGPROBS;
    return run;
}

static struct engine_config config_of(uint64_t ram)
{
    struct engine_config c = engine_rig_config(TINY);
    c.ram_budget = ram;
    c.kv_budget = 2 * MIB;
    c.prefill_chunk = 16;
    c.max_sequences = REQUESTS;
    return c;
}

/* One by one, by the CPU, with all the memory there is. */
static int set_expected(void **state)
{
    (void)state;
    const struct engine_config c = config_of(0);
    for (uint32_t r = 0; r < REQUESTS; r++)
        for (uint32_t i = 0; i < PROMPT; i++)
            prompts[r][i] = (11 + 97 * r + 31 * i + i * i * (r % 3)) % 900;
    engine_rig_start(&rig, &c);
    for (uint32_t r = 0; r < REQUESTS; r++) {
        const struct proto_run run = run_of(r);
        engine_rig_submit(&rig, &run);
        engine_rig_finish(&rig);
        assert_false(rig.answers[r].failed);
        n_expected[r] = rig.answers[r].n_tokens;
        memcpy(expected[r], rig.answers[r].tokens, n_expected[r] * sizeof(struct proto_token));
    }
    engine_rig_stop(&rig);
    return 0;
}

/* ---- commands ---- */

static struct engine_command *commands[OPEN];
static uint32_t n_commands;

static void take_commands(void)
{
    struct engine_command *m;
    while ((m = engine_next_command(rig.engine)) != NULL) {
        uint32_t i = 0;
        while (i < n_commands && commands[i] != m)
            i++;
        assert_true(i < n_commands);
        commands[i] = commands[--n_commands];
        const enum err_code code = m->error.code; /* ids go one beyond the model's */
        if (code != ERR_OK && code != ERR_CANCELLED && code != ERR_ARGUMENT)
            fail_msg("seed %llu: expert %u: %s", (unsigned long long)seed, m->expert.expert_id,
                     m->error.text);
        alloc_free(m);
    }
}

static void give_commands(void)
{
    struct err e = {.code = ERR_OK};
    for (uint32_t n = below(BURST); n > 0 && n_commands < OPEN; n--) {
        struct engine_command *m = alloc_zero(ALLOC_REQUEST, 1, sizeof(*m));
        assert_non_null(m);
        m->unload = one_in(2);
        m->expert =
            (struct proto_load_expert){.expert_id = below(65), .quant_type = PROTO_ANY_QUANT_TYPE};
        if (engine_submit_command(rig.engine, m, &e) != ERR_OK)
            fail_msg("%s", e.text);
        commands[n_commands++] = m;
    }
    if (n_commands > 0 && one_in(5))
        engine_cancel_command(rig.engine, commands[below(n_commands)]);
}

/* ---- the storm ---- */

static struct engine_config weather(void)
{
    static const uint64_t rams[] = {0, 8 * MIB, 9 * MIB, 11 * MIB};
    struct engine_config c = config_of(rams[below(4)]);
    gpu_options = (struct fake_gpu_options){.memory = 1000 * MIB,
                                            .eager = one_in(2),
                                            .no_arrange = one_in(3),
                                            .no_pinning = one_in(4),
                                            .no_ranges = one_in(4)};
    if (one_in(3)) /* while it loads or later */
        gpu_options.fault = (struct k_cuda_fault){.nth = 1 + below(9000), .error = DEVICE_ERROR};
    if (one_in(4))
        return c;
    c.open_gpu = open_gpu;
    c.vram_budget = one_in(3) ? 0 : (10 + below(9)) * MIB;
    c.sensors = one_in(4) ? NULL : &sensors;
    c.governor_period_ms = 1;
    c.governor_warn = 60;
    c.governor_critical = one_in(4) ? 90 : 0;
    c.governor_temp_high = 80;
    c.governor_temp_low = 70;
    return c;
}

static bool all_ended(void)
{
    for (uint32_t i = 0; i < rig.n; i++)
        if (!rig.answers[i].ended)
            return false;
    return true;
}

static void shuffle(uint32_t order[REQUESTS])
{
    for (uint32_t i = 0; i < REQUESTS; i++) {
        const uint32_t k = below(i + 1);
        order[i] = order[k];
        order[k] = i;
    }
}

/* An answer that was cancelled is a beginning. */
static void check(uint32_t i, uint32_t r)
{
    const struct engine_rig_answer *a = &rig.answers[i];
    if (a->failed)
        fail_msg("seed %llu: request %u: %s", (unsigned long long)seed, r, a->error.text);
    if (a->done.finish != PROTO_FINISH_CANCELLED)
        assert_int_equal(a->n_tokens, n_expected[r]);
    for (uint32_t k = 0; k < a->n_tokens; k++) {
        if (a->tokens[k].id != expected[r][k].id)
            fail_msg("seed %llu: request %u: token %u is %u, not %u", (unsigned long long)seed, r,
                     k, a->tokens[k].id, expected[r][k].id);
        assert_memory_equal(&a->tokens[k].logprob, &expected[r][k].logprob, sizeof(float));
    }
}

static void storm(void)
{
    static struct engine_snapshot s;
    uint32_t order[REQUESTS], given = 0;
    const uint64_t live = alloc_live_blocks();
    const struct engine_config c = weather();
    engine_rig_start(&rig, &c);
    assert_int_equal(engine_rig_wait_loaded(&rig), PROTO_SERVING);
    shuffle(order);
    while (given < REQUESTS || !all_ended()) {
        if (given < REQUESTS && one_in(3)) {
            const struct proto_run run = run_of(order[given++]);
            engine_rig_submit(&rig, &run);
        }
        give_commands();
        if (given > 0 && one_in(60))
            engine_rig_cancel(&rig, below(given));
        if (!all_ended())
            engine_rig_pump(&rig);
        take_commands();
    }
    while (n_commands > 0) {
        engine_rig_pump(&rig);
        take_commands();
    }
    for (uint32_t i = 0; i < REQUESTS; i++)
        check(i, order[i]);
    engine_get_snapshot(rig.engine, &s);
    assert_int_equal(s.status.requests_done_total, REQUESTS);
    assert_true(s.status.ram_slots_used_bytes <= s.status.ram_slots_bytes);
    assert_true(s.status.vram_islands_used_bytes <= s.status.vram_islands_bytes);
    engine_rig_stop(&rig);
    assert_int_equal(alloc_live_blocks(), live);
}

static void storms(void)
{
    for (seed = 1; seed <= SEEDS; seed++) {
        n_draws = 0;
        storm();
    }
}

static void test_engine_storm_answers_have_the_bits_they_have_alone(void **state)
{
    (void)state;
    storms();
}

static void test_engine_storm_cuda_answers_have_the_bits_they_have_alone(void **state)
{
    struct k_device *device = NULL;
    struct err e = {.code = ERR_OK};
    (void)state;
    const enum err_code code = k_open_cuda(&(struct k_cuda_options){.ordinal = -1}, &device, &e);
    if (code == ERR_UNSUPPORTED) {
        print_message("skip: no CUDA device: %s\n", e.text);
        skip();
    }
    assert_int_equal(code, ERR_OK);
    k_close(device);
    on_cuda = true;
    storms();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_storm_answers_have_the_bits_they_have_alone),
        cmocka_unit_test(test_engine_storm_cuda_answers_have_the_bits_they_have_alone)};
    return cmocka_run_group_tests(tests, set_expected, NULL);
}

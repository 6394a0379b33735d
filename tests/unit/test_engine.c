#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "alloc.h"
#include "engine_commands.h"
#include "engine_rig.h"
#include "fault.h"
#include "gguf_file.h"
#include "kernels.h"

#define TINY   ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf"
#define RANDOM ISLET_TEST_DIR "/models/random/qwen3moe-f32.gguf"

static struct engine_rig rig;

/* n ids of the random model, the same for the same start. */
static void make_prompt(uint32_t *ids, uint32_t n, uint32_t start)
{
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (start + i * 37 + i * i) % 280;
}

static void start_random(uint32_t max_sequences)
{
    struct engine_config config = engine_rig_config(RANDOM);
    config.max_sequences = max_sequences;
    engine_rig_start(&rig, &config);
}

static struct engine_snapshot *snapshot(void)
{
    static struct engine_snapshot s;
    engine_get_snapshot(rig.engine, &s);
    return &s;
}

/* Waits for the snapshot that follows the last event. */
static void wait_idle(void)
{
    while (snapshot()->status.n_sequences > 0)
        sched_yield();
}

/* ---- answers ---- */

static void test_engine_chat_ends_by_its_stop_token(void **state)
{
    (void)state;
    static const uint32_t hello[] = {4094, 369, 198, 3092, 0, 4095};
    const struct engine_config config = engine_rig_config(TINY);
    engine_rig_start(&rig, &config);
    struct proto_run run = engine_rig_run(hello, 6);
    run.max_new = 200;
    engine_rig_submit(&rig, &run); /* while the model loads: it waits */
    engine_rig_finish(&rig);
    const struct engine_rig_answer *a = &rig.answers[0];
    assert_false(a->failed);
    assert_int_equal(a->done.finish, PROTO_FINISH_LENGTH);
    assert_int_equal(a->n_tokens, 200);
    run.n_end = 1;
    run.end[0] = a->tokens[7].id;
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    const struct engine_rig_answer *b = &rig.answers[1];
    assert_int_equal(b->done.finish, PROTO_FINISH_STOP);
    assert_true(b->n_tokens >= 1 && b->n_tokens <= 8);
    assert_int_equal(b->tokens[b->n_tokens - 1].id, run.end[0]);
    assert_int_equal(b->done.usage.prompt, 6);
    assert_int_equal(b->done.usage.generated, b->n_tokens);
    assert_int_equal(b->done.usage.cached, 5); /* the last prompt token is always computed */
    assert_int_equal(b->done.usage.hits_ram, (b->n_tokens) * 4ull * 4);
    assert_int_equal(b->done.usage.misses, 0);
    engine_rig_stop(&rig);
}

static void test_engine_prefill_only_keeps_the_prefix(void **state)
{
    (void)state;
    uint32_t ids[200];
    make_prompt(ids, 200, 3);
    start_random(2);
    struct proto_run run = engine_rig_run(ids, 150);
    run.max_new = 0;
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    assert_int_equal(rig.answers[0].done.finish, PROTO_FINISH_LENGTH);
    assert_int_equal(rig.answers[0].n_tokens, 0);
    assert_int_equal(rig.answers[0].progress.prefilled, 150);
    run = engine_rig_run(ids, 200);
    run.max_new = 4;
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    assert_int_equal(rig.answers[1].done.usage.cached, 150);
    assert_int_equal(rig.answers[1].progress.cached, 150);
    run.flags = PROTO_RUN_NO_CACHE;
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    assert_int_equal(rig.answers[2].done.usage.cached, 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(rig.answers[2].tokens[i].id, rig.answers[1].tokens[i].id);
    engine_rig_stop(&rig);
}

static void test_engine_equal_prompts_wait_for_the_first(void **state)
{
    (void)state;
    uint32_t ids[256];
    make_prompt(ids, 256, 9);
    start_random(4);
    engine_rig_wait_loaded(&rig);
    for (int i = 0; i < 4; i++) {
        const struct proto_run run = engine_rig_run(ids, 256);
        engine_rig_submit(&rig, &run);
    }
    engine_rig_finish(&rig);
    wait_idle();
    assert_true(snapshot()->status.cached_tokens_total >= 3 * 192);
    for (int i = 1; i < 4; i++)
        assert_memory_equal(rig.answers[i].tokens, rig.answers[0].tokens,
                            32 * sizeof(struct proto_token));
    engine_rig_stop(&rig);
}

static void test_engine_resumed_answer_goes_on_bit_for_bit(void **state)
{
    (void)state;
    uint32_t ids[128];
    make_prompt(ids, 40, 77);
    start_random(2);
    struct proto_run run = engine_rig_run(ids, 40);
    run.temperature = 1.1f;
    run.seed = 42;
    run.presence = 0.3f;
    run.frequency = 0.2f;
    run.repeat = 1.1f;
    run.repeat_last_n = 16;
    run.flags = PROTO_RUN_LOGPROBS;
    run.n_top = 4;
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    for (uint32_t cut = 1; cut <= 32; cut += 5) {
        const uint32_t known = cut < 32 ? cut : 32;
        for (uint32_t i = 0; i < known; i++)
            ids[40 + i] = rig.answers[0].tokens[i].id;
        run.tokens = ids;
        run.n_tokens = 40 + known;
        run.first_index = known;
        const uint32_t k = engine_rig_submit(&rig, &run);
        engine_rig_finish(&rig);
        assert_int_equal(rig.answers[k].n_tokens, 32 - known);
        assert_int_equal(rig.answers[k].done.usage.generated, 32 - known);
        assert_memory_equal(rig.answers[k].tokens, rig.answers[0].tokens + known,
                            (32 - known) * sizeof(struct proto_token));
    }
    engine_rig_stop(&rig);
}

static void test_engine_complete_answer_resumed_ends_at_once(void **state)
{
    (void)state;
    uint32_t ids[40];
    make_prompt(ids, 40, 5);
    start_random(1);
    struct proto_run run = engine_rig_run(ids, 40);
    run.n_prompt = 30;
    run.first_index = 10;
    run.n_end = 1;
    run.end[0] = ids[39];
    engine_rig_submit(&rig, &run);
    run.n_end = 0;
    run.max_new = 10;
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    assert_int_equal(rig.answers[0].done.finish, PROTO_FINISH_STOP);
    assert_int_equal(rig.answers[1].done.finish, PROTO_FINISH_LENGTH);
    assert_int_equal(rig.answers[0].n_tokens + rig.answers[1].n_tokens, 0);
    wait_idle();
    assert_int_equal(snapshot()->status.rows_total, 0);
    engine_rig_stop(&rig);
}

static void test_engine_prompt_logprobs_come_for_every_prompt_token(void **state)
{
    (void)state;
    uint32_t ids[100];
    make_prompt(ids, 100, 11);
    struct proto_token first[100];
    static const uint32_t chunks[] = {512, 7};
    for (int c = 0; c < 2; c++) {
        struct engine_config config = engine_rig_config(RANDOM);
        config.prefill_chunk = chunks[c];
        engine_rig_start(&rig, &config);
        struct proto_run run = engine_rig_run(ids, 100);
        run.flags = PROTO_RUN_PROMPT_LOGPROBS | PROTO_RUN_LOGPROBS;
        run.n_top = 2;
        engine_rig_submit(&rig, &run);
        engine_rig_submit(&rig, &run); /* takes its turn */
        engine_rig_finish(&rig);
        for (int k = 0; k < 2; k++) {
            const struct engine_rig_answer *a = &rig.answers[k];
            assert_int_equal(a->n_prompt, 100);
            assert_int_equal(a->done.usage.cached, 0);
            assert_true(isnan(a->prompt[0].logprob) && a->prompt[0].n_top == 0);
            for (uint32_t i = 1; i < 100; i++) {
                assert_int_equal(a->prompt[i].id, ids[i]);
                assert_int_equal(a->prompt[i].n_top, 2);
                assert_true(a->prompt[i].logprob <= a->prompt[i].top[0].logprob);
            }
            if (c == 0 && k == 0)
                memcpy(first, a->prompt, sizeof(first));
            assert_memory_equal(a->prompt, first, sizeof(first));
        }
        engine_rig_stop(&rig);
    }
}

static void test_engine_answer_that_fills_the_context_says_so(void **state)
{
    (void)state;
    uint32_t ids[64];
    make_prompt(ids, 64, 1);
    struct engine_config config = engine_rig_config(RANDOM);
    config.context = 64;
    engine_rig_start(&rig, &config);
    engine_rig_wait_loaded(&rig);
    struct proto_run run = engine_rig_run(ids, 60);
    run.max_new = PROTO_MAX_NEW_ALL;
    engine_rig_submit(&rig, &run);
    run.n_tokens = run.n_prompt = 63;
    engine_rig_submit(&rig, &run);
    run.n_tokens = run.n_prompt = 64;
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    assert_int_equal(rig.answers[0].done.finish, PROTO_FINISH_CONTEXT);
    assert_int_equal(rig.answers[0].n_tokens, 4);
    assert_int_equal(rig.answers[1].done.finish, PROTO_FINISH_CONTEXT);
    assert_int_equal(rig.answers[1].n_tokens, 1);
    assert_int_equal(rig.answers[2].error.code, ERR_ARGUMENT);
    assert_non_null(strstr(rig.answers[2].error.text, "64"));
    engine_rig_stop(&rig);
}

static void test_engine_eight_bit_pages_give_the_same_whatever_the_chunk(void **state)
{
    (void)state;
    uint32_t ids[170];
    struct proto_token first[32];
    make_prompt(ids, 170, 21);
    static const uint32_t chunks[] = {512, 9};
    for (int c = 0; c < 2; c++) {
        struct engine_config config = engine_rig_config(RANDOM);
        config.kv_type = K_KV_Q8_0;
        config.prefill_chunk = chunks[c];
        engine_rig_start(&rig, &config);
        struct proto_run run = engine_rig_run(ids, 170);
        run.flags = PROTO_RUN_LOGPROBS;
        engine_rig_submit(&rig, &run);
        engine_rig_finish(&rig);
        engine_rig_submit(&rig, &run);
        engine_rig_finish(&rig);
        assert_int_equal(rig.answers[1].done.usage.cached, 169);
        if (c == 0)
            memcpy(first, rig.answers[0].tokens, sizeof(first));
        for (int k = 0; k < 2; k++)
            assert_memory_equal(rig.answers[k].tokens, first, sizeof(first));
        engine_rig_stop(&rig);
    }
}

/* ---- ends ---- */

static void test_engine_cancel_ends_waiting_and_running(void **state)
{
    (void)state;
    uint32_t ids[8];
    make_prompt(ids, 8, 2);
    start_random(1);
    struct proto_run run = engine_rig_run(ids, 8);
    run.max_new = 400;
    engine_rig_submit(&rig, &run);
    engine_rig_submit(&rig, &run);
    engine_rig_submit(&rig, &run);
    while (rig.answers[0].n_tokens == 0)
        engine_rig_pump(&rig);
    engine_rig_cancel(&rig, 1);
    while (!rig.answers[1].ended)
        engine_rig_pump(&rig);
    assert_int_equal(rig.answers[1].done.finish, PROTO_FINISH_CANCELLED);
    assert_int_equal(rig.answers[1].n_tokens, 0);
    engine_rig_cancel(&rig, 0);
    engine_rig_cancel(&rig, 0);
    engine_cancel(rig.engine, 12345);
    engine_rig_finish(&rig);
    assert_int_equal(rig.answers[0].done.finish, PROTO_FINISH_CANCELLED);
    assert_int_equal(rig.answers[0].done.usage.generated, rig.answers[0].n_tokens);
    assert_int_equal(rig.answers[2].done.finish, PROTO_FINISH_LENGTH);
    wait_idle();
    assert_int_equal(snapshot()->status.requests_cancelled_total, 2);
    assert_int_equal(snapshot()->status.kv_pages_used, 0);
    engine_rig_stop(&rig);
}

/* Prompts with common beginnings, answers long enough to run out of pages, and some cancelled. */
static struct proto_run random_life_run(uint32_t *ids, uint32_t kind)
{
    const uint32_t n = 20 + kind * 13;
    make_prompt(ids, n, 50 + kind % 3);
    struct proto_run run = engine_rig_run(ids, n);
    run.max_new = 30 + kind * 11;
    run.temperature = kind % 2 == 0 ? 0.0f : 0.9f;
    run.seed = kind;
    run.flags = PROTO_RUN_LOGPROBS;
    if (kind == 7)
        run.flags |= PROTO_RUN_PROMPT_LOGPROBS;
    run.priority = (int8_t)(kind % 3);
    return run;
}

static void test_engine_random_life_in_few_pages_changes_no_bit(void **state)
{
    (void)state;
    enum {
        KINDS = 10,
        MOST = 150
    };
    static struct proto_token expected[KINDS][MOST];
    uint32_t ids[256], n_expected[KINDS], x = 1;
    struct engine_config config = engine_rig_config(RANDOM);
    config.context = 256;
    engine_rig_start(&rig, &config);
    for (uint32_t k = 0; k < KINDS; k++) {
        const struct proto_run run = random_life_run(ids, k);
        engine_rig_submit(&rig, &run);
        engine_rig_finish(&rig);
        n_expected[k] = rig.answers[k].n_tokens;
        memcpy(expected[k], rig.answers[k].tokens, n_expected[k] * sizeof(expected[k][0]));
    }
    wait_idle();
    config.kv_budget = 7 * snapshot()->status.kv_page_bytes;
    engine_rig_stop(&rig);
    config.max_sequences = 6;
    config.prefill_chunk = 48;
    engine_rig_start(&rig, &config);
    for (uint32_t i = 0; i < ENGINE_RIG_MAX; i++) {
        x = x * 1664525 + 1013904223;
        const struct proto_run run = random_life_run(ids, (x >> 16) % KINDS);
        const uint32_t k = engine_rig_submit(&rig, &run);
        assert_false(rig.answers[k].failed);
        if (i % 8 == 7)
            engine_rig_cancel(&rig, (x >> 8) % (i + 1));
        if (i % 5 == 4)
            engine_rig_pump(&rig);
    }
    engine_rig_finish(&rig);
    x = 1;
    for (uint32_t i = 0; i < ENGINE_RIG_MAX; i++) {
        x = x * 1664525 + 1013904223;
        const uint32_t kind = (x >> 16) % KINDS;
        const struct engine_rig_answer *a = &rig.answers[i];
        assert_false(a->failed);
        if (a->done.finish != PROTO_FINISH_CANCELLED)
            assert_int_equal(a->n_tokens, n_expected[kind]);
        assert_memory_equal(a->tokens, expected[kind], a->n_tokens * sizeof(a->tokens[0]));
    }
    wait_idle();
    const struct proto_status *s = &snapshot()->status;
    assert_true(s->preemptions_total > 0);
    assert_true(s->requests_cancelled_total > 0);
    assert_int_equal(s->kv_pages_used, 0);
    assert_int_equal(s->requests_done_total, ENGINE_RIG_MAX);
    assert_int_equal(s->requests_failed_total, 0);
    engine_rig_stop(&rig);
}

static void test_engine_wrong_requests_are_refused_with_reason(void **state)
{
    (void)state;
    uint32_t ids[8];
    make_prompt(ids, 8, 2);
    start_random(1);
    engine_rig_wait_loaded(&rig);
    const struct proto_bias high = {.id = 288, .value = 1}, not_a_number = {.id = 1, .value = NAN};
    for (int i = 0; i < 9; i++) {
        struct proto_run run = engine_rig_run(ids, 8);
        run.n_tokens = i == 0 ? 0 : 8;
        run.n_prompt = i == 0 || i == 1 ? 0 : i == 2 ? 9 : 8;
        run.first_index = i == 3 ? 1 : 0;
        run.top_p = i == 4 ? 1.5f : 1.0f;
        run.repeat = i == 5 ? 0.0f : 1.0f;
        run.temperature = i == 6 ? NAN : 0.0f;
        run.n_bias = i >= 7;
        run.bias = i == 7 ? &high : &not_a_number;
        const uint32_t k = engine_rig_submit(&rig, &run);
        assert_true(rig.answers[k].failed);
        assert_int_equal(rig.answers[k].error.code, ERR_ARGUMENT);
        assert_true(strlen(rig.answers[k].error.text) > 10);
    }
    ids[3] = 288;
    struct proto_run run = engine_rig_run(ids, 8);
    engine_rig_submit(&rig, &run);
    assert_non_null(strstr(rig.answers[9].error.text, "288"));
    engine_rig_stop(&rig);
}

static void test_engine_all_tokens_forbidden_is_an_argument_error(void **state)
{
    (void)state;
    uint32_t ids[8];
    struct proto_bias bias[288];
    make_prompt(ids, 8, 2);
    for (uint32_t i = 0; i < 288; i++)
        bias[i] = (struct proto_bias){.id = i, .value = -INFINITY};
    start_random(1);
    struct proto_run run = engine_rig_run(ids, 8);
    run.bias = bias;
    run.n_bias = 288;
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    assert_true(rig.answers[0].failed);
    assert_int_equal(rig.answers[0].error.code, ERR_ARGUMENT);
    engine_rig_stop(&rig);
}

static void test_engine_draining_finishes_what_runs_and_refuses_more(void **state)
{
    (void)state;
    uint32_t ids[8];
    make_prompt(ids, 8, 2);
    start_random(1);
    const struct proto_run run = engine_rig_run(ids, 8);
    engine_rig_submit(&rig, &run);
    engine_drain(rig.engine);
    engine_rig_submit(&rig, &run);
    assert_int_equal(rig.answers[1].error.code, ERR_BUSY);
    engine_rig_finish(&rig);
    assert_int_equal(rig.answers[0].n_tokens, 32);
    assert_int_equal(engine_rig_wait_loaded(&rig), PROTO_DRAINING);
    engine_rig_stop(&rig);
}

/* ---- commands about experts ---- */

static enum err_code command(bool unload, uint32_t expert, struct err *e)
{
    struct engine_command *m = alloc_zero(ALLOC_REQUEST, 1, sizeof(*m));
    assert_non_null(m);
    m->unload = unload;
    m->expert = (struct proto_load_expert){.expert_id = expert, .quant_type = PROTO_ANY_QUANT_TYPE};
    const enum err_code code = engine_submit_command(rig.engine, m, e);
    if (code != ERR_OK)
        alloc_free(m);
    return code;
}

/* Waits for n of them to come back; gives the last one's answer. */
static struct engine_command commanded(uint32_t n)
{
    struct engine_command last = {.slot = 0};
    while (n > 0) {
        struct engine_command *m = engine_next_command(rig.engine);
        if (m == NULL) {
            engine_rig_pump(&rig);
            continue;
        }
        n--;
        memcpy(&last, m, sizeof(last));
        alloc_free(m);
    }
    return last;
}

static void test_engine_commands_while_loading_wait_and_show_in_the_snapshot(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    const struct engine_config config = engine_rig_config(TINY);
    engine_rig_start(&rig, &config);
    assert_int_equal(command(true, 7, &e), ERR_OK);
    struct engine_command m = commanded(1);
    assert_int_equal(m.error.code, ERR_OK);
    assert_int_equal(m.tier, PROTO_TIER_SSD);
    assert_int_equal(snapshot()->status.experts_resident, 63);
    assert_int_equal(command(false, 7, &e), ERR_OK); /* while the engine sleeps */
    m = commanded(1);
    assert_int_equal(m.error.code, ERR_OK);
    assert_int_equal(m.tier, PROTO_TIER_RAM);
    assert_int_equal(snapshot()->status.experts_resident, 64);
    engine_rig_stop(&rig);
}

static void test_engine_commands_to_no_model_or_a_draining_one_are_busy(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    const uint64_t before = alloc_live_blocks();
    struct engine_config config = engine_rig_config("/nonexistent/model.gguf");
    engine_rig_start(&rig, &config);
    assert_int_equal(engine_rig_wait_loaded(&rig), PROTO_FAILED);
    assert_int_equal(command(false, 1, &e), ERR_BUSY);
    assert_non_null(strstr(e.text, "model.gguf"));
    engine_rig_stop(&rig);
    config.model_path = TINY;
    engine_rig_start(&rig, &config);
    e.code = ERR_OK;
    assert_int_equal(command(false, 1, &e), ERR_OK);
    engine_drain(rig.engine); /* before the model is there */
    assert_int_equal(command(false, 2, &e), ERR_BUSY);
    assert_non_null(strstr(e.text, "draining"));
    assert_int_equal(commanded(1).error.code, ERR_BUSY);
    engine_rig_stop(&rig);
    assert_int_equal(alloc_live_blocks(), before);
}

/* A RAM that does not hold them all: loads find room or none, and no answer changes. */
static void test_engine_commands_beside_answers_change_none(void **state)
{
    (void)state;
    uint32_t ids[64], n = 0;
    struct err e = {.code = ERR_OK};
    make_prompt(ids, 64, 5);
    struct engine_config config = engine_rig_config(TINY);
    config.ram_budget = 16 << 20;
    config.kv_budget = 2 << 20;
    config.prefill_chunk = 32;
    config.max_sequences = 2;
    engine_rig_start(&rig, &config);
    for (uint32_t k = 0; k < 4; k++) { /* two alone, two beside commands */
        const struct proto_run run = engine_rig_run(ids + k % 2, 60);
        engine_rig_submit(&rig, &run);
        for (uint32_t i = 0; i < 300 && k >= 2; i++, n++)
            assert_int_equal(command(i % 3 == 0, i * (k + 5) % 64, &e), ERR_OK);
        if (k == 1)
            engine_rig_finish(&rig);
    }
    engine_rig_finish(&rig);
    assert_int_equal(commanded(n).error.code, ERR_OK);
    for (uint32_t k = 0; k < 2; k++)
        assert_memory_equal(rig.answers[k].tokens, rig.answers[k + 2].tokens,
                            32 * sizeof(struct proto_token));
    const struct proto_status *s = &snapshot()->status;
    assert_in_range(s->experts_resident, 1, 63);
    assert_true(s->ram_slots_used_bytes <= s->ram_slots_bytes);
    assert_true(s->ram_slots_bytes <= config.ram_budget);
    engine_rig_stop(&rig);
}

static void test_engine_commands_open_at_a_stop_are_freed(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    const uint64_t before = alloc_live_blocks();
    const struct engine_config config = engine_rig_config(TINY);
    engine_rig_start(&rig, &config);
    for (uint32_t i = 0; i < 200; i++)
        assert_int_equal(command(i % 2 == 0, i % 64, &e), ERR_OK);
    (void)commanded(1);
    engine_rig_stop(&rig);
    assert_int_equal(alloc_live_blocks(), before);
}

static void test_engine_too_many_waiting_are_refused_busy(void **state)
{
    (void)state;
    uint32_t ids[8];
    make_prompt(ids, 8, 2);
    struct engine_config config = engine_rig_config(RANDOM);
    config.max_sequences = 1;
    config.max_waiting = 2;
    engine_rig_start(&rig, &config);
    const struct proto_run run = engine_rig_run(ids, 8);
    for (int i = 0; i < 4; i++)
        engine_rig_submit(&rig, &run);
    assert_true(rig.answers[3].failed);
    assert_int_equal(rig.answers[3].error.code, ERR_BUSY);
    engine_rig_finish(&rig);
    assert_int_equal(rig.answers[2].n_tokens, 32);
    engine_rig_stop(&rig);
}

static void test_engine_slow_loop_loses_nothing(void **state)
{
    (void)state;
    uint32_t ids[8];
    make_prompt(ids, 8, 2);
    start_random(1);
    engine_rig_wait_loaded(&rig);
    struct proto_run run = engine_rig_run(ids, 8);
    run.max_new = 300; /* more than there are events */
    engine_rig_submit(&rig, &run);
    uint64_t seen = 0, turns = 0;
    while (turns < 3) { /* until the engine turns without a step, for want of events */
        const uint64_t heartbeat = engine_heartbeat(rig.engine);
        const uint64_t steps = snapshot()->status.steps_total;
        turns = steps > 8 && steps == seen ? turns + 1 : 0;
        seen = steps;
        while (engine_heartbeat(rig.engine) == heartbeat)
            sched_yield();
    }
    assert_true(seen < 300);
    engine_rig_finish(&rig);
    assert_int_equal(rig.answers[0].n_tokens, 300);
    engine_rig_stop(&rig);
}

/* ---- failures ---- */

static void test_engine_failed_device_ends_the_step_and_goes_on(void **state)
{
    (void)state;
    uint32_t ids[8];
    make_prompt(ids, 8, 2);
    start_random(1);
    engine_rig_wait_loaded(&rig);
    const struct proto_run run = engine_rig_run(ids, 8);
    fault_arm(FAULT_ENGINE_LAYER, 1, false);
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    fault_arm(FAULT_ENGINE_LAYER, 0, false);
    assert_int_equal(rig.answers[0].error.code, ERR_DEVICE);
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    assert_int_equal(rig.answers[1].n_tokens, 32);
    engine_rig_stop(&rig);
}

/* Copies the model at `from` to `path` with `value` at element `at` of a tensor. */
static void write_changed(const char *from, const char *path, const char *tensor, uint64_t at,
                          float value)
{
    static char data[1 << 22];
    struct gguf_file *f = NULL;
    struct err e = {.code = ERR_OK};
    assert_int_equal(gguf_file_open(from, &f, &e), ERR_OK);
    const uint64_t offset = gguf_file_tensor(f, tensor)->offset + at * sizeof(value);
    const size_t n = (size_t)f->file_sizes[0];
    assert_true(n <= sizeof(data));
    assert_int_equal(gguf_file_read(f, 0, 0, data, n, &e), ERR_OK);
    gguf_file_close(f);
    memcpy(data + offset, &value, sizeof(value));
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(data, 1, n, out), n);
    fclose(out);
}

static void test_engine_damaged_tensor_is_named_and_a_new_file_loads(void **state)
{
    (void)state;
    char path[] = "/tmp/islet-test-engine-XXXXXX";
    struct engine_facts facts;
    uint32_t ids[8];
    make_prompt(ids, 8, 2);
    close(mkstemp(path));
    write_changed(RANDOM, path, "blk.1.ffn_down_exps.weight", 12345, INFINITY);
    const struct engine_config config = engine_rig_config(path);
    engine_rig_start(&rig, &config);
    const struct proto_run run = engine_rig_run(ids, 8);
    assert_int_equal(engine_rig_wait_loaded(&rig), PROTO_FAILED);
    engine_get_facts(rig.engine, &facts);
    assert_non_null(strstr(facts.reason, "blk.1.ffn_down_exps.weight"));
    engine_rig_submit(&rig, &run);
    assert_int_equal(rig.answers[0].error.code, ERR_BUSY);
    write_changed(RANDOM, path, "blk.1.ffn_down_exps.weight", 12345, 0.5f);
    engine_load_again(rig.engine);
    do {
        engine_rig_pump(&rig);
        engine_get_facts(rig.engine, &facts);
    } while (facts.state != PROTO_SERVING);
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    assert_int_equal(rig.answers[1].n_tokens, 32);
    engine_rig_stop(&rig);
    unlink(path);
}

static void test_engine_row_that_is_not_finite_ends_its_request_alone(void **state)
{
    (void)state;
    char path[] = "/tmp/islet-test-engine-XXXXXX";
    close(mkstemp(path));
    /* Input 7 of the router is 8 after the norm for token 285 alone: 8 * 6e37 is no f32. */
    write_changed(RANDOM, path, "token_embd.weight", 285ull * 64 + 7, 1e10f);
    write_changed(path, path, "blk.0.ffn_gate_inp.weight", 7, 6e37f);
    uint32_t ids[100];
    make_prompt(ids, 100, 2);
    const struct engine_config config = engine_rig_config(path);
    engine_rig_start(&rig, &config);
    struct proto_run run = engine_rig_run(ids, 100);
    engine_rig_submit(&rig, &run);
    ids[80] = 285;
    engine_rig_submit(&rig, &run);
    ids[80] = 284;
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    assert_int_equal(rig.answers[0].n_tokens, 32);
    assert_int_equal(rig.answers[1].error.code, ERR_FORMAT);
    assert_non_null(strstr(rig.answers[1].error.text, "position 80 (token 285)"));
    assert_int_equal(rig.answers[2].n_tokens, 32);
    engine_rig_stop(&rig);
    unlink(path);
}

static void test_engine_missing_file_and_stop_while_loading_are_clean(void **state)
{
    (void)state;
    const uint64_t before = alloc_live_blocks();
    struct engine_facts facts;
    struct engine_config config = engine_rig_config("/nonexistent/model.gguf");
    engine_rig_start(&rig, &config);
    assert_int_equal(engine_rig_wait_loaded(&rig), PROTO_FAILED);
    engine_get_facts(rig.engine, &facts);
    assert_non_null(strstr(facts.reason, "model.gguf"));
    engine_rig_stop(&rig);
    config.model_path = TINY;
    engine_rig_start(&rig, &config);
    engine_rig_stop(&rig);
    engine_stop(NULL);
    assert_int_equal(alloc_live_blocks(), before);
}

static void test_engine_each_failed_allocation_is_a_failed_load(void **state)
{
    (void)state;
    const uint64_t before = alloc_live_blocks();
    const struct engine_config config = engine_rig_config(RANDOM);
    bool served = false;
    for (uint64_t nth = 1; nth < 400 && !served; nth += 3) {
        engine_rig_start(&rig, &config);
        alloc_fail_at(nth, 0); /* one of those of the load, which runs by now */
        served = engine_rig_wait_loaded(&rig) == PROTO_SERVING;
        alloc_fail_at(0, 0);
        engine_rig_stop(&rig);
        assert_int_equal(alloc_live_blocks(), before);
        served = served && nth > 100;
    }
    assert_true(served);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_chat_ends_by_its_stop_token),
        cmocka_unit_test(test_engine_prefill_only_keeps_the_prefix),
        cmocka_unit_test(test_engine_equal_prompts_wait_for_the_first),
        cmocka_unit_test(test_engine_resumed_answer_goes_on_bit_for_bit),
        cmocka_unit_test(test_engine_complete_answer_resumed_ends_at_once),
        cmocka_unit_test(test_engine_prompt_logprobs_come_for_every_prompt_token),
        cmocka_unit_test(test_engine_answer_that_fills_the_context_says_so),
        cmocka_unit_test(test_engine_eight_bit_pages_give_the_same_whatever_the_chunk),
        cmocka_unit_test(test_engine_cancel_ends_waiting_and_running),
        cmocka_unit_test(test_engine_random_life_in_few_pages_changes_no_bit),
        cmocka_unit_test(test_engine_wrong_requests_are_refused_with_reason),
        cmocka_unit_test(test_engine_all_tokens_forbidden_is_an_argument_error),
        cmocka_unit_test(test_engine_draining_finishes_what_runs_and_refuses_more),
        cmocka_unit_test(test_engine_commands_while_loading_wait_and_show_in_the_snapshot),
        cmocka_unit_test(test_engine_commands_to_no_model_or_a_draining_one_are_busy),
        cmocka_unit_test(test_engine_commands_beside_answers_change_none),
        cmocka_unit_test(test_engine_commands_open_at_a_stop_are_freed),
        cmocka_unit_test(test_engine_too_many_waiting_are_refused_busy),
        cmocka_unit_test(test_engine_slow_loop_loses_nothing),
        cmocka_unit_test(test_engine_failed_device_ends_the_step_and_goes_on),
        cmocka_unit_test(test_engine_damaged_tensor_is_named_and_a_new_file_loads),
        cmocka_unit_test(test_engine_row_that_is_not_finite_ends_its_request_alone),
        cmocka_unit_test(test_engine_missing_file_and_stop_while_loading_are_clean),
        cmocka_unit_test(test_engine_each_failed_allocation_is_a_failed_load),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* What a request gets back, through the whole engine with the shipped model: endings, resumption,
 * log-probabilities of prompts, refusals. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "engine_rig.h"

enum {
    ANSWER = 14
};

/* "Hello!" in the model's chat template, and the id that ends an answer. */
static const uint32_t hello[] = {4094, 266, 198, 740, 0, 4095, 198, 4094, 265, 198};
enum {
    N_HELLO = sizeof(hello) / sizeof(hello[0]),
    END = 4095
};

static const char *model(void)
{
    return ISLET_TEST_DIR "/models/tinymoe-q4_k_m.gguf";
}

static int start(void **state)
{
    struct engine_rig *rig = alloc_zero(ALLOC_MISC, 1, sizeof(*rig));
    if (rig == NULL)
        return -1;
    const struct engine_config config = engine_rig_config(model());
    engine_rig_start(rig, &config);
    *state = rig;
    return engine_rig_wait_loaded(rig) == PROTO_SERVING ? 0 : -1;
}

static int stop(void **state)
{
    engine_rig_stop(*state);
    alloc_free(*state);
    return 0;
}

static const struct engine_rig_answer *ask(struct engine_rig *rig, const struct proto_run *run)
{
    if (rig->n == ENGINE_RIG_MAX)
        engine_rig_forget(rig);
    const uint32_t i = engine_rig_submit(rig, run);
    engine_rig_finish(rig);
    return &rig->answers[i];
}

static struct proto_run hello_run(uint32_t max_new)
{
    struct proto_run run = engine_rig_run(hello, N_HELLO);
    run.max_new = max_new;
    return run;
}

static void test_engine_answer_end_token_stops_and_is_sent(void **state)
{
    struct proto_run run = hello_run(100);
    run.n_end = 1;
    run.end[0] = END;
    const struct engine_rig_answer *a = ask(*state, &run);
    assert_false(a->failed);
    assert_int_equal(a->done.finish, PROTO_FINISH_STOP);
    assert_int_equal(a->n_tokens, 9);
    assert_int_equal(a->tokens[8].id, END);
    assert_int_equal(a->done.usage.prompt, N_HELLO);
    assert_int_equal(a->done.usage.generated, 9);
}

static void test_engine_answer_max_new_ends_by_length(void **state)
{
    struct proto_run run = hello_run(3);
    const struct engine_rig_answer *a = ask(*state, &run);
    assert_int_equal(a->done.finish, PROTO_FINISH_LENGTH);
    assert_int_equal(a->n_tokens, 3);
}

static void test_engine_answer_max_new_zero_only_prefills(void **state)
{
    uint32_t prompt[300];
    for (uint32_t i = 0; i < 300; i++)
        prompt[i] = 300 + i * 7;
    struct proto_run run = engine_rig_run(prompt, 300);
    run.max_new = 0;
    const struct engine_rig_answer *a = ask(*state, &run);
    assert_false(a->failed);
    assert_int_equal(a->done.finish, PROTO_FINISH_LENGTH);
    assert_int_equal(a->n_tokens, 0);
    assert_true(a->n_progress > 0);
    assert_int_equal(a->progress.prefilled, 300);
    run.max_new = 1; /* its pages serve the same prompt, all but the last token */
    a = ask(*state, &run);
    assert_int_equal(a->done.usage.cached, 299);
    assert_int_equal(a->progress.cached, 299);
}

static void test_engine_answer_full_context_ends_by_context(void **state)
{
    (void)state;
    struct engine_rig *rig = alloc_zero(ALLOC_MISC, 1, sizeof(*rig));
    assert_non_null(rig);
    struct engine_config config = engine_rig_config(model());
    config.context = 64;
    engine_rig_start(rig, &config);
    assert_int_equal(engine_rig_wait_loaded(rig), PROTO_SERVING);
    struct proto_run run = hello_run(PROTO_MAX_NEW_ALL);
    const struct engine_rig_answer *a = ask(rig, &run);
    assert_int_equal(a->done.finish, PROTO_FINISH_CONTEXT);
    assert_int_equal(a->n_tokens, 64 - N_HELLO);
    uint32_t full[64] = {0};
    run = engine_rig_run(full, 64);
    a = ask(rig, &run);
    assert_true(a->failed);
    assert_int_equal(a->error.code, ERR_ARGUMENT);
    assert_non_null(strstr(a->error.text, "64"));
    engine_rig_stop(rig);
    alloc_free(rig);
}

/* ---- resumption ------------------------------------------------------------------------------ */

static bool same_token(const struct proto_token *a, const struct proto_token *b)
{
    bool same = a->id == b->id && a->n_top == b->n_top &&
                memcmp(&a->logprob, &b->logprob, sizeof(a->logprob)) == 0;
    for (uint8_t i = 0; i < a->n_top && same; i++)
        same = a->top[i].id == b->top[i].id &&
               memcmp(&a->top[i].logprob, &b->top[i].logprob, sizeof(float)) == 0;
    return same;
}

static void check_resumed(struct engine_rig *rig, struct proto_run run)
{
    struct proto_token whole[ANSWER];
    uint32_t tokens[N_HELLO + ANSWER];
    run.max_new = ANSWER;
    run.flags |= PROTO_RUN_LOGPROBS;
    run.n_top = 4;
    const struct engine_rig_answer *a = ask(rig, &run);
    assert_int_equal(a->n_tokens, ANSWER);
    memcpy(whole, a->tokens, sizeof(whole));
    memcpy(tokens, hello, sizeof(hello));
    for (uint32_t i = 0; i < ANSWER; i++)
        tokens[N_HELLO + i] = whole[i].id;
    for (uint32_t k = 1; k <= ANSWER; k++) {
        struct proto_run resumed = run;
        resumed.tokens = tokens;
        resumed.n_tokens = N_HELLO + k;
        resumed.first_index = k;
        a = ask(rig, &resumed);
        assert_false(a->failed);
        assert_int_equal(a->done.finish, PROTO_FINISH_LENGTH);
        assert_int_equal(a->n_tokens, ANSWER - k);
        for (uint32_t i = 0; i < a->n_tokens; i++)
            if (!same_token(&a->tokens[i], &whole[k + i]))
                fail_msg("resumed at %u, token %u: %u instead of %u", k, k + i, a->tokens[i].id,
                         whole[k + i].id);
    }
}

static void test_engine_answer_resumed_at_every_token_is_the_same(void **state)
{
    struct proto_run run = hello_run(0);
    check_resumed(*state, run);
    run.flags = PROTO_RUN_NO_CACHE;
    check_resumed(*state, run);
    run.temperature = 1.3f;
    run.seed = 99;
    run.presence = 0.7f;
    run.frequency = 0.4f;
    run.repeat = 1.3f;
    run.repeat_last_n = 8; /* the window moves from the prompt into the answer */
    run.top_k = 200;
    run.top_p = 0.98f;
    run.min_p = 0.0001f;
    check_resumed(*state, run);
    run.flags = 0;
    check_resumed(*state, run);
}

static void test_engine_answer_resumed_behind_the_end_stops_at_once(void **state)
{
    uint32_t tokens[N_HELLO + 2];
    memcpy(tokens, hello, sizeof(hello));
    tokens[N_HELLO] = 740;
    tokens[N_HELLO + 1] = END;
    struct proto_run run = engine_rig_run(tokens, N_HELLO + 2);
    run.n_prompt = N_HELLO;
    run.first_index = 2;
    run.n_end = 1;
    run.end[0] = END;
    const struct engine_rig_answer *a = ask(*state, &run);
    assert_false(a->failed);
    assert_int_equal(a->done.finish, PROTO_FINISH_STOP);
    assert_int_equal(a->n_tokens, 0);
}

/* ---- log-probabilities of the prompt --------------------------------------------------------- */

static void test_engine_answer_prompt_logprobs_come_first_and_whole(void **state)
{
    uint32_t prompt[150];
    struct proto_token first[150];
    for (uint32_t i = 0; i < 150; i++)
        prompt[i] = i < N_HELLO ? hello[i] : 260 + i * 13 % 900;
    struct proto_run run = engine_rig_run(prompt, 150);
    run.max_new = 2;
    run.flags = PROTO_RUN_PROMPT_LOGPROBS | PROTO_RUN_LOGPROBS;
    run.n_top = 2;
    for (int round = 0; round < 2; round++) { /* a second time: nothing is reused */
        const struct engine_rig_answer *a = ask(*state, &run);
        assert_false(a->failed);
        assert_int_equal(a->n_prompt, 150);
        assert_int_equal(a->n_tokens, 2);
        assert_int_equal(a->done.usage.cached, 0);
        for (uint32_t i = 0; i < 150; i++) {
            assert_int_equal(a->prompt[i].id, prompt[i]);
            assert_int_equal(a->prompt[i].flags, PROTO_TOKEN_PROMPT | PROTO_TOKEN_LOGPROB);
            assert_true(i == 0 ? isnan(a->prompt[i].logprob) : a->prompt[i].logprob <= 0.0f);
            assert_true(round == 0 || i == 0 || same_token(&a->prompt[i], &first[i]));
            first[i] = a->prompt[i];
        }
    }
}

static void test_engine_answer_prompt_logprob_is_that_of_generation(void **state)
{
    /* A greedy answer given back as part of a prompt has the log-probabilities it was made with. */
    struct proto_run run = hello_run(8);
    struct proto_token made[8];
    uint32_t prompt[N_HELLO + 8];
    run.flags = PROTO_RUN_LOGPROBS;
    const struct engine_rig_answer *a = ask(*state, &run);
    assert_int_equal(a->n_tokens, 8);
    memcpy(made, a->tokens, sizeof(made));
    memcpy(prompt, hello, sizeof(hello));
    for (uint32_t i = 0; i < 8; i++)
        prompt[N_HELLO + i] = made[i].id;
    run = engine_rig_run(prompt, N_HELLO + 8);
    run.max_new = 0;
    run.flags = PROTO_RUN_PROMPT_LOGPROBS;
    a = ask(*state, &run);
    assert_int_equal(a->n_prompt, N_HELLO + 8);
    for (uint32_t i = 0; i < 8; i++)
        assert_true(a->prompt[N_HELLO + i].logprob == made[i].logprob);
}

/* ---- what cannot be -------------------------------------------------------------------------- */

static void test_engine_answer_bad_requests_are_refused(void **state)
{
    const uint32_t outside[3] = {1, 4096, 2};
    const struct proto_bias nan_bias[1] = {{5, NAN}}, far_bias[1] = {{4096, 1.0f}};
    struct proto_run runs[6];
    for (int i = 0; i < 6; i++)
        runs[i] = hello_run(4);
    runs[0].tokens = outside;
    runs[0].n_tokens = runs[0].n_prompt = 3;
    runs[1].n_prompt = 0;
    runs[1].first_index = N_HELLO;
    runs[2].repeat = 0.0f;
    runs[3].bias = nan_bias;
    runs[3].n_bias = 1;
    runs[4].bias = far_bias;
    runs[4].n_bias = 1;
    runs[5].first_index = 1;
    for (int i = 0; i < 6; i++) {
        const struct engine_rig_answer *a = ask(*state, &runs[i]);
        if (!a->failed || a->error.code != ERR_ARGUMENT || a->error.text[0] == '\0')
            fail_msg("request %d was not refused", i);
    }
}

static void test_engine_answer_forbidden_tokens_never_come(void **state)
{
    enum {
        VOCAB = 4096
    };
    struct proto_bias *bias = alloc_zero(ALLOC_MISC, PROTO_MAX_BIAS, sizeof(*bias));
    assert_non_null(bias);
    struct proto_run run = hello_run(4);
    for (uint32_t i = 0; i < PROTO_MAX_BIAS; i++)
        bias[i] = (struct proto_bias){i, -INFINITY};
    run.bias = bias;
    run.n_bias = PROTO_MAX_BIAS;
    const struct engine_rig_answer *a = ask(*state, &run); /* others are left: an answer */
    assert_false(a->failed);
    for (uint32_t i = 0; i < a->n_tokens; i++)
        assert_in_range(a->tokens[i].id, PROTO_MAX_BIAS, VOCAB - 1);
    alloc_free(bias);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_answer_end_token_stops_and_is_sent),
        cmocka_unit_test(test_engine_answer_max_new_ends_by_length),
        cmocka_unit_test(test_engine_answer_max_new_zero_only_prefills),
        cmocka_unit_test(test_engine_answer_full_context_ends_by_context),
        cmocka_unit_test(test_engine_answer_resumed_at_every_token_is_the_same),
        cmocka_unit_test(test_engine_answer_resumed_behind_the_end_stops_at_once),
        cmocka_unit_test(test_engine_answer_prompt_logprobs_come_first_and_whole),
        cmocka_unit_test(test_engine_answer_prompt_logprob_is_that_of_generation),
        cmocka_unit_test(test_engine_answer_bad_requests_are_refused),
        cmocka_unit_test(test_engine_answer_forbidden_tokens_never_come),
    };
    return cmocka_run_group_tests(tests, start, stop);
}

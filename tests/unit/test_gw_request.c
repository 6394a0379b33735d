#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "gguf_file.h"
#include "gw_request.h"
#include "gw_text.h"
#include "gw_tokenizer.h"

static struct gw_tokenizer *tokenizer;

static int setup(void **state)
{
    struct gguf_file *file = NULL;
    struct err e = {0};
    (void)state;
    assert_int_equal(gguf_file_open(ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf", &file, &e), ERR_OK);
    assert_int_equal(gw_tokenizer_new(file, &tokenizer, &e), ERR_OK);
    gguf_file_close(file);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    gw_tokenizer_free(tokenizer);
    return 0;
}

/* A request for a completion of three ids, with more fields in JSON ("" = none). */
static struct gw_request *request(const char *fields)
{
    static const struct gw_chat_request_limits limits = {2048, 4096, 32};
    char text[512];
    struct gw_chat_request ask;
    struct gw_refusal refusal = {0};
    struct gw_request_prompt prompts[GW_CHAT_REQUEST_MAX_PROMPTS] = {0};
    snprintf(text, sizeof text, "{\"prompt\":[10,11,12]%s%s}", fields[0] != '\0' ? "," : "",
             fields);
    json_t *body = json_loads(text, 0, NULL);
    assert_non_null(body);
    if (!gw_chat_request_parse(body, GW_CHAT_REQUEST_COMPLETION, &limits, &ask, &refusal))
        fail_msg("%s", refusal.message);
    json_decref(body);
    prompts[0] = (struct gw_request_prompt){.ids = ask.prompts[0].ids, .n = ask.prompts[0].n_ids};
    ask.prompts[0].ids = NULL;
    struct gw_request *q = gw_request_new(&ask, prompts, 1, tokenizer);
    assert_non_null(q);
    return q;
}

static bool feed(struct gw_request_choice *c, uint32_t first, const uint32_t *ids, uint16_t n)
{
    struct proto_token tokens[16] = {0};
    for (uint16_t i = 0; i < n; i++) {
        tokens[i].id = ids[i];
        tokens[i].logprob = -0.5f;
        tokens[i].flags = PROTO_TOKEN_LOGPROB;
    }
    return gw_request_on_tokens(
        c, &(struct proto_tokens){.first_index = first, .n = n, .tokens = tokens}, 1);
}

static void test_gw_request_run_continues_where_it_stopped(void **state)
{
    (void)state;
    struct gw_request *q = request("\"seed\":9223372036854775807,\"n\":2,\"top_p\":0,\"top_k\":-1");
    struct buf scratch = BUF_INIT(1 << 20);
    struct proto_run run;
    const uint32_t ids[] = {20, 21};
    assert_true(feed(&q->choices[0], 0, ids, 2));
    assert_true(gw_request_run(&q->choices[0], &scratch, &run));
    assert_int_equal(run.n_tokens, 5);
    assert_int_equal(run.n_prompt, 3);
    assert_int_equal(run.first_index, 2);
    assert_int_equal(run.tokens[0], 10);
    assert_int_equal(run.tokens[4], 21);
    assert_true(run.seed == INT64_MAX);
    assert_true(run.temperature == 0); /* top_p 0 is greedy */
    assert_int_equal(run.max_new, 16);
    assert_true(run.n_end > 0);
    assert_true(gw_request_run(&q->choices[1], &scratch, &run));
    assert_true(run.seed == 0); /* modulo 2^63 */
    assert_int_equal(run.first_index, 0);
    buf_done(&scratch);
    gw_request_drop(q);
}

static bool text_is(struct proto_text text, const char *want)
{
    return text.size == strlen(want) && memcmp(text.data, want, text.size) == 0;
}

/* Each setting of a body arrives in the frame that the worker gets, by its own value. */
static void test_gw_request_every_setting_reaches_the_frame(void **state)
{
    (void)state;
    struct gw_request *q = request(
        "\"temperature\":0.5,\"top_p\":0.25,\"min_p\":0.125,\"top_k\":7,\"presence_penalty\":1.5,"
        "\"frequency_penalty\":-1.5,\"repeat_penalty\":1.25,\"repeat_last_n\":9,\"priority\":-3,"
        "\"seed\":11,\"max_tokens\":5,\"logprobs\":4,\"logit_bias\":{\"6\":-2.5},"
        "\"prompt_cache_key\":\"key\",\"cache_prompt\":false");
    struct buf scratch = BUF_INIT(1 << 20);
    struct proto_run run;
    strcpy(q->client_id, "req_1");
    assert_true(gw_request_run(&q->choices[0], &scratch, &run));
    assert_true(run.temperature == 0.5f && run.top_p == 0.25f && run.min_p == 0.125f);
    assert_int_equal(run.top_k, 7);
    assert_true(run.presence == 1.5f && run.frequency == -1.5f && run.repeat == 1.25f);
    assert_int_equal(run.repeat_last_n, 9);
    assert_int_equal(run.priority, -3);
    assert_true(run.seed == 11);
    assert_int_equal(run.max_new, 5);
    assert_int_equal(run.n_top, 4);
    assert_int_equal(run.flags, PROTO_RUN_LOGPROBS | PROTO_RUN_NO_CACHE);
    assert_int_equal(run.n_bias, 1);
    assert_true(run.bias[0].id == 6 && run.bias[0].value == -2.5f);
    assert_true(text_is(run.session, "key"));
    assert_true(text_is(run.trace, "req_1"));
    gw_request_drop(q);
    q = request("");
    assert_true(gw_request_run(&q->choices[0], &scratch, &run));
    assert_true(run.temperature == 1 && run.top_p == 1 && run.min_p == 0 && run.top_k == 0);
    assert_true(run.presence == 0 && run.frequency == 0 && run.repeat == 1);
    assert_int_equal(run.repeat_last_n, 64);
    assert_int_equal(run.priority + run.n_top + run.n_bias, 0);
    assert_int_equal(run.flags, 0);
    assert_true(text_is(run.session, ""));
    buf_done(&scratch);
    gw_request_drop(q);
}

/* What a client may ask for and a frame cannot carry. */
static void test_gw_request_extremes_become_what_the_worker_takes(void **state)
{
    (void)state;
    static const struct {
        const char *fields;
        uint32_t max_new;
    } rows[] = {{"\"max_tokens\":9223372036854775807", PROTO_MAX_NEW_ALL},
                {"\"max_tokens\":4294967295", PROTO_MAX_NEW_ALL},
                {"\"max_tokens\":4294967294", 4294967294u},
                {"\"n_predict\":0", 0}};
    struct buf scratch = BUF_INIT(1 << 20);
    struct proto_run run;
    struct gw_request *q;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        q = request(rows[i].fields);
        assert_true(gw_request_run(&q->choices[0], &scratch, &run));
        assert_true(run.max_new == rows[i].max_new);
        gw_request_drop(q);
    }
    q = request("\"top_k\":1099511627776,\"repeat_penalty\":5e-324,\"top_p\":5e-324");
    assert_true(gw_request_run(&q->choices[0], &scratch, &run));
    assert_int_equal(run.top_k, INT32_MAX);
    assert_true(run.repeat > 0);
    assert_true(run.top_p >= 0);
    gw_request_drop(q);
    buf_done(&scratch);
}

static void test_gw_request_ignore_eos_forbids_the_end_tokens(void **state)
{
    (void)state;
    struct gw_request *q =
        request("\"ignore_eos\":true,\"logit_bias\":{\"7\":2},\"max_tokens\":-1");
    struct buf scratch = BUF_INIT(1 << 20);
    struct proto_run run;
    assert_true(gw_request_run(&q->choices[0], &scratch, &run));
    assert_int_equal(run.n_end, 0);
    assert_int_equal(run.n_bias, 1 + q->n_end);
    assert_int_equal(run.bias[0].id, 7);
    assert_true(isinf(run.bias[1].value));
    assert_true(run.max_new == PROTO_MAX_NEW_ALL);
    assert_int_equal(run.tokens[2], 12);
    buf_done(&scratch);
    gw_request_drop(q);
}

static void test_gw_request_tokens_seen_twice_count_once_and_gaps_are_refused(void **state)
{
    (void)state;
    struct gw_request *q = request("");
    struct gw_request_choice *c = &q->choices[0];
    const uint32_t ids[] = {20, 21, 22};
    assert_true(feed(c, 0, ids, 2));
    assert_true(feed(c, 0, ids, 3));
    assert_true(feed(c, 1, ids + 1, 1));
    assert_int_equal(c->n_ids, 3);
    assert_int_equal(c->ids[2], 22);
    assert_false(feed(c, 4, ids, 1));
    assert_int_equal(c->n_ids, 3);
    gw_request_drop(q);
}

struct seen {
    char text[256];
    size_t n;
};

static void on_text(void *user, enum gw_stop_kind kind, const char *text, size_t n)
{
    struct seen *s = user;
    (void)kind;
    memcpy(s->text + s->n, text, n);
    s->n += n;
    s->text[s->n] = '\0';
}

static void read_all(struct gw_text *t, struct seen *s)
{
    bool more = true;
    while (more)
        assert_int_equal(gw_text_step(t, on_text, s, &more, NULL), ERR_OK);
}

static uint16_t encode(const char *text, uint32_t *ids)
{
    struct gw_tokenizer_ids found = {0};
    assert_int_equal(gw_tokenizer_encode(tokenizer, text, strlen(text), true, false, &found, NULL),
                     ERR_OK);
    assert_true(found.n <= 16);
    memcpy(ids, found.ids, found.n * sizeof *ids);
    uint16_t n = (uint16_t)found.n;
    gw_tokenizer_ids_done(&found);
    return n;
}

/* However the tokens come, text, stop and entries are the same. */
static void test_gw_request_text_does_not_depend_on_the_frames(void **state)
{
    (void)state;
    uint32_t ids[16];
    uint16_t n = encode("The capital of Norway is Oslo.", ids);
    for (uint16_t cut = 0; cut <= n; cut++) {
        struct gw_request *q = request("\"stop\":\" is O\",\"logprobs\":0,\"return_tokens\":true");
        struct gw_request_choice *c = &q->choices[0];
        struct gw_text t;
        struct seen s = {0};
        assert_int_equal(gw_text_init(&t, c, tokenizer, NULL, NULL), ERR_OK);
        c->state = GW_REQUEST_RUNNING;
        if (cut > 0)
            assert_true(feed(c, 0, ids, cut));
        read_all(&t, &s);
        if (cut < n)
            assert_true(feed(c, cut, ids + cut, (uint16_t)(n - cut)));
        read_all(&t, &s);
        assert_true(t.matched);
        c->state = GW_REQUEST_DONE;
        read_all(&t, &s);
        assert_true(gw_text_is_over(&t));
        assert_string_equal(s.text, "The capital of Norway");
        uint32_t parts = 1;
        for (size_t i = 0; i < t.ids.size; i++)
            parts += t.ids.data[i] == ',';
        assert_int_equal(parts, encode("The capital of Norway", (uint32_t[16]){0}));
        gw_text_done(&t);
        gw_request_drop(q);
    }
}

static void test_gw_request_end_token_yields_no_text_and_no_entry(void **state)
{
    (void)state;
    uint32_t ids[16];
    uint16_t n = encode("Oslo<|im_end|>", ids);
    struct gw_request *q = request("\"logprobs\":0,\"return_tokens\":true");
    struct gw_request_choice *c = &q->choices[0];
    struct gw_text t;
    struct seen s = {0};
    assert_int_equal(gw_text_init(&t, c, tokenizer, NULL, NULL), ERR_OK);
    assert_true(feed(c, 0, ids, n));
    c->state = GW_REQUEST_DONE;
    read_all(&t, &s);
    assert_string_equal(s.text, "Oslo");
    assert_int_equal(t.pushed, n);
    assert_null(memmem(t.ids.data, t.ids.size, "4095", 4));
    gw_text_done(&t);
    gw_request_drop(q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_request_run_continues_where_it_stopped),
        cmocka_unit_test(test_gw_request_every_setting_reaches_the_frame),
        cmocka_unit_test(test_gw_request_extremes_become_what_the_worker_takes),
        cmocka_unit_test(test_gw_request_ignore_eos_forbids_the_end_tokens),
        cmocka_unit_test(test_gw_request_tokens_seen_twice_count_once_and_gaps_are_refused),
        cmocka_unit_test(test_gw_request_text_does_not_depend_on_the_frames),
        cmocka_unit_test(test_gw_request_end_token_yields_no_text_and_no_entry),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

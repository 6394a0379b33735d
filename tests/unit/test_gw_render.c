/* Events and bodies of an answer, from tokens that the test feeds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "alloc.h"
#include "gguf_file.h"
#include "gw_model.h"
#include "gw_render.h"
#include "gw_tokenizer.h"

static struct gw_model model = {.id = "m \"1\"", .file_digest = {0xAB, 0xCD, 0x01, 0x02}};

static int setup(void **state)
{
    struct gguf_file *file = NULL;
    struct err e = {0};
    (void)state;
    assert_int_equal(gguf_file_open(ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf", &file, &e), ERR_OK);
    assert_int_equal(gw_tokenizer_new(file, &model.tokenizer, &e), ERR_OK);
    gguf_file_close(file);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    gw_tokenizer_free(model.tokenizer);
    return 0;
}

/* A chat of two prompt ids, with more fields in JSON ("" = none). */
static struct gw_request *request(const char *fields)
{
    static const struct gw_chat_request_limits limits = {2048, 4096, 32};
    char text[512];
    struct gw_chat_request ask;
    struct gw_refusal refusal = {0};
    struct gw_request_prompt prompts[GW_CHAT_REQUEST_MAX_PROMPTS] = {0};
    snprintf(text, sizeof text, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]%s%s}",
             fields[0] != '\0' ? "," : "", fields);
    json_t *body = json_loads(text, 0, NULL);
    assert_non_null(body);
    if (!gw_chat_request_parse(body, GW_CHAT_REQUEST_CHAT, &limits, &ask, &refusal))
        fail_msg("%s", refusal.message);
    json_decref(body);
    prompts[0] =
        (struct gw_request_prompt){.ids = alloc_zero(ALLOC_REQUEST, 2, sizeof(uint32_t)), .n = 2};
    struct gw_request *q = gw_request_new(&ask, prompts, 1, model.tokenizer);
    assert_non_null(q);
    return q;
}

/* Token `index` of a text, with a logprob of its own. */
static void feed(struct gw_request_choice *c, const char *text, uint32_t index)
{
    struct gw_tokenizer_ids ids = {0};
    assert_int_equal(
        gw_tokenizer_encode(model.tokenizer, text, strlen(text), true, false, &ids, NULL), ERR_OK);
    if (index < ids.n) {
        struct proto_token token = {.id = ids.ids[index], .logprob = -0.25f * (float)(index + 1)};
        struct proto_tokens m = {.first_index = index, .n = 1, .tokens = &token};
        assert_true(gw_request_on_tokens(c, &m, 1));
    }
    if (index + 1 >= ids.n) {
        c->finish = PROTO_FINISH_STOP;
        c->state = GW_REQUEST_DONE;
    }
    gw_tokenizer_ids_done(&ids);
}

/* As far as the tokens go. False: no memory. */
static bool go_on(struct gw_render_choice *c)
{
    struct err e = {0};
    for (bool more = true; more && !c->finished;) {
        if (gw_text_step(&c->text, gw_render_text, c, &more, &e) != ERR_OK)
            return false;
        if (gw_text_is_over(&c->text))
            gw_render_finish(c);
        if (gw_render_failed(c))
            return false;
    }
    return true;
}

static const char said[] = "The capital of Norway is Oslo.";

/* The whole answer in r->out. False: no memory. */
static bool render(struct gw_render *r, struct gw_request *q)
{
    struct err e = {0};
    bool fine = gw_render_init(r, q, &model, &e) == ERR_OK;
    for (uint32_t i = 0; fine && r->n_finished < q->n_choices; i++)
        for (unsigned k = 0; fine && k < q->n_choices; k++) {
            if (q->choices[k].state != GW_REQUEST_DONE)
                feed(&q->choices[k], said, i);
            fine = go_on(&r->choices[k]);
        }
    if (fine && r->stream)
        gw_render_end(r);
    else if (fine)
        gw_render_json(r);
    return fine && !buf_failed(&r->out);
}

static json_t *member(const json_t *object, const char *path)
{
    char key[64];
    for (size_t n; *path != '\0'; path += n + (path[n] != '\0')) {
        n = strcspn(path, "/");
        snprintf(key, sizeof key, "%.*s", (int)n, path);
        object = json_is_array(object) ? json_array_get(object, (size_t)atoi(key))
                                       : json_object_get(object, key);
    }
    return (json_t *)(uintptr_t)object;
}

static const char *text_of(const json_t *object, const char *path)
{
    return json_string_value(member(object, path));
}

/* The events of a stream; the last must be the terminal one. */
static size_t events_of(struct buf *out, json_t *ret[64])
{
    size_t n = 0;
    char *at, *end;
    buf_byte(out, 0);
    for (at = (char *)out->data; (end = strstr(at, "\n\n")) != NULL; at = end + 2) {
        *end = '\0';
        assert_int_equal(strncmp(at, "data: ", 6), 0);
        assert_null(strchr(at, '\n'));
        if (strcmp(at, "data: [DONE]") == 0)
            break;
        assert_true(n < 64);
        ret[n] = json_loads(at + 6, JSON_REJECT_DUPLICATES, NULL);
        assert_non_null(ret[n++]);
    }
    assert_string_equal(at, "data: [DONE]");
    assert_int_equal(end + 2 - (char *)out->data, out->size - 1);
    return n;
}

/* Each choice: its role, its text and one finish; then the usage, and what JSON says at once. */
static void test_gw_render_stream_says_what_json_says(void **state)
{
    static const char fields[] =
        "\"n\":2,\"seed\":7,\"logprobs\":true,\"stream_options\":{\"include_usage\":true}";
    struct gw_render stream, whole;
    json_t *events[64];
    char more[160], joined[2][64] = {"", ""};
    unsigned stage[2] = {0, 0}; /* 1: role, 2: finished */
    (void)state;
    snprintf(more, sizeof more, "%s,\"stream\":true", fields);
    struct gw_request *a = request(more), *b = request(fields);
    assert_true(render(&stream, a));
    assert_true(render(&whole, b));
    json_t *json = json_loadb((const char *)whole.out.data, whole.out.size, 0, NULL);
    assert_non_null(json);
    size_t n = events_of(&stream.out, events);
    for (size_t i = 0; i + 1 < n; i++) {
        size_t k = (size_t)json_integer_value(member(events[i], "choices/0/index"));
        const char *content = text_of(events[i], "choices/0/delta/content");
        assert_string_equal(text_of(events[i], "model"), "m \"1\"");
        assert_string_equal(text_of(events[i], "id"), text_of(events[0], "id"));
        assert_true(json_is_null(member(events[i], "usage")));
        assert_true(k < 2 && stage[k] < 2);
        if (stage[k] == 0)
            assert_string_equal(text_of(events[i], "choices/0/delta/role"), "assistant");
        stage[k] = text_of(events[i], "choices/0/finish_reason") ? 2 : 1;
        if (content)
            strcat(joined[k], content);
    }
    assert_int_equal(stage[0] + stage[1], 4);
    assert_non_null(member(events[n - 2], "timings"));
    assert_int_equal(json_array_size(member(events[n - 1], "choices")), 0);
    assert_true(json_equal(member(events[n - 1], "usage"), member(json, "usage")));
    assert_int_equal(json_integer_value(member(json, "usage/prompt_tokens")), 2);
    assert_string_equal(joined[0], said);
    assert_string_equal(joined[1], text_of(json, "choices/1/message/content"));
    assert_string_equal(text_of(json, "system_fingerprint"), "islet-0-abcd0102");
    for (size_t i = 0; i < n; i++)
        json_decref(events[i]);
    json_decref(json);
    gw_render_done(&stream);
    gw_render_done(&whole);
    gw_request_drop(a);
    gw_request_drop(b);
}

static void test_gw_render_error_stands_for_what_is_not_out(void **state)
{
    struct gw_render r;
    struct err e = {0};
    struct gw_error error = {.code = GW_ERROR_WORKER_UNAVAILABLE, .message = "gone"};
    struct gw_request *q = request("\"stream\":true");
    (void)state;
    assert_int_equal(gw_render_init(&r, q, &model, &e), ERR_OK);
    feed(&q->choices[0], said, 0);
    assert_true(go_on(&r.choices[0]));
    assert_true(r.out.size > 0);
    gw_render_error(&r, &error);
    buf_byte(&r.out, 0);
    assert_string_equal((const char *)r.out.data,
                        "data: {\"error\":{\"message\":\"gone\",\"type\":\"server_error\","
                        "\"param\":null,\"code\":\"worker_unavailable\"}}\n\ndata: [DONE]\n\n");
    gw_render_done(&r);
    gw_request_drop(q);
}

/* A piece that is kept of a stream comes as one event, with the role in front. */
static void test_gw_render_echo_is_one_event(void **state)
{
    struct gw_render r;
    struct err e = {0};
    json_t *events[64];
    struct gw_request *q = request("\"stream\":true");
    (void)state;
    assert_int_equal(gw_render_init(&r, q, &model, &e), ERR_OK);
    gw_render_keep(&r.choices[0], GW_STOP_CONTENT, "ab", 2);
    gw_render_keep(&r.choices[0], GW_STOP_CONTENT, "cd", 2);
    assert_int_equal(r.out.size, 0);
    gw_render_echo(&r.choices[0]);
    assert_int_equal(r.choices[0].content.size, 0);
    gw_render_end(&r);
    assert_int_equal(events_of(&r.out, events), 2);
    assert_string_equal(text_of(events[1], "choices/0/delta/content"), "abcd");
    json_decref(events[0]);
    json_decref(events[1]);
    gw_render_done(&r);
    gw_request_drop(q);
}

/* Each allocation of the rendering fails once: it is seen, and nothing is left. */
static void test_gw_render_no_memory_is_seen_and_leaves_nothing(void **state)
{
    static const char *const kinds[] = {"\"logprobs\":true", "\"stream\":true,\"logprobs\":true"};
    (void)state;
    for (unsigned k = 0; k < 2; k++) {
        bool fine = false;
        for (uint64_t nth = 1; !fine; nth++) {
            struct gw_request *q = request(kinds[k]);
            for (uint32_t i = 0; q->choices[0].state != GW_REQUEST_DONE; i++)
                feed(&q->choices[0], said, i);
            uint64_t live = alloc_live_blocks();
            struct gw_render r;
            alloc_fail_at(nth, 0);
            fine = render(&r, q);
            alloc_fail_at(0, 0);
            gw_render_done(&r);
            assert_int_equal(alloc_live_blocks(), live);
            gw_request_drop(q);
            assert_true(nth < 1000);
            assert_true(!fine || nth > 5);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_render_stream_says_what_json_says),
        cmocka_unit_test(test_gw_render_error_stands_for_what_is_not_out),
        cmocka_unit_test(test_gw_render_echo_is_one_event),
        cmocka_unit_test(test_gw_render_no_memory_is_seen_and_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

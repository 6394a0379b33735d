/* Walks over the table of fields that the parser itself uses, so that a new row is tested by being
 * there. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "gw_chat_request.h"

static const struct gw_chat_request_limits limits = {2048, 4096, 32};

/* A small body of the kind; the caller decrefs. */
static json_t *body_of(enum gw_chat_request_kind kind)
{
    json_t *body =
        kind == GW_CHAT_REQUEST_CHAT
            ? json_loads("{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}", 0, NULL)
            : json_loads("{\"prompt\":\"hi\"}", 0, NULL);
    assert_non_null(body);
    return body;
}

static bool parse_json(json_t *body, enum gw_chat_request_kind kind, struct gw_chat_request *q,
                       struct gw_refusal *refusal)
{
    uint64_t live = alloc_live_blocks();
    bool ok = gw_chat_request_parse(body, kind, &limits, q, refusal);
    if (!ok)
        assert_int_equal(alloc_live_blocks(), live);
    json_decref(body);
    return ok;
}

/* The body with one field more. Takes value. */
static bool parse_with(enum gw_chat_request_kind kind, const char *name, json_t *value,
                       struct gw_chat_request *q, struct gw_refusal *refusal)
{
    json_t *body = body_of(kind);
    assert_non_null(value);
    json_object_set_new(body, name, value);
    if (strcmp(name, "top_logprobs") == 0)
        json_object_set_new(body, "logprobs", json_true());
    return parse_json(body, kind, q, refusal);
}

static void assert_taken(enum gw_chat_request_kind kind, const char *name, json_t *value)
{
    struct gw_chat_request q;
    struct gw_refusal refusal = {0};
    if (!parse_with(kind, name, value, &q, &refusal))
        fail_msg("%s: refused: %s", name, refusal.message);
    assert_string_equal(q.ignored, "");
    gw_chat_request_done(&q);
}

static void assert_refused(enum gw_chat_request_kind kind, const char *name, json_t *value,
                           enum gw_error_code code)
{
    struct gw_chat_request q;
    struct gw_refusal refusal = {0};
    if (parse_with(kind, name, value, &q, &refusal))
        fail_msg("%s: taken", name);
    assert_string_equal(gw_error_name(refusal.code), gw_error_name(code));
    assert_true(strncmp(refusal.param, name, strlen(name)) == 0);
}

static double max_of(const struct gw_chat_request_field *f)
{
    return f->context_max ? limits.n_ctx : f->max;
}

static void wrong_types(const struct gw_chat_request_field *f, enum gw_chat_request_kind kind)
{
    bool number = f->type == GW_CHAT_REQUEST_INT || f->type == GW_CHAT_REQUEST_NUMBER;
    bool string = f->type == GW_CHAT_REQUEST_STRING || f->type == GW_CHAT_REQUEST_CHOICE;
    assert_refused(kind, f->name, json_object(), GW_ERROR_INVALID_TYPE);
    assert_refused(kind, f->name, json_array(), GW_ERROR_INVALID_TYPE);
    if (!string)
        assert_refused(kind, f->name, json_string("1"), GW_ERROR_INVALID_TYPE);
    if (!number)
        assert_refused(kind, f->name, json_integer(1), GW_ERROR_INVALID_TYPE);
    if (f->type != GW_CHAT_REQUEST_BOOL)
        assert_refused(kind, f->name, json_true(), GW_ERROR_INVALID_TYPE);
    if (f->type == GW_CHAT_REQUEST_INT)
        assert_refused(kind, f->name, json_real(1.5), GW_ERROR_INVALID_TYPE);
}

static void ends_of_range(const struct gw_chat_request_field *f, enum gw_chat_request_kind kind)
{
    double max = max_of(f);
    if (f->type == GW_CHAT_REQUEST_INT) {
        assert_taken(kind, f->name, json_integer((json_int_t)f->min));
        assert_taken(kind, f->name, json_real(f->min));
        assert_refused(kind, f->name, json_integer((json_int_t)f->min - 1), GW_ERROR_INVALID_VALUE);
        if (max >= 9223372036854775807.0) {
            assert_taken(kind, f->name, json_integer(INT64_MAX));
            assert_refused(kind, f->name, json_real(9223372036854775808.0), GW_ERROR_INVALID_VALUE);
            return;
        }
        assert_taken(kind, f->name, json_integer((json_int_t)max));
        assert_refused(kind, f->name, json_integer((json_int_t)max + 1), GW_ERROR_INVALID_VALUE);
    } else if (f->type == GW_CHAT_REQUEST_NUMBER) {
        assert_taken(kind, f->name, json_real(max));
        assert_refused(kind, f->name, json_real(nextafter(max, INFINITY)), GW_ERROR_INVALID_VALUE);
        if (f->open_min)
            assert_refused(kind, f->name, json_real(f->min), GW_ERROR_INVALID_VALUE);
        else
            assert_taken(kind, f->name, json_real(f->min));
        assert_refused(kind, f->name, json_real(nextafter(f->min, -INFINITY)),
                       GW_ERROR_INVALID_VALUE);
    }
}

static void strings_and_words(const struct gw_chat_request_field *f, enum gw_chat_request_kind kind)
{
    char text[600];
    size_t max = (size_t)f->max;
    if (f->type == GW_CHAT_REQUEST_STRING) {
        memset(text, 'a', sizeof text);
        assert_taken(kind, f->name, json_stringn(text, max));
        assert_taken(kind, f->name, json_string(""));
        assert_refused(kind, f->name, json_stringn(text, max + 1), GW_ERROR_INVALID_VALUE);
        assert_refused(kind, f->name, json_stringn("a\0b", 3), GW_ERROR_INVALID_VALUE);
        return;
    }
    snprintf(text, sizeof text, "%s", f->words);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " "))
        assert_taken(kind, f->name, json_string(word));
    assert_refused(kind, f->name, json_string("other"), GW_ERROR_INVALID_VALUE);
    assert_refused(kind, f->name, json_string(""), GW_ERROR_INVALID_VALUE);
}

static void neutral_values(const struct gw_chat_request_field *f, enum gw_chat_request_kind kind)
{
    char text[200];
    const char *strange[] = {"{\"a\":1}", "[[1]]", "\"strange\"", "12345", "\"0\""};
    if (f->words[0] == '<') {
        assert_taken(kind, f->name, json_real(-0.5));
        if (f->words[1] == '=')
            assert_taken(kind, f->name, json_integer(0));
        else
            assert_refused(kind, f->name, json_integer(0), GW_ERROR_UNSUPPORTED_PARAMETER);
    } else {
        snprintf(text, sizeof text, "%s", f->words);
        for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) {
            json_t *value = json_loads(word, JSON_DECODE_ANY, NULL);
            if (json_is_integer(value))
                assert_taken(kind, f->name, json_real((double)json_integer_value(value)));
            assert_taken(kind, f->name, value);
        }
    }
    for (size_t i = 0; i < sizeof strange / sizeof *strange; i++)
        assert_refused(kind, f->name, json_loads(strange[i], JSON_DECODE_ANY, NULL),
                       GW_ERROR_UNSUPPORTED_PARAMETER);
}

static void field_test(const struct gw_chat_request_field *f, enum gw_chat_request_kind kind)
{
    bool required = strcmp(f->name, "messages") == 0 || strcmp(f->name, "prompt") == 0;
    if (!required)
        assert_taken(kind, f->name, json_null());
    switch (f->type) {
    case GW_CHAT_REQUEST_BOOL:
        wrong_types(f, kind);
        assert_taken(kind, f->name, json_true());
        assert_taken(kind, f->name, json_false());
        break;
    case GW_CHAT_REQUEST_INT:
    case GW_CHAT_REQUEST_NUMBER:
        wrong_types(f, kind);
        ends_of_range(f, kind);
        break;
    case GW_CHAT_REQUEST_STRING:
    case GW_CHAT_REQUEST_CHOICE:
        wrong_types(f, kind);
        strings_and_words(f, kind);
        break;
    case GW_CHAT_REQUEST_REFUSED:
        neutral_values(f, kind);
        break;
    case GW_CHAT_REQUEST_SPECIAL:
        assert_refused(kind, f->name, json_true(), GW_ERROR_INVALID_TYPE);
        break;
    }
}

static void test_gw_chat_request_every_field_of_the_table(void **state)
{
    (void)state;
    size_t n;
    const struct gw_chat_request_field *fields = gw_chat_request_fields(&n);
    assert_true(n > 60);
    for (size_t i = 0; i < n; i++) {
        if (fields[i].kinds & GW_CHAT_REQUEST_CHAT)
            field_test(&fields[i], GW_CHAT_REQUEST_CHAT);
        if (fields[i].kinds & GW_CHAT_REQUEST_COMPLETION)
            field_test(&fields[i], GW_CHAT_REQUEST_COMPLETION);
    }
}

static struct gw_chat_request parsed(const char *json, enum gw_chat_request_kind kind)
{
    struct gw_chat_request q;
    struct gw_refusal refusal = {0};
    json_t *body = json_loads(json, JSON_ALLOW_NUL, NULL);
    assert_non_null(body);
    if (!parse_json(body, kind, &q, &refusal))
        fail_msg("%s: %s", json, refusal.message);
    return q;
}

static void refused(const char *json, enum gw_chat_request_kind kind, enum gw_error_code code,
                    const char *param)
{
    struct gw_chat_request q;
    struct gw_refusal refusal = {0};
    json_t *body = json_loads(json, JSON_ALLOW_NUL, NULL);
    assert_non_null(body);
    if (parse_json(body, kind, &q, &refusal))
        fail_msg("%s: taken", json);
    assert_string_equal(gw_error_name(refusal.code), gw_error_name(code));
    assert_string_equal(refusal.param, param);
}

#define M "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"

/* What a request is without its optional fields, number by number: the contract's defaults. */
static void check_defaults(const struct gw_chat_request *q)
{
    assert_int_equal(q->max_new, q->kind == GW_CHAT_REQUEST_CHAT ? -1 : 16);
    assert_true(q->temperature == 1 && q->top_p == 1 && q->min_p == 0 && q->top_k == 0);
    assert_true(q->presence_penalty == 0 && q->frequency_penalty == 0 && q->repeat_penalty == 1);
    assert_int_equal(q->repeat_last_n, 64);
    assert_int_equal(q->seed, -1);
    assert_int_equal(q->n, 1);
    assert_int_equal(q->n_stops + q->n_bias, 0);
    assert_false(q->stream || q->include_usage || q->logprobs || q->ignore_eos || q->echo);
    assert_false(q->return_tokens || q->timings_per_token);
    assert_int_equal(q->top_logprobs, 0);
    assert_null(q->model);
    assert_null(q->user);
    assert_null(q->safety_identifier);
    assert_null(q->session);
    assert_null(q->kwargs);
    assert_int_equal(q->priority, 0);
    assert_true(q->sse_ping_interval_s == GW_CHAT_REQUEST_ABSENT);
    assert_string_equal(q->ignored, "");
    assert_true(q->cache_prompt);
    if (q->kind != GW_CHAT_REQUEST_CHAT)
        return;
    assert_int_equal(q->reasoning_effort, GW_CHAT_REQUEST_EFFORT_ABSENT);
    assert_int_equal(q->reasoning_format, GW_CHAT_REQUEST_FORMAT_AUTO);
    assert_true(q->add_generation_prompt && q->continue_final_message);
}

/* Missing or null, one by one and all at once: the same. */
static void test_gw_chat_request_null_is_absent(void **state)
{
    static const enum gw_chat_request_kind kinds[] = {GW_CHAT_REQUEST_CHAT,
                                                      GW_CHAT_REQUEST_COMPLETION};
    size_t n;
    const struct gw_chat_request_field *fields = gw_chat_request_fields(&n);
    (void)state;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        struct gw_chat_request q;
        struct gw_refusal refusal = {0};
        json_t *all = body_of(kinds[k]);
        for (size_t i = 0; i < n; i++) {
            json_t *one = body_of(kinds[k]);
            if (json_object_get(one, fields[i].name) == NULL) {
                json_object_set_new(one, fields[i].name, json_null());
                json_object_set_new(all, fields[i].name, json_null());
            }
            assert_true(parse_json(one, kinds[k], &q, &refusal));
            check_defaults(&q);
            gw_chat_request_done(&q);
        }
        json_object_set_new(all, "unknown", json_null());
        assert_true(parse_json(all, kinds[k], &q, &refusal));
        check_defaults(&q);
        gw_chat_request_done(&q);
    }
}

static void set_session(struct gw_chat_request *q, const char *value, const char *want)
{
    assert_true(gw_chat_request_set_session(q, (struct gw_http_text){value, strlen(value)}));
    if (want)
        assert_string_equal(q->session, want);
    else
        assert_null(q->session);
}

static void test_gw_chat_request_session_of_the_head_wins_if_it_is_one(void **state)
{
    char longest[130];
    (void)state;
    struct gw_chat_request q = parsed("{" M "}", GW_CHAT_REQUEST_CHAT);
    set_session(&q, "", NULL);
    set_session(&q, "a b", NULL);
    set_session(&q, "aZ0._:-", "aZ0._:-");
    gw_chat_request_done(&q);
    q = parsed("{" M ",\"prompt_cache_key\":\"of the body\"}", GW_CHAT_REQUEST_CHAT);
    set_session(&q, "", "of the body");
    set_session(&q, "a,b", "of the body");
    set_session(&q, "a/b", "of the body");
    set_session(&q, "\xC3\xA9", "of the body");
    memset(longest, 'x', sizeof longest - 1);
    longest[129] = '\0';
    set_session(&q, longest, "of the body");
    longest[128] = '\0';
    set_session(&q, longest, longest);
    assert_true(gw_chat_request_set_session(&q, (struct gw_http_text){NULL, 0}));
    assert_true(gw_chat_request_set_session(&q, (struct gw_http_text){"a\0b", 3}));
    assert_string_equal(q.session, longest);
    alloc_fail_at(1, 0);
    assert_false(gw_chat_request_set_session(&q, (struct gw_http_text){"s", 1}));
    alloc_fail_at(0, 0);
    gw_chat_request_done(&q);
}

static void test_gw_chat_request_defaults_and_precedence(void **state)
{
    (void)state;
    struct gw_chat_request q = parsed("{" M "}", GW_CHAT_REQUEST_CHAT);
    check_defaults(&q);
    gw_chat_request_done(&q);
    q = parsed("{\"prompt\":\"a\"}", GW_CHAT_REQUEST_COMPLETION);
    check_defaults(&q);
    gw_chat_request_done(&q);
    q = parsed("{" M ",\"repeat_penalty\":null,\"repetition_penalty\":2}", GW_CHAT_REQUEST_CHAT);
    assert_true(q.repeat_penalty == 2);
    gw_chat_request_done(&q);
    q = parsed("{" M ",\"n_predict\":3,\"max_tokens\":2,\"max_completion_tokens\":1}",
               GW_CHAT_REQUEST_CHAT);
    assert_int_equal(q.max_new, 1);
    gw_chat_request_done(&q);
    q = parsed("{\"prompt\":\"a\"}", GW_CHAT_REQUEST_COMPLETION);
    assert_int_equal(q.max_new, 16);
    assert_false(q.logprobs);
    gw_chat_request_done(&q);
    q = parsed("{" M ",\"repetition_penalty\":2}", GW_CHAT_REQUEST_CHAT);
    assert_true(q.repeat_penalty == 2);
    gw_chat_request_done(&q);
}

static void test_gw_chat_request_unknown_fields_are_named_safely(void **state)
{
    (void)state;
    struct gw_chat_request q =
        parsed("{" M ",\"store\":1,\"a.b\":2,\"x\\r\\ny\":3,\"nul\":null}", GW_CHAT_REQUEST_CHAT);
    assert_non_null(strstr(q.ignored, "store"));
    assert_non_null(strstr(q.ignored, "a.b"));
    assert_null(strchr(q.ignored, '\r'));
    assert_null(strstr(q.ignored, "nul"));
    gw_chat_request_done(&q);
}

static void test_gw_chat_request_stops_and_biases(void **state)
{
    (void)state;
    struct gw_chat_request q = parsed(
        "{" M ",\"stop\":[\"\",\"ab\"],\"logit_bias\":[[7,false],[8,1.5]]}", GW_CHAT_REQUEST_CHAT);
    assert_int_equal(q.n_stops, 1);
    assert_int_equal(q.n_bias, 2);
    assert_true(isinf(q.bias[0].value) && q.bias[0].value < 0);
    assert_true(q.bias[1].value == 1.5f);
    gw_chat_request_done(&q);
    refused("{" M ",\"stop\":[\"a\",1]}", GW_CHAT_REQUEST_CHAT, GW_ERROR_INVALID_TYPE, "stop[1]");
    refused("{" M ",\"logit_bias\":{\"4096\":1}}", GW_CHAT_REQUEST_CHAT, GW_ERROR_INVALID_VALUE,
            "logit_bias.4096");
    refused("{" M ",\"logit_bias\":{\"+1\":1}}", GW_CHAT_REQUEST_CHAT, GW_ERROR_INVALID_VALUE,
            "logit_bias.+1");
    refused("{" M ",\"logit_bias\":[[1]]}", GW_CHAT_REQUEST_CHAT, GW_ERROR_INVALID_TYPE,
            "logit_bias[0]");
    refused("{" M ",\"top_logprobs\":1}", GW_CHAT_REQUEST_CHAT, GW_ERROR_INVALID_VALUE,
            "top_logprobs");
    refused("{" M ",\"stream_options\":{\"include_usage\":1}}", GW_CHAT_REQUEST_CHAT,
            GW_ERROR_INVALID_TYPE, "stream_options.include_usage");
    refused("{" M ",\"chat_template_kwargs\":{\"enable_thinking\":\"no\"}}", GW_CHAT_REQUEST_CHAT,
            GW_ERROR_INVALID_TYPE, "chat_template_kwargs.enable_thinking");
}

static void test_gw_chat_request_messages(void **state)
{
    (void)state;
    static const struct {
        const char *json;
        enum gw_error_code code;
        const char *param;
    } bad[] = {
        {"{}", GW_ERROR_MISSING_FIELD, "messages"},
        {"{\"messages\":[]}", GW_ERROR_INVALID_VALUE, "messages"},
        {"{\"messages\":[1]}", GW_ERROR_INVALID_TYPE, "messages[0]"},
        {"{\"messages\":[{\"content\":\"a\"}]}", GW_ERROR_MISSING_FIELD, "messages[0].role"},
        {"{\"messages\":[{\"role\":\"bot\",\"content\":\"a\"}]}", GW_ERROR_INVALID_VALUE,
         "messages[0].role"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":null}]}", GW_ERROR_MISSING_FIELD,
         "messages[0].content"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}",
         GW_ERROR_UNSUPPORTED_CONTENT, "messages[0].content[0].type"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":1}]}]}", GW_ERROR_INVALID_TYPE,
         "messages[0].content[0].type"},
        {"{\"messages\":[{\"role\":\"tool\",\"content\":\"a\"}]}", GW_ERROR_MISSING_FIELD,
         "messages[0].tool_call_id"},
        {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{}}]}]}",
         GW_ERROR_INVALID_TYPE, "messages[0].tool_calls[0].function.name"},
        {"{\"messages\":[{\"role\":\"assistant\",\"function_call\":{\"name\":\"f\"}}]}",
         GW_ERROR_UNSUPPORTED_CONTENT, "messages[0].function_call"},
        {"{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"audio\":{\"id\":\"1\"}}]}",
         GW_ERROR_UNSUPPORTED_CONTENT, "messages[0].audio"},
        {"{\"messages\":[{\"role\":\"assistant\",\"refusal\":1}]}", GW_ERROR_INVALID_TYPE,
         "messages[0].refusal"},
        {"{\"messages\":[{\"role\":\"user\",\"refusal\":\"no\"}]}", GW_ERROR_MISSING_FIELD,
         "messages[0].content"},
        {"{\"messages\":[{\"role\":\"function\",\"name\":\"f\",\"content\":\"a\"}]}",
         GW_ERROR_INVALID_VALUE, "messages[0].role"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        refused(bad[i].json, GW_CHAT_REQUEST_CHAT, bad[i].code, bad[i].param);
    struct gw_chat_request q = parsed(
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
        "{\"type\":\"refusal\",\"refusal\":\"b\"}]},{\"role\":\"assistant\",\"content\":null,"
        "\"reasoning\":\"r\",\"tool_calls\":[]}]}",
        GW_CHAT_REQUEST_CHAT);
    const json_t *user = json_array_get(q.messages, 0), *assistant = json_array_get(q.messages, 1);
    assert_string_equal(json_string_value(json_object_get(user, "content")), "a\nb");
    assert_string_equal(json_string_value(json_object_get(assistant, "content")), "");
    assert_string_equal(json_string_value(json_object_get(assistant, "reasoning_content")), "r");
    assert_null(json_object_get(assistant, "tool_calls"));
    gw_chat_request_done(&q);
    /* What the official client holds of an answer, sent back as it is; and a refusal is what was
     * said. */
    q = parsed("{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"refusal\":null,"
               "\"annotations\":[],\"audio\":null,\"function_call\":null,\"tool_calls\":null},"
               "{\"role\":\"assistant\",\"content\":null,\"refusal\":\"no\"}]}",
               GW_CHAT_REQUEST_CHAT);
    assert_string_equal(
        json_string_value(json_object_get(json_array_get(q.messages, 0), "content")), "a");
    assert_string_equal(
        json_string_value(json_object_get(json_array_get(q.messages, 1), "content")), "no");
    gw_chat_request_done(&q);
}

static void test_gw_chat_request_prompts(void **state)
{
    (void)state;
    struct gw_chat_request q = parsed("{\"prompt\":[[1,2],[3.0]]}", GW_CHAT_REQUEST_COMPLETION);
    assert_int_equal(q.n_prompts, 2);
    assert_int_equal(q.prompts[1].ids[0], 3);
    gw_chat_request_done(&q);
    q = parsed("{\"prompt\":[\"a\",\"b\\u0000c\"],\"logprobs\":0}", GW_CHAT_REQUEST_COMPLETION);
    assert_int_equal(q.prompts[1].n_text, 3);
    assert_true(q.logprobs);
    gw_chat_request_done(&q);
    refused("{\"prompt\":[]}", GW_CHAT_REQUEST_COMPLETION, GW_ERROR_INVALID_VALUE, "prompt");
    refused("{\"prompt\":[[1],\"x\"]}", GW_CHAT_REQUEST_COMPLETION, GW_ERROR_INVALID_TYPE,
            "prompt[1]");
    refused("{\"prompt\":[4096]}", GW_CHAT_REQUEST_COMPLETION, GW_ERROR_INVALID_VALUE, "prompt[0]");
    refused("{\"prompt\":[[1],[1.5]]}", GW_CHAT_REQUEST_COMPLETION, GW_ERROR_INVALID_TYPE,
            "prompt[1][0]");
    refused("{\"prompt\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\"]}",
            GW_CHAT_REQUEST_COMPLETION, GW_ERROR_INVALID_VALUE, "prompt");
}

/* Every allocation fails once: refused or taken, and nothing is left. */
static void test_gw_chat_request_without_memory_leaves_nothing(void **state)
{
    (void)state;
    static const char json[] =
        "{" M ",\"model\":\"m\",\"user\":\"u\",\"stop\":[\"a\",\"b\"],\"logit_bias\":{\"1\":1}}";
    for (uint64_t k = 1; k < 20; k++) {
        struct gw_chat_request q;
        struct gw_refusal refusal = {0};
        json_t *body = json_loads(json, 0, NULL);
        uint64_t live = alloc_live_blocks();
        alloc_fail_at(k, 0);
        bool ok = gw_chat_request_parse(body, GW_CHAT_REQUEST_CHAT, &limits, &q, &refusal);
        alloc_fail_at(0, 0);
        if (ok)
            gw_chat_request_done(&q);
        else
            assert_int_equal(refusal.code, GW_ERROR_OVERLOADED);
        assert_int_equal(alloc_live_blocks(), live);
        json_decref(body);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_chat_request_every_field_of_the_table),
        cmocka_unit_test(test_gw_chat_request_null_is_absent),
        cmocka_unit_test(test_gw_chat_request_session_of_the_head_wins_if_it_is_one),
        cmocka_unit_test(test_gw_chat_request_defaults_and_precedence),
        cmocka_unit_test(test_gw_chat_request_unknown_fields_are_named_safely),
        cmocka_unit_test(test_gw_chat_request_stops_and_biases),
        cmocka_unit_test(test_gw_chat_request_messages),
        cmocka_unit_test(test_gw_chat_request_prompts),
        cmocka_unit_test(test_gw_chat_request_without_memory_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

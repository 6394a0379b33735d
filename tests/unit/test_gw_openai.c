#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "gguf_file.h"
#include "gw_openai.h"
#include "gw_tokenizer.h"

static struct gw_tokenizer *tokenizer;

static int setup(void **state)
{
    struct gguf_file *file = NULL;
    (void)state;
    assert_int_equal(gguf_file_open(ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf", &file, NULL),
                     ERR_OK);
    assert_int_equal(gw_tokenizer_new(file, &tokenizer, NULL), ERR_OK);
    gguf_file_close(file);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    gw_tokenizer_free(tokenizer);
    return 0;
}

static void assert_json(struct buf *out, const char *expected)
{
    buf_byte(out, '\0');
    assert_string_equal((const char *)out->data, expected);
    buf_clear(out);
}

static void test_gw_openai_heads_name_kind_and_model(void **state)
{
    (void)state;
    struct gw_request q = {.id = "abc", .created_s = 5, .arithmetic = 3};
    const uint8_t digest[16] = {0xde, 0xad, 0xbe, 0xef};
    struct buf out = BUF_INIT(1 << 16);
    q.ask.kind = GW_CHAT_REQUEST_CHAT;
    gw_openai_head(&out, &q, "m\"x", digest, true);
    assert_json(&out, "{\"id\":\"chatcmpl-abc\",\"object\":\"chat.completion.chunk\",\"created\":5,"
                      "\"model\":\"m\\\"x\",\"system_fingerprint\":\"islet-3-deadbeef\","
                      "\"choices\":[");
    q.ask.kind = GW_CHAT_REQUEST_COMPLETION;
    gw_openai_head(&out, &q, "m", digest, true);
    assert_json(&out, "{\"id\":\"cmpl-abc\",\"object\":\"text_completion\",\"created\":5,"
                      "\"model\":\"m\",\"system_fingerprint\":\"islet-3-deadbeef\",\"choices\":[");
    buf_done(&out);
}

static void test_gw_openai_usage_and_timings_have_the_keys_in_order(void **state)
{
    (void)state;
    struct buf out = BUF_INIT(1 << 16);
    struct gw_openai_usage u = {9, 2, 1, 0, 42, 0, 7, 8, 9, 10, 1, true};
    gw_openai_usage(&out, &u);
    assert_json(&out, "{\"prompt_tokens\":9,\"completion_tokens\":2,\"total_tokens\":11,"
                      "\"prompt_tokens_details\":{\"cached_tokens\":1},"
                      "\"completion_tokens_details\":{\"reasoning_tokens\":0},"
                      "\"islet\":{\"seed\":42,\"expert_hits\":{\"vram\":0,\"ram\":7},"
                      "\"expert_misses\":8,\"ssd_bytes\":9,\"queue_ms\":10,\"resumed\":1,"
                      "\"context_full\":true}}");
    struct gw_openai_timings t = {1, 8, 2, 4, 0};
    gw_openai_timings(&out, &t);
    assert_json(&out, "{\"cache_n\":1,\"prompt_n\":8,\"prompt_ms\":4,\"prompt_per_second\":2000,"
                      "\"predicted_n\":2,\"predicted_ms\":0,\"predicted_per_second\":0}");
    gw_openai_finish(&out, PROTO_FINISH_CONTEXT, false);
    gw_openai_finish(&out, PROTO_FINISH_LENGTH, true);
    assert_json(&out, "\"length\"\"stop\"");
    buf_done(&out);
}

static void test_gw_openai_logprobs_hold_exact_bytes(void **state)
{
    (void)state;
    union {
        struct gw_request_lp lp;
        uint8_t room[sizeof(struct gw_request_lp) + sizeof(struct proto_top)];
    } u = {.lp = {.logprob = -0.1f, .n_top = 1}};
    struct gw_tokenizer_ids ids = {0};
    struct buf out = BUF_INIT(1 << 16);
    assert_int_equal(
        gw_tokenizer_encode(tokenizer, "\xF0\x9F\x9A\x80", 4, false, false, &ids, NULL), ERR_OK);
    u.lp.top[0] = (struct proto_top){ids.ids[0], -INFINITY};
    gw_openai_logprob(&out, tokenizer, ids.ids[0], &u.lp);
    assert_json(&out, "{\"token\":\"\xEF\xBF\xBD\",\"logprob\":-0.1,\"bytes\":[240],"
                      "\"top_logprobs\":[{\"token\":\"\xEF\xBF\xBD\",\"logprob\":-9999.0,"
                      "\"bytes\":[240]}]}");
    struct gw_openai_columns c;
    gw_openai_columns_init(&c, 1 << 16);
    gw_openai_columns_add(&c, tokenizer, 65, NULL, 0);
    gw_openai_columns_add(&c, tokenizer, ids.ids[0], &u.lp, 1);
    gw_openai_columns_write(&out, &c, true);
    buf_byte(&out, '\0');
    assert_non_null(strstr((char *)out.data, "\"token_logprobs\":[null,-0.1]"));
    assert_non_null(strstr((char *)out.data, "\"text_offset\":[0,1]}"));
    json_t *root = json_loads((char *)out.data, 0, NULL);
    assert_int_equal(json_array_size(json_object_get(root, "top_logprobs")), 2);
    json_decref(root);
    gw_openai_columns_done(&c);
    gw_tokenizer_ids_done(&ids);
    buf_done(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_openai_heads_name_kind_and_model),
        cmocka_unit_test(test_gw_openai_usage_and_timings_have_the_keys_in_order),
        cmocka_unit_test(test_gw_openai_logprobs_hold_exact_bytes),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

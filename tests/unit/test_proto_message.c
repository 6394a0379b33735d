#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "guard_page.h"
#include "proto_dump.h"

/* ---- PROTOCOL.md's examples ---- */

/* A fenced block "```example NAME": hex bytes, an empty line, then the fields as proto_dump gives
 * them. */
struct example {
    char name[64];
    uint8_t bytes[4096];
    size_t n;
    char fields[8192];
};

static bool read_hex(const char *line, struct example *x)
{
    unsigned byte;
    int used;
    while (sscanf(line, " %2x%n", &byte, &used) == 1) {
        if (x->n == sizeof x->bytes)
            return false;
        x->bytes[x->n++] = (uint8_t)byte;
        line += used;
    }
    return true;
}

/* False at the end of the file. */
static bool next_example(FILE *f, struct example *x)
{
    char line[1024];
    *x = (struct example){0};
    while (fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "```example %63s", x->name) == 1)
            break;
    if (x->name[0] == '\0')
        return false;
    while (fgets(line, sizeof line, f) != NULL && line[0] != '\n')
        assert_true(read_hex(line, x));
    while (fgets(line, sizeof line, f) != NULL && strncmp(line, "```", 3) != 0) {
        assert_true(strlen(x->fields) + strlen(line) < sizeof x->fields);
        memcpy(x->fields + strlen(x->fields), line, strlen(line) + 1);
    }
    return true;
}

static FILE *open_protocol(void)
{
    FILE *f = fopen(ISLET_TEST_DIR "/../proto/PROTOCOL.md", "r");
    assert_non_null(f);
    return f;
}

static bool take_frame(struct proto_reader *r, const void *bytes, size_t n, struct proto_frame *ret)
{
    struct err e = {0};
    proto_reader_init(r, PROTO_MAX_FRAME);
    return proto_reader_feed(r, bytes, n, &e) == ERR_OK && proto_reader_next(r, ret) == 1;
}

static void check_example(const struct example *x)
{
    struct proto_reader r;
    struct proto_frame f;
    struct err e = {0};
    struct buf text = BUF_INIT(1 << 20), again = BUF_INIT(1 << 20);
    if (!take_frame(&r, x->bytes, x->n, &f))
        fail_msg("%s: the bytes are not one frame", x->name);
    assert_string_equal(proto_cmd_name(f.cmd), x->name);
    if (proto_dump(&f, &text, &again, &e) != ERR_OK)
        fail_msg("%s: %s", x->name, e.text);
    bool same = again.size == x->n && memcmp(again.data, x->bytes, x->n) == 0;
    buf_byte(&text, 0);
    if (!same || strcmp((char *)text.data, x->fields) != 0) {
        print_message("%s should be:\n", x->name);
        for (size_t i = 0; i < again.size; i++)
            print_message("%02x%c", again.data[i],
                          i + 1 == again.size || i % 32 == 31 ? '\n' : ' ');
        print_message("\n%s", (char *)text.data);
        fail_msg("PROTOCOL.md's example of %s differs", x->name);
    }
    proto_reader_done(&r);
    buf_done(&text);
    buf_done(&again);
}

static void test_proto_message_documented_examples_are_true(void **state)
{
    (void)state;
    bool seen[256] = {false};
    struct example *x = malloc(sizeof *x);
    FILE *f = open_protocol();
    assert_non_null(x);
    while (next_example(f, x)) {
        check_example(x);
        seen[x->bytes[4]] = true;
    }
#define PROTO_MESSAGE(name, number, direction, text, help) \
    if (!seen[number])                                     \
        fail_msg("PROTOCOL.md has no example of %s", text);
#include "proto_messages.def"
#undef PROTO_MESSAGE
    fclose(f);
    free(x);
}

/* Payloads of each length up to the whole: a decoder must not read past them nor accept them, save
 * where only optional bytes are missing: run_inference's trace of the example, "cut-1". */
static void test_proto_message_cut_payload_is_refused(void **state)
{
    (void)state;
    struct example *x = malloc(sizeof *x);
    FILE *f = open_protocol();
    assert_non_null(x);
    while (next_example(f, x)) {
        const size_t optional = x->bytes[4] == PROTO_RUN_INFERENCE ? 2 + strlen("cut-1") : 0;
        for (size_t n = 0; n < x->n - PROTO_HEADER_BYTES; n++) {
            const bool whole = n >= x->n - PROTO_HEADER_BYTES - optional;
            struct buf text = BUF_INIT(1 << 20), again = BUF_INIT(1 << 20);
            struct err e = {0};
            uint8_t *copy = guard_page_copy(x->bytes + PROTO_HEADER_BYTES, n);
            struct proto_frame frame = {.cmd = x->bytes[4], .payload = copy, .n_payload = n};
            assert_int_equal(proto_dump(&frame, &text, &again, &e), whole ? ERR_OK : ERR_PROTOCOL);
            assert_true(whole || e.text[0] != '\0');
            guard_page_free(copy, n);
            buf_done(&text);
            buf_done(&again);
        }
    }
    fclose(f);
    free(x);
}

static void test_proto_message_trailing_bytes_are_ignored(void **state)
{
    (void)state;
    struct example *x = malloc(sizeof *x);
    FILE *f = open_protocol();
    assert_non_null(x);
    while (next_example(f, x)) {
        struct buf text = BUF_INIT(1 << 20), again = BUF_INIT(1 << 20);
        struct err e = {0};
        struct proto_frame frame = {.cmd = x->bytes[4],
                                    .payload = x->bytes + PROTO_HEADER_BYTES,
                                    .n_payload = x->n - PROTO_HEADER_BYTES + 5};
        assert_int_equal(proto_dump(&frame, &text, &again, &e), ERR_OK);
        assert_int_equal(again.size, x->n);
        buf_done(&text);
        buf_done(&again);
    }
    fclose(f);
    free(x);
}

/* ---- ranges ---- */

static const uint32_t three[] = {1, 2, 3};

static struct proto_run good_run(void)
{
    return (struct proto_run){.tokens = three,
                              .n_tokens = 3,
                              .n_prompt = 3,
                              .max_new = 9,
                              .top_p = 1,
                              .repeat = 1,
                              .n_end = 1,
                              .end = {7}};
}

/* Byte offsets in run_inference's payload. */
enum {
    AT_N_TOKENS = 0,
    AT_N_PROMPT = 4,
    AT_FIRST_INDEX = 8,
    AT_TEMPERATURE = 16,
    AT_TOP_P = 20,
    AT_MIN_P = 24,
    AT_PRESENCE = 32,
    AT_FREQUENCY = 36,
    AT_REPEAT = 40,
    AT_REPEAT_LAST_N = 44,
    AT_FLAGS = 57,
    AT_N_TOP = 61,
    AT_N_END = 62,
    AT_N_BIAS = 63,
};

static const uint32_t NAN_BITS = 0x7FC00000, INF_BITS = 0x7F800000, MINUS_INF_BITS = 0xFF800000;

static void expect_run(size_t at, size_t n, uint32_t value, enum err_code code, const char *field)
{
    struct proto_run run = good_run(), decoded;
    struct proto_reader r;
    struct proto_frame f;
    struct proto_scratch scratch;
    struct err e = {0};
    struct buf b = BUF_INIT(1 << 20);
    proto_encode_run(&b, 1, &run);
    for (size_t i = 0; i < n; i++)
        b.data[PROTO_HEADER_BYTES + at + i] = (uint8_t)(value >> (8 * (n - 1 - i)));
    assert_true(take_frame(&r, b.data, b.size, &f));
    proto_scratch_init(&scratch);
    enum err_code got = proto_decode_run(&f, &scratch, &decoded, &e);
    if (got != code || (code != ERR_OK && strncmp(e.text, field, strlen(field)) != 0))
        fail_msg("%s = 0x%x: code %s, \"%s\"", field, value, err_code_name(got), e.text);
    proto_scratch_done(&scratch);
    proto_reader_done(&r);
    buf_done(&b);
}

static void test_proto_message_run_out_of_range_names_the_field(void **state)
{
    (void)state;
    expect_run(0, 0, 0, ERR_OK, "untouched");
    expect_run(AT_N_PROMPT, 4, 4, ERR_PROTOCOL, "n_prompt: 4, the limit is 3");
    expect_run(AT_N_PROMPT, 4, 2, ERR_PROTOCOL, "first_index: 0, but n_tokens - n_prompt is 1");
    expect_run(AT_FIRST_INDEX, 4, 1, ERR_PROTOCOL, "first_index: 1");
    expect_run(AT_FIRST_INDEX, 4, UINT32_MAX, ERR_PROTOCOL, "first_index: ");
    expect_run(AT_N_TOKENS, 4, UINT32_MAX, ERR_PROTOCOL, "first_index: ");
    for (size_t at = AT_TEMPERATURE; at <= AT_REPEAT; at += 4) {
        if (at == 28) /* top_k takes any bits */
            continue;
        static const char *const names[] = {"temperature", "top_p",     "min_p", "",
                                            "presence",    "frequency", "repeat"};
        const char *name = names[(at - AT_TEMPERATURE) / 4];
        expect_run(at, 4, NAN_BITS, ERR_PROTOCOL, name);
        expect_run(at, 4, INF_BITS, ERR_PROTOCOL, name);
        expect_run(at, 4, MINUS_INF_BITS, ERR_PROTOCOL, name);
    }
    expect_run(AT_TEMPERATURE, 4, 0xBF800000, ERR_OK, "temperature -1 is greedy");
    expect_run(AT_TOP_P, 4, 0x3F800001, ERR_PROTOCOL, "top_p: ");
    expect_run(AT_TOP_P, 4, 0xBF800000, ERR_PROTOCOL, "top_p: -1, not within 0 and 1");
    expect_run(AT_MIN_P, 4, 0x3F800001, ERR_PROTOCOL, "min_p: ");
    expect_run(AT_REPEAT, 4, 0, ERR_PROTOCOL, "repeat: 0, not over 0");
    expect_run(AT_REPEAT, 4, 0xBF800000, ERR_PROTOCOL, "repeat: -1");
    expect_run(AT_REPEAT_LAST_N, 4, UINT32_MAX, ERR_OK, "-1");
    expect_run(AT_REPEAT_LAST_N, 4, UINT32_MAX - 1, ERR_PROTOCOL, "repeat_last_n: -2");
    expect_run(AT_FLAGS, 4, 15, ERR_OK, "all flags");
    expect_run(AT_FLAGS, 4, 16, ERR_PROTOCOL, "flags: 0x10");
    expect_run(AT_N_TOP, 1, 20, ERR_OK, "n_top");
    expect_run(AT_N_TOP, 1, 21, ERR_PROTOCOL, "n_top: 21, the limit is 20");
    expect_run(AT_N_END, 1, 17, ERR_PROTOCOL, "n_end: 17, the limit is 16");
    expect_run(AT_N_BIAS, 2, 1089, ERR_PROTOCOL, "n_bias: 1089, the limit is 1088");
}

static void expect_bias(float value, enum err_code code)
{
    struct proto_run run = good_run(), decoded;
    struct proto_bias bias[2] = {{.id = 4, .value = 1}, {.id = 5, .value = value}};
    struct proto_reader r;
    struct proto_frame f;
    struct proto_scratch scratch;
    struct err e = {0};
    struct buf b = BUF_INIT(1 << 20);
    run.bias = bias;
    run.n_bias = 2;
    proto_encode_run(&b, 1, &run);
    assert_true(take_frame(&r, b.data, b.size, &f));
    proto_scratch_init(&scratch);
    assert_int_equal(proto_decode_run(&f, &scratch, &decoded, &e), code);
    if (code == ERR_OK)
        assert_memory_equal(decoded.bias, bias, sizeof bias);
    else
        assert_int_equal(strncmp(e.text, "bias[1]: ", 9), 0);
    proto_scratch_done(&scratch);
    proto_reader_done(&r);
    buf_done(&b);
}

static void test_proto_message_bias_is_finite_or_minus_infinity(void **state)
{
    (void)state;
    expect_bias(-100, ERR_OK);
    expect_bias(-INFINITY, ERR_OK);
    expect_bias(INFINITY, ERR_PROTOCOL);
    expect_bias(NAN, ERR_PROTOCOL);
}

/* Bytes behind the tokens, `size` as their length; n 0: as much of a length as size says. */
static void expect_trace(const char *bytes, size_t n, uint16_t size, const char *want)
{
    struct proto_run run = good_run(), decoded;
    struct proto_reader r;
    struct proto_frame f;
    struct proto_scratch scratch;
    struct err e = {0};
    struct buf b = BUF_INIT(1 << 20);
    proto_encode_run(&b, 1, &run);
    const uint8_t head[2] = {(uint8_t)(size >> 8), (uint8_t)size};
    buf_append(&b, head, n > 0 ? 2 : size > 0 ? 1 : 0);
    buf_append(&b, bytes, n);
    b.data[2] = (uint8_t)(b.size >> 8);
    b.data[3] = (uint8_t)b.size;
    assert_true(take_frame(&r, b.data, b.size, &f));
    proto_scratch_init(&scratch);
    assert_int_equal(proto_decode_run(&f, &scratch, &decoded, &e), ERR_OK);
    if (decoded.trace.size != strlen(want) || strncmp(decoded.trace.data, want, strlen(want)) != 0)
        fail_msg("trace of %zu bytes: \"%.*s\", not \"%s\"", n, decoded.trace.size,
                 decoded.trace.data, want);
    proto_scratch_done(&scratch);
    proto_reader_done(&r);
    buf_done(&b);
}

/* A client of another version sends none, or other bytes in its place: the request runs. */
static void test_proto_message_trace_is_taken_where_it_is_one(void **state)
{
    (void)state;
    char longest[130];
    memset(longest, 'x', 129);
    longest[128] = '\0';
    expect_trace("", 0, 0, "");
    expect_trace("", 0, 1, ""); /* half a length */
    expect_trace("req_0.:-Z", 9, 9, "req_0.:-Z");
    expect_trace("req and more", 12, 3, "req");
    expect_trace(longest, 128, 128, longest);
    longest[128] = 'x';
    expect_trace(longest, 129, 129, "");
    expect_trace("abc", 3, 4, "");
    expect_trace("abc", 3, 0, "");
    expect_trace("a b", 3, 3, "");
    expect_trace("a\n=", 3, 3, "");
}

/* As many tokens as a frame holds: over four million, decoded in one pass. */
static void test_proto_message_largest_run_decodes_to_itself(void **state)
{
    (void)state;
    struct proto_run run = good_run(), decoded;
    struct proto_reader r;
    struct proto_frame f;
    struct proto_scratch scratch;
    struct err e = {0};
    uint32_t n = (PROTO_MAX_FRAME - 200) / 4;
    uint32_t *tokens = alloc_get(ALLOC_MISC, 4 * (size_t)n);
    struct buf b = BUF_INIT(PROTO_MAX_FRAME);
    assert_non_null(tokens);
    for (uint32_t i = 0; i < n; i++)
        tokens[i] = i * 2654435761u;
    run.tokens = tokens;
    run.n_tokens = run.n_prompt = n;
    proto_encode_run(&b, 1, &run);
    assert_false(buf_failed(&b));
    assert_true(take_frame(&r, b.data, b.size, &f));
    proto_scratch_init(&scratch);
    assert_int_equal(proto_decode_run(&f, &scratch, &decoded, &e), ERR_OK);
    assert_int_equal(decoded.n_tokens, n);
    assert_memory_equal(decoded.tokens, tokens, 4 * (size_t)n);
    proto_scratch_done(&scratch);
    proto_reader_done(&r);
    buf_done(&b);
    alloc_free(tokens);
}

static void test_proto_message_full_buffer_keeps_whole_frames_only(void **state)
{
    (void)state;
    struct proto_run run = good_run();
    struct buf b = BUF_INIT(100);
    proto_encode_empty(&b, PROTO_CANCEL, 5);
    proto_encode_run(&b, 1, &run);
    assert_true(buf_failed(&b));
    assert_int_equal(b.size, PROTO_HEADER_BYTES);
    buf_done(&b);
}

/* A payload by hand: the decoder's answer to bytes that no encoder of ours makes. */
static void expect_payload(uint8_t cmd, const void *payload, size_t n, const char *text)
{
    struct buf dump = BUF_INIT(1 << 20), again = BUF_INIT(1 << 20);
    struct err e = {0};
    uint8_t *copy = guard_page_copy(payload, n);
    struct proto_frame f = {.cmd = cmd, .payload = copy, .n_payload = n};
    enum err_code code = proto_dump(&f, &dump, &again, &e);
    if (text == NULL)
        assert_int_equal(code, ERR_OK);
    else
        assert_string_equal(e.text, text);
    guard_page_free(copy, n);
    buf_done(&dump);
    buf_done(&again);
}

static void test_proto_message_other_fields_out_of_range_are_named(void **state)
{
    (void)state;
    expect_payload(PROTO_HELLO, "\0\0\0\1\2\1", 6, "client: 513 bytes, the limit is 512");
    expect_payload(PROTO_ERROR, "\0\0\0\0\0", 5, "code: 0 is not an error");
    expect_payload(PROTO_ERROR, "\0\x63\0\0\0", 5, "code: 99, the limit is 10");
    expect_payload(PROTO_ERROR, "\0\1\2\0\0", 5, "retryable: 2, the limit is 1");
    expect_payload(PROTO_PROGRESS, "\0\0\0\2\0\0\0\0\0\0\0\1", 12, "prefilled: 2, the limit is 1");
    expect_payload(PROTO_PROGRESS, "\0\0\0\1\0\0\0\2\0\0\0\1", 12, "cached: 2, the limit is 1");
    expect_payload(PROTO_NOTICE, "\3\0\0", 3, "action: 3, the limit is 2");
    expect_payload(PROTO_LOADED, "\0\0\0\1\3", 5, "tier: 3, the limit is 2");
    expect_payload(PROTO_WELCOME, "\0\0\0\1\4", 5, "state: 4, the limit is 3");
    expect_payload(PROTO_TOKENS, "\0\0\0\0\0\0", 6, "n: 0, the least is 1");
    expect_payload(PROTO_TOKENS, "\0\0\0\0\xff\xff\0\0\0\0\0", 11,
                   "n: 65535, but 5 bytes are left for the tokens");
    expect_payload(PROTO_TOKENS, "\0\0\0\0\0\1\0\0\0\5\4", 11,
                   "tokens[0].flags: 0x4, known are 0x3");
    expect_payload(PROTO_TOKENS, "\0\0\0\0\0\2\0\0\0\5\1\0\0\0\6\0", 16,
                   "tokens[1].flags: prompt and answer in one frame");
    expect_payload(PROTO_TOKENS, "\0\0\0\0\0\1\0\0\0\5\2\x7f\xc0\0\0\0", 16,
                   "tokens[0].logprob: not a number");
    expect_payload(PROTO_TOKENS, "\0\0\0\0\0\1\0\0\0\5\3\x7f\xc0\0\0\0", 16, NULL);
    expect_payload(PROTO_TOKENS, "\0\0\0\0\0\1\0\0\0\5\2\0\0\0\0\x15", 16,
                   "tokens.n_top: 21, the limit is 20");
    expect_payload(PROTO_STATUS, "\0\0", 2, "version: 0, the least is 1");
}

/* ---- status of other versions ---- */

static void expect_status(uint16_t n_values, uint64_t *ret_uptime, uint64_t *ret_threads)
{
    struct buf b = BUF_INIT(1 << 20);
    struct proto_scratch scratch;
    struct proto_status m;
    struct err e = {0};
    buf_append(&b, "\0\1\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0", 17);
    buf_byte(&b, (uint8_t)(n_values >> 8));
    buf_byte(&b, (uint8_t)n_values);
    for (unsigned i = 0; i < n_values; i++)
        buf_append(&b, "\0\0\0\0\0\0\0\x09", 8);
    buf_append(&b, "\0\0", 2);
    struct proto_frame f = {.cmd = PROTO_STATUS, .payload = b.data, .n_payload = b.size};
    proto_scratch_init(&scratch);
    assert_int_equal(proto_decode_status(&f, &scratch, &m, &e), ERR_OK);
    *ret_uptime = m.uptime_ms;
    *ret_threads = m.cpu_threads;
    proto_scratch_done(&scratch);
    buf_done(&b);
}

static void test_proto_message_status_of_another_version_is_understood(void **state)
{
    (void)state;
    uint64_t uptime, threads;
    expect_status(1, &uptime, &threads); /* an older worker */
    assert_int_equal(uptime, 9);
    assert_int_equal(threads, 0);
    expect_status(2000, &uptime, &threads); /* a newer one */
    assert_int_equal(uptime, 9);
    assert_int_equal(threads, 9);
}

static void test_proto_message_no_memory_is_reported(void **state)
{
    (void)state;
    struct proto_run run = good_run(), decoded;
    struct proto_reader r;
    struct proto_frame f;
    struct proto_scratch scratch;
    struct err e = {0};
    struct buf b = BUF_INIT(1 << 20);
    proto_encode_run(&b, 1, &run);
    assert_true(take_frame(&r, b.data, b.size, &f));
    for (uint64_t nth = 1;; nth++) {
        proto_scratch_init(&scratch);
        alloc_fail_at(nth, 0);
        enum err_code code = proto_decode_run(&f, &scratch, &decoded, &e);
        alloc_fail_at(0, 0);
        if (code != ERR_OK) {
            assert_int_equal(code, ERR_NOMEM);
            assert_int_equal(proto_decode_run(&f, &scratch, &decoded, &e), ERR_OK);
        }
        proto_scratch_done(&scratch);
        if (code == ERR_OK) {
            assert_int_equal(nth, 3);
            break;
        }
    }
    proto_reader_done(&r);
    buf_done(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_proto_message_documented_examples_are_true),
        cmocka_unit_test(test_proto_message_cut_payload_is_refused),
        cmocka_unit_test(test_proto_message_trailing_bytes_are_ignored),
        cmocka_unit_test(test_proto_message_run_out_of_range_names_the_field),
        cmocka_unit_test(test_proto_message_bias_is_finite_or_minus_infinity),
        cmocka_unit_test(test_proto_message_trace_is_taken_where_it_is_one),
        cmocka_unit_test(test_proto_message_largest_run_decodes_to_itself),
        cmocka_unit_test(test_proto_message_full_buffer_keeps_whole_frames_only),
        cmocka_unit_test(test_proto_message_other_fields_out_of_range_are_named),
        cmocka_unit_test(test_proto_message_status_of_another_version_is_understood),
        cmocka_unit_test(test_proto_message_no_memory_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

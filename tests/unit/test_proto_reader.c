#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "guard_page.h"
#include "proto_message.h"

/* Three frames: no payload, a payload, a large one. */
static void some_frames(struct buf *b)
{
    static uint32_t ids[40000];
    for (uint32_t i = 0; i < 40000; i++)
        ids[i] = i * 7;
    struct proto_run run = {
        .tokens = ids, .n_tokens = 40000, .n_prompt = 40000, .top_p = 1, .repeat = 1};
    *b = BUF_INIT(1 << 20);
    proto_encode_empty(b, PROTO_CANCEL, 5);
    proto_encode_hello(b, &(struct proto_hello){.version = 1, .client = proto_text_of("me")});
    proto_encode_run(b, UINT64_MAX, &run);
}

static void expect_some_frames(struct proto_reader *r, unsigned *seen)
{
    struct proto_frame f;
    while (proto_reader_next(r, &f) == 1) {
        static const uint8_t cmds[] = {PROTO_CANCEL, PROTO_HELLO, PROTO_RUN_INFERENCE};
        static const uint64_t ids[] = {5, 0, UINT64_MAX};
        assert_true(*seen < 3);
        assert_int_equal(f.cmd, cmds[*seen]);
        assert_true(f.request_id == ids[*seen]);
        if (*seen == 1)
            assert_memory_equal(f.payload, "\0\0\0\1\0\2me", 8);
        if (*seen == 2)
            assert_memory_equal(f.payload + f.n_payload - 4, "\0\4\x45\xb9", 4); /* 39999 * 7 */
        (*seen)++;
    }
}

static void test_proto_reader_whole_input_gives_all_frames(void **state)
{
    (void)state;
    struct buf b;
    struct proto_reader r;
    struct err e = {0};
    unsigned seen = 0;
    some_frames(&b);
    proto_reader_init(&r, PROTO_MAX_FRAME);
    uint8_t *copy = guard_page_copy(b.data, b.size);
    assert_int_equal(proto_reader_feed(&r, copy, b.size, &e), ERR_OK);
    expect_some_frames(&r, &seen);
    assert_int_equal(seen, 3);
    guard_page_free(copy, b.size);
    proto_reader_done(&r);
    buf_done(&b);
}

static void test_proto_reader_single_bytes_give_the_same_frames(void **state)
{
    (void)state;
    struct buf b;
    struct proto_reader r;
    struct err e = {0};
    unsigned seen = 0;
    some_frames(&b);
    proto_reader_init(&r, PROTO_MAX_FRAME);
    for (size_t i = 0; i < b.size; i++) {
        assert_int_equal(proto_reader_feed(&r, b.data + i, 1, &e), ERR_OK);
        expect_some_frames(&r, &seen);
    }
    assert_int_equal(seen, 3);
    proto_reader_done(&r);
    buf_done(&b);
}

static void test_proto_reader_any_cut_gives_the_same_frames(void **state)
{
    (void)state;
    struct buf b = BUF_INIT(1 << 20);
    proto_encode_empty(&b, PROTO_CANCEL, 5);
    proto_encode_hello(&b, &(struct proto_hello){.version = 1, .client = proto_text_of("me")});
    for (size_t cut = 0; cut <= b.size; cut++) {
        struct proto_reader r;
        struct err e = {0};
        unsigned seen = 0;
        proto_reader_init(&r, PROTO_MAX_FRAME);
        assert_int_equal(proto_reader_feed(&r, b.data, cut, &e), ERR_OK);
        expect_some_frames(&r, &seen);
        assert_int_equal(seen, cut < 13 ? 0 : cut < b.size ? 1 : 2);
        assert_int_equal(proto_reader_feed(&r, b.data + cut, b.size - cut, &e), ERR_OK);
        expect_some_frames(&r, &seen);
        assert_int_equal(seen, 2);
        proto_reader_done(&r);
    }
    buf_done(&b);
}

static void test_proto_reader_frames_taken_late_are_all_there(void **state)
{
    (void)state;
    struct proto_reader r;
    struct proto_frame f;
    struct err e = {0};
    struct buf b = BUF_INIT(1 << 20);
    uint64_t taken = 0;
    proto_reader_init(&r, PROTO_MAX_FRAME);
    for (uint64_t i = 0; i < 1000; i++) { /* two in, one out */
        buf_clear(&b);
        proto_encode_empty(&b, PROTO_CANCEL, 2 * i);
        proto_encode_empty(&b, PROTO_CANCEL, 2 * i + 1);
        assert_int_equal(proto_reader_feed(&r, b.data, b.size, &e), ERR_OK);
        assert_int_equal(proto_reader_next(&r, &f), 1);
        assert_int_equal(f.request_id, taken++);
    }
    while (proto_reader_next(&r, &f) == 1)
        assert_int_equal(f.request_id, taken++);
    assert_int_equal(taken, 2000);
    proto_reader_done(&r);
    buf_done(&b);
}

/* Feeds a good frame, then `length`, in one piece or two. */
static void expect_refused(uint32_t length, const char *text, bool in_one)
{
    struct proto_reader r;
    struct proto_frame f;
    struct err e = {0};
    struct buf b = BUF_INIT(100);
    proto_reader_init(&r, 100);
    proto_encode_empty(&b, PROTO_CANCEL, 5);
    for (int shift = 24; shift >= 0; shift -= 8)
        buf_byte(&b, (uint8_t)(length >> shift));
    size_t first = in_one ? b.size : b.size - 1;
    if (!in_one)
        assert_int_equal(proto_reader_feed(&r, b.data, first, &e), ERR_OK);
    assert_int_equal(
        proto_reader_feed(&r, in_one ? b.data : b.data + first, b.size - (in_one ? 0 : first), &e),
        ERR_PROTOCOL);
    assert_string_equal(e.text, text);
    assert_int_equal(proto_reader_next(&r, &f), 1);
    assert_int_equal(f.request_id, 5);
    assert_int_equal(proto_reader_next(&r, &f), 0);
    e = (struct err){0};
    assert_int_equal(proto_reader_feed(&r, b.data, 13, &e), ERR_PROTOCOL);
    assert_int_equal(proto_reader_next(&r, &f), 0);
    proto_reader_done(&r);
    buf_done(&b);
}

static void test_proto_reader_bad_length_is_an_error_that_sticks(void **state)
{
    (void)state;
    for (int in_one = 0; in_one < 2; in_one++) {
        expect_refused(0, "frame of 0 bytes: a frame has at least 13", in_one);
        expect_refused(12, "frame of 12 bytes: a frame has at least 13", in_one);
        expect_refused(101, "frame of 101 bytes: the limit is 100", in_one);
        expect_refused(0x80000000u, "frame of 2147483648 bytes: the limit is 100", in_one);
        expect_refused(UINT32_MAX, "frame of 4294967295 bytes: the limit is 100", in_one);
    }
}

static void test_proto_reader_longest_frame_passes(void **state)
{
    (void)state;
    struct proto_reader r;
    struct proto_frame f;
    struct err e = {0};
    uint8_t bytes[100] = {0, 0, 0, 100, 0x77};
    proto_reader_init(&r, 100);
    assert_int_equal(proto_reader_feed(&r, bytes, sizeof bytes, &e), ERR_OK);
    assert_int_equal(proto_reader_next(&r, &f), 1);
    assert_int_equal(f.n_payload, 87);
    proto_reader_done(&r);
}

static void test_proto_reader_no_memory_is_an_error_that_sticks(void **state)
{
    (void)state;
    struct proto_reader r;
    struct proto_frame f;
    struct err e = {0};
    uint8_t bytes[13] = {0, 0, 0, 13, PROTO_CANCEL};
    proto_reader_init(&r, 100);
    alloc_fail_at(1, 0);
    assert_int_equal(proto_reader_feed(&r, bytes, sizeof bytes, &e), ERR_NOMEM);
    alloc_fail_at(0, 0);
    assert_int_equal(proto_reader_feed(&r, bytes, sizeof bytes, &e), ERR_NOMEM);
    assert_int_equal(proto_reader_next(&r, &f), 0);
    proto_reader_done(&r);
}

static void test_proto_reader_idle_connection_keeps_little_memory(void **state)
{
    (void)state;
    struct proto_reader r;
    struct proto_frame f;
    struct err e = {0};
    size_t n = 4 << 20;
    uint8_t *large = alloc_zero(ALLOC_MISC, 1, n);
    assert_non_null(large);
    large[1] = (uint8_t)(n >> 16);
    uint8_t small[13] = {0, 0, 0, 13, PROTO_CANCEL};
    proto_reader_init(&r, PROTO_MAX_FRAME);
    assert_int_equal(proto_reader_feed(&r, large, n, &e), ERR_OK);
    assert_int_equal(proto_reader_next(&r, &f), 1);
    assert_int_equal(proto_reader_feed(&r, small, sizeof small, &e), ERR_OK);
    assert_true(r.pending.capacity < 256 << 10);
    assert_int_equal(proto_reader_next(&r, &f), 1);
    proto_reader_done(&r);
    alloc_free(large);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_proto_reader_whole_input_gives_all_frames),
        cmocka_unit_test(test_proto_reader_single_bytes_give_the_same_frames),
        cmocka_unit_test(test_proto_reader_any_cut_gives_the_same_frames),
        cmocka_unit_test(test_proto_reader_frames_taken_late_are_all_there),
        cmocka_unit_test(test_proto_reader_bad_length_is_an_error_that_sticks),
        cmocka_unit_test(test_proto_reader_longest_frame_passes),
        cmocka_unit_test(test_proto_reader_no_memory_is_an_error_that_sticks),
        cmocka_unit_test(test_proto_reader_idle_connection_keeps_little_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

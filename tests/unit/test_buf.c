#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "buf.h"

static void test_buf_appends_grow_to_the_ceiling_and_no_further(void **state)
{
    (void)state;
    struct buf b = BUF_INIT(1000);
    for (size_t i = 0; i < 1000; i++)
        buf_byte(&b, (uint8_t)i);
    assert_false(buf_failed(&b));
    assert_int_equal(b.size, 1000);
    assert_true(b.capacity <= 1000);
    buf_byte(&b, 0);
    assert_true(buf_failed(&b));
    assert_int_equal(b.size, 1000);
    assert_int_equal(b.data[999], 999 % 256);
    buf_done(&b);
}

static void test_buf_failure_sticks_until_clear(void **state)
{
    (void)state;
    struct buf b = BUF_INIT(10);
    buf_append(&b, "12345678901", 11);
    buf_text(&b, "a");
    assert_true(buf_failed(&b));
    assert_int_equal(b.size, 0);
    buf_clear(&b);
    buf_text(&b, "a");
    assert_false(buf_failed(&b));
    assert_int_equal(b.size, 1);
    buf_done(&b);
}

static void test_buf_format_short_and_long(void **state)
{
    (void)state;
    static char longer[5000];
    struct buf b = BUF_INIT(sizeof longer + 2);
    memset(longer, 'y', sizeof longer - 1);
    buf_format(&b, "%d-%s", 7, "x");
    buf_format(&b, "%s", longer);
    assert_int_equal(b.size, 3 + sizeof longer - 1);
    size_t n;
    char *text = buf_give(&b, &n);
    assert_int_equal(strlen(text), n);
    assert_memory_equal(text, "7-xyyy", 6);
    alloc_free(text);
    assert_null(b.data);
}

static void test_buf_give_empty_and_failed(void **state)
{
    (void)state;
    struct buf b = BUF_INIT(0);
    size_t n = 9;
    char *text = buf_give(&b, &n);
    assert_non_null(text);
    assert_int_equal(n, 0);
    assert_string_equal(text, "");
    alloc_free(text);
    buf_byte(&b, 1);
    assert_null(buf_give(&b, &n));
}

static void test_buf_room_and_drop_front(void **state)
{
    (void)state;
    struct buf b = BUF_INIT(100);
    uint8_t *room = buf_room(&b, 50);
    memcpy(room, "abcdef", 6);
    buf_commit(&b, 6);
    buf_drop_front(&b, 4);
    assert_int_equal(b.size, 2);
    assert_memory_equal(b.data, "ef", 2);
    buf_drop_front(&b, 2);
    assert_int_equal(b.size, 0);
    assert_null(buf_room(&b, 101));
    buf_done(&b);
}

static void test_buf_no_memory_fails_and_keeps_the_bytes(void **state)
{
    (void)state;
    struct buf b = BUF_INIT(10000);
    uint64_t live = alloc_live_blocks();
    buf_text(&b, "keep");
    alloc_fail_at(1, 0);
    assert_null(buf_room(&b, 5000));
    assert_true(buf_failed(&b));
    assert_memory_equal(b.data, "keep", 4);
    buf_done(&b);
    assert_int_equal(alloc_live_blocks(), live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buf_appends_grow_to_the_ceiling_and_no_further),
        cmocka_unit_test(test_buf_failure_sticks_until_clear),
        cmocka_unit_test(test_buf_format_short_and_long),
        cmocka_unit_test(test_buf_give_empty_and_failed),
        cmocka_unit_test(test_buf_room_and_drop_front),
        cmocka_unit_test(test_buf_no_memory_fails_and_keeps_the_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

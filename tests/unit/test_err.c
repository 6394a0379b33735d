#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "err.h"
#include "utf8.h"

static void test_err_set_records_code_and_text(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    assert_int_equal(err_set(&e, ERR_LIMIT, "%s: %d, the limit is %d", "queue", 33, 32), ERR_LIMIT);
    assert_int_equal(e.code, ERR_LIMIT);
    assert_int_equal(e.os_errno, 0);
    assert_string_equal(e.text, "queue: 33, the limit is 32");
}

static void test_err_set_twice_keeps_the_first(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    (void)err_set(&e, ERR_IO, "cause");
    assert_int_equal(err_set(&e, ERR_NOMEM, "cleanup"), ERR_NOMEM);
    assert_int_equal(err_set_os(&e, ERR_BUSY, EAGAIN, "cleanup"), ERR_BUSY);
    assert_int_equal(e.code, ERR_IO);
    assert_string_equal(e.text, "cause");
}

static void test_err_set_os_appends_the_reason(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    (void)err_set_os(&e, ERR_IO, ENOENT, "model file %s", "a.gguf");
    assert_int_equal(e.os_errno, ENOENT);
    assert_string_equal(e.text, "model file a.gguf: No such file or directory");
}

static void test_err_null_is_fine(void **state)
{
    (void)state;
    assert_int_equal(err_set(NULL, ERR_IO, "x"), ERR_IO);
    assert_int_equal(err_set_os(NULL, ERR_IO, EIO, "x"), ERR_IO);
    assert_int_equal(err_wrap(NULL, "x"), ERR_OK);
}

static void test_err_wrap_puts_context_in_front(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    (void)err_set(&e, ERR_FORMAT, "cut short");
    assert_int_equal(err_wrap(&e, "part %d", 2), ERR_FORMAT);
    assert_string_equal(e.text, "part 2: cut short");
}

static void test_err_text_is_one_line_of_valid_utf8(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    (void)err_set(&e, ERR_FORMAT, "a\nb\x1b[2J \xff \xc3\xa9 \xc2\x9b");
    assert_string_equal(e.text, "a?b?[2J ? \xc3\xa9 ??");
}

static void test_err_long_text_is_cut_between_characters(void **state)
{
    (void)state;
    char longer[400];
    for (size_t shift = 0; shift < 4; shift++) {
        struct err e = {.code = ERR_OK};
        size_t n = shift;
        memset(longer, 'x', n);
        for (; n + 3 < sizeof longer; n += 3)
            memcpy(longer + n, "\xe2\x82\xac", 3);
        longer[n] = '\0';
        (void)err_set(&e, ERR_FORMAT, "%s", longer);
        assert_true(strlen(e.text) > sizeof e.text - 5);
        assert_true(utf8_valid(e.text, strlen(e.text)));
    }
}

static void test_err_names_and_retryable_follow_the_code(void **state)
{
    (void)state;
    assert_string_equal(err_code_name(ERR_OK), "ok");
    assert_string_equal(err_code_name(ERR_UNSUPPORTED), "unsupported");
    assert_string_equal(err_code_name((enum err_code)99), "unknown");
    for (unsigned i = 0; i < ERR_N; i++) {
        int again = i == ERR_BUSY || i == ERR_LIMIT || i == ERR_NOMEM || i == ERR_CANCELLED;
        assert_int_equal(err_code_retryable((enum err_code)i), again);
        assert_string_not_equal(err_code_name((enum err_code)i), "unknown");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_err_set_records_code_and_text),
        cmocka_unit_test(test_err_set_twice_keeps_the_first),
        cmocka_unit_test(test_err_set_os_appends_the_reason),
        cmocka_unit_test(test_err_null_is_fine),
        cmocka_unit_test(test_err_wrap_puts_context_in_front),
        cmocka_unit_test(test_err_text_is_one_line_of_valid_utf8),
        cmocka_unit_test(test_err_long_text_is_cut_between_characters),
        cmocka_unit_test(test_err_names_and_retryable_follow_the_code),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "guard_page.h"
#include "gw_pretoken.h"

/* Splits `text` and joins the pieces with '|'. */
static void assert_pieces(const char *text, const char *want)
{
    struct gw_pretoken *p;
    struct gw_pretoken_scan *s;
    char got[256];
    size_t n = strlen(text), made = 0, size, at = 0;
    char *copy = (char *)guard_page_copy(text, n);
    assert_int_equal(gw_pretoken_new("qwen2", 5, &p, NULL), ERR_OK);
    assert_int_equal(gw_pretoken_scan_new(p, &s, NULL), ERR_OK);
    gw_pretoken_scan_text(s, copy, n);
    for (;;) {
        assert_int_equal(gw_pretoken_scan_next(s, &size, NULL), ERR_OK);
        if (size == 0)
            break;
        if (at > 0)
            got[made++] = '|';
        memcpy(got + made, text + at, size);
        made += size;
        at += size;
    }
    got[made] = '\0';
    assert_int_equal(at, n);
    assert_string_equal(got, want);
    gw_pretoken_scan_free(s);
    gw_pretoken_free(p);
    guard_page_free((uint8_t *)copy, n);
}

static void test_gw_pretoken_pieces_are_those_of_the_pattern(void **state)
{
    (void)state;
    assert_pieces("", "");
    assert_pieces("Hello, world!", "Hello|,| world|!");
    assert_pieces("I'm I'LL 'tis", "I|'m| I|'LL| '|tis");
    assert_pieces("a12b", "a|1|2|b");
    assert_pieces("x  y   ", "x| | y|   ");
    assert_pieces("a \n\n b", "a| \n\n| b");
    assert_pieces("if (a):\r\n\treturn", "if| (|a|):\r\n|\treturn");
    assert_pieces("na\xC3\xAFve \xE7\x8C\xAB\xE7\x8C\xAB",
                  "na\xC3\xAFve| \xE7\x8C\xAB\xE7\x8C\xAB");
    assert_pieces("a\xE3\x80\x80\xC2\xA0z", "a|\xE3\x80\x80|\xC2\xA0z");
}

static void test_gw_pretoken_bytes_that_are_not_utf8_stand_alone(void **state)
{
    (void)state;
    assert_pieces("ab\xFF\xFEz", "ab|\xFF\xFE|z");
    assert_pieces("a\xE7\x8C", "a|\xE7\x8C");
    assert_pieces("\xED\xA0\x80q", "\xED\xA0\x80|q");
}

static void test_gw_pretoken_unknown_name_is_refused(void **state)
{
    (void)state;
    struct gw_pretoken *p;
    struct err e = {0};
    assert_int_equal(gw_pretoken_new("llama-bpe", 9, &p, &e), ERR_UNSUPPORTED);
    assert_non_null(strstr(e.text, "\"llama-bpe\""));
    assert_non_null(strstr(e.text, "\"qwen2\""));
}

/* 16 MiB of white space is beyond PCRE2's usual limit of backtracking. */
static void test_gw_pretoken_long_runs_are_not_refused(void **state)
{
    (void)state;
    struct gw_pretoken *p;
    struct gw_pretoken_scan *s;
    size_t n = 16 << 20, size, total = 0;
    char *text = malloc(n);
    assert_non_null(text);
    assert_int_equal(gw_pretoken_new("qwen2", 5, &p, NULL), ERR_OK);
    assert_int_equal(gw_pretoken_scan_new(p, &s, NULL), ERR_OK);
    for (const char *c = " a."; *c; c++) {
        memset(text, *c, n);
        text[n - 1] = 'b';
        gw_pretoken_scan_text(s, text, n);
        for (total = 0;; total += size) {
            assert_int_equal(gw_pretoken_scan_next(s, &size, NULL), ERR_OK);
            if (size == 0)
                break;
        }
        assert_int_equal(total, n);
    }
    gw_pretoken_scan_free(s);
    gw_pretoken_free(p);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_pretoken_pieces_are_those_of_the_pattern),
        cmocka_unit_test(test_gw_pretoken_bytes_that_are_not_utf8_stand_alone),
        cmocka_unit_test(test_gw_pretoken_unknown_name_is_refused),
        cmocka_unit_test(test_gw_pretoken_long_runs_are_not_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

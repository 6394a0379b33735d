#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "units.h"

static void test_units_sizes_parse_exactly(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } cases[] = {
        {"0", 0},
        {"12 GiB", UINT64_C(12) << 30},
        {"12GiB", UINT64_C(12) << 30},
        {"1.5 MiB", 1572864},
        {"0.1 GB", 100000000},
        {"7 B", 7},
        {"3 kB", 3000},
        {"3 KB", 3000},
        {"2 tib", UINT64_C(2) << 40},
        {"0 B", 0},
        {"0.0", 0},
        {"12GiB ", UINT64_C(12) << 30},
        {"12\tGiB \t", UINT64_C(12) << 30},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct err e = {.code = ERR_OK};
        uint64_t bytes = 99;
        if (units_parse_bytes(cases[i].text, &bytes, &e) != ERR_OK)
            fail_msg("%s", e.text);
        assert_true(bytes == cases[i].bytes);
    }
}

static void test_units_times_parse(void **state)
{
    (void)state;
    int64_t ms;
    assert_int_equal(units_parse_ms("50 ms", &ms, NULL), ERR_OK);
    assert_int_equal(ms, 50);
    assert_int_equal(units_parse_ms("1.5 s", &ms, NULL), ERR_OK);
    assert_int_equal(ms, 1500);
    assert_int_equal(units_parse_ms("2 min", &ms, NULL), ERR_OK);
    assert_int_equal(ms, 120000);
    assert_int_equal(units_parse_ms("1 h", &ms, NULL), ERR_OK);
    assert_int_equal(ms, 3600000);
    assert_int_equal(units_parse_ms("0", &ms, NULL), ERR_OK);
    assert_int_equal(ms, 0);
}

static void test_units_bad_texts_say_what_would_be_right(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"12", "12: a unit is missing, for example 12 GiB"},
        {"", "not a number with a unit, for example 12 GiB"},
        {"-1 GiB", "not a number"},
        {"1.", "not a number"},
        {".5 GiB", "not a number"},
        {"1e3 B", "unknown unit"},
        {"1 GiBs", "unknown unit GiBs; known are B KiB MiB GiB TiB kB MB GB TB"},
        {"1 G", "unknown unit"},
        {"99999999999999999999 B", "not a number"},
        {"9999999999 TiB", "too large"},
        {"0x10 B", "unknown unit"},
        {"1 Gi B", "unknown unit Gi B"},
        {"1 GiB GiB", "unknown unit GiB GiB"},
        {"1 M", "unknown unit M;"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct err e = {.code = ERR_OK};
        uint64_t bytes = 77;
        assert_int_equal(units_parse_bytes(cases[i].text, &bytes, &e), ERR_ARGUMENT);
        assert_int_equal(bytes, 77);
        if (strstr(e.text, cases[i].says) == NULL)
            fail_msg("'%s' says '%s'", cases[i].text, e.text);
    }
    struct err e = {.code = ERR_OK};
    int64_t ms;
    assert_int_equal(units_parse_ms("5", &ms, &e), ERR_ARGUMENT);
    assert_string_equal(e.text, "5: a unit is missing, for example 5 ms");
}

static void test_units_print(void **state)
{
    (void)state;
    assert_string_equal(units_bytes(0).s, "0 B");
    assert_string_equal(units_bytes(1023).s, "1023 B");
    assert_string_equal(units_bytes(1536).s, "1.50 KiB");
    assert_string_equal(units_bytes(UINT64_C(3) << 29).s, "1.50 GiB");
    assert_string_equal(units_bytes(UINT64_MAX).s, "16777216.00 TiB");
    assert_string_equal(units_ms(350).s, "350 ms");
    assert_string_equal(units_ms(2400).s, "2.4 s");
    assert_string_equal(units_ms(90000).s, "1.5 min");
    assert_string_equal(units_ms(5400000).s, "1.5 h");
}

/* What is said to be the least that works is typed in again. */
static void test_units_rounded_up_are_never_less(void **state)
{
    (void)state;
    assert_string_equal(units_bytes_up(1023).s, "1023 B");
    assert_string_equal(units_bytes_up(UINT64_C(112) << 20).s, "112.00 MiB");
    assert_string_equal(units_bytes_up((UINT64_C(112) << 20) + 1).s, "112.01 MiB");
    assert_string_equal(units_bytes_up((UINT64_C(1) << 30) - 1).s, "1024.00 MiB");
    uint64_t bytes = 1, back = 0;
    for (unsigned i = 0; i < 60; i++, bytes = bytes * 2 + i * i) {
        assert_int_equal(units_parse_bytes(units_bytes_up(bytes).s, &back, NULL), ERR_OK);
        assert_true(back >= bytes && back - bytes <= bytes / 100 + 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_units_sizes_parse_exactly),
        cmocka_unit_test(test_units_times_parse),
        cmocka_unit_test(test_units_bad_texts_say_what_would_be_right),
        cmocka_unit_test(test_units_print),
        cmocka_unit_test(test_units_rounded_up_are_never_less),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

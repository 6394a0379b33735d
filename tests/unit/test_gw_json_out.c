#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "gw_json_out.h"
#include "rng.h"
#include "utf8.h"

static void assert_string(const char *text, size_t n, const char *expected)
{
    struct buf out = BUF_INIT(1 << 16);
    gw_json_out_string(&out, text, n);
    buf_byte(&out, '\0');
    assert_string_equal((const char *)out.data, expected);
    buf_done(&out);
}

static void test_gw_json_out_escapes_what_cuts_lines(void **state)
{
    (void)state;
    assert_string("a\"\\\n\x01\x7F", 6, "\"a\\\"\\\\\\n\\u0001\\u007f\"");
    assert_string("\b\t\n\v\f\r", 6, "\"\\b\\t\\n\\u000b\\f\\r\"");
    assert_string("\xC2\x85\xE2\x80\xA8\xE2\x80\xA9", 8, "\"\\u0085\\u2028\\u2029\"");
    assert_string("\xE2\x80\xA7\xC2\x86\xF0\x9F\x98\x80", 9,
                  "\"\xE2\x80\xA7\xC2\x86\xF0\x9F\x98\x80\"");
    assert_string("", 0, "\"\"");
    assert_string("a\0b", 3, "\"a\\u0000b\"");
}

static void test_gw_json_out_is_always_utf8(void **state)
{
    (void)state;
    assert_string("a\xFF", 2, "\"a\xEF\xBF\xBD\"");
    assert_string("a\xF0\x9F", 3, "\"a\xEF\xBF\xBD\"");
    for (uint32_t round = 0; round < 2000; round++) {
        uint8_t bytes[24];
        struct buf out = BUF_INIT(1 << 12);
        for (uint32_t i = 0; i < sizeof bytes; i += 8) {
            uint64_t draw = rng_draw(7, round * 8 + i);
            memcpy(bytes + i, &draw, 8);
        }
        gw_json_out_string(&out, bytes, round % (sizeof bytes + 1));
        assert_true(utf8_valid(out.data, out.size));
        json_t *value =
            json_loadb((const char *)out.data, out.size, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        assert_non_null(value);
        json_decref(value);
        buf_done(&out);
    }
}

static const char *float_text(float value, struct buf *out)
{
    buf_clear(out);
    gw_json_out_float(out, value);
    buf_byte(out, '\0');
    return (const char *)out->data;
}

static void test_gw_json_out_floats_are_shortest_and_exact(void **state)
{
    (void)state;
    struct buf out = BUF_INIT(256);
    assert_string_equal(float_text(-0.1f, &out), "-0.1");
    assert_string_equal(float_text(0, &out), "0");
    assert_string_equal(float_text(-2, &out), "-2");
    assert_string_equal(float_text(-INFINITY, &out), "-9999.0");
    assert_string_equal(float_text(NAN, &out), "null");
    assert_string_equal(float_text(1.17549435e-38f, &out), "1.1754944e-38");
    for (uint32_t i = 0; i < 20000; i++) {
        uint32_t bits = (uint32_t)rng_draw(3, i);
        float value;
        memcpy(&value, &bits, sizeof value);
        if (!isfinite(value))
            continue;
        float back = strtof(float_text(value, &out), NULL);
        assert_memory_equal(&back, &value, sizeof value);
    }
    buf_done(&out);
}

static void test_gw_json_out_numbers(void **state)
{
    (void)state;
    struct buf out = BUF_INIT(256);
    gw_json_out_u64(&out, UINT64_MAX);
    buf_byte(&out, ' ');
    gw_json_out_u64(&out, 0);
    buf_byte(&out, ' ');
    gw_json_out_figure(&out, 12.5);
    buf_byte(&out, ' ');
    gw_json_out_figure(&out, 3);
    buf_byte(&out, ' ');
    gw_json_out_figure(&out, NAN);
    buf_byte(&out, ' ');
    gw_json_out_figure(&out, 1e200);
    buf_byte(&out, ' ');
    gw_json_out_ids(&out, (const uint32_t[]){1, 4294967295u}, 2);
    gw_json_out_bytes(&out, "\xFFz", 2);
    gw_json_out_text(&out, NULL);
    buf_byte(&out, '\0');
    assert_string_equal((const char *)out.data,
                        "18446744073709551615 0 12.5 3 0 0 [1,4294967295][255,122]null");
    buf_done(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_json_out_escapes_what_cuts_lines),
        cmocka_unit_test(test_gw_json_out_is_always_utf8),
        cmocka_unit_test(test_gw_json_out_floats_are_shortest_and_exact),
        cmocka_unit_test(test_gw_json_out_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "guard_page.h"
#include "utf8.h"

/* Whether the n bytes are one well-formed sequence, told by encoding: an oracle that shares nothing
 * with the parser's table. */
static bool oracle_whole(const uint8_t *p, size_t n)
{
    static const uint8_t lead[5] = {0, 0x7F, 0x1F, 0x0F, 0x07};
    uint8_t again[4];
    uint32_t code = p[0] & lead[n];
    for (size_t i = 1; i < n; i++)
        code = code << 6 | (p[i] & 0x3Fu);
    return code <= 0x10FFFF && !(code >= 0xD800 && code <= 0xDFFF) &&
           utf8_encode(code, again) == n && memcmp(again, p, n) == 0;
}

static void test_utf8_every_code_point_survives_the_round_trip(void **state)
{
    (void)state;
    for (uint32_t code = 0; code <= 0x10FFFF; code++) {
        uint8_t bytes[4];
        size_t n = utf8_encode(code, bytes);
        uint32_t want = code >= 0xD800 && code <= 0xDFFF ? 0xFFFD : code;
        if (utf8_sequence(bytes, n) != (int)n || utf8_decode(bytes, n) != want)
            fail_msg("code point %x", code);
        for (size_t cut = 1; cut < n; cut++)
            if (utf8_sequence(bytes, cut) != 0)
                fail_msg("code point %x cut at %zu is not a prefix", code, cut);
    }
    uint8_t bytes[4];
    assert_int_equal(utf8_encode(0x110000, bytes), 3);
    assert_memory_equal(bytes, "\xEF\xBF\xBD", 3);
}

static void test_utf8_all_three_byte_strings_agree_with_the_oracle(void **state)
{
    (void)state;
    for (uint32_t v = 0; v < 1u << 24; v += 1 + (v & 0xFF) % 3) {
        const uint8_t p[3] = {(uint8_t)(v >> 16), (uint8_t)(v >> 8), (uint8_t)v};
        int k = utf8_sequence(p, 3);
        bool whole = k > 0 && oracle_whole(p, (size_t)k);
        bool none = !oracle_whole(p, 1) && !oracle_whole(p, 2) && !oracle_whole(p, 3);
        if (k > 0 ? !whole : !none)
            fail_msg("%02x %02x %02x gives %d", p[0], p[1], p[2], k);
    }
}

static void test_utf8_ill_formed_parts_are_maximal(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        int result;
    } cases[] = {
        {"\x80", -1},         {"\xC0\x80", -1},     {"\xF5\x80", -1},
        {"\xE0\x80\x80", -1}, {"\xED\xA0\x80", -1}, {"\xF0\x80\x80", -1},
        {"\xF4\x90\x80", -1}, {"\xE2\x82\x41", -2}, {"\xF0\x9F\x98\x41", -3},
        {"\xE2\x82", 0},      {"\xF0", 0},          {"\xC3\x41", -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t n = strlen(cases[i].bytes);
        uint8_t *p = guard_page_copy(cases[i].bytes, n);
        assert_int_equal(utf8_sequence(p, n), cases[i].result);
        guard_page_free(p, n);
    }
}

static void gate_at(const char *bytes, size_t n, size_t first, size_t second, struct buf *out)
{
    struct utf8_gate g = {.n_tail = 0};
    utf8_gate_push(&g, bytes, first, out);
    utf8_gate_push(&g, bytes + first, second, out);
    utf8_gate_push(&g, bytes + first + second, n - first - second, out);
    utf8_gate_finish(&g, out);
}

static void test_utf8_gate_gives_the_same_text_at_every_split(void **state)
{
    (void)state;
    static const struct {
        const char *bytes, *text;
    } cases[] = {
        {"a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z", "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z"},
        {"\xE2\x82\x41\xF0\x9F\x98", "\xEF\xBF\xBD"
                                     "A\xEF\xBF\xBD"},
        {"\xF0\x9F\xE2\x82\xAC\xFF\xC3", "\xEF\xBF\xBD\xE2\x82\xAC\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t n = strlen(cases[i].bytes), n_text = strlen(cases[i].text);
        for (size_t first = 0; first <= n; first++)
            for (size_t second = 0; second <= n - first; second++) {
                struct buf out = BUF_INIT(100);
                gate_at(cases[i].bytes, n, first, second, &out);
                assert_int_equal(out.size, n_text);
                if (n_text > 0)
                    assert_memory_equal(out.data, cases[i].text, n_text);
                buf_done(&out);
            }
    }
}

static void test_utf8_valid_and_count(void **state)
{
    (void)state;
    assert_true(utf8_valid("", 0));
    assert_true(utf8_valid("a\xE2\x82\xAC", 4));
    assert_false(utf8_valid("a\xE2\x82\xAC", 3));
    assert_false(utf8_valid("\xFF", 1));
    assert_int_equal(utf8_count("a\xE2\x82\xAC\xC3\xA9", 6), 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8_every_code_point_survives_the_round_trip),
        cmocka_unit_test(test_utf8_all_three_byte_strings_agree_with_the_oracle),
        cmocka_unit_test(test_utf8_ill_formed_parts_are_maximal),
        cmocka_unit_test(test_utf8_gate_gives_the_same_text_at_every_split),
        cmocka_unit_test(test_utf8_valid_and_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "guard_page.h"
#include "gw_json_in.h"

/* Parses a copy that ends at an inaccessible page. */
static enum err_code parse(const char *text, size_t n, json_t **ret, struct err *e)
{
    uint8_t *copy = guard_page_copy(text, n);
    enum err_code code = gw_json_in_parse((char *)copy, n, ret, e);
    guard_page_free(copy, n);
    return code;
}

static void assert_refused(const char *text)
{
    json_t *root = NULL;
    struct err e = {0};
    assert_int_equal(parse(text, strlen(text), &root, &e), ERR_FORMAT);
    assert_null(root);
    assert_true(e.text[0] != '\0');
}

static void assert_text(const char *json, const char *expected)
{
    json_t *root = NULL;
    struct err e = {0};
    assert_int_equal(parse(json, strlen(json), &root, &e), ERR_OK);
    assert_string_equal(json_string_value(json_object_get(root, "a")), expected);
    json_decref(root);
}

static void test_gw_json_in_what_is_no_object_is_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {"",
                                      "[]",
                                      "1",
                                      "{",
                                      "{\"a\":1,}",
                                      "{} x",
                                      "{\"a\":1,\"a\":2}",
                                      "{\"a\":NaN}",
                                      "{\"a\":1e400}",
                                      "{\"a\":9223372036854775808}",
                                      "{\"a\":\"\xC3\x28\"}",
                                      "{\"a\":\"\\u12\"}",
                                      "\xEF\xBB\xBF",
                                      "{\"a\\u0000\":1}",
                                      "\"{}\"",
                                      "{\"a\":\"\\"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_refused(bad[i]);
}

static void test_gw_json_in_bom_and_white_space_are_taken(void **state)
{
    (void)state;
    assert_text("\xEF\xBB\xBF{\"a\":\"b\"}\r\n \t", "b");
}

static void test_gw_json_in_values_are_bounded(void **state)
{
    (void)state;
    /* {"a":["",",",...]}: the commas in the string count for nothing. */
    static const char head[] = "{\"a\":[\",,\"", tail[] = "]}";
    const size_t most = GW_JSON_IN_MAX_VALUES - 2 * GW_JSON_IN_CONTAINER_VALUES;
    for (size_t n = most; n <= most + 1; n++) {
        const bool fits = n == most;
        size_t size = sizeof head - 1 + 2 * n, skip = 0;
        struct err e = {0};
        char *text = malloc(size + sizeof tail);
        assert_non_null(text);
        memcpy(text, head, sizeof head - 1);
        for (size_t i = 0; i < n; i++)
            memcpy(text + sizeof head - 1 + 2 * i, ",1", 2);
        memcpy(text + size, tail, sizeof tail);
        assert_int_equal(gw_json_in_repair(text, size + sizeof tail - 1, &skip, &e),
                         fits ? ERR_OK : ERR_FORMAT);
        assert_int_equal(strstr(e.text, "values") != NULL, !fits);
        free(text);
    }
}

static void test_gw_json_in_depth_is_64(void **state)
{
    (void)state;
    char text[2048] = "";
    for (int depth = 64; depth <= 65; depth++) {
        json_t *root = NULL;
        struct err e = {0};
        text[0] = '\0';
        for (int i = 0; i < depth; i++)
            strcat(text, "{\"a\":");
        strcat(text, "1");
        for (int i = 0; i < depth; i++)
            strcat(text, "}");
        assert_int_equal(parse(text, strlen(text), &root, &e), depth == 64 ? ERR_OK : ERR_FORMAT);
        json_decref(root);
    }
    /* Brackets in strings count for nothing. */
    strcpy(text, "{\"a\":\"");
    for (int i = 0; i < 100; i++)
        strcat(text, "[");
    strcat(text, "\"}");
    json_t *root = NULL;
    assert_int_equal(parse(text, strlen(text), &root, NULL), ERR_OK);
    json_decref(root);
}

static void test_gw_json_in_lone_surrogates_become_fffd(void **state)
{
    (void)state;
    assert_text("{\"a\":\"x\\ud83d y\"}", "x\xEF\xBF\xBD y");
    assert_text("{\"a\":\"\\uDE00\"}", "\xEF\xBF\xBD");
    assert_text("{\"a\":\"\\ud83d\\ud83d\\ude00\"}", "\xEF\xBF\xBD\xF0\x9F\x98\x80");
    assert_text("{\"a\":\"\\ud83d\\ude00\"}", "\xF0\x9F\x98\x80");
    assert_text("{\"a\":\"\\\\ud83d\"}", "\\ud83d");
    assert_text("{\"a\":\"\\ud83d\\n\"}", "\xEF\xBF\xBD\n");
}

static void test_gw_json_in_every_cut_is_refused_or_read(void **state)
{
    (void)state;
    static const char text[] =
        "\xEF\xBB\xBF{\"a\":[1,2.5,\"\\ud83d\\ude00\\u0041\\ud83d\",{\"b\":null}],\"c\":true}";
    for (size_t n = 0; n + 1 < sizeof text; n++) {
        json_t *root = NULL;
        assert_int_equal(parse(text, n, &root, NULL), ERR_FORMAT);
        assert_null(root);
    }
}

static void test_gw_json_in_nul_in_text_is_kept(void **state)
{
    (void)state;
    static const char text[] = "{\"a\":\"b\\u0000c\"}";
    json_t *root = NULL;
    assert_int_equal(parse(text, sizeof text - 1, &root, NULL), ERR_OK);
    assert_int_equal(json_string_length(json_object_get(root, "a")), 3);
    json_decref(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_json_in_what_is_no_object_is_refused),
        cmocka_unit_test(test_gw_json_in_bom_and_white_space_are_taken),
        cmocka_unit_test(test_gw_json_in_depth_is_64),
        cmocka_unit_test(test_gw_json_in_values_are_bounded),
        cmocka_unit_test(test_gw_json_in_lone_surrogates_become_fffd),
        cmocka_unit_test(test_gw_json_in_every_cut_is_refused_or_read),
        cmocka_unit_test(test_gw_json_in_nul_in_text_is_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

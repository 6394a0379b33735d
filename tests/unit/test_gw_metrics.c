#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "gw_metrics.h"
#include "gw_upstream.h"

/* The name stands once in the text behind `word`. */
static void once_check(const char *text, const char *word, const char *name)
{
    char line[160];
    snprintf(line, sizeof line, "%s%s ", word, name);
    const char *first = strstr(text, line);
    assert_non_null(first);
    assert_null(strstr(first + 1, line));
}

/* HELP, TYPE and one value for each name; nothing else. Counters end in _total, and nothing else
 * does. Cuts the text into lines. */
static size_t families_check(char *text)
{
    char *whole = strdup(text);
    size_t n = 0;
    char *rest = text, *line, name[100] = "";
    while ((line = strsep(&rest, "\n")) && rest) {
        char word[100] = "", type[20] = "";
        unsigned long long value;
        if (strncmp(line, "# HELP ", 7) == 0) {
            assert_int_equal(sscanf(line, "# HELP %99s", name), 1);
            continue;
        }
        if (strncmp(line, "# TYPE ", 7) == 0) {
            assert_int_equal(sscanf(line, "# TYPE %99s %19s", word, type), 2);
            assert_string_equal(word, name);
            assert_true(strcmp(type, "gauge") == 0 || strcmp(type, "counter") == 0);
            bool is_total = strcmp(name + strlen(name) - 6, "_total") == 0;
            assert_int_equal(is_total, strcmp(type, "counter") == 0);
            once_check(whole, "# HELP ", name);
            once_check(whole, "# TYPE ", name);
            once_check(whole, "\n", name);
            continue;
        }
        assert_int_equal(sscanf(line, "%99s %llu", word, &value), 2);
        assert_string_equal(word, name);
        assert_int_equal(strncmp(word, "islet_", 6), 0);
        n++;
    }
    free(whole);
    return n;
}

static void test_gw_metrics_text_is_prometheus(void **state)
{
    (void)state;
    static struct gw_upstream_status worker;
    struct gw_metrics m = {.tokens_total = 12345678901ull};
    struct buf out = BUF_INIT(1 << 20);
    gw_metrics_write(&out, &m, NULL, 0);
    buf_byte(&out, '\0');
    assert_non_null(strstr((char *)out.data, "\nislet_gateway_tokens_total 12345678901\n"));
    size_t own = families_check((char *)out.data);
    assert_true(own > 15);
    buf_clear(&out);
    worker.known = true;
    worker.status.steps_total = 7;
    worker.status.kv_pages_total = 9;
    worker.received_ns = 1000000;
    worker.status.age_us = 500;
    gw_metrics_write(&out, &m, &worker, 4500000);
    buf_byte(&out, '\0');
    assert_non_null(strstr((char *)out.data, "\nislet_worker_steps_total 7\n"));
    assert_non_null(strstr((char *)out.data, "\nislet_worker_kv_pages 9\n"));
    assert_non_null(strstr((char *)out.data, "\nislet_worker_status_age_ms 4\n"));
    assert_true(families_check((char *)out.data) > own + 20);
    buf_done(&out);
}

static void test_gw_metrics_json_members_parse(void **state)
{
    (void)state;
    struct gw_metrics m = {.queued = 3};
    struct buf out = BUF_INIT(1 << 16);
    buf_byte(&out, '{');
    gw_metrics_write_json(&out, &m);
    buf_byte(&out, '}');
    json_t *root = json_loadb((const char *)out.data, out.size, JSON_REJECT_DUPLICATES, NULL);
    assert_int_equal(json_integer_value(json_object_get(root, "queued")), 3);
    json_decref(root);
    buf_done(&out);
    assert_true(gw_metrics_resident_bytes() > 100000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_metrics_text_is_prometheus),
        cmocka_unit_test(test_gw_metrics_json_members_parse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

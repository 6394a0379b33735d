#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "alloc.h"
#include "settings.h"

static char root[64], path[128];

static int make_root(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "/tmp/islet-test-XXXXXX");
    if (mkdtemp(root) == NULL)
        return 1;
    snprintf(path, sizeof path, "%s/islet.conf", root);
    setenv("XDG_CONFIG_HOME", root, 1);
    setenv("HOME", root, 1);
    return 0;
}

static int drop_root(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command) != 0 || alloc_live_blocks() != 0;
}

static void write_conf(const void *text, size_t n)
{
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    fclose(f);
}

static struct settings *load(const char *text, const char *const *sets, unsigned n_set)
{
    struct settings *s = NULL;
    struct err e = {.code = ERR_OK};
    write_conf(text, strlen(text));
    if (settings_load(path, sets, n_set, &s, &e) != ERR_OK)
        fail_msg("%s", e.text);
    return s;
}

/* The error must be `where` and `says`, in one line. */
static void refuse(const char *text, size_t n, const char *says)
{
    struct settings *s = NULL;
    struct err e = {.code = ERR_OK};
    write_conf(text, n);
    assert_int_not_equal(settings_load(path, NULL, 0, &s, &e), ERR_OK);
    assert_null(s);
    if (strncmp(e.text, path, strlen(path)) != 0 || strstr(e.text, says) == NULL)
        fail_msg("got '%s', wanted '%s'", e.text, says);
}

static void test_settings_defaults_have_their_types(void **state)
{
    (void)state;
    struct settings *s = load("", NULL, 0);
    assert_string_equal(settings_text(s, SETTING_model_path), "");
    assert_int_equal(settings_count(s, SETTING_batch_max_sequences), 32);
    assert_true(settings_is_auto(s, SETTING_memory_kv_budget));
    assert_int_equal(settings_bytes(s, SETTING_server_max_body), 16 << 20);
    assert_int_equal(settings_ms(s, SETTING_server_sse_ping_interval), 10000);
    assert_int_equal(settings_choice(s, SETTING_log_level), 2);
    assert_string_equal(settings_origin(s, SETTING_log_level), "default");
    assert_string_equal(settings_path(s), path);
    settings_free(s);
}

static void test_settings_file_and_set_override_in_order(void **state)
{
    (void)state;
    static const char *const sets[] = {"server.queue=7", "server.queue=8", "model.alias=a=b.c"};
    char origin[160];
    struct settings *s =
        load("\xEF\xBB\xBF# note\n[server]\r\n  queue = 5 ; five\n\tsse_ping_interval: off\n"
             "[memory]\nkv_budget=1.5 GiB\n[model]\npath = /a b/c.gguf\n",
             sets, 3);
    assert_int_equal(settings_count(s, SETTING_server_queue), 8);
    assert_string_equal(settings_origin(s, SETTING_server_queue), "--set");
    assert_string_equal(settings_text(s, SETTING_model_alias), "a=b.c");
    assert_int_equal(settings_ms(s, SETTING_server_sse_ping_interval), SETTING_TIME_OFF);
    assert_false(settings_is_auto(s, SETTING_memory_kv_budget));
    assert_true(settings_bytes(s, SETTING_memory_kv_budget) == UINT64_C(3) << 29);
    assert_string_equal(settings_text(s, SETTING_model_path), "/a b/c.gguf");
    snprintf(origin, sizeof origin, "%s:8", path);
    assert_string_equal(settings_origin(s, SETTING_model_path), origin);
    settings_free(s);
}

static void test_settings_bad_files_name_line_and_remedy(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"[server]\n\n\nlisen = x\n", ":4: unknown key [server] lisen; did you mean listen?"},
        {"[memory]\nkv_budget = 12\n",
         ":2: [memory] kv_budget = 12: a unit is missing, for example 12 GiB"},
        {"[model]\nkv_budget = 1 GiB",
         ":2: unknown key [model] kv_budget; did you mean [memory] kv_budget?"},
        {"[sever]\nlisten=x\n", ":2: unknown key [sever] listen; did you mean [server] listen?"},
        {"[zzz]\nqqqqqqqq=1\n", ":2: unknown section [zzz] qqqqqqqq"},
        {"path = x\n", ":1: key path stands before any [section]"},
        {"[model]\npath=a\n\npath=b\n", ":4: [model] path is set twice; first in line 2"},
        {"[model]\npath\n", ":2: neither a [section] nor key = value"},
        {"[model\n", ":1: the section's name does not end with ]"},
        {"[batch]\nmax_sequences=33\n", "must be a whole number from 1 to 32"},
        {"[batch]\nmax_sequences=99999999999999999999\n", "must be a whole number"},
        {"[batch]\nmax_sequences= +1\n", "must be a whole number"},
        {"[compute]\ncpu_level=sse\n",
         ":2: [compute] cpu_level = sse: must be one of auto|reference"},
        {"[server]\ndrain_deadline=off\n", "not a number with a unit, for example 50 ms"},
        {"[server]\nmax_body=auto\n", "not a number"},
        {"[server]\nmax_body=2 GiB\n", "must be 1 KiB to 1 GiB"},
        {"[model]\nalias=a\x01z\n", "control character"},
        {"[log]\nlevel=\n", "must be one of"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        refuse(cases[i].text, strlen(cases[i].text), cases[i].says);
    refuse("[model]\npath=a\0b\n", 17, ":2: a NUL byte");
}

static void test_settings_long_line_is_refused_never_cut(void **state)
{
    (void)state;
    for (size_t n = 150; n < 300; n++) {
        char text[400];
        int used = snprintf(text, sizeof text, "[model]\npath=%0*d\n", (int)n, 7);
        if (n + 5 > 198) {
            refuse(text, (size_t)used, "the limit is 198");
            continue;
        }
        struct settings *s = load(text, NULL, 0);
        assert_int_equal(strlen(settings_text(s, SETTING_model_path)), n);
        settings_free(s);
    }
}

static void test_settings_bad_places_are_errors(void **state)
{
    (void)state;
    struct settings *s = NULL;
    struct err e = {.code = ERR_OK};
    assert_int_equal(settings_load(path, NULL, 0, &s, &e), ERR_IO);
    assert_non_null(strstr(e.text, "No such file"));
    e.code = ERR_OK;
    assert_int_equal(settings_load(root, NULL, 0, &s, &e), ERR_IO);
    assert_non_null(strstr(e.text, "is a directory"));
    write_conf("", 0);
    assert_int_equal(truncate(path, 1 << 30), 0);
    e.code = ERR_OK;
    assert_int_equal(settings_load(path, NULL, 0, &s, &e), ERR_FORMAT);
    assert_non_null(strstr(e.text, "larger than 1 MiB"));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(settings_load(path, NULL, 0, &s, NULL), ERR_IO);
    assert_null(s);
}

static void test_settings_usual_places_are_searched(void **state)
{
    (void)state;
    struct settings *s = NULL;
    char dir[100];
    snprintf(dir, sizeof dir, "%s/islet", root);
    assert_int_equal(mkdir(dir, 0700), 0);
    assert_int_equal(settings_load(NULL, NULL, 0, &s, NULL), ERR_OK);
    settings_free(s);
    snprintf(path, sizeof path, "%s/islet/islet.conf", root);
    write_conf("[server]\nqueue=3\n", 17);
    assert_int_equal(settings_load(NULL, NULL, 0, &s, NULL), ERR_OK);
    assert_int_equal(settings_count(s, SETTING_server_queue), 3);
    assert_string_equal(settings_path(s), path);
    settings_free(s);
}

static void test_settings_bad_sets_are_refused(void **state)
{
    (void)state;
    static const char *const bad[][2] = {
        {"server.queue", "expected section.key=value"},
        {"queue=1", "expected section.key=value"},
        {".queue=1", "expected section.key=value"},
        {"server.=1", "expected section.key=value"},
        {"server.queu=1", "did you mean queue?"},
        {"server.queue=x", "--set: [server] queue = x"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct settings *s = NULL;
        struct err e = {.code = ERR_OK};
        assert_int_equal(settings_load("/dev/null", &bad[i][0], 1, &s, &e), ERR_ARGUMENT);
        if (strncmp(e.text, "--set", 5) != 0 || strstr(e.text, bad[i][1]) == NULL)
            fail_msg("%s: %s", bad[i][0], e.text);
    }
}

struct seen {
    unsigned n;
    enum setting_id last;
    bool reloadable;
};

static void count_change(void *context, enum setting_id id, bool reloadable)
{
    struct seen *seen = context;
    seen->n++;
    seen->last = id;
    seen->reloadable = reloadable;
}

static void test_settings_diff_compares_values_not_spelling(void **state)
{
    (void)state;
    struct seen seen = {.n = 0};
    struct settings *a = load("[server]\njson_pad_after=60 s\n", NULL, 0);
    struct settings *b = load("[server]\njson_pad_after=1 min\nqueue=33\n", NULL, 0);
    settings_diff(a, b, count_change, &seen);
    assert_int_equal(seen.n, 1);
    assert_int_equal(seen.last, SETTING_server_queue);
    assert_true(seen.reloadable);
    settings_free(b);
    seen.n = 0;
    b = load("[server]\njson_pad_after=off\n[memory]\nkv_budget=1 GiB\n", NULL, 0);
    settings_diff(a, b, count_change, &seen);
    assert_int_equal(seen.n, 2);
    settings_free(a);
    settings_free(b);
}

static char *printed(void (*print)(FILE *))
{
    char *text = NULL;
    size_t n = 0;
    FILE *out = open_memstream(&text, &n);
    print(out);
    fclose(out);
    return text;
}

static void test_settings_example_is_the_shipped_file_and_loads(void **state)
{
    (void)state;
    static char shipped[65536];
    char *text = printed(settings_print_example);
    struct settings *s = NULL, *defaults = load("", NULL, 0);
    struct seen seen = {.n = 0};
    struct err e = {.code = ERR_OK};
    FILE *f = fopen(ISLET_TEST_DIR "/../config/islet.conf", "re");
    assert_non_null(f);
    size_t n = fread(shipped, 1, sizeof shipped - 1, f);
    fclose(f);
    shipped[n] = '\0';
    assert_string_equal(shipped, text);
    if (settings_load(ISLET_TEST_DIR "/../config/islet.conf", NULL, 0, &s, &e) != ERR_OK)
        fail_msg("%s", e.text);
    settings_diff(s, defaults, count_change, &seen);
    assert_int_equal(seen.n, 0);
    settings_free(s);
    settings_free(defaults);
    free(text);
}

static void test_settings_help_names_every_key(void **state)
{
    (void)state;
    char *text = printed(settings_print_help);
    for (unsigned i = 0; i < SETTING_N; i++) {
        char start[80];
        snprintf(start, sizeof start, "%s = ", settings_name((enum setting_id)i));
        if (strstr(text, start) == NULL)
            fail_msg("%s is not there", start);
    }
    free(text);
}

static void test_settings_every_failed_allocation_is_nomem_without_leak(void **state)
{
    (void)state;
    struct settings *s = NULL;
    uint64_t live = alloc_live_blocks();
    write_conf("[server]\nqueue=3\n", 17);
    for (uint64_t nth = 1; s == NULL; nth++) {
        struct err e = {.code = ERR_OK};
        alloc_fail_at(nth, 0);
        enum err_code rc = settings_load(path, NULL, 0, &s, &e);
        alloc_fail_at(0, 0);
        assert_int_equal(rc, s == NULL ? ERR_NOMEM : ERR_OK);
        if (s == NULL)
            assert_int_equal(alloc_live_blocks(), live);
    }
    settings_free(s);
}

#define IN_ROOT(test) cmocka_unit_test_setup_teardown(test, make_root, drop_root)

int main(void)
{
    const struct CMUnitTest tests[] = {
        IN_ROOT(test_settings_defaults_have_their_types),
        IN_ROOT(test_settings_file_and_set_override_in_order),
        IN_ROOT(test_settings_bad_files_name_line_and_remedy),
        IN_ROOT(test_settings_long_line_is_refused_never_cut),
        IN_ROOT(test_settings_bad_places_are_errors),
        IN_ROOT(test_settings_usual_places_are_searched),
        IN_ROOT(test_settings_bad_sets_are_refused),
        IN_ROOT(test_settings_diff_compares_values_not_spelling),
        IN_ROOT(test_settings_example_is_the_shipped_file_and_loads),
        IN_ROOT(test_settings_help_names_every_key),
        IN_ROOT(test_settings_every_failed_allocation_is_nomem_without_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cli_server.h"

static void test_cli_server_good_addresses_are_read(void **state)
{
    static const struct {
        const char *text, *name;
    } rows[] = {
        {"http://127.0.0.1:8484", "http://127.0.0.1:8484"},
        {"http://127.0.0.1:99/v1", "http://127.0.0.1:99"},
        {"http://localhost", "http://localhost:8484"},
        {"localhost:80", "http://localhost:80"},
        {"http://[::1]:81/", "http://[::1]:81"},
        {"[::1]", "http://[::1]:8484"},
        {"::1", "http://[::1]:8484"},
        {"unix:/run/islet/http.sock", "unix:/run/islet/http.sock"},
        {"unix:///run/x.sock", "unix:/run/x.sock"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct cli_server s;
        assert_int_equal(cli_server_parse(rows[i].text, &s, NULL), ERR_OK);
        assert_string_equal(s.name, rows[i].name);
    }
}

static void test_cli_server_bad_addresses_are_refused(void **state)
{
    char path[160] = "unix:/";
    const char *rows[] = {"",           "http://",         "http://:80", "http://a:",
                          "http://a:b", "http://a:123456", "https://a",  path};
    (void)state;
    memset(path + 6, 'x', 110);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct cli_server s;
        struct err e = {0};
        if (cli_server_parse(rows[i], &s, &e) == ERR_OK)
            fail_msg("accepted: %s", rows[i]);
        assert_true(strlen(e.text) > 10);
    }
}

static void test_cli_server_nobody_listens_says_how_to_start(void **state)
{
    struct cli_server s;
    struct err e = {0};
    int fd = -1;
    (void)state;
    assert_int_equal(cli_server_parse("unix:/nonexistent/http.sock", &s, NULL), ERR_OK);
    assert_int_equal(cli_server_connect(&s, &fd, &e), ERR_IO);
    assert_int_equal(fd, -1);
    assert_non_null(strstr(e.text, "islet up --model"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cli_server_good_addresses_are_read),
        cmocka_unit_test(test_cli_server_bad_addresses_are_refused),
        cmocka_unit_test(test_cli_server_nobody_listens_says_how_to_start),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

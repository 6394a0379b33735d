/* Who may ask: Host, Origin, key and media type, as tables. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "gw_auth.h"

static struct gw_auth *make(const char *hosts, const char *cors, const char *file)
{
    struct gw_auth *a = NULL;
    struct err e = {0};
    if (gw_auth_new(hosts, cors, file, &a, &e) != ERR_OK)
        fail_msg("%s", e.text);
    return a;
}

static struct gw_http_text text(const char *t)
{
    return (struct gw_http_text){t, strlen(t)};
}

static void test_gw_auth_hosts_follow_the_table(void **state)
{
    static const struct {
        const char *host;
        bool allowed;
    } rows[] = {
        {"localhost", true},
        {"LOCALHOST:1", true},
        {"127.0.0.1", true},
        {"127.1.2.3:80", true},
        {"[::1]:8080", true},
        {"[::1]", true},
        {"[0:0:0:0:0:0:0:1]", true},
        {"[::ffff:127.0.0.1]", true},
        {"a.localhost", true},
        {"localhost.", true},
        {"my.box:8484", true},
        {"MY.BOX.", true},
        {"192.168.1.5:8484", true},
        {"evil.example", false},
        {"", false},
        {":8080", false},
        {".", false},
        {"127.0.0.1.evil.example", false},
        {"localhost.evil", false},
        {"evil-localhost", false},
        {".localhost", false},
        {"192.168.1.6", false},
        {"[::2]", false},
        {"127.1", false},
        {"2130706433", false},
        {"0.0.0.0", false},
        {"[fe80::1]", false},
        {"notmy.box", false},
    };
    (void)state;
    struct gw_auth *a = make("my.box, other", "", "");
    struct gw_auth_listener l = {.ip = {192, 168, 1, 5}, .n_ip = 4};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (gw_auth_host_allowed(a, &l, text(rows[i].host)) != rows[i].allowed)
            fail_msg("Host: %s", rows[i].host);
    l = (struct gw_auth_listener){.is_unix = true};
    assert_true(gw_auth_host_allowed(a, &l, text("x")));
    gw_auth_free(a);
}

static void test_gw_auth_origins_follow_the_table(void **state)
{
    static const struct {
        const char *origin;
        bool allowed;
    } rows[] = {
        {"http://localhost", true},
        {"https://LOCALHOST:5173", true},
        {"http://127.0.0.1:1", true},
        {"http://[::1]:8080", true},
        {"app://x", true},
        {"https://ok.example", true},
        {"https://ok.example:8443", false},
        {"https://evil.example", false},
        {"null", false},
        {"http://localhost.evil.example", false},
        {"http://localhost:", false},
        {"http://localhost:80/", false},
        {"http://localhost@evil", false},
        {"http://127.0.0.10", false},
        {"ftp://localhost", false},
        {"app://", false},
        {"", false},
        {"http://localhost, https://evil", false},
        {"http://evil.example#http://localhost", false},
    };
    (void)state;
    struct gw_auth *a = make("", "app://* https://ok.example", "");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (gw_auth_origin_allowed(a, text(rows[i].origin)) != rows[i].allowed)
            fail_msg("Origin: %s", rows[i].origin);
    gw_auth_free(a);
}

static void test_gw_auth_null_origin_stays_refused_when_configured(void **state)
{
    struct gw_auth *a = NULL;
    struct err e = {0};
    (void)state;
    assert_int_equal(gw_auth_new("", "null", "", &a, &e), ERR_ARGUMENT);
    assert_non_null(strstr(e.text, "server.cors"));
}

static void write_file(char *path, const char *content)
{
    strcpy(path, "/tmp/test_gw_auth.XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, content, strlen(content)), strlen(content));
    close(fd);
}

static void test_gw_auth_keys_of_a_file_are_compared_whole(void **state)
{
    char path[64];
    (void)state;
    write_file(path, "# keys\n\n  sk-one \r\nsk-two");
    struct gw_auth *a = make("", "", path);
    unlink(path);
    assert_true(gw_auth_asks_key(a));
    assert_true(gw_auth_key_allowed(a, text("sk-one")));
    assert_true(gw_auth_key_allowed(a, text("sk-two")));
    const char *wrong[] = {"", "sk-on", "sk-one ", "sk-onee", "# keys", "SK-ONE"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_false(gw_auth_key_allowed(a, text(wrong[i])));
    assert_false(gw_auth_key_allowed(a, (struct gw_http_text){"sk-one\0", 7}));
    gw_auth_free(a);
}

static void test_gw_auth_no_file_asks_for_no_key(void **state)
{
    (void)state;
    struct gw_auth *a = make("", "", "");
    assert_false(gw_auth_asks_key(a));
    assert_true(gw_auth_key_allowed(a, text("anything")));
    gw_auth_free(a);
}

static void test_gw_auth_file_without_a_key_is_refused(void **state)
{
    char path[64];
    struct gw_auth *a = NULL;
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct err e = {0};
        write_file(path, i == 0 ? "#none\n" : "");
        assert_int_equal(gw_auth_new("", "", path, &a, &e), ERR_ARGUMENT);
        unlink(path);
        assert_null(a);
        assert_non_null(strstr(e.text, "holds no key"));
    }
}

static void test_gw_auth_bad_key_files_name_file_and_line(void **state)
{
    char path[64];
    struct gw_auth *a = NULL;
    struct err e = {0}, missing = {0};
    (void)state;
    write_file(path, "good\nwith space\n");
    assert_int_equal(gw_auth_new("", "", path, &a, &e), ERR_FORMAT);
    unlink(path);
    assert_non_null(strstr(e.text, ":2:"));
    assert_int_equal(gw_auth_new("", "", "/nonexistent/keys", &a, &missing), ERR_ARGUMENT);
    assert_non_null(strstr(missing.text, "/nonexistent/keys"));
}

static struct gw_http_field fields[4];

static struct gw_http_request request(size_t n, ...)
{
    va_list args;
    va_start(args, n);
    for (size_t i = 0; i < n; i++) {
        fields[i].name = text(va_arg(args, const char *));
        fields[i].value = text(va_arg(args, const char *));
    }
    va_end(args);
    return (struct gw_http_request){.method = GW_HTTP_POST, .fields = fields, .n_fields = n};
}

static void test_gw_auth_key_is_found_in_either_header(void **state)
{
    (void)state;
    struct gw_http_request r = request(1, "authorization", "bEaReR  k1");
    assert_true(gw_http_text_is(gw_auth_key_of(&r), "k1"));
    r = request(1, "X-Api-Key", "k2");
    assert_true(gw_http_text_is(gw_auth_key_of(&r), "k2"));
    r = request(1, "Authorization", "Basic k3");
    assert_int_equal(gw_auth_key_of(&r).n, 0);
    r = request(0);
    assert_int_equal(gw_auth_key_of(&r).n, 0);
}

static void test_gw_auth_media_types_follow_the_table(void **state)
{
    static const struct {
        const char *type; /* "": missing */
        bool alone, with_origin;
    } rows[] = {
        {"application/json", true, true},
        {"application/json; charset=UTF-8", true, true},
        {"Application/JSON;charset=\"utf-8\"", true, true},
        {"application/x+json", true, true},
        {"", true, false},
        {"text/plain", true, false},
        {"text/plain; charset=utf-8", true, false},
        {"application/x-www-form-urlencoded", true, false},
        {"multipart/form-data; boundary=x", false, false},
        {"application/json; charset=latin1", false, false},
        {"application/jsonx", false, false},
        {"application/+json", false, false},
        {"text/json", false, false},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        bool none = rows[i].type[0] == '\0';
        struct gw_http_request r = request(none ? 0 : 1, "content-type", rows[i].type);
        if (gw_auth_media_allowed(&r) != rows[i].alone)
            fail_msg("%s", rows[i].type);
        r = request(none ? 1 : 2, "origin", "http://localhost", "content-type", rows[i].type);
        if (gw_auth_media_allowed(&r) != rows[i].with_origin)
            fail_msg("%s with an Origin", rows[i].type);
    }
    struct gw_http_request r =
        request(2, "content-type", "application/json", "content-encoding", "gzip");
    assert_false(gw_auth_media_allowed(&r));
    r = request(2, "content-type", "application/json", "content-encoding", "Identity");
    assert_true(gw_auth_media_allowed(&r));
}

static void test_gw_auth_cross_site_page_is_refused(void **state)
{
    (void)state;
    struct gw_auth *a = make("", "", "");
    struct gw_http_request r = request(1, "Sec-Fetch-Site", "cross-site");
    assert_false(gw_auth_page_allowed(a, &r));
    r = request(1, "Sec-Fetch-Site", "same-origin");
    assert_true(gw_auth_page_allowed(a, &r));
    r = request(2, "Origin", "http://localhost", "Origin", "http://localhost");
    assert_false(gw_auth_page_allowed(a, &r));
    r = request(2, "Origin", "http://localhost:3000", "Sec-Fetch-Site", "cross-site");
    assert_true(gw_auth_page_allowed(a, &r));
    gw_auth_free(a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_auth_hosts_follow_the_table),
        cmocka_unit_test(test_gw_auth_origins_follow_the_table),
        cmocka_unit_test(test_gw_auth_null_origin_stays_refused_when_configured),
        cmocka_unit_test(test_gw_auth_keys_of_a_file_are_compared_whole),
        cmocka_unit_test(test_gw_auth_no_file_asks_for_no_key),
        cmocka_unit_test(test_gw_auth_file_without_a_key_is_refused),
        cmocka_unit_test(test_gw_auth_bad_key_files_name_file_and_line),
        cmocka_unit_test(test_gw_auth_key_is_found_in_either_header),
        cmocka_unit_test(test_gw_auth_media_types_follow_the_table),
        cmocka_unit_test(test_gw_auth_cross_site_page_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* What a head leads to. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "gw_conn.h"
#include "gw_verdict.h"

static void handle(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    (void)x, (void)r, (void)context;
}

static const struct gw_route routes[] = {
    {.path = "/v1/models", .methods = GW_ROUTE_GET, .handle = handle},
    {.path = "/v1/ask", .methods = GW_ROUTE_POST, .needs_key = true, .handle = handle},
    {.path = "/v1/models/{id}", .methods = GW_ROUTE_GET, .handle = handle}};

static struct gw_conn_shared shared;

static int setup(void **state)
{
    struct gw_auth *auth = NULL;
    struct err e;
    (void)state;
    if (gw_auth_new("", "https://app.example", "", &auth, &e) != ERR_OK)
        return -1;
    shared = (struct gw_conn_shared){
        .limits = gw_limits_default(),
        .auth = auth,
        .routes = {.rows = routes, .n_rows = sizeof routes / sizeof *routes}};
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    gw_auth_free((struct gw_auth *)(uintptr_t)shared.auth);
    return 0;
}

/* Of a request with that first line and those fields; the verdict is good until the next call. */
static const struct gw_verdict *decide(const char *line, const char *fields)
{
    static struct gw_verdict v;
    const struct gw_auth_listener listener = {.ip = {127, 0, 0, 1}, .n_ip = 4};
    char head[1024];
    size_t used;
    struct gw_http *h = gw_http_new(&shared.limits);
    const int n = snprintf(head, sizeof head, "%s HTTP/1.1\r\n%s\r\n", line, fields);
    assert_non_null(h);
    assert_true(n > 0 && (size_t)n < sizeof head);
    assert_int_equal(gw_http_feed(h, head, (size_t)n, &used), GW_HTTP_HEAD_READY);
    gw_verdict_decide(&v, &shared, &listener, gw_http_peek(h));
    gw_http_free(h);
    return &v;
}

#define LOCAL "Host: localhost\r\n"
#define EVIL  "Host: evil.example\r\nOrigin: https://evil.example\r\n"
#define WRONG "Expect: magic\r\nContent-Type: application/json\r\nContent-Length: "

static void test_gw_verdict_first_failure_wins(void **state)
{
    static const struct {
        const char *line, *fields;
        enum gw_error_code code;
    } rows[] = {
        {"POST /nowhere", EVIL WRONG "99999999999\r\n", GW_ERROR_HOST_NOT_ALLOWED},
        {"POST /nowhere", LOCAL "Origin: https://evil.example\r\n" WRONG "99999999999\r\n",
         GW_ERROR_ORIGIN_NOT_ALLOWED},
        {"POST /nowhere", LOCAL WRONG "99999999999\r\n", GW_ERROR_UNKNOWN_URL},
        {"POST /v1/models", LOCAL WRONG "99999999999\r\n", GW_ERROR_METHOD_NOT_ALLOWED},
        {"POST /v1/ask", LOCAL "Content-Encoding: gzip\r\n" WRONG "99999999999\r\n",
         GW_ERROR_UNSUPPORTED_MEDIA_TYPE},
        {"POST /v1/ask", LOCAL WRONG "99999999999\r\n", GW_ERROR_BODY_TOO_LARGE},
        {"POST /v1/ask", LOCAL WRONG "2\r\n", GW_ERROR_OVERLOADED},
    };
    (void)state;
    shared.draining = true;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct gw_verdict *v = decide(rows[i].line, rows[i].fields);
        assert_true(v->refused);
        assert_int_equal(v->refusal.code, rows[i].code);
    }
    shared.draining = false;
    assert_int_equal(decide("POST /v1/ask", LOCAL WRONG "2\r\n")->refusal.code,
                     GW_ERROR_EXPECTATION_FAILED);
}

static void test_gw_verdict_good_head_gets_its_route(void **state)
{
    (void)state;
    const struct gw_verdict *v =
        decide("POST /v1/ask", LOCAL "Content-Type: application/json\r\nContent-Length: 2\r\n");
    assert_false(v->refused);
    assert_ptr_equal(v->route, &routes[1]);
    v = decide("HEAD /v1/models/m", LOCAL);
    assert_false(v->refused);
    assert_ptr_equal(v->route, &routes[2]);
}

static void test_gw_verdict_refusal_names_the_path(void **state)
{
    char line[300] = "GET /";
    (void)state;
    assert_string_equal(decide("GET /v1/v1/models", LOCAL)->refusal.message,
                        "/v1/v1/models is not served: the client's base URL already ends in /v1");
    memset(line + 5, 'x', sizeof line - 6);
    const char *message = decide(line, LOCAL)->refusal.message;
    assert_int_equal(strspn(message, "/x"), 100);
    assert_non_null(strstr(message, " is not served; "));
    const struct gw_verdict *v = decide("DELETE /v1/ask", LOCAL);
    assert_string_equal(v->allow, "POST, OPTIONS");
    assert_string_equal(v->refusal.message, "/v1/ask does not know this method; see Allow");
}

static void test_gw_verdict_options_are_answered(void **state)
{
    (void)state;
    const struct gw_verdict *v = decide("OPTIONS /v1/models", LOCAL);
    assert_true(v->refused && v->options && !v->preflight);
    assert_string_equal(v->allow, "GET, HEAD, OPTIONS");
    assert_string_equal(decide("OPTIONS *", LOCAL)->allow, "GET, HEAD, POST, OPTIONS");
    v = decide("OPTIONS /nowhere", LOCAL "Origin: https://app.example\r\n"
                                         "Access-Control-Request-Method: POST\r\n");
    assert_true(v->refused && v->options && v->preflight);
    assert_null(v->allow);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_verdict_first_failure_wins),
        cmocka_unit_test(test_gw_verdict_good_head_gets_its_route),
        cmocka_unit_test(test_gw_verdict_refusal_names_the_path),
        cmocka_unit_test(test_gw_verdict_options_are_answered),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

/* The parser of requests: every shape whole, byte by byte, and cut at every position against an
 * inaccessible page. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "guard_page.h"
#include "gw_http.h"
#include "http_shapes.h"

enum {
    UNFINISHED = 1
};

struct result {
    unsigned
        status; /* of the first thing that went wrong; 200: all complete; UNFINISHED; 0: alien */
    unsigned n_complete;
    char body[64]; /* of the last request */
    size_t n_body;
};

/* Feeds n bytes; true while the parser can take more. */
static bool feed(struct gw_http *h, const uint8_t *bytes, size_t n, struct result *ret)
{
    size_t at = 0;
    for (;;) {
        size_t used = 0;
        enum gw_http_event event = gw_http_feed(h, bytes + at, n - at, &used);
        assert_true(used <= n - at);
        at += used;
        if (event == GW_HTTP_FAILED || event == GW_HTTP_ALIEN) {
            ret->status = event == GW_HTTP_ALIEN ? 0 : gw_http_failure(h).status;
            return false;
        }
        if (event == GW_HTTP_MORE) {
            assert_int_equal(at, n);
            return true;
        }
        if (event == GW_HTTP_COMPLETE) {
            struct gw_http_request *r = gw_http_take(h);
            ret->n_complete++;
            ret->n_body = r->body_bytes;
            assert_true(r->body_bytes < sizeof ret->body);
            if (r->body_bytes > 0)
                memcpy(ret->body, r->body, r->body_bytes);
            bool go_on = r->keep_alive;
            gw_http_request_free(r);
            if (!go_on)
                return false;
        }
    }
}

/* The n bytes in pieces of `piece`, with a first piece of `first`; each piece ends at a guard
 * page. */
static struct result run(const char *bytes, size_t n, size_t first, size_t piece)
{
    struct gw_limits limits = gw_limits_default();
    struct result r = {.status = UNFINISHED};
    struct gw_http *h = gw_http_new(&limits);
    assert_non_null(h);
    bool more = true;
    for (size_t at = 0; at < n && more;) {
        size_t k = at == 0 && first > 0 ? first : piece;
        k = k < n - at ? k : n - at;
        uint8_t *copy = guard_page_copy(bytes + at, k);
        more = feed(h, copy, k, &r);
        guard_page_free(copy, k);
        at += k;
    }
    if (r.status == UNFINISHED && r.n_complete > 0)
        r.status = 200;
    gw_http_free(h);
    return r;
}

static void check(const struct http_shape *s, size_t index, size_t first, size_t piece)
{
    struct result r = run(s->bytes, s->n, first, piece);
    if (r.status != s->status)
        fail_msg("shape %zu (first %zu, pieces of %zu): %u instead of %u: %.*s", index, first,
                 piece, r.status, s->status, (int)s->n, s->bytes);
}

static void test_gw_http_shapes_whole_get_their_status(void **state)
{
    (void)state;
    for (size_t i = 0; i < http_shapes_count; i++)
        check(&http_shapes[i], i, 0, http_shapes[i].n);
}

static void test_gw_http_shapes_byte_by_byte_get_their_status(void **state)
{
    (void)state;
    for (size_t i = 0; i < http_shapes_count; i++)
        check(&http_shapes[i], i, 0, 1);
}

static void test_gw_http_shapes_cut_anywhere_get_their_status(void **state)
{
    (void)state;
    for (size_t i = 0; i < http_shapes_count; i++)
        for (size_t cut = 1; cut < http_shapes[i].n; cut++)
            check(&http_shapes[i], i, cut, http_shapes[i].n);
}

static void test_gw_http_truncated_shape_is_never_complete_or_a_new_error(void **state)
{
    (void)state;
    for (size_t i = 0; i < http_shapes_count; i++) {
        const struct http_shape *s = &http_shapes[i];
        for (size_t n = 0; n < s->n; n++) {
            struct result r = run(s->bytes, n, 0, n);
            if (r.status != UNFINISHED && r.status != s->status)
                fail_msg("shape %zu cut to %zu bytes: %u, whole %u", i, n, r.status, s->status);
        }
    }
}

static void expect_body(const char *request, const char *body)
{
    for (size_t piece = 1; piece < 9; piece++) {
        struct result r = run(request, strlen(request), 0, piece);
        assert_int_equal(r.status, 200);
        assert_int_equal(r.n_body, strlen(body));
        assert_memory_equal(r.body, body, r.n_body);
    }
}

#define HEAD "POST /x HTTP/1.1\r\nHost: a\r\n"

static void test_gw_http_bodies_are_joined(void **state)
{
    (void)state;
    expect_body(HEAD "Content-Length: 5\r\n\r\nhello", "hello");
    expect_body(HEAD "Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x\r\nlo\r\n0\r\n\r\n",
                "hello");
    expect_body(HEAD "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\n", "hello");
    expect_body(HEAD "Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\nhello",
                "hello");
}

static void test_gw_http_two_requests_are_separate(void **state)
{
    (void)state;
    const char two[] = HEAD "Content-Length: 1\r\n\r\na" HEAD
                            "Transfer-Encoding: chunked\r\n\r\n1\r\nb\r\n0\r\n\r\n";
    for (size_t piece = 1; piece < sizeof two; piece++) {
        struct result r = run(two, sizeof two - 1, 0, piece);
        assert_int_equal(r.status, 200);
        assert_int_equal(r.n_complete, 2);
        assert_memory_equal(r.body, "b", 1);
    }
}

static void test_gw_http_close_stops_the_parsing(void **state)
{
    (void)state;
    const char two[] =
        "GET /a HTTP/1.1\r\nHost: a\r\nConnection: x, Close\r\n\r\nGET /b HTTP/1.1\r\nHost: a\r\n\r\n";
    assert_int_equal(run(two, sizeof two - 1, 0, sizeof two).n_complete, 1);
}

static unsigned status_of(const char *request, size_t n)
{
    unsigned whole = run(request, n, 0, n).status;
    assert_int_equal(run(request, n, 0, 977).status, whole);
    return whole;
}

static void test_gw_http_request_line_of_8192_passes_and_8193_is_414(void **state)
{
    (void)state;
    for (unsigned more = 0; more < 2; more++) {
        struct buf b = BUF_INIT(1 << 20);
        buf_text(&b, "GET /");
        while (b.size < 8192 + more - strlen(" HTTP/1.1"))
            buf_byte(&b, 'a');
        buf_text(&b, " HTTP/1.1\r\nHost: a\r\n\r\n");
        assert_int_equal(status_of((const char *)b.data, b.size), more ? 414 : 200);
        buf_done(&b);
    }
}

static void test_gw_http_101_fields_are_431(void **state)
{
    (void)state;
    for (unsigned fields = 100; fields < 102; fields++) {
        struct buf b = BUF_INIT(1 << 20);
        buf_text(&b, "GET / HTTP/1.1\r\nHost: a\r\n");
        for (unsigned i = 1; i < fields; i++)
            buf_format(&b, "X-%u: y\r\n", i);
        buf_text(&b, "\r\n");
        assert_int_equal(status_of((const char *)b.data, b.size), fields > 100 ? 431 : 200);
        buf_done(&b);
    }
}

static void test_gw_http_head_over_32_kib_is_431(void **state)
{
    (void)state;
    for (unsigned more = 0; more < 2; more++) {
        struct buf b = BUF_INIT(1 << 20);
        buf_text(&b, "GET / HTTP/1.1\r\nHost: a\r\nX: ");
        while (b.size < 32 * 1024 - 4 + more)
            buf_byte(&b, 'a');
        buf_text(&b, "\r\n\r\n");
        assert_int_equal(status_of((const char *)b.data, b.size), more ? 431 : 200);
        buf_done(&b);
    }
}

static void test_gw_http_long_line_is_refused_before_it_ends(void **state)
{
    (void)state;
    char line[9000];
    memset(line, 'a', sizeof line);
    memcpy(line, "GET /", 5);
    assert_int_equal(run(line, sizeof line, 0, 100).status, 414);
}

static void test_gw_http_chunk_extensions_over_4_kib_are_400(void **state)
{
    (void)state;
    struct buf b = BUF_INIT(1 << 20);
    buf_text(&b, HEAD "Transfer-Encoding: chunked\r\n\r\n");
    for (unsigned i = 0; i < 40; i++) {
        buf_text(&b, "1;");
        for (unsigned k = 0; k < 110; k++)
            buf_byte(&b, 'e');
        buf_text(&b, "\r\nx\r\n");
    }
    buf_text(&b, "0\r\n\r\n");
    assert_int_equal(status_of((const char *)b.data, b.size), 400);
    buf_done(&b);
}

static void test_gw_http_chunked_body_over_the_limit_is_413(void **state)
{
    (void)state;
    struct gw_limits limits = gw_limits_default();
    limits.max_body_bytes = 8;
    const char *over[] = {HEAD "Transfer-Encoding: chunked\r\n\r\n9\r\n",
                          HEAD "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n4\r\n",
                          HEAD "Transfer-Encoding: chunked\r\n\r\nffffffff\r\n"};
    for (size_t i = 0; i < sizeof over / sizeof over[0]; i++) {
        struct gw_http *h = gw_http_new(&limits);
        struct result r = {.status = UNFINISHED};
        assert_false(feed(h, (const uint8_t *)over[i], strlen(over[i]), &r));
        assert_int_equal(r.status, 413);
        gw_http_free(h);
    }
}

static void test_gw_http_discarded_body_is_framed_and_not_kept(void **state)
{
    (void)state;
    struct gw_limits limits = gw_limits_default();
    const char text[] = HEAD "Content-Length: 5\r\n\r\nhelloGET / HTTP/1.1\r\nHost: a\r\n\r\n";
    struct gw_http *h = gw_http_new(&limits);
    size_t at = 0, used;
    assert_int_equal(gw_http_feed(h, text, sizeof text - 1, &used), GW_HTTP_HEAD_READY);
    at += used;
    gw_http_discard_body(h);
    assert_int_equal(gw_http_feed(h, text + at, sizeof text - 1 - at, &used), GW_HTTP_COMPLETE);
    assert_int_equal(used, 5);
    at += used;
    assert_null(gw_http_peek(h)->body);
    assert_int_equal(gw_http_feed(h, text + at, sizeof text - 1 - at, &used), GW_HTTP_HEAD_READY);
    assert_int_equal(gw_http_peek(h)->method, GW_HTTP_GET);
    gw_http_free(h);
}

static void test_gw_http_fields_and_target_are_told(void **state)
{
    (void)state;
    struct gw_limits limits = gw_limits_default();
    const char text[] =
        "\r\nGET http://A:80/p/q?r=s HTTP/1.1\r\nhOST:a:80\r\nX-One:  two words \t\r\nx-one: 2\r\n"
        "Expect: 100-Continue\r\n\r\n";
    struct gw_http *h = gw_http_new(&limits);
    size_t used;
    assert_int_equal(gw_http_feed(h, text, sizeof text - 1, &used), GW_HTTP_HEAD_READY);
    struct gw_http_request *r = gw_http_peek(h);
    assert_true(gw_http_text_is(r->path, "/p/q"));
    assert_true(gw_http_text_is(r->host, "A:80"));
    assert_true(gw_http_text_is(gw_http_field(r, "x-ONE"), "two words"));
    assert_int_equal(gw_http_count(r, "X-One"), 2);
    assert_null(gw_http_field(r, "x").p);
    assert_true(r->expect_continue && !r->expect_other && r->keep_alive);
    gw_http_free(h);
}

/* Every allocation of a request fails once: a status, no leak, no crash. */
static void test_gw_http_failing_allocation_is_503(void **state)
{
    (void)state;
    const char text[] = HEAD "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
    struct gw_limits limits = gw_limits_default();
    uint64_t before = alloc_live_blocks();
    unsigned refused = 0;
    for (uint64_t nth = 1; nth < 50; nth++) {
        struct result r = {.status = UNFINISHED};
        alloc_fail_at(nth, 0);
        struct gw_http *h = gw_http_new(&limits);
        if (h != NULL)
            feed(h, (const uint8_t *)text, sizeof text - 1, &r);
        alloc_fail_at(0, 0);
        gw_http_free(h);
        assert_int_equal(alloc_live_blocks(), before);
        assert_true(h == NULL || r.status == 503 || r.n_complete == 1);
        refused += h == NULL || r.status == 503;
    }
    assert_true(refused >= 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_http_shapes_whole_get_their_status),
        cmocka_unit_test(test_gw_http_shapes_byte_by_byte_get_their_status),
        cmocka_unit_test(test_gw_http_shapes_cut_anywhere_get_their_status),
        cmocka_unit_test(test_gw_http_truncated_shape_is_never_complete_or_a_new_error),
        cmocka_unit_test(test_gw_http_bodies_are_joined),
        cmocka_unit_test(test_gw_http_two_requests_are_separate),
        cmocka_unit_test(test_gw_http_close_stops_the_parsing),
        cmocka_unit_test(test_gw_http_request_line_of_8192_passes_and_8193_is_414),
        cmocka_unit_test(test_gw_http_101_fields_are_431),
        cmocka_unit_test(test_gw_http_head_over_32_kib_is_431),
        cmocka_unit_test(test_gw_http_long_line_is_refused_before_it_ends),
        cmocka_unit_test(test_gw_http_chunk_extensions_over_4_kib_are_400),
        cmocka_unit_test(test_gw_http_chunked_body_over_the_limit_is_413),
        cmocka_unit_test(test_gw_http_discarded_body_is_framed_and_not_kept),
        cmocka_unit_test(test_gw_http_fields_and_target_are_told),
        cmocka_unit_test(test_gw_http_failing_allocation_is_503),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

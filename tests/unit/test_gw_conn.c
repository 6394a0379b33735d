/* One connection on a fake clock: bytes in, bytes out, no sockets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "gw_conn.h"
#include "gw_exchange.h"
#include "gw_response.h"
#include "http_shapes.h"
#include "log.h"

struct fixture {
    struct ticks_fake clock;
    struct gw_conn_shared shared;
    struct gw_auth *auth;
    struct gw_conn *c;
    struct buf out; /* all that was sent */
    bool reads;     /* the client takes what is sent */
    bool shut;      /* the output was half-closed */
    unsigned n_calls, n_cancelled, n_writable, n_woken;
    struct gw_exchange *held; /* by the handler of /hold */
};

static void on_cancel(void *user)
{
    struct fixture *f = user;
    f->n_cancelled++;
    f->held = NULL;
}

static void on_writable(void *user)
{
    ((struct fixture *)user)->n_writable++;
}

static const struct gw_exchange_events events = {.cancel = on_cancel, .writable = on_writable};
static const struct gw_exchange_head plain = {.status = 200};

static void on_hurry(void *user)
{
    struct fixture *f = user;
    struct gw_exchange *x = f->held;
    f->held = NULL;
    gw_exchange_respond(x, &plain, "in a hurry", 10);
}

static const struct gw_exchange_events patient = {.cancel = on_cancel, .hurry = on_hurry};

static void handle_echo(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    struct fixture *f = context;
    f->n_calls++;
    if (r->body != NULL)
        gw_exchange_respond(x, &plain, r->body, r->body_bytes);
    else
        gw_exchange_respond(x, &plain, r->capture.n > 0 ? r->capture.p : "ok",
                            r->capture.n > 0 ? r->capture.n : 2);
}

static void handle_hold(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    struct fixture *f = context;
    (void)r;
    f->n_calls++;
    f->held = x;
    gw_exchange_watch(x, &events, f);
}

static void handle_wait(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    struct fixture *f = context;
    (void)r;
    f->held = x;
    gw_exchange_watch(x, &patient, f);
}

static const struct gw_route rows[] = {
    {"/wait", GW_ROUTE_GET, false, handle_wait},
    {"/", GW_ROUTE_GET, false, handle_echo},
    {"/a", GW_ROUTE_GET, false, handle_echo},
    {"/b", GW_ROUTE_GET, true, handle_echo},
    {"/x", GW_ROUTE_GET, false, handle_echo},
    {"/v1/models", GW_ROUTE_GET, true, handle_echo},
    {"/v1/models/{id}", GW_ROUTE_GET, true, handle_echo},
    {"/v1/chat/completions", GW_ROUTE_POST, true, handle_echo},
    {"/hold", GW_ROUTE_POST, true, handle_hold},
};

static void on_wake(void *io)
{
    ((struct fixture *)io)->n_woken++;
}

static void connect_client(struct fixture *f)
{
    struct gw_auth_listener listener = {.ip = {127, 0, 0, 1}, .n_ip = 4};
    gw_conn_free(f->c);
    buf_clear(&f->out);
    f->shut = false;
    f->c = gw_conn_new(&f->shared, &listener, on_wake, f);
    assert_non_null(f->c);
}

static int set_up(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct err e = {0};
    log_setup(LOG_LEVEL_ERROR, LOG_FORMAT_TEXT);
    f->clock.now_ns = 1000000000;
    f->reads = true;
    f->out = BUF_INIT(1 << 26);
    assert_int_equal(gw_auth_new("a", "app://*", "", &f->auth, &e), ERR_OK);
    f->shared.limits = gw_limits_default();
    f->shared.ticks = ticks_of_fake(&f->clock);
    f->shared.auth = f->auth;
    f->shared.routes = (struct gw_routes){rows, sizeof rows / sizeof rows[0], f};
    connect_client(f);
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    gw_conn_free(f->c);
    gw_auth_free(f->auth);
    buf_done(&f->out);
    assert_int_equal(f->shared.n_exchanges, 0);
    free(f);
    return alloc_live_blocks() == 0 ? 0 : -1;
}

/* What the loop does between two events. */
static void settle(struct fixture *f)
{
    size_t n;
    gw_conn_run(f->c);
    while (f->reads && gw_conn_state(f->c) != GW_CONN_RESET) {
        const void *bytes = gw_conn_output(f->c, &n);
        if (n == 0)
            break;
        buf_append(&f->out, bytes, n);
        gw_conn_sent(f->c, n);
    }
    if (gw_conn_state(f->c) == GW_CONN_SHUT)
        f->shut = true;
}

static void feed_bytes(struct fixture *f, const char *bytes, size_t n)
{
    gw_conn_feed(f->c, bytes, n);
    settle(f);
}

static void feed(struct fixture *f, const char *text)
{
    feed_bytes(f, text, strlen(text));
}

/* Lets time pass in steps of at most 100 ms, as the loop's timer would look. */
static void pass_ms(struct fixture *f, uint64_t ms)
{
    uint64_t end = f->clock.now_ns + ms * 1000000u;
    while (f->clock.now_ns < end) {
        uint64_t step = end - f->clock.now_ns;
        f->clock.now_ns += step < 100000000u ? step : 100000000u;
        gw_conn_tick(f->c);
        settle(f);
    }
}

static const char *text_of(struct fixture *f)
{
    buf_byte(&f->out, 0);
    f->out.size--;
    return (const char *)f->out.data;
}

static bool has(struct fixture *f, const char *word)
{
    return strstr(text_of(f), word) != NULL;
}

static unsigned status(struct fixture *f)
{
    return f->out.size > 12 ? (unsigned)atoi(text_of(f) + 9) : 0;
}

static unsigned count(struct fixture *f, const char *word)
{
    unsigned n = 0;
    for (const char *p = text_of(f); (p = strstr(p, word)) != NULL; p++)
        n++;
    return n;
}

static bool is_over(struct fixture *f)
{
    return gw_conn_state(f->c) != GW_CONN_OPEN;
}

#define GET(path) "GET " path " HTTP/1.1\r\nHost: localhost\r\n\r\n"
#define POST(path, more) \
    "POST " path " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" more "\r\n"
#define CHAT POST("/v1/chat/completions", "Content-Length: 2\r\n") "{}"

static void test_gw_conn_good_request_is_answered_and_kept(void **state)
{
    struct fixture *f = *state;
    feed(f, CHAT);
    assert_int_equal(status(f), 200);
    assert_true(has(f, "Content-Type: application/json\r\n"));
    assert_true(has(f, "Content-Length: 2\r\n"));
    assert_true(has(f, "Keep-Alive: timeout=75\r\n"));
    assert_true(has(f, "\r\nx-request-id: req_"));
    assert_true(has(f, "\r\nServer: islet/"));
    assert_true(has(f, "\r\nDate: "));
    assert_true(has(f, "Cache-Control: no-store\r\n"));
    assert_true(has(f, "openai-processing-ms: 0\r\n"));
    assert_false(is_over(f));
    feed(f, CHAT);
    assert_int_equal(count(f, "HTTP/1.1 200"), 2);
}

/* A shape and a valid request behind it: one status, then the end, and the second is never
 * served. */
static void check_shape(struct fixture *f, const struct http_shape *s, size_t piece)
{
    connect_client(f);
    f->n_calls = 0;
    for (size_t at = 0; at < s->n; at += piece)
        feed_bytes(f, s->bytes + at, piece < s->n - at ? piece : s->n - at);
    unsigned before = f->n_calls;
    if (s->status == 200) {
        assert_true(status(f) == 200 || status(f) == 400 || status(f) == 404 || status(f) == 204);
        return;
    }
    feed(f, GET("/"));
    if (status(f) != s->status || !is_over(f) || f->n_calls != before || before != 0)
        fail_msg("status %u instead of %u, %u calls: %.*s", status(f), s->status, f->n_calls,
                 (int)s->n, s->bytes);
    assert_true(s->status == 0 || has(f, "Connection: close\r\n"));
    assert_true(count(f, "\r\nServer: ") <= 1);
}

static void test_gw_conn_bad_shapes_end_the_connection(void **state)
{
    struct fixture *f = *state;
    for (size_t i = 0; i < http_shapes_count; i++) {
        check_shape(f, &http_shapes[i], http_shapes[i].n);
        check_shape(f, &http_shapes[i], 1);
    }
}

static void test_gw_conn_head_byte_by_byte_over_2_s_is_served(void **state)
{
    struct fixture *f = *state;
    for (const char *p = CHAT; *p != '\0'; p++) {
        feed_bytes(f, p, 1);
        pass_ms(f, 15);
    }
    assert_int_equal(status(f), 200);
}

static void test_gw_conn_stalled_head_is_408(void **state)
{
    struct fixture *f = *state;
    pass_ms(f, 29000);
    feed(f, "GET / HTTP/1.1\r\n");
    pass_ms(f, 9900);
    assert_int_equal(f->out.size, 0);
    pass_ms(f, 200);
    assert_int_equal(status(f), 408);
    assert_true(has(f, "\"code\":\"request_timeout\""));
    assert_true(f->shut);
    pass_ms(f, 2100);
    assert_int_equal(gw_conn_state(f->c), GW_CONN_CLOSE);
}

static void test_gw_conn_silence_after_accept_closes_without_a_byte(void **state)
{
    struct fixture *f = *state;
    pass_ms(f, 29900);
    assert_false(is_over(f));
    pass_ms(f, 200);
    assert_int_equal(gw_conn_state(f->c), GW_CONN_CLOSE);
    assert_int_equal(f->out.size, 0);
}

static void test_gw_conn_stalled_body_is_408(void **state)
{
    struct fixture *f = *state;
    feed(f, POST("/v1/chat/completions", "Content-Length: 100000\r\n") "{");
    pass_ms(f, 9900);
    assert_int_equal(f->out.size, 0);
    pass_ms(f, 200);
    assert_int_equal(status(f), 408);
}

static void feed_rate(struct fixture *f, unsigned bytes_per_s, unsigned seconds)
{
    char bytes[100];
    memset(bytes, ' ', sizeof bytes);
    for (unsigned i = 0; i < seconds * bytes_per_s / 100 && !is_over(f); i++) {
        feed_bytes(f, bytes, 100);
        pass_ms(f, 100000 / bytes_per_s);
    }
}

static void test_gw_conn_body_at_100_bytes_a_second_is_408_after_10_s(void **state)
{
    struct fixture *f = *state;
    feed(f, POST("/v1/chat/completions", "Content-Length: 100000\r\n"));
    feed_rate(f, 100, 9);
    assert_false(is_over(f));
    feed_rate(f, 100, 2);
    assert_int_equal(status(f), 408);
}

static void test_gw_conn_steady_body_has_60_s(void **state)
{
    struct fixture *f = *state;
    feed(f, POST("/v1/chat/completions", "Content-Length: 1000000\r\n"));
    feed_rate(f, 2000, 59);
    assert_false(is_over(f));
    feed_rate(f, 2000, 2);
    assert_int_equal(status(f), 408);
}

static void test_gw_conn_idle_closes_at_90_s(void **state)
{
    struct fixture *f = *state;
    feed(f, GET("/"));
    pass_ms(f, 89800);
    assert_false(is_over(f));
    feed(f, GET("/"));
    assert_int_equal(count(f, "HTTP/1.1 200"), 2);
    size_t before = f->out.size;
    pass_ms(f, 90100);
    assert_int_equal(gw_conn_state(f->c), GW_CONN_CLOSE);
    assert_int_equal(f->out.size, before);
}

static void test_gw_conn_stalled_reader_is_cancelled_after_60_s(void **state)
{
    struct fixture *f = *state;
    feed(f, POST("/hold", "Content-Length: 2\r\n") "{}");
    gw_exchange_begin(
        f->held, &(struct gw_exchange_head){.content_type = "text/event-stream; charset=utf-8"});
    settle(f);
    f->reads = false;
    assert_true(gw_exchange_write(f->held, "data: x\n\n", 9));
    pass_ms(f, 59900);
    assert_int_equal(f->n_cancelled, 0);
    pass_ms(f, 200);
    assert_int_equal(f->n_cancelled, 1);
    assert_int_equal(gw_conn_state(f->c), GW_CONN_RESET);
}

static void test_gw_conn_slow_reader_that_goes_on_is_kept(void **state)
{
    struct fixture *f = *state;
    char block[1000] = {0};
    feed(f, POST("/hold", "Content-Length: 2\r\n") "{}");
    gw_exchange_begin(f->held, &plain);
    f->reads = false;
    unsigned taken = 0;
    while (gw_exchange_write(f->held, block, sizeof block))
        taken++;
    assert_true(taken * sizeof block <= f->shared.limits.rendered_bytes + sizeof block);
    assert_int_equal(gw_exchange_room(f->held), 0);
    for (unsigned i = 0; i < 20; i++) {
        pass_ms(f, 50000);
        gw_conn_sent(f->c, 1);
        assert_int_equal(f->n_cancelled, 0);
    }
    assert_int_equal(f->n_writable, 0);
    f->reads = true;
    settle(f);
    assert_int_equal(f->n_writable, 1);
    assert_true(gw_exchange_room(f->held) > 0);
    gw_exchange_end(f->held);
    settle(f);
    assert_false(is_over(f));
}

static void test_gw_conn_stream_ends_with_its_chunk_at_once(void **state)
{
    struct fixture *f = *state;
    feed(f, POST("/hold", "Content-Length: 2\r\n") "{}");
    gw_exchange_begin(
        f->held, &(struct gw_exchange_head){.content_type = "text/event-stream; charset=utf-8"});
    settle(f);
    assert_true(has(f, "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"));
    assert_true(has(f, "Transfer-Encoding: chunked\r\n"));
    assert_true(gw_exchange_write(f->held, "data: [DONE]\n\n", 14));
    gw_exchange_end(f->held);
    settle(f);
    assert_non_null(strstr(text_of(f), "\r\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"));
    feed(f, GET("/"));
    assert_int_equal(count(f, "HTTP/1.1 200"), 2);
}

static void test_gw_conn_http10_stream_ends_by_the_close(void **state)
{
    struct fixture *f = *state;
    feed(f, "POST /hold HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n{}");
    gw_exchange_begin(f->held, &plain);
    assert_true(gw_exchange_write(f->held, "hello", 5));
    gw_exchange_end(f->held);
    settle(f);
    assert_false(has(f, "chunked"));
    assert_non_null(strstr(text_of(f), "\r\n\r\nhello"));
    assert_true(f->shut);
}

static void test_gw_conn_http10_keep_alive_is_kept_where_asked(void **state)
{
    struct fixture *f = *state;
    feed(f, "GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n");
    assert_true(has(f, "Connection: keep-alive\r\n"));
    assert_false(is_over(f));
    feed(f, "GET / HTTP/1.0\r\n\r\n");
    assert_true(f->shut);
}

static void test_gw_conn_abort_breaks_without_the_last_chunk(void **state)
{
    struct fixture *f = *state;
    feed(f, POST("/hold", "Content-Length: 2\r\n") "{}");
    gw_exchange_begin(f->held, &plain);
    assert_true(gw_exchange_write(f->held, " ", 1));
    gw_exchange_abort(f->held);
    settle(f);
    assert_int_equal(gw_conn_state(f->c), GW_CONN_CLOSE);
    assert_false(has(f, "\r\n0\r\n\r\n"));
}

static void test_gw_conn_client_gone_cancels(void **state)
{
    struct fixture *f = *state;
    for (unsigned how = 0; how < 2; how++) {
        connect_client(f);
        feed(f, POST("/hold", "Content-Length: 2\r\n") "{}");
        assert_non_null(f->held);
        if (how == 0)
            gw_conn_eof(f->c);
        else
            gw_conn_lost(f->c);
        assert_int_equal(f->n_cancelled, how + 1);
        assert_int_equal(f->shared.n_exchanges, 0);
        assert_true(is_over(f));
    }
}

static void test_gw_conn_half_close_behind_a_request_still_gets_the_answer(void **state)
{
    struct fixture *f = *state;
    gw_conn_feed(f->c, GET("/"), strlen(GET("/")));
    gw_conn_eof(f->c);
    settle(f);
    assert_int_equal(status(f), 200);
    assert_int_equal(gw_conn_state(f->c), GW_CONN_CLOSE);
}

/* A view of what is known is answered at once where a client sends no more; what would have to be
 * worked for is cancelled (above). */
static void test_gw_conn_half_close_hurries_what_only_waits(void **state)
{
    struct fixture *f = *state;
    feed(f, GET("/wait") GET("/a"));
    assert_non_null(f->held);
    assert_int_equal(f->out.size, 0);
    gw_conn_eof(f->c);
    settle(f);
    assert_int_equal(status(f), 200);
    assert_true(has(f, "\r\n\r\nin a hurry"));
    assert_int_equal(count(f, "HTTP/1.1 "), 1);
    assert_int_equal(f->n_cancelled, 0);
    assert_int_equal(f->shared.n_exchanges, 0);
    assert_int_equal(gw_conn_state(f->c), GW_CONN_CLOSE);
    connect_client(f); /* a reset is the end */
    feed(f, GET("/wait"));
    gw_conn_lost(f->c);
    assert_int_equal(f->n_cancelled, 1);
}

static void test_gw_conn_pipelined_requests_are_answered_in_order(void **state)
{
    struct fixture *f = *state;
    feed(f,
         POST("/hold", "Content-Length: 2\r\n") "{}" GET("/v1/models/one") GET("/v1/models/two"));
    assert_int_equal(f->n_calls, 1);
    assert_int_equal(f->out.size, 0);
    gw_exchange_respond(f->held, &plain, "zero", 4);
    settle(f);
    const char *t = text_of(f);
    assert_int_equal(f->n_calls, 3);
    assert_true(strstr(t, "zero") < strstr(t, "one") && strstr(t, "one") < strstr(t, "two"));
}

/* A client that asks without end and reads nothing: what waits for it stays within the limit and one
 * answer, and nothing is lost once it reads. */
static void test_gw_conn_pipelining_client_that_does_not_read_is_held(void **state)
{
    enum {
        BODY = 10000,
        ASKED = 500
    };
    struct fixture *f = *state;
    struct buf request = BUF_INIT(1 << 20);
    unsigned n_fed = 0;
    buf_format(&request, POST("/v1/chat/completions", "Content-Length: %d\r\n"), BODY);
    for (unsigned i = 0; i < BODY; i++)
        buf_byte(&request, 'x');
    for (unsigned round = 0; round < 2; round++) {
        f->reads = false;
        for (; gw_conn_reads(f->c) && n_fed < ASKED; n_fed++) {
            feed_bytes(f, (const char *)request.data, request.size);
            assert_true(gw_conn_unsent(f->c) < f->shared.limits.rendered_bytes + 2 * BODY);
        }
        assert_true(n_fed < ASKED);
        pass_ms(f, 50000); /* it is neither idle nor stalled yet */
        gw_conn_sent(f->c, 1);
        pass_ms(f, 50000);
        assert_int_equal(gw_conn_state(f->c), GW_CONN_OPEN);
        assert_false(gw_conn_reads(f->c));
        f->reads = true;
        settle(f);
        assert_true(gw_conn_reads(f->c));
        assert_int_equal(f->n_calls, n_fed);
    }
    buf_done(&request);
}

/* Requests that came in one piece wait too, and are taken up when there is room. */
static void test_gw_conn_pipelined_requests_of_one_piece_wait_for_room(void **state)
{
    struct fixture *f = *state;
    static const char request[] = GET("/x");
    enum {
        ASKED = 1000
    };
    struct buf all = BUF_INIT(1 << 20);
    f->shared.limits.rendered_bytes = 1000;
    f->reads = false;
    for (unsigned i = 0; i < ASKED; i++)
        buf_text(&all, request);
    feed_bytes(f, (const char *)all.data, all.size);
    assert_true(f->n_calls > 1 && f->n_calls < 20);
    assert_true(gw_conn_unsent(f->c) < 2000);
    assert_false(gw_conn_reads(f->c));
    f->reads = true;
    for (unsigned turns = 0; f->n_calls < ASKED; turns++) {
        unsigned before = f->n_woken;
        assert_true(turns < ASKED);
        settle(f);
        assert_true(f->n_calls == ASKED || f->n_woken > before);
    }
    settle(f);
    assert_true(gw_conn_reads(f->c));
    assert_int_equal(gw_conn_state(f->c), GW_CONN_OPEN);
    buf_done(&all);
}

static void test_gw_conn_65_kib_behind_a_running_request_close(void **state)
{
    struct fixture *f = *state;
    char rubbish[1024];
    memset(rubbish, 'x', sizeof rubbish);
    feed(f, POST("/hold", "Content-Length: 2\r\n") "{}");
    for (unsigned i = 0; i < 64; i++)
        feed_bytes(f, rubbish, sizeof rubbish);
    assert_int_equal(f->n_cancelled, 0);
    feed_bytes(f, rubbish, 1);
    assert_int_equal(f->n_cancelled, 1);
    assert_int_equal(gw_conn_state(f->c), GW_CONN_CLOSE);
}

static void test_gw_conn_413_comes_before_the_body_and_lingers(void **state)
{
    struct fixture *f = *state;
    char block[65536] = {0};
    feed(f, POST("/v1/chat/completions", "Content-Length: 16777217\r\n"));
    assert_int_equal(status(f), 413);
    assert_true(has(f, "Connection: close"));
    assert_true(f->shut);
    for (unsigned i = 0; i < 256; i++)
        feed_bytes(f, block, sizeof block);
    assert_int_equal(gw_conn_state(f->c), GW_CONN_SHUT);
    pass_ms(f, 2100);
    assert_int_equal(gw_conn_state(f->c), GW_CONN_CLOSE);
    assert_int_equal(f->n_calls, 0);
}

static void test_gw_conn_lingering_ends_after_64_mib(void **state)
{
    struct fixture *f = *state;
    char block[65536] = {0};
    feed(f, POST("/v1/chat/completions", "Content-Length: 16777217\r\n"));
    for (unsigned i = 0; i < 1024; i++)
        feed_bytes(f, block, sizeof block);
    assert_int_equal(gw_conn_state(f->c), GW_CONN_SHUT);
    feed_bytes(f, block, 1);
    assert_int_equal(gw_conn_state(f->c), GW_CONN_CLOSE);
}

static void test_gw_conn_expect_continue_is_answered_after_the_checks(void **state)
{
    struct fixture *f = *state;
    feed(f, POST("/v1/chat/completions", "Expect: 100-continue\r\nContent-Length: 2\r\n"));
    assert_string_equal(text_of(f), "HTTP/1.1 100 Continue\r\n\r\n");
    feed(f, "{}");
    assert_true(has(f, "HTTP/1.1 200 OK"));
    connect_client(f);
    feed(f, POST("/nowhere", "Expect: 100-continue\r\nContent-Length: 2\r\n"));
    assert_int_equal(status(f), 404);
    assert_true(f->shut);
    connect_client(f);
    feed(f, POST("/v1/chat/completions", "Expect: x\r\nContent-Length: 2\r\n") "{}");
    assert_int_equal(status(f), 417);
}

static void expect(struct fixture *f, const char *request, unsigned want)
{
    connect_client(f);
    feed(f, request);
    if (status(f) != want)
        fail_msg("%u instead of %u for %s", status(f), want, request);
}

static void test_gw_conn_methods_and_paths(void **state)
{
    struct fixture *f = *state;
    expect(f, "HEAD / HTTP/1.1\r\nHost: a\r\n\r\n", 200);
    assert_true(has(f, "Content-Length: 2\r\n") &&
                strcmp(strstr(text_of(f), "\r\n\r\n"), "\r\n\r\n") == 0);
    expect(f, "DELETE /v1/chat/completions HTTP/1.1\r\nHost: a\r\n\r\n", 405);
    assert_true(has(f, "Allow: POST, OPTIONS\r\n"));
    assert_false(is_over(f));
    expect(f, POST("/v1/models", "Content-Length: 2\r\n") "{}", 405);
    assert_true(has(f, "Allow: GET, HEAD, OPTIONS\r\n"));
    expect(f, GET("/v1/models/"), 200);
    expect(f, GET("/v1/models?x=1"), 200);
    expect(f, GET("/v1/models/a%2Fb:q"), 200);
    assert_true(has(f, "\r\n\r\na/b:q"));
    expect(f, GET("/v1/models/a/b:q"), 200);
    assert_true(has(f, "\r\n\r\na/b:q"));
    expect(f, GET("/v1/m%6Fdels"), 200);
    expect(f, GET("/v1%2Fmodels"), 404);
    expect(f, GET("/v1/v1/models"), 404);
    assert_true(has(f, "base URL"));
    expect(f, GET("/y"), 404);
    assert_true(has(f, "\"code\":\"unknown_url\""));
    expect(f, GET("/%zz"), 400);
    expect(f, GET("/v1/models/%00"), 400);
    expect(f, POST("/v1/chat/completions", ""), 400);
    assert_true(has(f, "invalid_json"));
    expect(f, "OPTIONS /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", 204);
    assert_true(has(f, "Allow: GET, HEAD, OPTIONS\r\n") && !has(f, "Content-Length"));
}

static void test_gw_conn_early_error_keeps_the_connection_when_the_body_is_there(void **state)
{
    struct fixture *f = *state;
    feed(f, POST("/nowhere", "Content-Length: 5\r\n") "hello" GET("/"));
    assert_int_equal(status(f), 404);
    assert_int_equal(count(f, "HTTP/1.1 200"), 1);
    connect_client(f);
    feed(f, POST("/nowhere", "Content-Length: 5\r\n") "hel");
    assert_int_equal(status(f), 404);
    assert_true(f->shut);
}

static void tell(void *context, struct gw_response *r)
{
    (void)context;
    r->degraded = "the GPU rests";
    r->celsius = 61;
}

static void test_gw_conn_every_answer_tells_of_the_gpu(void **state)
{
    struct fixture *f = *state;
    static const char *const requests[] = {GET("/"), GET("/y"), GET("/%zz"),
                                           POST("/v1/chat/completions", "")};
    for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++) {
        f->shared.tell = NULL;
        connect_client(f);
        feed(f, requests[i]);
        assert_true(status(f) >= 200);
        assert_false(has(f, "x-nvidia-temp") || has(f, "x-islet-degraded"));
        f->shared.tell = tell;
        connect_client(f);
        feed(f, requests[i]);
        assert_true(has(f, "\r\nx-nvidia-temp: 61\r\n"));
        assert_true(has(f, "\r\nx-islet-degraded: the GPU rests\r\n"));
    }
    struct buf out = BUF_INIT(SIZE_MAX);
    gw_conn_overloaded(&f->shared, &out);
    buf_append(&out, "", 1);
    assert_non_null(strstr((const char *)out.data, "\r\nx-nvidia-temp: 61\r\n"));
    buf_done(&out);
}

static void tell_bytes(void *context, struct gw_response *r)
{
    (void)context;
    r->degraded = "m\xC3\xBC\x7F: a\r\nx-evil: 1";
}

static void test_gw_conn_what_a_worker_says_stays_one_line_of_ascii(void **state)
{
    struct fixture *f = *state;
    f->shared.tell = tell_bytes;
    expect(f, GET("/"), 200);
    assert_true(has(f, "\r\nx-islet-degraded: m???: a??x-evil: 1\r\n"));
}

static void test_gw_conn_origins_and_preflight(void **state)
{
    struct fixture *f = *state;
    expect(f, "GET / HTTP/1.1\r\nHost: a\r\nOrigin: http://localhost:5173\r\n\r\n", 200);
    assert_true(has(f, "Access-Control-Allow-Origin: http://localhost:5173\r\nVary: Origin\r\n"));
    expect(f, "GET /y HTTP/1.1\r\nHost: a\r\nOrigin: app://x\r\n\r\n", 404);
    assert_true(has(f, "Access-Control-Allow-Origin: app://x\r\n"));
    expect(f, "GET / HTTP/1.1\r\nHost: a\r\nOrigin: https://evil.example\r\n\r\n", 403);
    assert_false(has(f, "Access-Control"));
    expect(f, "GET / HTTP/1.1\r\nHost: a\r\nSec-Fetch-Site: cross-site\r\n\r\n", 403);
    expect(
        f,
        "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: a\r\nOrigin: http://localhost\r\n"
        "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Private-Network: true\r\n"
        "Access-Control-Request-Headers: authorization, x-stainless-os,b@d, content-type\r\n\r\n",
        204);
    assert_true(
        has(f, "Access-Control-Allow-Headers: authorization, x-stainless-os, content-type\r\n"));
    assert_true(has(f, "Access-Control-Allow-Methods: GET, POST, OPTIONS\r\n"));
    assert_true(has(f, "Access-Control-Max-Age: 7200\r\n"));
    assert_true(has(f, "Access-Control-Allow-Private-Network: true\r\n"));
    assert_true(has(f, "Vary: Origin, Access-Control-Request-Headers\r\n"));
    expect(f,
           "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: a\r\nOrigin: https://evil.example\r\n"
           "Access-Control-Request-Method: POST\r\n\r\n",
           403);
}

static void test_gw_conn_request_id_is_echoed_or_made(void **state)
{
    struct fixture *f = *state;
    expect(f, "GET / HTTP/1.1\r\nHost: a\r\nx-request-id: My.id:1-_\r\n\r\n", 200);
    assert_true(has(f, "x-request-id: My.id:1-_\r\n"));
    expect(f, "GET / HTTP/1.1\r\nHost: a\r\nx-request-id: a b\r\n\r\n", 200);
    assert_true(has(f, "x-request-id: req_"));
    struct buf b = BUF_INIT(4096);
    buf_text(&b, "GET / HTTP/1.1\r\nHost: a\r\nx-request-id: ");
    for (int i = 0; i < 129; i++)
        buf_byte(&b, 'a');
    buf_text(&b, "\r\n\r\n");
    buf_byte(&b, 0);
    expect(f, (const char *)b.data, 200);
    buf_done(&b);
    assert_true(has(f, "x-request-id: req_"));
}

static void test_gw_conn_draining_refuses_posts_and_closes(void **state)
{
    struct fixture *f = *state;
    f->shared.draining = true;
    feed(f, CHAT);
    assert_int_equal(status(f), 503);
    assert_true(has(f, "Retry-After: 1\r\n") && has(f, "Connection: close\r\n"));
    connect_client(f);
    feed(f, GET("/"));
    assert_int_equal(status(f), 200);
    assert_true(f->shut);
    connect_client(f);
    gw_conn_drain(f->c);
    assert_int_equal(gw_conn_state(f->c), GW_CONN_CLOSE);
}

/* Each allocation of an exchange fails once: a status or the end of the connection, and nothing is
 * left. */
static void test_gw_conn_failing_allocation_ends_in_a_status_or_close(void **state)
{
    struct fixture *f = *state;
    unsigned fine = 0;
    for (uint64_t nth = 1; nth < 60; nth++) {
        connect_client(f);
        alloc_fail_at(nth, 0);
        feed(f, CHAT);
        alloc_fail_at(0, 0);
        bool over = gw_conn_state(f->c) != GW_CONN_OPEN;
        assert_true(over || status(f) == 200 || status(f) == 503 || status(f) == 404);
        fine += status(f) == 200;
    }
    assert_true(fine > 20 && fine < 59);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_gw_conn_good_request_is_answered_and_kept),
        TEST(test_gw_conn_bad_shapes_end_the_connection),
        TEST(test_gw_conn_head_byte_by_byte_over_2_s_is_served),
        TEST(test_gw_conn_stalled_head_is_408),
        TEST(test_gw_conn_silence_after_accept_closes_without_a_byte),
        TEST(test_gw_conn_stalled_body_is_408),
        TEST(test_gw_conn_body_at_100_bytes_a_second_is_408_after_10_s),
        TEST(test_gw_conn_steady_body_has_60_s),
        TEST(test_gw_conn_idle_closes_at_90_s),
        TEST(test_gw_conn_stalled_reader_is_cancelled_after_60_s),
        TEST(test_gw_conn_slow_reader_that_goes_on_is_kept),
        TEST(test_gw_conn_stream_ends_with_its_chunk_at_once),
        TEST(test_gw_conn_http10_stream_ends_by_the_close),
        TEST(test_gw_conn_http10_keep_alive_is_kept_where_asked),
        TEST(test_gw_conn_abort_breaks_without_the_last_chunk),
        TEST(test_gw_conn_client_gone_cancels),
        TEST(test_gw_conn_half_close_behind_a_request_still_gets_the_answer),
        TEST(test_gw_conn_half_close_hurries_what_only_waits),
        TEST(test_gw_conn_pipelined_requests_are_answered_in_order),
        TEST(test_gw_conn_pipelining_client_that_does_not_read_is_held),
        TEST(test_gw_conn_pipelined_requests_of_one_piece_wait_for_room),
        TEST(test_gw_conn_65_kib_behind_a_running_request_close),
        TEST(test_gw_conn_413_comes_before_the_body_and_lingers),
        TEST(test_gw_conn_lingering_ends_after_64_mib),
        TEST(test_gw_conn_expect_continue_is_answered_after_the_checks),
        TEST(test_gw_conn_methods_and_paths),
        TEST(test_gw_conn_early_error_keeps_the_connection_when_the_body_is_there),
        TEST(test_gw_conn_every_answer_tells_of_the_gpu),
        TEST(test_gw_conn_what_a_worker_says_stays_one_line_of_ascii),
        TEST(test_gw_conn_origins_and_preflight),
        TEST(test_gw_conn_request_id_is_echoed_or_made),
        TEST(test_gw_conn_draining_refuses_posts_and_closes),
        TEST(test_gw_conn_failing_allocation_ends_in_a_status_or_close),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

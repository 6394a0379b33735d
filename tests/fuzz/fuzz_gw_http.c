/* Requests from the net: whatever the bytes, a whole feed and a feed in pieces end the same way,
 * and a connection ends in a status, a close, or waits for more. The first byte chooses the size of
 * the pieces. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "gw_conn.h"
#include "gw_exchange.h"
#include "log.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct outcome {
    enum gw_http_event event;
    unsigned status, n_complete;
    size_t body_bytes;
};

static struct outcome parse(const uint8_t *bytes, size_t n, size_t piece)
{
    struct gw_limits limits = gw_limits_default();
    struct outcome o = {.event = GW_HTTP_MORE};
    struct gw_http *h = gw_http_new(&limits);
    if (h == NULL)
        abort();
    for (size_t at = 0, end = 0; end < n || at == 0;) {
        end = piece < n - end ? end + piece : n;
        do {
            size_t used;
            o.event = gw_http_feed(h, bytes + at, end - at, &used);
            at += used;
            if (o.event == GW_HTTP_COMPLETE) {
                struct gw_http_request *r = gw_http_take(h);
                o.n_complete++;
                o.body_bytes += r->body_bytes;
                gw_http_request_free(r);
            }
        } while (o.event == GW_HTTP_HEAD_READY || o.event == GW_HTTP_COMPLETE);
        if (o.event != GW_HTTP_MORE || end == n)
            break;
    }
    o.status = gw_http_failure(h).status;
    gw_http_free(h);
    return o;
}

static void handle(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    static const struct gw_exchange_head head = {.status = 200};
    (void)context;
    if (r->body_bytes % 2 == 0) {
        gw_exchange_respond(x, &head, r->body, r->body_bytes);
        return;
    }
    gw_exchange_begin(x, &head);
    if (!gw_exchange_write(x, r->body, r->body_bytes))
        abort();
    gw_exchange_end(x);
}

static void on_wake(void *io)
{
    (void)io;
}

static void connection(const uint8_t *bytes, size_t n, size_t piece)
{
    static const struct gw_route rows[] = {
        {"/", GW_ROUTE_GET, false, handle},
        {"/v1/models/{id}", GW_ROUTE_GET, false, handle},
        {"/v1/chat/completions", GW_ROUTE_POST, true, handle},
    };
    struct ticks_fake clock = {.now_ns = 1};
    struct gw_auth *auth = NULL;
    if (gw_auth_new("a", "", "", &auth, NULL) != ERR_OK)
        abort();
    struct gw_conn_shared shared = {
        .limits = gw_limits_default(),
        .ticks = ticks_of_fake(&clock),
        .auth = auth,
        .routes = {rows, sizeof rows / sizeof rows[0], NULL},
    };
    struct gw_auth_listener listener = {.ip = {127, 0, 0, 1}, .n_ip = 4};
    struct gw_conn *c = gw_conn_new(&shared, &listener, on_wake, NULL);
    if (c == NULL)
        abort();
    for (size_t at = 0; at < n; at += piece) {
        size_t out;
        gw_conn_feed(c, bytes + at, piece < n - at ? piece : n - at);
        gw_conn_run(c);
        while ((void)gw_conn_output(c, &out), out > 0)
            gw_conn_sent(c, out);
        clock.now_ns += 1000000;
        gw_conn_tick(c);
    }
    clock.now_ns += 100000000000u; /* all limits are over: the end must come */
    gw_conn_tick(c);
    if (gw_conn_state(c) == GW_CONN_OPEN)
        abort();
    gw_conn_free(c);
    gw_auth_free(auth);
    if (shared.n_exchanges != 0)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    log_setup(LOG_LEVEL_ERROR, LOG_FORMAT_TEXT);
    if (size < 1)
        return 0;
    size_t piece = data[0] % 64 + 1u;
    struct outcome whole = parse(data + 1, size - 1, size),
                   pieces = parse(data + 1, size - 1, piece);
    if (whole.event != pieces.event || whole.status != pieces.status ||
        whole.n_complete != pieces.n_complete || whole.body_bytes != pieces.body_bytes)
        abort();
    connection(data + 1, size - 1, piece);
    return 0;
}

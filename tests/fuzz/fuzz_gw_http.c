/* Requests from the net: whatever the bytes, a whole feed and a feed in pieces end the same way,
 * and a connection ends in a status, a close, or waits for more. The first byte chooses the size of
 * the pieces. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "gw_conn.h"
#include "http_echo.h"
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

static void connection(const uint8_t *bytes, size_t n, size_t piece)
{
    struct http_echo echo;
    http_echo_init(&echo);
    struct gw_conn *c = http_echo_connect(&echo);
    for (size_t at = 0; at < n; at += piece) {
        size_t out;
        gw_conn_feed(c, bytes + at, piece < n - at ? piece : n - at);
        gw_conn_run(c);
        while ((void)gw_conn_output(c, &out), out > 0)
            gw_conn_sent(c, out);
        echo.clock.now_ns += 1000000;
        gw_conn_tick(c);
    }
    if (!http_echo_ends(&echo, c))
        abort();
    gw_conn_free(c);
    if (echo.shared.n_exchanges != 0)
        abort();
    http_echo_done(&echo);
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

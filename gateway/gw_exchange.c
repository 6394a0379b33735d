#include "gw_exchange.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "gw_conn.h"
#include "gw_response.h"

struct gw_exchange {
    struct gw_conn *c;
    struct gw_http_request *r; /* owned */
    const struct gw_route *route;
    char id[GW_RESPONSE_ID_BYTES];
    uint64_t head_ns;
    const struct gw_exchange_events *events;
    void *user;
    unsigned status;
    bool begun, chunked, no_body;
    bool waits; /* for room */
};

struct gw_exchange *gw_exchange_new(struct gw_conn *c, struct gw_http_request *r,
                                    const struct gw_route *route, const char *id, uint64_t head_ns)
{
    struct gw_exchange *x = alloc_zero(ALLOC_REQUEST, 1, sizeof *x);
    if (x == NULL)
        return NULL;
    x->c = c;
    x->r = r;
    x->route = route;
    x->head_ns = head_ns;
    x->no_body = r->method == GW_HTTP_HEAD;
    snprintf(x->id, sizeof x->id, "%s", id);
    return x;
}

void gw_exchange_free(struct gw_exchange *x)
{
    if (x == NULL)
        return;
    gw_http_request_free(x->r);
    alloc_free(x);
}

void gw_exchange_cancel(struct gw_exchange *x)
{
    if (x->events != NULL)
        x->events->cancel(x->user);
    gw_exchange_free(x);
}

bool gw_exchange_hurry(struct gw_exchange *x)
{
    if (x->events == NULL || x->events->hurry == NULL)
        return false;
    x->events->hurry(x->user);
    return true;
}

void gw_exchange_drained(struct gw_exchange *x)
{
    if (!x->waits || x->events == NULL ||
        gw_conn_unsent(x->c) > gw_conn_shared(x->c)->limits.rendered_bytes / 2)
        return;
    x->waits = false;
    x->events->writable(x->user);
}

void gw_exchange_watch(struct gw_exchange *x, const struct gw_exchange_events *events, void *user)
{
    x->events = events;
    x->user = user;
}

const struct gw_http_request *gw_exchange_request(const struct gw_exchange *x)
{
    return x->r;
}

const char *gw_exchange_id(const struct gw_exchange *x)
{
    return x->id;
}

const struct gw_route *gw_exchange_route(const struct gw_exchange *x)
{
    return x->route;
}

uint64_t gw_exchange_head_ns(const struct gw_exchange *x)
{
    return x->head_ns;
}

struct buf gw_exchange_take_body(struct gw_exchange *x)
{
    return gw_http_take_body(x->r);
}

static struct gw_response response(const struct gw_exchange *x, const struct gw_exchange_head *head)
{
    struct gw_response r = {0};
    gw_conn_fill(x->c, x->r, x->id, &r);
    r.status = head->status != 0 ? head->status : 200;
    r.content_type = head->content_type != NULL ? head->content_type : "application/json";
    r.headers = head->headers;
    r.n_headers = head->n_headers;
    r.has_processing = true;
    r.processing_ms = (ticks_ns(gw_conn_shared(x->c)->ticks) - x->head_ns) / 1000000u;
    return r;
}

/* Takes the bytes of *body. */
static void send_whole(struct gw_exchange *x, struct gw_response *r, struct buf *body)
{
    r->length = body->size;
    gw_response_head(gw_conn_out(x->c), r);
    if (!x->no_body && r->status != 204)
        gw_conn_give(x->c, body);
    buf_done(body);
    gw_conn_wrote(x->c);
    gw_conn_end(x->c, GW_CONN_END_KEEP, r->status);
}

void gw_exchange_respond_buf(struct gw_exchange *x, const struct gw_exchange_head *head,
                             struct buf *body)
{
    assert(!x->begun);
    struct gw_response r = response(x, head);
    send_whole(x, &r, body);
}

void gw_exchange_respond(struct gw_exchange *x, const struct gw_exchange_head *head,
                         const void *body, size_t n)
{
    assert(!x->begun);
    struct gw_response r = response(x, head);
    r.length = n;
    struct buf *out = gw_conn_out(x->c);
    gw_response_head(out, &r);
    if (!x->no_body && r.status != 204)
        buf_append(out, body, n);
    gw_conn_wrote(x->c);
    gw_conn_end(x->c, GW_CONN_END_KEEP, r.status);
}

void gw_exchange_fail(struct gw_exchange *x, const struct gw_error *error)
{
    assert(!x->begun);
    struct gw_exchange_head head = {.status = gw_error_status(error->code)};
    struct gw_response r = response(x, &head);
    struct buf body = BUF_INIT(SIZE_MAX);
    gw_error_write(&body, error);
    if (r.status == 503)
        r.retry_after_s = error->retry_after_s > 0 ? error->retry_after_s : 1;
    send_whole(x, &r, &body);
}

void gw_exchange_fail_text(struct gw_exchange *x, enum gw_error_code code, const char *param,
                           const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    struct gw_error error = {.code = code, .param = param, .message = text};
    gw_exchange_fail(x, &error);
}

void gw_exchange_begin(struct gw_exchange *x, const struct gw_exchange_head *head)
{
    assert(!x->begun);
    struct gw_response r = response(x, head);
    r.open = true;
    r.chunked = x->chunked = x->r->minor == 1;
    x->begun = true;
    x->status = r.status;
    /* Without chunks the close is the end of the body. */
    r.keep_alive = r.keep_alive && x->chunked;
    gw_response_head(gw_conn_out(x->c), &r);
    gw_conn_wrote(x->c);
}

size_t gw_exchange_room(struct gw_exchange *x)
{
    size_t limit = gw_conn_shared(x->c)->limits.rendered_bytes;
    size_t unsent = gw_conn_unsent(x->c);
    x->waits = unsent >= limit;
    return x->waits ? 0 : limit - unsent;
}

bool gw_exchange_write(struct gw_exchange *x, const void *bytes, size_t n)
{
    assert(x->begun);
    if (n == 0 || x->no_body)
        return true;
    if (gw_exchange_room(x) == 0)
        return false;
    struct buf *out = gw_conn_out(x->c);
    if (x->chunked)
        gw_response_chunk(out, bytes, n);
    else
        buf_append(out, bytes, n);
    gw_conn_wrote(x->c);
    return true;
}

bool gw_exchange_begun(const struct gw_exchange *x)
{
    return x->begun;
}

void gw_exchange_end(struct gw_exchange *x)
{
    assert(x->begun);
    if (x->chunked && !x->no_body) {
        gw_response_last_chunk(gw_conn_out(x->c));
        gw_conn_wrote(x->c);
    }
    gw_conn_end(x->c, x->chunked ? GW_CONN_END_KEEP : GW_CONN_END_CLOSE, x->status);
}

void gw_exchange_abort(struct gw_exchange *x)
{
    gw_conn_end(x->c, GW_CONN_END_BREAK, x->status);
}

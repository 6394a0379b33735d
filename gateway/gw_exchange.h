/* One request and its answer, as its handler sees it.
 *
 * Life: the handle is valid from the handler's call until the owner ends it (respond, error, end,
 * abort) or until the `cancel` callback returns, whichever is first. After either nothing may be
 * called and no callback comes. A handler that does not end the exchange before it returns must
 * have called gw_exchange_watch. Callbacks never come from inside a gw_exchange_* call.
 * Thread: loop. */
#ifndef ISLET_GW_EXCHANGE_H
#define ISLET_GW_EXCHANGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"
#include "gw_error.h"
#include "gw_http.h"

struct gw_exchange;

struct gw_exchange_header {
    const char *name, *value; /* a value with CR, LF or another control byte is left out */
};

struct gw_exchange_head {
    unsigned status;          /* 0: 200 */
    const char *content_type; /* NULL: application/json */
    const struct gw_exchange_header *headers;
    size_t n_headers;
};

struct gw_exchange_events {
    /* The client is gone (EOF, half-close, reset, no progress for 60 s): stop working for it; the
     * handle ends with this. */
    void (*cancel)(void *user);
    /* After gw_exchange_write said no: there is room again. */
    void (*writable)(void *user);
    /* The client sends no more (EOF or half-close) and may still read: answer now, with what is
     * known; the handle ends with this. NULL: then this is the end too, `cancel`. */
    void (*hurry)(void *user);
};

void gw_exchange_watch(struct gw_exchange *x, const struct gw_exchange_events *events, void *user);

const struct gw_http_request *gw_exchange_request(
    const struct gw_exchange *x);                          /* lends, as long as the handle lives */
const char *gw_exchange_id(const struct gw_exchange *x);   /* x-request-id; lends */
uint64_t gw_exchange_head_ns(const struct gw_exchange *x); /* ticks when the head was complete */
/* Gives the request's body (its `body` becomes NULL), with a NUL behind it that is not counted. */
struct buf gw_exchange_take_body(struct gw_exchange *x);

/* A whole answer with Content-Length; ends the exchange. The body is copied. */
void gw_exchange_respond(struct gw_exchange *x, const struct gw_exchange_head *head,
                         const void *body, size_t n);
/* The same without a copy: takes the bytes of *body, which is empty then. */
void gw_exchange_respond_buf(struct gw_exchange *x, const struct gw_exchange_head *head,
                             struct buf *body);
/* An error object with its status (and Retry-After with 503, WWW-Authenticate with 401); ends the
 * exchange. */
void gw_exchange_fail(struct gw_exchange *x, const struct gw_error *error);
void gw_exchange_fail_text(struct gw_exchange *x, enum gw_error_code code, const char *param,
                           const char *format, ...) __attribute__((format(printf, 4, 5)));

/* An answer whose length is not known: head now (chunked; for HTTP/1.0 until close). With
 * content_type "text/event-stream; charset=utf-8" the headers of a stream are added. */
void gw_exchange_begin(struct gw_exchange *x, const struct gw_exchange_head *head);
/* One event, comment or piece of padded JSON, handed to the socket whole. False: nothing was taken,
 * because rendered_bytes wait already for a slow client; `writable` comes when there is room. One
 * larger event is taken if less than that waits. */
bool gw_exchange_write(struct gw_exchange *x, const void *bytes, size_t n);
/* How many bytes may be rendered before write says no; 0: wait for `writable`, which this call also
 * asks for. */
size_t gw_exchange_room(struct gw_exchange *x);
bool gw_exchange_begun(const struct gw_exchange *x);
/* The terminating chunk, at once; ends the exchange. What waits is still sent. */
void gw_exchange_end(struct gw_exchange *x);
/* Breaks the connection without the terminating chunk, after what was written: a visible failure;
 * ends the exchange. */
void gw_exchange_abort(struct gw_exchange *x);

/* ---- for gw_conn, which makes and ends exchanges ---- */

struct gw_conn;
struct gw_route;

/* Takes the request. Gives NULL without memory; the request is then the caller's still. */
struct gw_exchange *gw_exchange_new(struct gw_conn *c, struct gw_http_request *r,
                                    const struct gw_route *route, const char *id, uint64_t head_ns);
void gw_exchange_free(struct gw_exchange *x); /* NULL is fine */
const struct gw_route *gw_exchange_route(const struct gw_exchange *x);
/* The client is gone: tells the owner, then frees. */
void gw_exchange_cancel(struct gw_exchange *x);
/* Output went out: tells an owner that waits. */
void gw_exchange_drained(struct gw_exchange *x);
/* False: there is no such event. */
bool gw_exchange_hurry(struct gw_exchange *x);

#endif

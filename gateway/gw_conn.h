/* One connection: request after request in order, limits, time-outs, slow readers. No sockets and
 * no clock of its own: bytes are fed in, output is taken out, time comes from `ticks`; gw_loop does
 * the rest. Thread: loop. */
#ifndef ISLET_GW_CONN_H
#define ISLET_GW_CONN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"
#include "gw_auth.h"
#include "gw_http.h"
#include "gw_limits.h"
#include "gw_route.h"
#include "stats.h"
#include "ticks.h"

struct gw_response;

/* What all connections of a gateway share. Owned by gw_loop (or a test); outlives the
 * connections. */
struct gw_conn_shared {
    struct gw_limits limits;
    struct ticks ticks;
    const struct gw_auth *auth; /* a reload puts another one here between two turns of the loop */
    struct gw_routes routes;
    /* Fills what the worker has every response say; the texts stay valid until the call's caller
     * returns to the loop. NULL: nothing. */
    void (*tell)(void *context, struct gw_response *r);
    void *tell_context;
    bool draining;      /* POST gets 503, every answer closes its connection */
    size_t n_exchanges; /* requests that are with a handler now */
    struct stats_counter requests, refused,
        cancelled; /* all; answered before a handler; client gone */
    struct stats_counter bytes_in, bytes_out, timeouts;
};

enum gw_conn_state {
    GW_CONN_OPEN,  /* go on reading and writing */
    GW_CONN_SHUT,  /* as soon as the output is out: half-close, once; go on reading */
    GW_CONN_CLOSE, /* as soon as the output is out: close */
    GW_CONN_RESET  /* close now, what waits is lost */
};

struct gw_conn;

/* wake(io) is called when there is something new to do from outside of feed, eof and tick: then
 * gw_conn_run and look at output and state. It must not call into the connection. Gives a
 * connection; NULL: no memory. */
struct gw_conn *gw_conn_new(struct gw_conn_shared *shared, const struct gw_auth_listener *listener,
                            void (*wake)(void *io), void *io);
void gw_conn_free(struct gw_conn *c); /* cancels what runs; NULL is fine */

void gw_conn_feed(struct gw_conn *c, const void *bytes, size_t n);
void gw_conn_eof(struct gw_conn *c);   /* EOF or half-close of the client */
void gw_conn_lost(struct gw_conn *c);  /* reset, write error */
void gw_conn_run(struct gw_conn *c);   /* pipelined requests, callbacks that were due */
void gw_conn_tick(struct gw_conn *c);  /* looks at the time */
void gw_conn_drain(struct gw_conn *c); /* shared->draining became true: an idle connection closes */
/* When to call tick next, in ticks; UINT64_MAX: never. */
uint64_t gw_conn_deadline_ns(const struct gw_conn *c);

/* False: the client takes its answers too slowly, so no more requests are to be read from it; sent
 * bytes change that. While a request runs this is always true: its end must be seen. */
bool gw_conn_reads(const struct gw_conn *c);

/* Lends the bytes to send; gw_conn_sent tells how many went out. */
const void *gw_conn_output(const struct gw_conn *c, size_t *ret_n);
void gw_conn_sent(struct gw_conn *c, size_t n);
enum gw_conn_state gw_conn_state(const struct gw_conn *c);

/* For a connection beyond the limit: a whole 503 response, to be sent before the close. */
void gw_conn_overloaded(const struct gw_conn_shared *shared, struct buf *out);

/* ---- for gw_exchange ---- */

enum gw_conn_end {
    GW_CONN_END_KEEP,  /* the answer is complete; the next request may come if the head said so */
    GW_CONN_END_CLOSE, /* ... and the close is its end */
    GW_CONN_END_BREAK, /* the answer stays incomplete, and the client must see it */
};

const struct gw_conn_shared *gw_conn_shared(const struct gw_conn *c);
/* Fills what every response to this request carries. */
void gw_conn_fill(const struct gw_conn *c, const struct gw_http_request *r, const char *id,
                  struct gw_response *ret);
struct buf *gw_conn_out(struct gw_conn *c); /* append, then gw_conn_wrote */
/* Puts the bytes of *bytes behind the output; many of them are taken instead of copied. */
void gw_conn_give(struct gw_conn *c, struct buf *bytes);
void gw_conn_wrote(struct gw_conn *c);
size_t gw_conn_unsent(const struct gw_conn *c);
/* The exchange is over; frees it. */
void gw_conn_end(struct gw_conn *c, enum gw_conn_end how, unsigned status);

#endif

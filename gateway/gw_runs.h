/* Choices of started requests that wait for the worker or run at it: sends them, takes what comes
 * back, and when the worker is lost or breaks the protocol has them go on at the next one. How long
 * they may wait for that is gw_dispatch's. Thread: loop. */
#ifndef ISLET_GW_RUNS_H
#define ISLET_GW_RUNS_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "buf.h"
#include "err.h"
#include "gw_admit.h"
#include "gw_flight.h"
#include "gw_refusal.h"
#include "gw_request.h"
#include "gw_upstream.h"
#include "list.h"
#include "ticks.h"

struct gw_metrics;

struct gw_runs_events {
    void *context;
    void (*lost)(void *context);  /* the link broke; what ran waits again */
    void (*state)(void *context); /* gw_upstream_get_facts changed; calls gw_runs_pump */
    void (*status)(void *context);
};

struct gw_runs {
    /* filled by the owner before gw_runs_open */
    struct ticks ticks;
    struct gw_metrics *metrics;
    struct gw_runs_events events;
    uint32_t max_sequences; /* places at the worker, at most */
    int64_t resume_deadline_ms;

    /* the owner's to change */
    bool serving;   /* runs may be sent */
    uint32_t n_ctx; /* of a sequence */
    struct gw_admit admit;

    struct gw_upstream *upstream;
    struct list waiting; /* choices of started requests, first to go first */
    struct gw_flights flights;
    struct buf scratch;
};

/* n_vocab: ids of tokens are below it. admit is initialised by the owner. */
enum err_code gw_runs_open(struct gw_runs *r, uv_loop_t *loop, const char *socket, size_t max_frame,
                           uint32_t n_vocab, struct err *e) __attribute__((warn_unused_result));
/* No event comes any more. */
void gw_runs_close(struct gw_runs *r);
void gw_runs_done(struct gw_runs *r); /* after the handles are closed */

/* Sends what can be sent, and starts admitted requests while there are places. */
void gw_runs_pump(struct gw_runs *r);
/* Ends all choices that have not ended, and tells the listeners. */
void gw_runs_fail(struct gw_runs *r, struct gw_request *q, const struct gw_refusal *why);
/* Nobody listens any more. */
void gw_runs_abandon(struct gw_runs *r, struct gw_request *q);
/* A stop string was found: DONE as soon as the worker has let it go. */
void gw_runs_stop(struct gw_runs *r, struct gw_request_choice *c);
uint32_t gw_runs_places(const struct gw_runs *r);

#endif

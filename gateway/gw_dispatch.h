/* Has generations worked on: the queue in front of the worker, places at it, cancel, and what
 * follows when it is lost. Decisions come from gw_admit and gw_resume; bytes go through
 * gw_upstream. Thread: loop. */
#ifndef ISLET_GW_DISPATCH_H
#define ISLET_GW_DISPATCH_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "err.h"
#include "gw_admit.h"
#include "gw_refusal.h"
#include "gw_request.h"
#include "gw_upstream.h"
#include "ticks.h"

struct gw_dispatch;
struct gw_metrics;
struct gw_model;

struct gw_dispatch_options {
    uv_loop_t *loop;
    struct ticks ticks;
    const char *socket; /* copied */
    size_t max_frame;
    uint32_t max_sequences; /* places at the worker, at most */
    size_t queue;           /* server.queue */
    int64_t resume_deadline_ms;
    const struct gw_model *model;     /* borrowed */
    struct gw_metrics *metrics;       /* borrowed */
    void (*on_status)(void *context); /* a fresh status record came */
    void *context;
};

enum gw_dispatch_health {
    GW_DISPATCH_SERVING,
    GW_DISPATCH_LOADING,
    GW_DISPATCH_WORKER_DOWN,
    GW_DISPATCH_MODEL_ERROR, /* the worker has failed, or serves another model */
    GW_DISPATCH_OVERLOADED   /* the worker is short of memory */
};

enum err_code gw_dispatch_new(const struct gw_dispatch_options *options, struct gw_dispatch **ret,
                              struct err *e) __attribute__((warn_unused_result));
/* All requests must have ended or be abandoned; closes the handles. NULL is fine. */
void gw_dispatch_close(struct gw_dispatch *d);

/* Takes a place in the queue for all choices that are IDLE, and holds a reference until they have
 * ended. False: *refusal says why (queue full, worker away for too long, model). */
bool gw_dispatch_submit(struct gw_dispatch *d, struct gw_request *q, struct gw_refusal *refusal)
    __attribute__((warn_unused_result));
/* As submit, for a request that had stopped or failed: goes on from its tokens so far. */
bool gw_dispatch_again(struct gw_dispatch *d, struct gw_request *q, struct gw_refusal *refusal)
    __attribute__((warn_unused_result));
/* Nobody listens any more: cancels what runs and waits. */
void gw_dispatch_abandon(struct gw_dispatch *d, struct gw_request *q);
/* The view found a stop string: the choice is DONE as soon as the worker has let it go. */
void gw_dispatch_stop(struct gw_dispatch *d, struct gw_request_choice *c);

/* Drain: queued requests end with `overloaded` now, running ones at gw_dispatch_end_all. */
void gw_dispatch_drain(struct gw_dispatch *d);
void gw_dispatch_end_all(struct gw_dispatch *d);
/* Settings that SIGHUP applies. */
void gw_dispatch_set(struct gw_dispatch *d, size_t queue, int64_t resume_deadline_ms);

enum gw_dispatch_health gw_dispatch_health(const struct gw_dispatch *d);
/* One line for people: why it is not serving. */
const char *gw_dispatch_reason(const struct gw_dispatch *d);
/* The context of a sequence: the worker's, or before it has spoken what the model allows. */
uint32_t gw_dispatch_n_ctx(const struct gw_dispatch *d);
void gw_dispatch_set_context(struct gw_dispatch *d, uint32_t n_ctx); /* until the worker says */
uint32_t gw_dispatch_max_sequences(const struct gw_dispatch *d);
/* Why answers come slower than they should, "" = they do not. */
const char *gw_dispatch_degraded(const struct gw_dispatch *d);
/* Temperature of the GPU that computes; 0: there is none, it is unknown, or the worker is away. */
uint64_t gw_dispatch_gpu_celsius(const struct gw_dispatch *d);
struct gw_upstream *gw_dispatch_upstream(const struct gw_dispatch *d);
unsigned gw_dispatch_retry_after_s(const struct gw_dispatch *d);
/* Fills the gauges that belong to the queue and the worker. */
void gw_dispatch_gauges(const struct gw_dispatch *d, struct gw_metrics *m);

#endif

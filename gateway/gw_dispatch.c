#include "gw_dispatch.h"

#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "gw_metrics.h"
#include "gw_model.h"
#include "gw_runs.h"
#include "log.h"

enum {
    TICK_MS = 50,
    STATUS_MS = 1000,
    /* A worker is hung when it says nothing for resume_deadline, but not sooner than this; and so
     * long it may take to answer when it does say something. */
    LEAST_SILENCE_MS = 5000
};

struct gw_dispatch {
    struct gw_dispatch_options o;
    struct gw_runs runs;
    bool draining;
    uint64_t away_ns; /* since when nobody serves */
    uint64_t asked_ns;
    char trouble[300]; /* why this worker cannot serve, "" = it can */
    uv_timer_t timer;
};

static uint64_t now_of(const struct gw_dispatch *d)
{
    return ticks_ns(d->o.ticks);
}

void gw_dispatch_abandon(struct gw_dispatch *d, struct gw_request *q)
{
    gw_runs_abandon(&d->runs, q);
}

void gw_dispatch_stop(struct gw_dispatch *d, struct gw_request_choice *c)
{
    gw_runs_stop(&d->runs, c);
}

/* ---- the worker comes and goes ---- */

static void on_lost(void *context)
{
    struct gw_dispatch *d = context;
    d->away_ns = now_of(d); /* what ran until now waits from now on */
}

static void trouble_find(struct gw_dispatch *d, const struct gw_upstream_facts *f)
{
    const struct gw_model *m = d->o.model;
    d->trouble[0] = '\0';
    if (f->connected && f->state == PROTO_FAILED)
        snprintf(d->trouble, sizeof d->trouble, "the worker cannot serve the model: %.240s",
                 f->reason);
    else if (f->connected && f->state == PROTO_SERVING &&
             (memcmp(m->file_digest, f->file_digest, sizeof f->file_digest) != 0 ||
              memcmp(m->shape_digest, f->shape_digest, sizeof f->shape_digest) != 0))
        snprintf(d->trouble, sizeof d->trouble,
                 "the worker serves another model file than the gateway has read (digests differ): "
                 "give both the same model.path and restart them");
}

static void fail_all(struct gw_dispatch *d, const struct gw_refusal *why, bool queued_only)
{
    while (!list_empty(&d->runs.admit.waiting))
        gw_runs_fail(
            &d->runs,
            list_entry(list_entry(d->runs.admit.waiting.next, struct gw_admit_ticket, link),
                       struct gw_request, ticket),
            why);
    while (!queued_only && !list_empty(&d->runs.admit.running))
        gw_runs_fail(
            &d->runs,
            list_entry(list_entry(d->runs.admit.running.next, struct gw_admit_ticket, link),
                       struct gw_request, ticket),
            why);
}

static void on_state(void *context)
{
    struct gw_dispatch *d = context;
    const struct gw_upstream_facts *f = gw_upstream_get_facts(d->runs.upstream);
    struct gw_refusal why;
    trouble_find(d, f);
    bool serves = f->connected && f->state == PROTO_SERVING && d->trouble[0] == '\0';
    if (d->runs.serving && !serves)
        d->away_ns = now_of(d);
    d->runs.serving = serves;
    if (!f->connected)
        d->runs.admit.paused = false;
    if (serves) {
        d->runs.n_ctx = f->n_ctx;
        d->runs.admit.slots = gw_runs_places(&d->runs);
        gw_upstream_ask_status(d->runs.upstream);
    }
    if (d->trouble[0] != '\0') {
        log_error("upstream", "unusable", "reason=\"%s\"", d->trouble);
        gw_refusal_set(&why, GW_ERROR_MODEL_ERROR, NULL, "%s", d->trouble);
        fail_all(d, &why, false);
    }
    gw_runs_pump(&d->runs);
}

static void on_status(void *context)
{
    struct gw_dispatch *d = context;
    if (d->o.on_status)
        d->o.on_status(d->o.context);
}

/* ---- time ---- */

static bool waited_out(const struct gw_dispatch *d, const struct gw_request *q, uint64_t now)
{
    const struct gw_upstream_facts *f = gw_upstream_get_facts(d->runs.upstream);
    struct gw_resume_wait w = {.since_ns = d->away_ns,
                               .arrived_ns = q->arrived_ns,
                               .deadline_ms = d->o.resume_deadline_ms,
                               .loading = f->connected && f->state == PROTO_LOADING};
    /* A request that came while the worker was away gets its own time to see it come. */
    if (w.arrived_ns > w.since_ns && !f->known)
        w.loading = true;
    return now >= gw_resume_ends_ns(&w);
}

static void unavailable(struct gw_dispatch *d, struct gw_refusal *why)
{
    gw_refusal_set(why, GW_ERROR_WORKER_UNAVAILABLE, NULL,
                   "no worker has served for longer than worker.resume_deadline (%lld ms): %s",
                   (long long)d->o.resume_deadline_ms, gw_dispatch_reason(d));
    why->retry_after_s = 5;
}

/* A worker that drains still works for it. */
static bool is_running(const struct gw_request *q)
{
    for (unsigned i = 0; i < q->n_choices; i++)
        if (q->choices[i].state == GW_REQUEST_RUNNING)
            return true;
    return false;
}

static void expire(struct gw_dispatch *d, struct list *tickets, uint64_t now)
{
    struct gw_refusal why;
    bool again = true;
    while (again) {
        again = false;
        list_each(it, tickets) {
            struct gw_admit_ticket *t = list_entry(it, struct gw_admit_ticket, link);
            struct gw_request *q = list_entry(t, struct gw_request, ticket);
            if (is_running(q) || !waited_out(d, q, now))
                continue;
            unavailable(d, &why);
            gw_runs_fail(&d->runs, q, &why);
            again = true;
            break;
        }
    }
}

/* What heads of answers tell of the worker is a second old at most. */
static void refresh_status(struct gw_dispatch *d, uint64_t now)
{
    if (now - d->asked_ns < STATUS_MS * 1000000ull)
        return;
    d->asked_ns = now;
    gw_upstream_ask_status(d->runs.upstream);
}

/* A worker that is connected, has work and says nothing at all. */
static void silence_check(struct gw_dispatch *d, uint64_t now)
{
    struct gw_refusal why;
    int64_t limit_ms = d->o.resume_deadline_ms;
    if (d->runs.flights.n == 0)
        return;
    refresh_status(d, now);
    if (limit_ms < LEAST_SILENCE_MS)
        limit_ms = LEAST_SILENCE_MS;
    uint64_t heard = gw_upstream_heard_ns(d->runs.upstream);
    uint64_t due = gw_upstream_status_due_ns(d->runs.upstream);
    if (due > 0 && heard > due + LEAST_SILENCE_MS * 1000000ull) {
        gw_upstream_drop(d->runs.upstream, "bytes, but no answer to a status request");
        return;
    }
    /* A worker that nobody asked anything is not silent, however long that was. */
    uint64_t since = heard > due ? heard : due;
    if (due == 0 || now < since || now - since < (uint64_t)limit_ms * 1000000u)
        return;
    gw_refusal_set(&why, GW_ERROR_WORKER_UNAVAILABLE, NULL,
                   "the worker has not answered for %lld ms", (long long)limit_ms);
    why.retry_after_s = 5;
    fail_all(d, &why, false);
    gw_upstream_drop(d->runs.upstream, "no answer from the worker");
}

static void on_tick(uv_timer_t *timer)
{
    struct gw_dispatch *d = timer->data;
    uint64_t now = now_of(d);
    if (d->runs.admit.n_waiting + d->runs.admit.n_running + d->runs.flights.n == 0) {
        uv_timer_stop(timer); /* an idle gateway does not wake up */
        return;
    }
    if (!d->runs.serving && d->trouble[0] == '\0') {
        expire(d, &d->runs.admit.waiting, now);
        expire(d, &d->runs.admit.running, now);
    }
    silence_check(d, now);
    gw_runs_pump(&d->runs);
}

/* ---- in and out ---- */

static bool submit_allowed(struct gw_dispatch *d, struct gw_request *q, struct gw_refusal *refusal)
{
    if (d->trouble[0] != '\0')
        return gw_refusal_set(refusal, GW_ERROR_MODEL_ERROR, NULL, "%s", d->trouble);
    if (d->draining) {
        gw_refusal_set(refusal, GW_ERROR_OVERLOADED, NULL, "the server is stopping");
        refusal->retry_after_s = 5;
        return false;
    }
    if (!d->runs.serving && waited_out(d, q, now_of(d))) {
        unavailable(d, refusal);
        return false;
    }
    return true;
}

bool gw_dispatch_submit(struct gw_dispatch *d, struct gw_request *q, struct gw_refusal *refusal)
{
    uint64_t now = now_of(d);
    q->arrived_ns = now;
    if (!submit_allowed(d, q, refusal))
        return false;
    q->ticket.priority = q->ask.priority;
    enum gw_admit_result result = gw_admit_request(&d->runs.admit, &q->ticket, now);
    if (result != GW_ADMIT_TAKEN) {
        d->o.metrics->rejected_total++;
        gw_refusal_set(refusal, GW_ERROR_OVERLOADED, NULL, "%s",
                       result == GW_ADMIT_PAUSED
                           ? "the worker is short of memory and takes no new requests"
                           : "the queue is full (server.queue); try again later");
        refusal->retry_after_s = gw_admit_retry_after_s(&d->runs.admit);
        return false;
    }
    d->o.metrics->admitted_total++;
    gw_request_keep(q);
    refresh_status(d, now);
    if (!uv_is_active((const uv_handle_t *)&d->timer))
        uv_timer_start(&d->timer, on_tick, TICK_MS, TICK_MS);
    gw_runs_pump(&d->runs);
    return true;
}

bool gw_dispatch_again(struct gw_dispatch *d, struct gw_request *q, struct gw_refusal *refusal)
{
    bool wanted = false;
    if (q->ticket.waiting || q->ticket.running)
        return true;
    for (unsigned i = 0; i < q->n_choices; i++) {
        struct gw_request_choice *c = &q->choices[i];
        if (c->state == GW_REQUEST_FAILED && c->resume.losses < GW_RESUME_ENDS_AFTER)
            c->state = GW_REQUEST_IDLE;
        wanted = wanted || c->state == GW_REQUEST_IDLE;
    }
    return !wanted || gw_dispatch_submit(d, q, refusal);
}

void gw_dispatch_drain(struct gw_dispatch *d)
{
    struct gw_refusal why;
    d->draining = true;
    gw_refusal_set(&why, GW_ERROR_OVERLOADED, NULL, "the server is stopping");
    why.retry_after_s = 5;
    fail_all(d, &why, true);
}

void gw_dispatch_end_all(struct gw_dispatch *d)
{
    struct gw_refusal why;
    gw_refusal_set(&why, GW_ERROR_OVERLOADED, NULL, "the server is stopping");
    why.retry_after_s = 5;
    fail_all(d, &why, false);
}

void gw_dispatch_set(struct gw_dispatch *d, size_t queue, int64_t resume_deadline_ms)
{
    d->runs.admit.max_waiting = queue;
    d->o.resume_deadline_ms = d->runs.resume_deadline_ms = resume_deadline_ms;
}

enum err_code gw_dispatch_new(const struct gw_dispatch_options *options, struct gw_dispatch **ret,
                              struct err *e)
{
    struct gw_dispatch *d = alloc_zero(ALLOC_MISC, 1, sizeof *d);
    if (!d)
        return err_set(e, ERR_NOMEM, "no memory for the queue");
    d->o = *options;
    d->runs = (struct gw_runs){
        .ticks = options->ticks,
        .metrics = options->metrics,
        .events = {d, on_lost, on_state, on_status},
        .max_sequences = options->max_sequences,
        .resume_deadline_ms = options->resume_deadline_ms,
        .n_ctx = options->model->shape.n_ctx_train,
    };
    gw_admit_init(&d->runs.admit, options->queue, options->max_sequences);
    enum err_code code = gw_runs_open(&d->runs, options->loop, options->socket, options->max_frame,
                                      options->model->shape.n_vocab, e);
    if (code != ERR_OK) {
        alloc_free(d);
        return code;
    }
    d->away_ns = now_of(d);
    uv_timer_init(options->loop, &d->timer);
    d->timer.data = d;
    *ret = d;
    return ERR_OK;
}

static void on_timer_closed(uv_handle_t *handle)
{
    struct gw_dispatch *d = handle->data;
    gw_runs_done(&d->runs);
    alloc_free(d);
}

void gw_dispatch_close(struct gw_dispatch *d)
{
    if (!d)
        return;
    gw_runs_close(&d->runs);
    uv_close((uv_handle_t *)&d->timer, on_timer_closed);
}

/* ---- what can be seen ---- */

enum gw_dispatch_health gw_dispatch_health(const struct gw_dispatch *d)
{
    const struct gw_upstream_facts *f = gw_upstream_get_facts(d->runs.upstream);
    if (d->trouble[0] != '\0')
        return GW_DISPATCH_MODEL_ERROR;
    if (!f->connected || f->state == PROTO_DRAINING)
        return GW_DISPATCH_WORKER_DOWN;
    if (f->state == PROTO_LOADING)
        return GW_DISPATCH_LOADING;
    return d->runs.admit.paused ? GW_DISPATCH_OVERLOADED : GW_DISPATCH_SERVING;
}

const char *gw_dispatch_reason(const struct gw_dispatch *d)
{
    switch (gw_dispatch_health(d)) {
    case GW_DISPATCH_SERVING:
        return "serving";
    case GW_DISPATCH_LOADING:
        return "the worker loads the model";
    case GW_DISPATCH_MODEL_ERROR:
        return d->trouble;
    case GW_DISPATCH_OVERLOADED:
        return "the worker is short of memory";
    case GW_DISPATCH_WORKER_DOWN:
        break;
    }
    return "no worker is connected (is isletd running, with the same worker.socket?)";
}

uint32_t gw_dispatch_n_ctx(const struct gw_dispatch *d)
{
    return d->runs.n_ctx;
}

void gw_dispatch_set_context(struct gw_dispatch *d, uint32_t n_ctx)
{
    if (n_ctx > 0 && n_ctx < d->runs.n_ctx && !gw_upstream_get_facts(d->runs.upstream)->known)
        d->runs.n_ctx = n_ctx;
}

uint32_t gw_dispatch_max_sequences(const struct gw_dispatch *d)
{
    return gw_runs_places(&d->runs);
}

const char *gw_dispatch_degraded(const struct gw_dispatch *d)
{
    return gw_upstream_get_status(d->runs.upstream)->degraded;
}

uint64_t gw_dispatch_gpu_celsius(const struct gw_dispatch *d)
{
    const struct gw_upstream *u = d->runs.upstream;
    return gw_upstream_get_facts(u)->connected
               ? gw_upstream_get_status(u)->status.gpu_temperature_celsius
               : 0;
}

struct gw_upstream *gw_dispatch_upstream(const struct gw_dispatch *d)
{
    return d->runs.upstream;
}

unsigned gw_dispatch_retry_after_s(const struct gw_dispatch *d)
{
    return gw_admit_retry_after_s(&d->runs.admit);
}

void gw_dispatch_gauges(const struct gw_dispatch *d, struct gw_metrics *m)
{
    m->queued = d->runs.admit.n_waiting;
    m->running = d->runs.admit.n_running;
    m->sequences = d->runs.flights.n;
    m->worker_connected = gw_upstream_get_facts(d->runs.upstream)->connected;
    m->worker_serving = d->runs.serving;
}

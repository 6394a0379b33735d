#include "gw_dispatch.h"

#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "gw_metrics.h"
#include "gw_model.h"
#include "log.h"

enum {
    MAX_FLIGHT = 256,
    TICK_MS = 50,
    BUSY_RETRY_MS = 100,
    STATUS_MS = 1000,
    LEAST_SILENCE_MS =
        5000, /* a worker is hung when it says nothing for resume_deadline, but not sooner */
    MAX_SCRATCH = 1 << 30
};

/* A run that the worker has. choice NULL: cancelled, its place is free when `done` comes. */
struct flight {
    uint64_t id;
    struct gw_request_choice *choice;
};

struct gw_dispatch {
    struct gw_dispatch_options o;
    struct gw_upstream *upstream;
    struct gw_admit admit;
    struct list waiting; /* choices of started requests, first to go first */
    struct flight flights[MAX_FLIGHT];
    unsigned n_flights;
    uint64_t next_id;
    uint32_t n_ctx;
    bool serving, draining;
    uint64_t away_ns; /* since when nobody serves */
    uint64_t asked_ns;
    char trouble[300]; /* why this worker cannot serve, "" = it can */
    struct buf scratch;
    uv_timer_t timer;
};

static void pump(struct gw_dispatch *d);
static void request_fail(struct gw_dispatch *d, struct gw_request *q, const struct gw_refusal *why);

static uint64_t now_of(const struct gw_dispatch *d)
{
    return ticks_ns(d->o.ticks);
}

/* ---- flights ---- */

static struct flight *flight_find(struct gw_dispatch *d, uint64_t id)
{
    for (unsigned i = 0; i < d->n_flights; i++)
        if (d->flights[i].id == id)
            return &d->flights[i];
    return NULL;
}

static void flight_end(struct gw_dispatch *d, struct flight *f)
{
    *f = d->flights[--d->n_flights];
}

static void choice_cancel(struct gw_dispatch *d, struct gw_request_choice *c)
{
    if (c->state == GW_REQUEST_WAITING)
        list_remove(&c->link);
    if (c->state != GW_REQUEST_RUNNING)
        return;
    struct flight *f = flight_find(d, c->run_id);
    if (f)
        f->choice = NULL;
    if (!c->stopped) /* its cancel is under way */
        gw_upstream_send_cancel(d->upstream, c->run_id);
}

/* ---- ends ---- */

/* Lets the request go if nothing of it waits or runs. */
static void request_settle(struct gw_dispatch *d, struct gw_request *q, bool over)
{
    if (!over || (!q->ticket.waiting && !q->ticket.running))
        return;
    gw_admit_leave(&d->admit, &q->ticket, now_of(d));
    gw_request_drop(q);
}

static void request_fail(struct gw_dispatch *d, struct gw_request *q, const struct gw_refusal *why)
{
    struct gw_request_choice *told = NULL;
    gw_request_keep(q);
    for (unsigned i = 0; i < q->n_choices; i++) {
        struct gw_request_choice *c = &q->choices[i];
        if (c->state == GW_REQUEST_DONE || c->state == GW_REQUEST_FAILED)
            continue;
        choice_cancel(d, c);
        c->state = GW_REQUEST_FAILED;
        c->failure = *why;
        told = c;
    }
    d->o.metrics->failed_total++;
    log_warn("request", "failed", "id=%s code=%s reason=\"%s\"", q->client_id,
             gw_error_name(why->code), why->message);
    request_settle(d, q, true);
    if (told)
        gw_request_notify(told);
    gw_request_drop(q);
}

static void choice_done(struct gw_dispatch *d, struct gw_request_choice *c)
{
    struct gw_request *q = gw_request_keep(c->request);
    c->state = GW_REQUEST_DONE;
    bool over = gw_request_over(q);
    if (over)
        d->o.metrics->done_total++;
    request_settle(d, q, over);
    gw_request_notify(c);
    gw_request_drop(q);
}

void gw_dispatch_abandon(struct gw_dispatch *d, struct gw_request *q)
{
    if (!q->ticket.waiting && !q->ticket.running)
        return;
    for (unsigned i = 0; i < q->n_choices; i++) {
        struct gw_request_choice *c = &q->choices[i];
        choice_cancel(d, c);
        if (c->state == GW_REQUEST_WAITING || c->state == GW_REQUEST_RUNNING)
            c->state = c->stopped ? GW_REQUEST_DONE : GW_REQUEST_IDLE;
    }
    d->o.metrics->cancelled_total++;
    request_settle(d, q, true);
    pump(d);
}

void gw_dispatch_stop(struct gw_dispatch *d, struct gw_request_choice *c)
{
    if (c->stopped || c->state == GW_REQUEST_DONE || c->state == GW_REQUEST_FAILED)
        return;
    c->stopped = true;
    if (c->state == GW_REQUEST_RUNNING) {
        gw_upstream_send_cancel(d->upstream, c->run_id);
        return;
    }
    if (c->state == GW_REQUEST_WAITING)
        list_remove(&c->link);
    c->state = GW_REQUEST_DONE;
    request_settle(d, c->request, gw_request_over(c->request));
}

/* ---- sending ---- */

static bool run_allowed(struct gw_dispatch *d, struct gw_request_choice *c)
{
    const struct gw_upstream_facts *facts = gw_upstream_get_facts(d->upstream);
    struct gw_request *q = c->request;
    struct gw_refusal why;
    uint32_t n_prompt = q->prompts[c->prompt].n;
    if (q->arithmetic != 0 && q->arithmetic != facts->arithmetic && c->n_ids > 0) {
        gw_refusal_set(&why, GW_ERROR_MODEL_ERROR, NULL,
                       "the answer was begun with arithmetic version %u and this worker computes "
                       "with version %u; ask again",
                       q->arithmetic, facts->arithmetic);
        request_fail(d, q, &why);
        return false;
    }
    if (n_prompt >= facts->n_ctx) {
        gw_refusal_set(&why, GW_ERROR_CONTEXT_LENGTH, NULL,
                       "this model's maximum context length is %u tokens; the prompt has %u tokens",
                       facts->n_ctx, n_prompt);
        snprintf(why.extra, sizeof why.extra, "\"n_prompt_tokens\":%u,\"n_ctx\":%u", n_prompt,
                 facts->n_ctx);
        request_fail(d, q, &why);
        return false;
    }
    return true;
}

static void choice_send(struct gw_dispatch *d, struct gw_request_choice *c)
{
    const struct gw_upstream_facts *facts = gw_upstream_get_facts(d->upstream);
    struct gw_request *q = c->request;
    struct proto_run run;
    struct gw_refusal why;
    if (!run_allowed(d, c))
        return;
    if (!gw_request_run(c, &d->scratch, &run)) {
        gw_refusal_set(&why, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
        request_fail(d, q, &why);
        return;
    }
    list_remove(&c->link);
    c->state = GW_REQUEST_RUNNING;
    c->run_id = ++d->next_id;
    uint64_t now = now_of(d);
    if (c->sent_ns == 0)
        c->sent_ns = now;
    if (q->started_ns == 0)
        q->started_ns = now;
    q->arithmetic = facts->arithmetic;
    d->flights[d->n_flights++] = (struct flight){c->run_id, c};
    if (c->resume.resumed > 0)
        log_info("request", "resumed", "id=%s choice=%u first_index=%u", q->client_id, c->index,
                 c->n_ids);
    gw_upstream_send_run(d->upstream, c->run_id, &run); /* where it fails, `lost` comes */
}

/* The waiting choice to send now. *ret_hold: one waits to run alone, so nothing new may begin. */
static struct gw_request_choice *waiting_next(struct gw_dispatch *d, uint64_t now, bool *ret_hold)
{
    struct gw_request_choice *alone = NULL;
    list_each(it, &d->waiting) {
        struct gw_request_choice *c = list_entry(it, struct gw_request_choice, link);
        if (c->not_before_ns > now)
            continue;
        if (!gw_resume_is_alone(&c->resume))
            return c;
        if (!alone)
            alone = c;
    }
    *ret_hold = alone != NULL;
    return d->n_flights == 0 ? alone : NULL;
}

static bool alone_runs(const struct gw_dispatch *d)
{
    for (unsigned i = 0; i < d->n_flights; i++) {
        const struct gw_request_choice *c = d->flights[i].choice;
        if (c && gw_resume_is_alone(&c->resume))
            return true;
    }
    return false;
}

static void request_start(struct gw_dispatch *d, struct gw_request *q, uint64_t now)
{
    gw_admit_start(&d->admit, &q->ticket, now);
    for (unsigned i = 0; i < q->n_choices; i++) {
        struct gw_request_choice *c = &q->choices[i];
        if (c->state != GW_REQUEST_IDLE)
            continue;
        c->state = GW_REQUEST_WAITING;
        list_append(&d->waiting, &c->link);
    }
}

static void pump(struct gw_dispatch *d)
{
    while (d->serving && d->n_flights < gw_dispatch_max_sequences(d) && !alone_runs(d)) {
        uint64_t now = now_of(d);
        bool hold = false;
        struct gw_request_choice *c = waiting_next(d, now, &hold);
        if (c) {
            choice_send(d, c);
            continue;
        }
        struct gw_admit_ticket *t = hold ? NULL : gw_admit_next(&d->admit, now);
        if (!t)
            return;
        request_start(d, list_entry(t, struct gw_request, ticket), now);
    }
}

/* ---- frames of the worker ---- */

static void on_tokens(void *context, uint64_t id, const struct proto_tokens *m)
{
    struct gw_dispatch *d = context;
    struct flight *f = flight_find(d, id);
    if (!f || !f->choice || f->choice->stopped)
        return;
    struct gw_request_choice *c = f->choice;
    struct gw_request *q = gw_request_keep(c->request);
    bool was_alone = gw_resume_is_alone(&c->resume);
    uint32_t before = c->n_ids;
    if (!gw_request_on_tokens(c, m, now_of(d))) {
        struct gw_refusal why;
        gw_refusal_set(&why, GW_ERROR_INTERNAL, NULL, "internal error; request id %s",
                       q->client_id);
        log_warn("request", "tokens_refused", "id=%s first_index=%u known=%u", q->client_id,
                 m->first_index, before);
        request_fail(d, q, &why);
    } else {
        d->o.metrics->tokens_total += c->n_ids - before;
        gw_request_notify(c);
        if (was_alone && c->n_ids > before)
            pump(d);
    }
    gw_request_drop(q);
}

static void on_progress(void *context, uint64_t id, const struct proto_progress *m)
{
    struct flight *f = flight_find(context, id);
    if (f && f->choice)
        gw_request_on_progress(f->choice, m);
}

static void on_done(void *context, uint64_t id, const struct proto_done *m)
{
    struct gw_dispatch *d = context;
    struct flight *f = flight_find(d, id);
    if (!f)
        return;
    struct gw_request_choice *c = f->choice;
    flight_end(d, f);
    if (c && m->finish == PROTO_FINISH_CANCELLED && !c->stopped) {
        /* Not asked for by us: the worker is going away, and another one will go on. */
        c->state = GW_REQUEST_WAITING;
        list_prepend(&d->waiting, &c->link);
        c->not_before_ns = now_of(d) + BUSY_RETRY_MS * 1000000ull;
    } else if (c) {
        gw_request_on_done(c, m);
        choice_done(d, c);
    }
    pump(d);
}

static void on_error(void *context, uint64_t id, const struct proto_error *m)
{
    struct gw_dispatch *d = context;
    struct flight *f = flight_find(d, id);
    struct gw_refusal why;
    if (!f)
        return;
    struct gw_request_choice *c = f->choice;
    flight_end(d, f);
    if (!c) {
        pump(d);
        return;
    }
    uint64_t now = now_of(d);
    if (c->busy_since_ns == 0)
        c->busy_since_ns = now;
    uint64_t limit_ns = (uint64_t)d->o.resume_deadline_ms * 1000000u;
    if (m->retryable && now - c->busy_since_ns < limit_ns) {
        c->state = GW_REQUEST_WAITING;
        c->not_before_ns = now + BUSY_RETRY_MS * 1000000ull;
        list_append(&d->waiting, &c->link);
        pump(d);
        return;
    }
    c->state = GW_REQUEST_IDLE;
    enum gw_error_code code = gw_error_of_err((enum err_code)m->code);
    gw_refusal_set(&why, code, NULL, "the worker refused the request: %.*s", (int)m->text.size,
                   m->text.data);
    if (code == GW_ERROR_INTERNAL)
        gw_refusal_set(&why, code, NULL, "internal error; request id %s", c->request->client_id);
    why.retry_after_s = gw_admit_retry_after_s(&d->admit);
    request_fail(d, c->request, &why);
    pump(d);
}

static void on_notice(void *context, const struct proto_notice *m)
{
    struct gw_dispatch *d = context;
    if (m->action == PROTO_NOTICE_NONE)
        return;
    d->admit.paused = m->action == PROTO_NOTICE_PAUSE;
    log_warn("admit", d->admit.paused ? "paused" : "resumed", "reason=\"%.*s\"", (int)m->text.size,
             m->text.data);
}

/* ---- the worker comes and goes ---- */

/* The answer needs nothing more from a worker. */
static bool choice_is_complete(const struct gw_dispatch *d, struct gw_request_choice *c)
{
    const struct gw_request *q = c->request;
    uint32_t n_prompt = q->prompts[c->prompt].n;
    if (c->stopped || (c->n_ids > 0 && gw_request_is_end(q, c->ids[c->n_ids - 1])))
        c->finish = PROTO_FINISH_STOP;
    else if (c->n_ids > 0 && q->ask.max_new >= 0 && c->n_ids >= q->ask.max_new)
        c->finish = PROTO_FINISH_LENGTH;
    else if (c->n_ids > 0 && c->n_ids + n_prompt >= d->n_ctx)
        c->finish = PROTO_FINISH_CONTEXT;
    else
        return false;
    return true;
}

static void choice_lost(struct gw_dispatch *d, struct gw_request_choice *c)
{
    struct gw_refusal why;
    enum gw_resume_verdict verdict = gw_resume_on_lost(&c->resume);
    d->o.metrics->resumed_total++;
    if (choice_is_complete(d, c)) {
        choice_done(d, c);
        return;
    }
    if (verdict != GW_RESUME_POISON) {
        c->state = GW_REQUEST_WAITING;
        list_append(&d->waiting, &c->link);
        return;
    }
    d->o.metrics->poisoned_total++;
    c->state = GW_REQUEST_IDLE;
    gw_refusal_set(&why, GW_ERROR_INTERNAL, NULL, "internal error; request id %s",
                   c->request->client_id);
    log_warn("request", "poison", "id=%s losses=%u action=end", c->request->client_id,
             c->resume.losses);
    request_fail(d, c->request, &why);
}

static void on_lost(void *context)
{
    struct gw_dispatch *d = context;
    struct flight lost[MAX_FLIGHT];
    struct list later;
    unsigned n = d->n_flights;
    memcpy(lost, d->flights, n * sizeof *lost);
    d->n_flights = 0;
    if (n > 0 || d->serving)
        d->away_ns = now_of(d); /* what ran until now waits from now on */
    /* Who is told of an end may come back with more; it must not be sent where nobody listens. */
    d->serving = false;
    for (unsigned i = 0; i < n; i++)
        if (lost[i].choice)
            gw_request_keep(lost[i].choice->request); /* the end of one choice may free them all */
    d->o.metrics->worker_losses_total++;
    /* Those that ran go in front of those that waited. */
    list_init(&later);
    while (!list_empty(&d->waiting)) {
        struct list *node = d->waiting.next;
        list_remove(node);
        list_append(&later, node);
    }
    for (unsigned i = 0; i < n; i++)
        if (lost[i].choice && lost[i].choice->state == GW_REQUEST_RUNNING)
            choice_lost(d, lost[i].choice);
    while (!list_empty(&later)) {
        struct list *node = later.next;
        list_remove(node);
        list_append(&d->waiting, node);
    }
    for (unsigned i = 0; i < n; i++)
        if (lost[i].choice)
            gw_request_drop(lost[i].choice->request);
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
    while (!list_empty(&d->admit.waiting))
        request_fail(d,
                     list_entry(list_entry(d->admit.waiting.next, struct gw_admit_ticket, link),
                                struct gw_request, ticket),
                     why);
    while (!queued_only && !list_empty(&d->admit.running))
        request_fail(d,
                     list_entry(list_entry(d->admit.running.next, struct gw_admit_ticket, link),
                                struct gw_request, ticket),
                     why);
}

static void on_state(void *context)
{
    struct gw_dispatch *d = context;
    const struct gw_upstream_facts *f = gw_upstream_get_facts(d->upstream);
    struct gw_refusal why;
    trouble_find(d, f);
    bool serves = f->connected && f->state == PROTO_SERVING && d->trouble[0] == '\0';
    if (d->serving && !serves)
        d->away_ns = now_of(d);
    d->serving = serves;
    if (!f->connected)
        d->admit.paused = false;
    if (serves) {
        d->n_ctx = f->n_ctx;
        d->admit.slots = gw_dispatch_max_sequences(d);
        gw_upstream_ask_status(d->upstream);
    }
    if (d->trouble[0] != '\0') {
        log_error("upstream", "unusable", "reason=\"%s\"", d->trouble);
        gw_refusal_set(&why, GW_ERROR_MODEL_ERROR, NULL, "%s", d->trouble);
        fail_all(d, &why, false);
    }
    pump(d);
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
    const struct gw_upstream_facts *f = gw_upstream_get_facts(d->upstream);
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
            request_fail(d, q, &why);
            again = true;
            break;
        }
    }
}

/* A worker that is connected, has work and says nothing at all. */
static void silence_check(struct gw_dispatch *d, uint64_t now)
{
    struct gw_refusal why;
    int64_t limit_ms = d->o.resume_deadline_ms;
    if (d->n_flights == 0)
        return;
    if (now - d->asked_ns >= STATUS_MS * 1000000ull) {
        d->asked_ns = now;
        gw_upstream_ask_status(d->upstream);
    }
    if (limit_ms < LEAST_SILENCE_MS)
        limit_ms = LEAST_SILENCE_MS;
    uint64_t heard = gw_upstream_heard_ns(d->upstream);
    if (now < heard || now - heard < (uint64_t)limit_ms * 1000000u)
        return;
    gw_refusal_set(&why, GW_ERROR_WORKER_UNAVAILABLE, NULL,
                   "the worker has not answered for %lld ms", (long long)limit_ms);
    why.retry_after_s = 5;
    fail_all(d, &why, false);
    gw_upstream_drop(d->upstream, "no answer from the worker");
}

static void on_tick(uv_timer_t *timer)
{
    struct gw_dispatch *d = timer->data;
    uint64_t now = now_of(d);
    if (d->admit.n_waiting + d->admit.n_running + d->n_flights == 0) {
        uv_timer_stop(timer); /* an idle gateway does not wake up */
        return;
    }
    if (!d->serving && d->trouble[0] == '\0') {
        expire(d, &d->admit.waiting, now);
        expire(d, &d->admit.running, now);
    }
    silence_check(d, now);
    pump(d);
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
    if (!d->serving && waited_out(d, q, now_of(d))) {
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
    enum gw_admit_result result = gw_admit_request(&d->admit, &q->ticket, now);
    if (result != GW_ADMIT_TAKEN) {
        d->o.metrics->rejected_total++;
        gw_refusal_set(refusal, GW_ERROR_OVERLOADED, NULL, "%s",
                       result == GW_ADMIT_PAUSED
                           ? "the worker is short of memory and takes no new requests"
                           : "the queue is full (server.queue); try again later");
        refusal->retry_after_s = gw_admit_retry_after_s(&d->admit);
        return false;
    }
    d->o.metrics->admitted_total++;
    gw_request_keep(q);
    if (!uv_is_active((const uv_handle_t *)&d->timer))
        uv_timer_start(&d->timer, on_tick, TICK_MS, TICK_MS);
    pump(d);
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
    d->admit.max_waiting = queue;
    d->o.resume_deadline_ms = resume_deadline_ms;
}

enum err_code gw_dispatch_new(const struct gw_dispatch_options *options, struct gw_dispatch **ret,
                              struct err *e)
{
    struct gw_dispatch *d = alloc_zero(ALLOC_MISC, 1, sizeof *d);
    struct gw_upstream_events events = {.context = d,
                                        .state = on_state,
                                        .lost = on_lost,
                                        .tokens = on_tokens,
                                        .progress = on_progress,
                                        .done = on_done,
                                        .error = on_error,
                                        .notice = on_notice,
                                        .status = on_status};
    if (!d)
        return err_set(e, ERR_NOMEM, "no memory for the queue");
    d->o = *options;
    enum err_code code = gw_upstream_new(options->loop, options->socket, options->max_frame,
                                         options->ticks, &events, &d->upstream, e);
    if (code != ERR_OK) {
        alloc_free(d);
        return code;
    }
    gw_admit_init(&d->admit, options->queue, options->max_sequences);
    list_init(&d->waiting);
    d->n_ctx = options->model->shape.n_ctx_train;
    d->away_ns = now_of(d);
    d->scratch = BUF_INIT(MAX_SCRATCH);
    uv_timer_init(options->loop, &d->timer);
    d->timer.data = d;
    *ret = d;
    return ERR_OK;
}

static void on_timer_closed(uv_handle_t *handle)
{
    struct gw_dispatch *d = handle->data;
    buf_done(&d->scratch);
    alloc_free(d);
}

void gw_dispatch_close(struct gw_dispatch *d)
{
    if (!d)
        return;
    gw_upstream_close(d->upstream);
    d->serving = false;
    uv_close((uv_handle_t *)&d->timer, on_timer_closed);
}

/* ---- what can be seen ---- */

enum gw_dispatch_health gw_dispatch_health(const struct gw_dispatch *d)
{
    const struct gw_upstream_facts *f = gw_upstream_get_facts(d->upstream);
    if (d->trouble[0] != '\0')
        return GW_DISPATCH_MODEL_ERROR;
    if (!f->connected || f->state == PROTO_DRAINING)
        return GW_DISPATCH_WORKER_DOWN;
    if (f->state == PROTO_LOADING)
        return GW_DISPATCH_LOADING;
    return d->admit.paused ? GW_DISPATCH_OVERLOADED : GW_DISPATCH_SERVING;
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
    return d->n_ctx;
}

void gw_dispatch_set_context(struct gw_dispatch *d, uint32_t n_ctx)
{
    if (n_ctx > 0 && n_ctx < d->n_ctx && !gw_upstream_get_facts(d->upstream)->known)
        d->n_ctx = n_ctx;
}

uint32_t gw_dispatch_max_sequences(const struct gw_dispatch *d)
{
    const struct gw_upstream_facts *f = gw_upstream_get_facts(d->upstream);
    uint32_t n = d->o.max_sequences;
    if (f->known && f->max_sequences > 0 && f->max_sequences < n)
        n = f->max_sequences;
    return n < MAX_FLIGHT ? n : MAX_FLIGHT;
}

const char *gw_dispatch_degraded(const struct gw_dispatch *d)
{
    return gw_upstream_get_status(d->upstream)->degraded;
}

struct gw_upstream *gw_dispatch_upstream(const struct gw_dispatch *d)
{
    return d->upstream;
}

unsigned gw_dispatch_retry_after_s(const struct gw_dispatch *d)
{
    return gw_admit_retry_after_s(&d->admit);
}

void gw_dispatch_gauges(const struct gw_dispatch *d, struct gw_metrics *m)
{
    m->queued = d->admit.n_waiting;
    m->running = d->admit.n_running;
    m->sequences = d->n_flights;
    m->worker_connected = gw_upstream_get_facts(d->upstream)->connected;
    m->worker_serving = d->serving;
}

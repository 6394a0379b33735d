#include "gw_runs.h"

#include <stdio.h>
#include <string.h>

#include "gw_metrics.h"
#include "log.h"

enum {
    BUSY_RETRY_MS = 100,
    MAX_SCRATCH = 1 << 30
};

static uint64_t now_of(const struct gw_runs *r)
{
    return ticks_ns(r->ticks);
}

static void choice_cancel(struct gw_runs *r, struct gw_request_choice *c)
{
    if (c->state == GW_REQUEST_WAITING)
        list_remove(&c->link);
    if (c->state != GW_REQUEST_RUNNING)
        return;
    struct gw_flight *f = gw_flight_find(&r->flights, c->run_id);
    if (f) {
        f->choice = NULL;
        f->cancelled = true;
    }
    if (!c->stopped) /* its cancel is under way */
        gw_upstream_send_cancel(r->upstream, c->run_id);
}

/* ---- ends ---- */

/* Lets the request go if nothing of it waits or runs. */
static void request_settle(struct gw_runs *r, struct gw_request *q, bool over)
{
    if (!over || (!q->ticket.waiting && !q->ticket.running))
        return;
    gw_admit_leave(&r->admit, &q->ticket, now_of(r));
    gw_request_drop(q);
}

void gw_runs_fail(struct gw_runs *r, struct gw_request *q, const struct gw_refusal *why)
{
    struct gw_request_choice *told = NULL;
    gw_request_keep(q);
    for (unsigned i = 0; i < q->n_choices; i++) {
        struct gw_request_choice *c = &q->choices[i];
        if (c->state == GW_REQUEST_DONE || c->state == GW_REQUEST_FAILED)
            continue;
        choice_cancel(r, c);
        c->state = GW_REQUEST_FAILED;
        c->failure = *why;
        told = c;
    }
    r->metrics->failed_total++;
    log_warn("request", "failed", "id=%s code=%s reason=\"%s\"", q->client_id,
             gw_error_name(why->code), why->message);
    request_settle(r, q, true);
    if (told)
        gw_request_notify(told);
    gw_request_drop(q);
}

static void choice_done(struct gw_runs *r, struct gw_request_choice *c)
{
    struct gw_request *q = gw_request_keep(c->request);
    c->state = GW_REQUEST_DONE;
    bool over = gw_request_over(q);
    if (over)
        r->metrics->done_total++;
    request_settle(r, q, over);
    gw_request_notify(c);
    gw_request_drop(q);
}

void gw_runs_abandon(struct gw_runs *r, struct gw_request *q)
{
    if (!q->ticket.waiting && !q->ticket.running)
        return;
    for (unsigned i = 0; i < q->n_choices; i++) {
        struct gw_request_choice *c = &q->choices[i];
        choice_cancel(r, c);
        if (c->state == GW_REQUEST_WAITING || c->state == GW_REQUEST_RUNNING)
            c->state = c->stopped ? GW_REQUEST_DONE : GW_REQUEST_IDLE;
    }
    r->metrics->cancelled_total++;
    request_settle(r, q, true);
    gw_runs_pump(r);
}

void gw_runs_stop(struct gw_runs *r, struct gw_request_choice *c)
{
    if (c->stopped || c->state == GW_REQUEST_DONE || c->state == GW_REQUEST_FAILED)
        return;
    c->stopped = true;
    if (c->state == GW_REQUEST_RUNNING) {
        struct gw_flight *f = gw_flight_find(&r->flights, c->run_id);
        if (f)
            f->cancelled = true;
        gw_upstream_send_cancel(r->upstream, c->run_id);
        return;
    }
    if (c->state == GW_REQUEST_WAITING)
        list_remove(&c->link);
    c->state = GW_REQUEST_DONE;
    request_settle(r, c->request, gw_request_over(c->request));
}

/* ---- sending ---- */

static bool run_allowed(struct gw_runs *r, struct gw_request_choice *c)
{
    const struct gw_upstream_facts *facts = gw_upstream_get_facts(r->upstream);
    struct gw_request *q = c->request;
    struct gw_refusal why;
    uint32_t n_prompt = q->prompts[c->prompt].n;
    if (q->arithmetic != 0 && q->arithmetic != facts->arithmetic && c->n_ids > 0) {
        gw_refusal_set(&why, GW_ERROR_MODEL_ERROR, NULL,
                       "the answer was begun with arithmetic version %u and this worker computes "
                       "with version %u; ask again",
                       q->arithmetic, facts->arithmetic);
        gw_runs_fail(r, q, &why);
        return false;
    }
    if (n_prompt >= facts->n_ctx) {
        gw_refusal_set(&why, GW_ERROR_CONTEXT_LENGTH, NULL,
                       "this model's maximum context length is %u tokens; the prompt has %u tokens",
                       facts->n_ctx, n_prompt);
        snprintf(why.extra, sizeof why.extra, "\"n_prompt_tokens\":%u,\"n_ctx\":%u", n_prompt,
                 facts->n_ctx);
        gw_runs_fail(r, q, &why);
        return false;
    }
    return true;
}

static void choice_send(struct gw_runs *r, struct gw_request_choice *c)
{
    const struct gw_upstream_facts *facts = gw_upstream_get_facts(r->upstream);
    struct gw_request *q = c->request;
    struct proto_run run;
    struct gw_refusal why;
    if (!run_allowed(r, c))
        return;
    if (!gw_request_run(c, &r->scratch, &run)) {
        gw_refusal_set(&why, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
        gw_runs_fail(r, q, &why);
        return;
    }
    list_remove(&c->link);
    c->state = GW_REQUEST_RUNNING;
    uint64_t now = now_of(r);
    c->run_id = gw_flight_begin(&r->flights, c, &run, now)->id;
    if (c->sent_ns == 0)
        c->sent_ns = now;
    if (q->started_ns == 0)
        q->started_ns = now;
    q->arithmetic = facts->arithmetic;
    if (c->resume.resumed > 0)
        log_info("request", "resumed", "id=%s choice=%u first_index=%u", q->client_id, c->index,
                 c->n_ids);
    gw_upstream_send_run(r->upstream, c->run_id, &run); /* where it fails, `lost` comes */
}

/* The waiting choice to send now. *ret_hold: one waits to run alone, so nothing new may begin. */
static struct gw_request_choice *waiting_next(struct gw_runs *r, uint64_t now, bool *ret_hold)
{
    struct gw_request_choice *alone = NULL;
    list_each(it, &r->waiting) {
        struct gw_request_choice *c = list_entry(it, struct gw_request_choice, link);
        if (c->not_before_ns > now)
            continue;
        if (!gw_resume_is_alone(&c->resume))
            return c;
        if (!alone)
            alone = c;
    }
    *ret_hold = alone != NULL;
    return r->flights.n == 0 ? alone : NULL;
}

static bool alone_runs(const struct gw_runs *r)
{
    for (unsigned i = 0; i < r->flights.n; i++) {
        const struct gw_request_choice *c = r->flights.list[i].choice;
        if (c && gw_resume_is_alone(&c->resume))
            return true;
    }
    return false;
}

static void request_start(struct gw_runs *r, struct gw_request *q, uint64_t now)
{
    gw_admit_start(&r->admit, &q->ticket, now);
    for (unsigned i = 0; i < q->n_choices; i++) {
        struct gw_request_choice *c = &q->choices[i];
        if (c->state != GW_REQUEST_IDLE)
            continue;
        c->state = GW_REQUEST_WAITING;
        list_append(&r->waiting, &c->link);
    }
}

void gw_runs_pump(struct gw_runs *r)
{
    while (r->serving && r->flights.n < gw_runs_places(r) && !alone_runs(r)) {
        uint64_t now = now_of(r);
        bool hold = false;
        struct gw_request_choice *c = waiting_next(r, now, &hold);
        if (c) {
            choice_send(r, c);
            continue;
        }
        struct gw_admit_ticket *t = hold ? NULL : gw_admit_next(&r->admit, now);
        if (!t)
            return;
        request_start(r, list_entry(t, struct gw_request, ticket), now);
    }
}

/* ---- frames of the worker ---- */

/* The listeners hear of it last: they may end the request. */
static enum err_code on_tokens(void *context, uint64_t id, const struct proto_tokens *m,
                               struct err *e)
{
    struct gw_runs *r = context;
    struct gw_flight *f;
    enum err_code code = gw_flight_tokens(&r->flights, id, m, &f, e);
    if (code != ERR_OK || !f->choice || f->choice->stopped)
        return code;
    struct gw_request_choice *c = f->choice;
    struct gw_request *q = gw_request_keep(c->request);
    bool was_alone = gw_resume_is_alone(&c->resume);
    uint32_t before = c->n_ids;
    if (!gw_request_on_tokens(c, m, now_of(r))) {
        struct gw_refusal why;
        gw_refusal_set(&why, GW_ERROR_OVERLOADED, NULL, "no memory for the answer");
        gw_runs_fail(r, q, &why);
    } else {
        r->metrics->tokens_total += c->n_ids - before;
        gw_request_notify(c);
        if (was_alone && c->n_ids > before)
            gw_runs_pump(r);
    }
    gw_request_drop(q);
    return ERR_OK;
}

static enum err_code on_progress(void *context, uint64_t id, const struct proto_progress *m,
                                 struct err *e)
{
    struct gw_runs *r = context;
    struct gw_flight *f;
    enum err_code code = gw_flight_progress(&r->flights, id, m, &f, e);
    if (code == ERR_OK && f->choice)
        gw_request_on_progress(f->choice, m);
    return code;
}

/* For `why` the choice goes on later; past resume_deadline without a token its request ends. */
static void choice_again(struct gw_runs *r, struct gw_request_choice *c, bool first,
                         const struct gw_refusal *why)
{
    uint64_t now = now_of(r);
    uint64_t limit_ns = (uint64_t)r->resume_deadline_ms * 1000000u;
    if (c->busy_since_ns == 0)
        c->busy_since_ns = now;
    if (now - c->busy_since_ns >= limit_ns) {
        c->state = GW_REQUEST_IDLE;
        gw_runs_fail(r, c->request, why);
        return;
    }
    c->state = GW_REQUEST_WAITING;
    c->not_before_ns = now + BUSY_RETRY_MS * 1000000ull;
    if (first)
        list_prepend(&r->waiting, &c->link);
    else
        list_append(&r->waiting, &c->link);
}

static enum err_code on_done(void *context, uint64_t id, const struct proto_done *m, struct err *e)
{
    struct gw_runs *r = context;
    struct gw_flight *f;
    struct gw_refusal why;
    enum err_code code = gw_flight_done(&r->flights, id, m, &f, e);
    if (code != ERR_OK)
        return code;
    struct gw_request_choice *c = f->choice;
    if (c && m->finish == PROTO_FINISH_STOP && !c->stopped &&
        (c->n_ids == 0 || !gw_request_is_end(c->request, c->ids[c->n_ids - 1])))
        return err_set(e, ERR_PROTOCOL, "done (stop) for request %llu without an id that ends it",
                       (unsigned long long)id);
    gw_flight_end(&r->flights, f);
    if (c && m->finish == PROTO_FINISH_CANCELLED && !c->stopped) {
        /* Not asked for by us: the worker is going away, and another one will go on. */
        gw_refusal_set(&why, GW_ERROR_WORKER_UNAVAILABLE, NULL,
                       "the worker ends each run at once, and has for worker.resume_deadline "
                       "(%lld ms)",
                       (long long)r->resume_deadline_ms);
        choice_again(r, c, true, &why);
    } else if (c) {
        gw_request_on_done(c, m);
        choice_done(r, c);
    }
    gw_runs_pump(r);
    return ERR_OK;
}

static enum err_code on_error(void *context, uint64_t id, const struct proto_error *m,
                              struct err *e)
{
    struct gw_runs *r = context;
    struct gw_flight *f;
    struct gw_refusal why;
    enum err_code taken = gw_flight_error(&r->flights, id, &f, e);
    if (taken != ERR_OK)
        return taken;
    struct gw_request_choice *c = f->choice;
    gw_flight_end(&r->flights, f);
    if (c) {
        enum gw_error_code code = gw_error_of_err((enum err_code)m->code);
        gw_refusal_set(&why, code, NULL, "the worker refused the request: %.*s", (int)m->text.size,
                       m->text.data);
        if (code == GW_ERROR_INTERNAL)
            gw_refusal_set(&why, code, NULL, "internal error; request id %s",
                           c->request->client_id);
        why.retry_after_s = gw_admit_retry_after_s(&r->admit);
    }
    if (c && m->retryable) {
        choice_again(r, c, false, &why);
    } else if (c) {
        c->state = GW_REQUEST_IDLE;
        gw_runs_fail(r, c->request, &why);
    }
    gw_runs_pump(r);
    return ERR_OK;
}

static void on_notice(void *context, const struct proto_notice *m)
{
    struct gw_runs *r = context;
    if (m->action == PROTO_NOTICE_NONE)
        return;
    r->admit.paused = m->action == PROTO_NOTICE_PAUSE;
    log_warn("admit", r->admit.paused ? "paused" : "resumed", "reason=\"%.*s\"", (int)m->text.size,
             m->text.data);
}

static enum err_code on_status(void *context, struct err *e)
{
    struct gw_runs *r = context;
    const struct gw_upstream_status *s = gw_upstream_get_status(r->upstream);
    uint64_t up_us = s->status.uptime_ms * 1000u, age_us = s->status.age_us;
    if (s->lists_all && age_us < up_us) {
        enum err_code code = gw_flight_status(&r->flights, s->sequences, s->status.n_sequences,
                                              s->asked_ns, up_us - age_us, e);
        if (code != ERR_OK)
            return code;
    }
    r->events.status(r->events.context);
    return ERR_OK;
}

/* ---- the worker comes and goes ---- */

/* The answer needs nothing more from a worker. */
static bool choice_is_complete(const struct gw_runs *r, struct gw_request_choice *c)
{
    const struct gw_request *q = c->request;
    uint32_t n_prompt = q->prompts[c->prompt].n;
    if (c->stopped || (c->n_ids > 0 && gw_request_is_end(q, c->ids[c->n_ids - 1])))
        c->finish = PROTO_FINISH_STOP;
    else if (c->n_ids > 0 && q->ask.max_new >= 0 && c->n_ids >= q->ask.max_new)
        c->finish = PROTO_FINISH_LENGTH;
    else if (c->n_ids > 0 && c->n_ids + n_prompt >= r->n_ctx)
        c->finish = PROTO_FINISH_CONTEXT;
    else
        return false;
    return true;
}

static void choice_lost(struct gw_runs *r, struct gw_request_choice *c)
{
    struct gw_refusal why;
    enum gw_resume_verdict verdict = gw_resume_on_lost(&c->resume);
    r->metrics->resumed_total++;
    if (choice_is_complete(r, c)) {
        choice_done(r, c);
        return;
    }
    if (verdict != GW_RESUME_POISON) {
        c->state = GW_REQUEST_WAITING;
        list_append(&r->waiting, &c->link);
        return;
    }
    r->metrics->poisoned_total++;
    c->state = GW_REQUEST_IDLE;
    gw_refusal_set(&why, GW_ERROR_INTERNAL, NULL, "internal error; request id %s",
                   c->request->client_id);
    log_warn("request", "poison", "id=%s losses=%u action=end", c->request->client_id,
             c->resume.losses);
    gw_runs_fail(r, c->request, &why);
}

static void on_lost(void *context)
{
    struct gw_runs *r = context;
    struct gw_flight lost[GW_FLIGHT_MOST];
    struct list later;
    unsigned n = r->flights.n;
    memcpy(lost, r->flights.list, n * sizeof *lost);
    r->flights.n = 0;
    if (n > 0 || r->serving)
        r->events.lost(r->events.context);
    /* Who is told of an end may come back with more; it must not be sent where nobody listens. */
    r->serving = false;
    for (unsigned i = 0; i < n; i++)
        if (lost[i].choice)
            gw_request_keep(lost[i].choice->request); /* the end of one choice may free them all */
    r->metrics->worker_losses_total++;
    /* Those that ran go in front of those that waited. */
    list_init(&later);
    while (!list_empty(&r->waiting)) {
        struct list *node = r->waiting.next;
        list_remove(node);
        list_append(&later, node);
    }
    for (unsigned i = 0; i < n; i++)
        if (lost[i].choice && lost[i].choice->state == GW_REQUEST_RUNNING)
            choice_lost(r, lost[i].choice);
    while (!list_empty(&later)) {
        struct list *node = later.next;
        list_remove(node);
        list_append(&r->waiting, node);
    }
    for (unsigned i = 0; i < n; i++)
        if (lost[i].choice)
            gw_request_drop(lost[i].choice->request);
}

static void on_state(void *context)
{
    struct gw_runs *r = context;
    r->events.state(r->events.context);
}

/* ---- life ---- */

uint32_t gw_runs_places(const struct gw_runs *r)
{
    const struct gw_upstream_facts *f = gw_upstream_get_facts(r->upstream);
    uint32_t n = r->max_sequences;
    if (f->known && f->max_sequences > 0 && f->max_sequences < n)
        n = f->max_sequences;
    return n < GW_FLIGHT_MOST ? n : GW_FLIGHT_MOST;
}

enum err_code gw_runs_open(struct gw_runs *r, uv_loop_t *loop, const char *socket, size_t max_frame,
                           uint32_t n_vocab, struct err *e)
{
    struct gw_upstream_events events = {.context = r,
                                        .state = on_state,
                                        .lost = on_lost,
                                        .tokens = on_tokens,
                                        .progress = on_progress,
                                        .done = on_done,
                                        .error = on_error,
                                        .notice = on_notice,
                                        .status = on_status};
    list_init(&r->waiting);
    r->scratch = BUF_INIT(MAX_SCRATCH);
    r->flights.n_vocab = n_vocab;
    return gw_upstream_new(loop, socket, max_frame, r->ticks, &events, &r->upstream, e);
}

void gw_runs_close(struct gw_runs *r)
{
    gw_upstream_close(r->upstream);
    r->serving = false;
}

void gw_runs_done(struct gw_runs *r)
{
    buf_done(&r->scratch);
}

#include "gw_api_health.h"

#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "gw_api.h"
#include "gw_dispatch.h"
#include "gw_exchange.h"
#include "gw_json_out.h"
#include "gw_metrics.h"
#include "gw_model.h"
#include "gw_service.h"

enum {
    MAX_BODY = 1 << 20,
    WAIT_MS =
        100 /* longest wait for a fresh one; then the last known values go out with their age */
};

/* Somebody who waits for a fresh status record of the worker. */
struct waiter {
    struct list link;
    struct gw_service *service;
    struct gw_exchange *x;
    void (*answer)(struct gw_service *s, struct gw_exchange *x);
    uv_timer_t timer;
};

void gw_api_health_livez(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    static const char ok[] = "{\"status\":\"ok\"}";
    static const struct gw_exchange_head head = {0};
    (void)r;
    (void)context;
    gw_exchange_respond(x, &head, ok, sizeof ok - 1);
}

/* ---- readyz ---- */

/* NULL: ready. */
static const char *unready_status(const struct gw_service *s, struct gw_error *ret)
{
    *ret = (struct gw_error){.retry_after_s = 5};
    if (s->draining) {
        ret->code = GW_ERROR_OVERLOADED;
        ret->message = "the server is stopping";
        return "draining";
    }
    if (!s->dispatch) {
        ret->code = GW_ERROR_CONFIGURATION;
        ret->message = s->trouble;
        return "configuration";
    }
    ret->message = gw_dispatch_reason(s->dispatch);
    switch (gw_dispatch_health(s->dispatch)) {
    case GW_DISPATCH_LOADING:
        ret->code = GW_ERROR_WORKER_UNAVAILABLE;
        return "loading";
    case GW_DISPATCH_WORKER_DOWN:
        ret->code = GW_ERROR_WORKER_UNAVAILABLE;
        return "worker_down";
    case GW_DISPATCH_MODEL_ERROR:
        ret->code = GW_ERROR_MODEL_ERROR;
        return "model_error";
    case GW_DISPATCH_OVERLOADED:
        ret->code = GW_ERROR_OVERLOADED;
        return "overloaded";
    case GW_DISPATCH_SERVING:
        break;
    }
    return NULL;
}

void gw_api_health_readyz(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    static const struct gw_exchange_header retry = {"Retry-After", "5"};
    struct gw_service *s = context;
    struct buf out = BUF_INIT(MAX_BODY);
    struct gw_error error;
    const char *status = unready_status(s, &error);
    if (!status) {
        gw_api_health_livez(x, r, context);
        return;
    }
    gw_error_write(&out, &error);
    if (out.size > 0)
        out.size--; /* the closing brace */
    /* Probes know five words; that both processes read another model is a matter of settings. */
    if (error.code == GW_ERROR_MODEL_ERROR)
        status = "configuration";
    buf_format(&out, ",\"status\":\"%s\"}", status);
    struct gw_exchange_head head = {.status = 503, .headers = &retry, .n_headers = 1};
    if (buf_failed(&out))
        gw_exchange_fail(x, &error);
    else
        gw_exchange_respond(x, &head, out.data, out.size);
    buf_done(&out);
}

/* ---- waiting for a status record ---- */

static void on_timer_closed(uv_handle_t *handle)
{
    alloc_free(handle->data);
}

static void waiter_end(struct waiter *w)
{
    list_remove(&w->link);
    uv_close((uv_handle_t *)&w->timer, on_timer_closed);
}

static void waiter_answer(struct waiter *w)
{
    w->answer(w->service, w->x);
    waiter_end(w);
}

static void on_timer(uv_timer_t *timer)
{
    waiter_answer(timer->data);
}

static void on_cancel(void *user)
{
    waiter_end(user);
}

static void on_hurry(void *user)
{
    waiter_answer(user);
}

void gw_api_health_on_status(void *context)
{
    struct gw_service *s = context;
    while (!list_empty(&s->status_waiters))
        waiter_answer(list_entry(s->status_waiters.next, struct waiter, link));
}

/* Answers now, or when the worker has said how it is, but not later than WAIT_MS. */
static void with_status(struct gw_service *s, struct gw_exchange *x,
                        void (*answer)(struct gw_service *s, struct gw_exchange *x))
{
    static const struct gw_exchange_events events = {.cancel = on_cancel, .hurry = on_hurry};
    if (!s->dispatch || !gw_upstream_ask_status(gw_dispatch_upstream(s->dispatch))) {
        answer(s, x);
        return;
    }
    struct waiter *w = alloc_zero(ALLOC_REQUEST, 1, sizeof *w);
    if (!w) {
        answer(s, x);
        return;
    }
    w->service = s;
    w->x = x;
    w->answer = answer;
    list_append(&s->status_waiters, &w->link);
    uv_timer_init(gw_loop_uv(s->loop), &w->timer);
    w->timer.data = w;
    uv_timer_start(&w->timer, on_timer, WAIT_MS, 0);
    gw_exchange_watch(x, &events, w);
}

/* ---- metrics ---- */

static void metrics_answer(struct gw_service *s, struct gw_exchange *x)
{
    static const struct gw_exchange_head head = {.content_type = "text/plain; version=0.0.4"};
    struct buf out = BUF_INIT(MAX_BODY);
    gw_service_gauges(s);
    gw_metrics_write(&out, &s->metrics,
                     s->dispatch ? gw_upstream_get_status(gw_dispatch_upstream(s->dispatch)) : NULL,
                     ticks_ns(s->ticks));
    if (buf_failed(&out))
        gw_exchange_fail_text(x, GW_ERROR_OVERLOADED, NULL, "no memory for the answer");
    else
        gw_exchange_respond(x, &head, out.data, out.size);
    buf_done(&out);
}

void gw_api_health_metrics(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    (void)r;
    with_status(context, x, metrics_answer);
}

/* ---- status ---- */

static void digest_write(struct buf *out, const char *name, const uint8_t digest[16])
{
    buf_format(out, ",\"%s\":\"", name);
    for (int i = 0; i < 16; i++)
        buf_format(out, "%02x", digest[i]);
    buf_byte(out, '"');
}

static void sequence_write(struct buf *out, const struct proto_sequence *q)
{
    static const char *const states[] = {"waiting", "prefill", "decode"};
    buf_format(out,
               "{\"id\":%llu,\"state\":\"%s\",\"prompt\":%u,\"prefilled\":%u,\"generated\":%u,"
               "\"kv_pages\":%u,\"age_ms\":%llu,\"client\":",
               (unsigned long long)q->request_id,
               q->state <= PROTO_SEQUENCE_DECODE ? states[q->state] : "unknown", q->prompt,
               q->prefilled, q->generated, q->kv_pages, (unsigned long long)q->age_ms);
    gw_json_out_string(out, q->client.data, q->client.size);
    buf_byte(out, '}');
}

static void worker_write(struct buf *out, const struct gw_service *s)
{
    const struct gw_upstream *upstream = gw_dispatch_upstream(s->dispatch);
    const struct gw_upstream_facts *f = gw_upstream_get_facts(upstream);
    const struct gw_upstream_status *status = gw_upstream_get_status(upstream);
    buf_format(out, "{\"connected\":%s,\"state\":\"%s\",\"progress\":%u,\"build\":",
               f->connected ? "true" : "false", f->known ? proto_state_name(f->state) : "unknown",
               f->progress);
    gw_json_out_text(out, f->build);
    buf_format(out, ",\"incarnation\":\"%016llx\",\"reason\":", (unsigned long long)f->incarnation);
    gw_json_out_text(out, f->reason);
    if (status->known) {
        const struct proto_status *v = &status->status;
        buf_format(
            out, ",\"age_ms\":%llu,\"backend\":",
            (unsigned long long)((ticks_ns(s->ticks) - status->received_ns + v->age_us * 1000) /
                                 1000000u));
        gw_json_out_text(out, status->backend);
        buf_text(out, ",\"degraded\":");
        gw_json_out_text(out, status->degraded);
        buf_text(out, ",\"storage\":");
        gw_json_out_text(out, status->storage);
#define PROTO_STATUS(name, type, help) \
    buf_format(out, ",\"%s\":%llu", #name, (unsigned long long)v->name);
#include "proto_status.def"
#undef PROTO_STATUS
        buf_text(out, ",\"sequences\":[");
        for (unsigned i = 0; i < v->n_sequences; i++) {
            if (i > 0)
                buf_byte(out, ',');
            sequence_write(out, &v->sequences[i]);
        }
        buf_byte(out, ']');
    }
    buf_byte(out, '}');
}

static void status_answer(struct gw_service *s, struct gw_exchange *x)
{
    struct buf out = BUF_INIT(MAX_BODY);
    struct gw_error error;
    const char *unready = unready_status(s, &error);
    gw_service_gauges(s);
    buf_format(&out, "{\"version\":1,\"build\":\"%s\",\"state\":\"%s\",\"reason\":", ISLET_VERSION,
               unready ? unready : "serving");
    gw_json_out_text(&out, unready ? error.message : "");
    buf_text(&out, ",\"model\":");
    gw_json_out_text(&out, s->model ? s->model->id : NULL);
    if (s->dispatch) {
        const struct gw_upstream_facts *f =
            gw_upstream_get_facts(gw_dispatch_upstream(s->dispatch));
        buf_format(&out, ",\"n_ctx\":%u,\"max_sequences\":%u,\"progress\":%u,\"arithmetic\":%u",
                   gw_dispatch_n_ctx(s->dispatch), gw_dispatch_max_sequences(s->dispatch),
                   f->progress, f->arithmetic);
        digest_write(&out, "file_digest", s->model->file_digest);
        digest_write(&out, "shape_digest", s->model->shape_digest);
    }
    buf_text(&out, ",\"gateway\":{");
    gw_metrics_write_json(&out, &s->metrics);
    buf_text(&out, "},\"worker\":");
    if (s->dispatch)
        worker_write(&out, s);
    else
        buf_text(&out, "null");
    buf_byte(&out, '}');
    gw_api_respond(x, 200, &out);
}

void gw_api_health_status(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    (void)r;
    with_status(context, x, status_answer);
}

#include "gw_answer.h"

#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "gw_dispatch.h"
#include "gw_model.h"
#include "gw_openai.h"
#include "gw_render.h"
#include "gw_text.h"
#include "log.h"

enum {
    PAD_AGAIN_MS = 30 * 1000,
    INLINE_VALUES = 4096,   /* ids and logprobs that are rendered on the loop in one go */
    INLINE_BYTES = 1 << 20, /* of an answer that is put together there */
};

/* What libuv's pool does for an answer; meanwhile the loop leaves its rendering alone. */
enum work {
    WORK_NONE,
    WORK_ECHO,   /* of a choice */
    WORK_CHOICE, /* all of a choice that is DONE; JSON */
    WORK_JSON    /* the whole body, of choices that are finished */
};

struct gw_answer {
    const struct gw_answer_context *context;
    struct gw_request *q;
    struct gw_exchange *x; /* NULL: it has ended */
    struct gw_request_listener listener;
    struct gw_render render;
    bool running;     /* inside answer_run, which is not entered twice */
    uint64_t last_ns; /* of the last bytes */
    uv_timer_t timer;
    enum work work;
    struct gw_render_choice *work_choice; /* of ECHO and CHOICE */
    enum err_code work_code;
    struct err work_error;
    uv_work_t work_request;
};

static uint64_t now_of(const struct gw_answer *a)
{
    return ticks_ns(a->context->ticks);
}

/* ---- life ---- */

static void on_timer_closed(uv_handle_t *handle)
{
    alloc_free(handle->data);
}

static void memory_free(struct gw_answer *a)
{
    gw_render_done(&a->render);
    gw_request_drop(a->q);
    uv_close((uv_handle_t *)&a->timer, on_timer_closed);
}

/* The exchange is over. What the pool works on is freed when it lets go. */
static void answer_free(struct gw_answer *a)
{
    struct gw_request *q = gw_request_keep(a->q);
    list_remove(&a->listener.link);
    a->x = NULL;
    uv_timer_stop(&a->timer);
    if (list_empty(&q->listeners))
        gw_dispatch_abandon(a->context->dispatch, q);
    if (a->work == WORK_NONE)
        memory_free(a);
    else
        (void)uv_cancel((uv_req_t *)&a->work_request);
    gw_request_drop(q);
}

static void on_cancel(void *user)
{
    struct gw_answer *a = user;
    log_info("request", "client_gone", "id=%s", a->q->client_id);
    answer_free(a);
}

static void log_done(const struct gw_answer *a)
{
    struct gw_openai_usage u;
    gw_render_usage(&a->render, &u);
    log_info(
        "request", "done",
        "id=%s route=%s prompt=%llu cached=%llu completion=%llu queue_ms=%llu ms=%llu resumed=%llu",
        a->q->client_id, a->q->ask.kind == GW_CHAT_REQUEST_CHAT ? "chat" : "completion",
        (unsigned long long)u.prompt, (unsigned long long)u.cached,
        (unsigned long long)u.completion, (unsigned long long)u.queue_ms,
        (unsigned long long)((now_of(a) - a->q->arrived_ns) / 1000000u),
        (unsigned long long)u.resumed);
}

/* ---- heads ---- */

struct heads {
    struct gw_exchange_header list[2];
    size_t n;
    char seed[24];
};

static void heads_fill(const struct gw_answer *a, struct heads *h)
{
    h->n = 0;
    snprintf(h->seed, sizeof h->seed, "%llu", (unsigned long long)a->q->seed);
    h->list[h->n++] = (struct gw_exchange_header){"x-islet-seed", h->seed};
    if (a->q->ask.ignored[0] != '\0')
        h->list[h->n++] = (struct gw_exchange_header){"x-islet-ignored", a->q->ask.ignored};
}

static void begin(struct gw_answer *a)
{
    struct heads h;
    heads_fill(a, &h);
    struct gw_exchange_head head = {.headers = h.list, .n_headers = h.n};
    if (a->render.stream)
        head.content_type = "text/event-stream; charset=utf-8";
    gw_exchange_begin(a->x, &head);
    a->last_ns = now_of(a);
}

/* ---- ends ---- */

/* Sends what was rendered. The caller has looked for room. */
static void out_send(struct gw_answer *a)
{
    if (a->render.out.size == 0)
        return;
    gw_exchange_write(a->x, a->render.out.data, a->render.out.size);
    a->last_ns = now_of(a);
    buf_clear(&a->render.out);
}

static void fail(struct gw_answer *a, const struct gw_refusal *why)
{
    struct gw_exchange *x = a->x;
    struct gw_error error = gw_refusal_error(why);
    if (!gw_exchange_begun(x)) {
        gw_exchange_fail(x, &error);
    } else if (!a->render.stream) {
        gw_exchange_abort(x); /* an error object in a 200 body would be read as success */
    } else {
        struct buf *out = &a->render.out;
        gw_render_error(&a->render, &error);
        if (buf_failed(out) || !gw_exchange_write(x, out->data, out->size))
            gw_exchange_abort(x);
        else
            gw_exchange_end(x);
    }
    answer_free(a);
}

static void fail_memory(struct gw_answer *a, const char *text)
{
    struct gw_refusal why;
    gw_refusal_set(&why, GW_ERROR_OVERLOADED, NULL, "%s", text);
    why.retry_after_s = gw_dispatch_retry_after_s(a->context->dispatch);
    fail(a, &why);
}

static void end_stream(struct gw_answer *a)
{
    gw_render_end(&a->render);
    if (buf_failed(&a->render.out)) {
        gw_exchange_abort(a->x);
    } else {
        out_send(a);
        gw_exchange_end(a->x);
    }
    log_done(a);
    answer_free(a);
}

static void json_send(struct gw_answer *a)
{
    struct heads h;
    if (buf_failed(&a->render.out)) {
        fail_memory(a, "no memory for the answer");
        return;
    }
    if (gw_exchange_begun(a->x)) {
        gw_exchange_write(a->x, a->render.out.data, a->render.out.size);
        gw_exchange_end(a->x);
    } else {
        heads_fill(a, &h);
        struct gw_exchange_head head = {.headers = h.list, .n_headers = h.n};
        gw_exchange_respond_buf(a->x, &head, &a->render.out);
    }
    log_done(a);
    answer_free(a);
}

/* ---- in the pool ---- */

static void answer_run(struct gw_answer *a, const struct gw_request_choice *only);

static void on_work(uv_work_t *request)
{
    struct gw_answer *a = request->data;
    struct gw_render_choice *c = a->work_choice;
    bool more = true;
    a->work_code = ERR_OK;
    if (a->work == WORK_ECHO)
        a->work_code = gw_text_echo(&c->text, gw_render_keep, c, &a->work_error);
    if (a->work == WORK_ECHO && buf_failed(&c->content))
        a->work_code = err_set(&a->work_error, ERR_NOMEM, "no memory for the answer");
    while (a->work == WORK_CHOICE && more && a->work_code == ERR_OK)
        a->work_code = gw_text_step(&c->text, gw_render_text, c, &more, &a->work_error);
    if (a->work == WORK_JSON)
        gw_render_json(&a->render);
}

static void on_worked(uv_work_t *request, int status)
{
    struct gw_answer *a = request->data;
    (void)status; /* withdrawn only where the exchange is over */
    a->work = WORK_NONE;
    if (!a->x)
        memory_free(a);
    else if (a->work_code != ERR_OK)
        fail_memory(a, a->work_error.text);
    else
        answer_run(a, NULL);
}

/* False: the pool cannot take it; the caller does the work itself. */
static bool work_begin(struct gw_answer *a, enum work work, struct gw_render_choice *c)
{
    a->work_request.data = a;
    a->work = work;
    a->work_choice = c;
    if (uv_queue_work(a->context->loop, &a->work_request, on_work, on_worked) == 0)
        return true;
    a->work = WORK_NONE;
    return false;
}

/* How many ids and logprobs the next step, or with `all` the rest of the choice, has to render. */
static uint64_t values_of(const struct gw_answer *a, const struct gw_render_choice *c, bool all)
{
    const struct gw_request *q = a->q;
    const struct gw_text *t = &c->text;
    uint64_t n = t->echoed ? 0 : q->prompts[t->choice->prompt].n;
    if (all)
        n += t->choice->n_ids - t->pushed;
    return q->ask.logprobs ? n * (1 + (uint64_t)q->ask.top_logprobs) : n;
}

/* Hands long work on this choice to the pool. */
static bool hand_over(struct gw_answer *a, struct gw_render_choice *c)
{
    if (gw_text_is_over(&c->text))
        return false;
    if (!a->render.stream && c->text.choice->state == GW_REQUEST_DONE &&
        values_of(a, c, true) > INLINE_VALUES)
        return work_begin(a, WORK_CHOICE, c);
    return values_of(a, c, false) > INLINE_VALUES && gw_text_echo_is_due(&c->text) &&
           work_begin(a, WORK_ECHO, c);
}

static void end_json(struct gw_answer *a)
{
    struct gw_render *r = &a->render;
    bool written = r->out.size > 0 || buf_failed(&r->out); /* by the pool */
    if (!written && gw_render_bytes(r) > INLINE_BYTES && work_begin(a, WORK_JSON, NULL))
        return;
    if (!written)
        gw_render_json(r);
    json_send(a);
}

/* ---- going on ---- */

/* Renders a choice as far as tokens and room go. */
static enum err_code choice_run(struct gw_answer *a, struct gw_render_choice *c, struct err *e)
{
    bool more = true, was_matched = c->text.matched, stream = a->render.stream;
    enum err_code code = ERR_OK;
    while (more && code == ERR_OK && !c->finished) {
        if (stream && gw_exchange_room(a->x) == 0)
            return ERR_OK;
        if (stream && c->content.size > 0) { /* an echo that the pool has made, in one piece */
            gw_render_echo(c);
            if (!buf_failed(&a->render.out))
                out_send(a);
            continue;
        }
        if (hand_over(a, c))
            return ERR_OK;
        code = gw_text_step(&c->text, gw_render_text, c, &more, e);
        if (c->text.matched && !was_matched) {
            was_matched = true;
            gw_dispatch_stop(a->context->dispatch, &a->q->choices[c->text.choice->index]);
        }
        if (code == ERR_OK && gw_text_is_over(&c->text))
            gw_render_finish(c);
        if (gw_render_failed(c))
            code = err_set(e, ERR_NOMEM, "no memory for the answer");
        if (code == ERR_OK && stream)
            out_send(a);
    }
    return code;
}

/* One choice, or with NULL all. May free the answer. */
static void answer_run(struct gw_answer *a, const struct gw_request_choice *only)
{
    struct err e = {0};
    enum err_code code = ERR_OK;
    if (a->running || a->work != WORK_NONE)
        return;
    a->running = true;
    for (unsigned i = 0; i < a->q->n_choices && code == ERR_OK && a->work == WORK_NONE; i++)
        if (!only || only->index == i)
            code = choice_run(a, &a->render.choices[i], &e);
    a->running = false;
    if (code != ERR_OK) {
        fail_memory(a, e.text);
        return;
    }
    if (a->work != WORK_NONE || (gw_exchange_begun(a->x) && gw_exchange_room(a->x) == 0))
        return;
    const struct gw_request_choice *failed = gw_request_failed(a->q);
    if (failed)
        fail(a, &failed->failure);
    else if (a->render.n_finished < a->q->n_choices)
        return;
    else if (a->render.stream)
        end_stream(a);
    else
        end_json(a);
}

static void on_changed(void *user, struct gw_request_choice *c)
{
    struct gw_answer *a = user;
    answer_run(a, c->state == GW_REQUEST_FAILED ? NULL : c);
}

static void on_writable(void *user)
{
    answer_run(user, NULL);
}

/* ---- silence ---- */

static int64_t silence_ms(const struct gw_answer *a)
{
    if (!a->render.stream)
        return a->context->json_pad_after_ms;
    if (a->q->ask.sse_ping_interval_s != GW_CHAT_REQUEST_ABSENT)
        return a->q->ask.sse_ping_interval_s * 1000;
    return a->context->sse_ping_interval_ms;
}

/* Nothing went out for the interval: a comment, or for JSON the head and white space. */
static void on_timer(uv_timer_t *timer)
{
    struct gw_answer *a = timer->data;
    uint64_t now = now_of(a), quiet_ms = (now - a->last_ns) / 1000000u;
    uint64_t wait_ms = (uint64_t)silence_ms(a);
    if (!a->render.stream && gw_exchange_begun(a->x))
        wait_ms = PAD_AGAIN_MS;
    if (quiet_ms < wait_ms) {
        uv_timer_start(timer, on_timer, wait_ms - quiet_ms, 0);
        return;
    }
    if (!gw_exchange_begun(a->x))
        begin(a);
    gw_exchange_write(a->x, a->render.stream ? ":\n\n" : " ", a->render.stream ? 3 : 1);
    a->last_ns = now;
    uv_timer_start(timer, on_timer, a->render.stream ? wait_ms : PAD_AGAIN_MS, 0);
}

/* ---- start ---- */

void gw_answer_start(const struct gw_answer_context *context, struct gw_request *q,
                     struct gw_exchange *x)
{
    static const struct gw_exchange_events events = {.cancel = on_cancel, .writable = on_writable};
    struct err e = {0};
    struct gw_answer *a = alloc_zero(ALLOC_REQUEST, 1, sizeof *a);
    if (!a) {
        gw_exchange_fail_text(x, GW_ERROR_OVERLOADED, NULL, "no memory for the answer");
        if (list_empty(&q->listeners))
            gw_dispatch_abandon(context->dispatch, q);
        return;
    }
    a->context = context;
    a->q = gw_request_keep(q);
    a->x = x;
    a->listener = (struct gw_request_listener){.changed = on_changed, .user = a};
    list_append(&q->listeners, &a->listener.link);
    a->last_ns = now_of(a);
    uv_timer_init(context->loop, &a->timer);
    a->timer.data = a;
    if (gw_render_init(&a->render, q, context->model, &e) != ERR_OK) {
        fail_memory(a, e.text);
        return;
    }
    gw_exchange_watch(x, &events, a);
    if (a->render.stream && !gw_request_failed(q))
        begin(a);
    if (silence_ms(a) > 0)
        uv_timer_start(&a->timer, on_timer, (uint64_t)silence_ms(a), 0);
    answer_run(a, NULL);
}

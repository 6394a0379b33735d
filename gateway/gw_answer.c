#include "gw_answer.h"

#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "gw_dispatch.h"
#include "gw_json_out.h"
#include "gw_model.h"
#include "gw_openai.h"
#include "gw_template.h"
#include "gw_text.h"
#include "log.h"

enum {
    PAD_AGAIN_MS = 30 * 1000,
    MAX_BODY = 1 << 30,
    INLINE_VALUES = 4096,   /* ids and logprobs that are rendered on the loop in one go */
    INLINE_BYTES = 1 << 20, /* of an answer that is put together there */
};

struct view { /* of one choice */
    struct gw_text text;
    struct gw_answer *answer;
    struct buf content, reasoning; /* JSON: the whole; stream: an echo that the pool has made */
    bool role_sent, finished;
};

/* What libuv's pool does for an answer; meanwhile the loop leaves its views alone. */
enum work {
    WORK_NONE,
    WORK_ECHO, /* of a view */
    WORK_VIEW, /* all of a view, whose choice is DONE; JSON */
    WORK_JSON  /* the whole body, of views that are finished */
};

struct gw_answer {
    const struct gw_answer_context *context;
    struct gw_request *q;
    struct gw_exchange *x; /* NULL: it has ended */
    struct gw_request_listener listener;
    struct view *views; /* [q->n_choices] */
    unsigned n_finished;
    bool stream, running; /* running: inside answer_run, which is not entered twice */
    uint64_t last_ns;     /* of the last bytes */
    struct buf head, out; /* common start of every chunk; what is being rendered */
    uv_timer_t timer;
    enum work work;
    struct view *work_view; /* of ECHO and VIEW */
    enum err_code work_code;
    struct err work_error;
    uv_work_t work_request;
};

static uint64_t now_of(const struct gw_answer *a)
{
    return ticks_ns(a->context->ticks);
}

/* ---- the end of a view ---- */

static void on_timer_closed(uv_handle_t *handle)
{
    alloc_free(handle->data);
}

static void memory_free(struct gw_answer *a)
{
    struct gw_request *q = a->q;
    for (unsigned i = 0; a->views && i < q->n_choices; i++) {
        gw_text_done(&a->views[i].text);
        buf_done(&a->views[i].content);
        buf_done(&a->views[i].reasoning);
    }
    alloc_free(a->views);
    buf_done(&a->head);
    buf_done(&a->out);
    gw_request_drop(q);
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

/* ---- figures ---- */

static void usage_fill(const struct gw_answer *a, struct gw_openai_usage *u)
{
    const struct gw_request *q = a->q;
    uint64_t worker_queue_ms = 0;
    *u = (struct gw_openai_usage){.seed = q->seed};
    for (unsigned i = 0; i < q->n_prompts; i++) {
        u->prompt += q->prompts[i].n;
        u->cached += q->choices[i * (unsigned)q->ask.n].usage.cached;
    }
    for (unsigned i = 0; i < q->n_choices; i++) {
        const struct gw_request_choice *c = &q->choices[i];
        u->completion += a->views[i].text.pushed;
        u->reasoning += a->views[i].text.reasoning;
        u->hits_vram += c->usage.hits_vram;
        u->hits_ram += c->usage.hits_ram;
        u->misses += c->usage.misses;
        u->ssd_bytes += c->usage.ssd_bytes;
        if (c->usage.queue_ms > worker_queue_ms)
            worker_queue_ms = c->usage.queue_ms;
        if (c->resume.resumed > u->resumed)
            u->resumed = c->resume.resumed;
        u->context_full = u->context_full || (c->state == GW_REQUEST_DONE && !c->stopped &&
                                              c->finish == PROTO_FINISH_CONTEXT);
    }
    u->queue_ms = worker_queue_ms;
    if (q->started_ns > q->arrived_ns)
        u->queue_ms += (q->started_ns - q->arrived_ns) / 1000000u;
}

static void timings_fill(const struct gw_answer *a, struct gw_openai_timings *t)
{
    const struct gw_request *q = a->q;
    uint64_t sent = UINT64_MAX, first = UINT64_MAX, last = 0, prompt = 0;
    uint32_t decode_ms = 0;
    *t = (struct gw_openai_timings){0};
    for (unsigned i = 0; i < q->n_prompts; i++) {
        prompt += q->prompts[i].n;
        t->cache_n += q->choices[i * (unsigned)q->ask.n].usage.cached;
    }
    t->prompt_n = prompt > t->cache_n ? prompt - t->cache_n : 0;
    for (unsigned i = 0; i < q->n_choices; i++) {
        const struct gw_request_choice *c = &q->choices[i];
        t->predicted_n += a->views[i].text.pushed;
        if (c->sent_ns != 0 && c->sent_ns < sent)
            sent = c->sent_ns;
        if (c->first_ns != 0 && c->first_ns < first)
            first = c->first_ns;
        if (c->last_ns > last)
            last = c->last_ns;
        if (c->usage.decode_ms > decode_ms)
            decode_ms = c->usage.decode_ms;
    }
    if (sent < first && first != UINT64_MAX)
        t->prompt_ms = (double)(first - sent) / 1e6;
    if (last > first)
        t->predicted_ms = (double)(last - first) / 1e6;
    /* On a busy machine tokens arrive here in one go; then the worker's own time is the true
     * one. */
    if (t->predicted_ms < decode_ms)
        t->predicted_ms = decode_ms;
}

static void log_done(const struct gw_answer *a)
{
    struct gw_openai_usage u;
    usage_fill(a, &u);
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
    struct gw_exchange_header list[3];
    size_t n;
    char seed[24];
};

static void heads_fill(const struct gw_answer *a, struct heads *h)
{
    const char *degraded = gw_dispatch_degraded(a->context->dispatch);
    h->n = 0;
    snprintf(h->seed, sizeof h->seed, "%llu", (unsigned long long)a->q->seed);
    h->list[h->n++] = (struct gw_exchange_header){"x-islet-seed", h->seed};
    if (a->q->ask.ignored[0] != '\0')
        h->list[h->n++] = (struct gw_exchange_header){"x-islet-ignored", a->q->ask.ignored};
    if (degraded[0] != '\0')
        h->list[h->n++] = (struct gw_exchange_header){"x-islet-degraded", degraded};
}

static void begin(struct gw_answer *a)
{
    struct heads h;
    heads_fill(a, &h);
    struct gw_exchange_head head = {.headers = h.list, .n_headers = h.n};
    if (a->stream)
        head.content_type = "text/event-stream; charset=utf-8";
    gw_exchange_begin(a->x, &head);
    a->last_ns = now_of(a);
}

/* ---- events of a stream ---- */

static bool is_chat(const struct gw_answer *a)
{
    return a->q->ask.kind == GW_CHAT_REQUEST_CHAT;
}

static void chunk_open(struct gw_answer *a, const struct view *v)
{
    if (a->head.size == 0) {
        buf_text(&a->head, "data: ");
        gw_openai_head(&a->head, a->q, a->context->model->id, a->context->model->file_digest, true);
    }
    buf_append(&a->out, a->head.data, a->head.size);
    buf_text(&a->out, "{\"index\":");
    gw_json_out_u64(&a->out, v->text.choice->index);
}

/* Logprobs and ids of the tokens that go with this piece. */
static void entries_write(struct gw_answer *a, struct view *v, struct buf *out)
{
    const struct gw_chat_request *ask = &a->q->ask;
    buf_text(out, ",\"logprobs\":");
    if (!ask->logprobs || (a->stream && !v->text.has_entries)) {
        buf_text(out, "null");
    } else if (is_chat(a)) {
        buf_text(out, "{\"content\":[");
        buf_append(out, v->text.logprobs.data, v->text.logprobs.size);
        buf_text(out, "],\"refusal\":null}");
    } else {
        gw_openai_columns_write(out, &v->text.columns, ask->top_logprobs > 0);
    }
    if (ask->return_tokens) {
        buf_text(out, ",\"tokens\":[");
        buf_append(out, v->text.ids.data, v->text.ids.size);
        buf_byte(out, ']');
    }
}

static void timings_write(const struct gw_answer *a, struct buf *out)
{
    struct gw_openai_timings t;
    timings_fill(a, &t);
    buf_text(out, ",\"timings\":");
    gw_openai_timings(out, &t);
}

static void chunk_close(struct gw_answer *a, bool with_timings)
{
    buf_text(&a->out, "}]");
    if (a->q->ask.include_usage)
        buf_text(&a->out, ",\"usage\":null");
    if (with_timings || a->q->ask.timings_per_token)
        timings_write(a, &a->out);
    buf_text(&a->out, "}\n\n");
}

static void role_write(struct gw_answer *a, struct view *v)
{
    if (v->role_sent)
        return;
    v->role_sent = true;
    if (!is_chat(a))
        return;
    chunk_open(a, v);
    buf_text(&a->out, ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                      "\"finish_reason\":null");
    chunk_close(a, false);
}

static void text_write(struct gw_answer *a, struct view *v, enum gw_stop_kind kind,
                       const char *text, size_t n)
{
    role_write(a, v);
    chunk_open(a, v);
    if (!is_chat(a))
        buf_text(&a->out, ",\"text\":");
    else if (kind == GW_STOP_REASONING)
        buf_text(&a->out, ",\"delta\":{\"reasoning_content\":");
    else
        buf_text(&a->out, ",\"delta\":{\"content\":");
    gw_json_out_string(&a->out, text, n);
    if (is_chat(a))
        buf_byte(&a->out, '}');
    entries_write(a, v, &a->out);
    buf_text(&a->out, ",\"finish_reason\":null");
    chunk_close(a, false);
    gw_text_clear_entries(&v->text);
}

static void stop_reason_write(struct gw_answer *a, const struct view *v, struct buf *out)
{
    buf_text(out, ",\"finish_reason\":");
    gw_openai_finish(out, v->text.choice->finish, v->text.matched);
    buf_text(out, ",\"stop_reason\":");
    if (v->text.matched)
        gw_json_out_string(out, a->q->ask.stops[v->text.match].text,
                           a->q->ask.stops[v->text.match].size);
    else
        buf_text(out, "null");
}

static void finish_write(struct gw_answer *a, struct view *v)
{
    role_write(a, v);
    chunk_open(a, v);
    buf_text(&a->out, is_chat(a) ? ",\"delta\":{}" : ",\"text\":\"\"");
    entries_write(a, v, &a->out);
    stop_reason_write(a, v, &a->out);
    chunk_close(a, a->n_finished == a->q->n_choices);
    gw_text_clear_entries(&v->text);
}

/* ---- JSON ---- */

static void choice_write(struct gw_answer *a, struct view *v, struct buf *out)
{
    if (v->text.choice->index > 0)
        buf_byte(out, ',');
    buf_text(out, "{\"index\":");
    gw_json_out_u64(out, v->text.choice->index);
    if (is_chat(a)) {
        buf_text(out, ",\"message\":{\"role\":\"assistant\",\"content\":");
        gw_json_out_string(out, v->content.data, v->content.size);
        buf_text(out, ",\"refusal\":null");
        if (v->reasoning.size > 0) {
            buf_text(out, ",\"reasoning_content\":");
            gw_json_out_string(out, v->reasoning.data, v->reasoning.size);
        }
        buf_byte(out, '}');
    } else {
        buf_text(out, ",\"text\":");
        gw_json_out_string(out, v->content.data, v->content.size);
    }
    entries_write(a, v, out);
    stop_reason_write(a, v, out);
    buf_byte(out, '}');
}

static void json_write(struct gw_answer *a, struct buf *out)
{
    struct gw_openai_usage u;
    gw_openai_head(out, a->q, a->context->model->id, a->context->model->file_digest, false);
    for (unsigned i = 0; i < a->q->n_choices; i++)
        choice_write(a, &a->views[i], out);
    usage_fill(a, &u);
    buf_text(out, "],\"usage\":");
    gw_openai_usage(out, &u);
    timings_write(a, out);
    buf_byte(out, '}');
}

/* ---- ends ---- */

/* Sends what was rendered. The caller has looked for room. */
static void out_send(struct gw_answer *a)
{
    if (a->out.size == 0)
        return;
    gw_exchange_write(a->x, a->out.data, a->out.size);
    a->last_ns = now_of(a);
    buf_clear(&a->out);
}

static void fail(struct gw_answer *a, const struct gw_refusal *why)
{
    struct gw_exchange *x = a->x;
    struct gw_error error = gw_refusal_error(why);
    if (!gw_exchange_begun(x)) {
        gw_exchange_fail(x, &error);
    } else if (!a->stream) {
        gw_exchange_abort(x); /* an error object in a 200 body would be read as success */
    } else {
        buf_clear(&a->out);
        buf_text(&a->out, "data: ");
        gw_error_write(&a->out, &error);
        buf_text(&a->out, "\n\ndata: [DONE]\n\n");
        if (buf_failed(&a->out) || !gw_exchange_write(x, a->out.data, a->out.size))
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
    struct gw_openai_usage u;
    if (a->q->ask.include_usage) {
        usage_fill(a, &u);
        buf_append(&a->out, a->head.data, a->head.size);
        buf_text(&a->out, "],\"usage\":");
        gw_openai_usage(&a->out, &u);
        if (a->q->ask.timings_per_token)
            timings_write(a, &a->out);
        buf_text(&a->out, "}\n\n");
    }
    buf_text(&a->out, "data: [DONE]\n\n");
    if (buf_failed(&a->out)) {
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
    if (buf_failed(&a->out)) {
        fail_memory(a, "no memory for the answer");
        return;
    }
    if (gw_exchange_begun(a->x)) {
        gw_exchange_write(a->x, a->out.data, a->out.size);
        gw_exchange_end(a->x);
    } else {
        heads_fill(a, &h);
        struct gw_exchange_head head = {.headers = h.list, .n_headers = h.n};
        gw_exchange_respond_buf(a->x, &head, &a->out);
    }
    log_done(a);
    answer_free(a);
}

/* ---- in the pool ---- */

static void on_text(void *user, enum gw_stop_kind kind, const char *text, size_t n)
{
    struct view *v = user;
    struct gw_answer *a = v->answer;
    if (a->stream)
        text_write(a, v, kind, text, n);
    else
        buf_append(kind == GW_STOP_REASONING ? &v->reasoning : &v->content, text, n);
}

static void answer_run(struct gw_answer *a, const struct gw_request_choice *only);

static void on_echo(void *user, enum gw_stop_kind kind, const char *text, size_t n)
{
    (void)kind;
    buf_append(&((struct view *)user)->content, text, n);
}

static void on_work(uv_work_t *request)
{
    struct gw_answer *a = request->data;
    struct view *v = a->work_view;
    bool more = true;
    a->work_code = ERR_OK;
    if (a->work == WORK_ECHO)
        a->work_code = gw_text_echo(&v->text, on_echo, v, &a->work_error);
    if (a->work == WORK_ECHO && buf_failed(&v->content))
        a->work_code = err_set(&a->work_error, ERR_NOMEM, "no memory for the answer");
    while (a->work == WORK_VIEW && more && a->work_code == ERR_OK)
        a->work_code = gw_text_step(&v->text, on_text, v, &more, &a->work_error);
    if (a->work == WORK_JSON)
        json_write(a, &a->out);
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
static bool work_begin(struct gw_answer *a, enum work work, struct view *v)
{
    a->work_request.data = a;
    a->work = work;
    a->work_view = v;
    if (uv_queue_work(a->context->loop, &a->work_request, on_work, on_worked) == 0)
        return true;
    a->work = WORK_NONE;
    return false;
}

/* How many ids and logprobs the next step, or with `all` the rest of the view, has to render. */
static uint64_t values_of(const struct gw_answer *a, const struct view *v, bool all)
{
    const struct gw_request *q = a->q;
    const struct gw_text *t = &v->text;
    uint64_t n = t->echoed ? 0 : q->prompts[t->choice->prompt].n;
    if (all)
        n += t->choice->n_ids - t->pushed;
    return q->ask.logprobs ? n * (1 + (uint64_t)q->ask.top_logprobs) : n;
}

/* Hands long work on this view to the pool. */
static bool view_hand_over(struct gw_answer *a, struct view *v)
{
    if (gw_text_is_over(&v->text))
        return false;
    if (!a->stream && v->text.choice->state == GW_REQUEST_DONE &&
        values_of(a, v, true) > INLINE_VALUES)
        return work_begin(a, WORK_VIEW, v);
    return values_of(a, v, false) > INLINE_VALUES && gw_text_echo_is_due(&v->text) &&
           work_begin(a, WORK_ECHO, v);
}

static size_t bytes_of(const struct gw_answer *a)
{
    size_t bytes = 0;
    for (unsigned i = 0; i < a->q->n_choices; i++) {
        const struct view *v = &a->views[i];
        bytes += v->content.size + v->reasoning.size + v->text.logprobs.size + v->text.ids.size +
                 v->text.columns.tokens.size + v->text.columns.tops.size;
    }
    return bytes;
}

static void end_json(struct gw_answer *a)
{
    bool written = a->out.size > 0 || buf_failed(&a->out); /* by the pool */
    if (!written && bytes_of(a) > INLINE_BYTES && work_begin(a, WORK_JSON, NULL))
        return;
    if (!written)
        json_write(a, &a->out);
    json_send(a);
}

/* ---- going on ---- */

/* The echo of a stream that the pool has made, in one piece. */
static void echo_write(struct gw_answer *a, struct view *v)
{
    struct buf echo = v->content;
    v->content = BUF_INIT(MAX_BODY);
    text_write(a, v, GW_STOP_CONTENT, (const char *)echo.data, echo.size);
    buf_done(&echo);
    if (!buf_failed(&a->out))
        out_send(a);
}

/* Renders a choice as far as tokens and room go. */
static enum err_code view_run(struct gw_answer *a, struct view *v, struct err *e)
{
    bool more = true, was_matched = v->text.matched;
    enum err_code code = ERR_OK;
    while (more && code == ERR_OK && !v->finished) {
        if (a->stream && gw_exchange_room(a->x) == 0)
            return ERR_OK;
        if (a->stream && v->content.size > 0) {
            echo_write(a, v);
            continue;
        }
        if (view_hand_over(a, v))
            return ERR_OK;
        code = gw_text_step(&v->text, on_text, v, &more, e);
        if (v->text.matched && !was_matched) {
            was_matched = true;
            gw_dispatch_stop(a->context->dispatch, &a->q->choices[v->text.choice->index]);
        }
        if (code == ERR_OK && gw_text_is_over(&v->text)) {
            v->finished = true;
            a->n_finished++;
            if (a->stream)
                finish_write(a, v);
        }
        if (buf_failed(&a->out) || buf_failed(&v->content) || buf_failed(&v->reasoning))
            code = err_set(e, ERR_NOMEM, "no memory for the answer");
        if (code == ERR_OK && a->stream)
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
            code = view_run(a, &a->views[i], &e);
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
    else if (a->n_finished < a->q->n_choices)
        return;
    else if (a->stream)
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
    if (!a->stream)
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
    if (!a->stream && gw_exchange_begun(a->x))
        wait_ms = PAD_AGAIN_MS;
    if (quiet_ms < wait_ms) {
        uv_timer_start(timer, on_timer, wait_ms - quiet_ms, 0);
        return;
    }
    if (!gw_exchange_begun(a->x))
        begin(a);
    gw_exchange_write(a->x, a->stream ? ":\n\n" : " ", a->stream ? 3 : 1);
    a->last_ns = now;
    uv_timer_start(timer, on_timer, a->stream ? wait_ms : PAD_AGAIN_MS, 0);
}

/* ---- start ---- */

static enum err_code views_init(struct gw_answer *a, struct err *e)
{
    const struct gw_template_facts *facts =
        a->context->model->template ? gw_template_get_facts(a->context->model->template) : NULL;
    a->views = alloc_zero(ALLOC_REQUEST, a->q->n_choices, sizeof *a->views);
    if (!a->views)
        return err_set(e, ERR_NOMEM, "no memory for the answer");
    enum err_code code = ERR_OK;
    for (unsigned i = 0; i < a->q->n_choices && code == ERR_OK; i++) {
        struct view *v = &a->views[i];
        v->answer = a;
        v->content = v->reasoning = BUF_INIT(MAX_BODY);
        code = gw_text_init(&v->text, &a->q->choices[i], a->context->model->tokenizer, facts, e);
    }
    return code;
}

void gw_answer_start(const struct gw_answer_context *context, struct gw_request *q,
                     struct gw_exchange *x)
{
    static const struct gw_exchange_events events = {on_cancel, on_writable};
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
    a->stream = q->ask.stream;
    a->listener = (struct gw_request_listener){.changed = on_changed, .user = a};
    list_append(&q->listeners, &a->listener.link);
    a->head = a->out = BUF_INIT(MAX_BODY);
    a->last_ns = now_of(a);
    uv_timer_init(context->loop, &a->timer);
    a->timer.data = a;
    if (views_init(a, &e) != ERR_OK) {
        fail_memory(a, e.text);
        return;
    }
    gw_exchange_watch(x, &events, a);
    if (a->stream && !gw_request_failed(q))
        begin(a);
    if (silence_ms(a) > 0)
        uv_timer_start(&a->timer, on_timer, (uint64_t)silence_ms(a), 0);
    answer_run(a, NULL);
}

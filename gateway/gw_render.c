#include "gw_render.h"

#include <string.h>

#include "alloc.h"
#include "gw_json_out.h"
#include "gw_model.h"
#include "gw_template.h"

enum {
    MAX_BODY = 1 << 30
};

/* ---- life ---- */

enum err_code gw_render_init(struct gw_render *r, const struct gw_request *q,
                             const struct gw_model *model, struct err *e)
{
    const struct gw_template_facts *facts =
        model->template ? gw_template_get_facts(model->template) : NULL;
    *r = (struct gw_render){.model = model, .q = q, .stream = q->ask.stream};
    r->head = r->out = BUF_INIT(MAX_BODY);
    r->choices = alloc_zero(ALLOC_REQUEST, q->n_choices, sizeof *r->choices);
    if (!r->choices)
        return err_set(e, ERR_NOMEM, "no memory for the answer");
    enum err_code code = ERR_OK;
    for (unsigned i = 0; i < q->n_choices && code == ERR_OK; i++) {
        struct gw_render_choice *c = &r->choices[i];
        c->render = r;
        c->content = c->reasoning = BUF_INIT(MAX_BODY);
        code = gw_text_init(&c->text, &q->choices[i], model->tokenizer, facts, e);
    }
    if (code != ERR_OK)
        gw_render_done(r);
    return code;
}

void gw_render_done(struct gw_render *r)
{
    for (unsigned i = 0; r->choices && i < r->q->n_choices; i++) {
        gw_text_done(&r->choices[i].text);
        buf_done(&r->choices[i].content);
        buf_done(&r->choices[i].reasoning);
    }
    alloc_free(r->choices);
    r->choices = NULL;
    buf_done(&r->head);
    buf_done(&r->out);
}

/* ---- figures ---- */

void gw_render_usage(const struct gw_render *r, struct gw_openai_usage *u)
{
    const struct gw_request *q = r->q;
    uint64_t worker_queue_ms = 0;
    *u = (struct gw_openai_usage){.seed = q->seed};
    for (unsigned i = 0; i < q->n_prompts; i++) {
        u->prompt += q->prompts[i].n;
        u->cached += q->choices[i * (unsigned)q->ask.n].usage.cached;
    }
    for (unsigned i = 0; i < q->n_choices; i++) {
        const struct gw_request_choice *c = &q->choices[i];
        u->completion += r->choices[i].text.pushed;
        u->reasoning += r->choices[i].text.reasoning;
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

static void timings_fill(const struct gw_render *r, struct gw_openai_timings *t)
{
    const struct gw_request *q = r->q;
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
        t->predicted_n += r->choices[i].text.pushed;
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

/* ---- events of a stream ---- */

static bool is_chat(const struct gw_render *r)
{
    return r->q->ask.kind == GW_CHAT_REQUEST_CHAT;
}

static void chunk_open(struct gw_render *r, const struct gw_render_choice *c)
{
    if (r->head.size == 0) {
        buf_text(&r->head, "data: ");
        gw_openai_head(&r->head, r->q, r->model->id, r->model->file_digest, true);
    }
    buf_append(&r->out, r->head.data, r->head.size);
    buf_text(&r->out, "{\"index\":");
    gw_json_out_u64(&r->out, c->text.choice->index);
}

/* Logprobs and ids of the tokens that go with this piece. */
static void entries_write(struct gw_render *r, const struct gw_render_choice *c)
{
    struct buf *out = &r->out;
    const struct gw_chat_request *ask = &r->q->ask;
    buf_text(out, ",\"logprobs\":");
    if (!ask->logprobs || (r->stream && !c->text.has_entries)) {
        buf_text(out, "null");
    } else if (is_chat(r)) {
        buf_text(out, "{\"content\":[");
        buf_append(out, c->text.logprobs.data, c->text.logprobs.size);
        buf_text(out, "],\"refusal\":null}");
    } else {
        gw_openai_columns_write(out, &c->text.columns, ask->top_logprobs > 0);
    }
    if (ask->return_tokens) {
        buf_text(out, ",\"tokens\":[");
        buf_append(out, c->text.ids.data, c->text.ids.size);
        buf_byte(out, ']');
    }
}

static void timings_write(struct gw_render *r)
{
    struct gw_openai_timings t;
    timings_fill(r, &t);
    buf_text(&r->out, ",\"timings\":");
    gw_openai_timings(&r->out, &t);
}

static void chunk_close(struct gw_render *r, bool with_timings)
{
    buf_text(&r->out, "}]");
    if (r->q->ask.include_usage)
        buf_text(&r->out, ",\"usage\":null");
    if (with_timings || r->q->ask.timings_per_token)
        timings_write(r);
    buf_text(&r->out, "}\n\n");
}

static void role_write(struct gw_render *r, struct gw_render_choice *c)
{
    if (c->role_sent)
        return;
    c->role_sent = true;
    if (!is_chat(r))
        return;
    chunk_open(r, c);
    buf_text(&r->out, ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                      "\"finish_reason\":null");
    chunk_close(r, false);
}

static void event_write(struct gw_render_choice *c, enum gw_stop_kind kind, const char *text,
                        size_t n)
{
    struct gw_render *r = c->render;
    role_write(r, c);
    chunk_open(r, c);
    if (!is_chat(r))
        buf_text(&r->out, ",\"text\":");
    else if (kind == GW_STOP_REASONING)
        buf_text(&r->out, ",\"delta\":{\"reasoning_content\":");
    else
        buf_text(&r->out, ",\"delta\":{\"content\":");
    gw_json_out_string(&r->out, text, n);
    if (is_chat(r))
        buf_byte(&r->out, '}');
    entries_write(r, c);
    buf_text(&r->out, ",\"finish_reason\":null");
    chunk_close(r, false);
    gw_text_clear_entries(&c->text);
}

void gw_render_text(void *user, enum gw_stop_kind kind, const char *text, size_t n)
{
    struct gw_render_choice *c = user;
    if (c->render->stream)
        event_write(c, kind, text, n);
    else
        gw_render_keep(user, kind, text, n);
}

void gw_render_keep(void *user, enum gw_stop_kind kind, const char *text, size_t n)
{
    struct gw_render_choice *c = user;
    buf_append(kind == GW_STOP_REASONING ? &c->reasoning : &c->content, text, n);
}

void gw_render_echo(struct gw_render_choice *c)
{
    struct buf echo = c->content;
    c->content = BUF_INIT(MAX_BODY);
    event_write(c, GW_STOP_CONTENT, (const char *)echo.data, echo.size);
    buf_done(&echo);
}

static void stop_reason_write(struct gw_render *r, const struct gw_render_choice *c)
{
    struct buf *out = &r->out;
    buf_text(out, ",\"finish_reason\":");
    gw_openai_finish(out, c->text.choice->finish, c->text.matched);
    buf_text(out, ",\"stop_reason\":");
    if (c->text.matched)
        gw_json_out_string(out, r->q->ask.stops[c->text.match].text,
                           r->q->ask.stops[c->text.match].size);
    else
        buf_text(out, "null");
}

void gw_render_finish(struct gw_render_choice *c)
{
    struct gw_render *r = c->render;
    c->finished = true;
    r->n_finished++;
    if (!r->stream)
        return;
    role_write(r, c);
    chunk_open(r, c);
    buf_text(&r->out, is_chat(r) ? ",\"delta\":{}" : ",\"text\":\"\"");
    entries_write(r, c);
    stop_reason_write(r, c);
    chunk_close(r, r->n_finished == r->q->n_choices);
    gw_text_clear_entries(&c->text);
}

void gw_render_end(struct gw_render *r)
{
    struct gw_openai_usage u;
    if (r->q->ask.include_usage) {
        gw_render_usage(r, &u);
        buf_append(&r->out, r->head.data, r->head.size);
        buf_text(&r->out, "],\"usage\":");
        gw_openai_usage(&r->out, &u);
        if (r->q->ask.timings_per_token)
            timings_write(r);
        buf_text(&r->out, "}\n\n");
    }
    buf_text(&r->out, "data: [DONE]\n\n");
}

void gw_render_error(struct gw_render *r, const struct gw_error *error)
{
    buf_clear(&r->out);
    buf_text(&r->out, "data: ");
    gw_error_write(&r->out, error);
    buf_text(&r->out, "\n\ndata: [DONE]\n\n");
}

/* ---- JSON ---- */

static void choice_write(struct gw_render *r, const struct gw_render_choice *c)
{
    struct buf *out = &r->out;
    if (c->text.choice->index > 0)
        buf_byte(out, ',');
    buf_text(out, "{\"index\":");
    gw_json_out_u64(out, c->text.choice->index);
    if (is_chat(r)) {
        buf_text(out, ",\"message\":{\"role\":\"assistant\",\"content\":");
        gw_json_out_string(out, c->content.data, c->content.size);
        buf_text(out, ",\"refusal\":null");
        if (c->reasoning.size > 0) {
            buf_text(out, ",\"reasoning_content\":");
            gw_json_out_string(out, c->reasoning.data, c->reasoning.size);
        }
        buf_byte(out, '}');
    } else {
        buf_text(out, ",\"text\":");
        gw_json_out_string(out, c->content.data, c->content.size);
    }
    entries_write(r, c);
    stop_reason_write(r, c);
    buf_byte(out, '}');
}

void gw_render_json(struct gw_render *r)
{
    struct buf *out = &r->out;
    struct gw_openai_usage u;
    gw_openai_head(out, r->q, r->model->id, r->model->file_digest, false);
    for (unsigned i = 0; i < r->q->n_choices; i++)
        choice_write(r, &r->choices[i]);
    gw_render_usage(r, &u);
    buf_text(out, "],\"usage\":");
    gw_openai_usage(out, &u);
    timings_write(r);
    buf_byte(out, '}');
}

/* ---- state ---- */

bool gw_render_failed(const struct gw_render_choice *c)
{
    return buf_failed(&c->render->head) || buf_failed(&c->render->out) || buf_failed(&c->content) ||
           buf_failed(&c->reasoning);
}

size_t gw_render_bytes(const struct gw_render *r)
{
    size_t bytes = 0;
    for (unsigned i = 0; i < r->q->n_choices; i++) {
        const struct gw_render_choice *c = &r->choices[i];
        bytes += c->content.size + c->reasoning.size + c->text.logprobs.size + c->text.ids.size +
                 c->text.columns.tokens.size + c->text.columns.tops.size;
    }
    return bytes;
}

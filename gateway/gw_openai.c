#include "gw_openai.h"

#include <math.h>
#include <string.h>

#include "gw_json_out.h"
#include "gw_tokenizer.h"

static void piece_write(struct buf *out, const struct gw_tokenizer *t, uint32_t id)
{
    const char *text = "";
    size_t n = 0;
    if (!gw_tokenizer_piece(t, id, true, &text, &n))
        n = 0;
    gw_json_out_string(out, text, n);
}

void gw_openai_head(struct buf *out, const struct gw_request *q, const char *model,
                    const uint8_t file_digest[16], bool is_chunk)
{
    bool is_chat = q->ask.kind == GW_CHAT_REQUEST_CHAT;
    const char *object = is_chat ? "chat.completion" : "text_completion";
    buf_format(out, "{\"id\":\"%s-%s\",\"object\":\"%s%s\",\"created\":%lld,\"model\":",
               is_chat ? "chatcmpl" : "cmpl", q->id, object, is_chunk && is_chat ? ".chunk" : "",
               (long long)q->created_s);
    gw_json_out_text(out, model);
    buf_format(out, ",\"system_fingerprint\":\"islet-%u-%02x%02x%02x%02x\",\"choices\":[",
               q->arithmetic, file_digest[0], file_digest[1], file_digest[2], file_digest[3]);
}

static void member(struct buf *out, const char *name, uint64_t value)
{
    buf_text(out, name);
    gw_json_out_u64(out, value);
}

void gw_openai_usage(struct buf *out, const struct gw_openai_usage *u)
{
    member(out, "{\"prompt_tokens\":", u->prompt);
    member(out, ",\"completion_tokens\":", u->completion);
    member(out, ",\"total_tokens\":", u->prompt + u->completion);
    member(out, ",\"prompt_tokens_details\":{\"cached_tokens\":", u->cached);
    member(out, "},\"completion_tokens_details\":{\"reasoning_tokens\":", u->reasoning);
    member(out, "},\"islet\":{\"seed\":", u->seed);
    member(out, ",\"expert_hits\":{\"vram\":", u->hits_vram);
    member(out, ",\"ram\":", u->hits_ram);
    member(out, "},\"expert_misses\":", u->misses);
    member(out, ",\"ssd_bytes\":", u->ssd_bytes);
    member(out, ",\"queue_ms\":", u->queue_ms);
    member(out, ",\"resumed\":", u->resumed);
    buf_format(out, ",\"context_full\":%s}}", u->context_full ? "true" : "false");
}

static double per_second(uint64_t n, double ms)
{
    return ms > 0 ? (double)n * 1000 / ms : 0;
}

void gw_openai_timings(struct buf *out, const struct gw_openai_timings *t)
{
    member(out, "{\"cache_n\":", t->cache_n);
    member(out, ",\"prompt_n\":", t->prompt_n);
    buf_text(out, ",\"prompt_ms\":");
    gw_json_out_figure(out, t->prompt_ms);
    buf_text(out, ",\"prompt_per_second\":");
    gw_json_out_figure(out, per_second(t->prompt_n, t->prompt_ms));
    member(out, ",\"predicted_n\":", t->predicted_n);
    buf_text(out, ",\"predicted_ms\":");
    gw_json_out_figure(out, t->predicted_ms);
    buf_text(out, ",\"predicted_per_second\":");
    gw_json_out_figure(out, per_second(t->predicted_n, t->predicted_ms));
    buf_byte(out, '}');
}

void gw_openai_finish(struct buf *out, enum proto_finish finish, bool matched)
{
    buf_text(out, matched || finish == PROTO_FINISH_STOP ? "\"stop\"" : "\"length\"");
}

static void token_write(struct buf *out, const struct gw_tokenizer *t, uint32_t id, float logprob)
{
    const char *text = "";
    size_t n = 0;
    if (!gw_tokenizer_piece(t, id, true, &text, &n))
        n = 0;
    buf_text(out, "{\"token\":");
    gw_json_out_string(out, text, n);
    buf_text(out, ",\"logprob\":");
    gw_json_out_float(out, logprob);
    buf_text(out, ",\"bytes\":");
    gw_json_out_bytes(out, text, n);
}

void gw_openai_logprob(struct buf *out, const struct gw_tokenizer *t, uint32_t id,
                       const struct gw_request_lp *lp)
{
    token_write(out, t, id, lp->logprob);
    buf_text(out, ",\"top_logprobs\":[");
    for (uint32_t i = 0; i < lp->n_top; i++) {
        if (i > 0)
            buf_byte(out, ',');
        token_write(out, t, lp->top[i].id, lp->top[i].logprob);
        buf_byte(out, '}');
    }
    buf_text(out, "]}");
}

/* ---- columns ---- */

void gw_openai_columns_init(struct gw_openai_columns *c, size_t ceiling)
{
    c->tokens = c->logprobs = c->tops = c->offsets = BUF_INIT(ceiling);
}

void gw_openai_columns_done(struct gw_openai_columns *c)
{
    buf_done(&c->tokens);
    buf_done(&c->logprobs);
    buf_done(&c->tops);
    buf_done(&c->offsets);
}

void gw_openai_columns_clear(struct gw_openai_columns *c)
{
    buf_clear(&c->tokens);
    buf_clear(&c->logprobs);
    buf_clear(&c->tops);
    buf_clear(&c->offsets);
}

bool gw_openai_columns_failed(const struct gw_openai_columns *c)
{
    return buf_failed(&c->tokens) || buf_failed(&c->logprobs) || buf_failed(&c->tops) ||
           buf_failed(&c->offsets);
}

static void comma(struct buf *out)
{
    if (out->size > 0)
        buf_byte(out, ',');
}

void gw_openai_columns_add(struct gw_openai_columns *c, const struct gw_tokenizer *t, uint32_t id,
                           const struct gw_request_lp *lp, uint64_t offset)
{
    bool known = lp && !isnan(lp->logprob);
    comma(&c->tokens);
    piece_write(&c->tokens, t, id);
    comma(&c->logprobs);
    if (known)
        gw_json_out_float(&c->logprobs, lp->logprob);
    else
        buf_text(&c->logprobs, "null");
    comma(&c->offsets);
    gw_json_out_u64(&c->offsets, offset);
    comma(&c->tops);
    if (!known) {
        buf_text(&c->tops, "null");
        return;
    }
    buf_byte(&c->tops, '{');
    for (uint32_t i = 0; i < lp->n_top; i++) {
        if (i > 0)
            buf_byte(&c->tops, ',');
        piece_write(&c->tops, t, lp->top[i].id);
        buf_byte(&c->tops, ':');
        gw_json_out_float(&c->tops, lp->top[i].logprob);
    }
    buf_byte(&c->tops, '}');
}

static void column_write(struct buf *out, const char *name, const struct buf *column)
{
    buf_text(out, name);
    buf_append(out, column->data, column->size);
    buf_byte(out, ']');
}

void gw_openai_columns_write(struct buf *out, const struct gw_openai_columns *c, bool has_tops)
{
    column_write(out, "{\"tokens\":[", &c->tokens);
    column_write(out, ",\"token_logprobs\":[", &c->logprobs);
    if (has_tops)
        column_write(out, ",\"top_logprobs\":[", &c->tops);
    else
        buf_text(out, ",\"top_logprobs\":null");
    column_write(out, ",\"text_offset\":[", &c->offsets);
    buf_byte(out, '}');
}

#include "gw_api_tokenize.h"

#include <stdio.h>

#include "alloc.h"
#include "gw_api.h"
#include "gw_encode.h"
#include "gw_exchange.h"
#include "gw_json_out.h"
#include "gw_json_value.h"
#include "gw_model.h"
#include "gw_service.h"
#include "gw_tokenizer.h"
#include "utf8.h"

enum {
    MAX_BODY = 1 << 30
};

/* A /tokenize request whose text may be on the thread pool. */
struct job {
    struct gw_service *service;
    struct gw_exchange *x; /* NULL: the client has gone */
    json_t *body;          /* holds the text */
    bool with_pieces;
    struct gw_encode encode;
};

static bool bool_member(const json_t *body, const char *name, bool absent, bool *ret,
                        struct gw_refusal *refusal)
{
    const json_t *value = json_object_get(body, name);
    *ret = absent;
    if (!gw_json_value_present(value))
        return true;
    if (!json_is_boolean(value))
        return gw_refusal_set(refusal, GW_ERROR_INVALID_TYPE, name,
                              "%s must be true or false, not %s", name, gw_json_value_type(value));
    *ret = json_is_true(value);
    return true;
}

static void pieces_write(struct buf *out, const struct gw_tokenizer *t,
                         const struct gw_tokenizer_ids *ids)
{
    for (size_t i = 0; i < ids->n; i++) {
        const char *piece = "";
        size_t n = 0;
        if (!gw_tokenizer_piece(t, ids->ids[i], true, &piece, &n))
            n = 0;
        buf_text(out, i > 0 ? ",{\"id\":" : "{\"id\":");
        gw_json_out_u64(out, ids->ids[i]);
        buf_text(out, ",\"piece\":");
        if (utf8_valid(piece, n))
            gw_json_out_string(out, piece, n);
        else
            gw_json_out_bytes(out, piece, n);
        buf_byte(out, '}');
    }
}

static void on_encoded(struct gw_encode *e)
{
    struct job *job = (struct job *)(void *)((char *)e - offsetof(struct job, encode));
    struct buf out = BUF_INIT(MAX_BODY);
    if (job->x && e->code != ERR_OK) {
        gw_exchange_fail_text(job->x, gw_error_of_err(e->code), "content", "%s", e->error.text);
    } else if (job->x) {
        buf_text(&out, "{\"tokens\":");
        if (job->with_pieces) {
            buf_byte(&out, '[');
            pieces_write(&out, e->tokenizer, &e->ids[0]);
            buf_byte(&out, ']');
        } else {
            gw_json_out_ids(&out, e->ids[0].ids, e->ids[0].n);
        }
        buf_byte(&out, '}');
        gw_api_respond(job->x, 200, &out);
    }
    gw_tokenizer_ids_done(&e->ids[0]);
    json_decref(job->body);
    alloc_free(job);
}

static void on_cancel(void *user)
{
    struct job *job = user;
    job->x = NULL; /* freed when its text is done */
}

static bool job_fill(struct job *job, struct gw_refusal *refusal)
{
    const json_t *content = json_object_get(job->body, "content");
    struct gw_encode *e = &job->encode;
    if (!gw_json_value_present(content))
        return gw_refusal_set(refusal, GW_ERROR_MISSING_FIELD, "content",
                              "content is missing: a string is required");
    if (!json_is_string(content))
        return gw_refusal_set(refusal, GW_ERROR_INVALID_TYPE, "content",
                              "content must be a string, not %s", gw_json_value_type(content));
    e->texts[0].text = json_string_value(content);
    e->texts[0].n = json_string_length(content);
    e->n_texts = 1;
    return bool_member(job->body, "add_special", false, &e->add_bos, refusal) &&
           bool_member(job->body, "parse_special", true, &e->parse_special, refusal) &&
           bool_member(job->body, "with_pieces", false, &job->with_pieces, refusal);
}

void gw_api_tokenize_post(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    static const struct gw_exchange_events events = {.cancel = on_cancel};
    struct gw_service *s = context;
    struct gw_refusal refusal;
    if (!gw_api_ready(s, x))
        return;
    json_t *body = gw_api_body(x, r);
    if (!body)
        return;
    struct job *job = alloc_zero(ALLOC_REQUEST, 1, sizeof *job);
    if (!job) {
        json_decref(body);
        gw_exchange_fail_text(x, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
        return;
    }
    job->service = s;
    job->x = x;
    job->body = body;
    job->encode.tokenizer = s->model->tokenizer;
    job->encode.done = on_encoded;
    if (!job_fill(job, &refusal)) {
        json_decref(body);
        alloc_free(job);
        gw_refusal_send(&refusal, x);
        return;
    }
    gw_exchange_drop_body(x);
    gw_exchange_watch(x, &events, job);
    gw_encode_start(&job->encode, gw_loop_uv(s->loop));
}

/* ---- back ---- */

static bool tokens_join(const struct gw_tokenizer *t, const json_t *tokens, struct buf *ret,
                        struct gw_refusal *refusal)
{
    char param[40];
    size_t i;
    json_t *one;
    struct utf8_gate gate = {0};
    if (!gw_json_value_present(tokens))
        return gw_refusal_set(refusal, GW_ERROR_MISSING_FIELD, "tokens",
                              "tokens is missing: an array of token ids is required");
    if (!json_is_array(tokens))
        return gw_refusal_set(refusal, GW_ERROR_INVALID_TYPE, "tokens",
                              "tokens must be an array, not %s", gw_json_value_type(tokens));
    json_array_foreach(tokens, i, one)
    {
        const char *piece;
        size_t n;
        int64_t id;
        snprintf(param, sizeof param, "tokens[%zu]", i);
        if (!gw_json_value_int(one, &id))
            return gw_refusal_set(refusal, GW_ERROR_INVALID_TYPE, param,
                                  "%s must be a token id, not %s", param, gw_json_value_type(one));
        if (id < 0 || id > UINT32_MAX || !gw_tokenizer_piece(t, (uint32_t)id, true, &piece, &n))
            return gw_refusal_set(refusal, GW_ERROR_INVALID_VALUE, param,
                                  "%s: token id %lld is outside the vocabulary of %u", param,
                                  (long long)id, gw_tokenizer_n_vocab(t));
        utf8_gate_push(&gate, piece, n, ret);
    }
    utf8_gate_finish(&gate, ret);
    return true;
}

void gw_api_tokenize_back(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    struct gw_service *s = context;
    struct gw_refusal refusal;
    struct buf text = BUF_INIT(MAX_BODY), out = BUF_INIT(MAX_BODY);
    if (!gw_api_ready(s, x))
        return;
    json_t *body = gw_api_body(x, r);
    if (!body)
        return;
    bool ok = tokens_join(s->model->tokenizer, json_object_get(body, "tokens"), &text, &refusal);
    json_decref(body);
    if (!ok) {
        buf_done(&text);
        gw_refusal_send(&refusal, x);
        return;
    }
    buf_text(&out, "{\"content\":");
    gw_json_out_string(&out, text.data, text.size);
    buf_byte(&out, '}');
    if (buf_failed(&text))
        out.failed = true;
    buf_done(&text);
    gw_api_respond(x, 200, &out);
}

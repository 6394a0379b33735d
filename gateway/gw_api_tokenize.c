#include "gw_api_tokenize.h"

#include <stdio.h>

#include "gw_exchange.h"
#include "gw_job.h"
#include "gw_json_out.h"
#include "gw_json_value.h"
#include "gw_model.h"
#include "gw_tokenizer.h"
#include "utf8.h"

/* ---- /tokenize ---- */

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

static void ids_write(struct gw_job *j, const struct gw_tokenizer_ids *ids, bool with_pieces)
{
    buf_text(&j->out, "{\"tokens\":");
    if (with_pieces) {
        buf_byte(&j->out, '[');
        pieces_write(&j->out, j->model->tokenizer, ids);
        buf_byte(&j->out, ']');
    } else {
        gw_json_out_ids(&j->out, ids->ids, ids->n);
    }
    buf_byte(&j->out, '}');
}

static bool tokenize_run(struct gw_job *j, const json_t *body, struct gw_refusal *refusal)
{
    const json_t *content = json_object_get(body, "content");
    bool add_special, parse_special, with_pieces;
    struct gw_tokenizer_ids ids = {0};
    struct err e = {0};
    if (!gw_json_value_present(content))
        return gw_refusal_set(refusal, GW_ERROR_MISSING_FIELD, "content",
                              "content is missing: a string is required");
    if (!json_is_string(content))
        return gw_refusal_set(refusal, GW_ERROR_INVALID_TYPE, "content",
                              "content must be a string, not %s", gw_json_value_type(content));
    if (!bool_member(body, "add_special", false, &add_special, refusal) ||
        !bool_member(body, "parse_special", true, &parse_special, refusal) ||
        !bool_member(body, "with_pieces", false, &with_pieces, refusal))
        return false;
    /* Where the model's texts do not begin with a special token, there is none to add. */
    bool add_bos = add_special && gw_tokenizer_adds_bos(j->model->tokenizer);
    enum err_code code =
        gw_tokenizer_encode(j->model->tokenizer, json_string_value(content),
                            json_string_length(content), parse_special, add_bos, &ids, &e);
    if (code != ERR_OK)
        return gw_refusal_set(refusal, gw_error_of_err(code), "content", "%s", e.text);
    ids_write(j, &ids, with_pieces);
    gw_tokenizer_ids_done(&ids);
    return true;
}

void gw_api_tokenize_post(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    static const struct gw_job_kind kind = {.run = tokenize_run};
    struct gw_job *j = gw_job_new(sizeof *j, &kind, context, x);
    (void)r;
    if (j)
        gw_job_start(j);
}

/* ---- /detokenize ---- */

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

static bool detokenize_run(struct gw_job *j, const json_t *body, struct gw_refusal *refusal)
{
    struct buf text = BUF_INIT(j->out.ceiling);
    bool fine = tokens_join(j->model->tokenizer, json_object_get(body, "tokens"), &text, refusal);
    if (fine) {
        buf_text(&j->out, "{\"content\":");
        gw_json_out_string(&j->out, text.data, text.size);
        buf_byte(&j->out, '}');
    }
    if (buf_failed(&text))
        j->out.failed = true;
    buf_done(&text);
    return fine;
}

void gw_api_tokenize_back(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    static const struct gw_job_kind kind = {.run = detokenize_run};
    struct gw_job *j = gw_job_new(sizeof *j, &kind, context, x);
    (void)r;
    if (j)
        gw_job_start(j);
}

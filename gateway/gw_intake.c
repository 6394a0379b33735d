#include "gw_intake.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "alloc.h"
#include "gw_chat_request.h"
#include "gw_dispatch.h"
#include "gw_encode.h"
#include "gw_exchange.h"
#include "gw_model.h"
#include "gw_request.h"
#include "gw_service.h"
#include "gw_template.h"
#include "gw_tokenizer.h"

struct intake {
    struct gw_service *service;
    struct gw_exchange *x; /* NULL: the client has gone */
    struct gw_chat_request ask;
    char *chat_prompt;
    size_t n_chat_prompt;
    struct gw_encode encode;
    struct gw_request_prompt prompts[GW_CHAT_REQUEST_MAX_PROMPTS];
    unsigned n_prompts;
};

static void intake_free(struct intake *in)
{
    gw_chat_request_done(&in->ask);
    alloc_free(in->chat_prompt);
    for (unsigned i = 0; i < GW_ENCODE_MAX_TEXTS; i++)
        gw_tokenizer_ids_done(&in->encode.ids[i]);
    for (unsigned i = 0; i < in->n_prompts; i++)
        alloc_free(in->prompts[i].ids);
    alloc_free(in);
}

static void on_cancel(void *user)
{
    struct intake *in = user;
    in->x = NULL; /* freed when its texts are done */
}

/* ---- prompts ---- */

/* Moves the ids of prompt i into *to. */
static bool prompt_move(struct intake *in, unsigned i, struct gw_request_prompt *to,
                        struct gw_refusal *refusal)
{
    struct gw_tokenizer_ids *ids = &in->encode.ids[i];
    uint32_t bos;
    bool has_bos = gw_tokenizer_bos(in->service->model->tokenizer, &bos);
    if (in->encode.texts[i].text) {
        if (ids->n > UINT32_MAX)
            return gw_refusal_set(refusal, GW_ERROR_INVALID_VALUE, "prompt", "too many tokens");
        *to = (struct gw_request_prompt){.ids = ids->ids, .n = (uint32_t)ids->n};
        *ids = (struct gw_tokenizer_ids){0};
        to->bos_added = in->encode.add_bos && has_bos && to->n > 0;
    } else {
        to->ids = in->ask.prompts[i].ids;
        to->n = in->ask.prompts[i].n_ids;
        in->ask.prompts[i].ids = NULL;
    }
    if (to->n > 0)
        return true;
    if (!has_bos)
        return gw_refusal_set(refusal, GW_ERROR_INVALID_VALUE, "prompt",
                              "the prompt is empty; at least one token is needed");
    alloc_free(to->ids);
    to->ids = alloc_zero(ALLOC_REQUEST, 1, sizeof *to->ids);
    if (!to->ids)
        return gw_refusal_set(refusal, GW_ERROR_OVERLOADED, NULL, "no memory for the prompt");
    to->ids[0] = bos;
    to->n = 1;
    to->bos_added = true;
    return true;
}

static bool length_check(const struct intake *in, struct gw_refusal *refusal)
{
    uint32_t n_ctx = gw_dispatch_n_ctx(in->service->dispatch);
    for (unsigned i = 0; i < in->n_prompts; i++) {
        uint32_t n = in->prompts[i].n;
        if (n < n_ctx)
            continue;
        gw_refusal_set(refusal, GW_ERROR_CONTEXT_LENGTH,
                       in->ask.kind == GW_CHAT_REQUEST_CHAT ? "messages" : "prompt",
                       "this model's maximum context length is %u tokens; the prompt has %u tokens",
                       n_ctx, n);
        snprintf(refusal->extra, sizeof refusal->extra, "\"n_prompt_tokens\":%u,\"n_ctx\":%u", n,
                 n_ctx);
        return false;
    }
    return true;
}

static bool prompts_take(struct intake *in, struct gw_refusal *refusal)
{
    if (in->encode.code != ERR_OK)
        return gw_refusal_set(refusal, gw_error_of_err(in->encode.code), NULL, "%s",
                              in->encode.error.text);
    for (unsigned i = 0; i < in->encode.n_texts; i++) {
        in->n_prompts++;
        if (!prompt_move(in, i, &in->prompts[i], refusal))
            return false;
    }
    return length_check(in, refusal);
}

/* ---- the request ---- */

static struct gw_request *request_make(struct intake *in)
{
    struct gw_service *s = in->service;
    const struct gw_template *template = s->model->template;
    const struct gw_template_facts *facts = template ? gw_template_get_facts(template) : NULL;
    struct gw_request *q =
        gw_request_new(&in->ask, in->prompts, in->n_prompts, s->model->tokenizer);
    if (!q)
        return NULL;
    snprintf(q->client_id, sizeof q->client_id, "%s", gw_exchange_id(in->x));
    q->created_s = time(NULL);
    q->ticket.key = gw_recent_key(gw_exchange_request(in->x)->key);
    if (in->chat_prompt && facts && facts->think_open) {
        size_t n = strlen(facts->think_open);
        q->opens_thoughts = gw_template_prompt_opens(template, in->chat_prompt, in->n_chat_prompt);
        q->opens_bare = q->opens_thoughts && in->n_chat_prompt >= n &&
                        memcmp(in->chat_prompt + in->n_chat_prompt - n, facts->think_open, n) == 0;
    }
    return q;
}

static void finish(struct intake *in)
{
    struct gw_service *s = in->service;
    struct gw_refusal refusal;
    struct gw_request *q = NULL;
    if (!in->x)
        goto out;
    if (!s->dispatch) {
        gw_exchange_fail_text(in->x, GW_ERROR_OVERLOADED, NULL, "the server is stopping");
        goto out;
    }
    if (!prompts_take(in, &refusal)) {
        gw_refusal_send(&refusal, in->x);
        goto out;
    }
    q = request_make(in);
    if (!q) {
        gw_exchange_fail_text(in->x, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
        goto out;
    }
    uint64_t key = q->ticket.key;
    if (!gw_dispatch_submit(s->dispatch, q, &refusal)) {
        gw_refusal_send(&refusal, in->x);
        goto out;
    }
    gw_recent_put(&s->recent, q, key, ticks_ns(s->ticks));
    gw_answer_start(&s->answers, q, in->x);
out:
    gw_request_drop(q);
    intake_free(in);
}

static void on_encoded(struct gw_encode *e)
{
    finish((struct intake *)(void *)((char *)e - offsetof(struct intake, encode)));
}

void gw_intake_start(struct gw_service *s, struct gw_exchange *x, struct gw_chat_request *ask,
                     char *chat_prompt, size_t n_chat_prompt)
{
    static const struct gw_exchange_events events = {.cancel = on_cancel};
    struct intake *in = alloc_zero(ALLOC_REQUEST, 1, sizeof *in);
    if (!in) {
        gw_chat_request_done(ask);
        alloc_free(chat_prompt);
        gw_exchange_fail_text(x, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
        return;
    }
    in->service = s;
    in->x = x;
    in->ask = *ask;
    *ask = (struct gw_chat_request){0};
    in->chat_prompt = chat_prompt;
    in->n_chat_prompt = n_chat_prompt;
    in->encode =
        (struct gw_encode){.tokenizer = s->model->tokenizer,
                           .parse_special = true,
                           .add_bos = !chat_prompt && gw_tokenizer_adds_bos(s->model->tokenizer),
                           .done = on_encoded};
    if (chat_prompt) {
        in->encode.n_texts = 1;
        in->encode.texts[0].text = chat_prompt;
        in->encode.texts[0].n = n_chat_prompt;
    } else {
        in->encode.n_texts = in->ask.n_prompts;
        for (unsigned i = 0; i < in->ask.n_prompts; i++) {
            in->encode.texts[i].text = in->ask.prompts[i].text;
            in->encode.texts[i].n = in->ask.prompts[i].n_text;
        }
    }
    gw_exchange_drop_body(x);
    gw_exchange_watch(x, &events, in);
    gw_encode_start(&in->encode, gw_loop_uv(s->loop));
}

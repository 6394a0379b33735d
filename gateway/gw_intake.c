#include "gw_intake.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "alloc.h"
#include "gw_dispatch.h"
#include "gw_exchange.h"
#include "gw_job.h"
#include "gw_model.h"
#include "gw_request.h"
#include "gw_service.h"
#include "gw_tokenizer.h"

struct intake {
    struct gw_job job;
    struct gw_prompt prompt;
};

static struct intake *intake_of(struct gw_job *j)
{
    return (struct intake *)(void *)j;
}

static void intake_done(struct gw_job *j)
{
    gw_prompt_done(&intake_of(j)->prompt);
}

static bool intake_run(struct gw_job *j, const json_t *body, struct gw_refusal *refusal)
{
    struct gw_prompt *p = &intake_of(j)->prompt;
    return gw_prompt_read(p, body, refusal) && gw_prompt_encode(p, refusal);
}

/* ---- back on the loop ---- */

static bool length_check(const struct intake *in, struct gw_refusal *refusal)
{
    const struct gw_prompt *p = &in->prompt;
    uint32_t n_ctx = gw_dispatch_n_ctx(in->job.service->dispatch);
    for (unsigned i = 0; i < p->n_prompts; i++) {
        uint32_t n = p->prompts[i].n;
        if (n < n_ctx)
            continue;
        gw_refusal_set(refusal, GW_ERROR_CONTEXT_LENGTH,
                       p->kind == GW_CHAT_REQUEST_CHAT ? "messages" : "prompt",
                       "this model's maximum context length is %u tokens; the prompt has %u tokens",
                       n_ctx, n);
        snprintf(refusal->extra, sizeof refusal->extra, "\"n_prompt_tokens\":%u,\"n_ctx\":%u", n,
                 n_ctx);
        return false;
    }
    return true;
}

static struct gw_request *request_make(struct intake *in)
{
    struct gw_prompt *p = &in->prompt;
    const struct gw_http_request *r = gw_exchange_request(in->job.x);
    if (!gw_chat_request_set_session(&p->ask, gw_http_field(r, "x-islet-session")))
        return NULL;
    struct gw_request *q =
        gw_request_new(&p->ask, p->prompts, p->n_prompts, in->job.model->tokenizer);
    if (!q)
        return NULL;
    snprintf(q->client_id, sizeof q->client_id, "%s", gw_exchange_id(in->job.x));
    q->created_s = time(NULL);
    q->ticket.key = gw_recent_key(r->key);
    q->opens_thoughts = p->opens_thoughts;
    q->opens_bare = p->opens_bare;
    return q;
}

static void intake_finish(struct gw_job *j)
{
    struct gw_service *s = j->service;
    struct gw_refusal refusal;
    struct gw_request *q = NULL;
    if (!s->dispatch) {
        gw_exchange_fail_text(j->x, GW_ERROR_OVERLOADED, NULL, "the server is stopping");
        return;
    }
    if (!length_check(intake_of(j), &refusal)) {
        gw_refusal_send(&refusal, j->x);
        return;
    }
    q = request_make(intake_of(j));
    if (!q) {
        gw_exchange_fail_text(j->x, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
        return;
    }
    uint64_t key = q->ticket.key;
    if (gw_dispatch_submit(s->dispatch, q, &refusal)) {
        gw_recent_put(&s->recent, q, key, ticks_ns(s->ticks));
        gw_answer_start(&s->answers, q, j->x);
    } else {
        gw_refusal_send(&refusal, j->x);
    }
    gw_request_drop(q);
}

/* ---- start ---- */

bool gw_intake_prompt(const struct gw_service *s, enum gw_chat_request_kind kind,
                      struct gw_prompt *ret)
{
    const char *aliases = gw_service_aliases(s);
    *ret = (struct gw_prompt){
        .model = s->model,
        .aliases = alloc_text(ALLOC_REQUEST, aliases, strlen(aliases)), /* a reload may free it */
        .kind = kind,
        .limits = {.n_ctx = gw_dispatch_n_ctx(s->dispatch),
                   .n_vocab = gw_tokenizer_n_vocab(s->model->tokenizer),
                   .max_sequences = gw_dispatch_max_sequences(s->dispatch)},
    };
    return ret->aliases != NULL;
}

void gw_intake_start(struct gw_service *s, struct gw_exchange *x, enum gw_chat_request_kind kind)
{
    static const struct gw_job_kind intake = {intake_run, intake_finish, intake_done};
    struct intake *in = gw_job_new(sizeof *in, &intake, s, x);
    if (!in)
        return;
    if (!gw_intake_prompt(s, kind, &in->prompt)) {
        alloc_free(in);
        gw_exchange_fail_text(x, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
        return;
    }
    gw_job_start(&in->job);
}

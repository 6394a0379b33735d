#include "gw_request.h"

#include <math.h>
#include <string.h>

#include "alloc.h"
#include "gw_tokenizer.h"
#include "rng.h"

enum {
    FIRST_TOKENS = 64
};

#define LEAST_REPEAT 1e-30f /* the worker computes with nothing smaller */

static void id_make(char id[GW_REQUEST_ID_BYTES])
{
    static const char letters[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    uint8_t bytes[GW_REQUEST_ID_BYTES];
    rng_system(bytes, sizeof bytes);
    for (size_t i = 0; i < GW_REQUEST_ID_BYTES - 1; i++)
        id[i] = letters[bytes[i] % 62];
    id[GW_REQUEST_ID_BYTES - 1] = '\0';
}

static uint64_t seed_make(int64_t asked)
{
    uint64_t random;
    if (asked >= 0)
        return (uint64_t)asked;
    rng_system(&random, sizeof random);
    return random >> 11; /* 53 bits: exact as a JSON number */
}

static void ends_set(struct gw_request *q, const struct gw_tokenizer *tokenizer)
{
    const uint32_t *ids;
    size_t n = gw_tokenizer_end_ids(tokenizer, &ids);
    for (size_t i = 0; i < n && i < PROTO_MAX_END; i++)
        q->end_ids[q->n_end++] = ids[i];
}

struct gw_request *gw_request_new(struct gw_chat_request *ask, struct gw_request_prompt *prompts,
                                  unsigned n_prompts, const struct gw_tokenizer *tokenizer)
{
    unsigned n = (unsigned)ask->n;
    struct gw_request *q = alloc_zero(ALLOC_REQUEST, 1, sizeof *q);
    struct gw_request_choice *choices =
        alloc_zero(ALLOC_REQUEST, (size_t)n * n_prompts, sizeof *choices);
    if (!q || !choices) {
        alloc_free(q);
        alloc_free(choices);
        return NULL;
    }
    q->references = 1;
    q->ask = *ask;
    *ask = (struct gw_chat_request){0};
    memcpy(q->prompts, prompts, n_prompts * sizeof *prompts);
    memset(prompts, 0, n_prompts * sizeof *prompts);
    q->n_prompts = n_prompts;
    q->choices = choices;
    q->n_choices = n * n_prompts;
    q->seed = seed_make(q->ask.seed);
    q->lp_stride =
        sizeof(struct gw_request_lp) + (size_t)q->ask.top_logprobs * sizeof(struct proto_top);
    id_make(q->id);
    ends_set(q, tokenizer);
    list_init(&q->listeners);
    list_init(&q->ticket.link);
    for (unsigned i = 0; i < q->n_choices; i++) {
        struct gw_request_choice *c = &choices[i];
        c->request = q;
        c->index = i;
        c->prompt = i / n;
        c->seed = (q->seed + i % n) & INT64_MAX;
        list_init(&c->link);
    }
    return q;
}

struct gw_request *gw_request_keep(struct gw_request *q)
{
    q->references++;
    return q;
}

void gw_request_drop(struct gw_request *q)
{
    if (!q || --q->references > 0)
        return;
    for (unsigned i = 0; i < q->n_choices; i++) {
        alloc_free(q->choices[i].ids);
        alloc_free(q->choices[i].lps);
        alloc_free(q->choices[i].prompt_lps);
    }
    for (unsigned i = 0; i < q->n_prompts; i++)
        alloc_free(q->prompts[i].ids);
    alloc_free(q->choices);
    gw_chat_request_done(&q->ask);
    alloc_free(q);
}

/* ---- the run ---- */

static bool wants_prompt_lps(const struct gw_request *q)
{
    return q->ask.echo && q->ask.logprobs;
}

static uint32_t run_flags(const struct gw_request_choice *c)
{
    const struct gw_request *q = c->request;
    uint32_t flags = 0;
    if (q->ask.logprobs)
        flags |= PROTO_RUN_LOGPROBS;
    if (wants_prompt_lps(q) && c->n_prompt_lps < q->prompts[c->prompt].n)
        flags |= PROTO_RUN_PROMPT_LOGPROBS;
    if (!q->ask.cache_prompt)
        flags |= PROTO_RUN_NO_CACHE;
    return flags;
}

static void run_sampling(const struct gw_chat_request *ask, struct proto_run *run)
{
    run->temperature = ask->top_p > 0 ? (float)ask->temperature : 0;
    run->top_p = ask->top_p > 0 ? (float)ask->top_p : 1;
    run->min_p = (float)ask->min_p;
    run->top_k = ask->top_k < INT32_MAX ? (int32_t)ask->top_k : INT32_MAX;
    run->presence = (float)ask->presence_penalty;
    run->frequency = (float)ask->frequency_penalty;
    run->repeat = ask->repeat_penalty > LEAST_REPEAT ? (float)ask->repeat_penalty : LEAST_REPEAT;
    run->repeat_last_n = (int32_t)ask->repeat_last_n;
    run->priority = (int8_t)ask->priority;
    run->n_top = ask->logprobs ? (uint8_t)ask->top_logprobs : 0;
    run->session = proto_text_of(ask->session ? ask->session : "");
}

bool gw_request_run(const struct gw_request_choice *c, struct buf *scratch, struct proto_run *ret)
{
    const struct gw_request *q = c->request;
    const struct gw_request_prompt *prompt = &q->prompts[c->prompt];
    bool ends = !q->ask.ignore_eos;
    size_t bias_bytes = (q->ask.n_bias + (ends ? 0u : q->n_end)) * sizeof(struct proto_bias);
    struct proto_run run = {.n_tokens = prompt->n + c->n_ids,
                            .n_prompt = prompt->n,
                            .first_index = c->n_ids,
                            .seed = c->seed,
                            .flags = run_flags(c),
                            .trace = proto_text_of(q->client_id)};
    buf_clear(scratch);
    buf_append(scratch, q->ask.bias, q->ask.n_bias * sizeof(struct proto_bias));
    for (unsigned i = 0; !ends && i < q->n_end; i++) {
        struct proto_bias never = {q->end_ids[i], -INFINITY};
        buf_append(scratch, &never, sizeof never);
    }
    buf_append(scratch, prompt->ids, prompt->n * sizeof *prompt->ids);
    buf_append(scratch, c->ids, c->n_ids * sizeof *c->ids);
    if (buf_failed(scratch))
        return false;
    run.bias = (const struct proto_bias *)(const void *)scratch->data;
    run.n_bias = (uint16_t)(bias_bytes / sizeof(struct proto_bias));
    run.tokens = (const uint32_t *)(const void *)(scratch->data + bias_bytes);
    /* More than fits is cut to what fits. */
    run.max_new = q->ask.max_new < 0 || q->ask.max_new >= PROTO_MAX_NEW_ALL
                      ? PROTO_MAX_NEW_ALL
                      : (uint32_t)q->ask.max_new;
    run_sampling(&q->ask, &run);
    if (ends) {
        run.n_end = q->n_end;
        memcpy(run.end, q->end_ids, q->n_end * sizeof *run.end);
    }
    *ret = run;
    return true;
}

/* ---- what comes back ---- */

static void lp_store(const struct gw_request *q, uint8_t *records, uint32_t i,
                     const struct proto_token *t)
{
    struct gw_request_lp *lp = (struct gw_request_lp *)(void *)(records + i * q->lp_stride);
    uint32_t most = (uint32_t)q->ask.top_logprobs;
    lp->logprob = t->logprob;
    lp->n_top = t->n_top < most ? t->n_top : most;
    memcpy(lp->top, t->top, lp->n_top * sizeof *lp->top);
}

const struct gw_request_lp *gw_request_lp_at(const struct gw_request *q, const uint8_t *records,
                                             uint32_t i)
{
    return (const struct gw_request_lp *)(const void *)(records + i * q->lp_stride);
}

static bool answer_grow(struct gw_request_choice *c)
{
    const struct gw_request *q = c->request;
    if (c->n_ids < c->capacity)
        return true;
    uint32_t capacity = c->capacity > 0 ? c->capacity * 2 : FIRST_TOKENS;
    uint32_t *ids = alloc_resize(ALLOC_REQUEST, c->ids, capacity * sizeof *ids);
    if (!ids)
        return false;
    c->ids = ids;
    if (q->ask.logprobs) {
        uint8_t *lps = alloc_resize(ALLOC_REQUEST, c->lps, capacity * q->lp_stride);
        if (!lps)
            return false;
        c->lps = lps;
    }
    c->capacity = capacity;
    return true;
}

static bool prompt_tokens_keep(struct gw_request_choice *c, const struct proto_tokens *m)
{
    const struct gw_request *q = c->request;
    uint32_t n_prompt = q->prompts[c->prompt].n;
    if (!wants_prompt_lps(q) || m->first_index > c->n_prompt_lps ||
        m->n > n_prompt - m->first_index)
        return false;
    if (!c->prompt_lps)
        c->prompt_lps = alloc_zero(ALLOC_REQUEST, n_prompt, q->lp_stride);
    if (!c->prompt_lps)
        return false;
    for (uint32_t i = 0; i < m->n; i++) {
        if (m->first_index + i < c->n_prompt_lps)
            continue;
        lp_store(q, c->prompt_lps, c->n_prompt_lps++, &m->tokens[i]);
    }
    return true;
}

bool gw_request_on_tokens(struct gw_request_choice *c, const struct proto_tokens *m,
                          uint64_t now_ns)
{
    if ((m->tokens[0].flags & PROTO_TOKEN_PROMPT) != 0)
        return prompt_tokens_keep(c, m);
    if (m->first_index > c->n_ids)
        return false;
    for (uint32_t i = c->n_ids - m->first_index; i < m->n; i++) {
        if (!answer_grow(c))
            return false;
        if (c->request->ask.logprobs)
            lp_store(c->request, c->lps, c->n_ids, &m->tokens[i]);
        c->ids[c->n_ids++] = m->tokens[i].id;
        gw_resume_on_token(&c->resume);
    }
    if (c->first_ns == 0)
        c->first_ns = now_ns;
    c->last_ns = now_ns;
    c->busy_since_ns = 0;
    return true;
}

void gw_request_on_progress(struct gw_request_choice *c, const struct proto_progress *m)
{
    if (c->cached_known)
        return;
    c->cached_known = true;
    c->usage.cached = m->cached;
}

void gw_request_on_done(struct gw_request_choice *c, const struct proto_done *m)
{
    const struct proto_usage *u = &m->usage;
    if (!c->cached_known)
        c->usage.cached = u->cached;
    c->cached_known = true;
    c->usage.hits_vram += u->hits_vram;
    c->usage.hits_ram += u->hits_ram;
    c->usage.misses += u->misses;
    c->usage.ssd_bytes += u->ssd_bytes;
    c->usage.queue_ms += u->queue_ms;
    c->usage.prefill_ms += u->prefill_ms;
    c->usage.decode_ms += u->decode_ms;
    c->usage.preempted += u->preempted;
    c->finish = (enum proto_finish)m->finish;
}

void gw_request_notify(struct gw_request_choice *c)
{
    list_each_safe(it, &c->request->listeners) {
        struct gw_request_listener *l = list_entry(it, struct gw_request_listener, link);
        l->changed(l->user, c);
    }
}

bool gw_request_is_end(const struct gw_request *q, uint32_t id)
{
    for (unsigned i = 0; i < q->n_end; i++)
        if (q->end_ids[i] == id)
            return !q->ask.ignore_eos;
    return false;
}

bool gw_request_over(const struct gw_request *q)
{
    for (unsigned i = 0; i < q->n_choices; i++)
        if (q->choices[i].state != GW_REQUEST_DONE && q->choices[i].state != GW_REQUEST_FAILED)
            return false;
    return true;
}

const struct gw_request_choice *gw_request_failed(const struct gw_request *q)
{
    for (unsigned i = 0; i < q->n_choices; i++)
        if (q->choices[i].state == GW_REQUEST_FAILED)
            return &q->choices[i];
    return NULL;
}

size_t gw_request_bytes(const struct gw_request *q)
{
    size_t bytes = sizeof *q + q->n_choices * sizeof *q->choices;
    for (unsigned i = 0; i < q->n_prompts; i++)
        bytes += q->prompts[i].n * sizeof(uint32_t);
    for (unsigned i = 0; i < q->n_choices; i++) {
        const struct gw_request_choice *c = &q->choices[i];
        bytes += c->capacity * (sizeof(uint32_t) + (c->lps ? q->lp_stride : 0));
        if (c->prompt_lps)
            bytes += q->prompts[c->prompt].n * q->lp_stride;
    }
    return bytes;
}

#include "engine_rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "alloc.h"

static void on_event(void *context)
{
    sem_post(&((struct engine_rig *)context)->events);
}

static void die(const char *what, const char *text)
{
    fprintf(stderr, "engine_rig: %s: %s\n", what, text);
    abort();
}

struct engine_config engine_rig_config(const char *path)
{
    return (struct engine_config){.model_path = path,
                                  .threads = 2,
                                  .max_sequences = 32,
                                  .prefill_chunk = 512,
                                  .max_waiting = ENGINE_RIG_MAX,
                                  .ssd_depth = 8,
                                  .ticks = ticks_real()};
}

struct proto_run engine_rig_run(const uint32_t *tokens, uint32_t n)
{
    return (struct proto_run){.tokens = tokens,
                              .n_tokens = n,
                              .n_prompt = n,
                              .max_new = 32,
                              .top_p = 1.0f,
                              .repeat = 1.0f,
                              .session = proto_text_of("")};
}

void engine_rig_start(struct engine_rig *rig, const struct engine_config *config)
{
    struct err e = {.code = ERR_OK};
    memset(rig, 0, sizeof(*rig));
    rig->config = *config;
    rig->config.notify = on_event;
    rig->config.notify_context = rig;
    sem_init(&rig->events, 0, 0);
    if (engine_start(&rig->config, &rig->engine, &e) != ERR_OK)
        die("start", e.text);
}

void engine_rig_forget(struct engine_rig *rig)
{
    for (uint32_t i = 0; i < rig->n; i++) {
        alloc_free(rig->answers[i].prompt);
        alloc_free(rig->answers[i].tokens);
    }
    memset(rig->answers, 0, sizeof(rig->answers));
    rig->n = 0;
}

void engine_rig_stop(struct engine_rig *rig)
{
    engine_stop(rig->engine);
    engine_rig_forget(rig);
    sem_destroy(&rig->events);
}

static void keep(struct proto_token **list, uint32_t *n, const struct proto_token *token)
{
    struct proto_token *grown = alloc_resize(ALLOC_MISC, *list, (*n + 1) * sizeof(*grown));
    if (grown == NULL)
        die("keep", "no memory");
    grown[(*n)++] = *token;
    *list = grown;
}

static void take_tokens(struct engine_rig_answer *a, const struct engine_event *event)
{
    const bool prompt = event->tokens.tokens[0].flags & PROTO_TOKEN_PROMPT;
    if (a->n_tokens == 0 && !prompt && event->tokens.first_index != 0)
        ; /* a resumed answer begins where it begins */
    else if (a->n_prompt + a->n_tokens > 0 && prompt && event->tokens.first_index != a->n_prompt)
        die("tokens", "prompt tokens do not follow on");
    for (uint16_t i = 0; i < event->tokens.n; i++)
        if (prompt)
            keep(&a->prompt, &a->n_prompt, &event->tokens.tokens[i]);
        else
            keep(&a->tokens, &a->n_tokens, &event->tokens.tokens[i]);
}

static void take(struct engine_rig *rig, const struct engine_event *event)
{
    if (event->kind == ENGINE_STATE)
        return;
    struct engine_rig_answer *a = &rig->answers[event->handle - 1];
    if (a->ended)
        die("event", "something came after the last event");
    a->ended = event->kind == ENGINE_DONE || event->kind == ENGINE_ERROR;
    a->failed = event->kind == ENGINE_ERROR;
    if (event->kind == ENGINE_TOKENS)
        take_tokens(a, event);
    else if (event->kind == ENGINE_DONE)
        a->done = event->done;
    else if (event->kind == ENGINE_ERROR)
        a->error = event->error;
    else if (a->n_progress++, true)
        a->progress = event->progress;
}

void engine_rig_pump(struct engine_rig *rig)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 60;
    if (sem_timedwait(&rig->events, &until) != 0)
        die("pump", "no event for 60 s");
    struct engine_event *event;
    while ((event = engine_next_event(rig->engine)) != NULL) {
        take(rig, event);
        engine_event_return(rig->engine, event);
    }
}

enum proto_state engine_rig_wait_loaded(struct engine_rig *rig)
{
    struct engine_facts facts;
    for (;;) {
        engine_get_facts(rig->engine, &facts);
        if (facts.state != PROTO_LOADING)
            return facts.state;
        engine_rig_pump(rig);
    }
}

uint32_t engine_rig_submit(struct engine_rig *rig, const struct proto_run *run)
{
    const uint32_t i = rig->n++;
    struct engine_request *request = engine_request_new(i + 1, run, "rig");
    if (request == NULL)
        die("submit", "no memory");
    if (engine_submit(rig->engine, request, &rig->answers[i].error) != ERR_OK) {
        rig->answers[i].ended = rig->answers[i].failed = true;
        engine_request_free(request);
    }
    return i;
}

void engine_rig_cancel(struct engine_rig *rig, uint32_t index)
{
    engine_cancel(rig->engine, index + 1);
}

void engine_rig_finish(struct engine_rig *rig)
{
    for (uint32_t i = 0; i < rig->n; i++)
        while (!rig->answers[i].ended)
            engine_rig_pump(rig);
}

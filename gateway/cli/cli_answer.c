#include "cli_answer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli_http.h"
#include "cli_options.h"
#include "cli_server.h"
#include "cli_sse.h"
#include "ticks.h"

/* A stream is never silent for long: the server sends comments. */
enum {
    SILENCE_MS = 180000
};

struct stream {
    struct cli_sse sse;
    struct cli_answer *answer;
    cli_answer_text_fn *on_text;
    void *context;
    uint64_t start_ns;
    bool done;
};

json_t *cli_answer_body(const struct cli_options *o, json_t *messages, const char *prompt)
{
    json_t *body = json_pack("{s:b, s:{s:b}}", "stream", 1, "stream_options", "include_usage", 1);
    int bad = body == NULL;
    if (bad == 0 && messages != NULL)
        bad |= json_object_set(body, "messages", messages);
    else if (bad == 0)
        bad |= json_object_set_new(body, "prompt", json_string(prompt));
    /* Greedy unless asked: the same question gives the same answer. A seed alone means sampling. */
    double temperature = !isnan(o->temperature)     ? o->temperature
                         : o->seed != CLI_NOT_GIVEN ? 1.0
                                                    : 0.0;
    if (bad == 0)
        bad |= json_object_set_new(body, "temperature", json_real(temperature));
    if (bad == 0 && o->seed != CLI_NOT_GIVEN)
        bad |= json_object_set_new(body, "seed", json_integer(o->seed));
    if (bad == 0 && o->max_tokens != CLI_NOT_GIVEN)
        bad |= json_object_set_new(body, "max_tokens", json_integer(o->max_tokens));
    else if (bad == 0 && messages == NULL) /* the API's default for completions is 16 */
        bad |= json_object_set_new(body, "max_tokens", json_integer(-1));
    if (bad != 0) {
        json_decref(body);
        return NULL;
    }
    return body;
}

static void text_emit(struct stream *s, const json_t *value, bool is_reasoning)
{
    size_t n = json_string_length(value);
    if (n == 0)
        return;
    if (s->answer->first_ns == 0)
        s->answer->first_ns = ticks_ns(ticks_real()) - s->start_ns;
    s->on_text(s->context, json_string_value(value), n, is_reasoning);
}

static uint64_t count_of(const json_t *object, const char *key)
{
    json_int_t n = json_integer_value(json_object_get(object, key));
    return n > 0 ? (uint64_t)n : 0;
}

static void figures_read(struct cli_answer *a, const json_t *root)
{
    const json_t *usage = json_object_get(root, "usage");
    if (json_is_object(usage)) {
        a->prompt_tokens = count_of(usage, "prompt_tokens");
        a->tokens = count_of(usage, "completion_tokens");
        a->resumed = (unsigned)count_of(json_object_get(usage, "islet"), "resumed");
    }
}

static void choice_read(struct stream *s, const json_t *choice)
{
    const json_t *delta = json_object_get(choice, "delta");
    const char *finish = json_string_value(json_object_get(choice, "finish_reason"));
    text_emit(s, json_object_get(delta, "reasoning_content"), true);
    text_emit(s, json_object_get(delta, "content"), false);
    text_emit(s, json_object_get(choice, "text"), false);
    if (finish != NULL)
        snprintf(s->answer->finish, sizeof s->answer->finish, "%s", finish);
}

static enum err_code on_event(void *context, const char *data, size_t n, struct err *e)
{
    struct stream *s = context;
    enum err_code code = ERR_OK;
    if (strcmp(data, "[DONE]") == 0) {
        s->done = true;
        return ERR_OK;
    }
    json_t *root = json_loadb(data, n, JSON_ALLOW_NUL, NULL);
    if (root == NULL)
        return err_set(e, ERR_PROTOCOL, "the server sent an event that is not JSON");
    const json_t *error = json_object_get(root, "error");
    if (error != NULL) {
        const char *text = json_string_value(json_object_get(error, "message"));
        code = err_set(e, ERR_IO, "%s", text != NULL ? text : "the server ended the answer");
    } else {
        choice_read(s, json_array_get(json_object_get(root, "choices"), 0));
        figures_read(s->answer, root);
    }
    json_decref(root);
    return code;
}

static enum err_code on_data(void *context, const char *data, size_t n, struct err *e)
{
    struct stream *s = context;
    return cli_sse_feed(&s->sse, data, n, e);
}

enum err_code cli_answer_ask(const struct cli_server *server, json_t *body, int stop_fd,
                             cli_answer_text_fn *on_text, void *context, struct cli_answer *ret,
                             struct err *e)
{
    *ret = (struct cli_answer){0};
    char *text = json_dumps(body, JSON_COMPACT);
    if (text == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the request");
    struct stream s = {
        .answer = ret, .on_text = on_text, .context = context, .start_ns = ticks_ns(ticks_real())};
    bool is_chat = json_object_get(body, "messages") != NULL;
    struct cli_http_call call = {.method = "POST",
                                 .path = is_chat ? "/v1/chat/completions" : "/v1/completions",
                                 .body = text,
                                 .body_size = strlen(text),
                                 .stop_fd = stop_fd,
                                 .idle_ms = SILENCE_MS,
                                 .on_data = on_data,
                                 .context = &s};
    struct cli_http_response response;
    cli_sse_init(&s.sse, on_event, &s);
    enum err_code code = cli_http_send(server, &call, &response, e);
    if (code == ERR_OK && response.status != 200)
        code = cli_http_error(server, &response, e);
    else if (code == ERR_OK && !s.done)
        code = err_set(e, ERR_PROTOCOL, "the answer ended without [DONE]");
    ret->total_ns = ticks_ns(ticks_real()) - s.start_ns;
    snprintf(ret->seed, sizeof ret->seed, "%s", response.seed);
    cli_http_response_done(&response);
    cli_sse_done(&s.sse);
    free(text);
    return code;
}

void cli_answer_figures(const struct cli_answer *a, char *ret, size_t n)
{
    char resumed[48] = "";
    double seconds = (double)a->total_ns / 1e9;
    if (a->resumed > 0)
        snprintf(resumed, sizeof resumed, ", resumed %u time%s", a->resumed,
                 a->resumed == 1 ? "" : "s");
    snprintf(ret, n,
             "%llu prompt + %llu answer tokens in %.0f ms (%.0f tok/s), first text after %.0f ms, "
             "%s%s%s%s",
             (unsigned long long)a->prompt_tokens, (unsigned long long)a->tokens, seconds * 1e3,
             seconds > 0 ? (double)a->tokens / seconds : 0, (double)a->first_ns / 1e6,
             a->finish[0] != '\0' ? a->finish : "unfinished", a->seed[0] != '\0' ? ", seed " : "",
             a->seed, resumed);
}

#include "gw_chat_request.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "gw_chat_field.h"
#include "gw_json_value.h"

/* ---- the table ---- */

#define CHAT       GW_CHAT_REQUEST_CHAT
#define COMPLETION GW_CHAT_REQUEST_COMPLETION
#define BOTH       (CHAT | COMPLETION)
#define AT(member) offsetof(struct gw_chat_request, member)
#define BOOL(name_, kinds_, member, absent_)                                             \
    {                                                                                    \
        .name = name_, .kinds = kinds_, .type = GW_CHAT_REQUEST_BOOL, .absent = absent_, \
        .offset = AT(member)                                                             \
    }
#define INT(name_, kinds_, member, min_, max_, absent_)                                        \
    {                                                                                          \
        .name = name_, .kinds = kinds_, .type = GW_CHAT_REQUEST_INT, .min = min_, .max = max_, \
        .absent = absent_, .offset = AT(member)                                                \
    }
#define NUMBER(name_, member, min_, max_, absent_)                                              \
    {                                                                                           \
        .name = name_, .kinds = BOTH, .type = GW_CHAT_REQUEST_NUMBER, .min = min_, .max = max_, \
        .absent = absent_, .offset = AT(member)                                                 \
    }
#define STRING(name_, member, max_)                                                \
    {                                                                              \
        .name = name_, .kinds = BOTH, .type = GW_CHAT_REQUEST_STRING, .max = max_, \
        .offset = AT(member)                                                       \
    }
#define CHOICE(name_, member, absent_, words_)                                           \
    {                                                                                    \
        .name = name_, .kinds = CHAT, .type = GW_CHAT_REQUEST_CHOICE, .absent = absent_, \
        .offset = AT(member), .words = words_                                            \
    }
#define SPECIAL(name_, kinds_, parse_)                                                   \
    {                                                                                    \
        .name = name_, .kinds = kinds_, .type = GW_CHAT_REQUEST_SPECIAL, .parse = parse_ \
    }
#define REFUSED(name_, kinds_, words_)                                                   \
    {                                                                                    \
        .name = name_, .kinds = kinds_, .type = GW_CHAT_REQUEST_REFUSED, .words = words_ \
    }

static const struct gw_chat_request_field fields[] = {
    STRING("model", model, 256),
    SPECIAL("messages", CHAT, gw_chat_field_messages),
    SPECIAL("prompt", COMPLETION, gw_chat_field_prompt),
    INT("max_completion_tokens", BOTH, max_completion_tokens, -1, 9223372036854775807.0,
        (double)INT64_MIN),
    INT("max_tokens", BOTH, max_tokens, -1, 9223372036854775807.0, (double)INT64_MIN),
    INT("n_predict", BOTH, n_predict, -1, 9223372036854775807.0, (double)INT64_MIN),
    NUMBER("temperature", temperature, 0, 10, 1),
    NUMBER("top_p", top_p, 0, 1, 1),
    INT("top_k", BOTH, top_k, -1, 9223372036854775807.0, 0),
    NUMBER("min_p", min_p, 0, 1, 0),
    NUMBER("presence_penalty", presence_penalty, -2, 2, 0),
    NUMBER("frequency_penalty", frequency_penalty, -2, 2, 0),
    {.name = "repeat_penalty",
     .kinds = BOTH,
     .type = GW_CHAT_REQUEST_NUMBER,
     .open_min = true,
     .max = 10,
     .absent = 1,
     .offset = AT(repeat_penalty)},
    {.name = "repeat_last_n",
     .kinds = BOTH,
     .type = GW_CHAT_REQUEST_INT,
     .context_max = true,
     .min = -1,
     .absent = 64,
     .offset = AT(repeat_last_n)},
    INT("seed", BOTH, seed, -1, 9223372036854775807.0, -1),
    INT("n", BOTH, n, 1, GW_CHAT_REQUEST_MAX_N, 1),
    SPECIAL("stop", BOTH, gw_chat_field_stop),
    BOOL("stream", BOTH, stream, false),
    SPECIAL("stream_options", BOTH, gw_chat_field_stream_options),
    BOOL("logprobs", CHAT, logprobs, false),
    INT("logprobs", COMPLETION, n_logprobs, 0, PROTO_MAX_TOP, -1),
    INT("top_logprobs", CHAT, top_logprobs, 0, PROTO_MAX_TOP, 0),
    SPECIAL("logit_bias", BOTH, gw_chat_field_bias),
    BOOL("ignore_eos", BOTH, ignore_eos, false),
    STRING("user", user, 512),
    STRING("safety_identifier", safety_identifier, 512),
    STRING("prompt_cache_key", session, 512),
    CHOICE("reasoning_effort", reasoning_effort, GW_CHAT_REQUEST_EFFORT_ABSENT,
           "none minimal low medium high xhigh max"),
    SPECIAL("chat_template_kwargs", CHAT, gw_chat_field_kwargs),
    CHOICE("reasoning_format", reasoning_format, GW_CHAT_REQUEST_FORMAT_AUTO, "auto none deepseek"),
    BOOL("add_generation_prompt", CHAT, add_generation_prompt, true),
    BOOL("continue_final_message", CHAT, continue_final_message, true),
    BOOL("cache_prompt", BOTH, cache_prompt, true),
    INT("priority", BOTH, priority, -100, 100, 0),
    INT("sse_ping_interval", BOTH, sse_ping_interval_s, -1, 300, (double)INT64_MIN),
    BOOL("return_tokens", BOTH, return_tokens, false),
    BOOL("timings_per_token", BOTH, timings_per_token, false),
    BOOL("echo", COMPLETION, echo, false),
    REFUSED("echo", CHAT, "false"),
    REFUSED("suffix", COMPLETION, "\"\""),
    REFUSED("tools", BOTH, "[]"),
    REFUSED("functions", BOTH, "[]"),
    REFUSED("tool_choice", BOTH, "\"auto\" \"none\""),
    REFUSED("function_call", BOTH, "\"auto\" \"none\""),
    REFUSED("response_format", BOTH, "{\"type\":\"text\"}"),
    REFUSED("grammar", BOTH, "\"\""),
    REFUSED("json_schema", BOTH, ""),
    REFUSED("modalities", BOTH, "[\"text\"]"),
    REFUSED("audio", BOTH, ""),
    REFUSED("web_search_options", BOTH, ""),
    REFUSED("best_of", BOTH, "1"),
    REFUSED("typical_p", BOTH, "1"),
    REFUSED("top_n_sigma", BOTH, "<=0"),
    REFUSED("mirostat", BOTH, "0"),
    REFUSED("dry_multiplier", BOTH, "0"),
    REFUSED("xtc_probability", BOTH, "0"),
    REFUSED("dynatemp_range", BOTH, "0"),
    REFUSED("adaptive_target", BOTH, "<0"),
    REFUSED("lora", BOTH, "[]"),
    REFUSED("min_keep", BOTH, "0 1"),
    REFUSED("n_probs", BOTH, "0"),
    REFUSED("post_sampling_probs", BOTH, "false"),
    REFUSED("use_beam_search", BOTH, "false"),
    REFUSED("min_tokens", BOTH, "0"),
    REFUSED("stop_token_ids", BOTH, "[]"),
    REFUSED("n_indent", BOTH, "0"),
    REFUSED("t_max_predict_ms", BOTH, "0 -1"),
};

/* Other names of fields. If both stand in a body, the field's own name wins. */
static const struct {
    const char *alias, *name;
} aliases[] = {{"repetition_penalty", "repeat_penalty"}};

const struct gw_chat_request_field *gw_chat_request_fields(size_t *ret_n)
{
    *ret_n = sizeof fields / sizeof *fields;
    return fields;
}

static const struct gw_chat_request_field *field_find(const char *name, unsigned kind)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if ((fields[i].kinds & kind) != 0 && strcmp(fields[i].name, name) == 0)
            return &fields[i];
    return NULL;
}

static const char *alias_of(const char *name)
{
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++)
        if (strcmp(aliases[i].alias, name) == 0)
            return aliases[i].name;
    return name;
}

/* The i-th of words separated by spaces; n 0: there is none. */
static struct gw_http_text word_at(const char *words, int i)
{
    while (i-- > 0) {
        words += strcspn(words, " ");
        words += strspn(words, " ");
    }
    return (struct gw_http_text){words, strcspn(words, " ")};
}

const char *gw_chat_request_effort_name(int effort)
{
    static const char *const names[] = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};
    return effort >= 0 && (size_t)effort < sizeof names / sizeof *names ? names[effort] : "none";
}

/* ---- plain fields ---- */

static bool bool_parse(struct gw_chat_request_parser *p, const struct gw_chat_request_field *f,
                       const char *name, const json_t *value, bool *ret)
{
    (void)f;
    if (!json_is_boolean(value))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, name,
                              "%s must be true or false, not %s", name, gw_json_value_type(value));
    *ret = json_is_true(value);
    return true;
}

static bool range_check(struct gw_chat_request_parser *p, const struct gw_chat_request_field *f,
                        const char *name, double value, double max)
{
    bool inside = value <= max && (f->open_min ? value > f->min : value >= f->min);
    if (inside)
        return true;
    return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, name,
                          "%s is %.17g; it must be %s%.17g and at most %.17g", name, value,
                          f->open_min ? "more than " : "at least ", f->min, max);
}

static bool int_parse(struct gw_chat_request_parser *p, const struct gw_chat_request_field *f,
                      const char *name, const json_t *value, int64_t *ret)
{
    double max = f->context_max ? p->limits->n_ctx : f->max;
    if (f->offset == AT(n) && p->limits->max_sequences < max)
        max = p->limits->max_sequences;
    if (!gw_json_value_int(value, ret)) {
        if (json_is_real(value) && floor(json_real_value(value)) == json_real_value(value))
            return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, name,
                                  "%s is %.17g; it must be %.17g to %.17g", name,
                                  json_real_value(value), f->min, max);
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, name,
                              "%s must be a whole number, not %s", name, gw_json_value_type(value));
    }
    return range_check(p, f, name, (double)*ret, max);
}

static bool number_parse(struct gw_chat_request_parser *p, const struct gw_chat_request_field *f,
                         const char *name, const json_t *value, double *ret)
{
    if (!json_is_number(value))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, name,
                              "%s must be a number, not %s", name, gw_json_value_type(value));
    *ret = json_number_value(value);
    return range_check(p, f, name, *ret, f->max);
}

static bool string_parse(struct gw_chat_request_parser *p, const struct gw_chat_request_field *f,
                         const char *name, const json_t *value, char **ret)
{
    if (!json_is_string(value))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, name,
                              "%s must be a string, not %s", name, gw_json_value_type(value));
    size_t n = json_string_length(value);
    if ((double)n > f->max)
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, name,
                              "%s has %zu bytes; at most %.0f are allowed", name, n, f->max);
    if (memchr(json_string_value(value), '\0', n))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, name, "%s holds a U+0000", name);
    alloc_free(*ret);
    *ret = alloc_text(ALLOC_REQUEST, json_string_value(value), n);
    if (!*ret)
        return gw_refusal_set(p->refusal, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
    return true;
}

static bool choice_parse(struct gw_chat_request_parser *p, const struct gw_chat_request_field *f,
                         const char *name, const json_t *value, int *ret)
{
    if (!json_is_string(value))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, name,
                              "%s must be a string, not %s", name, gw_json_value_type(value));
    size_t n = json_string_length(value);
    for (int i = 0;; i++) {
        struct gw_http_text word = word_at(f->words, i);
        if (word.n == 0)
            break;
        if (word.n == n && memcmp(word.p, json_string_value(value), n) == 0) {
            *ret = i;
            return true;
        }
    }
    return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, name, "%s must be one of: %s", name,
                          f->words);
}

/* Equal, where a null member of an object is no member. */
static bool same(const json_t *neutral, const json_t *value)
{
    const char *key;
    json_t *one;
    size_t n = 0;
    if (!json_is_object(neutral) || !json_is_object(value))
        return json_equal(neutral, value);
    json_object_foreach((json_t *)(uintptr_t)value, key, one)
    {
        if (json_is_null(one))
            continue;
        n++;
        if (!json_equal(json_object_get(neutral, key), one))
            return false;
    }
    return n == json_object_size(neutral);
}

static bool is_neutral(const struct gw_chat_request_field *f, const json_t *value)
{
    if (f->words[0] == '<')
        return json_is_number(value) &&
               (f->words[1] == '=' ? json_number_value(value) <= 0 : json_number_value(value) < 0);
    for (int i = 0;; i++) {
        struct gw_http_text word = word_at(f->words, i);
        if (word.n == 0)
            return false;
        json_t *neutral = json_loadb(word.p, word.n, JSON_DECODE_ANY, NULL);
        bool equal =
            json_is_number(neutral)
                ? json_is_number(value) && json_number_value(neutral) == json_number_value(value)
                : same(neutral, value);
        json_decref(neutral);
        if (equal)
            return true;
    }
}

static bool refused_parse(struct gw_chat_request_parser *p, const struct gw_chat_request_field *f,
                          const char *name, const json_t *value)
{
    if (is_neutral(f, value))
        return true;
    return gw_refusal_set(p->refusal, GW_ERROR_UNSUPPORTED_PARAMETER, name,
                          "%s is not supported, and leaving it out of account would change the "
                          "answer; %s%s",
                          name, f->words[0] != '\0' ? "accepted: absent, " : "leave it out",
                          f->words);
}

static bool field_parse(struct gw_chat_request_parser *p, const struct gw_chat_request_field *f,
                        const char *name, const json_t *value)
{
    void *member = (char *)p->q + f->offset;
    switch (f->type) {
    case GW_CHAT_REQUEST_BOOL:
        return bool_parse(p, f, name, value, member);
    case GW_CHAT_REQUEST_INT:
        return int_parse(p, f, name, value, member);
    case GW_CHAT_REQUEST_NUMBER:
        return number_parse(p, f, name, value, member);
    case GW_CHAT_REQUEST_STRING:
        return string_parse(p, f, name, value, member);
    case GW_CHAT_REQUEST_CHOICE:
        return choice_parse(p, f, name, value, member);
    case GW_CHAT_REQUEST_SPECIAL:
        return f->parse(p, value);
    case GW_CHAT_REQUEST_REFUSED:
        return refused_parse(p, f, name, value);
    }
    return true;
}

static void field_default(struct gw_chat_request *q, const struct gw_chat_request_field *f)
{
    void *member = (char *)q + f->offset;
    if (f->type == GW_CHAT_REQUEST_BOOL)
        *(bool *)member = f->absent != 0;
    else if (f->type == GW_CHAT_REQUEST_INT)
        *(int64_t *)member = (int64_t)f->absent;
    else if (f->type == GW_CHAT_REQUEST_NUMBER)
        *(double *)member = f->absent;
    else if (f->type == GW_CHAT_REQUEST_CHOICE)
        *(int *)member = (int)f->absent;
}

/* ---- the whole ---- */

/* Adds a name to x-islet-ignored if it may stand in a header. */
static void ignored_add(struct gw_chat_request *q, unsigned *n, const char *name)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.";
    size_t size = strlen(name), used = strlen(q->ignored);
    if (*n == GW_CHAT_REQUEST_MAX_IGNORED || size == 0 || size > 64 ||
        strspn(name, allowed) != size)
        return;
    snprintf(q->ignored + used, sizeof q->ignored - used, "%s%s", *n > 0 ? "," : "", name);
    (*n)++;
}

/* A U+0000 in any string of it; as deep as gw_json_in lets it be. */
static bool has_nul(const json_t *value)
{
    const char *key;
    size_t i;
    json_t *one;
    if (json_is_string(value))
        return gw_json_value_has_nul(value);
    json_array_foreach(value, i, one)
    {
        if (has_nul(one))
            return true;
    }
    json_object_foreach((json_t *)(uintptr_t)value, key, one)
    {
        if (has_nul(one))
            return true;
    }
    return false;
}

static bool members_parse(struct gw_chat_request_parser *p, const json_t *root)
{
    const char *name;
    json_t *value;
    unsigned n_ignored = 0;
    json_object_foreach((json_t *)(uintptr_t)root, name, value)
    {
        const char *own = alias_of(name);
        const struct gw_chat_request_field *f = field_find(own, p->q->kind);
        if (json_is_null(value))
            continue;
        if (!f && has_nul(value))
            return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, name, "%.100s holds a U+0000",
                                  name);
        if (!f)
            ignored_add(p->q, &n_ignored, name);
        else if (own != name && gw_json_value_present(json_object_get(root, own)))
            continue;
        else if (!field_parse(p, f, name, value))
            return false;
    }
    return true;
}

static bool together_check(struct gw_chat_request_parser *p)
{
    struct gw_chat_request *q = p->q;
    const int64_t lengths[] = {q->max_completion_tokens, q->max_tokens, q->n_predict};
    if (q->kind == CHAT && !q->messages)
        return gw_refusal_set(p->refusal, GW_ERROR_MISSING_FIELD, "messages",
                              "messages is missing: an array of messages is required");
    if (q->kind == COMPLETION && q->n_prompts == 0)
        return gw_refusal_set(p->refusal, GW_ERROR_MISSING_FIELD, "prompt",
                              "prompt is missing: a text or token ids are required");
    if (q->top_logprobs > 0 && !q->logprobs)
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, "top_logprobs",
                              "top_logprobs needs logprobs: true");
    q->max_new = q->kind == CHAT ? -1 : 16;
    for (size_t i = sizeof lengths / sizeof *lengths; i-- > 0;)
        if (lengths[i] != GW_CHAT_REQUEST_ABSENT)
            q->max_new = lengths[i];
    if (q->kind == COMPLETION && q->n_logprobs >= 0) {
        q->logprobs = true;
        q->top_logprobs = q->n_logprobs;
    }
    return true;
}

bool gw_chat_request_parse(const json_t *root, enum gw_chat_request_kind kind,
                           const struct gw_chat_request_limits *limits, struct gw_chat_request *ret,
                           struct gw_refusal *refusal)
{
    struct gw_chat_request q = {.kind = kind, .reasoning_effort = GW_CHAT_REQUEST_EFFORT_ABSENT};
    struct gw_chat_request_parser p = {&q, limits, refusal};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if ((fields[i].kinds & kind) != 0)
            field_default(&q, &fields[i]);
    if (!members_parse(&p, root) || !together_check(&p)) {
        gw_chat_request_done(&q);
        return false;
    }
    *ret = q;
    return true;
}

void gw_chat_request_done(struct gw_chat_request *q)
{
    alloc_free(q->model);
    alloc_free(q->user);
    alloc_free(q->safety_identifier);
    alloc_free(q->session);
    alloc_free(q->bias);
    for (unsigned i = 0; i < q->n_stops; i++)
        alloc_free((char *)(uintptr_t)q->stops[i].text);
    for (unsigned i = 0; i < q->n_prompts; i++) {
        alloc_free(q->prompts[i].text);
        alloc_free(q->prompts[i].ids);
    }
    json_decref(q->messages);
    json_decref(q->kwargs);
    *q = (struct gw_chat_request){0};
}

bool gw_chat_request_set_session(struct gw_chat_request *q, struct gw_http_text value)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-";
    if (value.n < 1 || value.n > 128)
        return true;
    for (size_t i = 0; i < value.n; i++)
        if (value.p[i] == '\0' || !strchr(allowed, value.p[i]))
            return true;
    alloc_free(q->session);
    q->session = alloc_text(ALLOC_REQUEST, value.p, value.n);
    return q->session != NULL;
}

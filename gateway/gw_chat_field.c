#include "gw_chat_field.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "gw_chat_messages.h"
#include "gw_json_value.h"

/* ---- stop, logit_bias ---- */

static bool stop_add(struct gw_chat_request_parser *p, const json_t *value, const char *param)
{
    if (!json_is_string(value))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, param,
                              "%s must be a string, not %s", param, gw_json_value_type(value));
    size_t n = json_string_length(value);
    if (n == 0)
        return true;
    if (n > 256)
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, param,
                              "%s has %zu bytes; a stop string has at most 256", param, n);
    if (memchr(json_string_value(value), '\0', n))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, param, "%s holds a U+0000",
                              param);
    char *text = alloc_text(ALLOC_REQUEST, json_string_value(value), n);
    if (!text)
        return gw_refusal_set(p->refusal, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
    p->q->stops[p->q->n_stops++] = (struct gw_stop_string){text, n};
    return true;
}

bool gw_chat_field_stop(struct gw_chat_request_parser *p, const json_t *value)
{
    char param[32];
    size_t i;
    json_t *one;
    if (json_is_string(value))
        return stop_add(p, value, "stop");
    if (!json_is_array(value))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, "stop",
                              "stop must be a string or an array of strings, not %s",
                              gw_json_value_type(value));
    if (json_array_size(value) > GW_CHAT_REQUEST_MAX_STOPS)
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, "stop",
                              "stop has %zu strings; at most %d are allowed",
                              json_array_size(value), GW_CHAT_REQUEST_MAX_STOPS);
    json_array_foreach(value, i, one)
    {
        snprintf(param, sizeof param, "stop[%zu]", i);
        if (!stop_add(p, one, param))
            return false;
    }
    return true;
}

static bool bias_add(struct gw_chat_request_parser *p, int64_t id, const json_t *value,
                     const char *param)
{
    bool never = json_is_false(value);
    if (!json_is_number(value) && !never)
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, param,
                              "%s must be a number or false, not %s", param,
                              gw_json_value_type(value));
    if (id < 0 || id >= p->limits->n_vocab)
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, param,
                              "%s: token id %lld is outside the vocabulary of %u", param,
                              (long long)id, p->limits->n_vocab);
    double bias = json_number_value(value);
    if (!(bias >= -100 && bias <= 100))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, param,
                              "%s is %.17g; a bias is -100 to 100", param, bias);
    p->q->bias[p->q->n_bias++] = (struct proto_bias){(uint32_t)id, never ? -INFINITY : (float)bias};
    return true;
}

/* "123" and nothing else. */
static bool decimal_id(const char *text, int64_t *ret)
{
    size_t n = strlen(text);
    int64_t value = 0;
    if (n == 0 || n > 10 || strspn(text, "0123456789") != n)
        return false;
    for (size_t i = 0; i < n; i++)
        value = value * 10 + (text[i] - '0');
    *ret = value;
    return true;
}

static bool bias_pair(struct gw_chat_request_parser *p, const json_t *pair, size_t i)
{
    char param[48];
    int64_t id;
    snprintf(param, sizeof param, "logit_bias[%zu]", i);
    if (!json_is_array(pair) || json_array_size(pair) != 2)
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, param,
                              "%s must be an array of a token id and a bias", param);
    if (!gw_json_value_int(json_array_get(pair, 0), &id))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, param,
                              "%s: the token must be given by its id", param);
    return bias_add(p, id, json_array_get(pair, 1), param);
}

bool gw_chat_field_bias(struct gw_chat_request_parser *p, const json_t *value)
{
    char param[160];
    const char *key;
    size_t i;
    json_t *one;
    int64_t id;
    size_t n = json_is_object(value) ? json_object_size(value) : json_array_size(value);
    if (!json_is_object(value) && !json_is_array(value))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, "logit_bias",
                              "logit_bias must be an object or an array, not %s",
                              gw_json_value_type(value));
    if (n > GW_CHAT_REQUEST_MAX_BIAS)
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, "logit_bias",
                              "logit_bias has %zu tokens; at most %d are allowed", n,
                              GW_CHAT_REQUEST_MAX_BIAS);
    p->q->bias = alloc_zero(ALLOC_REQUEST, n + 1, sizeof *p->q->bias);
    if (!p->q->bias)
        return gw_refusal_set(p->refusal, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
    if (json_is_array(value)) {
        json_array_foreach(value, i, one)
        {
            if (!bias_pair(p, one, i))
                return false;
        }
        return true;
    }
    json_object_foreach((json_t *)(uintptr_t)value, key, one)
    {
        if (json_is_null(one))
            continue;
        snprintf(param, sizeof param, "logit_bias.%.100s", key);
        if (!decimal_id(key, &id))
            return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, param,
                                  "%s: tokens are named by decimal ids", param);
        if (!bias_add(p, id, one, param))
            return false;
    }
    return true;
}

/* ---- objects ---- */

bool gw_chat_field_stream_options(struct gw_chat_request_parser *p, const json_t *value)
{
    if (!json_is_object(value))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, "stream_options",
                              "stream_options must be an object, not %s",
                              gw_json_value_type(value));
    const json_t *usage = json_object_get(value, "include_usage");
    if (!usage || json_is_null(usage))
        return true;
    if (!json_is_boolean(usage))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, "stream_options.include_usage",
                              "stream_options.include_usage must be true or false, not %s",
                              gw_json_value_type(usage));
    p->q->include_usage = json_is_true(usage);
    return true;
}

bool gw_chat_field_kwargs(struct gw_chat_request_parser *p, const json_t *value)
{
    char param[160];
    const char *key;
    json_t *one;
    if (!json_is_object(value))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, "chat_template_kwargs",
                              "chat_template_kwargs must be an object, not %s",
                              gw_json_value_type(value));
    if (json_object_size(value) > 32)
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, "chat_template_kwargs",
                              "chat_template_kwargs has %zu members; at most 32 are allowed",
                              json_object_size(value));
    p->q->kwargs = json_object();
    json_object_foreach((json_t *)(uintptr_t)value, key, one)
    {
        snprintf(param, sizeof param, "chat_template_kwargs.%.100s", key);
        bool is_switch = strcmp(key, "enable_thinking") == 0;
        if (json_is_null(one))
            continue;
        if (json_is_array(one) || json_is_object(one) || (is_switch && !json_is_boolean(one)))
            return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, param, "%s must be %s, not %s",
                                  param, is_switch ? "true or false" : "a scalar",
                                  gw_json_value_type(one));
        if (gw_json_value_has_nul(one))
            return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, param, "%s holds a U+0000",
                                  param);
        if (json_object_set(p->q->kwargs, key, one) != 0)
            return gw_refusal_set(p->refusal, GW_ERROR_OVERLOADED, NULL,
                                  "no memory for the request");
    }
    return true;
}

bool gw_chat_field_messages(struct gw_chat_request_parser *p, const json_t *value)
{
    return gw_chat_messages_parse(value, &p->q->messages, p->refusal);
}

/* ---- prompts of a completion ---- */

static bool prompt_ids(struct gw_chat_request_parser *p, const json_t *ids, const char *param)
{
    char path[64];
    size_t i, n = json_array_size(ids);
    json_t *one;
    struct gw_chat_request_prompt *prompt = &p->q->prompts[p->q->n_prompts++];
    if (n == 0)
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, param,
                              "%s is empty; at least one token is needed", param);
    prompt->ids = n <= UINT32_MAX ? alloc_zero(ALLOC_REQUEST, n, sizeof *prompt->ids) : NULL;
    if (!prompt->ids)
        return gw_refusal_set(p->refusal, GW_ERROR_OVERLOADED, NULL, "no memory for the prompt");
    json_array_foreach(ids, i, one)
    {
        int64_t id;
        snprintf(path, sizeof path, "%s[%zu]", param, i);
        if (!gw_json_value_int(one, &id))
            return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, path,
                                  "%s must be a token id, not %s", path, gw_json_value_type(one));
        if (id < 0 || id >= p->limits->n_vocab)
            return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, path,
                                  "%s: token id %lld is outside the vocabulary of %u", path,
                                  (long long)id, p->limits->n_vocab);
        prompt->ids[prompt->n_ids++] = (uint32_t)id;
    }
    return true;
}

static bool prompt_text(struct gw_chat_request_parser *p, const json_t *text)
{
    struct gw_chat_request_prompt *prompt = &p->q->prompts[p->q->n_prompts++];
    prompt->n_text = json_string_length(text);
    prompt->text = alloc_text(ALLOC_REQUEST, json_string_value(text), prompt->n_text);
    if (!prompt->text)
        return gw_refusal_set(p->refusal, GW_ERROR_OVERLOADED, NULL, "no memory for the prompt");
    return true;
}

bool gw_chat_field_prompt(struct gw_chat_request_parser *p, const json_t *value)
{
    char param[32];
    size_t i;
    json_t *one;
    if (json_is_string(value))
        return prompt_text(p, value);
    if (!json_is_array(value))
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, "prompt",
                              "prompt must be a string or an array, not %s",
                              gw_json_value_type(value));
    const json_t *first = json_array_get(value, 0);
    if (!first || json_is_number(first))
        return prompt_ids(p, value, "prompt");
    if (json_array_size(value) > GW_CHAT_REQUEST_MAX_PROMPTS)
        return gw_refusal_set(p->refusal, GW_ERROR_INVALID_VALUE, "prompt",
                              "prompt has %zu prompts; at most %d are allowed",
                              json_array_size(value), GW_CHAT_REQUEST_MAX_PROMPTS);
    json_array_foreach(value, i, one)
    {
        snprintf(param, sizeof param, "prompt[%zu]", i);
        if (json_is_string(first) ? !json_is_string(one) : !json_is_array(one))
            return gw_refusal_set(p->refusal, GW_ERROR_INVALID_TYPE, param,
                                  "%s must be %s, as prompt[0] is, not %s", param,
                                  json_is_string(first) ? "a string" : "an array of token ids",
                                  gw_json_value_type(one));
        if (json_is_string(first) ? !prompt_text(p, one) : !prompt_ids(p, one, param))
            return false;
    }
    return true;
}

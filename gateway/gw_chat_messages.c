#include "gw_chat_messages.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "buf.h"
#include "gw_json_value.h"

enum {
    MAX_NAME = 64,
    MAX_CALL_ID = 256,
    MAX_CALLS = 128,
    MAX_JOINED = 1 << 30
};

struct place { /* where the parser is, for param */
    struct gw_refusal *refusal;
    size_t message;
};

static bool refuse(const struct place *at, enum gw_error_code code, const char *member,
                   const char *format, ...) __attribute__((format(printf, 4, 5)));
static bool refuse(const struct place *at, enum gw_error_code code, const char *member,
                   const char *format, ...)
{
    char param[128], text[240];
    va_list arguments;
    snprintf(param, sizeof param, "messages[%zu]%s%s", at->message, member[0] != '\0' ? "." : "",
             member);
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return gw_refusal_set(at->refusal, code, param, "%s %s", param, text);
}

static bool no_memory(const struct place *at)
{
    return gw_refusal_set(at->refusal, GW_ERROR_OVERLOADED, NULL, "no memory for the messages");
}

/* ---- content ---- */

static bool part_append(const struct place *at, const json_t *part, size_t i, struct buf *joined)
{
    static const char *const texts[] = {"text", "input_text", "output_text", "refusal"};
    char member[64];
    snprintf(member, sizeof member, "content[%zu]", i);
    if (!json_is_object(part))
        return refuse(at, GW_ERROR_INVALID_TYPE, member, "must be an object, not %s",
                      gw_json_value_type(part));
    const json_t *type = json_object_get(part, "type");
    snprintf(member, sizeof member, "content[%zu].type", i);
    if (!gw_json_value_present(type))
        return refuse(at, GW_ERROR_MISSING_FIELD, member, "is missing");
    if (!json_is_string(type))
        return refuse(at, GW_ERROR_INVALID_TYPE, member, "must be a string, not %s",
                      gw_json_value_type(type));
    if (gw_json_value_has_nul(type))
        return refuse(at, GW_ERROR_INVALID_VALUE, member, "holds a U+0000");
    const char *word = json_string_value(type);
    bool known = false;
    for (size_t k = 0; k < sizeof texts / sizeof *texts; k++)
        known = known || strcmp(word, texts[k]) == 0;
    if (!known)
        return refuse(at, GW_ERROR_UNSUPPORTED_CONTENT, member,
                      "is \"%.60s\": this model takes text only", word);
    const char *key = strcmp(word, "refusal") == 0 ? "refusal" : "text";
    const json_t *text = json_object_get(part, key);
    snprintf(member, sizeof member, "content[%zu].%s", i, key);
    if (!gw_json_value_present(text))
        return refuse(at, GW_ERROR_MISSING_FIELD, member, "is missing");
    if (!json_is_string(text))
        return refuse(at, GW_ERROR_INVALID_TYPE, member, "must be a string, not %s",
                      gw_json_value_type(text));
    if (i > 0)
        buf_byte(joined, '\n');
    buf_append(joined, json_string_value(text), json_string_length(text));
    return true;
}

static bool parts_join(const struct place *at, const json_t *parts, json_t **ret)
{
    struct buf joined = BUF_INIT(MAX_JOINED);
    size_t i;
    json_t *part;
    bool ok = true;
    json_array_foreach(parts, i, part)
    {
        ok = ok && part_append(at, part, i, &joined);
    }
    if (ok) {
        *ret = buf_failed(&joined)
                   ? NULL
                   : json_stringn(joined.size > 0 ? (const char *)joined.data : "", joined.size);
        ok = *ret || no_memory(at);
    }
    buf_done(&joined);
    return ok;
}

/* Gives *ret: a new reference to the content as one string; NULL where there is none (assistant
 * only). */
static bool content_parse(const struct place *at, const json_t *message, bool is_assistant,
                          json_t **ret)
{
    json_t *content = json_object_get(message, "content");
    json_t *refusal = json_object_get(message, "refusal");
    *ret = NULL;
    if (!gw_json_value_present(content) && is_assistant && gw_json_value_present(refusal)) {
        if (!json_is_string(refusal))
            return refuse(at, GW_ERROR_INVALID_TYPE, "refusal", "must be a string, not %s",
                          gw_json_value_type(refusal));
        *ret = json_incref(refusal); /* what the assistant said instead */
        return true;
    }
    if (!gw_json_value_present(content))
        return is_assistant || refuse(at, GW_ERROR_MISSING_FIELD, "content", "is missing");
    if (json_is_array(content))
        return parts_join(at, content, ret);
    if (!json_is_string(content))
        return refuse(at, GW_ERROR_INVALID_TYPE, "content",
                      "must be a string or an array of parts, not %s", gw_json_value_type(content));
    *ret = json_incref(content);
    return true;
}

/* ---- other members ---- */

/* Copies a string member if it is there. */
static bool string_copy(const struct place *at, const json_t *from, const char *key, const char *as,
                        size_t max, json_t *to)
{
    json_t *value = json_object_get(from, key);
    if (!gw_json_value_present(value))
        return true;
    if (!json_is_string(value))
        return refuse(at, GW_ERROR_INVALID_TYPE, key, "must be a string, not %s",
                      gw_json_value_type(value));
    if (max > 0 && json_string_length(value) > max)
        return refuse(at, GW_ERROR_INVALID_VALUE, key, "has %zu bytes; at most %zu are allowed",
                      json_string_length(value), max);
    if (max > 0 && gw_json_value_has_nul(value))
        return refuse(at, GW_ERROR_INVALID_VALUE, key, "holds a U+0000");
    return json_object_set(to, as, value) == 0 || no_memory(at);
}

static bool call_check(const struct place *at, const json_t *call, size_t i)
{
    char member[64];
    snprintf(member, sizeof member, "tool_calls[%zu]", i);
    if (!json_is_object(call))
        return refuse(at, GW_ERROR_INVALID_TYPE, member, "must be an object, not %s",
                      gw_json_value_type(call));
    const json_t *function = json_object_get(call, "function");
    snprintf(member, sizeof member, "tool_calls[%zu].function", i);
    if (!gw_json_value_present(function))
        return refuse(at, GW_ERROR_MISSING_FIELD, member, "is missing");
    if (!json_is_object(function))
        return refuse(at, GW_ERROR_INVALID_TYPE, member, "must be an object, not %s",
                      gw_json_value_type(function));
    const json_t *name = json_object_get(function, "name");
    snprintf(member, sizeof member, "tool_calls[%zu].function.name", i);
    if (!json_is_string(name) || gw_json_value_has_nul(name))
        return refuse(at, GW_ERROR_INVALID_TYPE, member, "must be a string");
    const json_t *arguments = json_object_get(function, "arguments");
    snprintf(member, sizeof member, "tool_calls[%zu].function.arguments", i);
    if (gw_json_value_present(arguments) && !json_is_string(arguments) &&
        !json_is_object(arguments))
        return refuse(at, GW_ERROR_INVALID_TYPE, member, "must be a string, not %s",
                      gw_json_value_type(arguments));
    return true;
}

static bool calls_parse(const struct place *at, const json_t *message, json_t *to)
{
    json_t *calls = json_object_get(message, "tool_calls");
    size_t i;
    json_t *call;
    if (!gw_json_value_present(calls) || (json_is_array(calls) && json_array_size(calls) == 0))
        return true;
    if (!json_is_array(calls))
        return refuse(at, GW_ERROR_INVALID_TYPE, "tool_calls", "must be an array, not %s",
                      gw_json_value_type(calls));
    if (json_array_size(calls) > MAX_CALLS)
        return refuse(at, GW_ERROR_INVALID_VALUE, "tool_calls",
                      "has %zu calls; at most %d are allowed", json_array_size(calls), MAX_CALLS);
    json_array_foreach(calls, i, call)
    {
        if (!call_check(at, call, i))
            return false;
    }
    return json_object_set(to, "tool_calls", calls) == 0 || no_memory(at);
}

static bool assistant_parse(const struct place *at, const json_t *message, json_t *to)
{
    static const char *const lost[] = {"function_call", "audio"}; /* no template has them */
    for (size_t i = 0; i < sizeof lost / sizeof *lost; i++)
        if (gw_json_value_present(json_object_get(message, lost[i])))
            return refuse(at, GW_ERROR_UNSUPPORTED_CONTENT, lost[i],
                          "is not supported, and leaving it out would change the prompt");
    const char *thoughts = gw_json_value_present(json_object_get(message, "reasoning_content"))
                               ? "reasoning_content"
                               : "reasoning";
    return string_copy(at, message, thoughts, "reasoning_content", 0, to) &&
           calls_parse(at, message, to);
}

static bool tool_parse(const struct place *at, const json_t *message, json_t *to)
{
    if (!gw_json_value_present(json_object_get(message, "tool_call_id")))
        return refuse(at, GW_ERROR_MISSING_FIELD, "tool_call_id", "is missing");
    return string_copy(at, message, "tool_call_id", "tool_call_id", MAX_CALL_ID, to);
}

/* ---- a message ---- */

static bool role_check(const struct place *at, const json_t *message, const char **ret)
{
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};
    const json_t *role = json_object_get(message, "role");
    if (!gw_json_value_present(role))
        return refuse(at, GW_ERROR_MISSING_FIELD, "role", "is missing");
    if (!json_is_string(role))
        return refuse(at, GW_ERROR_INVALID_TYPE, "role", "must be a string, not %s",
                      gw_json_value_type(role));
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) {
        if (strcmp(json_string_value(role), roles[i]) == 0 && !gw_json_value_has_nul(role)) {
            *ret = roles[i];
            return true;
        }
    }
    return refuse(at, GW_ERROR_INVALID_VALUE, "role",
                  "is \"%.40s\"; it must be system, developer, user, assistant or tool",
                  json_string_value(role));
}

static bool message_parse(const struct place *at, const json_t *message, json_t *to)
{
    const char *role = NULL;
    json_t *content = NULL;
    if (!json_is_object(message))
        return refuse(at, GW_ERROR_INVALID_TYPE, "", "must be an object, not %s",
                      gw_json_value_type(message));
    if (!role_check(at, message, &role))
        return false;
    bool is_assistant = strcmp(role, "assistant") == 0;
    if (json_object_set_new(to, "role", json_string(role)) != 0)
        return no_memory(at);
    if (!content_parse(at, message, is_assistant, &content))
        return false;
    if (!content)
        content = json_string("");
    if (json_object_set_new(to, "content", content) != 0)
        return no_memory(at);
    if (!string_copy(at, message, "name", "name", MAX_NAME, to))
        return false;
    if (is_assistant)
        return assistant_parse(at, message, to);
    return strcmp(role, "tool") != 0 || tool_parse(at, message, to);
}

bool gw_chat_messages_parse(const json_t *value, json_t **ret, struct gw_refusal *refusal)
{
    struct place at = {refusal, 0};
    json_t *message;
    if (!json_is_array(value))
        return gw_refusal_set(refusal, GW_ERROR_INVALID_TYPE, "messages",
                              "messages must be an array, not %s", gw_json_value_type(value));
    size_t n = json_array_size(value);
    if (n < 1 || n > GW_CHAT_MESSAGES_MAX)
        return gw_refusal_set(refusal, GW_ERROR_INVALID_VALUE, "messages",
                              "messages has %zu messages; 1 to %d are allowed", n,
                              GW_CHAT_MESSAGES_MAX);
    json_t *all = json_array();
    bool ok = all || no_memory(&at);
    for (; ok && at.message < n; at.message++) {
        json_t *to = json_object();
        message = json_array_get(value, at.message);
        ok = (to || no_memory(&at)) && message_parse(&at, message, to) &&
             (json_array_append(all, to) == 0 || no_memory(&at));
        json_decref(to);
    }
    if (!ok) {
        json_decref(all);
        return false;
    }
    *ret = all;
    return true;
}

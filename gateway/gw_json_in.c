#include "gw_json_in.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "alloc.h"

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

/* Value of the escape \uXXXX at p, or -1 if there is none. */
static int32_t escape_at(const char *p, const char *end)
{
    int32_t value = 0;
    if (end - p < 6 || p[0] != '\\' || p[1] != 'u')
        return -1;
    for (int i = 2; i < 6; i++) {
        int digit = hex_digit(p[i]);
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

static bool is_high(int32_t code)
{
    return code >= 0xD800 && code <= 0xDBFF;
}

static bool is_low(int32_t code)
{
    return code >= 0xDC00 && code <= 0xDFFF;
}

/* p is at a backslash inside a string. Returns the place behind the escape. */
static char *escape_repair(char *p, const char *end)
{
    int32_t code = escape_at(p, end);
    if (code < 0)
        return end - p < 2 ? p + 1 : p + 2;
    if (is_high(code) && is_low(escape_at(p + 6, end)))
        return p + 12;
    if (is_high(code) || is_low(code))
        memcpy(p + 2, "fffd", 4);
    return p + 6;
}

enum err_code gw_json_in_repair(char *text, size_t n, size_t *ret_skip, struct err *e)
{
    size_t skip = n >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
    char *p = text + skip, *end = text + n;
    bool in_string = false;
    unsigned depth = 0, values = 0;
    while (p < end) {
        char c = *p;
        if (in_string && c == '\\') {
            p = escape_repair(p, end);
            continue;
        }
        if (c == '"')
            in_string = !in_string;
        else if (!in_string && (c == '{' || c == '['))
            depth++;
        else if (!in_string && (c == '}' || c == ']') && depth > 0)
            depth--;
        if (depth > GW_JSON_IN_MAX_DEPTH)
            return err_set(e, ERR_FORMAT, "the body is nested deeper than %d levels (at byte %zu)",
                           GW_JSON_IN_MAX_DEPTH, (size_t)(p - text));
        if (!in_string && c == ',')
            values++;
        else if (!in_string && (c == '{' || c == '['))
            values += GW_JSON_IN_CONTAINER_VALUES;
        if (values > GW_JSON_IN_MAX_VALUES)
            return err_set(e, ERR_FORMAT, "the body holds more than %d values (at byte %zu)",
                           GW_JSON_IN_MAX_VALUES, (size_t)(p - text));
        p++;
    }
    *ret_skip = skip;
    return ERR_OK;
}

enum err_code gw_json_in_parse(char *text, size_t n, json_t **ret, struct err *e)
{
    json_error_t error;
    size_t skip = 0;
    const uint64_t refused = alloc_refused();
    if (text == NULL || n == 0)
        return err_set(e, ERR_FORMAT, "the body is empty; a JSON object is required");
    enum err_code code = gw_json_in_repair(text, n, &skip, e);
    if (code != ERR_OK)
        return code;
    json_t *root =
        json_loadb(text + skip, n - skip, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    /* The parser tells of few of its allocations: the others read as bad tokens or as nothing. */
    if (!root &&
        (json_error_code(&error) == json_error_out_of_memory || alloc_refused() != refused))
        return err_set(e, ERR_NOMEM, "no memory for the body");
    if (!root)
        return err_set(e, ERR_FORMAT, "the body is not JSON: %s (line %d, column %d)", error.text,
                       error.line, error.column);
    if (!json_is_object(root)) {
        json_decref(root);
        return err_set(e, ERR_FORMAT, "the body is a JSON array; an object is required");
    }
    *ret = root;
    return ERR_OK;
}

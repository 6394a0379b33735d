/* Small questions about values that came from a client. Pure. */
#ifndef ISLET_GW_JSON_VALUE_H
#define ISLET_GW_JSON_VALUE_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* "a string", "null", ... for messages. */
static inline const char *gw_json_value_type(const json_t *value)
{
    static const char *const names[] = {"an object", "an array", "a string", "a whole number",
                                        "a number",  "true",     "false",    "null"};
    return value ? names[json_typeof(value)] : "nothing";
}

/* A number without a fractional part: 5 or 5.0. */
static inline bool gw_json_value_int(const json_t *value, int64_t *ret)
{
    if (json_is_integer(value)) {
        *ret = json_integer_value(value);
        return true;
    }
    double real = json_real_value(value);
    if (!json_is_real(value) || !(real >= -9223372036854775808.0 && real < 9223372036854775808.0) ||
        (double)(int64_t)real != real)
        return false;
    *ret = (int64_t)real;
    return true;
}

static inline bool gw_json_value_has_nul(const json_t *value)
{
    return json_is_string(value) &&
           memchr(json_string_value(value), '\0', json_string_length(value)) != NULL;
}

/* There, and not null. */
static inline bool gw_json_value_present(const json_t *value)
{
    return value && !json_is_null(value);
}

#endif

/* JSON that clients send, to a jansson value. One pass over the raw bytes comes first: a BOM is
 * skipped, depth and the number of values are bounded (a value takes up to 100 times its text), and
 * a lone surrogate escape becomes \ufffd, because jansson refuses it and JavaScript clients send it
 * when they cut a string through an emoji. Pure; any thread. */
#ifndef ISLET_GW_JSON_IN_H
#define ISLET_GW_JSON_IN_H

#include <jansson.h>
#include <stddef.h>

#include "err.h"

enum {
    GW_JSON_IN_MAX_DEPTH = 64,
    /* A body may hold the token ids of a text of some MiB. Values are counted by commas; an array
     * or object takes as much memory as so many numbers. */
    GW_JSON_IN_MAX_VALUES = 1 << 22,
    GW_JSON_IN_CONTAINER_VALUES = 4
};

/* The pass alone. Changes text[n] in place (the length stays); *ret_skip = bytes of a BOM.
 * ERR_FORMAT: too deep, or too many values. */
enum err_code gw_json_in_repair(char *text, size_t n, size_t *ret_skip, struct err *e)
    __attribute__((warn_unused_result));

/* The pass and the parse: one object, nothing behind it but white space, no duplicate keys. Changes
 * text in place. Gives *ret, an object; json_decref. ERR_FORMAT says what is wrong and where;
 * ERR_NOMEM. */
enum err_code gw_json_in_parse(char *text, size_t n, json_t **ret, struct err *e)
    __attribute__((warn_unused_result));

#endif

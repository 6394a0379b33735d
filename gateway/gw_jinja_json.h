/* JSON in and out of the template language. */
#ifndef ISLET_GW_JINJA_JSON_H
#define ISLET_GW_JINJA_JSON_H

#include <jansson.h>

#include "gw_jinja_value.h"

/* Texts are borrowed from `json`, which must outlive the value. */
struct gw_jinja_value gw_jinja_json_read(struct gw_jinja_run *r, const json_t *json);

struct gw_jinja_json_format {
    int64_t indent; /* -1: one line */
    bool ascii, sort_keys;
    struct gw_jinja_text item, key; /* separators: ", " and ": " */
};
/* As Python's json.dumps writes it. */
struct gw_jinja_value gw_jinja_json_write(struct gw_jinja_run *r, struct gw_jinja_value v,
                                          const struct gw_jinja_json_format *format);

#endif

#include "gw_jinja_json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gw_jinja_run.h"
#include "gw_jinja_text.h"
#include "utf8.h"

enum {
    MAX_JSON = 64 << 20,
    MAX_INDENT = 32
};

static struct gw_jinja_value read_object(struct gw_jinja_run *r, const json_t *json)
{
    json_t *object =
        (json_t *)(uintptr_t)json; /* jansson's iterators want it so; nothing is changed */
    struct gw_jinja_value v = gw_jinja_value_dict(r, GW_JINJA_VALUE_DICT, json_object_size(object));
    for (void *it = json_object_iter(object); it && gw_jinja_run_ok(r);
         it = json_object_iter_next(object, it)) {
        const char *key = json_object_iter_key(it);
        gw_jinja_value_put_new(r, v.as.dict, gw_jinja_value_text(key, strlen(key)),
                               gw_jinja_json_read(r, json_object_iter_value(it)));
    }
    return v;
}

struct gw_jinja_value gw_jinja_json_read(struct gw_jinja_run *r, const json_t *json)
{
    struct gw_jinja_value v = gw_jinja_value_none(), *items;
    if (!gw_jinja_run_enter(r))
        return v;
    switch (json_typeof(json)) {
    case JSON_OBJECT:
        v = read_object(r, json);
        break;
    case JSON_ARRAY:
        v = gw_jinja_value_list(r, json_array_size(json), false, &items);
        for (size_t i = 0; items && i < json_array_size(json); i++)
            items[i] = gw_jinja_json_read(r, json_array_get(json, i));
        break;
    case JSON_STRING:
        v = gw_jinja_value_text(json_string_value(json), json_string_length(json));
        break;
    case JSON_INTEGER:
        v = gw_jinja_value_int(json_integer_value(json));
        break;
    case JSON_REAL:
        v = gw_jinja_value_float(json_real_value(json));
        break;
    case JSON_TRUE:
    case JSON_FALSE:
        v = gw_jinja_value_bool(json_is_true(json));
        break;
    case JSON_NULL:
        break;
    }
    gw_jinja_run_leave(r);
    return v;
}

struct writer {
    struct gw_jinja_run *run;
    const struct gw_jinja_json_format *format;
    struct buf out;
};

static void escape_code(struct writer *w, uint32_t c)
{
    if (c >= 0x10000) {
        c -= 0x10000;
        buf_format(&w->out, "\\u%04x\\u%04x", 0xD800 + (c >> 10), 0xDC00 + (c & 0x3FF));
    } else {
        buf_format(&w->out, "\\u%04x", c);
    }
}

static void write_text(struct writer *w, struct gw_jinja_text t)
{
    static const char from[] = "\"\\\n\r\t\f\b", to[] = "\"\\nrtfb";
    buf_byte(&w->out, '"');
    for (size_t at = 0, n; at < t.size; at += n) {
        const char *p = t.data + at, *known = memchr(from, *p, sizeof from - 1);
        int k = utf8_sequence((const uint8_t *)p, t.size - at);
        n = k > 0 ? (size_t)k : 1;
        if (known) {
            buf_byte(&w->out, '\\');
            buf_byte(&w->out, (uint8_t)to[known - from]);
        } else if ((uint8_t)*p < 0x20 || (w->format->ascii && (uint8_t)*p >= 0x7F)) {
            escape_code(w, utf8_decode((const uint8_t *)p, n));
        } else {
            buf_append(&w->out, p, n);
        }
    }
    buf_byte(&w->out, '"');
}

static void new_line(struct writer *w, int64_t level)
{
    if (w->format->indent < 0)
        return;
    buf_byte(&w->out, '\n');
    for (int64_t i = 0; i < level * w->format->indent; i++)
        buf_byte(&w->out, ' ');
}

static void separate(struct writer *w, size_t i, int64_t level)
{
    struct gw_jinja_text item = w->format->item;
    if (i > 0)
        buf_append(&w->out, item.data, item.size);
    new_line(w, level);
}

static void write_value(struct writer *w, struct gw_jinja_value v, int64_t level);

static void write_key(struct writer *w, struct gw_jinja_value key)
{
    if (key.kind == GW_JINJA_VALUE_TEXT) {
        write_text(w, key.as.text);
        return;
    }
    if (key.kind != GW_JINJA_VALUE_NONE && !gw_jinja_value_is_number(key)) {
        gw_jinja_run_fail(w->run, ERR_UNSUPPORTED, "tojson: a key that is a %s",
                          gw_jinja_value_type(key));
        return;
    }
    buf_byte(&w->out, '"');
    write_value(w, key, 0);
    buf_byte(&w->out, '"');
}

static int compare_places(const void *a, const void *b, void *context)
{
    struct writer *w = ((void **)context)[0];
    const struct gw_jinja_dict *d = ((void **)context)[1];
    return gw_jinja_value_compare(w->run, d->keys[*(const size_t *)a], d->keys[*(const size_t *)b]);
}

static void write_object(struct writer *w, const struct gw_jinja_dict *d, int64_t level)
{
    size_t *order = gw_jinja_run_get(w->run, d->n, sizeof *order);
    void *context[2] = {w, (void *)(uintptr_t)d};
    buf_byte(&w->out, '{');
    for (size_t i = 0; order && i < d->n; i++)
        order[i] = i;
    if (order && w->format->sort_keys)
        qsort_r(order, d->n, sizeof *order, compare_places, context);
    for (size_t i = 0; order && i < d->n && gw_jinja_run_ok(w->run); i++) {
        separate(w, i, level + 1);
        write_key(w, d->keys[order[i]]);
        buf_append(&w->out, w->format->key.data, w->format->key.size);
        write_value(w, d->values[order[i]], level + 1);
    }
    if (d->n > 0)
        new_line(w, level);
    buf_byte(&w->out, '}');
}

static void write_array(struct writer *w, const struct gw_jinja_list *list, int64_t level)
{
    buf_byte(&w->out, '[');
    for (size_t i = 0; i < list->n && gw_jinja_run_ok(w->run); i++) {
        separate(w, i, level + 1);
        write_value(w, list->items[i], level + 1);
    }
    if (list->n > 0)
        new_line(w, level);
    buf_byte(&w->out, ']');
}

static void write_float(struct writer *w, double f)
{
    char text[40];
    if (isfinite(f))
        buf_append(&w->out, text, gw_jinja_text_float(f, text));
    else
        buf_text(&w->out, isnan(f) ? "NaN" : f < 0 ? "-Infinity" : "Infinity");
}

static void write_value(struct writer *w, struct gw_jinja_value v, int64_t level)
{
    if (!gw_jinja_run_step(w->run, 1) || !gw_jinja_run_enter(w->run))
        return;
    switch (v.kind) {
    case GW_JINJA_VALUE_NONE:
        buf_text(&w->out, "null");
        break;
    case GW_JINJA_VALUE_BOOL:
        buf_text(&w->out, v.as.boolean ? "true" : "false");
        break;
    case GW_JINJA_VALUE_INT:
        buf_format(&w->out, "%lld", (long long)v.as.integer);
        break;
    case GW_JINJA_VALUE_FLOAT:
        write_float(w, v.as.real);
        break;
    case GW_JINJA_VALUE_TEXT:
        write_text(w, v.as.text);
        break;
    case GW_JINJA_VALUE_LIST:
        write_array(w, v.as.list, level);
        break;
    case GW_JINJA_VALUE_DICT:
        write_object(w, v.as.dict, level);
        break;
    default:
        gw_jinja_run_fail(w->run, ERR_UNSUPPORTED, "tojson: a value that is %s",
                          gw_jinja_value_type(v));
        break;
    }
    gw_jinja_run_leave(w->run);
}

struct gw_jinja_value gw_jinja_json_write(struct gw_jinja_run *r, struct gw_jinja_value v,
                                          const struct gw_jinja_json_format *format)
{
    struct writer w = {.run = r, .format = format, .out = BUF_INIT(MAX_JSON)};
    struct gw_jinja_value text = gw_jinja_value_text("", 0);
    if (format->indent > MAX_INDENT)
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "tojson: an indent over %d", MAX_INDENT);
    else
        write_value(&w, v, 0);
    if (buf_failed(&w.out))
        gw_jinja_run_fail(r, ERR_LIMIT, "tojson: more than %d bytes", MAX_JSON);
    if (gw_jinja_run_ok(r))
        text = gw_jinja_value_copy(r, (const char *)w.out.data, w.out.size);
    buf_done(&w.out);
    return text;
}

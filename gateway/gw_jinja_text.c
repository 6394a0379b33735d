#include "gw_jinja_text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gw_jinja_run.h"
#include "utf8.h"

enum {
    MAX_TEXT = 256 << 20
};

static bool is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
           c == 0x202F || c == 0x205F || c == 0x3000;
}

static uint32_t decode(const char *at, const char *end, size_t *ret_n)
{
    int n = utf8_sequence((const uint8_t *)at, (size_t)(end - at));
    *ret_n = n > 0 ? (size_t)n : 1;
    return n > 0 ? utf8_decode((const uint8_t *)at, (size_t)n) : 0xFFFD;
}

static const char *before(const char *start, const char *end)
{
    const char *at = end - 1;
    while (at > start && (*at & 0xC0) == 0x80)
        at--;
    return at;
}

const char *gw_jinja_text_skip_space(const char *at, const char *end)
{
    size_t n;
    while (at < end && is_space(decode(at, end, &n)))
        at += n;
    return at;
}

const char *gw_jinja_text_strip_right(const char *at, const char *end)
{
    size_t n;
    while (end > at && is_space(decode(before(at, end), end, &n)))
        end = before(at, end);
    return end;
}

static bool strips(const char *at, size_t n, uint32_t code, const struct gw_jinja_text *set)
{
    return set ? memmem(set->data, set->size, at, n) != NULL : is_space(code);
}

struct gw_jinja_text gw_jinja_text_strip(struct gw_jinja_text t, const struct gw_jinja_text *set,
                                         bool left, bool right)
{
    const char *at = t.data, *end = t.data + t.size;
    size_t n;
    while (left && at < end) {
        uint32_t code = decode(at, end, &n);
        if (!strips(at, n, code, set))
            break;
        at += n;
    }
    while (right && end > at) {
        const char *last = before(at, end);
        uint32_t code = decode(last, end, &n);
        if (!strips(last, n, code, set))
            break;
        end = last;
    }
    return (struct gw_jinja_text){at, (size_t)(end - at)};
}

static uint32_t upper_of(uint32_t c)
{
    if ((c >= 'a' && c <= 'z') || (c >= 0xE0 && c <= 0xFE && c != 0xF7) ||
        (c >= 0x3B1 && c <= 0x3C9 && c != 0x3C2) || (c >= 0x430 && c <= 0x44F))
        return c - 32;
    return c >= 0x450 && c <= 0x45F ? c - 80 : c;
}

static uint32_t lower_of(uint32_t c)
{
    if ((c >= 'A' && c <= 'Z') || (c >= 0xC0 && c <= 0xDE && c != 0xD7) ||
        (c >= 0x391 && c <= 0x3A9 && c != 0x3A2) || (c >= 0x410 && c <= 0x42F))
        return c + 32;
    return c >= 0x400 && c <= 0x40F ? c + 80 : c;
}

struct gw_jinja_value gw_jinja_text_recase(struct gw_jinja_run *r, struct gw_jinja_text t,
                                           enum gw_jinja_text_case how)
{
    const char *at = t.data, *end = t.data + t.size;
    bool first = true;
    size_t n, made = 0;
    char *out = gw_jinja_run_get(r, 1, t.size); /* no mapping changes the size */
    if (!out || !gw_jinja_run_step(r, t.size / 16))
        return gw_jinja_value_text("", 0);
    while (at < end) {
        uint32_t c = decode(at, end, &n);
        bool up = how == GW_JINJA_TEXT_UPPER || (how != GW_JINJA_TEXT_LOWER && first);
        made += utf8_encode(up ? upper_of(c) : lower_of(c), (uint8_t *)out + made);
        if (how == GW_JINJA_TEXT_TITLE)
            first = upper_of(c) == lower_of(c);
        else if (how == GW_JINJA_TEXT_WORDS)
            first = is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
        else
            first = false;
        at += n;
    }
    return gw_jinja_value_text(out, made);
}

static struct gw_jinja_value text_from(struct gw_jinja_run *r, struct buf *b)
{
    struct gw_jinja_value v = gw_jinja_value_text("", 0);
    if (buf_failed(b))
        gw_jinja_run_fail(r, b->size >= b->ceiling / 2 ? ERR_LIMIT : ERR_NOMEM,
                          "a text becomes too long");
    else
        v = gw_jinja_value_copy(r, (const char *)b->data, b->size);
    buf_done(b);
    return v;
}

struct gw_jinja_value gw_jinja_text_replace(struct gw_jinja_run *r, struct gw_jinja_text t,
                                            struct gw_jinja_text from, struct gw_jinja_text to,
                                            int64_t max)
{
    struct buf b = BUF_INIT(MAX_TEXT);
    const char *at = t.data, *end = t.data + t.size;
    size_t n;
    while (max != 0 && at <= end && gw_jinja_run_step(r, 1 + to.size / 256)) {
        const char *hit = from.size ? memmem(at, (size_t)(end - at), from.data, from.size) : at;
        if (!hit)
            break;
        buf_append(&b, at, (size_t)(hit - at));
        buf_append(&b, to.data, to.size);
        at = hit + from.size;
        max -= max > 0;
        if (from.size > 0)
            continue;
        if (at == end)
            return text_from(r, &b); /* "" is found behind the last character too */
        (void)decode(at, end, &n);
        buf_append(&b, at, n);
        at += n;
    }
    if (at < end)
        buf_append(&b, at, (size_t)(end - at));
    return text_from(r, &b);
}

/* A list that grows, for results whose length is not known before. */
struct collect {
    struct gw_jinja_value *items;
    size_t n, capacity;
};

static void collect_add(struct gw_jinja_run *r, struct collect *c, const char *at, size_t size)
{
    if (c->n == c->capacity) {
        size_t capacity = c->capacity * 2 + 8;
        struct gw_jinja_value *grown = gw_jinja_run_get(r, capacity, sizeof *grown);
        if (!grown)
            return;
        if (c->n > 0)
            memcpy(grown, c->items, c->n * sizeof *grown);
        c->items = grown;
        c->capacity = capacity;
    }
    (void)gw_jinja_run_step(r, 1);
    c->items[c->n++] = gw_jinja_value_text(at, size);
}

static struct gw_jinja_value collect_list(struct gw_jinja_run *r, const struct collect *c)
{
    struct gw_jinja_value *items;
    struct gw_jinja_value list = gw_jinja_value_list(r, c->n, false, &items);
    if (items && c->n > 0)
        memcpy(items, c->items, c->n * sizeof *items);
    return list;
}

static void split_space(struct gw_jinja_run *r, const char *at, const char *end, int64_t max,
                        struct collect *c)
{
    size_t n;
    for (at = gw_jinja_text_skip_space(at, end); at < end && gw_jinja_run_ok(r);
         at = gw_jinja_text_skip_space(at, end)) {
        const char *stop = at;
        while (stop < end && (max == 0 || !is_space(decode(stop, end, &n))))
            stop = max == 0 ? end : stop + n;
        collect_add(r, c, at, (size_t)(stop - at));
        max -= max > 0;
        at = stop;
    }
}

struct gw_jinja_value gw_jinja_text_split(struct gw_jinja_run *r, struct gw_jinja_text t,
                                          const struct gw_jinja_text *separator, int64_t max)
{
    struct collect c = {0};
    const char *at = t.data, *end = t.data + t.size, *hit;
    if (!separator) {
        split_space(r, at, end, max, &c);
        return collect_list(r, &c);
    }
    if (separator->size == 0) {
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "split by an empty separator");
        return collect_list(r, &c);
    }
    while (max != 0 && gw_jinja_run_ok(r) &&
           (hit = memmem(at, (size_t)(end - at), separator->data, separator->size)) != NULL) {
        collect_add(r, &c, at, (size_t)(hit - at));
        at = hit + separator->size;
        max -= max > 0;
    }
    collect_add(r, &c, at, (size_t)(end - at));
    return collect_list(r, &c);
}

struct gw_jinja_value gw_jinja_text_lines(struct gw_jinja_run *r, struct gw_jinja_text t, bool keep)
{
    struct collect c = {0};
    const char *at = t.data, *end = t.data + t.size;
    size_t n = 0;
    while (at < end && gw_jinja_run_ok(r)) {
        const char *stop = at;
        uint32_t code = 0;
        for (; stop < end; stop += n) {
            code = decode(stop, end, &n);
            if ((code >= 0x0A && code <= 0x0D) || (code >= 0x1C && code <= 0x1E) || code == 0x85 ||
                code == 0x2028 || code == 0x2029)
                break;
        }
        const char *next = stop < end ? stop + n : end;
        if (code == '\r' && next < end && *next == '\n')
            next++;
        collect_add(r, &c, at, (size_t)((keep ? next : stop) - at));
        at = next;
    }
    return collect_list(r, &c);
}

size_t gw_jinja_text_float(double f, char ret[40])
{
    char digits[40];
    int precision = 0, exponent, n = 0;
    if (!isfinite(f))
        return (size_t)snprintf(ret, 40, "%s", isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
    do
        (void)snprintf(digits, sizeof digits, "%.*e", precision, f);
    while (strtod(digits, NULL) != f && ++precision < 17);
    exponent = atoi(strchr(digits, 'e') + 1);
    if (exponent >= -4 && exponent < 16) {
        int decimals = precision > exponent ? precision - exponent : 0;
        n = snprintf(ret, 40, "%.*f", decimals, f);
        if (decimals == 0)
            n += snprintf(ret + n, (size_t)(40 - n), ".0");
        return (size_t)n;
    }
    return (size_t)snprintf(ret, 40, "%s", digits);
}

/* repr() of a text. */
static void quote(struct buf *b, struct gw_jinja_text t)
{
    bool single = t.size > 0 && memchr(t.data, '\'', t.size) && !memchr(t.data, '"', t.size);
    char mark = single ? '"' : '\'';
    const char *end = t.data + t.size;
    size_t n;
    buf_byte(b, (uint8_t)mark);
    for (const char *at = t.data; at < end; at += n) {
        uint32_t c = decode(at, end, &n);
        if (c == (uint32_t)mark || c == '\\')
            buf_format(b, "\\%c", (int)c);
        else if (c == '\n' || c == '\r' || c == '\t')
            buf_text(b, c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t");
        else if (c < 0x20 || (c >= 0x7F && c <= 0xA0) || c == 0xAD)
            buf_format(b, "\\x%02x", c);
        else if (c > 0xFF && is_space(c))
            buf_format(b, "\\u%04x", c);
        else
            buf_append(b, at, n);
    }
    buf_byte(b, (uint8_t)mark);
}

static void repr(struct gw_jinja_run *r, struct buf *b, struct gw_jinja_value v);

static void repr_list(struct gw_jinja_run *r, struct buf *b, const struct gw_jinja_list *list)
{
    buf_byte(b, list->tuple ? '(' : '[');
    for (size_t i = 0; i < list->n && gw_jinja_run_ok(r); i++) {
        if (i > 0)
            buf_text(b, ", ");
        repr(r, b, list->items[i]);
    }
    if (list->tuple && list->n == 1)
        buf_byte(b, ',');
    buf_byte(b, list->tuple ? ')' : ']');
}

static void repr_dict(struct gw_jinja_run *r, struct buf *b, const struct gw_jinja_dict *d)
{
    buf_byte(b, '{');
    for (size_t i = 0; i < d->n && gw_jinja_run_ok(r); i++) {
        if (i > 0)
            buf_text(b, ", ");
        repr(r, b, d->keys[i]);
        buf_text(b, ": ");
        repr(r, b, d->values[i]);
    }
    buf_byte(b, '}');
}

static void repr(struct gw_jinja_run *r, struct buf *b, struct gw_jinja_value v)
{
    char text[40];
    if (!gw_jinja_run_step(r, 1) || !gw_jinja_run_enter(r))
        return;
    switch (v.kind) {
    case GW_JINJA_VALUE_NONE:
        buf_text(b, "None");
        break;
    case GW_JINJA_VALUE_BOOL:
        buf_text(b, v.as.boolean ? "True" : "False");
        break;
    case GW_JINJA_VALUE_INT:
        buf_format(b, "%lld", (long long)v.as.integer);
        break;
    case GW_JINJA_VALUE_FLOAT:
        buf_append(b, text, gw_jinja_text_float(v.as.real, text));
        break;
    case GW_JINJA_VALUE_TEXT:
        quote(b, v.as.text);
        break;
    case GW_JINJA_VALUE_LIST:
        repr_list(r, b, v.as.list);
        break;
    case GW_JINJA_VALUE_DICT:
        repr_dict(r, b, v.as.dict);
        break;
    case GW_JINJA_VALUE_UNDEFINED:
        buf_text(b, "Undefined");
        break;
    default:
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "a %s cannot be written", gw_jinja_value_type(v));
        break;
    }
    gw_jinja_run_leave(r);
}

struct gw_jinja_text gw_jinja_text_of(struct gw_jinja_run *r, struct gw_jinja_value v)
{
    struct buf b = BUF_INIT(MAX_TEXT);
    if (v.kind == GW_JINJA_VALUE_TEXT)
        return v.as.text;
    if (v.kind == GW_JINJA_VALUE_UNDEFINED || v.kind == GW_JINJA_VALUE_ABSENT)
        return (struct gw_jinja_text){"", 0};
    repr(r, &b, v);
    return text_from(r, &b).as.text;
}

struct gw_jinja_value gw_jinja_text_pick(struct gw_jinja_run *r, struct gw_jinja_text t,
                                         int64_t first, int64_t step, size_t count)
{
    const char *at = t.data, *end = t.data + t.size;
    size_t n = 0, made = 0;
    if (count == 0 || !gw_jinja_run_step(r, t.size / 64))
        return gw_jinja_value_text("", 0);
    for (int64_t i = 0; i < first && at < end; i++) {
        (void)decode(at, end, &n);
        at += n;
    }
    if (step == 1) {
        const char *start = at;
        for (size_t i = 0; i < count && at < end; i++) {
            (void)decode(at, end, &n);
            at += n;
        }
        return gw_jinja_value_text(start, (size_t)(at - start));
    }
    char *out = gw_jinja_run_get(r, count, 4);
    for (size_t i = 0; out && i < count; i++) {
        uint32_t c = decode(at, end, &n);
        made += utf8_encode(c, (uint8_t *)out + made);
        for (int64_t k = 0; i + 1 < count && k < step; k++, at += n)
            (void)decode(at, end, &n);
        for (int64_t k = 0; i + 1 < count && k > step; k--)
            at = before(t.data, at);
    }
    return gw_jinja_value_text(out ? out : "", made);
}

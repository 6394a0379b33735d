#include "gw_jinja_value.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "gw_jinja_run.h"
#include "utf8.h"

struct gw_jinja_value gw_jinja_value_undefined(const char *what)
{
    struct gw_jinja_value v = {.kind = GW_JINJA_VALUE_UNDEFINED};
    v.as.text = (struct gw_jinja_text){what, strlen(what)};
    return v;
}

struct gw_jinja_value gw_jinja_value_none(void)
{
    return (struct gw_jinja_value){.kind = GW_JINJA_VALUE_NONE};
}

struct gw_jinja_value gw_jinja_value_bool(bool b)
{
    return (struct gw_jinja_value){GW_JINJA_VALUE_BOOL, {.boolean = b}};
}

struct gw_jinja_value gw_jinja_value_int(int64_t i)
{
    return (struct gw_jinja_value){GW_JINJA_VALUE_INT, {.integer = i}};
}

struct gw_jinja_value gw_jinja_value_float(double f)
{
    return (struct gw_jinja_value){GW_JINJA_VALUE_FLOAT, {.real = f}};
}

struct gw_jinja_value gw_jinja_value_text(const char *data, size_t n)
{
    return (struct gw_jinja_value){GW_JINJA_VALUE_TEXT, {.text = {data, n}}};
}

struct gw_jinja_value gw_jinja_value_copy(struct gw_jinja_run *r, const char *data, size_t n)
{
    char *copy = gw_jinja_run_get(r, 1, n);
    if (!copy)
        return gw_jinja_value_text("", 0);
    if (n > 0)
        memcpy(copy, data, n);
    return gw_jinja_value_text(copy, n);
}

struct gw_jinja_value gw_jinja_value_list(struct gw_jinja_run *r, size_t n, bool tuple,
                                          struct gw_jinja_value **ret_items)
{
    static const struct gw_jinja_list empty;
    struct gw_jinja_value v = {GW_JINJA_VALUE_LIST, {.list = &empty}};
    struct gw_jinja_list *list = gw_jinja_run_zero(r, 1, sizeof *list);
    *ret_items = list ? gw_jinja_run_zero(r, n, sizeof **ret_items) : NULL;
    if (!*ret_items)
        return v;
    *list = (struct gw_jinja_list){n, tuple, *ret_items};
    v.as.list = list;
    return v;
}

struct gw_jinja_value gw_jinja_value_dict(struct gw_jinja_run *r, enum gw_jinja_value_kind kind,
                                          size_t capacity)
{
    struct gw_jinja_dict *d = gw_jinja_run_zero(r, 1, sizeof *d);
    if (!d)
        return gw_jinja_value_none();
    d->keys = gw_jinja_run_get(r, capacity, sizeof *d->keys);
    d->values = gw_jinja_run_get(r, capacity, sizeof *d->values);
    d->capacity = d->keys && d->values ? capacity : 0;
    return (struct gw_jinja_value){kind, {.dict = d}};
}

void gw_jinja_value_put_new(struct gw_jinja_run *r, struct gw_jinja_dict *d,
                            struct gw_jinja_value key, struct gw_jinja_value value)
{
    if (d->n == d->capacity) {
        size_t capacity = d->capacity * 2 + 4;
        struct gw_jinja_value *keys = gw_jinja_run_get(r, capacity, sizeof *keys);
        struct gw_jinja_value *values = gw_jinja_run_get(r, capacity, sizeof *values);
        if (!keys || !values)
            return;
        if (d->n > 0) {
            memcpy(keys, d->keys, d->n * sizeof *keys);
            memcpy(values, d->values, d->n * sizeof *values);
        }
        d->keys = keys;
        d->values = values;
        d->capacity = capacity;
    }
    d->keys[d->n] = key;
    d->values[d->n++] = value;
}

static bool is_unhashable(struct gw_jinja_value v)
{
    return v.kind == GW_JINJA_VALUE_DICT || v.kind == GW_JINJA_VALUE_NAMESPACE ||
           (v.kind == GW_JINJA_VALUE_LIST && !v.as.list->tuple);
}

static size_t find_key(struct gw_jinja_run *r, const struct gw_jinja_dict *d,
                       struct gw_jinja_value key)
{
    if (!gw_jinja_run_step(r, d->n / 16))
        return d->n;
    for (size_t i = 0; i < d->n; i++)
        if (gw_jinja_value_equal(r, d->keys[i], key))
            return i;
    return d->n;
}

void gw_jinja_value_put(struct gw_jinja_run *r, struct gw_jinja_dict *d, struct gw_jinja_value key,
                        struct gw_jinja_value value)
{
    if (is_unhashable(key)) {
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "a %s cannot be a key", gw_jinja_value_type(key));
        return;
    }
    size_t i = find_key(r, d, key);
    if (i < d->n)
        d->values[i] = value;
    else if (gw_jinja_run_ok(r))
        gw_jinja_value_put_new(r, d, key, value);
}

const struct gw_jinja_value *gw_jinja_value_get(struct gw_jinja_run *r,
                                                const struct gw_jinja_dict *d,
                                                struct gw_jinja_value key)
{
    size_t i = find_key(r, d, key);
    return i < d->n ? &d->values[i] : NULL;
}

const struct gw_jinja_value *gw_jinja_value_get_name(struct gw_jinja_run *r,
                                                     const struct gw_jinja_dict *d,
                                                     const char *name, size_t n)
{
    return gw_jinja_value_get(r, d, gw_jinja_value_text(name, n));
}

const char *gw_jinja_value_type(struct gw_jinja_value v)
{
    switch (v.kind) {
    case GW_JINJA_VALUE_ABSENT:
    case GW_JINJA_VALUE_UNDEFINED:
        return "Undefined";
    case GW_JINJA_VALUE_NONE:
        return "NoneType";
    case GW_JINJA_VALUE_BOOL:
        return "bool";
    case GW_JINJA_VALUE_INT:
        return "int";
    case GW_JINJA_VALUE_FLOAT:
        return "float";
    case GW_JINJA_VALUE_TEXT:
        return "str";
    case GW_JINJA_VALUE_LIST:
        return v.as.list->tuple ? "tuple" : "list";
    case GW_JINJA_VALUE_DICT:
        return "dict";
    case GW_JINJA_VALUE_NAMESPACE:
        return "namespace";
    case GW_JINJA_VALUE_LOOP:
        return "loop";
    case GW_JINJA_VALUE_FUNCTION:
        return "function";
    case GW_JINJA_VALUE_METHOD:
        return "method";
    case GW_JINJA_VALUE_MACRO:
        return "macro";
    }
    return "value";
}

bool gw_jinja_value_is_number(struct gw_jinja_value v)
{
    return v.kind == GW_JINJA_VALUE_BOOL || v.kind == GW_JINJA_VALUE_INT ||
           v.kind == GW_JINJA_VALUE_FLOAT;
}

bool gw_jinja_value_is_text(struct gw_jinja_value v, const char *text)
{
    return v.kind == GW_JINJA_VALUE_TEXT && v.as.text.size == strlen(text) &&
           memcmp(v.as.text.data, text, v.as.text.size) == 0;
}

bool gw_jinja_value_true(struct gw_jinja_value v)
{
    switch (v.kind) {
    case GW_JINJA_VALUE_ABSENT:
    case GW_JINJA_VALUE_UNDEFINED:
    case GW_JINJA_VALUE_NONE:
        return false;
    case GW_JINJA_VALUE_BOOL:
        return v.as.boolean;
    case GW_JINJA_VALUE_INT:
        return v.as.integer != 0;
    case GW_JINJA_VALUE_FLOAT:
        return v.as.real != 0;
    case GW_JINJA_VALUE_TEXT:
        return v.as.text.size > 0;
    case GW_JINJA_VALUE_LIST:
        return v.as.list->n > 0;
    case GW_JINJA_VALUE_DICT:
        return v.as.dict->n > 0;
    default:
        return true;
    }
}

bool gw_jinja_value_whole(struct gw_jinja_value v, int64_t *ret)
{
    if (v.kind == GW_JINJA_VALUE_BOOL)
        *ret = v.as.boolean;
    else if (v.kind == GW_JINJA_VALUE_INT)
        *ret = v.as.integer;
    else
        return false;
    return true;
}

double gw_jinja_value_real(struct gw_jinja_value v)
{
    int64_t i = 0;
    return gw_jinja_value_whole(v, &i) ? (double)i : v.as.real;
}

static bool texts_equal(struct gw_jinja_text a, struct gw_jinja_text b)
{
    return a.size == b.size && (a.size == 0 || memcmp(a.data, b.data, a.size) == 0);
}

static bool lists_equal(struct gw_jinja_run *r, const struct gw_jinja_list *a,
                        const struct gw_jinja_list *b)
{
    if (a->n != b->n || a->tuple != b->tuple)
        return false;
    for (size_t i = 0; i < a->n; i++)
        if (!gw_jinja_value_equal(r, a->items[i], b->items[i]))
            return false;
    return true;
}

static bool dicts_equal(struct gw_jinja_run *r, const struct gw_jinja_dict *a,
                        const struct gw_jinja_dict *b)
{
    if (a->n != b->n)
        return false;
    for (size_t i = 0; i < a->n; i++) {
        const struct gw_jinja_value *other = gw_jinja_value_get(r, b, a->keys[i]);
        if (!other || !gw_jinja_value_equal(r, a->values[i], *other))
            return false;
    }
    return true;
}

bool gw_jinja_value_equal(struct gw_jinja_run *r, struct gw_jinja_value a, struct gw_jinja_value b)
{
    int64_t x, y;
    bool equal;
    if (gw_jinja_value_is_number(a) && gw_jinja_value_is_number(b)) {
        if (gw_jinja_value_whole(a, &x) && gw_jinja_value_whole(b, &y))
            return x == y;
        return gw_jinja_value_real(a) == gw_jinja_value_real(b);
    }
    if (a.kind != b.kind)
        return false;
    switch (a.kind) {
    case GW_JINJA_VALUE_UNDEFINED:
    case GW_JINJA_VALUE_NONE:
        return true;
    case GW_JINJA_VALUE_TEXT:
        return texts_equal(a.as.text, b.as.text);
    case GW_JINJA_VALUE_LIST:
    case GW_JINJA_VALUE_DICT:
        if (!gw_jinja_run_step(r, 1) || !gw_jinja_run_enter(r))
            return false;
        equal = a.kind == GW_JINJA_VALUE_LIST ? lists_equal(r, a.as.list, b.as.list)
                                              : dicts_equal(r, a.as.dict, b.as.dict);
        gw_jinja_run_leave(r);
        return equal;
    default:
        return a.as.loop == b.as.loop;
    }
}

static int sign(double d)
{
    return d < 0 ? -1 : d > 0;
}

static int texts_compare(struct gw_jinja_text a, struct gw_jinja_text b)
{
    size_t n = a.size < b.size ? a.size : b.size;
    int order = n > 0 ? memcmp(a.data, b.data, n) : 0; /* UTF-8 keeps the order of code points */
    return order != 0 ? (order < 0 ? -1 : 1) : a.size < b.size ? -1 : a.size > b.size;
}

int gw_jinja_value_compare(struct gw_jinja_run *r, struct gw_jinja_value a, struct gw_jinja_value b)
{
    int64_t x, y;
    if (gw_jinja_value_whole(a, &x) && gw_jinja_value_whole(b, &y))
        return x < y ? -1 : x > y;
    if (gw_jinja_value_is_number(a) && gw_jinja_value_is_number(b))
        return sign(gw_jinja_value_real(a) - gw_jinja_value_real(b));
    if (a.kind == GW_JINJA_VALUE_TEXT && b.kind == GW_JINJA_VALUE_TEXT)
        return texts_compare(a.as.text, b.as.text);
    if (a.kind == GW_JINJA_VALUE_LIST && b.kind == GW_JINJA_VALUE_LIST && gw_jinja_run_enter(r)) {
        size_t n = a.as.list->n < b.as.list->n ? a.as.list->n : b.as.list->n;
        int order = a.as.list->n < b.as.list->n ? -1 : a.as.list->n > b.as.list->n;
        for (size_t i = 0; i < n && gw_jinja_run_step(r, 1); i++) {
            if (gw_jinja_value_equal(r, a.as.list->items[i], b.as.list->items[i]))
                continue;
            order = gw_jinja_value_compare(r, a.as.list->items[i], b.as.list->items[i]);
            break;
        }
        gw_jinja_run_leave(r);
        return order;
    }
    gw_jinja_run_fail(r, ERR_UNSUPPORTED, "'%s' and '%s' have no order", gw_jinja_value_type(a),
                      gw_jinja_value_type(b));
    return 0;
}

bool gw_jinja_value_contains(struct gw_jinja_run *r, struct gw_jinja_value haystack,
                             struct gw_jinja_value needle)
{
    if (haystack.kind == GW_JINJA_VALUE_TEXT) {
        if (needle.kind != GW_JINJA_VALUE_TEXT) {
            gw_jinja_run_fail(r, ERR_UNSUPPORTED, "'in <string>' needs a string, not '%s'",
                              gw_jinja_value_type(needle));
            return false;
        }
        if (!gw_jinja_run_step(r, haystack.as.text.size / 256))
            return false;
        return needle.as.text.size == 0 || memmem(haystack.as.text.data, haystack.as.text.size,
                                                  needle.as.text.data, needle.as.text.size) != NULL;
    }
    if (haystack.kind == GW_JINJA_VALUE_DICT)
        return gw_jinja_value_get(r, haystack.as.dict, needle) != NULL;
    const struct gw_jinja_list *list = gw_jinja_value_iterate(r, haystack);
    for (size_t i = 0; list && i < list->n && gw_jinja_run_step(r, 1); i++)
        if (gw_jinja_value_equal(r, list->items[i], needle))
            return true;
    return false;
}

bool gw_jinja_value_length(struct gw_jinja_value v, size_t *ret)
{
    switch (v.kind) {
    case GW_JINJA_VALUE_UNDEFINED:
        *ret = 0;
        return true;
    case GW_JINJA_VALUE_TEXT:
        *ret = utf8_count(v.as.text.data, v.as.text.size);
        return true;
    case GW_JINJA_VALUE_LIST:
        *ret = v.as.list->n;
        return true;
    case GW_JINJA_VALUE_DICT:
        *ret = v.as.dict->n;
        return true;
    default:
        return false;
    }
}

static const struct gw_jinja_list *characters(struct gw_jinja_run *r, struct gw_jinja_text text)
{
    struct gw_jinja_value *items;
    size_t n = 0, at = 0;
    if (!gw_jinja_run_step(r, text.size))
        return NULL;
    struct gw_jinja_value v =
        gw_jinja_value_list(r, utf8_count(text.data, text.size), false, &items);
    while (items && at < text.size) {
        int k = utf8_sequence((const uint8_t *)text.data + at, text.size - at);
        assert(k > 0);
        items[n++] = gw_jinja_value_text(text.data + at, (size_t)k);
        at += (size_t)k;
    }
    return items ? v.as.list : NULL;
}

const struct gw_jinja_list *gw_jinja_value_iterate(struct gw_jinja_run *r, struct gw_jinja_value v)
{
    struct gw_jinja_value *items;
    switch (v.kind) {
    case GW_JINJA_VALUE_UNDEFINED:
        v = gw_jinja_value_list(r, 0, false, &items);
        return v.as.list;
    case GW_JINJA_VALUE_TEXT:
        return characters(r, v.as.text);
    case GW_JINJA_VALUE_LIST:
        return v.as.list;
    case GW_JINJA_VALUE_DICT: {
        const struct gw_jinja_dict *d = v.as.dict;
        v = gw_jinja_value_list(r, d->n, false, &items);
        if (!items)
            return NULL;
        if (d->n > 0)
            memcpy(items, d->keys, d->n * sizeof *items);
        return v.as.list;
    }
    default:
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "'%s' object is not iterable",
                          gw_jinja_value_type(v));
        return NULL;
    }
}

struct gw_jinja_value gw_jinja_value_pairs(struct gw_jinja_run *r, const struct gw_jinja_dict *d)
{
    struct gw_jinja_value *items, *pair;
    struct gw_jinja_value list = gw_jinja_value_list(r, d->n, false, &items);
    for (size_t i = 0; items && i < d->n; i++) {
        items[i] = gw_jinja_value_list(r, 2, true, &pair);
        if (!pair)
            break;
        pair[0] = d->keys[i];
        pair[1] = d->values[i];
    }
    return list;
}

/* The place of a name in a list of names separated by single spaces, or -1. */
static int place_of(const char *params, struct gw_jinja_text name)
{
    int place = 0;
    for (const char *p = params; *p; place++) {
        size_t n = strcspn(p, " ");
        if (n == name.size && memcmp(p, name.data, n) == 0)
            return place;
        p += n + (p[n] == ' ');
    }
    return -1;
}

static size_t count_params(const char *params)
{
    size_t n = *params != '\0';
    for (const char *p = params; *p; p++)
        n += *p == ' ';
    return n;
}

bool gw_jinja_value_bind(struct gw_jinja_run *r, const char *what, const char *params,
                         const struct gw_jinja_args *args,
                         struct gw_jinja_value ret[GW_JINJA_VALUE_MAX_PARAMS])
{
    size_t max = count_params(params);
    assert(max <= GW_JINJA_VALUE_MAX_PARAMS);
    for (size_t i = 0; i < GW_JINJA_VALUE_MAX_PARAMS; i++)
        ret[i] = (struct gw_jinja_value){.kind = GW_JINJA_VALUE_ABSENT};
    for (size_t i = 0; i < args->n; i++) {
        struct gw_jinja_text name = args->names[i];
        int place = name.size > 0 ? place_of(params, name) : i < max ? (int)i : -1;
        if (place < 0 && name.size > 0)
            gw_jinja_run_fail(r, ERR_UNSUPPORTED, "%s has no argument '%.*s' here", what,
                              (int)(name.size > 40 ? 40 : name.size), name.data);
        else if (place < 0)
            gw_jinja_run_fail(r, ERR_UNSUPPORTED, "%s takes at most %zu arguments here", what, max);
        else if (ret[place].kind != GW_JINJA_VALUE_ABSENT)
            gw_jinja_run_fail(r, ERR_UNSUPPORTED, "%s has an argument twice", what);
        else
            ret[place] = args->values[i];
        if (!gw_jinja_run_ok(r))
            return false;
    }
    return true;
}

bool gw_jinja_value_text_is(struct gw_jinja_text t, const char *word)
{
    return t.size == strlen(word) && memcmp(t.data, word, t.size) == 0;
}

void gw_jinja_value_refuse(struct gw_jinja_run *r, const char *what, struct gw_jinja_value v)
{
    if (v.kind == GW_JINJA_VALUE_UNDEFINED)
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "%s: '%.*s' is undefined", what,
                          (int)(v.as.text.size > 60 ? 60 : v.as.text.size), v.as.text.data);
    else
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "%s: not of '%s'", what, gw_jinja_value_type(v));
}

#include "gw_jinja_method.h"

#include <string.h>
#include <time.h>

#include "gw_jinja_run.h"
#include "gw_jinja_text.h"
#include "utf8.h"

enum {
    MAX_RANGE = 100000
};

typedef struct gw_jinja_value method_fn(struct gw_jinja_run *r, struct gw_jinja_value self,
                                        const struct gw_jinja_value *p);

struct gw_jinja_method_row {
    enum gw_jinja_value_kind kind;
    const char *name, *params;
    method_fn *call;
};

struct gw_jinja_function {
    const char *name;
    struct gw_jinja_value (*call)(struct gw_jinja_run *r, const struct gw_jinja_args *args);
};

#define METHOD(name)                                                                      \
    static struct gw_jinja_value name(struct gw_jinja_run *r, struct gw_jinja_value self, \
                                      const struct gw_jinja_value *p)
#define UNUSED ((void)r, (void)self, (void)p)

static struct gw_jinja_text text_of(struct gw_jinja_run *r, struct gw_jinja_value v)
{
    if (v.kind == GW_JINJA_VALUE_TEXT)
        return v.as.text;
    gw_jinja_run_fail(r, ERR_UNSUPPORTED, "a method of str needs a str, not '%s'",
                      gw_jinja_value_type(v));
    return (struct gw_jinja_text){"", 0};
}

static int64_t whole_or(struct gw_jinja_value v, int64_t missing)
{
    (void)gw_jinja_value_whole(v, &missing);
    return missing;
}

static bool given(struct gw_jinja_value v)
{
    return v.kind != GW_JINJA_VALUE_ABSENT && v.kind != GW_JINJA_VALUE_NONE;
}

/* ---- str ---- */

static struct gw_jinja_value stripped(struct gw_jinja_run *r, struct gw_jinja_value self,
                                      struct gw_jinja_value chars, bool left, bool right)
{
    struct gw_jinja_text set = given(chars) ? text_of(r, chars) : (struct gw_jinja_text){"", 0};
    struct gw_jinja_text t =
        gw_jinja_text_strip(self.as.text, given(chars) ? &set : NULL, left, right);
    return gw_jinja_value_text(t.data, t.size);
}

METHOD(strip)
{
    return stripped(r, self, p[0], true, true);
}

METHOD(lstrip)
{
    return stripped(r, self, p[0], true, false);
}

METHOD(rstrip)
{
    return stripped(r, self, p[0], false, true);
}

METHOD(split)
{
    struct gw_jinja_text separator = given(p[0]) ? text_of(r, p[0]) : (struct gw_jinja_text){"", 0};
    return gw_jinja_text_split(r, self.as.text, given(p[0]) ? &separator : NULL,
                               whole_or(p[1], -1));
}

METHOD(splitlines)
{
    return gw_jinja_text_lines(r, self.as.text,
                               p[0].kind != GW_JINJA_VALUE_ABSENT && gw_jinja_value_true(p[0]));
}

static bool affix(struct gw_jinja_text t, struct gw_jinja_text a, bool front)
{
    return a.size <= t.size &&
           memcmp(front ? t.data : t.data + (t.size - a.size), a.data, a.size) == 0;
}

/* With one text or a tuple of them. */
static struct gw_jinja_value has_affix(struct gw_jinja_run *r, struct gw_jinja_value self,
                                       struct gw_jinja_value of, bool front)
{
    bool found = false;
    if (of.kind != GW_JINJA_VALUE_LIST)
        return gw_jinja_value_bool(affix(self.as.text, text_of(r, of), front));
    for (size_t i = 0; i < of.as.list->n && !found; i++)
        found = affix(self.as.text, text_of(r, of.as.list->items[i]), front);
    return gw_jinja_value_bool(found);
}

METHOD(starts)
{
    return has_affix(r, self, p[0], true);
}

METHOD(ends)
{
    return has_affix(r, self, p[0], false);
}

METHOD(removeprefix)
{
    struct gw_jinja_text t = self.as.text, a = text_of(r, p[0]);
    return affix(t, a, true) ? gw_jinja_value_text(t.data + a.size, t.size - a.size) : self;
}

METHOD(removesuffix)
{
    struct gw_jinja_text t = self.as.text, a = text_of(r, p[0]);
    return affix(t, a, false) ? gw_jinja_value_text(t.data, t.size - a.size) : self;
}

METHOD(upper)
{
    UNUSED;
    return gw_jinja_text_recase(r, self.as.text, GW_JINJA_TEXT_UPPER);
}

METHOD(lower)
{
    UNUSED;
    return gw_jinja_text_recase(r, self.as.text, GW_JINJA_TEXT_LOWER);
}

METHOD(title)
{
    UNUSED;
    return gw_jinja_text_recase(r, self.as.text, GW_JINJA_TEXT_TITLE);
}

METHOD(capitalize)
{
    UNUSED;
    return gw_jinja_text_recase(r, self.as.text, GW_JINJA_TEXT_CAPITALIZE);
}

METHOD(replace)
{
    return gw_jinja_text_replace(r, self.as.text, text_of(r, p[0]), text_of(r, p[1]),
                                 whole_or(p[2], -1));
}

/* The first place (or last) in code points, or -1. */
static struct gw_jinja_value found(struct gw_jinja_run *r, struct gw_jinja_value self,
                                   struct gw_jinja_value what, bool last)
{
    struct gw_jinja_text t = self.as.text, a = text_of(r, what);
    const char *hit = NULL, *at = t.data, *end = t.data + t.size;
    if (!gw_jinja_run_step(r, t.size / 64) || a.size > t.size)
        return gw_jinja_value_int(-1);
    if (a.size == 0)
        hit = last ? end : at;
    while (a.size > 0 && (at = memmem(at, (size_t)(end - at), a.data, a.size)) != NULL) {
        hit = at++;
        if (!last)
            break;
    }
    return gw_jinja_value_int(hit ? (int64_t)utf8_count(t.data, (size_t)(hit - t.data)) : -1);
}

METHOD(find)
{
    return found(r, self, p[0], false);
}

METHOD(rfind)
{
    return found(r, self, p[0], true);
}

METHOD(count)
{
    struct gw_jinja_text t = self.as.text, a = text_of(r, p[0]);
    const char *at = t.data, *end = t.data + t.size;
    int64_t n = 0;
    if (a.size == 0)
        return gw_jinja_value_int((int64_t)utf8_count(t.data, t.size) + 1);
    for (; (at = memmem(at, (size_t)(end - at), a.data, a.size)) != NULL; at += a.size)
        n++;
    (void)gw_jinja_run_step(r, (uint64_t)n);
    return gw_jinja_value_int(n);
}

METHOD(only_digits)
{
    UNUSED;
    struct gw_jinja_text t = self.as.text;
    for (size_t i = 0; i < t.size; i++)
        if (t.data[i] < '0' || t.data[i] > '9')
            return gw_jinja_value_bool(false);
    return gw_jinja_value_bool(t.size > 0);
}

METHOD(only_space)
{
    UNUSED;
    struct gw_jinja_text t = self.as.text;
    const char *end = t.data + t.size;
    return gw_jinja_value_bool(t.size > 0 && gw_jinja_text_skip_space(t.data, end) == end);
}

METHOD(join)
{
    struct gw_jinja_text between = self.as.text;
    const struct gw_jinja_list *list = gw_jinja_value_iterate(r, p[0]);
    char *out = gw_jinja_run_get(r, 0, 1);
    size_t n = 0;
    for (size_t i = 0; out && list && i < list->n; i++) {
        struct gw_jinja_text t = text_of(r, list->items[i]);
        if (i > 0 && (out = gw_jinja_run_join(r, out, n, between.data, between.size)) != NULL)
            n += between.size;
        if (out && (out = gw_jinja_run_join(r, out, n, t.data, t.size)) != NULL)
            n += t.size;
    }
    return gw_jinja_value_text(out ? out : "", out ? n : 0);
}

/* ---- dict, list ---- */

METHOD(items)
{
    (void)p;
    return gw_jinja_value_pairs(r, self.as.dict);
}

static struct gw_jinja_value column(struct gw_jinja_run *r, const struct gw_jinja_value *from,
                                    size_t n)
{
    struct gw_jinja_value *to, list = gw_jinja_value_list(r, n, false, &to);
    if (to && n > 0)
        memcpy(to, from, n * sizeof *to);
    return list;
}

METHOD(keys)
{
    (void)p;
    return column(r, self.as.dict->keys, self.as.dict->n);
}

METHOD(values)
{
    (void)p;
    return column(r, self.as.dict->values, self.as.dict->n);
}

METHOD(get)
{
    const struct gw_jinja_value *hit = gw_jinja_value_get(r, self.as.dict, p[0]);
    return hit ? *hit : p[1].kind == GW_JINJA_VALUE_ABSENT ? gw_jinja_value_none() : p[1];
}

METHOD(list_index)
{
    for (size_t i = 0; i < self.as.list->n && gw_jinja_run_step(r, 1); i++)
        if (gw_jinja_value_equal(r, self.as.list->items[i], p[0]))
            return gw_jinja_value_int((int64_t)i);
    gw_jinja_run_fail(r, ERR_UNSUPPORTED, "list.index: the value is not in the list");
    return gw_jinja_value_none();
}

METHOD(list_count)
{
    int64_t n = 0;
    for (size_t i = 0; i < self.as.list->n && gw_jinja_run_step(r, 1); i++)
        n += gw_jinja_value_equal(r, self.as.list->items[i], p[0]);
    return gw_jinja_value_int(n);
}

static const struct gw_jinja_method_row rows[] = {
    {GW_JINJA_VALUE_TEXT, "strip", "chars", strip},
    {GW_JINJA_VALUE_TEXT, "lstrip", "chars", lstrip},
    {GW_JINJA_VALUE_TEXT, "rstrip", "chars", rstrip},
    {GW_JINJA_VALUE_TEXT, "split", "sep maxsplit", split},
    {GW_JINJA_VALUE_TEXT, "splitlines", "keepends", splitlines},
    {GW_JINJA_VALUE_TEXT, "startswith", "prefix", starts},
    {GW_JINJA_VALUE_TEXT, "endswith", "suffix", ends},
    {GW_JINJA_VALUE_TEXT, "removeprefix", "prefix", removeprefix},
    {GW_JINJA_VALUE_TEXT, "removesuffix", "suffix", removesuffix},
    {GW_JINJA_VALUE_TEXT, "upper", "", upper},
    {GW_JINJA_VALUE_TEXT, "lower", "", lower},
    {GW_JINJA_VALUE_TEXT, "title", "", title},
    {GW_JINJA_VALUE_TEXT, "capitalize", "", capitalize},
    {GW_JINJA_VALUE_TEXT, "replace", "old new count", replace},
    {GW_JINJA_VALUE_TEXT, "find", "sub", find},
    {GW_JINJA_VALUE_TEXT, "rfind", "sub", rfind},
    {GW_JINJA_VALUE_TEXT, "count", "sub", count},
    {GW_JINJA_VALUE_TEXT, "isdigit", "", only_digits},
    {GW_JINJA_VALUE_TEXT, "isspace", "", only_space},
    {GW_JINJA_VALUE_TEXT, "join", "iterable", join},
    {GW_JINJA_VALUE_DICT, "items", "", items},
    {GW_JINJA_VALUE_DICT, "keys", "", keys},
    {GW_JINJA_VALUE_DICT, "values", "", values},
    {GW_JINJA_VALUE_DICT, "get", "key default", get},
    {GW_JINJA_VALUE_LIST, "index", "value", list_index},
    {GW_JINJA_VALUE_LIST, "count", "value", list_count},
};

const struct gw_jinja_method_row *gw_jinja_method_find(enum gw_jinja_value_kind kind,
                                                       struct gw_jinja_text name)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].kind == kind && strlen(rows[i].name) == name.size &&
            memcmp(rows[i].name, name.data, name.size) == 0)
            return &rows[i];
    return NULL;
}

struct gw_jinja_value gw_jinja_method_call(struct gw_jinja_run *r, const struct gw_jinja_method *m,
                                           const struct gw_jinja_args *args)
{
    struct gw_jinja_value p[GW_JINJA_VALUE_MAX_PARAMS];
    if (!gw_jinja_value_bind(r, m->row->name, m->row->params, args, p))
        return gw_jinja_value_none();
    return m->row->call(r, m->self, p);
}

/* ---- functions ---- */

static struct gw_jinja_value range(struct gw_jinja_run *r, const struct gw_jinja_args *args)
{
    struct gw_jinja_value p[GW_JINJA_VALUE_MAX_PARAMS], *to;
    int64_t start = 0, stop = 0, step = 1, n = 0;
    bool fine = gw_jinja_value_bind(r, "range", "start stop step", args, p) &&
                gw_jinja_value_whole(p[0], &start);
    if (p[1].kind == GW_JINJA_VALUE_ABSENT) {
        stop = start;
        start = 0;
    } else {
        fine = fine && gw_jinja_value_whole(p[1], &stop);
    }
    if (p[2].kind != GW_JINJA_VALUE_ABSENT)
        fine = fine && gw_jinja_value_whole(p[2], &step);
    if (!fine || step == 0)
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "range needs integers, and a step other than 0");
    for (int64_t i = start; gw_jinja_run_ok(r) && (step > 0 ? i < stop : i > stop); n++)
        if (n == MAX_RANGE || __builtin_add_overflow(i, step, &i))
            gw_jinja_run_fail(r, ERR_LIMIT, "a range of more than %d numbers", MAX_RANGE);
    struct gw_jinja_value list = gw_jinja_value_list(r, (size_t)n, false, &to);
    for (int64_t i = 0; to && i < n; i++)
        to[i] = gw_jinja_value_int(start + i * step);
    return list;
}

static struct gw_jinja_value gathered(struct gw_jinja_run *r, const struct gw_jinja_args *args,
                                      enum gw_jinja_value_kind kind)
{
    struct gw_jinja_value v = gw_jinja_value_dict(r, kind, args->n);
    for (size_t i = 0; i < args->n && gw_jinja_run_ok(r); i++) {
        struct gw_jinja_value from = args->values[i];
        if (args->names[i].size > 0) {
            gw_jinja_value_put(r, v.as.dict,
                               gw_jinja_value_text(args->names[i].data, args->names[i].size), from);
            continue;
        }
        if (from.kind != GW_JINJA_VALUE_DICT) {
            gw_jinja_run_fail(r, ERR_UNSUPPORTED, "dict and namespace take a dict or named values");
            break;
        }
        for (size_t k = 0; k < from.as.dict->n && gw_jinja_run_ok(r); k++)
            gw_jinja_value_put(r, v.as.dict, from.as.dict->keys[k], from.as.dict->values[k]);
    }
    return v;
}

static struct gw_jinja_value dict(struct gw_jinja_run *r, const struct gw_jinja_args *args)
{
    return gathered(r, args, GW_JINJA_VALUE_DICT);
}

static struct gw_jinja_value namespace(struct gw_jinja_run *r, const struct gw_jinja_args *args)
{
    return gathered(r, args, GW_JINJA_VALUE_NAMESPACE);
}

static struct gw_jinja_value raise_exception(struct gw_jinja_run *r,
                                             const struct gw_jinja_args *args)
{
    struct gw_jinja_text t =
        args->n > 0 ? gw_jinja_text_of(r, args->values[0]) : (struct gw_jinja_text){"", 0};
    gw_jinja_run_fail(r, ERR_UNSUPPORTED, "it refuses the conversation: %.*s",
                      (int)(t.size > 150 ? 150 : t.size), t.data);
    return gw_jinja_value_none();
}

static struct gw_jinja_value strftime_now(struct gw_jinja_run *r, const struct gw_jinja_args *args)
{
    char format[64], text[256];
    struct tm parts;
    time_t now = (time_t)r->now_s;
    if (args->n != 1 || args->values[0].kind != GW_JINJA_VALUE_TEXT ||
        args->values[0].as.text.size >= sizeof format || !gmtime_r(&now, &parts)) {
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "strftime_now needs a format of up to 63 bytes");
        return gw_jinja_value_none();
    }
    memcpy(format, args->values[0].as.text.data, args->values[0].as.text.size);
    format[args->values[0].as.text.size] = '\0';
    return gw_jinja_value_copy(r, text, strftime(text, sizeof text, format, &parts));
}

static const struct gw_jinja_function functions[] = {
    {"range", range},
    {"dict", dict},
    {"namespace", namespace},
    {"raise_exception", raise_exception},
    {"strftime_now", strftime_now},
};

const struct gw_jinja_function *gw_jinja_method_function(struct gw_jinja_text name)
{
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strlen(functions[i].name) == name.size &&
            memcmp(functions[i].name, name.data, name.size) == 0)
            return &functions[i];
    return NULL;
}

struct gw_jinja_value gw_jinja_method_call_function(struct gw_jinja_run *r,
                                                    const struct gw_jinja_function *f,
                                                    const struct gw_jinja_args *args)
{
    return f->call(r, args);
}

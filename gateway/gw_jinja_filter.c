#include "gw_jinja_filter.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gw_jinja_json.h"
#include "gw_jinja_run.h"
#include "gw_jinja_test.h"
#include "gw_jinja_text.h"

struct gw_jinja_filter_row {
    const char *name, *params; /* "*": takes its arguments itself */
    struct gw_jinja_value (*apply)(struct gw_jinja_run *r, struct gw_jinja_value v,
                                   const struct gw_jinja_value *p,
                                   const struct gw_jinja_args *args);
};

#define FILTER(name)                                                                   \
    static struct gw_jinja_value name(struct gw_jinja_run *r, struct gw_jinja_value v, \
                                      const struct gw_jinja_value *p,                  \
                                      const struct gw_jinja_args *args)
#define UNUSED ((void)r, (void)v, (void)p, (void)args)

/* ---- helpers ---- */

static bool given(struct gw_jinja_value v)
{
    return v.kind != GW_JINJA_VALUE_ABSENT && v.kind != GW_JINJA_VALUE_NONE;
}

static bool flag(struct gw_jinja_value v)
{
    return v.kind != GW_JINJA_VALUE_ABSENT && gw_jinja_value_true(v);
}

static int64_t whole(struct gw_jinja_run *r, struct gw_jinja_value v, int64_t missing)
{
    int64_t i = missing;
    if (given(v) && !gw_jinja_value_whole(v, &i))
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "a filter's argument is a %s, not an integer",
                          gw_jinja_value_type(v));
    return i;
}

static struct gw_jinja_value attribute_of(struct gw_jinja_run *r, struct gw_jinja_value v,
                                          struct gw_jinja_value attribute)
{
    int64_t i;
    if (v.kind == GW_JINJA_VALUE_DICT) {
        struct gw_jinja_text path = gw_jinja_text_of(r, attribute);
        const char *dot = memchr(path.data, '.', path.size);
        size_t n = dot ? (size_t)(dot - path.data) : path.size;
        const struct gw_jinja_value *found = gw_jinja_value_get_name(r, v.as.dict, path.data, n);
        struct gw_jinja_value one = found ? *found : gw_jinja_value_undefined("attribute");
        return dot ? attribute_of(r, one, gw_jinja_value_text(dot + 1, path.size - n - 1)) : one;
    }
    if (v.kind == GW_JINJA_VALUE_LIST && gw_jinja_value_whole(attribute, &i) && i >= 0 &&
        (uint64_t)i < v.as.list->n)
        return v.as.list->items[i];
    return gw_jinja_value_undefined("attribute");
}

static struct gw_jinja_value recased(struct gw_jinja_run *r, struct gw_jinja_value v,
                                     enum gw_jinja_text_case how)
{
    return gw_jinja_text_recase(r, gw_jinja_text_of(r, v), how);
}

/* ---- texts ---- */

FILTER(trim)
{
    UNUSED;
    struct gw_jinja_text t =
        gw_jinja_text_strip(gw_jinja_text_of(r, v),
                            p[0].kind == GW_JINJA_VALUE_TEXT ? &p[0].as.text : NULL, true, true);
    return gw_jinja_value_text(t.data, t.size);
}

FILTER(upper)
{
    UNUSED;
    return recased(r, v, GW_JINJA_TEXT_UPPER);
}

FILTER(lower)
{
    UNUSED;
    return recased(r, v, GW_JINJA_TEXT_LOWER);
}

FILTER(title)
{
    UNUSED;
    return recased(r, v, GW_JINJA_TEXT_WORDS);
}

FILTER(capitalize)
{
    UNUSED;
    return recased(r, v, GW_JINJA_TEXT_CAPITALIZE);
}

FILTER(to_text)
{
    UNUSED;
    struct gw_jinja_text t = gw_jinja_text_of(r, v);
    return gw_jinja_value_text(t.data, t.size);
}

FILTER(replace)
{
    UNUSED;
    return gw_jinja_text_replace(r, gw_jinja_text_of(r, v), gw_jinja_text_of(r, p[0]),
                                 gw_jinja_text_of(r, p[1]), whole(r, p[2], -1));
}

FILTER(escape)
{
    UNUSED;
    static const char *const from[] = {"&", "<", ">", "'", "\""};
    static const char *const to[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    struct gw_jinja_text t = gw_jinja_text_of(r, v);
    for (size_t i = 0; i < 5; i++)
        t = gw_jinja_text_replace(r, t, (struct gw_jinja_text){from[i], 1},
                                  (struct gw_jinja_text){to[i], strlen(to[i])}, -1)
                .as.text;
    return gw_jinja_value_text(t.data, t.size);
}

FILTER(indent)
{
    UNUSED;
    char spaces[256];
    struct gw_jinja_text by = {spaces, 0}, newline = {"\n", 1};
    struct gw_jinja_text t = gw_jinja_text_of(r, v);
    int64_t width = p[0].kind == GW_JINJA_VALUE_TEXT ? 0 : whole(r, p[0], 4);
    if (width < 0 || width > (int64_t)sizeof spaces) {
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "indent by more than %zu", sizeof spaces);
        return v;
    }
    memset(spaces, ' ', sizeof spaces);
    by.size = (size_t)width;
    if (p[0].kind == GW_JINJA_VALUE_TEXT)
        by = p[0].as.text;
    struct gw_jinja_value lines = gw_jinja_text_split(r, t, &newline, -1);
    char *out = gw_jinja_run_get(r, 0, 1);
    size_t n = 0;
    for (size_t i = 0; out && i < lines.as.list->n; i++) {
        struct gw_jinja_text line = lines.as.list->items[i].as.text;
        bool indented = i == 0 ? flag(p[1]) : line.size > 0 || flag(p[2]);
        if (i > 0 && (out = gw_jinja_run_join(r, out, n, "\n", 1)) != NULL)
            n++;
        if (out && indented && (out = gw_jinja_run_join(r, out, n, by.data, by.size)) != NULL)
            n += by.size;
        if (out && (out = gw_jinja_run_join(r, out, n, line.data, line.size)) != NULL)
            n += line.size;
    }
    return gw_jinja_value_text(out ? out : "", out ? n : 0);
}

FILTER(tojson)
{
    UNUSED;
    struct gw_jinja_json_format format = {
        .indent = whole(r, p[1], -1),
        .ascii = flag(p[0]),
        .sort_keys = flag(p[3]),
        .item = {", ", 2},
        .key = {": ", 2},
    };
    if (format.indent >= 0)
        format.item.size = 1;
    if (p[2].kind == GW_JINJA_VALUE_LIST && p[2].as.list->n == 2) {
        format.item = gw_jinja_text_of(r, p[2].as.list->items[0]);
        format.key = gw_jinja_text_of(r, p[2].as.list->items[1]);
    }
    return gw_jinja_json_write(r, v, &format);
}

/* ---- any value ---- */

FILTER(length)
{
    UNUSED;
    size_t n = 0;
    if (v.kind == GW_JINJA_VALUE_TEXT)
        (void)gw_jinja_run_step(r, v.as.text.size / 64);
    if (!gw_jinja_value_length(v, &n))
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "object of type '%s' has no length",
                          gw_jinja_value_type(v));
    return gw_jinja_value_int((int64_t)n);
}

FILTER(or_default)
{
    UNUSED;
    if (v.kind != GW_JINJA_VALUE_UNDEFINED && !(flag(p[1]) && !gw_jinja_value_true(v)))
        return v;
    return p[0].kind == GW_JINJA_VALUE_ABSENT ? gw_jinja_value_text("", 0) : p[0];
}

FILTER(to_int)
{
    UNUSED;
    struct gw_jinja_value missing =
        p[0].kind == GW_JINJA_VALUE_ABSENT ? gw_jinja_value_int(0) : p[0];
    char text[64], *end;
    int64_t i;
    if (gw_jinja_value_whole(v, &i))
        return gw_jinja_value_int(i);
    if (v.kind == GW_JINJA_VALUE_TEXT) {
        struct gw_jinja_text t = gw_jinja_text_strip(v.as.text, NULL, true, true);
        if (t.size == 0 || t.size >= sizeof text)
            return missing;
        memcpy(text, t.data, t.size);
        text[t.size] = '\0';
        i = strtoll(text, &end, 10);
        if (*end == '\0')
            return gw_jinja_value_int(i);
        v = gw_jinja_value_float(strtod(text, &end));
        if (*end != '\0')
            return missing;
    }
    if (v.kind != GW_JINJA_VALUE_FLOAT || !(fabs(v.as.real) < 9e18))
        return missing;
    return gw_jinja_value_int((int64_t)v.as.real);
}

FILTER(to_float)
{
    UNUSED;
    struct gw_jinja_value missing =
        p[0].kind == GW_JINJA_VALUE_ABSENT ? gw_jinja_value_float(0) : p[0];
    char text[64], *end;
    if (gw_jinja_value_is_number(v))
        return gw_jinja_value_float(gw_jinja_value_real(v));
    if (v.kind != GW_JINJA_VALUE_TEXT)
        return missing;
    struct gw_jinja_text t = gw_jinja_text_strip(v.as.text, NULL, true, true);
    if (t.size == 0 || t.size >= sizeof text)
        return missing;
    memcpy(text, t.data, t.size);
    text[t.size] = '\0';
    double f = strtod(text, &end);
    return *end == '\0' ? gw_jinja_value_float(f) : missing;
}

FILTER(absolute)
{
    UNUSED;
    int64_t i;
    if (gw_jinja_value_whole(v, &i) && i != INT64_MIN)
        return gw_jinja_value_int(i < 0 ? -i : i);
    if (v.kind == GW_JINJA_VALUE_FLOAT)
        return gw_jinja_value_float(fabs(v.as.real));
    gw_jinja_run_fail(r, ERR_UNSUPPORTED, "abs of '%s'", gw_jinja_value_type(v));
    return v;
}

FILTER(same)
{
    UNUSED;
    return v;
}

/* ---- lists ---- */

FILTER(first)
{
    UNUSED;
    const struct gw_jinja_list *list = gw_jinja_value_iterate(r, v);
    return list && list->n ? list->items[0] : gw_jinja_value_undefined("first of nothing");
}

FILTER(last)
{
    UNUSED;
    const struct gw_jinja_list *list = gw_jinja_value_iterate(r, v);
    return list && list->n ? list->items[list->n - 1] : gw_jinja_value_undefined("last of nothing");
}

/* A new list with the items of v. */
static struct gw_jinja_value copied(struct gw_jinja_run *r, struct gw_jinja_value v,
                                    struct gw_jinja_value **ret_items, size_t *ret_n)
{
    const struct gw_jinja_list *list = gw_jinja_value_iterate(r, v);
    struct gw_jinja_value copy = gw_jinja_value_list(r, list ? list->n : 0, false, ret_items);
    *ret_n = *ret_items && list ? list->n : 0;
    if (*ret_n > 0)
        memcpy(*ret_items, list->items, list->n * sizeof **ret_items);
    return copy;
}

FILTER(to_list)
{
    UNUSED;
    struct gw_jinja_value *items;
    size_t n;
    return copied(r, v, &items, &n);
}

FILTER(reverse)
{
    UNUSED;
    struct gw_jinja_value *items;
    size_t n;
    struct gw_jinja_value list = copied(r, v, &items, &n);
    for (size_t i = 0; i < n / 2; i++) {
        struct gw_jinja_value other = items[n - 1 - i];
        items[n - 1 - i] = items[i];
        items[i] = other;
    }
    if (v.kind != GW_JINJA_VALUE_TEXT)
        return list;
    char *out = gw_jinja_run_get(r, 0, 1);
    size_t size = 0;
    for (size_t i = 0; out && i < n; i++) {
        out = gw_jinja_run_join(r, out, size, items[i].as.text.data, items[i].as.text.size);
        size += items[i].as.text.size;
    }
    return gw_jinja_value_text(out ? out : "", out ? size : 0);
}

FILTER(join)
{
    UNUSED;
    const struct gw_jinja_list *list = gw_jinja_value_iterate(r, v);
    struct gw_jinja_text between = gw_jinja_text_of(r, p[0]);
    struct buf b = BUF_INIT(64 << 20);
    for (size_t i = 0; list && i < list->n && gw_jinja_run_step(r, 1 + between.size / 64); i++) {
        struct gw_jinja_value item =
            given(p[1]) ? attribute_of(r, list->items[i], p[1]) : list->items[i];
        struct gw_jinja_text t = gw_jinja_text_of(r, item);
        if (i > 0)
            buf_append(&b, between.data, between.size);
        buf_append(&b, t.data, t.size);
    }
    if (buf_failed(&b))
        gw_jinja_run_fail(r, ERR_LIMIT, "join makes a text that is too long");
    struct gw_jinja_value text =
        gw_jinja_value_copy(r, (const char *)b.data, buf_failed(&b) ? 0 : b.size);
    buf_done(&b);
    return text;
}

FILTER(pairs)
{
    UNUSED;
    struct gw_jinja_value *items;
    if (v.kind == GW_JINJA_VALUE_DICT)
        return gw_jinja_value_pairs(r, v.as.dict);
    if (v.kind != GW_JINJA_VALUE_UNDEFINED)
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "Can only get item pairs from a mapping.");
    return gw_jinja_value_list(r, 0, false, &items);
}

/* What is compared when values are sorted or made unique. */
static struct gw_jinja_value sort_key(struct gw_jinja_run *r, struct gw_jinja_value v,
                                      struct gw_jinja_value attribute, bool exact)
{
    if (given(attribute))
        v = attribute_of(r, v, attribute);
    return v.kind == GW_JINJA_VALUE_TEXT && !exact ? recased(r, v, GW_JINJA_TEXT_LOWER) : v;
}

struct sorting {
    struct gw_jinja_run *run;
    bool reverse;
};

struct sorted {
    struct gw_jinja_value key, value;
    size_t place;
};

static int compare_sorted(const void *a, const void *b, void *context)
{
    const struct sorted *x = a, *y = b;
    const struct sorting *s = context;
    int order = gw_jinja_run_step(s->run, 1) ? gw_jinja_value_compare(s->run, x->key, y->key) : 0;
    if (order != 0)
        return s->reverse ? -order : order;
    return x->place < y->place ? -1 : x->place > y->place;
}

/* Sorts items by keys[], both of n; stable. */
static void sort_by(struct gw_jinja_run *r, struct gw_jinja_value *items,
                    const struct gw_jinja_value *keys, size_t n, bool reverse)
{
    struct sorting s = {r, reverse};
    struct sorted *all = gw_jinja_run_get(r, n, sizeof *all);
    for (size_t i = 0; all && i < n; i++)
        all[i] = (struct sorted){keys[i], items[i], i};
    if (!all || !gw_jinja_run_ok(r))
        return;
    qsort_r(all, n, sizeof *all, compare_sorted, &s);
    for (size_t i = 0; i < n; i++)
        items[i] = all[i].value;
}

FILTER(sort)
{
    UNUSED;
    struct gw_jinja_value *items, *keys;
    size_t n;
    struct gw_jinja_value list = copied(r, v, &items, &n);
    keys = gw_jinja_run_get(r, n, sizeof *keys);
    for (size_t i = 0; keys && i < n; i++)
        keys[i] = sort_key(r, items[i], p[2], flag(p[1]));
    if (keys)
        sort_by(r, items, keys, n, flag(p[0]));
    return list;
}

FILTER(dictsort)
{
    UNUSED;
    struct gw_jinja_value list = pairs(r, v, p, args), *keys;
    size_t n = list.as.list->n, part = gw_jinja_value_is_text(p[1], "value");
    keys = gw_jinja_run_get(r, n, sizeof *keys);
    for (size_t i = 0; keys && gw_jinja_run_ok(r) && i < n; i++)
        keys[i] = sort_key(r, list.as.list->items[i].as.list->items[part], gw_jinja_value_none(),
                           flag(p[0]));
    if (keys)
        sort_by(r, list.as.list->items, keys, n, flag(p[2]));
    return list;
}

FILTER(unique)
{
    UNUSED;
    struct gw_jinja_value *items, *keys, *kept;
    size_t n, n_kept = 0;
    struct gw_jinja_value list = copied(r, v, &items, &n);
    keys = gw_jinja_run_get(r, n, sizeof *keys);
    for (size_t i = 0; keys && i < n && gw_jinja_run_step(r, 1 + n_kept / 4); i++) {
        struct gw_jinja_value key = sort_key(r, items[i], p[1], flag(p[0]));
        bool seen = false;
        for (size_t k = 0; k < n_kept && !seen; k++)
            seen = gw_jinja_value_equal(r, keys[k], key);
        if (seen)
            continue;
        keys[n_kept] = key;
        items[n_kept++] = items[i];
    }
    list = gw_jinja_value_list(r, n_kept, false, &kept);
    if (kept && n_kept > 0)
        memcpy(kept, items, n_kept * sizeof *kept);
    return list;
}

/* The largest (or smallest) item. */
static struct gw_jinja_value extreme(struct gw_jinja_run *r, struct gw_jinja_value v,
                                     const struct gw_jinja_value *p, int want)
{
    const struct gw_jinja_list *list = gw_jinja_value_iterate(r, v);
    if (!list || list->n == 0)
        return gw_jinja_value_undefined("No aggregated item, sequence was empty.");
    struct gw_jinja_value best = list->items[0], best_key = sort_key(r, best, p[1], flag(p[0]));
    for (size_t i = 1; i < list->n && gw_jinja_run_step(r, 1); i++) {
        struct gw_jinja_value key = sort_key(r, list->items[i], p[1], flag(p[0]));
        if (gw_jinja_value_compare(r, key, best_key) != want)
            continue;
        best = list->items[i];
        best_key = key;
    }
    return best;
}

FILTER(largest)
{
    UNUSED;
    return extreme(r, v, p, 1);
}

FILTER(smallest)
{
    UNUSED;
    return extreme(r, v, p, -1);
}

/* Arguments from place `skip` on. */
static struct gw_jinja_args rest(const struct gw_jinja_args *args, size_t skip)
{
    if (skip >= args->n)
        return (struct gw_jinja_args){0};
    return (struct gw_jinja_args){args->n - skip, args->values + skip, args->names + skip};
}

static struct gw_jinja_value named(const struct gw_jinja_args *args, const char *name)
{
    for (size_t i = 0; i < args->n; i++)
        if (args->names[i].size == strlen(name) &&
            memcmp(args->names[i].data, name, args->names[i].size) == 0)
            return args->values[i];
    return (struct gw_jinja_value){.kind = GW_JINJA_VALUE_ABSENT};
}

FILTER(map)
{
    (void)p;
    struct gw_jinja_value attribute = named(args, "attribute"), missing = named(args, "default");
    const struct gw_jinja_filter_row *row = NULL;
    struct gw_jinja_value *items;
    struct gw_jinja_args more = rest(args, 1);
    size_t n;
    if (attribute.kind == GW_JINJA_VALUE_ABSENT && args->n > 0 &&
        args->values[0].kind == GW_JINJA_VALUE_TEXT)
        row = gw_jinja_filter_find(args->values[0].as.text);
    if (attribute.kind == GW_JINJA_VALUE_ABSENT && !row)
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "map needs attribute= or a filter that is built in");
    struct gw_jinja_value list = copied(r, v, &items, &n);
    for (size_t i = 0; i < n && gw_jinja_run_step(r, 1); i++) {
        if (row && gw_jinja_run_enter(r)) {
            items[i] = gw_jinja_filter_apply(r, row, items[i], &more);
            gw_jinja_run_leave(r);
        } else {
            items[i] = attribute_of(r, items[i], attribute);
        }
        if (items[i].kind == GW_JINJA_VALUE_UNDEFINED && missing.kind != GW_JINJA_VALUE_ABSENT)
            items[i] = missing;
    }
    return list;
}

/* Keeps the items for which the test (default: truth) of item or attribute is `want`. */
static struct gw_jinja_value chosen(struct gw_jinja_run *r, struct gw_jinja_value v,
                                    const struct gw_jinja_args *args, bool by_attribute, bool want)
{
    size_t skip = by_attribute, n, n_kept = 0;
    const struct gw_jinja_test_row *row = NULL;
    struct gw_jinja_value *items, *kept;
    struct gw_jinja_args more = rest(args, skip + 1);
    if (by_attribute && args->n == 0)
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "selectattr needs an attribute");
    if (gw_jinja_run_ok(r) && args->n > skip) {
        row = args->values[skip].kind == GW_JINJA_VALUE_TEXT
                  ? gw_jinja_test_find(args->values[skip].as.text)
                  : NULL;
        if (!row)
            gw_jinja_run_fail(r, ERR_UNSUPPORTED, "select by a test that is not built in");
    }
    struct gw_jinja_value list = copied(r, v, &items, &n);
    for (size_t i = 0; i < n && gw_jinja_run_step(r, 1); i++) {
        struct gw_jinja_value one =
            by_attribute ? attribute_of(r, items[i], args->values[0]) : items[i];
        bool is = row ? gw_jinja_test_apply(r, row, one, &more) : gw_jinja_value_true(one);
        if (is == want)
            items[n_kept++] = items[i];
    }
    list = gw_jinja_value_list(r, gw_jinja_run_ok(r) ? n_kept : 0, false, &kept);
    if (kept && n_kept > 0)
        memcpy(kept, items, n_kept * sizeof *kept);
    return list;
}

FILTER(select_items)
{
    UNUSED;
    return chosen(r, v, args, false, true);
}

FILTER(reject_items)
{
    UNUSED;
    return chosen(r, v, args, false, false);
}

FILTER(select_attribute)
{
    UNUSED;
    return chosen(r, v, args, true, true);
}

FILTER(reject_attribute)
{
    UNUSED;
    return chosen(r, v, args, true, false);
}

static const struct gw_jinja_filter_row rows[] = {
    {"trim", "chars", trim},
    {"upper", "", upper},
    {"lower", "", lower},
    {"title", "", title},
    {"capitalize", "", capitalize},
    {"string", "", to_text},
    {"replace", "old new count", replace},
    {"escape", "", escape},
    {"e", "", escape},
    {"indent", "width first blank", indent},
    {"tojson", "ensure_ascii indent separators sort_keys", tojson},
    {"length", "", length},
    {"count", "", length},
    {"default", "default_value boolean", or_default},
    {"d", "default_value boolean", or_default},
    {"int", "default", to_int},
    {"float", "default", to_float},
    {"abs", "", absolute},
    {"safe", "", same},
    {"first", "", first},
    {"last", "", last},
    {"list", "", to_list},
    {"reverse", "", reverse},
    {"join", "d attribute", join},
    {"items", "", pairs},
    {"sort", "reverse case_sensitive attribute", sort},
    {"dictsort", "case_sensitive by reverse", dictsort},
    {"unique", "case_sensitive attribute", unique},
    {"max", "case_sensitive attribute", largest},
    {"min", "case_sensitive attribute", smallest},
    {"map", "*", map},
    {"select", "*", select_items},
    {"reject", "*", reject_items},
    {"selectattr", "*", select_attribute},
    {"rejectattr", "*", reject_attribute},
};

const struct gw_jinja_filter_row *gw_jinja_filter_find(struct gw_jinja_text name)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strlen(rows[i].name) == name.size && memcmp(rows[i].name, name.data, name.size) == 0)
            return &rows[i];
    return NULL;
}

struct gw_jinja_value gw_jinja_filter_apply(struct gw_jinja_run *r,
                                            const struct gw_jinja_filter_row *row,
                                            struct gw_jinja_value v,
                                            const struct gw_jinja_args *args)
{
    struct gw_jinja_value p[GW_JINJA_VALUE_MAX_PARAMS];
    if (!gw_jinja_run_step(r, 1))
        return v;
    if (strcmp(row->params, "*") == 0)
        return row->apply(r, v, NULL, args);
    if (!gw_jinja_value_bind(r, row->name, row->params, args, p))
        return v;
    return row->apply(r, v, p, args);
}

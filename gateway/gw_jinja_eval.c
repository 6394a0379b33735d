#include "gw_jinja_eval.h"

#include <string.h>

#include "gw_jinja_filter.h"
#include "gw_jinja_method.h"
#include "gw_jinja_operator.h"
#include "gw_jinja_run.h"
#include "gw_jinja_test.h"
#include "gw_jinja_text.h"

struct scope {
    struct scope *outer;
    struct gw_jinja_dict names;
};

struct gw_jinja_macro {
    const struct gw_jinja_node *node;
    struct scope *scope; /* where it was defined */
};

struct gw_jinja_loop {
    size_t index, n;
    const struct gw_jinja_value *items;
};

enum flow {
    FLOW_NEXT,
    FLOW_BREAK,
    FLOW_CONTINUE
};

static struct gw_jinja_value eval(struct gw_jinja_run *r, const struct gw_jinja_node *n,
                                  struct scope *s);
static enum flow execute(struct gw_jinja_run *r, const struct gw_jinja_node *n, struct scope *s);

static struct gw_jinja_value missing(struct gw_jinja_text name)
{
    return (struct gw_jinja_value){GW_JINJA_VALUE_UNDEFINED, {.text = name}};
}

/* ---- names ---- */

static struct scope *inner(struct gw_jinja_run *r, struct scope *outer)
{
    struct scope *s = gw_jinja_run_zero(r, 1, sizeof *s);
    if (!s)
        return outer;
    s->outer = outer;
    return s;
}

static void define(struct gw_jinja_run *r, struct scope *s, struct gw_jinja_text name,
                   struct gw_jinja_value v)
{
    if (gw_jinja_run_ok(r))
        gw_jinja_value_put(r, &s->names, gw_jinja_value_text(name.data, name.size), v);
}

static struct gw_jinja_value look_up(struct gw_jinja_run *r, struct scope *s,
                                     struct gw_jinja_text name)
{
    for (; s; s = s->outer) {
        const struct gw_jinja_value *v =
            gw_jinja_value_get_name(r, &s->names, name.data, name.size);
        if (v)
            return *v;
    }
    const struct gw_jinja_function *f = gw_jinja_method_function(name);
    return f ? (struct gw_jinja_value){GW_JINJA_VALUE_FUNCTION, {.function = f}} : missing(name);
}

/* ---- attributes and items ---- */

static struct gw_jinja_value loop_attribute(const struct gw_jinja_loop *loop,
                                            struct gw_jinja_text name)
{
    int64_t i = (int64_t)loop->index, n = (int64_t)loop->n;
    const struct {
        const char *name;
        struct gw_jinja_value value;
    } rows[] = {
        {"index", gw_jinja_value_int(i + 1)},
        {"index0", gw_jinja_value_int(i)},
        {"revindex", gw_jinja_value_int(n - i)},
        {"revindex0", gw_jinja_value_int(n - i - 1)},
        {"first", gw_jinja_value_bool(i == 0)},
        {"last", gw_jinja_value_bool(i + 1 == n)},
        {"length", gw_jinja_value_int(n)},
        {"depth", gw_jinja_value_int(1)}, /* deeper ones exist in recursive loops alone */
        {"depth0", gw_jinja_value_int(0)},
        {"previtem", i > 0 ? loop->items[i - 1] : missing(name)},
        {"nextitem", i + 1 < n ? loop->items[i + 1] : missing(name)},
    };
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++)
        if (gw_jinja_value_text_is(name, rows[k].name))
            return rows[k].value;
    return missing(name);
}

static struct gw_jinja_value method_of(struct gw_jinja_run *r, struct gw_jinja_value v,
                                       struct gw_jinja_text name)
{
    const struct gw_jinja_method_row *row = gw_jinja_method_find(v.kind, name);
    struct gw_jinja_method *m = row ? gw_jinja_run_get(r, 1, sizeof *m) : NULL;
    if (!m)
        return missing(name);
    *m = (struct gw_jinja_method){v, row};
    return (struct gw_jinja_value){GW_JINJA_VALUE_METHOD, {.method = m}};
}

/* v.name: methods before entries. */
static struct gw_jinja_value attribute(struct gw_jinja_run *r, struct gw_jinja_value v,
                                       struct gw_jinja_text name)
{
    const struct gw_jinja_value *entry = NULL;
    struct gw_jinja_value found;
    if (v.kind == GW_JINJA_VALUE_UNDEFINED)
        gw_jinja_value_refuse(r, "attribute of something missing", v);
    if (v.kind == GW_JINJA_VALUE_LOOP)
        return loop_attribute(v.as.loop, name);
    found = method_of(r, v, name);
    if (found.kind == GW_JINJA_VALUE_METHOD)
        return found;
    if (v.kind == GW_JINJA_VALUE_DICT || v.kind == GW_JINJA_VALUE_NAMESPACE)
        entry = gw_jinja_value_get_name(r, v.as.dict, name.data, name.size);
    return entry ? *entry : missing(name);
}

static struct gw_jinja_value by_index(struct gw_jinja_run *r, struct gw_jinja_value v, int64_t i)
{
    size_t n = 0;
    if (!gw_jinja_value_length(v, &n) || v.kind == GW_JINJA_VALUE_DICT)
        return gw_jinja_value_undefined("an item");
    if (i < 0)
        i += (int64_t)n;
    if (i < 0 || i >= (int64_t)n)
        return gw_jinja_value_undefined("an item behind the end");
    if (v.kind == GW_JINJA_VALUE_LIST)
        return v.as.list->items[i];
    return gw_jinja_text_pick(r, v.as.text, i, 1, 1);
}

/* v[key]: entries before methods. */
static struct gw_jinja_value item(struct gw_jinja_run *r, struct gw_jinja_value v,
                                  struct gw_jinja_value key)
{
    int64_t i;
    if (v.kind == GW_JINJA_VALUE_UNDEFINED) {
        gw_jinja_value_refuse(r, "item of something missing", v);
        return v;
    }
    if (v.kind == GW_JINJA_VALUE_DICT) {
        const struct gw_jinja_value *entry = gw_jinja_value_get(r, v.as.dict, key);
        if (entry)
            return *entry;
    } else if (gw_jinja_value_whole(key, &i)) {
        return by_index(r, v, i);
    }
    return key.kind == GW_JINJA_VALUE_TEXT ? attribute(r, v, key.as.text)
                                           : gw_jinja_value_undefined("an item");
}

static int64_t clamp(int64_t i, int64_t n, int64_t low, int64_t high)
{
    if (i < 0)
        i = i < -n ? low : i + n;
    return i < low ? low : i > high ? high : i;
}

static struct gw_jinja_value slice(struct gw_jinja_run *r, const struct gw_jinja_node *n,
                                   struct scope *s)
{
    struct gw_jinja_value v = eval(r, n->a, s), part[3], *to;
    int64_t step = 1, from, until, length, count;
    size_t size = 0;
    for (size_t i = 0; i < 3; i++) {
        part[i] = n->items[i] ? eval(r, n->items[i], s) : gw_jinja_value_none();
        if (part[i].kind != GW_JINJA_VALUE_NONE && !gw_jinja_value_whole(part[i], &from))
            gw_jinja_value_refuse(r, "a slice needs integers", part[i]);
    }
    if (v.kind != GW_JINJA_VALUE_TEXT && v.kind != GW_JINJA_VALUE_LIST)
        gw_jinja_value_refuse(r, "a slice", v);
    (void)gw_jinja_value_whole(part[2], &step);
    if (step == 0 || step == INT64_MIN)
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "a slice with step 0");
    if (!gw_jinja_run_ok(r) || !gw_jinja_value_length(v, &size))
        return gw_jinja_value_none();
    length = (int64_t)size;
    int64_t low = step > 0 ? 0 : -1, high = step > 0 ? length : length - 1;
    from = step > 0 ? low : high;
    until = step > 0 ? high : low;
    if (gw_jinja_value_whole(part[0], &from))
        from = clamp(from, length, low, high);
    if (gw_jinja_value_whole(part[1], &until))
        until = clamp(until, length, low, high);
    count = step > 0 ? (until > from ? (until - from - 1) / step + 1 : 0)
                     : (from > until ? (from - until - 1) / -step + 1 : 0);
    if (v.kind == GW_JINJA_VALUE_TEXT)
        return gw_jinja_text_pick(r, v.as.text, from, step, (size_t)count);
    struct gw_jinja_value list = gw_jinja_value_list(r, (size_t)count, v.as.list->tuple, &to);
    for (int64_t i = 0; to && i < count; i++)
        to[i] = v.as.list->items[from + i * step];
    return list;
}

/* ---- calls ---- */

static struct gw_jinja_args arguments(struct gw_jinja_run *r, const struct gw_jinja_node *n,
                                      struct scope *s)
{
    struct gw_jinja_value *values = gw_jinja_run_get(r, n->n, sizeof *values);
    for (size_t i = 0; values && i < n->n; i++)
        values[i] = eval(r, n->items[i], s);
    return (struct gw_jinja_args){values ? n->n : 0, values, n->names};
}

/* Runs a body and takes its output back out as a text. */
static struct gw_jinja_value captured(struct gw_jinja_run *r, const struct gw_jinja_node *body,
                                      struct scope *s)
{
    size_t start = r->out.size;
    (void)execute(r, body, s);
    struct gw_jinja_value text = gw_jinja_value_text("", 0);
    if (gw_jinja_run_ok(r) && r->out.size > start)
        text = gw_jinja_value_copy(r, (const char *)r->out.data + start, r->out.size - start);
    r->out.size = start;
    return text;
}

static struct gw_jinja_value call_macro(struct gw_jinja_run *r, const struct gw_jinja_macro *m,
                                        const struct gw_jinja_args *args,
                                        struct gw_jinja_value caller)
{
    struct scope *s = inner(r, m->scope);
    const struct gw_jinja_node *n = m->node;
    size_t placed = 0;
    for (size_t i = 0; i < args->n && gw_jinja_run_ok(r); i++) {
        bool known = args->names[i].size == 0 && i < n->n;
        for (size_t k = 0; k < n->n && args->names[i].size > 0; k++)
            known = known || (n->names[k].size == args->names[i].size &&
                              memcmp(n->names[k].data, args->names[i].data, n->names[k].size) == 0);
        if (!known)
            gw_jinja_run_fail(r, ERR_UNSUPPORTED, "macro %.*s: an argument that it does not have",
                              (int)n->name.size, n->name.data);
        else
            define(r, s, args->names[i].size ? args->names[i] : n->names[i], args->values[i]);
        placed += args->names[i].size == 0;
    }
    for (size_t i = placed; i < n->n && gw_jinja_run_ok(r); i++)
        if (!gw_jinja_value_get_name(r, &s->names, n->names[i].data, n->names[i].size))
            define(r, s, n->names[i], n->items[i] ? eval(r, n->items[i], s) : missing(n->names[i]));
    if (caller.kind != GW_JINJA_VALUE_ABSENT)
        define(r, s, (struct gw_jinja_text){"caller", 6}, caller);
    return gw_jinja_run_ok(r) ? captured(r, n->body, s) : gw_jinja_value_none();
}

static struct gw_jinja_value call(struct gw_jinja_run *r, const struct gw_jinja_node *n,
                                  struct scope *s, struct gw_jinja_value caller)
{
    struct gw_jinja_value f = eval(r, n->a, s);
    struct gw_jinja_args args = arguments(r, n, s);
    if (!gw_jinja_run_ok(r))
        return f;
    r->line = n->line;
    switch (f.kind) {
    case GW_JINJA_VALUE_FUNCTION:
        return gw_jinja_method_call_function(r, f.as.function, &args);
    case GW_JINJA_VALUE_METHOD:
        return gw_jinja_method_call(r, f.as.method, &args);
    case GW_JINJA_VALUE_MACRO:
        return call_macro(r, f.as.macro, &args, caller);
    case GW_JINJA_VALUE_UNDEFINED:
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "'%.*s' is called, but is not built in or defined",
                          (int)(f.as.text.size > 60 ? 60 : f.as.text.size), f.as.text.data);
        return f;
    default:
        gw_jinja_value_refuse(r, "a call", f);
        return f;
    }
}

/* ---- expressions ---- */

static struct gw_jinja_value comparison(struct gw_jinja_run *r, const struct gw_jinja_node *n,
                                        struct scope *s)
{
    struct gw_jinja_value a = eval(r, n->a, s), b;
    for (size_t i = 0; i < n->n; i++, a = b) {
        b = eval(r, n->items[i], s);
        if (!gw_jinja_run_ok(r) || !gw_jinja_operator_compares(r, n->names[i], a, b))
            return gw_jinja_value_bool(false);
    }
    return gw_jinja_value_bool(true);
}

static struct gw_jinja_value sequence(struct gw_jinja_run *r, const struct gw_jinja_node *n,
                                      struct scope *s)
{
    struct gw_jinja_value *to, list;
    list = gw_jinja_value_list(r, n->n, n->kind == GW_JINJA_NODE_TUPLE, &to);
    for (size_t i = 0; to && i < n->n; i++)
        to[i] = eval(r, n->items[i], s);
    return list;
}

static struct gw_jinja_value dict(struct gw_jinja_run *r, const struct gw_jinja_node *n,
                                  struct scope *s)
{
    struct gw_jinja_value v = gw_jinja_value_dict(r, GW_JINJA_VALUE_DICT, n->n / 2);
    for (size_t i = 0; i + 1 < n->n && gw_jinja_run_ok(r); i += 2) {
        struct gw_jinja_value key = eval(r, n->items[i], s), value = eval(r, n->items[i + 1], s);
        if (gw_jinja_run_ok(r))
            gw_jinja_value_put(r, v.as.dict, key, value);
    }
    return v;
}

static struct gw_jinja_value concat(struct gw_jinja_run *r, const struct gw_jinja_node *n,
                                    struct scope *s)
{
    struct gw_jinja_value all = gw_jinja_value_text("", 0);
    for (size_t i = 0; i < n->n && gw_jinja_run_ok(r); i++) {
        struct gw_jinja_text t = gw_jinja_text_of(r, eval(r, n->items[i], s));
        all = i == 0 ? gw_jinja_value_text(t.data, t.size)
                     : gw_jinja_operator_join(r, all.as.text, t);
    }
    return all;
}

static struct gw_jinja_value operation(struct gw_jinja_run *r, const struct gw_jinja_node *n,
                                       struct scope *s)
{
    struct gw_jinja_value a = eval(r, n->a, s), b;
    struct gw_jinja_args args;
    bool is;
    if (!gw_jinja_run_ok(r))
        return a;
    switch (n->kind) {
    case GW_JINJA_NODE_ATTRIBUTE:
        return attribute(r, a, n->name);
    case GW_JINJA_NODE_ITEM:
        b = eval(r, n->b, s);
        return gw_jinja_run_ok(r) ? item(r, a, b) : b;
    case GW_JINJA_NODE_FILTER:
        args = arguments(r, n, s);
        return gw_jinja_run_ok(r) ? gw_jinja_filter_apply(r, n->filter, a, &args) : a;
    case GW_JINJA_NODE_TEST:
        args = arguments(r, n, s);
        is = gw_jinja_run_ok(r) && gw_jinja_test_apply(r, n->test, a, &args);
        return gw_jinja_value_bool(is != (n->name.size > 0));
    case GW_JINJA_NODE_NEGATE:
    case GW_JINJA_NODE_PLUS:
        return gw_jinja_operator_sign(r, a, n->kind == GW_JINJA_NODE_NEGATE);
    case GW_JINJA_NODE_NOT:
        return gw_jinja_value_bool(!gw_jinja_value_true(a));
    case GW_JINJA_NODE_AND:
        return gw_jinja_value_true(a) ? eval(r, n->b, s) : a;
    case GW_JINJA_NODE_OR:
        return gw_jinja_value_true(a) ? a : eval(r, n->b, s);
    default:
        b = eval(r, n->b, s);
        return gw_jinja_run_ok(r) ? gw_jinja_operator_apply(r, n->name, a, b) : b;
    }
}

static struct gw_jinja_value eval(struct gw_jinja_run *r, const struct gw_jinja_node *n,
                                  struct scope *s)
{
    struct gw_jinja_value v = gw_jinja_value_none();
    if (!gw_jinja_run_step(r, 1) || !gw_jinja_run_enter(r))
        return v;
    r->line = n->line;
    switch (n->kind) {
    case GW_JINJA_NODE_LITERAL:
        v = n->value;
        break;
    case GW_JINJA_NODE_NAME:
        v = look_up(r, s, n->name);
        break;
    case GW_JINJA_NODE_LIST:
    case GW_JINJA_NODE_TUPLE:
        v = sequence(r, n, s);
        break;
    case GW_JINJA_NODE_DICT:
        v = dict(r, n, s);
        break;
    case GW_JINJA_NODE_SLICE:
        v = slice(r, n, s);
        break;
    case GW_JINJA_NODE_CALL:
        v = call(r, n, s, (struct gw_jinja_value){.kind = GW_JINJA_VALUE_ABSENT});
        break;
    case GW_JINJA_NODE_COMPARE:
        v = comparison(r, n, s);
        break;
    case GW_JINJA_NODE_CONCAT:
        v = concat(r, n, s);
        break;
    case GW_JINJA_NODE_CONDITIONAL:
        if (gw_jinja_value_true(eval(r, n->b, s)))
            v = eval(r, n->a, s);
        else
            v = n->c ? eval(r, n->c, s) : gw_jinja_value_undefined("an inline if without else");
        break;
    default:
        v = operation(r, n, s);
        break;
    }
    gw_jinja_run_leave(r);
    return v;
}

/* ---- statements ---- */

static void assign(struct gw_jinja_run *r, const struct gw_jinja_node *target, struct scope *s,
                   struct gw_jinja_value v)
{
    if (!gw_jinja_run_ok(r))
        return;
    r->line = target->line;
    if (target->kind == GW_JINJA_NODE_NAME) {
        define(r, s, target->name, v);
    } else if (target->kind == GW_JINJA_NODE_ATTRIBUTE) {
        struct gw_jinja_value of = eval(r, target->a, s);
        if (of.kind == GW_JINJA_VALUE_NAMESPACE)
            gw_jinja_value_put(r, of.as.dict,
                               gw_jinja_value_text(target->name.data, target->name.size), v);
        else
            gw_jinja_value_refuse(r, "set of an attribute needs a namespace", of);
    } else {
        const struct gw_jinja_list *list = gw_jinja_value_iterate(r, v);
        if (list && list->n != target->n)
            gw_jinja_run_fail(r, ERR_UNSUPPORTED, "%zu values for %zu names", list->n, target->n);
        for (size_t i = 0; list && i < list->n && gw_jinja_run_ok(r); i++)
            assign(r, target->items[i], s, list->items[i]);
    }
}

/* The chain of filters over a block's text: the innermost filter node has no operand. */
static struct gw_jinja_value filtered(struct gw_jinja_run *r, const struct gw_jinja_node *n,
                                      struct scope *s, struct gw_jinja_value v)
{
    if (!n || !gw_jinja_run_enter(r))
        return v;
    v = filtered(r, n->a, s, v);
    struct gw_jinja_args args = arguments(r, n, s);
    if (gw_jinja_run_ok(r))
        v = gw_jinja_filter_apply(r, n->filter, v, &args);
    gw_jinja_run_leave(r);
    return v;
}

static void write_value(struct gw_jinja_run *r, struct gw_jinja_value v)
{
    struct gw_jinja_text t = gw_jinja_text_of(r, v);
    if (!gw_jinja_run_step(r, 1 + t.size / 256))
        return;
    buf_append(&r->out, t.data, t.size);
    if (buf_failed(&r->out))
        gw_jinja_run_fail(r, ERR_LIMIT, "the prompt becomes longer than %zu bytes", r->out.ceiling);
}

/* Items for which the loop's own `if` holds. */
static const struct gw_jinja_list *loop_items(struct gw_jinja_run *r, const struct gw_jinja_node *n,
                                              struct scope *s)
{
    const struct gw_jinja_list *all = gw_jinja_value_iterate(r, eval(r, n->b, s));
    struct gw_jinja_value *kept;
    size_t n_kept = 0;
    if (!all || !gw_jinja_run_ok(r) || n->n == 0)
        return gw_jinja_run_ok(r) ? all : NULL;
    struct gw_jinja_value list = gw_jinja_value_list(r, all->n, false, &kept);
    for (size_t i = 0; kept && i < all->n && gw_jinja_run_ok(r); i++) {
        struct scope *one = inner(r, s);
        assign(r, n->a, one, all->items[i]);
        if (gw_jinja_value_true(eval(r, n->items[0], one)))
            kept[n_kept++] = all->items[i];
    }
    if (!kept || !gw_jinja_run_ok(r))
        return NULL;
    struct gw_jinja_value *to;
    list = gw_jinja_value_list(r, n_kept, false, &to);
    if (to && n_kept > 0)
        memcpy(to, kept, n_kept * sizeof *to);
    return list.as.list;
}

static enum flow for_loop(struct gw_jinja_run *r, const struct gw_jinja_node *n, struct scope *s)
{
    const struct gw_jinja_list *list = loop_items(r, n, s);
    if (list && list->n == 0 && n->c)
        return execute(r, n->c, s);
    struct gw_jinja_loop *loop = gw_jinja_run_get(r, 1, sizeof *loop);
    for (size_t i = 0; loop && list && i < list->n && gw_jinja_run_ok(r); i++) {
        struct scope *one = inner(r, s);
        *loop = (struct gw_jinja_loop){i, list->n, list->items};
        define(r, one, (struct gw_jinja_text){"loop", 4},
               (struct gw_jinja_value){GW_JINJA_VALUE_LOOP, {.loop = loop}});
        assign(r, n->a, one, list->items[i]);
        if (gw_jinja_run_ok(r) && execute(r, n->body, one) == FLOW_BREAK)
            break;
    }
    return FLOW_NEXT;
}

static struct gw_jinja_value new_macro(struct gw_jinja_run *r, const struct gw_jinja_node *n,
                                       struct scope *s)
{
    struct gw_jinja_macro *m = gw_jinja_run_get(r, 1, sizeof *m);
    if (!m)
        return gw_jinja_value_none();
    *m = (struct gw_jinja_macro){n, s};
    return (struct gw_jinja_value){GW_JINJA_VALUE_MACRO, {.macro = m}};
}

static enum flow scoped(struct gw_jinja_run *r, const struct gw_jinja_node *n, struct scope *s)
{
    struct scope *with = inner(r, s);
    for (size_t i = 0; i + 1 < n->n; i += 2)
        assign(r, n->items[i], with, eval(r, n->items[i + 1], s));
    return execute(r, n->body, with);
}

static enum flow execute_one(struct gw_jinja_run *r, const struct gw_jinja_node *n, struct scope *s)
{
    switch (n->kind) {
    case GW_JINJA_NODE_DATA:
        write_value(r, gw_jinja_value_text(n->name.data, n->name.size));
        return FLOW_NEXT;
    case GW_JINJA_NODE_OUTPUT:
        write_value(r, eval(r, n->a, s));
        return FLOW_NEXT;
    case GW_JINJA_NODE_IF:
        if (gw_jinja_value_true(eval(r, n->a, s)))
            return execute(r, n->b, s);
        return n->c ? execute(r, n->c, s) : FLOW_NEXT;
    case GW_JINJA_NODE_FOR:
        return for_loop(r, n, s);
    case GW_JINJA_NODE_SET:
        assign(r, n->a, s, eval(r, n->b, s));
        return FLOW_NEXT;
    case GW_JINJA_NODE_SET_BLOCK:
        assign(r, n->a, s, filtered(r, n->b, s, captured(r, n->body, inner(r, s))));
        return FLOW_NEXT;
    case GW_JINJA_NODE_FILTER_BLOCK:
        write_value(r, filtered(r, n->b, s, captured(r, n->body, inner(r, s))));
        return FLOW_NEXT;
    case GW_JINJA_NODE_WITH:
        return scoped(r, n, s);
    case GW_JINJA_NODE_MACRO:
        define(r, s, n->name, new_macro(r, n, s));
        return FLOW_NEXT;
    case GW_JINJA_NODE_CALL_BLOCK:
        write_value(r, call(r, n->a, s, new_macro(r, n, s)));
        return FLOW_NEXT;
    case GW_JINJA_NODE_BREAK:
        return FLOW_BREAK;
    case GW_JINJA_NODE_CONTINUE:
        return FLOW_CONTINUE;
    default:
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "a statement that is not built in");
        return FLOW_NEXT;
    }
}

static enum flow execute(struct gw_jinja_run *r, const struct gw_jinja_node *n, struct scope *s)
{
    enum flow flow = FLOW_NEXT;
    if (!gw_jinja_run_step(r, 1) || !gw_jinja_run_enter(r))
        return flow;
    r->line = n->line;
    if (n->kind != GW_JINJA_NODE_SEQUENCE)
        flow = execute_one(r, n, s);
    for (size_t i = 0; n->kind == GW_JINJA_NODE_SEQUENCE && i < n->n && flow == FLOW_NEXT; i++)
        flow = gw_jinja_run_ok(r) ? execute(r, n->items[i], s) : FLOW_BREAK;
    gw_jinja_run_leave(r);
    return flow;
}

void gw_jinja_eval(struct gw_jinja_run *r, const struct gw_jinja_node *tree,
                   const struct gw_jinja_dict *variables)
{
    struct scope globals = {.names = *variables}, top = {.outer = &globals};
    (void)execute(r, tree, &top);
}

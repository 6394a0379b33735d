#include "gw_jinja_operator.h"

#include <math.h>
#include <string.h>

#include "gw_jinja_run.h"

struct gw_jinja_value gw_jinja_operator_join(struct gw_jinja_run *r, struct gw_jinja_text a,
                                             struct gw_jinja_text b)
{
    const char *text = gw_jinja_run_join(r, a.data, a.size, b.data, b.size);
    return gw_jinja_value_text(text ? text : "", text ? a.size + b.size : 0);
}

static struct gw_jinja_value lists_joined(struct gw_jinja_run *r, const struct gw_jinja_list *a,
                                          const struct gw_jinja_list *b)
{
    struct gw_jinja_value *to, list = gw_jinja_value_list(r, a->n + b->n, a->tuple, &to);
    if (to && a->n > 0)
        memcpy(to, a->items, a->n * sizeof *to);
    if (to && b->n > 0)
        memcpy(to + a->n, b->items, b->n * sizeof *to);
    return list;
}

static struct gw_jinja_value repeated(struct gw_jinja_run *r, struct gw_jinja_value v,
                                      int64_t times)
{
    struct gw_jinja_value all = v.kind == GW_JINJA_VALUE_TEXT ? gw_jinja_value_text("", 0) : v, *to;
    if (v.kind == GW_JINJA_VALUE_LIST)
        all = gw_jinja_value_list(r, 0, v.as.list->tuple, &to);
    for (int64_t i = 0; i < times && gw_jinja_run_step(r, 1); i++)
        all = v.kind == GW_JINJA_VALUE_TEXT ? gw_jinja_operator_join(r, all.as.text, v.as.text)
                                            : lists_joined(r, all.as.list, v.as.list);
    return all;
}

static struct gw_jinja_value whole_result(struct gw_jinja_run *r, bool overflow, int64_t i)
{
    if (overflow)
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "an integer beyond 64 bits");
    return gw_jinja_value_int(i);
}

static struct gw_jinja_value power(struct gw_jinja_run *r, int64_t x, int64_t y)
{
    int64_t i = 1;
    bool overflow = false;
    if (y < 0)
        return gw_jinja_value_float(pow((double)x, (double)y));
    for (; y > 0 && !overflow && gw_jinja_run_step(r, 1); y--)
        overflow = __builtin_mul_overflow(i, x, &i);
    return whole_result(r, overflow, i);
}

/* Rounds down, as Python does. */
static struct gw_jinja_value divided(struct gw_jinja_run *r, int64_t x, int64_t y, bool rest)
{
    if (y == 0 || (x == INT64_MIN && y == -1)) {
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "division by zero or beyond 64 bits");
        return gw_jinja_value_int(0);
    }
    int64_t q = x / y, m = x % y;
    if (m != 0 && (m < 0) != (y < 0)) {
        q--;
        m += y;
    }
    return gw_jinja_value_int(rest ? m : q);
}

static struct gw_jinja_value whole_operation(struct gw_jinja_run *r, struct gw_jinja_text op,
                                             int64_t x, int64_t y)
{
    int64_t i = 0;
    bool overflow;
    if (gw_jinja_value_text_is(op, "//") || gw_jinja_value_text_is(op, "%"))
        return divided(r, x, y, gw_jinja_value_text_is(op, "%"));
    if (gw_jinja_value_text_is(op, "**"))
        return power(r, x, y);
    if (gw_jinja_value_text_is(op, "+"))
        overflow = __builtin_add_overflow(x, y, &i);
    else if (gw_jinja_value_text_is(op, "-"))
        overflow = __builtin_sub_overflow(x, y, &i);
    else
        overflow = __builtin_mul_overflow(x, y, &i);
    return whole_result(r, overflow, i);
}

static struct gw_jinja_value real_operation(struct gw_jinja_run *r, struct gw_jinja_text op,
                                            double x, double y)
{
    if (gw_jinja_value_text_is(op, "+"))
        return gw_jinja_value_float(x + y);
    if (gw_jinja_value_text_is(op, "-"))
        return gw_jinja_value_float(x - y);
    if (gw_jinja_value_text_is(op, "*"))
        return gw_jinja_value_float(x * y);
    if (gw_jinja_value_text_is(op, "**"))
        return gw_jinja_value_float(pow(x, y));
    if (y == 0)
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "division by zero");
    if (gw_jinja_value_text_is(op, "/"))
        return gw_jinja_value_float(x / y);
    if (gw_jinja_value_text_is(op, "//"))
        return gw_jinja_value_float(floor(x / y));
    double m = fmod(x, y);
    return gw_jinja_value_float(m != 0 && (m < 0) != (y < 0) ? m + y : m);
}

struct gw_jinja_value gw_jinja_operator_apply(struct gw_jinja_run *r, struct gw_jinja_text op,
                                              struct gw_jinja_value a, struct gw_jinja_value b)
{
    int64_t x, y;
    bool sequences =
        a.kind == b.kind && (a.kind == GW_JINJA_VALUE_TEXT || a.kind == GW_JINJA_VALUE_LIST);
    if (gw_jinja_value_text_is(op, "+") && sequences)
        return a.kind == GW_JINJA_VALUE_TEXT ? gw_jinja_operator_join(r, a.as.text, b.as.text)
                                             : lists_joined(r, a.as.list, b.as.list);
    if (gw_jinja_value_text_is(op, "*") && gw_jinja_value_whole(b, &y) &&
        (a.kind == GW_JINJA_VALUE_TEXT || a.kind == GW_JINJA_VALUE_LIST))
        return repeated(r, a, y);
    if (gw_jinja_value_text_is(op, "*") && gw_jinja_value_whole(a, &x) &&
        (b.kind == GW_JINJA_VALUE_TEXT || b.kind == GW_JINJA_VALUE_LIST))
        return repeated(r, b, x);
    if (gw_jinja_value_is_number(a) && gw_jinja_value_is_number(b)) {
        if (!gw_jinja_value_text_is(op, "/") && gw_jinja_value_whole(a, &x) &&
            gw_jinja_value_whole(b, &y))
            return whole_operation(r, op, x, y);
        return real_operation(r, op, gw_jinja_value_real(a), gw_jinja_value_real(b));
    }
    if (a.kind == GW_JINJA_VALUE_UNDEFINED || b.kind == GW_JINJA_VALUE_UNDEFINED)
        gw_jinja_value_refuse(r, "an operator", a.kind == GW_JINJA_VALUE_UNDEFINED ? a : b);
    gw_jinja_run_fail(r, ERR_UNSUPPORTED, "'%s' %.*s '%s' is not possible", gw_jinja_value_type(a),
                      (int)op.size, op.data, gw_jinja_value_type(b));
    return gw_jinja_value_none();
}

bool gw_jinja_operator_compares(struct gw_jinja_run *r, struct gw_jinja_text op,
                                struct gw_jinja_value a, struct gw_jinja_value b)
{
    if (gw_jinja_value_text_is(op, "=="))
        return gw_jinja_value_equal(r, a, b);
    if (gw_jinja_value_text_is(op, "!="))
        return !gw_jinja_value_equal(r, a, b);
    if (gw_jinja_value_text_is(op, "in"))
        return gw_jinja_value_contains(r, b, a);
    if (gw_jinja_value_text_is(op, "not"))
        return !gw_jinja_value_contains(r, b, a);
    int order = gw_jinja_value_compare(r, a, b);
    return op.data[0] == '<' ? order < 0 || (order == 0 && op.size == 2)
                             : order > 0 || (order == 0 && op.size == 2);
}

struct gw_jinja_value gw_jinja_operator_sign(struct gw_jinja_run *r, struct gw_jinja_value v,
                                             bool minus)
{
    int64_t i;
    if (gw_jinja_value_whole(v, &i))
        return minus ? whole_operation(r, (struct gw_jinja_text){"-", 1}, 0, i)
                     : gw_jinja_value_int(i);
    if (v.kind == GW_JINJA_VALUE_FLOAT)
        return gw_jinja_value_float(minus ? -v.as.real : v.as.real);
    gw_jinja_value_refuse(r, "a sign", v);
    return v;
}

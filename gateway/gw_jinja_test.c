#include "gw_jinja_test.h"

#include <string.h>

#include "gw_jinja_run.h"
#include "gw_jinja_text.h"

struct gw_jinja_test_row {
    const char *name, *params;
    bool (*apply)(struct gw_jinja_run *r, struct gw_jinja_value v, const struct gw_jinja_value *p);
};

#define TEST(name)                                                    \
    static bool name(struct gw_jinja_run *r, struct gw_jinja_value v, \
                     const struct gw_jinja_value *p)
#define UNUSED ((void)r, (void)v, (void)p)

TEST(defined)
{
    UNUSED;
    return v.kind != GW_JINJA_VALUE_UNDEFINED;
}

TEST(undefined)
{
    UNUSED;
    return v.kind == GW_JINJA_VALUE_UNDEFINED;
}

TEST(none)
{
    UNUSED;
    return v.kind == GW_JINJA_VALUE_NONE;
}

TEST(text)
{
    UNUSED;
    return v.kind == GW_JINJA_VALUE_TEXT;
}

TEST(mapping)
{
    UNUSED;
    return v.kind == GW_JINJA_VALUE_DICT;
}

TEST(iterable)
{
    UNUSED;
    return v.kind == GW_JINJA_VALUE_UNDEFINED || v.kind == GW_JINJA_VALUE_TEXT ||
           v.kind == GW_JINJA_VALUE_LIST || v.kind == GW_JINJA_VALUE_DICT;
}

TEST(sequence)
{
    return iterable(r, v, p);
}

TEST(number)
{
    UNUSED;
    return gw_jinja_value_is_number(v);
}

TEST(integer)
{
    UNUSED;
    return v.kind == GW_JINJA_VALUE_INT;
}

TEST(real)
{
    UNUSED;
    return v.kind == GW_JINJA_VALUE_FLOAT;
}

TEST(boolean)
{
    UNUSED;
    return v.kind == GW_JINJA_VALUE_BOOL;
}

TEST(is_true)
{
    UNUSED;
    return v.kind == GW_JINJA_VALUE_BOOL && v.as.boolean;
}

TEST(is_false)
{
    UNUSED;
    return v.kind == GW_JINJA_VALUE_BOOL && !v.as.boolean;
}

TEST(callable)
{
    UNUSED;
    return v.kind == GW_JINJA_VALUE_FUNCTION || v.kind == GW_JINJA_VALUE_METHOD ||
           v.kind == GW_JINJA_VALUE_MACRO;
}

TEST(equal)
{
    return gw_jinja_value_equal(r, v, p[0]);
}

TEST(unequal)
{
    return !gw_jinja_value_equal(r, v, p[0]);
}

TEST(less)
{
    return gw_jinja_value_compare(r, v, p[0]) < 0;
}

TEST(less_equal)
{
    return gw_jinja_value_compare(r, v, p[0]) <= 0;
}

TEST(greater)
{
    return gw_jinja_value_compare(r, v, p[0]) > 0;
}

TEST(greater_equal)
{
    return gw_jinja_value_compare(r, v, p[0]) >= 0;
}

TEST(within)
{
    return gw_jinja_value_contains(r, p[0], v);
}

static bool remainder_is(struct gw_jinja_run *r, struct gw_jinja_value v, int64_t by, int64_t want)
{
    int64_t i;
    if (!gw_jinja_value_whole(v, &i) || by == 0) {
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "a test of divisibility needs integers");
        return false;
    }
    return by == -1 || (uint64_t)((i % by + by) % by) == (uint64_t)want;
}

TEST(odd)
{
    (void)p;
    return remainder_is(r, v, 2, 1);
}

TEST(even)
{
    (void)p;
    return remainder_is(r, v, 2, 0);
}

TEST(divisible)
{
    int64_t by = 0;
    (void)gw_jinja_value_whole(p[0], &by);
    return remainder_is(r, v, by, 0);
}

static bool recased_equal(struct gw_jinja_run *r, struct gw_jinja_value v,
                          enum gw_jinja_text_case how)
{
    struct gw_jinja_text t = gw_jinja_text_of(r, v);
    struct gw_jinja_text other = gw_jinja_text_recase(r, t, how).as.text;
    enum gw_jinja_text_case opposite =
        how == GW_JINJA_TEXT_UPPER ? GW_JINJA_TEXT_LOWER : GW_JINJA_TEXT_UPPER;
    struct gw_jinja_text inverse = gw_jinja_text_recase(r, t, opposite).as.text;
    if (!gw_jinja_run_ok(r) || t.size == 0)
        return false;
    return memcmp(t.data, other.data, t.size) == 0 && memcmp(t.data, inverse.data, t.size) != 0;
}

TEST(upper)
{
    (void)p;
    return recased_equal(r, v, GW_JINJA_TEXT_UPPER);
}

TEST(lower)
{
    (void)p;
    return recased_equal(r, v, GW_JINJA_TEXT_LOWER);
}

static const struct gw_jinja_test_row rows[] = {
    {"defined", "", defined},
    {"undefined", "", undefined},
    {"none", "", none},
    {"string", "", text},
    {"mapping", "", mapping},
    {"iterable", "", iterable},
    {"sequence", "", sequence},
    {"number", "", number},
    {"integer", "", integer},
    {"float", "", real},
    {"boolean", "", boolean},
    {"true", "", is_true},
    {"false", "", is_false},
    {"callable", "", callable},
    {"eq", "other", equal},
    {"equalto", "other", equal},
    {"==", "other", equal},
    {"ne", "other", unequal},
    {"!=", "other", unequal},
    {"lt", "other", less},
    {"lessthan", "other", less},
    {"<", "other", less},
    {"le", "other", less_equal},
    {"<=", "other", less_equal},
    {"gt", "other", greater},
    {"greaterthan", "other", greater},
    {">", "other", greater},
    {"ge", "other", greater_equal},
    {">=", "other", greater_equal},
    {"in", "seq", within},
    {"odd", "", odd},
    {"even", "", even},
    {"divisibleby", "num", divisible},
    {"upper", "", upper},
    {"lower", "", lower},
};

const struct gw_jinja_test_row *gw_jinja_test_find(struct gw_jinja_text name)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strlen(rows[i].name) == name.size && memcmp(rows[i].name, name.data, name.size) == 0)
            return &rows[i];
    return NULL;
}

bool gw_jinja_test_apply(struct gw_jinja_run *r, const struct gw_jinja_test_row *row,
                         struct gw_jinja_value v, const struct gw_jinja_args *args)
{
    struct gw_jinja_value p[GW_JINJA_VALUE_MAX_PARAMS];
    if (!gw_jinja_value_bind(r, row->name, row->params, args, p))
        return false;
    if (*row->params && p[0].kind == GW_JINJA_VALUE_ABSENT) {
        gw_jinja_run_fail(r, ERR_UNSUPPORTED, "the test '%s' needs an argument", row->name);
        return false;
    }
    return row->apply(r, v, p);
}

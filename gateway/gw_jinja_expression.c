#include "gw_jinja_expression.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gw_jinja_filter.h"
#include "gw_jinja_run.h"
#include "gw_jinja_test.h"

typedef struct gw_jinja_node *expression_fn(struct gw_jinja_build *p);

static bool is_tuple_end(const struct gw_jinja_build *p)
{
    return p->at->kind == GW_JINJA_LEX_VARIABLE_END || p->at->kind == GW_JINJA_LEX_BLOCK_END ||
           gw_jinja_build_is_operator(p, ")");
}

/* One expression, or several with commas between, which are a tuple. */
struct gw_jinja_node *gw_jinja_expression_tuple(struct gw_jinja_build *p)
{
    struct gw_jinja_node *first = gw_jinja_expression_conditional(p), *all;
    if (!gw_jinja_build_is_operator(p, ","))
        return first;
    all = gw_jinja_build_node(p, GW_JINJA_NODE_TUPLE);
    gw_jinja_build_add_item(p, all, first);
    while (gw_jinja_run_ok(p->run) && gw_jinja_build_take_operator(p, ",") && !is_tuple_end(p))
        gw_jinja_build_add_item(p, all, gw_jinja_expression_conditional(p));
    return all;
}

static struct gw_jinja_node *in_round(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n = gw_jinja_build_is_operator(p, ")")
                                  ? gw_jinja_build_node(p, GW_JINJA_NODE_TUPLE)
                                  : gw_jinja_expression_tuple(p);
    gw_jinja_build_need_operator(p, ")");
    return n;
}

static struct gw_jinja_node *in_square(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n = gw_jinja_build_node(p, GW_JINJA_NODE_LIST);
    while (gw_jinja_run_ok(p->run) && !gw_jinja_build_is_operator(p, "]")) {
        gw_jinja_build_add_item(p, n, gw_jinja_expression_conditional(p));
        if (!gw_jinja_build_is_operator(p, "]"))
            gw_jinja_build_need_operator(p, ",");
    }
    gw_jinja_build_need_operator(p, "]");
    return n;
}

static struct gw_jinja_node *in_curly(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n = gw_jinja_build_node(p, GW_JINJA_NODE_DICT);
    while (gw_jinja_run_ok(p->run) && !gw_jinja_build_is_operator(p, "}")) {
        gw_jinja_build_add_item(p, n, gw_jinja_expression_conditional(p));
        gw_jinja_build_need_operator(p, ":");
        gw_jinja_build_add_item(p, n, gw_jinja_expression_conditional(p));
        if (!gw_jinja_build_is_operator(p, "}"))
            gw_jinja_build_need_operator(p, ",");
    }
    gw_jinja_build_need_operator(p, "}");
    return n;
}

static struct gw_jinja_node *number(struct gw_jinja_build *p)
{
    char text[64];
    size_t n = 0;
    struct gw_jinja_text t = p->at->text;
    if (t.size >= sizeof text)
        return gw_jinja_build_fail(p, ERR_UNSUPPORTED, "expected a number of fewer digits");
    for (size_t i = 0; i < t.size; i++)
        if (t.data[i] != '_')
            text[n++] = t.data[i];
    text[n] = '\0';
    if (p->at->kind == GW_JINJA_LEX_FLOAT) {
        p->at++;
        return gw_jinja_build_literal(p, gw_jinja_value_float(strtod(text, NULL)));
    }
    errno = 0;
    long long i = strtoll(text, NULL, 10);
    if (errno != 0)
        return gw_jinja_build_fail(p, ERR_UNSUPPORTED, "expected a number below 2^63");
    p->at++;
    return gw_jinja_build_literal(p, gw_jinja_value_int(i));
}

static struct gw_jinja_node *texts(struct gw_jinja_build *p)
{
    struct gw_jinja_text t = p->at++->text;
    while (p->at->kind == GW_JINJA_LEX_TEXT) {
        struct gw_jinja_text more = p->at++->text;
        const char *joined = gw_jinja_run_join(p->run, t.data, t.size, more.data, more.size);
        if (!joined)
            return NULL;
        t = (struct gw_jinja_text){joined, t.size + more.size};
    }
    return gw_jinja_build_literal(p, gw_jinja_value_text(t.data, t.size));
}

static struct gw_jinja_node *named(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n;
    if (gw_jinja_build_take_name(p, "true") || gw_jinja_build_take_name(p, "True"))
        return gw_jinja_build_literal(p, gw_jinja_value_bool(true));
    if (gw_jinja_build_take_name(p, "false") || gw_jinja_build_take_name(p, "False"))
        return gw_jinja_build_literal(p, gw_jinja_value_bool(false));
    if (gw_jinja_build_take_name(p, "none") || gw_jinja_build_take_name(p, "None"))
        return gw_jinja_build_literal(p, gw_jinja_value_none());
    n = gw_jinja_build_node(p, GW_JINJA_NODE_NAME);
    if (gw_jinja_run_ok(p->run))
        n->name = p->at->text;
    p->at++;
    return n;
}

static struct gw_jinja_node *primary(struct gw_jinja_build *p)
{
    switch (p->at->kind) {
    case GW_JINJA_LEX_NAME:
        return named(p);
    case GW_JINJA_LEX_TEXT:
        return texts(p);
    case GW_JINJA_LEX_INT:
    case GW_JINJA_LEX_FLOAT:
        return number(p);
    default:
        if (gw_jinja_build_take_operator(p, "("))
            return in_round(p);
        if (gw_jinja_build_take_operator(p, "["))
            return in_square(p);
        if (gw_jinja_build_take_operator(p, "{"))
            return in_curly(p);
        return gw_jinja_build_fail(p, ERR_FORMAT, "expected an expression");
    }
}

/* Behind "(": arguments into the call, filter or test. */
static void arguments(struct gw_jinja_build *p, struct gw_jinja_node *n)
{
    bool by_name = false;
    while (gw_jinja_run_ok(p->run) && !gw_jinja_build_is_operator(p, ")")) {
        struct gw_jinja_text name = {"", 0};
        if (gw_jinja_build_is_operator(p, "*") || gw_jinja_build_is_operator(p, "**"))
            (void)gw_jinja_build_fail(p, ERR_UNSUPPORTED,
                                      "expected an argument (* and ** are not built in)");
        if (p->at->kind == GW_JINJA_LEX_NAME && p->at[1].kind == GW_JINJA_LEX_OPERATOR &&
            p->at[1].text.size == 1 && *p->at[1].text.data == '=') {
            name = p->at->text;
            p->at += 2;
            by_name = true;
        } else if (by_name) {
            (void)gw_jinja_build_fail(p, ERR_FORMAT, "expected an argument with its name");
        }
        gw_jinja_build_add(p, n, gw_jinja_expression_conditional(p), name);
        if (!gw_jinja_build_is_operator(p, ")"))
            gw_jinja_build_need_operator(p, ",");
    }
    gw_jinja_build_need_operator(p, ")");
}

static struct gw_jinja_node *subscript(struct gw_jinja_build *p, struct gw_jinja_node *of)
{
    struct gw_jinja_node *n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_ITEM, of, NULL),
                         *parts[3] = {0};
    size_t part = 0;
    bool slice = false;
    while (gw_jinja_run_ok(p->run) && !gw_jinja_build_is_operator(p, "]")) {
        if (!gw_jinja_build_is_operator(p, ":")) {
            parts[part] = gw_jinja_expression_tuple(p);
            if (gw_jinja_build_is_operator(p, "]"))
                break;
        }
        slice = true;
        gw_jinja_build_need_operator(p, ":");
        if (++part == 3)
            (void)gw_jinja_build_fail(p, ERR_FORMAT, "expected ']'");
    }
    if (gw_jinja_run_ok(p->run) && !slice && !parts[0])
        (void)gw_jinja_build_fail(p, ERR_FORMAT, "expected an index");
    gw_jinja_build_need_operator(p, "]");
    if (!gw_jinja_run_ok(p->run))
        return n;
    n->b = parts[0];
    if (slice) {
        n->kind = GW_JINJA_NODE_SLICE;
        for (part = 0; part < 3; part++)
            gw_jinja_build_add_item(p, n, parts[part]);
    }
    return n;
}

struct gw_jinja_node *gw_jinja_expression_attribute(struct gw_jinja_build *p,
                                                    struct gw_jinja_node *of)
{
    struct gw_jinja_node *n;
    if (p->at->kind == GW_JINJA_LEX_INT)
        return gw_jinja_build_node_ab(p, GW_JINJA_NODE_ITEM, of, number(p));
    n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_ATTRIBUTE, of, NULL);
    struct gw_jinja_text name = gw_jinja_build_need_name(p);
    if (gw_jinja_run_ok(p->run))
        n->name = name;
    return n;
}

static struct gw_jinja_node *call(struct gw_jinja_build *p, struct gw_jinja_node *of)
{
    struct gw_jinja_node *n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_CALL, of, NULL);
    arguments(p, n);
    return n;
}

static struct gw_jinja_node *postfix(struct gw_jinja_build *p, struct gw_jinja_node *n)
{
    while (gw_jinja_run_ok(p->run)) {
        if (gw_jinja_build_take_operator(p, "."))
            n = gw_jinja_expression_attribute(p, n);
        else if (gw_jinja_build_take_operator(p, "["))
            n = subscript(p, n);
        else if (gw_jinja_build_take_operator(p, "("))
            n = call(p, n);
        else
            break;
    }
    return n;
}

/* Behind "|", or the first filter of a block (of = NULL: the block's text). */
struct gw_jinja_node *gw_jinja_expression_filter(struct gw_jinja_build *p, struct gw_jinja_node *of)
{
    struct gw_jinja_node *n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_FILTER, of, NULL);
    const struct gw_jinja_filter_row *row =
        p->at->kind == GW_JINJA_LEX_NAME ? gw_jinja_filter_find(p->at->text) : NULL;
    if (!row)
        return gw_jinja_build_fail(p, ERR_UNSUPPORTED, "expected a filter that is built in");
    p->at++;
    if (gw_jinja_run_ok(p->run))
        n->filter = row;
    if (gw_jinja_build_take_operator(p, "("))
        arguments(p, n);
    return n;
}

static bool begins_argument(const struct gw_jinja_build *p)
{
    if (p->at->kind == GW_JINJA_LEX_NAME)
        return !gw_jinja_build_is_name(p, "else") && !gw_jinja_build_is_name(p, "or") &&
               !gw_jinja_build_is_name(p, "and") && !gw_jinja_build_is_name(p, "is") &&
               !gw_jinja_build_is_name(p, "if") && !gw_jinja_build_is_name(p, "in") &&
               !gw_jinja_build_is_name(p, "not");
    return p->at->kind == GW_JINJA_LEX_TEXT || p->at->kind == GW_JINJA_LEX_INT ||
           p->at->kind == GW_JINJA_LEX_FLOAT || gw_jinja_build_is_operator(p, "[") ||
           gw_jinja_build_is_operator(p, "{");
}

static struct gw_jinja_node *test(struct gw_jinja_build *p, struct gw_jinja_node *of)
{
    struct gw_jinja_node *n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_TEST, of, NULL);
    if (gw_jinja_build_is_name(p, "not") && gw_jinja_run_ok(p->run))
        n->name = p->at->text;
    (void)gw_jinja_build_take_name(p, "not");
    const struct gw_jinja_test_row *row =
        p->at->kind == GW_JINJA_LEX_NAME ? gw_jinja_test_find(p->at->text) : NULL;
    if (!row)
        return gw_jinja_build_fail(p, ERR_UNSUPPORTED, "expected a test that is built in");
    p->at++;
    if (gw_jinja_run_ok(p->run))
        n->test = row;
    if (gw_jinja_build_take_operator(p, "("))
        arguments(p, n);
    else if (begins_argument(p))
        gw_jinja_build_add_item(p, n, postfix(p, primary(p)));
    return n;
}

static struct gw_jinja_node *filters(struct gw_jinja_build *p, struct gw_jinja_node *n)
{
    while (gw_jinja_run_ok(p->run)) {
        if (gw_jinja_build_take_operator(p, "|"))
            n = gw_jinja_expression_filter(p, n);
        else if (gw_jinja_build_take_name(p, "is"))
            n = test(p, n);
        else if (gw_jinja_build_take_operator(p, "("))
            n = call(p, n);
        else
            break;
    }
    return n;
}

struct gw_jinja_node *gw_jinja_expression_unary(struct gw_jinja_build *p, bool with_filters)
{
    struct gw_jinja_node *n;
    if (!gw_jinja_run_enter(p->run))
        return NULL;
    if (gw_jinja_build_take_operator(p, "-"))
        n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_NEGATE, gw_jinja_expression_unary(p, false),
                                   NULL);
    else if (gw_jinja_build_take_operator(p, "+"))
        n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_PLUS, gw_jinja_expression_unary(p, false),
                                   NULL);
    else
        n = primary(p);
    n = postfix(p, n);
    if (with_filters)
        n = filters(p, n);
    gw_jinja_run_leave(p->run);
    return n;
}

static struct gw_jinja_node *operand(struct gw_jinja_build *p)
{
    return gw_jinja_expression_unary(p, true);
}

/* next (operator next)*, to the left; operators separated by spaces. */
static struct gw_jinja_node *binary(struct gw_jinja_build *p, expression_fn *next,
                                    const char *const *operators)
{
    struct gw_jinja_node *n = next(p);
    while (gw_jinja_run_ok(p->run) && p->at->kind == GW_JINJA_LEX_OPERATOR) {
        size_t i = 0;
        while (operators[i] && !gw_jinja_build_is_operator(p, operators[i]))
            i++;
        if (!operators[i])
            break;
        struct gw_jinja_text name = p->at++->text;
        n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_BINARY, n, next(p));
        if (gw_jinja_run_ok(p->run))
            n->name = name;
    }
    return n;
}

static struct gw_jinja_node *power(struct gw_jinja_build *p)
{
    return binary(p, operand, (const char *const[]){"**", NULL});
}

static struct gw_jinja_node *product(struct gw_jinja_build *p)
{
    return binary(p, power, (const char *const[]){"*", "/", "//", "%", NULL});
}

static struct gw_jinja_node *concat(struct gw_jinja_build *p)
{
    struct gw_jinja_node *first = product(p), *all;
    if (!gw_jinja_build_is_operator(p, "~"))
        return first;
    all = gw_jinja_build_node(p, GW_JINJA_NODE_CONCAT);
    gw_jinja_build_add_item(p, all, first);
    while (gw_jinja_run_ok(p->run) && gw_jinja_build_take_operator(p, "~"))
        gw_jinja_build_add_item(p, all, product(p));
    return all;
}

static struct gw_jinja_node *sum(struct gw_jinja_build *p)
{
    return binary(p, concat, (const char *const[]){"+", "-", NULL});
}

static bool take_comparison(struct gw_jinja_build *p, struct gw_jinja_text *ret)
{
    static const char *const operators[] = {"==", "!=", "<", "<=", ">", ">="};
    *ret = p->at->text;
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
        if (gw_jinja_build_take_operator(p, operators[i]))
            return true;
    if (gw_jinja_build_take_name(p, "in"))
        return true;
    if (gw_jinja_build_is_name(p, "not") && p->at[1].kind == GW_JINJA_LEX_NAME &&
        p->at[1].text.size == 2 && memcmp(p->at[1].text.data, "in", 2) == 0) {
        p->at += 2;
        return true;
    }
    return false;
}

static struct gw_jinja_node *comparison(struct gw_jinja_build *p)
{
    struct gw_jinja_node *first = sum(p), *n = NULL;
    struct gw_jinja_text operator;
    while (gw_jinja_run_ok(p->run) && take_comparison(p, &operator)) {
        if (!n)
            n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_COMPARE, first, NULL);
        gw_jinja_build_add(p, n, sum(p), operator);
    }
    return n ? n : first;
}

static struct gw_jinja_node *negation(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n;
    if (!gw_jinja_build_take_name(p, "not"))
        return comparison(p);
    if (!gw_jinja_run_enter(p->run))
        return NULL;
    n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_NOT, negation(p), NULL);
    gw_jinja_run_leave(p->run);
    return n;
}

static struct gw_jinja_node *conjunction(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n = negation(p);
    while (gw_jinja_run_ok(p->run) && gw_jinja_build_take_name(p, "and"))
        n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_AND, n, negation(p));
    return n;
}

struct gw_jinja_node *gw_jinja_expression_disjunction(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n = conjunction(p);
    while (gw_jinja_run_ok(p->run) && gw_jinja_build_take_name(p, "or"))
        n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_OR, n, conjunction(p));
    return n;
}

struct gw_jinja_node *gw_jinja_expression_conditional(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n;
    if (!gw_jinja_run_enter(p->run))
        return NULL;
    n = gw_jinja_expression_disjunction(p);
    while (gw_jinja_run_ok(p->run) && gw_jinja_build_take_name(p, "if")) {
        n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_CONDITIONAL, n,
                                   gw_jinja_expression_disjunction(p));
        const struct gw_jinja_node *other =
            gw_jinja_build_take_name(p, "else") ? gw_jinja_expression_conditional(p) : NULL;
        if (gw_jinja_run_ok(p->run))
            n->c = other;
    }
    gw_jinja_run_leave(p->run);
    return n;
}

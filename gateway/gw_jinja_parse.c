#include "gw_jinja_parse.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gw_jinja_filter.h"
#include "gw_jinja_lex.h"
#include "gw_jinja_run.h"
#include "gw_jinja_test.h"

struct parser {
    struct gw_jinja_run *run;
    const struct gw_jinja_lex_token *at;
    uint32_t n_loops; /* open for statements, for break and continue */
};

typedef struct gw_jinja_node *expression_fn(struct parser *p);
static struct gw_jinja_node *conditional(struct parser *p);
static struct gw_jinja_node *unary(struct parser *p, bool with_filters);
static struct gw_jinja_node *statements(struct parser *p, const char *const *ends);

/* ---- tokens ---- */

static struct gw_jinja_node *fail(struct parser *p, enum err_code code, const char *what)
{
    struct gw_jinja_text t = p->at->text;
    p->run->line = p->at->line;
    gw_jinja_run_fail(p->run, code, "%s, not '%.*s'", what, (int)(t.size > 40 ? 40 : t.size),
                      t.data);
    return NULL;
}

static bool is(const struct parser *p, enum gw_jinja_lex_kind kind, const char *text)
{
    return p->at->kind == kind && p->at->text.size == strlen(text) &&
           memcmp(p->at->text.data, text, p->at->text.size) == 0;
}

static bool is_operator(const struct parser *p, const char *text)
{
    return is(p, GW_JINJA_LEX_OPERATOR, text);
}

static bool is_name(const struct parser *p, const char *text)
{
    return is(p, GW_JINJA_LEX_NAME, text);
}

static bool take(struct parser *p, enum gw_jinja_lex_kind kind, const char *text)
{
    if (!is(p, kind, text))
        return false;
    p->at++;
    return true;
}

static bool take_operator(struct parser *p, const char *text)
{
    return take(p, GW_JINJA_LEX_OPERATOR, text);
}

static bool take_name(struct parser *p, const char *text)
{
    return take(p, GW_JINJA_LEX_NAME, text);
}

static void need_operator(struct parser *p, const char *text)
{
    char what[32] = "expected '";
    if (!take_operator(p, text) && gw_jinja_run_ok(p->run)) {
        strcat(what, text);
        strcat(what, "'");
        (void)fail(p, ERR_FORMAT, what);
    }
}

static struct gw_jinja_text need_name(struct parser *p)
{
    if (p->at->kind == GW_JINJA_LEX_NAME)
        return p->at++->text;
    (void)fail(p, ERR_FORMAT, "expected a name");
    return (struct gw_jinja_text){"", 0};
}

static void need_block_end(struct parser *p)
{
    if (p->at->kind == GW_JINJA_LEX_BLOCK_END)
        p->at++;
    else if (gw_jinja_run_ok(p->run))
        (void)fail(p, ERR_FORMAT, "expected the end of the tag");
}

/* ---- nodes ---- */

static struct gw_jinja_node *node(struct parser *p, enum gw_jinja_node_kind kind)
{
    static const struct gw_jinja_node harmless = {.kind = GW_JINJA_NODE_SEQUENCE};
    struct gw_jinja_node *n = gw_jinja_run_zero(p->run, 1, sizeof *n);
    if (!n)
        return (struct gw_jinja_node *)(uintptr_t)&harmless;
    n->kind = kind;
    n->line = p->at->line;
    return n;
}

static struct gw_jinja_node *node_ab(struct parser *p, enum gw_jinja_node_kind kind,
                                     const struct gw_jinja_node *a, const struct gw_jinja_node *b)
{
    struct gw_jinja_node *n = node(p, kind);
    if (gw_jinja_run_ok(p->run)) {
        n->a = a;
        n->b = b;
    }
    return n;
}

/* Adds an item; room doubles at powers of two. */
static void add(struct parser *p, struct gw_jinja_node *n, const struct gw_jinja_node *item,
                struct gw_jinja_text name)
{
    if (!gw_jinja_run_ok(p->run))
        return;
    if ((n->n & (n->n - 1)) == 0) {
        size_t room = n->n ? n->n * 2 : 1;
        const struct gw_jinja_node **items = gw_jinja_run_get(p->run, room, sizeof *items);
        struct gw_jinja_text *names = gw_jinja_run_get(p->run, room, sizeof *names);
        if (!items || !names)
            return;
        if (n->n > 0) {
            memcpy(items, n->items, n->n * sizeof *items);
            memcpy(names, n->names, n->n * sizeof *names);
        }
        n->items = items;
        n->names = names;
    }
    n->items[n->n] = item;
    n->names[n->n++] = name;
}

static void add_item(struct parser *p, struct gw_jinja_node *n, const struct gw_jinja_node *item)
{
    add(p, n, item, (struct gw_jinja_text){"", 0});
}

static struct gw_jinja_node *literal(struct parser *p, struct gw_jinja_value v)
{
    struct gw_jinja_node *n = node(p, GW_JINJA_NODE_LITERAL);
    if (gw_jinja_run_ok(p->run))
        n->value = v;
    return n;
}

/* ---- expressions ---- */

static bool is_tuple_end(const struct parser *p)
{
    return p->at->kind == GW_JINJA_LEX_VARIABLE_END || p->at->kind == GW_JINJA_LEX_BLOCK_END ||
           is_operator(p, ")");
}

/* One expression, or several with commas between, which are a tuple. */
static struct gw_jinja_node *tuple(struct parser *p)
{
    struct gw_jinja_node *first = conditional(p), *all;
    if (!is_operator(p, ","))
        return first;
    all = node(p, GW_JINJA_NODE_TUPLE);
    add_item(p, all, first);
    while (gw_jinja_run_ok(p->run) && take_operator(p, ",") && !is_tuple_end(p))
        add_item(p, all, conditional(p));
    return all;
}

static struct gw_jinja_node *in_round(struct parser *p)
{
    struct gw_jinja_node *n = is_operator(p, ")") ? node(p, GW_JINJA_NODE_TUPLE) : tuple(p);
    need_operator(p, ")");
    return n;
}

static struct gw_jinja_node *in_square(struct parser *p)
{
    struct gw_jinja_node *n = node(p, GW_JINJA_NODE_LIST);
    while (gw_jinja_run_ok(p->run) && !is_operator(p, "]")) {
        add_item(p, n, conditional(p));
        if (!is_operator(p, "]"))
            need_operator(p, ",");
    }
    need_operator(p, "]");
    return n;
}

static struct gw_jinja_node *in_curly(struct parser *p)
{
    struct gw_jinja_node *n = node(p, GW_JINJA_NODE_DICT);
    while (gw_jinja_run_ok(p->run) && !is_operator(p, "}")) {
        add_item(p, n, conditional(p));
        need_operator(p, ":");
        add_item(p, n, conditional(p));
        if (!is_operator(p, "}"))
            need_operator(p, ",");
    }
    need_operator(p, "}");
    return n;
}

static struct gw_jinja_node *number(struct parser *p)
{
    char text[64];
    size_t n = 0;
    struct gw_jinja_text t = p->at->text;
    if (t.size >= sizeof text)
        return fail(p, ERR_UNSUPPORTED, "expected a number of fewer digits");
    for (size_t i = 0; i < t.size; i++)
        if (t.data[i] != '_')
            text[n++] = t.data[i];
    text[n] = '\0';
    if (p->at->kind == GW_JINJA_LEX_FLOAT) {
        p->at++;
        return literal(p, gw_jinja_value_float(strtod(text, NULL)));
    }
    errno = 0;
    long long i = strtoll(text, NULL, 10);
    if (errno != 0)
        return fail(p, ERR_UNSUPPORTED, "expected a number below 2^63");
    p->at++;
    return literal(p, gw_jinja_value_int(i));
}

static struct gw_jinja_node *texts(struct parser *p)
{
    struct gw_jinja_text t = p->at++->text;
    while (p->at->kind == GW_JINJA_LEX_TEXT) {
        struct gw_jinja_text more = p->at++->text;
        const char *joined = gw_jinja_run_join(p->run, t.data, t.size, more.data, more.size);
        if (!joined)
            return NULL;
        t = (struct gw_jinja_text){joined, t.size + more.size};
    }
    return literal(p, gw_jinja_value_text(t.data, t.size));
}

static struct gw_jinja_node *named(struct parser *p)
{
    struct gw_jinja_node *n;
    if (take_name(p, "true") || take_name(p, "True"))
        return literal(p, gw_jinja_value_bool(true));
    if (take_name(p, "false") || take_name(p, "False"))
        return literal(p, gw_jinja_value_bool(false));
    if (take_name(p, "none") || take_name(p, "None"))
        return literal(p, gw_jinja_value_none());
    n = node(p, GW_JINJA_NODE_NAME);
    if (gw_jinja_run_ok(p->run))
        n->name = p->at->text;
    p->at++;
    return n;
}

static struct gw_jinja_node *primary(struct parser *p)
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
        if (take_operator(p, "("))
            return in_round(p);
        if (take_operator(p, "["))
            return in_square(p);
        if (take_operator(p, "{"))
            return in_curly(p);
        return fail(p, ERR_FORMAT, "expected an expression");
    }
}

/* Behind "(": arguments into the call, filter or test. */
static void arguments(struct parser *p, struct gw_jinja_node *n)
{
    bool by_name = false;
    while (gw_jinja_run_ok(p->run) && !is_operator(p, ")")) {
        struct gw_jinja_text name = {"", 0};
        if (is_operator(p, "*") || is_operator(p, "**"))
            (void)fail(p, ERR_UNSUPPORTED, "expected an argument (* and ** are not built in)");
        if (p->at->kind == GW_JINJA_LEX_NAME && p->at[1].kind == GW_JINJA_LEX_OPERATOR &&
            p->at[1].text.size == 1 && *p->at[1].text.data == '=') {
            name = p->at->text;
            p->at += 2;
            by_name = true;
        } else if (by_name) {
            (void)fail(p, ERR_FORMAT, "expected an argument with its name");
        }
        add(p, n, conditional(p), name);
        if (!is_operator(p, ")"))
            need_operator(p, ",");
    }
    need_operator(p, ")");
}

static struct gw_jinja_node *subscript(struct parser *p, struct gw_jinja_node *of)
{
    struct gw_jinja_node *n = node_ab(p, GW_JINJA_NODE_ITEM, of, NULL), *parts[3] = {0};
    size_t part = 0;
    bool slice = false;
    while (gw_jinja_run_ok(p->run) && !is_operator(p, "]")) {
        if (!is_operator(p, ":")) {
            parts[part] = tuple(p);
            if (is_operator(p, "]"))
                break;
        }
        slice = true;
        need_operator(p, ":");
        if (++part == 3)
            (void)fail(p, ERR_FORMAT, "expected ']'");
    }
    if (gw_jinja_run_ok(p->run) && !slice && !parts[0])
        (void)fail(p, ERR_FORMAT, "expected an index");
    need_operator(p, "]");
    if (!gw_jinja_run_ok(p->run))
        return n;
    n->b = parts[0];
    if (slice) {
        n->kind = GW_JINJA_NODE_SLICE;
        for (part = 0; part < 3; part++)
            add_item(p, n, parts[part]);
    }
    return n;
}

static struct gw_jinja_node *attribute(struct parser *p, struct gw_jinja_node *of)
{
    struct gw_jinja_node *n;
    if (p->at->kind == GW_JINJA_LEX_INT)
        return node_ab(p, GW_JINJA_NODE_ITEM, of, number(p));
    n = node_ab(p, GW_JINJA_NODE_ATTRIBUTE, of, NULL);
    struct gw_jinja_text name = need_name(p);
    if (gw_jinja_run_ok(p->run))
        n->name = name;
    return n;
}

static struct gw_jinja_node *call(struct parser *p, struct gw_jinja_node *of)
{
    struct gw_jinja_node *n = node_ab(p, GW_JINJA_NODE_CALL, of, NULL);
    arguments(p, n);
    return n;
}

static struct gw_jinja_node *postfix(struct parser *p, struct gw_jinja_node *n)
{
    while (gw_jinja_run_ok(p->run)) {
        if (take_operator(p, "."))
            n = attribute(p, n);
        else if (take_operator(p, "["))
            n = subscript(p, n);
        else if (take_operator(p, "("))
            n = call(p, n);
        else
            break;
    }
    return n;
}

/* Behind "|", or the first filter of a block (of = NULL: the block's text). */
static struct gw_jinja_node *filter(struct parser *p, struct gw_jinja_node *of)
{
    struct gw_jinja_node *n = node_ab(p, GW_JINJA_NODE_FILTER, of, NULL);
    const struct gw_jinja_filter_row *row =
        p->at->kind == GW_JINJA_LEX_NAME ? gw_jinja_filter_find(p->at->text) : NULL;
    if (!row)
        return fail(p, ERR_UNSUPPORTED, "expected a filter that is built in");
    p->at++;
    if (gw_jinja_run_ok(p->run))
        n->filter = row;
    if (take_operator(p, "("))
        arguments(p, n);
    return n;
}

static bool begins_argument(const struct parser *p)
{
    if (p->at->kind == GW_JINJA_LEX_NAME)
        return !is_name(p, "else") && !is_name(p, "or") && !is_name(p, "and") &&
               !is_name(p, "is") && !is_name(p, "if") && !is_name(p, "in") && !is_name(p, "not");
    return p->at->kind == GW_JINJA_LEX_TEXT || p->at->kind == GW_JINJA_LEX_INT ||
           p->at->kind == GW_JINJA_LEX_FLOAT || is_operator(p, "[") || is_operator(p, "{");
}

static struct gw_jinja_node *test(struct parser *p, struct gw_jinja_node *of)
{
    struct gw_jinja_node *n = node_ab(p, GW_JINJA_NODE_TEST, of, NULL);
    if (is_name(p, "not") && gw_jinja_run_ok(p->run))
        n->name = p->at->text;
    (void)take_name(p, "not");
    const struct gw_jinja_test_row *row =
        p->at->kind == GW_JINJA_LEX_NAME ? gw_jinja_test_find(p->at->text) : NULL;
    if (!row)
        return fail(p, ERR_UNSUPPORTED, "expected a test that is built in");
    p->at++;
    if (gw_jinja_run_ok(p->run))
        n->test = row;
    if (take_operator(p, "("))
        arguments(p, n);
    else if (begins_argument(p))
        add_item(p, n, postfix(p, primary(p)));
    return n;
}

static struct gw_jinja_node *filters(struct parser *p, struct gw_jinja_node *n)
{
    while (gw_jinja_run_ok(p->run)) {
        if (take_operator(p, "|"))
            n = filter(p, n);
        else if (take_name(p, "is"))
            n = test(p, n);
        else if (take_operator(p, "("))
            n = call(p, n);
        else
            break;
    }
    return n;
}

static struct gw_jinja_node *unary(struct parser *p, bool with_filters)
{
    struct gw_jinja_node *n;
    if (!gw_jinja_run_enter(p->run))
        return NULL;
    if (take_operator(p, "-"))
        n = node_ab(p, GW_JINJA_NODE_NEGATE, unary(p, false), NULL);
    else if (take_operator(p, "+"))
        n = node_ab(p, GW_JINJA_NODE_PLUS, unary(p, false), NULL);
    else
        n = primary(p);
    n = postfix(p, n);
    if (with_filters)
        n = filters(p, n);
    gw_jinja_run_leave(p->run);
    return n;
}

static struct gw_jinja_node *operand(struct parser *p)
{
    return unary(p, true);
}

/* next (operator next)*, to the left; operators separated by spaces. */
static struct gw_jinja_node *binary(struct parser *p, expression_fn *next,
                                    const char *const *operators)
{
    struct gw_jinja_node *n = next(p);
    while (gw_jinja_run_ok(p->run) && p->at->kind == GW_JINJA_LEX_OPERATOR) {
        size_t i = 0;
        while (operators[i] && !is_operator(p, operators[i]))
            i++;
        if (!operators[i])
            break;
        struct gw_jinja_text name = p->at++->text;
        n = node_ab(p, GW_JINJA_NODE_BINARY, n, next(p));
        if (gw_jinja_run_ok(p->run))
            n->name = name;
    }
    return n;
}

static struct gw_jinja_node *power(struct parser *p)
{
    return binary(p, operand, (const char *const[]){"**", NULL});
}

static struct gw_jinja_node *product(struct parser *p)
{
    return binary(p, power, (const char *const[]){"*", "/", "//", "%", NULL});
}

static struct gw_jinja_node *concat(struct parser *p)
{
    struct gw_jinja_node *first = product(p), *all;
    if (!is_operator(p, "~"))
        return first;
    all = node(p, GW_JINJA_NODE_CONCAT);
    add_item(p, all, first);
    while (gw_jinja_run_ok(p->run) && take_operator(p, "~"))
        add_item(p, all, product(p));
    return all;
}

static struct gw_jinja_node *sum(struct parser *p)
{
    return binary(p, concat, (const char *const[]){"+", "-", NULL});
}

static bool take_comparison(struct parser *p, struct gw_jinja_text *ret)
{
    static const char *const operators[] = {"==", "!=", "<", "<=", ">", ">="};
    *ret = p->at->text;
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++)
        if (take_operator(p, operators[i]))
            return true;
    if (take_name(p, "in"))
        return true;
    if (is_name(p, "not") && p->at[1].kind == GW_JINJA_LEX_NAME && p->at[1].text.size == 2 &&
        memcmp(p->at[1].text.data, "in", 2) == 0) {
        p->at += 2;
        return true;
    }
    return false;
}

static struct gw_jinja_node *comparison(struct parser *p)
{
    struct gw_jinja_node *first = sum(p), *n = NULL;
    struct gw_jinja_text operator;
    while (gw_jinja_run_ok(p->run) && take_comparison(p, &operator)) {
        if (!n)
            n = node_ab(p, GW_JINJA_NODE_COMPARE, first, NULL);
        add(p, n, sum(p), operator);
    }
    return n ? n : first;
}

static struct gw_jinja_node *negation(struct parser *p)
{
    struct gw_jinja_node *n;
    if (!take_name(p, "not"))
        return comparison(p);
    if (!gw_jinja_run_enter(p->run))
        return NULL;
    n = node_ab(p, GW_JINJA_NODE_NOT, negation(p), NULL);
    gw_jinja_run_leave(p->run);
    return n;
}

static struct gw_jinja_node *conjunction(struct parser *p)
{
    struct gw_jinja_node *n = negation(p);
    while (gw_jinja_run_ok(p->run) && take_name(p, "and"))
        n = node_ab(p, GW_JINJA_NODE_AND, n, negation(p));
    return n;
}

static struct gw_jinja_node *disjunction(struct parser *p)
{
    struct gw_jinja_node *n = conjunction(p);
    while (gw_jinja_run_ok(p->run) && take_name(p, "or"))
        n = node_ab(p, GW_JINJA_NODE_OR, n, conjunction(p));
    return n;
}

static struct gw_jinja_node *conditional(struct parser *p)
{
    struct gw_jinja_node *n;
    if (!gw_jinja_run_enter(p->run))
        return NULL;
    n = disjunction(p);
    while (gw_jinja_run_ok(p->run) && take_name(p, "if")) {
        n = node_ab(p, GW_JINJA_NODE_CONDITIONAL, n, disjunction(p));
        const struct gw_jinja_node *other = take_name(p, "else") ? conditional(p) : NULL;
        if (gw_jinja_run_ok(p->run))
            n->c = other;
    }
    gw_jinja_run_leave(p->run);
    return n;
}

/* ---- statements ---- */

static const char *const end_if[] = {"elif", "else", "endif", NULL};
static const char *const end_for[] = {"else", "endfor", NULL};

/* name, name.attribute, or several names with commas. */
static struct gw_jinja_node *target(struct parser *p)
{
    bool round = take_operator(p, "(");
    struct gw_jinja_node *all = node(p, GW_JINJA_NODE_TUPLE), *n;
    bool tuple_like = round;
    do {
        if (tuple_like && p->at->kind != GW_JINJA_LEX_NAME)
            break;
        n = node(p, GW_JINJA_NODE_NAME);
        struct gw_jinja_text name = need_name(p);
        if (gw_jinja_run_ok(p->run))
            n->name = name;
        if (take_operator(p, "."))
            n = attribute(p, n);
        add_item(p, all, n);
        tuple_like = tuple_like || is_operator(p, ",");
    } while (gw_jinja_run_ok(p->run) && take_operator(p, ","));
    if (round)
        need_operator(p, ")");
    return tuple_like ? all : n;
}

/* Statements up to endNAME, which is taken. */
static struct gw_jinja_node *body(struct parser *p, const char *end)
{
    struct gw_jinja_node *n = statements(p, (const char *const[]){end, NULL});
    if (gw_jinja_run_ok(p->run))
        p->at++;
    need_block_end(p);
    return n;
}

static struct gw_jinja_node *if_statement(struct parser *p)
{
    struct gw_jinja_node *first = NULL, **link = &first, *n;
    bool more = true;
    while (gw_jinja_run_ok(p->run) && more) {
        n = node_ab(p, GW_JINJA_NODE_IF, tuple(p), NULL);
        need_block_end(p);
        const struct gw_jinja_node *then = statements(p, end_if);
        if (!gw_jinja_run_ok(p->run))
            break;
        n->b = then;
        *link = n;
        link = (struct gw_jinja_node **)(uintptr_t)&n->c;
        more = take_name(p, "elif");
    }
    if (take_name(p, "else")) {
        need_block_end(p);
        const struct gw_jinja_node *other = body(p, "endif");
        if (gw_jinja_run_ok(p->run))
            *link = (struct gw_jinja_node *)(uintptr_t)other;
        return first;
    }
    if (gw_jinja_run_ok(p->run))
        p->at++;
    need_block_end(p);
    return first;
}

static struct gw_jinja_node *for_statement(struct parser *p)
{
    struct gw_jinja_node *n = node(p, GW_JINJA_NODE_FOR);
    const struct gw_jinja_node *of = target(p), *in = NULL, *only = NULL, *other = NULL, *inside;
    if (!take_name(p, "in"))
        return gw_jinja_run_ok(p->run) ? fail(p, ERR_FORMAT, "expected 'in'") : NULL;
    in = disjunction(p);
    if (gw_jinja_run_ok(p->run) && is_operator(p, ",")) {
        struct gw_jinja_node *all = node(p, GW_JINJA_NODE_TUPLE);
        add_item(p, all, in);
        while (gw_jinja_run_ok(p->run) && take_operator(p, ","))
            add_item(p, all, disjunction(p));
        in = all;
    }
    if (take_name(p, "if"))
        only = tuple(p);
    if (gw_jinja_run_ok(p->run) && is_name(p, "recursive"))
        return fail(p, ERR_UNSUPPORTED, "expected the end of the tag");
    need_block_end(p);
    p->n_loops++;
    inside = statements(p, end_for);
    p->n_loops--;
    if (take_name(p, "else")) {
        need_block_end(p);
        other = body(p, "endfor");
    } else {
        if (gw_jinja_run_ok(p->run))
            p->at++;
        need_block_end(p);
    }
    if (!gw_jinja_run_ok(p->run))
        return NULL;
    n->a = of;
    n->b = in;
    n->c = other;
    n->body = inside;
    if (only)
        add_item(p, n, only);
    return n;
}

static struct gw_jinja_node *filter_chain(struct parser *p, bool first_given)
{
    struct gw_jinja_node *n = first_given ? filter(p, NULL) : NULL;
    while (gw_jinja_run_ok(p->run) && take_operator(p, "|"))
        n = filter(p, n);
    return n;
}

static struct gw_jinja_node *set_statement(struct parser *p)
{
    struct gw_jinja_node *n = node_ab(p, GW_JINJA_NODE_SET, target(p), NULL);
    const struct gw_jinja_node *value, *inside;
    if (take_operator(p, "=")) {
        value = tuple(p);
        need_block_end(p);
        if (gw_jinja_run_ok(p->run))
            n->b = value;
        return n;
    }
    value = filter_chain(p, false);
    need_block_end(p);
    inside = body(p, "endset");
    if (gw_jinja_run_ok(p->run)) {
        n->kind = GW_JINJA_NODE_SET_BLOCK;
        n->b = value;
        n->body = inside;
    }
    return n;
}

/* Behind "(": parameters with their defaults. */
static void parameters(struct parser *p, struct gw_jinja_node *n)
{
    while (gw_jinja_run_ok(p->run) && !is_operator(p, ")")) {
        struct gw_jinja_text name = need_name(p);
        add(p, n, take_operator(p, "=") ? conditional(p) : NULL, name);
        if (!is_operator(p, ")"))
            need_operator(p, ",");
    }
    need_operator(p, ")");
}

static struct gw_jinja_node *macro_statement(struct parser *p)
{
    struct gw_jinja_node *n = node(p, GW_JINJA_NODE_MACRO);
    struct gw_jinja_text name = need_name(p);
    uint32_t loops = p->n_loops;
    need_operator(p, "(");
    parameters(p, n);
    need_block_end(p);
    p->n_loops = 0;
    const struct gw_jinja_node *inside = body(p, "endmacro");
    p->n_loops = loops;
    if (gw_jinja_run_ok(p->run)) {
        n->name = name;
        n->body = inside;
    }
    return n;
}

static struct gw_jinja_node *call_statement(struct parser *p)
{
    struct gw_jinja_node *n = node(p, GW_JINJA_NODE_CALL_BLOCK);
    uint32_t loops = p->n_loops;
    if (take_operator(p, "("))
        parameters(p, n);
    const struct gw_jinja_node *called = unary(p, true);
    if (gw_jinja_run_ok(p->run) && called->kind != GW_JINJA_NODE_CALL)
        return fail(p, ERR_FORMAT, "expected a call");
    need_block_end(p);
    p->n_loops = 0;
    const struct gw_jinja_node *inside = body(p, "endcall");
    p->n_loops = loops;
    if (gw_jinja_run_ok(p->run)) {
        n->a = called;
        n->body = inside;
    }
    return n;
}

static struct gw_jinja_node *with_statement(struct parser *p)
{
    struct gw_jinja_node *n = node(p, GW_JINJA_NODE_WITH);
    while (gw_jinja_run_ok(p->run) && p->at->kind == GW_JINJA_LEX_NAME) {
        struct gw_jinja_node *of = node(p, GW_JINJA_NODE_NAME);
        struct gw_jinja_text name = need_name(p);
        if (gw_jinja_run_ok(p->run))
            of->name = name;
        add_item(p, n, of);
        need_operator(p, "=");
        add_item(p, n, conditional(p));
        (void)take_operator(p, ",");
    }
    need_block_end(p);
    const struct gw_jinja_node *inside = body(p, "endwith");
    if (gw_jinja_run_ok(p->run))
        n->body = inside;
    return n;
}

static struct gw_jinja_node *filter_statement(struct parser *p)
{
    struct gw_jinja_node *n = node_ab(p, GW_JINJA_NODE_FILTER_BLOCK, NULL, filter_chain(p, true));
    need_block_end(p);
    const struct gw_jinja_node *inside = body(p, "endfilter");
    if (gw_jinja_run_ok(p->run))
        n->body = inside;
    return n;
}

/* The markers around what the assistant said are for training: their content counts here. */
static struct gw_jinja_node *generation_statement(struct parser *p)
{
    need_block_end(p);
    return body(p, "endgeneration");
}

static struct gw_jinja_node *jump(struct parser *p, enum gw_jinja_node_kind kind)
{
    if (p->n_loops == 0)
        return fail(p, ERR_FORMAT, "expected break and continue inside a for");
    struct gw_jinja_node *n = node(p, kind);
    need_block_end(p);
    return n;
}

static struct gw_jinja_node *statement(struct parser *p)
{
    static const struct {
        const char *name;
        expression_fn *parse;
    } rows[] = {
        {"if", if_statement},         {"for", for_statement},
        {"set", set_statement},       {"macro", macro_statement},
        {"call", call_statement},     {"with", with_statement},
        {"filter", filter_statement}, {"generation", generation_statement},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (take_name(p, rows[i].name))
            return rows[i].parse(p);
    if (take_name(p, "break"))
        return jump(p, GW_JINJA_NODE_BREAK);
    if (take_name(p, "continue"))
        return jump(p, GW_JINJA_NODE_CONTINUE);
    return fail(p, ERR_UNSUPPORTED, "expected a statement that is built in");
}

static bool at_end(const struct parser *p, const char *const *ends)
{
    for (size_t i = 0; ends && ends[i]; i++)
        if (is_name(p, ends[i]))
            return true;
    return false;
}

/* Up to a tag that begins with one of `ends` (its name is next then), or NULL: up to the end of
 * the template. */
static struct gw_jinja_node *statements(struct parser *p, const char *const *ends)
{
    struct gw_jinja_node *all = node(p, GW_JINJA_NODE_SEQUENCE), *n;
    if (!gw_jinja_run_enter(p->run))
        return all;
    while (gw_jinja_run_ok(p->run)) {
        if (p->at->kind == GW_JINJA_LEX_END) {
            if (ends)
                (void)fail(p, ERR_FORMAT, "expected the end of a block, which the template lacks");
            break;
        }
        if (p->at->kind == GW_JINJA_LEX_DATA) {
            n = node(p, GW_JINJA_NODE_DATA);
            if (gw_jinja_run_ok(p->run))
                n->name = p->at->text;
            p->at++;
        } else if (p->at->kind == GW_JINJA_LEX_VARIABLE_BEGIN) {
            p->at++;
            n = node_ab(p, GW_JINJA_NODE_OUTPUT, tuple(p), NULL);
            if (p->at->kind == GW_JINJA_LEX_VARIABLE_END)
                p->at++;
            else if (gw_jinja_run_ok(p->run))
                (void)fail(p, ERR_FORMAT, "expected }}");
        } else {
            p->at++;
            if (at_end(p, ends))
                break;
            n = statement(p);
        }
        add_item(p, all, n);
    }
    gw_jinja_run_leave(p->run);
    return all;
}

const struct gw_jinja_node *gw_jinja_parse(struct gw_jinja_run *r, const char *source, size_t n)
{
    struct parser p = {.run = r, .at = gw_jinja_lex(r, source, n)};
    const struct gw_jinja_node *all = p.at ? statements(&p, NULL) : NULL;
    return gw_jinja_run_ok(r) ? all : NULL;
}

#include "gw_jinja_parse.h"

#include <string.h>

#include "gw_jinja_expression.h"
#include "gw_jinja_run.h"

typedef struct gw_jinja_node *statement_fn(struct gw_jinja_build *p);
static struct gw_jinja_node *statements(struct gw_jinja_build *p, const char *const *ends);

static const char *const end_if[] = {"elif", "else", "endif", NULL};
static const char *const end_for[] = {"else", "endfor", NULL};

/* name, name.attribute, or several names with commas. */
static struct gw_jinja_node *target(struct gw_jinja_build *p)
{
    bool round = gw_jinja_build_take_operator(p, "(");
    struct gw_jinja_node *all = gw_jinja_build_node(p, GW_JINJA_NODE_TUPLE), *n;
    bool tuple_like = round;
    do {
        if (tuple_like && p->at->kind != GW_JINJA_LEX_NAME)
            break;
        n = gw_jinja_build_node(p, GW_JINJA_NODE_NAME);
        struct gw_jinja_text name = gw_jinja_build_need_name(p);
        if (gw_jinja_run_ok(p->run))
            n->name = name;
        if (gw_jinja_build_take_operator(p, "."))
            n = gw_jinja_expression_attribute(p, n);
        gw_jinja_build_add_item(p, all, n);
        tuple_like = tuple_like || gw_jinja_build_is_operator(p, ",");
    } while (gw_jinja_run_ok(p->run) && gw_jinja_build_take_operator(p, ","));
    if (round)
        gw_jinja_build_need_operator(p, ")");
    return tuple_like ? all : n;
}

/* Statements up to endNAME, which is taken. */
static struct gw_jinja_node *body(struct gw_jinja_build *p, const char *end)
{
    struct gw_jinja_node *n = statements(p, (const char *const[]){end, NULL});
    if (gw_jinja_run_ok(p->run))
        p->at++;
    gw_jinja_build_need_block_end(p);
    return n;
}

static struct gw_jinja_node *if_statement(struct gw_jinja_build *p)
{
    struct gw_jinja_node *first = NULL, **link = &first, *n;
    bool more = true;
    while (gw_jinja_run_ok(p->run) && more) {
        n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_IF, gw_jinja_expression_tuple(p), NULL);
        gw_jinja_build_need_block_end(p);
        const struct gw_jinja_node *then = statements(p, end_if);
        if (!gw_jinja_run_ok(p->run))
            break;
        n->b = then;
        *link = n;
        link = (struct gw_jinja_node **)(uintptr_t)&n->c;
        more = gw_jinja_build_take_name(p, "elif");
    }
    if (gw_jinja_build_take_name(p, "else")) {
        gw_jinja_build_need_block_end(p);
        const struct gw_jinja_node *other = body(p, "endif");
        if (gw_jinja_run_ok(p->run))
            *link = (struct gw_jinja_node *)(uintptr_t)other;
        return first;
    }
    if (gw_jinja_run_ok(p->run))
        p->at++;
    gw_jinja_build_need_block_end(p);
    return first;
}

static struct gw_jinja_node *for_statement(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n = gw_jinja_build_node(p, GW_JINJA_NODE_FOR);
    const struct gw_jinja_node *of = target(p), *in = NULL, *only = NULL, *other = NULL, *inside;
    if (!gw_jinja_build_take_name(p, "in"))
        return gw_jinja_run_ok(p->run) ? gw_jinja_build_fail(p, ERR_FORMAT, "expected 'in'") : NULL;
    in = gw_jinja_expression_disjunction(p);
    if (gw_jinja_run_ok(p->run) && gw_jinja_build_is_operator(p, ",")) {
        struct gw_jinja_node *all = gw_jinja_build_node(p, GW_JINJA_NODE_TUPLE);
        gw_jinja_build_add_item(p, all, in);
        while (gw_jinja_run_ok(p->run) && gw_jinja_build_take_operator(p, ","))
            gw_jinja_build_add_item(p, all, gw_jinja_expression_disjunction(p));
        in = all;
    }
    if (gw_jinja_build_take_name(p, "if"))
        only = gw_jinja_expression_tuple(p);
    if (gw_jinja_run_ok(p->run) && gw_jinja_build_is_name(p, "recursive"))
        return gw_jinja_build_fail(p, ERR_UNSUPPORTED, "expected the end of the tag");
    gw_jinja_build_need_block_end(p);
    p->n_loops++;
    inside = statements(p, end_for);
    p->n_loops--;
    if (gw_jinja_build_take_name(p, "else")) {
        gw_jinja_build_need_block_end(p);
        other = body(p, "endfor");
    } else {
        if (gw_jinja_run_ok(p->run))
            p->at++;
        gw_jinja_build_need_block_end(p);
    }
    if (!gw_jinja_run_ok(p->run))
        return NULL;
    n->a = of;
    n->b = in;
    n->c = other;
    n->body = inside;
    if (only)
        gw_jinja_build_add_item(p, n, only);
    return n;
}

static struct gw_jinja_node *filter_chain(struct gw_jinja_build *p, bool first_given)
{
    struct gw_jinja_node *n = first_given ? gw_jinja_expression_filter(p, NULL) : NULL;
    while (gw_jinja_run_ok(p->run) && gw_jinja_build_take_operator(p, "|"))
        n = gw_jinja_expression_filter(p, n);
    return n;
}

static struct gw_jinja_node *set_statement(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_SET, target(p), NULL);
    const struct gw_jinja_node *value, *inside;
    if (gw_jinja_build_take_operator(p, "=")) {
        value = gw_jinja_expression_tuple(p);
        gw_jinja_build_need_block_end(p);
        if (gw_jinja_run_ok(p->run))
            n->b = value;
        return n;
    }
    value = filter_chain(p, false);
    gw_jinja_build_need_block_end(p);
    inside = body(p, "endset");
    if (gw_jinja_run_ok(p->run)) {
        n->kind = GW_JINJA_NODE_SET_BLOCK;
        n->b = value;
        n->body = inside;
    }
    return n;
}

/* Behind "(": parameters with their defaults. */
static void parameters(struct gw_jinja_build *p, struct gw_jinja_node *n)
{
    while (gw_jinja_run_ok(p->run) && !gw_jinja_build_is_operator(p, ")")) {
        struct gw_jinja_text name = gw_jinja_build_need_name(p);
        gw_jinja_build_add(
            p, n, gw_jinja_build_take_operator(p, "=") ? gw_jinja_expression_conditional(p) : NULL,
            name);
        if (!gw_jinja_build_is_operator(p, ")"))
            gw_jinja_build_need_operator(p, ",");
    }
    gw_jinja_build_need_operator(p, ")");
}

static struct gw_jinja_node *macro_statement(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n = gw_jinja_build_node(p, GW_JINJA_NODE_MACRO);
    struct gw_jinja_text name = gw_jinja_build_need_name(p);
    uint32_t loops = p->n_loops;
    gw_jinja_build_need_operator(p, "(");
    parameters(p, n);
    gw_jinja_build_need_block_end(p);
    p->n_loops = 0;
    const struct gw_jinja_node *inside = body(p, "endmacro");
    p->n_loops = loops;
    if (gw_jinja_run_ok(p->run)) {
        n->name = name;
        n->body = inside;
    }
    return n;
}

static struct gw_jinja_node *call_statement(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n = gw_jinja_build_node(p, GW_JINJA_NODE_CALL_BLOCK);
    uint32_t loops = p->n_loops;
    if (gw_jinja_build_take_operator(p, "("))
        parameters(p, n);
    const struct gw_jinja_node *called = gw_jinja_expression_unary(p, true);
    if (gw_jinja_run_ok(p->run) && called->kind != GW_JINJA_NODE_CALL)
        return gw_jinja_build_fail(p, ERR_FORMAT, "expected a call");
    gw_jinja_build_need_block_end(p);
    p->n_loops = 0;
    const struct gw_jinja_node *inside = body(p, "endcall");
    p->n_loops = loops;
    if (gw_jinja_run_ok(p->run)) {
        n->a = called;
        n->body = inside;
    }
    return n;
}

static struct gw_jinja_node *with_statement(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n = gw_jinja_build_node(p, GW_JINJA_NODE_WITH);
    while (gw_jinja_run_ok(p->run) && p->at->kind == GW_JINJA_LEX_NAME) {
        struct gw_jinja_node *of = gw_jinja_build_node(p, GW_JINJA_NODE_NAME);
        struct gw_jinja_text name = gw_jinja_build_need_name(p);
        if (gw_jinja_run_ok(p->run))
            of->name = name;
        gw_jinja_build_add_item(p, n, of);
        gw_jinja_build_need_operator(p, "=");
        gw_jinja_build_add_item(p, n, gw_jinja_expression_conditional(p));
        (void)gw_jinja_build_take_operator(p, ",");
    }
    gw_jinja_build_need_block_end(p);
    const struct gw_jinja_node *inside = body(p, "endwith");
    if (gw_jinja_run_ok(p->run))
        n->body = inside;
    return n;
}

static struct gw_jinja_node *filter_statement(struct gw_jinja_build *p)
{
    struct gw_jinja_node *n =
        gw_jinja_build_node_ab(p, GW_JINJA_NODE_FILTER_BLOCK, NULL, filter_chain(p, true));
    gw_jinja_build_need_block_end(p);
    const struct gw_jinja_node *inside = body(p, "endfilter");
    if (gw_jinja_run_ok(p->run))
        n->body = inside;
    return n;
}

/* The markers around what the assistant said are for training: their content counts here. */
static struct gw_jinja_node *generation_statement(struct gw_jinja_build *p)
{
    gw_jinja_build_need_block_end(p);
    return body(p, "endgeneration");
}

static struct gw_jinja_node *jump(struct gw_jinja_build *p, enum gw_jinja_node_kind kind)
{
    if (p->n_loops == 0)
        return gw_jinja_build_fail(p, ERR_FORMAT, "expected break and continue inside a for");
    struct gw_jinja_node *n = gw_jinja_build_node(p, kind);
    gw_jinja_build_need_block_end(p);
    return n;
}

static struct gw_jinja_node *statement(struct gw_jinja_build *p)
{
    static const struct {
        const char *name;
        statement_fn *parse;
    } rows[] = {
        {"if", if_statement},         {"for", for_statement},
        {"set", set_statement},       {"macro", macro_statement},
        {"call", call_statement},     {"with", with_statement},
        {"filter", filter_statement}, {"generation", generation_statement},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (gw_jinja_build_take_name(p, rows[i].name))
            return rows[i].parse(p);
    if (gw_jinja_build_take_name(p, "break"))
        return jump(p, GW_JINJA_NODE_BREAK);
    if (gw_jinja_build_take_name(p, "continue"))
        return jump(p, GW_JINJA_NODE_CONTINUE);
    return gw_jinja_build_fail(p, ERR_UNSUPPORTED, "expected a statement that is built in");
}

static bool at_end(const struct gw_jinja_build *p, const char *const *ends)
{
    for (size_t i = 0; ends && ends[i]; i++)
        if (gw_jinja_build_is_name(p, ends[i]))
            return true;
    return false;
}

/* Up to a tag that begins with one of `ends` (its name is next then), or NULL: up to the end of
 * the template. */
static struct gw_jinja_node *statements(struct gw_jinja_build *p, const char *const *ends)
{
    struct gw_jinja_node *all = gw_jinja_build_node(p, GW_JINJA_NODE_SEQUENCE), *n;
    if (!gw_jinja_run_enter(p->run))
        return all;
    while (gw_jinja_run_ok(p->run)) {
        if (p->at->kind == GW_JINJA_LEX_END) {
            if (ends)
                (void)gw_jinja_build_fail(p, ERR_FORMAT,
                                          "expected the end of a block, which the template lacks");
            break;
        }
        if (p->at->kind == GW_JINJA_LEX_DATA) {
            n = gw_jinja_build_node(p, GW_JINJA_NODE_DATA);
            if (gw_jinja_run_ok(p->run))
                n->name = p->at->text;
            p->at++;
        } else if (p->at->kind == GW_JINJA_LEX_VARIABLE_BEGIN) {
            p->at++;
            n = gw_jinja_build_node_ab(p, GW_JINJA_NODE_OUTPUT, gw_jinja_expression_tuple(p), NULL);
            if (p->at->kind == GW_JINJA_LEX_VARIABLE_END)
                p->at++;
            else if (gw_jinja_run_ok(p->run))
                (void)gw_jinja_build_fail(p, ERR_FORMAT, "expected }}");
        } else {
            p->at++;
            if (at_end(p, ends))
                break;
            n = statement(p);
        }
        gw_jinja_build_add_item(p, all, n);
    }
    gw_jinja_run_leave(p->run);
    return all;
}

const struct gw_jinja_node *gw_jinja_parse(struct gw_jinja_run *r, const char *source, size_t n)
{
    struct gw_jinja_build p = {.run = r, .at = gw_jinja_lex(r, source, n)};
    const struct gw_jinja_node *all = p.at ? statements(&p, NULL) : NULL;
    return gw_jinja_run_ok(r) ? all : NULL;
}

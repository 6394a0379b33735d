#include "gw_jinja_build.h"

#include <string.h>

#include "gw_jinja_run.h"

struct gw_jinja_node *gw_jinja_build_fail(struct gw_jinja_build *p, enum err_code code,
                                          const char *what)
{
    struct gw_jinja_text t = p->at->text;
    p->run->line = p->at->line;
    gw_jinja_run_fail(p->run, code, "%s, not '%.*s'", what, (int)(t.size > 40 ? 40 : t.size),
                      t.data);
    return NULL;
}

static bool is(const struct gw_jinja_build *p, enum gw_jinja_lex_kind kind, const char *text)
{
    return p->at->kind == kind && p->at->text.size == strlen(text) &&
           memcmp(p->at->text.data, text, p->at->text.size) == 0;
}

bool gw_jinja_build_is_operator(const struct gw_jinja_build *p, const char *text)
{
    return is(p, GW_JINJA_LEX_OPERATOR, text);
}

bool gw_jinja_build_is_name(const struct gw_jinja_build *p, const char *text)
{
    return is(p, GW_JINJA_LEX_NAME, text);
}

static bool take(struct gw_jinja_build *p, enum gw_jinja_lex_kind kind, const char *text)
{
    if (!is(p, kind, text))
        return false;
    p->at++;
    return true;
}

bool gw_jinja_build_take_operator(struct gw_jinja_build *p, const char *text)
{
    return take(p, GW_JINJA_LEX_OPERATOR, text);
}

bool gw_jinja_build_take_name(struct gw_jinja_build *p, const char *text)
{
    return take(p, GW_JINJA_LEX_NAME, text);
}

void gw_jinja_build_need_operator(struct gw_jinja_build *p, const char *text)
{
    char what[32] = "expected '";
    if (!gw_jinja_build_take_operator(p, text) && gw_jinja_run_ok(p->run)) {
        strcat(what, text);
        strcat(what, "'");
        (void)gw_jinja_build_fail(p, ERR_FORMAT, what);
    }
}

struct gw_jinja_text gw_jinja_build_need_name(struct gw_jinja_build *p)
{
    if (p->at->kind == GW_JINJA_LEX_NAME)
        return p->at++->text;
    (void)gw_jinja_build_fail(p, ERR_FORMAT, "expected a name");
    return (struct gw_jinja_text){"", 0};
}

void gw_jinja_build_need_block_end(struct gw_jinja_build *p)
{
    if (p->at->kind == GW_JINJA_LEX_BLOCK_END)
        p->at++;
    else if (gw_jinja_run_ok(p->run))
        (void)gw_jinja_build_fail(p, ERR_FORMAT, "expected the end of the tag");
}

/* ---- nodes ---- */

struct gw_jinja_node *gw_jinja_build_node(struct gw_jinja_build *p, enum gw_jinja_node_kind kind)
{
    static const struct gw_jinja_node harmless = {.kind = GW_JINJA_NODE_SEQUENCE};
    struct gw_jinja_node *n = gw_jinja_run_zero(p->run, 1, sizeof *n);
    if (!n)
        return (struct gw_jinja_node *)(uintptr_t)&harmless;
    n->kind = kind;
    n->line = p->at->line;
    return n;
}

struct gw_jinja_node *gw_jinja_build_node_ab(struct gw_jinja_build *p, enum gw_jinja_node_kind kind,
                                             const struct gw_jinja_node *a,
                                             const struct gw_jinja_node *b)
{
    struct gw_jinja_node *n = gw_jinja_build_node(p, kind);
    if (gw_jinja_run_ok(p->run)) {
        n->a = a;
        n->b = b;
    }
    return n;
}

/* Adds an item; room doubles at powers of two. */
void gw_jinja_build_add(struct gw_jinja_build *p, struct gw_jinja_node *n,
                        const struct gw_jinja_node *item, struct gw_jinja_text name)
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

void gw_jinja_build_add_item(struct gw_jinja_build *p, struct gw_jinja_node *n,
                             const struct gw_jinja_node *item)
{
    gw_jinja_build_add(p, n, item, (struct gw_jinja_text){"", 0});
}

struct gw_jinja_node *gw_jinja_build_literal(struct gw_jinja_build *p, struct gw_jinja_value v)
{
    struct gw_jinja_node *n = gw_jinja_build_node(p, GW_JINJA_NODE_LITERAL);
    if (gw_jinja_run_ok(p->run))
        n->value = v;
    return n;
}

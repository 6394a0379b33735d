/* A parser's place among the tokens of a template, and the nodes it makes. After a failure of the
 * run all of these still may be called; what they give is not looked at. */
#ifndef ISLET_GW_JINJA_BUILD_H
#define ISLET_GW_JINJA_BUILD_H

#include <stdbool.h>

#include "err.h"
#include "gw_jinja_lex.h"
#include "gw_jinja_node.h"

struct gw_jinja_run;

struct gw_jinja_build {
    struct gw_jinja_run *run;
    const struct gw_jinja_lex_token *at;
    uint32_t n_loops; /* open for statements, for break and continue */
};

/* ---- tokens ---- */

/* `what` was expected where the parser is. NULL. */
struct gw_jinja_node *gw_jinja_build_fail(struct gw_jinja_build *p, enum err_code code,
                                          const char *what);
bool gw_jinja_build_is_operator(const struct gw_jinja_build *p, const char *text);
bool gw_jinja_build_is_name(const struct gw_jinja_build *p, const char *text);
/* True: it was there, and the parser is behind it. */
bool gw_jinja_build_take_operator(struct gw_jinja_build *p, const char *text);
bool gw_jinja_build_take_name(struct gw_jinja_build *p, const char *text);
/* Fails where it is not there. */
void gw_jinja_build_need_operator(struct gw_jinja_build *p, const char *text);
struct gw_jinja_text gw_jinja_build_need_name(struct gw_jinja_build *p);
void gw_jinja_build_need_block_end(struct gw_jinja_build *p);

/* ---- nodes, in the run's memory ---- */

struct gw_jinja_node *gw_jinja_build_node(struct gw_jinja_build *p, enum gw_jinja_node_kind kind);
struct gw_jinja_node *gw_jinja_build_node_ab(struct gw_jinja_build *p, enum gw_jinja_node_kind kind,
                                             const struct gw_jinja_node *a,
                                             const struct gw_jinja_node *b);
struct gw_jinja_node *gw_jinja_build_literal(struct gw_jinja_build *p, struct gw_jinja_value v);
/* Adds an item, which may have a name. */
void gw_jinja_build_add(struct gw_jinja_build *p, struct gw_jinja_node *n,
                        const struct gw_jinja_node *item, struct gw_jinja_text name);
void gw_jinja_build_add_item(struct gw_jinja_build *p, struct gw_jinja_node *n,
                             const struct gw_jinja_node *item);

#endif

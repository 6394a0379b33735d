/* Expressions of a template, by what binds how strongly. Filters and tests that are not built in
 * are refused here. */
#ifndef ISLET_GW_JINJA_EXPRESSION_H
#define ISLET_GW_JINJA_EXPRESSION_H

#include "gw_jinja_build.h"

/* Several with commas are a tuple. */
struct gw_jinja_node *gw_jinja_expression_tuple(struct gw_jinja_build *p);
/* a if b else c */
struct gw_jinja_node *gw_jinja_expression_conditional(struct gw_jinja_build *p);
/* Without a condition behind it. */
struct gw_jinja_node *gw_jinja_expression_disjunction(struct gw_jinja_build *p);
struct gw_jinja_node *gw_jinja_expression_unary(struct gw_jinja_build *p, bool with_filters);
/* Behind the dot, and behind the bar. */
struct gw_jinja_node *gw_jinja_expression_attribute(struct gw_jinja_build *p,
                                                    struct gw_jinja_node *of);
struct gw_jinja_node *gw_jinja_expression_filter(struct gw_jinja_build *p,
                                                 struct gw_jinja_node *of);

#endif

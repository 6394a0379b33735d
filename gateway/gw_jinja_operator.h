/* What operators make of values. What Python refuses fails the run. */
#ifndef ISLET_GW_JINJA_OPERATOR_H
#define ISLET_GW_JINJA_OPERATOR_H

#include "gw_jinja_value.h"

struct gw_jinja_value gw_jinja_operator_join(struct gw_jinja_run *r, struct gw_jinja_text a,
                                             struct gw_jinja_text b);
/* + - * / // % ** */
struct gw_jinja_value gw_jinja_operator_apply(struct gw_jinja_run *r, struct gw_jinja_text op,
                                              struct gw_jinja_value a, struct gw_jinja_value b);
/* == != < <= > >=, in, and not (in) */
bool gw_jinja_operator_compares(struct gw_jinja_run *r, struct gw_jinja_text op,
                                struct gw_jinja_value a, struct gw_jinja_value b);
/* The sign before a number. */
struct gw_jinja_value gw_jinja_operator_sign(struct gw_jinja_run *r, struct gw_jinja_value v,
                                             bool minus);

#endif

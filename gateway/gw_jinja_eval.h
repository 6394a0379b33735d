/* Runs the tree of a template. The output goes to run->out. */
#ifndef ISLET_GW_JINJA_EVAL_H
#define ISLET_GW_JINJA_EVAL_H

#include "gw_jinja_node.h"

void gw_jinja_eval(struct gw_jinja_run *r, const struct gw_jinja_node *tree,
                   const struct gw_jinja_dict *variables);

#endif

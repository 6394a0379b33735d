/* Tokens of a template to its tree. Everything that is not built in (statements, filters, tests)
 * is refused here, naming it and its line. */
#ifndef ISLET_GW_JINJA_PARSE_H
#define ISLET_GW_JINJA_PARSE_H

#include "gw_jinja_node.h"

/* The tree lives in the run; NULL after a failure. `source` is borrowed for the call. */
const struct gw_jinja_node *gw_jinja_parse(struct gw_jinja_run *r, const char *source, size_t n);

#endif

/* The tests: value is name(arguments). */
#ifndef ISLET_GW_JINJA_TEST_H
#define ISLET_GW_JINJA_TEST_H

#include "gw_jinja_value.h"

struct gw_jinja_test_row;

const struct gw_jinja_test_row *gw_jinja_test_find(struct gw_jinja_text name); /* NULL: none */
bool gw_jinja_test_apply(struct gw_jinja_run *r, const struct gw_jinja_test_row *row,
                         struct gw_jinja_value v, const struct gw_jinja_args *args);

#endif

/* The filters: value | name(arguments). */
#ifndef ISLET_GW_JINJA_FILTER_H
#define ISLET_GW_JINJA_FILTER_H

#include "gw_jinja_value.h"

struct gw_jinja_filter_row;

const struct gw_jinja_filter_row *gw_jinja_filter_find(struct gw_jinja_text name); /* NULL: none */
struct gw_jinja_value gw_jinja_filter_apply(struct gw_jinja_run *r,
                                            const struct gw_jinja_filter_row *row,
                                            struct gw_jinja_value v,
                                            const struct gw_jinja_args *args);

#endif

/* Methods of texts, dicts and lists, and the functions that every template may call. */
#ifndef ISLET_GW_JINJA_METHOD_H
#define ISLET_GW_JINJA_METHOD_H

#include "gw_jinja_value.h"

struct gw_jinja_method_row;
struct gw_jinja_function;

/* The method of a value of this kind, or NULL. */
const struct gw_jinja_method_row *gw_jinja_method_find(enum gw_jinja_value_kind kind,
                                                       struct gw_jinja_text name);
struct gw_jinja_value gw_jinja_method_call(struct gw_jinja_run *r, const struct gw_jinja_method *m,
                                           const struct gw_jinja_args *args);

/* range, dict, namespace, raise_exception, strftime_now; NULL: none of them. */
const struct gw_jinja_function *gw_jinja_method_function(struct gw_jinja_text name);
struct gw_jinja_value gw_jinja_method_call_function(struct gw_jinja_run *r,
                                                    const struct gw_jinja_function *f,
                                                    const struct gw_jinja_args *args);

#endif

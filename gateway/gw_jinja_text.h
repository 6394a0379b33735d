/* Operations on texts as Python's str has them. */
#ifndef ISLET_GW_JINJA_TEXT_H
#define ISLET_GW_JINJA_TEXT_H

#include "gw_jinja_value.h"

/* White space as str.isspace() knows it; texts are valid UTF-8. */
const char *gw_jinja_text_skip_space(const char *at, const char *end);  /* first other character */
const char *gw_jinja_text_strip_right(const char *at, const char *end); /* new end */
/* Strips white space, or the characters of `set` when it is not NULL. */
struct gw_jinja_text gw_jinja_text_strip(struct gw_jinja_text t, const struct gw_jinja_text *set,
                                         bool left, bool right);

enum gw_jinja_text_case {
    GW_JINJA_TEXT_UPPER,
    GW_JINJA_TEXT_LOWER,
    GW_JINJA_TEXT_CAPITALIZE, /* first character up, others down */
    GW_JINJA_TEXT_TITLE,      /* str.title: each run of letters */
    GW_JINJA_TEXT_WORDS,      /* the filter `title`: behind white space, - ( { [ < */
};
/* Letters of ASCII, Latin-1, Greek and Cyrillic change one for one; others stay. */
struct gw_jinja_value gw_jinja_text_recase(struct gw_jinja_run *r, struct gw_jinja_text t,
                                           enum gw_jinja_text_case how);
/* max < 0: all. */
struct gw_jinja_value gw_jinja_text_replace(struct gw_jinja_run *r, struct gw_jinja_text t,
                                            struct gw_jinja_text from, struct gw_jinja_text to,
                                            int64_t max);
/* separator NULL: runs of white space. */
struct gw_jinja_value gw_jinja_text_split(struct gw_jinja_run *r, struct gw_jinja_text t,
                                          const struct gw_jinja_text *separator, int64_t max);
struct gw_jinja_value gw_jinja_text_lines(struct gw_jinja_run *r, struct gw_jinja_text t,
                                          bool keep);
/* str(v): what {{ v }} writes. */
struct gw_jinja_text gw_jinja_text_of(struct gw_jinja_run *r, struct gw_jinja_value v);
/* Code points first, first + step, ... (count of them) of t. */
struct gw_jinja_value gw_jinja_text_pick(struct gw_jinja_run *r, struct gw_jinja_text t,
                                         int64_t first, int64_t step, size_t count);
/* Shortest decimal that reads back, as Python writes it. Returns its length. */
size_t gw_jinja_text_float(double f, char ret[40]);

#endif

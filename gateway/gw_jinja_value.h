/* Values of the template language: as Python's, without big integers and without changeable lists
 * and dicts. Texts are UTF-8 counted in bytes; the language counts code points. All memory is of
 * the run, or borrowed from what outlives it (template, messages). */
#ifndef ISLET_GW_JINJA_VALUE_H
#define ISLET_GW_JINJA_VALUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gw_jinja_run;

enum gw_jinja_value_kind {
    GW_JINJA_VALUE_ABSENT, /* an argument that was not given; never seen by templates */
    GW_JINJA_VALUE_UNDEFINED,
    GW_JINJA_VALUE_NONE,
    GW_JINJA_VALUE_BOOL,
    GW_JINJA_VALUE_INT,
    GW_JINJA_VALUE_FLOAT,
    GW_JINJA_VALUE_TEXT,
    GW_JINJA_VALUE_LIST,
    GW_JINJA_VALUE_DICT,
    GW_JINJA_VALUE_NAMESPACE, /* a dict whose entries `set` may change */
    GW_JINJA_VALUE_LOOP,
    GW_JINJA_VALUE_FUNCTION,
    GW_JINJA_VALUE_METHOD,
    GW_JINJA_VALUE_MACRO,
};

struct gw_jinja_text {
    const char *data;
    size_t size;
};

struct gw_jinja_value {
    enum gw_jinja_value_kind kind;
    union {
        bool boolean;
        int64_t integer;
        double real;
        struct gw_jinja_text text; /* UNDEFINED: what is missing, for the message */
        const struct gw_jinja_list *list;
        struct gw_jinja_dict *dict;
        const struct gw_jinja_loop *loop;
        const struct gw_jinja_function *function;
        const struct gw_jinja_method *method;
        const struct gw_jinja_macro *macro;
    } as;
};

struct gw_jinja_list {
    size_t n;
    bool tuple; /* prints with ( ) and differs from a list */
    struct gw_jinja_value *items;
};

struct gw_jinja_dict { /* keys in the order of insertion */
    size_t n, capacity;
    struct gw_jinja_value *keys, *values;
};

struct gw_jinja_method { /* value.name, to be called */
    struct gw_jinja_value self;
    const struct gw_jinja_method_row *row;
};

/* Arguments of a call. names[i].size 0: by place; those come first. */
struct gw_jinja_args {
    size_t n;
    const struct gw_jinja_value *values;
    const struct gw_jinja_text *names;
};

enum {
    GW_JINJA_VALUE_MAX_PARAMS = 4
};
/* Places arguments by `params`, names separated by spaces ("" none); the others become ABSENT.
 * Fails naming `what`. */
bool gw_jinja_value_bind(struct gw_jinja_run *r, const char *what, const char *params,
                         const struct gw_jinja_args *args,
                         struct gw_jinja_value ret[GW_JINJA_VALUE_MAX_PARAMS]);

struct gw_jinja_value gw_jinja_value_undefined(const char *what); /* a constant */
struct gw_jinja_value gw_jinja_value_none(void);
struct gw_jinja_value gw_jinja_value_bool(bool b);
struct gw_jinja_value gw_jinja_value_int(int64_t i);
struct gw_jinja_value gw_jinja_value_float(double f);
struct gw_jinja_value gw_jinja_value_text(const char *data, size_t n); /* borrowed */
struct gw_jinja_value gw_jinja_value_copy(struct gw_jinja_run *r, const char *data, size_t n);
/* n items to be filled in, through *ret_items; NULL there on failure. */
struct gw_jinja_value gw_jinja_value_list(struct gw_jinja_run *r, size_t n, bool tuple,
                                          struct gw_jinja_value **ret_items);
struct gw_jinja_value gw_jinja_value_dict(struct gw_jinja_run *r, enum gw_jinja_value_kind kind,
                                          size_t capacity);
/* Adds or replaces. */
void gw_jinja_value_put(struct gw_jinja_run *r, struct gw_jinja_dict *d, struct gw_jinja_value key,
                        struct gw_jinja_value value);
/* Adds a key that is known to be new. */
void gw_jinja_value_put_new(struct gw_jinja_run *r, struct gw_jinja_dict *d,
                            struct gw_jinja_value key, struct gw_jinja_value value);
const struct gw_jinja_value *gw_jinja_value_get(struct gw_jinja_run *r,
                                                const struct gw_jinja_dict *d,
                                                struct gw_jinja_value key);
const struct gw_jinja_value *gw_jinja_value_get_name(struct gw_jinja_run *r,
                                                     const struct gw_jinja_dict *d,
                                                     const char *name, size_t n);

const char *gw_jinja_value_type(struct gw_jinja_value v); /* Python's name: "str", "dict", ... */
bool gw_jinja_value_is_number(struct gw_jinja_value v);   /* bool, int, float */
bool gw_jinja_value_is_text(struct gw_jinja_value v, const char *text);
bool gw_jinja_value_true(struct gw_jinja_value v);
double gw_jinja_value_real(struct gw_jinja_value v); /* of a number */
/* Integer of a bool or int; false otherwise. */
bool gw_jinja_value_whole(struct gw_jinja_value v, int64_t *ret);
bool gw_jinja_value_equal(struct gw_jinja_run *r, struct gw_jinja_value a, struct gw_jinja_value b);
/* -1, 0, 1; fails where Python has no order. */
int gw_jinja_value_compare(struct gw_jinja_run *r, struct gw_jinja_value a,
                           struct gw_jinja_value b);
/* needle in haystack */
bool gw_jinja_value_contains(struct gw_jinja_run *r, struct gw_jinja_value haystack,
                             struct gw_jinja_value needle);
/* len(); false where there is none. */
bool gw_jinja_value_length(struct gw_jinja_value v, size_t *ret);
/* What `for` goes through: items, keys, characters. NULL after a failure. */
const struct gw_jinja_list *gw_jinja_value_iterate(struct gw_jinja_run *r, struct gw_jinja_value v);
/* (key, value) tuples. */
struct gw_jinja_value gw_jinja_value_pairs(struct gw_jinja_run *r, const struct gw_jinja_dict *d);

bool gw_jinja_value_text_is(struct gw_jinja_text t, const char *word);
/* Fails the run: `what` is not possible with the value. */
void gw_jinja_value_refuse(struct gw_jinja_run *r, const char *what, struct gw_jinja_value v);

#endif

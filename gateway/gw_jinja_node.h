/* The tree of a template. Immutable once parsed. */
#ifndef ISLET_GW_JINJA_NODE_H
#define ISLET_GW_JINJA_NODE_H

#include "gw_jinja_value.h"

enum gw_jinja_node_kind {
    /* expressions */
    GW_JINJA_NODE_LITERAL,     /* value */
    GW_JINJA_NODE_NAME,        /* name */
    GW_JINJA_NODE_LIST,        /* items */
    GW_JINJA_NODE_TUPLE,       /* items */
    GW_JINJA_NODE_DICT,        /* items: key, value, key, value ... */
    GW_JINJA_NODE_ATTRIBUTE,   /* a.name */
    GW_JINJA_NODE_ITEM,        /* a[b] */
    GW_JINJA_NODE_SLICE,       /* a[items 0:1:2], each may be NULL */
    GW_JINJA_NODE_CALL,        /* a(items named by names) */
    GW_JINJA_NODE_FILTER,      /* a | filter(items named by names) */
    GW_JINJA_NODE_TEST,        /* a is test(items); name "not": negated */
    GW_JINJA_NODE_NEGATE,      /* -a */
    GW_JINJA_NODE_PLUS,        /* +a */
    GW_JINJA_NODE_NOT,         /* not a */
    GW_JINJA_NODE_BINARY,      /* a name b */
    GW_JINJA_NODE_AND,         /* a and b */
    GW_JINJA_NODE_OR,          /* a or b */
    GW_JINJA_NODE_COMPARE,     /* a names[0] items[0] names[1] items[1] ... */
    GW_JINJA_NODE_CONCAT,      /* items joined by ~ */
    GW_JINJA_NODE_CONDITIONAL, /* a if b else c (c may be NULL) */
    /* statements */
    GW_JINJA_NODE_SEQUENCE,     /* items */
    GW_JINJA_NODE_DATA,         /* name = the text */
    GW_JINJA_NODE_OUTPUT,       /* {{ a }} */
    GW_JINJA_NODE_IF,           /* if a: b else c (c may be NULL) */
    GW_JINJA_NODE_FOR,          /* for a in b: body, else c; if filter */
    GW_JINJA_NODE_SET,          /* a = b */
    GW_JINJA_NODE_SET_BLOCK,    /* a = text of body through the filters of b (NULL: none) */
    GW_JINJA_NODE_FILTER_BLOCK, /* text of body through the filters of b */
    GW_JINJA_NODE_WITH,         /* items: target, value, ...; body */
    GW_JINJA_NODE_MACRO,        /* name, parameters names with defaults items (NULL: none), body */
    GW_JINJA_NODE_CALL_BLOCK,   /* call a with a caller: names, items, body as of a macro */
    GW_JINJA_NODE_BREAK,
    GW_JINJA_NODE_CONTINUE,
};

struct gw_jinja_node {
    enum gw_jinja_node_kind kind;
    uint32_t line;
    const struct gw_jinja_node *a, *b, *c, *body;
    struct gw_jinja_text name;
    size_t n;
    const struct gw_jinja_node **items;
    struct gw_jinja_text *names;
    struct gw_jinja_value value;
    const struct gw_jinja_filter_row *filter;
    const struct gw_jinja_test_row *test;
};

#endif

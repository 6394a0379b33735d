/* Source of a template to tokens, with Jinja's white-space control as chat templates are written
 * for: trim_blocks and lstrip_blocks on, the last newline dropped. Tokens and texts live in the
 * run. */
#ifndef ISLET_GW_JINJA_LEX_H
#define ISLET_GW_JINJA_LEX_H

#include "gw_jinja_value.h"

enum gw_jinja_lex_kind {
    GW_JINJA_LEX_DATA,
    GW_JINJA_LEX_VARIABLE_BEGIN,
    GW_JINJA_LEX_VARIABLE_END,
    GW_JINJA_LEX_BLOCK_BEGIN,
    GW_JINJA_LEX_BLOCK_END,
    GW_JINJA_LEX_NAME,
    GW_JINJA_LEX_TEXT, /* a string literal, escapes undone */
    GW_JINJA_LEX_INT,
    GW_JINJA_LEX_FLOAT,
    GW_JINJA_LEX_OPERATOR,
    GW_JINJA_LEX_END,
};

struct gw_jinja_lex_token {
    enum gw_jinja_lex_kind kind;
    uint32_t line;
    struct gw_jinja_text text;
};

/* The last token is END. NULL after a failure. `source` is borrowed for the call. */
const struct gw_jinja_lex_token *gw_jinja_lex(struct gw_jinja_run *r, const char *source, size_t n);

#endif

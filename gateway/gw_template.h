/* Chat templates: the model's own `tokenizer.chat_template`, run by an interpreter of the part of
 * Jinja that chat templates use, with the conventions of Hugging Face (trim_blocks, lstrip_blocks,
 * tojson, raise_exception, ...). Nothing is guessed: a template with something that is not built
 * in is refused, naming it and its line. A compiled template is immutable; any thread may render.
 * Pure: no I/O, the time is an argument. */
#ifndef ISLET_GW_TEMPLATE_H
#define ISLET_GW_TEMPLATE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"

struct gw_template;

/* What the template does, found out at compile time by rendering small conversations. */
struct gw_template_facts {
    bool system_anywhere; /* several, and in the middle; false: they are joined in front */
    bool developer_role;  /* knows `developer`; false: it is given as `system` */
    bool tool_calls;      /* renders tool_calls of the assistant and `tool` messages */
    bool thinking_switch; /* enable_thinking true and false differ: thoughts can be switched off */
    const char *think_open;  /* "<think>", or NULL: no thinking markers in template or vocabulary */
    const char *think_close; /* "</think>" */
};

struct gw_template_model { /* what belongs to the model and not to a request; texts are copied */
    const char *bos, *eos; /* texts of the tokens; NULL: none, "" for the template */
    bool think_tokens;     /* the vocabulary has <think> and </think> */
};

/* Gives *ret; free with gw_template_free. Errors: UNSUPPORTED (a construct that is not built in,
 * or a template that cannot render a plain question; text says which and where), FORMAT (not a
 * template), NOMEM, LIMIT. */
enum err_code gw_template_compile(const char *text, size_t n, const struct gw_template_model *model,
                                  struct gw_template **ret, struct err *e)
    __attribute__((warn_unused_result));
void gw_template_free(struct gw_template *t);
const struct gw_template_facts *gw_template_get_facts(const struct gw_template *t); /* lent */

struct gw_template_input {
    /* Array of {role, content, reasoning_content?, name?, tool_call_id?, tool_calls?}, checked
     * before: content is a string (of the assistant also null or missing). Borrowed and not
     * changed. The renderer gives `developer` and scattered system messages as `facts` says, and
     * tool_calls' arguments as objects where the string holds one. */
    const json_t *messages;
    const json_t *kwargs; /* object: more variables (enable_thinking, ...), or NULL */
    bool add_generation_prompt;
    /* If the last message is the assistant's: ends right behind its content, and no generation
     * prompt is added. */
    bool continue_final_message;
    int64_t now_s; /* for strftime_now: seconds since 1970, shown as UTC */
};

/* Gives *ret_text (NUL behind it, not counted); caller frees with alloc_free. Errors: UNSUPPORTED
 * (the template refused with raise_exception or failed on this conversation, it cannot be
 * continued, or tool messages that it does not render: a 400 unsupported_content with this text),
 * LIMIT (steps, memory or size of the output), NOMEM. */
enum err_code gw_template_render(const struct gw_template *t, const struct gw_template_input *input,
                                 char **ret_text, size_t *ret_size, struct err *e)
    __attribute__((warn_unused_result));

/* True if the prompt ends with the opening marker, perhaps with white space behind it. */
bool gw_template_prompt_opens(const struct gw_template *t, const char *prompt, size_t n);

#endif

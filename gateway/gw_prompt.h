/* What a generation is asked for, from the parsed body to the ids that the worker gets: fields
 * checked, model name looked up, chat rendered, texts tokenised. Owns all that it made. Any thread;
 * the model is immutable and everything else belongs to the caller. */
#ifndef ISLET_GW_PROMPT_H
#define ISLET_GW_PROMPT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gw_chat_request.h"
#include "gw_refusal.h"
#include "gw_request.h"

struct gw_model;

struct gw_prompt {
    /* filled by the caller */
    const struct gw_model *model;
    char *aliases; /* of model.alias; owned */
    enum gw_chat_request_kind kind;
    struct gw_chat_request_limits limits;

    /* gw_prompt_read */
    struct gw_chat_request ask; /* without the messages, which the chat's text holds */
    char *chat;                 /* the rendered template; NULL for a completion */
    size_t n_chat;
    bool opens_thoughts, opens_bare; /* the chat ends inside thoughts, with the marker itself */

    /* gw_prompt_encode */
    struct gw_request_prompt prompts[GW_CHAT_REQUEST_MAX_PROMPTS];
    unsigned n_prompts;
};

bool gw_prompt_read(struct gw_prompt *p, const json_t *body, struct gw_refusal *refusal)
    __attribute__((warn_unused_result));
/* After gw_prompt_read. Each prompt has at least one id then. */
bool gw_prompt_encode(struct gw_prompt *p, struct gw_refusal *refusal)
    __attribute__((warn_unused_result));
void gw_prompt_done(struct gw_prompt *p);

#endif

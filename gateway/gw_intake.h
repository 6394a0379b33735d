/* From a checked request to an admitted one: tokenises the prompts, checks their length, takes a
 * place in the queue and starts the answer. Thread: loop. */
#ifndef ISLET_GW_INTAKE_H
#define ISLET_GW_INTAKE_H

#include <stddef.h>

struct gw_chat_request;
struct gw_exchange;
struct gw_service;

/* Takes *ask (zeroed), chat_prompt (the rendered template; NULL for completions) and the
 * exchange. */
void gw_intake_start(struct gw_service *s, struct gw_exchange *x, struct gw_chat_request *ask,
                     char *chat_prompt, size_t n_chat_prompt);

#endif

/* From the body of a generation request to an admitted one: reads it (gw_prompt, as a gw_job),
 * checks its length, takes a place in the queue and starts the answer. Thread: loop. */
#ifndef ISLET_GW_INTAKE_H
#define ISLET_GW_INTAKE_H

#include "gw_chat_request.h"
#include "gw_prompt.h"

struct gw_exchange;
struct gw_service;

/* Takes the exchange. */
void gw_intake_start(struct gw_service *s, struct gw_exchange *x, enum gw_chat_request_kind kind);

/* Fills what gw_prompt_read wants. False: no memory. */
bool gw_intake_prompt(const struct gw_service *s, enum gw_chat_request_kind kind,
                      struct gw_prompt *ret) __attribute__((warn_unused_result));

#endif

/* The fields of a request that hold more than one value: checks one and fills the request, or says
 * in the refusal what is wrong with which part. For the table of gw_chat_request. Any thread. */
#ifndef ISLET_GW_CHAT_FIELD_H
#define ISLET_GW_CHAT_FIELD_H

#include <jansson.h>
#include <stdbool.h>

#include "gw_chat_request.h"
#include "gw_refusal.h"

struct gw_chat_request_parser {
    struct gw_chat_request *q;
    const struct gw_chat_request_limits *limits;
    struct gw_refusal *refusal;
};

bool gw_chat_field_stop(struct gw_chat_request_parser *p, const json_t *value);
bool gw_chat_field_bias(struct gw_chat_request_parser *p, const json_t *value);
bool gw_chat_field_stream_options(struct gw_chat_request_parser *p, const json_t *value);
bool gw_chat_field_kwargs(struct gw_chat_request_parser *p, const json_t *value);
bool gw_chat_field_messages(struct gw_chat_request_parser *p, const json_t *value);
/* Of a completion: a text, texts, ids, or arrays of ids. */
bool gw_chat_field_prompt(struct gw_chat_request_parser *p, const json_t *value);

#endif

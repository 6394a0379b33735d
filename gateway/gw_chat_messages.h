/* `messages` of a chat request, checked and brought into the form that templates take: content is a
 * string, parts are joined by newlines. Thread: loop. */
#ifndef ISLET_GW_CHAT_MESSAGES_H
#define ISLET_GW_CHAT_MESSAGES_H

#include <jansson.h>
#include <stdbool.h>

#include "gw_refusal.h"

enum {
    GW_CHAT_MESSAGES_MAX = 4096
};

/* Gives *ret, a new array of {role, content, reasoning_content?, name?, tool_call_id?,
 * tool_calls?}; json_decref. False: *refusal names the place ("messages[2].content[0].type"). */
bool gw_chat_messages_parse(const json_t *value, json_t **ret, struct gw_refusal *refusal)
    __attribute__((warn_unused_result));

#endif

/* /v1/chat/completions and /apply-template. Thread: loop. */
#ifndef ISLET_GW_API_CHAT_H
#define ISLET_GW_API_CHAT_H

#include "gw_route.h"

gw_route_handler gw_api_chat_post;
gw_route_handler gw_api_chat_template;

#endif

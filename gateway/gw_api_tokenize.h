/* /tokenize and /detokenize. Thread: loop. */
#ifndef ISLET_GW_API_TOKENIZE_H
#define ISLET_GW_API_TOKENIZE_H

#include "gw_route.h"

gw_route_handler gw_api_tokenize_post;
gw_route_handler gw_api_tokenize_back;

#endif

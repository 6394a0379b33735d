/* /v1/completions. Thread: loop. */
#ifndef ISLET_GW_API_COMPLETIONS_H
#define ISLET_GW_API_COMPLETIONS_H

#include "gw_route.h"

gw_route_handler gw_api_completions_post;

#endif

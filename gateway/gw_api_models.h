/* /v1/models. Thread: loop. */
#ifndef ISLET_GW_API_MODELS_H
#define ISLET_GW_API_MODELS_H

#include "gw_route.h"

gw_route_handler gw_api_models_list;
gw_route_handler gw_api_models_one;

#endif

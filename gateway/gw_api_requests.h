/* /v1/requests/{id}: the answer of a recent request from its first byte. Thread: loop. */
#ifndef ISLET_GW_API_REQUESTS_H
#define ISLET_GW_API_REQUESTS_H

#include "gw_route.h"

gw_route_handler gw_api_requests_get;

#endif

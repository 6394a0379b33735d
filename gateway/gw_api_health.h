/* /livez, /readyz, /metrics and /status. Thread: loop. */
#ifndef ISLET_GW_API_HEALTH_H
#define ISLET_GW_API_HEALTH_H

#include "gw_route.h"

gw_route_handler gw_api_health_livez;
gw_route_handler gw_api_health_readyz;
gw_route_handler gw_api_health_metrics;
gw_route_handler gw_api_health_status;
/* A fresh status record of the worker came: answers those who wait for it. context: the service. */
void gw_api_health_on_status(void *context);

#endif

/* The path table, and what every handler begins with. Thread: loop. */
#ifndef ISLET_GW_API_H
#define ISLET_GW_API_H

#include <stdbool.h>

#include "buf.h"
#include "gw_route.h"

struct gw_service;

/* All routes, with `service` as their context. */
struct gw_routes gw_api_routes(struct gw_service *service);

/* False: there is no model to answer with; the exchange has been answered. */
bool gw_api_ready(struct gw_service *s, struct gw_exchange *x);
/* A whole JSON answer from `out`, which is freed; 503 where it has failed. */
void gw_api_respond(struct gw_exchange *x, unsigned status, struct buf *out);

#endif

/* The path table, and what every handler begins with. Thread: loop. */
#ifndef ISLET_GW_API_H
#define ISLET_GW_API_H

#include <jansson.h>
#include <stdbool.h>

#include "gw_chat_request.h"
#include "gw_refusal.h"
#include "gw_route.h"

struct gw_service;

/* All routes, with `service` as their context. */
struct gw_routes gw_api_routes(struct gw_service *service);

/* False: there is no model to answer with; the exchange has been answered. */
bool gw_api_ready(struct gw_service *s, struct gw_exchange *x);
/* Gives the body as an object, or answers with 400 and returns NULL. */
json_t *gw_api_body(struct gw_exchange *x, const struct gw_http_request *r);
/* Body, fields and model of a generation request. False: the exchange has been answered. */
bool gw_api_ask(struct gw_service *s, struct gw_exchange *x, const struct gw_http_request *r,
                enum gw_chat_request_kind kind, struct gw_chat_request *ret);
/* A whole JSON answer from `out`, which is freed; 503 where it has failed. */
void gw_api_respond(struct gw_exchange *x, unsigned status, struct buf *out);

#endif

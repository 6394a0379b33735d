/* The path table: which handler answers which path and method. Pure. */
#ifndef ISLET_GW_ROUTE_H
#define ISLET_GW_ROUTE_H

#include <stdbool.h>
#include <stddef.h>

#include "buf.h"
#include "gw_http.h"

struct gw_exchange;

/* Called with the whole request, the body included. The handler answers at once, or keeps the
 * exchange and calls gw_exchange_watch. `context` is that of the table. */
typedef void gw_route_handler(struct gw_exchange *x, const struct gw_http_request *r,
                              void *context);

enum gw_route_methods {
    GW_ROUTE_GET = 1, /* GET and HEAD */
    GW_ROUTE_POST = 2
};

struct gw_route {
    /* "/v1/models", or with one {id} at its end, which matches one byte or more, '/' included. */
    const char *path;
    unsigned methods; /* GW_ROUTE_GET | GW_ROUTE_POST */
    bool needs_key;
    gw_route_handler *handle;
};

struct gw_routes {
    const struct gw_route *rows;
    size_t n_rows;
    void *context;
};

enum gw_route_result {
    GW_ROUTE_FOUND,
    GW_ROUTE_UNKNOWN,
    GW_ROUTE_BAD_ESCAPE,
    GW_ROUTE_NO_MEMORY
};

/* Finds the row of a path: unreserved characters may be percent-encoded, one '/' at the end is
 * ignored, rows without {id} go first. *capture gets what {id} stands for, decoded once. */
enum gw_route_result gw_route_find(const struct gw_routes *routes, struct gw_http_text path,
                                   const struct gw_route **ret, struct buf *capture);
const char *gw_route_allow(const struct gw_route *route); /* "GET, HEAD, OPTIONS", ... */

#endif

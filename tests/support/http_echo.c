#include "http_echo.h"

#include <stdlib.h>

#include "gw_exchange.h"

static void handle(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    static const struct gw_exchange_head head = {.status = 200};
    (void)context;
    if (r->body_bytes % 2 == 0) {
        gw_exchange_respond(x, &head, r->body, r->body_bytes);
        return;
    }
    gw_exchange_begin(x, &head);
    if (!gw_exchange_write(x, r->body, r->body_bytes))
        abort();
    gw_exchange_end(x);
}

static const struct gw_route rows[] = {
    {"/", GW_ROUTE_GET, false, handle},
    {"/v1/models/{id}", GW_ROUTE_GET, false, handle},
    {"/v1/chat/completions", GW_ROUTE_POST, true, handle},
    {"/v1/completions", GW_ROUTE_POST, true, handle},
    {"/tokenize", GW_ROUTE_POST, true, handle},
};

static void on_wake(void *io)
{
    (void)io;
}

void http_echo_init(struct http_echo *e)
{
    *e = (struct http_echo){.clock.now_ns = 1};
    if (gw_auth_new("a", "", "", &e->auth, NULL) != ERR_OK)
        abort();
    e->shared = (struct gw_conn_shared){
        .limits = gw_limits_default(),
        .ticks = ticks_of_fake(&e->clock),
        .auth = e->auth,
        .routes = {rows, sizeof rows / sizeof rows[0], NULL},
    };
}

void http_echo_done(struct http_echo *e)
{
    gw_auth_free(e->auth);
}

struct gw_conn *http_echo_connect(struct http_echo *e)
{
    static const struct gw_auth_listener listener = {.ip = {127, 0, 0, 1}, .n_ip = 4};
    struct gw_conn *c = gw_conn_new(&e->shared, &listener, on_wake, NULL);
    if (c == NULL)
        abort();
    return c;
}

bool http_echo_ends(struct http_echo *e, struct gw_conn *c)
{
    e->clock.now_ns += 100000000000u;
    gw_conn_tick(c);
    return gw_conn_state(c) != GW_CONN_OPEN;
}

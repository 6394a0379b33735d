/* The gateway's HTTP layer without sockets: connections whose handlers send the body back, half of
 * them as a whole answer and half in chunks. A failure inside ends the program. */
#ifndef ISLET_HTTP_ECHO_H
#define ISLET_HTTP_ECHO_H

#include "gw_conn.h"
#include "ticks.h"

struct http_echo {
    struct ticks_fake clock;
    struct gw_auth *auth;
    struct gw_conn_shared shared;
};

/* Must stay where it is until http_echo_done. */
void http_echo_init(struct http_echo *e);
void http_echo_done(struct http_echo *e);
/* Gives a connection from loopback; gw_conn_free. */
struct gw_conn *http_echo_connect(struct http_echo *e);
/* Lets every limit of time pass. False: the connection neither answered nor closed. */
bool http_echo_ends(struct http_echo *e, struct gw_conn *c);

#endif

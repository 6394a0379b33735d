/* A small HTTP/1.1 client: one request on one connection, blocking, parsed by llhttp. */
#ifndef ISLET_CLI_HTTP_H
#define ISLET_CLI_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"
#include "err.h"

struct cli_server;

/* A piece of a 2xx body. Returning other than ERR_OK ends the call with that code. */
typedef enum err_code cli_http_data_fn(void *context, const char *data, size_t n, struct err *e);

struct cli_http_call {
    const char *method, *path;
    const char *body; /* JSON, or NULL */
    size_t body_size;
    int stop_fd;               /* readable: the call ends with ERR_CANCELLED; -1: none */
    int idle_ms;               /* silence after which the call fails; 0: none is too long */
    cli_http_data_fn *on_data; /* NULL: the body is kept in the response */
    void *context;
};

struct cli_http_response {
    int status;           /* 0: no answer came */
    char seed[24];        /* x-islet-seed */
    char request_id[132]; /* x-request-id */
    char retry_after[8];
    struct buf body; /* what on_data did not take; free with cli_http_response_done */
};

/* ERR_OK whatever the status is; ERR_IO: no server, lost connection, silence; ERR_PROTOCOL: not
 * HTTP; ERR_CANCELLED: stop_fd. Always leaves *ret fit for cli_http_response_done. */
enum err_code cli_http_send(const struct cli_server *server, const struct cli_http_call *call,
                            struct cli_http_response *ret, struct err *e)
    __attribute__((warn_unused_result));
void cli_http_response_done(struct cli_http_response *r);
/* The error of a response that is not 2xx: its error.message where the body has one. */
enum err_code cli_http_error(const struct cli_server *server, const struct cli_http_response *r,
                             struct err *e) __attribute__((warn_unused_result));

#endif

/* A server for the time of one command: `islet up --private` as a child. */
#ifndef ISLET_CLI_PRIVATE_H
#define ISLET_CLI_PRIVATE_H

#include <sys/types.h>

#include "cli_server.h"
#include "err.h"

struct cli_options;

struct cli_private {
    pid_t pid; /* 0: none */
    struct cli_server server;
};

/* Starts it and waits until it is ready. stop_fd as in cli_http: ERR_CANCELLED. Whatever the
 * outcome, call cli_private_stop. */
enum err_code cli_private_start(struct cli_private *p, const struct cli_options *o, int stop_fd,
                                struct err *e) __attribute__((warn_unused_result));
void cli_private_stop(struct cli_private *p); /* waits for its end */

#endif

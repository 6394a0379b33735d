/* Ctrl-C and SIGTERM as something to poll, so that they stop an answer and not the program. */
#ifndef ISLET_CLI_STOP_H
#define ISLET_CLI_STOP_H

#include "err.h"

/* Blocks both signals in this thread and those it starts; gives a descriptor that is readable once
 * one came. */
enum err_code cli_stop_open(int *ret_fd, struct err *e) __attribute__((warn_unused_result));
/* Forgets what came; returns the last signal, or 0. */
int cli_stop_take(int fd);
void cli_stop_close(int fd); /* unblocks them again */

#endif

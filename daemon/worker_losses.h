/* How often workers on one socket lost their GPU, remembered across processes in a file beside the
 * socket: a GPU that is lost again and again should rest, or no answer would ever end. The gateway
 * ends a generation that is with the worker at a third loss in a row; two are enough here, so that
 * it is answered. Thread: loop. */
#ifndef ISLET_WORKER_LOSSES_H
#define ISLET_WORKER_LOSSES_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

enum {
    WORKER_LOSSES_MOST = 2,    /* in */
    WORKER_LOSSES_MINUTES = 10 /* and it rests for as long */
};

/* Another one, now. ERR_IO: the file cannot be written, or the socket has no path. */
enum err_code worker_losses_note(const char *socket, uint64_t now_ns, struct err *e)
    __attribute__((warn_unused_result));
/* Were there so many of late? now_ns counts from the machine's start, as of any process. */
bool worker_losses_are_many(const char *socket, uint64_t now_ns);

#endif

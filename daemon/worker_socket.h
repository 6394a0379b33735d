/* The worker's listening socket: inherited by name, or bound beside a lock file that says who owns
 * it. Thread: loop. */
#ifndef ISLET_WORKER_SOCKET_H
#define ISLET_WORKER_SOCKET_H

#include <stdbool.h>
#include <sys/types.h>

#include "err.h"

struct ucred;

struct worker_socket {
    int fd;         /* listening, non-blocking; -1: none */
    int lock_fd;    /* held for life; -1: inherited socket */
    char path[108]; /* "": inherited, and not in a file system */
};

/* The listening fd named `worker` of LISTEN_FDS (whose variables are then gone), or -1. Other fds
 * passed on are closed. Once, from main. */
int worker_socket_inherited(void);
/* Listens on a duplicate of an inherited fd, which stays the caller's. */
enum err_code worker_socket_adopt(int fd, struct worker_socket *ret, struct err *e)
    __attribute__((warn_unused_result));
/* Binds `path` (mode 0660), which a lock file `path`.lock
 * guards: a file left by a dead worker is replaced, a live one is not touched. ERR_BUSY: another
 * worker holds the lock (its pid is in the text); ERR_IO: anything else. */
enum err_code worker_socket_open(const char *path, struct worker_socket *ret, struct err *e)
    __attribute__((warn_unused_result));
/* Removes the path if it was bound here. A closed or zeroed (fd -1) socket is fine. */
void worker_socket_close(struct worker_socket *s);

/* True if the process at the other end may use the worker. */
bool worker_socket_peer_allowed(int fd);
/* The rule, for a worker of this user and group: root, the same user, or the same group. */
bool worker_socket_user_allowed(const struct ucred *peer, uid_t user, gid_t group);

#endif

/* Listening sockets: TCP addresses, a Unix socket, or those that systemd hands over. */
#ifndef ISLET_GW_LISTEN_H
#define ISLET_GW_LISTEN_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "err.h"
#include "gw_auth.h"

enum {
    GW_LISTEN_MOST = 16
};

struct gw_listen_socket {
    int fd;
    struct gw_auth_listener who;
    unsigned port; /* 0: Unix socket */
    bool loopback;
};

struct gw_listen {
    struct gw_listen_socket sockets[GW_LISTEN_MOST];
    size_t n;
    bool inherited;
    char *path; /* of the Unix socket that was bound here; removed by gw_listen_done */
    dev_t device;
    ino_t inode;
};

/* Each adds to *l (zero-initialised), or adds nothing and says why. */
/* "127.0.0.1:8484, [::1]:8484"; "" or "none": nothing. An IPv6 loopback that the machine lacks is
 * logged and left out. */
enum err_code gw_listen_tcp(struct gw_listen *l, const char *addresses, struct err *e)
    __attribute__((warn_unused_result));
/* Mode 0660. A socket file that nobody serves any more is replaced. */
enum err_code gw_listen_unix(struct gw_listen *l, const char *path, struct err *e)
    __attribute__((warn_unused_result));
/* LISTEN_FDS named `http`; others are closed and logged. None is fine. */
enum err_code gw_listen_inherited(struct gw_listen *l, struct err *e)
    __attribute__((warn_unused_result));
void gw_listen_done(struct gw_listen *l);
bool gw_listen_beyond_loopback(const struct gw_listen *l);

#endif

/* The gateway's libuv loop: listeners, connections, signals, drain, sd_notify. Thread: the
 * caller's. */
#ifndef ISLET_GW_LOOP_H
#define ISLET_GW_LOOP_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "err.h"
#include "gw_conn.h"

struct gw_loop;

struct gw_loop_hooks {
    void *context;
    void (*reload)(void *context); /* SIGHUP, between RELOADING=1 and READY=1 */
    /* SIGTERM or SIGINT: shared->draining is true from now on; timers may be stopped. */
    void (*draining)(void *context);
    void (*deadline)(void *context); /* drain_deadline is over: end what runs with an error */
    /* No exchange is left: close own handles, so that the loop can end. */
    void (*stopped)(void *context);
};

struct gw_loop_options {
    /* server.listen: "127.0.0.1:8484, [::1]:8484"; "" or "none": no TCP. Port 0: any free one. */
    const char *listen;
    const char *socket; /* path of the Unix socket, mode 0660; NULL: none */
    bool use_inherited; /* LISTEN_FDS named `http` replace both */
    bool handle_signals;
    struct gw_limits limits;
    const struct gw_auth *auth; /* borrowed; see gw_loop_set_auth */
    struct gw_routes routes;
    int64_t drain_deadline_ms;
    struct gw_loop_hooks hooks; /* members may be NULL */
};

/* Binds everything or nothing. Errors name the address or path, the reason and the remedy (port in
 * use, stale socket of a living process, path too long, non-loopback without key). Gives *ret; free
 * with gw_loop_free. */
enum err_code gw_loop_new(const struct gw_loop_options *options, struct gw_loop **ret,
                          struct err *e) __attribute__((warn_unused_result));
void gw_loop_free(struct gw_loop *l); /* NULL is fine */

uv_loop_t *gw_loop_uv(struct gw_loop *l);
struct gw_conn_shared *gw_loop_shared(struct gw_loop *l);
/* A listener is not on loopback: a reload must not leave it without a key. */
bool gw_loop_beyond_loopback(const struct gw_loop *l);
unsigned gw_loop_connections(const struct gw_loop *l);

void gw_loop_ready(struct gw_loop *l); /* sd_notify READY=1 */
void gw_loop_status(struct gw_loop *l, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void gw_loop_set_auth(struct gw_loop *l, const struct gw_auth *auth);
void gw_loop_set_drain_deadline(struct gw_loop *l, int64_t ms);
/* Turns until stopped. */
void gw_loop_run(struct gw_loop *l);

#endif

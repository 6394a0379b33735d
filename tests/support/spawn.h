/* Real processes for a test: isletd and islet-gateway with a runtime directory and a port of their
 * own. Logs are collected in files; spawn_stop ends both and tells whether a line of level error
 * was written. */
#ifndef ISLET_SPAWN_H
#define ISLET_SPAWN_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct spawn {
    char folder[64]; /* runtime and state directory, removed at the end */
    char socket[96]; /* the gateway's Unix socket */
    unsigned port;   /* on 127.0.0.1 */
    pid_t gateway, worker;
};

/* sets: "section.key=value" for both processes, NULL-terminated, may be NULL. Waits until /readyz
 * answers 200, a minute at most (more under sanitisers). False: said on stderr; everything is
 * cleaned up. */
bool spawn_start(struct spawn *s, const char *model, const char *const *sets);
/* True when both ended well and no log line is an error. Removes the folder. */
bool spawn_stop(struct spawn *s);
bool spawn_alive(const struct spawn *s);

/* A connected blocking socket with a receive limit of 10 s; -1: errno says why. */
int spawn_connect(const struct spawn *s);
int spawn_connect_unix(const struct spawn *s);
/* Reads up to capacity - 1 bytes until the peer closes or `enough` says so; ends with a NUL.
 * Returns the count. */
size_t spawn_read(int fd, char *ret, size_t capacity, bool (*enough)(const char *text, size_t n));
/* For spawn_read: one whole response with Content-Length or chunks is there. */
bool spawn_response_whole(const char *text, size_t n);

#endif

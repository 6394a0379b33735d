/* A Unix socket in front of another one that changes bytes: of each read from the far side a bit is
 * flipped with a given chance. A thread of its own; the same seed flips the same reads. */
#ifndef ISLET_FLIP_PROXY_H
#define ISLET_FLIP_PROXY_H

#include <stdint.h>

struct flip_proxy;

/* Listens at `path` (replaced where it is there) before it returns, connects to `to` for each
 * client. Ends the test program on failure. Free with flip_proxy_stop. */
struct flip_proxy *flip_proxy_start(const char *path, const char *to, uint64_t seed,
                                    unsigned percent);
/* Closes everything, joins, removes the socket file; returns how many bits were flipped. NULL is
 * fine. */
uint64_t flip_proxy_stop(struct flip_proxy *p);

#endif

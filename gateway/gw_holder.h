/* Who has an address that cannot be bound, as far as the system tells. For error texts only. */
#ifndef ISLET_GW_HOLDER_H
#define ISLET_GW_HOLDER_H

#include <stddef.h>
#include <sys/types.h>

/* The process that listens at a TCP port; 0: unknown (another user's, or in another namespace). */
pid_t gw_holder_of_port(unsigned port);
/* The process at the other end of a connected Unix socket; 0: unknown. */
pid_t gw_holder_of_peer(int fd);
/* "another process", or "islet-gateway (pid 4711)". Writes to text[n] and lends it. */
const char *gw_holder_name(pid_t pid, char *text, size_t n);

#endif

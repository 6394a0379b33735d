/* Where things live: runtime directory for sockets, state directory, configuration. */
#ifndef ISLET_PATHS_H
#define ISLET_PATHS_H

#include <stddef.h>

#include "err.h"

/* $STATE_DIRECTORY, else ~/.local/state/islet. Created 0700 if missing. */
enum err_code paths_state(char *ret, size_t n, struct err *e) __attribute__((warn_unused_result));
/* Resolves a socket setting: "auto" is `name` in the runtime directory, which is $RUNTIME_DIRECTORY
 * (systemd), else $XDG_RUNTIME_DIR/islet, else /run/islet for root, else /tmp/islet-<uid>; it is
 * made 0700 if missing, and refused if it is another user's. A path that does not fit sun_path (107
 * bytes) is refused with its length and the limit. */
enum err_code paths_socket(const char *setting, const char *name, char *ret, size_t n,
                           struct err *e) __attribute__((warn_unused_result));

#endif

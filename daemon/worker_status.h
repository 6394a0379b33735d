/* The status record: the engine's last snapshot, completed by what the process knows. Pure but for
 * the resident set, which is read from /proc. Thread: loop. */
#ifndef ISLET_WORKER_STATUS_H
#define ISLET_WORKER_STATUS_H

#include <stdint.h>

#include "proto_message.h"

struct engine_snapshot;

/* The client's own id of a handle; 0 where the request is another client's. */
typedef uint64_t worker_status_id_fn(void *context, uint64_t handle);

/* Fills in version, state, age, uptime and resident set, and turns handles into request ids. */
void worker_status_complete(struct engine_snapshot *s, enum proto_state state, uint64_t now_ns,
                            uint64_t start_ns, worker_status_id_fn *id_of, void *context);

#endif

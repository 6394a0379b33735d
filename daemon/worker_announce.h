/* What the worker tells all of its clients: its state, whether anything new should be admitted, and
 * that it has drained. Each is sent once, when it differs from what all were told last. Queues
 * only, as worker_peer does. Thread: loop. */
#ifndef ISLET_WORKER_ANNOUNCE_H
#define ISLET_WORKER_ANNOUNCE_H

#include "worker_peer.h"

/* The peer said hello: it gets welcome, and the notice that is in force. */
void worker_announce_hello(struct worker_peer *p);
/* Sends welcome to all that said hello, if it differs from the last one. */
void worker_announce_welcome(struct worker_peers *set);
/* Tells all whether to admit anything new, if that changed. */
void worker_announce_notice(struct worker_peers *set);
/* Tells those who asked to drain that nothing runs any more, if so. */
void worker_announce_drained(struct worker_peers *set);

#endif

/* What the loop decides from the time and from the engine's pulse: when to look for a model again,
 * and whether systemd may be told that all is well. Pure: readings in, decisions out.
 * Thread: loop. */
#ifndef ISLET_WORKER_WATCH_H
#define ISLET_WORKER_WATCH_H

#include <stdbool.h>
#include <stdint.h>

enum {
    WORKER_WATCH_RETRY_MS = 10000 /* a model that could not be loaded is looked for again */
};

struct worker_watch {
    bool failed;        /* at the last look */
    uint64_t failed_ms; /* since then, or since the last retry */
    uint64_t heartbeat; /* at the last ping that was due */
};

/* Called now and then with the state: true when a failed model is to be looked for again, which is
 * WORKER_WATCH_RETRY_MS after it was first seen failed, and as long after each retry. */
bool worker_watch_retry(struct worker_watch *w, bool failed, uint64_t now_ms);
/* A ping is due: true if it may be sent, because the engine moved since the last one that was. An
 * engine that hangs must be restarted, although the loop lives. */
bool worker_watch_ping(struct worker_watch *w, uint64_t heartbeat);

#endif

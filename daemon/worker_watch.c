#include "worker_watch.h"

bool worker_watch_retry(struct worker_watch *w, bool failed, uint64_t now_ms)
{
    bool again = failed && w->failed && now_ms - w->failed_ms >= WORKER_WATCH_RETRY_MS;
    if (again || (failed && !w->failed))
        w->failed_ms = now_ms;
    w->failed = failed;
    return again;
}

bool worker_watch_ping(struct worker_watch *w, uint64_t heartbeat)
{
    bool moved = heartbeat != w->heartbeat;
    w->heartbeat = heartbeat;
    return moved;
}

#include "engine_retry.h"

enum {
    MS = 1000000, /* ns */
    MOST_DOUBLED = 10
};

void engine_retry_start(struct engine_retry *r, uint32_t period_ms, uint32_t rest_ms)
{
    *r = (struct engine_retry){.period_ms = period_ms != 0 ? period_ms : ENGINE_RETRY_MS,
                               .rest_ms = rest_ms};
}

void engine_retry_wait(struct engine_retry *r, uint64_t now_ns)
{
    const uint32_t n = r->given_up < MOST_DOUBLED ? r->given_up : MOST_DOUBLED;
    const uint64_t ms = (uint64_t)r->period_ms << (n > 0 ? n - 1 : 0);
    const uint64_t most = r->period_ms > ENGINE_RETRY_MOST_MS ? r->period_ms : ENGINE_RETRY_MOST_MS;
    if (r->rest_ms != 0) {
        r->due_ns = now_ns + (uint64_t)r->rest_ms * MS;
        r->rest_ms = 0;
        return;
    }
    r->due_ns = r->failed >= ENGINE_RETRY_FAILURES ? 0 : now_ns + (ms < most ? ms : most) * MS;
}

void engine_retry_on_loss(struct engine_retry *r, bool failed)
{
    r->given_up++;
    r->failed += failed;
    r->due_ns = 0;
}

bool engine_retry_is_due(const struct engine_retry *r, uint64_t now_ns)
{
    return r->due_ns != 0 && now_ns >= r->due_ns;
}

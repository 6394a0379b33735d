#include "gw_resume.h"

enum gw_resume_verdict gw_resume_on_lost(struct gw_resume *r)
{
    r->losses++;
    if (r->losses >= GW_RESUME_ENDS_AFTER)
        return GW_RESUME_POISON;
    r->resumed++;
    return gw_resume_is_alone(r) ? GW_RESUME_ALONE : GW_RESUME_GO;
}

void gw_resume_on_token(struct gw_resume *r)
{
    r->losses = 0;
}

bool gw_resume_is_alone(const struct gw_resume *r)
{
    return r->losses >= GW_RESUME_ALONE_AFTER;
}

/* A worker that has been gone for the whole deadline fails new requests at once; one that loads is
 * waited for by each request anew, since loads may take longer than the deadline. */
uint64_t gw_resume_ends_ns(const struct gw_resume_wait *w)
{
    uint64_t from = w->since_ns;
    if (w->loading && w->arrived_ns > from)
        from = w->arrived_ns;
    uint64_t deadline_ns = (uint64_t)(w->deadline_ms > 0 ? w->deadline_ms : 0) * 1000000u;
    return deadline_ns > UINT64_MAX - from ? UINT64_MAX : from + deadline_ns;
}

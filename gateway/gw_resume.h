/* What becomes of a generation whose worker was lost. Pure: counts and times in, decisions out.
 *
 * A worker may die because of one request. A generation that was with the worker at two losses in a
 * row, without a new token in between, runs alone; if the worker is lost a third time, the
 * generation ends (FAULTS: poison request). A new token clears it. Thread: loop. */
#ifndef ISLET_GW_RESUME_H
#define ISLET_GW_RESUME_H

#include <stdbool.h>
#include <stdint.h>

enum {
    GW_RESUME_ALONE_AFTER = 2, /* losses in a row */
    GW_RESUME_ENDS_AFTER = 3
};

struct gw_resume {
    uint32_t losses;  /* in a row, while it was with the worker */
    uint32_t resumed; /* times that it was sent again, in all */
};

enum gw_resume_verdict {
    GW_RESUME_GO,    /* send it again */
    GW_RESUME_ALONE, /* send it again when nothing else runs, and nothing beside it */
    GW_RESUME_POISON /* end it with an internal error */
};

/* The worker was lost while this generation was with it. */
enum gw_resume_verdict gw_resume_on_lost(struct gw_resume *r);
/* A new token came. */
void gw_resume_on_token(struct gw_resume *r);
bool gw_resume_is_alone(const struct gw_resume *r);

/* How long a generation may still wait for a worker. since_ns: when the worker went away or was
 * first waited for; arrived_ns: when this request came. loading: a worker is there and loads.
 * UINT64_MAX: for ever. */
struct gw_resume_wait {
    uint64_t since_ns, arrived_ns;
    int64_t deadline_ms;
    bool loading;
};
uint64_t gw_resume_ends_ns(const struct gw_resume_wait *w);

#endif

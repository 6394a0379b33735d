/* The queue of requests that wait for a place at the worker. Pure: events and the time in,
 * decisions out.
 *
 * Order. Within one key: by priority, then arrival. Between keys the one with fewest running
 * requests goes first. One priority step weighs as much as a second of waiting or one running
 * request of the same key, so nothing starves.
 * Thread: loop. */
#ifndef ISLET_GW_ADMIT_H
#define ISLET_GW_ADMIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "list.h"

/* Inside the owner's struct. */
struct gw_admit_ticket {
    struct list link; /* list_init before the first use */
    uint64_t key;     /* who asks */
    int64_t priority; /* smaller is earlier */
    uint64_t arrived_ns, started_ns;
    bool waiting, running;
};

struct gw_admit {
    struct list waiting; /* by arrival */
    size_t n_waiting, n_running;
    size_t max_waiting; /* server.queue */
    uint32_t slots;     /* requests that may run at once */
    bool paused;        /* the worker is short of memory: nothing new */
    struct list running;
    double mean_ms; /* decaying mean of the time that a request runs */
};

enum gw_admit_result {
    GW_ADMIT_TAKEN,
    GW_ADMIT_FULL,
    GW_ADMIT_PAUSED
};

void gw_admit_init(struct gw_admit *a, size_t max_waiting, uint32_t slots);
/* Takes a place in the queue. max_waiting requests may wait beyond those that could run at once. */
enum gw_admit_result gw_admit_request(struct gw_admit *a, struct gw_admit_ticket *t,
                                      uint64_t now_ns);
/* The one to start next, or NULL; it stays in the queue until gw_admit_start. */
struct gw_admit_ticket *gw_admit_next(const struct gw_admit *a, uint64_t now_ns);
void gw_admit_start(struct gw_admit *a, struct gw_admit_ticket *t, uint64_t now_ns);
/* The request ended or was cancelled, waiting or running. Safe to call twice. */
void gw_admit_leave(struct gw_admit *a, struct gw_admit_ticket *t, uint64_t now_ns);
/* Whole seconds, 1..30: when it may be worth to ask again. */
unsigned gw_admit_retry_after_s(const struct gw_admit *a);

#endif

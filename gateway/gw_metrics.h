/* Counters of the gateway, and the text of /metrics. Thread: loop. */
#ifndef ISLET_GW_METRICS_H
#define ISLET_GW_METRICS_H

#include <stdbool.h>
#include <stdint.h>

#include "buf.h"

struct gw_upstream_status;

struct gw_metrics {
#define GW_METRIC(name, type, help) uint64_t name;
#include "gw_metrics.def"
#undef GW_METRIC
};

/* Prometheus text, format 0.0.4: the gateway's values and the worker's last known ones with their
 * age. worker may be NULL. */
void gw_metrics_write(struct buf *out, const struct gw_metrics *m,
                      const struct gw_upstream_status *worker, uint64_t now_ns);
/* The members of the gateway's object in /status: "name":value,... */
void gw_metrics_write_json(struct buf *out, const struct gw_metrics *m);
/* Resident bytes of this process; 0: not known. */
uint64_t gw_metrics_resident_bytes(void);

#endif

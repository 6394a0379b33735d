#include "gw_metrics.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "gw_json_out.h"
#include "gw_upstream.h"

/* In Prometheus' text "_total" says it is a counter: a gauge of that name does without. */
static void sample(struct buf *out, const char *prefix, const char *name, const char *type,
                   const char *help, uint64_t value)
{
    static const char total[] = "_total";
    size_t n = strlen(name), cut = sizeof total - 1;
    if (strcmp(type, "counter") != 0 && n > cut && strcmp(name + n - cut, total) == 0)
        n -= cut;
    buf_format(out, "# HELP %s%.*s %s\n# TYPE %s%.*s %s\n%s%.*s ", prefix, (int)n, name, help,
               prefix, (int)n, name, type, prefix, (int)n, name);
    gw_json_out_u64(out, value);
    buf_byte(out, '\n');
}

void gw_metrics_write(struct buf *out, const struct gw_metrics *m,
                      const struct gw_upstream_status *worker, uint64_t now_ns)
{
#define GW_METRIC(name, type, help) sample(out, "islet_gateway_", #name, #type, help, m->name);
#include "gw_metrics.def"
#undef GW_METRIC
    if (!worker || !worker->known)
        return;
    const struct proto_status *s = &worker->status;
    sample(out, "islet_worker_", "status_age_ms", "gauge", "age of the worker's values",
           (now_ns - worker->received_ns + s->age_us * 1000) / 1000000);
    sample(out, "islet_worker_", "degraded", "gauge",
           "1 while a tier or the GPU is off or the file cannot be read",
           worker->degraded[0] != '\0');
#define PROTO_STATUS(name, type, help) sample(out, "islet_worker_", #name, #type, help, s->name);
#include "proto_status.def"
#undef PROTO_STATUS
}

void gw_metrics_write_json(struct buf *out, const struct gw_metrics *m)
{
    const char *comma = "";
#define GW_METRIC(name, type, help)             \
    buf_format(out, "%s\"%s\":", comma, #name); \
    gw_json_out_u64(out, m->name);              \
    comma = ",";
#include "gw_metrics.def"
#undef GW_METRIC
}

uint64_t gw_metrics_resident_bytes(void)
{
    unsigned long total, resident;
    FILE *file = fopen("/proc/self/statm", "re");
    if (!file)
        return 0;
    int n = fscanf(file, "%lu %lu", &total, &resident);
    fclose(file);
    return n == 2 ? (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE) : 0;
}

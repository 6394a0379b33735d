#include "worker_status.h"

#include <stdio.h>
#include <unistd.h>

#include "engine.h"

/* 0 where /proc does not tell. */
static uint64_t worker_status_resident_bytes(void)
{
    unsigned long long all, resident = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f == NULL)
        return 0;
    if (fscanf(f, "%llu %llu", &all, &resident) != 2)
        resident = 0;
    fclose(f);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

void worker_status_complete(struct engine_snapshot *s, enum proto_state state, uint64_t now_ns,
                            uint64_t start_ns, worker_status_id_fn *id_of, void *context)
{
    struct proto_status *m = &s->status;
    m->version = PROTO_STATUS_VERSION;
    m->state = (uint8_t)state;
    m->age_us = now_ns > s->taken_ns ? (now_ns - s->taken_ns) / 1000 : 0;
    m->uptime_ms = (now_ns - start_ns) / 1000000;
    m->resident_bytes = worker_status_resident_bytes();
    for (unsigned i = 0; i < m->n_sequences; i++)
        s->sequences[i].request_id = id_of(context, s->sequences[i].request_id);
}

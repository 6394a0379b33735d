/* What the engine thread tells about itself: figures and sequences. */
#ifndef ISLET_ENGINE_STATUS_H
#define ISLET_ENGINE_STATUS_H

#include "engine.h"
#include "engine_run.h"

/* Brings the gauges and counters of memory and devices in run->count up to date. */
void engine_status_count(struct engine_run *run);
/* Before what counts goes: the counters go on from where they are. */
void engine_status_keep(struct engine_run *run);
/* One line for each tier that is in use. */
void engine_status_log(const struct engine_run *run, const struct engine_run_devices *devices);
/* Lists what runs and waits in ret->status, sequences and clients. */
void engine_status_sequences(const struct engine_run *run, uint64_t now_ns,
                             struct engine_snapshot *ret);

#endif

/* The governor at work: readings of the GPU come in between steps, chunks of islands go back to the
 * device and come again, fewer sequences have rows in a step. The engine thread's. */
#ifndef ISLET_ENGINE_GOVERN_H
#define ISLET_ENGINE_GOVERN_H

#include "engine_run.h"
#include "governor.h"
#include "governor_sensors.h"

enum {
    ENGINE_GOVERN_PERIOD_MS = 1000 /* of readings, unless the configuration says otherwise */
};

struct engine_govern {
    struct governor governor;
    struct governor_actions actions;   /* in force */
    struct governor_sensors *sensors;  /* NULL: the GPU's memory is all that is known */
    struct governor_readings readings; /* the last ones */
    uint64_t due_ns;                   /* when to go on without fresh ones */
    uint64_t period_ns;
    uint64_t given_back, taken_again; /* chunks, ever */
    bool active;
    bool no_sensors_said; /* of this process */
    char why_slower[240]; /* or "" */
};

/* A GPU computes from now on. What sensors cannot be had is said once. */
void engine_govern_start(struct engine_govern *v, const struct engine_config *config,
                         const struct engine_run *run, struct k_device *gpu);
void engine_govern_stop(struct engine_govern *v); /* one that was not started is fine */
/* Between steps; does nothing most of the time. True: something changed that others should know.
 * actions.drop: the GPU is to be given up; run->gpu_failed: it failed. */
bool engine_govern_turn(struct engine_govern *v, struct engine_run *run, uint64_t now_ns);
void engine_govern_count(const struct engine_govern *v, const struct engine_run *run,
                         struct proto_status *ret);

#endif

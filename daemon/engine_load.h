/* A model on its devices: opens the CPU and a GPU, starts the run on them and reads the weights;
 * and gives all of it up again. The engine thread's, but for engine_load_pulse. */
#ifndef ISLET_ENGINE_LOAD_H
#define ISLET_ENGINE_LOAD_H

#include <stdatomic.h>

#include "engine.h"
#include "engine_run.h"
#include "model.h"

enum {
    ENGINE_LOAD_PATIENCE_MS = 120000 /* that a GPU's driver may take without a sign of life */
};

struct engine_load {
    const struct engine_config *config; /* these five: set before the first load, borrowed */
    struct engine_run *run;
    _Atomic uint64_t *heartbeat;
    void (*progress)(void *context, unsigned percent);
    bool (*stopped)(void *context); /* asked between pieces */
    void *context;                  /* of these two */

    struct engine_run_devices devices;
    struct model *model;      /* NULL: none is loaded */
    _Atomic uint64_t deaf_ns; /* since when a driver has the thread; 0: it has not */
};

/* With or without the GPU. After a failure there is something to give up. */
enum err_code engine_load_on(struct engine_load *l, bool gpu, struct err *e)
    __attribute__((warn_unused_result));
/* Can the GPU be had, with room for the model that the CPU serves? Opens, looks and closes it. */
enum err_code engine_load_try_gpu(struct engine_load *l, struct err *e)
    __attribute__((warn_unused_result));
/* Gives up the model and the devices. Sequences that run stay, and wait. */
void engine_load_leave(struct engine_load *l);
/* Moves on while a driver has the thread, as long as that is plausible. Any thread. */
uint64_t engine_load_pulse(const struct engine_load *l);

#endif

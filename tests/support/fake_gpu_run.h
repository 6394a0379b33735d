/* What an operation of the fake GPU does when its turn comes: the backend underneath computes it, on
 * weights that are put into its order for as long. */
#ifndef ISLET_FAKE_GPU_RUN_H
#define ISLET_FAKE_GPU_RUN_H

#include "fake_gpu_inner.h"

/* Any but AFTER. */
void fake_gpu_run_command(struct fake_gpu *g, struct fake_command *c);

#endif

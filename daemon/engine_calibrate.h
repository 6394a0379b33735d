/* The rates by which experts are split between CPU and GPU, measured at start in some tens of
 * milliseconds; in service engine_hybrid corrects those of the CPU. */
#ifndef ISLET_ENGINE_CALIBRATE_H
#define ISLET_ENGINE_CALIBRATE_H

#include "engine_islands.h"
#include "engine_split.h"
#include "ticks.h"

/* The islands and the RAM arena hold nothing yet. ERR_NOMEM, ERR_DEVICE. */
enum err_code engine_calibrate(struct k_device *cpu, struct engine_islands *is, struct ticks ticks,
                               struct engine_split_rates *ret, struct err *e)
    __attribute__((warn_unused_result));

#endif

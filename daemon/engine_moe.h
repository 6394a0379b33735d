/* The second half of a layer: norm, router, experts grouped over the step's rows, sum in rank
 * order. */
#ifndef ISLET_ENGINE_MOE_H
#define ISLET_ENGINE_MOE_H

#include "engine_forward.h"

enum err_code engine_moe_run(struct engine_forward *f, uint32_t layer)
    __attribute__((warn_unused_result));

#endif

/* The first half of a layer: norm, q, k and v, rope, KV write, attention, output projection. */
#ifndef ISLET_ENGINE_ATTENTION_H
#define ISLET_ENGINE_ATTENTION_H

#include "engine_forward.h"

enum err_code engine_attention_run(struct engine_forward *f, uint32_t layer)
    __attribute__((warn_unused_result));

#endif

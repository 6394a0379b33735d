/* The second half of a layer: norm, router, experts grouped over the step's rows, sum in rank
 * order. */
#ifndef ISLET_ENGINE_MOE_H
#define ISLET_ENGINE_MOE_H

#include "engine_forward.h"

/* Norm, router, groups. */
enum err_code engine_moe_route(struct engine_forward *f, uint32_t layer)
    __attribute__((warn_unused_result));
/* The chosen experts, wherever they are. */
enum err_code engine_moe_compute(struct engine_forward *f, uint32_t layer)
    __attribute__((warn_unused_result));
/* Of a layer all of whose experts are in islands: only the device's part, or the host's. */
enum err_code engine_moe_in_vram(struct engine_forward *f, uint32_t layer)
    __attribute__((warn_unused_result));
/* Where the host's memory is pinned, the device can tell it the layer's groups and rows unasked,
 * and read from it which groups' experts are in islands (f->host_resident), to compute these. */
bool engine_moe_may_tell(const struct engine_forward *f);
void engine_moe_tell(struct engine_forward *f);
enum err_code engine_moe_resident(struct engine_forward *f, uint32_t layer)
    __attribute__((warn_unused_result));
void engine_moe_unseen(struct engine_forward *f, uint32_t layer);
/* Their sum, of any layer. */
enum err_code engine_moe_sum(struct engine_forward *f) __attribute__((warn_unused_result));

#endif

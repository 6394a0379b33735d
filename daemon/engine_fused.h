/* What lies between a step's matrix products: as one operation where the device has it, otherwise
 * one after the other, with the same bits. */
#ifndef ISLET_ENGINE_FUSED_H
#define ISLET_ENGINE_FUSED_H

#include "engine_forward.h"

/* As k_ops.enter. */
enum err_code engine_fused_enter(struct engine_forward *f, const struct k_enter *a)
    __attribute__((warn_unused_result));
/* As k_ops.heads. */
enum err_code engine_fused_heads(struct engine_forward *f, const struct k_heads *a)
    __attribute__((warn_unused_result));
/* As k_ops.attend. */
enum err_code engine_fused_attend(struct engine_forward *f, const struct k_attention *a,
                                  const struct k_act *y) __attribute__((warn_unused_result));
/* As k_ops.route. */
enum err_code engine_fused_route(struct engine_forward *f, const struct k_enter *enter,
                                 const struct k_matmul *matmul, const struct k_router *router,
                                 const struct k_grouping *grouping)
    __attribute__((warn_unused_result));

#endif

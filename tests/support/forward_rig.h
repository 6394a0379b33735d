/* A model ready to compute steps without an engine around it, for tests. */
#ifndef ISLET_FORWARD_RIG_H
#define ISLET_FORWARD_RIG_H

#include "engine_forward.h"

/* A GPU beside the CPU. */
struct forward_rig_gpu {
    struct k_device *device; /* taken */
    uint64_t islands_bytes;  /* beside what the tier needs at least; UINT64_MAX: room for all */
    struct engine_split_rates rates;
};

struct forward_rig {
    struct k_device *device, *gpu; /* gpu: NULL: none */
    struct k_stream *stream, *gpu_stream;
    struct model *model;
    struct engine_experts *experts;
    struct engine_islands islands;
    struct engine_hybrid hybrid;
    struct k_buffer *pool; /* max_sequences * max_pages pages of f16 */
    struct engine_forward *forward;
};

/* Opens and loads the model on two threads. arena: bytes of expert slots, 0: room for all. source:
 * NULL, or the test's own reader. gpu: NULL: none. Fills *ret, which then
 * stays where it is if there is a GPU; end with forward_rig_close, also after an error. */
enum err_code forward_rig_open(const char *path, uint64_t arena,
                               const struct tier_read_source *source,
                               const struct engine_forward_sizes *sizes,
                               const struct forward_rig_gpu *gpu, struct forward_rig *ret,
                               struct err *e) __attribute__((warn_unused_result));
void forward_rig_close(struct forward_rig *r);

#endif

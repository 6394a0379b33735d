/* Memory of the fake GPU: buffers that nobody sees from outside, ranges whose chunks come and go, and
 * what of the host is pinned. */
#ifndef ISLET_FAKE_GPU_MEMORY_H
#define ISLET_FAKE_GPU_MEMORY_H

#include "fake_gpu_inner.h"

void fake_gpu_memory_fill(struct k_ops *ops);
bool fake_gpu_memory_is_pinned(const struct fake_gpu *g, const uint8_t *from, size_t n);
/* While an operation runs, the backend underneath sees the buffers. */
void fake_gpu_memory_show(const struct fake_gpu *g, bool shown);
/* Ends the program where something was not given back. */
void fake_gpu_memory_check_empty(const struct fake_gpu *g);

#endif

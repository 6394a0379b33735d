/* Memory of the device, pinned memory of the host, and ranges whose chunks come and go. */
#ifndef ISLET_K_CUDA_MEMORY_CUH
#define ISLET_K_CUDA_MEMORY_CUH

#include "k_cuda.cuh"

void k_cuda_memory_fill(struct k_ops *ret);
/* True: all n bytes lie in memory of the host that the device reaches. */
bool k_cuda_memory_is_pinned(const struct k_cuda *c, const void *first, uint64_t n);

#endif

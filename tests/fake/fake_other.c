/* As islet-cuda.so of another build would be: opening it must not be tried. */
#include <stdlib.h>

#include "k_cuda_entry.h"

static enum err_code open_device(const struct k_cuda_options *o, const struct k_cuda_heap *heap,
                                 struct k_device **ret, struct err *e)
{
    (void)o;
    (void)heap;
    (void)ret;
    (void)e;
    abort();
}

extern const struct k_cuda_entry islet_cuda_entry;
const struct k_cuda_entry islet_cuda_entry = {K_CUDA_ABI, K_ARITHMETIC_VERSION,
                                              (uint32_t)sizeof(struct k_ops) + 8, open_device};

/* What islet-cuda.so shows to the program that opens it: one symbol. Plain C on both sides. */
#ifndef ISLET_K_CUDA_ENTRY_H
#define ISLET_K_CUDA_ENTRY_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    K_CUDA_ABI = 1 /* raised with any change of kernels.h that sizes do not show */
};
#define K_CUDA_ENTRY_SYMBOL "islet_cuda_entry"

/* The program's heap, so that what the backend keeps is counted there. */
struct k_cuda_heap {
    void *(*zero)(size_t bytes); /* cleared, or NULL */
    void (*free)(void *block);
};

struct k_cuda_entry {
    uint32_t abi, arithmetic,
        ops_bytes; /* K_CUDA_ABI, K_ARITHMETIC_VERSION, sizeof(struct k_ops) */
    /* `heap` must live as long as the device. */
    enum err_code (*open)(const struct k_cuda_options *o, const struct k_cuda_heap *heap,
                          struct k_device **ret, struct err *e);
};

#ifdef __cplusplus
}
#endif

#endif

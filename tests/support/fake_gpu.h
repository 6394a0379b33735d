/* A device that plays a GPU on the CPU, for tests: its memory cannot be touched from outside (a CPU
 * operation that is handed one of its buffers crashes), its weights are in an order of its own, its
 * operations run as late as the order between streams allows, what they read of the host they read
 * then, and it can fail at any call. All the bits are those of the backend underneath.
 *
 * What k_ops.inject asks for: error 2 is "no memory", 700 and 719 lose the device for good. */
#ifndef ISLET_FAKE_GPU_H
#define ISLET_FAKE_GPU_H

#include "kernels.h"

struct fake_gpu_options {
    uint64_t memory;           /* bytes of the device; 0: without limit */
    bool eager;                /* operations run at once */
    bool no_arrange;           /* weights stay in the file's order */
    bool no_bring;             /* experts come step by step */
    bool no_pinning;           /* host memory cannot be registered */
    bool no_ranges;            /* chunks of memory cannot come and go */
    struct k_cuda_fault fault; /* from the first call on */
};

enum err_code fake_gpu_open(const struct fake_gpu_options *options, struct k_device **ret,
                            struct err *e) __attribute__((warn_unused_result));
/* Bytes of the device that are taken. */
uint64_t fake_gpu_used(const struct k_device *d);

#endif

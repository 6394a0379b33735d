/* Operations and copies of the fake GPU, as they are put into a stream. */
#ifndef ISLET_FAKE_GPU_OPS_H
#define ISLET_FAKE_GPU_OPS_H

#include "fake_gpu_inner.h"

void fake_gpu_ops_fill(const struct fake_gpu_options *options, struct k_ops *ops);

#endif

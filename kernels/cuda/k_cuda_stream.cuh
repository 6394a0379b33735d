/* Streams and what orders and repeats them: copies, events, graphs. */
#ifndef ISLET_K_CUDA_STREAM_CUH
#define ISLET_K_CUDA_STREAM_CUH

#include "k_cuda.cuh"

void k_cuda_stream_fill(struct k_ops *ret);

#endif

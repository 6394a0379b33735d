/* Products of many rows by the integer tensor cores (B5), for arranged weights (k_cuda_tile.h). The
 * entries of k_ops call these when rows.max_rows passes the decode kernels' 8. They launch or do
 * nothing (ERR_UNSUPPORTED), never wait, and may be recorded in a graph.
 *
 * A step's row counts, groups and expert addresses are read on the device: grids come from upper
 * bounds and blocks beyond the counts return at once. */
#ifndef ISLET_K_CUDA_PREFILL_CUH
#define ISLET_K_CUDA_PREFILL_CUH

#include "k_cuda.cuh"

extern "C" {
/* ERR_UNSUPPORTED if one of the matrices is not arranged. */
enum err_code k_cuda_matmul_prefill(const struct k_matmul *a, struct k_stream *s);
/* h alone; its quantised forms are the caller's. ERR_UNSUPPORTED if gate and up differ in format or
 * are not arranged. */
enum err_code k_cuda_moe_gate_up_prefill(const struct k_moe_gate_up *a, struct k_stream *s);
/* ERR_UNSUPPORTED if down is not arranged. */
enum err_code k_cuda_moe_down_prefill(const struct k_moe_down *a, struct k_stream *s);
}

#endif

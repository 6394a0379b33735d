/* The threaded CPU backend: the table of operations for a level. */
#ifndef ISLET_K_CPU_OPS_H
#define ISLET_K_CPU_OPS_H

#include "k_cpu_inner.h"
#include "kernels.h"

/* Inner loops of AVX2 or AVX512. */
void k_cpu_ops_fill(enum k_level level, struct k_cpu_inner *ret);
void k_cpu_ops_table(const struct k_cpu_inner *inner, struct k_ops *ret);
size_t k_cpu_ops_scratch_bytes(void); /* of each thread */

#endif

/* What this processor can do (CPUID and what the system saves of the registers). */
#ifndef ISLET_K_CPU_H
#define ISLET_K_CPU_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels.h"

bool k_cpu_has(enum k_level level);
/* "avx512f avx512bw ...": what `level` needs, for messages. */
const char *k_cpu_needs(enum k_level level);
/* Physical cores this process may run on, at least 1. */
uint32_t k_cpu_cores(void);

#endif

/* k_weigh and k_highest by eights. */
#ifndef ISLET_K_AVX2_WEIGH_H
#define ISLET_K_AVX2_WEIGH_H

#include <stdint.h>

uint64_t k_avx2_weigh(const float *x, uint32_t n, float best, float temperature, uint64_t *ret);
uint32_t k_avx2_weigh_highest(const float *x, uint32_t n);

#endif

/* What a sampler does with a whole vocabulary (A21). */
#include "k_avx2_weigh.h"
#include "k_cpu.h"
#include "kernels.h"

uint64_t k_weigh(const float *x, uint32_t n, float best, float temperature, uint64_t *ret)
{
    uint64_t total = 0;
    if (k_cpu_has(K_LEVEL_AVX2))
        return k_avx2_weigh(x, n, best, temperature, ret);
    for (uint32_t i = 0; i < n; i++)
        total += ret[i] = (uint64_t)(k_exp32((x[i] - best) / temperature) * K_WEIGHT_ONE);
    return total;
}

uint32_t k_highest(const float *x, uint32_t n)
{
    uint32_t best = 0;
    if (k_cpu_has(K_LEVEL_AVX2))
        return k_avx2_weigh_highest(x, n);
    for (uint32_t i = 1; i < n; i++)
        best = x[i] > x[best] ? i : best;
    return best;
}

#include "k_cpu.h"

#include <sched.h>
#include <stdio.h>

bool k_cpu_has(enum k_level level)
{
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    switch (level) {
    case K_LEVEL_AUTO:
    case K_LEVEL_REFERENCE:
        return true;
    case K_LEVEL_AVX2: /* every processor with AVX2 has F16C */
        return avx2;
    case K_LEVEL_AVX512:
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
    }
    return false;
}

const char *k_cpu_needs(enum k_level level)
{
    switch (level) {
    case K_LEVEL_AVX2:
        return "avx2 fma f16c";
    case K_LEVEL_AVX512:
        return "avx512f avx512bw avx512dq avx512vl avx512vnni";
    case K_LEVEL_AUTO:
    case K_LEVEL_REFERENCE:
        break;
    }
    return "nothing";
}

/* A core with two hardware threads lists both; it counts once, by its first. */
static bool first_of_core(int cpu)
{
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    FILE *f = fopen(path, "re");
    int first = cpu;
    if (f != NULL) {
        if (fscanf(f, "%d", &first) != 1)
            first = cpu;
        fclose(f);
    }
    return first == cpu;
}

uint32_t k_cpu_cores(void)
{
    cpu_set_t set;
    uint32_t all = 0, cores = 0;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &set)) {
            all++;
            cores += first_of_core(cpu);
        }
    /* A mask that leaves out the first siblings still has work for each CPU it names. */
    const uint32_t n = cores > 0 ? cores : all;
    return n == 0 ? 1 : n > K_MAX_THREADS ? K_MAX_THREADS : n;
}

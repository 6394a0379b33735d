/* What the machine has: figures of memory, read when they are asked for. */
#ifndef ISLET_ENGINE_MACHINE_H
#define ISLET_ENGINE_MACHINE_H

#include <stdint.h>

/* Bytes named by `key` in /proc/meminfo ("MemTotal", "MemAvailable"); 0: unknown. */
uint64_t engine_machine_memory(const char *key);
/* What the memory limits of this process' cgroup and its parents (v2 memory.max and memory.high, v1
 * memory.limit_in_bytes) leave beside what they hold already without page cache; UINT64_MAX: no
 * limit. */
uint64_t engine_machine_cgroup_left(void);
/* Least of MemAvailable and what the cgroup leaves; 0: unknown. */
uint64_t engine_machine_available(void);
/* The resident set of this process, from an open /proc/self/statm; 0: unknown. */
uint64_t engine_machine_resident(int statm);

#endif

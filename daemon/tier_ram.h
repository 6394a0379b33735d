/* The RAM tier: one arena of expert slots in huge pages, locked where the system allows it. What
 * lies where is expert_cache's affair. The engine thread's.
 *
 * A small arena is filled with pages at once. A large one would cost seconds before the first
 * answer (the system clears every page): it is locked as its pages come, by the reads that use
 * them and, while the engine has nothing to do, piece by piece by tier_ram_reserve. */
#ifndef ISLET_TIER_RAM_H
#define ISLET_TIER_RAM_H

#include "kernels.h"

struct tier_ram {
    const struct k_ops *ops;
    struct k_buffer *arena;
    uint64_t bytes, reserved; /* reserved: bytes from the start whose pages are there */
    bool locked;
    char refusal[96]; /* why it is not locked; empty if it is */
};

/* A refused lock (RLIMIT_MEMLOCK) is no error: `refusal` says it. ERR_NOMEM. End with
 * tier_ram_done. */
enum err_code tier_ram_start(struct tier_ram *t, struct k_device *device, uint64_t bytes,
                             struct err *e) __attribute__((warn_unused_result));
void tier_ram_done(struct tier_ram *t); /* a cleared one is fine */

/* Reserves the next few MiB, some milliseconds' work. False: all was there already. */
bool tier_ram_reserve(struct tier_ram *t);

#endif

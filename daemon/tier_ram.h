/* The RAM tier: one arena of expert slots in huge pages, locked where the system allows it. What
 * lies where is expert_cache's affair.
 *
 * A small arena is filled with pages at once. A large one would cost seconds before the first
 * answer (the system clears every page): a thread of its own does it then, at low priority, while
 * the model is read and first answers are computed; a read that comes before it brings its pages
 * itself. */
#ifndef ISLET_TIER_RAM_H
#define ISLET_TIER_RAM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "kernels.h"

struct tier_ram {
    const struct k_ops *ops;
    struct k_buffer *arena;
    uint64_t bytes;
    bool locked;
    char refusal[96]; /* why it is not locked; empty if it is */

    pthread_t thread;
    bool has_thread;
    _Atomic bool stop;
    _Atomic uint64_t reserved; /* bytes from the start whose pages are there */
};

/* A refused lock (RLIMIT_MEMLOCK) is no error: `refusal` says it. ERR_NOMEM. End with
 * tier_ram_done; `t` stays where it is until then. */
enum err_code tier_ram_start(struct tier_ram *t, struct k_device *device, uint64_t bytes,
                             struct err *e) __attribute__((warn_unused_result));
void tier_ram_done(struct tier_ram *t); /* a cleared one is fine */

#endif

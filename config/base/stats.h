/* Counters of one thread that another may read: relaxed atomics, no locks. */
#ifndef ISLET_STATS_H
#define ISLET_STATS_H

#include <stdatomic.h>
#include <stdint.h>

struct stats_counter {
    _Atomic uint64_t value;
};

static inline void stats_add(struct stats_counter *c, uint64_t n)
{
    atomic_fetch_add_explicit(&c->value, n, memory_order_relaxed);
}

static inline void stats_set(struct stats_counter *c, uint64_t n)
{
    atomic_store_explicit(&c->value, n, memory_order_relaxed);
}

static inline uint64_t stats_get(const struct stats_counter *c)
{
    return atomic_load_explicit(&((struct stats_counter *)(uintptr_t)c)->value,
                                memory_order_relaxed);
}

#endif

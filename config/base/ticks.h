/* Monotonic time as a handle, so that tests move it by hand. Wall-clock time exists only for log
 * lines and `created`. */
#ifndef ISLET_TICKS_H
#define ISLET_TICKS_H

#include <stdint.h>

struct ticks {
    uint64_t (*now_ns)(void *context);
    void *context;
};

struct ticks ticks_real(void); /* CLOCK_MONOTONIC */

struct ticks_fake {
    uint64_t now_ns;
};
struct ticks ticks_of_fake(struct ticks_fake *fake); /* borrows fake for its whole life */

static inline uint64_t ticks_ns(struct ticks t)
{
    return t.now_ns(t.context);
}

static inline uint64_t ticks_ms(struct ticks t)
{
    return t.now_ns(t.context) / 1000000u;
}

#endif

#include "ticks.h"

#include <stddef.h>
#include <time.h>

static uint64_t ticks_monotonic(void *context)
{
    (void)context;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t ticks_read_fake(void *context)
{
    const struct ticks_fake *fake = context;
    return fake->now_ns;
}

struct ticks ticks_real(void)
{
    return (struct ticks){.now_ns = ticks_monotonic, .context = NULL};
}

struct ticks ticks_of_fake(struct ticks_fake *fake)
{
    return (struct ticks){.now_ns = ticks_read_fake, .context = fake};
}

/* Checked arithmetic for sizes that come from files and peers. Each returns false on overflow and
 * leaves *ret alone. */
#ifndef ISLET_SIZE_H
#define ISLET_SIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline bool size_add(uint64_t a, uint64_t b, uint64_t *ret)
{
    uint64_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        return false;
    *ret = sum;
    return true;
}

static inline bool size_mul(uint64_t a, uint64_t b, uint64_t *ret)
{
    uint64_t product;
    if (__builtin_mul_overflow(a, b, &product))
        return false;
    *ret = product;
    return true;
}

/* Rounds n up to a multiple of `to` (a power of two). */
static inline bool size_round_up(uint64_t n, uint64_t to, uint64_t *ret)
{
    uint64_t sum;
    if (!size_add(n, to - 1, &sum))
        return false;
    *ret = sum & ~(to - 1);
    return true;
}

#endif

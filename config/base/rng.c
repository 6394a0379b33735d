#include "rng.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/types.h>

/* Multipliers and key increments of the paper. */
static const uint32_t rng_m0 = 0xD2511F53u, rng_m1 = 0xCD9E8D57u;
static const uint32_t rng_w0 = 0x9E3779B9u, rng_w1 = 0xBB67AE85u;

void rng_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t ret[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (unsigned round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)rng_m0 * c0, p1 = (uint64_t)rng_m1 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += rng_w0;
        k1 += rng_w1;
    }
    ret[0] = c0;
    ret[1] = c1;
    ret[2] = c2;
    ret[3] = c3;
}

uint64_t rng_draw(uint64_t seed, uint32_t index)
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {index, 0, 0, 0};
    uint32_t word[4];
    rng_philox(counter, key, word);
    return (uint64_t)word[1] << 32 | word[0];
}

void rng_system(void *ret, unsigned n)
{
    unsigned char *p = ret;
    while (n > 0) {
        ssize_t got = getrandom(p, n, 0);
        if (got < 0 && errno == EINTR)
            continue;
        /* Guessable request ids would be worse than a crash, and Linux has had the call since
         * 3.17. */
        if (got <= 0)
            abort();
        p += got;
        n -= (unsigned)got;
    }
}

/* Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011). A draw depends on key and
 * counter alone, so a resumed answer needs no generator state (ARITHMETIC.md, A21). */
#ifndef ISLET_RNG_H
#define ISLET_RNG_H

#include <stdint.h>

/* ret[4] = Philox4x32-10(counter[4], key[2]). */
void rng_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t ret[4]);

/* The 64-bit draw of token `index` under `seed`: key = seed (low word, high word), counter =
 * (index, 0, 0, 0), words 0 (low) and 1 (high). */
uint64_t rng_draw(uint64_t seed, uint32_t index);

/* Unpredictable bytes of the system (getrandom), for request ids and default seeds. */
void rng_system(void *ret, unsigned n);

#endif

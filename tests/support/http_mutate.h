/* Requests with seeded damage: heads, chunkings, JSON. The nth request of a seed is always the
 * same. */
#ifndef ISLET_HTTP_MUTATE_H
#define ISLET_HTTP_MUTATE_H

#include <stdint.h>

#include "buf.h"

/* Replaces what is in *out. */
void http_mutate(uint64_t seed, uint32_t index, struct buf *out);

#endif

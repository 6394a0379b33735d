#include "stats.h"

void stats_record_us(struct stats_histogram *h, uint64_t us)
{
    unsigned i = us > 1 ? 63u - (unsigned)__builtin_clzll(us) : 0; /* 0 counts with 1 */
    stats_add(&h->bucket[i < STATS_BUCKETS ? i : STATS_BUCKETS - 1], 1);
    stats_add(&h->sum_us, us);
    stats_add(&h->count, 1);
}

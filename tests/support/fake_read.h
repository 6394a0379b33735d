/* A reader for tier_ssd that misbehaves as told: real bytes of the real files, but results come in
 * another order, short, or not at all. Everything happens inside its calls, in one thread, so that
 * a run repeats exactly. */
#ifndef ISLET_FAKE_READ_H
#define ISLET_FAKE_READ_H

#include <stdbool.h>
#include <stdint.h>

#include "tier_read.h"

struct fake_read {
    /* What a test asks for, before opening or between calls. */
    uint64_t seed;     /* not 0: results come in an order drawn from it */
    uint64_t fail_nth; /* this read from now (1: the next) ends with -fail_errno */
    bool fail_forever; /* and all later ones */
    int fail_errno;
    uint64_t short_nth; /* this read from now gives short_bytes at most */
    bool short_forever; /* and all later ones */
    uint32_t short_bytes;
    uint32_t idle_takes; /* so many calls of take give nothing */
    /* What it saw. */
    uint64_t n_reads, n_faults, n_closed; /* faults: reads that ended with fail_errno */
    uint32_t n_open, most_open;
    bool too_many, misplaced;       /* more reads open than agreed; one outside of the arena */
    struct tier_read_source source; /* for struct tier_ssd_options */
};

/* Sets everything to "behaves" and fills `source`. The struct outlives the tier_ssd. */
void fake_read_init(struct fake_read *f);

#endif

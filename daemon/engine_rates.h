/* Rates of this machine, measured: reading RAM with all threads, and reading experts of a model's
 * own file in the way that the engine does. */
#ifndef ISLET_ENGINE_RATES_H
#define ISLET_ENGINE_RATES_H

#include <stdbool.h>

#include "model.h"
#include "ticks.h"
#include "tier_ssd.h"

/* Bytes a second that as many threads as compute on `device` read of a block of `bytes`, which
 * should be larger than the caches: the best of three passes, or of those that begin within
 * `limit_ns`. ERR_NOMEM. */
enum err_code engine_rates_ram(struct k_device *device, uint64_t bytes, uint64_t limit_ns,
                               struct ticks ticks, double *ret, struct err *e)
    __attribute__((warn_unused_result));

struct engine_rates_ssd {
    double rate;     /* bytes a second */
    uint64_t bytes;  /* that were read for it */
    bool direct;     /* past the page cache */
    double cached;   /* if not direct: share of them that the page cache held before; < 0: the
                      * system does not say */
    char about[512]; /* tier_ssd_about */
};

/* Reads experts in an order drawn at random, each once at most, as many at a time as a token uses
 * in one layer, for `limit_ns` at most. ERR_IO, ERR_FORMAT, ERR_NOMEM, ERR_UNSUPPORTED: as
 * tier_ssd. */
enum err_code engine_rates_ssd(struct k_device *device, const struct model *m, enum tier_ssd_io io,
                               uint32_t depth, uint64_t limit_ns, struct ticks ticks,
                               struct engine_rates_ssd *ret, struct err *e)
    __attribute__((warn_unused_result));

#endif

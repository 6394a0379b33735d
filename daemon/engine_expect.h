/* What speed of decoding to expect from measured rates: the bytes that a token needs over the rates
 * at which they come. Pure. Expected, not promised: computing may be slower than reading, and a
 * conversation's routing may differ from what is usual. */
#ifndef ISLET_ENGINE_EXPECT_H
#define ISLET_ENGINE_EXPECT_H

#include <stdint.h>

struct engine_expect {
    double dense_bytes;  /* dense weights that each token reads */
    double expert_bytes; /* of the experts of one token */
    double ram_rate;     /* bytes a second, all threads; > 0 */
    double ssd_rate;     /* bytes a second; > 0 */
};

/* Share of hits to expect when `resident` (0..1) of all experts have a slot and routing has the
 * locality that is usual for trained models. */
double engine_expect_hits(double resident);
/* Tokens a second at most when `hits` (0..1) of the experts are in memory: reads of both kinds
 * overlap, and what comes from the SSD crosses the RAM twice. */
double engine_expect_speed(const struct engine_expect *x, double hits);

#endif

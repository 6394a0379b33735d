/* Memory that decoded arrays live in, kept from one message to the next. One owner, one thread. */
#ifndef ISLET_PROTO_SCRATCH_H
#define ISLET_PROTO_SCRATCH_H

#include <stdint.h>

#include "buf.h"

struct proto_scratch {
    struct buf a, b;
};

static inline void proto_scratch_init(struct proto_scratch *s)
{
    /* No ceiling of its own: what a frame can ask for is bounded by the frame's size. */
    s->a = BUF_INIT(SIZE_MAX / 4);
    s->b = BUF_INIT(SIZE_MAX / 4);
}

static inline void proto_scratch_done(struct proto_scratch *s)
{
    buf_done(&s->a);
    buf_done(&s->b);
}

#endif

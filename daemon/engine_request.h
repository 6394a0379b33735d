/* A request on its way through the engine: one heap block, made and freed by the loop thread, that
 * holds copies of the run's arrays, the links of both threads and the last event, so that a request
 * can always end. */
#ifndef ISLET_ENGINE_REQUEST_H
#define ISLET_ENGINE_REQUEST_H

#include <stdatomic.h>

#include "engine.h"
#include "list.h"

struct engine_job {
    struct engine_request request; /* first: the loop knows the block by it */
    struct list open;              /* loop thread: submitted, last event not yet returned */
    struct list waiting;           /* engine thread */
    struct engine_event last;      /* DONE or ERROR */
    _Atomic bool cancelled;        /* loop to engine */
    uint32_t checked_ctx;          /* context it was checked against; 0: the model was not known */
    uint64_t order;                /* of submission */
    uint64_t submitted_ns;
    uint64_t deferred_ns; /* since when it waits for another's prefix; 0: does not */
};

static inline struct engine_job *engine_request_job(struct engine_request *r)
{
    return (struct engine_job *)(void *)r;
}

/* Sizes that every engine would refuse, and values that the arithmetic has no meaning for.
 * ERR_ARGUMENT. */
enum err_code engine_request_check_run(const struct proto_run *run, struct err *e)
    __attribute__((warn_unused_result));
/* The same against a loaded model: ids and lengths. */
enum err_code engine_request_check_model(const struct proto_run *run, uint32_t n_vocab,
                                         uint32_t n_ctx, struct err *e)
    __attribute__((warn_unused_result));

#endif

/* A POST whose body is worked on: at once where it is short, on libuv's thread pool where that
 * would hold up the loop and with it every stream. The job owns the body and all that is made of
 * it; what runs on the pool touches the job and what never changes (the model). The client may go
 * at any time: the job is then freed as soon as the pool has let it go. */
#ifndef ISLET_GW_JOB_H
#define ISLET_GW_JOB_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <uv.h>

#include "buf.h"
#include "gw_refusal.h"

struct gw_exchange;
struct gw_job;
struct gw_model;
struct gw_service;

enum {
    GW_JOB_INLINE_BYTES = 64 * 1024 /* a body up to here stays on the loop */
};

struct gw_job_kind {
    /* Any thread, once. body: the parsed object, borrowed. False: *refusal says why. */
    bool (*run)(struct gw_job *j, const json_t *body, struct gw_refusal *refusal);
    /* Loop, after run said true and if the client is still there: ends or hands on j->x. NULL:
     * answers 200 with j->out. */
    void (*finish)(struct gw_job *j);
    /* Loop. Frees what the struct around the job owns, but not the struct. NULL: nothing. */
    void (*done)(struct gw_job *j);
};

/* First member of a struct of the owner's, which alloc_zero made and gw_job_start takes. */
struct gw_job {
    const struct gw_job_kind *kind;
    struct gw_service *service;   /* for the loop only */
    const struct gw_model *model; /* immutable */
    struct gw_exchange *x;        /* for the loop only; NULL: the client is gone */
    struct buf out;               /* JSON, by run */

    struct buf body;
    size_t body_bytes;
    struct gw_refusal refusal;
    bool accepted;
    uv_work_t work;
};

/* Room for a job in a struct of `bytes` bytes, zeroed. NULL: no model to answer with, or no memory;
 * the exchange has been answered. */
void *gw_job_new(size_t bytes, const struct gw_job_kind *kind, struct gw_service *s,
                 struct gw_exchange *x);
/* Takes the job, the exchange and its body. The job may be over when this returns. */
void gw_job_start(struct gw_job *j);

#endif

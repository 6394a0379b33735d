/* Events from the engine thread to the loop: a fixed pool and a queue of those that are ready. A
 * request's last event is not of the pool, so that a full pool never keeps a request from
 * ending. */
#ifndef ISLET_ENGINE_MAIL_H
#define ISLET_ENGINE_MAIL_H

#include <stdatomic.h>

#include "engine_request.h"
#include "queue.h"

struct engine_mail {
    struct queue *ready, *idle;
    struct engine_event *pool; /* [n] */
    size_t n;
    struct engine_event state;  /* the one STATE event */
    struct engine_event **held; /* [n + n_last]: sent, and waiting for the flush */
    size_t n_held;
    _Atomic bool state_queued;
    void (*notify)(void *context);
    void *notify_context;
};

/* n: events of the pool; n_last: requests that may be open. */
enum err_code engine_mail_start(struct engine_mail *m, size_t n, size_t n_last, struct err *e)
    __attribute__((warn_unused_result));
void engine_mail_done(struct engine_mail *m);

/* Engine thread. */
size_t engine_mail_room(struct engine_mail *m); /* events of the pool that are idle */
/* An event of the pool, cleared; the caller made sure that there is room. */
struct engine_event *engine_mail_take(struct engine_mail *m, enum engine_event_kind kind,
                                      uint64_t handle);
/* Holds the event until engine_mail_flush, so that the snapshot is never behind what the loop was
 * told. */
void engine_mail_send(struct engine_mail *m, struct engine_event *event);
void engine_mail_flush(struct engine_mail *m);
void engine_mail_send_state(struct engine_mail *m); /* any thread; several become one */

/* Loop thread. */
struct engine_event *engine_mail_next(struct engine_mail *m); /* NULL: none */
/* Gives an event of the pool back; others are left alone. */
void engine_mail_return(struct engine_mail *m, struct engine_event *event);

#endif

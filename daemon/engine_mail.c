#include "engine_mail.h"

#include <assert.h>
#include <string.h>

#include "alloc.h"

enum err_code engine_mail_start(struct engine_mail *m, size_t n, size_t n_last, struct err *e)
{
    m->n = n;
    m->state.kind = ENGINE_STATE;
    m->ready = queue_new(n + n_last + 1);
    m->idle = queue_new(n);
    m->pool = alloc_zero(ALLOC_REQUEST, n, sizeof(*m->pool));
    m->held = alloc_zero(ALLOC_REQUEST, n + n_last, sizeof(*m->held));
    if (m->ready == NULL || m->idle == NULL || m->pool == NULL || m->held == NULL) {
        engine_mail_done(m);
        return err_set(e, ERR_NOMEM, "no memory for %zu events", n);
    }
    for (size_t i = 0; i < n; i++)
        (void)queue_push(m->idle, &m->pool[i]);
    return ERR_OK;
}

void engine_mail_done(struct engine_mail *m)
{
    queue_free(m->ready);
    queue_free(m->idle);
    alloc_free(m->pool);
    alloc_free(m->held);
    m->ready = m->idle = NULL;
    m->pool = NULL;
    m->held = NULL;
}

size_t engine_mail_room(struct engine_mail *m)
{
    return queue_count(m->idle);
}

struct engine_event *engine_mail_take(struct engine_mail *m, enum engine_event_kind kind,
                                      uint64_t handle)
{
    struct engine_event *event = queue_pop(m->idle);
    assert(event != NULL);
    memset(event, 0, sizeof(*event));
    event->kind = kind;
    event->handle = handle;
    return event;
}

void engine_mail_send(struct engine_mail *m, struct engine_event *event)
{
    m->held[m->n_held++] = event; /* it holds the pool and all last events */
}

void engine_mail_flush(struct engine_mail *m)
{
    if (m->n_held == 0)
        return;
    for (size_t i = 0; i < m->n_held; i++) {
        const bool sent = queue_push(m->ready, m->held[i]);
        assert(sent); /* the queue holds the pool, all last events and the state */
        (void)sent;
    }
    m->n_held = 0;
    m->notify(m->notify_context);
}

void engine_mail_send_state(struct engine_mail *m)
{
    if (atomic_exchange(&m->state_queued, true))
        return;
    (void)queue_push(m->ready, &m->state);
    m->notify(m->notify_context);
}

struct engine_event *engine_mail_next(struct engine_mail *m)
{
    struct engine_event *event = queue_pop(m->ready);
    if (event == &m->state)
        atomic_store(&m->state_queued, false); /* before the loop reads the facts */
    return event;
}

void engine_mail_return(struct engine_mail *m, struct engine_event *event)
{
    if (event >= m->pool && event < m->pool + m->n)
        (void)queue_push(m->idle, event);
}

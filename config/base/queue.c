#include "queue.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <time.h>

#include "alloc.h"
#include "ticks.h"

struct queue {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    size_t capacity, first, count;
    bool woken;
    void *items[];
};

struct queue *queue_new(size_t capacity)
{
    if (capacity == 0 || capacity > (SIZE_MAX / 2 - sizeof(struct queue)) / sizeof(void *))
        return NULL;
    struct queue *q = alloc_zero(ALLOC_MISC, 1, sizeof *q + capacity * sizeof q->items[0]);
    if (q == NULL)
        return NULL;
    q->capacity = capacity;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->changed, &attr);
    pthread_condattr_destroy(&attr);
    return q;
}

void queue_free(struct queue *q)
{
    if (q == NULL)
        return;
    pthread_cond_destroy(&q->changed);
    pthread_mutex_destroy(&q->lock);
    alloc_free(q);
}

bool queue_push(struct queue *q, void *item)
{
    assert(item != NULL); /* NULL is how queue_pop says "empty" */
    pthread_mutex_lock(&q->lock);
    bool fits = q->count < q->capacity;
    if (fits) {
        q->items[(q->first + q->count) % q->capacity] = item;
        q->count++;
        pthread_cond_signal(&q->changed);
    }
    pthread_mutex_unlock(&q->lock);
    return fits;
}

void *queue_pop(struct queue *q)
{
    void *item = NULL;
    pthread_mutex_lock(&q->lock);
    if (q->count > 0) {
        item = q->items[q->first];
        q->first = (q->first + 1) % q->capacity;
        q->count--;
    }
    pthread_mutex_unlock(&q->lock);
    return item;
}

void queue_wait(struct queue *q, int64_t timeout_ms)
{
    struct timespec until = {0};
    if (timeout_ms >= 0) {
        uint64_t now = ticks_ns(ticks_real());
        uint64_t room = (uint64_t)INT64_MAX - now;
        uint64_t wait = (uint64_t)timeout_ms;
        uint64_t end = wait > room / 1000000u ? (uint64_t)INT64_MAX : now + wait * 1000000u;
        until.tv_sec = (time_t)(end / 1000000000u);
        until.tv_nsec = (long)(end % 1000000000u);
    }
    pthread_mutex_lock(&q->lock);
    int rc = 0;
    while (q->count == 0 && !q->woken && rc != ETIMEDOUT) {
        if (timeout_ms < 0)
            rc = pthread_cond_wait(&q->changed, &q->lock);
        else
            rc = pthread_cond_timedwait(&q->changed, &q->lock, &until);
    }
    q->woken = false;
    pthread_mutex_unlock(&q->lock);
}

void queue_wake(struct queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->woken = true;
    pthread_cond_signal(&q->changed);
    pthread_mutex_unlock(&q->lock);
}

size_t queue_count(struct queue *q)
{
    pthread_mutex_lock(&q->lock);
    size_t n = q->count;
    pthread_mutex_unlock(&q->lock);
    return n;
}

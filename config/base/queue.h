/* Bounded hand-over of pointers between two threads (mutex and condition variable; FIFO). */
#ifndef ISLET_QUEUE_H
#define ISLET_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct queue;

struct queue *queue_new(size_t capacity); /* caller frees with queue_free; NULL: no memory */
void queue_free(struct queue *q);         /* NULL is fine; what is still inside is the caller's */
/* False when full: nothing was taken. Wakes a waiter. */
bool queue_push(struct queue *q, void *item);
/* NULL when empty. */
void *queue_pop(struct queue *q);
/* Waits up to timeout_ms (negative: for ever) until there is an item or queue_wake is called; does
 * not take it. */
void queue_wait(struct queue *q, int64_t timeout_ms);
/* Ends a present or the next queue_wait without an item. */
void queue_wake(struct queue *q);
size_t queue_count(struct queue *q);

#endif

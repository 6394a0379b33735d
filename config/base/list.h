/* Intrusive doubly linked list: a head and nodes inside the owner's struct. list_init before
 * use. */
#ifndef ISLET_LIST_H
#define ISLET_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct list {
    struct list *next, *prev;
};

static inline void list_init(struct list *l)
{
    l->next = l->prev = l;
}

static inline bool list_empty(const struct list *l)
{
    return l->next == l;
}

static inline void list_insert_before(struct list *at, struct list *node)
{
    node->prev = at->prev;
    node->next = at;
    at->prev->next = node;
    at->prev = node;
}

static inline void list_append(struct list *head, struct list *node)
{
    list_insert_before(head, node);
}

static inline void list_prepend(struct list *head, struct list *node)
{
    list_insert_before(head->next, node);
}

/* Safe on a node that is in no list, if it was initialised. */
static inline void list_remove(struct list *node)
{
    node->prev->next = node->next;
    node->next->prev = node->prev;
    list_init(node);
}

#define list_entry(node, type, member) ((type *)(void *)((char *)(node)-offsetof(type, member)))

#define list_each(it, head) for (struct list *it = (head)->next; it != (head); it = it->next)
#define list_each_safe(it, head)                                              \
    for (struct list *it = (head)->next, *it##_next = it->next; it != (head); \
         it = it##_next, it##_next = it->next)

#endif

/* The pages of one sequence, first position first. The leading n_shared ones are in the prefix tree
 * and may be held by others too; only positions past `computed` are ever written. The engine
 * thread's. */
#ifndef ISLET_KV_SEQUENCE_H
#define ISLET_KV_SEQUENCE_H

#include "kv_prefix.h"

struct kv_sequence {
    uint32_t *pages; /* borrowed, [max_pages] */
    uint32_t n_pages, n_shared;
    uint32_t computed; /* positions that hold values */
    bool changed;      /* the device's table does not have these pages yet */
};

struct kv_sequence_copy { /* a page to copy before the next step; from KV_PAGE_NONE: none */
    uint32_t from, to;
};

/* Takes what the tree has of tokens[n] into the empty sequence: at most n positions, whole pages
 * held, a page that agrees only at its beginning copied into a new one where the pool has one. */
void kv_sequence_reuse(struct kv_sequence *s, struct kv_prefix *p, const uint32_t *tokens,
                       uint32_t n, struct kv_sequence_copy *ret);
/* Positions that the tree has of tokens[n], without taking anything. */
uint32_t kv_sequence_reusable(const struct kv_prefix *p, const uint32_t *tokens, uint32_t n);
/* Pages for `positions` positions, unheld prefixes making room. False: the pool has no more; what
 * was taken stays with the sequence. */
bool kv_sequence_grow(struct kv_sequence *s, struct kv_prefix *p, uint32_t positions);
/* Positions up to `computed` hold tokens[computed]: pages that became full go into the tree. */
void kv_sequence_advance(struct kv_sequence *s, struct kv_prefix *p, const uint32_t *tokens,
                         uint32_t computed);
/* Gives all pages back; their content stays in the tree as long as nobody needs the room. */
void kv_sequence_release(struct kv_sequence *s, struct kv_prefix *p, const uint32_t *tokens);

#endif

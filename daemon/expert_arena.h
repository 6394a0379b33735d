/* The extents of one arena in the order of their addresses, free or owned by an expert.
 * Neighbouring free extents are one; a free one is split for a smaller expert. Offsets only: no
 * memory is touched. The expert cache's. */
#ifndef ISLET_EXPERT_ARENA_H
#define ISLET_EXPERT_ARENA_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

#define EXPERT_ARENA_NONE UINT32_MAX

struct expert_arena_extent {
    uint64_t place, bytes;
    uint32_t owner;                   /* an expert, or EXPERT_ARENA_NONE: free */
    uint32_t before, after;           /* neighbours by address, EXPERT_ARENA_NONE at the ends */
    uint32_t list_before, list_after; /* of the free list; of the list of unused numbers */
};

enum {
    EXPERT_ARENA_LISTS = 64 /* free extents by the logarithm of their size */
};

struct expert_arena {
    struct expert_arena_extent *extents; /* [2 * owners + 1], numbers are stable while owned */
    uint32_t first;                      /* by address */
    uint32_t unused;
    uint32_t lists[EXPERT_ARENA_LISTS];
    uint64_t filled; /* bit i: lists[i] is not empty */
    uint64_t used_bytes;
};

/* One free extent of `bytes`; at most n_owners are owned at once. ERR_NOMEM. */
enum err_code expert_arena_start(struct expert_arena *a, uint64_t bytes, uint32_t n_owners,
                                 struct err *e) __attribute__((warn_unused_result));
void expert_arena_done(struct expert_arena *a); /* of zeroes is fine */

/* Number of an extent of exactly `bytes` (not 0) now owned by `owner`, cut from the smallest free
 * one that is large enough (the lowest of equals in its list); EXPERT_ARENA_NONE: none is. */
uint32_t expert_arena_take(struct expert_arena *a, uint64_t bytes, uint32_t owner);
/* Frees an owned extent and merges it with free neighbours; gives the number of the free one. */
uint32_t expert_arena_return(struct expert_arena *a, uint32_t extent);
/* Bytes that would be free in one piece if this owned extent were. */
uint64_t expert_arena_span(const struct expert_arena *a, uint32_t extent);

#endif

#include "expert_arena.h"

#include <assert.h>

#include "alloc.h"

static uint32_t list_of(uint64_t bytes)
{
    return 63 - (uint32_t)__builtin_clzll(bytes);
}

static void free_add(struct expert_arena *a, uint32_t n)
{
    struct expert_arena_extent *x = &a->extents[n];
    const uint32_t list = list_of(x->bytes);
    x->owner = EXPERT_ARENA_NONE;
    x->list_before = EXPERT_ARENA_NONE;
    x->list_after = a->lists[list];
    if (x->list_after != EXPERT_ARENA_NONE)
        a->extents[x->list_after].list_before = n;
    a->lists[list] = n;
    a->filled |= 1ull << list;
}

static void free_remove(struct expert_arena *a, uint32_t n)
{
    const struct expert_arena_extent *x = &a->extents[n];
    const uint32_t list = list_of(x->bytes);
    if (x->list_before != EXPERT_ARENA_NONE)
        a->extents[x->list_before].list_after = x->list_after;
    else
        a->lists[list] = x->list_after;
    if (x->list_after != EXPERT_ARENA_NONE)
        a->extents[x->list_after].list_before = x->list_before;
    if (a->lists[list] == EXPERT_ARENA_NONE)
        a->filled &= ~(1ull << list);
}

/* Joins the extent behind n to n; both are free and in no list. */
static void join_after(struct expert_arena *a, uint32_t n)
{
    struct expert_arena_extent *x = &a->extents[n];
    const uint32_t gone = x->after;
    x->bytes += a->extents[gone].bytes;
    x->after = a->extents[gone].after;
    if (x->after != EXPERT_ARENA_NONE)
        a->extents[x->after].before = n;
    a->extents[gone].list_after = a->unused;
    a->unused = gone;
}

static bool is_free(const struct expert_arena *a, uint32_t n)
{
    return n != EXPERT_ARENA_NONE && a->extents[n].owner == EXPERT_ARENA_NONE;
}

enum err_code expert_arena_start(struct expert_arena *a, uint64_t bytes, uint32_t n_owners,
                                 struct err *e)
{
    const uint32_t n = 2 * n_owners + 1;
    *a = (struct expert_arena){.extents = alloc_zero(ALLOC_MISC, n, sizeof *a->extents)};
    if (a->extents == NULL)
        return err_set(e, ERR_NOMEM, "expert cache: no memory for %u extents", n);
    for (uint32_t i = 0; i < EXPERT_ARENA_LISTS; i++)
        a->lists[i] = EXPERT_ARENA_NONE;
    for (uint32_t i = 1; i < n; i++)
        a->extents[i].list_after = i + 1 < n ? i + 1 : EXPERT_ARENA_NONE;
    a->unused = n > 1 ? 1 : EXPERT_ARENA_NONE;
    a->extents[0] = (struct expert_arena_extent){
        .bytes = bytes, .before = EXPERT_ARENA_NONE, .after = EXPERT_ARENA_NONE};
    free_add(a, 0);
    return ERR_OK;
}

void expert_arena_done(struct expert_arena *a)
{
    alloc_free(a->extents);
    a->extents = NULL;
}

/* The smallest free extent of at least `bytes`: of its own list the best, else the best of the next
 * list that holds any. */
static uint32_t best_fit(const struct expert_arena *a, uint64_t bytes)
{
    const uint32_t own = list_of(bytes);
    uint64_t lists = a->filled & (~0ull << own);
    while (lists != 0) {
        uint32_t best = EXPERT_ARENA_NONE;
        for (uint32_t n = a->lists[__builtin_ctzll(lists)]; n != EXPERT_ARENA_NONE;
             n = a->extents[n].list_after) {
            const struct expert_arena_extent *x = &a->extents[n];
            if (x->bytes >= bytes &&
                (best == EXPERT_ARENA_NONE || x->bytes < a->extents[best].bytes ||
                 (x->bytes == a->extents[best].bytes && x->place < a->extents[best].place)))
                best = n;
        }
        if (best != EXPERT_ARENA_NONE)
            return best;
        lists &= lists - 1;
    }
    return EXPERT_ARENA_NONE;
}

uint32_t expert_arena_take(struct expert_arena *a, uint64_t bytes, uint32_t owner)
{
    const uint32_t n = best_fit(a, bytes);
    if (n == EXPERT_ARENA_NONE)
        return n;
    struct expert_arena_extent *x = &a->extents[n];
    free_remove(a, n);
    if (x->bytes > bytes) {
        const uint32_t rest = a->unused;
        assert(rest != EXPERT_ARENA_NONE);
        struct expert_arena_extent *r = &a->extents[rest];
        a->unused = r->list_after;
        *r = (struct expert_arena_extent){
            .place = x->place + bytes, .bytes = x->bytes - bytes, .before = n, .after = x->after};
        if (r->after != EXPERT_ARENA_NONE)
            a->extents[r->after].before = rest;
        x->after = rest;
        x->bytes = bytes;
        free_add(a, rest);
    }
    x->owner = owner;
    a->used_bytes += bytes;
    return n;
}

uint32_t expert_arena_return(struct expert_arena *a, uint32_t extent)
{
    struct expert_arena_extent *x = &a->extents[extent];
    assert(x->owner != EXPERT_ARENA_NONE);
    a->used_bytes -= x->bytes;
    if (is_free(a, x->after)) {
        free_remove(a, x->after);
        join_after(a, extent);
    }
    if (is_free(a, x->before)) {
        extent = x->before;
        free_remove(a, extent);
        join_after(a, extent);
    }
    free_add(a, extent);
    return extent;
}

uint64_t expert_arena_span(const struct expert_arena *a, uint32_t extent)
{
    const struct expert_arena_extent *x = &a->extents[extent];
    uint64_t bytes = x->bytes;
    if (is_free(a, x->before))
        bytes += a->extents[x->before].bytes;
    if (is_free(a, x->after))
        bytes += a->extents[x->after].bytes;
    return bytes;
}

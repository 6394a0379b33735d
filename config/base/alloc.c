#include "alloc.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "size.h"

/* Stands right before every block. Its size keeps a block as aligned as malloc's own. */
struct alloc_head {
    void *base; /* what free() wants */
    size_t bytes;
    uint32_t tag;
    uint32_t mark;
    uint64_t unused;
};

enum {
    ALLOC_MARK = 0x15137A10,
    ALLOC_DEAD = 0x15137DEA
};

static struct {
    _Atomic uint64_t used[ALLOC_N], cap[ALLOC_N];
    _Atomic uint64_t live, refused;
    _Atomic uint64_t fail_in; /* 0: never; 1: the next call */
    _Atomic bool fail_forever;
} alloc_state;

static struct alloc_head *alloc_head_of(void *block)
{
    struct alloc_head *h = (struct alloc_head *)block - 1;
    assert(h->mark == ALLOC_MARK);
    return h;
}

static bool alloc_must_fail(void)
{
    uint64_t n = atomic_load(&alloc_state.fail_in);
    while (n > 1)
        if (atomic_compare_exchange_weak(&alloc_state.fail_in, &n, n - 1))
            return false;
    if (n == 0)
        return false;
    if (!atomic_load(&alloc_state.fail_forever))
        atomic_store(&alloc_state.fail_in, 0);
    return true;
}

/* Counts `bytes` in, or returns false where that would pass the cap. */
static bool alloc_charge(enum alloc_tag tag, size_t bytes)
{
    uint64_t cap = atomic_load(&alloc_state.cap[tag]);
    uint64_t old = atomic_fetch_add(&alloc_state.used[tag], bytes);
    if (cap == 0 || (old <= cap && bytes <= cap - old))
        return true;
    atomic_fetch_sub(&alloc_state.used[tag], bytes);
    return false;
}

static void *alloc_mark(enum alloc_tag tag, void *base, size_t room, size_t bytes)
{
    struct alloc_head *h = (struct alloc_head *)(void *)((char *)base + room) - 1;
    *h =
        (struct alloc_head){.base = base, .bytes = bytes, .tag = (uint32_t)tag, .mark = ALLOC_MARK};
    return h + 1;
}

/* align 0: malloc's own. */
static void *alloc_try(enum alloc_tag tag, size_t align, size_t bytes, bool clear)
{
    assert((unsigned)tag < ALLOC_N);
    size_t room = align > sizeof(struct alloc_head) ? align : sizeof(struct alloc_head);
    uint64_t whole;
    bytes = bytes > 0 ? bytes : 1;
    if (alloc_must_fail() || !size_add(bytes, room, &whole))
        return NULL;
    if (align > 0 && !size_round_up(whole, align, &whole))
        return NULL;
    if (whole > SIZE_MAX / 2 || !alloc_charge(tag, bytes))
        return NULL;
    void *base;
    if (align > 0)
        base = aligned_alloc(align, whole);
    else
        base = clear ? calloc(1, whole) : malloc(whole);
    if (base == NULL) {
        atomic_fetch_sub(&alloc_state.used[tag], bytes);
        return NULL;
    }
    atomic_fetch_add(&alloc_state.live, 1);
    return alloc_mark(tag, base, room, bytes);
}

static void *alloc_counted(void *block)
{
    if (block == NULL)
        atomic_fetch_add(&alloc_state.refused, 1);
    return block;
}

static void *alloc_block(enum alloc_tag tag, size_t align, size_t bytes, bool clear)
{
    return alloc_counted(alloc_try(tag, align, bytes, clear));
}

void *alloc_get(enum alloc_tag tag, size_t bytes)
{
    return alloc_block(tag, 0, bytes, false);
}

void *alloc_zero(enum alloc_tag tag, size_t count, size_t bytes)
{
    uint64_t whole;
    if (!size_mul(count, bytes, &whole))
        return NULL;
    return alloc_block(tag, 0, whole, true);
}

static void *alloc_try_resize(enum alloc_tag tag, void *block, size_t bytes)
{
    struct alloc_head *h = alloc_head_of(block);
    assert(h->base == h && h->tag == (uint32_t)tag); /* aligned blocks cannot move */
    bytes = bytes > 0 ? bytes : 1;
    size_t old = h->bytes;
    if (alloc_must_fail() || bytes > SIZE_MAX / 2)
        return NULL;
    if (bytes > old && !alloc_charge(tag, bytes - old))
        return NULL;
    void *base = realloc(h, sizeof *h + bytes);
    if (base == NULL) {
        if (bytes > old)
            atomic_fetch_sub(&alloc_state.used[tag], bytes - old);
        return NULL;
    }
    if (bytes < old)
        atomic_fetch_sub(&alloc_state.used[tag], old - bytes);
    return alloc_mark(tag, base, sizeof *h, bytes);
}

void *alloc_resize(enum alloc_tag tag, void *block, size_t bytes)
{
    if (block == NULL)
        return alloc_get(tag, bytes);
    return alloc_counted(alloc_try_resize(tag, block, bytes));
}

void *alloc_aligned(enum alloc_tag tag, size_t align, size_t bytes)
{
    assert(align >= 16 && (align & (align - 1)) == 0);
    return alloc_block(tag, align, bytes, false);
}

char *alloc_text(enum alloc_tag tag, const char *text, size_t n)
{
    if (n == SIZE_MAX)
        return NULL;
    char *copy = alloc_get(tag, n + 1);
    if (copy == NULL)
        return NULL;
    if (n > 0)
        memcpy(copy, text, n);
    copy[n] = '\0';
    return copy;
}

void alloc_free(void *block)
{
    if (block == NULL)
        return;
    struct alloc_head *h = alloc_head_of(block);
    h->mark = ALLOC_DEAD;
    atomic_fetch_sub(&alloc_state.used[h->tag], h->bytes);
    atomic_fetch_sub(&alloc_state.live, 1);
    free(h->base);
}

uint64_t alloc_used_bytes(enum alloc_tag tag)
{
    return atomic_load(&alloc_state.used[tag]);
}

uint64_t alloc_live_blocks(void)
{
    return atomic_load(&alloc_state.live);
}

uint64_t alloc_refused(void)
{
    return atomic_load(&alloc_state.refused);
}

void alloc_cap(enum alloc_tag tag, uint64_t bytes)
{
    atomic_store(&alloc_state.cap[tag], bytes);
}

void alloc_fail_at(uint64_t nth, int forever)
{
    atomic_store(&alloc_state.fail_forever, forever != 0);
    atomic_store(&alloc_state.fail_in, nth);
}

/* Heap with a tag: counted, capped, and able to fail the Nth time. Every allocation of Islet's own
 * goes through here. Any thread. A returned block belongs to the caller until alloc_free. NULL
 * means: cap reached, no memory, or a failure asked for by a test; callers report ERR_NOMEM. */
#ifndef ISLET_ALLOC_H
#define ISLET_ALLOC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum alloc_tag {
    ALLOC_MISC,
    ALLOC_CONFIG,
    ALLOC_MODEL, /* header, tensor table, tokenizer */
    ALLOC_WEIGHTS,
    ALLOC_KV,
    ALLOC_WORK, /* buffers of a step */
    ALLOC_PEER, /* connections and their queues */
    ALLOC_REQUEST,
    ALLOC_N
};

void *alloc_get(enum alloc_tag tag, size_t bytes); /* not cleared; bytes 0 gives a block of 1 */
/* count * bytes, checked for overflow; cleared. */
void *alloc_zero(enum alloc_tag tag, size_t count, size_t bytes);
/* As realloc; on NULL the old block stays. Not for blocks of alloc_aligned. */
void *alloc_resize(enum alloc_tag tag, void *block, size_t bytes);
/* align: a power of two >= 16. */
void *alloc_aligned(enum alloc_tag tag, size_t align, size_t bytes);
char *alloc_text(enum alloc_tag tag, const char *text, size_t n); /* copy with a NUL behind */
void alloc_free(void *block); /* NULL is fine; knows its own tag */

uint64_t alloc_used_bytes(enum alloc_tag tag);
uint64_t alloc_live_blocks(void);
/* Calls so far that returned NULL. A library that does not say why it failed had no memory if this
 * grew meanwhile. */
uint64_t alloc_refused(void);
void alloc_cap(enum alloc_tag tag, uint64_t bytes); /* 0: no cap */
/* The nth call from now (1 = the next) returns NULL; with `forever` all later ones too. 0 switches
 * it off. */
void alloc_fail_at(uint64_t nth, int forever);

#ifdef __cplusplus
}
#endif

#endif

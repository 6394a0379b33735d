/* The pool of KV pages: which are free, and how many sequences hold each. Counts only; the memory
 * is the engine's. The engine thread's. */
#ifndef ISLET_KV_PAGE_H
#define ISLET_KV_PAGE_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

#define KV_PAGE_NONE UINT32_MAX

struct kv_page {
    uint32_t n, n_free;
    uint32_t *free; /* [n_free] ids */
    uint32_t *refs; /* [n] holders; a free page has none, a cached one may have none */
};

/* What the pool should be: `budget` bytes, or for 0 an eighth of `ram` but not more than
 * `sequences` whole contexts. At least one page. */
uint32_t kv_page_count(uint64_t budget, uint64_t ram, uint64_t page_bytes, uint32_t context_pages,
                       uint32_t sequences);

enum err_code kv_page_start(struct kv_page *p, uint32_t n, struct err *e)
    __attribute__((warn_unused_result));
void kv_page_done(struct kv_page *p);

/* A free page with one holder, or KV_PAGE_NONE. */
uint32_t kv_page_take(struct kv_page *p);
void kv_page_hold(struct kv_page *p, uint32_t page);
/* One holder less; true if it was the last one. The page is not free yet: kv_page_give. */
bool kv_page_drop(struct kv_page *p, uint32_t page);
void kv_page_give(struct kv_page *p, uint32_t page); /* free from now on; has no holder */

#endif

#include "kv_page.h"

#include "alloc.h"

uint32_t kv_page_count(uint64_t budget, uint64_t ram, uint64_t page_bytes, uint32_t context_pages,
                       uint32_t sequences)
{
    const uint64_t wanted = (uint64_t)context_pages * sequences;
    uint64_t n = (budget != 0 ? budget : ram / 8) / page_bytes;
    if (budget == 0 && n > wanted)
        n = wanted;
    if (n > UINT32_MAX - 1)
        n = UINT32_MAX - 1;
    return n == 0 ? 1 : (uint32_t)n;
}

enum err_code kv_page_start(struct kv_page *p, uint32_t n, struct err *e)
{
    *p = (struct kv_page){.n = n, .n_free = n};
    p->free = alloc_zero(ALLOC_KV, n, sizeof(*p->free));
    p->refs = alloc_zero(ALLOC_KV, n, sizeof(*p->refs));
    if (p->free == NULL || p->refs == NULL) {
        kv_page_done(p);
        return err_set(e, ERR_NOMEM, "no memory for the list of %u KV pages", n);
    }
    for (uint32_t i = 0; i < n; i++)
        p->free[i] = n - 1 - i;
    return ERR_OK;
}

void kv_page_done(struct kv_page *p)
{
    alloc_free(p->free);
    alloc_free(p->refs);
    *p = (struct kv_page){.n = 0};
}

uint32_t kv_page_take(struct kv_page *p)
{
    if (p->n_free == 0)
        return KV_PAGE_NONE;
    const uint32_t page = p->free[--p->n_free];
    p->refs[page] = 1;
    return page;
}

void kv_page_hold(struct kv_page *p, uint32_t page)
{
    p->refs[page]++;
}

bool kv_page_drop(struct kv_page *p, uint32_t page)
{
    return --p->refs[page] == 0;
}

void kv_page_give(struct kv_page *p, uint32_t page)
{
    p->free[p->n_free++] = page;
}

#include "kv_sequence.h"

static uint32_t last_shared(const struct kv_sequence *s)
{
    return s->n_shared == 0 ? KV_PAGE_NONE : s->pages[s->n_shared - 1];
}

void kv_sequence_reuse(struct kv_sequence *s, struct kv_prefix *p, const uint32_t *tokens,
                       uint32_t n, struct kv_sequence_copy *ret)
{
    *ret = (struct kv_sequence_copy){KV_PAGE_NONE, KV_PAGE_NONE};
    uint32_t match = KV_PREFIX_PAGE, page = KV_PAGE_NONE;
    while (s->computed < n) {
        page = kv_prefix_find(p, last_shared(s), tokens + s->computed, n - s->computed, &match);
        if (match < KV_PREFIX_PAGE)
            break;
        kv_prefix_hold(p, page);
        s->pages[s->n_pages++] = page;
        s->n_shared++;
        s->computed += KV_PREFIX_PAGE;
        s->changed = true;
    }
    if (match == 0 || match == KV_PREFIX_PAGE)
        return;
    kv_prefix_touch(p, page); /* the last one to be evicted, so that it is not its own room */
    if (p->pages->n_free == 0 && (p->oldest == page || !kv_prefix_evict(p)))
        return;
    const uint32_t copy = kv_page_take(p->pages);
    s->pages[s->n_pages++] = copy;
    s->computed += match;
    s->changed = true;
    *ret = (struct kv_sequence_copy){page, copy};
}

uint32_t kv_sequence_reusable(const struct kv_prefix *p, const uint32_t *tokens, uint32_t n)
{
    uint32_t parent = KV_PAGE_NONE, done = 0, match = 0;
    do {
        parent = kv_prefix_find(p, parent, tokens + done, n - done, &match);
        done += match;
    } while (match == KV_PREFIX_PAGE && done < n);
    return done;
}

bool kv_sequence_grow(struct kv_sequence *s, struct kv_prefix *p, uint32_t positions)
{
    while ((uint64_t)s->n_pages * KV_PREFIX_PAGE < positions) {
        if (p->pages->n_free == 0 && !kv_prefix_evict(p))
            return false;
        s->pages[s->n_pages++] = kv_page_take(p->pages);
        s->changed = true;
    }
    return true;
}

void kv_sequence_advance(struct kv_sequence *s, struct kv_prefix *p, const uint32_t *tokens,
                         uint32_t computed)
{
    s->computed = computed;
    while (s->n_shared < computed / KV_PREFIX_PAGE) {
        const uint32_t i = s->n_shared;
        const uint32_t page =
            kv_prefix_insert(p, last_shared(s), s->pages[i], tokens + i * KV_PREFIX_PAGE);
        s->changed = s->changed || page != s->pages[i];
        s->pages[i] = page;
        s->n_shared++;
    }
}

void kv_sequence_release(struct kv_sequence *s, struct kv_prefix *p, const uint32_t *tokens)
{
    while (s->n_pages > s->n_shared) {
        const uint32_t first = --s->n_pages * KV_PREFIX_PAGE;
        const uint32_t n = s->computed > first ? s->computed - first : 0;
        kv_prefix_leave(p, last_shared(s), s->pages[s->n_pages], tokens + first, n);
    }
    while (s->n_pages > 0)
        kv_prefix_drop(p, s->pages[--s->n_pages]);
    s->n_shared = 0;
    s->computed = 0;
}

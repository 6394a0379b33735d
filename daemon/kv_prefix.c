#include "kv_prefix.h"

#include <string.h>

#include "alloc.h"

enum err_code kv_prefix_start(struct kv_prefix *p, struct kv_page *pages, struct err *e)
{
    *p = (struct kv_prefix){
        .pages = pages, .first_root = KV_PAGE_NONE, .oldest = KV_PAGE_NONE, .newest = KV_PAGE_NONE};
    p->nodes = alloc_zero(ALLOC_KV, pages->n, sizeof(*p->nodes));
    p->tokens = alloc_zero(ALLOC_KV, pages->n, sizeof(*p->tokens));
    if (p->nodes == NULL || p->tokens == NULL) {
        kv_prefix_done(p);
        return err_set(e, ERR_NOMEM, "no memory for the prefixes of %u KV pages", pages->n);
    }
    return ERR_OK;
}

void kv_prefix_done(struct kv_prefix *p)
{
    alloc_free(p->nodes);
    alloc_free(p->tokens);
    *p = (struct kv_prefix){.first_root = KV_PAGE_NONE};
}

static uint32_t *children(struct kv_prefix *p, uint32_t parent)
{
    return parent == KV_PAGE_NONE ? &p->first_root : &p->nodes[parent].first_child;
}

uint32_t kv_prefix_find(const struct kv_prefix *p, uint32_t parent, const uint32_t *tokens,
                        uint32_t n, uint32_t *ret_match)
{
    uint32_t best = KV_PAGE_NONE, best_match = 0;
    uint32_t at = parent == KV_PAGE_NONE ? p->first_root : p->nodes[parent].first_child;
    for (; at != KV_PAGE_NONE; at = p->nodes[at].next) {
        const uint32_t limit = n < p->nodes[at].n_tokens ? n : p->nodes[at].n_tokens;
        uint32_t match = 0;
        while (match < limit && p->tokens[at][match] == tokens[match])
            match++;
        if (match > best_match) {
            best = at;
            best_match = match;
        }
    }
    *ret_match = best_match;
    return best;
}

static void unlist(struct kv_prefix *p, uint32_t page)
{
    struct kv_prefix_node *node = &p->nodes[page];
    if (!node->listed)
        return;
    *(node->older == KV_PAGE_NONE ? &p->oldest : &p->nodes[node->older].newer) = node->newer;
    *(node->newer == KV_PAGE_NONE ? &p->newest : &p->nodes[node->newer].older) = node->older;
    node->listed = false;
    p->n_cached--;
}

static void list_newest(struct kv_prefix *p, uint32_t page)
{
    struct kv_prefix_node *node = &p->nodes[page];
    node->older = p->newest;
    node->newer = KV_PAGE_NONE;
    *(p->newest == KV_PAGE_NONE ? &p->oldest : &p->nodes[p->newest].newer) = page;
    p->newest = page;
    node->listed = true;
    p->n_cached++;
}

void kv_prefix_hold(struct kv_prefix *p, uint32_t page)
{
    unlist(p, page);
    kv_page_hold(p->pages, page);
}

void kv_prefix_touch(struct kv_prefix *p, uint32_t page)
{
    if (!p->nodes[page].listed)
        return;
    unlist(p, page);
    list_newest(p, page);
}

static void link_node(struct kv_prefix *p, uint32_t parent, uint32_t page, const uint32_t *tokens,
                      uint32_t n)
{
    uint32_t *head = children(p, parent);
    p->nodes[page] = (struct kv_prefix_node){.parent = parent,
                                             .first_child = KV_PAGE_NONE,
                                             .next = *head,
                                             .previous = KV_PAGE_NONE,
                                             .n_tokens = (uint8_t)n};
    if (*head != KV_PAGE_NONE)
        p->nodes[*head].previous = page;
    *head = page;
    memcpy(p->tokens[page], tokens, n * sizeof(*tokens));
}

/* Takes an unheld page without children out of the tree and frees it. */
static void remove_node(struct kv_prefix *p, uint32_t page)
{
    struct kv_prefix_node *node = &p->nodes[page];
    unlist(p, page);
    if (node->previous != KV_PAGE_NONE)
        p->nodes[node->previous].next = node->next;
    else
        *children(p, node->parent) = node->next;
    if (node->next != KV_PAGE_NONE)
        p->nodes[node->next].previous = node->previous;
    node->n_tokens = 0;
    kv_page_give(p->pages, page);
}

/* Removes shorter pages that hold nothing but a beginning of tokens[n]. */
static void remove_beginnings(struct kv_prefix *p, uint32_t parent, const uint32_t *tokens,
                              uint32_t n)
{
    for (uint32_t at = *children(p, parent), next; at != KV_PAGE_NONE; at = next) {
        next = p->nodes[at].next;
        const uint32_t k = p->nodes[at].n_tokens;
        if (k < n && memcmp(p->tokens[at], tokens, k * sizeof(*tokens)) == 0)
            remove_node(p, at);
    }
}

uint32_t kv_prefix_insert(struct kv_prefix *p, uint32_t parent, uint32_t page,
                          const uint32_t *tokens)
{
    uint32_t match;
    const uint32_t same = kv_prefix_find(p, parent, tokens, KV_PREFIX_PAGE, &match);
    if (match == KV_PREFIX_PAGE) {
        kv_prefix_hold(p, same);
        if (kv_page_drop(p->pages, page))
            kv_page_give(p->pages, page);
        return same;
    }
    remove_beginnings(p, parent, tokens, KV_PREFIX_PAGE);
    link_node(p, parent, page, tokens, KV_PREFIX_PAGE);
    return page;
}

void kv_prefix_leave(struct kv_prefix *p, uint32_t parent, uint32_t page, const uint32_t *tokens,
                     uint32_t n)
{
    if (!kv_page_drop(p->pages, page))
        return;
    uint32_t match = 0;
    if (n > 0)
        kv_prefix_find(p, parent, tokens, n, &match);
    if (match == n) {
        kv_page_give(p->pages, page);
        return;
    }
    remove_beginnings(p, parent, tokens, n);
    link_node(p, parent, page, tokens, n);
    list_newest(p, page);
}

void kv_prefix_drop(struct kv_prefix *p, uint32_t page)
{
    if (kv_page_drop(p->pages, page))
        list_newest(p, page);
}

bool kv_prefix_evict(struct kv_prefix *p)
{
    if (p->oldest == KV_PAGE_NONE)
        return false;
    remove_node(p, p->oldest);
    return true;
}

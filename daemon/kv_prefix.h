/* Pages kept by content, so that prompts with equal beginnings share them: a tree whose nodes are
 * pages, each naming the tokens of its positions and the page before it. Tokens are compared, not
 * hashes of them. Full pages may be held by sequences; a page that ends early is only copied from.
 * Pages without a holder leave in the order of their last use, later pages of a prompt before
 * earlier ones. The engine thread's. */
#ifndef ISLET_KV_PREFIX_H
#define ISLET_KV_PREFIX_H

#include "kv_page.h"

enum {
    KV_PREFIX_PAGE = 64 /* positions of a page */
};

struct kv_prefix_node {                           /* of a page; KV_PAGE_NONE: none */
    uint32_t parent, first_child, next, previous; /* siblings */
    uint32_t older, newer;                        /* in the list of unheld pages */
    uint8_t n_tokens;                             /* 0: the page is not in the tree */
    bool listed;
};

struct kv_prefix {
    struct kv_page *pages;        /* borrowed */
    struct kv_prefix_node *nodes; /* [pages->n] */
    uint32_t (*tokens)[KV_PREFIX_PAGE];
    uint32_t first_root, oldest, newest;
    uint32_t n_cached; /* unheld pages in the tree */
};

enum err_code kv_prefix_start(struct kv_prefix *p, struct kv_page *pages, struct err *e)
    __attribute__((warn_unused_result));
void kv_prefix_done(struct kv_prefix *p);

/* The child of `parent` (KV_PAGE_NONE: the first page) that shares the longest beginning with
 * tokens[n]; *ret_match: how long. KV_PAGE_NONE if none shares any. */
uint32_t kv_prefix_find(const struct kv_prefix *p, uint32_t parent, const uint32_t *tokens,
                        uint32_t n, uint32_t *ret_match);
/* Holds a page of the tree for a sequence. */
void kv_prefix_hold(struct kv_prefix *p, uint32_t page);
/* Marks a page that was copied from as used now. */
void kv_prefix_touch(struct kv_prefix *p, uint32_t page);
/* Puts a page that the caller holds, full, into the tree under `parent`, which the caller holds as
 * well. Returns the page to use from now on: where the tree has one of the same tokens already it
 * is held in place of `page`, which is freed. */
uint32_t kv_prefix_insert(struct kv_prefix *p, uint32_t parent, uint32_t page,
                          const uint32_t *tokens);
/* The caller's last page, with n tokens (0: nothing worth keeping), goes: into the tree, or free.
 * Not in the tree before. */
void kv_prefix_leave(struct kv_prefix *p, uint32_t parent, uint32_t page, const uint32_t *tokens,
                     uint32_t n);
/* Drops a hold on a page of the tree. Pages of a sequence: last one first. */
void kv_prefix_drop(struct kv_prefix *p, uint32_t page);
/* Frees the page unused for longest; false: all pages of the tree are held. */
bool kv_prefix_evict(struct kv_prefix *p);

#endif

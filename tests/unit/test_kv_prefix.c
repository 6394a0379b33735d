#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "kv_prefix.h"

enum {
    PAGE = KV_PREFIX_PAGE
};

struct rig {
    struct kv_page pages;
    struct kv_prefix prefix;
};

static void start(struct rig *r, uint32_t n)
{
    struct err e = {.code = ERR_OK};
    assert_int_equal(kv_page_start(&r->pages, n, &e), ERR_OK);
    assert_int_equal(kv_prefix_start(&r->prefix, &r->pages, &e), ERR_OK);
}

static void done(struct rig *r)
{
    kv_prefix_done(&r->prefix);
    kv_page_done(&r->pages);
}

/* tokens first, first + 1, ... */
static void fill(uint32_t *tokens, uint32_t n, uint32_t first)
{
    for (uint32_t i = 0; i < n; i++)
        tokens[i] = first + i;
}

static void test_kv_prefix_find_gives_the_longest_beginning(void **state)
{
    (void)state;
    struct rig r;
    uint32_t a[PAGE], b[PAGE], match;
    start(&r, 8);
    fill(a, PAGE, 100);
    fill(b, PAGE, 100);
    b[40] = 7;
    const uint32_t page_a = kv_prefix_insert(&r.prefix, KV_PAGE_NONE, kv_page_take(&r.pages), a);
    const uint32_t page_b = kv_prefix_insert(&r.prefix, KV_PAGE_NONE, kv_page_take(&r.pages), b);
    assert_int_equal(kv_prefix_find(&r.prefix, KV_PAGE_NONE, a, PAGE, &match), page_a);
    assert_int_equal(match, PAGE);
    assert_int_equal(kv_prefix_find(&r.prefix, KV_PAGE_NONE, b, 50, &match), page_b);
    assert_int_equal(match, 50);
    kv_prefix_find(&r.prefix, KV_PAGE_NONE, a, 30, &match);
    assert_int_equal(match, 30);
    assert_int_equal(kv_prefix_find(&r.prefix, KV_PAGE_NONE, a + 1, 20, &match), KV_PAGE_NONE);
    assert_int_equal(match, 0);
    assert_int_equal(kv_prefix_find(&r.prefix, page_a, a, PAGE, &match), KV_PAGE_NONE);
    done(&r);
}

static void test_kv_prefix_insert_twice_keeps_one_page(void **state)
{
    (void)state;
    struct rig r;
    uint32_t tokens[PAGE];
    start(&r, 4);
    fill(tokens, PAGE, 1);
    const uint32_t first =
        kv_prefix_insert(&r.prefix, KV_PAGE_NONE, kv_page_take(&r.pages), tokens);
    const uint32_t second =
        kv_prefix_insert(&r.prefix, KV_PAGE_NONE, kv_page_take(&r.pages), tokens);
    assert_int_equal(second, first);
    assert_int_equal(r.pages.n_free, 3);
    assert_int_equal(r.pages.refs[first], 2);
    done(&r);
}

static void test_kv_prefix_evict_takes_the_unused_longest_first(void **state)
{
    (void)state;
    struct rig r;
    uint32_t tokens[3][PAGE], page[3], match;
    start(&r, 3);
    for (uint32_t i = 0; i < 3; i++) {
        fill(tokens[i], PAGE, 1000 * i);
        page[i] = kv_prefix_insert(&r.prefix, KV_PAGE_NONE, kv_page_take(&r.pages), tokens[i]);
    }
    assert_false(kv_prefix_evict(&r.prefix)); /* all are held */
    kv_prefix_drop(&r.prefix, page[1]);
    kv_prefix_drop(&r.prefix, page[0]);
    kv_prefix_drop(&r.prefix, page[2]);
    assert_int_equal(r.prefix.n_cached, 3);
    kv_prefix_touch(&r.prefix, page[1]);
    kv_prefix_hold(&r.prefix, page[0]);
    assert_true(kv_prefix_evict(&r.prefix));
    kv_prefix_find(&r.prefix, KV_PAGE_NONE, tokens[2], PAGE, &match);
    assert_int_equal(match, 0);
    assert_true(kv_prefix_evict(&r.prefix));
    kv_prefix_find(&r.prefix, KV_PAGE_NONE, tokens[1], PAGE, &match);
    assert_int_equal(match, 0);
    assert_false(kv_prefix_evict(&r.prefix)); /* page 0 is in use */
    kv_prefix_find(&r.prefix, KV_PAGE_NONE, tokens[0], PAGE, &match);
    assert_int_equal(match, PAGE);
    done(&r);
}

static void test_kv_prefix_leave_replaces_its_own_beginnings(void **state)
{
    (void)state;
    struct rig r;
    uint32_t tokens[PAGE], match;
    start(&r, 4);
    fill(tokens, PAGE, 1);
    kv_prefix_leave(&r.prefix, KV_PAGE_NONE, kv_page_take(&r.pages), tokens, 10);
    assert_int_equal(r.prefix.n_cached, 1);
    kv_prefix_leave(&r.prefix, KV_PAGE_NONE, kv_page_take(&r.pages), tokens, 20);
    assert_int_equal(r.prefix.n_cached, 1); /* the page of 10 held nothing more */
    kv_prefix_leave(&r.prefix, KV_PAGE_NONE, kv_page_take(&r.pages), tokens, 15);
    assert_int_equal(r.prefix.n_cached, 1); /* nothing new */
    kv_prefix_leave(&r.prefix, KV_PAGE_NONE, kv_page_take(&r.pages), tokens, 0);
    assert_int_equal(r.prefix.n_cached, 1);
    assert_int_equal(r.pages.n_free, 3);
    kv_prefix_find(&r.prefix, KV_PAGE_NONE, tokens, PAGE, &match);
    assert_int_equal(match, 20);
    done(&r);
}

static void test_kv_prefix_start_without_memory_frees_all(void **state)
{
    (void)state;
    struct kv_page pages;
    struct err e = {.code = ERR_OK};
    assert_int_equal(kv_page_start(&pages, 4, &e), ERR_OK);
    const uint64_t blocks = alloc_live_blocks();
    for (uint64_t nth = 1; nth <= 2; nth++) {
        struct kv_prefix p;
        struct err why = {.code = ERR_OK};
        alloc_fail_at(nth, 0);
        assert_int_equal(kv_prefix_start(&p, &pages, &why), ERR_NOMEM);
        alloc_fail_at(0, 0);
        assert_int_equal(alloc_live_blocks(), blocks);
    }
    kv_page_done(&pages);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_prefix_find_gives_the_longest_beginning),
        cmocka_unit_test(test_kv_prefix_insert_twice_keeps_one_page),
        cmocka_unit_test(test_kv_prefix_evict_takes_the_unused_longest_first),
        cmocka_unit_test(test_kv_prefix_leave_replaces_its_own_beginnings),
        cmocka_unit_test(test_kv_prefix_start_without_memory_frees_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "alloc.h"
#include "kv_page.h"

static void test_kv_page_take_until_empty_gives_each_page_once(void **state)
{
    (void)state;
    struct kv_page p;
    struct err e = {.code = ERR_OK};
    bool seen[5] = {false};
    assert_int_equal(kv_page_start(&p, 5, &e), ERR_OK);
    for (int i = 0; i < 5; i++) {
        const uint32_t page = kv_page_take(&p);
        assert_true(page < 5 && !seen[page]);
        seen[page] = true;
    }
    assert_int_equal(kv_page_take(&p), KV_PAGE_NONE);
    assert_int_equal(p.n_free, 0);
    kv_page_done(&p);
}

static void test_kv_page_drop_counts_holders(void **state)
{
    (void)state;
    struct kv_page p;
    struct err e = {.code = ERR_OK};
    assert_int_equal(kv_page_start(&p, 2, &e), ERR_OK);
    const uint32_t page = kv_page_take(&p);
    kv_page_hold(&p, page);
    assert_false(kv_page_drop(&p, page));
    assert_true(kv_page_drop(&p, page));
    assert_int_equal(p.n_free, 1); /* not free before it is given */
    kv_page_give(&p, page);
    assert_int_equal(p.n_free, 2);
    kv_page_done(&p);
}

static void test_kv_page_count_follows_budget_or_ram(void **state)
{
    (void)state;
    assert_int_equal(kv_page_count(1000, 0, 100, 64, 32), 10);    /* the budget, rounded down */
    assert_int_equal(kv_page_count(100000, 0, 100, 4, 2), 1000);  /* said is said */
    assert_int_equal(kv_page_count(0, 80000, 100, 1000, 1), 100); /* an eighth of RAM */
    assert_int_equal(kv_page_count(0, 8000000, 100, 8, 4), 32);   /* all that could be used */
    assert_int_equal(kv_page_count(99, 0, 100, 8, 4), 1);         /* never none */
    assert_int_equal(kv_page_count(UINT64_MAX, 0, 1, 8, 4), UINT32_MAX - 1); /* ids stay valid */
}

static void test_kv_page_start_without_memory_frees_all(void **state)
{
    (void)state;
    const uint64_t blocks = alloc_live_blocks();
    for (uint64_t nth = 1; nth <= 2; nth++) {
        struct kv_page p;
        struct err e = {.code = ERR_OK};
        alloc_fail_at(nth, 0);
        assert_int_equal(kv_page_start(&p, 8, &e), ERR_NOMEM);
        alloc_fail_at(0, 0);
        assert_int_equal(alloc_live_blocks(), blocks);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_page_take_until_empty_gives_each_page_once),
        cmocka_unit_test(test_kv_page_drop_counts_holders),
        cmocka_unit_test(test_kv_page_count_follows_budget_or_ram),
        cmocka_unit_test(test_kv_page_start_without_memory_frees_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

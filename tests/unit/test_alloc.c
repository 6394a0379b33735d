#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"

static void test_alloc_counts_by_tag(void **state)
{
    (void)state;
    uint64_t live = alloc_live_blocks(), used = alloc_used_bytes(ALLOC_KV);
    void *a = alloc_get(ALLOC_KV, 100), *b = alloc_zero(ALLOC_KV, 3, 50);
    assert_non_null(a);
    assert_non_null(b);
    assert_int_equal(alloc_used_bytes(ALLOC_KV), used + 250);
    assert_int_equal(alloc_live_blocks(), live + 2);
    a = alloc_resize(ALLOC_KV, a, 40);
    assert_int_equal(alloc_used_bytes(ALLOC_KV), used + 190);
    alloc_free(a);
    alloc_free(b);
    alloc_free(NULL);
    assert_int_equal(alloc_used_bytes(ALLOC_KV), used);
    assert_int_equal(alloc_live_blocks(), live);
}

static void test_alloc_zero_clears_and_checks_overflow(void **state)
{
    (void)state;
    char *p = alloc_zero(ALLOC_MISC, 10, 10);
    for (size_t i = 0; i < 100; i++)
        assert_int_equal(p[i], 0);
    alloc_free(p);
    assert_null(alloc_zero(ALLOC_MISC, SIZE_MAX / 2, 3));
    assert_null(alloc_get(ALLOC_MISC, SIZE_MAX));
    assert_null(alloc_get(ALLOC_MISC, SIZE_MAX - 8));
    assert_null(alloc_aligned(ALLOC_MISC, 64, SIZE_MAX - 70));
    assert_null(alloc_text(ALLOC_MISC, "", SIZE_MAX));
    void *empty = alloc_get(ALLOC_MISC, 0);
    assert_non_null(empty);
    alloc_free(empty);
}

static void test_alloc_aligned_is_aligned_and_free_knows_it(void **state)
{
    (void)state;
    for (size_t align = 16; align <= 65536; align *= 2) {
        uint8_t *p = alloc_aligned(ALLOC_WEIGHTS, align, 1000);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % align, 0);
        memset(p, 7, 1000);
        alloc_free(p);
    }
    assert_int_equal(alloc_used_bytes(ALLOC_WEIGHTS), 0);
}

static void test_alloc_cap_refuses_and_keeps_the_old_block(void **state)
{
    (void)state;
    alloc_cap(ALLOC_PEER, 1000);
    char *p = alloc_get(ALLOC_PEER, 600);
    assert_non_null(p);
    p[599] = 'x';
    assert_null(alloc_get(ALLOC_PEER, 401));
    assert_null(alloc_resize(ALLOC_PEER, p, 1001));
    assert_int_equal(p[599], 'x');
    char *q = alloc_resize(ALLOC_PEER, p, 1000);
    assert_non_null(q);
    assert_int_equal(q[599], 'x');
    alloc_free(q);
    alloc_cap(ALLOC_PEER, 0);
    assert_int_equal(alloc_used_bytes(ALLOC_PEER), 0);
}

static void test_alloc_fail_at_once_and_for_ever(void **state)
{
    (void)state;
    const uint64_t refused = alloc_refused();
    alloc_fail_at(2, 0);
    void *a = alloc_get(ALLOC_MISC, 1), *b = alloc_get(ALLOC_MISC, 1),
         *c = alloc_get(ALLOC_MISC, 1);
    assert_non_null(a);
    assert_null(b);
    assert_non_null(c);
    alloc_fail_at(1, 1);
    assert_null(alloc_get(ALLOC_MISC, 1));
    assert_null(alloc_resize(ALLOC_MISC, a, 2));
    assert_null(alloc_aligned(ALLOC_MISC, 64, 1));
    alloc_fail_at(0, 0);
    assert_int_equal(alloc_refused(), refused + 4);
    alloc_free(a);
    alloc_free(c);
}

static void test_alloc_text_copies_with_nul(void **state)
{
    (void)state;
    char *t = alloc_text(ALLOC_MISC, "hello", 3);
    assert_string_equal(t, "hel");
    alloc_free(t);
}

static void *churn(void *unused)
{
    (void)unused;
    for (size_t i = 0; i < 20000; i++)
        alloc_free(alloc_get(ALLOC_REQUEST, i % 100));
    return NULL;
}

static void test_alloc_counts_are_right_with_threads(void **state)
{
    (void)state;
    pthread_t threads[3];
    uint64_t live = alloc_live_blocks();
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, churn, NULL), 0);
    for (size_t i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(alloc_used_bytes(ALLOC_REQUEST), 0);
    assert_int_equal(alloc_live_blocks(), live);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alloc_counts_by_tag),
        cmocka_unit_test(test_alloc_zero_clears_and_checks_overflow),
        cmocka_unit_test(test_alloc_aligned_is_aligned_and_free_knows_it),
        cmocka_unit_test(test_alloc_cap_refuses_and_keeps_the_old_block),
        cmocka_unit_test(test_alloc_fail_at_once_and_for_ever),
        cmocka_unit_test(test_alloc_text_copies_with_nul),
        cmocka_unit_test(test_alloc_counts_are_right_with_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

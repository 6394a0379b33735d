#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "alloc.h"
#include "queue.h"

enum {
    ITEMS = 20000
};

static void test_queue_is_first_in_first_out_and_bounded(void **state)
{
    (void)state;
    int items[5];
    struct queue *q = queue_new(3);
    assert_null(queue_pop(q));
    for (size_t round = 0; round < 5; round++) {
        for (size_t i = 0; i < 3; i++)
            assert_true(queue_push(q, &items[i]));
        assert_false(queue_push(q, &items[3]));
        assert_int_equal(queue_count(q), 3);
        for (size_t i = 0; i < 3; i++)
            assert_ptr_equal(queue_pop(q), &items[i]);
        assert_null(queue_pop(q));
    }
    queue_free(q);
    queue_free(NULL);
}

static void test_queue_new_refuses_nothing_and_too_much(void **state)
{
    (void)state;
    assert_null(queue_new(0));
    assert_null(queue_new(SIZE_MAX / 4));
    alloc_fail_at(1, 0);
    assert_null(queue_new(1));
    alloc_fail_at(0, 0);
}

static void test_queue_wait_ends_at_the_timeout(void **state)
{
    (void)state;
    struct queue *q = queue_new(1);
    queue_wait(q, 0);
    queue_wait(q, 1);
    assert_int_equal(queue_count(q), 0);
    queue_free(q);
}

static void test_queue_wake_before_the_wait_is_not_lost(void **state)
{
    (void)state;
    struct queue *q = queue_new(1);
    queue_wake(q);
    queue_wait(q, -1); /* would hang without the wake */
    queue_push(q, q);
    queue_wait(q, -1); /* does not take it */
    assert_ptr_equal(queue_pop(q), q);
    queue_free(q);
}

static int numbers[ITEMS];

static void *produce(void *context)
{
    struct queue *q = context;
    for (size_t i = 0; i < ITEMS; i++)
        while (!queue_push(q, &numbers[i]))
            continue;
    return NULL;
}

static void test_queue_hands_over_all_in_order_between_threads(void **state)
{
    (void)state;
    pthread_t thread;
    struct queue *q = queue_new(16);
    assert_int_equal(pthread_create(&thread, NULL, produce, q), 0);
    for (size_t i = 0; i < ITEMS;) {
        queue_wait(q, -1);
        for (void *item; (item = queue_pop(q)) != NULL; i++)
            assert_ptr_equal(item, &numbers[i]);
    }
    pthread_join(thread, NULL);
    queue_free(q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_queue_is_first_in_first_out_and_bounded),
        cmocka_unit_test(test_queue_new_refuses_nothing_and_too_much),
        cmocka_unit_test(test_queue_wait_ends_at_the_timeout),
        cmocka_unit_test(test_queue_wake_before_the_wait_is_not_lost),
        cmocka_unit_test(test_queue_hands_over_all_in_order_between_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

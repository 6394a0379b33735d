#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine_retry.h"

#define MS UINT64_C(1000000)

/* Time from `now` until it is due; 0: never. */
static uint64_t wait_of(struct engine_retry *r, uint64_t now)
{
    engine_retry_wait(r, now);
    if (r->due_ns == 0)
        return 0;
    assert_false(engine_retry_is_due(r, r->due_ns - 1));
    assert_true(engine_retry_is_due(r, r->due_ns));
    return (r->due_ns - now) / MS;
}

static void test_engine_retry_is_never_due_before_it_waits(void **state)
{
    (void)state;
    struct engine_retry r;
    engine_retry_start(&r, 0, 0);
    assert_false(engine_retry_is_due(&r, UINT64_MAX));
}

static void test_engine_retry_of_an_absent_gpu_comes_every_period(void **state)
{
    (void)state;
    struct engine_retry r;
    engine_retry_start(&r, 0, 0);
    for (uint64_t i = 1; i < 100; i++)
        assert_int_equal(wait_of(&r, i * 1000 * MS), ENGINE_RETRY_MS);
}

static void test_engine_retry_after_others_filled_it_comes_ever_later(void **state)
{
    (void)state;
    struct engine_retry r;
    engine_retry_start(&r, 0, 0);
    static const uint64_t waits[] = {60000, 120000, 240000, 480000, 600000, 600000};
    for (unsigned i = 0; i < 6; i++) {
        engine_retry_on_loss(&r, false);
        assert_false(engine_retry_is_due(&r, UINT64_MAX));
        assert_int_equal(wait_of(&r, 5 * MS), waits[i]);
    }
    for (unsigned i = 0; i < 1000; i++)
        engine_retry_on_loss(&r, false);
    assert_int_equal(wait_of(&r, 5 * MS), ENGINE_RETRY_MOST_MS);
}

static void test_engine_retry_rests_first(void **state)
{
    (void)state;
    struct engine_retry r;
    engine_retry_start(&r, 0, 600000);
    assert_int_equal(wait_of(&r, 5 * MS), 600000);
    assert_int_equal(wait_of(&r, 700000 * MS), ENGINE_RETRY_MS);
}

static void test_engine_retry_ends_after_some_failures(void **state)
{
    (void)state;
    struct engine_retry r;
    engine_retry_start(&r, 0, 0);
    for (unsigned i = 1; i < ENGINE_RETRY_FAILURES; i++) {
        engine_retry_on_loss(&r, true);
        assert_true(wait_of(&r, 5 * MS) > 0);
    }
    engine_retry_on_loss(&r, true);
    assert_int_equal(wait_of(&r, 5 * MS), 0);
    assert_false(engine_retry_is_due(&r, UINT64_MAX));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_retry_is_never_due_before_it_waits),
        cmocka_unit_test(test_engine_retry_of_an_absent_gpu_comes_every_period),
        cmocka_unit_test(test_engine_retry_after_others_filled_it_comes_ever_later),
        cmocka_unit_test(test_engine_retry_rests_first),
        cmocka_unit_test(test_engine_retry_ends_after_some_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

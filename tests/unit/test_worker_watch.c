#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "ticks.h"
#include "worker_watch.h"

/* Moves the clock on and looks. */
static bool look(struct worker_watch *w, struct ticks_fake *clock, bool failed, uint64_t after_ms)
{
    clock->now_ns += after_ms * 1000000u;
    return worker_watch_retry(w, failed, ticks_ms(ticks_of_fake(clock)));
}

static void test_worker_watch_failed_model_is_looked_for_every_ten_seconds(void **state)
{
    (void)state;
    struct worker_watch w = {.failed = false};
    struct ticks_fake clock = {.now_ns = 77};
    unsigned retries = 0;
    assert_false(look(&w, &clock, false, 60000)); /* it loads, for long */
    assert_false(look(&w, &clock, true, 1000));
    assert_false(look(&w, &clock, true, WORKER_WATCH_RETRY_MS - 1));
    assert_true(look(&w, &clock, true, 1));
    assert_false(look(&w, &clock, true, WORKER_WATCH_RETRY_MS - 1));
    assert_true(look(&w, &clock, true, 1));
    for (unsigned s = 0; s < 100; s++)
        retries += look(&w, &clock, true, 1000);
    assert_int_equal(retries, 10);
}

static void test_worker_watch_model_that_loads_again_starts_the_time_anew(void **state)
{
    (void)state;
    struct worker_watch w = {.failed = false};
    struct ticks_fake clock = {.now_ns = 0};
    assert_false(look(&w, &clock, true, 0));
    assert_false(look(&w, &clock, true, 9000));
    assert_false(look(&w, &clock, false, 2000)); /* SIGHUP: it was looked for */
    assert_false(look(&w, &clock, true, 2000));
    assert_false(look(&w, &clock, true, 9000));
    assert_true(look(&w, &clock, true, 1000));
    assert_false(look(&w, &clock, false, 100000)); /* it serves */
}

static void test_worker_watch_no_ping_without_a_heartbeat(void **state)
{
    (void)state;
    struct worker_watch w = {.heartbeat = 0};
    assert_false(worker_watch_ping(&w, 0)); /* it never moved */
    assert_true(worker_watch_ping(&w, 1));
    assert_true(worker_watch_ping(&w, 900));
    assert_false(worker_watch_ping(&w, 900));
    assert_false(worker_watch_ping(&w, 900));
    assert_true(worker_watch_ping(&w, 901));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_worker_watch_failed_model_is_looked_for_every_ten_seconds),
        cmocka_unit_test(test_worker_watch_model_that_loads_again_starts_the_time_anew),
        cmocka_unit_test(test_worker_watch_no_ping_without_a_heartbeat),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

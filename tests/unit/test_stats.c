#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "stats.h"
#include "ticks.h"

static void test_stats_counter_adds_and_sets(void **state)
{
    (void)state;
    struct stats_counter c = {0};
    stats_add(&c, 5);
    stats_add(&c, 6);
    assert_int_equal(stats_get(&c), 11);
    stats_set(&c, 3);
    assert_int_equal(stats_get(&c), 3);
}

static void test_ticks_fake_moves_by_hand_and_real_does_not_go_back(void **state)
{
    (void)state;
    struct ticks_fake fake = {.now_ns = 5000000};
    struct ticks t = ticks_of_fake(&fake), real = ticks_real();
    assert_int_equal(ticks_ms(t), 5);
    fake.now_ns += 1;
    assert_int_equal(ticks_ns(t), 5000001);
    uint64_t first = ticks_ns(real);
    assert_true(first > 0 && ticks_ns(real) >= first);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stats_counter_adds_and_sets),
        cmocka_unit_test(test_ticks_fake_moves_by_hand_and_real_does_not_go_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

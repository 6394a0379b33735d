/* The speed to expect: hits grow with what is resident, and the slower of RAM and SSD counts. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine_expect.h"

/* A 9 GB model on two slow cores. */
static const struct engine_expect model = {
    .dense_bytes = 380e6, .expert_bytes = 550e6, .ram_rate = 27e9, .ssd_rate = 1.4e9};

static void assert_near(double a, double b)
{
    if (!(fabs(a - b) <= 1e-9 * fabs(b)))
        fail_msg("%.12g is not %.12g", a, b);
}

static void test_engine_expect_hits_are_the_published_ones_at_their_points(void **state)
{
    (void)state;
    assert_near(engine_expect_hits(0.125), 0.44);
    assert_near(engine_expect_hits(0.25), 0.70);
    assert_near(engine_expect_hits(0.5), 0.90);
    assert_near(engine_expect_hits(0.22), 0.645);
    assert_near(engine_expect_hits(0.75), 0.95);
}

static void test_engine_expect_hits_grow_from_none_to_all(void **state)
{
    (void)state;
    double before = 0;
    assert_true(engine_expect_hits(0) == 0);
    assert_true(engine_expect_hits(-1) == 0);
    for (int i = 1; i <= 1000; i++) {
        const double hits = engine_expect_hits(i / 1000.0);
        assert_true(hits > before && hits <= 1);
        assert_true(hits >=
                    i / 1000.0 - 1e-12); /* locality never does worse than uniform routing */
        before = hits;
    }
    assert_true(engine_expect_hits(1) == 1);
    assert_true(engine_expect_hits(2) == 1);
}

static void test_engine_expect_resident_model_is_bound_by_ram(void **state)
{
    (void)state;
    assert_near(engine_expect_speed(&model, 1), 27e9 / 930e6);
}

static void test_engine_expect_misses_are_bound_by_the_ssd(void **state)
{
    (void)state;
    assert_near(engine_expect_speed(&model, 0), 1.4e9 / 550e6);
    assert_near(engine_expect_speed(&model, 0.5), 1.4e9 / 275e6);
}

static void test_engine_expect_fast_ssd_still_crosses_the_ram_twice(void **state)
{
    (void)state;
    struct engine_expect x = model;
    x.ssd_rate = 1e12;
    assert_near(engine_expect_speed(&x, 0), 27e9 / 1480e6);
    assert_near(engine_expect_speed(&x, 0.5), 27e9 / 1205e6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_expect_hits_are_the_published_ones_at_their_points),
        cmocka_unit_test(test_engine_expect_hits_grow_from_none_to_all),
        cmocka_unit_test(test_engine_expect_resident_model_is_bound_by_ram),
        cmocka_unit_test(test_engine_expect_misses_are_bound_by_the_ssd),
        cmocka_unit_test(test_engine_expect_fast_ssd_still_crosses_the_ram_twice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

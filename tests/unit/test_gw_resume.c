#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "gw_resume.h"

static void test_gw_resume_poison_runs_alone_then_ends(void **state)
{
    (void)state;
    struct gw_resume r = {0};
    assert_int_equal(gw_resume_on_lost(&r), GW_RESUME_GO);
    assert_false(gw_resume_is_alone(&r));
    assert_int_equal(gw_resume_on_lost(&r), GW_RESUME_ALONE);
    assert_true(gw_resume_is_alone(&r));
    assert_int_equal(gw_resume_on_lost(&r), GW_RESUME_POISON);
    assert_int_equal(r.resumed, 2);
}

static void test_gw_resume_a_token_clears_the_suspicion(void **state)
{
    (void)state;
    struct gw_resume r = {0};
    for (uint32_t i = 0; i < 100; i++) {
        assert_int_equal(gw_resume_on_lost(&r), GW_RESUME_GO);
        gw_resume_on_token(&r);
    }
    assert_int_equal(r.resumed, 100);
}

static void test_gw_resume_waits_from_the_loss_or_for_a_load_from_arrival(void **state)
{
    (void)state;
    struct gw_resume_wait w = {.since_ns = 1000, .arrived_ns = 5000, .deadline_ms = 2};
    assert_int_equal(gw_resume_ends_ns(&w), 1000 + 2000000);
    w.loading = true;
    assert_int_equal(gw_resume_ends_ns(&w), 5000 + 2000000);
    w.arrived_ns = 10;
    assert_int_equal(gw_resume_ends_ns(&w), 1000 + 2000000);
    w.deadline_ms = 0;
    assert_int_equal(gw_resume_ends_ns(&w), 1000);
    w.since_ns = UINT64_MAX - 1;
    w.deadline_ms = INT64_MAX / 2000000;
    assert_true(gw_resume_ends_ns(&w) == UINT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_resume_poison_runs_alone_then_ends),
        cmocka_unit_test(test_gw_resume_a_token_clears_the_suspicion),
        cmocka_unit_test(test_gw_resume_waits_from_the_loss_or_for_a_load_from_arrival),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

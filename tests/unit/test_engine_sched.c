#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "engine_sched.h"

static struct engine_sched_sequence prompt(uint64_t order, uint32_t remaining)
{
    return (struct engine_sched_sequence){
        .order = order, .remaining = remaining, .max_rows = UINT32_MAX, .holds_pages = true};
}

static struct engine_sched_sequence decoding(uint64_t order)
{
    struct engine_sched_sequence s = prompt(order, 1);
    s.decoding = true;
    return s;
}

static void test_engine_sched_prompts_alone_fill_the_chunk(void **state)
{
    (void)state;
    const struct engine_sched_sequence s[] = {prompt(0, 400), prompt(1, 50), prompt(2, 300)};
    const struct engine_sched_limits limits = {.prefill_chunk = 512, .row_ns = 1000000000};
    uint32_t rows[3];
    assert_int_equal(engine_sched_plan(s, 3, &limits, rows), 512);
    assert_int_equal(rows[1], 50);
    assert_int_equal(rows[2], 300);
    assert_int_equal(rows[0], 162);
}

static void test_engine_sched_every_decoding_sequence_gets_one_row(void **state)
{
    (void)state;
    struct engine_sched_sequence s[32];
    uint32_t rows[32];
    for (uint32_t i = 0; i < 32; i++)
        s[i] = decoding(i);
    const struct engine_sched_limits limits = {.prefill_chunk = 1};
    assert_int_equal(engine_sched_plan(s, 32, &limits, rows), 32);
    for (uint32_t i = 0; i < 32; i++)
        assert_int_equal(rows[i], 1);
}

static void test_engine_sched_prompt_beside_decoding_keeps_the_step_short(void **state)
{
    (void)state;
    const struct engine_sched_sequence s[] = {decoding(0), decoding(1), prompt(2, 5000)};
    uint32_t rows[3];
    struct engine_sched_limits limits = {.prefill_chunk = 512, .row_ns = 2000000};
    engine_sched_plan(s, 3, &limits, rows);
    assert_int_equal(rows[2], 98); /* 100 rows of 2 ms, two of them decode */
    limits.row_ns = 0;
    engine_sched_plan(s, 3, &limits, rows);
    assert_int_equal(rows[2], ENGINE_SCHED_FIRST_ROWS);
    limits.row_ns = 900000000; /* one row is longer than a step may be */
    engine_sched_plan(s, 3, &limits, rows);
    assert_int_equal(rows[2], 1);
    limits.row_ns = 1;
    engine_sched_plan(s, 3, &limits, rows);
    assert_int_equal(rows[2], 512);
}

static void test_engine_sched_sequence_without_pages_gets_no_rows(void **state)
{
    (void)state;
    struct engine_sched_sequence s[] = {prompt(0, 10), decoding(1)};
    uint32_t rows[2];
    const struct engine_sched_limits limits = {.prefill_chunk = 64};
    s[0].max_rows = s[1].max_rows = 0;
    assert_int_equal(engine_sched_plan(s, 2, &limits, rows), 0);
    s[0].max_rows = 4;
    assert_int_equal(engine_sched_plan(s, 2, &limits, rows), 4);
}

static void test_engine_sched_priority_and_age_come_before_length(void **state)
{
    (void)state;
    assert_true(engine_sched_urgency(100, 0, 0) < engine_sched_urgency(200, 0, 0));
    assert_true(engine_sched_urgency(900, -1, 0) < engine_sched_urgency(100, 0, 0));
    assert_true(engine_sched_urgency(2000, 0, 1000) < engine_sched_urgency(100, 0, 0));
    /* no overflow at the ends */
    assert_true(engine_sched_urgency(UINT32_MAX, 127, UINT64_MAX) <
                engine_sched_urgency(UINT32_MAX, 127, 0));
}

static void test_engine_sched_long_prompt_among_short_ones_ends(void **state)
{
    (void)state;
    /* every step a new short prompt arrives that alone would fill the chunk */
    struct engine_sched_sequence s[2] = {prompt(0, 4000), prompt(1, 64)};
    const struct engine_sched_limits limits = {.prefill_chunk = 64};
    uint32_t rows[2], steps = 0;
    for (; s[0].remaining > 0 && steps < 100000; steps++) {
        engine_sched_plan(s, 2, &limits, rows);
        s[0].remaining -= rows[0];
        s[0].waited_ms += 20;
        s[1] = prompt(steps + 2, 64);
    }
    assert_true(steps < 400);
}

static void test_engine_sched_victim_is_the_youngest_but_not_the_oldest(void **state)
{
    (void)state;
    struct engine_sched_sequence s[] = {decoding(5), decoding(3), decoding(9), decoding(7)};
    assert_int_equal(engine_sched_victim(s, 4), 2);
    s[2].holds_pages = false;
    assert_int_equal(engine_sched_victim(s, 4), 3);
    s[3].holds_pages = s[0].holds_pages = false;
    assert_int_equal(engine_sched_victim(s, 4), 4); /* only the oldest holds pages */
}

static void test_engine_sched_limit_lets_few_have_turns_one_after_the_other(void **state)
{
    (void)state;
    uint64_t served[6] = {0};
    for (uint64_t step = 1; step <= 12; step++) {
        struct engine_sched_sequence s[6];
        for (uint32_t i = 0; i < 6; i++)
            s[i] = (struct engine_sched_sequence){.order = 10 - i,
                                                  .remaining = i == 4 ? 0 : 1,
                                                  .max_rows = i == 5 ? 0 : 7,
                                                  .served = served[i]};
        engine_sched_limit(s, 6, 2); /* 0 to 3 want rows; 3 is the oldest of them */
        uint32_t n = 0;
        for (uint32_t i = 0; i < 4; i++) {
            assert_true(s[i].max_rows == 0 || s[i].max_rows == 7);
            assert_int_equal(s[i].max_rows > 0, (step % 2 == 1) == (i >= 2));
            n += s[i].max_rows > 0;
            served[i] = s[i].max_rows > 0 ? step : served[i];
        }
        assert_int_equal(n, 2);
    }
}

static void test_engine_sched_limit_of_zero_or_of_many_limits_nobody(void **state)
{
    (void)state;
    for (uint32_t most = 0; most <= 99; most += 33) {
        struct engine_sched_sequence s[64];
        for (uint32_t i = 0; i < 64; i++)
            s[i] = (struct engine_sched_sequence){
                .order = i, .remaining = 1, .max_rows = 1, .served = 1 + i % 3};
        engine_sched_limit(s, most == 33 ? 33 : 64, most);
        for (uint32_t i = 0; i < 64; i++)
            assert_int_equal(s[i].max_rows, 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_sched_prompts_alone_fill_the_chunk),
        cmocka_unit_test(test_engine_sched_every_decoding_sequence_gets_one_row),
        cmocka_unit_test(test_engine_sched_prompt_beside_decoding_keeps_the_step_short),
        cmocka_unit_test(test_engine_sched_sequence_without_pages_gets_no_rows),
        cmocka_unit_test(test_engine_sched_priority_and_age_come_before_length),
        cmocka_unit_test(test_engine_sched_long_prompt_among_short_ones_ends),
        cmocka_unit_test(test_engine_sched_victim_is_the_youngest_but_not_the_oldest),
        cmocka_unit_test(test_engine_sched_limit_lets_few_have_turns_one_after_the_other),
        cmocka_unit_test(test_engine_sched_limit_of_zero_or_of_many_limits_nobody),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

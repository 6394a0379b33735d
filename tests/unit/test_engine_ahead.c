/* Reading ahead stays where it is faster, goes where it is slower, and is tried again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine_ahead.h"

static const uint64_t ms = 1000000;

/* n steps of `rows` rows, of which those that guess take `with`; returns how many guessed. */
static unsigned play(struct engine_ahead *a, unsigned n, uint32_t rows, uint64_t with,
                     uint64_t without)
{
    unsigned guessed = 0;
    for (unsigned i = 0; i < n; i++) {
        const bool wanted = engine_ahead_wanted(a, rows, 0);
        guessed += wanted;
        (void)engine_ahead_done(a, rows, 0, wanted ? with : without);
    }
    return guessed;
}

static void test_engine_ahead_faster_stays(void **state)
{
    (void)state;
    struct engine_ahead a;
    engine_ahead_start(&a, true);
    assert_int_equal(play(&a, ENGINE_AHEAD_TRIAL_STEPS, 1, 90 * ms, 100 * ms),
                     ENGINE_AHEAD_TRIAL_STEPS / 2);
    assert_int_equal(play(&a, 256, 1, 90 * ms, 100 * ms), 256);
}

static void test_engine_ahead_slower_goes_and_is_tried_again_ever_more_rarely(void **state)
{
    (void)state;
    struct engine_ahead a;
    engine_ahead_start(&a, true);
    play(&a, ENGINE_AHEAD_TRIAL_STEPS, 1, 101 * ms, 100 * ms);
    const unsigned guessed = play(&a, 20000, 1, 101 * ms, 100 * ms);
    assert_in_range(guessed, 4 * ENGINE_AHEAD_TRIAL_STEPS / 2, 9 * ENGINE_AHEAD_TRIAL_STEPS / 2);
}

static void test_engine_ahead_a_change_is_found(void **state)
{
    (void)state;
    struct engine_ahead a;
    engine_ahead_start(&a, true);
    play(&a, 5000, 1, 110 * ms, 100 * ms);
    assert_false(a.on);
    play(&a, 10000, 2, 80 * ms, 100 * ms);
    assert_true(a.on);
}

static void test_engine_ahead_prompts_and_wide_steps_neither_guess_nor_count(void **state)
{
    (void)state;
    struct engine_ahead a, before;
    engine_ahead_start(&a, true);
    before = a;
    assert_true(engine_ahead_wanted(&a, 1, 0)); /* a trial begins with it */
    assert_false(engine_ahead_wanted(&a, 1, 1));
    assert_false(engine_ahead_wanted(&a, 0, 512));
    assert_false(engine_ahead_wanted(&a, ENGINE_AHEAD_MOST_ROWS + 1, 0));
    (void)engine_ahead_done(&a, 1, 1, ms);
    (void)engine_ahead_done(&a, 0, 512, ms);
    (void)engine_ahead_done(&a, ENGINE_AHEAD_MOST_ROWS + 1, 0, ms);
    assert_memory_equal(&a, &before, sizeof(a));
}

static void test_engine_ahead_inactive_never_guesses(void **state)
{
    (void)state;
    struct engine_ahead a;
    engine_ahead_start(&a, false);
    assert_int_equal(play(&a, 10000, 1, ms, 100 * ms), 0);
}

static void test_engine_ahead_kinds_are_apart(void **state)
{
    (void)state;
    bool seen[ENGINE_AHEAD_FAR * ENGINE_AHEAD_RANKS] = {false};
    for (uint32_t far = 0; far < ENGINE_AHEAD_FAR; far++)
        for (uint32_t rank = 0; rank < 10; rank++) {
            const uint32_t kind = engine_ahead_kind(far, rank, 10);
            assert_in_range(kind, far * ENGINE_AHEAD_RANKS, (far + 1) * ENGINE_AHEAD_RANKS - 1);
            seen[kind] = true;
        }
    for (uint32_t i = 0; i < ENGINE_AHEAD_FAR * ENGINE_AHEAD_RANKS; i++)
        assert_true(seen[i]);
    assert_int_equal(engine_ahead_kind(0, 0, 1), 0); /* a choice of one */
}

/* Kinds are read for at first, and then as long as they are right often enough. */
static void test_engine_ahead_only_kinds_that_are_mostly_right_pay(void **state)
{
    (void)state;
    struct engine_ahead_odds o;
    engine_ahead_odds_start(&o);
    const uint32_t good = engine_ahead_kind(0, 0, 8), poor = engine_ahead_kind(2, 7, 8);
    assert_true(engine_ahead_pays(&o, good) && engine_ahead_pays(&o, poor));
    for (unsigned i = 0; i < 400; i++) {
        engine_ahead_learn(&o, good, i % 10 != 0);
        engine_ahead_learn(&o, poor, i % 2 != 0);
    }
    assert_true(engine_ahead_pays(&o, good));
    assert_false(engine_ahead_pays(&o, poor));
    for (unsigned i = 0; i < 400; i++) { /* another text */
        engine_ahead_learn(&o, good, i % 2 != 0);
        engine_ahead_learn(&o, poor, i % 10 != 0);
    }
    assert_false(engine_ahead_pays(&o, good));
    assert_true(engine_ahead_pays(&o, poor));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_ahead_faster_stays),
        cmocka_unit_test(test_engine_ahead_slower_goes_and_is_tried_again_ever_more_rarely),
        cmocka_unit_test(test_engine_ahead_a_change_is_found),
        cmocka_unit_test(test_engine_ahead_prompts_and_wide_steps_neither_guess_nor_count),
        cmocka_unit_test(test_engine_ahead_inactive_never_guesses),
        cmocka_unit_test(test_engine_ahead_kinds_are_apart),
        cmocka_unit_test(test_engine_ahead_only_kinds_that_are_mostly_right_pay),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Sequences take turns when that is faster, all together when that is; nobody starves, and a
 * prompt's chunk is paid back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine_turns.h"

static const uint64_t ms = 1000000;
static const struct engine_turns_prompts one = {.n = 1}; /* that has just come */

/* Steps with all of `mask` decoding; a step of n rows takes fixed + each * n^power. */
struct world {
    struct engine_turns t;
    uint64_t ns, rows, steps[ENGINE_TURNS_SEQUENCES], longest_pause[ENGINE_TURNS_SEQUENCES];
    uint64_t since[ENGINE_TURNS_SEQUENCES];
};

static void play(struct world *w, uint32_t mask, unsigned n, uint64_t fixed, uint64_t each,
                 uint64_t square)
{
    for (unsigned i = 0; i < n; i++) {
        const uint32_t picked = engine_turns_pick(&w->t, mask);
        const uint32_t rows = (uint32_t)__builtin_popcount(picked);
        assert_int_not_equal(picked, 0);
        assert_int_equal(picked & ~mask, 0);
        const uint64_t ns = fixed + each * rows + square * rows * rows;
        w->ns += ns;
        w->rows += rows;
        for (uint32_t s = 0; s < ENGINE_TURNS_SEQUENCES; s++) {
            if (!(mask >> s & 1))
                continue;
            w->since[s] += ns;
            if (!(picked >> s & 1))
                continue;
            w->steps[s]++;
            if (w->since[s] > w->longest_pause[s])
                w->longest_pause[s] = w->since[s];
            w->since[s] = 0;
        }
        engine_turns_done(&w->t, rows, 0, ns);
    }
}

static void test_engine_turns_inactive_lets_all_decode(void **state)
{
    (void)state;
    struct engine_turns t;
    engine_turns_start(&t, false, 1);
    assert_int_equal(engine_turns_pick(&t, 0xff00ff), 0xff00ff);
    engine_turns_done(&t, 16, 100, 1000 * ms);
    assert_true(engine_turns_prompt(&t, 0xff, &one));
}

static void test_engine_turns_narrow_wins_where_batches_read_more(void **state)
{
    (void)state;
    struct world w = {.ns = 0};
    engine_turns_start(&w.t, true, 4);
    play(&w, 0xf, 600, 10 * ms, 50 * ms, 50 * ms); /* 110, 310, 1010 ms */
    assert_int_equal(w.t.width, 1);
}

static void test_engine_turns_wide_wins_where_batches_share(void **state)
{
    (void)state;
    struct world w = {.ns = 0};
    engine_turns_start(&w.t, true, 1);
    play(&w, 0xffff, 1200, 100 * ms, 5 * ms, 0);
    assert_int_equal(w.t.width, 16);
}

static void test_engine_turns_a_guess_wider_than_needed_is_tried_too(void **state)
{
    (void)state;
    struct world w = {.ns = 0};
    engine_turns_start(&w.t, true, 32);
    play(&w, 0xf, 600, 10 * ms, 50 * ms, 50 * ms);
    assert_int_equal(w.t.width, 1);
    struct world v = {.ns = 0};
    engine_turns_start(&v.t, true, 32);
    play(&v, 0xf, 1200, 100 * ms, 5 * ms, 0);
    assert_int_equal(v.t.width, 32);
    assert_true(v.rows > 4 * 1200 - 4 * 1200 / 10); /* trials are few */
}

static void test_engine_turns_everyone_gets_the_same_share(void **state)
{
    (void)state;
    struct world w = {.ns = 0};
    engine_turns_start(&w.t, true, 1);
    play(&w, 0x8421, 4000, 10 * ms, 50 * ms, 100 * ms);
    for (uint32_t s = 0; s < ENGINE_TURNS_SEQUENCES; s++)
        if (0x8421u >> s & 1) {
            assert_in_range(w.steps[s], w.rows / 4 - w.rows / 40, w.rows / 4 + w.rows / 40);
            assert_true(w.longest_pause[s] <= 3 * ENGINE_TURNS_PAUSE_MS * ms);
        }
}

static void test_engine_turns_those_who_leave_and_come_are_followed(void **state)
{
    (void)state;
    struct world w = {.ns = 0};
    engine_turns_start(&w.t, true, 2);
    uint32_t random = 12345;
    for (unsigned i = 0; i < 3000; i++) {
        random = random * 1664525u + 1013904223u;
        const uint32_t mask = random >> (random >> 27) | 1u << (random & 31);
        play(&w, mask, 1 + (random >> 9) % 5, 20 * ms, 30 * ms, 10 * ms);
    }
    assert_true(w.rows > 3000);
}

static void test_engine_turns_a_chunk_is_paid_back_before_the_next(void **state)
{
    (void)state;
    struct engine_turns t;
    engine_turns_start(&t, true, 4);
    assert_true(engine_turns_prompt(&t, 1, &one));
    engine_turns_done(&t, 1, 512, 6000 * ms);
    unsigned steps = 0;
    for (; !engine_turns_prompt(&t, 1, &one); steps++) {
        assert_true(engine_turns_prompt(&t, 0, &one)); /* nobody decodes: no reason to wait */
        engine_turns_done(&t, 1, 0, 100 * ms);
    }
    assert_int_equal(steps, 60);
    engine_turns_done(&t, 0, 512, 6000 * ms); /* nobody was held up */
    assert_true(engine_turns_prompt(&t, 1, &one));
}

/* Prompts share reads with one another: beside several answers one waits for company, for a while. */
static void test_engine_turns_a_prompt_waits_for_others_but_not_for_long(void **state)
{
    (void)state;
    struct engine_turns t;
    struct engine_turns_prompts p = {.n = 1};
    engine_turns_start(&t, true, 1);
    assert_true(engine_turns_prompt(&t, 7, &p)); /* what a chunk takes is not known yet */
    engine_turns_done(&t, 0, 30, 3000 * ms);
    assert_false(engine_turns_prompt(&t, 7, &p));
    assert_true(engine_turns_prompt(&t, 4, &p)); /* one answer only: it goes in between */
    p.waited_ns = 8999 * ms;
    assert_false(engine_turns_prompt(&t, 7, &p));
    p.waited_ns = 9000 * ms;
    assert_true(engine_turns_prompt(&t, 7, &p));
    p.waited_ns = UINT64_MAX;
    assert_true(engine_turns_prompt(&t, 7, &p));
    p = (struct engine_turns_prompts){.n = 2};
    assert_false(engine_turns_prompt(&t, 7, &p));
    assert_true(engine_turns_prompt(&t, 3, &p)); /* as many as decode */
    p = (struct engine_turns_prompts){.n = 1, .urgent = true};
    assert_true(engine_turns_prompt(&t, 7, &p));
    engine_turns_done(&t, 1, 30, 3000 * ms);
    assert_false(engine_turns_prompt(&t, 7, &p)); /* the last chunk is not paid back */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_turns_inactive_lets_all_decode),
        cmocka_unit_test(test_engine_turns_narrow_wins_where_batches_read_more),
        cmocka_unit_test(test_engine_turns_wide_wins_where_batches_share),
        cmocka_unit_test(test_engine_turns_a_guess_wider_than_needed_is_tried_too),
        cmocka_unit_test(test_engine_turns_everyone_gets_the_same_share),
        cmocka_unit_test(test_engine_turns_those_who_leave_and_come_are_followed),
        cmocka_unit_test(test_engine_turns_a_chunk_is_paid_back_before_the_next),
        cmocka_unit_test(test_engine_turns_a_prompt_waits_for_others_but_not_for_long),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

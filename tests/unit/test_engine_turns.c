/* Sequences take turns when that is faster, all together when that is; nobody starves; a prompt is
 * computed in its own sequence's turn, long ones together. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine_turns.h"

static const uint64_t ms = 1000000;

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
        const struct engine_turns_seen seen = {.present = mask, .decoding = mask};
        const struct engine_turns_choice choice = engine_turns_pick(&w->t, &seen);
        const uint32_t picked = choice.decoding;
        assert_int_equal(choice.prompts, 0);
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
    const struct engine_turns_seen seen = {
        .present = 0xffffff, .decoding = 0xff00ff, .prompts = 0xff00};
    for (int i = 0; i < 3; i++) {
        const struct engine_turns_choice c = engine_turns_pick(&t, &seen);
        assert_int_equal(c.decoding, 0xff00ff);
        assert_int_equal(c.prompts, 0xff00);
        engine_turns_done(&t, 16, 100, 1000 * ms);
    }
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

/* One step: `decoding` and `prompts` are there, `longs` of the prompts are long. */
static struct engine_turns_choice one_step(struct engine_turns *t, uint32_t decoding,
                                           uint32_t prompts, uint32_t longs, uint64_t ns)
{
    const struct engine_turns_seen seen = {.present = decoding | prompts,
                                           .decoding = decoding,
                                           .prompts = prompts,
                                           .long_prompts = longs};
    const struct engine_turns_choice c = engine_turns_pick(t, &seen);
    engine_turns_done(t, (uint32_t)__builtin_popcount(c.decoding), c.prompts == 0 ? 0 : 16, ns);
    return c;
}

static void test_engine_turns_a_short_prompt_begins_its_own_turn(void **state)
{
    (void)state;
    struct engine_turns t;
    engine_turns_start(&t, true, 1);
    assert_int_equal(one_step(&t, 0, 1, 0, 2000 * ms).prompts, 1);
    for (int i = 0; i < 25; i++)
        assert_int_equal(one_step(&t, 1, 0, 0, 100 * ms).decoding, 1);
    /* 2.5 s of decoding: who comes now need not wait for the end of the turn */
    struct engine_turns_choice c = one_step(&t, 1, 2, 0, 2000 * ms);
    assert_int_equal(c.decoding, 0);
    assert_int_equal(c.prompts, 2);
    for (int i = 0; i < 4; i++) {
        c = one_step(&t, 3, 4, 0, 100 * ms);
        assert_int_equal(c.decoding, 2); /* its own answers follow the prompt */
        assert_int_equal(c.prompts, 0);
    }
    unsigned steps = 0;
    while ((c = one_step(&t, 3, 4, 0, 100 * ms)).decoding == 2)
        steps++;
    assert_in_range(steps, 40, ENGINE_TURNS_MOST_STEPS);
    assert_int_equal(c.decoding, 1); /* it waited before the third came */
    assert_int_equal(c.prompts, 0);
}

static void test_engine_turns_long_prompts_share_chunks(void **state)
{
    (void)state;
    struct engine_turns t;
    engine_turns_start(&t, true, 1);
    struct engine_turns_choice c = one_step(&t, 0, 7, 6, 3000 * ms);
    assert_int_equal(c.prompts, 1); /* a short one alone */
    unsigned steps = 0;             /* its first turn is whole */
    while ((c = one_step(&t, 1, 6, 6, 100 * ms)).decoding == 1)
        steps++;
    assert_in_range(steps, 60, ENGINE_TURNS_MOST_STEPS);
    assert_int_equal(c.prompts, 6);
    c = one_step(&t, 7, 0, 0, 100 * ms);
    assert_int_equal(c.decoding, 2); /* and the turn goes on */
}

/* Chunks of a prompt that is never done let the others have their turns. */
static void test_engine_turns_an_endless_prompt_starves_nobody(void **state)
{
    (void)state;
    struct engine_turns t;
    engine_turns_start(&t, true, 1);
    uint64_t prompt_ns = 0, decode_ns = 0;
    for (unsigned i = 0; i < 5000; i++) {
        t.width = i < 2500 ? 1 : 2; /* in turns, then both in one */
        const struct engine_turns_seen seen = {
            .present = 3, .decoding = 1, .prompts = 2, .long_prompts = 2};
        const struct engine_turns_choice c = engine_turns_pick(&t, &seen);
        const uint64_t ns = c.prompts != 0 ? 6000 * ms : 100 * ms;
        engine_turns_done(&t, c.decoding != 0, c.prompts != 0 ? 512 : 0, ns);
        *(c.prompts != 0 ? &prompt_ns : &decode_ns) += ns;
    }
    assert_in_range(prompt_ns, decode_ns / 2, decode_ns * 3);
}

static void test_engine_turns_one_without_pages_keeps_its_place(void **state)
{
    (void)state;
    struct engine_turns t;
    engine_turns_start(&t, true, 1);
    struct engine_turns_seen seen = {.present = 7, .decoding = 7};
    (void)engine_turns_pick(&t, &seen);
    engine_turns_done(&t, 1, 0, 100 * ms);
    seen.decoding = 5; /* 1 lost its pages */
    for (int i = 0; i < 400; i++) {
        (void)engine_turns_pick(&t, &seen);
        engine_turns_done(&t, 1, 0, 100 * ms);
    }
    const uint64_t before = t.last[1];
    seen.decoding = 7;
    (void)engine_turns_pick(&t, &seen);
    assert_true(t.last[1] == before && before < t.last[0] && before < t.last[2]);
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
        cmocka_unit_test(test_engine_turns_a_short_prompt_begins_its_own_turn),
        cmocka_unit_test(test_engine_turns_long_prompts_share_chunks),
        cmocka_unit_test(test_engine_turns_an_endless_prompt_starves_nobody),
        cmocka_unit_test(test_engine_turns_one_without_pages_keeps_its_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

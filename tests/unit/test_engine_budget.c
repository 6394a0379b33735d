/* memory.ram_budget is divided without ever being exceeded, and what is too small says the least
 * that works. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine_budget.h"
#include "engine_machine.h"

#define GIB (UINT64_C(1) << 30)
#define MIB (UINT64_C(1) << 20)

/* The shape of a 9 GB model: 0.4 GiB dense, 3072 experts of 2.75 MiB, 8 of 128 used in 24 layers. */
static struct engine_budget_needs needs_of(uint64_t budget)
{
    const uint64_t expert = 11 * MIB / 4;
    return (struct engine_budget_needs){.budget = budget,
                                        .available = 20 * GIB,
                                        .weights = 400 * MIB,
                                        .kv = 200 * MIB,
                                        .work = 100 * MIB,
                                        .experts = 3072 * expert,
                                        .largest_expert = expert,
                                        .cycle = 24 * 8 * expert};
}

static void test_engine_budget_roomy_holds_every_expert_and_no_more(void **state)
{
    (void)state;
    struct engine_budget b;
    struct err e = {0};
    const struct engine_budget_needs n = needs_of(16 * GIB);
    assert_int_equal(engine_budget_split(&n, &b, &e), ERR_OK);
    assert_true(b.all_resident);
    assert_false(b.below_cycle);
    assert_int_equal(b.arena, n.experts);
    assert_int_equal(b.total, 700 * MIB + n.experts);
}

static void test_engine_budget_tight_gives_the_rest_to_slots(void **state)
{
    (void)state;
    struct engine_budget b;
    struct err e = {0};
    const struct engine_budget_needs n = needs_of(3 * GIB);
    assert_int_equal(engine_budget_split(&n, &b, &e), ERR_OK);
    assert_false(b.all_resident);
    assert_false(b.below_cycle);
    assert_int_equal(b.arena, 3 * GIB - 700 * MIB);
    assert_int_equal(b.total, 3 * GIB);
}

static void test_engine_budget_below_a_token_cycle_is_said(void **state)
{
    (void)state;
    struct engine_budget b;
    struct err e = {0};
    const struct engine_budget_needs n = needs_of(GIB);
    assert_int_equal(engine_budget_split(&n, &b, &e), ERR_OK);
    assert_true(b.below_cycle);
    assert_true(b.total <= GIB);
}

static void test_engine_budget_every_size_is_kept_and_in_pages(void **state)
{
    (void)state;
    for (uint64_t budget = 703 * MIB; budget < 10 * GIB; budget += 7 * MIB + 1234) {
        struct engine_budget b;
        struct err e = {0};
        const struct engine_budget_needs n = needs_of(budget);
        assert_int_equal(engine_budget_split(&n, &b, &e), ERR_OK);
        assert_true(b.total <= budget);
        assert_int_equal(b.arena % 4096, 0);
        assert_true(b.arena >= n.largest_expert);
    }
}

static void test_engine_budget_too_small_says_the_least(void **state)
{
    (void)state;
    struct engine_budget b = {.arena = 1};
    struct err e = {0};
    const struct engine_budget_needs n = needs_of(700 * MIB);
    assert_int_equal(engine_budget_split(&n, &b, &e), ERR_NOMEM);
    assert_non_null(strstr(e.text, "MiB is the least that works"));
    assert_int_equal(b.arena, 1);
}

static void test_engine_budget_remedy_names_what_helps(void **state)
{
    (void)state;
    struct engine_budget b;
    struct err e = {0};
    struct engine_budget_needs n = needs_of(100 * MIB);
    assert_int_equal(engine_budget_split(&n, &b, &e), ERR_NOMEM);
    assert_non_null(strstr(e.text, "raise it, or lower memory.kv_budget or batch.prefill_chunk"));
    n.kv = 0; /* the KV pages are on a GPU */
    e = (struct err){0};
    assert_int_equal(engine_budget_split(&n, &b, &e), ERR_NOMEM);
    assert_non_null(strstr(e.text, "raise it, or lower batch.prefill_chunk"));
}

static void test_engine_budget_more_than_available_is_refused(void **state)
{
    (void)state;
    struct engine_budget b;
    struct err e = {0};
    struct engine_budget_needs n = needs_of(16 * GIB);
    n.available = 4 * GIB;
    assert_int_equal(engine_budget_split(&n, &b, &e), ERR_NOMEM);
    assert_non_null(strstr(e.text, "4.00 GiB available"));
    n.least = 600 * MIB; /* KV pages would be fewer */
    e = (struct err){.code = ERR_OK};
    assert_int_equal(engine_budget_split(&n, &b, &e), ERR_NOMEM);
    assert_non_null(strstr(e.text, "(least here: 600.00 MiB)"));
    n.available = 0; /* unknown */
    assert_int_equal(engine_budget_split(&n, &b, &e), ERR_OK);
}

static void test_engine_budget_absurd_sizes_do_not_overflow(void **state)
{
    (void)state;
    struct engine_budget b;
    struct err e = {0};
    struct engine_budget_needs n = needs_of(16 * GIB);
    n.weights = UINT64_MAX - MIB;
    assert_int_equal(engine_budget_split(&n, &b, &e), ERR_LIMIT);
}

static void test_engine_budget_auto_leaves_room_for_others(void **state)
{
    (void)state;
    assert_int_equal(engine_budget_auto(10 * GIB), 7 * GIB);
    assert_int_equal(engine_budget_auto(0), 0);
}

static void test_engine_machine_figures_are_plausible(void **state)
{
    (void)state;
    const uint64_t total = engine_machine_memory("MemTotal");
    assert_true(total > 64 * MIB);
    assert_true(engine_machine_available() > 0);
    assert_true(engine_machine_available() <= total);
    assert_int_equal(engine_machine_memory("NoSuchKey"), 0);
}

static struct engine_budget_vram_needs vram_needs_of(uint64_t budget)
{
    return (struct engine_budget_vram_needs){.budget = budget,
                                             .weights = 700 * MIB,
                                             .kv = 300 * MIB,
                                             .work = 200 * MIB,
                                             .fixed = 50 * MIB,
                                             .experts = 16 * GIB + 5,
                                             .least_islands = 250 * MIB};
}

static void test_engine_budget_vram_auto_leaves_a_margin(void **state)
{
    (void)state;
    assert_int_equal(engine_budget_vram_auto(12 * GIB, 12 * GIB), 11 * GIB);
    assert_int_equal(engine_budget_vram_auto(12 * GIB, 0), 11 * GIB);
    assert_int_equal(engine_budget_vram_auto(GIB, GIB), 768 * MIB);
    assert_int_equal(engine_budget_vram_auto(100 * MIB, 100 * MIB), 0);
    /* What others use leaves less for us, not less for them. */
    assert_int_equal(engine_budget_vram_auto(5 * GIB, 12 * GIB), 4 * GIB);
    assert_int_equal(engine_budget_vram_auto(GIB, 24 * GIB), 0);
}

static void test_engine_budget_vram_is_never_exceeded(void **state)
{
    (void)state;
    for (uint64_t budget = 1500 * MIB; budget < 20 * GIB; budget += 123456789) {
        const struct engine_budget_vram_needs n = vram_needs_of(budget);
        struct engine_budget_vram b;
        struct err e = {.code = ERR_OK};
        assert_int_equal(engine_budget_vram_split(&n, &b, &e), ERR_OK);
        assert_true(b.total <= budget);
        assert_int_equal(b.total, 1250 * MIB + b.islands);
        assert_int_equal(b.islands % 4096, 0);
        assert_true(b.islands >= n.least_islands);
        assert_int_equal(b.all_resident, b.islands >= n.experts);
        assert_true(b.all_resident || b.total + 4096 > budget);
    }
}

static void test_engine_budget_vram_refusal_says_the_least(void **state)
{
    (void)state;
    struct engine_budget_vram b;
    struct err e = {.code = ERR_OK};
    struct engine_budget_vram_needs n = vram_needs_of(1500 * MIB - 1);
    assert_int_equal(engine_budget_vram_split(&n, &b, &e), ERR_NOMEM);
    assert_non_null(strstr(e.text, "1.47 GiB is the least that works"));
    n.least = 1600 * MIB; /* KV pages grow with the budget */
    e = (struct err){.code = ERR_OK};
    assert_int_equal(engine_budget_vram_split(&n, &b, &e), ERR_NOMEM);
    assert_non_null(strstr(e.text, "; 1.57 GiB is the least that works; raise it"));
    assert_non_null(strstr(e.text, "batch.prefill_chunk")); /* not cut */
    n = vram_needs_of(4 * GIB);
    n.available = 3 * GIB;
    e = (struct err){.code = ERR_OK};
    assert_int_equal(engine_budget_vram_split(&n, &b, &e), ERR_NOMEM);
    assert_non_null(strstr(e.text, "3.00 GiB free"));
    n.weights = UINT64_MAX - MIB;
    e = (struct err){.code = ERR_OK};
    assert_int_equal(engine_budget_vram_split(&n, &b, &e), ERR_LIMIT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_budget_roomy_holds_every_expert_and_no_more),
        cmocka_unit_test(test_engine_budget_tight_gives_the_rest_to_slots),
        cmocka_unit_test(test_engine_budget_below_a_token_cycle_is_said),
        cmocka_unit_test(test_engine_budget_every_size_is_kept_and_in_pages),
        cmocka_unit_test(test_engine_budget_too_small_says_the_least),
        cmocka_unit_test(test_engine_budget_remedy_names_what_helps),
        cmocka_unit_test(test_engine_budget_more_than_available_is_refused),
        cmocka_unit_test(test_engine_budget_absurd_sizes_do_not_overflow),
        cmocka_unit_test(test_engine_budget_auto_leaves_room_for_others),
        cmocka_unit_test(test_engine_machine_figures_are_plausible),
        cmocka_unit_test(test_engine_budget_vram_auto_leaves_a_margin),
        cmocka_unit_test(test_engine_budget_vram_is_never_exceeded),
        cmocka_unit_test(test_engine_budget_vram_refusal_says_the_least),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

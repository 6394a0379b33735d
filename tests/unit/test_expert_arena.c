#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "expert_arena.h"

enum {
    PAGE = 4096,
    MAX_TAKEN = 512
};

static struct expert_arena start(uint64_t pages, const uint64_t *layer_pages, uint32_t n_layer,
                                 uint32_t n_expert)
{
    struct expert_arena a;
    struct err e = {.code = ERR_OK};
    uint64_t bytes[16];
    for (uint32_t l = 0; l < n_layer; l++)
        bytes[l] = layer_pages[l] * PAGE;
    assert_int_equal(expert_arena_start(&a, pages * PAGE, bytes, n_layer, n_expert, &e), ERR_OK);
    return a;
}

/* Takes slots of the class until there are no more; gives how many. */
static uint32_t fill(struct expert_arena *a, uint64_t pages, uint32_t *slots)
{
    const uint32_t class = expert_arena_class_of(a, pages * PAGE);
    uint32_t n = 0;
    while ((slots[n] = expert_arena_take(a, class, n)) != EXPERT_ARENA_NONE)
        assert_true(++n < MAX_TAKEN);
    return n;
}

static void give_back(struct expert_arena *a, const uint32_t *slots, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        expert_arena_return(a, slots[i]);
}

/* Marks the slot's pages; none is another's. */
static void mark(const struct expert_arena *a, uint32_t slot, uint64_t pages, uint8_t *taken,
                 uint64_t n_pages)
{
    const uint64_t place = expert_arena_place(a, slot);
    assert_int_equal(place % PAGE, 0);
    assert_true(place / PAGE + pages <= n_pages);
    for (uint64_t i = place / PAGE; i < place / PAGE + pages; i++) {
        assert_int_equal(taken[i], 0);
        taken[i] = 1;
    }
}

static void test_expert_arena_all_fit_in_any_order(void **state)
{
    (void)state;
    static const uint64_t pages[] = {7, 8, 3};
    uint8_t taken[18 * 10] = {0};
    struct expert_arena a = start(sizeof taken, pages, 3, 10);
    for (uint32_t round = 0; round < 2; round++) {
        uint32_t slots[30];
        for (uint32_t i = 0; i < 30; i++) {
            const uint64_t size = pages[(i * 7 + round) % 3];
            slots[i] = expert_arena_take(&a, expert_arena_class_of(&a, size * PAGE), i);
            assert_int_not_equal(slots[i], EXPERT_ARENA_NONE);
            if (round == 1)
                mark(&a, slots[i], size, taken, sizeof taken);
        }
        if (round == 0)
            give_back(&a, slots, 30);
    }
    expert_arena_done(&a);
}

static void test_expert_arena_slabs_serve_one_size_then_another(void **state)
{
    (void)state;
    static const uint64_t pages[] = {750, 651};
    static uint8_t taken[750 * 200];
    uint32_t slots[MAX_TAKEN];
    struct expert_arena a = start(sizeof taken, pages, 2, 1000);
    for (uint32_t round = 0; round < 4; round++) {
        const uint64_t size = pages[round % 2];
        const uint32_t n = fill(&a, size, slots);
        /* Less than a fiftieth is lost. */
        assert_true(n * size * 50 > sizeof taken * 49);
        memset(taken, 0, sizeof taken);
        for (uint32_t i = 0; i < n; i++)
            mark(&a, slots[i], size, taken, sizeof taken);
        give_back(&a, slots, n);
    }
    expert_arena_done(&a);
}

static void test_expert_arena_a_slab_with_one_left_keeps_its_size(void **state)
{
    (void)state;
    static const uint64_t pages[] = {1, 4};
    uint32_t slots[MAX_TAKEN], one;
    struct expert_arena a = start(8, pages, 2, 100);
    assert_int_equal(fill(&a, 1, slots), 8);
    assert_int_equal(fill(&a, 4, &one), 0);
    give_back(&a, slots, 3);
    assert_int_equal(fill(&a, 4, &one), 0);
    give_back(&a, slots + 3, 1);
    assert_int_not_equal(expert_arena_take(&a, expert_arena_class_of(&a, 4 * PAGE), 0),
                         EXPERT_ARENA_NONE);
    expert_arena_done(&a);
}

/* What is left beside the slabs serves the sizes that fit there. */
static void test_expert_arena_the_rest_serves_small_ones(void **state)
{
    (void)state;
    static const uint64_t pages[] = {2, 5};
    uint32_t slots[MAX_TAKEN];
    struct expert_arena a = start(14, pages, 2, 100);
    assert_int_equal(fill(&a, 5, slots), 2);
    assert_int_equal(fill(&a, 2, slots), 2);
    expert_arena_done(&a);
}

static void test_expert_arena_one_size_fills_all_of_it(void **state)
{
    (void)state;
    uint32_t slots[MAX_TAKEN];
    struct expert_arena a = start(302, (uint64_t[]){3, 3}, 2, 200);
    assert_int_equal(fill(&a, 3, slots), 100);
    assert_int_equal(expert_arena_place(&a, slots[0]), 0);
    expert_arena_done(&a);
}

/* Slabs of 7 pages alone would hold 10 experts. */
static void test_expert_arena_few_experts_have_slabs_of_their_own_size(void **state)
{
    (void)state;
    static const uint64_t pages[] = {7, 5};
    static uint8_t taken[70];
    struct expert_arena a = start(sizeof taken, pages, 2, 100);
    uint32_t n[2] = {0, 0};
    for (uint32_t more = 1; more > 0;) {
        more = 0;
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t slot =
                expert_arena_take(&a, expert_arena_class_of(&a, pages[i] * PAGE), i);
            if (slot == EXPERT_ARENA_NONE)
                continue;
            mark(&a, slot, pages[i], taken, sizeof taken);
            more++;
            n[i]++;
        }
    }
    assert_int_equal(n[0], 5);
    assert_int_equal(n[1], 7);
    assert_int_equal(a.n_strange, 0);
    expert_arena_done(&a);
}

static void test_expert_arena_slabs_that_serve_others_are_counted(void **state)
{
    (void)state;
    static const uint64_t pages[] = {7, 5};
    uint32_t slots[MAX_TAKEN];
    struct expert_arena a = start(70, pages, 2, 100);
    assert_int_equal(fill(&a, 7, slots), 8);
    assert_int_equal(a.n_strange, 3); /* slabs of two small ones */
    give_back(&a, slots, 8);
    assert_int_equal(a.n_strange, 0);
    expert_arena_done(&a);
}

static void test_expert_arena_each_failed_allocation_is_reported(void **state)
{
    (void)state;
    const uint64_t bytes[] = {PAGE, 2 * PAGE};
    const uint64_t before = alloc_live_blocks();
    for (uint64_t n = 1; n <= 3; n++) {
        struct expert_arena a;
        struct err e = {.code = ERR_OK};
        alloc_fail_at(n, 0);
        assert_int_equal(expert_arena_start(&a, 4 * PAGE, bytes, 2, 8, &e), ERR_NOMEM);
        expert_arena_done(&a);
        assert_int_equal(alloc_live_blocks(), before);
    }
    alloc_fail_at(0, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_expert_arena_all_fit_in_any_order),
        cmocka_unit_test(test_expert_arena_slabs_serve_one_size_then_another),
        cmocka_unit_test(test_expert_arena_a_slab_with_one_left_keeps_its_size),
        cmocka_unit_test(test_expert_arena_the_rest_serves_small_ones),
        cmocka_unit_test(test_expert_arena_one_size_fills_all_of_it),
        cmocka_unit_test(test_expert_arena_few_experts_have_slabs_of_their_own_size),
        cmocka_unit_test(test_expert_arena_slabs_that_serve_others_are_counted),
        cmocka_unit_test(test_expert_arena_each_failed_allocation_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "alloc.h"
#include "expert_policy.h"
#include "rng.h"

enum {
    LAYERS = 4,
    EXPERTS = 16,
    USED = 2
};

static struct expert_policy start(void)
{
    struct expert_policy p;
    struct err e = {.code = ERR_OK};
    assert_int_equal(expert_policy_start(&p, LAYERS, EXPERTS, USED, &e), ERR_OK);
    return p;
}

/* A pass of one row that uses two experts. */
static void pass(struct expert_policy *p, uint32_t layer, uint32_t a, uint32_t b)
{
    expert_policy_pass(p, layer, 1);
    expert_policy_use(p, layer, a, 1);
    expert_policy_use(p, layer, b, 1);
    expert_policy_score(p, layer);
}

static float chance(const struct expert_policy *p, uint32_t layer, uint32_t expert)
{
    return expert_policy_chance(p, expert_policy_odds(p, layer)[expert]);
}

static void test_expert_policy_what_is_used_often_is_likelier(void **state)
{
    (void)state;
    struct expert_policy p = start();
    for (uint32_t i = 0; i < 300; i++)
        for (uint32_t l = 0; l < LAYERS; l++)
            pass(&p, l, i % 2, 2 + i % 8);
    for (uint32_t l = 0; l < LAYERS; l++) {
        assert_true(chance(&p, l, 0) > chance(&p, l, 4));
        assert_true(chance(&p, l, 4) > chance(&p, l, 12));
        /* Used each other time, each eighth time, never. */
        assert_in_range((unsigned)(100 * chance(&p, l, 12)), 0, 3);
    }
    expert_policy_done(&p);
}

/* Experts of layer 0 come back in the next pass, those of layer 1 never do. */
static void test_expert_policy_each_layer_learns_what_recent_use_says(void **state)
{
    (void)state;
    struct expert_policy p = start();
    uint32_t held = 0;
    for (uint32_t i = 0; i < 4000; i++) {
        const uint32_t fresh = (uint32_t)(rng_draw(3, i) >> 32) % EXPERTS;
        held = i % 8 == 0 ? fresh : held;
        pass(&p, 0, held, (held + 8) % EXPERTS);
        pass(&p, 1, (2 * i) % EXPERTS, (2 * i + 1) % EXPERTS);
    }
    const uint32_t last = 2 * 3999 % EXPERTS;
    assert_true(chance(&p, 0, held) > 0.6f);
    assert_true(chance(&p, 1, last) < 0.1f);
    assert_true(p.layers[0].own[0] + p.layers[0].own[1] > p.layers[1].own[0] + p.layers[1].own[1]);
    expert_policy_done(&p);
}

static void test_expert_policy_worth_falls_with_distance_and_price(void **state)
{
    (void)state;
    struct expert_policy p = start();
    expert_policy_pass(&p, 1, 1);
    assert_int_equal(expert_policy_ahead(&p, 2), 1);
    assert_int_equal(expert_policy_ahead(&p, 0), 3);
    assert_int_equal(expert_policy_ahead(&p, 1), 4); /* its pass is under way */
    for (uint32_t n = 0; n < 400; n++)
        expert_policy_evicted(&p, 4, 0.4f);
    assert_true(p.price > 0.09f && p.price < 0.11f);
    /* What goes now is worth nothing: a chance of 0.4 four passes away. */
    const float none = expert_policy_worth(&p, 4, 0.4f);
    assert_true(none > -0.05f && none < 0.05f);
    assert_true(expert_policy_worth(&p, 4, 0.5f) > expert_policy_worth(&p, 4, 0.4f));
    assert_true(expert_policy_worth(&p, 1, 0.4f) > expert_policy_worth(&p, 4, 0.4f));
    /* Soon and unlikely against late and likely. */
    assert_true(expert_policy_worth(&p, 1, 0.05f) < 0.0f);
    assert_true(expert_policy_worth(&p, 4, 0.9f) > expert_policy_worth(&p, 1, 0.2f));
    expert_policy_done(&p);
}

/* In a chunk nearly all are used: those of the layers that come next stay. */
static void test_expert_policy_in_a_chunk_the_next_layers_stay(void **state)
{
    (void)state;
    struct expert_policy p = start();
    expert_policy_pass(&p, 1, 512);
    assert_true(expert_policy_worth(&p, 1, 0.7f) > expert_policy_worth(&p, 4, 0.9f));
    const float before = p.price;
    expert_policy_evicted(&p, 4, 0.9f);
    assert_true(p.price <= before && p.price >= before);
    expert_policy_done(&p);
}

/* The first evictions set the price, whatever it was before. */
static void test_expert_policy_price_follows_the_first_evictions(void **state)
{
    (void)state;
    struct expert_policy p = start();
    expert_policy_pass(&p, 1, 1);
    expert_policy_evicted(&p, 2, 0.02f);
    assert_true(p.price > 0.009f && p.price < 0.011f);
    expert_policy_evicted(&p, 2, 0.06f);
    assert_true(p.price > 0.019f && p.price < 0.021f);
    expert_policy_done(&p);
}

/* A prompt of 512 rows uses expert 0 in each, its answer expert 1 in each of 32 steps. */
static void test_expert_policy_a_prompt_counts_less_than_its_answer(void **state)
{
    (void)state;
    struct expert_policy p = start();
    expert_policy_pass(&p, 0, 512);
    expert_policy_use(&p, 0, 0, 512);
    expert_policy_use(&p, 0, 2, 512);
    for (uint32_t i = 0; i < 32; i++)
        pass(&p, 0, 1, 3);
    for (uint32_t s = 0; s + 1 < EXPERT_POLICY_SPANS; s++) {
        const float *counts = (const float *)&p.counts[s];
        assert_true(counts[1] > 1.2f * counts[0]);
        assert_true(counts[0] > 0.0f);
    }
    expert_policy_done(&p);
}

/* Expert 0 is used in rows of 8 passes, expert 1 as often but each time by chance. The longest span
 * tells them apart once it is learned what a use foretells; the others do not. */
static void test_expert_policy_uses_in_a_row_say_less_of_steady_use(void **state)
{
    (void)state;
    struct expert_policy p = start();
    for (uint32_t i = 0; i < 4000; i++)
        for (uint32_t l = 0; l < LAYERS; l++) {
            const bool row = rng_draw(l, i / 8) >> 61 == 0,
                       by_chance = rng_draw(9 + l, i) >> 61 == 0;
            const uint32_t other = (uint32_t)(rng_draw(20 + l, i) >> 32);
            pass(&p, l, row ? 0 : 2 + other % 7, by_chance ? 1 : 9 + other / 7 % 7);
        }
    const float *steady = (const float *)&p.counts[EXPERT_POLICY_SPANS - 1];
    const float *all = (const float *)&p.counts[EXPERT_POLICY_SPANS - 2];
    assert_true(steady[0] > 0.0f);
    assert_true(steady[1] / steady[0] > 1.5f * all[1] / all[0]);
    expert_policy_done(&p);
}

/* What the last pass used comes again in one of two passes, however seldom it is drawn; what it did
 * not use comes as often as it is drawn. */
static void test_expert_policy_counts_say_less_of_what_is_in_use(void **state)
{
    (void)state;
    struct expert_policy p = start();
    uint32_t drawn[LAYERS] = {0};
    for (uint32_t i = 0; i < 4000; i++)
        for (uint32_t l = 0; l < LAYERS; l++) {
            const float x = (float)(rng_draw(l, i) >> 40) * 0x1p-24f;
            if (rng_draw(9 + l, i) >> 63 == 0)
                drawn[l] = (uint32_t)(x * x * x * (EXPERTS / 2));
            pass(&p, l, drawn[l], EXPERTS / 2 + drawn[l]);
        }
    float in_use = 0.0f, others = 0.0f;
    for (uint32_t s = 2; s < EXPERT_POLICY_SPANS; s++) {
        others += p.weights[s][0];
        in_use += p.weights[s][3];
    }
    assert_true(others > in_use + 0.2f);
    expert_policy_done(&p);
}

static void test_expert_policy_learns_from_fewer_experts_with_time(void **state)
{
    (void)state;
    struct expert_policy p;
    struct err e = {.code = ERR_OK};
    assert_int_equal(expert_policy_start(&p, 1, 128, USED, &e), ERR_OK);
    for (uint32_t i = 0; i < 1000; i++) {
        pass(&p, 0, i % 128, (i + 1) % 128);
        if (i < 60)
            assert_int_equal(p.n_samples, 32);
        assert_in_range(p.n_samples, 4, 32);
    }
    assert_int_equal(p.n_samples, 4);
    expert_policy_done(&p);
}

static void test_expert_policy_each_failed_allocation_is_reported(void **state)
{
    (void)state;
    const uint64_t before = alloc_live_blocks();
    for (uint64_t n = 1; n <= 6; n++) {
        struct expert_policy p;
        struct err e = {.code = ERR_OK};
        alloc_fail_at(n, 0);
        assert_int_equal(expert_policy_start(&p, LAYERS, EXPERTS, USED, &e), ERR_NOMEM);
        expert_policy_done(&p);
        assert_int_equal(alloc_live_blocks(), before);
    }
    alloc_fail_at(0, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_expert_policy_what_is_used_often_is_likelier),
        cmocka_unit_test(test_expert_policy_each_layer_learns_what_recent_use_says),
        cmocka_unit_test(test_expert_policy_worth_falls_with_distance_and_price),
        cmocka_unit_test(test_expert_policy_in_a_chunk_the_next_layers_stay),
        cmocka_unit_test(test_expert_policy_price_follows_the_first_evictions),
        cmocka_unit_test(test_expert_policy_a_prompt_counts_less_than_its_answer),
        cmocka_unit_test(test_expert_policy_uses_in_a_row_say_less_of_steady_use),
        cmocka_unit_test(test_expert_policy_counts_say_less_of_what_is_in_use),
        cmocka_unit_test(test_expert_policy_learns_from_fewer_experts_with_time),
        cmocka_unit_test(test_expert_policy_each_failed_allocation_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* The bound on a trace counted by hand, and on generated ones: chances that come true, and policies
 * that stay under it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "sim_bound.h"

static struct sim_trace_recipe recipe_of(const char *words)
{
    struct sim_trace_recipe r = sim_trace_default();
    struct err e = {.code = ERR_OK};
    assert_int_equal(sim_trace_words(words, &r, &e), ERR_OK);
    return r;
}

static struct sim_trace generate(const char *words, enum sim_trace_chances chances)
{
    struct sim_trace_recipe r = recipe_of(words);
    struct sim_trace t;
    struct err e = {.code = ERR_OK};
    r.chances = chances;
    assert_int_equal(sim_trace_generate(&r, &t, &e), ERR_OK);
    return t;
}

static struct sim_replay_result bound(const struct sim_trace *t, double percent)
{
    const uint64_t capacity = (uint64_t)(percent / 100 * (double)t->all_bytes);
    struct sim_replay_result r;
    struct err e = {.code = ERR_OK};
    assert_int_equal(sim_bound_run(t, &capacity, 1, &r, &e), ERR_OK);
    assert_int_equal(r.needs, t->n_needs);
    return r;
}

static struct sim_replay_result replay(const struct sim_trace *t, enum sim_replay_kind kind,
                                       double half_life, double percent)
{
    const uint64_t capacity = (uint64_t)(percent / 100 * (double)t->all_bytes);
    struct sim_replay_result r;
    struct err e = {.code = ERR_OK};
    assert_int_equal(sim_replay_run(t, kind, half_life, capacity, &r, &e), ERR_OK);
    return r;
}

/* One layer of four experts, a need a step: 0 1 0 2 1 with chances that favour 0, then 1. */
static void test_sim_bound_likeliest_of_those_read_are_held(void **state)
{
    (void)state;
    uint64_t page = ROUTE_TRACE_ALIGN, first[] = {0, 1, 2, 3, 4, 5};
    uint32_t rows[] = {1, 1, 1, 1, 1};
    struct sim_need needs[] = {{0, 1}, {1, 1}, {0, 1}, {2, 1}, {1, 1}};
    float chances[5][4] = {{0.9f}, {0.8f, 0.1f}, {0.6f, 0.2f}, {0.3f, 0.2f, 0.9f}, {0.3f, 0.5f}};
    const struct sim_trace t = {.n_layer = 1,
                                .n_expert = 4,
                                .n_used = 1,
                                .layer_bytes = &page,
                                .all_bytes = 4 * page,
                                .n_steps = 5,
                                .step_rows = rows,
                                .first = first,
                                .needs = needs,
                                .n_needs = 5,
                                .n_rows = 5,
                                .chances = &chances[0][0]};
    /* A place: 0 is hit in the third step, 1 in the fifth; 2 had not been read before the fourth. */
    assert_int_equal(bound(&t, 25).hits, 2);
    assert_int_equal(bound(&t, 50).hits, 2);
    chances[4][0] = 0.7f;
    assert_int_equal(bound(&t, 25).hits, 1);
    assert_int_equal(bound(&t, 50).hits, 2);
}

static void test_sim_bound_a_trace_without_chances_is_refused(void **state)
{
    (void)state;
    struct sim_trace t = generate("tokens=3", SIM_TRACE_NO_CHANCES);
    struct sim_replay_result r;
    struct err e = {.code = ERR_OK};
    assert_int_equal(sim_bound_run(&t, &t.all_bytes, 1, &r, &e), ERR_ARGUMENT);
    sim_trace_done(&t);
}

/* Chances of all experts of a step sum to what it uses; those from 0.3 to 0.5 come true as often. */
static void test_sim_bound_chances_of_generated_traces_come_true(void **state)
{
    (void)state;
    static const char *const recipes[] = {"tokens=200,layers=6", "tokens=200,layers=6,zipf=1.2",
                                          "tokens=200,layers=6,locality=0,recent=0",
                                          "tokens=200,layers=6,topics=4,stay=30,window=5,rows=3"};
    for (size_t n = 0; n < 2 * sizeof recipes / sizeof *recipes; n++) {
        struct sim_trace t = generate(recipes[n / 2], n % 2 ? SIM_TRACE_UNTOLD : SIM_TRACE_TOLD);
        double all = 0, foreseen = 0, came = 0;
        for (uint64_t p = 0; p < (uint64_t)t.n_steps * t.n_layer; p++) {
            const float *chances = t.chances + p * t.n_expert;
            for (uint32_t i = 0; i < t.n_expert; i++) {
                const bool counts = chances[i] > 0.3f && chances[i] < 0.5f;
                all += chances[i];
                foreseen += counts ? chances[i] : 0.0f;
            }
            for (uint64_t i = t.first[p]; i < t.first[p + 1]; i++) {
                const float x = chances[t.needs[i].expert];
                came += x > 0.3f && x < 0.5f;
            }
        }
        assert_true(all > 0.95 * (double)t.n_needs && all < 1.05 * (double)t.n_needs);
        if (n % 2 == 0)
            assert_true(came > 0.94 * foreseen && came < 1.06 * foreseen);
        sim_trace_done(&t);
    }
}

/* In expectation, that is: 0.3 points are left to luck. */
static void test_sim_bound_no_policy_hits_more(void **state)
{
    (void)state;
    static const char *const recipes[] = {"layers=6,tokens=200",
                                          "layers=12,tokens=300,zipf=1,locality=0,recent=0",
                                          "layers=12,tokens=200,zipf=0,locality=0,recent=0",
                                          "layers=6,tokens=200,locality=0.8,recent=0.1",
                                          "layers=6,tokens=100,rows=4,zipf=1,topics=3,stay=40",
                                          "layers=6,tokens=60,chunk=200,every=20"};
    static const enum sim_replay_kind kinds[] = {SIM_REPLAY_LRU, SIM_REPLAY_LFU, SIM_REPLAY_OURS};
    for (size_t n = 0; n < sizeof recipes / sizeof *recipes; n++) {
        struct sim_trace told = generate(recipes[n], SIM_TRACE_TOLD);
        struct sim_trace untold = generate(recipes[n], SIM_TRACE_UNTOLD);
        const double luck = 0.003 * (double)told.n_needs;
        assert_int_equal(told.n_needs, untold.n_needs);
        for (double percent = 6; percent < 80; percent *= 2) {
            const double most = (double)bound(&told, percent).hits + luck;
            const double learnt = (double)bound(&untold, percent).hits + luck;
            assert_true(learnt < most + luck);
            for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
                assert_true((double)replay(&told, kinds[k], 0, percent).hits < learnt);
        }
        sim_trace_done(&told);
        sim_trace_done(&untold);
    }
}

/* The cache reads at most 1.05 of the best of LRU, decayed frequency and the list by the trace's own
 * counts; where that is more than anybody can foresee, little more than the bound. */
static void test_sim_bound_ours_is_near_the_best_or_near_the_bound(void **state)
{
    (void)state;
    static const char *const recipes[] = {"layers=12,tokens=100,zipf=0.5,locality=0,recent=0",
                                          "layers=12,tokens=300,zipf=1,locality=0,recent=0",
                                          "layers=12,tokens=200,zipf=0,locality=0,recent=0",
                                          "layers=12,tokens=200,zipf=1,locality=0.1,recent=0.1"};
    for (size_t n = 0; n < sizeof recipes / sizeof *recipes; n++) {
        struct sim_trace t = generate(recipes[n], SIM_TRACE_UNTOLD);
        for (double percent = 6; percent < 80; percent *= 1.6) {
            uint64_t best = replay(&t, SIM_REPLAY_STATIC, 0, percent).read_bytes;
            for (double half_life = 8; half_life < 1000; half_life *= 8) {
                const uint64_t x = replay(&t, SIM_REPLAY_DECAY, half_life, percent).read_bytes;
                best = x < best ? x : best;
            }
            const double aim = 1.05 * (double)best;
            const double least = 1.035 * (double)bound(&t, percent).read_bytes;
            const double ours = (double)replay(&t, SIM_REPLAY_OURS, 0, percent).read_bytes;
            if (ours > aim && ours > least)
                fail_msg("%s at %.1f %%: %.3f of the best, %.3f of the bound", recipes[n], percent,
                         1.05 * ours / aim, 1.035 * ours / least);
        }
        sim_trace_done(&t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sim_bound_likeliest_of_those_read_are_held),
        cmocka_unit_test(test_sim_bound_a_trace_without_chances_is_refused),
        cmocka_unit_test(test_sim_bound_chances_of_generated_traces_come_true),
        cmocka_unit_test(test_sim_bound_no_policy_hits_more),
        cmocka_unit_test(test_sim_bound_ours_is_near_the_best_or_near_the_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

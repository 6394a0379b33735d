/* Floors of the cache policy on a recorded trace of the trained model and on generated ones, and
 * the policies it is measured against on needs small enough to count by hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "sim_replay.h"

static struct sim_replay_result run(const struct sim_trace *t, enum sim_replay_kind kind,
                                    double half_life, uint64_t capacity)
{
    struct sim_replay_result r;
    struct err e = {.code = ERR_OK};
    assert_int_equal(sim_replay_run(t, kind, half_life, capacity, &r, &e), ERR_OK);
    return r;
}

static double hits(struct sim_replay_result r)
{
    return 100.0 * (double)r.hits / (double)r.needs;
}

static void generate(const char *recipe, struct sim_trace *ret)
{
    struct sim_trace_recipe r = sim_trace_default();
    struct err e = {.code = ERR_OK};
    assert_int_equal(sim_trace_words(recipe, &r, &e), ERR_OK);
    assert_int_equal(sim_trace_generate(&r, ret, &e), ERR_OK);
}

/* One layer, experts of one page, a need a step. */
static void by_hand(const uint16_t *experts, uint32_t n, struct sim_trace *ret)
{
    uint64_t page = ROUTE_TRACE_ALIGN, first[65];
    uint32_t zeroes[64] = {0};
    struct err e = {.code = ERR_OK};
    for (uint32_t i = 0; i <= n; i++)
        first[i] = i;
    const struct route_trace_file f = {
        .shape = {.n_layer = 1, .n_expert = 8, .n_used = 1, .layer_bytes = &page},
        .n_steps = n,
        .n_rows = n,
        .step_first = first,
        .sequence = zeroes,
        .position = zeroes,
        .ids = (uint16_t *)(uintptr_t)experts};
    assert_int_equal(sim_trace_from_file(&f, ret, &e), ERR_OK);
}

static void test_sim_replay_each_policy_counts_as_by_hand(void **state)
{
    (void)state;
    static const uint16_t experts[] = {0, 1, 2, 0, 0, 3, 1, 0};
    const uint64_t two = 2ull * ROUTE_TRACE_ALIGN;
    struct sim_trace t;
    by_hand(experts, 8, &t);
    assert_int_equal(run(&t, SIM_REPLAY_LRU, 0, two).hits, 1);    /* the second 0 of the pair */
    assert_int_equal(run(&t, SIM_REPLAY_LFU, 0, two).hits, 2);    /* and the last 0 */
    assert_int_equal(run(&t, SIM_REPLAY_STATIC, 0, two).hits, 4); /* 0 three times, 1 once */
    assert_int_equal(run(&t, SIM_REPLAY_BELADY, 0, two).hits, 4);
    assert_int_equal(run(&t, SIM_REPLAY_LRU, 0, two).read_bytes, 7ull * ROUTE_TRACE_ALIGN);
    assert_int_equal(run(&t, SIM_REPLAY_DECAY, 1e6, two).hits,
                     run(&t, SIM_REPLAY_LFU, 0, two).hits);
    assert_int_equal(run(&t, SIM_REPLAY_DECAY, 0.1, two).hits,
                     run(&t, SIM_REPLAY_LRU, 0, two).hits);
    sim_trace_done(&t);
}

/* Ours against LRU and LFU in points of hits, below 25 % against LRU alone, and in bytes against
 * the best of LRU, decayed frequency in hindsight and the static list; never above Belady. */
struct floors {
    double points, over_lru, most_bytes;
};

static void hold(const char *name, const struct sim_trace *t, const double *percents, uint32_t n,
                 struct floors f)
{
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t capacity = (uint64_t)(percents[i] / 100 * (double)t->all_bytes);
        const struct sim_replay_result ours = run(t, SIM_REPLAY_OURS, 0, capacity);
        const struct sim_replay_result lru = run(t, SIM_REPLAY_LRU, 0, capacity);
        const struct sim_replay_result lfu = run(t, SIM_REPLAY_LFU, 0, capacity);
        uint64_t best = run(t, SIM_REPLAY_STATIC, 0, capacity).read_bytes;
        best = lru.read_bytes < best ? lru.read_bytes : best;
        for (double half_life = 4; half_life < 5000; half_life *= 4) {
            const uint64_t bytes = run(t, SIM_REPLAY_DECAY, half_life, capacity).read_bytes;
            best = bytes < best ? bytes : best;
        }
        const double points = hits(ours) - (hits(lru) > hits(lfu) ? hits(lru) : hits(lfu));
        const double over_lru = hits(ours) - hits(lru);
        const double bytes = (double)ours.read_bytes / (double)best;
        if (points < f.points || bytes > f.most_bytes ||
            (percents[i] < 25 && over_lru < f.over_lru))
            fail_msg("%s at %.1f %%: %.2f points to LRU and LFU, %.2f to LRU, %.3f of the best "
                     "one's bytes",
                     name, percents[i], points, over_lru, bytes);
        assert_true(ours.hits <= run(t, SIM_REPLAY_BELADY, 0, capacity).hits);
    }
}

static void recorded(const char *path, struct sim_trace *ret)
{
    struct route_trace_file f;
    struct err e = {.code = ERR_OK};
    assert_int_equal(route_trace_read(path, &f, &e), ERR_OK);
    assert_int_equal(sim_trace_from_file(&f, ret, &e), ERR_OK);
    route_trace_file_done(&f);
}

static void test_sim_replay_ours_on_the_trained_models_trace_leads(void **state)
{
    (void)state;
    static const double percents[] = {5, 10, 15, 20, 25, 30, 40, 50, 60, 80};
    struct sim_trace t;
    recorded(ISLET_TEST_DIR "/models/tinymoe-chat.trace", &t);
    hold("tinymoe", &t, percents, 10, (struct floors){1.0, 3.0, 0.98});
    sim_trace_done(&t);
}

/* Experts of two sizes, layers with and without locality. */
static void test_sim_replay_ours_on_a_large_models_trace_is_near_the_best(void **state)
{
    (void)state;
    static const double percents[] = {4, 6, 10, 12.5, 19, 22, 25, 38, 50, 60, 75};
    struct sim_trace t;
    recorded(ISLET_TEST_DIR "/models/m89-noise.trace", &t);
    hold("m89", &t, percents, 11, (struct floors){-0.3, 3.0, 1.03});
    sim_trace_done(&t);
}

static void test_sim_replay_ours_on_generated_traces_is_near_the_best(void **state)
{
    (void)state;
    static const struct {
        const char *recipe;
        double over_lru, most_bytes;
    } cases[] = {
        {"tokens=300", 3.0, 1.0},
        {"tokens=300,zipf=1.2,locality=0.1", 3.0, 1.03},
        {"tokens=400,zipf=1,topics=8,stay=50,locality=0.4", 3.0, 1.01},
        {"tokens=200,chunk=512,every=25", 3.0, 1.0},
        {"tokens=200,rows=4,zipf=1", 3.0, 1.03},
        /* Here the list knows the sample's own luck, and nothing but counts tells experts apart:
         * LFU too reads up to 1.08 and 1.20 of its bytes. */
        {"tokens=600,zipf=1,locality=0,recent=0", 3.0, 1.09},
        {"tokens=100,zipf=0.5,locality=0,recent=0", 3.0, 1.19},
        {"tokens=300,layers=48,odd_bytes=3436544", 3.0, 1.0},
    };
    static const double percents[] = {5, 12.5, 25, 38};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sim_trace t;
        generate(cases[i].recipe, &t);
        hold(cases[i].recipe, &t, percents, 4,
             (struct floors){-1.0, cases[i].over_lru, cases[i].most_bytes});
        sim_trace_done(&t);
    }
}

static void test_sim_replay_ours_in_prompt_scans_is_near_belady(void **state)
{
    (void)state;
    struct sim_trace t;
    generate("tokens=20,chunk=512,every=1", &t);
    for (uint32_t percent = 10; percent <= 80; percent += 35) {
        const uint64_t capacity = t.all_bytes / 100 * percent;
        const double belady = hits(run(&t, SIM_REPLAY_BELADY, 0, capacity));
        assert_true(hits(run(&t, SIM_REPLAY_OURS, 0, capacity)) > belady - 6);
    }
    sim_trace_done(&t);
}

static void test_sim_replay_a_recipe_gives_the_same_trace_again(void **state)
{
    (void)state;
    struct sim_trace a, b;
    generate("tokens=20,topics=3,rows=2,chunk=40,every=7,seed=5", &a);
    generate("tokens=20,topics=3,rows=2,chunk=40,every=7,seed=5", &b);
    assert_int_equal(a.n_needs, b.n_needs);
    assert_memory_equal(a.needs, b.needs, a.n_needs * sizeof *a.needs);
    assert_int_equal(a.n_rows, 3 * 40 + 20 * 2);
    sim_trace_done(&a);
    sim_trace_done(&b);
}

static void test_sim_replay_a_bad_recipe_is_named(void **state)
{
    (void)state;
    static const char *const bad[] = {"zipf",     "zipf=",      "zipf=5",   "zpf=1",
                                      "used=200", "bytes=5000", "zipf=1,,", "tokens=nan"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct sim_trace_recipe r = sim_trace_default();
        struct err e = {.code = ERR_OK};
        assert_int_equal(sim_trace_words(bad[i], &r, &e), ERR_ARGUMENT);
        assert_true(e.text[0] != '\0');
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sim_replay_each_policy_counts_as_by_hand),
        cmocka_unit_test(test_sim_replay_a_recipe_gives_the_same_trace_again),
        cmocka_unit_test(test_sim_replay_a_bad_recipe_is_named),
        cmocka_unit_test(test_sim_replay_ours_on_the_trained_models_trace_leads),
        cmocka_unit_test(test_sim_replay_ours_on_a_large_models_trace_is_near_the_best),
        cmocka_unit_test(test_sim_replay_ours_on_generated_traces_is_near_the_best),
        cmocka_unit_test(test_sim_replay_ours_in_prompt_scans_is_near_belady),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Who computes an expert: the split is never slower than any other that takes experts by rows, and
 * its edges are where they should be. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine_split.h"
#include "rng.h"

enum {
    MAX = 128
};

/* A laptop: 12 GB/s over the link, 40 GB/s of RAM, 300 GB/s of the GPU. */
static const struct engine_split_rates laptop = {
    .link = 12e9, .cpu = 40e9, .cpu_row = 80e9, .gpu = 300e9, .sync_ns = 20e3};

static struct engine_split_layer layer_of(const uint32_t *n_rows, uint32_t n, uint32_t n_resident)
{
    return (struct engine_split_layer){.expert_bytes = 2600000,
                                       .row_bytes = 8192,
                                       .n_resident = n_resident,
                                       .n = n,
                                       .n_rows = n_rows};
}

/* How long a layer takes if the first `copied` of the order are copied. */
static double time_of(const struct engine_split_rates *r, const struct engine_split_layer *l,
                      const uint32_t *order, uint32_t copied)
{
    const double compute = 1e9 * (double)l->expert_bytes / r->gpu;
    const double link = 1e9 * (double)l->expert_bytes / r->link * copied;
    double gpu = compute * (l->n_resident + copied), cpu = copied < l->n ? r->sync_ns : 0;
    cpu += r->copy_ns * copied;
    if (copied > 0 && gpu < link + compute)
        gpu = link + compute;
    for (uint32_t i = copied; i < l->n; i++)
        cpu += engine_split_cpu_ns(r, l, l->n_rows[order[i]]);
    return gpu > cpu ? gpu : cpu;
}

static void test_engine_split_is_the_best_of_all_splits(void **state)
{
    (void)state;
    uint32_t draws = 0;
    for (int round = 0; round < 2000; round++) {
        uint32_t rows[MAX], order[MAX];
        const uint32_t n = (uint32_t)(rng_draw(11, draws++) % MAX);
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t bits = rng_draw(11, draws++) % 8;
            rows[i] = 1 + (uint32_t)(rng_draw(11, draws++) % (1u << bits));
        }
        const struct engine_split_layer l =
            layer_of(rows, n, (uint32_t)(rng_draw(11, draws++) % 20));
        struct engine_split_rates r = laptop;
        r.link = 1e9 * (double)(1 + rng_draw(11, draws++) % 60);
        r.cpu = 1e9 * (double)(1 + rng_draw(11, draws++) % 100);
        r.cpu_row = 2 * r.cpu;
        r.copy_ns = 1e3 * (double)(rng_draw(11, draws++) % 60);
        const uint32_t copied = engine_split_plan(&r, &l, order);
        assert_true(copied <= n);
        for (uint32_t i = 1; i < n; i++)
            assert_true(rows[order[i - 1]] > rows[order[i]] ||
                        (rows[order[i - 1]] == rows[order[i]] && order[i - 1] < order[i]));
        for (uint32_t other = 0; other <= n; other++)
            assert_true(time_of(&r, &l, order, copied) <=
                        time_of(&r, &l, order, other) * (1 + 1e-9));
    }
}

static void test_engine_split_one_row_stays_on_the_cpu(void **state)
{
    (void)state;
    static const uint32_t rows[] = {1, 1, 1};
    uint32_t order[3];
    const struct engine_split_layer l = layer_of(rows, 3, 5);
    assert_int_equal(engine_split_plan(&laptop, &l, order), 0);
}

static void test_engine_split_many_rows_are_copied(void **state)
{
    (void)state;
    static const uint32_t rows[] = {1, 200, 2, 300};
    uint32_t order[4];
    const struct engine_split_layer l = layer_of(rows, 4, 0);
    assert_int_equal(engine_split_plan(&laptop, &l, order), 2);
    assert_int_equal(order[0], 3);
    assert_int_equal(order[1], 1);
}

static void test_engine_split_a_dear_sync_keeps_the_cpu_out(void **state)
{
    (void)state;
    static const uint32_t rows[] = {1};
    uint32_t order[1];
    const struct engine_split_layer l = layer_of(rows, 1, 0);
    struct engine_split_rates r = laptop;
    assert_int_equal(engine_split_plan(&r, &l, order), 0);
    r.sync_ns = 1e6;
    assert_int_equal(engine_split_plan(&r, &l, order), 1);
}

static void test_engine_split_nothing_to_split(void **state)
{
    (void)state;
    const struct engine_split_layer l = layer_of(NULL, 0, 8);
    assert_int_equal(engine_split_plan(&laptop, &l, NULL), 0);
}

static void test_engine_split_learns_slowly(void **state)
{
    (void)state;
    double rate = 0;
    engine_split_learn(&rate, 1000, 1000);
    assert_true(rate > 0.999e9 && rate < 1.001e9);
    engine_split_learn(&rate, 2000, 1000);
    assert_true(rate > 1.099e9 && rate < 1.101e9);
    engine_split_learn(&rate, 0, 1000);
    engine_split_learn(&rate, 1000, 0);
    assert_true(rate > 1.099e9 && rate < 1.101e9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_split_is_the_best_of_all_splits),
        cmocka_unit_test(test_engine_split_one_row_stays_on_the_cpu),
        cmocka_unit_test(test_engine_split_many_rows_are_copied),
        cmocka_unit_test(test_engine_split_a_dear_sync_keeps_the_cpu_out),
        cmocka_unit_test(test_engine_split_nothing_to_split),
        cmocka_unit_test(test_engine_split_learns_slowly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

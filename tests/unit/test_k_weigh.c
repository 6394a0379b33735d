#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kernels.h"
#include "rng.h"

enum {
    MOST = 1000
};

static float number(uint64_t i, float scale)
{
    return scale * ((float)(rng_draw(7, i) >> 40) / 8388608.0f - 1.0f);
}

static void fill(float *x, uint32_t n, uint64_t seed, float scale)
{
    for (uint32_t i = 0; i < n; i++)
        x[i] = number(seed * MOST + i, scale);
}

static void test_k_weigh_any_length_is_the_scalar_formula(void **state)
{
    static const float temperatures[] = {1.0f, 0.7f, 0.01f, 3.0f};
    float x[MOST];
    uint64_t w[MOST];
    (void)state;
    for (uint32_t t = 0; t < 200; t++) {
        const uint32_t n = t < 40 ? t + 1 : (uint32_t)(rng_draw(3, t) % MOST) + 1;
        fill(x, n, t, t % 2 ? 10.0f : 120.0f);
        const float temperature = temperatures[t % 4], best = x[k_highest(x, n)];
        const uint64_t total = k_weigh(x, n, best, temperature, w);
        uint64_t sum = 0;
        for (uint32_t i = 0; i < n; i++) {
            assert_true(w[i] ==
                        (uint64_t)(k_exp32((x[i] - best) / temperature) * 1099511627776.0f));
            sum += w[i];
        }
        assert_true(sum == total);
    }
}

static void test_k_weigh_infinities_weigh_nothing(void **state)
{
    float x[19];
    uint64_t w[19];
    (void)state;
    for (int i = 0; i < 19; i++)
        x[i] = i % 3 == 0 ? -INFINITY : 0.0f;
    assert_true(k_weigh(x, 19, 0.0f, 1.0f, w) == 12ull << 40);
    x[2] = INFINITY;
    assert_true(k_weigh(x, 19, INFINITY, 1.0f, w) == 0);
}

static void test_k_highest_equal_values_gives_the_first(void **state)
{
    float x[MOST];
    (void)state;
    for (uint32_t t = 0; t < 500; t++) {
        const uint32_t n = t < 80 ? t + 1 : (uint32_t)(rng_draw(5, t) % MOST) + 1;
        uint32_t best = 0;
        fill(x, n, t, 2.0f);
        for (uint32_t i = 0; i < n; i++) {
            x[i] = t % 3 == 0 ? floorf(x[i]) : x[i];
            if (x[i] == 0.0f && i % 2)
                x[i] = -0.0f;
            best = x[i] > x[best] ? i : best;
        }
        assert_int_equal(k_highest(x, n), best);
    }
}

static void test_k_highest_what_is_not_a_number_is_passed_over(void **state)
{
    float x[40];
    (void)state;
    fill(x, 40, 1, 1.0f);
    x[3] = x[17] = x[39] = NAN;
    x[21] = 5.0f;
    assert_int_equal(k_highest(x, 40), 21);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_k_weigh_any_length_is_the_scalar_formula),
        cmocka_unit_test(test_k_weigh_infinities_weigh_nothing),
        cmocka_unit_test(test_k_highest_equal_values_gives_the_first),
        cmocka_unit_test(test_k_highest_what_is_not_a_number_is_passed_over),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

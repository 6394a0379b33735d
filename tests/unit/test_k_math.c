#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "k_float.h"
#include "kernels.h"

static double relative(double got, double want)
{
    return fabs(got - want) / fabs(want);
}

/* The library's functions are a sanity check only; nothing on the data path calls them. */
static void test_k_math_exp64_and_log64_are_close_to_the_library(void **state)
{
    (void)state;
    for (double x = -700.0; x <= 700.0; x += 0.37)
        assert_true(relative(k_exp64(x), exp(x)) < 1e-15);
    for (double x = 1e-300; x < 1e300; x *= 1.93)
        assert_true(fabs(k_log64(x) - log(x)) <= 4e-16 * fabs(log(x)) + 1e-16);
    assert_true(k_exp64(0.0) == 1.0);
    assert_true(k_log64(1.0) == 0.0);
    assert_true(fabs(k_log64(0x1p-1074) - log(0x1p-1074)) < 1e-12); /* least subnormal */
}

static void test_k_math_rope_table_is_close_to_the_library(void **state)
{
    (void)state;
    enum {
        DIM = 128,
        POSITIONS = 4096
    };
    static float table[POSITIONS * DIM];
    k_rope_table(1e6, DIM, POSITIONS, table);
    for (uint32_t p = 0; p < POSITIONS; p++)
        for (uint32_t i = 0; i < DIM / 2; i++) {
            const double angle = p * pow(1e6, -2.0 * i / DIM);
            assert_true(fabs(table[(p * (DIM / 2) + i) * 2] - cos(angle)) < 1e-7);
            assert_true(fabs(table[(p * (DIM / 2) + i) * 2 + 1] - sin(angle)) < 1e-7);
        }
    assert_true(table[0] == 1.0f && table[1] == 0.0f);
}

/* A change of these bits is a change of every answer: K_ARITHMETIC_VERSION must rise with it. */
static void test_k_math_known_bits_do_not_change(void **state)
{
    (void)state;
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (uint32_t i = 0; i <= 200000; i++) {
        const float x = -100.0f + (float)i * 0x1p-10f;
        hash = (hash ^ k_float_bits(k_exp32(x))) * UINT64_C(0x100000001b3);
    }
    static float table[64 * 64];
    k_rope_table(100000.0, 64, 64, table);
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        hash = (hash ^ k_float_bits(table[i])) * UINT64_C(0x100000001b3);
    assert_int_equal(K_ARITHMETIC_VERSION, 1);
    assert_int_equal(hash, UINT64_C(0xdfb92e008c37f84d));
}

static void test_k_math_exp32_has_the_error_that_is_claimed(void **state)
{
    (void)state;
    double worst = 0.0;
    for (uint32_t u = k_float_bits(-87.0f); u >= 0x80000000u + 4099; u -= 4099) {
        const float x = k_float_of_bits(u), y = k_exp32(x);
        const double want = exp((double)x);
        const float above = k_float_of_bits(k_float_bits(y) + 1);
        const double ulp = (double)above - (double)y, error = fabs((double)y - want) / ulp;
        worst = error > worst ? error : worst;
    }
    assert_true(worst < 1.02);
    assert_true(k_exp32(0.0f) == 1.0f);
    assert_true(k_exp32(-87.5f) == 0.0f);
    assert_true(k_exp32(nanf("")) == 0.0f);
    assert_true(k_exp32(1000.0f) == k_exp32(88.0f));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_k_math_exp64_and_log64_are_close_to_the_library),
        cmocka_unit_test(test_k_math_rope_table_is_close_to_the_library),
        cmocka_unit_test(test_k_math_known_bits_do_not_change),
        cmocka_unit_test(test_k_math_exp32_has_the_error_that_is_claimed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

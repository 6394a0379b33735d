#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "mkmodel_block.h"

static const enum k_format formats[] = {K_F32,  K_F16,  K_BF16, K_Q4_0,
                                        K_Q8_0, K_Q4_K, K_Q5_K, K_Q6_K};
enum {
    N_FORMATS = sizeof(formats) / sizeof(formats[0]),
    N = 1 << 16
};

static float values[N];
static uint8_t blocks[N * 4];

static void fill(enum k_format format, uint64_t seed, float std)
{
    const uint32_t elements = k_format_block_elements(format);
    for (uint32_t i = 0; i < N / elements; i++)
        mkmodel_block_random(format, seed << 40 ^ (uint64_t)i << 8, std,
                             blocks + i * k_format_block_bytes(format));
    k_dequantise(format, blocks, values, N);
}

static void test_mkmodel_block_random_has_the_deviation_in_every_format(void **state)
{
    (void)state;
    for (int f = 0; f < N_FORMATS; f++) {
        double sum = 0, squares = 0;
        fill(formats[f], 3, 0.25f);
        assert_int_equal(k_find_invalid(formats[f], blocks, N), -1);
        for (int i = 0; i < N; i++) {
            sum += (double)values[i];
            squares += (double)values[i] * (double)values[i];
        }
        const double mean = sum / N, std = sqrt(squares / N - mean * mean);
        if (fabs(mean) > 0.01 || fabs(std - 0.25) > 0.01)
            fail_msg("%s: mean %g, deviation %g", mkmodel_block_name(formats[f]), mean, std);
    }
}

static void test_mkmodel_block_halves_have_the_deviation_in_any_pieces(void **state)
{
    (void)state;
    static uint8_t pieces[N * 2];
    for (int f = 1; f < 3; f++) {
        double squares = 0;
        mkmodel_block_halves(formats[f], 9, 0.25f, 0, N, blocks);
        for (uint64_t at = 0, n = 1; at < N; at += n, n = n % 11 + 1)
            mkmodel_block_halves(formats[f], 9, 0.25f, at, n < N - at ? n : N - at,
                                 pieces + 2 * at);
        assert_memory_equal(blocks, pieces, sizeof(pieces));
        k_dequantise(formats[f], blocks, values, N);
        for (int i = 0; i < N; i++)
            squares += (double)values[i] * (double)values[i];
        assert_true(fabs(sqrt(squares / N) - 0.25) < 0.01);
    }
}

static void test_mkmodel_block_random_same_key_gives_same_bytes(void **state)
{
    (void)state;
    for (int f = 0; f < N_FORMATS; f++) {
        uint8_t a[MKMODEL_BLOCK_MAX_BYTES] = {0}, b[MKMODEL_BLOCK_MAX_BYTES] = {0};
        const size_t n = k_format_block_bytes(formats[f]);
        mkmodel_block_random(formats[f], 77, 1.0f, a);
        mkmodel_block_random(formats[f], 77, 1.0f, b);
        assert_memory_equal(a, b, sizeof(a));
        mkmodel_block_random(formats[f], 78, 1.0f, b);
        assert_memory_not_equal(a, b, n);
    }
}

static void test_mkmodel_block_random_std_zero_gives_ones(void **state)
{
    (void)state;
    for (int f = 0; f < 3; f++) {
        float one = 0;
        uint8_t bytes[4];
        mkmodel_block_random(formats[f], 1, 0.0f, bytes);
        k_dequantise(formats[f], bytes, &one, 1);
        assert_true(one == 1.0f);
    }
}

static void test_mkmodel_block_marks_are_exact_in_every_format(void **state)
{
    (void)state;
    for (int f = 0; f < N_FORMATS; f++) {
        const uint32_t n = k_format_block_elements(formats[f]);
        int8_t signs[MKMODEL_BLOCK_MAX];
        for (uint32_t round = 0; round < 16; round++) {
            for (uint32_t i = 0; i < n; i++)
                signs[i] = (int8_t)((i * i + i / 7 + round * 5) % 3) - 1;
            mkmodel_block_marks(formats[f], 1.5f, signs, blocks);
            k_dequantise(formats[f], blocks, values, n);
            assert_int_equal(k_find_invalid(formats[f], blocks, n), -1);
            for (uint32_t i = 0; i < n; i++)
                if (values[i] != (float)signs[i] * 1.5f)
                    fail_msg("%s: element %u is %g", mkmodel_block_name(formats[f]), i,
                             (double)values[i]);
        }
    }
}

static void test_mkmodel_block_names_lead_back_to_the_format(void **state)
{
    (void)state;
    enum k_format back;
    for (int f = 0; f < N_FORMATS; f++) {
        assert_true(mkmodel_block_format(mkmodel_block_name(formats[f]), &back));
        assert_int_equal(back, formats[f]);
    }
    assert_false(mkmodel_block_format("q3_k", &back));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mkmodel_block_random_has_the_deviation_in_every_format),
        cmocka_unit_test(test_mkmodel_block_halves_have_the_deviation_in_any_pieces),
        cmocka_unit_test(test_mkmodel_block_random_same_key_gives_same_bytes),
        cmocka_unit_test(test_mkmodel_block_random_std_zero_gives_ones),
        cmocka_unit_test(test_mkmodel_block_marks_are_exact_in_every_format),
        cmocka_unit_test(test_mkmodel_block_names_lead_back_to_the_format),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

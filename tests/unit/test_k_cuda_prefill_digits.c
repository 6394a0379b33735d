/* The integer schemes of the CUDA prefill kernels: every product and sum that they take apart comes
 * back exactly, and every digit fits its operand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "k_cuda_prefill_digits.h"

static uint32_t word_of(const int32_t value[4])
{
    uint32_t w = 0;
    for (int e = 0; e < 4; e++)
        w |= ((uint32_t)value[e] & 255u) << (8 * e);
    return w;
}

static int32_t unsigned_byte(uint32_t w, int e)
{
    return (int32_t)(w >> (8 * e) & 255u);
}

static int32_t signed_byte(uint32_t w, int e)
{
    return (int8_t)(w >> (8 * e) & 255u);
}

static void test_k_cuda_prefill_digits_scale_times_weight_is_exact(void **state)
{
    (void)state;
    for (int32_t scale = 0; scale < 64; scale++) {
        const uint32_t scales = word_of((const int32_t[4]){scale, 63 - scale, 0, 63});
        for (int e = 0; e < 4; e++) {
            const int32_t low = unsigned_byte(k_prefill_scale_digit(scales, 0), e);
            const int32_t high = unsigned_byte(k_prefill_scale_digit(scales, 1), e);
            assert_int_equal(low + K_PREFILL_SCALE_BASE * high, unsigned_byte(scales, e));
            assert_true(low * 31 <= 255 && high * 31 <= 255); /* no carry into the next weight */
        }
    }
}

static void test_k_cuda_prefill_digits_six_bit_weights_are_exact(void **state)
{
    (void)state;
    for (int32_t scale = -128; scale < 128; scale++)
        for (int32_t weight = -32; weight < 32; weight++) {
            const int32_t w[4] = {weight, -1 - weight, -32, 31};
            const uint32_t four =
                word_of((const int32_t[4]){4 * w[0], 4 * w[1], 4 * w[2], 4 * w[3]});
            uint32_t low, high;
            k_prefill_six_digits(four, scale, &low, &high);
            for (int e = 0; e < 4; e++)
                assert_int_equal(unsigned_byte(low, e) + K_PREFILL_SIX_BASE * signed_byte(high, e),
                                 4 * w[e] * scale);
        }
}

static void test_k_cuda_prefill_digits_sums_are_exact(void **state)
{
    (void)state;
    for (int32_t sum = -4064; sum <= 4064; sum++) {
        const int32_t v[4] = {sum, -sum, 4064, -4064};
        const uint32_t first = ((uint32_t)v[0] & 0xffffu) | (uint32_t)v[1] << 16;
        const uint32_t second = ((uint32_t)v[2] & 0xffffu) | (uint32_t)v[3] << 16;
        const uint32_t low = k_prefill_sum_low(first, second);
        const uint32_t high = k_prefill_sum_high(first, second);
        const uint32_t digit0 = k_prefill_sum_digit(first, second, 0);
        const uint32_t digit1 = k_prefill_sum_digit(first, second, 1);
        for (int e = 0; e < 4; e++) {
            assert_int_equal(signed_byte(low, e) + 8 * 4 * signed_byte(high, e), v[e]);
            assert_int_equal(signed_byte(digit0, e) + 64 * signed_byte(digit1, e), v[e]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_k_cuda_prefill_digits_scale_times_weight_is_exact),
        cmocka_unit_test(test_k_cuda_prefill_digits_six_bit_weights_are_exact),
        cmocka_unit_test(test_k_cuda_prefill_digits_sums_are_exact),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

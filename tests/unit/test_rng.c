#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "rng.h"

static void test_rng_philox_known_answers(void **state)
{
    (void)state;
    static const uint32_t zero[4] = {0}, ones[4] = {~0u, ~0u, ~0u, ~0u};
    static const uint32_t of_zero[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    static const uint32_t of_ones[4] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
    uint32_t got[4];
    rng_philox(zero, zero, got);
    assert_memory_equal(got, of_zero, sizeof got);
    rng_philox(ones, ones, got);
    assert_memory_equal(got, of_ones, sizeof got);
}

static void test_rng_draw_is_words_0_and_1(void **state)
{
    (void)state;
    assert_true(rng_draw(0, 0) == 0xe169c58d6627e8d5u);
    const uint32_t key[2] = {0x89abcdef, 0x01234567}, counter[4] = {42, 0, 0, 0};
    uint32_t word[4];
    rng_philox(counter, key, word);
    assert_true(rng_draw(0x0123456789abcdef, 42) == ((uint64_t)word[1] << 32 | word[0]));
    assert_true(rng_draw(1, 0) != rng_draw(0, 1));
}

static void test_rng_system_differs_between_calls(void **state)
{
    (void)state;
    uint8_t a[32] = {0}, b[32] = {0};
    rng_system(a, sizeof a);
    rng_system(b, sizeof b);
    assert_memory_not_equal(a, b, sizeof a);
    uint8_t guard[3] = {1, 2, 3};
    rng_system(guard + 1, 1);
    assert_int_equal(guard[0], 1);
    assert_int_equal(guard[2], 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rng_philox_known_answers),
        cmocka_unit_test(test_rng_draw_is_words_0_and_1),
        cmocka_unit_test(test_rng_system_differs_between_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

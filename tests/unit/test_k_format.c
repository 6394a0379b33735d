#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "guard_page.h"
#include "k_float.h"
#include "k_format.h"
#include "kernels.h"

static void *read_file(const char *name, size_t *ret_bytes)
{
    char path[512];
    snprintf(path, sizeof path, "%s/models/dequant/%s", ISLET_TEST_DIR, name);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        fail_msg("cannot open %s", path);
    fseek(f, 0, SEEK_END);
    *ret_bytes = (size_t)ftell(f);
    rewind(f);
    void *data = malloc(*ret_bytes);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, *ret_bytes, f), *ret_bytes);
    fclose(f);
    return data;
}

static void compare_type(const json_t *type)
{
    const uint32_t format = (uint32_t)json_integer_value(json_object_get(type, "ggml_type"));
    const size_t blocks = (size_t)json_integer_value(json_object_get(type, "blocks"));
    size_t block_bytes, value_bytes;
    void *data = read_file(json_string_value(json_object_get(type, "blocks_file")), &block_bytes);
    float *values =
        read_file(json_string_value(json_object_get(type, "values_file")), &value_bytes);
    const size_t n = blocks * k_format_block_elements(format);
    assert_int_equal(block_bytes, blocks * k_format_block_bytes(format));
    assert_int_equal(block_bytes, k_format_bytes(format, 1, n));
    assert_int_equal(value_bytes, n * sizeof(float));
    /* Next to an inaccessible page: one byte read too far is a crash. */
    uint8_t *copy = guard_page_copy(data, block_bytes);
    float *out = malloc(value_bytes);
    assert_non_null(out);
    k_dequantise(format, copy, out, n);
    for (size_t i = 0; i < n; i++)
        if (k_float_bits(out[i]) != k_float_bits(values[i]))
            fail_msg("format %u, value %zu: %a, the reference has %a", format, i, (double)out[i],
                     (double)values[i]);
    assert_int_equal(k_find_invalid(format, copy, n), -1);
    guard_page_free(copy, block_bytes);
    free(out);
    free(values);
    free(data);
}

static bool is_built_in(uint32_t format)
{
    static const enum k_format all[] = {K_F16, K_BF16, K_Q4_0, K_Q8_0, K_Q4_K, K_Q5_K, K_Q6_K};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if ((uint32_t)all[i] == format)
            return true;
    return false;
}

static void test_k_format_reference_blocks_dequantise_to_their_bits(void **state)
{
    (void)state;
    json_t *index = json_load_file(ISLET_TEST_DIR "/models/dequant/index.json", 0, NULL);
    assert_non_null(index);
    size_t i, compared = 0;
    json_t *type;
    json_array_foreach(json_object_get(index, "types"), i, type)
    {
        if (!is_built_in((uint32_t)json_integer_value(json_object_get(type, "ggml_type"))))
            continue;
        compare_type(type);
        compared++;
    }
    json_decref(index);
    assert_int_equal(compared, 7); /* all but F32, which has no file */
}

static void test_k_format_sizes_are_those_of_the_files(void **state)
{
    (void)state;
    static const struct {
        enum k_format format;
        uint32_t elements, bytes;
        enum k_form form;
    } rows[] = {
        {K_F32, 1, 4, K_FORM_F32},       {K_F16, 1, 2, K_FORM_F32},
        {K_BF16, 1, 2, K_FORM_F32},      {K_Q4_0, 32, 18, K_FORM_Q32},
        {K_Q8_0, 32, 34, K_FORM_Q32},    {K_Q4_K, 256, 144, K_FORM_Q256},
        {K_Q5_K, 256, 176, K_FORM_Q256}, {K_Q6_K, 256, 210, K_FORM_Q256},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        assert_int_equal(k_format_block_elements(rows[i].format), rows[i].elements);
        assert_int_equal(k_format_block_bytes(rows[i].format), rows[i].bytes);
        assert_int_equal(k_format_form(rows[i].format), rows[i].form);
        assert_int_equal(k_format_bytes(rows[i].format, 1u << 20, 65536),
                         UINT64_C(65536) / rows[i].elements * rows[i].bytes << 20);
    }
}

static void test_k_format_not_finite_scale_is_found_where_it_is(void **state)
{
    (void)state;
    static const struct {
        enum k_format format;
        uint32_t at; /* byte of the scale's high half in a block */
        uint8_t byte;
    } cases[] = {
        {K_F32, 3, 0x7f},  {K_F16, 1, 0x7c},    {K_BF16, 1, 0x7f}, {K_Q4_0, 1, 0x7c},
        {K_Q8_0, 1, 0xfc}, {K_Q4_K, 1, 0x7e},   {K_Q4_K, 3, 0x7c}, {K_Q5_K, 1, 0x7c},
        {K_Q5_K, 3, 0xff}, {K_Q6_K, 209, 0x7c},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const uint32_t bytes = k_format_block_bytes(cases[i].format), bad = 5, n = 8;
        uint8_t *blocks = calloc(n, bytes);
        assert_non_null(blocks);
        const uint64_t elements = (uint64_t)n * k_format_block_elements(cases[i].format);
        assert_int_equal(k_find_invalid(cases[i].format, blocks, elements), -1);
        blocks[bad * bytes + cases[i].at] = cases[i].byte;
        if (cases[i].format == K_F32 || cases[i].format == K_BF16)
            blocks[bad * bytes + cases[i].at - 1] = 0x80; /* the exponent's last bit */
        assert_int_equal(k_find_invalid(cases[i].format, blocks, elements), bad);
        free(blocks);
    }
}

static void test_k_format_every_f16_survives_f32(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        if ((h & 0x7c00) == 0x7c00 && (h & 0x3ff) != 0)
            continue; /* NaN */
        assert_int_equal(k_float_to_f16(k_float_of_f16((uint16_t)h)), h);
    }
}

static void test_k_format_f16_rounds_to_nearest_even(void **state)
{
    (void)state;
    assert_int_equal(k_float_to_f16(1.0f + 0x1p-11f), 0x3c00);            /* tie to even */
    assert_int_equal(k_float_to_f16(1.0f + 0x1p-10f + 0x1p-11f), 0x3c02); /* tie to even */
    assert_int_equal(k_float_to_f16(1.0f + 0x1p-11f + 0x1p-20f), 0x3c01); /* above the tie */
    assert_int_equal(k_float_to_f16(65519.996f), 0x7bff);
    assert_int_equal(k_float_to_f16(65520.0f), 0x7c00);
    assert_int_equal(k_float_to_f16(0x1p-25f), 0); /* tie of 0 and the least */
    assert_int_equal(k_float_to_f16(0x1.8p-25f), 1);
    assert_int_equal(k_float_to_f16(-0x1p-24f), 0x8001);
    assert_int_equal(k_float_to_f16(0x1.ff8p-15f), 0x03ff); /* largest subnormal */
    assert_int_equal(k_float_to_f16(0x1.fffp-15f), 0x0400); /* rounds up to the least normal */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_k_format_reference_blocks_dequantise_to_their_bits),
        cmocka_unit_test(test_k_format_sizes_are_those_of_the_files),
        cmocka_unit_test(test_k_format_not_finite_scale_is_found_where_it_is),
        cmocka_unit_test(test_k_format_every_f16_survives_f32),
        cmocka_unit_test(test_k_format_f16_rounds_to_nearest_even),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

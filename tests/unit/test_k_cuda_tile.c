#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "k_cuda_tile.h"
#include "k_format.h"
#include "rng.h"

enum {
    OUTPUTS = 32,
    INPUTS = 512,
    MOST_BYTES = OUTPUTS * INPUTS / 32 * 34
};

static const enum k_format formats[] = {K_Q8_0, K_Q4_0, K_Q4_K, K_Q5_K, K_Q6_K};

static void fill(uint8_t *p, uint64_t n, uint32_t seed)
{
    const uint32_t key[2] = {seed, 0};
    for (uint64_t i = 0; i < n; i += 16) {
        const uint32_t counter[4] = {(uint32_t)i, 0, 0, 0};
        uint32_t draw[4];
        rng_philox(counter, key, draw);
        memcpy(p + i, draw, n - i < 16 ? n - i : 16);
    }
}

/* A matrix in both orders, from random bytes. */
struct sample {
    enum k_format format;
    uint64_t row_bytes, bytes;
    uint8_t file[MOST_BYTES], arranged[MOST_BYTES];
};

static void arrange(struct sample *m)
{
    const uint32_t tile_bytes = k_cuda_tile_bytes(m->format);
    for (uint32_t s = 0; s < OUTPUTS / 16; s++)
        for (uint32_t b = 0; b < INPUTS / 256; b++) {
            uint8_t *tile = m->arranged + k_cuda_tile_offset(m->format, INPUTS, s, b);
            const uint8_t *row0 =
                m->file + 16 * s * m->row_bytes + b * k_format_bytes(m->format, 1, 256);
            for (uint32_t w = 0; w < tile_bytes / 4; w++) {
                const uint32_t word = k_cuda_tile_word(m->format, row0, m->row_bytes, w);
                memcpy(tile + 4 * (size_t)w, &word, sizeof word);
            }
        }
}

static void make(struct sample *m, enum k_format format, uint32_t seed)
{
    m->format = format;
    m->row_bytes = k_format_bytes(format, 1, INPUTS);
    m->bytes = k_format_bytes(format, OUTPUTS, INPUTS);
    assert_true(m->bytes <= MOST_BYTES);
    fill(m->file, m->bytes, seed);
    arrange(m);
}

static const uint8_t *block_of(const struct sample *m, uint32_t output, uint32_t b)
{
    return m->file + output * m->row_bytes + b * k_format_bytes(m->format, 1, 256);
}

static const uint8_t *tile_of(const struct sample *m, uint32_t output, uint32_t b)
{
    return m->arranged + k_cuda_tile_offset(m->format, INPUTS, output / 16, b);
}

static void test_k_cuda_tile_bytes_are_those_of_the_file(void **state)
{
    (void)state;
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++)
        assert_int_equal(k_cuda_tile_bytes(formats[f]), k_format_bytes(formats[f], 16, 256));
    assert_int_equal(k_cuda_tile_bytes(K_F16), 0);
}

static void test_k_cuda_tile_ragged_and_float_stay_in_file_order(void **state)
{
    (void)state;
    assert_true(k_cuda_tile_arranged(K_Q8_0, 16, 256));
    assert_false(k_cuda_tile_arranged(K_Q8_0, 17, 256));
    assert_false(k_cuda_tile_arranged(K_Q4_0, 16, 288));
    assert_false(k_cuda_tile_arranged(K_BF16, 16, 256));
}

/* The integers of a block as k_dequantise sees them: all scales one. */
static void test_k_cuda_tile_file_weights_are_those_dequantised(void **state)
{
    (void)state;
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        uint8_t block[8 * 34];
        float value[256];
        const uint16_t one = 0x3c00, zero = 0;
        fill(block, sizeof block, (uint32_t)f);
        if (formats[f] == K_Q8_0 || formats[f] == K_Q4_0) {
            for (uint32_t b = 0; b < 8; b++)
                memcpy(block + b * k_format_block_bytes(formats[f]), &one, 2);
        } else if (formats[f] == K_Q6_K) {
            memset(block + 192, 1, 16);
            memcpy(block + 208, &one, 2);
        } else {
            static const uint8_t ones[12] = {1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1};
            memcpy(block, &one, 2);
            memcpy(block + 2, &zero, 2);
            memcpy(block + 4, ones, sizeof ones);
        }
        k_dequantise(formats[f], block, value, 256);
        for (uint32_t i = 0; i < 256; i++) {
            const int minus = formats[f] == K_Q4_0 ? 8 : 0;
            assert_true((float)(k_cuda_tile_file_weight(formats[f], block, i) - minus) == value[i]);
        }
    }
}

static void test_k_cuda_tile_weights_survive_arranging(void **state)
{
    (void)state;
    static struct sample m;
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        make(&m, formats[f], (uint32_t)f);
        for (uint32_t o = 0; o < OUTPUTS; o++)
            for (uint32_t i = 0; i < INPUTS; i++)
                assert_int_equal(
                    k_cuda_tile_weight(m.format, tile_of(&m, o, i / 256), o % 16, i % 256),
                    k_cuda_tile_file_weight(m.format, block_of(&m, o, i / 256), i % 256));
    }
}

static void check_heads(const struct sample *m, uint32_t o, uint32_t b)
{
    const uint8_t *block = block_of(m, o, b), *tile = tile_of(m, o, b);
    const uint8_t *head = tile + k_cuda_tile_head(m->format) + 16 * (o % 16);
    const uint32_t bytes = k_format_block_bytes(m->format);
    if (m->format == K_Q6_K) {
        assert_memory_equal(head, block + 192, 16);
        assert_memory_equal(tile + K_CUDA_TILE_Q6_K_D + 2 * (o % 16), block + 208, 2);
    } else if (m->format == K_Q4_K || m->format == K_Q5_K) {
        assert_memory_equal(head, block, 16);
    } else {
        for (uint32_t i = 0; i < 8; i++)
            assert_memory_equal(head + 2 * i, block + i * bytes, 2);
    }
}

static void test_k_cuda_tile_scales_and_mins_are_those_of_the_format(void **state)
{
    (void)state;
    uint8_t scales[12];
    fill(scales, sizeof scales, 9);
    for (uint32_t j = 0; j < 8; j++) {
        uint32_t scale, min;
        uint8_t want_scale, want_min;
        k_cuda_tile_scale_min(scales, j, &scale, &min);
        k_format_scale_min(scales, (int)j, &want_scale, &want_min);
        assert_int_equal(scale, want_scale);
        assert_int_equal(min, want_min);
    }
}

static void test_k_cuda_tile_scales_lie_by_output(void **state)
{
    (void)state;
    static struct sample m;
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        make(&m, formats[f], (uint32_t)f);
        for (uint32_t o = 0; o < OUTPUTS; o++)
            for (uint32_t b = 0; b < INPUTS / 256; b++)
                check_heads(&m, o, b);
    }
}

/* Operand R[j][a] of lane l by the header's words on loads, a byte per weight. */
static uint32_t operand(enum k_format format, const uint8_t *tile, uint32_t l, uint32_t j,
                        uint32_t a)
{
    uint32_t w[8][4], v[24];
    for (uint32_t c = 0; 512 * c < k_cuda_tile_head(format); c++)
        memcpy(w[c], tile + 512 * (size_t)c + 16 * (size_t)l, 16);
    if (format == K_Q8_0)
        return w[j][a];
    if (format == K_Q6_K) {
        memcpy(v, w, sizeof v);
        if (a < 3)
            return v[3 * j + a] & 0xfcfcfcfc;
        return (v[3 * j] & 0x03030303) << 6 | (v[3 * j + 1] & 0x03030303) << 4 |
               (v[3 * j + 2] & 0x03030303) << 2;
    }
    uint32_t x = w[j / 2][a] >> (j % 2 * 4) & 0x0f0f0f0f;
    if (format == K_Q5_K)
        x |= (w[4][a] >> j & 0x01010101) << 4;
    return x;
}

/* mma.sync's map: lane l's byte e of operand register a is row l / 4 + 8 (a & 1), k = 16 (a / 2) +
 * 4 (l % 4) + e. */
static void test_k_cuda_tile_operands_are_those_of_mma(void **state)
{
    (void)state;
    static struct sample m;
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        make(&m, formats[f], (uint32_t)f);
        for (uint32_t n = 0; n < 32 * 8 * 4 * 4; n++) {
            const uint32_t l = n / 128, j = n / 16 % 8, a = n / 4 % 4, e = n % 4;
            const uint32_t row = l / 4 + 8 * (a & 1), k = 16 * (a / 2) + 4 * (l % 4) + e;
            const uint32_t byte = operand(m.format, m.arranged, l, j, a) >> (8 * e) & 255;
            const int factor = m.format == K_Q6_K ? 4 : 1;
            const int want =
                factor * k_cuda_tile_file_weight(m.format, block_of(&m, row, 0), 32 * j + k);
            assert_int_equal((int8_t)byte, want);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_k_cuda_tile_bytes_are_those_of_the_file),
        cmocka_unit_test(test_k_cuda_tile_ragged_and_float_stay_in_file_order),
        cmocka_unit_test(test_k_cuda_tile_file_weights_are_those_dequantised),
        cmocka_unit_test(test_k_cuda_tile_weights_survive_arranging),
        cmocka_unit_test(test_k_cuda_tile_scales_and_mins_are_those_of_the_format),
        cmocka_unit_test(test_k_cuda_tile_scales_lie_by_output),
        cmocka_unit_test(test_k_cuda_tile_operands_are_those_of_mma),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

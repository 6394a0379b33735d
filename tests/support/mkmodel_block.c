#include "mkmodel_block.h"

#include <string.h>

#include "k_float.h"
#include "k_format.h"

static const struct {
    const char *name;
    enum k_format format;
} formats[] = {{"f32", K_F32},   {"f16", K_F16},   {"bf16", K_BF16}, {"q4_0", K_Q4_0},
               {"q8_0", K_Q8_0}, {"q4_k", K_Q4_K}, {"q5_k", K_Q5_K}, {"q6_k", K_Q6_K}};

const char *mkmodel_block_name(enum k_format format)
{
    for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++)
        if (formats[i].format == format)
            return formats[i].name;
    return "?";
}

bool mkmodel_block_format(const char *name, enum k_format *ret)
{
    for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++)
        if (strcmp(formats[i].name, name) == 0) {
            *ret = formats[i].format;
            return true;
        }
    return false;
}

/* ---- random blocks --------------------------------------------------------------------------- */

static void noise_fill(struct mkmodel_block_noise *n, void *to, size_t bytes)
{
    uint8_t *p = to;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        const uint64_t z = mkmodel_block_next(n);
        memcpy(p, &z, 8);
    }
    if (bytes > 0) {
        const uint64_t z = mkmodel_block_next(n);
        memcpy(p, &z, bytes);
    }
}

/* Uniform values of mean 0 and this deviation. */
static float noise_value(struct mkmodel_block_noise *n, float std)
{
    const double unit = (double)(mkmodel_block_next(n) >> 11) * 0x1p-53;
    return (float)((unit * 2.0 - 1.0) * 1.7320508075688772 * (double)std);
}

static void scales_write(const uint8_t s[8], uint8_t scales[12])
{
    for (int j = 0; j < 4; j++) {
        scales[j] = (uint8_t)(s[j] | (s[j + 4] >> 4) << 6);
        scales[j + 4] = (uint8_t)(s[j] | (s[j + 4] >> 4) << 6);
        scales[j + 8] = (uint8_t)((s[j + 4] & 15) | (s[j + 4] & 15) << 4);
    }
}

/* Eight scales of 32..63, each also the sub-block's min: with dmin = mean(q) * d the mean is 0. */
static void scales_random(struct mkmodel_block_noise *n, uint8_t scales[12])
{
    const uint64_t z = mkmodel_block_next(n);
    uint8_t s[8];
    for (int j = 0; j < 8; j++)
        s[j] = (uint8_t)(32 + ((z >> (8 * j)) & 31));
    scales_write(s, scales);
}

/* Deviations: q uniform over 0..15 has 4.61, over 0..31 9.23, -32..31 18.5, -128..127 73.9; the
 * scales of 32..63 have a root mean square of 48.4. */
static void random_q4_k(struct mkmodel_block_noise *n, float std, void *to)
{
    struct k_format_q4_k b;
    const float d = std / (4.61f * 48.4f);
    b.d = k_float_to_f16(d);
    b.dmin = k_float_to_f16(7.5f * d);
    scales_random(n, b.scales);
    noise_fill(n, b.q, sizeof(b.q));
    memcpy(to, &b, sizeof(b));
}

static void random_q5_k(struct mkmodel_block_noise *n, float std, void *to)
{
    struct k_format_q5_k b;
    const float d = std / (9.23f * 48.4f);
    b.d = k_float_to_f16(d);
    b.dmin = k_float_to_f16(15.5f * d);
    scales_random(n, b.scales);
    noise_fill(n, b.high, sizeof(b.high));
    noise_fill(n, b.q, sizeof(b.q));
    memcpy(to, &b, sizeof(b));
}

static void random_q6_k(struct mkmodel_block_noise *n, float std, void *to)
{
    struct k_format_q6_k b;
    noise_fill(n, b.low, sizeof(b.low));
    noise_fill(n, b.high, sizeof(b.high));
    noise_fill(n, b.scales, sizeof(b.scales));
    for (int j = 0; j < 16; j++) { /* 32..63 of either sign: the mean of q is -1/2 */
        const int s = 32 + (b.scales[j] & 31);
        b.scales[j] = (int8_t)(b.scales[j] < 0 ? -s : s);
    }
    b.d = k_float_to_f16(std / (18.5f * 48.4f));
    memcpy(to, &b, sizeof(b));
}

static void random_q8_0(struct mkmodel_block_noise *n, float std, void *to)
{
    struct k_format_q8_0 b;
    noise_fill(n, b.q, sizeof(b.q));
    b.d = k_float_to_f16(std / 73.9f);
    memcpy(to, &b, sizeof(b));
}

static void random_q4_0(struct mkmodel_block_noise *n, float std, void *to)
{
    struct k_format_q4_0 b;
    noise_fill(n, b.q, sizeof(b.q));
    b.d = k_float_to_f16(std / 4.61f * (mkmodel_block_next(n) & 1 ? 1.0f : -1.0f));
    memcpy(to, &b, sizeof(b));
}

static void value_write(enum k_format format, float x, void *to)
{
    const uint32_t bits = k_float_bits(x);
    if (format == K_F32) {
        memcpy(to, &bits, sizeof(bits));
    } else {
        const uint16_t half = format == K_BF16 ? (uint16_t)(bits >> 16) : k_float_to_f16(x);
        memcpy(to, &half, sizeof(half));
    }
}

void mkmodel_block_random(enum k_format format, uint64_t key, float std, void *to)
{
    struct mkmodel_block_noise n = {key};
    n.state = mkmodel_block_next(&n);
    switch (format) {
    case K_F32:
    case K_F16:
    case K_BF16:
        value_write(format, std > 0.0f ? noise_value(&n, std) : 1.0f, to);
        break;
    case K_Q4_0:
        random_q4_0(&n, std, to);
        break;
    case K_Q8_0:
        random_q8_0(&n, std, to);
        break;
    case K_Q4_K:
        random_q4_k(&n, std, to);
        break;
    case K_Q5_K:
        random_q5_k(&n, std, to);
        break;
    case K_Q6_K:
        random_q6_k(&n, std, to);
        break;
    }
}

void mkmodel_block_halves(enum k_format format, uint64_t key, float std, uint64_t first, uint64_t n,
                          void *to)
{
    enum {
        VALUES = 4096
    };
    uint16_t values[VALUES];
    uint8_t *out = to;
    for (int i = 0; i < VALUES; i++) { /* the middles of equal steps */
        const double unit = (i + 0.5) / VALUES;
        value_write(format, (float)((unit * 2 - 1) * 1.7320508075688772 * (double)std), &values[i]);
    }
    for (uint64_t i = first; i < first + n;) {
        struct mkmodel_block_noise noise = {key ^ (i / 4) << 8};
        noise.state = mkmodel_block_next(&noise);
        uint64_t draw = mkmodel_block_next(&noise) >> (16 * (i % 4));
        do {
            memcpy(out, &values[draw % VALUES], 2);
            draw >>= 16;
            out += 2;
            i++;
        } while (i % 4 != 0 && i < first + n);
    }
}

/* ---- marks ----------------------------------------------------------------------------------- */

static const uint8_t ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};

/* All scales and mins 1 and dmin = d: the value is d * (q - 1). */
static void marks_q4_k(float size, const int8_t *signs, void *to)
{
    struct k_format_q4_k b = {.d = k_float_to_f16(size), .dmin = k_float_to_f16(size)};
    scales_write(ones, b.scales);
    for (int i = 0; i < K_BLOCK256; i += 64)
        for (int k = 0; k < 32; k++)
            b.q[i / 2 + k] = (uint8_t)((signs[i + k] + 1) | (signs[i + k + 32] + 1) << 4);
    memcpy(to, &b, sizeof(b));
}

static void marks_q5_k(float size, const int8_t *signs, void *to)
{
    struct k_format_q5_k b = {.d = k_float_to_f16(size), .dmin = k_float_to_f16(size)};
    scales_write(ones, b.scales);
    for (int i = 0; i < K_BLOCK256; i += 64)
        for (int k = 0; k < 32; k++)
            b.q[i / 2 + k] = (uint8_t)((signs[i + k] + 1) | (signs[i + k + 32] + 1) << 4);
    memcpy(to, &b, sizeof(b));
}

/* The value is d * (q - 32); q has four low bits in `low`, two in `high`. */
static void marks_q6_k(float size, const int8_t *signs, void *to)
{
    struct k_format_q6_k b = {.d = k_float_to_f16(size)};
    memset(b.scales, 1, sizeof(b.scales));
    for (int i = 0; i < K_BLOCK256; i++) {
        const int half = i / 128, in = i % 128, q = signs[i] + 32;
        b.low[half * 64 + in % 64] |= (uint8_t)((q & 15) << (in / 64 * 4));
        b.high[half * 32 + in % 32] |= (uint8_t)((q >> 4) << (in / 32 * 2));
    }
    memcpy(to, &b, sizeof(b));
}

static void marks_q8_0(float size, const int8_t *signs, void *to)
{
    struct k_format_q8_0 b = {.d = k_float_to_f16(size)};
    memcpy(b.q, signs, sizeof(b.q));
    memcpy(to, &b, sizeof(b));
}

static void marks_q4_0(float size, const int8_t *signs, void *to)
{
    struct k_format_q4_0 b = {.d = k_float_to_f16(size)};
    for (int i = 0; i < 16; i++)
        b.q[i] = (uint8_t)((signs[i] + 8) | (signs[i + 16] + 8) << 4);
    memcpy(to, &b, sizeof(b));
}

void mkmodel_block_marks(enum k_format format, float size, const int8_t *signs, void *to)
{
    switch (format) {
    case K_F32:
    case K_F16:
    case K_BF16:
        value_write(format, (float)signs[0] * size, to);
        break;
    case K_Q4_0:
        marks_q4_0(size, signs, to);
        break;
    case K_Q8_0:
        marks_q8_0(size, signs, to);
        break;
    case K_Q4_K:
        marks_q4_k(size, signs, to);
        break;
    case K_Q5_K:
        marks_q5_k(size, signs, to);
        break;
    case K_Q6_K:
        marks_q6_k(size, signs, to);
        break;
    }
}

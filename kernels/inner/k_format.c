#include "k_format.h"

#include <string.h>

#include "k_float.h"

struct row {
    enum k_format format;
    enum k_form form;
    uint32_t block, bytes;
};

static const struct row rows[] = {
    {K_F32, K_FORM_F32, 1, 4},
    {K_F16, K_FORM_F32, 1, 2},
    {K_BF16, K_FORM_F32, 1, 2},
    {K_Q4_0, K_FORM_Q32, 32, sizeof(struct k_format_q4_0)},
    {K_Q8_0, K_FORM_Q32, 32, sizeof(struct k_format_q8_0)},
    {K_Q4_K, K_FORM_Q256, 256, sizeof(struct k_format_q4_k)},
    {K_Q5_K, K_FORM_Q256, 256, sizeof(struct k_format_q5_k)},
    {K_Q6_K, K_FORM_Q256, 256, sizeof(struct k_format_q6_k)},
};
_Static_assert(sizeof(struct k_format_q4_0) == 18 && sizeof(struct k_format_q8_0) == 34,
               "32-blocks");
_Static_assert(sizeof(struct k_format_q4_k) == 144 && sizeof(struct k_format_q5_k) == 176 &&
                   sizeof(struct k_format_q6_k) == 210,
               "256-blocks");

static const struct row *find(uint32_t format)
{
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if ((uint32_t)rows[i].format == format)
            return &rows[i];
    return NULL;
}

enum k_form k_format_form(enum k_format format)
{
    return find(format)->form;
}

uint32_t k_format_block_elements(enum k_format format)
{
    return find(format)->block;
}

uint32_t k_format_block_bytes(enum k_format format)
{
    return find(format)->bytes;
}

uint64_t k_format_bytes(enum k_format format, uint64_t n_out, uint64_t n_in)
{
    const struct row *r = find(format);
    return n_out * (n_in / r->block) * r->bytes;
}

static uint64_t round64(uint64_t n)
{
    return (n + 63) & ~UINT64_C(63);
}

uint64_t k_format_act_bytes(enum k_form form, uint32_t n)
{
    if (form == K_FORM_F32)
        return round64((uint64_t)n * 4);
    const uint64_t blocks = form == K_FORM_Q32 ? n / K_BLOCK32 : n / K_BLOCK256;
    const uint64_t sums = round64(n / 32 * 2) + (form == K_FORM_Q256 ? round64(n / 16 * 2) : 0);
    return round64(blocks * 4) + sums + round64(n);
}

struct k_act_row k_format_act_row(enum k_form form, void *row, uint32_t n)
{
    const uint64_t blocks = form == K_FORM_Q32 ? n / K_BLOCK32 : n / K_BLOCK256;
    uint8_t *p = row;
    struct k_act_row r = {.dx = (float *)(void *)p};
    p += round64(blocks * 4);
    r.sum = (int16_t *)(void *)p;
    p += round64(n / 32 * 2);
    if (form == K_FORM_Q256) {
        r.sum16 = (int16_t *)(void *)p;
        p += round64(n / 16 * 2);
    }
    r.q = (int8_t *)p;
    return r;
}

static void unpack_q4_k_like(const uint8_t *q, const uint8_t *high, int8_t *ret)
{
    for (int j = 0; j < 8; j++) {
        const uint8_t *bytes = q + 32 * (j / 2);
        for (int i = 0; i < 32; i++) {
            int v = j % 2 == 0 ? bytes[i] & 15 : bytes[i] >> 4;
            if (high != NULL)
                v |= ((high[i] >> j) & 1) << 4;
            ret[32 * j + i] = (int8_t)v;
        }
    }
}

static void unpack_q6_k(const struct k_format_q6_k *b, int8_t *ret)
{
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i++) {
            const uint8_t *low = b->low + 64 * half;
            const uint8_t high = b->high[32 * half + i];
            int8_t *out = ret + 128 * half;
            out[i] = (int8_t)(((low[i] & 15) | ((high & 3) << 4)) - 32);
            out[i + 32] = (int8_t)(((low[i + 32] & 15) | (((high >> 2) & 3) << 4)) - 32);
            out[i + 64] = (int8_t)(((low[i] >> 4) | (((high >> 4) & 3) << 4)) - 32);
            out[i + 96] = (int8_t)(((low[i + 32] >> 4) | ((high >> 6) << 4)) - 32);
        }
}

/* Integer weights of one block, in element order: Q4_K 0..15, Q5_K 0..31, Q6_K -32..31, Q4_0 -8..7,
 * Q8_0 as stored. */
static void unpack(enum k_format format, const void *block, int8_t *ret)
{
    switch (format) {
    case K_Q8_0:
        memcpy(ret, ((const struct k_format_q8_0 *)block)->q, 32);
        break;
    case K_Q4_0:
        for (int i = 0; i < 16; i++) {
            const uint8_t v = ((const struct k_format_q4_0 *)block)->q[i];
            ret[i] = (int8_t)((v & 15) - 8);
            ret[i + 16] = (int8_t)((v >> 4) - 8);
        }
        break;
    case K_Q4_K:
        unpack_q4_k_like(((const struct k_format_q4_k *)block)->q, NULL, ret);
        break;
    case K_Q5_K:
        unpack_q4_k_like(((const struct k_format_q5_k *)block)->q,
                         ((const struct k_format_q5_k *)block)->high, ret);
        break;
    case K_Q6_K:
        unpack_q6_k(block, ret);
        break;
    case K_F32:
    case K_F16:
    case K_BF16:
        break;
    }
}

static void dequantise_mins(const int8_t *q, uint16_t d16, uint16_t dmin16, const uint8_t *scales,
                            float *out)
{
    const float d = k_float_of_f16(d16), dmin = k_float_of_f16(dmin16);
    for (int j = 0; j < 8; j++) {
        uint8_t s, m;
        k_format_scale_min(scales, j, &s, &m);
        const float ds = d * (float)s, dm = dmin * (float)m;
        for (int i = 0; i < 32; i++) {
            const float product = ds * (float)q[32 * j + i];
            out[32 * j + i] = product - dm;
        }
    }
}

static void dequantise_block(enum k_format format, const void *block, float *out)
{
    int8_t q[256];
    unpack(format, block, q);
    switch (format) {
    case K_Q8_0:
    case K_Q4_0: { /* d is the first field of both */
        uint16_t d16;
        memcpy(&d16, block, sizeof d16);
        const float d = k_float_of_f16(d16);
        for (int i = 0; i < 32; i++)
            out[i] = d * (float)q[i];
        break;
    }
    case K_Q4_K: {
        const struct k_format_q4_k *b = block;
        dequantise_mins(q, b->d, b->dmin, b->scales, out);
        break;
    }
    case K_Q5_K: {
        const struct k_format_q5_k *b = block;
        dequantise_mins(q, b->d, b->dmin, b->scales, out);
        break;
    }
    case K_Q6_K: {
        const struct k_format_q6_k *b = block;
        const float d = k_float_of_f16(b->d);
        for (int i = 0; i < 256; i++) {
            const float ds = d * (float)b->scales[i / 16];
            out[i] = ds * (float)q[i];
        }
        break;
    }
    case K_F32:
    case K_F16:
    case K_BF16:
        break;
    }
}

void k_dequantise(enum k_format format, const void *blocks, float *out, size_t n)
{
    const uint8_t *p = blocks;
    uint16_t h;
    switch (format) {
    case K_F32:
        memcpy(out, blocks, n * sizeof(float));
        return;
    case K_F16:
        for (size_t i = 0; i < n; i++) {
            memcpy(&h, p + 2 * i, 2);
            out[i] = k_float_of_f16(h);
        }
        return;
    case K_BF16:
        for (size_t i = 0; i < n; i++) {
            memcpy(&h, p + 2 * i, 2);
            out[i] = k_float_of_bf16(h);
        }
        return;
    default:
        break;
    }
    const struct row *r = find(format);
    for (size_t b = 0; b < n / r->block; b++)
        dequantise_block(format, p + b * r->bytes, out + b * r->block);
}

static bool f16_finite(uint16_t h)
{
    return (h & 0x7c00u) != 0x7c00u;
}

static bool block_valid(enum k_format format, const uint8_t *p)
{
    uint16_t h[2];
    uint32_t u;
    switch (format) {
    case K_F32:
        memcpy(&u, p, 4);
        return (u & 0x7fffffffu) < 0x7f800000u;
    case K_BF16:
        memcpy(h, p, 2);
        return (h[0] & 0x7f80u) != 0x7f80u;
    case K_F16:
    case K_Q4_0:
    case K_Q8_0:
        memcpy(h, p, 2);
        return f16_finite(h[0]);
    case K_Q4_K:
    case K_Q5_K:
        memcpy(h, p, 4);
        return f16_finite(h[0]) && f16_finite(h[1]);
    case K_Q6_K:
        memcpy(h, p + offsetof(struct k_format_q6_k, d), 2);
        return f16_finite(h[0]);
    }
    return false;
}

int64_t k_find_invalid(enum k_format format, const void *blocks, uint64_t n)
{
    const struct row *r = find(format);
    const uint8_t *p = blocks;
    for (uint64_t b = 0; b < n / r->block; b++)
        if (!block_valid(format, p + b * r->bytes))
            return (int64_t)b;
    return -1;
}

static float block_mins(const int8_t *w, uint16_t d16, uint16_t dmin16, const uint8_t *scales,
                        const int8_t *q, const int16_t *sums)
{
    int32_t sum = 0, mins = 0;
    for (int j = 0; j < 8; j++) {
        uint8_t s, m;
        k_format_scale_min(scales, j, &s, &m);
        int32_t dot = 0;
        for (int i = 32 * j; i < 32 * j + 32; i++)
            dot += w[i] * q[i];
        sum += s * dot;
        mins += m * sums[j];
    }
    const float minus = k_float_of_f16(dmin16) * (float)mins;
    return k_float_fma(k_float_of_f16(d16), (float)sum, -minus);
}

float k_format_block(enum k_format format, const void *block, const int8_t *q, const int16_t *sums)
{
    int8_t w[256];
    unpack(format, block, w);
    int32_t sum = 0;
    uint16_t d16;
    switch (format) {
    case K_Q8_0:
    case K_Q4_0: {
        for (int i = 0; i < 32; i++)
            sum += w[i] * q[i];
        memcpy(&d16, block, sizeof d16);
        return k_float_of_f16(d16) * (float)sum;
    }
    case K_Q4_K: {
        const struct k_format_q4_k *b = block;
        return block_mins(w, b->d, b->dmin, b->scales, q, sums);
    }
    case K_Q5_K: {
        const struct k_format_q5_k *b = block;
        return block_mins(w, b->d, b->dmin, b->scales, q, sums);
    }
    case K_Q6_K: {
        const struct k_format_q6_k *b = block;
        for (int j = 0; j < 16; j++) {
            int32_t dot = 0;
            for (int i = 16 * j; i < 16 * j + 16; i++)
                dot += w[i] * q[i];
            sum += b->scales[j] * dot;
        }
        return k_float_of_f16(b->d) * (float)sum;
    }
    case K_F32:
    case K_F16:
    case K_BF16:
        break;
    }
    return 0.0f;
}

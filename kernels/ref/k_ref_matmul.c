/* Quantiser, products and norm of the oracle (A4 to A10). */
#include <string.h>

#include "k_float.h"
#include "k_format.h"
#include "k_ref.h"

/* Quantises `n` values; returns the scale. */
static float quantise_block(const float *x, uint32_t n, int8_t *q, bool *fault)
{
    uint32_t m = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t a = k_float_bits(x[i]) & 0x7fffffffu;
        m = a > m ? a : m;
    }
    if (m >= 0x7f800000u) {
        *fault = true;
        m = 0;
    }
    if (m < 0x0d800000u) { /* below 2^-100 */
        memset(q, 0, n);
        return 0.0f;
    }
    const float largest = k_float_of_bits(m);
    const float inv = 127.0f / largest;
    for (uint32_t i = 0; i < n; i++)
        q[i] = (int8_t)k_float_rint(x[i] * inv);
    return largest / 127.0f;
}

static bool quantise(enum k_form form, const float *x, uint32_t n, void *ret)
{
    const uint32_t block = form == K_FORM_Q32 ? K_BLOCK32 : K_BLOCK256;
    const struct k_act_row row = k_format_act_row(form, ret, n);
    bool fault = false;
    for (uint32_t b = 0; b < n / block; b++)
        row.dx[b] = quantise_block(x + b * block, block, row.q + b * block, &fault);
    for (uint32_t j = 0; j < n / 32; j++) {
        int32_t sum = 0;
        for (uint32_t i = 32 * j; i < 32 * j + 32; i++)
            sum += row.q[i];
        row.sum[j] = (int16_t)sum;
    }
    for (uint32_t j = 0; form == K_FORM_Q256 && j < n / 16; j++) {
        int32_t sum = 0;
        for (uint32_t i = 16 * j; i < 16 * j + 16; i++)
            sum += row.q[i];
        row.sum16[j] = (int16_t)sum;
    }
    return fault;
}

bool k_ref_quantise32(const float *x, uint32_t n, void *ret)
{
    return quantise(K_FORM_Q32, x, n, ret);
}

bool k_ref_quantise256(const float *x, uint32_t n, void *ret)
{
    return quantise(K_FORM_Q256, x, n, ret);
}

static float dot_float(enum k_format format, const void *weights, const float *x, uint32_t n)
{
    float a[32] = {0};
    const uint16_t *half = weights;
    for (uint32_t i = 0; i < n; i++) {
        float w;
        if (format == K_F32)
            w = ((const float *)weights)[i];
        else if (format == K_F16)
            w = k_float_of_f16(half[i]);
        else
            w = k_float_of_bf16(half[i]);
        a[i % 32] = k_float_fma(w, x[i], a[i % 32]);
    }
    return k_float_tree32(a);
}

float k_ref_dot(enum k_format format, const void *weights, const void *act, uint32_t n)
{
    const enum k_form form = k_format_form(format);
    if (form == K_FORM_F32)
        return dot_float(format, weights, act, n);
    const uint32_t block = k_format_block_elements(format), bytes = k_format_block_bytes(format);
    const struct k_act_row x = k_format_act_row(form, (void *)(uintptr_t)act, n);
    const uint8_t *w = weights;
    float acc = 0.0f;
    for (uint32_t b = 0; b < n / block; b++)
        acc = k_float_fma(x.dx[b],
                          k_format_block(format, w + (size_t)b * bytes, x.q + b * block,
                                         x.sum + b * (block / 32)),
                          acc);
    return acc;
}

void k_ref_norm(const float *x, const float *weight, float *y, uint32_t n, float eps)
{
    float a[32] = {0};
    for (uint32_t i = 0; i < n; i++)
        a[i % 32] = k_float_fma(x[i], x[i], a[i % 32]);
    const float mean = k_float_tree32(a) / (float)n;
    const float r = 1.0f / __builtin_sqrtf(mean + eps);
    for (uint32_t i = 0; i < n; i++) {
        const float scaled = x[i] * r;
        y[i] = scaled * weight[i];
    }
}

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bits.h"
#include "k_float.h"
#include "k_format.h"
#include "k_host.h"
#include "k_ref.h"

enum {
    GUARD = 64,
    GUARD_BYTE = 0xa5
};

uint64_t bits_next(struct bits_random *r)
{
    r->state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t z = r->state;
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

uint32_t bits_below(struct bits_random *r, uint32_t n)
{
    return (uint32_t)((bits_next(r) >> 32) * n >> 32);
}

uint32_t bits_between(struct bits_random *r, uint32_t a, uint32_t b)
{
    return a + bits_below(r, b - a + 1);
}

static float uniform(struct bits_random *r)
{
    return (float)((double)(bits_next(r) >> 11) * 0x1p-52 - 1.0);
}

/* 2^e with e in a..b, either sign. */
static float power(struct bits_random *r, int a, int b)
{
    const int e = a + (int)bits_below(r, (uint32_t)(b - a + 1));
    const float m = 1.0f + (float)bits_below(r, 1u << 20) * 0x1p-20f;
    return (bits_next(r) & 1 ? -m : m) * k_float_of_bits((uint32_t)(e + 127) << 23);
}

void bits_fill(struct bits_random *r, enum bits_kind kind, float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        switch (kind) {
        case BITS_ZERO:
            x[i] = bits_below(r, 8) == 0 ? -0.0f : 0.0f;
            break;
        case BITS_SUBNORMAL:
            x[i] = k_float_of_bits((uint32_t)bits_next(r) & 0x807fffffu);
            break;
        case BITS_SPIKES:
            x[i] = bits_below(r, 50) == 0 ? power(r, 10, 20) : uniform(r);
            break;
        case BITS_WIDE:
            x[i] = power(r, -120, i % 256 < 128 ? 80 : -90);
            break;
        case BITS_NORMAL:
        case BITS_KINDS:
            x[i] = uniform(r) + uniform(r) + uniform(r);
            break;
        }
    }
}

static uint16_t scale16(struct bits_random *r)
{
    switch (bits_below(r, 8)) {
    case 0:
        return 0;
    case 1:
        return (uint16_t)(bits_next(r) & 0x83ff); /* subnormal */
    case 2:
        return (uint16_t)((bits_next(r) & 0x83ff) | 0x7800); /* huge */
    default:
        return k_float_to_f16(uniform(r) * 0.02f);
    }
}

void bits_blocks(struct bits_random *r, enum k_format format, void *blocks, size_t n_blocks)
{
    uint8_t *p = blocks;
    const uint32_t bytes = k_format_block_bytes(format);
    for (size_t b = 0; b < n_blocks; b++, p += bytes) {
        if (format == K_F32 || format == K_F16 || format == K_BF16) {
            const float w = uniform(r) * (bits_below(r, 20) == 0 ? 1000.0f : 0.1f);
            const uint16_t h =
                format == K_F16 ? k_float_to_f16(w) : (uint16_t)(k_float_bits(w) >> 16);
            memcpy(p, format == K_F32 ? (const void *)&w : (const void *)&h, bytes);
            continue;
        }
        const uint32_t edge = bits_below(r, 6);
        for (uint32_t i = 0; i < bytes; i++)
            p[i] = edge == 0 ? 0xff : edge == 1 ? 0x80 : edge == 2 ? 0 : (uint8_t)bits_next(r);
        uint16_t d[2] = {scale16(r), scale16(r)};
        if (format == K_Q6_K)
            memcpy(p + offsetof(struct k_format_q6_k, d), d, 2);
        else
            memcpy(p, d, format == K_Q4_K || format == K_Q5_K ? 4 : 2);
    }
}

void *bits_host(struct k_span span)
{
    return k_host_at(span);
}

struct k_span bits_span(struct bits_side *side, const void *bytes, size_t n)
{
    struct k_span span = {0};
    struct err e = {0};
    if (side->ops->buffer_new(side->device, n + 2 * GUARD, &span.buffer, &e) != ERR_OK) {
        printf("%s\n", e.text);
        exit(1);
    }
    span.offset = GUARD;
    uint8_t *host = bits_host(span);
    if (bytes != NULL && n > 0)
        memcpy(host, bytes, n);
    memset(host - GUARD, GUARD_BYTE, GUARD);
    memset(host + n, GUARD_BYTE, GUARD);
    return span;
}

bool bits_drop(struct bits_side *side, struct k_span span, size_t n)
{
    bool ok = true;
    if (span.buffer != NULL) {
        const uint8_t *first = bits_host(span);
        for (int i = 0; i < GUARD; i++)
            ok &= (first - GUARD)[i] == GUARD_BYTE && first[n + (size_t)i] == GUARD_BYTE;
        if (!ok)
            printf("bytes around a buffer of %zu bytes were overwritten\n", n);
        side->ops->buffer_free(span.buffer);
    }
    return ok;
}

bool bits_equal(struct bits_run *run, const char *what, const float *a, const float *b, size_t n)
{
    run->compared += n;
    if (memcmp(a, b, n * sizeof(float)) == 0)
        return true;
    for (size_t i = 0; i < n; i++)
        if (k_float_bits(a[i]) != k_float_bits(b[i])) {
            printf("%s: value %zu of %zu is %a (%08x), the reference gives %a (%08x)\n", what, i, n,
                   (double)b[i], k_float_bits(b[i]), (double)a[i], k_float_bits(a[i]));
            break;
        }
    return false;
}

bool bits_rows_equal(struct bits_run *run, const char *what, const float *a, const float *b,
                     size_t width, uint32_t n_rows, uint32_t without)
{
    for (uint32_t row = 0; row < n_rows; row++)
        if (row != without && !bits_equal(run, what, a + row * width, b + row * width, width)) {
            printf("%s: in row %u of %u\n", what, row, n_rows);
            return false;
        }
    return true;
}

bool bits_only_fault(const char *what, const uint32_t *faults, uint32_t n_rows, uint32_t bad)
{
    for (uint32_t i = 0; i < n_rows; i++)
        if ((faults[i] != 0) != (i == bad)) {
            printf("%s: row %u of %u has fault %u, the bad row is %u\n", what, i, n_rows, faults[i],
                   bad);
            return false;
        }
    return true;
}

float bits_not_finite(struct bits_random *r)
{
    static const uint32_t values[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345, 0x7f800001};
    return k_float_of_bits(values[bits_below(r, 5)]);
}

bool bits_mutation_is_seen(struct bits_random *r)
{
    enum {
        N = 2048,
        ROWS = 64
    };
    static float x[N];
    static uint8_t weights[ROWS][N / 256 * 144], act[N * 2];
    bits_fill(r, BITS_NORMAL, x, N);
    bits_blocks(r, K_Q4_K, weights, ROWS * N / 256);
    (void)k_ref_quantise256(x, N, act);
    const struct k_act_row row = k_format_act_row(K_FORM_Q256, act, N);
    uint32_t differ = 0;
    for (int o = 0; o < ROWS; o++) {
        float acc[2] = {0};
        for (uint32_t b = 0; b < N / 256; b++)
            acc[b % 2] = k_float_fma(
                row.dx[b],
                k_format_block(K_Q4_K, weights[o] + 144 * b, row.q + 256 * b, row.sum + 8 * b),
                acc[b % 2]);
        differ +=
            k_float_bits(acc[0] + acc[1]) != k_float_bits(k_ref_dot(K_Q4_K, weights[o], act, N));
    }
    return differ > ROWS / 10;
}

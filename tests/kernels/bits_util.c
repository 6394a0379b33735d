#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bits.h"
#include "k_float.h"
#include "k_format.h"
#include "k_ref.h"

enum {
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

static struct bits_mirror *mirror_of(struct bits_side *side, const struct k_buffer *buffer)
{
    for (uint32_t i = 0; i < side->n_mirrors; i++)
        if (side->mirror[i].buffer == buffer)
            return &side->mirror[i];
    printf("a buffer of another side\n");
    abort();
}

static void *must(size_t n)
{
    void *p = calloc(1, n);
    if (p == NULL)
        abort();
    return p;
}

const void *bits_host(struct bits_side *side, struct k_span span)
{
    uint8_t *host = side->ops->buffer_host(span.buffer);
    if (host != NULL)
        return host + span.offset;
    struct bits_mirror *m = mirror_of(side, span.buffer);
    if (m->copy == NULL) {
        m->copy = must(m->bytes);
        side->ops->download(side->stream, m->copy, (struct k_span){span.buffer, 0}, m->bytes);
        if (side->ops->wait(side->stream) != ERR_OK) {
            struct err why = {0};
            (void)side->ops->lost(side->device, &why);
            printf("the device failed: %s\n", why.text);
            exit(1);
        }
    }
    return m->copy + span.offset;
}

struct k_span bits_span_of(struct bits_side *side, const void *bytes, size_t n, size_t total)
{
    struct k_span span = {0};
    struct err e = {0};
    const size_t all = total + 2 * BITS_GUARD;
    if (side->ops->buffer_new(side->device, all, &span.buffer, &e) != ERR_OK) {
        printf("%s\n", e.text);
        exit(1);
    }
    if (side->n_mirrors == BITS_MIRRORS)
        abort();
    side->mirror[side->n_mirrors++] = (struct bits_mirror){.buffer = span.buffer, .bytes = all};
    uint8_t *image = must(all);
    memset(image, GUARD_BYTE, BITS_GUARD);
    if (bytes != NULL && n > 0)
        memcpy(image + BITS_GUARD, bytes, n);
    memset(image + BITS_GUARD + total, GUARD_BYTE, BITS_GUARD);
    side->ops->upload(side->stream, span, image, all);
    free(image);
    span.offset = BITS_GUARD;
    return span;
}

struct k_span bits_span(struct bits_side *side, const void *bytes, size_t n)
{
    return bits_span_of(side, bytes, n, n);
}

bool bits_drop(struct bits_side *side, struct k_span span, size_t n)
{
    bool ok = true;
    if (span.buffer == NULL)
        return true;
    const uint8_t *first = bits_host(side, span);
    for (int i = 0; i < BITS_GUARD; i++)
        ok &= (first - BITS_GUARD)[i] == GUARD_BYTE && first[n + (size_t)i] == GUARD_BYTE;
    if (!ok)
        printf("bytes around a buffer of %zu bytes were overwritten\n", n);
    struct bits_mirror *m = mirror_of(side, span.buffer);
    free(m->copy);
    *m = side->mirror[--side->n_mirrors];
    side->ops->buffer_free(span.buffer);
    return ok;
}

bool bits_done(const struct bits_side *side, const char *what, enum err_code code)
{
    if (code != ERR_OK)
        printf("%s of %s: %s\n", what, side->ops->name, err_code_name(code));
    return code == ERR_OK;
}

bool bits_arrange(struct bits_side *side, struct k_span from, struct k_span to,
                  enum k_format format, uint32_t n_out, uint32_t n_in)
{
    return bits_done(
        side, "arrange",
        side->ops->arrange(&(struct k_arrange){from, to, format, n_out, n_in}, side->stream));
}

struct k_span bits_weights(struct bits_side *side, enum k_format format, uint32_t n_out,
                           uint32_t n_in, const void *blocks)
{
    const uint64_t bytes = k_format_bytes(format, n_out, n_in);
    const struct k_span file = bits_span(side, blocks, bytes);
    if (side->ops->arrange == NULL)
        return file;
    const struct k_span span = bits_span(side, NULL, bytes);
    if (!bits_arrange(side, file, span, format, n_out, n_in) || !bits_drop(side, file, bytes))
        exit(1);
    return span;
}

bool bits_begin(struct bits_side *side)
{
    return !side->record ||
           bits_done(side, "capture_begin", side->ops->capture_begin(side->stream));
}

bool bits_end(struct bits_side *side)
{
    bool ok = true;
    struct k_graph *graph = NULL;
    if (side->record)
        ok = bits_done(side, "capture_end", side->ops->capture_end(side->stream, &graph)) &&
             bits_done(side, "replay", side->ops->replay(graph, side->stream));
    ok &= bits_done(side, "wait", side->ops->wait(side->stream));
    if (graph != NULL)
        side->ops->graph_free(graph);
    return ok;
}

uint32_t bits_some_rows(struct bits_run *run, uint32_t n)
{
    return run->device && bits_below(&run->random, 16) == 0 ? bits_between(&run->random, 65, 600)
                                                            : bits_between(&run->random, 1, n);
}

uint32_t bits_max_rows(struct bits_run *run, uint32_t n)
{
    if (!run->device || bits_below(&run->random, 3) == 0)
        return n;
    uint32_t room = 1;
    while (room < n)
        room *= 2;
    return bits_below(&run->random, 4) == 0 ? 2 * room : room;
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

/* KV cache and attention of the oracle (A17 to A19).
 *
 * A page's part of one layer, for H kv heads of D dimensions and 64 positions:
 *   f16:   K f16 [H][D][64] | V f16 [H][64][D]
 *   q8_0:  K int8 [H][D][64] | V int8 [H][64][D] | K scale f16 [H][D/32][64] |
 *          V scale f16 [H][64][D/32] */
#include <string.h>

#include "k_float.h"
#include "k_format.h"
#include "k_ref.h"

uint64_t k_kv_layer_bytes(enum k_kv_type type, uint32_t n_head_kv, uint32_t head_dim)
{
    const uint64_t values = (uint64_t)n_head_kv * head_dim * K_PAGE;
    return type == K_KV_F16 ? 4 * values : 2 * values + 4 * (values / 32);
}

/* 32 values to int8 with an f16 scale (A17). True: the scale overflowed or a value was not
 * finite. */
static bool quantise_kv(const float *x, int8_t *q, uint16_t *ret_scale)
{
    uint32_t m = 0;
    for (int i = 0; i < 32; i++) {
        const uint32_t a = k_float_bits(x[i]) & 0x7fffffffu;
        m = a > m ? a : m;
    }
    const bool fault = m >= 0x7f800000u;
    *ret_scale = fault ? 0 : k_float_to_f16(k_float_of_bits(m) / 127.0f);
    if (fault || *ret_scale < 0x0400u) { /* below 2^-14 */
        memset(q, 0, 32);
        *ret_scale = 0;
        return fault;
    }
    const float inv = 1.0f / k_float_of_f16(*ret_scale);
    if (*ret_scale >= 0x7c00u) {
        memset(q, 0, 32);
        *ret_scale = 0;
        return true;
    }
    for (int i = 0; i < 32; i++) {
        const int32_t v = k_float_rint(x[i] * inv);
        q[i] = (int8_t)(v > 127 ? 127 : v < -127 ? -127 : v);
    }
    return false;
}

static bool write_f16(void *layer, uint32_t n_head_kv, uint32_t dim, uint32_t slot, const float *k,
                      const float *v)
{
    uint16_t *keys = layer, *values = keys + (size_t)n_head_kv * dim * K_PAGE;
    bool fault = false;
    for (uint32_t h = 0; h < n_head_kv; h++)
        for (uint32_t d = 0; d < dim; d++) {
            const uint16_t k16 = k_float_to_f16(k[h * dim + d]);
            const uint16_t v16 = k_float_to_f16(v[h * dim + d]);
            fault |= (k16 & 0x7c00u) == 0x7c00u || (v16 & 0x7c00u) == 0x7c00u;
            keys[((size_t)h * dim + d) * K_PAGE + slot] = k16;
            values[((size_t)h * K_PAGE + slot) * dim + d] = v16;
        }
    return fault;
}

bool k_ref_kv_write(void *layer, enum k_kv_type type, uint32_t n_head_kv, uint32_t dim,
                    uint32_t slot, const float *k, const float *v)
{
    if (type == K_KV_F16)
        return write_f16(layer, n_head_kv, dim, slot, k, v);
    const size_t n = (size_t)n_head_kv * dim * K_PAGE;
    int8_t *keys = layer, *values = keys + n;
    uint16_t *key_scales = (uint16_t *)(values + n), *value_scales = key_scales + n / 32;
    bool fault = false;
    for (uint32_t h = 0; h < n_head_kv; h++)
        for (uint32_t b = 0; b < dim / 32; b++) {
            int8_t q[32];
            uint16_t scale;
            fault |= quantise_kv(k + h * dim + 32 * b, q, &scale);
            for (uint32_t i = 0; i < 32; i++)
                keys[((size_t)h * dim + 32 * b + i) * K_PAGE + slot] = q[i];
            key_scales[((size_t)h * (dim / 32) + b) * K_PAGE + slot] = scale;
            fault |= quantise_kv(v + h * dim + 32 * b, q, &scale);
            memcpy(values + ((size_t)h * K_PAGE + slot) * dim + 32 * b, q, 32);
            value_scales[((size_t)h * K_PAGE + slot) * (dim / 32) + b] = scale;
        }
    return fault;
}

/* What one chunk or group of chunks gives: running maximum, sum of weights, weighted values. */
struct part {
    float m, l;
    float *o; /* [dim] */
    bool empty;
};

/* One step of the fold of A19; `next` is not empty. */
static void merge(struct part *into, const struct part *next, uint32_t dim)
{
    if (into->empty) {
        into->m = next->m;
        into->l = next->l;
        memcpy(into->o, next->o, dim * sizeof(float));
        into->empty = false;
        return;
    }
    const float m = into->m > next->m ? into->m : next->m;
    const float a = k_float_exp32(into->m - m), b = k_float_exp32(next->m - m);
    const float lb = next->l * b;
    into->l = k_float_fma(into->l, a, lb);
    for (uint32_t d = 0; d < dim; d++) {
        const float ob = next->o[d] * b;
        into->o[d] = k_float_fma(into->o[d], a, ob);
    }
    into->m = m;
}

static void scores_f16(const float *q, const uint16_t *keys, uint32_t n, uint32_t dim, float scale,
                       float *s)
{
    for (uint32_t j = 0; j < n; j++) {
        float acc = 0.0f;
        for (uint32_t d = 0; d < dim; d++)
            acc = k_float_fma(q[d], k_float_of_f16(keys[(size_t)d * K_PAGE + j]), acc);
        s[j] = acc * scale;
    }
}

static void scores_q8(const struct k_act_row *q, const int8_t *keys, const uint16_t *scales,
                      uint32_t n, uint32_t dim, float scale, float *s)
{
    for (uint32_t j = 0; j < n; j++) {
        float acc = 0.0f;
        for (uint32_t b = 0; b < dim / 32; b++) {
            int32_t dot = 0;
            for (uint32_t i = 0; i < 32; i++)
                dot += q->q[32 * b + i] * keys[(size_t)(32 * b + i) * K_PAGE + j];
            const float d = q->dx[b] * k_float_of_f16(scales[(size_t)b * K_PAGE + j]);
            acc = k_float_fma(d, (float)dot, acc);
        }
        s[j] = acc * scale;
    }
}

/* s[n] -> e in place, m and l (A18). True: a score was not finite. */
static bool weigh(float *s, uint32_t n, struct part *ret)
{
    float m = s[0];
    bool fault = false;
    for (uint32_t j = 0; j < n; j++) {
        fault |= !k_float_finite(s[j]);
        m = s[j] > m ? s[j] : m;
    }
    float a[32];
    for (uint32_t j = 0; j < K_PAGE; j++)
        s[j] = j < n && !fault ? k_float_exp32(s[j] - m) : 0.0f;
    for (int i = 0; i < 32; i++)
        a[i] = s[i] + s[i + 32];
    ret->m = fault ? 0.0f : m;
    ret->l = k_float_tree32(a);
    ret->empty = false;
    return fault;
}

bool k_ref_attention_head(const float *q, const uint8_t *const *pages, uint32_t n_visible,
                          const struct k_kv *kv, uint32_t head_kv, float scale, float *work,
                          float *y)
{
    const uint32_t dim = kv->head_dim, n_pages = (n_visible + K_PAGE - 1) / K_PAGE;
    const size_t n_values = (size_t)kv->n_head_kv * dim * K_PAGE,
                 head = (size_t)head_kv * dim * K_PAGE;
    struct part total = {.o = work, .empty = true}, group = {.o = work + dim, .empty = true};
    struct part chunk = {.o = work + 2 * dim};
    float *s = work + 3 * dim;
    _Alignas(64) uint8_t quantised[1024];
    const struct k_act_row q8 = k_format_act_row(K_FORM_Q32, quantised, dim);
    bool fault = false;
    if (kv->type == K_KV_Q8_0)
        fault |= k_ref_quantise32(q, dim, quantised);
    for (uint32_t c = 0; c < n_pages; c++) {
        const uint32_t left = n_visible - c * K_PAGE, n = left < K_PAGE ? left : K_PAGE;
        if (kv->type == K_KV_F16) {
            const uint16_t *keys = (const uint16_t *)(const void *)pages[c];
            scores_f16(q, keys + head, n, dim, scale, s);
            fault |= weigh(s, n, &chunk);
            const uint16_t *values = keys + n_values + head;
            memset(chunk.o, 0, dim * sizeof(float));
            for (uint32_t j = 0; j < n; j++)
                for (uint32_t d = 0; d < dim; d++)
                    chunk.o[d] =
                        k_float_fma(s[j], k_float_of_f16(values[(size_t)j * dim + d]), chunk.o[d]);
        } else {
            const int8_t *keys = (const int8_t *)pages[c], *values = keys + n_values + head;
            const uint16_t *key_scales = (const uint16_t *)(const void *)(keys + 2 * n_values);
            const uint16_t *value_scales = key_scales + n_values / 32 + head / 32;
            scores_q8(&q8, keys + head, key_scales + head / 32, n, dim, scale, s);
            fault |= weigh(s, n, &chunk);
            memset(chunk.o, 0, dim * sizeof(float));
            for (uint32_t j = 0; j < n; j++)
                for (uint32_t d = 0; d < dim; d++) {
                    const float ev =
                        s[j] * k_float_of_f16(value_scales[(size_t)j * (dim / 32) + d / 32]);
                    chunk.o[d] = k_float_fma(ev, (float)values[(size_t)j * dim + d], chunk.o[d]);
                }
        }
        merge(&group, &chunk, dim);
        if (c % K_CHUNK_GROUP == K_CHUNK_GROUP - 1 || c + 1 == n_pages) {
            merge(&total, &group, dim);
            group.empty = true;
        }
    }
    for (uint32_t d = 0; d < dim; d++)
        y[d] = total.o[d] / total.l;
    return fault;
}

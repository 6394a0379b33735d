/* Block layouts of the weight formats (as in GGUF; see A5's table) and what each needs. All values
 * little-endian. */
#ifndef ISLET_K_FORMAT_H
#define ISLET_K_FORMAT_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    K_BLOCK32 = 32,
    K_BLOCK256 = 256
};

struct k_format_q4_0 {
    uint16_t d;
    uint8_t q[16]; /* element i: low nibble of q[i], element i + 16: high nibble; value q - 8 */
};
struct k_format_q8_0 {
    uint16_t d;
    int8_t q[32];
};
struct k_format_q4_k {
    uint16_t d, dmin;
    uint8_t scales[12]; /* 8 six-bit scales and mins: k_format_scale_min */
    uint8_t q[128];     /* per 64 elements 32 bytes: low nibbles first, then high ones */
};
struct k_format_q5_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t high[32]; /* bit j of high[i]: fifth bit of element 32 * j + i */
    uint8_t q[128];
};
struct k_format_q6_k {
    uint8_t low[128]; /* per 128 elements 64 bytes of nibbles */
    uint8_t high[64]; /* per 128 elements 32 bytes: two bits each of four elements */
    int8_t scales[16];
    uint16_t d;
};

/* Six-bit scale and min of sub-block j (0..7) of Q4_K and Q5_K. */
static inline void k_format_scale_min(const uint8_t scales[12], int j, uint8_t *ret_scale,
                                      uint8_t *ret_min)
{
    if (j < 4) {
        *ret_scale = scales[j] & 63;
        *ret_min = scales[j + 4] & 63;
    } else {
        *ret_scale = (uint8_t)((scales[j + 4] & 15) | ((scales[j - 4] >> 6) << 4));
        *ret_min = (uint8_t)((scales[j + 4] >> 4) | ((scales[j] >> 6) << 4));
    }
}

/* A quantised activation row (A4) of n elements: scales, then sums of the integers, then the
 * integers, each part aligned to 64 bytes. Sums are per 32 elements (and per 16): they fit 16 bits
 * (at most 32 * 127). k_format_act_bytes is the stride. */
struct k_act_row {
    float *dx;      /* [n / B], B = 32 or 256 */
    int16_t *sum;   /* [n / 32] */
    int16_t *sum16; /* [n / 16], Q256 only */
    int8_t *q;      /* [n] */
};
struct k_act_row k_format_act_row(enum k_form form, void *row, uint32_t n);
uint64_t k_format_act_bytes(enum k_form form, uint32_t n);

/* The value t of one quantised weight block against the activation block's integers and sums (A5),
 * scalar. */
float k_format_block(enum k_format format, const void *block, const int8_t *q, const int16_t *sum);

#ifdef __cplusplus
}
#endif

#endif

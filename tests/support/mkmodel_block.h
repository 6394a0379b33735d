/* Blocks of weights for generated models: random ones of a wanted deviation, and ones that hold
 * chosen marks exactly. Pure; any thread. */
#ifndef ISLET_MKMODEL_BLOCK_H
#define ISLET_MKMODEL_BLOCK_H

#include "kernels.h"

enum {
    MKMODEL_BLOCK_MAX = 256, /* elements of the largest block */
    MKMODEL_BLOCK_MAX_BYTES = 256
};

/* Bytes from splitmix64: a state, its successors. */
struct mkmodel_block_noise {
    uint64_t state;
};

static inline uint64_t mkmodel_block_next(struct mkmodel_block_noise *n)
{
    uint64_t z = n->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* One valid block of mean 0 and deviation `std`; of the formats without blocks one element, which
 * is 1 where std is 0. The same key gives the same bytes. */
void mkmodel_block_random(enum k_format format, uint64_t key, float std, void *to);
/* Elements first..first+n of an F16 or BF16 tensor whose key is `key`, of mean 0 and deviation
 * `std`, fast for many: drawn from 4,096 values. */
void mkmodel_block_halves(enum k_format format, uint64_t key, float std, uint64_t first, uint64_t n,
                          void *to);
/* One block whose element i is exactly signs[i] * size; size is rounded to f16 (BF16: to bf16) but
 * for F32. signs: -1, 0 or 1, [k_format_block_elements]. */
void mkmodel_block_marks(enum k_format format, float size, const int8_t *signs, void *to);
/* The name in GGUF tools, "q4_k"; and back: false if there is none. */
const char *mkmodel_block_name(enum k_format format);
bool mkmodel_block_format(const char *name, enum k_format *ret);

#endif

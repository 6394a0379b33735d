/* The order in which the CUDA kernels read quantised weights (k_ops.arrange), byte by byte, as
 * plain C for nvcc and gcc.
 *
 * A matrix [n_out][n_in] is cut into stripes of 16 outputs, a stripe into tiles of 16 outputs x 256
 * inputs. Tiles of a stripe follow each other (inputs rising), stripes too (outputs rising); tile
 * `b` of stripe `s` begins at k_cuda_tile_offset. A tile has as many bytes as its blocks in the
 * file, so a matrix too; every plane below begins at a multiple of 32 bytes if the matrix does.
 *
 * Operands. Lane l of a warp (g = l / 4, t = l % 4) holds of a tile the 32 registers R[j][a],
 * j = 0..7, a = 0..3: four integer weights, byte e = 0..3 (lowest first) being that of
 *     output  g + 8 * (a & 1)
 *     input   32 * j + 16 * (a >> 1) + 4 * t + e
 * Thus R[j][0..3] is operand A of mma.sync.m16n8k32 for inputs 32 j .. 32 j + 31 in natural order,
 * and R[j][0..1], R[j][2..3] are operand A of m16n8k16 for the two halves. Operand B is then the
 * activation's q in natural order: b0 = q[32 j + 4 t ..], b1 = q[32 j + 16 + 4 t ..] of column g.
 *
 * Loads. "Load c" is 512 bytes, 16 per lane: lane l's at c * 512 + 16 * l, as little-endian words
 * W[c][0..3]. Headers, scales and d's are planes by output.
 *
 *   Q8_0   4,352 bytes
 *     loads 0..7     W[c][a] = R[c][a], int8
 *     4096 + 16 r    output r: uint16 d[8], f16, of blocks 0..7 (32 inputs each)
 *   Q4_0   2,304 bytes
 *     loads 0..3     W[c][a]: low nibbles R[2c][a], high nibbles R[2c+1][a]; 0..15, weight + 8
 *     2048 + 16 r    output r: uint16 d[8], f16
 *   Q4_K   2,304 bytes
 *     loads 0..3     W[c][a]: low nibbles R[2c][a], high nibbles R[2c+1][a]; 0..15
 *     2048 + 16 r    output r: the file's first 16 bytes: d, dmin (f16), scales[12]
 *   Q5_K   2,816 bytes
 *     loads 0..3     as Q4_K: the low four bits
 *     load  4        W[4][a]: bit j of byte e is the fifth bit of byte e of R[j][a]
 *     2560 + 16 r    output r: the file's first 16 bytes
 *   Q6_K   3,360 bytes
 *     loads 0..5     words V[0..23] = W[0][0..3], W[1][0..3], ...; V[3 j + p], p = 0..2: the upper
 *                    six bits of byte e are those of R[j][p], two's complement -32..31, so that
 *                    V & 0xfcfcfcfc is 4 * R[j][p]; the lower two bits are bits 5..4 (p = 0),
 *                    3..2 (p = 1), 1..0 (p = 2) of R[j][3]
 *     3072 + 16 r    output r: int8 scales[16], of 16 inputs each
 *     3328 + 2 r     output r: uint16 d, f16
 *
 * Other formats, n_out not a multiple of 16 and n_in not one of 256 stay in the file's order:
 * k_cuda_tile_arranged. */
#ifndef ISLET_K_CUDA_TILE_H
#define ISLET_K_CUDA_TILE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels.h"

#if defined(__CUDACC__)
#define K_CUDA_TILE_INLINE static __host__ __device__ __forceinline__
#else
#define K_CUDA_TILE_INLINE static inline
#endif

enum {
    K_CUDA_TILE_OUTPUTS = 16,
    K_CUDA_TILE_INPUTS = 256,
    K_CUDA_TILE_Q8_0_BYTES = 4352,
    K_CUDA_TILE_Q8_0_HEAD = 4096,
    K_CUDA_TILE_Q4_0_BYTES = 2304,
    K_CUDA_TILE_Q4_0_HEAD = 2048,
    K_CUDA_TILE_Q4_K_BYTES = 2304,
    K_CUDA_TILE_Q4_K_HEAD = 2048,
    K_CUDA_TILE_Q5_K_BYTES = 2816,
    K_CUDA_TILE_Q5_K_HIGH = 2048,
    K_CUDA_TILE_Q5_K_HEAD = 2560,
    K_CUDA_TILE_Q6_K_BYTES = 3360,
    K_CUDA_TILE_Q6_K_HEAD = 3072,
    K_CUDA_TILE_Q6_K_D = 3328
};

/* Bytes of a tile; 0 for a format that is never arranged. */
K_CUDA_TILE_INLINE uint32_t k_cuda_tile_bytes(enum k_format format)
{
    switch (format) {
    case K_Q8_0:
        return K_CUDA_TILE_Q8_0_BYTES;
    case K_Q4_0:
        return K_CUDA_TILE_Q4_0_BYTES;
    case K_Q4_K:
        return K_CUDA_TILE_Q4_K_BYTES;
    case K_Q5_K:
        return K_CUDA_TILE_Q5_K_BYTES;
    case K_Q6_K:
        return K_CUDA_TILE_Q6_K_BYTES;
    default:
        return 0;
    }
}

/* Where a tile's plane of 16 bytes an output begins (d's, file headers, or Q6_K's scales). */
K_CUDA_TILE_INLINE uint32_t k_cuda_tile_head(enum k_format format)
{
    switch (format) {
    case K_Q8_0:
        return K_CUDA_TILE_Q8_0_HEAD;
    case K_Q5_K:
        return K_CUDA_TILE_Q5_K_HEAD;
    case K_Q6_K:
        return K_CUDA_TILE_Q6_K_HEAD;
    default:
        return K_CUDA_TILE_Q4_K_HEAD;
    }
}

/* Does `arrange` change the order of such a matrix? If not it copies. */
K_CUDA_TILE_INLINE bool k_cuda_tile_arranged(enum k_format format, uint32_t n_out, uint32_t n_in)
{
    return k_cuda_tile_bytes(format) != 0 && n_out % K_CUDA_TILE_OUTPUTS == 0 &&
           n_in % K_CUDA_TILE_INPUTS == 0;
}

/* Byte offset of tile `b` (inputs 256 b ..) of stripe `s` (outputs 16 s ..). */
K_CUDA_TILE_INLINE uint64_t k_cuda_tile_offset(enum k_format format, uint32_t n_in, uint32_t s,
                                               uint32_t b)
{
    return ((uint64_t)s * (n_in / K_CUDA_TILE_INPUTS) + b) * k_cuda_tile_bytes(format);
}

/* ---- the file's side ------------------------------------------------------------------------- */

/* Integer of input i (0..255) of one output, from its block (Q4_K, Q5_K, Q6_K) or the first of its
 * eight (Q8_0, Q4_0): the weight itself, but Q4_0's plus 8. */
K_CUDA_TILE_INLINE int k_cuda_tile_file_weight(enum k_format format, const uint8_t *block,
                                               uint32_t i)
{
    const uint32_t in32 = i % 32, half = i / 128, in128 = i % 128;
    switch (format) {
    case K_Q8_0:
        return (int8_t)block[i / 32 * 34 + 2 + in32];
    case K_Q4_0:
        return (block[i / 32 * 18 + 2 + in32 % 16] >> (in32 / 16 * 4)) & 15;
    case K_Q4_K:
        return (block[16 + i / 64 * 32 + in32] >> (i / 32 % 2 * 4)) & 15;
    case K_Q5_K:
        return ((block[48 + i / 64 * 32 + in32] >> (i / 32 % 2 * 4)) & 15) |
               ((block[16 + in32] >> (i / 32) & 1) << 4);
    case K_Q6_K:
        return (((block[half * 64 + in128 % 64] >> (in128 / 64 * 4)) & 15) |
                ((block[128 + half * 32 + in32] >> (in128 / 32 * 2) & 3) << 4)) -
               32;
    default:
        return 0;
    }
}

/* Two bytes of the file as they lie there; blocks have no alignment beyond 2. */
K_CUDA_TILE_INLINE uint32_t k_cuda_tile_file_half(const uint8_t *p)
{
#if defined(__CUDA_ARCH__)
    return *(const uint16_t *)(const void *)p;
#else
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
#endif
}

K_CUDA_TILE_INLINE uint32_t k_cuda_tile_file_word(const uint8_t *p)
{
    return k_cuda_tile_file_half(p) | k_cuda_tile_file_half(p + 2) << 16;
}

/* Six-bit scale and min of sub-block j (0..7) of Q4_K and Q5_K: k_format_scale_min. */
K_CUDA_TILE_INLINE void k_cuda_tile_scale_min(const uint8_t *scales, uint32_t j,
                                              uint32_t *ret_scale, uint32_t *ret_min)
{
    if (j < 4) {
        *ret_scale = scales[j] & 63u;
        *ret_min = scales[j + 4] & 63u;
    } else {
        *ret_scale = (scales[j + 4] & 15u) | (uint32_t)(scales[j - 4] >> 6) << 4;
        *ret_min = (uint32_t)(scales[j + 4] >> 4) | (uint32_t)(scales[j] >> 6) << 4;
    }
}

/* ---- packing: word w (4 bytes at 4 * w) of a tile -------------------------------------------- */

/* R[j][a] of lane l, a byte per weight, of Q6_K its lower six bits: four weights at once, whose
 * bytes are neighbours in the file too. row0: blocks of the tile's first output; row_bytes: from
 * one output's to the next's. */
K_CUDA_TILE_INLINE uint32_t k_cuda_tile_pack_operand(enum k_format format, const uint8_t *row0,
                                                     uint64_t row_bytes, uint32_t l, uint32_t j,
                                                     uint32_t a)
{
    const uint8_t *block = row0 + (l / 4 + 8 * (a & 1)) * row_bytes;
    const uint32_t half = a >> 1, in32 = 16 * half + 4 * (l % 4); /* first input of the 32 */
    uint32_t low, high;
    switch (format) {
    case K_Q8_0:
        return k_cuda_tile_file_word(block + 34 * j + 2 + in32);
    case K_Q4_0:
        return k_cuda_tile_file_word(block + 18 * j + 2 + in32 % 16) >> (4 * half) & 0x0f0f0f0fu;
    case K_Q4_K:
        return k_cuda_tile_file_word(block + 16 + j / 2 * 32 + in32) >> (j % 2 * 4) & 0x0f0f0f0fu;
    case K_Q5_K:
        low = k_cuda_tile_file_word(block + 48 + j / 2 * 32 + in32) >> (j % 2 * 4);
        high = k_cuda_tile_file_word(block + 16 + in32) >> j;
        return (low & 0x0f0f0f0fu) | (high & 0x01010101u) << 4;
    case K_Q6_K:
        low = k_cuda_tile_file_word(block + j / 4 * 64 + j % 2 * 32 + in32) >> (j / 2 % 2 * 4);
        high = k_cuda_tile_file_word(block + 128 + j / 4 * 32 + in32) >> (j % 4 * 2);
        return ((low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4) ^ 0x20202020u;
    default:
        return 0;
    }
}

/* Word a of lane l in load c of Q6_K. */
K_CUDA_TILE_INLINE uint32_t k_cuda_tile_pack_six(const uint8_t *row0, uint64_t row_bytes,
                                                 uint32_t l, uint32_t c, uint32_t a)
{
    const uint32_t v = 4 * c + a, j = v / 3, p = v % 3;
    const uint32_t upper = k_cuda_tile_pack_operand(K_Q6_K, row0, row_bytes, l, j, p);
    const uint32_t lower = k_cuda_tile_pack_operand(K_Q6_K, row0, row_bytes, l, j, 3);
    return (upper & 0x3f3f3f3fu) << 2 | (lower >> (4 - 2 * p) & 0x03030303u);
}

/* Word a of lane l in the load of Q5_K's fifth bits. */
K_CUDA_TILE_INLINE uint32_t k_cuda_tile_pack_fifth(const uint8_t *row0, uint64_t row_bytes,
                                                   uint32_t l, uint32_t a)
{
    uint32_t word = 0;
    for (uint32_t j = 0; j < 8; j++)
        word |= (k_cuda_tile_pack_operand(K_Q5_K, row0, row_bytes, l, j, a) >> 4 & 0x01010101u)
                << j;
    return word;
}

/* Word w of a plane of headers: 16 bytes an output. */
K_CUDA_TILE_INLINE uint32_t k_cuda_tile_pack_head(enum k_format format, const uint8_t *row0,
                                                  uint64_t row_bytes, uint32_t w)
{
    const uint8_t *block = row0 + w / 4 * row_bytes;
    const uint32_t in_row = w % 4;
    if (format == K_Q8_0 || format == K_Q4_0) {
        const uint32_t bytes = format == K_Q8_0 ? 34 : 18;
        return k_cuda_tile_file_half(block + 2 * in_row * bytes) |
               k_cuda_tile_file_half(block + (2 * in_row + 1) * bytes) << 16;
    }
    return k_cuda_tile_file_word(block + (format == K_Q6_K ? 192 : 0) + 4 * in_row);
}

/* Word w of the tile whose first output's blocks are at row0, outputs row_bytes apart. */
K_CUDA_TILE_INLINE uint32_t k_cuda_tile_word(enum k_format format, const uint8_t *row0,
                                             uint64_t row_bytes, uint32_t w)
{
    const uint32_t c = w / 128, l = w / 4 % 32, a = w % 4, head = k_cuda_tile_head(format);
    if (format == K_Q6_K && 4 * w >= K_CUDA_TILE_Q6_K_D) {
        const uint8_t *block = row0 + 2 * (w - K_CUDA_TILE_Q6_K_D / 4) * row_bytes + 208;
        return k_cuda_tile_file_half(block) | k_cuda_tile_file_half(block + row_bytes) << 16;
    }
    if (4 * w >= head)
        return k_cuda_tile_pack_head(format, row0, row_bytes, w - head / 4);
    if (format == K_Q8_0)
        return k_cuda_tile_pack_operand(format, row0, row_bytes, l, c, a);
    if (format == K_Q6_K)
        return k_cuda_tile_pack_six(row0, row_bytes, l, c, a);
    if (format == K_Q5_K && c == 4)
        return k_cuda_tile_pack_fifth(row0, row_bytes, l, a);
    return (k_cuda_tile_pack_operand(format, row0, row_bytes, l, 2 * c, a) & 0x0f0f0f0fu) |
           (k_cuda_tile_pack_operand(format, row0, row_bytes, l, 2 * c + 1, a) & 0x0f0f0f0fu) << 4;
}

/* ---- reading one weight of a tile ------------------------------------------------------------ */

/* Byte e of W[c][a] of lane l. */
K_CUDA_TILE_INLINE uint32_t k_cuda_tile_load_byte(const uint8_t *tile, uint32_t c, uint32_t l,
                                                  uint32_t a, uint32_t e)
{
    return tile[512 * c + 16 * l + 4 * a + e];
}

/* As k_cuda_tile_file_weight: the integer of output r (0..15), input i (0..255). */
K_CUDA_TILE_INLINE int k_cuda_tile_weight(enum k_format format, const uint8_t *tile, uint32_t r,
                                          uint32_t i)
{
    const uint32_t l = r % 8 * 4 + i / 4 % 4, a = r / 8 + i / 16 % 2 * 2, e = i % 4, j = i / 32;
    if (format == K_Q8_0)
        return (int8_t)k_cuda_tile_load_byte(tile, j, l, a, e);
    if (format == K_Q6_K) {
        uint32_t six = 0;
        for (uint32_t p = 0; p < 3; p++) {
            const uint32_t v = 3 * j + p;
            const uint32_t byte = k_cuda_tile_load_byte(tile, v / 4, l, v % 4, e);
            six = p == a ? byte >> 2 : a == 3 ? six << 2 | (byte & 3) : six;
        }
        return (int)(six ^ 32u) - 32;
    }
    const uint32_t low = k_cuda_tile_load_byte(tile, j / 2, l, a, e) >> (j % 2 * 4) & 15;
    if (format != K_Q5_K)
        return (int)low;
    return (int)(low | (k_cuda_tile_load_byte(tile, 4, l, a, e) >> j & 1) << 4);
}

#endif

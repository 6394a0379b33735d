/* UTF-8: where text may be cut, and the gate that lets only valid UTF-8 out. */
#ifndef ISLET_UTF8_H
#define ISLET_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"

/* Length of the valid UTF-8 sequence at p (1..4), 0 if the bytes are a proper prefix of one that
 * could become valid, or -k: the k first bytes (1..3) are a maximal subpart of an ill-formed
 * sequence and become one U+FFFD. n >= 1. */
int utf8_sequence(const uint8_t *p, size_t n);

bool utf8_valid(const void *text, size_t n);
/* Decodes the valid sequence at p of length n into its code point. */
uint32_t utf8_decode(const uint8_t *p, size_t n);
/* Encodes a code point; returns 1..4 bytes written to out[4]. Surrogates and > 10FFFF give
 * U+FFFD. */
size_t utf8_encode(uint32_t code, uint8_t out[4]);
size_t utf8_count(const void *text, size_t n); /* code points of valid text */

/* The gate: bytes in, valid UTF-8 out; an incomplete tail (<= 3 bytes) waits; ill-formed bytes
 * become U+FFFD. */
struct utf8_gate {
    uint8_t tail[4];
    uint8_t n_tail;
};
void utf8_gate_push(struct utf8_gate *g, const void *bytes, size_t n, struct buf *out);
void utf8_gate_finish(struct utf8_gate *g, struct buf *out); /* a waiting tail becomes one U+FFFD */

#endif

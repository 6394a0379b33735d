/* JSON as it is sent: compact, always valid UTF-8, safe for line splitters. Appends to a buf, whose
 * sticky failure tells about memory. Any thread. */
#ifndef ISLET_GW_JSON_OUT_H
#define ISLET_GW_JSON_OUT_H

#include <stddef.h>
#include <stdint.h>

#include "buf.h"

/* A string with its quotes. Escaped: quote, backslash, U+0000-001F, U+007F, U+0085, U+2028, U+2029
 * (line splitters cut at the last three). Bytes that are not UTF-8 become U+FFFD. */
void gw_json_out_string(struct buf *out, const void *text, size_t n);
void gw_json_out_text(struct buf *out, const char *text); /* NUL-terminated; NULL: null */
/* The shortest decimal that reads back as the same float32; -inf: -9999.0; NaN: null. */
void gw_json_out_float(struct buf *out, float value);
void gw_json_out_u64(struct buf *out, uint64_t value);
/* Milliseconds or a rate: at most three decimals. */
void gw_json_out_figure(struct buf *out, double value);
/* [1,2,...] */
void gw_json_out_bytes(struct buf *out, const void *bytes, size_t n);
void gw_json_out_ids(struct buf *out, const uint32_t *ids, size_t n);

#endif

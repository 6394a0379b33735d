#include "gw_json_out.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "utf8.h"

/* True for bytes that are sent as they are, whatever follows. */
static bool is_plain(uint8_t c)
{
    return c >= 0x20 && c < 0x7F && c != '"' && c != '\\';
}

static void escape_ascii(struct buf *out, uint8_t c)
{
    static const char digits[] = "0123456789abcdef";
    static const char letters[] = "btn\0fr"; /* U+0008..000D; 000B has none */
    char text[6] = {'\\', (char)c, '0', '0', 0, 0};
    if (c == '"' || c == '\\') {
        buf_append(out, text, 2);
        return;
    }
    if (c >= 8 && c <= 13 && letters[c - 8] != '\0') {
        text[1] = letters[c - 8];
        buf_append(out, text, 2);
        return;
    }
    text[1] = 'u';
    text[4] = digits[c >> 4];
    text[5] = digits[c & 15];
    text[2] = text[3] = '0';
    buf_append(out, text, 6);
}

/* One character of more than one byte, or what is not one. Returns the bytes used. */
static size_t wide(struct buf *out, const uint8_t *p, size_t n)
{
    int length = utf8_sequence(p, n);
    if (length <= 0) {
        buf_text(out, "\xEF\xBF\xBD");
        return length == 0 ? n : (size_t)-length;
    }
    if (length == 2 && p[0] == 0xC2 && p[1] == 0x85)
        buf_text(out, "\\u0085");
    else if (length == 3 && p[0] == 0xE2 && p[1] == 0x80 && (p[2] | 1) == 0xA9)
        buf_text(out, p[2] == 0xA8 ? "\\u2028" : "\\u2029");
    else
        buf_append(out, p, (size_t)length);
    return (size_t)length;
}

void gw_json_out_string(struct buf *out, const void *text, size_t n)
{
    const uint8_t *p = text, *end = p + n;
    buf_byte(out, '"');
    while (p < end) {
        const uint8_t *start = p;
        while (p < end && is_plain(*p))
            p++;
        if (p > start)
            buf_append(out, start, (size_t)(p - start));
        if (p == end)
            break;
        if (*p < 0x80)
            escape_ascii(out, *p++);
        else
            p += wide(out, p, (size_t)(end - p));
    }
    buf_byte(out, '"');
}

void gw_json_out_text(struct buf *out, const char *text)
{
    if (text)
        gw_json_out_string(out, text, strlen(text));
    else
        buf_text(out, "null");
}

void gw_json_out_float(struct buf *out, float value)
{
    char text[32];
    if (isnan(value)) {
        buf_text(out, "null");
        return;
    }
    if (isinf(value)) {
        buf_text(out, value < 0 ? "-9999.0" : "9999.0");
        return;
    }
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value)
            break;
    }
    buf_text(out, text);
}

void gw_json_out_u64(struct buf *out, uint64_t value)
{
    char text[20];
    size_t at = sizeof text;
    do {
        text[--at] = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    buf_append(out, text + at, sizeof text - at);
}

void gw_json_out_figure(struct buf *out, double value)
{
    char text[64];
    if (!isfinite(value))
        value = 0;
    int n = snprintf(text, sizeof text, "%.3f", value);
    if (n < 0 || (size_t)n >= sizeof text) {
        buf_byte(out, '0');
        return;
    }
    while (n > 1 && text[n - 1] == '0')
        n--;
    if (text[n - 1] == '.')
        n--;
    buf_append(out, text, (size_t)n);
}

void gw_json_out_bytes(struct buf *out, const void *bytes, size_t n)
{
    const uint8_t *p = bytes;
    buf_byte(out, '[');
    for (size_t i = 0; i < n; i++) {
        if (i > 0)
            buf_byte(out, ',');
        gw_json_out_u64(out, p[i]);
    }
    buf_byte(out, ']');
}

void gw_json_out_ids(struct buf *out, const uint32_t *ids, size_t n)
{
    buf_byte(out, '[');
    for (size_t i = 0; i < n; i++) {
        if (i > 0)
            buf_byte(out, ',');
        gw_json_out_u64(out, ids[i]);
    }
    buf_byte(out, ']');
}

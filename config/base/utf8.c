#include "utf8.h"

#include <assert.h>
#include <string.h>

/* Table 3-7 of the Unicode standard: the range of the second byte depends on the first; later ones
 * are 80..BF. */
int utf8_sequence(const uint8_t *p, size_t n)
{
    uint8_t first = p[0], low = 0x80, high = 0xBF;
    size_t length;
    if (first < 0x80)
        return 1;
    if (first < 0xC2 || first > 0xF4)
        return -1;
    length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    if (first == 0xE0)
        low = 0xA0;
    else if (first == 0xED)
        high = 0x9F;
    else if (first == 0xF0)
        low = 0x90;
    else if (first == 0xF4)
        high = 0x8F;
    for (size_t i = 1; i < length; i++) {
        if (i == n)
            return 0;
        if (p[i] < low || p[i] > high)
            return -(int)i;
        low = 0x80;
        high = 0xBF;
    }
    return (int)length;
}

bool utf8_valid(const void *text, size_t n)
{
    const uint8_t *p = text;
    while (n > 0) {
        int k = utf8_sequence(p, n);
        if (k <= 0)
            return false;
        p += k;
        n -= (size_t)k;
    }
    return true;
}

uint32_t utf8_decode(const uint8_t *p, size_t n)
{
    static const uint8_t mask[5] = {0, 0x7F, 0x1F, 0x0F, 0x07};
    assert(n >= 1 && n <= 4);
    uint32_t code = p[0] & mask[n];
    for (size_t i = 1; i < n; i++)
        code = code << 6 | (p[i] & 0x3Fu);
    return code;
}

size_t utf8_encode(uint32_t code, uint8_t out[4])
{
    if (code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF))
        code = 0xFFFD;
    if (code < 0x80) {
        out[0] = (uint8_t)code;
        return 1;
    }
    size_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const uint8_t lead[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = n - 1; i > 0; i--) {
        out[i] = (uint8_t)(0x80 | (code & 0x3F));
        code >>= 6;
    }
    out[0] = (uint8_t)(lead[n] | code);
    return n;
}

size_t utf8_count(const void *text, size_t n)
{
    const uint8_t *p = text;
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        count += (p[i] & 0xC0) != 0x80;
    return count;
}

static void utf8_replacement(struct buf *out)
{
    buf_append(out, "\xEF\xBF\xBD", 3);
}

/* Takes one sequence or ill-formed part that begins in the waiting tail. Returns how many of the n
 * new bytes it used, all of them when it still waits. */
static size_t utf8_gate_tail(struct utf8_gate *g, const uint8_t *p, size_t n, struct buf *out)
{
    size_t used = 0;
    for (;;) {
        int k = utf8_sequence(g->tail, g->n_tail);
        if (k > 0)
            buf_append(out, g->tail, (size_t)k);
        if (k < 0)
            utf8_replacement(out);
        size_t taken = (size_t)(k < 0 ? -k : k);
        if (taken > 0) {
            /* A byte that proved the tail ill-formed may begin something itself: it is given
             * back. */
            size_t back = g->n_tail - taken;
            assert(back <= 1 && back <= used);
            g->n_tail = 0;
            return used - back;
        }
        if (used == n)
            return used;
        g->tail[g->n_tail++] = p[used++];
    }
}

void utf8_gate_push(struct utf8_gate *g, const void *bytes, size_t n, struct buf *out)
{
    const uint8_t *p = bytes;
    if (n > 0 && g->n_tail > 0) {
        size_t used = utf8_gate_tail(g, p, n, out);
        p += used;
        n -= used;
    }
    while (n > 0) {
        size_t whole = 0;
        int k = 0;
        while (whole < n && (k = utf8_sequence(p + whole, n - whole)) > 0)
            whole += (size_t)k;
        buf_append(out, p, whole);
        p += whole;
        n -= whole;
        if (n == 0)
            return;
        if (k == 0) {
            memcpy(g->tail, p, n);
            g->n_tail = (uint8_t)n;
            return;
        }
        utf8_replacement(out);
        p += -k;
        n -= (size_t)-k;
    }
}

void utf8_gate_finish(struct utf8_gate *g, struct buf *out)
{
    if (g->n_tail > 0)
        utf8_replacement(out);
    g->n_tail = 0;
}

/* Input: a flag byte, a stop string (length byte first), then text. Pushed whole and byte by byte
 * it must give the same. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "buf.h"
#include "gw_stop.h"
#include "utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void take(const struct gw_stop *s, struct buf out[2])
{
    const struct gw_stop_segment *segments;
    size_t n = gw_stop_segments(s, &segments);
    for (size_t i = 0; i < n; i++) {
        if (segments[i].size == 0 || !utf8_valid(segments[i].text, segments[i].size))
            abort();
        buf_append(&out[segments[i].kind], segments[i].text, segments[i].size);
    }
}

static void feed(const struct gw_stop_config *config, const uint8_t *text, size_t n, size_t step,
                 struct buf out[2], uint64_t *ret_kept)
{
    struct gw_stop *s;
    if (gw_stop_new(config, &s, NULL) != ERR_OK)
        abort();
    for (size_t at = 0; at < n; at += step) {
        if (gw_stop_push(s, text + at, step < n - at ? step : n - at, NULL) != ERR_OK)
            abort();
        take(s, out);
    }
    if (gw_stop_finish(s, NULL) != ERR_OK)
        abort();
    take(s, out);
    *ret_kept = gw_stop_kept(s);
    gw_stop_free(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct buf whole[2] = {BUF_INIT(1 << 24), BUF_INIT(1 << 24)};
    struct buf bytes[2] = {BUF_INIT(1 << 24), BUF_INIT(1 << 24)};
    uint64_t kept[2];
    if (size < 2 || data[1] > size - 2 || size > 1 << 16 || !utf8_valid(data + 2, data[1]))
        return 0;
    const struct gw_stop_string stop = {(const char *)data + 2, data[1]};
    bool thinks = data[0] & 1;
    const struct gw_stop_config config = {
        .stops = &stop,
        .n_stops = 1,
        .think_open = thinks ? "<think>" : NULL,
        .think_close = thinks ? "</think>" : NULL,
        .open = data[0] & 2,
        .open_bare = data[0] & 4,
    };
    const uint8_t *text = data + 2 + data[1];
    size_t n = size - 2 - data[1];
    feed(&config, text, n, n + 1, whole, &kept[0]);
    feed(&config, text, n, 1, bytes, &kept[1]);
    for (int i = 0; i < 2; i++) {
        if (whole[i].size != bytes[i].size ||
            (whole[i].size > 0 && memcmp(whole[i].data, bytes[i].data, whole[i].size) != 0))
            abort();
        buf_done(&whole[i]);
        buf_done(&bytes[i]);
    }
    if (kept[0] != kept[1])
        abort();
    return 0;
}

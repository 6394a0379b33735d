/* Bytes to frames to messages. A stream in one piece and in pieces gives the same frames; a
 * message that decodes encodes to a frame that decodes to the same fields. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "proto_dump.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_frame(const struct proto_frame *f)
{
    struct buf text = BUF_INIT(64 << 20), again = BUF_INIT(64 << 20);
    struct buf text2 = BUF_INIT(64 << 20), again2 = BUF_INIT(64 << 20);
    struct proto_reader r;
    struct proto_frame f2;
    struct err e = {0};
    proto_reader_init(&r, 64 << 20);
    if (proto_dump(f, &text, &again, &e) != ERR_OK) {
        assert(e.code != ERR_OK && e.text[0] != '\0');
        goto out;
    }
    assert(proto_reader_feed(&r, again.data, again.size, &e) == ERR_OK);
    assert(proto_reader_next(&r, &f2) == 1 && proto_reader_next(&r, &f2) == 0);
    f2 = (struct proto_frame){.cmd = f->cmd,
                              .request_id = f->request_id,
                              .payload = again.data + PROTO_HEADER_BYTES,
                              .n_payload = again.size - PROTO_HEADER_BYTES};
    assert(proto_dump(&f2, &text2, &again2, &e) == ERR_OK);
    assert(again.size == again2.size && memcmp(again.data, again2.data, again.size) == 0);
    /* Connection messages have no id to keep. */
    if (again.data[12] == (uint8_t)f->request_id)
        assert(text.size == text2.size && memcmp(text.data, text2.data, text.size) == 0);
out:
    proto_reader_done(&r);
    buf_done(&text);
    buf_done(&again);
    buf_done(&text2);
    buf_done(&again2);
}

static void note(struct buf *seen, const struct proto_frame *f)
{
    buf_append(seen, &f->cmd, 1);
    buf_append(seen, &f->request_id, sizeof f->request_id);
    buf_append(seen, &f->n_payload, sizeof f->n_payload);
    buf_append(seen, f->payload, f->n_payload);
}

/* What comes out when the bytes arrive `step` at a time. */
static enum err_code read_all(const uint8_t *data, size_t size, size_t step, struct buf *seen,
                              bool check)
{
    struct proto_reader r;
    struct proto_frame f;
    struct err e = {0};
    enum err_code code = ERR_OK;
    proto_reader_init(&r, 1 << 20);
    for (size_t at = 0; at < size && code == ERR_OK; at += step) {
        code = proto_reader_feed(&r, data + at, step < size - at ? step : size - at, &e);
        while (proto_reader_next(&r, &f) == 1) {
            note(seen, &f);
            if (check)
                check_frame(&f);
        }
    }
    proto_reader_done(&r);
    return code;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct buf whole = BUF_INIT(64 << 20), pieces = BUF_INIT(64 << 20);
    enum err_code a = read_all(data, size, size, &whole, true);
    for (size_t step = 1; step <= 7; step += 3) {
        buf_clear(&pieces);
        enum err_code b = read_all(data, size, step, &pieces, false);
        assert(a == b && whole.size == pieces.size);
        assert(whole.size == 0 || memcmp(whole.data, pieces.data, whole.size) == 0);
    }
    buf_done(&whole);
    buf_done(&pieces);
    return 0;
}

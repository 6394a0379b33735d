#include "proto_reader.h"

#include <assert.h>

enum {
    PROTO_READER_KEEP = 256 << 10 /* an idle connection keeps no more memory than this */
};

static uint32_t proto_reader_length(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | (uint32_t)p[3];
}

void proto_reader_init(struct proto_reader *r, size_t max_frame)
{
    assert(max_frame >= PROTO_HEADER_BYTES && max_frame <= UINT32_MAX);
    *r = (struct proto_reader){.pending = BUF_INIT(SIZE_MAX / 4), .max_frame = max_frame};
}

void proto_reader_done(struct proto_reader *r)
{
    buf_done(&r->pending);
}

/* Makes room at the front. Frames that were not taken are moved only when more than half of the
 * bytes are used up, so that the moves cost no more than the bytes themselves. */
static void proto_reader_compact(struct proto_reader *r)
{
    struct buf *b = &r->pending;
    if (r->consumed < b->size && r->consumed <= b->size / 2)
        return;
    buf_drop_front(b, r->consumed);
    r->checked -= r->consumed;
    r->consumed = 0;
    if (b->size == 0 && b->capacity > PROTO_READER_KEEP)
        buf_done(b);
}

static enum err_code proto_reader_fail(struct proto_reader *r, enum err_code code)
{
    r->error = code;
    r->pending.size = r->checked; /* what follows can never be a frame */
    return code;
}

/* Looks at the length of every frame that has one by now. */
static enum err_code proto_reader_check(struct proto_reader *r, struct err *e)
{
    const struct buf *b = &r->pending;
    while (b->size - r->checked >= 4) {
        size_t length = proto_reader_length(b->data + r->checked);
        if (length < PROTO_HEADER_BYTES) {
            proto_reader_fail(r, ERR_PROTOCOL);
            return err_set(e, ERR_PROTOCOL, "frame of %zu bytes: a frame has at least %d", length,
                           PROTO_HEADER_BYTES);
        }
        if (length > r->max_frame) {
            proto_reader_fail(r, ERR_PROTOCOL);
            return err_set(e, ERR_PROTOCOL, "frame of %zu bytes: the limit is %zu", length,
                           r->max_frame);
        }
        if (length > b->size - r->checked)
            return ERR_OK;
        r->checked += length;
    }
    return ERR_OK;
}

enum err_code proto_reader_feed(struct proto_reader *r, const void *bytes, size_t n, struct err *e)
{
    if (r->error != ERR_OK)
        return err_set(e, r->error, "bytes after a malformed frame");
    proto_reader_compact(r);
    buf_append(&r->pending, bytes, n);
    if (buf_failed(&r->pending)) {
        proto_reader_fail(r, ERR_NOMEM);
        return err_set(e, ERR_NOMEM, "no memory for %zu bytes of a frame", r->pending.size + n);
    }
    return proto_reader_check(r, e);
}

int proto_reader_next(struct proto_reader *r, struct proto_frame *ret)
{
    if (r->consumed == r->checked)
        return 0;
    const uint8_t *p = r->pending.data + r->consumed;
    size_t length = proto_reader_length(p);
    uint64_t id = (uint64_t)proto_reader_length(p + 5) << 32 | proto_reader_length(p + 9);
    *ret = (struct proto_frame){
        .cmd = p[4],
        .request_id = id,
        .payload = p + PROTO_HEADER_BYTES,
        .n_payload = length - PROTO_HEADER_BYTES,
    };
    r->consumed += length;
    return 1;
}

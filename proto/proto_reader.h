/* Frames out of bytes, without I/O: `u32 length | u8 cmd | u64 request_id | payload`, big-endian;
 * length counts the whole frame (13 + payload). An error sticks. One reader a connection, one
 * thread. */
#ifndef ISLET_PROTO_READER_H
#define ISLET_PROTO_READER_H

#include <stddef.h>
#include <stdint.h>

#include "buf.h"
#include "err.h"

enum {
    PROTO_HEADER_BYTES = 13,
    PROTO_MAX_FRAME = 16 << 20 /* unless worker.max_frame says otherwise */
};

struct proto_frame {
    uint8_t cmd;
    uint64_t request_id;
    const uint8_t *payload; /* lent until the next call on the reader */
    size_t n_payload;
};

struct proto_reader {
    struct buf pending;
    size_t consumed;     /* bytes of `pending` already handed out */
    size_t checked;      /* the first frame whose length was not looked at begins here */
    size_t max_frame;    /* frames over this are an error; none of their bytes are kept */
    enum err_code error; /* sticks */
};

void proto_reader_init(struct proto_reader *r, size_t max_frame);
void proto_reader_done(struct proto_reader *r);
/* Adds n bytes (copied). ERR_PROTOCOL: a length under 13 or over max_frame, seen as soon as its
 * four bytes are there; ERR_NOMEM. The error sticks: later bytes are dropped, but frames that
 * ended before it can still be taken. Callers take all frames after each feed, so that at most
 * max_frame + n bytes are held. */
enum err_code proto_reader_feed(struct proto_reader *r, const void *bytes, size_t n, struct err *e)
    __attribute__((warn_unused_result));
/* 1: *ret is the next frame; 0: not yet (or never, after an error of feed). */
int proto_reader_next(struct proto_reader *r, struct proto_frame *ret);

#endif

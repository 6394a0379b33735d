/* Any frame of the protocol as text, one `field = value` a line, and encoded again: for tests that
 * compare PROTOCOL.md's examples and for the fuzz target. */
#ifndef ISLET_PROTO_DUMP_H
#define ISLET_PROTO_DUMP_H

#include "buf.h"
#include "proto_message.h"

/* Decodes the frame and appends its fields to `text` and its new encoding to `again`.
 * ERR_UNSUPPORTED: no such command; else what the decoder said. */
enum err_code proto_dump(const struct proto_frame *f, struct buf *text, struct buf *again,
                         struct err *e);

#endif

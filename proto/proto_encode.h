/* Messages to frames. Each function appends one whole frame to `out`; where `out` is full it is
 * left failed and without the new frame, so that it still holds whole frames only. A struct that
 * breaks a limit of proto_message.h is a bug of ours and asserts. Any thread. */
#ifndef ISLET_PROTO_ENCODE_H
#define ISLET_PROTO_ENCODE_H

#include <stdint.h>

struct buf;
struct proto_done;
struct proto_error;
struct proto_hello;
struct proto_load_expert;
struct proto_loaded;
struct proto_notice;
struct proto_progress;
struct proto_run;
struct proto_status;
struct proto_tokens;
struct proto_unload_expert;
struct proto_welcome;

/* cancel, status_request, drain, drained: frames without payload. */
void proto_encode_empty(struct buf *out, uint8_t cmd, uint64_t request_id);
void proto_encode_hello(struct buf *out, const struct proto_hello *m);
void proto_encode_welcome(struct buf *out, const struct proto_welcome *m);
void proto_encode_run(struct buf *out, uint64_t request_id, const struct proto_run *m);
void proto_encode_tokens(struct buf *out, uint64_t request_id, const struct proto_tokens *m);
void proto_encode_done(struct buf *out, uint64_t request_id, const struct proto_done *m);
void proto_encode_error(struct buf *out, uint64_t request_id, const struct proto_error *m);
void proto_encode_progress(struct buf *out, uint64_t request_id, const struct proto_progress *m);
void proto_encode_notice(struct buf *out, const struct proto_notice *m);
void proto_encode_load_expert(struct buf *out, uint64_t request_id,
                              const struct proto_load_expert *m);
void proto_encode_unload_expert(struct buf *out, uint64_t request_id,
                                const struct proto_unload_expert *m);
/* cmd: PROTO_LOADED or PROTO_UNLOADED. */
void proto_encode_loaded(struct buf *out, uint64_t request_id, uint8_t cmd,
                         const struct proto_loaded *m);
void proto_encode_status(struct buf *out, uint64_t request_id, const struct proto_status *m);

#endif

/* Frames to messages. ERR_PROTOCOL says which field is wrong and why; every length and range of
 * proto_message.h is checked here, so that decoded structs can be trusted. Unknown trailing bytes
 * are ignored: that is how fields are added. Texts are lent by the frame; arrays live in the
 * scratch, valid until its next use. Any thread. */
#ifndef ISLET_PROTO_DECODE_H
#define ISLET_PROTO_DECODE_H

#include "err.h"
#include "proto_scratch.h"

struct proto_done;
struct proto_error;
struct proto_frame;
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

#define PROTO_DECODE __attribute__((warn_unused_result))
enum err_code proto_decode_hello(const struct proto_frame *f, struct proto_hello *ret,
                                 struct err *e) PROTO_DECODE;
enum err_code proto_decode_welcome(const struct proto_frame *f, struct proto_welcome *ret,
                                   struct err *e) PROTO_DECODE;
enum err_code proto_decode_run(const struct proto_frame *f, struct proto_scratch *s,
                               struct proto_run *ret, struct err *e) PROTO_DECODE;
enum err_code proto_decode_tokens(const struct proto_frame *f, struct proto_scratch *s,
                                  struct proto_tokens *ret, struct err *e) PROTO_DECODE;
enum err_code proto_decode_done(const struct proto_frame *f, struct proto_done *ret,
                                struct err *e) PROTO_DECODE;
enum err_code proto_decode_error(const struct proto_frame *f, struct proto_error *ret,
                                 struct err *e) PROTO_DECODE;
enum err_code proto_decode_progress(const struct proto_frame *f, struct proto_progress *ret,
                                    struct err *e) PROTO_DECODE;
enum err_code proto_decode_notice(const struct proto_frame *f, struct proto_notice *ret,
                                  struct err *e) PROTO_DECODE;
enum err_code proto_decode_load_expert(const struct proto_frame *f, struct proto_load_expert *ret,
                                       struct err *e) PROTO_DECODE;
enum err_code proto_decode_unload_expert(const struct proto_frame *f,
                                         struct proto_unload_expert *ret,
                                         struct err *e) PROTO_DECODE;
enum err_code proto_decode_loaded(const struct proto_frame *f, struct proto_loaded *ret,
                                  struct err *e) PROTO_DECODE;
enum err_code proto_decode_status(const struct proto_frame *f, struct proto_scratch *s,
                                  struct proto_status *ret, struct err *e) PROTO_DECODE;

#endif

/* Messages of the Islet protocol as structs, their encoders and decoders. No I/O. Layout byte by byte: PROTOCOL.md.
 * Decoders check every length; unknown trailing bytes are ignored (that is how fields are added); pointers in decoded
 * structs are lent by the frame or point into the struct's own `arena` (see each). */
#ifndef ISLET_PROTO_MESSAGE_H
#define ISLET_PROTO_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"
#include "err.h"
#include "proto_reader.h"

enum { PROTO_VERSION = 1, PROTO_MAX_TOP = 20, PROTO_MAX_BIAS = 1024 + 64, PROTO_MAX_END = 16, PROTO_MAX_TEXT = 512 };

enum proto_cmd {
#define PROTO_MESSAGE(name, number, direction, type, help) PROTO_##name = number,
#include "proto_messages.def"
#undef PROTO_MESSAGE
};
const char *proto_cmd_name(uint8_t cmd); /* "run_inference"; "unknown" */

struct proto_text { /* not NUL-terminated; lent by the frame when decoded */
    const char *data;
    uint16_t size;
};
struct proto_text proto_text_of(const char *text); /* borrows; cut at 65,535 bytes */

struct proto_hello {
    uint32_t version;
    struct proto_text client;
};

enum proto_state { PROTO_LOADING, PROTO_SERVING, PROTO_DRAINING, PROTO_FAILED };
const char *proto_state_name(enum proto_state s);

struct proto_welcome {
    uint32_t version;
    uint8_t state;          /* enum proto_state */
    uint8_t warm;           /* 1 if hot experts were restored; 0 = came up cold */
    uint8_t progress;       /* percent loaded */
    struct proto_text reason; /* why failed; "" otherwise */
    struct proto_text model;  /* name of the model */
    struct proto_text build;  /* version of the program */
    uint32_t arithmetic;    /* version of ARITHMETIC.md */
    uint8_t file_digest[16], shape_digest[16]; /* zero until known */
    uint64_t incarnation;   /* differs for each worker process */
    uint32_t n_ctx, n_vocab, max_sequences, prefill_chunk, max_frame;
    uint32_t n_layer, n_expert, n_expert_used;
};

enum proto_run_flags {
    PROTO_RUN_LOGPROBS = 1u << 0,        /* chosen token's logprob and the n_top best */
    PROTO_RUN_PROMPT_LOGPROBS = 1u << 1, /* also of the prompt tokens; no prefix reuse then */
    PROTO_RUN_ROUTES = 1u << 2,          /* done carries experts (not sent by this version) */
    PROTO_RUN_NO_CACHE = 1u << 3,        /* take nothing from shared prefixes */
};

struct proto_bias {
    uint32_t id;
    float value; /* added to the logit; -inf = never */
};

#define PROTO_MAX_NEW_ALL UINT32_MAX /* until the context is full */

struct proto_run {
    const uint32_t *tokens; /* prompt, then tokens of the answer already known (resumption) */
    uint32_t n_tokens;
    uint32_t n_prompt;      /* <= n_tokens; n_tokens - n_prompt == first_index */
    uint32_t first_index;   /* place in the answer of the first token to generate */
    uint32_t max_new;       /* tokens of the whole answer, first_index included */
    float temperature;      /* <= 0 or subnormal: greedy */
    float top_p, min_p;     /* 1 and 0: not applied */
    int32_t top_k;          /* <= 0: not applied */
    float presence, frequency; /* over the tokens from n_prompt on */
    float repeat;           /* over the last repeat_last_n tokens of all */
    int32_t repeat_last_n;  /* -1: the context; 0: off */
    uint64_t seed;
    int8_t priority;        /* smaller is earlier */
    uint32_t flags;         /* enum proto_run_flags */
    uint8_t n_top;          /* 0..PROTO_MAX_TOP */
    uint8_t n_end;          /* tokens that end the answer (each counts as generated, and is sent) */
    uint32_t end[PROTO_MAX_END];
    const struct proto_bias *bias;
    uint16_t n_bias;
    struct proto_text session; /* key, or "" */
};

struct proto_top {
    uint32_t id;
    float logprob;
};

enum proto_token_flags { PROTO_TOKEN_PROMPT = 1, PROTO_TOKEN_LOGPROB = 2 };

struct proto_token {
    uint32_t id;
    uint8_t flags;  /* enum proto_token_flags */
    float logprob;  /* with PROTO_TOKEN_LOGPROB; NAN for the first prompt token, which has none */
    uint8_t n_top;
    struct proto_top top[PROTO_MAX_TOP];
};

struct proto_tokens {
    uint32_t first_index; /* of tokens[0]: place in the answer, or in the prompt when it is a prompt token */
    uint16_t n;
    const struct proto_token *tokens;
};

enum proto_finish { PROTO_FINISH_STOP, PROTO_FINISH_LENGTH, PROTO_FINISH_CONTEXT, PROTO_FINISH_CANCELLED };
const char *proto_finish_name(enum proto_finish f);

struct proto_usage {
    uint32_t prompt, cached, generated; /* tokens; generated counts this run_inference only */
    uint64_t hits_vram, hits_ram, misses, ssd_bytes;
    uint32_t queue_ms, prefill_ms, decode_ms, preempted;
};

struct proto_done {
    uint8_t finish; /* enum proto_finish */
    struct proto_usage usage;
};

struct proto_error {
    uint16_t code; /* enum err_code */
    uint8_t retryable;
    struct proto_text text;
};

struct proto_progress {
    uint32_t prefilled; /* of total, the cached ones included */
    uint32_t cached;
    uint32_t total;
};

enum proto_notice_action { PROTO_NOTICE_NONE, PROTO_NOTICE_PAUSE, PROTO_NOTICE_RESUME };
struct proto_notice {
    uint8_t action;
    struct proto_text text;
};

struct proto_load_expert {
    uint32_t expert_id;   /* layer * n_expert + index */
    uint16_t quant_type;  /* ggml type of the gate slice, or 0xFFFF: any */
    uint32_t weight_size; /* sum of the three slices, or 0: any */
};
struct proto_unload_expert {
    uint32_t expert_id;
};
struct proto_loaded {
    uint32_t expert_id;
    uint8_t tier; /* 0 none, 1 RAM, 2 VRAM */
};

enum proto_sequence_state { PROTO_SEQUENCE_WAITING, PROTO_SEQUENCE_PREFILL, PROTO_SEQUENCE_DECODE };
struct proto_sequence {
    uint64_t request_id;
    uint8_t state; /* enum proto_sequence_state */
    uint32_t prompt, prefilled, generated, kv_pages;
    uint64_t age_ms;
    struct proto_text client; /* name from hello */
};

struct proto_status {
    uint16_t version;  /* 1 */
    uint64_t age_us;   /* of the snapshot */
    uint8_t state;     /* enum proto_state */
    struct proto_text backend; /* "reference", "avx2", "avx512" */
    struct proto_text degraded; /* reason, or "" */
#define PROTO_STATUS(name, type, help) uint64_t name;
#include "proto_status.def"
#undef PROTO_STATUS
    uint16_t n_sequences;
    const struct proto_sequence *sequences;
};

/* Encoders append one whole frame to `out` (a full buffer makes it failed). Encoding a struct that breaks a limit above
 * is a bug of ours and asserts. */
void proto_encode_empty(struct buf *out, enum proto_cmd cmd, uint64_t request_id);
void proto_encode_hello(struct buf *out, const struct proto_hello *m);
void proto_encode_welcome(struct buf *out, const struct proto_welcome *m);
void proto_encode_run(struct buf *out, uint64_t request_id, const struct proto_run *m);
void proto_encode_tokens(struct buf *out, uint64_t request_id, const struct proto_tokens *m);
void proto_encode_done(struct buf *out, uint64_t request_id, const struct proto_done *m);
void proto_encode_error(struct buf *out, uint64_t request_id, const struct proto_error *m);
void proto_encode_progress(struct buf *out, uint64_t request_id, const struct proto_progress *m);
void proto_encode_notice(struct buf *out, const struct proto_notice *m);
void proto_encode_load_expert(struct buf *out, uint64_t request_id, const struct proto_load_expert *m);
void proto_encode_unload_expert(struct buf *out, uint64_t request_id, const struct proto_unload_expert *m);
void proto_encode_loaded(struct buf *out, uint64_t request_id, enum proto_cmd cmd, const struct proto_loaded *m);
void proto_encode_status(struct buf *out, uint64_t request_id, const struct proto_status *m);

/* Decoders of a frame's payload. ERR_PROTOCOL says which field is wrong and why. Arrays (tokens, bias, sequences) are
 * decoded into memory that proto_scratch owns, valid until its next use. */
struct proto_scratch {
    struct buf a, b;
};
void proto_scratch_init(struct proto_scratch *s);
void proto_scratch_done(struct proto_scratch *s);

#define PROTO_DECODE __attribute__((warn_unused_result))
enum err_code proto_decode_hello(const struct proto_frame *f, struct proto_hello *ret, struct err *e) PROTO_DECODE;
enum err_code proto_decode_welcome(const struct proto_frame *f, struct proto_welcome *ret, struct err *e) PROTO_DECODE;
enum err_code proto_decode_run(const struct proto_frame *f, struct proto_scratch *s, struct proto_run *ret,
                               struct err *e) PROTO_DECODE;
enum err_code proto_decode_tokens(const struct proto_frame *f, struct proto_scratch *s, struct proto_tokens *ret,
                                  struct err *e) PROTO_DECODE;
enum err_code proto_decode_done(const struct proto_frame *f, struct proto_done *ret, struct err *e) PROTO_DECODE;
enum err_code proto_decode_error(const struct proto_frame *f, struct proto_error *ret, struct err *e) PROTO_DECODE;
enum err_code proto_decode_progress(const struct proto_frame *f, struct proto_progress *ret, struct err *e) PROTO_DECODE;
enum err_code proto_decode_notice(const struct proto_frame *f, struct proto_notice *ret, struct err *e) PROTO_DECODE;
enum err_code proto_decode_load_expert(const struct proto_frame *f, struct proto_load_expert *ret, struct err *e)
    PROTO_DECODE;
enum err_code proto_decode_unload_expert(const struct proto_frame *f, struct proto_unload_expert *ret, struct err *e)
    PROTO_DECODE;
enum err_code proto_decode_loaded(const struct proto_frame *f, struct proto_loaded *ret, struct err *e) PROTO_DECODE;
enum err_code proto_decode_status(const struct proto_frame *f, struct proto_scratch *s, struct proto_status *ret,
                                  struct err *e) PROTO_DECODE;

#endif

/* Messages of the Islet protocol as structs. No I/O. Layout byte by byte: PROTOCOL.md. Encoders and
 * decoders come along by proto_encode.h and proto_decode.h. */
#ifndef ISLET_PROTO_MESSAGE_H
#define ISLET_PROTO_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "buf.h"
#include "err.h"
#include "proto_reader.h"

enum {
    PROTO_VERSION = 1,
    PROTO_STATUS_VERSION = 1,
    PROTO_MAX_TOP = 20,
    PROTO_MAX_BIAS = 1024 + 64,
    PROTO_MAX_END = 16,
    PROTO_MAX_TEXT = 512, /* bytes of any text field */
    PROTO_MAX_TRACE = 128 /* bytes of run_inference's trace, which is its client's request id */
};

enum proto_cmd {
#define PROTO_MESSAGE(name, number, direction, type, help) PROTO_##name = number,
#include "proto_messages.def"
#undef PROTO_MESSAGE
};
/* "run_inference"; "unknown". */
static inline const char *proto_cmd_name(uint8_t cmd)
{
    switch (cmd) {
#define PROTO_MESSAGE(name, number, direction, text, help) \
    case number:                                           \
        return text;
#include "proto_messages.def"
#undef PROTO_MESSAGE
    default:
        return "unknown";
    }
}

struct proto_text { /* not NUL-terminated; lent by the frame when decoded */
    const char *data;
    uint16_t size;
};
/* Lends `text`, cut at PROTO_MAX_TEXT bytes. */
static inline struct proto_text proto_text_of(const char *text)
{
    return (struct proto_text){.data = text, .size = (uint16_t)strnlen(text, PROTO_MAX_TEXT)};
}

/* True for what may be a trace: 1 to PROTO_MAX_TRACE of letters, digits, '.', '_', ':', '-', so that
 * it can stand in a header and in a line of a log. */
static inline bool proto_trace_good(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bool word = (p[i] >= '0' && p[i] <= '9') || ((p[i] | 0x20) >= 'a' && (p[i] | 0x20) <= 'z');
        if (!word && p[i] != '.' && p[i] != '_' && p[i] != ':' && p[i] != '-')
            return false;
    }
    return n >= 1 && n <= PROTO_MAX_TRACE;
}

struct proto_hello {
    uint32_t version;
    struct proto_text client;
};

enum proto_state {
    PROTO_LOADING,
    PROTO_SERVING,
    PROTO_DRAINING,
    PROTO_FAILED
};
static inline const char *proto_state_name(enum proto_state s)
{
    static const char *const names[] = {"loading", "serving", "draining", "failed"};
    return (unsigned)s <= PROTO_FAILED ? names[s] : "unknown";
}

struct proto_welcome {
    uint32_t version;
    uint8_t state;            /* enum proto_state */
    uint8_t warm;             /* 1 if hot experts were restored; 0 = came up cold */
    uint8_t progress;         /* percent loaded */
    struct proto_text reason; /* why failed; "" otherwise */
    struct proto_text model;  /* name of the model */
    struct proto_text build;  /* version of the program */
    uint32_t arithmetic;      /* version of ARITHMETIC.md */
    uint8_t file_digest[16], shape_digest[16]; /* zero until known */
    uint64_t incarnation;                      /* differs for each worker process */
    uint32_t n_ctx, n_vocab, max_sequences, prefill_chunk, max_frame;
    uint32_t n_layer, n_expert, n_expert_used;
};

enum proto_run_flags {
    PROTO_RUN_LOGPROBS = 1u << 0,        /* chosen token's logprob and the n_top best */
    PROTO_RUN_PROMPT_LOGPROBS = 1u << 1, /* also of the prompt tokens; no prefix reuse then */
    PROTO_RUN_ROUTES = 1u << 2,          /* done carries experts (not sent by this version) */
    PROTO_RUN_NO_CACHE = 1u << 3,        /* take nothing from shared prefixes */
    PROTO_RUN_ALL = (1u << 4) - 1,
};

struct proto_bias {
    uint32_t id;
    float value; /* added to the logit; -inf = never; neither NaN nor +inf */
};

#define PROTO_MAX_NEW_ALL UINT32_MAX /* until the context is full */

struct proto_run {
    const uint32_t *tokens; /* prompt, then tokens of the answer already known (resumption) */
    uint32_t n_tokens;
    uint32_t n_prompt;         /* <= n_tokens; n_tokens - n_prompt == first_index */
    uint32_t first_index;      /* place in the answer of the first token to generate */
    uint32_t max_new;          /* tokens of the whole answer, first_index included */
    float temperature;         /* <= 0 or subnormal: greedy */
    float top_p, min_p;        /* both 0..1; 1 and 0: not applied */
    int32_t top_k;             /* <= 0: not applied */
    float presence, frequency; /* over the tokens from n_prompt on */
    float repeat;              /* > 0; over the last repeat_last_n tokens of all */
    int32_t repeat_last_n;     /* -1: the context; 0: off */
    uint64_t seed;
    int8_t priority; /* smaller is earlier */
    uint32_t flags;  /* enum proto_run_flags */
    uint8_t n_top;   /* 0..PROTO_MAX_TOP */
    uint8_t n_end;   /* tokens that end the answer (each counts as generated, and is sent) */
    uint32_t end[PROTO_MAX_END];
    const struct proto_bias *bias;
    uint16_t n_bias;
    struct proto_text session; /* key, or "" */
    struct proto_text trace;   /* names the request in the worker's log (proto_trace_good), or "" */
};

struct proto_top {
    uint32_t id;
    float logprob;
};

enum proto_token_flags {
    PROTO_TOKEN_PROMPT = 1,
    PROTO_TOKEN_LOGPROB = 2
};

struct proto_token {
    uint32_t id;
    uint8_t flags; /* enum proto_token_flags */
    float logprob; /* with PROTO_TOKEN_LOGPROB; NAN for the first prompt token, which has none */
    uint8_t n_top;
    struct proto_top top[PROTO_MAX_TOP];
};

struct proto_tokens {     /* all of the answer, or all of the prompt */
    uint32_t first_index; /* of tokens[0]: place in the answer, or in the prompt */
    uint16_t n;           /* >= 1 */
    const struct proto_token *tokens;
};

enum proto_finish {
    PROTO_FINISH_STOP,
    PROTO_FINISH_LENGTH,
    PROTO_FINISH_CONTEXT,
    PROTO_FINISH_CANCELLED
};
static inline const char *proto_finish_name(enum proto_finish f)
{
    static const char *const names[] = {"stop", "length", "context", "cancelled"};
    return (unsigned)f <= PROTO_FINISH_CANCELLED ? names[f] : "unknown";
}

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

enum proto_notice_action {
    PROTO_NOTICE_NONE,
    PROTO_NOTICE_PAUSE,
    PROTO_NOTICE_RESUME
};
struct proto_notice {
    uint8_t action;
    struct proto_text text;
};

enum {
    PROTO_ANY_QUANT_TYPE = 0xFFFF,
    PROTO_ANY_WEIGHT_SIZE = 0
};
struct proto_load_expert {
    uint32_t expert_id;   /* layer * n_expert + index */
    uint16_t quant_type;  /* ggml type of the gate slice, or PROTO_ANY_QUANT_TYPE */
    uint32_t weight_size; /* bytes of the three slices, or PROTO_ANY_WEIGHT_SIZE */
};
struct proto_unload_expert {
    uint32_t expert_id;
};
enum proto_tier {
    PROTO_TIER_SSD, /* in no memory: it is read when it is needed */
    PROTO_TIER_RAM,
    PROTO_TIER_VRAM
};
struct proto_loaded {
    uint32_t expert_id;
    uint8_t tier; /* enum proto_tier */
};

enum proto_sequence_state {
    PROTO_SEQUENCE_WAITING,
    PROTO_SEQUENCE_PREFILL,
    PROTO_SEQUENCE_DECODE
};
struct proto_sequence {
    uint64_t request_id;
    uint8_t state; /* enum proto_sequence_state */
    uint32_t prompt, prefilled, generated, kv_pages;
    uint64_t age_ms;
    struct proto_text client; /* name from hello */
};

struct proto_status {
    uint16_t version;           /* PROTO_STATUS_VERSION; >= 1 */
    uint64_t age_us;            /* of the snapshot */
    uint8_t state;              /* enum proto_state */
    struct proto_text backend;  /* "reference", "avx2", "avx512" */
    struct proto_text degraded; /* reason, or "" */
    struct proto_text storage;  /* how experts are read: "io_uring, O_DIRECT, depth 16" */
#define PROTO_STATUS(name, type, help) uint64_t name;
#include "proto_status.def"
#undef PROTO_STATUS
    uint16_t n_sequences;
    const struct proto_sequence *sequences;
};

#include "proto_decode.h"
#include "proto_encode.h"

#endif

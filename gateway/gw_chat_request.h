/* The body of /v1/chat/completions, /v1/completions and /apply-template as a checked struct.
 * Nothing is clamped: a value outside its range is refused. One table of fields
 * (gw_chat_request_fields) says name, type, range, default and, for what would change the answer
 * and is not built in, the neutral values; the parser and the tests walk over it.
 * Any thread. */
#ifndef ISLET_GW_CHAT_REQUEST_H
#define ISLET_GW_CHAT_REQUEST_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"
#include "gw_http.h"
#include "gw_refusal.h"
#include "gw_stop.h"
#include "proto_message.h"

enum {
    GW_CHAT_REQUEST_MAX_STOPS = 16,
    GW_CHAT_REQUEST_MAX_PROMPTS = 8,
    GW_CHAT_REQUEST_MAX_N = 8,
    GW_CHAT_REQUEST_MAX_BIAS = 1024,
    GW_CHAT_REQUEST_MAX_IGNORED = 16,
};

enum gw_chat_request_kind { /* bits */
    GW_CHAT_REQUEST_CHAT = 1,
    GW_CHAT_REQUEST_COMPLETION = 2,
};

enum gw_chat_request_effort { /* order of the words in the table */
    GW_CHAT_REQUEST_EFFORT_ABSENT = -1,
    GW_CHAT_REQUEST_EFFORT_NONE = 0,
};

enum gw_chat_request_format {
    GW_CHAT_REQUEST_FORMAT_AUTO,
    GW_CHAT_REQUEST_FORMAT_NONE,
    GW_CHAT_REQUEST_FORMAT_DEEPSEEK,
};

/* One prompt of a completion: text, or ids. */
struct gw_chat_request_prompt {
    char *text; /* NULL: ids */
    size_t n_text;
    uint32_t *ids;
    uint32_t n_ids;
};

struct gw_chat_request {
    enum gw_chat_request_kind kind;
    char *model;      /* NULL: the loaded one */
    json_t *messages; /* checked and in the form that gw_template_render takes */
    struct gw_chat_request_prompt prompts[GW_CHAT_REQUEST_MAX_PROMPTS];
    unsigned n_prompts;

    int64_t max_completion_tokens, max_tokens, n_predict;
    int64_t max_new; /* the first present of these; -1: until the context is full */
    double temperature, top_p, min_p;
    int64_t top_k;
    double presence_penalty, frequency_penalty, repeat_penalty;
    int64_t repeat_last_n;
    int64_t seed; /* -1: random */
    int64_t n;
    struct gw_stop_string stops[GW_CHAT_REQUEST_MAX_STOPS]; /* texts owned */
    unsigned n_stops;
    struct proto_bias *bias;
    unsigned n_bias;
    bool ignore_eos;

    bool stream, include_usage;
    bool logprobs;
    int64_t n_logprobs; /* of a completion: -1 none, else as top_logprobs */
    int64_t top_logprobs;
    bool echo;
    bool return_tokens, timings_per_token;
    int64_t sse_ping_interval_s; /* GW_CHAT_REQUEST_ABSENT: the setting */

    char *user, *safety_identifier, *session; /* NULL: none */
    int reasoning_effort;                     /* index of the word, or EFFORT_ABSENT */
    int reasoning_format;
    json_t *kwargs; /* NULL: none */
    bool add_generation_prompt, continue_final_message;
    bool cache_prompt;
    int64_t priority;

    char ignored[GW_CHAT_REQUEST_MAX_IGNORED * 66]; /* value of x-islet-ignored, "" = nothing */
};

#define GW_CHAT_REQUEST_ABSENT INT64_MIN

struct gw_chat_request_limits { /* of the model and the settings */
    uint32_t n_ctx, n_vocab, max_sequences;
};

enum gw_chat_request_type {
    GW_CHAT_REQUEST_BOOL,
    GW_CHAT_REQUEST_INT,     /* min..max */
    GW_CHAT_REQUEST_NUMBER,  /* min..max */
    GW_CHAT_REQUEST_STRING,  /* at most max bytes */
    GW_CHAT_REQUEST_CHOICE,  /* a word of `words` */
    GW_CHAT_REQUEST_SPECIAL, /* a function of its own */
    GW_CHAT_REQUEST_REFUSED, /* only the JSON texts of `words`; or "<=0", "<0" */
};

struct gw_chat_request_parser;

struct gw_chat_request_field {
    const char *name;
    unsigned kinds; /* enum gw_chat_request_kind, or-ed */
    enum gw_chat_request_type type;
    bool open_min, context_max; /* min itself is outside; max is the context */
    double min, max, absent;    /* absent: the value where the field is missing or null */
    size_t offset;              /* of the member */
    const char *words;
    bool (*parse)(struct gw_chat_request_parser *p, const json_t *value);
};

const struct gw_chat_request_field *gw_chat_request_fields(size_t *ret_n);
/* "none", "minimal", ...; effort >= 0. */
const char *gw_chat_request_effort_name(int effort);

/* Checks the whole body. False: *refusal says why. Fills *ret on success; gw_chat_request_done
 * frees. Borrows root. */
bool gw_chat_request_parse(const json_t *root, enum gw_chat_request_kind kind,
                           const struct gw_chat_request_limits *limits, struct gw_chat_request *ret,
                           struct gw_refusal *refusal) __attribute__((warn_unused_result));
void gw_chat_request_done(struct gw_chat_request *q);

/* The value of x-islet-session: a good one wins over prompt_cache_key, others leave it as it is.
 * False: no memory. */
bool gw_chat_request_set_session(struct gw_chat_request *q, struct gw_http_text value)
    __attribute__((warn_unused_result));

#endif

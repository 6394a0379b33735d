#include "proto_decode.h"

#include <math.h>
#include <string.h>

#include "proto_message.h"

/* What is left of a payload. The first fault sticks: later reads give zero, and *e names the first
 * field that was wrong. */
struct proto_decode {
    const uint8_t *p, *end;
    struct err *e;
    enum err_code code;
};

static struct proto_decode proto_decode_begin(const struct proto_frame *f, struct err *e)
{
    return (struct proto_decode){.p = f->payload, .end = f->payload + f->n_payload, .e = e};
}

#define proto_decode_fail(d, code_, ...) \
    ((d)->code = (d)->code != ERR_OK ? (d)->code : err_set((d)->e, code_, __VA_ARGS__))

enum {
    PROTO_SEQUENCE_BYTES = 8 + 1 + 4 * 4 + 8 + 2 /* of a sequence without its client's name */
};

/* ---- fields ---- */

static const uint8_t *proto_decode_take(struct proto_decode *d, size_t n, const char *field)
{
    size_t left = (size_t)(d->end - d->p);
    if (d->code != ERR_OK)
        return NULL;
    if (n > left) {
        proto_decode_fail(d, ERR_PROTOCOL, "%s: %zu bytes needed, the payload has %zu left", field,
                          n, left);
        return NULL;
    }
    const uint8_t *taken = d->p;
    d->p += n;
    return taken;
}

static uint32_t proto_decode_load(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | (uint32_t)p[3];
}

static uint8_t proto_decode_u8(struct proto_decode *d, const char *field)
{
    const uint8_t *p = proto_decode_take(d, 1, field);
    return p != NULL ? *p : 0;
}

static uint16_t proto_decode_u16(struct proto_decode *d, const char *field)
{
    const uint8_t *p = proto_decode_take(d, 2, field);
    unsigned value = p != NULL ? (unsigned)p[0] << 8 | p[1] : 0;
    return (uint16_t)value;
}

static uint32_t proto_decode_u32(struct proto_decode *d, const char *field)
{
    const uint8_t *p = proto_decode_take(d, 4, field);
    return p != NULL ? proto_decode_load(p) : 0;
}

static uint64_t proto_decode_u64(struct proto_decode *d, const char *field)
{
    const uint8_t *p = proto_decode_take(d, 8, field);
    return p != NULL ? (uint64_t)proto_decode_load(p) << 32 | proto_decode_load(p + 4) : 0;
}

static float proto_decode_f32(struct proto_decode *d, const char *field)
{
    uint32_t bits = proto_decode_u32(d, field);
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static struct proto_text proto_decode_text(struct proto_decode *d, const char *field)
{
    struct proto_text t = {.data = "", .size = 0};
    uint16_t size = proto_decode_u16(d, field);
    if (size > PROTO_MAX_TEXT) {
        proto_decode_fail(d, ERR_PROTOCOL, "%s: %u bytes, the limit is %d", field, size,
                          PROTO_MAX_TEXT);
        return t;
    }
    const uint8_t *p = proto_decode_take(d, size, field);
    if (p != NULL && size > 0)
        t = (struct proto_text){.data = (const char *)p, .size = size};
    return t;
}

/* ---- ranges ---- */

static void proto_decode_at_most(struct proto_decode *d, const char *field, uint64_t value,
                                 uint64_t limit)
{
    if (value > limit)
        proto_decode_fail(d, ERR_PROTOCOL, "%s: %llu, the limit is %llu", field,
                          (unsigned long long)value, (unsigned long long)limit);
}

static void proto_decode_finite(struct proto_decode *d, const char *field, float value)
{
    if (!isfinite(value))
        proto_decode_fail(d, ERR_PROTOCOL, "%s: %g, not a finite number", field, (double)value);
}

static void proto_decode_unit(struct proto_decode *d, const char *field, float value)
{
    if (!(value >= 0 && value <= 1))
        proto_decode_fail(d, ERR_PROTOCOL, "%s: %g, not within 0 and 1", field, (double)value);
}

/* Room for n items of `bytes` in `b`, or NULL (and the fault is recorded). n * bytes is small: n
 * items of a byte or more were seen in the frame. */
static void *proto_decode_room(struct proto_decode *d, struct buf *b, size_t n, size_t bytes)
{
    if (d->code != ERR_OK)
        return NULL;
    buf_clear(b);
    void *room = buf_room(b, n * bytes);
    if (room == NULL)
        proto_decode_fail(d, ERR_NOMEM, "no memory for %zu items of a message", n);
    return room;
}

/* ---- messages ---- */

enum err_code proto_decode_hello(const struct proto_frame *f, struct proto_hello *ret,
                                 struct err *e)
{
    struct proto_decode d = proto_decode_begin(f, e);
    struct proto_hello m;
    m.version = proto_decode_u32(&d, "version");
    m.client = proto_decode_text(&d, "client");
    if (d.code == ERR_OK)
        *ret = m;
    return d.code;
}

enum err_code proto_decode_welcome(const struct proto_frame *f, struct proto_welcome *ret,
                                   struct err *e)
{
    struct proto_decode d = proto_decode_begin(f, e);
    struct proto_welcome m;
    m.version = proto_decode_u32(&d, "version");
    m.state = proto_decode_u8(&d, "state");
    proto_decode_at_most(&d, "state", m.state, PROTO_FAILED);
    m.warm = proto_decode_u8(&d, "warm");
    proto_decode_at_most(&d, "warm", m.warm, 1);
    m.progress = proto_decode_u8(&d, "progress");
    proto_decode_at_most(&d, "progress", m.progress, 100);
    m.reason = proto_decode_text(&d, "reason");
    m.model = proto_decode_text(&d, "model");
    m.build = proto_decode_text(&d, "build");
    m.arithmetic = proto_decode_u32(&d, "arithmetic");
    const uint8_t *digest = proto_decode_take(&d, sizeof m.file_digest, "file_digest");
    if (digest != NULL)
        memcpy(m.file_digest, digest, sizeof m.file_digest);
    digest = proto_decode_take(&d, sizeof m.shape_digest, "shape_digest");
    if (digest != NULL)
        memcpy(m.shape_digest, digest, sizeof m.shape_digest);
    m.incarnation = proto_decode_u64(&d, "incarnation");
    m.n_ctx = proto_decode_u32(&d, "n_ctx");
    m.n_vocab = proto_decode_u32(&d, "n_vocab");
    m.max_sequences = proto_decode_u32(&d, "max_sequences");
    m.prefill_chunk = proto_decode_u32(&d, "prefill_chunk");
    m.max_frame = proto_decode_u32(&d, "max_frame");
    m.n_layer = proto_decode_u32(&d, "n_layer");
    m.n_expert = proto_decode_u32(&d, "n_expert");
    m.n_expert_used = proto_decode_u32(&d, "n_expert_used");
    if (d.code == ERR_OK)
        *ret = m;
    return d.code;
}

static void proto_decode_ids(struct proto_decode *d, const char *field, uint32_t *ret, size_t n)
{
    const uint8_t *p = proto_decode_take(d, 4 * n, field);
    for (size_t i = 0; p != NULL && i < n; i++)
        ret[i] = proto_decode_load(p + 4 * i);
}

static void proto_decode_run_fixed(struct proto_decode *d, struct proto_run *m)
{
    m->n_tokens = proto_decode_u32(d, "n_tokens");
    m->n_prompt = proto_decode_u32(d, "n_prompt");
    m->first_index = proto_decode_u32(d, "first_index");
    m->max_new = proto_decode_u32(d, "max_new");
    m->temperature = proto_decode_f32(d, "temperature");
    m->top_p = proto_decode_f32(d, "top_p");
    m->min_p = proto_decode_f32(d, "min_p");
    m->top_k = (int32_t)proto_decode_u32(d, "top_k");
    m->presence = proto_decode_f32(d, "presence");
    m->frequency = proto_decode_f32(d, "frequency");
    m->repeat = proto_decode_f32(d, "repeat");
    m->repeat_last_n = (int32_t)proto_decode_u32(d, "repeat_last_n");
    m->seed = proto_decode_u64(d, "seed");
    m->priority = (int8_t)proto_decode_u8(d, "priority");
    m->flags = proto_decode_u32(d, "flags");
    m->n_top = proto_decode_u8(d, "n_top");
    m->n_end = proto_decode_u8(d, "n_end");
    m->n_bias = proto_decode_u16(d, "n_bias");
    m->session = proto_decode_text(d, "session");
}

static void proto_decode_run_check(struct proto_decode *d, const struct proto_run *m)
{
    proto_decode_at_most(d, "n_prompt", m->n_prompt, m->n_tokens);
    if (d->code == ERR_OK && m->n_tokens - m->n_prompt != m->first_index)
        proto_decode_fail(d, ERR_PROTOCOL, "first_index: %u, but n_tokens - n_prompt is %u",
                          m->first_index, m->n_tokens - m->n_prompt);
    proto_decode_finite(d, "temperature", m->temperature);
    proto_decode_unit(d, "top_p", m->top_p);
    proto_decode_unit(d, "min_p", m->min_p);
    proto_decode_finite(d, "presence", m->presence);
    proto_decode_finite(d, "frequency", m->frequency);
    proto_decode_finite(d, "repeat", m->repeat);
    if (!(m->repeat > 0))
        proto_decode_fail(d, ERR_PROTOCOL, "repeat: %g, not over 0", (double)m->repeat);
    if (m->repeat_last_n < -1)
        proto_decode_fail(d, ERR_PROTOCOL, "repeat_last_n: %d, the least is -1", m->repeat_last_n);
    if ((m->flags & ~(uint32_t)PROTO_RUN_ALL) != 0)
        proto_decode_fail(d, ERR_PROTOCOL, "flags: 0x%x, known are 0x%x", m->flags, PROTO_RUN_ALL);
    proto_decode_at_most(d, "n_top", m->n_top, PROTO_MAX_TOP);
    proto_decode_at_most(d, "n_end", m->n_end, PROTO_MAX_END);
    proto_decode_at_most(d, "n_bias", m->n_bias, PROTO_MAX_BIAS);
}

static void proto_decode_run_bias(struct proto_decode *d, struct proto_bias *ret, size_t n)
{
    for (size_t i = 0; i < n && d->code == ERR_OK; i++) {
        ret[i].id = proto_decode_u32(d, "bias");
        ret[i].value = proto_decode_f32(d, "bias");
        if (isnan(ret[i].value) || ret[i].value == INFINITY)
            proto_decode_fail(d, ERR_PROTOCOL, "bias[%zu]: %g, not a finite number or -inf", i,
                              (double)ret[i].value);
    }
}

/* The last field came with a later version: a frame may end before it, and bytes that are no trace
 * are bytes of a version that is not known here. */
static struct proto_text proto_decode_trace(const struct proto_decode *d)
{
    struct proto_text t = {.data = "", .size = 0};
    size_t left = (size_t)(d->end - d->p);
    if (d->code != ERR_OK || left < 2)
        return t;
    const char *text = (const char *)d->p + 2;
    size_t size = (size_t)(d->p[0] << 8 | d->p[1]);
    if (size <= left - 2 && proto_trace_good(text, size))
        t = (struct proto_text){.data = text, .size = (uint16_t)size};
    return t;
}

enum err_code proto_decode_run(const struct proto_frame *f, struct proto_scratch *s,
                               struct proto_run *ret, struct err *e)
{
    struct proto_decode d = proto_decode_begin(f, e);
    struct proto_run m = {0};
    proto_decode_run_fixed(&d, &m);
    if (d.code == ERR_OK)
        proto_decode_run_check(&d, &m);
    proto_decode_ids(&d, "end", m.end, d.code == ERR_OK ? m.n_end : 0);
    struct proto_bias *bias = proto_decode_room(&d, &s->b, m.n_bias, sizeof *bias);
    if (bias != NULL)
        proto_decode_run_bias(&d, bias, m.n_bias);
    size_t left = (size_t)(d.end - d.p);
    if (m.n_tokens > left / 4)
        proto_decode_fail(&d, ERR_PROTOCOL, "n_tokens: %u, but %zu bytes are left for them",
                          m.n_tokens, left);
    uint32_t *tokens = proto_decode_room(&d, &s->a, m.n_tokens, sizeof *tokens);
    if (tokens != NULL)
        proto_decode_ids(&d, "tokens", tokens, m.n_tokens);
    m.trace = proto_decode_trace(&d);
    m.bias = bias;
    m.tokens = tokens;
    if (d.code == ERR_OK)
        *ret = m;
    return d.code;
}

static void proto_decode_token(struct proto_decode *d, size_t i, struct proto_token *t)
{
    t->id = proto_decode_u32(d, "tokens.id");
    t->flags = proto_decode_u8(d, "tokens.flags");
    t->n_top = 0;
    t->logprob = 0;
    if ((t->flags & ~(PROTO_TOKEN_PROMPT | PROTO_TOKEN_LOGPROB)) != 0)
        proto_decode_fail(d, ERR_PROTOCOL, "tokens[%zu].flags: 0x%x, known are 0x%x", i, t->flags,
                          PROTO_TOKEN_PROMPT | PROTO_TOKEN_LOGPROB);
    if ((t->flags & PROTO_TOKEN_LOGPROB) == 0)
        return;
    t->logprob = proto_decode_f32(d, "tokens.logprob");
    if (isnan(t->logprob) && (t->flags & PROTO_TOKEN_PROMPT) == 0)
        proto_decode_fail(d, ERR_PROTOCOL, "tokens[%zu].logprob: not a number", i);
    t->n_top = proto_decode_u8(d, "tokens.n_top");
    proto_decode_at_most(d, "tokens.n_top", t->n_top, PROTO_MAX_TOP);
    for (size_t k = 0; k < t->n_top && d->code == ERR_OK; k++) {
        t->top[k].id = proto_decode_u32(d, "tokens.top");
        t->top[k].logprob = proto_decode_f32(d, "tokens.top");
        if (isnan(t->top[k].logprob))
            proto_decode_fail(d, ERR_PROTOCOL, "tokens[%zu].top[%zu]: not a number", i, k);
    }
}

enum err_code proto_decode_tokens(const struct proto_frame *f, struct proto_scratch *s,
                                  struct proto_tokens *ret, struct err *e)
{
    struct proto_decode d = proto_decode_begin(f, e);
    uint32_t first_index = proto_decode_u32(&d, "first_index");
    uint16_t n = proto_decode_u16(&d, "n");
    size_t left = (size_t)(d.end - d.p);
    if (n == 0)
        proto_decode_fail(&d, ERR_PROTOCOL, "n: 0, the least is 1");
    if (n > left / 5)
        proto_decode_fail(&d, ERR_PROTOCOL, "n: %u, but %zu bytes are left for the tokens", n,
                          left);
    struct proto_token *tokens = proto_decode_room(&d, &s->a, n, sizeof *tokens);
    for (size_t i = 0; i < n && d.code == ERR_OK; i++) {
        proto_decode_token(&d, i, &tokens[i]);
        if (((tokens[i].flags ^ tokens[0].flags) & PROTO_TOKEN_PROMPT) != 0)
            proto_decode_fail(&d, ERR_PROTOCOL, "tokens[%zu].flags: prompt and answer in one frame",
                              i);
    }
    if (d.code == ERR_OK)
        *ret = (struct proto_tokens){.first_index = first_index, .n = n, .tokens = tokens};
    return d.code;
}

enum err_code proto_decode_done(const struct proto_frame *f, struct proto_done *ret, struct err *e)
{
    struct proto_decode d = proto_decode_begin(f, e);
    struct proto_done m;
    m.finish = proto_decode_u8(&d, "finish");
    proto_decode_at_most(&d, "finish", m.finish, PROTO_FINISH_CANCELLED);
    m.usage.prompt = proto_decode_u32(&d, "prompt");
    m.usage.cached = proto_decode_u32(&d, "cached");
    m.usage.generated = proto_decode_u32(&d, "generated");
    m.usage.hits_vram = proto_decode_u64(&d, "hits_vram");
    m.usage.hits_ram = proto_decode_u64(&d, "hits_ram");
    m.usage.misses = proto_decode_u64(&d, "misses");
    m.usage.ssd_bytes = proto_decode_u64(&d, "ssd_bytes");
    m.usage.queue_ms = proto_decode_u32(&d, "queue_ms");
    m.usage.prefill_ms = proto_decode_u32(&d, "prefill_ms");
    m.usage.decode_ms = proto_decode_u32(&d, "decode_ms");
    m.usage.preempted = proto_decode_u32(&d, "preempted");
    if (d.code == ERR_OK)
        *ret = m;
    return d.code;
}

enum err_code proto_decode_error(const struct proto_frame *f, struct proto_error *ret,
                                 struct err *e)
{
    struct proto_decode d = proto_decode_begin(f, e);
    struct proto_error m;
    m.code = proto_decode_u16(&d, "code");
    if (d.code == ERR_OK && m.code == ERR_OK)
        proto_decode_fail(&d, ERR_PROTOCOL, "code: 0 is not an error");
    proto_decode_at_most(&d, "code", m.code, ERR_N - 1);
    m.retryable = proto_decode_u8(&d, "retryable");
    proto_decode_at_most(&d, "retryable", m.retryable, 1);
    m.text = proto_decode_text(&d, "text");
    if (d.code == ERR_OK)
        *ret = m;
    return d.code;
}

enum err_code proto_decode_progress(const struct proto_frame *f, struct proto_progress *ret,
                                    struct err *e)
{
    struct proto_decode d = proto_decode_begin(f, e);
    struct proto_progress m;
    m.prefilled = proto_decode_u32(&d, "prefilled");
    m.cached = proto_decode_u32(&d, "cached");
    m.total = proto_decode_u32(&d, "total");
    proto_decode_at_most(&d, "prefilled", m.prefilled, m.total);
    proto_decode_at_most(&d, "cached", m.cached, m.total);
    if (d.code == ERR_OK)
        *ret = m;
    return d.code;
}

enum err_code proto_decode_notice(const struct proto_frame *f, struct proto_notice *ret,
                                  struct err *e)
{
    struct proto_decode d = proto_decode_begin(f, e);
    struct proto_notice m;
    m.action = proto_decode_u8(&d, "action");
    proto_decode_at_most(&d, "action", m.action, PROTO_NOTICE_RESUME);
    m.text = proto_decode_text(&d, "text");
    if (d.code == ERR_OK)
        *ret = m;
    return d.code;
}

enum err_code proto_decode_load_expert(const struct proto_frame *f, struct proto_load_expert *ret,
                                       struct err *e)
{
    struct proto_decode d = proto_decode_begin(f, e);
    struct proto_load_expert m;
    m.expert_id = proto_decode_u32(&d, "expert_id");
    m.quant_type = proto_decode_u16(&d, "quant_type");
    m.weight_size = proto_decode_u32(&d, "weight_size");
    if (d.code == ERR_OK)
        *ret = m;
    return d.code;
}

enum err_code proto_decode_unload_expert(const struct proto_frame *f,
                                         struct proto_unload_expert *ret, struct err *e)
{
    struct proto_decode d = proto_decode_begin(f, e);
    struct proto_unload_expert m = {.expert_id = proto_decode_u32(&d, "expert_id")};
    if (d.code == ERR_OK)
        *ret = m;
    return d.code;
}

enum err_code proto_decode_loaded(const struct proto_frame *f, struct proto_loaded *ret,
                                  struct err *e)
{
    struct proto_decode d = proto_decode_begin(f, e);
    struct proto_loaded m;
    m.expert_id = proto_decode_u32(&d, "expert_id");
    m.tier = proto_decode_u8(&d, "tier");
    proto_decode_at_most(&d, "tier", m.tier, PROTO_TIER_VRAM);
    if (d.code == ERR_OK)
        *ret = m;
    return d.code;
}

/* Values that the sender does not know stay 0; those that this program does not know are
 * skipped. */
static void proto_decode_status_values(struct proto_decode *d, struct proto_status *m)
{
    uint64_t *const values[] = {
#define PROTO_STATUS(name, type, help) &m->name,
#include "proto_status.def"
#undef PROTO_STATUS
    };
    size_t n = proto_decode_u16(d, "n_values");
    for (size_t i = 0; i < n && d->code == ERR_OK; i++) {
        uint64_t value = proto_decode_u64(d, "values");
        if (i < sizeof values / sizeof *values)
            *values[i] = value;
    }
}

static void proto_decode_sequence(struct proto_decode *d, struct proto_sequence *q)
{
    q->request_id = proto_decode_u64(d, "sequences.request_id");
    q->state = proto_decode_u8(d, "sequences.state");
    proto_decode_at_most(d, "sequences.state", q->state, PROTO_SEQUENCE_DECODE);
    q->prompt = proto_decode_u32(d, "sequences.prompt");
    q->prefilled = proto_decode_u32(d, "sequences.prefilled");
    q->generated = proto_decode_u32(d, "sequences.generated");
    q->kv_pages = proto_decode_u32(d, "sequences.kv_pages");
    q->age_ms = proto_decode_u64(d, "sequences.age_ms");
    q->client = proto_decode_text(d, "sequences.client");
}

enum err_code proto_decode_status(const struct proto_frame *f, struct proto_scratch *s,
                                  struct proto_status *ret, struct err *e)
{
    struct proto_decode d = proto_decode_begin(f, e);
    struct proto_status m = {0};
    m.version = proto_decode_u16(&d, "version");
    if (d.code == ERR_OK && m.version == 0)
        proto_decode_fail(&d, ERR_PROTOCOL, "version: 0, the least is 1");
    m.age_us = proto_decode_u64(&d, "age_us");
    m.state = proto_decode_u8(&d, "state");
    proto_decode_at_most(&d, "state", m.state, PROTO_FAILED);
    m.backend = proto_decode_text(&d, "backend");
    m.degraded = proto_decode_text(&d, "degraded");
    m.storage = proto_decode_text(&d, "storage");
    proto_decode_status_values(&d, &m);
    m.n_sequences = proto_decode_u16(&d, "n_sequences");
    size_t left = (size_t)(d.end - d.p);
    if (m.n_sequences > left / PROTO_SEQUENCE_BYTES)
        proto_decode_fail(&d, ERR_PROTOCOL, "n_sequences: %u, but %zu bytes are left for them",
                          m.n_sequences, left);
    struct proto_sequence *sequences =
        proto_decode_room(&d, &s->a, m.n_sequences, sizeof *sequences);
    for (size_t i = 0; i < m.n_sequences && d.code == ERR_OK; i++)
        proto_decode_sequence(&d, &sequences[i]);
    m.sequences = sequences;
    if (d.code == ERR_OK)
        *ret = m;
    return d.code;
}

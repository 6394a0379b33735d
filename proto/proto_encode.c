#include "proto_encode.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "proto_message.h"

/* ---- fields ---- */

static void proto_encode_u16(struct buf *out, uint16_t v)
{
    uint8_t bytes[2] = {(uint8_t)(v >> 8), (uint8_t)v};
    buf_append(out, bytes, sizeof bytes);
}

static void proto_encode_u32(struct buf *out, uint32_t v)
{
    uint8_t bytes[4] = {(uint8_t)(v >> 24), (uint8_t)(v >> 16), (uint8_t)(v >> 8), (uint8_t)v};
    buf_append(out, bytes, sizeof bytes);
}

static void proto_encode_u64(struct buf *out, uint64_t v)
{
    proto_encode_u32(out, (uint32_t)(v >> 32));
    proto_encode_u32(out, (uint32_t)v);
}

static void proto_encode_f32(struct buf *out, float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    proto_encode_u32(out, bits);
}

static void proto_encode_text(struct buf *out, struct proto_text t)
{
    assert(t.size <= PROTO_MAX_TEXT);
    proto_encode_u16(out, t.size);
    buf_append(out, t.data, t.size);
}

/* ---- frames ---- */

/* Returns where the frame begins; proto_encode_end writes its length there. */
static size_t proto_encode_begin(struct buf *out, uint8_t cmd, uint64_t request_id)
{
    size_t start = out->size;
    proto_encode_u32(out, 0);
    buf_byte(out, cmd);
    proto_encode_u64(out, request_id);
    return start;
}

static void proto_encode_end(struct buf *out, size_t start)
{
    if (buf_failed(out)) {
        out->size = start;
        return;
    }
    size_t length = out->size - start;
    assert(length <= UINT32_MAX);
    for (unsigned i = 0; i < 4; i++)
        out->data[start + i] = (uint8_t)(length >> (24 - 8 * i));
}

void proto_encode_empty(struct buf *out, uint8_t cmd, uint64_t request_id)
{
    proto_encode_end(out, proto_encode_begin(out, cmd, request_id));
}

void proto_encode_hello(struct buf *out, const struct proto_hello *m)
{
    size_t start = proto_encode_begin(out, PROTO_HELLO, 0);
    proto_encode_u32(out, m->version);
    proto_encode_text(out, m->client);
    proto_encode_end(out, start);
}

void proto_encode_welcome(struct buf *out, const struct proto_welcome *m)
{
    assert(m->state <= PROTO_FAILED && m->warm <= 1 && m->progress <= 100);
    size_t start = proto_encode_begin(out, PROTO_WELCOME, 0);
    proto_encode_u32(out, m->version);
    buf_byte(out, m->state);
    buf_byte(out, m->warm);
    buf_byte(out, m->progress);
    proto_encode_text(out, m->reason);
    proto_encode_text(out, m->model);
    proto_encode_text(out, m->build);
    proto_encode_u32(out, m->arithmetic);
    buf_append(out, m->file_digest, sizeof m->file_digest);
    buf_append(out, m->shape_digest, sizeof m->shape_digest);
    proto_encode_u64(out, m->incarnation);
    proto_encode_u32(out, m->n_ctx);
    proto_encode_u32(out, m->n_vocab);
    proto_encode_u32(out, m->max_sequences);
    proto_encode_u32(out, m->prefill_chunk);
    proto_encode_u32(out, m->max_frame);
    proto_encode_u32(out, m->n_layer);
    proto_encode_u32(out, m->n_expert);
    proto_encode_u32(out, m->n_expert_used);
    proto_encode_end(out, start);
}

static void proto_encode_ids(struct buf *out, const uint32_t *ids, size_t n)
{
    uint8_t *p = buf_room(out, 4 * n);
    if (p == NULL)
        return;
    for (size_t i = 0; i < n; i++, p += 4) {
        p[0] = (uint8_t)(ids[i] >> 24);
        p[1] = (uint8_t)(ids[i] >> 16);
        p[2] = (uint8_t)(ids[i] >> 8);
        p[3] = (uint8_t)ids[i];
    }
    buf_commit(out, 4 * n);
}

void proto_encode_run(struct buf *out, uint64_t request_id, const struct proto_run *m)
{
    assert(m->n_prompt <= m->n_tokens && m->n_tokens - m->n_prompt == m->first_index);
    assert(m->n_top <= PROTO_MAX_TOP && m->n_end <= PROTO_MAX_END && m->n_bias <= PROTO_MAX_BIAS);
    assert(m->trace.size == 0 || proto_trace_good(m->trace.data, m->trace.size));
    size_t start = proto_encode_begin(out, PROTO_RUN_INFERENCE, request_id);
    proto_encode_u32(out, m->n_tokens);
    proto_encode_u32(out, m->n_prompt);
    proto_encode_u32(out, m->first_index);
    proto_encode_u32(out, m->max_new);
    proto_encode_f32(out, m->temperature);
    proto_encode_f32(out, m->top_p);
    proto_encode_f32(out, m->min_p);
    proto_encode_u32(out, (uint32_t)m->top_k);
    proto_encode_f32(out, m->presence);
    proto_encode_f32(out, m->frequency);
    proto_encode_f32(out, m->repeat);
    proto_encode_u32(out, (uint32_t)m->repeat_last_n);
    proto_encode_u64(out, m->seed);
    buf_byte(out, (uint8_t)m->priority);
    proto_encode_u32(out, m->flags);
    buf_byte(out, m->n_top);
    buf_byte(out, m->n_end);
    proto_encode_u16(out, m->n_bias);
    proto_encode_text(out, m->session);
    proto_encode_ids(out, m->end, m->n_end);
    for (size_t i = 0; i < m->n_bias; i++) {
        proto_encode_u32(out, m->bias[i].id);
        proto_encode_f32(out, m->bias[i].value);
    }
    proto_encode_ids(out, m->tokens, m->n_tokens);
    if (m->trace.size > 0)
        proto_encode_text(out, m->trace);
    proto_encode_end(out, start);
}

static void proto_encode_token(struct buf *out, const struct proto_token *t)
{
    assert(t->n_top <= PROTO_MAX_TOP);
    proto_encode_u32(out, t->id);
    buf_byte(out, t->flags);
    if ((t->flags & PROTO_TOKEN_LOGPROB) == 0)
        return;
    proto_encode_f32(out, t->logprob);
    buf_byte(out, t->n_top);
    for (size_t i = 0; i < t->n_top; i++) {
        proto_encode_u32(out, t->top[i].id);
        proto_encode_f32(out, t->top[i].logprob);
    }
}

void proto_encode_tokens(struct buf *out, uint64_t request_id, const struct proto_tokens *m)
{
    assert(m->n > 0);
    size_t start = proto_encode_begin(out, PROTO_TOKENS, request_id);
    proto_encode_u32(out, m->first_index);
    proto_encode_u16(out, m->n);
    for (size_t i = 0; i < m->n; i++) {
        assert(((m->tokens[i].flags ^ m->tokens[0].flags) & PROTO_TOKEN_PROMPT) == 0);
        proto_encode_token(out, &m->tokens[i]);
    }
    proto_encode_end(out, start);
}

void proto_encode_done(struct buf *out, uint64_t request_id, const struct proto_done *m)
{
    assert(m->finish <= PROTO_FINISH_CANCELLED);
    size_t start = proto_encode_begin(out, PROTO_DONE, request_id);
    buf_byte(out, m->finish);
    proto_encode_u32(out, m->usage.prompt);
    proto_encode_u32(out, m->usage.cached);
    proto_encode_u32(out, m->usage.generated);
    proto_encode_u64(out, m->usage.hits_vram);
    proto_encode_u64(out, m->usage.hits_ram);
    proto_encode_u64(out, m->usage.misses);
    proto_encode_u64(out, m->usage.ssd_bytes);
    proto_encode_u32(out, m->usage.queue_ms);
    proto_encode_u32(out, m->usage.prefill_ms);
    proto_encode_u32(out, m->usage.decode_ms);
    proto_encode_u32(out, m->usage.preempted);
    proto_encode_end(out, start);
}

void proto_encode_error(struct buf *out, uint64_t request_id, const struct proto_error *m)
{
    assert(m->code > ERR_OK && m->code < ERR_N && m->retryable <= 1);
    size_t start = proto_encode_begin(out, PROTO_ERROR, request_id);
    proto_encode_u16(out, m->code);
    buf_byte(out, m->retryable);
    proto_encode_text(out, m->text);
    proto_encode_end(out, start);
}

void proto_encode_progress(struct buf *out, uint64_t request_id, const struct proto_progress *m)
{
    assert(m->prefilled <= m->total && m->cached <= m->total);
    size_t start = proto_encode_begin(out, PROTO_PROGRESS, request_id);
    proto_encode_u32(out, m->prefilled);
    proto_encode_u32(out, m->cached);
    proto_encode_u32(out, m->total);
    proto_encode_end(out, start);
}

void proto_encode_notice(struct buf *out, const struct proto_notice *m)
{
    assert(m->action <= PROTO_NOTICE_RESUME);
    size_t start = proto_encode_begin(out, PROTO_NOTICE, 0);
    buf_byte(out, m->action);
    proto_encode_text(out, m->text);
    proto_encode_end(out, start);
}

void proto_encode_load_expert(struct buf *out, uint64_t request_id,
                              const struct proto_load_expert *m)
{
    size_t start = proto_encode_begin(out, PROTO_LOAD_EXPERT, request_id);
    proto_encode_u32(out, m->expert_id);
    proto_encode_u16(out, m->quant_type);
    proto_encode_u32(out, m->weight_size);
    proto_encode_end(out, start);
}

void proto_encode_unload_expert(struct buf *out, uint64_t request_id,
                                const struct proto_unload_expert *m)
{
    size_t start = proto_encode_begin(out, PROTO_UNLOAD_EXPERT, request_id);
    proto_encode_u32(out, m->expert_id);
    proto_encode_end(out, start);
}

void proto_encode_loaded(struct buf *out, uint64_t request_id, uint8_t cmd,
                         const struct proto_loaded *m)
{
    assert((cmd == PROTO_LOADED || cmd == PROTO_UNLOADED) && m->tier <= PROTO_TIER_VRAM);
    size_t start = proto_encode_begin(out, cmd, request_id);
    proto_encode_u32(out, m->expert_id);
    buf_byte(out, m->tier);
    proto_encode_end(out, start);
}

static void proto_encode_sequence(struct buf *out, const struct proto_sequence *q)
{
    assert(q->state <= PROTO_SEQUENCE_DECODE);
    proto_encode_u64(out, q->request_id);
    buf_byte(out, q->state);
    proto_encode_u32(out, q->prompt);
    proto_encode_u32(out, q->prefilled);
    proto_encode_u32(out, q->generated);
    proto_encode_u32(out, q->kv_pages);
    proto_encode_u64(out, q->age_ms);
    proto_encode_text(out, q->client);
}

void proto_encode_status(struct buf *out, uint64_t request_id, const struct proto_status *m)
{
    assert(m->version >= 1 && m->state <= PROTO_FAILED);
    const uint64_t values[] = {
#define PROTO_STATUS(name, type, help) m->name,
#include "proto_status.def"
#undef PROTO_STATUS
    };
    enum {
        N_VALUES = sizeof values / sizeof *values
    };
    size_t start = proto_encode_begin(out, PROTO_STATUS, request_id);
    proto_encode_u16(out, m->version);
    proto_encode_u64(out, m->age_us);
    buf_byte(out, m->state);
    proto_encode_text(out, m->backend);
    proto_encode_text(out, m->degraded);
    proto_encode_text(out, m->storage);
    proto_encode_u16(out, N_VALUES);
    for (size_t i = 0; i < N_VALUES; i++)
        proto_encode_u64(out, values[i]);
    proto_encode_u16(out, m->n_sequences);
    for (size_t i = 0; i < m->n_sequences; i++)
        proto_encode_sequence(out, &m->sequences[i]);
    proto_encode_end(out, start);
}

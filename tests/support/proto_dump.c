#include "proto_dump.h"

#include <inttypes.h>

static void line_u64(struct buf *b, const char *field, uint64_t v)
{
    buf_format(b, "%s = %" PRIu64 "\n", field, v);
}

static void line_i64(struct buf *b, const char *field, int64_t v)
{
    buf_format(b, "%s = %" PRId64 "\n", field, v);
}

static void line_float(struct buf *b, const char *field, float v)
{
    buf_format(b, "%s = %.9g\n", field, (double)v);
}

static void line_text(struct buf *b, const char *field, struct proto_text t)
{
    buf_format(b, "%s = \"%.*s\"\n", field, t.size, t.data);
}

static void line_bytes(struct buf *b, const char *field, const uint8_t *p, size_t n)
{
    buf_format(b, "%s = ", field);
    for (size_t i = 0; i < n; i++)
        buf_format(b, "%02x", p[i]);
    buf_text(b, "\n");
}

static void line_ids(struct buf *b, const char *field, const uint32_t *ids, size_t n)
{
    buf_format(b, "%s =", field);
    for (size_t i = 0; i < n; i++)
        buf_format(b, " %u", ids[i]);
    buf_text(b, "\n");
}

static enum err_code dump_hello(const struct proto_frame *f, struct buf *b, struct buf *again,
                                struct err *e)
{
    struct proto_hello m;
    enum err_code code = proto_decode_hello(f, &m, e);
    if (code != ERR_OK)
        return code;
    line_u64(b, "version", m.version);
    line_text(b, "client", m.client);
    proto_encode_hello(again, &m);
    return ERR_OK;
}

static enum err_code dump_welcome(const struct proto_frame *f, struct buf *b, struct buf *again,
                                  struct err *e)
{
    struct proto_welcome m;
    enum err_code code = proto_decode_welcome(f, &m, e);
    if (code != ERR_OK)
        return code;
    line_u64(b, "version", m.version);
    buf_format(b, "state = %s\n", proto_state_name(m.state));
    line_u64(b, "warm", m.warm);
    line_u64(b, "progress", m.progress);
    line_text(b, "reason", m.reason);
    line_text(b, "model", m.model);
    line_text(b, "build", m.build);
    line_u64(b, "arithmetic", m.arithmetic);
    line_bytes(b, "file_digest", m.file_digest, sizeof m.file_digest);
    line_bytes(b, "shape_digest", m.shape_digest, sizeof m.shape_digest);
    line_u64(b, "incarnation", m.incarnation);
    line_u64(b, "n_ctx", m.n_ctx);
    line_u64(b, "n_vocab", m.n_vocab);
    line_u64(b, "max_sequences", m.max_sequences);
    line_u64(b, "prefill_chunk", m.prefill_chunk);
    line_u64(b, "max_frame", m.max_frame);
    line_u64(b, "n_layer", m.n_layer);
    line_u64(b, "n_expert", m.n_expert);
    line_u64(b, "n_expert_used", m.n_expert_used);
    proto_encode_welcome(again, &m);
    return ERR_OK;
}

static void dump_run_fields(const struct proto_run *m, struct buf *b)
{
    line_u64(b, "n_tokens", m->n_tokens);
    line_u64(b, "n_prompt", m->n_prompt);
    line_u64(b, "first_index", m->first_index);
    line_u64(b, "max_new", m->max_new);
    line_float(b, "temperature", m->temperature);
    line_float(b, "top_p", m->top_p);
    line_float(b, "min_p", m->min_p);
    line_i64(b, "top_k", m->top_k);
    line_float(b, "presence", m->presence);
    line_float(b, "frequency", m->frequency);
    line_float(b, "repeat", m->repeat);
    line_i64(b, "repeat_last_n", m->repeat_last_n);
    line_u64(b, "seed", m->seed);
    line_i64(b, "priority", m->priority);
    line_u64(b, "flags", m->flags);
    line_u64(b, "n_top", m->n_top);
    line_text(b, "session", m->session);
    line_ids(b, "end", m->end, m->n_end);
    buf_text(b, "bias =");
    for (size_t i = 0; i < m->n_bias; i++)
        buf_format(b, " %u:%.9g", m->bias[i].id, (double)m->bias[i].value);
    buf_text(b, "\n");
    line_ids(b, "tokens", m->tokens, m->n_tokens);
    line_text(b, "trace", m->trace);
}

static enum err_code dump_run(const struct proto_frame *f, struct proto_scratch *s, struct buf *b,
                              struct buf *again, struct err *e)
{
    struct proto_run m;
    enum err_code code = proto_decode_run(f, s, &m, e);
    if (code != ERR_OK)
        return code;
    dump_run_fields(&m, b);
    proto_encode_run(again, f->request_id, &m);
    return ERR_OK;
}

static enum err_code dump_tokens(const struct proto_frame *f, struct proto_scratch *s,
                                 struct buf *b, struct buf *again, struct err *e)
{
    struct proto_tokens m;
    enum err_code code = proto_decode_tokens(f, s, &m, e);
    if (code != ERR_OK)
        return code;
    line_u64(b, "first_index", m.first_index);
    for (size_t i = 0; i < m.n; i++) {
        const struct proto_token *t = &m.tokens[i];
        buf_format(b, "token = %u flags %u", t->id, t->flags);
        if ((t->flags & PROTO_TOKEN_LOGPROB) != 0)
            buf_format(b, " logprob %.9g top", (double)t->logprob);
        for (size_t k = 0; k < t->n_top; k++)
            buf_format(b, " %u:%.9g", t->top[k].id, (double)t->top[k].logprob);
        buf_text(b, "\n");
    }
    proto_encode_tokens(again, f->request_id, &m);
    return ERR_OK;
}

static enum err_code dump_done(const struct proto_frame *f, struct buf *b, struct buf *again,
                               struct err *e)
{
    struct proto_done m;
    enum err_code code = proto_decode_done(f, &m, e);
    if (code != ERR_OK)
        return code;
    buf_format(b, "finish = %s\n", proto_finish_name(m.finish));
    line_u64(b, "prompt", m.usage.prompt);
    line_u64(b, "cached", m.usage.cached);
    line_u64(b, "generated", m.usage.generated);
    line_u64(b, "hits_vram", m.usage.hits_vram);
    line_u64(b, "hits_ram", m.usage.hits_ram);
    line_u64(b, "misses", m.usage.misses);
    line_u64(b, "ssd_bytes", m.usage.ssd_bytes);
    line_u64(b, "queue_ms", m.usage.queue_ms);
    line_u64(b, "prefill_ms", m.usage.prefill_ms);
    line_u64(b, "decode_ms", m.usage.decode_ms);
    line_u64(b, "preempted", m.usage.preempted);
    proto_encode_done(again, f->request_id, &m);
    return ERR_OK;
}

static enum err_code dump_error(const struct proto_frame *f, struct buf *b, struct buf *again,
                                struct err *e)
{
    struct proto_error m;
    enum err_code code = proto_decode_error(f, &m, e);
    if (code != ERR_OK)
        return code;
    buf_format(b, "code = %s\n", err_code_name((enum err_code)m.code));
    line_u64(b, "retryable", m.retryable);
    line_text(b, "text", m.text);
    proto_encode_error(again, f->request_id, &m);
    return ERR_OK;
}

static enum err_code dump_progress(const struct proto_frame *f, struct buf *b, struct buf *again,
                                   struct err *e)
{
    struct proto_progress m;
    enum err_code code = proto_decode_progress(f, &m, e);
    if (code != ERR_OK)
        return code;
    line_u64(b, "prefilled", m.prefilled);
    line_u64(b, "cached", m.cached);
    line_u64(b, "total", m.total);
    proto_encode_progress(again, f->request_id, &m);
    return ERR_OK;
}

static enum err_code dump_notice(const struct proto_frame *f, struct buf *b, struct buf *again,
                                 struct err *e)
{
    struct proto_notice m;
    enum err_code code = proto_decode_notice(f, &m, e);
    if (code != ERR_OK)
        return code;
    line_u64(b, "action", m.action);
    line_text(b, "text", m.text);
    proto_encode_notice(again, &m);
    return ERR_OK;
}

static enum err_code dump_expert(const struct proto_frame *f, struct buf *b, struct buf *again,
                                 struct err *e)
{
    if (f->cmd == PROTO_LOAD_EXPERT) {
        struct proto_load_expert m;
        enum err_code code = proto_decode_load_expert(f, &m, e);
        if (code != ERR_OK)
            return code;
        line_u64(b, "expert_id", m.expert_id);
        line_u64(b, "quant_type", m.quant_type);
        line_u64(b, "weight_size", m.weight_size);
        proto_encode_load_expert(again, f->request_id, &m);
        return ERR_OK;
    }
    if (f->cmd == PROTO_UNLOAD_EXPERT) {
        struct proto_unload_expert m;
        enum err_code code = proto_decode_unload_expert(f, &m, e);
        if (code != ERR_OK)
            return code;
        line_u64(b, "expert_id", m.expert_id);
        proto_encode_unload_expert(again, f->request_id, &m);
        return ERR_OK;
    }
    struct proto_loaded m;
    enum err_code code = proto_decode_loaded(f, &m, e);
    if (code != ERR_OK)
        return code;
    line_u64(b, "expert_id", m.expert_id);
    line_u64(b, "tier", m.tier);
    proto_encode_loaded(again, f->request_id, f->cmd, &m);
    return ERR_OK;
}

static enum err_code dump_status(const struct proto_frame *f, struct proto_scratch *s,
                                 struct buf *b, struct buf *again, struct err *e)
{
    static const char *const states[] = {"waiting", "prefill", "decode"};
    struct proto_status m;
    enum err_code code = proto_decode_status(f, s, &m, e);
    if (code != ERR_OK)
        return code;
    line_u64(b, "version", m.version);
    line_u64(b, "age_us", m.age_us);
    buf_format(b, "state = %s\n", proto_state_name(m.state));
    line_text(b, "backend", m.backend);
    line_text(b, "degraded", m.degraded);
    line_text(b, "storage", m.storage);
#define PROTO_STATUS(name, type, help) line_u64(b, #name, m.name);
#include "proto_status.def"
#undef PROTO_STATUS
    for (size_t i = 0; i < m.n_sequences; i++) {
        const struct proto_sequence *q = &m.sequences[i];
        buf_format(b,
                   "sequence = request %" PRIu64
                   " %s prompt %u prefilled %u generated %u pages %u age %" PRIu64 " client %.*s\n",
                   q->request_id, states[q->state], q->prompt, q->prefilled, q->generated,
                   q->kv_pages, q->age_ms, q->client.size, q->client.data);
    }
    proto_encode_status(again, f->request_id, &m);
    return ERR_OK;
}

static enum err_code dump_payload(const struct proto_frame *f, struct proto_scratch *s,
                                  struct buf *b, struct buf *again, struct err *e)
{
    switch (f->cmd) {
    case PROTO_HELLO:
        return dump_hello(f, b, again, e);
    case PROTO_WELCOME:
        return dump_welcome(f, b, again, e);
    case PROTO_RUN_INFERENCE:
        return dump_run(f, s, b, again, e);
    case PROTO_TOKENS:
        return dump_tokens(f, s, b, again, e);
    case PROTO_DONE:
        return dump_done(f, b, again, e);
    case PROTO_ERROR:
        return dump_error(f, b, again, e);
    case PROTO_PROGRESS:
        return dump_progress(f, b, again, e);
    case PROTO_NOTICE:
        return dump_notice(f, b, again, e);
    case PROTO_LOAD_EXPERT:
    case PROTO_UNLOAD_EXPERT:
    case PROTO_LOADED:
    case PROTO_UNLOADED:
        return dump_expert(f, b, again, e);
    case PROTO_STATUS:
        return dump_status(f, s, b, again, e);
    case PROTO_CANCEL:
    case PROTO_STATUS_REQUEST:
    case PROTO_HINT:
    case PROTO_ROUTE:
    case PROTO_DRAIN:
    case PROTO_DRAINED:
        proto_encode_empty(again, f->cmd, f->request_id);
        return ERR_OK;
    default:
        return err_set(e, ERR_UNSUPPORTED, "command 0x%02x", f->cmd);
    }
}

enum err_code proto_dump(const struct proto_frame *f, struct buf *text, struct buf *again,
                         struct err *e)
{
    struct proto_scratch scratch;
    proto_scratch_init(&scratch);
    line_u64(text, "request_id", f->request_id);
    enum err_code code = dump_payload(f, &scratch, text, again, e);
    proto_scratch_done(&scratch);
    return code;
}

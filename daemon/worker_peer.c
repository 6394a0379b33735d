#include "worker_peer.h"

#include <assert.h>
#include <stdio.h>

#include "alloc.h"
#include "engine_commands.h"
#include "fault.h"
#include "log.h"
#include "rng.h"
#include "worker_announce.h"
#include "worker_status.h"

/* A handle names slot and serial, so that events find their peer without a table. A slot that was
 * used again cannot take another's events: serials are never used twice. */
enum {
    WORKER_PEER_SLOT_SHIFT = 48,
    WORKER_PEER_KEEP = 256 << 10 /* memory that an empty queue keeps */
};

struct worker_request {
    struct list link;
    uint64_t id; /* the client's */
    uint64_t handle;
    char trace[PROTO_MAX_TRACE + 1]; /* what the client calls it, or "-" */
};

struct worker_command {
    struct list link;
    uint64_t id;                    /* the client's */
    struct engine_command *command; /* the engine's until it ends */
};

void worker_peer_set_init(struct worker_peers *set, struct engine *engine, uint32_t max_frame,
                          struct ticks ticks)
{
    *set = (struct worker_peers){.engine = engine, .max_frame = max_frame, .ticks = ticks};
    set->start_ns = ticks_ns(ticks);
    rng_system(&set->incarnation, sizeof set->incarnation);
    proto_scratch_init(&set->scratch);
    set->welcome = BUF_INIT(64 << 10);
}

void worker_peer_set_done(struct worker_peers *set)
{
    for (uint32_t i = 0; i < WORKER_PEER_MAX; i++)
        worker_peer_close(set->slots[i]);
    proto_scratch_done(&set->scratch);
    buf_done(&set->welcome);
}

/* ---- one peer ---- */

enum err_code worker_peer_open(struct worker_peers *set, struct worker_peer **ret, struct err *e)
{
    uint32_t slot = 0;
    while (slot < WORKER_PEER_MAX && set->slots[slot] != NULL)
        slot++;
    if (slot == WORKER_PEER_MAX)
        return err_set(e, ERR_LIMIT, "%d connections, the limit", WORKER_PEER_MAX);
    struct worker_peer *p = alloc_zero(ALLOC_PEER, 1, sizeof *p);
    if (p == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a connection");
    p->set = set;
    p->slot = slot;
    proto_reader_init(&p->reader, set->max_frame);
    p->out = BUF_INIT(WORKER_PEER_QUEUE_BYTES);
    list_init(&p->requests);
    list_init(&p->commands);
    set->slots[slot] = p;
    *ret = p;
    return ERR_OK;
}

static void worker_peer_end_request(struct worker_peer *p, struct worker_request *r)
{
    list_remove(&r->link);
    alloc_free(r);
    p->n_requests--;
    p->set->n_requests--;
}

static void worker_peer_end_command(struct worker_peer *p, struct worker_command *c)
{
    list_remove(&c->link);
    alloc_free(c);
    p->n_commands--;
    p->set->n_commands--;
}

void worker_peer_close(struct worker_peer *p)
{
    if (p == NULL)
        return;
    list_each_safe(it, &p->requests) {
        struct worker_request *r = list_entry(it, struct worker_request, link);
        log_debug("request", "abandoned", "trace=%s client=\"%s\"", r->trace, p->client);
        engine_cancel(p->set->engine, r->handle);
        worker_peer_end_request(p, r);
    }
    list_each_safe(it, &p->commands) {
        struct worker_command *c = list_entry(it, struct worker_command, link);
        engine_cancel_command(p->set->engine, c->command);
        worker_peer_end_command(p, c);
    }
    p->set->slots[p->slot] = NULL;
    proto_reader_done(&p->reader);
    buf_done(&p->out);
    alloc_free(p);
}

void worker_peer_queued(struct worker_peer *p)
{
    if (p->out_sent == 0 && p->moved_ms == 0)
        p->moved_ms = ticks_ms(p->set->ticks);
    if (buf_failed(&p->out) && p->lost == NULL)
        p->lost = "its queue is full";
}

static void worker_peer_error(struct worker_peer *p, uint64_t id, enum err_code code,
                              const char *text)
{
    struct proto_error m = {
        .code = (uint16_t)code, .retryable = err_code_retryable(code), .text = proto_text_of(text)};
    proto_encode_error(&p->out, id, &m);
    worker_peer_queued(p);
}

/* The peer does not keep to the protocol: it is told, and closed. */
static void worker_peer_refuse(struct worker_peer *p, uint64_t id, const struct err *e)
{
    log_warn("peer", "malformed", "client=\"%s\" error=\"%s\"", p->client, e->text);
    worker_peer_error(p, id, e->code, e->text);
    p->ending = true;
}

/* ---- requests ---- */

static struct worker_request *worker_peer_find_id(struct worker_peer *p, uint64_t id)
{
    list_each(it, &p->requests) {
        struct worker_request *r = list_entry(it, struct worker_request, link);
        if (r->id == id)
            return r;
    }
    return NULL;
}

static struct worker_command *worker_peer_find_command(struct worker_peer *p, uint64_t id)
{
    list_each(it, &p->commands) {
        struct worker_command *c = list_entry(it, struct worker_command, link);
        if (c->id == id)
            return c;
    }
    return NULL;
}

static enum err_code worker_peer_check_id(struct worker_peer *p, uint64_t id, struct err *e)
{
    if (id == 0)
        return err_set(e, ERR_ARGUMENT, "request id 0 is the connection's, ids begin at 1");
    if (worker_peer_find_id(p, id) != NULL || worker_peer_find_command(p, id) != NULL)
        return err_set(e, ERR_ARGUMENT, "request id %llu is in use", (unsigned long long)id);
    return ERR_OK;
}

/* Moves it to the front: those that run are few and send often, those that wait do not send. */
static struct worker_request *worker_peer_find_handle(struct worker_peer *p, uint64_t handle)
{
    list_each(it, &p->requests) {
        struct worker_request *r = list_entry(it, struct worker_request, link);
        if (r->handle != handle)
            continue;
        list_remove(&r->link);
        list_prepend(&p->requests, &r->link);
        return r;
    }
    return NULL;
}

static enum err_code worker_peer_admit(struct worker_peer *p, uint64_t id,
                                       const struct proto_run *run, struct err *e)
{
    struct worker_peers *set = p->set;
    if (worker_peer_check_id(p, id, e) != ERR_OK)
        return e->code;
    if (p->n_requests >= WORKER_PEER_MAX_REQUESTS)
        return err_set(e, ERR_BUSY, "%u requests of this connection wait already", p->n_requests);
    uint64_t handle = (uint64_t)p->slot << WORKER_PEER_SLOT_SHIFT | (set->serial + 1);
    struct worker_request *r = alloc_get(ALLOC_REQUEST, sizeof *r);
    struct engine_request *request = engine_request_new(handle, run, p->client);
    if (r == NULL || request == NULL) {
        err_set(e, ERR_NOMEM, "no memory for a request of %u tokens", run->n_tokens);
        goto refused;
    }
    if (engine_submit(set->engine, request, e) != ERR_OK)
        goto refused;
    set->serial++;
    *r = (struct worker_request){.id = id, .handle = handle, .trace = "-"};
    if (run->trace.size > 0)
        snprintf(r->trace, sizeof r->trace, "%.*s", run->trace.size, run->trace.data);
    log_debug("request", "accepted", "trace=%s client=\"%s\" prompt=%u first_index=%u", r->trace,
              p->client, run->n_prompt, run->first_index);
    list_append(&p->requests, &r->link);
    p->n_requests++;
    set->n_requests++;
    fault_hit(FAULT_WORKER_ADMIT);
    return ERR_OK;
refused:
    engine_request_free(request);
    alloc_free(r);
    return e->code;
}

static void worker_peer_run(struct worker_peer *p, const struct proto_frame *f)
{
    struct proto_run run;
    struct err e = {0};
    if (proto_decode_run(f, &p->set->scratch, &run, &e) != ERR_OK) {
        if (e.code == ERR_PROTOCOL)
            worker_peer_refuse(p, f->request_id, &e);
        else
            worker_peer_error(p, f->request_id, e.code, e.text);
        return;
    }
    if (worker_peer_admit(p, f->request_id, &run, &e) != ERR_OK)
        worker_peer_error(p, f->request_id, e.code, e.text);
}

static void worker_peer_cancel(struct worker_peer *p, uint64_t id)
{
    struct worker_request *r = worker_peer_find_id(p, id);
    struct worker_command *c = worker_peer_find_command(p, id);
    if (r != NULL)
        engine_cancel(p->set->engine, r->handle); /* done follows as an event */
    if (c != NULL)
        engine_cancel_command(p->set->engine, c->command); /* an error does */
}

/* ---- commands about experts ---- */

static enum err_code worker_peer_command(struct worker_peer *p, uint64_t id, bool unload,
                                         const struct proto_load_expert *expert, struct err *e)
{
    struct worker_peers *set = p->set;
    if (worker_peer_check_id(p, id, e) != ERR_OK)
        return e->code;
    if (p->n_commands >= WORKER_PEER_MAX_COMMANDS)
        return err_set(e, ERR_BUSY,
                       "%u commands about experts of this connection wait already, the limit",
                       p->n_commands);
    struct worker_command *c = alloc_get(ALLOC_REQUEST, sizeof *c);
    struct engine_command *command = alloc_zero(ALLOC_REQUEST, 1, sizeof *command);
    if (c == NULL || command == NULL) {
        err_set(e, ERR_NOMEM, "no memory for a command about an expert");
        goto refused;
    }
    command->slot = p->slot;
    command->unload = unload;
    command->expert = *expert;
    if (engine_submit_command(set->engine, command, e) != ERR_OK)
        goto refused;
    *c = (struct worker_command){.id = id, .command = command};
    list_append(&p->commands, &c->link);
    p->n_commands++;
    set->n_commands++;
    return ERR_OK;
refused:
    alloc_free(command);
    alloc_free(c);
    return e->code;
}

static void worker_peer_expert(struct worker_peer *p, const struct proto_frame *f)
{
    const bool unload = f->cmd == PROTO_UNLOAD_EXPERT;
    struct proto_load_expert expert = {.quant_type = PROTO_ANY_QUANT_TYPE,
                                       .weight_size = PROTO_ANY_WEIGHT_SIZE};
    struct proto_unload_expert m = {.expert_id = 0};
    struct err e = {0};
    const enum err_code code =
        unload ? proto_decode_unload_expert(f, &m, &e) : proto_decode_load_expert(f, &expert, &e);
    if (code != ERR_OK) {
        worker_peer_refuse(p, f->request_id, &e);
        return;
    }
    if (unload)
        expert.expert_id = m.expert_id;
    if (worker_peer_command(p, f->request_id, unload, &expert, &e) != ERR_OK)
        worker_peer_error(p, f->request_id, e.code, e.text);
}

/* ---- hello, status, drain ---- */

static void worker_peer_hello(struct worker_peer *p, const struct proto_frame *f)
{
    struct proto_hello m;
    struct err e = {0};
    if (proto_decode_hello(f, &m, &e) == ERR_OK && m.version != PROTO_VERSION)
        err_set(&e, ERR_UNSUPPORTED, "protocol version %u: this worker speaks %d", m.version,
                PROTO_VERSION);
    if (e.code != ERR_OK) {
        worker_peer_refuse(p, 0, &e);
        return;
    }
    snprintf(p->client, sizeof p->client, "%.*s", m.client.size, m.client.data);
    worker_announce_hello(p);
    log_debug("peer", "hello", "client=\"%s\"", p->client);
}

static uint64_t worker_peer_id_of(void *context, uint64_t handle)
{
    struct worker_peer *p = context;
    list_each(it, &p->requests) {
        const struct worker_request *r = list_entry(it, struct worker_request, link);
        if (r->handle == handle)
            return r->id;
    }
    return 0;
}

static void worker_peer_status(struct worker_peer *p, uint64_t id)
{
    struct worker_peers *set = p->set;
    struct engine_facts facts = {0};
    engine_get_facts(set->engine, &facts);
    engine_get_snapshot(set->engine, &set->snapshot);
    worker_status_complete(&set->snapshot, facts.state, ticks_ns(set->ticks), set->start_ns,
                           worker_peer_id_of, p);
    proto_encode_status(&p->out, id, &set->snapshot.status);
    worker_peer_queued(p);
}

/* From the next frame on nothing is accepted. The loop does the rest: it sends drained when nothing
 * runs any more, and ends. */
static void worker_peer_drain(struct worker_peer *p)
{
    log_info("peer", "drain_asked", "client=\"%s\"", p->client);
    p->drains = true;
    p->set->drain_asked = true;
    engine_drain(p->set->engine);
    worker_announce_welcome(p->set);
}

/* ---- frames ---- */

static void worker_peer_take(struct worker_peer *p, const struct proto_frame *f)
{
    struct err e = {0};
    if (!p->greeted && f->cmd != PROTO_HELLO) {
        err_set(&e, ERR_PROTOCOL, "command 0x%02x (%s) before hello", f->cmd,
                proto_cmd_name(f->cmd));
        worker_peer_refuse(p, f->request_id, &e);
        return;
    }
    switch (f->cmd) {
    case PROTO_HELLO:
        worker_peer_hello(p, f);
        return;
    case PROTO_RUN_INFERENCE:
        worker_peer_run(p, f);
        return;
    case PROTO_LOAD_EXPERT:
    case PROTO_UNLOAD_EXPERT:
        worker_peer_expert(p, f);
        return;
    case PROTO_CANCEL:
        worker_peer_cancel(p, f->request_id);
        return;
    case PROTO_STATUS_REQUEST:
        worker_peer_status(p, f->request_id);
        return;
    case PROTO_DRAIN:
        worker_peer_drain(p);
        return;
    default:
        err_set(&e, ERR_UNSUPPORTED, "command 0x%02x (%s) is not supported by this worker", f->cmd,
                proto_cmd_name(f->cmd));
        worker_peer_error(p, f->request_id, e.code, e.text);
        return;
    }
}

void worker_peer_on_bytes(struct worker_peer *p, const void *bytes, size_t n)
{
    struct proto_frame f;
    struct err e = {0};
    if (p->ending || p->lost != NULL)
        return;
    enum err_code code = proto_reader_feed(&p->reader, bytes, n, &e);
    while (!p->ending && p->lost == NULL && proto_reader_next(&p->reader, &f) == 1)
        worker_peer_take(p, &f);
    if (code != ERR_OK && !p->ending)
        worker_peer_refuse(p, 0, &e);
}

const uint8_t *worker_peer_unsent(const struct worker_peer *p, size_t *ret_n)
{
    *ret_n = p->out.size - p->out_sent;
    return *ret_n > 0 ? p->out.data + p->out_sent : NULL;
}

void worker_peer_sent(struct worker_peer *p, size_t n)
{
    assert(n <= p->out.size - p->out_sent);
    p->out_sent += n;
    if (n > 0)
        p->moved_ms = ticks_ms(p->set->ticks);
    if (p->out_sent == p->out.size) {
        buf_clear(&p->out);
        if (p->out.capacity > WORKER_PEER_KEEP)
            buf_done(&p->out);
        p->out_sent = 0;
        p->moved_ms = 0;
    } else if (p->out_sent > p->out.size / 2) {
        buf_drop_front(&p->out, p->out_sent);
        p->out_sent = 0;
    }
}

void worker_peer_check_stall(struct worker_peer *p, uint64_t now_ms)
{
    if (p->out.size > p->out_sent && p->lost == NULL &&
        now_ms - p->moved_ms >= WORKER_PEER_STALL_MS)
        p->lost = "it takes nothing";
}

/* ---- from the engine ---- */

static void worker_peer_log_done(const struct worker_peer *p, const struct worker_request *r,
                                 const struct proto_done *m)
{
    log_info("request", "done",
             "trace=%s client=\"%s\" finish=%s prompt=%u cached=%u generated=%u queue_ms=%u "
             "prefill_ms=%u decode_ms=%u",
             r->trace, p->client, proto_finish_name(m->finish), m->usage.prompt, m->usage.cached,
             m->usage.generated, m->usage.queue_ms, m->usage.prefill_ms, m->usage.decode_ms);
}

struct worker_peer *worker_peer_on_event(struct worker_peers *set, const struct engine_event *event)
{
    uint64_t slot = event->handle >> WORKER_PEER_SLOT_SHIFT;
    struct worker_peer *p = slot < WORKER_PEER_MAX ? set->slots[slot] : NULL;
    struct worker_request *r = p != NULL ? worker_peer_find_handle(p, event->handle) : NULL;
    if (r == NULL)
        return NULL;
    struct proto_tokens tokens;
    switch (event->kind) {
    case ENGINE_PROGRESS:
        proto_encode_progress(&p->out, r->id, &event->progress);
        break;
    case ENGINE_TOKENS:
        tokens = (struct proto_tokens){.first_index = event->tokens.first_index,
                                       .n = event->tokens.n,
                                       .tokens = event->tokens.tokens};
        proto_encode_tokens(&p->out, r->id, &tokens);
        break;
    case ENGINE_DONE:
        proto_encode_done(&p->out, r->id, &event->done);
        worker_peer_log_done(p, r, &event->done);
        worker_peer_end_request(p, r);
        break;
    case ENGINE_ERROR:
        worker_peer_error(p, r->id, event->error.code, event->error.text);
        log_info("request", "failed", "trace=%s client=\"%s\" code=%s reason=\"%s\"", r->trace,
                 p->client, err_code_name(event->error.code), event->error.text);
        worker_peer_end_request(p, r);
        break;
    case ENGINE_STATE:
        break;
    }
    worker_peer_queued(p);
    return p;
}

static struct worker_command *worker_peer_find_answered(struct worker_peer *p,
                                                        const struct engine_command *command)
{
    list_each(it, &p->commands) {
        struct worker_command *c = list_entry(it, struct worker_command, link);
        if (c->command == command)
            return c;
    }
    return NULL;
}

/* The client is told of all; of these whoever looks after the worker is too. */
static void worker_peer_log_command(const struct worker_peer *p, const struct engine_command *m)
{
    const enum err_code code = m->error.code;
    if (code == ERR_IO || code == ERR_FORMAT || code == ERR_DEVICE)
        log_warn("expert", "load_failed", "expert=%u client=\"%s\" code=%s reason=\"%s\"",
                 m->expert.expert_id, p->client, err_code_name(code), m->error.text);
}

struct worker_peer *worker_peer_on_command(struct worker_peers *set,
                                           const struct engine_command *command)
{
    struct worker_peer *p = set->slots[command->slot];
    struct worker_command *c = p != NULL ? worker_peer_find_answered(p, command) : NULL;
    if (c == NULL)
        return NULL;
    const struct proto_loaded m = {.expert_id = command->expert.expert_id, .tier = command->tier};
    if (command->error.code == ERR_OK) {
        proto_encode_loaded(&p->out, c->id, command->unload ? PROTO_UNLOADED : PROTO_LOADED, &m);
        worker_peer_queued(p);
    } else {
        worker_peer_error(p, c->id, command->error.code, command->error.text);
        worker_peer_log_command(p, command);
    }
    worker_peer_end_command(p, c);
    return p;
}

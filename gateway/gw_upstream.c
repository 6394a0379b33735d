#include "gw_upstream.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "log.h"

enum {
    FIRST_DELAY_MS = 50,
    MAX_DELAY_MS = 2000,
    WELCOME_MS = 5000,
    READ_BYTES = 64 * 1024,
    MAX_QUEUED_BYTES = 1 << 30
};

enum link_state {
    LINK_DOWN, /* the timer connects */
    LINK_CONNECTING,
    LINK_HELLO, /* waits for welcome */
    LINK_UP,
    LINK_CLOSING /* the pipe is being closed, then DOWN */
};

struct gw_upstream {
    uv_loop_t *loop;
    char path[108];
    size_t max_frame;
    struct ticks ticks;
    struct gw_upstream_events events;
    struct gw_upstream_facts facts;
    struct gw_upstream_status status;

    enum link_state state;
    uv_pipe_t pipe;
    uv_timer_t timer;
    uv_connect_t connect;
    uv_write_t write;
    uint64_t delay_ms;
    uint64_t heard_ns, status_due_ns; /* status_due_ns 0: none is due */
    bool writing, closed, said_down;
    unsigned open_handles;

    struct proto_reader reader;
    struct proto_scratch scratch;
    struct buf out;    /* to be written */
    struct buf flight; /* being written */
    char in[READ_BYTES];
};

static void connect_start(struct gw_upstream *u);
static void flush(struct gw_upstream *u);

/* ---- down and up ---- */

static void on_handle_closed(uv_handle_t *handle)
{
    struct gw_upstream *u = handle->data;
    if (--u->open_handles > 0)
        return;
    proto_scratch_done(&u->scratch);
    buf_done(&u->out);
    buf_done(&u->flight);
    alloc_free(u);
}

static void on_timer(uv_timer_t *timer)
{
    connect_start(timer->data);
}

static void on_pipe_closed(uv_handle_t *handle)
{
    struct gw_upstream *u = handle->data;
    proto_reader_done(&u->reader);
    buf_clear(&u->out);
    buf_clear(&u->flight);
    u->writing = false;
    u->status_due_ns = 0;
    if (u->closed) {
        on_handle_closed(handle);
        return;
    }
    u->state = LINK_DOWN;
    uv_timer_start(&u->timer, on_timer, u->delay_ms, 0);
    u->delay_ms = u->delay_ms * 2 > MAX_DELAY_MS ? MAX_DELAY_MS : u->delay_ms * 2;
}

void gw_upstream_drop(struct gw_upstream *u, const char *why)
{
    bool was_connected = u->facts.connected;
    if (u->state == LINK_DOWN || u->state == LINK_CLOSING)
        return;
    if (was_connected)
        log_warn("upstream", "lost", "socket=%s reason=\"%s\" action=reconnect", u->path, why);
    else if (!u->said_down)
        log_info("upstream", "waiting", "socket=%s reason=\"%s\"", u->path, why);
    u->said_down = true;
    u->state = LINK_CLOSING;
    u->facts.connected = false;
    uv_timer_stop(&u->timer);
    uv_close((uv_handle_t *)&u->pipe, on_pipe_closed);
    if (!was_connected)
        return;
    u->events.lost(u->events.context);
    u->events.state(u->events.context);
}

/* ---- frames in ---- */

static void text_copy(char *to, size_t n, struct proto_text text)
{
    snprintf(to, n, "%.*s", (int)text.size, text.data ? text.data : "");
}

static void take_welcome(struct gw_upstream *u, const struct proto_welcome *m)
{
    struct gw_upstream_facts *f = &u->facts;
    bool is_new = !f->connected;
    if (is_new || f->state != (enum proto_state)m->state) {
        log_info("upstream", is_new ? "connected" : "state",
                 "state=%s model=\"%.*s\" build=%.*s arithmetic=%u incarnation=%016llx",
                 proto_state_name((enum proto_state)m->state), (int)m->model.size, m->model.data,
                 (int)m->build.size, m->build.data, m->arithmetic,
                 (unsigned long long)m->incarnation);
    }
    f->connected = f->known = true;
    f->state = (enum proto_state)m->state;
    f->progress = m->progress;
    text_copy(f->reason, sizeof f->reason, m->reason);
    text_copy(f->build, sizeof f->build, m->build);
    f->arithmetic = m->arithmetic;
    memcpy(f->file_digest, m->file_digest, sizeof f->file_digest);
    memcpy(f->shape_digest, m->shape_digest, sizeof f->shape_digest);
    f->incarnation = m->incarnation;
    f->n_ctx = m->n_ctx;
    f->max_sequences = m->max_sequences;
    f->max_frame = m->max_frame;
    u->state = LINK_UP;
    uv_timer_stop(&u->timer);
    u->said_down = false;
    u->delay_ms = FIRST_DELAY_MS;
    u->events.state(u->events.context);
}

static enum err_code take_status(struct gw_upstream *u, const struct proto_status *m, struct err *e)
{
    struct gw_upstream_status *s = &u->status;
    s->known = true;
    s->received_ns = ticks_ns(u->ticks);
    s->asked_ns = u->status_due_ns;
    s->status = *m;
    text_copy(s->backend, sizeof s->backend, m->backend);
    text_copy(s->degraded, sizeof s->degraded, m->degraded);
    text_copy(s->storage, sizeof s->storage, m->storage);
    s->status.storage = proto_text_of(s->storage);
    s->status.backend = proto_text_of(s->backend);
    s->status.degraded = proto_text_of(s->degraded);
    if (s->status.n_sequences > GW_UPSTREAM_MAX_LISTED)
        s->status.n_sequences = GW_UPSTREAM_MAX_LISTED;
    for (unsigned i = 0; i < s->status.n_sequences; i++) {
        s->sequences[i] = m->sequences[i];
        text_copy(s->clients[i], sizeof s->clients[i], m->sequences[i].client);
        s->sequences[i].client = proto_text_of(s->clients[i]);
    }
    s->status.sequences = s->sequences;
    s->lists_all = m->n_sequences <= GW_UPSTREAM_MAX_LISTED &&
                   m->n_sequences == m->sequences_running + m->sequences_waiting;
    u->status_due_ns = 0;
    return u->events.status(u->events.context, e);
}

static enum err_code take_error(struct gw_upstream *u, const struct proto_frame *f, struct err *e)
{
    struct proto_error m;
    enum err_code code = proto_decode_error(f, &m, e);
    if (code != ERR_OK)
        return code;
    if (f->request_id == 0)
        return err_set(e, ERR_PROTOCOL, "the worker says: %.*s", (int)m.text.size, m.text.data);
    return u->events.error(u->events.context, f->request_id, &m, e);
}

static enum err_code take_tokens(struct gw_upstream *u, const struct proto_frame *f, struct err *e)
{
    struct proto_tokens m;
    enum err_code code = proto_decode_tokens(f, &u->scratch, &m, e);
    if (code == ERR_OK)
        code = u->events.tokens(u->events.context, f->request_id, &m, e);
    return code;
}

static enum err_code frame_take(struct gw_upstream *u, const struct proto_frame *f, struct err *e)
{
    union {
        struct proto_welcome welcome;
        struct proto_progress progress;
        struct proto_done done;
        struct proto_notice notice;
        struct proto_status status;
    } m;
    enum err_code code = ERR_OK;
    if (u->state == LINK_HELLO && f->cmd != PROTO_WELCOME && f->cmd != PROTO_ERROR)
        return err_set(e, ERR_PROTOCOL, "%s before welcome", proto_cmd_name(f->cmd));
    switch (f->cmd) {
    case PROTO_TOKENS:
        return take_tokens(u, f, e);
    case PROTO_PROGRESS:
        code = proto_decode_progress(f, &m.progress, e);
        if (code == ERR_OK)
            code = u->events.progress(u->events.context, f->request_id, &m.progress, e);
        return code;
    case PROTO_DONE:
        code = proto_decode_done(f, &m.done, e);
        if (code == ERR_OK)
            code = u->events.done(u->events.context, f->request_id, &m.done, e);
        return code;
    case PROTO_ERROR:
        return take_error(u, f, e);
    case PROTO_WELCOME:
        code = proto_decode_welcome(f, &m.welcome, e);
        if (code == ERR_OK && m.welcome.version != PROTO_VERSION)
            code = err_set(e, ERR_UNSUPPORTED, "the worker speaks version %u, not %d",
                           m.welcome.version, PROTO_VERSION);
        if (code == ERR_OK)
            take_welcome(u, &m.welcome);
        return code;
    case PROTO_STATUS:
        code = proto_decode_status(f, &u->scratch, &m.status, e);
        if (code == ERR_OK)
            code = take_status(u, &m.status, e);
        return code;
    case PROTO_NOTICE:
        code = proto_decode_notice(f, &m.notice, e);
        if (code == ERR_OK)
            u->events.notice(u->events.context, &m.notice);
        return code;
    default:
        return ERR_OK; /* kinds of later versions */
    }
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *ret)
{
    struct gw_upstream *u = handle->data;
    (void)suggested;
    *ret = uv_buf_init(u->in, READ_BYTES);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *bytes)
{
    struct gw_upstream *u = stream->data;
    struct proto_frame f;
    struct err e = {0};
    if (n == 0 || u->state == LINK_CLOSING)
        return;
    if (n < 0) {
        gw_upstream_drop(u, n == UV_EOF ? "the worker closed the connection" : uv_strerror((int)n));
        return;
    }
    u->heard_ns = ticks_ns(u->ticks);
    enum err_code code = proto_reader_feed(&u->reader, bytes->base, (size_t)n, &e);
    while (u->state != LINK_CLOSING && proto_reader_next(&u->reader, &f) == 1) {
        enum err_code taken = frame_take(u, &f, &e);
        code = code == ERR_OK ? taken : code;
        if (taken != ERR_OK)
            break;
    }
    if (code != ERR_OK)
        gw_upstream_drop(u, e.text);
}

/* ---- frames out ---- */

static void on_written(uv_write_t *request, int status)
{
    struct gw_upstream *u = request->data;
    u->writing = false;
    if (status < 0 || u->state == LINK_CLOSING) {
        if (status != UV_ECANCELED)
            gw_upstream_drop(u, uv_strerror(status));
        return;
    }
    buf_clear(&u->flight);
    flush(u);
}

static void flush(struct gw_upstream *u)
{
    if (buf_failed(&u->out)) {
        gw_upstream_drop(u, "no memory for frames");
        return;
    }
    if (u->writing || u->out.size == 0)
        return;
    uv_buf_t bytes = uv_buf_init((char *)u->out.data, (unsigned)u->out.size);
    int n = uv_try_write((uv_stream_t *)&u->pipe, &bytes, 1);
    if (n == (int)u->out.size) {
        buf_clear(&u->out);
        return;
    }
    if (n > 0)
        buf_drop_front(&u->out, (size_t)n);
    struct buf swap = u->flight;
    u->flight = u->out;
    u->out = swap;
    bytes = uv_buf_init((char *)u->flight.data, (unsigned)u->flight.size);
    u->write.data = u;
    int code = uv_write(&u->write, (uv_stream_t *)&u->pipe, &bytes, 1, on_written);
    if (code < 0)
        gw_upstream_drop(u, uv_strerror(code));
    else
        u->writing = true;
}

bool gw_upstream_send_run(struct gw_upstream *u, uint64_t id, const struct proto_run *run)
{
    if (u->state != LINK_UP)
        return false;
    proto_encode_run(&u->out, id, run);
    flush(u);
    return u->state == LINK_UP;
}

void gw_upstream_send_cancel(struct gw_upstream *u, uint64_t id)
{
    if (u->state != LINK_UP)
        return;
    proto_encode_empty(&u->out, PROTO_CANCEL, id);
    flush(u);
}

bool gw_upstream_ask_status(struct gw_upstream *u)
{
    if (u->state != LINK_UP)
        return false;
    if (u->status_due_ns == 0) {
        u->status_due_ns = ticks_ns(u->ticks);
        proto_encode_empty(&u->out, PROTO_STATUS_REQUEST, 0);
        flush(u);
    }
    return true;
}

/* ---- connecting ---- */

/* A worker says welcome at once, whatever its state; one that does not is stopped, or its frame was
 * mangled on the way. */
static void on_no_welcome(uv_timer_t *timer)
{
    struct gw_upstream *u = timer->data;
    if (u->state == LINK_HELLO)
        gw_upstream_drop(u, "no welcome from the worker");
}

static void on_connect(uv_connect_t *request, int status)
{
    struct gw_upstream *u = request->data;
    struct proto_hello hello = {.version = PROTO_VERSION, .client = proto_text_of("islet-gateway")};
    if (u->state != LINK_CONNECTING)
        return;
    if (status < 0) {
        gw_upstream_drop(u, uv_strerror(status));
        return;
    }
    u->state = LINK_HELLO;
    u->heard_ns = ticks_ns(u->ticks);
    uv_timer_start(&u->timer, on_no_welcome, WELCOME_MS, 0);
    int code = uv_read_start((uv_stream_t *)&u->pipe, on_alloc, on_read);
    if (code < 0) {
        gw_upstream_drop(u, uv_strerror(code));
        return;
    }
    proto_encode_hello(&u->out, &hello);
    flush(u);
}

static void connect_start(struct gw_upstream *u)
{
    uv_pipe_init(u->loop, &u->pipe, 0);
    u->pipe.data = u;
    u->connect.data = u;
    u->state = LINK_CONNECTING;
    proto_reader_init(&u->reader, u->max_frame);
    uv_pipe_connect(&u->connect, &u->pipe, u->path, on_connect);
}

enum err_code gw_upstream_new(uv_loop_t *loop, const char *path, size_t max_frame,
                              struct ticks ticks, const struct gw_upstream_events *events,
                              struct gw_upstream **ret, struct err *e)
{
    struct gw_upstream *u = alloc_zero(ALLOC_PEER, 1, sizeof *u);
    if (!u)
        return err_set(e, ERR_NOMEM, "no memory for the link to the worker");
    if (strlen(path) >= sizeof u->path) {
        alloc_free(u);
        return err_set(e, ERR_ARGUMENT, "worker.socket: the path has %zu bytes, at most %zu fit",
                       strlen(path), sizeof u->path - 1);
    }
    u->loop = loop;
    memcpy(u->path, path, strlen(path) + 1);
    u->max_frame = max_frame;
    u->ticks = ticks;
    u->events = *events;
    u->delay_ms = FIRST_DELAY_MS;
    u->out = u->flight = BUF_INIT(MAX_QUEUED_BYTES);
    proto_scratch_init(&u->scratch);
    uv_timer_init(loop, &u->timer);
    u->timer.data = u;
    u->open_handles = 1;
    uv_timer_start(&u->timer, on_timer, 0, 0);
    *ret = u;
    return ERR_OK;
}

static void ignore(void *context)
{
    (void)context;
}

void gw_upstream_close(struct gw_upstream *u)
{
    if (!u || u->closed)
        return;
    u->closed = true;
    u->events.lost = u->events.state = ignore;
    if (u->state != LINK_DOWN)
        u->open_handles++;
    if (u->state != LINK_DOWN && u->state != LINK_CLOSING) {
        u->state = LINK_CLOSING;
        u->facts.connected = false;
        uv_close((uv_handle_t *)&u->pipe, on_pipe_closed);
    }
    uv_close((uv_handle_t *)&u->timer, on_handle_closed);
}

const struct gw_upstream_facts *gw_upstream_get_facts(const struct gw_upstream *u)
{
    return &u->facts;
}

const struct gw_upstream_status *gw_upstream_get_status(const struct gw_upstream *u)
{
    return &u->status;
}

uint64_t gw_upstream_heard_ns(const struct gw_upstream *u)
{
    return u->heard_ns;
}

uint64_t gw_upstream_status_due_ns(const struct gw_upstream *u)
{
    return u->status_due_ns;
}

#include "proto_client.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "alloc.h"
#include "ticks.h"

enum {
    PROTO_CLIENT_READ = 64 << 10,
    PROTO_CLIENT_READS = 16,       /* of one on_readable, so that a loop's other work goes on */
    PROTO_CLIENT_QUEUE = 64 << 20, /* unsent bytes; more is ERR_BUSY */
    PROTO_CLIENT_KEEP = 256 << 10, /* memory that an empty queue keeps */
};

struct proto_client {
    int fd;
    struct proto_reader reader;
    struct proto_scratch scratch;
    struct buf out; /* whole frames, of which out_sent bytes are gone */
    size_t out_sent;
    bool write_lost;
    size_t max_frame; /* the worker's, once its welcome came */
    uint64_t next_id;
    struct err lost; /* why nothing more can be read; ERR_OK while it can */
    uint8_t bytes[PROTO_CLIENT_READ];
};

/* ---- writing ---- */

static bool proto_client_would_block(int os_errno)
{
    return os_errno == EAGAIN || os_errno == EWOULDBLOCK;
}

static enum err_code proto_client_flush(struct proto_client *c, struct err *e)
{
    if (c->write_lost)
        return err_set(e, ERR_IO, "the connection to the worker is lost");
    while (c->out_sent < c->out.size) {
        ssize_t n = send(c->fd, c->out.data + c->out_sent, c->out.size - c->out_sent,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && proto_client_would_block(errno))
            break;
        if (n < 0) {
            int os_errno = errno;
            c->write_lost = true;
            shutdown(c->fd, SHUT_RDWR); /* what arrived can still be read, then comes the end */
            return err_set_os(e, ERR_IO, os_errno, "sending to the worker");
        }
        c->out_sent += (size_t)n;
    }
    if (c->out_sent == c->out.size) {
        buf_clear(&c->out);
        c->out_sent = 0;
        if (c->out.capacity > PROTO_CLIENT_KEEP)
            buf_done(&c->out);
    } else if (c->out_sent > c->out.size / 2) {
        buf_drop_front(&c->out, c->out_sent);
        c->out_sent = 0;
    }
    return ERR_OK;
}

/* Ends an encoding that began when the queue held `before` bytes: a frame that is too long or did
 * not fit is taken back, and the connection stays good. */
static enum err_code proto_client_post(struct proto_client *c, size_t before, struct err *e)
{
    if (buf_failed(&c->out)) {
        c->out.failed = false;
        if (before <= PROTO_CLIENT_QUEUE - PROTO_MAX_FRAME)
            return err_set(e, ERR_NOMEM, "no memory for a message to the worker");
        return err_set(e, ERR_BUSY,
                       "%zu bytes wait for the worker already, the limit is %d: send again later",
                       before - c->out_sent, PROTO_CLIENT_QUEUE);
    }
    size_t length = c->out.size - before;
    if (length > c->max_frame) {
        c->out.size = before;
        return err_set(e, ERR_LIMIT, "message of %zu bytes: the worker takes %zu", length,
                       c->max_frame);
    }
    return proto_client_flush(c, e);
}

/* ---- connecting ---- */

enum err_code proto_client_adopt(int fd, const char *client_name, struct proto_client **ret,
                                 struct err *e)
{
    if (strlen(client_name) > PROTO_MAX_TEXT)
        return err_set(e, ERR_ARGUMENT, "client name of %zu bytes: the limit is %d",
                       strlen(client_name), PROTO_MAX_TEXT);
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
        fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        return err_set_os(e, ERR_IO, errno, "fd %d", fd);
    struct proto_client *c = alloc_zero(ALLOC_PEER, 1, sizeof *c);
    if (c == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a connection");
    c->fd = fd;
    proto_reader_init(&c->reader, PROTO_MAX_FRAME);
    proto_scratch_init(&c->scratch);
    c->out = BUF_INIT(PROTO_CLIENT_QUEUE);
    c->max_frame = PROTO_MAX_FRAME;
    struct proto_hello hello = {.version = PROTO_VERSION, .client = proto_text_of(client_name)};
    proto_encode_hello(&c->out, &hello);
    enum err_code code = proto_client_post(c, 0, e);
    if (code != ERR_OK) {
        c->fd = -1; /* stays the caller's */
        proto_client_close(c);
        return code;
    }
    *ret = c;
    return ERR_OK;
}

static enum err_code proto_client_dial(const char *path, int *ret_fd, struct err *e)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof address.sun_path)
        return err_set(e, ERR_IO, "socket path of %zu bytes: a path has 1 to %zu", n,
                       sizeof address.sun_path - 1);
    memcpy(address.sun_path, path, n);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_set_os(e, ERR_IO, errno, "socket");
    if (connect(fd, (const struct sockaddr *)&address, sizeof address) == 0) {
        *ret_fd = fd;
        return ERR_OK;
    }
    int os_errno = errno;
    close(fd);
    if (os_errno == ENOENT)
        return err_set(e, ERR_IO, "%s: no such socket; is isletd running?", path);
    if (os_errno == ECONNREFUSED)
        return err_set(e, ERR_IO, "%s: nobody listens there; is isletd running?", path);
    if (proto_client_would_block(os_errno))
        return err_set(e, ERR_BUSY, "%s: too many wait to connect; try again", path);
    return err_set_os(e, ERR_IO, os_errno, "%s", path);
}

enum err_code proto_client_connect(const char *path, const char *client_name,
                                   struct proto_client **ret, struct err *e)
{
    int fd = -1;
    enum err_code code = proto_client_dial(path, &fd, e);
    if (code != ERR_OK)
        return code;
    code = proto_client_adopt(fd, client_name, ret, e);
    if (code != ERR_OK)
        close(fd);
    return code;
}

void proto_client_close(struct proto_client *c)
{
    if (c == NULL)
        return;
    if (c->fd >= 0)
        close(c->fd);
    proto_reader_done(&c->reader);
    proto_scratch_done(&c->scratch);
    buf_done(&c->out);
    alloc_free(c);
}

/* ---- requests ---- */

static enum err_code proto_client_check_run(const struct proto_client *c, const struct proto_run *m,
                                            struct err *e)
{
    if (m->n_tokens > c->max_frame / 4)
        return err_set(e, ERR_LIMIT, "message of %u tokens: the worker takes %zu bytes",
                       m->n_tokens, c->max_frame);
    if (m->n_prompt > m->n_tokens || m->n_tokens - m->n_prompt != m->first_index)
        return err_set(e, ERR_ARGUMENT,
                       "%u tokens of which %u are the prompt, but first_index is %u", m->n_tokens,
                       m->n_prompt, m->first_index);
    if (m->n_top > PROTO_MAX_TOP || m->n_end > PROTO_MAX_END || m->n_bias > PROTO_MAX_BIAS)
        return err_set(e, ERR_ARGUMENT, "n_top %u, n_end %u, n_bias %u: the limits are %d, %d, %d",
                       m->n_top, m->n_end, m->n_bias, PROTO_MAX_TOP, PROTO_MAX_END, PROTO_MAX_BIAS);
    if (m->session.size > PROTO_MAX_TEXT)
        return err_set(e, ERR_ARGUMENT, "session key of %u bytes: the limit is %d", m->session.size,
                       PROTO_MAX_TEXT);
    if (m->trace.size > 0 && !proto_trace_good(m->trace.data, m->trace.size))
        return err_set(e, ERR_ARGUMENT,
                       "a trace has 1 to %d of letters, digits, '.', '_', ':' and '-'",
                       PROTO_MAX_TRACE);
    return ERR_OK;
}

enum err_code proto_client_run(struct proto_client *c, const struct proto_run *run,
                               uint64_t *ret_id, struct err *e)
{
    size_t before = c->out.size;
    enum err_code code = proto_client_check_run(c, run, e);
    if (code != ERR_OK)
        return code;
    proto_encode_run(&c->out, c->next_id + 1, run);
    code = proto_client_post(c, before, e);
    if (code == ERR_OK)
        *ret_id = ++c->next_id;
    return code;
}

enum err_code proto_client_cancel(struct proto_client *c, uint64_t id, struct err *e)
{
    size_t before = c->out.size;
    proto_encode_empty(&c->out, PROTO_CANCEL, id);
    return proto_client_post(c, before, e);
}

enum err_code proto_client_status(struct proto_client *c, struct err *e)
{
    size_t before = c->out.size;
    proto_encode_empty(&c->out, PROTO_STATUS_REQUEST, 0);
    return proto_client_post(c, before, e);
}

enum err_code proto_client_drain(struct proto_client *c, struct err *e)
{
    size_t before = c->out.size;
    proto_encode_empty(&c->out, PROTO_DRAIN, 0);
    return proto_client_post(c, before, e);
}

enum err_code proto_client_load_expert(struct proto_client *c, const struct proto_load_expert *m,
                                       uint64_t *ret_id, struct err *e)
{
    size_t before = c->out.size;
    proto_encode_load_expert(&c->out, c->next_id + 1, m);
    enum err_code code = proto_client_post(c, before, e);
    if (code == ERR_OK)
        *ret_id = ++c->next_id;
    return code;
}

enum err_code proto_client_unload_expert(struct proto_client *c,
                                         const struct proto_unload_expert *m, uint64_t *ret_id,
                                         struct err *e)
{
    size_t before = c->out.size;
    proto_encode_unload_expert(&c->out, c->next_id + 1, m);
    enum err_code code = proto_client_post(c, before, e);
    if (code == ERR_OK)
        *ret_id = ++c->next_id;
    return code;
}

/* ---- reading ---- */

int proto_client_wait(struct proto_client *c, int timeout_ms, struct proto_event *ret,
                      struct err *e)
{
    struct ticks clock = ticks_real();
    uint64_t start_ms = ticks_ms(clock);
    for (;;) {
        int got = proto_client_next(c, ret, e);
        if (got != 0)
            return got;
        if (c->lost.code != ERR_OK) {
            err_set(e, c->lost.code, "%s", c->lost.text);
            return -1;
        }
        uint64_t past_ms = ticks_ms(clock) - start_ms;
        if (timeout_ms > 0 && past_ms >= (uint64_t)timeout_ms)
            return 0;
        int left_ms = timeout_ms > 0 ? timeout_ms - (int)past_ms : timeout_ms;
        struct pollfd p = {.fd = c->fd, .events = POLLIN};
        if (proto_client_wants_write(c))
            p.events |= POLLOUT;
        int n = poll(&p, 1, left_ms);
        if (n == 0)
            return 0;
        if (n < 0 && errno != EINTR) {
            err_set_os(e, ERR_IO, errno, "poll");
            return -1;
        }
        if (n < 0)
            continue;
        /* Faults are in c->lost afterwards; what arrived before one is handed out first. */
        if ((p.revents & POLLOUT) != 0 && proto_client_on_writable(c, NULL) != ERR_OK)
            p.revents |= POLLIN;
        if ((p.revents & ~POLLOUT) != 0 && proto_client_on_readable(c, NULL) != ERR_OK)
            continue;
    }
}

int proto_client_fd(const struct proto_client *c)
{
    return c->fd;
}

bool proto_client_wants_write(const struct proto_client *c)
{
    return c->out_sent < c->out.size && !c->write_lost && c->lost.code == ERR_OK;
}

enum err_code proto_client_on_readable(struct proto_client *c, struct err *e)
{
    for (unsigned i = 0; i < PROTO_CLIENT_READS && c->lost.code == ERR_OK; i++) {
        ssize_t n = recv(c->fd, c->bytes, sizeof c->bytes, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && proto_client_would_block(errno))
            return ERR_OK;
        if (n < 0)
            err_set_os(&c->lost, ERR_IO, errno, "reading from the worker");
        else if (n == 0)
            err_set(&c->lost, ERR_IO, "the worker closed the connection");
        else if (proto_reader_feed(&c->reader, c->bytes, (size_t)n, &c->lost) != ERR_OK)
            err_wrap(&c->lost, "from the worker");
        else if ((size_t)n < sizeof c->bytes)
            return ERR_OK;
    }
    return c->lost.code == ERR_OK ? ERR_OK : err_set(e, c->lost.code, "%s", c->lost.text);
}

enum err_code proto_client_on_writable(struct proto_client *c, struct err *e)
{
    return proto_client_flush(c, e);
}

static enum err_code proto_client_welcome(struct proto_client *c, const struct proto_frame *f,
                                          struct proto_welcome *ret, struct err *e)
{
    struct proto_welcome m;
    enum err_code code = proto_decode_welcome(f, &m, e);
    if (code != ERR_OK)
        return code;
    if (m.version != PROTO_VERSION)
        return err_set(e, ERR_UNSUPPORTED, "the worker speaks protocol %u, this program %d",
                       m.version, PROTO_VERSION);
    if (m.max_frame >= PROTO_HEADER_BYTES) {
        c->max_frame = m.max_frame;
        c->reader.max_frame = m.max_frame;
    }
    *ret = m;
    return ERR_OK;
}

/* False: a frame that this version does not know. */
static bool proto_client_decode(struct proto_client *c, const struct proto_frame *f,
                                struct proto_event *ret, enum err_code *ret_code, struct err *e)
{
    struct proto_scratch *s = &c->scratch;
    switch (f->cmd) {
    case PROTO_WELCOME:
        ret->kind = PROTO_EVENT_WELCOME;
        *ret_code = proto_client_welcome(c, f, &ret->welcome, e);
        return true;
    case PROTO_TOKENS:
        ret->kind = PROTO_EVENT_TOKENS;
        *ret_code = proto_decode_tokens(f, s, &ret->tokens, e);
        return true;
    case PROTO_PROGRESS:
        ret->kind = PROTO_EVENT_PROGRESS;
        *ret_code = proto_decode_progress(f, &ret->progress, e);
        return true;
    case PROTO_DONE:
        ret->kind = PROTO_EVENT_DONE;
        *ret_code = proto_decode_done(f, &ret->done, e);
        return true;
    case PROTO_ERROR:
        ret->kind = PROTO_EVENT_ERROR;
        *ret_code = proto_decode_error(f, &ret->error, e);
        return true;
    case PROTO_STATUS:
        ret->kind = PROTO_EVENT_STATUS;
        *ret_code = proto_decode_status(f, s, &ret->status, e);
        return true;
    case PROTO_NOTICE:
        ret->kind = PROTO_EVENT_NOTICE;
        *ret_code = proto_decode_notice(f, &ret->notice, e);
        return true;
    case PROTO_LOADED:
    case PROTO_UNLOADED:
        ret->kind = f->cmd == PROTO_LOADED ? PROTO_EVENT_LOADED : PROTO_EVENT_UNLOADED;
        *ret_code = proto_decode_loaded(f, &ret->loaded, e);
        return true;
    case PROTO_DRAINED:
        ret->kind = PROTO_EVENT_DRAINED;
        *ret_code = ERR_OK;
        return true;
    default:
        return false;
    }
}

int proto_client_next(struct proto_client *c, struct proto_event *ret, struct err *e)
{
    struct proto_frame f;
    while (proto_reader_next(&c->reader, &f) == 1) {
        struct proto_event event = {.request_id = f.request_id};
        enum err_code code = ERR_OK;
        if (!proto_client_decode(c, &f, &event, &code, &c->lost))
            continue;
        if (code != ERR_OK) {
            err_wrap(&c->lost, "%s from the worker", proto_cmd_name(f.cmd));
            err_set(e, code, "%s", c->lost.text);
            return -1;
        }
        *ret = event;
        return 1;
    }
    return 0;
}

#include "gw_loop.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>

#include "alloc.h"
#include "gw_listen.h"
#include "list.h"
#include "log.h"

enum {
    READ_BYTES = 65536,
    ACCEPTS = 64,    /* of one listener in one turn */
    SENDS = 32,      /* of one connection before the others have their turn */
    PAUSE_MS = 200,  /* without descriptors or memory, listeners rest so long */
    SPARE_FDS = 64,  /* what the gateway needs beside connections */
    FORCE_MS = 2000, /* from drain_deadline's errors to the end */
};

struct listener {
    struct gw_loop *l;
    size_t index;
    uv_poll_t poll;
    unsigned n_links;
    bool full; /* said in the log */
};

/* One accepted socket and its connection. */
struct link {
    struct gw_loop *l;
    struct listener *from;
    struct gw_conn *c; /* NULL: closing */
    int fd;
    uv_poll_t poll;
    uv_timer_t timer;
    uint64_t armed_ns; /* deadline that the timer stands for; UINT64_MAX: none */
    int events;        /* that poll waits for */
    unsigned n_open;   /* handles whose close callback is still to come */
    bool dirty, at_eof, blocked, shut;
    struct list all, todo; /* todo: the dirty ones */
};

struct gw_loop {
    uv_loop_t uv;
    struct gw_conn_shared shared;
    struct gw_loop_hooks hooks;
    struct gw_listen listen;
    struct listener listeners[GW_LISTEN_MOST];
    struct list links, todo;
    unsigned n_links;
    unsigned connections; /* limit per listener */
    int reserve_fd;       /* given up for a moment to refuse a client when there is no other */
    uv_prepare_t prepare;
    uv_check_t check;
    uv_timer_t pause, drain;
    uv_signal_t signals[3];
    bool handle_signals, paused, listening, deadline_over, finished;
    int64_t drain_deadline_ms;
    uint8_t bytes[READ_BYTES];
};

/* ---- links ----------------------------------------------------------------------------------- */

static void mark(struct link *k)
{
    if (k->dirty || k->c == NULL)
        return;
    k->dirty = true;
    list_append(&k->l->todo, &k->todo);
}

static void on_wake(void *io)
{
    mark(io);
}

static void on_link_closed(uv_handle_t *handle)
{
    struct link *k = handle->data;
    if (--k->n_open == 0)
        alloc_free(k);
}

static void link_close(struct link *k, bool reset)
{
    struct gw_conn *c = k->c;
    k->c = NULL;
    list_remove(&k->all);
    list_remove(&k->todo);
    k->l->n_links--;
    k->from->n_links--;
    uv_close((uv_handle_t *)&k->poll, on_link_closed);
    uv_close((uv_handle_t *)&k->timer, on_link_closed);
    if (reset) {
        struct linger now = {.l_onoff = 1};
        (void)setsockopt(k->fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    }
    close(k->fd);
    gw_conn_free(c); /* last: it may call into the API */
}

static void on_timer(uv_timer_t *timer)
{
    struct link *k = timer->data;
    k->armed_ns = UINT64_MAX;
    gw_conn_tick(k->c);
    mark(k);
}

static void arm(struct link *k)
{
    uint64_t deadline = gw_conn_deadline_ns(k->c);
    /* A timer that is due too early only looks and is set again: cheaper than setting it for each
     * byte. */
    if (deadline >= k->armed_ns || deadline == UINT64_MAX)
        return;
    uint64_t now = ticks_ns(k->l->shared.ticks);
    uint64_t ms = deadline > now ? (deadline - now) / 1000000u + 1 : 0;
    k->armed_ns = deadline;
    uv_update_time(&k->l->uv);
    uv_timer_start(&k->timer, on_timer, ms, 0);
}

static void on_poll(uv_poll_t *poll, int status, int events);

static void poll_set(struct link *k)
{
    bool reads = !k->at_eof && gw_conn_reads(k->c);
    int events = (reads ? UV_READABLE : 0) | (k->blocked ? UV_WRITABLE : 0);
    if (events == k->events)
        return;
    k->events = events;
    if (events == 0)
        uv_poll_stop(&k->poll);
    else
        uv_poll_start(&k->poll, events, on_poll);
}

static void send_some(struct link *k)
{
    k->blocked = false;
    for (int i = 0; i < SENDS && gw_conn_state(k->c) != GW_CONN_RESET; i++) {
        size_t n;
        const void *bytes = gw_conn_output(k->c, &n);
        if (n == 0)
            return;
        ssize_t sent = send(k->fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            gw_conn_sent(k->c, (size_t)sent);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) {
            k->blocked = true;
            return;
        } else if (errno != EINTR) {
            gw_conn_lost(k->c);
            return;
        }
    }
    mark(k);
}

/* Does what is due on a connection: pipelined requests, output, half-close, close. */
static void settle(struct link *k)
{
    size_t n;
    gw_conn_run(k->c);
    send_some(k);
    (void)gw_conn_output(k->c, &n);
    switch (gw_conn_state(k->c)) {
    case GW_CONN_RESET:
        link_close(k, true);
        return;
    case GW_CONN_CLOSE:
        if (n == 0) {
            link_close(k, false);
            return;
        }
        break;
    case GW_CONN_SHUT:
        if (n == 0 && !k->shut) {
            k->shut = true;
            (void)shutdown(k->fd, SHUT_WR);
        }
        break;
    case GW_CONN_OPEN:
        break;
    }
    poll_set(k);
    arm(k);
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    struct link *k = poll->data;
    mark(k);
    if (status < 0) {
        gw_conn_lost(k->c);
        return;
    }
    if ((events & UV_READABLE) == 0)
        return;
    ssize_t n = recv(k->fd, k->l->bytes, sizeof k->l->bytes, MSG_DONTWAIT);
    if (n > 0) {
        gw_conn_feed(k->c, k->l->bytes, (size_t)n);
    } else if (n == 0) {
        k->at_eof = true;
        gw_conn_eof(k->c);
    } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
        gw_conn_lost(k->c);
    }
}

/* ---- accept ---------------------------------------------------------------------------------- */

static struct link *link_new(struct listener *from, int fd)
{
    struct gw_loop *l = from->l;
    struct link *k = alloc_zero(ALLOC_PEER, 1, sizeof *k);
    if (k == NULL)
        return NULL;
    k->l = l;
    k->from = from;
    k->fd = fd;
    k->armed_ns = UINT64_MAX;
    list_init(&k->all);
    list_init(&k->todo);
    k->c = gw_conn_new(&l->shared, &l->listen.sockets[from->index].who, on_wake, k);
    if (k->c == NULL || uv_poll_init(&l->uv, &k->poll, fd) != 0) {
        gw_conn_free(k->c);
        alloc_free(k);
        return NULL;
    }
    uv_timer_init(&l->uv, &k->timer);
    k->poll.data = k->timer.data = k;
    k->n_open = 2;
    list_append(&l->links, &k->all);
    l->n_links++;
    from->n_links++;
    return k;
}

/* 503 and close. What the client sent is read away, so that the close is no reset. */
static void turn_away(struct gw_loop *l, int fd)
{
    struct buf out = BUF_INIT(65536);
    gw_conn_overloaded(&l->shared, &out);
    (void)send(fd, out.data, out.size, MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)shutdown(fd, SHUT_WR);
    (void)recv(fd, l->bytes, sizeof l->bytes, MSG_DONTWAIT);
    buf_done(&out);
    close(fd);
}

static void accepted(struct listener *from, int fd)
{
    struct gw_loop *l = from->l;
    int on = 1;
    if (l->listen.sockets[from->index].port != 0)
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    bool full = from->n_links >= l->connections;
    if (full && !from->full)
        log_warn("http", "connections_full", "limit=%u", l->connections);
    from->full = full;
    struct link *k = full ? NULL : link_new(from, fd);
    if (k == NULL)
        turn_away(l, fd);
    else
        mark(k);
}

static void on_accept(uv_poll_t *poll, int status, int events);

static void listeners_start(struct gw_loop *l)
{
    l->paused = false;
    for (size_t i = 0; i < l->listen.n; i++)
        uv_poll_start(&l->listeners[i].poll, UV_READABLE, on_accept);
}

static void on_pause_over(uv_timer_t *timer)
{
    struct gw_loop *l = timer->data;
    if (l->listening)
        listeners_start(l);
}

/* No descriptor or memory is left: refuse this client with the reserve, then rest, or the loop
 * would spin. */
static void starved(struct listener *from, int code)
{
    struct gw_loop *l = from->l;
    log_warn("http", "accept_failed", "reason=\"%s\" pause_ms=%d", strerror(code), PAUSE_MS);
    if ((code == EMFILE || code == ENFILE) && l->reserve_fd >= 0) {
        close(l->reserve_fd);
        int fd =
            accept4(l->listen.sockets[from->index].fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0)
            turn_away(l, fd);
        l->reserve_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    }
    for (size_t i = 0; i < l->listen.n; i++)
        uv_poll_stop(&l->listeners[i].poll);
    l->paused = true;
    uv_timer_start(&l->pause, on_pause_over, PAUSE_MS, 0);
}

static void on_accept(uv_poll_t *poll, int status, int events)
{
    struct listener *from = poll->data;
    (void)events;
    for (int i = 0; i < ACCEPTS && status >= 0 && !from->l->paused; i++) {
        int fd = accept4(from->l->listen.sockets[from->index].fd, NULL, NULL,
                         SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0)
            accepted(from, fd);
        else if (errno == EAGAIN || errno == EWOULDBLOCK)
            return;
        else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
            starved(from, errno);
        /* Other errors belong to a client that is gone already. */
    }
}

/* ---- end ------------------------------------------------------------------------------------- */

static void close_handle(uv_handle_t *handle)
{
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

static void stop_listening(struct gw_loop *l)
{
    if (!l->listening)
        return;
    l->listening = false;
    for (size_t i = 0; i < l->listen.n; i++)
        close_handle((uv_handle_t *)&l->listeners[i].poll);
    gw_listen_done(&l->listen);
}

static void finish(struct gw_loop *l)
{
    if (l->finished)
        return;
    l->finished = true;
    stop_listening(l);
    list_each_safe(it, &l->links)
        link_close(list_entry(it, struct link, all), false);
    close_handle((uv_handle_t *)&l->prepare);
    close_handle((uv_handle_t *)&l->check);
    close_handle((uv_handle_t *)&l->pause);
    close_handle((uv_handle_t *)&l->drain);
    if (l->handle_signals)
        for (size_t i = 0; i < 3; i++)
            close_handle((uv_handle_t *)&l->signals[i]);
    if (l->hooks.stopped != NULL)
        l->hooks.stopped(l->hooks.context);
}

/* Nothing runs any more, and every answer is with its client. */
static bool drained(const struct gw_loop *l)
{
    if (l->shared.n_exchanges > 0)
        return false;
    list_each(it, &l->links) {
        size_t n;
        const struct link *k = list_entry(it, struct link, all);
        (void)gw_conn_output(k->c, &n);
        if (n > 0 || gw_conn_state(k->c) == GW_CONN_SHUT)
            return false;
    }
    return true;
}

static void flush(struct gw_loop *l)
{
    while (!list_empty(&l->todo)) {
        struct link *k = list_entry(l->todo.next, struct link, todo);
        list_remove(&k->todo);
        k->dirty = false;
        settle(k);
    }
    if (l->shared.draining && !l->finished && drained(l))
        finish(l);
}

static void on_prepare(uv_prepare_t *handle)
{
    flush(handle->data);
}

static void on_check(uv_check_t *handle)
{
    flush(handle->data);
}

static void on_force(uv_timer_t *timer)
{
    finish(timer->data);
}

static void on_deadline(uv_timer_t *timer)
{
    struct gw_loop *l = timer->data;
    l->deadline_over = true;
    if (l->shared.n_exchanges > 0)
        log_warn("http", "drain_deadline", "requests=%zu", l->shared.n_exchanges);
    if (l->hooks.deadline != NULL)
        l->hooks.deadline(l->hooks.context);
    uv_timer_start(&l->drain, on_force, FORCE_MS, 0);
}

/* A second call is the deadline. */
static void stop(struct gw_loop *l)
{
    if (l->finished)
        return;
    if (l->shared.draining) {
        if (!l->deadline_over)
            on_deadline(&l->drain);
        return;
    }
    l->shared.draining = true;
    sd_notify(0, "STOPPING=1");
    log_info("http", "draining", "requests=%zu connections=%u deadline_ms=%" PRId64,
             l->shared.n_exchanges, l->n_links, l->drain_deadline_ms);
    uv_update_time(&l->uv);
    uv_timer_start(&l->drain, on_deadline, (uint64_t)l->drain_deadline_ms, 0);
    list_each(it, &l->links) {
        struct link *k = list_entry(it, struct link, all);
        gw_conn_drain(k->c);
        mark(k);
    }
    if (l->hooks.draining != NULL)
        l->hooks.draining(l->hooks.context);
}

/* ---- signals, systemd ------------------------------------------------------------------------ */

static void reload(struct gw_loop *l)
{
    struct timespec t = {0};
    clock_gettime(CLOCK_MONOTONIC, &t);
    sd_notifyf(0, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64,
               (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u);
    if (l->hooks.reload != NULL)
        l->hooks.reload(l->hooks.context);
    sd_notify(0, "READY=1");
}

static void on_signal(uv_signal_t *handle, int number)
{
    if (number == SIGHUP)
        reload(handle->data);
    else
        stop(handle->data);
}

void gw_loop_ready(struct gw_loop *l)
{
    for (size_t i = 0; i < l->listen.n; i++)
        if (l->listen.sockets[i].port != 0)
            log_info("http", "listening", "family=%s port=%u",
                     l->listen.sockets[i].who.n_ip == 4 ? "ipv4" : "ipv6",
                     l->listen.sockets[i].port);
        else
            log_info("http", "listening", "family=unix path=\"%s\"",
                     l->listen.path != NULL ? l->listen.path : "inherited");
    sd_notify(0, "READY=1");
}

void gw_loop_status(struct gw_loop *l, const char *format, ...)
{
    char text[256];
    va_list args;
    (void)l;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    sd_notifyf(0, "STATUS=%s", text);
}

/* ---- life ------------------------------------------------------------------------------------ */

static void handles_start(struct gw_loop *l)
{
    static const int numbers[3] = {SIGTERM, SIGINT, SIGHUP};
    uv_prepare_init(&l->uv, &l->prepare);
    uv_check_init(&l->uv, &l->check);
    uv_timer_init(&l->uv, &l->pause);
    uv_timer_init(&l->uv, &l->drain);
    l->prepare.data = l->check.data = l->pause.data = l->drain.data = l;
    uv_prepare_start(&l->prepare, on_prepare);
    uv_check_start(&l->check, on_check);
    for (size_t i = 0; l->handle_signals && i < 3; i++) {
        uv_signal_init(&l->uv, &l->signals[i]);
        l->signals[i].data = l;
        uv_signal_start(&l->signals[i], on_signal, numbers[i]);
    }
    if (l->handle_signals)
        signal(SIGPIPE, SIG_IGN);
}

static void lower_limit(struct gw_loop *l)
{
    struct rlimit fds;
    l->connections = l->shared.limits.connections;
    if (l->listen.n == 0 || getrlimit(RLIMIT_NOFILE, &fds) != 0 || fds.rlim_cur == RLIM_INFINITY)
        return;
    uint64_t spare = fds.rlim_cur > 2 * SPARE_FDS ? fds.rlim_cur - SPARE_FDS : fds.rlim_cur / 2;
    uint64_t each = spare / l->listen.n;
    if (each < l->connections) {
        l->connections = (unsigned)each;
        log_warn("http", "connections_lowered", "limit=%u fds=%" PRIu64 " continuing=1",
                 l->connections, (uint64_t)fds.rlim_cur);
    }
}

static enum err_code bind_all(struct gw_loop *l, const struct gw_loop_options *o, struct err *e)
{
    enum err_code code = ERR_OK;
    if (o->use_inherited)
        code = gw_listen_inherited(&l->listen, e);
    if (code == ERR_OK && !l->listen.inherited)
        code = gw_listen_tcp(&l->listen, o->listen, e);
    if (code == ERR_OK && !l->listen.inherited && o->socket != NULL)
        code = gw_listen_unix(&l->listen, o->socket, e);
    if (code == ERR_OK && l->listen.n == 0)
        code = err_set(e, ERR_ARGUMENT, "nothing to listen on: set server.listen or server.socket");
    if (code == ERR_OK && gw_listen_beyond_loopback(&l->listen) && !gw_auth_asks_key(o->auth))
        code = err_set(
            e, ERR_ARGUMENT,
            "server.listen names an address beyond loopback, but server.api_key_file gives no "
            "key; add a key, or listen on 127.0.0.1 and [::1] only");
    return code;
}

enum err_code gw_loop_new(const struct gw_loop_options *options, struct gw_loop **ret,
                          struct err *e)
{
    struct gw_loop *l = alloc_zero(ALLOC_PEER, 1, sizeof *l);
    if (l == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the server's loop");
    l->reserve_fd = -1;
    enum err_code code = bind_all(l, options, e);
    int uv = code == ERR_OK ? uv_loop_init(&l->uv) : 0;
    if (uv != 0)
        code = err_set(e, ERR_IO, "the server's loop cannot start: %s", uv_strerror(uv));
    if (code != ERR_OK) {
        gw_listen_done(&l->listen);
        alloc_free(l);
        return code;
    }
    l->shared.limits = options->limits;
    l->shared.ticks = ticks_real();
    l->shared.auth = options->auth;
    l->shared.routes = options->routes;
    l->hooks = options->hooks;
    l->drain_deadline_ms = options->drain_deadline_ms;
    l->handle_signals = options->handle_signals;
    list_init(&l->links);
    list_init(&l->todo);
    l->reserve_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    lower_limit(l);
    handles_start(l);
    for (size_t i = 0; i < l->listen.n; i++) {
        struct listener *from = &l->listeners[i];
        *from = (struct listener){.l = l, .index = i};
        uv_poll_init(&l->uv, &from->poll, l->listen.sockets[i].fd);
        from->poll.data = from;
    }
    l->listening = true;
    listeners_start(l);
    *ret = l;
    return ERR_OK;
}

void gw_loop_free(struct gw_loop *l)
{
    if (l == NULL)
        return;
    l->hooks.stopped = NULL;
    finish(l);
    while (l->uv.active_reqs.count > 0) /* what the pool works on uses the model */
        uv_run(&l->uv, UV_RUN_ONCE);
    for (int i = 0; i < 3; i++) /* the close callbacks */
        uv_run(&l->uv, UV_RUN_NOWAIT);
    if (uv_loop_close(&l->uv) != 0)
        log_warn("http", "handles_left", "%s", "");
    if (l->reserve_fd >= 0)
        close(l->reserve_fd);
    alloc_free(l);
}

uv_loop_t *gw_loop_uv(struct gw_loop *l)
{
    return &l->uv;
}

struct gw_conn_shared *gw_loop_shared(struct gw_loop *l)
{
    return &l->shared;
}

bool gw_loop_beyond_loopback(const struct gw_loop *l)
{
    return gw_listen_beyond_loopback(&l->listen);
}

unsigned gw_loop_connections(const struct gw_loop *l)
{
    return l->n_links;
}

void gw_loop_set_auth(struct gw_loop *l, const struct gw_auth *auth)
{
    l->shared.auth = auth;
}

void gw_loop_set_drain_deadline(struct gw_loop *l, int64_t ms)
{
    l->drain_deadline_ms = ms;
}

void gw_loop_run(struct gw_loop *l)
{
    while (!l->finished)
        uv_run(&l->uv, UV_RUN_ONCE);
}

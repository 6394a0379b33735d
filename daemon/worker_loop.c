#include "worker_loop.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>
#include <uv.h>

#include "alloc.h"
#include "engine.h"
#include "fault.h"
#include "log.h"
#include "paths.h"
#include "settings.h"
#include "worker_announce.h"
#include "worker_config.h"
#include "worker_losses.h"
#include "worker_peer.h"
#include "worker_socket.h"
#include "worker_watch.h"

enum {
    WORKER_LOOP_READ = 64 << 10,
    WORKER_LOOP_READS = 8,      /* of one connection in one turn */
    WORKER_LOOP_EVENTS = 256,   /* of the engine in one turn */
    WORKER_LOOP_ACCEPTS = 16,   /* in one turn */
    WORKER_LOOP_WAITING = 256,  /* requests that wait in the engine */
    WORKER_LOOP_PAUSE_MS = 100, /* of the listener, when the system has no more fds */
    WORKER_LOOP_TICK_MS = 1000
};

struct worker_loop {
    uv_loop_t uv;
    uv_async_t events;
    uv_signal_t terminate, interrupt, hangup;
    uv_timer_t tick, pause, deadline, watchdog;
    uv_poll_t accept;
    const struct worker_loop_options *options;
    struct settings *settings;
    struct worker_socket socket;
    int reserve_fd; /* given up to accept and close, when there are no more fds */
    struct engine *engine;
    struct worker_peers peers;
    struct engine_facts facts; /* last seen */
    char model_path[4096], trace_path[4096];
    char notified[320];      /* the STATUS= line sent last */
    char failed_reason[240]; /* that was logged last */
    struct worker_watch watch;
    bool draining, signalled, ended;
    bool again; /* the settings are to be read anew */
    uint8_t bytes[WORKER_LOOP_READ];
};

/* One accepted connection as libuv sees it; freed when its handle is closed. */
struct worker_loop_conn {
    uv_poll_t poll;
    struct worker_loop *loop;
    struct worker_peer *peer; /* NULL once closed */
    int fd;
};

static void worker_loop_on_conn(uv_poll_t *poll, int status, int events);
static void worker_loop_drain(struct worker_loop *w, const char *why);
static void worker_loop_check_drained(struct worker_loop *w);
static void worker_loop_end(struct worker_loop *w, const char *why);

/* ---- settings ---- */

void worker_loop_setup_log(const struct settings *s)
{
    static const enum log_format formats[] = {LOG_FORMAT_TEXT, LOG_FORMAT_TEXT, LOG_FORMAT_JSON,
                                              LOG_FORMAT_JOURNAL};
    unsigned choice = settings_choice(s, SETTING_log_format); /* auto, text, json, journal */
    enum log_format format = formats[choice];
    if (choice == 0 && log_under_journal())
        format = LOG_FORMAT_JOURNAL;
    log_setup((enum log_level)settings_choice(s, SETTING_log_level), format);
}

static void worker_loop_on_difference(void *context, enum setting_id id, bool reloadable)
{
    const struct settings *fresh = context;
    if (reloadable)
        log_info("loop", "setting_applied", "key=%s value=\"%s\"", settings_name(id),
                 settings_text(fresh, id));
    else
        log_warn("loop", "setting_needs_restart", "key=%s value=\"%s\"", settings_name(id),
                 settings_text(fresh, id));
}

/* All or nothing: a refused file leaves everything as it was. */
static void worker_loop_reload(struct worker_loop *w)
{
    struct settings *fresh = NULL;
    struct err e = {0};
    sd_notifyf(0, "RELOADING=1\nMONOTONIC_USEC=%llu",
               (unsigned long long)(ticks_ns(w->peers.ticks) / 1000));
    if (settings_load(w->options->config, w->options->sets, w->options->n_sets, &fresh, &e) !=
        ERR_OK) {
        log_error("loop", "reload_refused", "error=\"%s\" effect=\"old settings stay\"", e.text);
        sd_notifyf(0, "READY=1\nSTATUS=settings refused: %s", e.text);
    } else {
        settings_diff(w->settings, fresh, worker_loop_on_difference, fresh);
        settings_free(w->settings);
        w->settings = fresh;
        worker_loop_setup_log(fresh);
        log_info("loop", "reloaded", "path=\"%s\"", settings_path(fresh));
        sd_notify(0, "READY=1");
    }
    w->notified[0] = '\0';
    engine_load_again(w->engine);
}

/* ---- what systemd shows ---- */

static void worker_loop_notify_status(struct worker_loop *w)
{
    char line[sizeof w->notified];
    switch (w->facts.state) {
    case PROTO_LOADING:
        snprintf(line, sizeof line, "STATUS=loading %u %%", w->facts.progress);
        break;
    case PROTO_FAILED:
        snprintf(line, sizeof line, "STATUS=failed: %s", w->facts.reason);
        break;
    default:
        snprintf(line, sizeof line, "STATUS=%s %u streams", proto_state_name(w->facts.state),
                 w->peers.n_requests);
        break;
    }
    if (strcmp(line, w->notified) == 0)
        return;
    memcpy(w->notified, line, sizeof line);
    sd_notify(0, line);
}

/* The next worker is told, so that one that is lost again and again rests. */
static void worker_loop_note_loss(struct worker_loop *w)
{
    struct err e = {.code = ERR_OK};
    if (!w->ended && worker_losses_note(w->socket.path, ticks_ns(w->peers.ticks), &e) != ERR_OK)
        log_warn("loop", "loss_not_noted", "error=\"%s\"", e.text);
    worker_loop_end(w, "the GPU is lost to this process");
}

/* The state of the engine changed: the log, the clients and systemd learn it. */
static void worker_loop_on_state(struct worker_loop *w)
{
    enum proto_state old = w->facts.state;
    const struct engine_facts *f = &w->facts;
    engine_get_facts(w->engine, &w->facts);
    if (f->gpu_lost) {
        worker_loop_note_loss(w);
        return;
    }
    worker_announce_welcome(&w->peers);
    worker_announce_notice(&w->peers);
    if (f->state != old) /* percents are for the tick: sd_notify waits where its queue is full */
        worker_loop_notify_status(w);
    /* Said once, not at each try. */
    if (f->state == PROTO_FAILED && strcmp(w->failed_reason, f->reason) != 0) {
        memcpy(w->failed_reason, f->reason, sizeof w->failed_reason);
        log_error("model", "not_loaded", "error=\"%s\" retry_ms=%d", f->reason,
                  WORKER_WATCH_RETRY_MS);
    }
    if (f->state == PROTO_SERVING && old != PROTO_SERVING) {
        w->failed_reason[0] = '\0';
        log_info("model", "serving", "name=\"%s\" layers=%u experts=%u context=%u max_sequences=%u",
                 f->model, f->n_layer, f->n_expert, f->n_ctx, f->max_sequences);
    }
}

/* ---- connections ---- */

static void worker_loop_on_conn_closed(uv_handle_t *handle)
{
    alloc_free(handle->data);
}

static void worker_loop_close_conn(struct worker_loop_conn *c, const char *why)
{
    if (c->peer == NULL)
        return;
    log_debug("peer", "closed", "client=\"%s\" requests=%u why=\"%s\"", c->peer->client,
              c->peer->n_requests, why);
    uv_poll_stop(&c->poll);
    worker_peer_close(c->peer);
    c->peer = NULL;
    close(c->fd);
    uv_close((uv_handle_t *)&c->poll, worker_loop_on_conn_closed);
}

/* Sends what waits. May close the connection. */
static void worker_loop_flush(struct worker_loop_conn *c)
{
    size_t n;
    const uint8_t *bytes;
    while ((bytes = worker_peer_unsent(c->peer, &n)) != NULL && c->peer->lost == NULL) {
        ssize_t sent = send(c->fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        if (sent < 0)
            c->peer->lost = "it is gone";
        else
            worker_peer_sent(c->peer, (size_t)sent);
    }
    if (c->peer->lost != NULL) {
        log_warn("peer", "cut_off", "client=\"%s\" unsent_bytes=%zu why=\"%s\"", c->peer->client, n,
                 c->peer->lost);
        worker_loop_close_conn(c, c->peer->lost);
        return;
    }
    if (c->peer->ending && n == 0) {
        worker_loop_close_conn(c, "protocol");
        return;
    }
    uv_poll_start(&c->poll, UV_READABLE | (n > 0 ? UV_WRITABLE : 0), worker_loop_on_conn);
}

static void worker_loop_flush_all(struct worker_loop *w)
{
    for (uint32_t i = 0; i < WORKER_PEER_MAX; i++)
        if (w->peers.slots[i] != NULL)
            worker_loop_flush(w->peers.slots[i]->io);
}

/* May close the connection. */
static void worker_loop_read(struct worker_loop_conn *c)
{
    struct worker_loop *w = c->loop;
    for (unsigned i = 0; i < WORKER_LOOP_READS; i++) {
        ssize_t n = recv(c->fd, w->bytes, sizeof w->bytes, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            /* A half-close too: a client that cannot ask cannot cancel, so its requests end. */
            worker_loop_close_conn(c, n == 0 ? "end" : strerror(errno));
            return;
        }
        worker_peer_on_bytes(c->peer, w->bytes, (size_t)n);
        if ((size_t)n < sizeof w->bytes)
            return;
    }
}

static void worker_loop_on_conn(uv_poll_t *poll, int status, int events)
{
    struct worker_loop_conn *c = poll->data;
    if (status < 0) {
        worker_loop_close_conn(c, uv_strerror(status));
        return;
    }
    struct worker_loop *w = c->loop;
    if ((events & UV_READABLE) != 0)
        worker_loop_read(c);
    if (w->peers.drain_asked)
        worker_loop_drain(w, "a client asks");
    if (c->peer != NULL)
        worker_loop_flush(c);
    worker_loop_check_drained(w);
}

static enum err_code worker_loop_adopt(struct worker_loop *w, int fd, struct err *e)
{
    if (!worker_socket_peer_allowed(fd))
        return err_set(e, ERR_ARGUMENT, "the peer's group is not the worker's");
    struct worker_loop_conn *c = alloc_zero(ALLOC_PEER, 1, sizeof *c);
    if (c == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a connection");
    struct worker_peer *peer = NULL;
    if (worker_peer_open(&w->peers, &peer, e) != ERR_OK) {
        alloc_free(c);
        return e->code;
    }
    int status = uv_poll_init(&w->uv, &c->poll, fd);
    if (status < 0) {
        worker_peer_close(peer);
        alloc_free(c);
        return err_set(e, ERR_IO, "%s", uv_strerror(status));
    }
    c->poll.data = c;
    c->loop = w;
    c->peer = peer;
    c->fd = fd;
    peer->io = c;
    uv_poll_start(&c->poll, UV_READABLE, worker_loop_on_conn);
    return ERR_OK;
}

/* ---- the listener ---- */

static void worker_loop_on_accept(uv_poll_t *poll, int status, int events);

static void worker_loop_on_pause_end(uv_timer_t *timer)
{
    struct worker_loop *w = timer->data;
    uv_poll_start(&w->accept, UV_READABLE, worker_loop_on_accept);
}

/* The system has no more fds or memory. One who waits is accepted by the reserve and closed, so
 * that he knows; then the listener rests: it would be readable at once, for ever. */
static void worker_loop_accept_failed(struct worker_loop *w, int os_errno)
{
    log_warn("socket", "accept_failed", "error=\"%s\" pause_ms=%d", strerror(os_errno),
             WORKER_LOOP_PAUSE_MS);
    if ((os_errno == EMFILE || os_errno == ENFILE) && w->reserve_fd >= 0) {
        close(w->reserve_fd);
        int fd = accept4(w->socket.fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0)
            close(fd);
        w->reserve_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    }
    uv_poll_stop(&w->accept);
    uv_timer_start(&w->pause, worker_loop_on_pause_end, WORKER_LOOP_PAUSE_MS, 0);
}

static void worker_loop_on_accept(uv_poll_t *poll, int status, int events)
{
    struct worker_loop *w = poll->data;
    (void)events;
    for (unsigned i = 0; status >= 0 && i < WORKER_LOOP_ACCEPTS; i++) {
        int fd = accept4(w->socket.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
            continue;
        if (fd < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (fd < 0) {
            worker_loop_accept_failed(w, errno);
            return;
        }
        struct err e = {0};
        if (worker_loop_adopt(w, fd, &e) != ERR_OK) {
            log_warn("peer", "refused", "error=\"%s\"", e.text);
            close(fd);
        }
    }
}

/* ---- the engine ---- */

/* Engine thread. */
static void worker_loop_wake(void *context)
{
    struct worker_loop *w = context;
    uv_async_send(&w->events);
}

static void worker_loop_on_event(struct worker_loop *w, const struct engine_event *event)
{
    if (event->kind == ENGINE_STATE) {
        worker_loop_on_state(w);
        worker_loop_flush_all(w);
        return;
    }
    struct worker_peer *p = worker_peer_on_event(&w->peers, event);
    if (p == NULL)
        return;
    worker_loop_flush(p->io);
    if (event->kind == ENGINE_TOKENS)
        fault_hit(FAULT_WORKER_SENT);
    if (event->kind == ENGINE_DONE)
        fault_hit(FAULT_WORKER_DONE);
}

/* Returns how many commands about experts were answered. */
static unsigned worker_loop_take_commands(struct worker_loop *w)
{
    struct engine_command *command;
    unsigned n = 0;
    while (n < WORKER_LOOP_EVENTS && (command = engine_next_command(w->engine)) != NULL) {
        struct worker_peer *p = worker_peer_on_command(&w->peers, command);
        if (p != NULL)
            worker_loop_flush(p->io);
        alloc_free(command);
        n++;
    }
    return n;
}

static void worker_loop_on_events(uv_async_t *async)
{
    struct worker_loop *w = async->data;
    struct engine_event *event;
    unsigned n = 0;
    while (n < WORKER_LOOP_EVENTS && (event = engine_next_event(w->engine)) != NULL) {
        worker_loop_on_event(w, event);
        engine_event_return(w->engine, event);
        n++;
    }
    if (worker_loop_take_commands(w) == WORKER_LOOP_EVENTS || n == WORKER_LOOP_EVENTS)
        uv_async_send(async);
    worker_loop_check_drained(w);
}

/* ---- time ---- */

static void worker_loop_on_tick(uv_timer_t *timer)
{
    struct worker_loop *w = timer->data;
    uint64_t now_ms = ticks_ms(w->peers.ticks);
    for (uint32_t i = 0; i < WORKER_PEER_MAX; i++) {
        struct worker_peer *p = w->peers.slots[i];
        if (p == NULL)
            continue;
        worker_peer_check_stall(p, now_ms);
        if (p->lost != NULL)
            worker_loop_flush(p->io);
    }
    if (worker_watch_retry(&w->watch, w->facts.state == PROTO_FAILED, now_ms))
        engine_load_again(w->engine);
    worker_loop_notify_status(w);
}

static void worker_loop_on_watchdog(uv_timer_t *timer)
{
    struct worker_loop *w = timer->data;
    if (worker_watch_ping(&w->watch, engine_heartbeat(w->engine)))
        sd_notify(0, "WATCHDOG=1");
}

/* ---- stop ---- */

static void worker_loop_end(struct worker_loop *w, const char *why)
{
    if (w->ended)
        return;
    w->ended = true;
    log_info("loop", "stopping", "why=\"%s\" streams=%u", why, w->peers.n_requests);
    uv_stop(&w->uv);
}

static void worker_loop_check_drained(struct worker_loop *w)
{
    if (!w->draining || w->peers.n_requests > 0 || w->peers.n_commands > 0)
        return;
    worker_announce_drained(&w->peers);
    worker_loop_flush_all(w);
    for (uint32_t i = 0; i < WORKER_PEER_MAX; i++) {
        size_t n = 0;
        if (w->peers.slots[i] != NULL)
            worker_peer_unsent(w->peers.slots[i], &n);
        if (n > 0)
            return; /* the last frames are on their way; the deadline bounds the wait */
    }
    worker_loop_end(w, "drained");
}

static void worker_loop_on_deadline(uv_timer_t *timer)
{
    worker_loop_end(timer->data, "server.drain_deadline is over");
}

/* Nothing new, the rest to its end, then out: who supervises this process starts a fresh one. */
static void worker_loop_drain(struct worker_loop *w, const char *why)
{
    if (w->draining)
        return;
    w->draining = true;
    int64_t deadline_ms = settings_ms(w->settings, SETTING_server_drain_deadline);
    log_info("loop", "draining", "why=\"%s\" streams=%u deadline_ms=%lld", why, w->peers.n_requests,
             (long long)deadline_ms);
    sd_notify(0, "STOPPING=1");
    engine_drain(w->engine);
    worker_loop_on_state(w);
    worker_loop_flush_all(w);
    uv_timer_start(&w->deadline, worker_loop_on_deadline,
                   deadline_ms > 0 ? (uint64_t)deadline_ms : 0, 0);
}

static void worker_loop_on_stop(uv_signal_t *handle, int number)
{
    struct worker_loop *w = handle->data;
    if (w->signalled) {
        worker_loop_end(w, "second signal");
        return;
    }
    w->signalled = true;
    worker_loop_drain(w, strsignal(number));
    worker_loop_check_drained(w);
}

static void worker_loop_on_hangup(uv_signal_t *handle, int number)
{
    struct worker_loop *w = handle->data;
    (void)number;
    if (w->options->trouble == NULL) {
        worker_loop_reload(w);
        return;
    }
    w->again = true;
    worker_loop_end(w, "the settings are read again");
}

/* ---- start ---- */

static void worker_loop_open_handles(struct worker_loop *w)
{
    struct {
        uv_signal_t *handle;
        uv_signal_cb callback;
        int number;
    } const signals[] = {{&w->terminate, worker_loop_on_stop, SIGTERM},
                         {&w->interrupt, worker_loop_on_stop, SIGINT},
                         {&w->hangup, worker_loop_on_hangup, SIGHUP}};
    uv_timer_t *const timers[] = {&w->tick, &w->pause, &w->deadline, &w->watchdog};
    uint64_t watchdog_us = 0;
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        uv_signal_init(&w->uv, signals[i].handle);
        signals[i].handle->data = w;
        uv_signal_start(signals[i].handle, signals[i].callback, signals[i].number);
    }
    for (size_t i = 0; i < sizeof timers / sizeof *timers; i++) {
        uv_timer_init(&w->uv, timers[i]);
        timers[i]->data = w;
    }
    uv_timer_start(&w->tick, worker_loop_on_tick, 0, WORKER_LOOP_TICK_MS);
    if (sd_watchdog_enabled(1, &watchdog_us) > 0)
        uv_timer_start(&w->watchdog, worker_loop_on_watchdog, watchdog_us / 3000,
                       watchdog_us / 3000);
}

static enum err_code worker_loop_listen(struct worker_loop *w, struct err *e)
{
    char path[108];
    enum err_code code;
    if (w->options->inherited_fd >= 0) {
        code = worker_socket_adopt(w->options->inherited_fd, &w->socket, e);
    } else {
        code = paths_socket(settings_text(w->settings, SETTING_worker_socket), "worker.sock", path,
                            sizeof path, e);
        if (code == ERR_OK)
            code = worker_socket_open(path, &w->socket, e);
    }
    if (code != ERR_OK)
        return code;
    w->reserve_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return ERR_OK;
}

static enum err_code worker_loop_start_engine(struct worker_loop *w, struct err *e)
{
    struct engine_config config = worker_config_engine(w->settings);
    snprintf(w->model_path, sizeof w->model_path, "%s", config.model_path);
    snprintf(w->trace_path, sizeof w->trace_path, "%s", config.trace_path);
    config.model_path = w->model_path; /* copies: the settings may be read again */
    config.trace_path = w->trace_path;
    config.trouble = w->options->trouble;
    config.max_waiting = WORKER_LOOP_WAITING;
    config.notify = worker_loop_wake;
    config.notify_context = w;
    if (worker_losses_are_many(w->socket.path, ticks_ns(config.ticks)))
        config.gpu_rest_ms = WORKER_LOSSES_MINUTES * 60000;
    return engine_start(&config, &w->engine, e);
}

static void worker_loop_close_handle(uv_handle_t *handle, void *context)
{
    (void)context;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

/* Peers first, while the engine can still take their cancels; the wake-up's handle last, when no
 * engine uses it. */
static void worker_loop_close(struct worker_loop *w)
{
    for (uint32_t i = 0; w->engine != NULL && i < WORKER_PEER_MAX; i++)
        if (w->peers.slots[i] != NULL)
            worker_loop_close_conn(w->peers.slots[i]->io, "stop");
    engine_stop(w->engine);
    worker_peer_set_done(&w->peers);
    uv_walk(&w->uv, worker_loop_close_handle, NULL);
    uv_run(&w->uv, UV_RUN_DEFAULT);
    uv_loop_close(&w->uv);
    worker_socket_close(&w->socket);
    if (w->reserve_fd >= 0)
        close(w->reserve_fd);
    settings_free(w->settings);
    alloc_free(w);
}

static int worker_loop_fail(struct worker_loop *w, const struct err *e, int status)
{
    log_error("loop", "cannot_start", "error=\"%s\"", e->text);
    worker_loop_close(w);
    return status;
}

int worker_loop_run(struct settings *settings, const struct worker_loop_options *options)
{
    struct err e = {0};
    struct worker_loop *w = alloc_zero(ALLOC_PEER, 1, sizeof *w);
    if (w == NULL || uv_loop_init(&w->uv) != 0) {
        fputs("isletd: no memory to start\n", stderr);
        alloc_free(w);
        settings_free(settings);
        return WORKER_EXIT_BIND;
    }
    signal(SIGPIPE, SIG_IGN);
    w->settings = settings;
    w->options = options;
    w->socket = (struct worker_socket){.fd = -1, .lock_fd = -1};
    w->reserve_fd = -1;
    worker_peer_set_init(&w->peers, NULL,
                         (uint32_t)settings_bytes(settings, SETTING_worker_max_frame),
                         ticks_real());
    if (worker_loop_listen(w, &e) != ERR_OK)
        return worker_loop_fail(w, &e, e.code == ERR_BUSY ? WORKER_EXIT_RUNNING : WORKER_EXIT_BIND);
    uv_async_init(&w->uv, &w->events, worker_loop_on_events);
    w->events.data = w;
    if (worker_loop_start_engine(w, &e) != ERR_OK)
        return worker_loop_fail(w, &e, WORKER_EXIT_BIND);
    w->peers.engine = w->engine;
    worker_loop_open_handles(w);
    worker_loop_on_state(w);
    uv_poll_init(&w->uv, &w->accept, w->socket.fd);
    w->accept.data = w;
    uv_poll_start(&w->accept, UV_READABLE, worker_loop_on_accept);
    log_info("loop", "listening", "socket=\"%s\" version=%s model=\"%s\"", w->socket.path,
             ISLET_VERSION, w->model_path);
    worker_loop_notify_status(w);
    sd_notify(0, "READY=1");
    uv_run(&w->uv, UV_RUN_DEFAULT);
    int status = w->again ? WORKER_LOOP_AGAIN : w->facts.gpu_lost ? WORKER_EXIT_GPU : 0;
    worker_loop_close(w);
    return status;
}

#include "fake_worker.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "alloc.h"
#include "list.h"
#include "ticks.h"

enum {
    MAX_PEERS = 32,
    QUEUE_BYTES = 64 << 20
};

struct fake_run {
    struct list link;
    uint64_t id;
    struct proto_run run; /* its arrays lie behind this struct */
    uint32_t next;        /* place in the answer */
    uint64_t due_ms;
    bool began; /* its prompt was told */
};

struct fake_peer {
    int fd; /* -1: free */
    struct proto_reader reader;
    struct buf out;
    size_t out_sent, out_asked; /* frames before out_asked may go out */
    struct list runs;
    bool welcomed;
    uint64_t connection, n_frames; /* for `drop` */
};

struct fake_worker {
    struct fake_worker_options o;
    char path[108];
    int listener, wake;
    pthread_t thread;
    struct proto_scratch scratch;
    struct fake_peer peers[MAX_PEERS]; /* worker's thread */

    pthread_mutex_t lock; /* what follows */
    pthread_cond_t changed;
    struct fake_worker_counts counts;
    bool stop, die, held, state_changed;
    struct buf raw;
};

static void must(bool ok, const char *what)
{
    if (ok)
        return;
    perror(what);
    abort();
}

/* ---- one connection ---- */

static void peer_flush(struct fake_peer *p)
{
    while (p->out_sent < p->out.size) {
        ssize_t n = send(p->fd, p->out.data + p->out_sent, p->out.size - p->out_sent,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n <= 0)
            return;
        p->out_sent += (size_t)n;
    }
    buf_clear(&p->out);
    p->out_sent = p->out_asked = 0;
}

static void run_end(struct fake_worker *w, struct fake_run *r)
{
    list_remove(&r->link);
    alloc_free(r);
    w->counts.open_runs--;
}

static void peer_close(struct fake_worker *w, struct fake_peer *p)
{
    if (p->fd < 0)
        return;
    list_each_safe(it, &p->runs)
        run_end(w, list_entry(it, struct fake_run, link));
    close(p->fd);
    p->fd = -1;
    proto_reader_done(&p->reader);
    buf_done(&p->out);
    p->out_sent = 0;
    w->counts.connected--;
}

/* Sends what is ready, up to the frame that `drop` says no to: with it the connection ends. */
static void peer_send(struct fake_worker *w, struct fake_peer *p)
{
    while (w->o.drop != NULL && p->out_asked < p->out.size) {
        const uint8_t *at = p->out.data + p->out_asked;
        if (w->o.drop(w->o.context, p->connection, ++p->n_frames, at[4])) {
            p->out.size = p->out_asked;
            peer_flush(p);
            peer_close(w, p);
            return;
        }
        p->out_asked += (size_t)at[0] << 24 | (size_t)at[1] << 16 | (size_t)at[2] << 8 | at[3];
    }
    peer_flush(p);
}

static void peer_open(struct fake_worker *w)
{
    int fd = accept4(w->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return;
    for (unsigned i = 0; i < MAX_PEERS; i++) {
        struct fake_peer *p = &w->peers[i];
        if (p->fd >= 0)
            continue;
        *p = (struct fake_peer){.fd = fd, .out = BUF_INIT(QUEUE_BYTES)};
        proto_reader_init(&p->reader, PROTO_MAX_FRAME);
        list_init(&p->runs);
        w->counts.connections++;
        w->counts.connected++;
        p->connection = w->counts.connections;
        if (w->o.drop != NULL && w->o.drop(w->o.context, p->connection, 0, 0))
            peer_close(w, p);
        return;
    }
    close(fd);
}

static void peer_error(struct fake_peer *p, uint64_t id, enum err_code code, const char *text)
{
    struct proto_error m = {
        .code = (uint16_t)code, .retryable = err_code_retryable(code), .text = proto_text_of(text)};
    proto_encode_error(&p->out, id, &m);
}

/* ---- runs ---- */

static struct fake_run *run_copy(uint64_t id, const struct proto_run *m)
{
    size_t bias_bytes = m->n_bias * sizeof *m->bias, token_bytes = 4 * (size_t)m->n_tokens;
    struct fake_run *r = alloc_zero(ALLOC_MISC, 1, sizeof *r + bias_bytes + token_bytes);
    must(r != NULL, "memory");
    struct proto_bias *bias = (struct proto_bias *)(void *)(r + 1);
    uint32_t *tokens = (uint32_t *)(void *)(bias + m->n_bias);
    if (bias_bytes > 0)
        memcpy(bias, m->bias, bias_bytes);
    if (token_bytes > 0)
        memcpy(tokens, m->tokens, token_bytes);
    r->id = id;
    r->run = *m;
    r->run.bias = bias;
    r->run.tokens = tokens;
    r->run.session = r->run.trace = proto_text_of("");
    r->next = m->first_index;
    return r;
}

static void fill_token(const struct proto_run *run, uint32_t id, uint32_t index, uint8_t flags,
                       struct proto_token *t)
{
    *t = (struct proto_token){.id = id, .flags = flags};
    bool prompt = (flags & PROTO_TOKEN_PROMPT) != 0;
    if ((run->flags & (prompt ? PROTO_RUN_PROMPT_LOGPROBS : PROTO_RUN_LOGPROBS)) == 0)
        return;
    t->flags |= PROTO_TOKEN_LOGPROB;
    if (prompt && index == 0) {
        t->logprob = NAN;
        return;
    }
    t->logprob = -0.25f * (float)(index % 4 + 1);
    t->n_top = run->n_top;
    for (uint32_t k = 0; k < t->n_top; k++)
        t->top[k] = (struct proto_top){.id = id + k, .logprob = t->logprob - (float)k};
}

static void send_prompt(struct fake_peer *p, const struct fake_run *r)
{
    const struct proto_run *run = &r->run;
    struct proto_progress progress = {.prefilled = run->n_tokens, .total = run->n_tokens};
    proto_encode_progress(&p->out, r->id, &progress);
    if ((run->flags & PROTO_RUN_PROMPT_LOGPROBS) == 0)
        return;
    for (uint32_t i = 0; i < run->n_prompt; i++) {
        struct proto_token t;
        fill_token(run, run->tokens[i], i, PROTO_TOKEN_PROMPT, &t);
        proto_encode_tokens(&p->out, r->id,
                            &(struct proto_tokens){.first_index = i, .n = 1, .tokens = &t});
    }
}

static void run_accept(struct fake_worker *w, struct fake_peer *p, const struct proto_frame *f)
{
    struct proto_run m;
    struct err e = {0};
    if (proto_decode_run(f, &w->scratch, &m, &e) != ERR_OK) {
        peer_error(p, f->request_id, e.code, e.text);
        return;
    }
    w->counts.runs++;
    if (w->o.on_run != NULL)
        w->o.on_run(w->o.context, f->request_id, &m);
    if (w->o.refuse != ERR_OK) {
        peer_error(p, f->request_id, w->o.refuse, "refused by the fake worker");
        return;
    }
    struct fake_run *r = run_copy(f->request_id, &m);
    list_append(&p->runs, &r->link);
    w->counts.open_runs++;
}

static void run_done(struct fake_worker *w, struct fake_peer *p, struct fake_run *r,
                     enum proto_finish finish)
{
    struct proto_done m = {
        .finish = (uint8_t)finish,
        .usage = {.prompt = r->run.n_prompt, .generated = r->next - r->run.first_index}};
    proto_encode_done(&p->out, r->id, &m);
    w->counts.done++;
    run_end(w, r);
}

static bool ends(const struct proto_run *run, uint32_t id)
{
    for (unsigned i = 0; i < run->n_end; i++)
        if (run->end[i] == id)
            return true;
    return false;
}

/* One frame, and done where the answer ends with it. */
static void run_advance(struct fake_worker *w, struct fake_peer *p, struct fake_run *r)
{
    struct proto_token tokens[256];
    uint32_t limit = w->o.per_frame > 0 ? w->o.per_frame : 1, first = r->next;
    uint16_t n = 0;
    bool stop = false;
    if (!r->began)
        send_prompt(p, r);
    r->began = true;
    while (n < limit && n < 256 && !stop && r->next < r->run.max_new &&
           r->run.n_prompt + r->next < w->o.welcome.n_ctx) {
        uint32_t id = w->o.token(w->o.context, &r->run, r->next);
        fill_token(&r->run, id, r->next, 0, &tokens[n++]);
        stop = ends(&r->run, id);
        r->next++;
        w->counts.tokens++;
        if (w->counts.tokens == w->o.die_after || w->counts.tokens == w->o.lie_after)
            break;
    }
    if (n > 0)
        proto_encode_tokens(&p->out, r->id,
                            &(struct proto_tokens){.first_index = first, .n = n, .tokens = tokens});
    if (w->o.lie_after != 0 && w->counts.tokens == w->o.lie_after)
        buf_append(&p->out, "\0\0\0\1lies", 8);
    if (stop)
        run_done(w, p, r, PROTO_FINISH_STOP);
    else if (r->next >= r->run.max_new)
        run_done(w, p, r, PROTO_FINISH_LENGTH);
    else if (r->run.n_prompt + r->next >= w->o.welcome.n_ctx)
        run_done(w, p, r, PROTO_FINISH_CONTEXT);
}

static void run_cancel(struct fake_worker *w, struct fake_peer *p, uint64_t id)
{
    w->counts.cancels++;
    list_each_safe(it, &p->runs) {
        struct fake_run *r = list_entry(it, struct fake_run, link);
        if (r->id == id)
            run_done(w, p, r, PROTO_FINISH_CANCELLED);
    }
}

/* ---- frames in ---- */

static void peer_take(struct fake_worker *w, struct fake_peer *p, const struct proto_frame *f)
{
    struct proto_status status = {.version = PROTO_STATUS_VERSION,
                                  .state = w->o.welcome.state,
                                  .backend = proto_text_of("fake"),
                                  .degraded = proto_text_of(""),
                                  .storage = proto_text_of("none"),
                                  .generated_tokens_total = w->counts.tokens,
                                  .requests_total = w->counts.runs,
                                  .sequences_running = w->counts.open_runs};
    switch (f->cmd) {
    case PROTO_HELLO:
        p->welcomed = true;
        proto_encode_welcome(&p->out, &w->o.welcome);
        break;
    case PROTO_RUN_INFERENCE:
        run_accept(w, p, f);
        break;
    case PROTO_CANCEL:
        run_cancel(w, p, f->request_id);
        break;
    case PROTO_STATUS_REQUEST:
        proto_encode_status(&p->out, f->request_id, &status);
        break;
    default:
        peer_error(p, f->request_id, ERR_UNSUPPORTED, "not by the fake worker");
    }
}

static void peer_read(struct fake_worker *w, struct fake_peer *p)
{
    uint8_t bytes[65536];
    struct proto_frame f;
    struct err e = {0};
    ssize_t n = recv(p->fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0 || proto_reader_feed(&p->reader, bytes, (size_t)n, &e) != ERR_OK) {
        peer_close(w, p);
        return;
    }
    while (p->fd >= 0 && proto_reader_next(&p->reader, &f) == 1)
        peer_take(w, p, &f);
}

/* ---- the thread ---- */

/* Lets runs whose time has come go on; returns how long poll may wait. */
static int advance_all(struct fake_worker *w, uint64_t now_ms)
{
    int wait_ms = -1;
    for (unsigned i = 0; i < MAX_PEERS && !w->held; i++) {
        struct fake_peer *p = &w->peers[i];
        if (p->fd < 0)
            continue;
        list_each_safe(it, &p->runs) {
            struct fake_run *r = list_entry(it, struct fake_run, link);
            if (r->due_ms <= now_ms) {
                r->due_ms = now_ms + w->o.interval_ms;
                run_advance(w, p, r);
            }
            if (w->o.die_after != 0 && w->counts.tokens >= w->o.die_after) {
                w->die = true;
                peer_flush(p);
                return 0;
            }
        }
        list_each(it, &p->runs) {
            uint64_t due_ms = list_entry(it, struct fake_run, link)->due_ms;
            int left_ms = due_ms > now_ms ? (int)(due_ms - now_ms) : 0;
            if (wait_ms < 0 || left_ms < wait_ms)
                wait_ms = left_ms;
        }
    }
    return wait_ms;
}

static void die_now(struct fake_worker *w)
{
    /* The listener first: who sees the connection close must find nobody there. */
    if (w->listener >= 0)
        close(w->listener);
    w->listener = -1;
    for (unsigned i = 0; i < MAX_PEERS; i++)
        peer_close(w, &w->peers[i]);
    w->counts.dead = true;
}

static void send_orders(struct fake_worker *w)
{
    for (unsigned i = 0; i < MAX_PEERS; i++) {
        struct fake_peer *p = &w->peers[i];
        if (p->fd < 0)
            continue;
        if (w->state_changed && p->welcomed)
            proto_encode_welcome(&p->out, &w->o.welcome);
        buf_append(&p->out, w->raw.data, w->raw.size);
    }
    w->state_changed = false;
    buf_clear(&w->raw);
}

static nfds_t fill_polls(struct fake_worker *w, struct pollfd *polls)
{
    polls[0] = (struct pollfd){.fd = w->wake, .events = POLLIN};
    polls[1] = (struct pollfd){.fd = w->listener, .events = POLLIN};
    for (unsigned i = 0; i < MAX_PEERS; i++) {
        struct fake_peer *p = &w->peers[i];
        polls[2 + i] = (struct pollfd){.fd = p->fd, .events = POLLIN};
        if (p->fd >= 0 && p->out.size > p->out_sent)
            polls[2 + i].events |= POLLOUT;
    }
    return 2 + MAX_PEERS;
}

static void *fake_main(void *argument)
{
    struct fake_worker *w = argument;
    struct pollfd polls[2 + MAX_PEERS];
    pthread_mutex_lock(&w->lock);
    while (!w->stop) {
        send_orders(w);
        int wait_ms = advance_all(w, ticks_ms(ticks_real()));
        for (unsigned i = 0; i < MAX_PEERS; i++)
            if (w->peers[i].fd >= 0)
                peer_send(w, &w->peers[i]);
        if (w->die && !w->counts.dead)
            die_now(w);
        pthread_cond_broadcast(&w->changed);
        nfds_t n = fill_polls(w, polls);
        pthread_mutex_unlock(&w->lock);
        poll(polls, n, wait_ms);
        pthread_mutex_lock(&w->lock);
        uint64_t ignored;
        if ((polls[0].revents & POLLIN) != 0)
            must(read(w->wake, &ignored, sizeof ignored) == sizeof ignored, "eventfd");
        for (unsigned i = 0; i < MAX_PEERS; i++)
            if (polls[2 + i].revents != 0 && w->peers[i].fd == polls[2 + i].fd)
                peer_read(w, &w->peers[i]);
        if (polls[1].revents != 0 && w->listener >= 0)
            peer_open(w);
    }
    die_now(w);
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* ---- the test's side ---- */

struct fake_worker_options fake_worker_defaults(const char *path)
{
    return (struct fake_worker_options){
        .path = path,
        .welcome = {.version = PROTO_VERSION,
                    .state = PROTO_SERVING,
                    .progress = 100,
                    .reason = proto_text_of(""),
                    .model = proto_text_of("fake"),
                    .build = proto_text_of("0.0.0"),
                    .arithmetic = 1,
                    .incarnation = 1,
                    .n_ctx = 2048,
                    .n_vocab = 4096,
                    .max_sequences = 32,
                    .prefill_chunk = 512,
                    .max_frame = PROTO_MAX_FRAME,
                    .n_layer = 1,
                    .n_expert = 1,
                    .n_expert_used = 1},
        .token = fake_worker_echo,
    };
}

uint32_t fake_worker_echo(void *context, const struct proto_run *run, uint32_t index)
{
    (void)context;
    return run->n_prompt > 0 ? run->tokens[index % run->n_prompt] : 0;
}

static int fake_listen(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    must(strlen(path) < sizeof address.sun_path, "socket path is too long");
    memcpy(address.sun_path, path, strlen(path) + 1);
    unlink(path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    must(fd >= 0, "socket");
    must(bind(fd, (const struct sockaddr *)&address, sizeof address) == 0, path);
    must(listen(fd, 128) == 0, "listen");
    return fd;
}

struct fake_worker *fake_worker_start(const struct fake_worker_options *options)
{
    struct fake_worker *w = alloc_zero(ALLOC_MISC, 1, sizeof *w);
    must(w != NULL, "memory");
    w->o = *options;
    if (w->o.token == NULL)
        w->o.token = fake_worker_echo;
    for (unsigned i = 0; i < MAX_PEERS; i++)
        w->peers[i].fd = -1;
    proto_scratch_init(&w->scratch);
    w->raw = BUF_INIT(1 << 20);
    w->listener = fake_listen(options->path);
    memcpy(w->path, options->path, strlen(options->path) + 1);
    w->wake = eventfd(0, EFD_CLOEXEC);
    must(w->wake >= 0, "eventfd");
    must(pthread_mutex_init(&w->lock, NULL) == 0, "mutex");
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    must(pthread_cond_init(&w->changed, &attributes) == 0, "condition");
    pthread_condattr_destroy(&attributes);
    must(pthread_create(&w->thread, NULL, fake_main, w) == 0, "thread");
    return w;
}

/* Ends a change made under the lock. */
static void order_given(struct fake_worker *w)
{
    uint64_t one = 1;
    pthread_mutex_unlock(&w->lock);
    must(write(w->wake, &one, sizeof one) == sizeof one, "eventfd");
}

void fake_worker_stop(struct fake_worker *w)
{
    if (w == NULL)
        return;
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    order_given(w);
    pthread_join(w->thread, NULL);
    close(w->wake);
    unlink(w->path);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->changed);
    proto_scratch_done(&w->scratch);
    buf_done(&w->raw);
    alloc_free(w);
}

void fake_worker_die(struct fake_worker *w)
{
    pthread_mutex_lock(&w->lock);
    w->die = true;
    order_given(w);
    pthread_mutex_lock(&w->lock);
    while (!w->counts.dead)
        pthread_cond_wait(&w->changed, &w->lock);
    pthread_mutex_unlock(&w->lock);
}

void fake_worker_hold(struct fake_worker *w, bool held)
{
    pthread_mutex_lock(&w->lock);
    w->held = held;
    order_given(w);
}

void fake_worker_set_state(struct fake_worker *w, enum proto_state state, const char *reason)
{
    pthread_mutex_lock(&w->lock);
    w->o.welcome.state = (uint8_t)state;
    w->o.welcome.reason = proto_text_of(reason);
    w->state_changed = true;
    order_given(w);
}

void fake_worker_send_raw(struct fake_worker *w, const void *bytes, size_t n)
{
    pthread_mutex_lock(&w->lock);
    buf_append(&w->raw, bytes, n);
    order_given(w);
}

struct fake_worker_counts fake_worker_counts(struct fake_worker *w)
{
    pthread_mutex_lock(&w->lock);
    struct fake_worker_counts counts = w->counts;
    pthread_mutex_unlock(&w->lock);
    return counts;
}

bool fake_worker_wait(struct fake_worker *w, bool (*ready)(const struct fake_worker_counts *c),
                      int limit_ms)
{
    uint64_t end_ns = ticks_ns(ticks_real()) + (uint64_t)limit_ms * 1000000u;
    struct timespec end = {.tv_sec = (time_t)(end_ns / 1000000000u),
                           .tv_nsec = (long)(end_ns % 1000000000u)};
    pthread_mutex_lock(&w->lock);
    int code = 0;
    while (!ready(&w->counts) && code == 0)
        code = pthread_cond_timedwait(&w->changed, &w->lock, &end);
    bool is_ready = ready(&w->counts);
    pthread_mutex_unlock(&w->lock);
    return is_ready;
}

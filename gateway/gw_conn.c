#include "gw_conn.h"

#include <inttypes.h>

#include "alloc.h"
#include "gw_error.h"
#include "gw_exchange.h"
#include "gw_response.h"
#include "gw_verdict.h"
#include "log.h"

enum phase {
    PHASE_HEAD,   /* waiting for a request or reading its head */
    PHASE_BODY,   /* reading its body */
    PHASE_BUSY,   /* a handler has it */
    PHASE_LINGER, /* the last answer is written; what the client still sends is dropped */
    PHASE_CLOSE,
    PHASE_RESET
};

struct gw_conn {
    struct gw_conn_shared *shared;
    struct gw_auth_listener listener;
    void (*wake)(void *io);
    void *io;
    struct gw_http *http;
    enum phase phase;
    struct buf out; /* bytes from out_at on are unsent */
    size_t out_at;
    struct buf big;       /* a large body, behind `out`; moves there when `out` is sent */
    struct buf later;     /* bytes behind the request that runs */
    bool run_due;         /* `later` can be parsed now */
    bool served;          /* an answer was given on this connection */
    bool started;         /* the first byte of a head is there */
    bool keep_alive;      /* of the request that is being read or runs */
    uint64_t since_ns;    /* accept, or end of the last answer */
    uint64_t started_ns;  /* first byte of the head */
    uint64_t head_ns;     /* end of the head */
    uint64_t progress_ns; /* unsent bytes: when some last went out, or they came */
    uint64_t linger_ns;   /* when lingering ends; 0: not yet begun */
    uint64_t dropped;     /* bytes while lingering */

    char id[GW_RESPONSE_ID_BYTES]; /* of the request that is being read */
    struct gw_verdict verdict;     /* on its head; a refusal goes out when the body is over or not
                                    * waited for */
    struct gw_exchange *x;
};

static uint64_t now(const struct gw_conn *c)
{
    return ticks_ns(c->shared->ticks);
}

static uint64_t after(uint64_t from_ns, uint64_t ms)
{
    return from_ns + ms * 1000000u;
}

/* ---- life ------------------------------------------------------------------------------------ */

struct gw_conn *gw_conn_new(struct gw_conn_shared *shared, const struct gw_auth_listener *listener,
                            void (*wake)(void *io), void *io)
{
    struct gw_conn *c = alloc_zero(ALLOC_PEER, 1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->http = gw_http_new(&shared->limits);
    if (c->http == NULL) {
        alloc_free(c);
        return NULL;
    }
    c->shared = shared;
    c->listener = *listener;
    c->wake = wake;
    c->io = io;
    c->out = BUF_INIT(SIZE_MAX);
    c->big = BUF_INIT(SIZE_MAX);
    c->later = BUF_INIT(SIZE_MAX);
    c->since_ns = now(c);
    return c;
}

static void cancel(struct gw_conn *c)
{
    struct gw_exchange *x = c->x;
    if (x == NULL)
        return;
    c->x = NULL;
    c->shared->n_exchanges--;
    stats_add(&c->shared->cancelled, 1);
    log_info("http", "cancelled", "request=%s route=%s", gw_exchange_id(x),
             gw_exchange_route(x)->path);
    gw_exchange_cancel(x);
}

/* The end without an answer. */
static void drop(struct gw_conn *c, enum phase phase)
{
    cancel(c);
    c->phase = phase;
    buf_done(&c->later);
    c->run_due = false;
    buf_done(&c->out);
    buf_done(&c->big);
    c->out_at = 0;
}

void gw_conn_free(struct gw_conn *c)
{
    if (c == NULL)
        return;
    drop(c, PHASE_CLOSE);
    gw_http_free(c->http);
    alloc_free(c);
}

/* ---- output ---------------------------------------------------------------------------------- */

const struct gw_conn_shared *gw_conn_shared(const struct gw_conn *c)
{
    return c->shared;
}

struct buf *gw_conn_out(struct gw_conn *c)
{
    if (gw_conn_unsent(c) == 0)
        c->progress_ns = now(c);
    return c->big.size > 0 ? &c->big : &c->out;
}

void gw_conn_give(struct gw_conn *c, struct buf *bytes)
{
    enum {
        COPIED = 64 * 1024
    };
    if (bytes->size <= COPIED || c->big.size > 0) {
        buf_append(gw_conn_out(c), bytes->data, bytes->size);
        return;
    }
    c->big = *bytes;
    c->big.ceiling = SIZE_MAX;
    *bytes = BUF_INIT(bytes->ceiling);
}

size_t gw_conn_unsent(const struct gw_conn *c)
{
    return c->out.size - c->out_at + c->big.size;
}

/* Between two requests, with so many unsent bytes of answers that the next one must wait. */
static bool held(const struct gw_conn *c)
{
    return c->phase == PHASE_HEAD && !c->started &&
           gw_conn_unsent(c) > c->shared->limits.rendered_bytes;
}

bool gw_conn_reads(const struct gw_conn *c)
{
    return !held(c) && !c->run_due;
}

void gw_conn_wrote(struct gw_conn *c)
{
    c->wake(c->io);
}

void gw_conn_fill(const struct gw_conn *c, const struct gw_http_request *r, const char *id,
                  struct gw_response *ret)
{
    ret->request_id = id;
    ret->keep_alive = c->keep_alive && !c->shared->draining;
    ret->idle_announced_s = c->shared->limits.idle_announced_s;
    if (c->shared->tell != NULL)
        c->shared->tell(c->shared->tell_context, ret);
    if (r == NULL)
        return;
    struct gw_http_text origin = gw_http_field(r, "origin");
    if (origin.n > 0 && gw_auth_page_allowed(c->shared->auth, r))
        ret->origin = origin;
}

/* The answer is written. What follows: the next request, or the end of the connection. */
static void answered(struct gw_conn *c, bool keep)
{
    c->served = true;
    c->started = false;
    c->verdict.refused = false;
    c->since_ns = now(c);
    if (keep && c->phase != PHASE_CLOSE && c->phase != PHASE_RESET) {
        c->phase = PHASE_HEAD;
        c->run_due = c->later.size > 0;
        return;
    }
    buf_done(&c->later);
    c->phase = PHASE_LINGER;
    c->linger_ns = 0;
}

/* The retries that a client has counted, as it writes them; "0" for what is no number. */
static struct gw_http_text retry_of(const struct gw_http_request *r)
{
    struct gw_http_text retry = gw_http_field(r, "x-stainless-retry-count");
    bool fine = retry.n > 0 && retry.n < 8;
    for (size_t i = 0; fine && i < retry.n; i++)
        fine = retry.p[i] >= '0' && retry.p[i] <= '9';
    return fine ? retry : (struct gw_http_text){"0", 1};
}

void gw_conn_end(struct gw_conn *c, enum gw_conn_end how, unsigned status)
{
    struct gw_exchange *x = c->x;
    uint64_t took_ms = (now(c) - gw_exchange_head_ns(x)) / 1000000u;
    unsigned minor = gw_exchange_request(x)->minor;
    bool post = gw_exchange_request(x)->method == GW_HTTP_POST; /* probes would fill the log */
    enum log_level level = how == GW_CONN_END_BREAK || (post && status >= 500) ? LOG_LEVEL_WARN
                           : post                                              ? LOG_LEVEL_INFO
                                                                               : LOG_LEVEL_DEBUG;
    struct gw_http_text retry = retry_of(gw_exchange_request(x));
    log_event(level, "http", how == GW_CONN_END_BREAK ? "broken" : "answered",
              "request=%s route=%s status=%u ms=%" PRIu64 " retry=%.*s", gw_exchange_id(x),
              gw_exchange_route(x)->path, status, took_ms, (int)retry.n, retry.p);
    c->x = NULL;
    c->shared->n_exchanges--;
    gw_exchange_free(x);
    if (how == GW_CONN_END_BREAK) {
        buf_done(&c->later);
        c->run_due = false;
        /* Where the close ends the body, only a reset shows that it is not whole. */
        c->phase = minor == 0 ? PHASE_RESET : PHASE_CLOSE;
    } else {
        answered(c, how == GW_CONN_END_KEEP && c->keep_alive && !c->shared->draining);
    }
    c->wake(c->io);
}

const void *gw_conn_output(const struct gw_conn *c, size_t *ret_n)
{
    *ret_n = c->out.size - c->out_at;
    return *ret_n > 0 ? c->out.data + c->out_at : NULL;
}

void gw_conn_sent(struct gw_conn *c, size_t n)
{
    enum {
        KEPT = 4096,
        MOVED = 65536,
        MOST_MOVED = 1 << 20 /* a longer rest would hold up the loop */
    };
    bool was_held = held(c);
    stats_add(&c->shared->bytes_out, n);
    c->out_at += n;
    if (n > 0)
        c->progress_ns = now(c);
    if (c->out_at == c->out.size) {
        c->out_at = 0;
        if (c->out.capacity > KEPT)
            buf_done(&c->out);
        else
            buf_clear(&c->out);
        if (c->big.size > 0) {
            buf_done(&c->out);
            c->out = c->big;
            c->big = BUF_INIT(SIZE_MAX);
        } else if (c->phase == PHASE_LINGER && c->linger_ns == 0) {
            c->linger_ns = after(now(c), c->shared->limits.linger_ms);
        }
    } else if (c->out_at > MOVED && c->out_at > c->out.size / 2 &&
               c->out.size - c->out_at <= MOST_MOVED) {
        buf_drop_front(&c->out, c->out_at);
        c->out_at = 0;
    }
    if (was_held && !held(c)) {
        c->since_ns = now(c); /* it could not ask until now */
        if (c->run_due)
            c->wake(c->io);
    }
    if (c->x != NULL && n > 0)
        gw_exchange_drained(c->x);
}

enum gw_conn_state gw_conn_state(const struct gw_conn *c)
{
    if (c->phase == PHASE_RESET || buf_failed(&c->out) || buf_failed(&c->big))
        return GW_CONN_RESET;
    if (c->phase == PHASE_CLOSE)
        return GW_CONN_CLOSE;
    return c->phase == PHASE_LINGER ? GW_CONN_SHUT : GW_CONN_OPEN;
}

/* ---- answers without a handler --------------------------------------------------------------- */

static void answer_error(struct gw_conn *c, const struct gw_http_request *r,
                         const struct gw_error *error, unsigned status, const char *allow)
{
    struct gw_response response = {
        .status = status, .content_type = "application/json", .allow = allow};
    struct buf body = BUF_INIT(SIZE_MAX);
    gw_error_write(&body, error);
    gw_conn_fill(c, r, c->id, &response);
    response.length = body.size;
    response.retry_after_s = status == 503 ? 1 : 0;
    struct buf *out = gw_conn_out(c);
    gw_response_head(out, &response);
    if (r == NULL || r->method != GW_HTTP_HEAD)
        buf_append(out, body.data, body.size);
    buf_done(&body);
    stats_add(&c->shared->refused, 1);
    log_info("http", "refused", "request=%s status=%u code=%s", c->id, status,
             gw_error_name(error->code));
    answered(c, response.keep_alive);
}

/* The head said no, or it was OPTIONS. */
static void answer_refusal(struct gw_conn *c, const struct gw_http_request *r)
{
    if (!c->verdict.options) {
        answer_error(c, r, &c->verdict.refusal, gw_error_status(c->verdict.refusal.code),
                     c->verdict.allow);
        return;
    }
    struct gw_response response = {.status = 204, .allow = c->verdict.allow};
    gw_conn_fill(c, r, c->id, &response);
    if (c->verdict.preflight)
        gw_response_preflight(gw_conn_out(c), &response, r);
    else
        gw_response_head(gw_conn_out(c), &response);
    answered(c, response.keep_alive);
}

/* A request that cannot be read on from here: answer and close. r: NULL where there is no sound
 * head. */
static void fail(struct gw_conn *c, const struct gw_http_request *r, enum gw_error_code code,
                 unsigned status, const char *text)
{
    struct gw_error error = {.code = code, .message = text};
    if (r == NULL)
        gw_response_id(NULL, c->id);
    c->keep_alive = false;
    answer_error(c, r, &error, status, status == 405 ? "GET, HEAD, POST, OPTIONS" : NULL);
}

/* ---- input ----------------------------------------------------------------------------------- */

static void on_head(struct gw_conn *c)
{
    struct gw_http_request *r = gw_http_peek(c->http);
    stats_add(&c->shared->requests, 1);
    c->head_ns = now(c);
    c->keep_alive = r->keep_alive;
    c->phase = PHASE_BODY;
    gw_response_id(r, c->id);
    gw_verdict_decide(&c->verdict, c->shared, &c->listener, r);
    bool has_body = r->chunked || r->content_length > 0;
    if (!c->verdict.refused) {
        if (r->expect_continue && has_body)
            buf_text(gw_conn_out(c), "HTTP/1.1 100 Continue\r\n\r\n");
        return;
    }
    gw_http_discard_body(c->http);
    if (!has_body)
        return;
    /* A client that waits for 100 sends no body now, and a long one is not worth reading. */
    if (r->expect_continue || r->content_length > c->shared->limits.max_body_bytes) {
        c->keep_alive = false;
        answer_refusal(c, r);
    }
}

static void on_complete(struct gw_conn *c)
{
    struct gw_http_request *r = gw_http_take(c->http);
    if (c->verdict.refused) {
        answer_refusal(c, r);
        gw_http_request_free(r);
        return;
    }
    if (r->method == GW_HTTP_POST && r->body == NULL) {
        struct gw_error error = {.code = GW_ERROR_INVALID_JSON, .message = "a JSON body is needed"};
        answer_error(c, r, &error, 400, NULL);
        gw_http_request_free(r);
        return;
    }
    struct gw_exchange *x = gw_exchange_new(c, r, c->verdict.route, c->id, c->head_ns);
    if (x == NULL) {
        struct gw_error error = {.code = GW_ERROR_OVERLOADED,
                                 .message = "no memory for the request"};
        answer_error(c, r, &error, 503, NULL);
        gw_http_request_free(r);
        return;
    }
    c->phase = PHASE_BUSY;
    c->x = x;
    c->shared->n_exchanges++;
    c->verdict.route->handle(x, r, c->shared->routes.context);
}

/* Bytes behind the request that runs. */
static void keep_for_later(struct gw_conn *c, const uint8_t *bytes, size_t n)
{
    if (n == 0 || !c->keep_alive)
        return; /* S18: nothing is parsed behind a request that closes */
    if (n > c->shared->limits.pipeline_bytes - c->later.size) {
        log_info("http", "pipeline_full", "limit_bytes=%" PRIu32, c->shared->limits.pipeline_bytes);
        drop(c, PHASE_CLOSE);
        return;
    }
    buf_append(&c->later, bytes, n);
    if (buf_failed(&c->later))
        drop(c, PHASE_RESET);
}

static void linger(struct gw_conn *c, size_t n)
{
    c->dropped += n;
    if (c->phase == PHASE_LINGER && c->dropped > c->shared->limits.linger_bytes)
        c->phase = PHASE_CLOSE;
}

static void on_failed(struct gw_conn *c)
{
    struct gw_http_failure f = gw_http_failure(c->http);
    struct gw_http_request *r = c->phase == PHASE_BODY ? gw_http_peek(c->http) : NULL;
    if (c->verdict.refused && c->phase == PHASE_BODY) { /* decided before the body went wrong */
        c->keep_alive = false;
        answer_refusal(c, r);
        return;
    }
    fail(c, r, f.code, f.status, f.text);
}

/* One event of the parser. False: all bytes are used. */
static bool on_event(struct gw_conn *c, enum gw_http_event event)
{
    switch (event) {
    case GW_HTTP_HEAD_READY:
        on_head(c);
        return true;
    case GW_HTTP_COMPLETE:
        on_complete(c);
        return true;
    case GW_HTTP_FAILED:
        on_failed(c);
        return true;
    case GW_HTTP_ALIEN:
        log_info("http", "not_http", "%s", "");
        drop(c, PHASE_CLOSE);
        return true;
    default:
        if (c->verdict.refused && c->phase == PHASE_BODY) {
            /* The answer stands already; the rest of the body is not worth waiting for. */
            c->keep_alive = false;
            answer_refusal(c, gw_http_peek(c->http));
        }
        return false;
    }
}

static void consume(struct gw_conn *c, const uint8_t *bytes, size_t n)
{
    size_t at = 0;
    bool more = true;
    while (more && (c->phase == PHASE_HEAD || c->phase == PHASE_BODY) && !held(c)) {
        size_t used = 0;
        enum gw_http_event event = gw_http_feed(c->http, bytes + at, n - at, &used);
        at += used;
        if (!c->started && gw_http_started(c->http)) {
            c->started = true;
            c->started_ns = now(c);
        }
        more = on_event(c, event);
    }
    if (c->phase == PHASE_BUSY || c->phase == PHASE_HEAD)
        keep_for_later(c, bytes + at, n - at);
    else
        linger(c, n - at);
    c->run_due = c->phase == PHASE_HEAD && c->later.size > 0;
}

void gw_conn_feed(struct gw_conn *c, const void *bytes, size_t n)
{
    stats_add(&c->shared->bytes_in, n);
    if (n == 0)
        return;
    if (c->phase == PHASE_BUSY || c->run_due)
        keep_for_later(c, bytes, n);
    else
        consume(c, bytes, n);
}

void gw_conn_run(struct gw_conn *c)
{
    if (!c->run_due || held(c))
        return;
    struct buf later = c->later;
    c->later = BUF_INIT(SIZE_MAX);
    c->run_due = false;
    consume(c, later.data, later.size);
    buf_done(&later);
}

void gw_conn_eof(struct gw_conn *c)
{
    gw_conn_run(c);
    if (c->phase == PHASE_CLOSE || c->phase == PHASE_RESET)
        return;
    if (c->phase == PHASE_BUSY && !gw_exchange_hurry(c->x))
        drop(c, PHASE_CLOSE);
    else
        c->phase = PHASE_CLOSE; /* what is written still goes out */
}

void gw_conn_lost(struct gw_conn *c)
{
    drop(c, PHASE_RESET);
}

void gw_conn_drain(struct gw_conn *c)
{
    if (c->phase == PHASE_HEAD && !c->started && !c->run_due)
        c->phase = PHASE_CLOSE;
}

void gw_conn_overloaded(const struct gw_conn_shared *shared, struct buf *out)
{
    char id[GW_RESPONSE_ID_BYTES];
    gw_response_id(NULL, id);
    struct gw_error error = {.code = GW_ERROR_OVERLOADED, .message = "too many connections"};
    struct buf body = BUF_INIT(SIZE_MAX);
    gw_error_write(&body, &error);
    struct gw_response response = {.status = 503,
                                   .content_type = "application/json",
                                   .length = body.size,
                                   .idle_announced_s = shared->limits.idle_announced_s,
                                   .request_id = id,
                                   .retry_after_s = 1};
    if (shared->tell != NULL)
        shared->tell(shared->tell_context, &response);
    gw_response_head(out, &response);
    buf_append(out, body.data, body.size);
    buf_done(&body);
}

/* ---- time ------------------------------------------------------------------------------------ */

/* When a body that comes in too slowly is given up: at body_ms, or when its average falls under the
 * rate. */
static uint64_t body_deadline(const struct gw_conn *c)
{
    const struct gw_limits *l = &c->shared->limits;
    uint64_t enough_ms = gw_http_body_bytes(c->http) * 1000 / l->body_rate_bytes_per_s;
    uint64_t ms = enough_ms > l->body_rate_after_ms ? enough_ms : l->body_rate_after_ms;
    return after(c->head_ns, ms < l->body_ms ? ms : l->body_ms);
}

static uint64_t phase_deadline(const struct gw_conn *c)
{
    const struct gw_limits *l = &c->shared->limits;
    switch (c->phase) {
    case PHASE_HEAD:
        if (held(c))
            return UINT64_MAX; /* the limit for unsent bytes stands alone */
        if (c->started)
            return after(c->started_ns, l->head_ms);
        return after(c->since_ns, c->served ? l->idle_ms : l->first_byte_ms);
    case PHASE_BODY:
        return body_deadline(c);
    case PHASE_LINGER:
        return c->linger_ns != 0 ? c->linger_ns : UINT64_MAX;
    default:
        return UINT64_MAX;
    }
}

uint64_t gw_conn_deadline_ns(const struct gw_conn *c)
{
    uint64_t phase = phase_deadline(c);
    uint64_t stall =
        gw_conn_unsent(c) > 0 ? after(c->progress_ns, c->shared->limits.stall_ms) : UINT64_MAX;
    return phase < stall ? phase : stall;
}

void gw_conn_tick(struct gw_conn *c)
{
    uint64_t t = now(c);
    if (gw_conn_unsent(c) > 0 && t >= after(c->progress_ns, c->shared->limits.stall_ms)) {
        log_info("http", "stalled", "unsent_bytes=%zu", gw_conn_unsent(c));
        stats_add(&c->shared->timeouts, 1);
        drop(c, PHASE_RESET);
        return;
    }
    if (t < phase_deadline(c))
        return;
    if (c->phase == PHASE_LINGER) {
        c->phase = PHASE_CLOSE;
        return;
    }
    stats_add(&c->shared->timeouts, 1);
    if (c->phase == PHASE_HEAD && !c->started)
        c->phase = PHASE_CLOSE; /* unsent bytes still have until their own limit */
    else
        fail(c, c->phase == PHASE_BODY ? gw_http_peek(c->http) : NULL, GW_ERROR_REQUEST_TIMEOUT,
             408,
             c->phase == PHASE_BODY ? "the request's body did not come in time"
                                    : "the request's head did not come in time");
}

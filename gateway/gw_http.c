#include "gw_http.h"

#include <string.h>
#include <strings.h>

#include <llhttp.h>

#include "alloc.h"
#include "gw_head.h"

enum state {
    STATE_HEAD,
    STATE_READY, /* the head was reported; the body begins with the next feed */
    STATE_LENGTH,
    STATE_CHUNK_LINE,
    STATE_CHUNK_DATA,
    STATE_TRAILER,
    STATE_FAILED,
    STATE_ALIEN
};

enum {
    CHUNK_DIGITS = 8
};

/* What gw_http_request points into. */
struct owned {
    struct gw_http_request r; /* first: a request is freed through it */
    struct buf head, body, capture;
    struct gw_http_field fields[];
};

struct gw_http {
    const struct gw_limits *limits;
    llhttp_t parser;
    struct gw_head head;
    struct buf head_bytes;
    struct owned *request;
    enum state state;
    bool discard;
    bool complete;     /* llhttp has seen the end of the message */
    bool line_seen;    /* ... the end of a chunk-size line */
    bool data_seen;    /* ... the end of a chunk's data */
    bool line_cr;      /* the last byte of the chunk-size line was CR */
    unsigned n_digits; /* of the chunk-size line */
    bool digits_over;
    uint32_t n_ext;      /* bytes of chunk extensions so far */
    uint64_t body_bytes; /* of the body itself */
    uint64_t fed_bytes;  /* of the body section, framing included */
    struct gw_http_failure failure;
};

/* ---- the request ----------------------------------------------------------------------------- */

bool gw_http_text_is(struct gw_http_text text, const char *word)
{
    return text.n == strlen(word) && memcmp(text.p, word, text.n) == 0;
}

bool gw_http_text_is_word(struct gw_http_text text, const char *word)
{
    return text.n == strlen(word) && strncasecmp(text.p, word, text.n) == 0;
}

struct gw_http_text gw_http_field(const struct gw_http_request *r, const char *name)
{
    for (size_t i = 0; i < r->n_fields; i++)
        if (gw_http_text_is_word(r->fields[i].name, name))
            return r->fields[i].value;
    return (struct gw_http_text){0};
}

size_t gw_http_count(const struct gw_http_request *r, const char *name)
{
    size_t n = 0;
    for (size_t i = 0; i < r->n_fields; i++)
        n += gw_http_text_is_word(r->fields[i].name, name);
    return n;
}

const char *gw_http_method_name(enum gw_http_method method)
{
    static const char *const names[GW_HTTP_METHOD_N] = {
        [GW_HTTP_GET] = "GET",         [GW_HTTP_HEAD] = "HEAD",     [GW_HTTP_POST] = "POST",
        [GW_HTTP_OPTIONS] = "OPTIONS", [GW_HTTP_DELETE] = "DELETE",
    };
    return names[method];
}

struct buf gw_http_take_body(struct gw_http_request *r)
{
    struct owned *o = (struct owned *)r;
    struct buf body = o->body;
    body.size = r->body_bytes;
    o->body = BUF_INIT(SIZE_MAX);
    r->body = NULL;
    r->body_bytes = 0;
    return body;
}

void gw_http_set_capture(struct gw_http_request *r, struct buf *capture)
{
    struct owned *o = (struct owned *)r;
    buf_done(&o->capture);
    o->capture = *capture;
    *capture = BUF_INIT(capture->ceiling);
    r->capture = (struct gw_http_text){(const char *)o->capture.data, o->capture.size};
}

void gw_http_request_free(struct gw_http_request *r)
{
    struct owned *o = (struct owned *)r;
    if (o == NULL)
        return;
    buf_done(&o->head);
    buf_done(&o->body);
    buf_done(&o->capture);
    alloc_free(o);
}

/* ---- llhttp ---------------------------------------------------------------------------------- */

static int on_headers_complete(llhttp_t *parser)
{
    (void)parser;
    return HPE_PAUSED;
}

static int on_chunk_header(llhttp_t *parser)
{
    ((struct gw_http *)parser->data)->line_seen = true;
    return HPE_PAUSED;
}

static int on_chunk_complete(llhttp_t *parser)
{
    ((struct gw_http *)parser->data)->data_seen = true;
    return HPE_PAUSED;
}

static int on_message_complete(llhttp_t *parser)
{
    ((struct gw_http *)parser->data)->complete = true;
    return HPE_PAUSED;
}

static bool fail(struct gw_http *h, enum gw_error_code code, const char *text)
{
    h->state = STATE_FAILED;
    h->failure = (struct gw_http_failure){code, gw_error_status(code), text};
    return false;
}

static int on_body(llhttp_t *parser, const char *at, size_t n)
{
    struct gw_http *h = parser->data;
    if (n > h->limits->max_body_bytes - h->body_bytes) {
        fail(h, GW_ERROR_BODY_TOO_LARGE, "the body is longer than server.max_body allows");
        return HPE_USER;
    }
    h->body_bytes += n;
    if (h->discard)
        return 0;
    buf_append(&h->request->body, at, n);
    if (!buf_failed(&h->request->body))
        return 0;
    fail(h, GW_ERROR_OVERLOADED, "no memory for the body");
    return HPE_USER;
}

static const llhttp_settings_t settings = {
    .on_headers_complete = on_headers_complete,
    .on_body = on_body,
    .on_chunk_header = on_chunk_header,
    .on_chunk_complete = on_chunk_complete,
    .on_message_complete = on_message_complete,
};

/* Runs llhttp over n bytes, up to where it pauses. False: it refuses them, or a callback did. */
static bool parse(struct gw_http *h, const char *bytes, size_t n, size_t *ret_used)
{
    enum llhttp_errno code = llhttp_execute(&h->parser, bytes, n);
    *ret_used = n;
    if (code == HPE_OK)
        return true;
    if (code == HPE_PAUSED || code == HPE_PAUSED_UPGRADE) {
        *ret_used = (size_t)(llhttp_get_error_pos(&h->parser) - bytes);
        if (code == HPE_PAUSED)
            llhttp_resume(&h->parser);
        else
            llhttp_resume_after_upgrade(&h->parser);
        return true;
    }
    if (h->state != STATE_FAILED)
        fail(h, GW_ERROR_BAD_REQUEST,
             h->request == NULL || h->state <= STATE_READY
                 ? "the request head is malformed"
                 : "the framing of the body is malformed");
    return false;
}

/* ---- life ------------------------------------------------------------------------------------ */

struct gw_http *gw_http_new(const struct gw_limits *limits)
{
    struct gw_http *h = alloc_zero(ALLOC_PEER, 1, sizeof *h);
    if (h == NULL)
        return NULL;
    h->limits = limits;
    h->head_bytes = BUF_INIT(limits->head_bytes);
    gw_head_init(&h->head, limits, false);
    return h;
}

void gw_http_free(struct gw_http *h)
{
    if (h == NULL)
        return;
    buf_done(&h->head_bytes);
    if (h->request != NULL)
        gw_http_request_free(&h->request->r);
    alloc_free(h);
}

void gw_http_discard_body(struct gw_http *h)
{
    h->discard = true;
}

struct gw_http_request *gw_http_peek(struct gw_http *h)
{
    return h->request != NULL ? &h->request->r : NULL;
}

struct gw_http_request *gw_http_take(struct gw_http *h)
{
    struct owned *o = h->request;
    h->request = NULL;
    return &o->r;
}

struct gw_http_failure gw_http_failure(const struct gw_http *h)
{
    return h->failure;
}

bool gw_http_started(const struct gw_http *h)
{
    return h->state != STATE_HEAD || h->head.size > 0;
}

uint64_t gw_http_body_bytes(const struct gw_http *h)
{
    return h->fed_bytes;
}

/* ---- head ------------------------------------------------------------------------------------ */

/* A request around the collected head, which moves into it. */
static bool request_new(struct gw_http *h)
{
    size_t bytes = sizeof(struct owned) + h->head.n_fields * sizeof(struct gw_http_field);
    struct owned *o = alloc_zero(ALLOC_REQUEST, 1, bytes);
    if (o == NULL)
        return fail(h, GW_ERROR_OVERLOADED, "no memory for the request");
    const char *head = (const char *)h->head_bytes.data;
    if (!gw_head_judge(&h->head, head, &o->r)) {
        alloc_free(o);
        h->state = STATE_FAILED;
        h->failure = h->head.failure;
        return false;
    }
    for (uint32_t i = 0; i < h->head.n_fields; i++) {
        const struct gw_head_field *f = &h->head.fields[i];
        o->fields[i].name = (struct gw_http_text){head + f->name, f->n_name};
        o->fields[i].value = (struct gw_http_text){head + f->value, f->n_value};
    }
    o->r.fields = o->fields;
    o->r.n_fields = h->head.n_fields;
    o->head = h->head_bytes;
    h->head_bytes = BUF_INIT(h->limits->head_bytes);
    o->body = BUF_INIT(SIZE_MAX);
    h->request = o;
    return true;
}

/* llhttp reads the head that passed the check. Where the two differ, nobody knows what the request
 * says. */
static bool confirm_head(struct gw_http *h)
{
    static const uint8_t methods[GW_HTTP_METHOD_N] = {
        [GW_HTTP_GET] = HTTP_GET,       [GW_HTTP_HEAD] = HTTP_HEAD,
        [GW_HTTP_POST] = HTTP_POST,     [GW_HTTP_OPTIONS] = HTTP_OPTIONS,
        [GW_HTTP_DELETE] = HTTP_DELETE,
    };
    struct owned *o = h->request;
    size_t used;
    llhttp_init(&h->parser, HTTP_REQUEST, &settings);
    h->parser.data = h;
    if (!parse(h, (const char *)o->head.data, o->head.size, &used))
        return false;
    bool chunked = (h->parser.flags & F_CHUNKED) != 0;
    if (h->complete || used != o->head.size || h->parser.method != methods[o->r.method] ||
        h->parser.http_minor != o->r.minor || chunked != o->r.chunked ||
        (!chunked && h->parser.content_length != o->r.content_length))
        return fail(h, GW_ERROR_BAD_REQUEST, "the request head can be read in two ways");
    return true;
}

static enum gw_http_event feed_head(struct gw_http *h, const char *bytes, size_t n,
                                    size_t *ret_used)
{
    uint32_t before = h->head.size;
    enum gw_head_result result = gw_head_scan(&h->head, bytes, n, ret_used);
    uint32_t grown = h->head.size - before;
    switch (result) {
    case GW_HEAD_ALIEN:
        h->state = STATE_ALIEN;
        return GW_HTTP_ALIEN;
    case GW_HEAD_FAILED:
        h->state = STATE_FAILED;
        h->failure = h->head.failure;
        return GW_HTTP_FAILED;
    default:
        buf_append(&h->head_bytes, bytes + *ret_used - grown, grown);
        if (!buf_failed(&h->head_bytes))
            break;
        fail(h, GW_ERROR_OVERLOADED, "no memory for the request head");
        return GW_HTTP_FAILED;
    }
    if (result == GW_HEAD_MORE)
        return GW_HTTP_MORE;
    h->complete = false;
    if (!request_new(h) || !confirm_head(h))
        return GW_HTTP_FAILED;
    h->state = STATE_READY;
    h->discard = false;
    h->n_ext = 0;
    h->body_bytes = h->fed_bytes = 0;
    return GW_HTTP_HEAD_READY;
}

/* ---- body ------------------------------------------------------------------------------------ */

static enum gw_http_event complete(struct gw_http *h)
{
    struct owned *o = h->request;
    gw_head_init(&h->head, h->limits, false);
    h->state = STATE_HEAD;
    if (o->body.size > 0) {
        o->r.body_bytes = o->body.size;
        buf_byte(&o->body, 0);
        o->r.body = (char *)o->body.data;
        if (buf_failed(&o->body)) {
            fail(h, GW_ERROR_OVERLOADED, "no memory for the body");
            return GW_HTTP_FAILED;
        }
    }
    return GW_HTTP_COMPLETE;
}

static void line_start(struct gw_http *h)
{
    h->state = STATE_CHUNK_LINE;
    h->n_digits = 0;
    h->digits_over = h->line_cr = h->line_seen = h->data_seen = false;
}

/* Checks the bytes of a chunk-size line up to and with its LF; *ret_n is how many of the n belong
 * to it. */
static bool scan_line(struct gw_http *h, const char *bytes, size_t n, size_t *ret_n)
{
    for (size_t i = 0; i < n; i++) {
        uint8_t c = (uint8_t)bytes[i];
        bool hex = (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'f');
        *ret_n = i + 1;
        if (h->line_cr)
            return c == '\n' || fail(h, GW_ERROR_BAD_REQUEST, "a CR is not followed by LF");
        if (c == '\r') {
            h->line_cr = true;
        } else if (!h->digits_over && hex) {
            if (++h->n_digits > CHUNK_DIGITS)
                return fail(h, GW_ERROR_BAD_REQUEST, "a chunk size has more than 8 digits");
        } else if (!h->digits_over && c != ';') {
            return fail(h, GW_ERROR_BAD_REQUEST, "a chunk size must be hexadecimal digits");
        } else {
            h->digits_over = true;
            if ((c < 0x20 && c != '\t') || c == 0x7F)
                return fail(h, GW_ERROR_BAD_REQUEST, "a control byte in a chunk extension");
            if (++h->n_ext > h->limits->chunk_ext_bytes)
                return fail(h, GW_ERROR_BAD_REQUEST, "the chunk extensions are too long");
        }
        if (h->n_digits == 0)
            return fail(h, GW_ERROR_BAD_REQUEST, "a chunk has no size");
    }
    return true;
}

static bool feed_line(struct gw_http *h, const char *bytes, size_t n, size_t *ret_used)
{
    size_t length = 0;
    if (!scan_line(h, bytes, n, &length) || !parse(h, bytes, length, ret_used))
        return false;
    if (!h->line_seen)
        return true;
    uint64_t size = h->parser.content_length;
    if (size == 0) {
        gw_head_init(&h->head, h->limits, true);
        h->state = STATE_TRAILER;
        return true;
    }
    h->state = STATE_CHUNK_DATA;
    return size <= h->limits->max_body_bytes - h->body_bytes ||
           fail(h, GW_ERROR_BODY_TOO_LARGE, "the body is longer than server.max_body allows");
}

static bool feed_trailer(struct gw_http *h, const char *bytes, size_t n, size_t *ret_used)
{
    size_t length = 0, used;
    enum gw_head_result result = gw_head_scan(&h->head, bytes, n, &length);
    *ret_used = length;
    if (result == GW_HEAD_FAILED || result == GW_HEAD_ALIEN) {
        h->state = STATE_FAILED;
        h->failure = h->head.failure;
        return false;
    }
    /* llhttp pauses once more behind the last chunk, at the end of the trailer. */
    for (size_t at = 0; at < length; at += used) {
        if (!parse(h, bytes + at, length - at, &used))
            return false;
        if (used == 0 && h->complete)
            break;
    }
    if (h->data_seen && !h->complete && !parse(h, bytes + length, 0, &used))
        return false;
    return h->complete == (result == GW_HEAD_DONE) ||
           fail(h, GW_ERROR_BAD_REQUEST, "the end of the body can be read in two ways");
}

/* One step over the body; sets *ret_used to at least 1 of n, unless the body is complete. */
static bool step_body(struct gw_http *h, const char *bytes, size_t n, size_t *ret_used)
{
    switch (h->state) {
    case STATE_CHUNK_LINE:
        return feed_line(h, bytes, n, ret_used);
    case STATE_TRAILER:
        return feed_trailer(h, bytes, n, ret_used);
    default:
        if (!parse(h, bytes, n, ret_used))
            return false;
        if (h->state == STATE_CHUNK_DATA && h->data_seen)
            line_start(h);
        return true;
    }
}

static enum gw_http_event feed_body(struct gw_http *h, const char *bytes, size_t n,
                                    size_t *ret_used)
{
    const struct gw_http_request *r = &h->request->r;
    if (h->state == STATE_READY) {
        if (!r->chunked && r->content_length == 0)
            return complete(h);
        if (r->chunked)
            line_start(h);
        else
            h->state = STATE_LENGTH;
    }
    while (*ret_used < n && !h->complete) {
        size_t used = 0;
        bool fine = step_body(h, bytes + *ret_used, n - *ret_used, &used);
        *ret_used += used;
        h->fed_bytes += used;
        if (!fine)
            return GW_HTTP_FAILED;
    }
    return h->complete ? complete(h) : GW_HTTP_MORE;
}

enum gw_http_event gw_http_feed(struct gw_http *h, const void *bytes, size_t n, size_t *ret_used)
{
    *ret_used = 0;
    switch (h->state) {
    case STATE_FAILED:
        return GW_HTTP_FAILED;
    case STATE_ALIEN:
        return GW_HTTP_ALIEN;
    case STATE_HEAD:
        if (h->request != NULL) { /* complete, and nobody took it */
            gw_http_request_free(&h->request->r);
            h->request = NULL;
        }
        return feed_head(h, bytes, n, ret_used);
    default:
        return feed_body(h, bytes, n, ret_used);
    }
}

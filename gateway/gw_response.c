#include "gw_response.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

#include "gw_head.h"
#include "rng.h"

#define EXPOSED                                                                         \
    "x-request-id, openai-processing-ms, retry-after, x-islet-degraded, x-islet-seed, " \
    "x-islet-ignored"

static const char *reason_of(unsigned status)
{
    static const struct {
        unsigned status;
        const char *reason;
    } rows[] = {
        {200, "OK"},
        {204, "No Content"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {403, "Forbidden"},
        {404, "Not Found"},
        {405, "Method Not Allowed"},
        {408, "Request Timeout"},
        {413, "Content Too Large"},
        {414, "URI Too Long"},
        {415, "Unsupported Media Type"},
        {417, "Expectation Failed"},
        {431, "Request Header Fields Too Large"},
        {500, "Internal Server Error"},
        {501, "Not Implemented"},
        {503, "Service Unavailable"},
        {505, "HTTP Version Not Supported"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (rows[i].status == status)
            return rows[i].reason;
    return "Unknown";
}

void gw_response_id(const struct gw_http_request *r, char ret[GW_RESPONSE_ID_BYTES])
{
    struct gw_http_text id = {0};
    if (r != NULL)
        id = gw_http_field(r, "x-request-id");
    bool fine = proto_trace_good(id.p, id.n);
    if (fine) {
        memcpy(ret, id.p, id.n);
        ret[id.n] = '\0';
        return;
    }
    uint8_t random[12];
    rng_system(random, sizeof random);
    memcpy(ret, "req_", 4);
    for (size_t i = 0; i < sizeof random; i++) {
        ret[4 + 2 * i] = "0123456789abcdef"[random[i] >> 4];
        ret[5 + 2 * i] = "0123456789abcdef"[random[i] & 15];
    }
    ret[4 + 2 * sizeof random] = '\0';
}

static void date(struct buf *out)
{
    static const char days[7][4] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
    static const char months[12][4] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                       "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
    time_t now = time(NULL);
    struct tm t;
    gmtime_r(&now, &t);
    buf_format(out, "Date: %s, %02d %s %04d %02d:%02d:%02d GMT\r\n", days[t.tm_wday], t.tm_mday,
               months[t.tm_mon], t.tm_year + 1900, t.tm_hour, t.tm_min, t.tm_sec);
}

static void cors(struct buf *out, struct gw_http_text origin)
{
    buf_text(out, "Access-Control-Allow-Origin: ");
    buf_append(out, origin.p, origin.n);
    buf_text(out, "\r\n");
}

static void extra(struct buf *out, const struct gw_exchange_header *h)
{
    for (const char *p = h->value; *p != '\0'; p++)
        if (((uint8_t)*p < 0x20 && *p != '\t') || *p == 0x7F)
            return;
    buf_format(out, "%s: %s\r\n", h->name, h->value);
}

/* A worker's text may hold any byte, as names in a model's file do. */
static void degraded(struct buf *out, const char *text)
{
    buf_text(out, "x-islet-degraded: ");
    for (const char *p = text; *p != '\0'; p++)
        buf_append(out, *p >= ' ' && *p <= '~' ? p : "?", 1);
    buf_text(out, "\r\n");
}

/* All but the blank line at the end. */
static void head(struct buf *out, const struct gw_response *r)
{
    bool events = r->content_type != NULL &&
                  strncmp(r->content_type, "text/event-stream", strlen("text/event-stream")) == 0;
    buf_format(out, "HTTP/1.1 %u %s\r\n", r->status, reason_of(r->status));
    date(out);
    buf_format(out, "Server: islet/%s\r\nx-request-id: %s\r\n", ISLET_VERSION, r->request_id);
    if (r->content_type != NULL)
        buf_format(out, "Content-Type: %s\r\n", r->content_type);
    if (r->open && r->chunked)
        buf_text(out, "Transfer-Encoding: chunked\r\n");
    else if (!r->open && r->status != 204)
        buf_format(out, "Content-Length: %" PRIu64 "\r\n", r->length);
    buf_text(out, events ? "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
                         : "Cache-Control: no-store\r\n");
    if (r->keep_alive)
        buf_format(out, "Connection: keep-alive\r\nKeep-Alive: timeout=%u\r\n",
                   r->idle_announced_s);
    else
        buf_text(out, "Connection: close\r\n");
    if (r->has_processing)
        buf_format(out, "openai-processing-ms: %" PRIu64 "\r\n", r->processing_ms);
    if (r->status == 401)
        buf_text(out, "WWW-Authenticate: Bearer\r\n");
    if (r->allow != NULL)
        buf_format(out, "Allow: %s\r\n", r->allow);
    if (r->retry_after_s > 0)
        buf_format(out, "Retry-After: %u\r\n", r->retry_after_s);
    for (size_t i = 0; i < r->n_headers; i++)
        extra(out, &r->headers[i]);
    if (r->degraded != NULL)
        degraded(out, r->degraded);
    if (r->celsius > 0)
        buf_format(out, "x-nvidia-temp: %" PRIu64 "\r\n", r->celsius);
}

void gw_response_head(struct buf *out, const struct gw_response *r)
{
    head(out, r);
    if (r->origin.n > 0) {
        cors(out, r->origin);
        buf_text(out, "Vary: Origin\r\nAccess-Control-Expose-Headers: " EXPOSED "\r\n");
    }
    buf_text(out, "\r\n");
}

void gw_response_chunk(struct buf *out, const void *bytes, size_t n)
{
    buf_format(out, "%zx\r\n", n);
    buf_append(out, bytes, n);
    buf_text(out, "\r\n");
}

void gw_response_last_chunk(struct buf *out)
{
    buf_text(out, "0\r\n\r\n");
}

/* The header names that a page asks for, those that are tokens. ('*' would not cover
 * Authorization.) */
static void requested_names(struct buf *out, struct gw_http_text list)
{
    bool first = true;
    size_t i = 0;
    while (i < list.n) {
        size_t from = i, n = 0;
        while (i < list.n && list.p[i] != ',')
            i++;
        while (from < i && (list.p[from] == ' ' || list.p[from] == '\t'))
            from++;
        while (from + n < i && gw_head_token_byte((uint8_t)list.p[from + n]))
            n++;
        size_t behind = from + n;
        while (behind < i && (list.p[behind] == ' ' || list.p[behind] == '\t'))
            behind++;
        if (n > 0 && behind == i) {
            buf_text(out, first ? "Access-Control-Allow-Headers: " : ", ");
            buf_append(out, list.p + from, n);
            first = false;
        }
        i++;
    }
    if (!first)
        buf_text(out, "\r\n");
}

void gw_response_preflight(struct buf *out, const struct gw_response *r,
                           const struct gw_http_request *request)
{
    head(out, r);
    cors(out, r->origin);
    buf_text(out, "Access-Control-Allow-Methods: GET, POST, OPTIONS\r\n");
    requested_names(out, gw_http_field(request, "access-control-request-headers"));
    buf_text(out, "Access-Control-Max-Age: 7200\r\n");
    struct gw_http_text local = gw_http_field(request, "access-control-request-private-network");
    if (gw_http_text_is_word(local, "true"))
        buf_text(out, "Access-Control-Allow-Private-Network: true\r\n");
    buf_text(out, "Vary: Origin, Access-Control-Request-Headers\r\n\r\n");
}

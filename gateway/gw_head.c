#include "gw_head.h"

#include <string.h>

enum state {
    STATE_START, /* blank lines in front of a request */
    STATE_START_LF,
    STATE_METHOD,
    STATE_TARGET,
    STATE_VERSION,
    STATE_VERSION_LF,
    STATE_FIELD,
    STATE_NAME,
    STATE_VALUE_START,
    STATE_VALUE,
    STATE_VALUE_LF,
    STATE_END_LF,
    STATE_DONE,
    STATE_FAILED
};

bool gw_head_token_byte(uint8_t c)
{
    if ((c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z'))
        return true;
    return c != 0 && strchr("!#$%&'*+-.^_`|~", c) != NULL;
}

static bool value_byte(uint8_t c)
{
    return c == '\t' || (c >= 0x20 && c != 0x7F);
}

void gw_head_init(struct gw_head *h, const struct gw_limits *limits, bool is_trailer)
{
    /* The field table is written before it is read. */
    memset(h, 0, offsetof(struct gw_head, fields));
    h->limits = limits;
    h->is_trailer = is_trailer;
    h->state = is_trailer ? STATE_FIELD : STATE_START;
    h->name[0] = '\0';
    h->failure = (struct gw_http_failure){0};
}

static bool fail(struct gw_head *h, enum gw_error_code code, unsigned status, const char *text)
{
    h->state = STATE_FAILED;
    h->failure = (struct gw_http_failure){
        .code = code, .status = status ? status : gw_error_status(code), .text = text};
    return false;
}

static bool bad(struct gw_head *h, const char *text)
{
    return fail(h, GW_ERROR_BAD_REQUEST, 0, text);
}

static bool method_is(const struct gw_head *h, const char *head, const char *name)
{
    return h->n_method == strlen(name) && memcmp(head, name, h->n_method) == 0;
}

static bool judge_version(struct gw_head *h)
{
    const char *v = h->version;
    if (h->n_version != 8 || memcmp(v, "HTTP/", 5) != 0 || v[5] < '0' || v[5] > '9' ||
        v[6] != '.' || v[7] < '0' || v[7] > '9')
        return bad(h, "the request line must end with HTTP/1.1 or HTTP/1.0");
    if (v[5] == '0')
        return bad(h, "HTTP/0.9 is not spoken here; use HTTP/1.1");
    if (v[5] != '1' || v[7] > '1')
        return fail(h, GW_ERROR_HTTP_VERSION, 0, "only HTTP/1.1 and HTTP/1.0 are spoken here");
    return true;
}

/* The bytes of the request line up to the version. */
static bool line_byte(struct gw_head *h, uint8_t c)
{
    if (h->state == STATE_METHOD) {
        if (c == ' ') {
            h->n_method = h->size;
            h->target = h->size + 1;
            h->state = STATE_TARGET;
        } else if (!gw_head_token_byte(c)) {
            return bad(h,
                       "the request line must be: method, one space, target, one space, version");
        }
        return true;
    }
    if (c == ' ') {
        h->n_target = h->size - h->target;
        h->state = STATE_VERSION;
        return h->n_target > 0 || bad(h, "the request line has two spaces in a row");
    }
    if (c < 0x21 || c > 0x7E || c == '#')
        return bad(h, "the request target may hold printable ASCII without '#' only");
    return true;
}

static bool version_byte(struct gw_head *h, uint8_t c)
{
    if (c == '\r') {
        h->state = STATE_VERSION_LF;
        return true;
    }
    if (c < 0x21 || c > 0x7E || h->n_version == sizeof h->version)
        return bad(h, "the request line must end with HTTP/1.1 or HTTP/1.0 and CR LF");
    h->version[h->n_version++] = (char)c;
    return true;
}

static bool name_end(struct gw_head *h)
{
    if (h->is_trailer) {
        static const char *const never[] = {"content-length", "transfer-encoding", "host",
                                            "authorization"};
        for (size_t i = 0; i < sizeof never / sizeof never[0]; i++)
            if (strcmp(h->name, never[i]) == 0)
                return bad(h, "Content-Length, Transfer-Encoding, Host and Authorization cannot be "
                              "trailer fields");
    } else {
        struct gw_head_field *f = &h->fields[h->n_fields - 1];
        f->n_name = h->size - f->name;
    }
    h->state = STATE_VALUE_START;
    return true;
}

static void keep_name(struct gw_head *h, uint8_t c)
{
    size_t n = strlen(h->name);
    if (n + 1 < sizeof h->name) {
        h->name[n] = (char)(c >= 'A' && c <= 'Z' ? c | 0x20 : c);
        h->name[n + 1] = '\0';
    }
}

static bool field_start(struct gw_head *h, uint8_t c)
{
    if (c == '\r') {
        h->state = STATE_END_LF;
        return true;
    }
    if (c == ' ' || c == '\t')
        return bad(h, "a header line begins with white space; folded lines are refused");
    if (c == ':')
        return bad(h, "a header field has no name");
    if (!gw_head_token_byte(c))
        return bad(h, "a header field name holds a byte that is not allowed there");
    uint32_t most = h->is_trailer ? h->limits->trailer_lines : h->limits->fields;
    if (h->n_fields >= most || (!h->is_trailer && h->n_fields >= GW_HEAD_FIELDS))
        return h->is_trailer ? bad(h, "too many trailer fields")
                             : fail(h, GW_ERROR_HEAD_TOO_LARGE, 0, "too many header fields");
    h->n_fields++;
    h->name[0] = '\0';
    if (h->is_trailer)
        keep_name(h, c);
    else
        h->fields[h->n_fields - 1] = (struct gw_head_field){.name = h->size};
    h->state = STATE_NAME;
    return true;
}

static bool name_byte(struct gw_head *h, uint8_t c)
{
    if (c == ':')
        return name_end(h);
    if (!gw_head_token_byte(c))
        return bad(h, c == ' ' || c == '\t'
                          ? "white space between a field name and its colon"
                          : "a header line without a colon, or a bad byte in its name");
    if (h->is_trailer)
        keep_name(h, c);
    return true;
}

static bool value_next(struct gw_head *h, uint8_t c)
{
    struct gw_head_field *f = h->is_trailer ? NULL : &h->fields[h->n_fields - 1];
    if (c == '\r') {
        if (f != NULL && h->state == STATE_VALUE_START)
            f->value = h->size;
        h->state = STATE_VALUE_LF;
        return true;
    }
    if (!value_byte(c))
        return bad(h, "a header value holds a control byte, or a line does not end with CR LF");
    bool space = c == ' ' || c == '\t';
    if (h->state == STATE_VALUE_START && !space) {
        h->state = STATE_VALUE;
        if (f != NULL)
            f->value = h->size;
    }
    if (f != NULL && !space)
        f->n_value = h->size + 1 - f->value; /* white space at the end is not counted */
    return true;
}

static bool line_feed(struct gw_head *h, uint8_t c)
{
    if (c != '\n')
        return bad(h, "a CR is not followed by LF");
    if (h->state == STATE_START_LF) {
        h->state = STATE_START;
        return true;
    }
    if (h->state == STATE_VERSION_LF && !judge_version(h))
        return false;
    h->state = h->state == STATE_END_LF ? STATE_DONE : STATE_FIELD;
    return true;
}

static bool next_byte(struct gw_head *h, uint8_t c)
{
    switch ((enum state)h->state) {
    case STATE_METHOD:
    case STATE_TARGET:
        return line_byte(h, c);
    case STATE_VERSION:
        return version_byte(h, c);
    case STATE_FIELD:
        return field_start(h, c);
    case STATE_NAME:
        return name_byte(h, c);
    case STATE_VALUE_START:
    case STATE_VALUE:
        return value_next(h, c);
    default:
        return line_feed(h, c);
    }
}

/* False: the scan ends, with failure.text set or (not HTTP at all) without. */
static bool first_byte(struct gw_head *h, uint8_t c)
{
    if (h->state == STATE_START_LF)
        return line_feed(h, c);
    if (c == '\r') {
        h->state = STATE_START_LF;
        return ++h->n_blank <= 2 || bad(h, "more than two blank lines in front of a request");
    }
    h->state = STATE_METHOD;
    if (gw_head_token_byte(c))
        return true;
    h->state = STATE_FAILED;
    return false;
}

static bool within_limits(struct gw_head *h)
{
    if (h->is_trailer)
        return h->size < h->limits->trailer_bytes || bad(h, "the trailer is too long");
    bool in_line = h->state <= STATE_VERSION;
    if (in_line && h->size >= h->limits->request_line_bytes + (h->state == STATE_VERSION))
        return fail(h, GW_ERROR_URI_TOO_LONG, 0, "the request line is too long");
    return h->size < h->limits->head_bytes ||
           fail(h, GW_ERROR_HEAD_TOO_LARGE, 0, "the request head is too long");
}

enum gw_head_result gw_head_scan(struct gw_head *h, const char *bytes, size_t n, size_t *ret_used)
{
    size_t i = 0;
    while (i < n && h->state < STATE_DONE) {
        uint8_t c = (uint8_t)bytes[i++];
        if (h->state <= STATE_START_LF) {
            if (!first_byte(h, c))
                break;
            h->size = h->state == STATE_METHOD; /* 1: this byte is the head's first */
            continue;
        }
        if (!within_limits(h) || !next_byte(h, c))
            break;
        h->size++;
    }
    *ret_used = i;
    if (h->state == STATE_FAILED)
        return h->failure.text != NULL ? GW_HEAD_FAILED : GW_HEAD_ALIEN;
    return h->state == STATE_DONE ? GW_HEAD_DONE : GW_HEAD_MORE;
}

/* ---- the table: what a well-formed head must not say ----------------------------------------- */

/* Name, IPv4 or [IPv6], and a port; no userinfo, comma, space or path. An empty text is
 * well-formed. */
static bool host_wellformed(struct gw_http_text host)
{
    size_t i = 0;
    if (host.n > 0 && host.p[0] == '[') {
        const char *end = memchr(host.p, ']', host.n);
        if (end == NULL)
            return false;
        for (i = 1; host.p + i < end; i++) {
            char c = host.p[i];
            bool hex = (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'f');
            if (!hex && c != ':' && c != '.')
                return false;
        }
        i++;
    }
    for (; i < host.n && host.p[i] != ':'; i++) {
        uint8_t c = (uint8_t)host.p[i];
        if (host.p[0] == '[' || c < 0x21 || c > 0x7E || strchr("@,/\\?#[]\"<>^`{|}", c) != NULL)
            return false;
    }
    if (i < host.n) /* the port */
        for (i++; i < host.n; i++)
            if (host.p[i] < '0' || host.p[i] > '9')
                return false;
    return true;
}

/* `word` as an element of a comma-separated list. */
static bool list_has(struct gw_http_text list, const char *word)
{
    size_t i = 0;
    while (i < list.n) {
        size_t end = i;
        while (end < list.n && list.p[end] != ',')
            end++;
        size_t from = i, to = end;
        while (from < to && (list.p[from] == ' ' || list.p[from] == '\t'))
            from++;
        while (to > from && (list.p[to - 1] == ' ' || list.p[to - 1] == '\t'))
            to--;
        if (gw_http_text_is_word((struct gw_http_text){list.p + from, to - from}, word))
            return true;
        i = end + 1;
    }
    return false;
}

struct facts {
    unsigned n_host, n_length, n_coding;
    struct gw_http_text host, length, coding;
    bool close, keep_alive, expect_continue, expect_other;
};

static bool collect(struct gw_head *h, const char *head, struct facts *f)
{
    for (uint32_t i = 0; i < h->n_fields; i++) {
        const struct gw_head_field *at = &h->fields[i];
        struct gw_http_text name = {head + at->name, at->n_name};
        struct gw_http_text value = {head + at->value, at->n_value};
        bool length = gw_http_text_is_word(name, "content-length");
        bool coding = gw_http_text_is_word(name, "transfer-encoding");
        /* Between value and CR stands white space; servers disagree about a tab there. */
        const char *end = value.p + value.n;
        if ((length || coding) && memchr(end, '\t', (size_t)(strchr(end, '\r') - end)) != NULL)
            return bad(h, "a tab behind the value of Content-Length or Transfer-Encoding");
        if (length && f->n_length++ == 0)
            f->length = value;
        if (coding && f->n_coding++ == 0)
            f->coding = value;
        if (gw_http_text_is_word(name, "host") && f->n_host++ == 0)
            f->host = value;
        if (gw_http_text_is_word(name, "connection")) {
            f->close |= list_has(value, "close");
            f->keep_alive |= list_has(value, "keep-alive");
        }
        if (gw_http_text_is_word(name, "expect")) {
            bool known = gw_http_text_is_word(value, "100-continue");
            f->expect_continue |= known;
            f->expect_other |= !known;
        }
    }
    return true;
}

static bool judge_length(struct gw_head *h, const struct facts *f, struct gw_http_request *r)
{
    if (f->n_length > 1)
        return bad(h, "more than one Content-Length");
    if (f->n_length == 1 && (f->length.n == 0 || f->length.n > 19))
        return bad(h, "Content-Length must be 1 to 19 digits");
    uint64_t value = 0;
    for (size_t i = 0; i < f->length.n; i++) {
        char c = f->length.p[i];
        if (c < '0' || c > '9')
            return bad(h, "Content-Length must be digits only");
        value = value * 10 + (uint64_t)(c - '0');
    }
    r->content_length = value;
    return true;
}

static bool judge_framing(struct gw_head *h, const struct facts *f, struct gw_http_request *r)
{
    if (f->n_length > 0 && f->n_coding > 0)
        return bad(h, "Content-Length and Transfer-Encoding together");
    if (!judge_length(h, f, r))
        return false;
    if (f->n_coding > 1 || (f->n_coding == 1 && f->coding.n == 0))
        return bad(h, "Transfer-Encoding must be given once and be chunked");
    if (f->n_coding > 0 && r->minor == 0)
        return bad(h, "Transfer-Encoding in an HTTP/1.0 request");
    r->chunked = f->n_coding > 0;
    if (r->chunked && !gw_http_text_is_word(f->coding, "chunked"))
        return fail(h, GW_ERROR_NOT_IMPLEMENTED, 0,
                    "no other Transfer-Encoding than chunked is known");
    bool has_body = r->chunked || r->content_length > 0;
    if (has_body && r->method != GW_HTTP_POST && r->method != GW_HTTP_DELETE)
        return bad(h, "a body in a GET, HEAD or OPTIONS request");
    return true;
}

static bool judge_method(struct gw_head *h, const char *head, struct gw_http_request *r)
{
    for (unsigned m = 0; m < GW_HTTP_METHOD_N; m++) {
        if (method_is(h, head, gw_http_method_name((enum gw_http_method)m))) {
            r->method = (enum gw_http_method)m;
            return true;
        }
    }
    if (method_is(h, head, "CONNECT") || method_is(h, head, "TRACE"))
        return fail(h, GW_ERROR_METHOD_NOT_ALLOWED, 0, "CONNECT and TRACE are not served here");
    return fail(h, GW_ERROR_NOT_IMPLEMENTED, 0,
                "the methods are GET, HEAD, POST, OPTIONS and DELETE");
}

static bool judge_target(struct gw_head *h, const struct facts *f, struct gw_http_request *r)
{
    struct gw_http_text t = r->target;
    if (t.p[0] != '/') {
        if (t.n == 1 && t.p[0] == '*' && r->method == GW_HTTP_OPTIONS) {
            r->path = t;
            return true;
        }
        if (t.n < 7 || !gw_http_text_is_word((struct gw_http_text){t.p, 7}, "http://"))
            return bad(h, "the request target must be a path or an http:// address");
        t.p += 7;
        t.n -= 7;
        size_t n = 0;
        while (n < t.n && t.p[n] != '/' && t.p[n] != '?')
            n++;
        struct gw_http_text authority = {t.p, n};
        bool same = authority.n == f->host.n;
        for (size_t i = 0; same && i < n; i++)
            same = ((uint8_t)t.p[i] | 0x20) == ((uint8_t)f->host.p[i] | 0x20);
        if (n == 0 || (f->n_host > 0 && !same) || !host_wellformed(authority))
            return bad(h, "the address in the request line differs from Host");
        r->host = authority;
        r->has_host = true; /* it is checked like one, where HTTP/1.0 sends none */
        t.p += n;
        t.n -= n;
    }
    const char *query = memchr(t.p, '?', t.n);
    if (query != NULL)
        t.n = (size_t)(query - t.p);
    r->path = t.n > 0 ? t : (struct gw_http_text){"/", 1};
    return true;
}

bool gw_head_judge(struct gw_head *h, const char *head, struct gw_http_request *r)
{
    struct facts f = {0};
    r->minor = (unsigned)(h->version[7] - '0');
    r->target = (struct gw_http_text){head + h->target, h->n_target};
    if (!judge_method(h, head, r) || !collect(h, head, &f))
        return false;
    if (f.n_host > 1 || (f.n_host == 0 && r->minor == 1))
        return bad(h, "HTTP/1.1 asks for exactly one Host");
    if (!host_wellformed(f.host))
        return bad(h, "Host must be a name or an address and a port");
    r->has_host = f.n_host > 0;
    r->host = f.host;
    if (!judge_framing(h, &f, r) || !judge_target(h, &f, r))
        return false;
    r->keep_alive = !f.close && (r->minor == 1 || f.keep_alive);
    r->expect_continue = f.expect_continue && r->minor == 1; /* HTTP/1.0 knows no 1xx */
    r->expect_other = f.expect_other && r->minor == 1;
    return true;
}

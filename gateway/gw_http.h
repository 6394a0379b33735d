/* HTTP/1.1 requests from bytes: the head is collected and checked (gw_head), then llhttp parses
 * head and body behind that check. No I/O, no clock. Bytes are taken in pieces of any size with the
 * same result. Thread: loop. */
#ifndef ISLET_GW_HTTP_H
#define ISLET_GW_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"
#include "gw_error.h"
#include "gw_limits.h"

enum gw_http_method {
    GW_HTTP_GET,
    GW_HTTP_HEAD,
    GW_HTTP_POST,
    GW_HTTP_OPTIONS,
    GW_HTTP_DELETE,
    GW_HTTP_METHOD_N
};

struct gw_http_text { /* not terminated */
    const char *p;
    size_t n;
};

struct gw_http_field {
    struct gw_http_text name, value; /* value without the white space around it */
};

/* One request. Everything points into memory of the request itself and lives as long as it. */
struct gw_http_request {
    enum gw_http_method method;
    unsigned minor;              /* HTTP/1.<minor>: 0 or 1 */
    struct gw_http_text target;  /* as sent */
    struct gw_http_text path;    /* of the target, without query; "*" only with OPTIONS */
    struct gw_http_text host;    /* authority of Host; n 0 if empty or (HTTP/1.0) missing */
    struct gw_http_text capture; /* what {id} of the route matched, percent-decoded */
    struct gw_http_text key;     /* the API key that was sent; n 0: none */
    bool has_host, keep_alive;
    bool chunked;
    bool expect_continue, expect_other; /* Expect: 100-continue; anything else (417) */
    uint64_t content_length;            /* 0 when chunked or absent */
    const struct gw_http_field *fields;
    size_t n_fields;
    char *body; /* with a NUL behind; the owner of the exchange may change it; NULL if empty */
    size_t body_bytes;
};

/* Value of the first field of that name (any case), or .p NULL. `gw_http_count` counts them. */
struct gw_http_text gw_http_field(const struct gw_http_request *r, const char *name);
size_t gw_http_count(const struct gw_http_request *r, const char *name);
bool gw_http_text_is(struct gw_http_text text, const char *word); /* equal bytes */
/* Equal but for the case of ASCII letters. */
bool gw_http_text_is_word(struct gw_http_text text, const char *word);
const char *gw_http_method_name(enum gw_http_method method);
/* Gives the body's bytes (`body` becomes NULL); the NUL behind them is not counted. */
struct buf gw_http_take_body(struct gw_http_request *r);
/* Takes the bytes of *capture as r->capture. */
void gw_http_set_capture(struct gw_http_request *r, struct buf *capture);
void gw_http_request_free(struct gw_http_request *r); /* NULL is fine */

enum gw_http_event {
    GW_HTTP_MORE,       /* all bytes were used; more are needed */
    GW_HTTP_HEAD_READY, /* the head is complete and sound: decide, then feed the body */
    GW_HTTP_COMPLETE,   /* head and body are there */
    GW_HTTP_FAILED,     /* answer `failure` and close; sticks */
    GW_HTTP_ALIEN       /* not HTTP at all (TLS): close without a word; sticks */
};

struct gw_http_failure {
    enum gw_error_code code;
    unsigned status;  /* mostly that of the code */
    const char *text; /* constant; what was wrong */
};

struct gw_http;

/* limits is borrowed for the parser's life. Gives a parser, freed with gw_http_free; NULL: no
 * memory. */
struct gw_http *gw_http_new(const struct gw_limits *limits);
void gw_http_free(struct gw_http *h); /* NULL is fine */

/* Takes up to n bytes, stops after an event other than MORE; *ret_used says how many were used.
 * After HEAD_READY feed again (n may be 0) to get the body; after COMPLETE the next call starts the
 * next request. */
enum gw_http_event gw_http_feed(struct gw_http *h, const void *bytes, size_t n, size_t *ret_used);
/* The body that follows is parsed and counted, but not kept. */
void gw_http_discard_body(struct gw_http *h);
/* Lends the request from HEAD_READY on; it stays the parser's. */
struct gw_http_request *gw_http_peek(struct gw_http *h);
/* Gives the request after COMPLETE; free with gw_http_request_free. */
struct gw_http_request *gw_http_take(struct gw_http *h);
struct gw_http_failure gw_http_failure(const struct gw_http *h);
/* Bytes of a request have been seen; blank lines in front do not count. */
bool gw_http_started(const struct gw_http *h);
/* Bytes of the body section fed so far, framing included. */
uint64_t gw_http_body_bytes(const struct gw_http *h);

#endif

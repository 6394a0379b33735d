/* Heads and chunks of responses, as bytes. Pure but for the Date. */
#ifndef ISLET_GW_RESPONSE_H
#define ISLET_GW_RESPONSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"
#include "gw_error.h"
#include "gw_exchange.h"
#include "gw_http.h"
#include "proto_message.h"

enum {
    GW_RESPONSE_ID_BYTES = PROTO_MAX_TRACE + 1
}; /* of a request id with its NUL */

struct gw_response {
    unsigned status;
    const char *content_type; /* NULL: no body, no length */
    uint64_t length;          /* of the body, if not `open` */
    bool open;                /* length unknown */
    bool chunked;             /* open: chunks; else the close is the end */
    bool keep_alive;
    unsigned idle_announced_s;
    const char *request_id;
    struct gw_http_text origin; /* allowed origin of the request; n 0: none */
    const char *allow;          /* Allow, or NULL */
    unsigned retry_after_s;     /* 0: none */
    bool has_processing;
    uint64_t processing_ms; /* openai-processing-ms */
    const char *degraded;   /* x-islet-degraded, shown in ASCII; or NULL */
    uint64_t celsius;       /* x-nvidia-temp; 0: none */
    const struct gw_exchange_header *headers;
    size_t n_headers;
};

/* Status line, headers and blank line. */
void gw_response_head(struct buf *out, const struct gw_response *r);
/* One chunk; n > 0. */
void gw_response_chunk(struct buf *out, const void *bytes, size_t n);
void gw_response_last_chunk(struct buf *out);
/* The whole answer to a preflight of a page whose origin is allowed. */
void gw_response_preflight(struct buf *out, const struct gw_response *r,
                           const struct gw_http_request *request);

/* The request's x-request-id if it is well-formed, else a new one. r may be NULL. */
void gw_response_id(const struct gw_http_request *r, char ret[GW_RESPONSE_ID_BYTES]);

#endif

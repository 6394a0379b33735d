/* Every limit and time-out of the HTTP layer in one place, so that a test can make them small or
 * its clock fast. */
#ifndef ISLET_GW_LIMITS_H
#define ISLET_GW_LIMITS_H

#include <stdint.h>

struct gw_limits {
    uint32_t request_line_bytes; /* without its CRLF; 414 */
    uint32_t head_bytes;         /* request line and fields; 431 */
    uint32_t fields;             /* 431 */
    uint32_t chunk_ext_bytes;    /* of all chunk extensions of one body; 400 */
    uint32_t trailer_lines;      /* 400 */
    uint32_t trailer_bytes;      /* 400 */
    uint64_t max_body_bytes;     /* 413 */
    uint32_t pipeline_bytes;     /* kept while a request runs; more: close */
    uint32_t rendered_bytes;     /* unsent bytes of a stream before its owner must wait; of answers
                                  * before the next request is read */
    uint32_t connections;        /* per listener; more: 503 and close */

    uint32_t first_byte_ms; /* from accept to the first byte; silent close */
    uint32_t head_ms;       /* from the first byte to the end of the head; 408 */
    uint32_t body_ms;       /* from the end of the head to the end of the body; 408 */
    uint32_t body_rate_after_ms;
    uint32_t body_rate_bytes_per_s; /* averaged from the end of the head; 408 */
    uint32_t idle_ms;               /* between requests; silent close */
    uint32_t idle_announced_s;      /* Keep-Alive: timeout=, less than idle_ms */
    uint32_t stall_ms;              /* response bytes wait and none goes out; reset */
    uint32_t linger_ms;    /* after an early error: the client's bytes are dropped so long, */
    uint64_t linger_bytes; /* and so many of them */
};

static inline struct gw_limits gw_limits_default(void)
{
    return (struct gw_limits){
        .request_line_bytes = 8 * 1024,
        .head_bytes = 32 * 1024,
        .fields = 100,
        .chunk_ext_bytes = 4 * 1024,
        .trailer_lines = 8,
        .trailer_bytes = 1024,
        .max_body_bytes = 16 * 1024 * 1024,
        .pipeline_bytes = 64 * 1024,
        .rendered_bytes = 256 * 1024,
        .connections = 512,
        .first_byte_ms = 30 * 1000,
        .head_ms = 10 * 1000,
        .body_ms = 60 * 1000,
        .body_rate_after_ms = 10 * 1000,
        .body_rate_bytes_per_s = 1024,
        .idle_ms = 90 * 1000,
        .idle_announced_s = 75,
        .stall_ms = 60 * 1000,
        .linger_ms = 2 * 1000,
        .linger_bytes = 64 * 1024 * 1024,
    };
}

#endif

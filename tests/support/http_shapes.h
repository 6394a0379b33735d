/* Request shapes, good and bad, with the status that a server must answer: for the parser, the
 * connection and the real server alike. */
#ifndef ISLET_HTTP_SHAPES_H
#define ISLET_HTTP_SHAPES_H

#include <stddef.h>

struct http_shape {
    unsigned status;   /* 200: framed as valid; 0: close without a word */
    const char *bytes; /* holds NULs */
    size_t n;
};

extern const struct http_shape http_shapes[];
extern const size_t http_shapes_count;

#endif

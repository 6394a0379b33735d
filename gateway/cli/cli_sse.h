/* Server-sent events: bytes in, the text behind each `data:` out. Comments and other fields are
 * passed over. */
#ifndef ISLET_CLI_SSE_H
#define ISLET_CLI_SSE_H

#include <stddef.h>

#include "buf.h"
#include "err.h"

/* One event's data, NUL behind it, lent for the call. */
typedef enum err_code cli_sse_event_fn(void *context, const char *data, size_t n, struct err *e);

struct cli_sse {
    struct buf line, data;
    cli_sse_event_fn *on_event;
    void *context;
};

void cli_sse_init(struct cli_sse *s, cli_sse_event_fn *on_event, void *context);
enum err_code cli_sse_feed(struct cli_sse *s, const char *bytes, size_t n, struct err *e)
    __attribute__((warn_unused_result));
void cli_sse_done(struct cli_sse *s);

#endif

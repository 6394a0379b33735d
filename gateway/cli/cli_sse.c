#include "cli_sse.h"

#include <string.h>

enum {
    MAX_EVENT = 16 << 20
};

void cli_sse_init(struct cli_sse *s, cli_sse_event_fn *on_event, void *context)
{
    *s = (struct cli_sse){.line = BUF_INIT(MAX_EVENT),
                          .data = BUF_INIT(MAX_EVENT),
                          .on_event = on_event,
                          .context = context};
}

static enum err_code event_end(struct cli_sse *s, struct err *e)
{
    size_t n = s->data.size;
    if (n == 0)
        return ERR_OK;
    buf_byte(&s->data, 0);
    if (buf_failed(&s->data))
        return err_set(e, ERR_LIMIT, "an event is larger than %d bytes", MAX_EVENT);
    enum err_code code = s->on_event(s->context, (const char *)s->data.data, n, e);
    buf_clear(&s->data);
    return code;
}

static enum err_code line_end(struct cli_sse *s, struct err *e)
{
    const char *line = (const char *)s->line.data;
    size_t n = s->line.size;
    if (n > 0 && line[n - 1] == '\r')
        n--;
    if (n == 0)
        return event_end(s, e);
    if (n >= 5 && memcmp(line, "data:", 5) == 0) {
        size_t skip = n > 5 && line[5] == ' ' ? 6 : 5;
        if (s->data.size > 0)
            buf_byte(&s->data, '\n');
        buf_append(&s->data, line + skip, n - skip);
    }
    return ERR_OK;
}

enum err_code cli_sse_feed(struct cli_sse *s, const char *bytes, size_t n, struct err *e)
{
    while (n > 0) {
        const char *end = memchr(bytes, '\n', n);
        size_t piece = end != NULL ? (size_t)(end - bytes) : n;
        buf_append(&s->line, bytes, piece);
        if (buf_failed(&s->line))
            return err_set(e, ERR_LIMIT, "a line of an event is larger than %d bytes", MAX_EVENT);
        if (end == NULL)
            return ERR_OK;
        enum err_code code = line_end(s, e);
        buf_clear(&s->line);
        if (code != ERR_OK)
            return code;
        bytes += piece + 1;
        n -= piece + 1;
    }
    return ERR_OK;
}

void cli_sse_done(struct cli_sse *s)
{
    buf_done(&s->line);
    buf_done(&s->data);
}

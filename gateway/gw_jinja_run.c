#include "gw_jinja_run.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "size.h"

enum {
    CHUNK = 16 * 1024,
    ALIGN = 16
};

struct gw_jinja_run_chunk {
    struct gw_jinja_run_chunk *next;
    size_t padding; /* what follows is aligned to 16 */
};

void gw_jinja_run_init(struct gw_jinja_run *r, size_t max_bytes, size_t max_out, struct err *e)
{
    *r = (struct gw_jinja_run){.max_bytes = max_bytes, .out = BUF_INIT(max_out), .err = e};
}

void gw_jinja_run_done(struct gw_jinja_run *r)
{
    for (struct gw_jinja_run_chunk *c = r->chunks, *next; c; c = next) {
        next = c->next;
        alloc_free(c);
    }
    r->chunks = NULL;
    r->top = r->end = NULL;
    r->bytes = 0;
    buf_done(&r->out);
}

void gw_jinja_run_fail(struct gw_jinja_run *r, enum err_code code, const char *format, ...)
{
    char text[200];
    va_list args;
    if (r->code != ERR_OK)
        return;
    r->code = code;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < 0x20)
            *c = ' ';
    (void)err_set(r->err, code, "chat template, line %u: %s", r->line, text);
}

static bool add_chunk(struct gw_jinja_run *r, size_t bytes)
{
    size_t size = bytes / 2 > CHUNK ? bytes + bytes / 2 : bytes + CHUNK;
    if (size > r->max_bytes - r->bytes)
        size = bytes + ALIGN;
    if (bytes > r->max_bytes || size > r->max_bytes - r->bytes) {
        gw_jinja_run_fail(r, ERR_LIMIT, "it needs more than %zu bytes of memory", r->max_bytes);
        return false;
    }
    struct gw_jinja_run_chunk *c = alloc_get(ALLOC_REQUEST, sizeof *c + size);
    if (!c) {
        gw_jinja_run_fail(r, ERR_NOMEM, "no memory");
        return false;
    }
    c->next = r->chunks;
    r->chunks = c;
    r->top = (char *)(c + 1);
    r->end = r->top + size;
    r->bytes += size;
    return true;
}

void *gw_jinja_run_get(struct gw_jinja_run *r, size_t count, size_t bytes)
{
    uint64_t n;
    if (!gw_jinja_run_ok(r))
        return NULL;
    if (!size_mul(count, bytes, &n) || n > r->max_bytes) {
        gw_jinja_run_fail(r, ERR_LIMIT, "it needs more than %zu bytes of memory", r->max_bytes);
        return NULL;
    }
    if (!gw_jinja_run_step(r, 1 + n / 256))
        return NULL;
    size_t skip = r->top ? -(uintptr_t)r->top % ALIGN : 0;
    if (!r->top || skip > (size_t)(r->end - r->top) || n > (size_t)(r->end - r->top) - skip) {
        if (!add_chunk(r, (size_t)n))
            return NULL;
        skip = 0;
    }
    char *block = r->top + skip;
    r->top = block + n;
    return block;
}

void *gw_jinja_run_zero(struct gw_jinja_run *r, size_t count, size_t bytes)
{
    void *block = gw_jinja_run_get(r, count, bytes);
    if (block)
        memset(block, 0, count * bytes);
    return block;
}

char *gw_jinja_run_join(struct gw_jinja_run *r, const char *a, size_t n_a, const char *b,
                        size_t n_b)
{
    uint64_t n;
    char *block;
    if (n_a > 0 && r->chunks && a > (const char *)r->chunks && a + n_a == r->top &&
        n_b <= (size_t)(r->end - r->top)) {
        if (!gw_jinja_run_step(r, 1 + n_b / 256))
            return NULL;
        memcpy(r->top, b, n_b);
        r->top += n_b;
        return (char *)(uintptr_t)a;
    }
    block = size_add(n_a, n_b, &n) ? gw_jinja_run_get(r, 1, (size_t)n) : NULL;
    if (!block)
        return NULL;
    if (n_a > 0)
        memcpy(block, a, n_a);
    if (n_b > 0)
        memcpy(block + n_a, b, n_b);
    return block;
}

bool gw_jinja_run_step(struct gw_jinja_run *r, uint64_t n)
{
    if (n > GW_JINJA_RUN_MAX_STEPS - r->steps) {
        r->steps = GW_JINJA_RUN_MAX_STEPS;
        gw_jinja_run_fail(r, ERR_LIMIT, "it takes more than %d steps", GW_JINJA_RUN_MAX_STEPS);
        return false;
    }
    r->steps += n;
    return gw_jinja_run_ok(r);
}

bool gw_jinja_run_enter(struct gw_jinja_run *r)
{
    if (r->depth == GW_JINJA_RUN_MAX_DEPTH) {
        gw_jinja_run_fail(r, ERR_LIMIT, "nested more than %d deep", GW_JINJA_RUN_MAX_DEPTH);
        return false;
    }
    r->depth++;
    return true;
}

void gw_jinja_run_leave(struct gw_jinja_run *r)
{
    assert(r->depth > 0);
    r->depth--;
}

/* What one compilation or rendering of a template owns: memory that is freed in one go, the first
 * error, and the limits that keep a hostile template from hanging the gateway. One thread.
 *
 * Errors stick: after the first one every function of gw_jinja_* does nothing of use and returns
 * something harmless (undefined, an empty text), so callers look at gw_jinja_run_ok only where
 * going on would do harm. */
#ifndef ISLET_GW_JINJA_RUN_H
#define ISLET_GW_JINJA_RUN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"
#include "err.h"

enum {
    GW_JINJA_RUN_MAX_DEPTH = 250,          /* nested calls, expressions or values */
    GW_JINJA_RUN_MAX_STEPS = 10 * 1000000, /* each some 100 ns */
};

struct gw_jinja_run_chunk;

struct gw_jinja_run {
    struct gw_jinja_run_chunk *chunks; /* newest first */
    char *top, *end;                   /* free part of the newest */
    size_t bytes, max_bytes;
    uint64_t steps;
    uint32_t depth;
    uint32_t line;   /* of the template, for messages */
    struct buf out;  /* of a rendering */
    int64_t now_s;   /* for strftime_now */
    struct err *err; /* borrowed; may be NULL */
    enum err_code code;
};

void gw_jinja_run_init(struct gw_jinja_run *r, size_t max_bytes, size_t max_out, struct err *e);
void gw_jinja_run_done(struct gw_jinja_run *r);

static inline bool gw_jinja_run_ok(const struct gw_jinja_run *r)
{
    return r->code == ERR_OK;
}
/* The text gets "chat template, line N: " in front. */
void gw_jinja_run_fail(struct gw_jinja_run *r, enum err_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Memory until gw_jinja_run_done, not cleared, never NULL for n == 0; NULL on failure. */
void *gw_jinja_run_get(struct gw_jinja_run *r, size_t count, size_t bytes);
void *gw_jinja_run_zero(struct gw_jinja_run *r, size_t count, size_t bytes);
/* a and b joined. Where `a` is the newest block its memory is continued, so that chains of + are
 * linear. */
char *gw_jinja_run_join(struct gw_jinja_run *r, const char *a, size_t n_a, const char *b,
                        size_t n_b);

/* Counts work; false when the limit is reached. */
bool gw_jinja_run_step(struct gw_jinja_run *r, uint64_t n);
/* Around every recursion; false, and then without leave, when it is too deep. */
bool gw_jinja_run_enter(struct gw_jinja_run *r);
void gw_jinja_run_leave(struct gw_jinja_run *r);

#endif

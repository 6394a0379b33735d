/* A generation as one client gets it, in bytes: the events of a stream, or one JSON object. Appends
 * to buffers; sends nothing and knows no clock, so a second view of the same generation gives the
 * same. Thread: loop; of a choice that is DONE any one thread. */
#ifndef ISLET_GW_RENDER_H
#define ISLET_GW_RENDER_H

#include <stdbool.h>
#include <stddef.h>

#include "buf.h"
#include "err.h"
#include "gw_error.h"
#include "gw_openai.h"
#include "gw_request.h"
#include "gw_text.h"

struct gw_model;
struct gw_render;

struct gw_render_choice {
    struct gw_render *render; /* the whole that it is part of */
    struct gw_text text;
    struct buf content, reasoning; /* JSON: the whole; stream: an echo that waits */
    bool role_sent, finished;
};

struct gw_render {
    const struct gw_model *model;     /* borrowed */
    const struct gw_request *q;       /* borrowed; it may still grow */
    struct gw_render_choice *choices; /* [q->n_choices] */
    unsigned n_finished;              /* of them */
    bool stream;
    struct buf head, out; /* common start of every chunk; what is to be sent */
};

/* r must stay where it is. On failure there is nothing to free, and gw_render_done is fine. */
enum err_code gw_render_init(struct gw_render *r, const struct gw_request *q,
                             const struct gw_model *model, struct err *e)
    __attribute__((warn_unused_result));
void gw_render_done(struct gw_render *r);

/* A piece of text with the entries of its tokens: a gw_text_emit, user is the gw_render_choice. Of
 * a stream it becomes an event in `out`, of JSON it is kept. */
gw_text_emit gw_render_text;
/* A piece that is kept, of a stream too, until gw_render_echo. */
gw_text_emit gw_render_keep;
/* The kept piece as one event. */
void gw_render_echo(struct gw_render_choice *c);
/* All text of the choice is out; of a stream the finish event follows. */
void gw_render_finish(struct gw_render_choice *c);
/* Behind the last choice: usage where it was asked for, and the terminal event. */
void gw_render_end(struct gw_render *r);
/* In place of what is not out yet: the error and the terminal event. */
void gw_render_error(struct gw_render *r, const struct gw_error *error);
/* The whole object; all choices are finished. */
void gw_render_json(struct gw_render *r);

bool gw_render_failed(const struct gw_render_choice *c); /* no memory: some bytes are missing */
size_t gw_render_bytes(const struct gw_render *r);       /* of JSON's parts that are kept */
void gw_render_usage(const struct gw_render *r, struct gw_openai_usage *ret); /* so far */

#endif

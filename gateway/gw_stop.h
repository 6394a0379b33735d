/* The text of one answer, put together from pieces of tokens: UTF-8 gate, thinking markers, stop
 * strings. Pure.
 *
 * The whole text is a function of the pushed bytes alone; how they were cut into pushes changes
 * only when a part of it comes out. Held back is the longest suffix that may still become a stop
 * string or a marker, no more.
 *
 * Stop strings are searched in all text, thoughts and markers included. The earliest match wins,
 * of those that begin at one place the longest; a match that an earlier or longer one may still
 * replace waits for the bytes that decide.
 *
 * Thinking. An answer may begin (behind at most one newline) with the opening marker, or inside
 * the thoughts when the prompt already opened them; up to the closing marker it is reasoning. A
 * marker and one newline on each side of it yield no text. Later markers are ordinary text. */
#ifndef ISLET_GW_STOP_H
#define ISLET_GW_STOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"

enum gw_stop_kind {
    GW_STOP_CONTENT,
    GW_STOP_REASONING,
};

struct gw_stop_string {
    const char *text;
    size_t size;
};

struct gw_stop_config {
    const struct gw_stop_string *stops; /* copied; valid UTF-8; empty ones are dropped */
    size_t n_stops;
    const char *think_open,
        *think_close; /* both NULL: no splitting (reasoning_format none, or no such model) */
    bool open;        /* the prompt ends inside the thoughts */
    bool open_bare;   /* and with the marker itself: a newline that comes first is dropped */
};

/* Text that can no longer change. `end`: pushed bytes that are settled with this segment, so a
 * token whose bytes end at or before it may be reported with it. */
struct gw_stop_segment {
    enum gw_stop_kind kind;
    const char *text; /* valid UTF-8, never empty; lent until the next call */
    size_t size;
    uint64_t end;
};

struct gw_stop;

enum err_code gw_stop_new(const struct gw_stop_config *config, struct gw_stop **ret, struct err *e)
    __attribute__((warn_unused_result));
void gw_stop_free(struct gw_stop *s);

/* Pushes the bytes of one token's piece (may be none). After a stop match bytes are ignored.
 * Errors: NOMEM. */
enum err_code gw_stop_push(struct gw_stop *s, const void *bytes, size_t n, struct err *e)
    __attribute__((warn_unused_result));
/* No more bytes will come: releases what was held back; a stop match that waited is decided. */
enum err_code gw_stop_finish(struct gw_stop *s, struct err *e) __attribute__((warn_unused_result));

/* Segments of the last push or finish, in order; neighbours differ in kind. Lent until the next
 * call. */
size_t gw_stop_segments(const struct gw_stop *s, const struct gw_stop_segment **ret);

/* True once a stop string matched (the caller then cancels the generation); *ret_index = its index
 * in config.stops. */
bool gw_stop_matched(const struct gw_stop *s, size_t *ret_index);
/* Pushed bytes in front of the match; all pushed bytes when there is none. A token whose bytes
 * begin at or behind it lies wholly behind the cut (empty pieces do when they come after it). */
uint64_t gw_stop_kept(const struct gw_stop *s);
/* The thoughts are open now: a token counts as reasoning when they were open before or after it. */
bool gw_stop_in_reasoning(const struct gw_stop *s);

#endif

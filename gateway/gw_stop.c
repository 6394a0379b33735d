#include "gw_stop.h"

#include <string.h>

#include "alloc.h"
#include "buf.h"
#include "utf8.h"

enum {
    MAX_OUT = 1 << 30, /* ceiling of the buffers; a push is a piece of a token */
    MAX_SEGMENTS = 4,
};

enum place {
    AT_START, /* nothing but perhaps one newline came: an opening marker counts */
    IN_REASONING,
    IN_CONTENT,
};

/* Text goes through `window`: what is gated but not settled, the longest suffix that may still
 * change. Stop strings are looked for in the whole window, then everything in front of the first
 * place that may still match is split by the markers and leaves. */
struct gw_stop {
    struct gw_stop_string *stops;
    size_t n_stops;
    size_t *indexes; /* of stops[] in config.stops */
    char *open, *close;
    size_t n_open, n_close;

    uint8_t tail[4]; /* pushed bytes of an unfinished UTF-8 sequence */
    size_t n_tail;
    uint64_t pushed;
    struct buf window;
    struct buf origins; /* uint64_t per byte of window: pushed bytes before its character */

    enum place place;
    bool drop_newline; /* a marker just ended */
    uint64_t settled, kept;
    bool matched, over;
    size_t match;

    struct buf out;
    struct gw_stop_segment segments[MAX_SEGMENTS];
    size_t n_segments;
};

enum err_code gw_stop_new(const struct gw_stop_config *config, struct gw_stop **ret, struct err *e)
{
    struct gw_stop *s = alloc_zero(ALLOC_REQUEST, 1, sizeof *s);
    bool failed = false;
    if (!s)
        return err_set(e, ERR_NOMEM, "no memory for stop strings");
    s->stops = alloc_zero(ALLOC_REQUEST, config->n_stops + 1, sizeof *s->stops);
    s->indexes = alloc_zero(ALLOC_REQUEST, config->n_stops + 1, sizeof *s->indexes);
    for (size_t i = 0; s->stops && s->indexes && i < config->n_stops; i++) {
        const struct gw_stop_string *from = &config->stops[i];
        if (from->size == 0)
            continue;
        char *text = alloc_text(ALLOC_REQUEST, from->text, from->size);
        failed = failed || !text;
        s->indexes[s->n_stops] = i;
        s->stops[s->n_stops++] = (struct gw_stop_string){text, from->size};
    }
    s->place = IN_CONTENT;
    if (config->think_open && config->think_close) {
        s->n_open = strlen(config->think_open);
        s->n_close = strlen(config->think_close);
        s->open = alloc_text(ALLOC_REQUEST, config->think_open, s->n_open);
        s->close = alloc_text(ALLOC_REQUEST, config->think_close, s->n_close);
        failed = failed || !s->open || !s->close;
        s->place = config->open ? IN_REASONING : AT_START;
        s->drop_newline = config->open && config->open_bare;
    }
    s->window = BUF_INIT(MAX_OUT);
    s->origins = BUF_INIT(MAX_OUT);
    s->out = BUF_INIT(MAX_OUT);
    if (failed || !s->stops || !s->indexes) {
        gw_stop_free(s);
        return err_set(e, ERR_NOMEM, "no memory for stop strings");
    }
    *ret = s;
    return ERR_OK;
}

void gw_stop_free(struct gw_stop *s)
{
    if (!s)
        return;
    for (size_t i = 0; i < s->n_stops; i++)
        alloc_free((char *)(uintptr_t)s->stops[i].text);
    alloc_free(s->stops);
    alloc_free(s->indexes);
    alloc_free(s->open);
    alloc_free(s->close);
    buf_done(&s->window);
    buf_done(&s->origins);
    buf_done(&s->out);
    alloc_free(s);
}

/* ---- UTF-8 ---- */

static void window_add(struct gw_stop *s, const void *text, size_t n, uint64_t origin)
{
    buf_append(&s->window, text, n);
    for (size_t i = 0; i < n; i++)
        buf_append(&s->origins, &origin, sizeof origin);
}

/* As utf8_gate, and tells from where each character came. */
static void gate(struct gw_stop *s, const uint8_t *bytes, size_t n, bool last)
{
    static const uint8_t replacement[3] = {0xEF, 0xBF, 0xBD};
    for (size_t i = 0; i < n; i++) {
        s->tail[s->n_tail++] = bytes[i];
        s->pushed++;
        for (int k = 1; s->n_tail > 0 && k != 0;) {
            uint64_t origin = s->pushed - s->n_tail;
            k = utf8_sequence(s->tail, s->n_tail);
            if (k > 0)
                window_add(s, s->tail, (size_t)k, origin);
            else if (k < 0)
                window_add(s, replacement, sizeof replacement, origin);
            size_t used = (size_t)(k < 0 ? -k : k);
            memmove(s->tail, s->tail + used, s->n_tail - used);
            s->n_tail -= used;
        }
    }
    if (last && s->n_tail > 0) {
        window_add(s, replacement, sizeof replacement, s->pushed - s->n_tail);
        s->n_tail = 0;
    }
}

/* Pushed bytes in front of window[at]. */
static uint64_t origin_at(const struct gw_stop *s, size_t at)
{
    uint64_t origin;
    if (at == s->window.size)
        return s->pushed - s->n_tail;
    memcpy(&origin, s->origins.data + at * sizeof origin, sizeof origin);
    return origin;
}

/* ---- stop strings ---- */

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Everything in front of *ret_limit can no longer be part of a stop string; true if one matches
 * there, *ret_stop. */
static bool find_stop(const struct gw_stop *s, bool last, size_t *ret_limit, size_t *ret_stop)
{
    const uint8_t *text = s->window.data;
    size_t n = s->window.size;
    for (size_t at = 0; at < n; at++) {
        size_t best = s->n_stops;
        for (size_t i = 0; i < s->n_stops; i++) {
            const struct gw_stop_string *stop = &s->stops[i];
            size_t have = least(stop->size, n - at);
            if (memcmp(text + at, stop->text, have) != 0)
                continue;
            if (have < stop->size && !last) {
                /* It may still become this one, which beats all that begin later. */
                *ret_limit = at;
                return false;
            }
            if (have == stop->size && (best == s->n_stops || stop->size > s->stops[best].size))
                best = i;
        }
        if (best < s->n_stops) {
            *ret_limit = at;
            *ret_stop = best;
            return true;
        }
    }
    *ret_limit = n;
    return false;
}

/* ---- thinking ---- */

static void emit(struct gw_stop *s, enum gw_stop_kind kind, const uint8_t *text, size_t n)
{
    if (n == 0)
        return;
    if (s->n_segments == 0 || s->segments[s->n_segments - 1].kind != kind)
        s->segments[s->n_segments++] = (struct gw_stop_segment){.kind = kind};
    s->segments[s->n_segments - 1].size += n;
    buf_append(&s->out, text, n);
}

enum fit {
    FIT_NO,
    FIT_PART,
    FIT_WHOLE
};

/* Does text[n] begin with the marker, perhaps behind one newline? FIT_PART: its end is not there
 * yet. */
static enum fit marker_fit(const uint8_t *text, size_t n, const char *marker, size_t n_marker,
                           size_t *ret_size)
{
    size_t newline = n > 0 && text[0] == '\n';
    size_t have = least(n - newline, n_marker);
    if (memcmp(text + newline, marker, have) != 0)
        return FIT_NO;
    *ret_size = newline + n_marker;
    return have == n_marker ? FIT_WHOLE : FIT_PART;
}

/* Takes window[at, limit) as far as its kind is known; returns the new place. `known`: bytes of
 * the window that count, which behind a stop match are those in front of it. */
static size_t split(struct gw_stop *s, size_t limit, size_t known, bool final)
{
    const uint8_t *text = s->window.data;
    size_t at = 0, size = 0;
    while (at < limit) {
        bool in_content = s->place == IN_CONTENT;
        if (s->drop_newline) {
            s->drop_newline = false;
            if (text[at] == '\n') {
                at++;
                continue;
            }
        }
        if (in_content) {
            emit(s, GW_STOP_CONTENT, text + at, limit - at);
            return limit;
        }
        bool opening = s->place == AT_START;
        enum fit fit = marker_fit(text + at, known - at, opening ? s->open : s->close,
                                  opening ? s->n_open : s->n_close, &size);
        bool whole = fit == FIT_WHOLE && size <= limit - at;
        if (whole) {
            at += size;
            s->place = opening ? IN_REASONING : IN_CONTENT;
            s->drop_newline = true;
        } else if (fit != FIT_NO && !final) {
            return at;
        } else if (opening) {
            s->place = IN_CONTENT;
        } else {
            emit(s, GW_STOP_REASONING, text + at, 1);
            at++;
        }
    }
    return at;
}

/* ---- pushing ---- */

static void begin(struct gw_stop *s)
{
    buf_clear(&s->out);
    s->n_segments = 0;
}

static enum err_code advance(struct gw_stop *s, bool last, struct err *e)
{
    size_t limit, stop;
    bool matched;
    if (buf_failed(&s->window) || buf_failed(&s->origins))
        return err_set(e, ERR_NOMEM, "no memory for the text of an answer");
    matched = find_stop(s, last, &limit, &stop);
    bool final = matched || last;
    size_t at = split(s, limit, matched ? limit : s->window.size, final);
    s->settled = origin_at(s, at);
    if (matched) {
        s->matched = true;
        s->match = s->indexes[stop];
        s->kept = origin_at(s, limit);
    }
    uint64_t end = s->settled;
    buf_drop_front(&s->window, at);
    buf_drop_front(&s->origins, at * sizeof(uint64_t));
    if (buf_failed(&s->out))
        return err_set(e, ERR_NOMEM, "no memory for the text of an answer");
    const char *text = (const char *)s->out.data;
    for (size_t i = 0; i < s->n_segments; i++) {
        s->segments[i].text = text;
        text += s->segments[i].size;
        s->segments[i].end = end;
    }
    s->over = final;
    return ERR_OK;
}

enum err_code gw_stop_push(struct gw_stop *s, const void *bytes, size_t n, struct err *e)
{
    begin(s);
    if (s->over) {
        s->pushed += n;
        return ERR_OK;
    }
    gate(s, bytes, n, false);
    return advance(s, false, e);
}

enum err_code gw_stop_finish(struct gw_stop *s, struct err *e)
{
    begin(s);
    if (s->over)
        return ERR_OK;
    gate(s, NULL, 0, true);
    return advance(s, true, e);
}

size_t gw_stop_segments(const struct gw_stop *s, const struct gw_stop_segment **ret)
{
    *ret = s->segments;
    return s->n_segments;
}

bool gw_stop_matched(const struct gw_stop *s, size_t *ret_index)
{
    if (s->matched)
        *ret_index = s->match;
    return s->matched;
}

uint64_t gw_stop_kept(const struct gw_stop *s)
{
    return s->matched ? s->kept : s->pushed;
}

bool gw_stop_in_reasoning(const struct gw_stop *s)
{
    return s->place == IN_REASONING;
}

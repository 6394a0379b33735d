/* Growable bytes with a ceiling. A failed append makes the buffer sticky-failed: later appends do
 * nothing, and buf_failed() tells once at the end, so that writers need not check each call.
 * Zero-initialised with BUF_INIT. */
#ifndef ISLET_BUF_H
#define ISLET_BUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct buf {
    uint8_t *data;
    size_t size;     /* bytes used */
    size_t capacity; /* bytes owned */
    size_t ceiling;  /* never grows past this */
    bool failed;
};

#define BUF_INIT(ceiling_bytes) ((struct buf){.ceiling = (ceiling_bytes)})

void buf_append(struct buf *b, const void *data, size_t n);
void buf_text(struct buf *b, const char *text);
void buf_format(struct buf *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
void buf_byte(struct buf *b, uint8_t byte);
/* Room for n more bytes; lends a pointer to them, valid until the next call, or NULL. buf_commit(n)
 * counts them. */
uint8_t *buf_room(struct buf *b, size_t n);
void buf_commit(struct buf *b, size_t n);
void buf_drop_front(struct buf *b, size_t n);
void buf_clear(struct buf *b); /* size 0, failure forgotten, memory kept */
void buf_done(struct buf *b);  /* frees; the struct may be used again */
/* Gives the bytes, with one NUL behind them not counted in *ret_size; caller frees with alloc_free.
 * NULL if failed. */
char *buf_give(struct buf *b, size_t *ret_size);
static inline bool buf_failed(const struct buf *b)
{
    return b->failed;
}

#endif

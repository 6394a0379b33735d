#include "buf.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"

enum {
    BUF_FIRST = 64
};

uint8_t *buf_room(struct buf *b, size_t n)
{
    if (b->failed)
        return NULL;
    if (b->data != NULL && n <= b->capacity - b->size)
        return b->data + b->size;
    if (n > b->ceiling || b->size > b->ceiling - n) {
        b->failed = true;
        return NULL;
    }
    size_t capacity = b->capacity < b->ceiling / 2 ? b->capacity * 2 : b->ceiling;
    if (capacity < BUF_FIRST)
        capacity = BUF_FIRST < b->ceiling ? BUF_FIRST : b->ceiling;
    if (capacity < b->size + n)
        capacity = b->size + n;
    /* One byte more than it says, for the NUL of buf_give. */
    uint8_t *data = capacity < SIZE_MAX ? alloc_resize(ALLOC_MISC, b->data, capacity + 1) : NULL;
    if (data == NULL) {
        b->failed = true;
        return NULL;
    }
    b->data = data;
    b->capacity = capacity;
    return b->data + b->size;
}

void buf_commit(struct buf *b, size_t n)
{
    assert(n <= b->capacity - b->size);
    b->size += n;
}

void buf_append(struct buf *b, const void *data, size_t n)
{
    if (n == 0)
        return;
    uint8_t *room = buf_room(b, n);
    if (room == NULL)
        return;
    memcpy(room, data, n);
    b->size += n;
}

void buf_text(struct buf *b, const char *text)
{
    buf_append(b, text, strlen(text));
}

void buf_byte(struct buf *b, uint8_t byte)
{
    buf_append(b, &byte, 1);
}

void buf_format(struct buf *b, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    char small[256];
    int n = vsnprintf(small, sizeof small, format, args);
    va_end(args);
    if (n < 0) {
        b->failed = true;
        return;
    }
    if ((size_t)n < sizeof small) {
        buf_append(b, small, (size_t)n);
        return;
    }
    uint8_t *room = buf_room(b, (size_t)n);
    if (room == NULL)
        return;
    /* The NUL lands in the spare byte behind the capacity, or in free room. */
    va_start(args, format);
    vsnprintf((char *)room, (size_t)n + 1, format, args);
    va_end(args);
    b->size += (size_t)n;
}

void buf_drop_front(struct buf *b, size_t n)
{
    assert(n <= b->size);
    b->size -= n;
    if (n > 0 && b->size > 0)
        memmove(b->data, b->data + n, b->size);
}

void buf_clear(struct buf *b)
{
    b->size = 0;
    b->failed = false;
}

void buf_done(struct buf *b)
{
    alloc_free(b->data);
    *b = BUF_INIT(b->ceiling);
}

char *buf_give(struct buf *b, size_t *ret_size)
{
    if (!b->failed && b->data == NULL)
        buf_room(b, 0);
    if (b->failed) {
        buf_done(b);
        return NULL;
    }
    char *text = (char *)b->data;
    text[b->size] = '\0';
    if (ret_size != NULL)
        *ret_size = b->size;
    *b = BUF_INIT(b->ceiling);
    return text;
}

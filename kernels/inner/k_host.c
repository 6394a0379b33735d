#include "k_host.h"

#include <string.h>
#include <sys/mman.h>

#include "alloc.h"
#include "k_format.h"

/* Mapped, not from the heap: cleared by the system, given back whole, and large ones in huge
 * pages. */
enum err_code k_host_buffer_new(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                                struct err *e)
{
    (void)d;
    struct k_buffer *b = alloc_zero(ALLOC_WORK, 1, sizeof *b);
    if (b == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a buffer");
    b->bytes = bytes == 0 ? 64 : bytes;
    b->data = mmap(NULL, b->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b->data == MAP_FAILED) {
        const uint64_t wanted = b->bytes;
        alloc_free(b);
        return err_set(e, ERR_NOMEM, "no memory for a buffer of %llu bytes",
                       (unsigned long long)wanted);
    }
    if (b->bytes >= (2u << 20))
        madvise(b->data, b->bytes, MADV_HUGEPAGE);
    *ret = b;
    return ERR_OK;
}

void k_host_buffer_free(struct k_buffer *b)
{
    if (b == NULL)
        return;
    munmap(b->data, b->bytes);
    alloc_free(b);
}

void *k_host_buffer_host(struct k_buffer *b)
{
    return b->data;
}

void k_host_upload(struct k_stream *s, struct k_span to, const void *from, size_t n)
{
    (void)s;
    K_ASSERT(to.offset + n <= to.buffer->bytes);
    if (n > 0)
        memcpy(k_host_at(to), from, n);
}

void k_host_download(struct k_stream *s, void *to, struct k_span from, size_t n)
{
    (void)s;
    K_ASSERT(from.offset + n <= from.buffer->bytes);
    if (n > 0)
        memcpy(to, k_host_at(from), n);
}

void k_host_copy(struct k_stream *s, struct k_span to, struct k_span from, size_t n)
{
    (void)s;
    if (n > 0)
        memmove(k_host_at(to), k_host_at(from), n);
}

enum err_code k_host_stream_new(struct k_device *d, struct k_stream **ret, struct err *e)
{
    struct k_stream *s = alloc_zero(ALLOC_WORK, 1, sizeof *s);
    if (s == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a stream");
    s->device = d;
    *ret = s;
    return ERR_OK;
}

void k_host_stream_free(struct k_stream *s)
{
    alloc_free(s);
}

enum err_code k_host_wait(struct k_stream *s)
{
    (void)s;
    return ERR_OK;
}

uint64_t k_host_act_bytes(enum k_form form, uint32_t n, uint32_t max_rows)
{
    return k_format_act_bytes(form, n) * max_rows;
}

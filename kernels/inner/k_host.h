/* What the reference and the threaded CPU backend share: buffers in host memory, streams that run
 * at once, and access to spans. */
#ifndef ISLET_K_HOST_H
#define ISLET_K_HOST_H

#include "k_cpu_inner.h"
#include "k_device.h"
#include "kernels.h"

struct k_pool;

/* The device of both CPU backends. */
struct k_host {
    struct k_device device;
    struct k_cpu_inner inner; /* of the threaded backend */
    struct k_pool *pool;      /* NULL in the reference backend */
};

static inline struct k_host *k_host_of(struct k_device *d)
{
    return (struct k_host *)(void *)d;
}

struct k_stream {
    struct k_device *device;
};

struct k_buffer {
    void *data;
    uint64_t bytes;
};

enum err_code k_host_buffer_new(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                                struct err *e);
void k_host_buffer_free(struct k_buffer *b);
void *k_host_buffer_host(struct k_buffer *b);
void k_host_upload(struct k_stream *s, struct k_span to, const void *from, size_t n);
void k_host_download(struct k_stream *s, void *to, struct k_span from, size_t n);
void k_host_copy(struct k_stream *s, struct k_span to, struct k_span from, size_t n);
enum err_code k_host_stream_new(struct k_device *d, struct k_stream **ret, struct err *e);
void k_host_stream_free(struct k_stream *s);
enum err_code k_host_wait(struct k_stream *s);
uint64_t k_host_act_bytes(enum k_form form, uint32_t n, uint32_t max_rows);

/* The bytes of a span; NULL for a span without a buffer. */
static inline void *k_host_at(struct k_span span)
{
    return span.buffer == NULL ? NULL : (uint8_t *)span.buffer->data + span.offset;
}

static inline uint32_t k_host_count(struct k_span span)
{
    return *(const uint32_t *)k_host_at(span);
}

/* Debug builds only: contracts of ours inside kernels. */
#if defined(K_DEBUG)
#include <assert.h>
#define K_ASSERT(condition) assert(condition)
#else
#define K_ASSERT(condition) ((void)0)
#endif

#endif

#include "fake_gpu_memory.h"

#include <string.h>
#include <sys/mman.h>

#include "alloc.h"

/* An allocation is counted; its place in g->buffers. */
static uint32_t next_buffer(struct fake_gpu *g)
{
    uint32_t i = 0;
    while (i < MAX_BUFFERS && g->buffers[i] != NULL)
        i++;
    if (i == MAX_BUFFERS)
        fake_gpu_die("too many buffers");
    g->counts.allocations++;
    return i;
}

static enum err_code memory_new(struct fake_gpu *g, uint64_t bytes, bool pinned,
                                struct k_buffer **ret, struct err *e)
{
    const uint32_t i = next_buffer(g);
    if (!fake_gpu_call(g) ||
        (!pinned && g->options.memory != 0 && bytes > g->options.memory - g->used))
        return g->failed ? err_set(e, ERR_DEVICE, "the fake device failed")
                         : err_set(e, ERR_NOMEM, "the fake device has no %llu bytes",
                                   (unsigned long long)bytes);
    struct fake_buffer *b = alloc_zero(ALLOC_WORK, 1, sizeof(*b));
    if (b == NULL)
        fake_gpu_die("no memory");
    b->data = alloc_aligned(ALLOC_WORK, 256, bytes == 0 ? 64 : (size_t)bytes);
    if (b->data == NULL)
        fake_gpu_die("no memory");
    memset(b->data, 0, (size_t)bytes);
    b->base.bytes = bytes;
    b->base.data = pinned ? b->data : NULL;
    b->gpu = g;
    b->pinned = pinned;
    g->used += pinned ? 0 : bytes;
    g->buffers[i] = b;
    *ret = &b->base;
    return ERR_OK;
}

static uint64_t chunk_bytes(const struct k_buffer *range, uint64_t i)
{
    const uint64_t left = range->bytes - i * K_CHUNK_BYTES;
    return left < K_CHUNK_BYTES ? left : K_CHUNK_BYTES;
}

/* What has no memory cannot be touched. */
static enum err_code range_new(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                               struct err *e)
{
    struct fake_gpu *g = fake_gpu_of(d);
    const uint64_t n = (bytes + K_CHUNK_BYTES - 1) / K_CHUNK_BYTES;
    const uint32_t i = next_buffer(g);
    if (!fake_gpu_call(g))
        return err_set(e, ERR_DEVICE, "the fake device failed");
    if (g->options.no_ranges)
        return err_set(e, ERR_UNSUPPORTED, "the fake device has no ranges");
    struct fake_buffer *b = alloc_zero(ALLOC_WORK, 1, sizeof(*b));
    bool *taken = alloc_zero(ALLOC_WORK, n, sizeof(*taken));
    if (b == NULL || taken == NULL)
        fake_gpu_die("no memory");
    b->data = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (b->data == MAP_FAILED)
        fake_gpu_die("no addresses");
    b->base.bytes = bytes;
    b->gpu = g;
    b->n_chunks = n;
    b->taken = taken;
    g->buffers[i] = b;
    *ret = &b->base;
    return ERR_OK;
}

static void chunks_return(struct k_buffer *range, uint64_t first, uint64_t n)
{
    struct fake_buffer *b = (struct fake_buffer *)(void *)range;
    for (uint64_t i = first; i < first + n; i++) {
        if (!b->taken[i])
            continue;
        uint8_t *at = b->data + i * K_CHUNK_BYTES;
        if (mmap(at, chunk_bytes(range, i), PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != at)
            fake_gpu_die("no addresses");
        b->taken[i] = false;
        b->gpu->used -= chunk_bytes(range, i);
    }
}

static enum err_code chunks_take(struct k_buffer *range, uint64_t first, uint64_t n, struct err *e)
{
    struct fake_buffer *b = (struct fake_buffer *)(void *)range;
    struct fake_gpu *g = b->gpu;
    if (first > b->n_chunks || n > b->n_chunks - first)
        fake_gpu_die("chunks beyond the range");
    for (uint64_t i = first; i < first + n; i++) {
        const uint64_t bytes = chunk_bytes(range, i);
        if (b->taken[i])
            fake_gpu_die("a chunk is taken twice");
        g->counts.allocations++;
        if (!fake_gpu_call(g) || (g->options.memory != 0 && bytes > g->options.memory - g->used)) {
            chunks_return(range, first, i - first);
            return g->failed ? err_set(e, ERR_DEVICE, "the fake device failed")
                             : err_set(e, ERR_NOMEM, "the fake device has no chunk left");
        }
        if (mprotect(b->data + i * K_CHUNK_BYTES, bytes, PROT_READ | PROT_WRITE) != 0)
            fake_gpu_die("no memory");
        memset(b->data + i * K_CHUNK_BYTES, 0xA5, bytes); /* nobody cleared it */
        b->taken[i] = true;
        g->used += bytes;
    }
    return ERR_OK;
}

static enum err_code buffer_new(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                                struct err *e)
{
    return memory_new(fake_gpu_of(d), bytes, false, ret, e);
}

static enum err_code pinned_new(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                                struct err *e)
{
    return memory_new(fake_gpu_of(d), bytes, true, ret, e);
}

static void buffer_free(struct k_buffer *buffer)
{
    struct fake_buffer *b = (struct fake_buffer *)(void *)buffer;
    if (b == NULL)
        return;
    struct fake_gpu *g = b->gpu;
    for (uint32_t i = 0; i < MAX_BUFFERS; i++)
        if (g->buffers[i] == b)
            g->buffers[i] = NULL;
    if (b->taken != NULL) {
        chunks_return(buffer, 0, b->n_chunks);
        munmap(b->data, b->base.bytes);
        alloc_free(b->taken);
    } else {
        g->used -= b->pinned ? 0 : b->base.bytes;
        alloc_free(b->data);
    }
    alloc_free(b);
}

static void *buffer_host(struct k_buffer *buffer)
{
    return buffer->data;
}

static enum err_code host_register(struct k_device *d, void *memory, uint64_t bytes, struct err *e)
{
    struct fake_gpu *g = fake_gpu_of(d);
    if (!fake_gpu_call(g) || g->options.no_pinning)
        return err_set(e, ERR_NOMEM, "the fake device pins nothing");
    for (uint32_t i = 0; i < MAX_PINNED; i++)
        if (g->pinned[i].at == NULL) {
            g->pinned[i].at = memory;
            g->pinned[i].bytes = bytes;
            return ERR_OK;
        }
    fake_gpu_die("too many pinned ranges");
    return ERR_NOMEM;
}

static void host_unregister(struct k_device *d, void *memory)
{
    struct fake_gpu *g = fake_gpu_of(d);
    for (uint32_t i = 0; i < MAX_PINNED; i++)
        if (g->pinned[i].at == memory) {
            g->pinned[i].at = NULL;
            return;
        }
    fake_gpu_die("unregister of memory that is not pinned");
}

bool fake_gpu_memory_is_pinned(const struct fake_gpu *g, const uint8_t *from, size_t n)
{
    for (uint32_t i = 0; i < MAX_PINNED; i++)
        if (g->pinned[i].at != NULL && from >= g->pinned[i].at &&
            from + n <= g->pinned[i].at + g->pinned[i].bytes)
            return true;
    for (uint32_t i = 0; i < MAX_BUFFERS; i++) {
        const struct fake_buffer *b = g->buffers[i];
        if (b != NULL && b->pinned && from >= b->data && from + n <= b->data + b->base.bytes)
            return true;
    }
    return false;
}

void fake_gpu_memory_show(const struct fake_gpu *g, bool shown)
{
    for (uint32_t i = 0; i < MAX_BUFFERS; i++)
        if (g->buffers[i] != NULL && !g->buffers[i]->pinned)
            g->buffers[i]->base.data = shown ? g->buffers[i]->data : NULL;
}

void fake_gpu_memory_check_empty(const struct fake_gpu *g)
{
    for (uint32_t i = 0; i < MAX_BUFFERS; i++)
        if (g->buffers[i] != NULL)
            fake_gpu_die("closed with a buffer left");
    for (uint32_t i = 0; i < MAX_PINNED; i++)
        if (g->pinned[i].at != NULL)
            fake_gpu_die("closed with pinned memory left");
}

static void memory_left(struct k_device *d, uint64_t *ret_free, uint64_t *ret_total)
{
    const struct fake_gpu *g = fake_gpu_of(d);
    *ret_total = g->options.memory;
    *ret_free = g->options.memory == 0 ? 0 : g->options.memory - g->used;
}

void fake_gpu_memory_fill(struct k_ops *ops)
{
    ops->buffer_new = buffer_new;
    ops->buffer_free = buffer_free;
    ops->buffer_host = buffer_host;
    ops->pinned_new = pinned_new;
    ops->host_register = host_register;
    ops->host_unregister = host_unregister;
    ops->range_new = range_new;
    ops->chunks_take = chunks_take;
    ops->chunks_return = chunks_return;
    ops->memory = memory_left;
}

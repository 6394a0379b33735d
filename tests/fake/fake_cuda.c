/* A stand-in for islet-cuda.so that needs no GPU: the reference behind the same symbol. Its memory
 * cannot be seen by the CPU (buffer_host gives NULL), chunks without memory cannot be touched, its
 * calls are counted and fail when a test asks for it, and recorded operations run when they are
 * replayed. Operations run at once; weights keep the file's order.
 *   ISLET_FAKE_CUDA_MIB     memory of the device, 4096 without it
 *   ISLET_FAKE_CUDA_WRONG   any value: the first float of a norm has a bit too many, which whoever
 *                           compares must see */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "k_cuda_entry.h"
#include "k_cuda_fault.h"
#include "k_host.h"
#include "k_ref.h"

struct fake {
    struct k_device device;
    const struct k_cuda_heap *heap;
    struct k_counts counts;
    struct k_cuda_fault fault;
    struct err first;
    int lost; /* the error that ended the device, 0: none */
    uint64_t total, used;
    bool wrong;
};

struct fake_buffer {
    struct k_buffer host; /* as the reference takes it */
    struct fake *fake;
    bool pinned;
    uint64_t n_chunks;
    bool taken[]; /* of a range */
};

#define FAKE_DENSE(X)   X(embed) X(norm) X(quantise) X(matmul) X(rope) X(add) X(gather) X(check)
#define FAKE_EXPERTS(X) X(router) X(grouping) X(moe_gate_up) X(moe_down) X(moe_sum)
#define FAKE_OPS(X)     FAKE_DENSE(X) FAKE_EXPERTS(X) X(kv_write) X(attention)

struct copying {
    uint8_t *to;
    const uint8_t *from;
    size_t n;
};
enum call_kind {
#define KIND(op) CALL_##op,
    FAKE_OPS(KIND)
#undef KIND
    CALL_copying
};
struct call {
    enum call_kind kind;
    union {
#define MEMBER(op) struct k_##op op;
        FAKE_OPS(MEMBER)
#undef MEMBER
        struct copying copying;
    } args;
};

enum {
    GRANULE = 2 << 20, /* of memory that is mapped */
    MAX_CALLS = 16384  /* of a recording */
};
struct k_graph {
    struct fake *fake;
    uint32_t n;
    struct call call[];
};
struct fake_stream {
    struct k_stream host;
    int error;
    bool recording;
    uint32_t n;
    struct call *call;
};
struct k_event {
    struct fake *fake;
    int error; /* of the stream when it was recorded */
};

static struct fake *fake_of(const struct k_device *d)
{
    return (struct fake *)(void *)(uintptr_t)d;
}

static struct fake_stream *stream_of(struct k_stream *s)
{
    return (struct fake_stream *)(void *)s;
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* 0, or the error that the call of `what` gave. */
static int call_made(struct fake *f, const char *what)
{
    f->counts.calls++;
    if (f->lost != 0)
        return f->lost;
    if (!k_cuda_fault_due(&f->fault))
        return 0;
    if (k_cuda_fault_is_lost(f->fault.error))
        f->lost = f->fault.error;
    (void)err_set(&f->first, ERR_DEVICE, "%s: injected (CUDA error %d)", what, f->fault.error);
    return f->fault.error;
}

static void run(const struct fake *f, const struct call *c)
{
    switch (c->kind) {
#define RUN(op)                                           \
    case CALL_##op:                                       \
        if (k_ref_ops()->op(&c->args.op, NULL) != ERR_OK) \
            abort();                                      \
        break;
        FAKE_OPS(RUN)
#undef RUN
    case CALL_copying:
        memmove(c->args.copying.to, c->args.copying.from, c->args.copying.n);
        break;
    }
    if (f->wrong && c->kind == CALL_norm)
        *(uint32_t *)k_host_at(c->args.norm.y) ^= 1;
}

/* Runs or records a call, unless the stream has failed. */
static void step(struct k_stream *stream, const struct call *c, const char *what)
{
    struct fake_stream *s = stream_of(stream);
    if (s->error == 0)
        s->error = call_made(fake_of(stream->device), what);
    if (s->error != 0)
        return;
    if (!s->recording)
        run(fake_of(stream->device), c);
    else if (s->n < MAX_CALLS)
        s->call[s->n++] = *c;
    else
        s->error = 2;
}

#define OP(op)                                                               \
    static enum err_code op_##op(const struct k_##op *a, struct k_stream *s) \
    {                                                                        \
        struct call c = {.kind = CALL_##op};                                 \
        c.args.op = *a;                                                      \
        step(s, &c, #op);                                                    \
        return ERR_OK;                                                       \
    }
FAKE_OPS(OP)
#undef OP

static void move(struct k_stream *s, void *to, const void *from, size_t n, const char *what)
{
    const struct call c = {.kind = CALL_copying, .args.copying = {to, from, n}};
    if (n > 0)
        step(s, &c, what);
}

static enum err_code arrange(const struct k_arrange *a, struct k_stream *s)
{
    move(s, k_host_at(a->to), k_host_at(a->from), k_format_bytes(a->format, a->n_out, a->n_in),
         "arrange");
    return ERR_OK;
}

static void upload(struct k_stream *s, struct k_span to, const void *from, size_t n)
{
    if (stream_of(s)->recording)
        stream_of(s)->error = 900; /* the caller's memory may change before the replay */
    move(s, k_host_at(to), from, n, "upload");
}

static void fetch(struct k_stream *s, struct k_span to, const void *from, size_t n)
{
    move(s, k_host_at(to), from, n, "fetch");
}

static void download(struct k_stream *s, void *to, struct k_span from, size_t n)
{
    move(s, to, k_host_at(from), n, "download");
}

static void copy(struct k_stream *s, struct k_span to, struct k_span from, size_t n)
{
    move(s, k_host_at(to), k_host_at(from), n, "copy");
}

/* ---- memory ---------------------------------------------------------------------------------- */

static enum err_code refused(int error, const char *what, struct err *e)
{
    return err_set(e, k_cuda_fault_code(error), "%s: CUDA error %d", what, error);
}

/* Takes bytes of the device's memory. */
static int take(struct fake *f, uint64_t bytes, const char *what)
{
    const int error = call_made(f, what);
    if (error != 0)
        return error;
    if (bytes > f->total - f->used)
        return 2;
    f->used += bytes;
    f->counts.allocations++;
    return 0;
}

static enum err_code mapped(struct fake *f, uint64_t bytes, uint64_t n_chunks, int protection,
                            struct fake_buffer **ret, struct err *e)
{
    struct fake_buffer *b = f->heap->zero(sizeof *b + n_chunks);
    if (b == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a buffer");
    b->host.bytes = bytes == 0 ? 64 : bytes;
    b->host.data =
        mmap(NULL, b->host.bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    b->fake = f;
    b->n_chunks = n_chunks;
    if (b->host.data == MAP_FAILED) {
        f->heap->free(b);
        return err_set(e, ERR_NOMEM, "no memory for a buffer");
    }
    *ret = b;
    return ERR_OK;
}

static enum err_code buffer(struct k_device *d, uint64_t bytes, bool pinned, struct k_buffer **ret,
                            struct err *e)
{
    struct fake *f = fake_of(d);
    struct fake_buffer *b = NULL;
    const int error = take(f, pinned ? 0 : bytes == 0 ? 64 : bytes, "memory");
    if (error != 0)
        return refused(error, "memory of the stand-in", e);
    const enum err_code code = mapped(f, bytes, 0, PROT_READ | PROT_WRITE, &b, e);
    if (code != ERR_OK)
        return code;
    b->pinned = pinned;
    *ret = &b->host;
    return ERR_OK;
}

static enum err_code buffer_new(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                                struct err *e)
{
    return buffer(d, bytes, false, ret, e);
}

static enum err_code pinned_new(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                                struct err *e)
{
    return buffer(d, bytes, true, ret, e);
}

static void *buffer_host(struct k_buffer *b)
{
    return ((struct fake_buffer *)(void *)b)->pinned ? b->data : NULL;
}

static enum err_code range_new(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                               struct err *e)
{
    struct fake *f = fake_of(d);
    struct fake_buffer *b = NULL;
    const uint64_t n = bytes / K_CHUNK_BYTES + (bytes % K_CHUNK_BYTES != 0);
    const int error = take(f, 0, "range");
    if (error != 0)
        return refused(error, "a range of the stand-in", e);
    const enum err_code code =
        mapped(f, (bytes + GRANULE - 1) / GRANULE * GRANULE, n, PROT_NONE, &b, e);
    if (code == ERR_OK)
        *ret = &b->host;
    return code;
}

static uint64_t chunk_bytes(const struct k_buffer *range, uint64_t i)
{
    const uint64_t left = range->bytes - i * K_CHUNK_BYTES;
    return left < K_CHUNK_BYTES ? left : K_CHUNK_BYTES;
}

static void chunks_return(struct k_buffer *range, uint64_t first, uint64_t n)
{
    struct fake_buffer *b = (struct fake_buffer *)(void *)range;
    for (uint64_t i = first; i < first + n && i < b->n_chunks; i++)
        if (b->taken[i]) {
            uint8_t *at = (uint8_t *)range->data + i * K_CHUNK_BYTES;
            if (mmap(at, chunk_bytes(range, i), PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != at)
                abort();
            b->taken[i] = false;
            b->fake->used -= chunk_bytes(range, i);
        }
}

static enum err_code chunks_take(struct k_buffer *range, uint64_t first, uint64_t n, struct err *e)
{
    struct fake_buffer *b = (struct fake_buffer *)(void *)range;
    if (first > b->n_chunks || n > b->n_chunks - first)
        return err_set(e, ERR_ARGUMENT, "chunks beyond the range");
    for (uint64_t i = first; i < first + n; i++)
        if (b->taken[i])
            return err_set(e, ERR_ARGUMENT, "chunk %llu has memory", (unsigned long long)i);
    for (uint64_t i = first; i < first + n; i++) {
        const int error = take(b->fake, chunk_bytes(range, i), "chunk");
        if (error != 0) {
            chunks_return(range, first, i - first);
            return refused(error, "chunks of the stand-in", e);
        }
        if (mprotect((uint8_t *)range->data + i * K_CHUNK_BYTES, chunk_bytes(range, i),
                     PROT_READ | PROT_WRITE) != 0)
            abort();
        b->taken[i] = true;
    }
    return ERR_OK;
}

static void buffer_free(struct k_buffer *buffer)
{
    struct fake_buffer *b = (struct fake_buffer *)(void *)buffer;
    if (b == NULL)
        return;
    if (b->n_chunks > 0)
        chunks_return(buffer, 0, b->n_chunks);
    else if (!b->pinned)
        b->fake->used -= b->host.bytes;
    munmap(b->host.data, b->host.bytes);
    b->fake->heap->free(b);
}

static enum err_code host_register(struct k_device *d, void *memory, uint64_t bytes, struct err *e)
{
    (void)memory;
    (void)bytes;
    const int error = take(fake_of(d), 0, "register");
    return error == 0 ? ERR_OK : refused(error, "pinning", e);
}

static void host_unregister(struct k_device *d, void *memory)
{
    (void)d;
    (void)memory;
}

static void memory(struct k_device *d, uint64_t *ret_free, uint64_t *ret_total)
{
    const struct fake *f = fake_of(d);
    *ret_free = f->total - f->used;
    *ret_total = f->total;
}

/* ---- streams, events, graphs ----------------------------------------------------------------- */

static enum err_code stream_new(struct k_device *d, struct k_stream **ret, struct err *e)
{
    struct fake *f = fake_of(d);
    const int error = take(f, 0, "stream");
    if (error != 0)
        return refused(error, "a stream", e);
    struct fake_stream *s = f->heap->zero(sizeof *s);
    if (s == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a stream");
    s->host.device = d;
    *ret = &s->host;
    return ERR_OK;
}

static void stream_free(struct k_stream *stream)
{
    if (stream == NULL)
        return;
    const struct k_cuda_heap *heap = fake_of(stream->device)->heap;
    if (stream_of(stream)->call != NULL)
        heap->free(stream_of(stream)->call);
    heap->free(stream);
}

static enum err_code wait(struct k_stream *stream)
{
    struct fake_stream *s = stream_of(stream);
    const int error = s->error != 0 ? s->error : call_made(fake_of(stream->device), "wait");
    s->error = 0;
    return error == 0 ? ERR_OK : ERR_DEVICE;
}

static enum err_code event_new(struct k_device *d, struct k_event **ret, struct err *e)
{
    struct fake *f = fake_of(d);
    const int error = take(f, 0, "event");
    if (error != 0)
        return refused(error, "an event", e);
    struct k_event *v = f->heap->zero(sizeof *v);
    if (v == NULL)
        return err_set(e, ERR_NOMEM, "no memory for an event");
    v->fake = f;
    *ret = v;
    return ERR_OK;
}

static void event_free(struct k_event *v)
{
    if (v != NULL)
        v->fake->heap->free(v);
}

static void event_record(struct k_event *v, struct k_stream *s)
{
    if (stream_of(s)->error == 0)
        stream_of(s)->error = call_made(v->fake, "event");
    v->error = stream_of(s)->error;
}

static void event_after(struct k_event *v, struct k_stream *s)
{
    if (stream_of(s)->error == 0)
        stream_of(s)->error = v->error != 0 ? v->error : call_made(v->fake, "event");
}

static bool event_passed(struct k_event *v)
{
    return (v->error == 0 && call_made(v->fake, "event") == 0) || v->fake->lost != 0;
}

static double event_us(struct k_event *from, struct k_event *to)
{
    return call_made(from->fake, "event") == 0 && from != to ? 1.0 : -1.0;
}

static enum err_code capture_begin(struct k_stream *stream)
{
    struct fake_stream *s = stream_of(stream);
    struct fake *f = fake_of(stream->device);
    if (s->error == 0)
        s->error = call_made(f, "capture_begin");
    if (s->error == 0 && s->call == NULL)
        s->call = f->heap->zero(MAX_CALLS * sizeof *s->call);
    if (s->error != 0 || s->call == NULL)
        return ERR_DEVICE;
    s->recording = true;
    s->n = 0;
    return ERR_OK;
}

static enum err_code capture_end(struct k_stream *stream, struct k_graph **ret)
{
    struct fake_stream *s = stream_of(stream);
    struct fake *f = fake_of(stream->device);
    s->recording = false;
    if (s->error == 0)
        s->error = take(f, 0, "capture_end");
    if (s->error != 0)
        return ERR_DEVICE;
    struct k_graph *g = f->heap->zero(sizeof *g + s->n * sizeof g->call[0]);
    if (g == NULL)
        return ERR_NOMEM;
    g->fake = f;
    g->n = s->n;
    memcpy(g->call, s->call, s->n * sizeof g->call[0]);
    *ret = g;
    return ERR_OK;
}

static enum err_code replay(struct k_graph *g, struct k_stream *stream)
{
    struct fake_stream *s = stream_of(stream);
    if (s->error == 0)
        s->error = call_made(g->fake, "replay");
    if (s->error != 0)
        return ERR_DEVICE;
    for (uint32_t i = 0; i < g->n; i++)
        run(g->fake, &g->call[i]);
    return ERR_OK;
}

static void graph_free(struct k_graph *g)
{
    if (g != NULL)
        g->fake->heap->free(g);
}

/* ---- the device ------------------------------------------------------------------------------ */

static bool lost(const struct k_device *d, struct err *ret_why)
{
    const struct fake *f = fake_of(d);
    if (f->first.code != ERR_OK && ret_why != NULL)
        *ret_why = f->first;
    return f->lost != 0;
}

static const char *describe(const struct k_device *d)
{
    (void)d;
    return "stand-in of a GPU, the reference on the CPU";
}

static const char *bus_id(const struct k_device *d)
{
    (void)d;
    return "0000:01:00.0";
}

static void counts(const struct k_device *d, struct k_counts *ret)
{
    *ret = fake_of(d)->counts;
}

static void inject(struct k_device *d, const struct k_cuda_fault *fault)
{
    fake_of(d)->fault = *fault;
}

static void close_device(struct k_device *d)
{
    fake_of(d)->heap->free(d);
}

static void fill(struct k_ops *ret)
{
    *ret = *k_ref_ops(); /* sizes */
    ret->name = "stand-in";
#define FILL(op) ret->op = op_##op;
    FAKE_OPS(FILL)
#undef FILL
    ret->arrange = arrange;
    ret->buffer_new = buffer_new;
    ret->buffer_free = buffer_free;
    ret->buffer_host = buffer_host;
    ret->pinned_new = pinned_new;
    ret->host_register = host_register;
    ret->host_unregister = host_unregister;
    ret->range_new = range_new;
    ret->chunks_take = chunks_take;
    ret->chunks_return = chunks_return;
    ret->memory = memory;
    ret->upload = upload;
    ret->download = download;
    ret->copy = copy;
    ret->fetch = fetch;
    ret->stream_new = stream_new;
    ret->stream_free = stream_free;
    ret->wait = wait;
    ret->event_new = event_new;
    ret->event_free = event_free;
    ret->event_record = event_record;
    ret->event_after = event_after;
    ret->event_passed = event_passed;
    ret->event_us = event_us;
    ret->capture_begin = capture_begin;
    ret->capture_end = capture_end;
    ret->replay = replay;
    ret->graph_free = graph_free;
    ret->lost = lost;
    ret->describe = describe;
    ret->bus_id = bus_id;
    ret->counts = counts;
    ret->inject = inject;
}

static enum err_code open_device(const struct k_cuda_options *o, const struct k_cuda_heap *heap,
                                 struct k_device **ret, struct err *e)
{
    struct fake *f = heap->zero(sizeof *f);
    if (f == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the compute device");
    const char *mib = getenv("ISLET_FAKE_CUDA_MIB");
    f->total = (mib == NULL ? 4096 : strtoull(mib, NULL, 10)) << 20;
    f->wrong = getenv("ISLET_FAKE_CUDA_WRONG") != NULL;
    f->heap = heap;
    f->fault = o->fault;
    f->device.threads = 1;
    f->device.close = close_device;
    fill(&f->device.ops);
    static const char *const stages[] = {"count", "properties", "context", "first kernel"};
    for (size_t i = 0; i < sizeof stages / sizeof stages[0]; i++) {
        const int error = call_made(f, stages[i]);
        if (error != 0) {
            heap->free(f);
            return refused(error, stages[i], e);
        }
    }
    *ret = &f->device;
    return ERR_OK;
}

extern const struct k_cuda_entry islet_cuda_entry;
const struct k_cuda_entry islet_cuda_entry = {K_CUDA_ABI, K_ARITHMETIC_VERSION,
                                              (uint32_t)sizeof(struct k_ops), open_device};

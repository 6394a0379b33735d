#include "fake_gpu.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "alloc.h"
#include "k_host.h"

enum {
    THREADS = 2,
    MAX_BUFFERS = 32,
    MAX_PINNED = 8,
    MAX_QUEUE = 1 << 14,
    MEMORY_ERROR = 2,
    LOST_FROM = 700
};

enum kind {
    UPLOAD,
    DOWNLOAD,
    FETCH,
    COPY,
    AFTER,
    EMBED,
    NORM,
    QUANTISE,
    MATMUL,
    ROPE,
    KV_WRITE,
    ATTENTION,
    ADD,
    ROUTER,
    GROUPING,
    GATE_UP,
    DOWN,
    SUM,
    GATHER,
    CHECK,
    PICK,
    ARRANGE
};

struct fake_stream;

struct k_event {
    struct fake_stream *stream; /* NULL: never recorded */
    uint64_t mark;              /* what the stream had queued */
};

struct command {
    enum kind kind;
    union {
        struct {
            struct k_span to, from;
            void *memory; /* of the host; UPLOAD: a copy, freed when it ran */
            size_t n;
        } move;
        struct k_event after;
        struct k_embed embed;
        struct k_norm norm;
        struct k_quantise quantise;
        struct k_matmul matmul;
        struct k_rope rope;
        struct k_kv_write kv_write;
        struct k_attention attention;
        struct k_add add;
        struct k_router router;
        struct k_grouping grouping;
        struct k_moe_gate_up gate_up;
        struct k_moe_down down;
        struct k_moe_sum sum;
        struct k_gather gather;
        struct k_check check;
        struct k_pick pick;
        struct k_arrange arrange;
    };
};

struct k_graph {
    uint32_t n;
    struct command commands[];
};

struct fake_buffer {
    struct k_buffer base; /* data: NULL but while an operation runs, unless pinned */
    struct fake_gpu *gpu;
    uint8_t *data;
    bool pinned;
    uint64_t n_chunks; /* of a range */
    bool *taken;
};

struct fake_gpu {
    struct k_device device;
    struct k_device *inner;
    const struct k_ops *ops; /* of inner */
    struct fake_gpu_options options;
    struct fake_buffer *buffers[MAX_BUFFERS];
    struct {
        const uint8_t *at;
        uint64_t bytes;
    } pinned[MAX_PINNED];
    uint64_t used;
    struct k_counts counts;
    struct k_cuda_fault fault;
    bool failed, lost;
};

struct fake_stream {
    struct k_stream base;
    struct fake_gpu *gpu;
    uint64_t queued, ran;
    bool captures;
    uint64_t capture_from;
    struct command queue[MAX_QUEUE];
};

static void die(const char *what)
{
    fprintf(stderr, "fake_gpu: %s\n", what);
    abort();
}

static struct fake_gpu *gpu_of(struct k_device *d)
{
    return (struct fake_gpu *)(void *)d;
}

static struct fake_stream *stream_of(struct k_stream *s)
{
    return (struct fake_stream *)(void *)s;
}

/* A call of the device's library. False: it fails, or the device failed before. */
static bool call(struct fake_gpu *g)
{
    g->counts.calls++;
    if (g->fault.nth != 0 && --g->fault.nth == 0) {
        if (g->fault.forever)
            g->fault.nth = 1;
        g->lost |= g->fault.error >= LOST_FROM;
        g->failed |= g->fault.error != MEMORY_ERROR;
        return false;
    }
    return !g->failed;
}

/* ---- memory ---- */

static enum err_code memory_new(struct fake_gpu *g, uint64_t bytes, bool pinned,
                                struct k_buffer **ret, struct err *e)
{
    uint32_t i = 0;
    while (i < MAX_BUFFERS && g->buffers[i] != NULL)
        i++;
    if (i == MAX_BUFFERS)
        die("too many buffers");
    g->counts.allocations++;
    if (!call(g) || (!pinned && g->options.memory != 0 && bytes > g->options.memory - g->used))
        return g->failed ? err_set(e, ERR_DEVICE, "the fake device failed")
                         : err_set(e, ERR_NOMEM, "the fake device has no %llu bytes",
                                   (unsigned long long)bytes);
    struct fake_buffer *b = alloc_zero(ALLOC_WORK, 1, sizeof(*b));
    if (b == NULL)
        die("no memory");
    b->data = alloc_aligned(ALLOC_WORK, 256, bytes == 0 ? 64 : (size_t)bytes);
    if (b->data == NULL)
        die("no memory");
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
    struct fake_gpu *g = gpu_of(d);
    const uint64_t n = (bytes + K_CHUNK_BYTES - 1) / K_CHUNK_BYTES;
    uint32_t i = 0;
    while (i < MAX_BUFFERS && g->buffers[i] != NULL)
        i++;
    if (i == MAX_BUFFERS)
        die("too many buffers");
    g->counts.allocations++;
    if (!call(g))
        return err_set(e, ERR_DEVICE, "the fake device failed");
    if (g->options.no_ranges)
        return err_set(e, ERR_UNSUPPORTED, "the fake device has no ranges");
    struct fake_buffer *b = alloc_zero(ALLOC_WORK, 1, sizeof(*b));
    bool *taken = alloc_zero(ALLOC_WORK, n, sizeof(*taken));
    if (b == NULL || taken == NULL)
        die("no memory");
    b->data = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (b->data == MAP_FAILED)
        die("no addresses");
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
            die("no addresses");
        b->taken[i] = false;
        b->gpu->used -= chunk_bytes(range, i);
    }
}

static enum err_code chunks_take(struct k_buffer *range, uint64_t first, uint64_t n, struct err *e)
{
    struct fake_buffer *b = (struct fake_buffer *)(void *)range;
    struct fake_gpu *g = b->gpu;
    if (first > b->n_chunks || n > b->n_chunks - first)
        die("chunks beyond the range");
    for (uint64_t i = first; i < first + n; i++) {
        const uint64_t bytes = chunk_bytes(range, i);
        if (b->taken[i])
            die("a chunk is taken twice");
        g->counts.allocations++;
        if (!call(g) || (g->options.memory != 0 && bytes > g->options.memory - g->used)) {
            chunks_return(range, first, i - first);
            return g->failed ? err_set(e, ERR_DEVICE, "the fake device failed")
                             : err_set(e, ERR_NOMEM, "the fake device has no chunk left");
        }
        if (mprotect(b->data + i * K_CHUNK_BYTES, bytes, PROT_READ | PROT_WRITE) != 0)
            die("no memory");
        memset(b->data + i * K_CHUNK_BYTES, 0xA5, bytes); /* nobody cleared it */
        b->taken[i] = true;
        g->used += bytes;
    }
    return ERR_OK;
}

static enum err_code buffer_new(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                                struct err *e)
{
    return memory_new(gpu_of(d), bytes, false, ret, e);
}

static enum err_code pinned_new(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                                struct err *e)
{
    return memory_new(gpu_of(d), bytes, true, ret, e);
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
    struct fake_gpu *g = gpu_of(d);
    if (!call(g) || g->options.no_pinning)
        return err_set(e, ERR_NOMEM, "the fake device pins nothing");
    for (uint32_t i = 0; i < MAX_PINNED; i++)
        if (g->pinned[i].at == NULL) {
            g->pinned[i].at = memory;
            g->pinned[i].bytes = bytes;
            return ERR_OK;
        }
    die("too many pinned ranges");
    return ERR_NOMEM;
}

static void host_unregister(struct k_device *d, void *memory)
{
    struct fake_gpu *g = gpu_of(d);
    for (uint32_t i = 0; i < MAX_PINNED; i++)
        if (g->pinned[i].at == memory) {
            g->pinned[i].at = NULL;
            return;
        }
    die("unregister of memory that is not pinned");
}

static bool is_pinned(const struct fake_gpu *g, const uint8_t *from, size_t n)
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

/* ---- running ---- */

static void show(const struct fake_gpu *g, bool shown)
{
    for (uint32_t i = 0; i < MAX_BUFFERS; i++)
        if (g->buffers[i] != NULL && !g->buffers[i]->pinned)
            g->buffers[i]->base.data = shown ? g->buffers[i]->data : NULL;
}

/* The device's own order of weights: its own inverse. */
static void turn(const struct fake_gpu *g, struct k_span span, uint64_t bytes)
{
    uint8_t *at = k_host_at(span);
    for (uint64_t i = 0; i < bytes && !g->options.no_arrange; i++)
        at[i] ^= (uint8_t)(i * 31 + 7);
}

static void turn_matrix(const struct fake_gpu *g, const struct k_matrix *m)
{
    turn(g, m->data, k_format_bytes(m->format, m->n_out, m->n_in));
}

/* The slices of the selected groups' experts. */
static void turn_experts(const struct fake_gpu *g, const struct k_experts *x, struct k_span groups,
                         struct k_span n_selected, struct k_span selected, bool down)
{
    const uint32_t n = *(const uint32_t *)k_host_at(n_selected);
    const uint32_t *which = k_host_at(selected);
    const struct k_group *of = k_host_at(groups);
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t *slots = (const uint64_t *)k_host_at(x->slots) + 3ull * of[which[i]].expert;
        if (down) {
            turn(g, (struct k_span){x->arena, slots[2]},
                 k_format_bytes(x->down, x->n_embd, x->n_ff));
            continue;
        }
        turn(g, (struct k_span){x->arena, slots[0]}, k_format_bytes(x->gate, x->n_ff, x->n_embd));
        turn(g, (struct k_span){x->arena, slots[1]}, k_format_bytes(x->up, x->n_ff, x->n_embd));
    }
}

static void run_to(struct fake_stream *s, uint64_t mark);

static enum err_code run_weights(struct fake_gpu *g, struct command *c, struct k_stream *in)
{
    enum err_code code;
    switch (c->kind) {
    case EMBED:
        turn_matrix(g, &c->embed.table);
        code = g->ops->embed(&c->embed, in);
        turn_matrix(g, &c->embed.table);
        return code;
    case MATMUL:
        for (uint32_t i = 0; i < c->matmul.n_matrices; i++)
            turn_matrix(g, &c->matmul.w[i]);
        code = g->ops->matmul(&c->matmul, in);
        for (uint32_t i = 0; i < c->matmul.n_matrices; i++)
            turn_matrix(g, &c->matmul.w[i]);
        return code;
    case GATE_UP:
        for (int i = 0; i < 2; i++) {
            turn_experts(g, &c->gate_up.experts, c->gate_up.groups, c->gate_up.n_selected,
                         c->gate_up.selected, false);
            if (i == 0 && (code = g->ops->moe_gate_up(&c->gate_up, in)) != ERR_OK)
                die("moe_gate_up failed");
        }
        return ERR_OK;
    case DOWN:
        for (int i = 0; i < 2; i++) {
            turn_experts(g, &c->down.experts, c->down.groups, c->down.n_selected, c->down.selected,
                         true);
            if (i == 0 && (code = g->ops->moe_down(&c->down, in)) != ERR_OK)
                die("moe_down failed");
        }
        return ERR_OK;
    default:
        memmove(k_host_at(c->arrange.to), k_host_at(c->arrange.from),
                k_format_bytes(c->arrange.format, c->arrange.n_out, c->arrange.n_in));
        turn(g, c->arrange.to,
             k_format_bytes(c->arrange.format, c->arrange.n_out, c->arrange.n_in));
        return ERR_OK;
    }
}

static enum err_code run_pick(const struct k_pick *a)
{
    const uint32_t n = a->n_vocab, n_rows = *(const uint32_t *)k_host_at(a->rows.n_rows);
    const struct k_pick_row *how = k_host_at(a->how);
    uint32_t *ids = k_host_at(a->ids);
    uint64_t *w = alloc_get(ALLOC_WORK, n * sizeof(*w));
    if (w == NULL)
        die("no memory");
    for (uint32_t row = 0; row < n_rows; row++) {
        const float *x = (const float *)k_host_at(a->logits) + (size_t)row * n;
        ids[row] = k_highest(x, n);
        if (how[row].temperature < FLT_MIN)
            continue;
        const uint64_t total = k_weigh(x, n, x[ids[row]], how[row].temperature, w);
        uint64_t r = (uint64_t)(((unsigned __int128)how[row].random * total) >> 64);
        uint32_t i = 0;
        while (i < n && r >= w[i])
            r -= w[i++];
        ids[row] = i < n ? i : ids[row];
    }
    alloc_free(w);
    return ERR_OK;
}

static enum err_code run_rows(const struct fake_gpu *g, struct command *c, struct k_stream *in)
{
    switch (c->kind) {
    case NORM:
        return g->ops->norm(&c->norm, in);
    case QUANTISE:
        return g->ops->quantise(&c->quantise, in);
    case ROPE:
        return g->ops->rope(&c->rope, in);
    case KV_WRITE:
        return g->ops->kv_write(&c->kv_write, in);
    case ATTENTION:
        return g->ops->attention(&c->attention, in);
    case ADD:
        return g->ops->add(&c->add, in);
    case ROUTER:
        return g->ops->router(&c->router, in);
    case GROUPING:
        return g->ops->grouping(&c->grouping, in);
    case SUM:
        return g->ops->moe_sum(&c->sum, in);
    case GATHER:
        return g->ops->gather(&c->gather, in);
    case PICK:
        return run_pick(&c->pick);
    default:
        return g->ops->check(&c->check, in);
    }
}

static void run_command(struct fake_stream *s, struct command *c)
{
    struct fake_gpu *g = s->gpu;
    struct k_stream in = {.device = g->inner};
    if (c->kind == AFTER) {
        if (c->after.stream != NULL)
            run_to(c->after.stream, c->after.mark);
        return;
    }
    show(g, true);
    if (g->failed)
        ; /* nothing runs any more */
    else if (c->kind == UPLOAD || c->kind == FETCH)
        memcpy(k_host_at(c->move.to), c->move.memory, c->move.n);
    else if (c->kind == DOWNLOAD)
        memcpy(c->move.memory, k_host_at(c->move.from), c->move.n);
    else if (c->kind == COPY)
        memmove(k_host_at(c->move.to), k_host_at(c->move.from), c->move.n);
    else if (c->kind == EMBED || c->kind == MATMUL || c->kind == GATE_UP || c->kind == DOWN ||
             c->kind == ARRANGE) {
        if (run_weights(g, c, &in) != ERR_OK)
            die("an operation on weights failed");
    } else if (run_rows(g, c, &in) != ERR_OK)
        die("an operation on rows failed");
    if (c->kind == UPLOAD)
        alloc_free(c->move.memory);
    show(g, false);
}

static void run_to(struct fake_stream *s, uint64_t mark)
{
    while (s->ran < mark) {
        struct command c = s->queue[s->ran % MAX_QUEUE];
        s->ran++;
        run_command(s, &c);
    }
}

static struct command *enqueue(struct fake_stream *s, enum kind kind)
{
    if (s->queued - s->ran == MAX_QUEUE) {
        if (s->captures)
            die("the recording is too long");
        run_to(s, s->queued);
    }
    struct command *c = &s->queue[s->queued++ % MAX_QUEUE];
    memset(c, 0, sizeof(*c));
    c->kind = kind;
    return c;
}

static struct command *push(struct k_stream *stream, enum kind kind)
{
    (void)call(stream_of(stream)->gpu);
    return enqueue(stream_of(stream), kind);
}

/* Runs what was pushed, if the device is eager. */
static enum err_code pushed(struct k_stream *stream)
{
    struct fake_stream *s = stream_of(stream);
    if (s->gpu->options.eager && !s->captures)
        run_to(s, s->queued);
    return ERR_OK;
}

/* ---- operations ---- */

#define OPERATION(name, type, KIND, field)                                   \
    static enum err_code name(const struct type *a, struct k_stream *stream) \
    {                                                                        \
        push(stream, KIND)->field = *a;                                      \
        return pushed(stream);                                               \
    }
OPERATION(embed, k_embed, EMBED, embed)
OPERATION(norm, k_norm, NORM, norm)
OPERATION(quantise, k_quantise, QUANTISE, quantise)
OPERATION(matmul, k_matmul, MATMUL, matmul)
OPERATION(rope, k_rope, ROPE, rope)
OPERATION(kv_write, k_kv_write, KV_WRITE, kv_write)
OPERATION(attention, k_attention, ATTENTION, attention)
OPERATION(add, k_add, ADD, add)
OPERATION(router, k_router, ROUTER, router)
OPERATION(grouping, k_grouping, GROUPING, grouping)
OPERATION(moe_gate_up, k_moe_gate_up, GATE_UP, gate_up)
OPERATION(moe_down, k_moe_down, DOWN, down)
OPERATION(moe_sum, k_moe_sum, SUM, sum)
OPERATION(gather, k_gather, GATHER, gather)
OPERATION(check, k_check, CHECK, check)
OPERATION(pick, k_pick, PICK, pick)
OPERATION(arrange, k_arrange, ARRANGE, arrange)

/* The operations that are several in one. */
static enum err_code enter(const struct k_enter *a, struct k_stream *stream)
{
    enum err_code code = ERR_OK;
    if (a->out.buffer != NULL && a->weights.buffer != NULL)
        code = moe_sum(&(struct k_moe_sum){a->rows, a->weights, a->out, a->x, a->act.n, a->n_used},
                       stream);
    else if (a->out.buffer != NULL)
        code = add(&(struct k_add){a->rows, a->x, a->out, a->act.n}, stream);
    if (code == ERR_OK)
        code =
            norm(&(struct k_norm){a->rows, a->x, a->act.f32, a->norm, a->act.n, 1, a->eps}, stream);
    return code == ERR_OK ? quantise(&(struct k_quantise){a->rows, a->act}, stream) : code;
}

static enum err_code heads(const struct k_heads *a, struct k_stream *stream)
{
    const struct k_kv *kv = &a->kv;
    enum err_code code = ERR_OK;
    for (int i = 0; i < 2 && code == ERR_OK; i++) {
        const struct k_span x = i == 0 ? a->q : a->k, weight = i == 0 ? a->q_norm : a->k_norm;
        const uint32_t n = i == 0 ? a->n_head : kv->n_head_kv;
        if (weight.buffer != NULL)
            code = norm(&(struct k_norm){a->rows, x, x, weight, kv->head_dim, n, a->eps}, stream);
        if (code == ERR_OK)
            code =
                rope(&(struct k_rope){a->rows, x, a->table, n, kv->head_dim, a->rope_dim}, stream);
    }
    return code == ERR_OK ? kv_write(&(struct k_kv_write){a->rows, a->k, a->v, *kv}, stream) : code;
}

static enum err_code attend(const struct k_attention *a, const struct k_act *y,
                            struct k_stream *stream)
{
    const enum err_code code = attention(a, stream);
    if (code != ERR_OK)
        return code;
    return quantise(&(struct k_quantise){.rows = a->rows, .act = *y}, stream);
}

static enum err_code route(const struct k_enter *e, const struct k_matmul *m,
                           const struct k_router *a, const struct k_grouping *g,
                           struct k_stream *stream)
{
    enum err_code code = enter(e, stream);
    if (code == ERR_OK)
        code = matmul(m, stream);
    if (code == ERR_OK)
        code = router(a, stream);
    return code == ERR_OK ? grouping(g, stream) : code;
}

static void upload(struct k_stream *stream, struct k_span to, const void *from, size_t n)
{
    if (n == 0)
        return;
    if (stream_of(stream)->captures)
        die("upload while a graph is recorded");
    if (to.offset + n > to.buffer->bytes)
        die("upload past the end");
    struct command *c = push(stream, UPLOAD);
    c->move.to = to;
    c->move.memory = alloc_get(ALLOC_WORK, n);
    if (c->move.memory == NULL)
        die("no memory");
    memcpy(c->move.memory, from, n);
    c->move.n = n;
    (void)pushed(stream);
}

static void fetch(struct k_stream *stream, struct k_span to, const void *from, size_t n)
{
    if (!is_pinned(stream_of(stream)->gpu, from, n))
        die("fetch from memory that is not pinned");
    struct command *c = push(stream, FETCH);
    c->move.to = to;
    c->move.memory = (void *)(uintptr_t)from;
    c->move.n = n;
    (void)pushed(stream);
}

/* The stand-in arranges in place. */
static enum err_code bring(const struct k_bring *a, struct k_stream *stream)
{
    const struct k_experts *l = &a->layer;
    const enum k_format formats[K_BRING_SLICES] = {l->gate, l->up, l->down};
    enum err_code code = ERR_OK;
    for (uint32_t i = 0; i < a->n * K_BRING_SLICES && code == ERR_OK; i++) {
        const struct k_bring_expert *x = &a->experts[i / K_BRING_SLICES];
        const uint32_t k = i % K_BRING_SLICES;
        const struct k_span to = {l->arena, x->to[k]};
        const struct k_arrange how = {to, to, formats[k], k < 2 ? l->n_ff : l->n_embd,
                                      k < 2 ? l->n_embd : l->n_ff};
        fetch(stream, to, x->from[k], k_format_bytes(how.format, how.n_out, how.n_in));
        code = arrange(&how, stream);
        if (k == 0)
            upload(stream,
                   (struct k_span){l->slots.buffer, l->slots.offset + x->expert * sizeof(x->to)},
                   x->to, sizeof(x->to));
    }
    return code;
}

static void download(struct k_stream *stream, void *to, struct k_span from, size_t n)
{
    if (n == 0)
        return;
    struct command *c = push(stream, DOWNLOAD);
    c->move.from = from;
    c->move.memory = to;
    c->move.n = n;
    (void)pushed(stream);
}

static void copy(struct k_stream *stream, struct k_span to, struct k_span from, size_t n)
{
    struct command *c = push(stream, COPY);
    c->move.to = to;
    c->move.from = from;
    c->move.n = n;
    (void)pushed(stream);
}

/* ---- streams, events, graphs ---- */

static enum err_code stream_new(struct k_device *d, struct k_stream **ret, struct err *e)
{
    struct fake_gpu *g = gpu_of(d);
    g->counts.allocations++;
    if (!call(g))
        return err_set(e, ERR_DEVICE, "the fake device makes no stream");
    struct fake_stream *s = alloc_zero(ALLOC_WORK, 1, sizeof(*s));
    if (s == NULL)
        die("no memory");
    s->gpu = g;
    s->base.device = d;
    *ret = &s->base;
    return ERR_OK;
}

static void stream_free(struct k_stream *stream)
{
    if (stream == NULL)
        return;
    struct fake_stream *s = stream_of(stream);
    run_to(s, s->queued);
    alloc_free(s);
}

static enum err_code wait(struct k_stream *stream)
{
    struct fake_stream *s = stream_of(stream);
    (void)call(s->gpu);
    run_to(s, s->queued);
    return s->gpu->failed ? ERR_DEVICE : ERR_OK;
}

static enum err_code event_new(struct k_device *d, struct k_event **ret, struct err *e)
{
    struct fake_gpu *g = gpu_of(d);
    g->counts.allocations++;
    if (!call(g))
        return err_set(e, ERR_DEVICE, "the fake device makes no event");
    *ret = alloc_zero(ALLOC_WORK, 1, sizeof(**ret));
    return *ret == NULL ? err_set(e, ERR_NOMEM, "no memory") : ERR_OK;
}

static void event_free(struct k_event *v)
{
    alloc_free(v);
}

static void event_record(struct k_event *v, struct k_stream *stream)
{
    struct fake_stream *s = stream_of(stream);
    (void)call(s->gpu);
    *v = (struct k_event){.stream = s, .mark = s->queued};
}

static void event_after(struct k_event *v, struct k_stream *stream)
{
    if (stream_of(stream)->gpu->failed)
        return; /* nothing runs any more, and the other stream may go first */
    push(stream, AFTER)->after = *v;
    (void)pushed(stream);
}

/* A lazy stream goes on by one operation for each question. */
static bool event_passed(struct k_event *v)
{
    struct fake_stream *s = v->stream;
    if (s == NULL || s->gpu->failed)
        return true;
    if (s->ran < v->mark)
        run_to(s, s->ran + 1);
    return s->ran >= v->mark;
}

static double event_us(struct k_event *from, struct k_event *to)
{
    (void)from, (void)to;
    return -1;
}

static enum err_code capture_begin(struct k_stream *stream)
{
    struct fake_stream *s = stream_of(stream);
    if (!call(s->gpu))
        return ERR_DEVICE;
    run_to(s, s->queued);
    s->captures = true;
    s->capture_from = s->queued;
    return ERR_OK;
}

static enum err_code capture_end(struct k_stream *stream, struct k_graph **ret)
{
    struct fake_stream *s = stream_of(stream);
    const uint32_t n = (uint32_t)(s->queued - s->capture_from);
    s->captures = false;
    s->gpu->counts.allocations++;
    s->queued = s->capture_from;
    if (!call(s->gpu))
        return ERR_DEVICE;
    struct k_graph *g = alloc_zero(ALLOC_WORK, 1, sizeof(*g) + n * sizeof(g->commands[0]));
    if (g == NULL)
        die("no memory");
    g->n = n;
    for (uint32_t i = 0; i < n; i++)
        g->commands[i] = s->queue[(s->capture_from + i) % MAX_QUEUE];
    *ret = g;
    return ERR_OK;
}

static enum err_code replay(struct k_graph *g, struct k_stream *stream)
{
    if (!call(stream_of(stream)->gpu))
        return ERR_DEVICE;
    for (uint32_t i = 0; i < g->n; i++)
        *enqueue(stream_of(stream), g->commands[i].kind) = g->commands[i];
    return pushed(stream);
}

static void graph_free(struct k_graph *g)
{
    alloc_free(g);
}

/* ---- the device ---- */

static void memory(struct k_device *d, uint64_t *ret_free, uint64_t *ret_total)
{
    const struct fake_gpu *g = gpu_of(d);
    *ret_total = g->options.memory;
    *ret_free = g->options.memory == 0 ? 0 : g->options.memory - g->used;
}

static bool lost(const struct k_device *d, struct err *ret_why)
{
    const struct fake_gpu *g = (const struct fake_gpu *)(const void *)d;
    if (g->failed)
        (void)err_set(ret_why, ERR_DEVICE, "error %d of the fake device", g->fault.error);
    return g->lost;
}

static const char *describe(const struct k_device *d)
{
    (void)d;
    return "a fake GPU";
}

static const char *bus_id(const struct k_device *d)
{
    (void)d;
    return "0000:01:00.0";
}

static void counts(const struct k_device *d, struct k_counts *ret)
{
    *ret = ((const struct fake_gpu *)(const void *)d)->counts;
}

static void inject(struct k_device *d, const struct k_cuda_fault *fault)
{
    gpu_of(d)->fault = *fault;
}

static uint64_t attention_bytes(const struct k_device *d, uint32_t n_head, uint32_t head_dim,
                                uint32_t max_rows, uint32_t max_pages)
{
    const struct fake_gpu *g = (const struct fake_gpu *)(const void *)d;
    return g->ops->attention_bytes(g->inner, n_head, head_dim, max_rows, max_pages);
}

static void close_gpu(struct k_device *d)
{
    struct fake_gpu *g = gpu_of(d);
    for (uint32_t i = 0; i < MAX_BUFFERS; i++)
        if (g->buffers[i] != NULL)
            die("closed with a buffer left");
    for (uint32_t i = 0; i < MAX_PINNED; i++)
        if (g->pinned[i].at != NULL)
            die("closed with pinned memory left");
    k_close(g->inner);
    alloc_free(g);
}

enum err_code fake_gpu_open(const struct fake_gpu_options *options, struct k_device **ret,
                            struct err *e)
{
    struct fake_gpu *g = alloc_zero(ALLOC_WORK, 1, sizeof(*g));
    if (g == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a fake GPU");
    g->options = *options;
    g->fault = options->fault;
    const enum err_code code = k_open(K_LEVEL_AUTO, THREADS, &g->inner, e);
    if (code != ERR_OK || !call(g)) {
        if (code == ERR_OK)
            k_close(g->inner);
        alloc_free(g);
        return code != ERR_OK ? code : err_set(e, ERR_DEVICE, "the fake device does not open");
    }
    g->ops = k_ops(g->inner);
    g->device = (struct k_device){.threads = 0,
                                  .close = close_gpu,
                                  .ops = {.name = "fake",
                                          .buffer_new = buffer_new,
                                          .buffer_free = buffer_free,
                                          .buffer_host = buffer_host,
                                          .upload = upload,
                                          .download = download,
                                          .copy = copy,
                                          .stream_new = stream_new,
                                          .stream_free = stream_free,
                                          .wait = wait,
                                          .act_bytes = g->ops->act_bytes,
                                          .attention_bytes = attention_bytes,
                                          .embed = embed,
                                          .norm = norm,
                                          .quantise = quantise,
                                          .matmul = matmul,
                                          .rope = rope,
                                          .kv_write = kv_write,
                                          .attention = attention,
                                          .add = add,
                                          .router = router,
                                          .grouping = grouping,
                                          .moe_gate_up = moe_gate_up,
                                          .moe_down = moe_down,
                                          .moe_sum = moe_sum,
                                          .gather = gather,
                                          .check = check,
                                          .arrange = options->no_arrange ? NULL : arrange,
                                          .bring = options->no_bring ? NULL : bring,
                                          .enter = enter,
                                          .heads = heads,
                                          .attend = attend,
                                          .route = route,
                                          .pick = pick,
                                          .pinned_new = pinned_new,
                                          .host_register = host_register,
                                          .host_unregister = host_unregister,
                                          .fetch = fetch,
                                          .range_new = range_new,
                                          .chunks_take = chunks_take,
                                          .chunks_return = chunks_return,
                                          .memory = memory,
                                          .event_new = event_new,
                                          .event_free = event_free,
                                          .event_record = event_record,
                                          .event_after = event_after,
                                          .event_passed = event_passed,
                                          .event_us = event_us,
                                          .capture_begin = capture_begin,
                                          .capture_end = capture_end,
                                          .replay = replay,
                                          .graph_free = graph_free,
                                          .lost = lost,
                                          .describe = describe,
                                          .bus_id = bus_id,
                                          .counts = counts,
                                          .inject = inject}};
    *ret = &g->device;
    return ERR_OK;
}

uint64_t fake_gpu_used(const struct k_device *d)
{
    return ((const struct fake_gpu *)(const void *)d)->used;
}

#include "k_cuda_stream.cuh"

#include <string.h>

#include "k_cuda_entry.h"
#include "k_cuda_memory.cuh"

static const size_t PIECE = K_CUDA_RING_PIECE_BYTES;

struct k_event {
    struct k_device *device;
    cudaEvent_t event;
    bool recorded;
    cudaError_t
        error; /* of the stream when it was recorded: what it was to tell of did not happen */
};

struct k_graph {
    struct k_device *device;
    cudaGraphExec_t exec;
};

/* ---- the ring -------------------------------------------------------------------------------- */

/* Hands out what lies in the piece, whose part of the stream has passed. */
static void drain(struct k_stream *s, uint32_t piece)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s->n_pending; i++) {
        const struct k_cuda_pending *p = &s->pending[i];
        if (p->piece == piece)
            memcpy(p->to, p->from, p->n);
        else
            s->pending[kept++] = *p;
    }
    s->n_pending = kept;
}

/* Waits for everything; the ring is then empty. False: an error, and downloads are forgotten. */
static bool settle(struct k_stream *s)
{
    struct k_cuda *c = k_cuda_of(s->device);
    const bool ok = K_CUDA_CALL(c, s, cudaStreamSynchronize(s->stream)) == cudaSuccess &&
                    s->error == cudaSuccess;
    for (uint32_t i = 0; ok && i < s->n_pending; i++)
        memcpy(s->pending[i].to, s->pending[i].from, s->pending[i].n);
    s->n_pending = 0;
    memset(s->left, 0, sizeof s->left);
    s->piece = s->used = 0;
    return ok;
}

/* n <= K_CUDA_RING_PIECE_BYTES bytes of the ring; NULL: an error. */
static uint8_t *ring_take(struct k_stream *s, size_t n)
{
    struct k_cuda *c = k_cuda_of(s->device);
    if (s->used + n > K_CUDA_RING_PIECE_BYTES) {
        if (K_CUDA_CALL(c, s, cudaEventRecord(s->passed[s->piece], s->stream)) != cudaSuccess)
            return NULL;
        s->left[s->piece] = true;
        s->piece = (s->piece + 1) % K_CUDA_RING_PIECES;
        s->used = 0;
        if (s->left[s->piece]) {
            if (K_CUDA_CALL(c, s, cudaEventSynchronize(s->passed[s->piece])) != cudaSuccess)
                return NULL;
            drain(s, s->piece);
            s->left[s->piece] = false;
        }
    }
    uint8_t *p = s->ring + (size_t)s->piece * K_CUDA_RING_PIECE_BYTES + s->used;
    s->used += (uint32_t)((n + 63) / 64 * 64);
    return p;
}

/* ---- copies ---------------------------------------------------------------------------------- */

static void move(struct k_stream *s, void *to, const void *from, size_t n)
{
    if (n > 0 && s->error == cudaSuccess)
        (void)K_CUDA_CALL(k_cuda_of(s->device), s,
                          cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, s->stream));
}

static void copy(struct k_stream *s, struct k_span to, struct k_span from, size_t n)
{
    move(s, k_cuda_at(to), k_cuda_at(from), n);
}

static void fetch(struct k_stream *s, struct k_span to, const void *from, size_t n)
{
    move(s, k_cuda_at(to), from, n);
}

/* Through the ring: the host's memory is read now, not when the stream gets there. A recorded copy
 * would read the ring as it is at the replay, so there it is an error. */
static void upload(struct k_stream *s, struct k_span to, const void *from, size_t n)
{
    uint8_t *at = (uint8_t *)k_cuda_at(to);
    const uint8_t *source = (const uint8_t *)from;
    if (s->capturing)
        (void)k_cuda_device_book(k_cuda_of(s->device), s, cudaErrorStreamCaptureUnsupported,
                                 "upload while a graph is recorded");
    while (n > 0 && s->error == cudaSuccess) {
        const size_t part = n < PIECE ? n : PIECE;
        uint8_t *ring = ring_take(s, part);
        if (ring == NULL)
            return;
        memcpy(ring, source, part);
        move(s, at, ring, part);
        at += part;
        source += part;
        n -= part;
    }
}

static void download(struct k_stream *s, void *to, struct k_span from, size_t n)
{
    const uint8_t *at = (const uint8_t *)k_cuda_at(from);
    uint8_t *target = (uint8_t *)to;
    if (k_cuda_memory_is_pinned(k_cuda_of(s->device), to, n)) {
        move(s, to, at, n);
        return;
    }
    if (s->capturing)
        (void)k_cuda_device_book(k_cuda_of(s->device), s, cudaErrorStreamCaptureUnsupported,
                                 "download to memory that is not pinned while a graph is recorded");
    while (n > 0 && s->error == cudaSuccess) {
        const size_t part = n < PIECE ? n : PIECE;
        if (s->n_pending == K_CUDA_MAX_PENDING && !settle(s))
            return;
        uint8_t *ring = ring_take(s, part);
        if (ring == NULL)
            return;
        move(s, ring, at, part);
        struct k_cuda_pending *p = &s->pending[s->n_pending++];
        p->to = target;
        p->from = ring;
        p->n = part;
        p->piece = s->piece;
        at += part;
        target += part;
        n -= part;
    }
}

/* ---- streams --------------------------------------------------------------------------------- */

static void stream_free(struct k_stream *s)
{
    if (s == NULL)
        return;
    if (s->stream != NULL)
        (void)cudaStreamSynchronize(s->stream);
    for (uint32_t i = 0; i < K_CUDA_RING_PIECES; i++)
        if (s->passed[i] != NULL)
            (void)cudaEventDestroy(s->passed[i]);
    (void)cudaFreeHost(s->ring);
    (void)cudaFree(s->words);
    if (s->stream != NULL)
        (void)cudaStreamDestroy(s->stream);
    k_cuda_of(s->device)->heap->free(s);
}

static enum err_code stream_new(struct k_device *d, struct k_stream **ret, struct err *e)
{
    struct k_cuda *c = k_cuda_of(d);
    struct k_stream *s = (struct k_stream *)c->heap->zero(sizeof *s);
    if (s == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a stream");
    s->device = d;
    cudaError_t result = K_CUDA_CALL(c, NULL, cudaSetDevice(c->ordinal));
    if (result == cudaSuccess)
        result = K_CUDA_CALL(c, NULL, cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking));
    if (result == cudaSuccess)
        result = K_CUDA_CALL(c, NULL,
                             cudaHostAlloc((void **)&s->ring,
                                           K_CUDA_RING_PIECES * K_CUDA_RING_PIECE_BYTES,
                                           cudaHostAllocPortable));
    if (result == cudaSuccess)
        result = K_CUDA_CALL(c, NULL, cudaMalloc(&s->words, K_CUDA_ROUTE_WORDS * sizeof *s->words));
    if (result == cudaSuccess)
        result = K_CUDA_CALL(
            c, NULL,
            cudaMemsetAsync(s->words, 0, K_CUDA_ROUTE_WORDS * sizeof *s->words, s->stream));
    for (uint32_t i = 0; i < K_CUDA_RING_PIECES && result == cudaSuccess; i++)
        result =
            K_CUDA_CALL(c, NULL, cudaEventCreateWithFlags(&s->passed[i], cudaEventDisableTiming));
    if (result != cudaSuccess) {
        stream_free(s);
        return err_set(e, result == cudaErrorMemoryAllocation ? ERR_NOMEM : ERR_DEVICE,
                       "making a stream on the GPU: %s (CUDA error %d)", cudaGetErrorString(result),
                       (int)result);
    }
    c->counts.allocations++;
    *ret = s;
    return ERR_OK;
}

static enum err_code wait(struct k_stream *s)
{
    const bool ok = settle(s);
    s->error = cudaSuccess;
    return ok ? ERR_OK : ERR_DEVICE;
}

/* ---- events ---------------------------------------------------------------------------------- */

static enum err_code event_new(struct k_device *d, struct k_event **ret, struct err *e)
{
    struct k_cuda *c = k_cuda_of(d);
    struct k_event *v = (struct k_event *)c->heap->zero(sizeof *v);
    if (v == NULL)
        return err_set(e, ERR_NOMEM, "no memory for an event");
    v->device = d;
    const cudaError_t result = K_CUDA_CALL(c, NULL, cudaEventCreate(&v->event));
    if (result != cudaSuccess) {
        c->heap->free(v);
        return err_set(e, result == cudaErrorMemoryAllocation ? ERR_NOMEM : ERR_DEVICE,
                       "making an event on the GPU: %s (CUDA error %d)", cudaGetErrorString(result),
                       (int)result);
    }
    c->counts.allocations++;
    *ret = v;
    return ERR_OK;
}

static void event_free(struct k_event *v)
{
    if (v == NULL)
        return;
    (void)cudaEventDestroy(v->event);
    k_cuda_of(v->device)->heap->free(v);
}

static void event_record(struct k_event *v, struct k_stream *s)
{
    v->recorded = true;
    if (s->error == cudaSuccess)
        (void)K_CUDA_CALL(k_cuda_of(s->device), s, cudaEventRecord(v->event, s->stream));
    v->error = s->error;
}

static void event_after(struct k_event *v, struct k_stream *s)
{
    if (!v->recorded || s->error != cudaSuccess)
        return;
    if (v->error != cudaSuccess)
        s->error = v->error;
    else
        (void)K_CUDA_CALL(k_cuda_of(s->device), s, cudaStreamWaitEvent(s->stream, v->event, 0));
}

static bool event_passed(struct k_event *v)
{
    struct k_cuda *c = k_cuda_of(v->device);
    cudaError_t result = cudaSuccess;
    if (!v->recorded)
        return true;
    if (v->error != cudaSuccess)
        return c->lost;
    if (k_cuda_device_may(c, &result))
        result = cudaEventQuery(v->event);
    if (result == cudaErrorNotReady)
        return false;
    return k_cuda_device_book(c, NULL, result, "cudaEventQuery") == cudaSuccess || c->lost;
}

static double event_us(struct k_event *from, struct k_event *to)
{
    float ms = 0.0f;
    if (!from->recorded || !to->recorded ||
        K_CUDA_CALL(k_cuda_of(from->device), NULL,
                    cudaEventElapsedTime(&ms, from->event, to->event)) != cudaSuccess)
        return -1.0;
    return 1000.0 * (double)ms;
}

/* ---- graphs ---------------------------------------------------------------------------------- */

/* Relaxed: memory may be taken and other streams used meanwhile, by this thread too. */
static enum err_code capture_begin(struct k_stream *s)
{
    struct k_cuda *c = k_cuda_of(s->device);
    if (s->error != cudaSuccess ||
        K_CUDA_CALL(c, s, cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeRelaxed)) !=
            cudaSuccess)
        return ERR_DEVICE;
    s->capturing = true;
    return ERR_OK;
}

static void graph_free(struct k_graph *g)
{
    if (g == NULL)
        return;
    if (g->exec != NULL)
        (void)cudaGraphExecDestroy(g->exec);
    k_cuda_of(g->device)->heap->free(g);
}

static enum err_code capture_end(struct k_stream *s, struct k_graph **ret)
{
    struct k_cuda *c = k_cuda_of(s->device);
    struct k_graph *g = NULL;
    cudaGraph_t graph = NULL;
    enum err_code code = ERR_DEVICE;
    s->capturing = false;
    /* Also after an error: the stream must leave its state. */
    const cudaError_t result = cudaStreamEndCapture(s->stream, &graph);
    if (k_cuda_device_book(c, s, result, "cudaStreamEndCapture") != cudaSuccess ||
        s->error != cudaSuccess)
        goto out;
    g = (struct k_graph *)c->heap->zero(sizeof *g);
    if (g == NULL) {
        code = ERR_NOMEM;
        goto out;
    }
    g->device = s->device;
    if (K_CUDA_CALL(c, s, cudaGraphInstantiate(&g->exec, graph, 0)) != cudaSuccess ||
        K_CUDA_CALL(c, s, cudaGraphUpload(g->exec, s->stream)) != cudaSuccess)
        goto out;
    c->counts.allocations++;
    *ret = g;
    g = NULL;
    code = ERR_OK;
out:
    graph_free(g);
    if (graph != NULL)
        (void)cudaGraphDestroy(graph);
    return code;
}

static enum err_code replay(struct k_graph *g, struct k_stream *s)
{
    if (s->error != cudaSuccess ||
        K_CUDA_CALL(k_cuda_of(s->device), s, cudaGraphLaunch(g->exec, s->stream)) != cudaSuccess)
        return ERR_DEVICE;
    return ERR_OK;
}

void k_cuda_stream_fill(struct k_ops *ret)
{
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
}

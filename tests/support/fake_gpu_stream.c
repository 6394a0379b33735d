#include "fake_gpu_stream.h"

#include <string.h>

#include "alloc.h"
#include "fake_gpu_run.h"

static void run_to(struct fake_stream *s, uint64_t mark)
{
    while (s->ran < mark) {
        struct fake_command c = s->queue[s->ran % MAX_QUEUE];
        s->ran++;
        if (c.kind != AFTER)
            fake_gpu_run_command(s->gpu, &c);
        else if (c.after.stream != NULL)
            run_to(c.after.stream, c.after.mark);
    }
}

static struct fake_command *enqueue(struct fake_stream *s, enum fake_kind kind)
{
    if (s->queued - s->ran == MAX_QUEUE) {
        if (s->captures)
            fake_gpu_die("the recording is too long");
        run_to(s, s->queued);
    }
    struct fake_command *c = &s->queue[s->queued++ % MAX_QUEUE];
    memset(c, 0, sizeof(*c));
    c->kind = kind;
    return c;
}

struct fake_command *fake_gpu_stream_push(struct k_stream *stream, enum fake_kind kind)
{
    (void)fake_gpu_call(fake_stream_of(stream)->gpu);
    return enqueue(fake_stream_of(stream), kind);
}

enum err_code fake_gpu_stream_pushed(struct k_stream *stream)
{
    struct fake_stream *s = fake_stream_of(stream);
    if (s->gpu->options.eager && !s->captures)
        run_to(s, s->queued);
    return ERR_OK;
}

static enum err_code stream_new(struct k_device *d, struct k_stream **ret, struct err *e)
{
    struct fake_gpu *g = fake_gpu_of(d);
    g->counts.allocations++;
    if (!fake_gpu_call(g))
        return err_set(e, ERR_DEVICE, "the fake device makes no stream");
    struct fake_stream *s = alloc_zero(ALLOC_WORK, 1, sizeof(*s));
    if (s == NULL)
        fake_gpu_die("no memory");
    s->gpu = g;
    s->base.device = d;
    *ret = &s->base;
    return ERR_OK;
}

static void stream_free(struct k_stream *stream)
{
    if (stream == NULL)
        return;
    struct fake_stream *s = fake_stream_of(stream);
    run_to(s, s->queued);
    alloc_free(s);
}

static enum err_code wait(struct k_stream *stream)
{
    struct fake_stream *s = fake_stream_of(stream);
    (void)fake_gpu_call(s->gpu);
    run_to(s, s->queued);
    return s->gpu->failed ? ERR_DEVICE : ERR_OK;
}

static enum err_code event_new(struct k_device *d, struct k_event **ret, struct err *e)
{
    struct fake_gpu *g = fake_gpu_of(d);
    g->counts.allocations++;
    if (!fake_gpu_call(g))
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
    struct fake_stream *s = fake_stream_of(stream);
    (void)fake_gpu_call(s->gpu);
    *v = (struct k_event){.stream = s, .mark = s->queued};
}

static void event_after(struct k_event *v, struct k_stream *stream)
{
    if (fake_stream_of(stream)->gpu->failed)
        return; /* nothing runs any more, and the other stream may go first */
    fake_gpu_stream_push(stream, AFTER)->after = *v;
    (void)fake_gpu_stream_pushed(stream);
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
    struct fake_stream *s = fake_stream_of(stream);
    if (!fake_gpu_call(s->gpu))
        return ERR_DEVICE;
    run_to(s, s->queued);
    s->captures = true;
    s->capture_from = s->queued;
    return ERR_OK;
}

static enum err_code capture_end(struct k_stream *stream, struct k_graph **ret)
{
    struct fake_stream *s = fake_stream_of(stream);
    const uint32_t n = (uint32_t)(s->queued - s->capture_from);
    s->captures = false;
    s->gpu->counts.allocations++;
    s->queued = s->capture_from;
    if (!fake_gpu_call(s->gpu))
        return ERR_DEVICE;
    struct k_graph *g = alloc_zero(ALLOC_WORK, 1, sizeof(*g) + n * sizeof(g->commands[0]));
    if (g == NULL)
        fake_gpu_die("no memory");
    g->n = n;
    for (uint32_t i = 0; i < n; i++)
        g->commands[i] = s->queue[(s->capture_from + i) % MAX_QUEUE];
    *ret = g;
    return ERR_OK;
}

static enum err_code replay(struct k_graph *g, struct k_stream *stream)
{
    if (!fake_gpu_call(fake_stream_of(stream)->gpu))
        return ERR_DEVICE;
    for (uint32_t i = 0; i < g->n; i++)
        *enqueue(fake_stream_of(stream), g->commands[i].kind) = g->commands[i];
    return fake_gpu_stream_pushed(stream);
}

static void graph_free(struct k_graph *g)
{
    alloc_free(g);
}

void fake_gpu_stream_fill(struct k_ops *ops)
{
    ops->stream_new = stream_new;
    ops->stream_free = stream_free;
    ops->wait = wait;
    ops->event_new = event_new;
    ops->event_free = event_free;
    ops->event_record = event_record;
    ops->event_after = event_after;
    ops->event_passed = event_passed;
    ops->event_us = event_us;
    ops->capture_begin = capture_begin;
    ops->capture_end = capture_end;
    ops->replay = replay;
    ops->graph_free = graph_free;
}

#include "fake_gpu.h"

#include <stdio.h>
#include <stdlib.h>

#include "alloc.h"
#include "fake_gpu_inner.h"
#include "fake_gpu_memory.h"
#include "fake_gpu_ops.h"
#include "fake_gpu_stream.h"

enum {
    THREADS = 2,
    MEMORY_ERROR = 2,
    LOST_FROM = 700
};

void fake_gpu_die(const char *what)
{
    fprintf(stderr, "fake_gpu: %s\n", what);
    abort();
}

bool fake_gpu_call(struct fake_gpu *g)
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
    fake_gpu_of(d)->fault = *fault;
}

static uint64_t attention_bytes(const struct k_device *d, uint32_t n_head, uint32_t head_dim,
                                uint32_t max_rows, uint32_t max_pages)
{
    const struct fake_gpu *g = (const struct fake_gpu *)(const void *)d;
    return g->ops->attention_bytes(g->inner, n_head, head_dim, max_rows, max_pages);
}

static void close_gpu(struct k_device *d)
{
    struct fake_gpu *g = fake_gpu_of(d);
    fake_gpu_memory_check_empty(g);
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
    if (code != ERR_OK || !fake_gpu_call(g)) {
        if (code == ERR_OK)
            k_close(g->inner);
        alloc_free(g);
        return code != ERR_OK ? code : err_set(e, ERR_DEVICE, "the fake device does not open");
    }
    g->ops = k_ops(g->inner);
    g->device = (struct k_device){.threads = 0, .close = close_gpu, .ops = {.name = "fake"}};
    struct k_ops *ops = &g->device.ops;
    ops->act_bytes = g->ops->act_bytes;
    ops->attention_bytes = attention_bytes;
    ops->lost = lost;
    ops->describe = describe;
    ops->bus_id = bus_id;
    ops->counts = counts;
    ops->inject = inject;
    fake_gpu_memory_fill(ops);
    fake_gpu_stream_fill(ops);
    fake_gpu_ops_fill(options, ops);
    *ret = &g->device;
    return ERR_OK;
}

uint64_t fake_gpu_used(const struct k_device *d)
{
    return ((const struct fake_gpu *)(const void *)d)->used;
}

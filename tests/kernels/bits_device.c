/* What a device with memory of its own has beyond operations: copies of all sizes, pinned memory,
 * ranges, events, recordings, and calls that fail. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "bits.h"

enum {
    MOST = 6 << 20 /* bytes of a copy: more than the ring that small ones go through */
};

static uint8_t *noise(struct bits_random *r, size_t n)
{
    uint8_t *p = malloc(n + 8);
    if (p == NULL)
        abort();
    for (size_t i = 0; i < n; i += 8) {
        const uint64_t x = bits_next(r);
        memcpy(p + i, &x, 8);
    }
    return p;
}

static bool same(struct bits_run *run, const char *what, const void *a, const void *b, size_t n)
{
    run->compared += n;
    if (memcmp(a, b, n) == 0)
        return true;
    printf("device: %s of %zu bytes gave others\n", what, n);
    return false;
}

static struct k_span buffer(struct bits_side *side, uint64_t n)
{
    struct k_span span = {0};
    struct err e = {0};
    if (side->ops->buffer_new(side->device, n, &span.buffer, &e) != ERR_OK) {
        printf("%s\n", e.text);
        exit(1);
    }
    return span;
}

/* Many uploads and downloads of all sizes in one go, the caller's memory overwritten at once. */
static bool copies(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    struct bits_side *side = &run->tried;
    const uint32_t n = bits_between(r, 1, bits_below(r, 4) == 0 ? 600 : 20);
    const size_t each = n > 20 ? bits_between(r, 1, 9000) : bits_between(r, 1, MOST / n);
    uint8_t *want = noise(r, each * n), *got = calloc(n, each), *scratch = malloc(each);
    if (got == NULL || scratch == NULL)
        abort();
    const struct k_span x = buffer(side, each * n), y = buffer(side, each * n);
    for (uint32_t i = 0; i < n; i++) {
        memcpy(scratch, want + each * i, each);
        side->ops->upload(side->stream, (struct k_span){x.buffer, each * i}, scratch, each);
        memset(scratch, 0xee, each);
    }
    side->ops->copy(side->stream, y, x, each * n);
    for (uint32_t i = 0; i < n; i++)
        side->ops->download(side->stream, got + each * i, (struct k_span){y.buffer, each * i},
                            each);
    bool ok = bits_done(side, "wait", side->ops->wait(side->stream));
    ok = ok && same(run, "upload, copy and download", want, got, each * n);
    side->ops->buffer_free(x.buffer);
    side->ops->buffer_free(y.buffer);
    free(want);
    free(got);
    free(scratch);
    return ok;
}

/* Fetches recorded in a graph read pinned and registered memory as it is at each replay; another
 * stream goes on behind them. */
static bool fetches(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    struct bits_side *side = &run->tried;
    const struct k_ops *ops = side->ops;
    const size_t n = 4096 * bits_between(r, 1, 200);
    struct err e = {0};
    struct k_buffer *pinned = NULL;
    struct k_stream *other = NULL;
    struct k_event *event = NULL;
    struct k_graph *graph = NULL;
    uint8_t *memory = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || ops->host_register(side->device, memory, n, &e) != ERR_OK ||
        ops->pinned_new(side->device, n, &pinned, &e) != ERR_OK ||
        ops->stream_new(side->device, &other, &e) != ERR_OK ||
        ops->event_new(side->device, &event, &e) != ERR_OK) {
        printf("device: %s\n", e.text);
        return false;
    }
    const struct k_span x = buffer(side, 2 * n), y = buffer(side, 2 * n);
    bool ok = bits_done(side, "capture_begin", ops->capture_begin(side->stream));
    ops->fetch(side->stream, x, memory, n);
    ops->fetch(side->stream, (struct k_span){x.buffer, n}, ops->buffer_host(pinned), n);
    ok = ok && bits_done(side, "capture_end", ops->capture_end(side->stream, &graph));
    for (int i = 0; i < 3 && ok; i++) {
        uint8_t *want = noise(r, 2 * n), *got = malloc(2 * n);
        if (got == NULL)
            abort();
        memcpy(memory, want, n);
        memcpy(ops->buffer_host(pinned), want + n, n);
        ok = bits_done(side, "replay", ops->replay(graph, side->stream));
        ops->event_record(event, side->stream);
        ops->event_after(event, other);
        ops->copy(other, y, x, 2 * n);
        ops->download(other, got, y, 2 * n);
        ok = bits_done(side, "wait", ops->wait(other)) && ok;
        ok = ok && ops->event_passed(event) && same(run, "fetch", want, got, 2 * n);
        ok = bits_done(side, "wait", ops->wait(side->stream)) && ok;
        free(want);
        free(got);
    }
    ops->graph_free(graph);
    ops->event_free(event);
    ops->stream_free(other);
    ops->buffer_free(pinned);
    ops->host_unregister(side->device, memory);
    munmap(memory, n);
    ops->buffer_free(x.buffer);
    ops->buffer_free(y.buffer);
    return ok;
}

enum {
    LAST_BYTES = 3 << 20 /* of the last chunk */
};

/* Chunks keep their bytes while others come and go. */
static bool ranges(struct bits_run *run)
{
    struct bits_side *side = &run->tried;
    const struct k_ops *ops = side->ops;
    const size_t n = 100000;
    struct err e = {0};
    struct k_buffer *range = NULL;
    uint8_t *want = noise(&run->random, n), *got = calloc(1, n);
    if (got == NULL)
        abort();
    bool ok = ops->range_new(side->device, UINT64_C(5) * K_CHUNK_BYTES + LAST_BYTES, &range, &e) ==
                  ERR_OK &&
              ops->chunks_take(range, 1, 2, &e) == ERR_OK;
    if (!ok)
        printf("device: %s\n", e.text);
    const struct k_span across = {range, UINT64_C(2) * K_CHUNK_BYTES - n / 2};
    const struct k_span last = {range, UINT64_C(5) * K_CHUNK_BYTES - n / 2}; /* and the short one */
    for (int i = 0; i < 3 && ok; i++) {
        if (i == 0)
            ops->upload(side->stream, across, want, n);
        ok = ops->chunks_take(range, 4, 2, &e) == ERR_OK;
        ops->copy(side->stream, last, across, n);
        ops->download(side->stream, got, last, n);
        ok = ok && bits_done(side, "wait", ops->wait(side->stream));
        ops->chunks_return(range, 4, 2);
        ok = ok && same(run, "a range", want, got, n);
    }
    ok = ok && ops->chunks_take(range, 1, 1, &e) == ERR_ARGUMENT;
    ops->buffer_free(range);
    free(want);
    free(got);
    return ok;
}

/* The nth call from now fails with an error that the device survives: the code says so once, and
 * then everything works. */
static bool faults(struct bits_run *run)
{
    struct bits_side *side = &run->tried;
    const uint64_t nth = bits_between(&run->random, 1, 12);
    uint8_t bytes[64] = {1, 2, 3}, got[64] = {0};
    side->ops->inject(side->device, &(struct k_cuda_fault){.nth = nth, .error = 2});
    struct k_counts before, after;
    side->ops->counts(side->device, &before);
    struct err e = {0};
    struct k_span x = {0};
    enum err_code code = side->ops->buffer_new(side->device, sizeof bytes, &x.buffer, &e);
    if (code == ERR_OK) {
        side->ops->upload(side->stream, x, bytes, sizeof bytes);
        side->ops->download(side->stream, got, x, sizeof got);
        code = side->ops->wait(side->stream);
        side->ops->counts(side->device, &after);
    }
    side->ops->inject(side->device, &(struct k_cuda_fault){0});
    side->ops->buffer_free(x.buffer);
    const bool due = code != ERR_OK || after.calls - before.calls >= nth;
    if (due != (code != ERR_OK) || side->ops->lost(side->device, NULL)) {
        printf("device: call %llu was to fail, the code is %s\n", (unsigned long long)nth,
               err_code_name(code));
        return false;
    }
    return code != ERR_OK || same(run, "a copy", bytes, got, sizeof got);
}

/* A copy fails in a way that the device survives: who waits for it on another stream learns of it,
 * once. */
static bool carried(struct bits_run *run)
{
    struct bits_side *side = &run->tried;
    const struct k_ops *ops = side->ops;
    struct err e = {0};
    struct k_stream *other = NULL;
    struct k_event *event = NULL;
    if (ops->stream_new(side->device, &other, &e) != ERR_OK ||
        ops->event_new(side->device, &event, &e) != ERR_OK) {
        printf("device: %s\n", e.text);
        return false;
    }
    const struct k_span x = buffer(side, 4096), y = buffer(side, 4096);
    const bool early = bits_below(&run->random, 2);
    ops->inject(side->device, &(struct k_cuda_fault){.nth = 1, .error = 2});
    ops->copy(side->stream, y, x, 4096);
    ops->event_record(event, side->stream);
    bool ok = !ops->event_passed(event);
    if (early) /* the one that failed was waited for before the other one is told */
        ok &= ops->wait(side->stream) == ERR_DEVICE;
    ops->event_after(event, other);
    ops->copy(other, x, y, 4096);
    ok &= ops->wait(other) == ERR_DEVICE && ops->wait(other) == ERR_OK;
    if (!early)
        ok &= ops->wait(side->stream) == ERR_DEVICE;
    ops->event_record(event, side->stream);
    ops->event_after(event, other);
    ok &= ops->wait(other) == ERR_OK && ops->event_passed(event) && !ops->lost(side->device, NULL);
    if (!ok)
        printf("device: who waits for a copy that failed does not learn of it, or twice\n");
    run->compared++;
    ops->event_free(event);
    ops->stream_free(other);
    ops->buffer_free(x.buffer);
    ops->buffer_free(y.buffer);
    return ok;
}

bool bits_device(struct bits_run *run)
{
    static bits_case *const kinds[] = {copies, fetches, ranges, faults, carried};
    return kinds[bits_below(&run->random, 5)](run) && copies(run);
}

#include "engine_calibrate.h"

#include "engine_rates.h"

enum {
    MOST_BYTES = 32 << 20, /* of a copy */
    PASSES = 3,
    SYNCS = 8,
    RAM_NS = 20 * 1000 * 1000
};

/* Share of the rate at which the CPU reads RAM that it computes experts with, and how much faster it
 * is a row where many rows share the reading. */
#define CPU_SHARE 0.85
#define CPU_ROWS  2.0

struct measure {
    const struct k_ops *ops;
    struct k_stream *stream;
    struct k_buffer *memory; /* of the GPU */
    const uint8_t *arena;    /* of the CPU */
    bool pinned;
    uint64_t bytes;
    struct ticks ticks;
};

static void over_link(const struct measure *m)
{
    const struct k_span to = {m->memory, 0};
    if (m->pinned)
        m->ops->fetch(m->stream, to, m->arena, m->bytes);
    else
        m->ops->upload(m->stream, to, m->arena, m->bytes);
}

static void inside(const struct measure *m)
{
    const uint64_t half = m->bytes / 2;
    m->ops->copy(m->stream, (struct k_span){m->memory, half}, (struct k_span){m->memory, 0}, half);
}

static void tell(const struct measure *m)
{
    uint64_t word;
    for (int i = 0; i < SYNCS; i++) {
        m->ops->download(m->stream, &word, (struct k_span){m->memory, 0}, sizeof(word));
        if (m->ops->wait(m->stream) != ERR_OK)
            return;
    }
}

/* The shortest time of some passes in nanoseconds. */
static enum err_code shortest(const struct measure *m, void (*work)(const struct measure *m),
                              double *ret)
{
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < PASSES; i++) {
        const uint64_t start = ticks_ns(m->ticks);
        work(m);
        const enum err_code code = m->ops->wait(m->stream);
        if (code != ERR_OK)
            return code;
        const uint64_t ns = ticks_ns(m->ticks) - start + 1;
        best = ns < best ? ns : best;
    }
    *ret = (double)best;
    return ERR_OK;
}

enum err_code engine_calibrate(struct k_device *cpu, struct engine_islands *is, struct ticks ticks,
                               struct engine_split_rates *ret, struct err *e)
{
    const struct tier_ram *ram = &is->experts->ram;
    struct measure m = {.ops = is->vram.ops,
                        .stream = is->vram.stream,
                        .memory = is->vram.memory,
                        .arena = ram->ops->buffer_host(ram->arena),
                        .pinned = is->pinned,
                        .bytes = is->vram.staging, /* islands and transit area */
                        .ticks = ticks};
    double link = 0, gpu = 0, sync = 0, read = 0;
    m.bytes = m.bytes < ram->bytes ? m.bytes : ram->bytes;
    m.bytes = (m.bytes < MOST_BYTES ? m.bytes : MOST_BYTES) / 4096 * 4096;
    enum err_code code = shortest(&m, over_link, &link);
    if (code == ERR_OK)
        code = shortest(&m, inside, &gpu);
    if (code == ERR_OK)
        code = shortest(&m, tell, &sync);
    if (code != ERR_OK)
        return err_set(e, code, "the GPU failed while its speed was measured");
    code = engine_rates_ram(cpu, MOST_BYTES, RAM_NS, ticks, &read, e);
    if (code != ERR_OK)
        return code;
    *ret = (struct engine_split_rates){.link = 1e9 * (double)m.bytes / link,
                                       .cpu = CPU_SHARE * read,
                                       .cpu_row = CPU_SHARE * CPU_ROWS * read,
                                       .gpu = 1e9 * (double)m.bytes / gpu, /* read or written */
                                       .sync_ns = sync / SYNCS};
    return ERR_OK;
}

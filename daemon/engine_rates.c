#include "engine_rates.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "alloc.h"
#include "engine_experts.h"
#include "rng.h"

enum {
    PASSES = 3,
    ARENA_BYTES = 256 << 20, /* of the reads at a time; one expert if that is larger */
    STRIDE = 32,             /* words read between two prefetches */
    DISTANCE = 256           /* words that the prefetch is ahead */
};

/* ---- RAM ---- */

struct reader {
    const uint64_t *data;
    size_t n;
    uint64_t sum; /* keeps the loads */
    pthread_t thread;
};

static void *read_words(void *context)
{
    struct reader *r = context;
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (size_t i = 0; i + STRIDE <= r->n; i += STRIDE) {
        __builtin_prefetch(r->data + i + DISTANCE);
        for (size_t k = 0; k < STRIDE; k += 4) {
            a += r->data[i + k];
            b += r->data[i + k + 1];
            c += r->data[i + k + 2];
            d += r->data[i + k + 3];
        }
    }
    r->sum = a + b + c + d;
    return NULL;
}

/* One pass over [n_words]; the last part is this thread's own. A thread that cannot be started
 * leaves its part to this one. */
static void read_once(struct reader *readers, uint32_t threads, const uint64_t *data,
                      size_t n_words)
{
    const size_t each = n_words / threads / STRIDE * STRIDE;
    bool started[K_MAX_THREADS] = {false};
    for (uint32_t t = 0; t < threads; t++) {
        readers[t] = (struct reader){.data = data + each * t, .n = each};
        started[t] = t + 1 < threads &&
                     pthread_create(&readers[t].thread, NULL, read_words, &readers[t]) == 0;
    }
    for (uint32_t t = threads; t-- > 0;)
        if (!started[t])
            read_words(&readers[t]);
    for (uint32_t t = 0; t < threads; t++)
        if (started[t])
            pthread_join(readers[t].thread, NULL);
}

enum err_code engine_rates_ram(struct k_device *device, uint64_t bytes, uint64_t limit_ns,
                               struct ticks ticks, double *ret, struct err *e)
{
    struct k_buffer *buffer = NULL;
    struct reader *readers = alloc_zero(ALLOC_WORK, K_MAX_THREADS, sizeof(*readers));
    enum err_code code = readers == NULL ? err_set(e, ERR_NOMEM, "no memory for measuring")
                                         : k_ops(device)->buffer_new(device, bytes, &buffer, e);
    double best = 0;
    const uint64_t start = ticks_ns(ticks);
    if (code == ERR_OK)
        memset(k_ops(device)->buffer_host(buffer), 1, bytes);
    for (int pass = 0; pass < PASSES && code == ERR_OK; pass++) {
        const uint64_t began = ticks_ns(ticks);
        if (pass > 0 && began - start > limit_ns)
            break;
        read_once(readers, k_threads(device), k_ops(device)->buffer_host(buffer), bytes / 8);
        const double rate = (double)bytes * 1e9 / (double)(ticks_ns(ticks) - began + 1);
        best = rate > best ? rate : best;
    }
    if (code == ERR_OK)
        *ret = best;
    if (buffer != NULL)
        k_ops(device)->buffer_free(buffer);
    alloc_free(readers);
    return code;
}

/* ---- SSD ---- */

struct sample {
    const struct model *m;
    struct tier_ssd *ssd;
    uint32_t *order; /* [n] experts of all layers, drawn at random */
    uint32_t n, next;
    uint32_t slots; /* reads of experts at a time */
    uint64_t slot_bytes;
    uint64_t pages, pages_cached; /* looked at before they were read */
    bool cached_unknown;
};

/* Pages of a part in the page cache. Others' files are said to be all there: they are not asked. */
static void count_cached(struct sample *s, const struct tier_ssd_part *p)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), start = p->offset - p->offset % page;
    const size_t n = (size_t)((p->offset + p->bytes - start + page - 1) / page);
    const int fd = s->m->file->fds[p->file];
    unsigned char state[512];
    struct stat about;
    if (fstat(fd, &about) != 0 || about.st_uid != geteuid()) {
        s->cached_unknown = true;
        return;
    }
    char *at = mmap(NULL, n * page, PROT_READ, MAP_SHARED, fd, (off_t)start);
    if (at == MAP_FAILED) {
        s->cached_unknown = true;
        return;
    }
    for (size_t i = 0; i < n; i += sizeof(state)) {
        const size_t count = n - i < sizeof(state) ? n - i : sizeof(state);
        if (mincore(at + i * page, count * page, state) != 0)
            break;
        s->pages += count;
        for (size_t k = 0; k < count; k++)
            s->pages_cached += state[k] & 1;
    }
    munmap(at, n * page);
}

static void start_next(struct sample *s, uint64_t slot)
{
    struct tier_ssd_part parts[TIER_SSD_PARTS];
    const uint32_t id = s->order[s->next++], n_expert = s->m->shape.n_expert;
    model_expert_parts(s->m, id / n_expert, id % n_expert, slot * s->slot_bytes, parts);
    if (!tier_ssd_is_direct(s->ssd))
        for (int i = 0; i < TIER_SSD_PARTS; i++)
            count_cached(s, &parts[i]);
    tier_ssd_start(s->ssd, slot, parts, TIER_SSD_PARTS);
}

static enum err_code draw_order(struct sample *s, struct err *e)
{
    s->order = alloc_zero(ALLOC_WORK, s->n, sizeof(*s->order));
    if (s->order == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the order of %u experts", s->n);
    for (uint32_t i = 0; i < s->n; i++) {
        const uint32_t k = (uint32_t)(rng_draw(1, i) % (i + 1));
        s->order[i] = s->order[k];
        s->order[k] = i;
    }
    return ERR_OK;
}

/* Keeps all slots busy until the time is over or every expert was read. */
static enum err_code read_sample(struct sample *s, uint64_t end_ns, struct ticks ticks,
                                 struct err *e)
{
    uint32_t open = 0;
    enum err_code code = ERR_OK;
    for (; open < s->slots && s->next < s->n; open++)
        start_next(s, open);
    while (open > 0) {
        struct tier_ssd_result result;
        if (tier_ssd_wait(s->ssd, true, &result, 1) == 0)
            continue;
        if (result.code != ERR_OK && code == ERR_OK)
            code = err_set(e, result.code, "%s", result.error.text);
        if (code == ERR_OK && s->next < s->n && ticks_ns(ticks) < end_ns)
            start_next(s, result.id);
        else
            open--;
    }
    return code;
}

enum err_code engine_rates_ssd(struct k_device *device, const struct model *m, enum tier_ssd_io io,
                               uint32_t depth, uint64_t limit_ns, struct ticks ticks,
                               struct engine_rates_ssd *ret, struct err *e)
{
    struct sample s = {
        .m = m, .n = m->shape.n_layer * m->shape.n_expert, .slots = m->shape.n_expert_used};
    struct k_buffer *arena = NULL;
    for (uint32_t i = 0; i < m->shape.n_layer; i++)
        s.slot_bytes = m->expert_bytes[i] > s.slot_bytes ? m->expert_bytes[i] : s.slot_bytes;
    while (s.slots > 1 && s.slots * s.slot_bytes > ARENA_BYTES)
        s.slots--;
    const uint64_t bytes = s.slots * s.slot_bytes;
    enum err_code code = draw_order(&s, e);
    if (code == ERR_OK)
        code = k_ops(device)->buffer_new(device, bytes, &arena, e);
    if (code == ERR_OK) {
        /* pages first: the system's clearing them is not the disk's time */
        memset(k_ops(device)->buffer_host(arena), 1, bytes);
        code = engine_experts_open_ssd(
            m, &(struct engine_experts_options){.arena_bytes = bytes, .io = io, .depth = depth},
            k_ops(device)->buffer_host(arena), &s.ssd, e);
    }
    const uint64_t began = ticks_ns(ticks);
    if (code == ERR_OK) {
        tier_ssd_reserved(s.ssd, bytes);
        code = read_sample(&s, began + limit_ns, ticks, e);
    }
    if (code == ERR_OK) {
        const uint64_t took = ticks_ns(ticks) - began + 1;
        *ret = (struct engine_rates_ssd){.bytes = tier_ssd_count(s.ssd).bytes,
                                         .direct = tier_ssd_is_direct(s.ssd),
                                         .cached = s.cached_unknown || s.pages == 0
                                                       ? -1
                                                       : (double)s.pages_cached / (double)s.pages};
        ret->rate = (double)ret->bytes * 1e9 / (double)took;
        snprintf(ret->about, sizeof(ret->about), "%s", tier_ssd_about(s.ssd));
    }
    tier_ssd_close(s.ssd);
    if (arena != NULL)
        k_ops(device)->buffer_free(arena);
    alloc_free(s.order);
    return code;
}

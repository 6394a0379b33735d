#include "tier_ssd.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "alloc.h"
#include "ticks.h"
#include "tier_file.h"
#include "tier_read.h"

enum {
    SSD_READ_BYTES = 512 << 10,   /* longest single read: what is longer becomes several */
    SSD_MAX_WAITS = 1000,         /* repeats of a read without progress, before it is an error */
    SSD_PAUSE_NS = 1000 * 1000,   /* before a repeat, where the caller waits anyway */
    SSD_NONE = TIER_SSD_REQUESTS, /* no request */
};

/* Whole windows of one file that land in one piece of the arena. */
struct ssd_run {
    uint32_t file;
    uint64_t start, end; /* in the file, multiples of TIER_SSD_ALIGN */
    uint64_t next;       /* first byte not yet asked for */
    uint64_t need_end;   /* behind the last byte that must come: the file may end before `end` */
    uint64_t place;      /* of start */
};

struct ssd_request {
    uint64_t id;
    struct ssd_run runs[TIER_SSD_PARTS];
    uint32_t n_runs, run; /* run: the one that is being asked for; n_runs: all are */
    uint32_t n_reading;   /* reads in flight */
    struct err error;     /* the first; .code ERR_OK: none */
    struct ssd_place {
        uint32_t file;
        uint64_t offset, bytes;
    } fault; /* where it was */
};

/* A read in flight. Of a short one the rest is read under the same token. */
struct ssd_read {
    uint32_t request, file;
    uint64_t offset, place;
    uint32_t bytes;
    uint32_t need;  /* bytes of it that must come */
    uint32_t waits; /* repeats since the last progress */
    bool failed;    /* once already */
};

/* First in, first out. */
struct ssd_ring {
    uint32_t first, n;
    uint32_t of[TIER_SSD_REQUESTS];
};

struct tier_ssd {
    struct tier_read *reader;
    struct tier_file *files; /* [n_files] */
    int *fds;                /* [n_files] of files, for the reader */
    uint32_t n_files, depth;
    uint8_t *arena;
    uint64_t arena_bytes;
    bool direct;
    bool pause; /* a read waits for something passing */
    struct ticks ticks;
    struct tier_ssd_counts counts;
    char about[512];

    struct ssd_ring queue; /* requests with reads to begin; only the first may have begun */
    struct ssd_ring ended;
    uint32_t n_free, n_idle, n_open; /* n_open: requests, ended ones included */
    uint32_t free[TIER_SSD_REQUESTS];
    struct ssd_request requests[TIER_SSD_REQUESTS];
    uint32_t idle[TIER_SSD_MAX_DEPTH]; /* tokens */
    struct ssd_read reads[TIER_SSD_MAX_DEPTH];
    struct tier_read_op ops[TIER_SSD_MAX_DEPTH];   /* scratch of ssd_pump */
    struct tier_read_end ends[TIER_SSD_MAX_DEPTH]; /* scratch of ssd_take */
};

static void ssd_ring_push(struct ssd_ring *r, uint32_t request)
{
    r->of[(r->first + r->n++) % TIER_SSD_REQUESTS] = request;
}

static uint32_t ssd_ring_first(const struct ssd_ring *r)
{
    return r->n > 0 ? r->of[r->first] : SSD_NONE;
}

static void ssd_ring_pop(struct ssd_ring *r)
{
    r->first = (r->first + 1) % TIER_SSD_REQUESTS;
    r->n--;
}

static uint64_t ssd_window_start(uint64_t offset)
{
    return offset - offset % TIER_SSD_ALIGN;
}

static struct tier_read_op ssd_op(const struct tier_ssd *t, uint32_t token)
{
    const struct ssd_read *d = &t->reads[token];
    return (struct tier_read_op){token, d->file, d->offset, d->bytes, t->arena + d->place};
}

/* ---- opening ------------------------------------------------------------------------------- */

/* Direct reads of all files, or of none. ERR_UNSUPPORTED: none, e says why. */
static enum err_code ssd_set_direct(struct tier_ssd *t, struct err *e)
{
    enum err_code code = ERR_OK;
    for (uint32_t i = 0; i < t->n_files && code == ERR_OK; i++)
        code = tier_file_direct(&t->files[i], TIER_SSD_ALIGN, e);
    t->direct = code == ERR_OK;
    for (uint32_t i = 0; i < t->n_files && !t->direct; i++)
        tier_file_buffered(&t->files[i]);
    return code;
}

static enum err_code ssd_open_files(struct tier_ssd *t, const struct tier_ssd_options *o,
                                    struct err *e)
{
    t->files = alloc_zero(ALLOC_WEIGHTS, o->n_files, sizeof(*t->files));
    t->fds = alloc_zero(ALLOC_WEIGHTS, o->n_files, sizeof(*t->fds));
    if (t->files == NULL || t->fds == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the files of the model");
    for (; t->n_files < o->n_files; t->n_files++) {
        const uint32_t i = t->n_files;
        const int same = o->fds != NULL ? o->fds[i] : -1;
        enum err_code code = tier_file_open(o->paths[i], same, &t->files[i], e);
        if (code != ERR_OK)
            return code;
        t->fds[i] = t->files[i].fd;
    }
    return ERR_OK;
}

/* The reader of `io`; *ret_why: why it is not the one that `auto` would rather have. */
static enum err_code ssd_open_reader(struct tier_ssd *t, const struct tier_ssd_options *o,
                                     struct err *ret_why, struct err *e)
{
    const struct tier_read_setup setup = {.fds = t->fds,
                                          .n_fds = t->n_files,
                                          .arena = o->arena,
                                          .arena_bytes = o->arena_bytes,
                                          .depth = o->depth,
                                          .drop = !t->direct && o->io != TIER_SSD_BUFFERED};
    if (o->source != NULL)
        return o->source->open(o->source->context, &setup, &t->reader, e);
    if (o->io == TIER_SSD_URING)
        return tier_read_uring_open(&setup, &t->reader, e);
    /* Through the page cache the copies are better made by threads than by the engine. */
    if (o->io == TIER_SSD_AUTO && t->direct &&
        tier_read_uring_open(&setup, &t->reader, ret_why) == ERR_OK)
        return ERR_OK;
    return tier_read_pread_open(&setup, &t->reader, e);
}

static enum err_code ssd_open(struct tier_ssd *t, const struct tier_ssd_options *o, struct err *e)
{
    enum err_code code = ssd_open_files(t, o, e);
    if (code != ERR_OK)
        return code;
    struct err why = {.code = ERR_OK};
    if (o->io != TIER_SSD_BUFFERED) {
        code = ssd_set_direct(t, &why);
        if (code != ERR_OK && (code != ERR_UNSUPPORTED || o->io == TIER_SSD_URING)) {
            (void)err_set(e, code, "%s", why.text);
            return code == ERR_UNSUPPORTED ? err_wrap(e, "ssd.io = uring; auto would do without")
                                           : code;
        }
    }
    code = ssd_open_reader(t, o, &why, e);
    if (code == ERR_UNSUPPORTED && o->io == TIER_SSD_URING)
        return err_wrap(e, "ssd.io = uring; auto would do without");
    if (code != ERR_OK)
        return code;
    const char *way = t->direct                    ? "O_DIRECT"
                      : o->io == TIER_SSD_BUFFERED ? "through the page cache"
                                                   : "buffered, page cache dropped";
    snprintf(t->about, sizeof(t->about), "%s, %s, depth %u%s%s%s", t->reader->about, way, t->depth,
             why.code != ERR_OK ? " (" : "", why.text, why.code != ERR_OK ? ")" : "");
    return ERR_OK;
}

enum err_code tier_ssd_open(const struct tier_ssd_options *options, struct tier_ssd **ret,
                            struct err *e)
{
    assert(options->depth >= 1 && options->depth <= TIER_SSD_MAX_DEPTH);
    assert((uintptr_t)options->arena % TIER_SSD_ALIGN == 0);
    struct tier_ssd *t = alloc_zero(ALLOC_WEIGHTS, 1, sizeof(*t));
    if (t == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the queue of the model's reads");
    t->depth = options->depth;
    t->arena = options->arena;
    t->arena_bytes = options->arena_bytes;
    t->ticks = ticks_real();
    for (; t->n_free < TIER_SSD_REQUESTS; t->n_free++)
        t->free[t->n_free] = t->n_free;
    for (; t->n_idle < t->depth; t->n_idle++)
        t->idle[t->n_idle] = t->n_idle;
    enum err_code code = ssd_open(t, options, e);
    if (code != ERR_OK) {
        tier_ssd_close(t);
        return code;
    }
    *ret = t;
    return ERR_OK;
}

/* ---- requests ------------------------------------------------------------------------------ */

/* The whole windows around a part. */
static struct ssd_run ssd_run_of(const struct tier_ssd *t, const struct tier_ssd_part *p)
{
    const uint64_t before = p->offset % TIER_SSD_ALIGN;
    struct ssd_run r = {.file = p->file,
                        .start = p->offset - before,
                        .need_end = p->offset + p->bytes,
                        .place = p->place - before};
    r.end = ssd_window_start(r.need_end + TIER_SSD_ALIGN - 1);
    r.next = r.start;
    assert(p->place >= before && r.place % TIER_SSD_ALIGN == 0);
    assert(r.place <= t->arena_bytes && r.end - r.start <= t->arena_bytes - r.place);
    return r;
}

/* Adds a part in the order of the file; where it touches the one before, in the file and in the
 * arena alike, both become one. */
static void ssd_add_run(struct ssd_request *q, struct ssd_run r)
{
    uint32_t at = q->n_runs;
    while (at > 0 && (q->runs[at - 1].file > r.file ||
                      (q->runs[at - 1].file == r.file && q->runs[at - 1].start > r.start)))
        at--;
    memmove(&q->runs[at + 1], &q->runs[at], (q->n_runs - at) * sizeof(r));
    q->runs[at] = r;
    q->n_runs++;
    for (uint32_t i = 1; i < q->n_runs;) {
        struct ssd_run *a = &q->runs[i - 1], *b = &q->runs[i];
        if (a->file != b->file || b->start > a->end ||
            a->place + (b->start - a->start) != b->place) {
            i++;
            continue;
        }
        a->end = a->end > b->end ? a->end : b->end;
        a->need_end = a->need_end > b->need_end ? a->need_end : b->need_end;
        memmove(b, b + 1, (--q->n_runs - i) * sizeof(*b));
    }
}

static void ssd_end_request(struct tier_ssd *t, uint32_t request)
{
    if (t->requests[request].error.code != ERR_OK)
        t->counts.failures++;
    ssd_ring_push(&t->ended, request);
}

static void ssd_say_ends(struct ssd_request *q, const struct tier_file *f, uint64_t size,
                         struct ssd_place at)
{
    q->fault = at;
    (void)err_set(&q->error, ERR_IO,
                  "%s ends at byte %llu, %llu bytes at %llu are wanted; was it truncated?",
                  f->label, (unsigned long long)size, (unsigned long long)at.bytes,
                  (unsigned long long)at.offset);
}

/* Begins reads while there are requests and `depth` allows. */
static void ssd_pump(struct tier_ssd *t)
{
    uint32_t n = 0;
    while (t->n_idle > 0 && t->queue.n > 0) {
        const uint32_t request = ssd_ring_first(&t->queue);
        struct ssd_request *q = &t->requests[request];
        struct ssd_run *r = &q->runs[q->run];
        const uint64_t left = r->end - r->next;
        const uint32_t bytes = left < SSD_READ_BYTES ? (uint32_t)left : SSD_READ_BYTES;
        const uint64_t need = r->need_end - r->next;
        const uint32_t token = t->idle[--t->n_idle];
        t->reads[token] = (struct ssd_read){.request = request,
                                            .file = r->file,
                                            .offset = r->next,
                                            .place = r->place + (r->next - r->start),
                                            .bytes = bytes,
                                            .need = need < bytes ? (uint32_t)need : bytes};
        t->ops[n++] = ssd_op(t, token);
        q->n_reading++;
        r->next += bytes;
        if (r->next == r->end && ++q->run == q->n_runs)
            ssd_ring_pop(&t->queue);
    }
    if (n > 0)
        t->reader->start(t->reader, t->ops, n);
}

static uint64_t ssd_bytes_of(const struct tier_ssd *t, const struct ssd_request *q)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < q->n_runs; i++) {
        const uint64_t size = t->files[q->runs[i].file].size;
        bytes += (q->runs[i].end < size ? q->runs[i].end : size) - q->runs[i].start;
    }
    return bytes;
}

uint64_t tier_ssd_start(struct tier_ssd *t, uint64_t id, const struct tier_ssd_part *parts,
                        uint32_t n)
{
    assert(t->n_free > 0 && n <= TIER_SSD_PARTS);
    const uint32_t request = t->free[--t->n_free];
    struct ssd_request *q = &t->requests[request];
    *q = (struct ssd_request){.id = id};
    t->n_open++;
    for (uint32_t i = 0; i < n && q->error.code == ERR_OK; i++) {
        assert(parts[i].file < t->n_files);
        const struct tier_file *f = &t->files[parts[i].file];
        const uint64_t offset = parts[i].offset, bytes = parts[i].bytes;
        if (bytes == 0)
            continue;
        if (offset > f->size || bytes > f->size - offset)
            ssd_say_ends(q, f, f->size, (struct ssd_place){parts[i].file, offset, bytes});
        else
            ssd_add_run(q, ssd_run_of(t, &parts[i]));
    }
    if (q->error.code != ERR_OK || q->n_runs == 0) {
        ssd_end_request(t, request);
        return 0;
    }
    ssd_ring_push(&t->queue, request);
    ssd_pump(t);
    return ssd_bytes_of(t, q);
}

uint32_t tier_ssd_room(const struct tier_ssd *t)
{
    return t->n_free;
}

/* ---- results of reads ---------------------------------------------------------------------- */

static bool ssd_is_passing(int failed)
{
    return failed == EINTR || failed == EAGAIN || failed == EBUSY || failed == ENOMEM;
}

/* What a failed request has not asked for yet is no longer asked for. */
static void ssd_stop_request(struct tier_ssd *t, uint32_t request)
{
    struct ssd_request *q = &t->requests[request];
    if (q->run < q->n_runs)
        ssd_ring_pop(&t->queue); /* it has begun, so it is the first */
    q->run = q->n_runs;
}

/* A read that failed: true if it is to be repeated. */
static bool ssd_repeats_failed(struct tier_ssd *t, struct ssd_read *d, int failed)
{
    if (ssd_is_passing(failed) && ++d->waits <= SSD_MAX_WAITS) {
        t->pause = true;
        return true;
    }
    if (!ssd_is_passing(failed) && !d->failed) {
        d->failed = true;
        return true;
    }
    t->requests[d->request].fault = (struct ssd_place){d->file, d->offset, d->bytes};
    (void)err_set_os(&t->requests[d->request].error, ERR_IO, failed,
                     "%s: reading %u bytes at %llu fails, also when repeated; check the disk",
                     t->files[d->file].label, d->bytes, (unsigned long long)d->offset);
    ssd_stop_request(t, d->request);
    return false;
}

/* A read that ended early after `got` bytes: true if the rest is to be read. */
static bool ssd_repeats_short(struct tier_ssd *t, struct ssd_read *d, uint32_t got)
{
    struct ssd_request *q = &t->requests[d->request];
    const struct tier_file *f = &t->files[d->file];
    const uint64_t size = tier_file_size_now(f);
    if (size < d->offset + d->need) {
        ssd_say_ends(q, f, size, (struct ssd_place){d->file, d->offset, d->need});
        ssd_stop_request(t, d->request);
        return false;
    }
    if (t->direct)
        got -= got % TIER_SSD_ALIGN;
    d->offset += got;
    d->place += got;
    d->bytes -= got;
    d->need -= got;
    d->waits = got > 0 ? 0 : d->waits + 1;
    if (got > 0)
        return true;
    if (d->waits <= SSD_MAX_WAITS) {
        t->pause = true;
        return true;
    }
    q->fault = (struct ssd_place){d->file, d->offset, d->bytes};
    (void)err_set(&q->error, ERR_IO,
                  "%s: reading %u bytes at %llu stays short, also when repeated; check the disk",
                  f->label, d->bytes, (unsigned long long)d->offset);
    ssd_stop_request(t, d->request);
    return false;
}

static void ssd_on_end(struct tier_ssd *t, const struct tier_read_end *end)
{
    struct ssd_read *d = &t->reads[end->token];
    struct ssd_request *q = &t->requests[d->request];
    bool again = false;
    if (end->result >= 0) {
        t->counts.reads++;
        t->counts.bytes += (uint32_t)end->result;
    }
    if (q->error.code != ERR_OK)
        again = false;
    else if (end->result < 0)
        again = ssd_repeats_failed(t, d, -end->result);
    else if ((uint32_t)end->result < d->need)
        again = ssd_repeats_short(t, d, (uint32_t)end->result);
    if (again) {
        const struct tier_read_op op = ssd_op(t, end->token);
        t->counts.retries++;
        t->reader->start(t->reader, &op, 1);
        return;
    }
    t->idle[t->n_idle++] = end->token;
    if (--q->n_reading == 0 && q->run == q->n_runs)
        ssd_end_request(t, d->request);
}

/* Takes what the reader has and begins what may begin. */
static void ssd_take(struct tier_ssd *t, bool wait)
{
    if (t->n_idle == t->depth)
        return;
    t->pause = false;
    const uint32_t n = t->reader->take(t->reader, wait, t->ends, t->depth);
    for (uint32_t i = 0; i < n; i++)
        ssd_on_end(t, &t->ends[i]);
    ssd_pump(t);
    if (wait && (t->pause || n == 0))
        (void)nanosleep(&(struct timespec){.tv_nsec = SSD_PAUSE_NS}, NULL);
}

uint32_t tier_ssd_wait(struct tier_ssd *t, bool block, struct tier_ssd_result *ret, uint32_t n)
{
    assert(n > 0 || !block);
    ssd_take(t, false);
    if (block && t->ended.n == 0 && t->n_open > 0) {
        const uint64_t began = ticks_ns(t->ticks);
        while (t->ended.n == 0)
            ssd_take(t, true);
        t->counts.wait_ns += ticks_ns(t->ticks) - began;
    }
    uint32_t given = 0;
    for (; given < n && t->ended.n > 0; given++) {
        const uint32_t request = ssd_ring_first(&t->ended);
        const struct ssd_request *q = &t->requests[request];
        ret[given] = (struct tier_ssd_result){.id = q->id,
                                              .code = q->error.code,
                                              .error = q->error,
                                              .file = q->fault.file,
                                              .offset = q->fault.offset,
                                              .bytes = q->fault.bytes};
        ssd_ring_pop(&t->ended);
        t->free[t->n_free++] = request;
        t->n_open--;
    }
    return given;
}

/* ---- the rest ------------------------------------------------------------------------------ */

void tier_ssd_close(struct tier_ssd *t)
{
    if (t == NULL)
        return;
    if (t->reader != NULL) {
        while (t->n_idle < t->depth)
            t->n_idle += t->reader->take(t->reader, true, t->ends, t->depth);
        t->reader->close(t->reader);
    }
    for (uint32_t i = 0; i < t->n_files; i++)
        tier_file_close(&t->files[i]);
    alloc_free(t->files);
    alloc_free(t->fds);
    alloc_free(t);
}

enum err_code tier_ssd_check_files(struct tier_ssd *t, struct err *e)
{
    enum err_code code = ERR_OK;
    for (uint32_t i = 0; i < t->n_files && code == ERR_OK; i++)
        code = tier_file_check(&t->files[i], e);
    return code;
}

void tier_ssd_reserved(struct tier_ssd *t, uint64_t bytes)
{
    if (t->reader->reserved != NULL)
        t->reader->reserved(t->reader, bytes);
}

struct tier_ssd_counts tier_ssd_count(const struct tier_ssd *t)
{
    return t->counts;
}

const char *tier_ssd_about(const struct tier_ssd *t)
{
    return t->about;
}

bool tier_ssd_is_direct(const struct tier_ssd *t)
{
    return t->direct;
}

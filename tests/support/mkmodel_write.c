#include "mkmodel_write.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "alloc.h"
#include "mkmodel_block.h"
#include "mkmodel_router.h"

enum {
    PIECE_BYTES = 4 << 20,
    PAGE_BYTES = 4096, /* what O_DIRECT wants of places, sizes and addresses */
    WATCH_MS = 200
};

/* ---- bytes ----------------------------------------------------------------------------------- */

static uint64_t key_of(const struct mkmodel_plan *p, size_t tensor)
{
    return p->o.seed * UINT64_C(0x9e3779b97f4a7c15) ^ (uint64_t)tensor << 44;
}

/* `n` blocks from `number` on. */
static void blocks_write(const struct mkmodel_plan *p, const struct mkmodel_router *router,
                         size_t tensor, uint64_t number, uint64_t n, uint8_t *to)
{
    const struct mkmodel_tensor *t = &p->tensors[tensor];
    const uint64_t elements = k_format_block_elements(t->format);
    const uint64_t bytes = k_format_block_bytes(t->format), in_row = t->dims[0] / elements;
    const uint64_t key = key_of(p, tensor), end = number + n;
    if (router != NULL && !mkmodel_router_shapes(router, t))
        router = NULL;
    if (router == NULL && (t->format == K_F16 || t->format == K_BF16)) {
        mkmodel_block_halves(t->format, key, t->std, number, n, to);
        return;
    }
    for (; number < end; number++, to += bytes)
        if (router == NULL ||
            !mkmodel_router_block(router, t, number / in_row, number % in_row * elements, to))
            mkmodel_block_random(t->format, key ^ number << 8, t->std, to);
}

/* Bytes from..end of the tensor, both within it. */
static void tensor_write(const struct mkmodel_plan *p, const struct mkmodel_router *router,
                         size_t tensor, uint64_t from, uint64_t end, uint8_t *to)
{
    const uint64_t block = k_format_block_bytes(p->tensors[tensor].format);
    while (from < end) {
        const uint64_t skip = from % block, left = end - from;
        uint64_t n = left / block * block;
        if (skip == 0 && n > 0) {
            blocks_write(p, router, tensor, from / block, n / block, to);
        } else { /* a block cut by the border of a piece */
            uint8_t whole[MKMODEL_BLOCK_MAX_BYTES];
            n = block - skip < left ? block - skip : left;
            blocks_write(p, router, tensor, from / block, 1, whole);
            memcpy(to, whole + skip, n);
        }
        from += n;
        to += n;
    }
}

void mkmodel_write_range(const struct mkmodel_plan *p, const struct mkmodel_router *router,
                         size_t part, uint64_t offset, void *to, size_t n)
{
    const struct mkmodel_part *f = &p->parts[part];
    uint8_t *out = to;
    memset(out, 0, n);
    if (offset < f->data_offset) {
        const uint64_t left = f->data_offset - offset;
        memcpy(out, f->header + offset, left < n ? left : n);
    }
    for (size_t i = f->first; i < f->first + f->n; i++) {
        const uint64_t begin = f->data_offset + p->tensors[i].offset;
        const uint64_t end = begin + p->tensors[i].bytes;
        if (end <= offset || begin >= offset + n)
            continue;
        const uint64_t from = begin > offset ? begin : offset;
        const uint64_t last = end < offset + n ? end : offset + n;
        tensor_write(p, router, i, from - begin, last - begin, out + (from - offset));
    }
}

/* ---- files ----------------------------------------------------------------------------------- */

struct file {
    char *path; /* with .part */
    int fd;
    bool direct;
    uint64_t bytes;
};

struct writing {
    const struct mkmodel_plan *plan;
    const struct mkmodel_router *router;
    struct file *files; /* [plan->n_parts] */
    uint64_t n_pieces;
    _Atomic uint64_t next, written; /* piece; bytes */
    _Atomic int failed;             /* errno */
    _Atomic bool stopped;
    sem_t ended; /* posted by each thread */
};

static uint64_t pieces_of(const struct file *f)
{
    return (f->bytes + PIECE_BYTES - 1) / PIECE_BYTES;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static enum err_code fail(const struct file *f, int os, struct err *e)
{
    struct statvfs s;
    if ((os == ENOSPC || os == EDQUOT) && fstatvfs(f->fd, &s) == 0)
        return err_set(e, ERR_IO, "%s: %s: it takes %.0f MB, %.0f MB are free", f->path,
                       strerror(os), (double)f->bytes / 1e6,
                       (double)s.f_bavail * (double)s.f_frsize / 1e6);
    return err_set_os(e, ERR_IO, os, "%s", f->path);
}

/* Opens the file and reserves its bytes. */
static enum err_code file_open(struct writing *w, size_t i, struct err *e)
{
    const struct mkmodel_part *part = &w->plan->parts[i];
    struct file *f = &w->files[i];
    const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
    const size_t n = strlen(part->path) + sizeof(".part");
    struct stat there;
    if (stat(part->path, &there) == 0 && !S_ISREG(there.st_mode)) /* a device would be replaced */
        return err_set(e, ERR_ARGUMENT, "%s is not a regular file", part->path);
    f->bytes = part->data_offset + part->data_bytes;
    f->path = alloc_get(ALLOC_MISC, n);
    if (f->path == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a path");
    snprintf(f->path, n, "%s.part", part->path);
    f->fd = open(f->path, flags | O_DIRECT, 0644);
    f->direct = f->fd >= 0;
    if (f->fd < 0 && errno == EINVAL)
        f->fd = open(f->path, flags, 0644);
    if (f->fd < 0)
        return err_set_os(e, ERR_IO, errno, "%s", f->path);
    if (fallocate(f->fd, 0, 0, (off_t)f->bytes) != 0 && errno != EOPNOTSUPP && errno != ENOSYS)
        return fail(f, errno, e);
    return ERR_OK;
}

/* Fills and writes piece `number` of all pieces of all files. */
static void piece_write(struct writing *w, uint64_t number, uint8_t *buffer)
{
    size_t i = 0;
    while (number >= pieces_of(&w->files[i]))
        number -= pieces_of(&w->files[i++]);
    const struct file *f = &w->files[i];
    const uint64_t at = number * PIECE_BYTES;
    const uint64_t left = f->bytes - at, wanted = left < PIECE_BYTES ? left : PIECE_BYTES;
    /* O_DIRECT writes whole pages; the file is cut to its size in the end. */
    const uint64_t n = f->direct ? (wanted + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES : wanted;
    mkmodel_write_range(w->plan, w->router, i, at, buffer, n);
    for (uint64_t done = 0; done < n;) {
        const ssize_t wrote = pwrite(f->fd, buffer + done, n - done, (off_t)(at + done));
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0) {
            atomic_store(&w->failed, wrote == 0 ? ENOSPC : errno);
            return;
        }
        done += (uint64_t)wrote;
    }
    atomic_fetch_add(&w->written, n);
}

static void *writer(void *context)
{
    struct writing *w = context;
    uint8_t *buffer = alloc_aligned(ALLOC_MISC, PAGE_BYTES, PIECE_BYTES);
    if (buffer == NULL)
        atomic_store(&w->failed, ENOMEM);
    while (atomic_load(&w->failed) == 0 && !atomic_load(&w->stopped)) {
        const uint64_t piece = atomic_fetch_add(&w->next, 1);
        if (piece >= w->n_pieces)
            break;
        piece_write(w, piece, buffer);
    }
    alloc_free(buffer);
    sem_post(&w->ended);
    return NULL;
}

static void show(const struct writing *w, double start, uint64_t all)
{
    const double done = (double)atomic_load(&w->written), seconds = now() - start;
    fprintf(stderr, "\r%3.0f %% of %.2f GB, %.0f MB/s ", 100 * done / (double)all,
            (double)all / 1e9, done / 1e6 / (seconds > 0 ? seconds : 1));
    fflush(stderr);
}

/* Waits for `threads` writers and looks out for signals, which are blocked meanwhile. */
static void watch(struct writing *w, uint64_t threads, const sigset_t *signals, bool progress)
{
    const double start = now();
    const uint64_t all = mkmodel_plan_bytes(w->plan);
    while (threads > 0) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += (long)WATCH_MS * 1000000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        if (sem_clockwait(&w->ended, CLOCK_MONOTONIC, &until) == 0)
            threads--;
        if (sigtimedwait(signals, NULL, &(struct timespec){0}) > 0)
            atomic_store(&w->stopped, true);
        if (progress)
            show(w, start, all);
    }
    if (progress)
        fprintf(stderr, "\r%40s\r", "");
}

static enum err_code write_pieces(struct writing *w, bool progress, struct err *e)
{
    pthread_t threads[MKMODEL_MAX_THREADS];
    sigset_t signals, before;
    uint64_t n = 0;
    for (size_t i = 0; i < w->plan->n_parts; i++)
        w->n_pieces += pieces_of(&w->files[i]);
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals, &before);
    sem_init(&w->ended, 0, 0);
    while (n < w->plan->o.threads && n < MKMODEL_MAX_THREADS &&
           pthread_create(&threads[n], NULL, writer, w) == 0)
        n++;
    watch(w, n, &signals, progress);
    for (uint64_t i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    sem_destroy(&w->ended);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (n == 0)
        return err_set(e, ERR_NOMEM, "no thread could be started");
    if (atomic_load(&w->failed) != 0)
        return fail(&w->files[0], atomic_load(&w->failed), e);
    if (atomic_load(&w->stopped))
        return err_set(e, ERR_CANCELLED, "stopped; %s was removed", w->files[0].path);
    return ERR_OK;
}

static enum err_code files_finish(const struct writing *w, struct err *e)
{
    for (size_t i = 0; i < w->plan->n_parts; i++) {
        const struct file *f = &w->files[i];
        if (ftruncate(f->fd, (off_t)f->bytes) != 0 || (w->plan->o.sync && fsync(f->fd) != 0))
            return fail(f, errno, e);
    }
    for (size_t i = 0; i < w->plan->n_parts; i++) {
        const struct file *f = &w->files[i];
        if (rename(f->path, w->plan->parts[i].path) != 0)
            return fail(f, errno, e);
    }
    return ERR_OK;
}

enum err_code mkmodel_write_files(const struct mkmodel_plan *p, const struct mkmodel_router *router,
                                  bool progress, struct mkmodel_write_figures *ret, struct err *e)
{
    struct writing w = {.plan = p, .router = router};
    const double start = now();
    bool direct = true;
    enum err_code rc = ERR_OK;
    w.files = alloc_zero(ALLOC_MISC, p->n_parts, sizeof(*w.files));
    if (w.files == NULL)
        return err_set(e, ERR_NOMEM, "no memory for %zu files", p->n_parts);
    for (size_t i = 0; i < p->n_parts; i++)
        w.files[i].fd = -1;
    for (size_t i = 0; rc == ERR_OK && i < p->n_parts; i++)
        rc = file_open(&w, i, e);
    if (rc == ERR_OK)
        rc = write_pieces(&w, progress, e);
    if (rc == ERR_OK)
        rc = files_finish(&w, e);
    for (size_t i = 0; i < p->n_parts; i++) {
        struct file *f = &w.files[i];
        if (f->fd >= 0 && close(f->fd) != 0 && rc == ERR_OK)
            rc = err_set_os(e, ERR_IO, errno, "%s", f->path);
        if (f->fd >= 0 && rc != ERR_OK)
            unlink(f->path);
        direct = direct && f->direct;
        alloc_free(f->path);
    }
    alloc_free(w.files);
    const double seconds = now() - start;
    if (rc == ERR_OK)
        *ret = (struct mkmodel_write_figures){mkmodel_plan_bytes(p), seconds, direct};
    return rc;
}

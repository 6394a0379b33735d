#include "tier_read.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "alloc.h"

enum {
    PREAD_PAGE = 4096,
    PREAD_STACK_BYTES = 256 << 10
};

/* Bounded by depth on both sides: a read is either in `ops`, in a thread's hands or in `ends`. */
struct pread_pool {
    struct tier_read read; /* first: the interface is the object */
    struct tier_read_setup setup;
    pthread_mutex_t lock; /* of all below but threads */
    pthread_cond_t work, done;
    struct tier_read_op *ops;   /* [depth] ring */
    struct tier_read_end *ends; /* [depth] ring */
    uint32_t first_op, n_ops, first_end, n_ends;
    bool stop, waiting;
    uint32_t n_threads;
    pthread_t threads[];
};

static int32_t pread_read(const struct tier_read_setup *s, const struct tier_read_op *op)
{
    const int fd = s->fds[op->file];
    const ssize_t got = pread(fd, op->to, op->bytes, (off_t)op->offset);
    const int32_t result = got < 0 ? -errno : (int32_t)got;
    if (s->drop && got > 0) {
        const uint64_t from = op->offset / PREAD_PAGE * PREAD_PAGE;
        posix_fadvise(fd, (off_t)from, (off_t)(op->offset + op->bytes - from), POSIX_FADV_DONTNEED);
    }
    return result;
}

static void *pread_main(void *context)
{
    struct pread_pool *p = context;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (p->n_ops == 0 && !p->stop)
            pthread_cond_wait(&p->work, &p->lock);
        if (p->stop)
            break;
        const struct tier_read_op op = p->ops[p->first_op];
        p->first_op = (p->first_op + 1) % p->setup.depth;
        p->n_ops--;
        pthread_mutex_unlock(&p->lock);
        const int32_t result = pread_read(&p->setup, &op);
        pthread_mutex_lock(&p->lock);
        p->ends[(p->first_end + p->n_ends) % p->setup.depth] =
            (struct tier_read_end){op.token, result};
        p->n_ends++;
        if (p->waiting)
            pthread_cond_signal(&p->done);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static void pread_start(struct tier_read *r, const struct tier_read_op *ops, uint32_t n)
{
    struct pread_pool *p = (struct pread_pool *)r;
    pthread_mutex_lock(&p->lock);
    for (uint32_t i = 0; i < n; i++) {
        p->ops[(p->first_op + p->n_ops) % p->setup.depth] = ops[i];
        p->n_ops++;
        pthread_cond_signal(&p->work);
    }
    pthread_mutex_unlock(&p->lock);
}

static uint32_t pread_take(struct tier_read *r, bool wait, struct tier_read_end *ret, uint32_t n)
{
    struct pread_pool *p = (struct pread_pool *)r;
    uint32_t taken = 0;
    pthread_mutex_lock(&p->lock);
    p->waiting = wait;
    while (wait && p->n_ends == 0)
        pthread_cond_wait(&p->done, &p->lock);
    p->waiting = false;
    while (taken < n && p->n_ends > 0) {
        ret[taken++] = p->ends[p->first_end];
        p->first_end = (p->first_end + 1) % p->setup.depth;
        p->n_ends--;
    }
    pthread_mutex_unlock(&p->lock);
    return taken;
}

static void pread_close(struct tier_read *r)
{
    struct pread_pool *p = (struct pread_pool *)r;
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (uint32_t i = 0; i < p->n_threads; i++)
        pthread_join(p->threads[i], NULL);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->done);
    pthread_mutex_destroy(&p->lock);
    alloc_free(p->ops);
    alloc_free(p->ends);
    alloc_free(p);
}

/* As many threads as there are to be had; fewer read fewer at once, none is an error. */
static int pread_create_threads(struct pread_pool *p)
{
    pthread_attr_t attr;
    int failed = pthread_attr_init(&attr);
    if (failed != 0)
        return failed;
    pthread_attr_setstacksize(&attr, PREAD_STACK_BYTES);
    sigset_t all, before; /* signals belong to the process' loop */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (p->n_threads < p->setup.depth && failed == 0) {
        failed = pthread_create(&p->threads[p->n_threads], &attr, pread_main, p);
        if (failed == 0)
            pthread_setname_np(p->threads[p->n_threads++], "read");
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    return p->n_threads > 0 ? 0 : failed;
}

enum err_code tier_read_pread_open(const struct tier_read_setup *setup, struct tier_read **ret,
                                   struct err *e)
{
    struct pread_pool *p =
        alloc_zero(ALLOC_WEIGHTS, 1, sizeof(*p) + setup->depth * sizeof(p->threads[0]));
    if (p == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the readers of the model file");
    p->read = (struct tier_read){.start = pread_start, .take = pread_take, .close = pread_close};
    p->setup = *setup;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->done, NULL);
    p->ops = alloc_zero(ALLOC_WEIGHTS, setup->depth, sizeof(*p->ops));
    p->ends = alloc_zero(ALLOC_WEIGHTS, setup->depth, sizeof(*p->ends));
    if (p->ops == NULL || p->ends == NULL) {
        pread_close(&p->read);
        return err_set(e, ERR_NOMEM, "no memory for the readers of the model file");
    }
    const int failed = pread_create_threads(p);
    if (failed != 0) {
        pread_close(&p->read);
        return err_set_os(e, ERR_NOMEM, failed, "no thread for reading the model file");
    }
    snprintf(p->read.about, sizeof(p->read.about), "pread with %u threads", p->n_threads);
    *ret = &p->read;
    return ERR_OK;
}

#include "k_pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xmmintrin.h>

#include "alloc.h"
#include "kernels.h"

enum {
    SPINS = 2000
}; /* pauses: some 10-40 us before a thread sleeps */

/* `ticket` holds the job's number in its high half and the next piece in its low half. A piece
 * belongs to whoever moves the low half on by compare-and-swap; that succeeds only while the job is
 * the one whose fields were read before it, so a helper that wakes late cannot take a piece of a
 * job that it knows nothing of. */
struct k_pool {
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic uint32_t done; /* pieces finished of this job */
    _Atomic uint32_t waiting;           /* the caller sleeps on `done` */
    _Alignas(64) _Atomic uint32_t wake; /* changes with every job; helpers sleep on it */
    _Atomic uint32_t sleepers;
    _Atomic bool stop;
    _Atomic(k_pool_fn *) fn;
    _Atomic(const void *) context;
    _Atomic uint32_t n;
    uint32_t threads;
    size_t scratch_bytes;
    uint8_t *scratch;
    pthread_t helpers[K_MAX_THREADS];
    uint32_t n_helpers;
    _Atomic uint32_t inexact; /* helpers whose float mode is wrong */
    _Atomic uint32_t started;
};

struct helper_start {
    struct k_pool *pool;
    uint32_t thread;
};

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, (void *)word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int n)
{
    syscall(SYS_futex, (void *)word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

int k_pool_float_mode_is_exact(void)
{
    return (_mm_getcsr() & (0x8000u | 0x0040u | 0x6000u)) == 0;
}

/* Works on the job `ticket` shows until its pieces are out. */
static void work(struct k_pool *p, uint64_t ticket, uint32_t thread)
{
    const uint64_t job = ticket >> 32;
    k_pool_fn *fn = atomic_load_explicit(&p->fn, memory_order_relaxed);
    const void *context = atomic_load_explicit(&p->context, memory_order_relaxed);
    const uint32_t n = atomic_load_explicit(&p->n, memory_order_relaxed);
    uint32_t finished = 0;
    while (ticket >> 32 == job && (uint32_t)ticket < n) {
        if (!atomic_compare_exchange_weak_explicit(&p->ticket, &ticket, ticket + 1,
                                                   memory_order_acq_rel, memory_order_acquire))
            continue;
        fn(context, (uint32_t)ticket, thread);
        finished++;
        ticket = atomic_load_explicit(&p->ticket, memory_order_acquire);
    }
    if (finished == 0)
        return;
    atomic_fetch_add(&p->done, finished);
    if (thread != 0 && atomic_load(&p->waiting) != 0)
        futex_wake(&p->done, 1);
}

static void *helper_main(void *argument)
{
    struct helper_start *start = argument;
    struct k_pool *p = start->pool;
    const uint32_t thread = start->thread;
    alloc_free(start);
    if (!k_pool_float_mode_is_exact())
        atomic_fetch_add(&p->inexact, 1);
    uint32_t seen = atomic_load(&p->wake);
    atomic_fetch_add(&p->started, 1);
    while (!atomic_load_explicit(&p->stop, memory_order_relaxed)) {
        uint32_t now = seen;
        for (int i = 0; i < SPINS && now == seen; i++) {
            _mm_pause();
            now = atomic_load_explicit(&p->wake, memory_order_acquire);
        }
        if (now == seen) {
            atomic_fetch_add(&p->sleepers, 1);
            futex_wait(&p->wake, seen);
            atomic_fetch_sub(&p->sleepers, 1);
            now = atomic_load_explicit(&p->wake, memory_order_acquire);
            if (now == seen)
                continue;
        }
        seen = now;
        work(p, atomic_load_explicit(&p->ticket, memory_order_acquire), thread);
    }
    return NULL;
}

void k_pool_run(struct k_pool *p, k_pool_fn *fn, const void *context, uint32_t n)
{
    if (n == 0)
        return;
    if (n == 1 || p->n_helpers == 0) {
        for (uint32_t i = 0; i < n; i++)
            fn(context, i, 0);
        return;
    }
    const uint64_t job = (atomic_load_explicit(&p->ticket, memory_order_relaxed) >> 32) + 1;
    /* Between jobs the ticket's piece is past every n, so no helper takes one while the fields
     * change. */
    atomic_store_explicit(&p->fn, fn, memory_order_relaxed);
    atomic_store_explicit(&p->context, context, memory_order_relaxed);
    atomic_store_explicit(&p->n, n, memory_order_relaxed);
    atomic_store(&p->done, 0);
    atomic_store(&p->ticket, job << 32);
    atomic_fetch_add(&p->wake, 1);
    if (atomic_load(&p->sleepers) != 0)
        futex_wake(&p->wake, INT_MAX);
    work(p, atomic_load(&p->ticket), 0);
    for (int i = 0; i < SPINS && atomic_load_explicit(&p->done, memory_order_acquire) < n; i++)
        _mm_pause();
    uint32_t done = atomic_load(&p->done);
    while (done < n) {
        atomic_store(&p->waiting, 1);
        done = atomic_load(&p->done);
        if (done < n)
            futex_wait(&p->done, done);
        atomic_store(&p->waiting, 0);
        done = atomic_load(&p->done);
    }
    /* Closes the job: a helper that still holds its number finds no piece. */
    atomic_store(&p->ticket, (job << 32) | UINT32_MAX);
}

enum err_code k_pool_new(uint32_t threads, size_t scratch_bytes, struct k_pool **ret, struct err *e)
{
    struct k_pool *p = alloc_aligned(ALLOC_WORK, 64, sizeof *p);
    if (p == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the compute pool");
    *p = (struct k_pool){.threads = threads};
    p->scratch_bytes = (scratch_bytes + 127) & ~(size_t)127;
    atomic_store(&p->ticket, UINT32_MAX);
    p->scratch = alloc_aligned(ALLOC_WORK, 64, p->scratch_bytes * threads + 64);
    if (p->scratch == NULL) {
        k_pool_free(p);
        return err_set(e, ERR_NOMEM, "no memory for the compute pool");
    }
    /* Signals belong to the process' loop. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    enum err_code code = ERR_OK;
    for (uint32_t t = 1; t < threads && code == ERR_OK; t++) {
        struct helper_start *start = alloc_get(ALLOC_WORK, sizeof *start);
        if (start != NULL)
            *start = (struct helper_start){p, t};
        const int os = start == NULL
                           ? 12
                           : pthread_create(&p->helpers[p->n_helpers], NULL, helper_main, start);
        if (os != 0) {
            alloc_free(start);
            code = err_set_os(e, ERR_NOMEM, os, "compute thread %u of %u", t + 1, threads);
        } else {
            p->n_helpers++;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    while (code == ERR_OK && atomic_load(&p->started) < p->n_helpers)
        sched_yield();
    if (code == ERR_OK && (atomic_load(&p->inexact) != 0 || !k_pool_float_mode_is_exact()))
        code = err_set(e, ERR_UNSUPPORTED,
                       "the floating-point mode flushes denormals or does not round to nearest; "
                       "answers would not be exact");
    if (code != ERR_OK) {
        k_pool_free(p);
        return code;
    }
    *ret = p;
    return ERR_OK;
}

void k_pool_free(struct k_pool *p)
{
    if (p == NULL)
        return;
    atomic_store(&p->stop, true);
    atomic_fetch_add(&p->wake, 1);
    futex_wake(&p->wake, INT_MAX);
    for (uint32_t t = 0; t < p->n_helpers; t++)
        pthread_join(p->helpers[t], NULL);
    alloc_free(p->scratch);
    alloc_free(p);
}

void *k_pool_scratch(struct k_pool *p, uint32_t thread)
{
    return p->scratch + p->scratch_bytes * thread;
}

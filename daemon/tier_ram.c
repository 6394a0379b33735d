#include "tier_ram.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MLOCK_ONFAULT
#define MLOCK_ONFAULT 1
#endif

enum {
    AT_ONCE_BYTES = 64 << 20,
    PIECE_BYTES = 2 << 20, /* one huge page: nobody waits long for the lock of the address space */
    NICE = 10
};

static void say_refusal(struct tier_ram *t, int error)
{
    struct rlimit limit = {0};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        snprintf(t->refusal, sizeof(t->refusal), "%s; the limit on locked memory is %llu KiB",
                 strerror(error), (unsigned long long)limit.rlim_cur >> 10);
    else
        snprintf(t->refusal, sizeof(t->refusal), "%s", strerror(error));
}

/* False: the rest stays as it is (an older kernel, no memory left: the reads will tell). */
static bool reserve_piece(struct tier_ram *t)
{
    const uint64_t done = atomic_load(&t->reserved), left = t->bytes - done;
    const uint64_t n = left < PIECE_BYTES ? left : PIECE_BYTES;
    if (n == 0 ||
        madvise((char *)t->ops->buffer_host(t->arena) + done, n, MADV_POPULATE_WRITE) != 0)
        return false;
    atomic_store(&t->reserved, done + n);
    return true;
}

static void *reserve_main(void *argument)
{
    struct tier_ram *t = argument;
    pthread_setname_np(pthread_self(), "reserve");
    (void)setpriority(PRIO_PROCESS, (id_t)gettid(), NICE); /* of this thread alone */
    while (!atomic_load(&t->stop) && reserve_piece(t)) {
    }
    return NULL;
}

/* Without a thread the pages come with the reads. */
static void start_thread(struct tier_ram *t)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the loop's */
    t->has_thread = pthread_create(&t->thread, NULL, reserve_main, t) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

enum err_code tier_ram_start(struct tier_ram *t, struct k_device *device, uint64_t bytes,
                             struct err *e)
{
    *t = (struct tier_ram){.ops = k_ops(device), .bytes = bytes};
    const enum err_code code = t->ops->buffer_new(device, bytes, &t->arena, e);
    if (code != ERR_OK)
        return code;
    t->locked = mlock2(t->ops->buffer_host(t->arena), bytes, MLOCK_ONFAULT) == 0;
    if (!t->locked)
        say_refusal(t, errno);
    if (bytes > AT_ONCE_BYTES)
        start_thread(t);
    else
        while (reserve_piece(t)) {
        }
    return ERR_OK;
}

void tier_ram_done(struct tier_ram *t)
{
    if (t->has_thread) {
        atomic_store(&t->stop, true);
        pthread_join(t->thread, NULL);
    }
    if (t->arena != NULL)
        t->ops->buffer_free(t->arena); /* unmapping unlocks */
    *t = (struct tier_ram){.bytes = 0};
}

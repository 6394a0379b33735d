#include "tier_ram.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MLOCK_ONFAULT
#define MLOCK_ONFAULT 1
#endif

enum {
    AT_ONCE_BYTES = 64 << 20,
    PIECE_BYTES = 8 << 20
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
    if (bytes <= AT_ONCE_BYTES)
        while (tier_ram_reserve(t)) {
        }
    return ERR_OK;
}

void tier_ram_done(struct tier_ram *t)
{
    if (t->arena != NULL)
        t->ops->buffer_free(t->arena); /* unmapping unlocks */
    *t = (struct tier_ram){.bytes = 0};
}

bool tier_ram_reserve(struct tier_ram *t)
{
    if (t->arena == NULL || t->reserved == t->bytes)
        return false;
    const uint64_t left = t->bytes - t->reserved, n = left < PIECE_BYTES ? left : PIECE_BYTES;
    char *at = (char *)t->ops->buffer_host(t->arena) + t->reserved;
    /* An older kernel refuses: then the pages come with the reads. */
    if (madvise(at, n, MADV_POPULATE_WRITE) != 0 && errno == EINVAL)
        t->reserved = t->bytes;
    else
        t->reserved += n;
    return true;
}

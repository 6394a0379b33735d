#include "worker_losses.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    MS = 1000000, /* ns */
    PATH_BYTES = 160
};

/* Milliseconds of the last losses, oldest first; 0: there was none. */
struct losses {
    uint64_t ms[WORKER_LOSSES_MOST];
};

static void path_of(const char *socket, char ret[PATH_BYTES])
{
    snprintf(ret, PATH_BYTES, "%s.gpu-lost", socket);
}

static void add(struct losses *l, uint64_t ms)
{
    memmove(l->ms, l->ms + 1, sizeof(l->ms) - sizeof(l->ms[0]));
    l->ms[WORKER_LOSSES_MOST - 1] = ms;
}

/* Whatever the file holds. */
static struct losses read_losses(const char *path)
{
    struct losses l = {{0}};
    char text[WORKER_LOSSES_MOST * 24];
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    const ssize_t n = fd >= 0 ? read(fd, text, sizeof(text) - 1) : 0;
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = '\0';
    uint64_t ms;
    int used;
    for (const char *p = text; sscanf(p, "%" SCNu64 "%n", &ms, &used) == 1; p += used)
        add(&l, ms);
    return l;
}

enum err_code worker_losses_note(const char *socket, uint64_t now_ns, struct err *e)
{
    char path[PATH_BYTES], text[WORKER_LOSSES_MOST * 24];
    size_t n = 0;
    if (socket[0] == '\0')
        return err_set(e, ERR_IO, "the inherited socket has no path beside which to note it");
    path_of(socket, path);
    struct losses l = read_losses(path);
    add(&l, now_ns / MS);
    for (int i = 0; i < WORKER_LOSSES_MOST; i++)
        n += (size_t)snprintf(text + n, sizeof(text) - n, "%" PRIu64 "\n", l.ms[i]);
    const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    const int fd = open(path, flags, 0600);
    const bool written = fd >= 0 && write(fd, text, n) == (ssize_t)n;
    const int failed = errno;
    if (fd >= 0)
        close(fd);
    return written ? ERR_OK : err_set_os(e, ERR_IO, failed, "%s", path);
}

bool worker_losses_are_many(const char *socket, uint64_t now_ns)
{
    char path[PATH_BYTES];
    if (socket[0] == '\0')
        return false;
    path_of(socket, path);
    const struct losses l = read_losses(path);
    const uint64_t now = now_ns / MS, first = l.ms[0];
    return first != 0 && first <= now && now - first < (uint64_t)WORKER_LOSSES_MINUTES * 60000;
}

#include "tier_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "alloc.h"
#include "gguf_file.h"

static bool tier_file_same_time(struct timespec a, struct timespec b)
{
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

/* Notes what the file is, and compares it with what its headers were read from. */
static enum err_code tier_file_look(struct tier_file *f, int same, struct err *e)
{
    struct stat s, before;
    if (fstat(f->fd, &s) != 0)
        return err_set_os(e, ERR_IO, errno, "model file %s", f->label);
    if (!S_ISREG(s.st_mode))
        return err_set(e, ERR_IO, "model file %s is not a regular file", f->label);
    f->size = (uint64_t)s.st_size;
    f->changed = s.st_mtim;
    if (same < 0)
        return ERR_OK;
    if (fstat(same, &before) != 0)
        return err_set_os(e, ERR_IO, errno, "model file %s", f->label);
    if (before.st_dev != s.st_dev || before.st_ino != s.st_ino || before.st_size != s.st_size ||
        !tier_file_same_time(before.st_mtim, s.st_mtim))
        return err_set(e, ERR_FORMAT,
                       "model file %s was replaced while it was loading; start again", f->label);
    return ERR_OK;
}

enum err_code tier_file_open(const char *path, int same, struct tier_file *ret, struct err *e)
{
    struct tier_file f = {.fd = -1};
    snprintf(f.label, sizeof(f.label), "%s", gguf_file_label(path));
    f.fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a fifo must not hold us */
    if (f.fd < 0)
        return err_set_os(e, ERR_IO, errno, "model file %s", f.label);
    enum err_code code = tier_file_look(&f, same, e);
    if (code != ERR_OK) {
        tier_file_close(&f);
        return code;
    }
    tier_file_buffered(&f);
    *ret = f;
    return ERR_OK;
}

void tier_file_close(struct tier_file *f)
{
    if (f->fd >= 0)
        close(f->fd);
    f->fd = -1;
}

void tier_file_buffered(struct tier_file *f)
{
    (void)fcntl(f->fd, F_SETFL, 0); /* neither O_NONBLOCK nor O_DIRECT; cannot fail on a file */
    posix_fadvise(f->fd, 0, 0, POSIX_FADV_RANDOM);
}

/* What the kernel says of direct reads, where it says it (Linux 6.1). */
static enum err_code tier_file_ask(const struct tier_file *f, uint32_t align, struct err *e)
{
    struct statx x;
    if (statx(f->fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &x) != 0 ||
        (x.stx_mask & STATX_DIOALIGN) == 0)
        return ERR_OK;
    if (x.stx_dio_offset_align == 0 || x.stx_dio_mem_align == 0)
        return err_set(e, ERR_UNSUPPORTED, "O_DIRECT refused: its file system has none");
    const uint32_t unit =
        x.stx_dio_offset_align > x.stx_dio_mem_align ? x.stx_dio_offset_align : x.stx_dio_mem_align;
    if (unit > align)
        return err_set(e, ERR_UNSUPPORTED,
                       "O_DIRECT refused: its file system reads in units of %u bytes, at most %u "
                       "are supported",
                       unit, align);
    return ERR_OK;
}

/* A read at an odd multiple of `align` into an odd multiple of it: what a larger unit refuses. */
static enum err_code tier_file_try(const struct tier_file *f, uint32_t align, struct err *e)
{
    uint8_t *block = alloc_aligned(ALLOC_MISC, (size_t)2 * align, (size_t)2 * align);
    if (block == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a trial read of %s", f->label);
    const off_t offset = f->size > align ? (off_t)align : 0;
    ssize_t got;
    do
        got = pread(f->fd, block + align, align, offset);
    while (got < 0 && errno == EINTR);
    const int failed = got < 0 ? errno : 0;
    alloc_free(block);
    if (failed == 0)
        return ERR_OK;
    if (failed == EINVAL || failed == EOPNOTSUPP)
        return err_set_os(e, ERR_UNSUPPORTED, failed, "O_DIRECT refused");
    return err_set_os(e, ERR_IO, failed, "%s: reading %u bytes at %lld; check the disk", f->label,
                      align, (long long)offset);
}

enum err_code tier_file_direct(struct tier_file *f, uint32_t align, struct err *e)
{
    enum err_code code = tier_file_ask(f, align, e);
    if (code != ERR_OK)
        return code;
    if (fcntl(f->fd, F_SETFL, O_DIRECT) != 0)
        return err_set_os(e, ERR_UNSUPPORTED, errno, "O_DIRECT refused");
    code = tier_file_try(f, align, e);
    if (code != ERR_OK)
        tier_file_buffered(f);
    return code;
}

enum err_code tier_file_check(const struct tier_file *f, struct err *e)
{
    struct stat s;
    if (fstat(f->fd, &s) != 0)
        return err_set_os(e, ERR_IO, errno, "model file %s", f->label);
    if ((uint64_t)s.st_size != f->size)
        return err_set(e, ERR_FORMAT,
                       "model file %s has %llu bytes and had %llu when it was opened; restart "
                       "with the right file",
                       f->label, (unsigned long long)s.st_size, (unsigned long long)f->size);
    if (!tier_file_same_time(s.st_mtim, f->changed))
        return err_set(e, ERR_FORMAT,
                       "model file %s was written to since it was opened; restart with the right "
                       "file",
                       f->label);
    return ERR_OK;
}

uint64_t tier_file_size_now(const struct tier_file *f)
{
    struct stat s;
    return fstat(f->fd, &s) == 0 ? (uint64_t)s.st_size : f->size;
}

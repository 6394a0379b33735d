#include "read_counters.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

enum {
    SECTOR_BYTES = 512,
    FILE_MAX_BYTES = 4096
};

static enum err_code slurp(const char *path, char text[static FILE_MAX_BYTES], struct err *e)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? -1 : read(fd, text, FILE_MAX_BYTES - 1);
    const int saved = errno;
    if (fd >= 0)
        close(fd);
    if (n < 0)
        return err_set_os(e, ERR_IO, saved, "%s", path);
    text[n] = '\0';
    return ERR_OK;
}

enum err_code read_counters_init(struct read_counters_source *s, const char *file, pid_t pid,
                                 struct err *e)
{
    struct stat at;
    if (stat(file, &at) != 0)
        return err_set_os(e, ERR_IO, errno, "%s", file);
    memset(s, 0, sizeof *s);
    snprintf(s->disk, sizeof s->disk, "/sys/dev/block/%u:%u/stat", major(at.st_dev),
             minor(at.st_dev));
    if (access(s->disk, R_OK) != 0)
        s->disk[0] = '\0';
    const long id = pid == 0 ? (long)getpid() : (long)pid;
    snprintf(s->io, sizeof s->io, "/proc/%ld/io", id);
    snprintf(s->stat, sizeof s->stat, "/proc/%ld/stat", id);
    return ERR_OK;
}

enum err_code read_counters_take(const struct read_counters_source *s, struct read_counters *ret,
                                 struct err *e)
{
    char text[FILE_MAX_BYTES];
    struct read_counters c = {0};
    enum err_code code = ERR_OK;
    if (s->disk[0] != '\0') {
        uint64_t sectors = 0;
        if ((code = slurp(s->disk, text, e)) != ERR_OK)
            return code;
        if (sscanf(text, " %*u %*u %" SCNu64, &sectors) != 1)
            return err_set(e, ERR_FORMAT, "%s: no third number", s->disk);
        c.disk_bytes = sectors * SECTOR_BYTES;
    }
    if ((code = slurp(s->io, text, e)) != ERR_OK)
        return code;
    const char *line = strstr(text, "\nread_bytes: ");
    if (line == NULL || sscanf(line, " read_bytes: %" SCNu64, &c.process_bytes) != 1)
        return err_set(e, ERR_FORMAT, "%s: no read_bytes", s->io);
    if ((code = slurp(s->stat, text, e)) != ERR_OK)
        return code;
    /* The name in brackets may hold anything; behind it: state, then 8 numbers, then majflt. */
    line = strrchr(text, ')');
    if (line == NULL ||
        sscanf(line + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %" SCNu64, &c.major_faults) != 1)
        return err_set(e, ERR_FORMAT, "%s: no count of major faults", s->stat);
    *ret = c;
    return ERR_OK;
}

struct read_counters read_counters_since(const struct read_counters *from,
                                         const struct read_counters *to)
{
    return (struct read_counters){.disk_bytes = to->disk_bytes - from->disk_bytes,
                                  .process_bytes = to->process_bytes - from->process_bytes,
                                  .major_faults = to->major_faults - from->major_faults};
}

/* What has been read so far, for a bench: from the disk that holds a file by anybody (the block
 * device's own counter), by one process (/proc/PID/io), and its major faults. Differences of two
 * takes are what happened between them; where disk and process differ, somebody else was reading. */
#ifndef ISLET_READ_COUNTERS_H
#define ISLET_READ_COUNTERS_H

#include <stdint.h>
#include <sys/types.h>

#include "err.h"

struct read_counters {
    uint64_t disk_bytes;    /* 0 throughout if the file is on no block device */
    uint64_t process_bytes; /* fetched from storage for the process, page faults included */
    uint64_t major_faults;
};

struct read_counters_source {
    char disk[64], io[64], stat[64]; /* paths under /sys and /proc; disk "" if there is none */
};

/* Of this process with pid 0. ERR_IO: the file is not there. */
enum err_code read_counters_init(struct read_counters_source *s, const char *file, pid_t pid,
                                 struct err *e) __attribute__((warn_unused_result));
/* ERR_IO: the process is gone, or its counters may not be read. */
enum err_code read_counters_take(const struct read_counters_source *s, struct read_counters *ret,
                                 struct err *e) __attribute__((warn_unused_result));
struct read_counters read_counters_since(const struct read_counters *from,
                                         const struct read_counters *to);

#endif

/* One file of the model, opened for reading experts from it, past the page cache where the system
 * allows. Any thread may read from it. */
#ifndef ISLET_TIER_FILE_H
#define ISLET_TIER_FILE_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "err.h"

enum {
    TIER_FILE_LABEL = 104
};

struct tier_file {
    int fd;
    char label[TIER_FILE_LABEL]; /* the end of its path, for texts */
    uint64_t size;               /* as it was when opened */
    struct timespec changed;     /* the same */
};

/* Fills *ret; close with tier_file_close. `same`: a descriptor of the file it must be, or -1.
 * ERR_IO: cannot be opened, not a regular file; ERR_FORMAT: another file than `same`. */
enum err_code tier_file_open(const char *path, int same, struct tier_file *ret, struct err *e)
    __attribute__((warn_unused_result));
void tier_file_close(struct tier_file *f); /* fd -1 is fine */

/* Switches to direct reads in units of `align` bytes (a power of two), in the file as in memory,
 * and tries one. ERR_UNSUPPORTED: refused, with the reason; the file then reads through the page
 * cache. ERR_NOMEM, ERR_IO: the trial failed for another reason. */
enum err_code tier_file_direct(struct tier_file *f, uint32_t align, struct err *e)
    __attribute__((warn_unused_result));
/* Switches to reads through the page cache, without read-ahead. */
void tier_file_buffered(struct tier_file *f);

/* ERR_FORMAT: size or time of change are not those of opening; ERR_IO: the system cannot tell. */
enum err_code tier_file_check(const struct tier_file *f, struct err *e)
    __attribute__((warn_unused_result));
/* Size now; that of opening where the system cannot tell. */
uint64_t tier_file_size_now(const struct tier_file *f);

#endif

/* How tier_ssd reads: one small interface, several readers behind it. A reader takes reads of known
 * place and length and hands their results back in any order, as the system gave them: counts that
 * may be short, and errors; what to make of these is tier_ssd's.
 *   tier_read_uring   io_uring, registered files and buffers
 *   tier_read_pread   a pool of threads, one a read in flight
 *   a test's own      through struct tier_read_source
 * One thread calls a reader, though not always the one that opened it. */
#ifndef ISLET_TIER_READ_H
#define ISLET_TIER_READ_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

struct tier_read_setup {
    const int *fds; /* [n_fds] open until the reader is closed; with O_DIRECT or without */
    uint32_t n_fds;
    void *arena; /* all reads go into it; there until the reader is closed */
    uint64_t arena_bytes;
    uint32_t depth; /* reads open at once at most */
    bool drop;      /* leave nothing of what was read in the page cache (fds without O_DIRECT) */
};

struct tier_read_op {
    uint32_t token; /* the caller's name for it */
    uint32_t file;  /* index into fds */
    uint64_t offset;
    uint32_t bytes;
    void *to; /* in the arena */
};

struct tier_read_end {
    uint32_t token;
    int32_t result; /* bytes read, or -errno */
};

struct tier_read {
    /* Begins n reads; does not wait. */
    void (*start)(struct tier_read *r, const struct tier_read_op *ops, uint32_t n);
    /* Takes up to n results; with `wait` blocks until there is one. May return 0 all the same. */
    uint32_t (*take)(struct tier_read *r, bool wait, struct tier_read_end *ret, uint32_t n);
    /* NULL, or to be told that the first `bytes` of the arena have their pages: they may be pinned
     * now without making the system clear memory first. */
    void (*reserved)(struct tier_read *r, uint64_t bytes);
    /* No read may be open. */
    void (*close)(struct tier_read *r);
    char about[120]; /* "io_uring", with what it had to do without */
};

/* A reader that is not chosen by a setting. */
struct tier_read_source {
    enum err_code (*open)(void *context, const struct tier_read_setup *setup,
                          struct tier_read **ret, struct err *e);
    void *context;
};

/* Give *ret; free with (*ret)->close. ERR_UNSUPPORTED: the system refuses, with its reason;
 * ERR_NOMEM. */
enum err_code tier_read_uring_open(const struct tier_read_setup *setup, struct tier_read **ret,
                                   struct err *e) __attribute__((warn_unused_result));
enum err_code tier_read_pread_open(const struct tier_read_setup *setup, struct tier_read **ret,
                                   struct err *e) __attribute__((warn_unused_result));

#endif

/* Experts on their way from the file: a request is the slices of one expert, read straight into its
 * slot, several requests in flight. io_uring with O_DIRECT, registered files and buffers; a pool of
 * threads with pread where io_uring is refused; through the page cache where O_DIRECT is refused or
 * `ssd.io = buffered` asks for it: tier_ssd_about says which and why.
 *
 * A slice lies in its slot at its file offset modulo TIER_SSD_ALIGN, so that direct reads need no
 * copy: a part is read from the aligned offset below it to the aligned one above (at the end of the
 * file: as far as it goes). The engine thread's. */
#ifndef ISLET_TIER_SSD_H
#define ISLET_TIER_SSD_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

enum {
    TIER_SSD_ALIGN = 4096,
    TIER_SSD_PARTS = 3,       /* gate, up, down */
    TIER_SSD_REQUESTS = 1024, /* open at once */
    TIER_SSD_MAX_DEPTH = 256
};

struct tier_read_source;

/* Order of the words of ssd.io. */
enum tier_ssd_io {
    TIER_SSD_AUTO,
    TIER_SSD_URING,
    TIER_SSD_PREAD,
    TIER_SSD_BUFFERED
};

struct tier_ssd_options {
    const char *const *paths; /* [n_files] of the (split) model file, borrowed while opening */
    uint32_t n_files;
    enum tier_ssd_io io;
    uint32_t depth; /* reads in flight at most, 1..256 */
    void *arena;    /* all reads go into it; aligned to TIER_SSD_ALIGN; lent until close */
    uint64_t arena_bytes;
    /* [n_files] of the same files, opened before by whoever read their headers: a file that was
     * replaced since then is ERR_FORMAT. NULL: not compared. Borrowed while opening. */
    const int *fds;
    const struct tier_read_source *source; /* NULL: by `io`; else a test's own reader */
};

struct tier_ssd_part {
    uint32_t file;   /* index into paths */
    uint64_t offset; /* of the slice in the file */
    uint64_t bytes;
    uint64_t place; /* of the slice in the arena; place % 4096 == offset % 4096. The aligned window
                      * around it lies in the arena and belongs to this request alone */
};

struct tier_ssd_counts {
    uint64_t bytes, reads, retries, failures; /* bytes: as read from the file, aligned windows */
    uint64_t wait_ns;                         /* blocked in tier_ssd_wait */
};

struct tier_ssd_result {
    uint64_t id;
    enum err_code code; /* ERR_OK; ERR_IO: read error, or the file ends too early */
    struct err error;
    /* The read that failed: it may begin before the slice that it was for, and end behind it. */
    uint32_t file;
    uint64_t offset, bytes;
};

struct tier_ssd;

/* Gives *ret; free with tier_ssd_close. ERR_IO: a file cannot be opened; ERR_UNSUPPORTED: io asks
 * for what the system refuses. Remembers size and time of change of the files. */
enum err_code tier_ssd_open(const struct tier_ssd_options *options, struct tier_ssd **ret,
                            struct err *e) __attribute__((warn_unused_result));
/* Waits for the reads in flight, then frees. NULL is fine. */
void tier_ssd_close(struct tier_ssd *t);

/* Queues the parts of one request, [n] with n <= TIER_SSD_PARTS; `id` is the caller's name for it.
 * Touching parts become one read. At most TIER_SSD_REQUESTS may be open (tier_ssd_room). Reads
 * begin at once, as many as `depth` allows, in the order of the calls. Returns the bytes that will
 * be counted for it if no read fails or is repeated: windows that parts share once, none behind the
 * end of the file. */
uint64_t tier_ssd_start(struct tier_ssd *t, uint64_t id, const struct tier_ssd_part *parts,
                        uint32_t n);
/* Requests that may be started now. */
uint32_t tier_ssd_room(const struct tier_ssd *t);
/* Takes up to n results of requests that ended and keeps the queue going. With `block` waits for at
 * least one if any request is open. Returns their number. A short read is continued, EINTR and
 * EAGAIN repeated, an error tried once more. */
uint32_t tier_ssd_wait(struct tier_ssd *t, bool block, struct tier_ssd_result *ret, uint32_t n);

/* ERR_FORMAT: a file is not what it was when it was opened (size, time of change); ERR_IO: the
 * system cannot tell. */
enum err_code tier_ssd_check_files(struct tier_ssd *t, struct err *e)
    __attribute__((warn_unused_result));

/* The first `bytes` of the arena have their pages from now on: the reader may register them. */
void tier_ssd_reserved(struct tier_ssd *t, uint64_t bytes);

bool tier_ssd_is_direct(const struct tier_ssd *t); /* reads past the page cache */
struct tier_ssd_counts tier_ssd_count(const struct tier_ssd *t);
/* Lends: "io_uring, O_DIRECT, depth 8", or "pread with 8 threads, O_DIRECT, depth 8 (io_uring
 * refused: ...)". */
const char *tier_ssd_about(const struct tier_ssd *t);

#endif

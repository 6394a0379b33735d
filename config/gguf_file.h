/* A model file, or a set of split files (-00001-of-0000N.gguf), opened for reading: headers parsed,
 * tensors of all parts in one table. Headers are read by pread, never mapped: a truncated file must
 * not be a SIGBUS. Immutable after open, but for the file descriptors' use; any thread. */
#ifndef ISLET_GGUF_FILE_H
#define ISLET_GGUF_FILE_H

#include "gguf.h"

/* The end of a path, 100 bytes at most, so that a long one does not push the cause out of an
 * error's text. Lends. */
const char *gguf_file_label(const char *path);

enum {
    GGUF_FILE_MAX_PATH = 4096
};

struct gguf_file {
    char *path; /* as given */
    uint32_t n_files;
    int *fds;              /* O_RDONLY | O_CLOEXEC, one a part */
    uint64_t *file_sizes;  /* as fstat said at open */
    struct gguf **headers; /* one a part; keys are those of part 0 */
    size_t n_tensors;
    const struct gguf_tensor **tensors; /* own copies, by part and file order; .file = part */
};

/* Opens `path`; if it names one part of a split set, all of them. Gives *ret; free with
 * gguf_file_close. Errors: IO (missing, unreadable, a directory: says so with the remedy), FORMAT,
 * LIMIT, NOMEM. */
enum err_code gguf_file_open(const char *path, struct gguf_file **ret, struct err *e)
    __attribute__((warn_unused_result));
void gguf_file_close(struct gguf_file *f);
/* Path of part `file`. */
void gguf_file_part_path(const struct gguf_file *f, uint32_t file, char ret[GGUF_FILE_MAX_PATH]);
static inline const struct gguf *gguf_file_keys(const struct gguf_file *f)
{
    return f->headers[0];
}
const struct gguf_tensor *gguf_file_tensor(const struct gguf_file *f, const char *name);
/* Reads n bytes at `offset` of part `file`; short reads and EINTR are retried. ERR_IO names file
 * and offset; a file that became shorter is said as that. */
enum err_code gguf_file_read(const struct gguf_file *f, uint32_t file, uint64_t offset, void *out,
                             size_t n, struct err *e) __attribute__((warn_unused_result));

/* File digest: XXH3-128 over all header bytes, file sizes, and the first and last 4 KiB of each
 * tensor. Shape digest: over struct model_shape's fields, the tensor table and the tokenizer keys.
 * 16 bytes each, canonical (big-endian). */
struct model_shape;
enum err_code gguf_file_digest(const struct gguf_file *f, uint8_t ret[16], struct err *e)
    __attribute__((warn_unused_result));
void gguf_file_shape_digest(const struct gguf_file *f, const struct model_shape *shape,
                            uint8_t ret[16]);

#endif

#include "gguf_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* For the size of XXH3_state_t, fixed since 0.8.0: a digest then needs no heap and cannot fail. */
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

#include "alloc.h"
#include "shape.h"

enum {
    GGUF_FILE_FIRST_READ = 64 * 1024,
    GGUF_FILE_MAX_HEADER = 256 * 1024 * 1024,
    GGUF_FILE_MAX_PARTS = 999,
    GGUF_FILE_LABEL = 100,
    GGUF_FILE_SAMPLE = 4096, /* bytes of a tensor's start and end in the digest */
    GGUF_FILE_SUFFIX = sizeof "-00001-of-00002.gguf" - 1,
};

const char *gguf_file_label(const char *path)
{
    size_t n = strlen(path);
    if (n <= GGUF_FILE_LABEL)
        return path;
    const char *end = path + n - GGUF_FILE_LABEL, *slash = strchr(end, '/');
    return slash != NULL && slash[1] != '\0' ? slash + 1 : end;
}

/* ---- names of parts -------------------------------------------------------------------------- */

/* Reads the end of a split file's name. False if it has none. */
static bool gguf_file_split_name(const char *path, unsigned *ret_no, unsigned *ret_count)
{
    size_t n = strlen(path);
    char again[GGUF_FILE_SUFFIX + 1];
    unsigned no, count;
    if (n < GGUF_FILE_SUFFIX)
        return false;
    const char *end = path + n - GGUF_FILE_SUFFIX;
    if (sscanf(end, "-%5u-of-%5u.gguf", &no, &count) != 2 || no > 99999 || count > 99999)
        return false;
    snprintf(again, sizeof again, "-%05u-of-%05u.gguf", no, count);
    if (strcmp(again, end) != 0)
        return false;
    *ret_no = no;
    *ret_count = count;
    return true;
}

void gguf_file_part_path(const struct gguf_file *f, uint32_t file, char ret[GGUF_FILE_MAX_PATH])
{
    if (f->n_files <= 1) {
        snprintf(ret, GGUF_FILE_MAX_PATH, "%s", f->path);
        return;
    }
    size_t stem = strlen(f->path) - GGUF_FILE_SUFFIX;
    snprintf(ret, GGUF_FILE_MAX_PATH, "%.*s-%05u-of-%05u.gguf", (int)stem, f->path, file + 1,
             f->n_files);
}

/* ---- opening --------------------------------------------------------------------------------- */

static enum err_code gguf_file_open_one(const char *path, int *ret_fd, uint64_t *ret_size,
                                        struct err *e)
{
    struct stat st;
    /* O_NONBLOCK: a FIFO must be refused, not waited for. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_set_os(e, ERR_IO, errno, "model file %s", gguf_file_label(path));
    if (fstat(fd, &st) != 0) {
        int saved = errno;
        close(fd);
        return err_set_os(e, ERR_IO, saved, "model file %s", gguf_file_label(path));
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        if (S_ISDIR(st.st_mode))
            return err_set(e, ERR_IO, "model file %s is a directory; name the .gguf file in it",
                           gguf_file_label(path));
        return err_set(e, ERR_IO, "model file %s is not a regular file", gguf_file_label(path));
    }
    *ret_fd = fd;
    *ret_size = (uint64_t)st.st_size;
    return ERR_OK;
}

static enum err_code gguf_file_pread(int fd, const char *path, uint64_t offset, void *out, size_t n,
                                     struct err *e)
{
    uint8_t *p = out;
    while (n > 0) {
        ssize_t got = pread(fd, p, n, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return err_set_os(e, ERR_IO, errno, "%s: reading %zu bytes at %llu",
                              gguf_file_label(path), n, (unsigned long long)offset);
        if (got == 0)
            return err_set(e, ERR_IO,
                           "%s: ends at byte %llu; it became shorter since it was opened",
                           gguf_file_label(path), (unsigned long long)offset);
        p += got;
        n -= (size_t)got;
        offset += (uint64_t)got;
    }
    return ERR_OK;
}

/* Reads the header in growing steps: most fit into the first, those of large vocabularies take a
 * few more. */
static enum err_code gguf_file_read_header(struct gguf_file *f, uint32_t file, const char *path,
                                           struct err *e)
{
    uint64_t size = f->file_sizes[file], want = GGUF_FILE_FIRST_READ;
    enum err_code rc = ERR_OK;
    for (bool more = true; more && rc == ERR_OK;) {
        struct err why = {.code = ERR_OK};
        uint64_t need = 0;
        size_t n = want < size ? want : size;
        uint8_t *bytes = alloc_get(ALLOC_MODEL, n);
        if (bytes == NULL)
            return err_set(e, ERR_NOMEM, "%s: no memory for a header of %zu bytes",
                           gguf_file_label(path), n);
        rc = gguf_file_pread(f->fds[file], path, 0, bytes, n, e);
        if (rc == ERR_OK)
            rc = gguf_parse(bytes, n, size, &f->headers[file], &need, &why);
        alloc_free(bytes);
        more = rc == ERR_LIMIT && need > n && need <= GGUF_FILE_MAX_HEADER;
        if (more) {
            want = need > want * 2 ? need : want * 2;
            rc = ERR_OK;
        } else if (rc == ERR_LIMIT && need > n) {
            return err_set(e, ERR_LIMIT, "%s: the header needs %llu bytes; the limit is %d",
                           gguf_file_label(path), (unsigned long long)need, GGUF_FILE_MAX_HEADER);
        } else if (rc != ERR_OK && why.code != ERR_OK) {
            return err_set(e, why.code, "%s: %s", gguf_file_label(path), why.text);
        }
    }
    return rc;
}

static enum err_code gguf_file_open_part(struct gguf_file *f, uint32_t file, struct err *e)
{
    char path[GGUF_FILE_MAX_PATH];
    gguf_file_part_path(f, file, path);
    enum err_code rc = gguf_file_open_one(path, &f->fds[file], &f->file_sizes[file], e);
    if (rc != ERR_OK && f->n_files > 1)
        (void)err_wrap(e, "part %u of %u", file + 1, f->n_files);
    return rc == ERR_OK ? gguf_file_read_header(f, file, path, e) : rc;
}

static enum err_code gguf_file_reserve(struct gguf_file *f, uint32_t n_files, struct err *e)
{
    f->fds = alloc_get(ALLOC_MODEL, n_files * sizeof f->fds[0]);
    f->file_sizes = alloc_zero(ALLOC_MODEL, n_files, sizeof f->file_sizes[0]);
    f->headers = alloc_zero(ALLOC_MODEL, n_files, sizeof f->headers[0]);
    if (f->fds == NULL || f->file_sizes == NULL || f->headers == NULL)
        return err_set(e, ERR_NOMEM, "%s: no memory for a table of %u files",
                       gguf_file_label(f->path), n_files);
    for (uint32_t i = 0; i < n_files; i++)
        f->fds[i] = -1;
    f->n_files = n_files;
    return ERR_OK;
}

static void gguf_file_release(struct gguf_file *f)
{
    for (uint32_t i = 0; i < f->n_files; i++) {
        if (f->fds != NULL && f->fds[i] >= 0)
            close(f->fds[i]);
        if (f->headers != NULL)
            gguf_free(f->headers[i]);
    }
    alloc_free(f->fds);
    alloc_free(f->file_sizes);
    alloc_free(f->headers);
    f->fds = NULL;
    f->file_sizes = NULL;
    f->headers = NULL;
    f->n_files = 0;
}

/* What the keys of a header say about the set. *ret_count is 1 for a file of its own. */
static enum err_code gguf_file_split_keys(const struct gguf *g, const char *path, unsigned *ret_no,
                                          unsigned *ret_count, struct err *e)
{
    uint64_t no = 0, count = 1;
    if (gguf_has(g, "split.count") && !gguf_u64(g, "split.count", &count))
        return err_set(e, ERR_FORMAT, "%s: split.count is not a number", gguf_file_label(path));
    *ret_no = 0;
    *ret_count = 1;
    if (count <= 1)
        return ERR_OK;
    if (count > GGUF_FILE_MAX_PARTS)
        return err_set(e, ERR_FORMAT, "%s: split.count is %llu; the limit is %d",
                       gguf_file_label(path), (unsigned long long)count, GGUF_FILE_MAX_PARTS);
    if (!gguf_u64(g, "split.no", &no) || no >= count)
        return err_set(e, ERR_FORMAT, "%s: split.no is missing or not below split.count = %llu",
                       gguf_file_label(path), (unsigned long long)count);
    *ret_no = (unsigned)no;
    *ret_count = (unsigned)count;
    return ERR_OK;
}

/* Part `file` must say of itself what its name says. */
static enum err_code gguf_file_check_part(const struct gguf_file *f, uint32_t file, struct err *e)
{
    char path[GGUF_FILE_MAX_PATH];
    unsigned no, count;
    gguf_file_part_path(f, file, path);
    enum err_code rc = gguf_file_split_keys(f->headers[file], path, &no, &count, e);
    if (rc != ERR_OK)
        return rc;
    if (count != f->n_files || no != file)
        return err_set(e, ERR_FORMAT, "%s: says that it is part %u of %u; parts are mixed up",
                       gguf_file_label(path), no + 1, count);
    return ERR_OK;
}

/* Opens the set that `path` names a part of, given what that part's own header says. */
static enum err_code gguf_file_open_split(struct gguf_file *f, unsigned no, unsigned count,
                                          struct err *e)
{
    unsigned name_no = 0, name_count = 0;
    if (!gguf_file_split_name(f->path, &name_no, &name_count) || name_no != no + 1 ||
        name_count != count)
        return err_set(e, ERR_FORMAT,
                       "%s: says that it is part %u of %u, so its name must end in "
                       "-%05u-of-%05u.gguf",
                       gguf_file_label(f->path), no + 1, count, no + 1, count);
    gguf_file_release(f);
    enum err_code rc = gguf_file_reserve(f, count, e);
    for (uint32_t i = 0; i < count && rc == ERR_OK; i++) {
        rc = gguf_file_open_part(f, i, e);
        if (rc == ERR_OK)
            rc = gguf_file_check_part(f, i, e);
    }
    return rc;
}

/* Index in f->tensors of the first tensor of a part. */
static size_t gguf_file_first(const struct gguf_file *f, uint32_t file)
{
    size_t first = 0;
    for (uint32_t i = 0; i < file; i++)
        first += gguf_n_tensors(f->headers[i]);
    return first;
}

static enum err_code gguf_file_list_tensors(struct gguf_file *f, struct err *e)
{
    uint64_t said = 0;
    size_t n = gguf_file_first(f, f->n_files), at = 0;
    struct gguf_tensor *copies = alloc_zero(ALLOC_MODEL, n, sizeof copies[0]);
    f->tensors = alloc_zero(ALLOC_MODEL, n, sizeof f->tensors[0]);
    if (copies == NULL || f->tensors == NULL) {
        alloc_free(copies);
        return err_set(e, ERR_NOMEM, "%s: no memory for %zu tensors", gguf_file_label(f->path), n);
    }
    if (n == 0)
        alloc_free(copies);
    f->n_tensors = n;
    for (uint32_t file = 0; file < f->n_files; file++)
        for (size_t i = 0; i < gguf_n_tensors(f->headers[file]); i++, at++) {
            copies[at] = *gguf_tensor_at(f->headers[file], i);
            copies[at].file = file;
            f->tensors[at] = &copies[at];
        }
    const struct gguf *keys = gguf_file_keys(f);
    if (f->n_files > 1 && gguf_u64(keys, "split.tensors.count", &said) && said != n)
        return err_set(e, ERR_FORMAT, "%s: split.tensors.count is %llu, but the parts hold %zu",
                       gguf_file_label(f->path), (unsigned long long)said, n);
    return ERR_OK;
}

/* Within a part gguf_parse has seen to it. */
static enum err_code gguf_file_refuse_twins(const struct gguf_file *f, struct err *e)
{
    char name[256];
    for (size_t i = gguf_file_first(f, f->n_files > 1 ? 1 : f->n_files); i < f->n_tensors; i++) {
        const struct gguf_tensor *t = f->tensors[i];
        snprintf(name, sizeof name, "%.*s", (int)t->name.size, t->name.data);
        for (uint32_t file = 0; file < t->file; file++)
            if (gguf_tensor_find(f->headers[file], name) != NULL)
                return err_set(e, ERR_FORMAT, "%s: tensor %s is in parts %u and %u",
                               gguf_file_label(f->path), name, file + 1, t->file + 1);
    }
    return ERR_OK;
}

enum err_code gguf_file_open(const char *path, struct gguf_file **ret, struct err *e)
{
    unsigned no = 0, count = 1;
    if (strlen(path) >= GGUF_FILE_MAX_PATH - GGUF_FILE_SUFFIX)
        return err_set(e, ERR_IO, "model file %.80s...: the path has %zu bytes; the limit is %d",
                       path, strlen(path), GGUF_FILE_MAX_PATH - (int)GGUF_FILE_SUFFIX);
    struct gguf_file *f = alloc_zero(ALLOC_MODEL, 1, sizeof *f);
    enum err_code rc = ERR_OK;
    if (f != NULL)
        f->path = alloc_text(ALLOC_MODEL, path, strlen(path));
    if (f == NULL || f->path == NULL) {
        rc = err_set(e, ERR_NOMEM, "%s: no memory to open it", gguf_file_label(path));
        goto out;
    }
    rc = gguf_file_reserve(f, 1, e);
    if (rc == ERR_OK)
        rc = gguf_file_open_part(f, 0, e);
    if (rc == ERR_OK)
        rc = gguf_file_split_keys(f->headers[0], path, &no, &count, e);
    if (rc == ERR_OK && count > 1)
        rc = gguf_file_open_split(f, no, count, e);
    if (rc == ERR_OK)
        rc = gguf_file_list_tensors(f, e);
    if (rc == ERR_OK)
        rc = gguf_file_refuse_twins(f, e);
out:
    if (rc == ERR_OK)
        *ret = f;
    else
        gguf_file_close(f);
    return rc;
}

void gguf_file_close(struct gguf_file *f)
{
    if (f == NULL)
        return;
    if (f->tensors != NULL && f->n_tensors > 0)
        alloc_free((void *)(uintptr_t)f->tensors[0]); /* all copies are one block */
    alloc_free(f->tensors);
    gguf_file_release(f);
    alloc_free(f->path);
    alloc_free(f);
}

const struct gguf_tensor *gguf_file_tensor(const struct gguf_file *f, const char *name)
{
    for (uint32_t file = 0; file < f->n_files; file++) {
        const struct gguf_tensor *t = gguf_tensor_find(f->headers[file], name);
        if (t != NULL)
            return f->tensors[gguf_file_first(f, file) +
                              (size_t)(t - gguf_tensor_at(f->headers[file], 0))];
    }
    return NULL;
}

enum err_code gguf_file_read(const struct gguf_file *f, uint32_t file, uint64_t offset, void *out,
                             size_t n, struct err *e)
{
    char path[GGUF_FILE_MAX_PATH];
    gguf_file_part_path(f, file, path);
    uint64_t size = f->file_sizes[file];
    if (offset > size || n > size - offset)
        return err_set(e, ERR_IO, "%s: %zu bytes at %llu pass its end at %llu",
                       gguf_file_label(path), n, (unsigned long long)offset,
                       (unsigned long long)size);
    return gguf_file_pread(f->fds[file], path, offset, out, n, e);
}

/* ---- digests --------------------------------------------------------------------------------- */

static void gguf_file_hash_u64(XXH3_state_t *state, uint64_t value)
{
    uint8_t bytes[8];
    for (unsigned i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(value >> (56 - 8 * i));
    XXH3_128bits_update(state, bytes, sizeof bytes);
}

static void gguf_file_hash_f64(XXH3_state_t *state, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    gguf_file_hash_u64(state, bits);
}

static void gguf_file_hash_text(XXH3_state_t *state, struct gguf_text text)
{
    gguf_file_hash_u64(state, text.size);
    XXH3_128bits_update(state, text.data, text.size);
}

static void gguf_file_hash_end(XXH3_state_t *state, uint8_t ret[16])
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
    memcpy(ret, canonical.digest, 16);
}

static enum err_code gguf_file_hash_range(const struct gguf_file *f, XXH3_state_t *state,
                                          uint32_t file, uint64_t offset, uint64_t n, struct err *e)
{
    uint8_t chunk[GGUF_FILE_SAMPLE];
    while (n > 0) {
        size_t step = n < sizeof chunk ? n : sizeof chunk;
        enum err_code rc = gguf_file_read(f, file, offset, chunk, step, e);
        if (rc != ERR_OK)
            return rc;
        XXH3_128bits_update(state, chunk, step);
        offset += step;
        n -= step;
    }
    return ERR_OK;
}

enum err_code gguf_file_digest(const struct gguf_file *f, uint8_t ret[16], struct err *e)
{
    XXH3_state_t whole, *state = &whole;
    XXH3_128bits_reset(state);
    enum err_code rc = ERR_OK;
    for (uint32_t file = 0; file < f->n_files && rc == ERR_OK; file++) {
        rc = gguf_file_hash_range(f, state, file, 0, gguf_header_bytes(f->headers[file]), e);
        gguf_file_hash_u64(state, f->file_sizes[file]);
    }
    for (size_t i = 0; i < f->n_tensors && rc == ERR_OK; i++) {
        const struct gguf_tensor *t = f->tensors[i];
        uint64_t n = t->bytes < GGUF_FILE_SAMPLE ? t->bytes : GGUF_FILE_SAMPLE;
        rc = gguf_file_hash_range(f, state, t->file, t->offset, n, e);
        if (rc == ERR_OK)
            rc = gguf_file_hash_range(f, state, t->file, t->offset + t->bytes - n, n, e);
    }
    if (rc == ERR_OK)
        gguf_file_hash_end(state, ret);
    return rc;
}

static void gguf_file_hash_shape(XXH3_state_t *state, const struct model_shape *s)
{
    gguf_file_hash_text(state, (struct gguf_text){.data = s->arch, .size = strlen(s->arch)});
    const uint64_t numbers[] = {
        s->n_layer,     s->n_embd,   s->n_vocab,          s->n_ctx_train, s->n_head,
        s->n_head_kv,   s->head_dim, s->rope_dim,         s->n_expert,    s->n_expert_used,
        s->n_ff_expert, s->qk_norm,  s->router_normalise, s->tied_head,   s->n_params,
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        gguf_file_hash_u64(state, numbers[i]);
    gguf_file_hash_f64(state, s->rope_base);
    gguf_file_hash_f64(state, (double)s->rms_eps);
    gguf_file_hash_f64(state, (double)s->attention_scale);
    gguf_file_hash_f64(state, (double)s->router_scale);
}

static void gguf_file_hash_array(XXH3_state_t *state, const struct gguf_array *a)
{
    gguf_file_hash_u64(state, gguf_array_kind(a));
    gguf_file_hash_u64(state, gguf_array_count(a));
    for (uint64_t i = 0; i < gguf_array_count(a); i++) {
        struct gguf_text text;
        int64_t integer;
        double real;
        if (gguf_array_text_at(a, i, &text))
            gguf_file_hash_text(state, text);
        else if (gguf_array_i64_at(a, i, &integer))
            gguf_file_hash_u64(state, (uint64_t)integer);
        else if (gguf_array_f64_at(a, i, &real))
            gguf_file_hash_f64(state, real);
    }
}

/* Keys of the tokenizer, in file order: vocabulary, merges, special tokens, template. */
static void gguf_file_hash_tokenizer(XXH3_state_t *state, const struct gguf *g)
{
    static const char prefix[] = "tokenizer.";
    for (size_t i = 0; i < gguf_n_keys(g); i++) {
        struct gguf_text key = gguf_key_at(g, i), text;
        char name[256];
        uint64_t number;
        double real;
        bool flag;
        if (key.size >= sizeof name || key.size < sizeof prefix - 1 ||
            memcmp(key.data, prefix, sizeof prefix - 1) != 0)
            continue;
        memcpy(name, key.data, key.size);
        name[key.size] = '\0';
        gguf_file_hash_text(state, key);
        const struct gguf_array *a = gguf_array_get(g, name);
        if (a != NULL)
            gguf_file_hash_array(state, a);
        else if (gguf_text(g, name, &text))
            gguf_file_hash_text(state, text);
        else if (gguf_bool(g, name, &flag))
            gguf_file_hash_u64(state, flag);
        else if (gguf_u64(g, name, &number))
            gguf_file_hash_u64(state, number);
        else if (gguf_f64(g, name, &real))
            gguf_file_hash_f64(state, real);
    }
}

/* The name is left out: a renamed file is the same model. */
void gguf_file_shape_digest(const struct gguf_file *f, const struct model_shape *shape,
                            uint8_t ret[16])
{
    XXH3_state_t whole, *state = &whole;
    XXH3_128bits_reset(state);
    gguf_file_hash_shape(state, shape);
    for (size_t i = 0; i < f->n_tensors; i++) {
        const struct gguf_tensor *t = f->tensors[i];
        gguf_file_hash_text(state, t->name);
        gguf_file_hash_u64(state, t->type);
        for (unsigned d = 0; d < 4; d++)
            gguf_file_hash_u64(state, t->dims[d]);
    }
    gguf_file_hash_tokenizer(state, gguf_file_keys(f));
    gguf_file_hash_end(state, ret);
}

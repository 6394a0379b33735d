#include "route_trace.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "alloc.h"
#include "log.h"

enum {
    BUFFER_BYTES = 256 << 10,
    HEAD_BYTES = 24
};

static const char magic[8] = "ISLETRT1";

struct route_trace {
    int fd; /* -1: a write failed, nothing more is traced */
    uint32_t n_layer, n_used;
    size_t used;
    char *path;
    uint8_t buffer[BUFFER_BYTES];
};

/* ---- writing ------------------------------------------------------------------------------- */

static void stop(struct route_trace *t, int why)
{
    log_warn("route_trace", "stopped", "path=%s error=\"%s\" action=\"continuing: not traced\"",
             t->path, strerror(why));
    close(t->fd);
    t->fd = -1;
}

static void flush(struct route_trace *t)
{
    size_t done = 0;
    while (t->fd >= 0 && done < t->used) {
        const ssize_t n = write(t->fd, t->buffer + done, t->used - done);
        if (n > 0)
            done += (size_t)n;
        else if (n == 0 || errno != EINTR)
            stop(t, n == 0 ? EIO : errno);
    }
    t->used = 0;
}

static void put(struct route_trace *t, uint64_t value, unsigned bytes)
{
    if (t->used > BUFFER_BYTES - bytes)
        flush(t);
    for (unsigned i = 0; i < bytes; i++)
        t->buffer[t->used++] = (uint8_t)(value >> (8 * i));
}

static void put_head(struct route_trace *t, const struct route_trace_shape *shape)
{
    for (unsigned i = 0; i < sizeof magic; i++)
        put(t, (uint8_t)magic[i], 1);
    put(t, shape->n_layer, 4);
    put(t, shape->n_expert, 4);
    put(t, shape->n_used, 4);
    put(t, 0, 4);
    for (uint32_t l = 0; l < shape->n_layer; l++)
        put(t, shape->layer_bytes[l], 8);
}

/* What a slip names, a model for one, is not overwritten. */
static bool holds_trace(int fd)
{
    char head[sizeof magic];
    return pread(fd, head, sizeof head, 0) == sizeof head && memcmp(head, magic, sizeof head) == 0;
}

enum err_code route_trace_open(const char *path, const struct route_trace_shape *shape,
                               struct route_trace **ret, struct err *e)
{
    enum err_code code = ERR_OK;
    struct stat about;
    struct route_trace *t = alloc_zero(ALLOC_MISC, 1, sizeof *t);
    if (t == NULL)
        return err_set(e, ERR_NOMEM, "route.trace: no memory for a buffer of %d bytes",
                       BUFFER_BYTES);
    t->fd = -1;
    t->n_layer = shape->n_layer;
    t->n_used = shape->n_used;
    t->path = alloc_text(ALLOC_MISC, path, strlen(path));
    if (t->path == NULL) {
        code = err_set(e, ERR_NOMEM, "route.trace: no memory");
        goto out;
    }
    t->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0600);
    if (t->fd < 0 || fstat(t->fd, &about) != 0) {
        code = err_set_os(e, ERR_IO, errno, "route.trace: %s", path);
        goto out;
    }
    if (!S_ISREG(about.st_mode)) {
        code = err_set(e, ERR_ARGUMENT, "route.trace: %s is not a regular file", path);
        goto out;
    }
    if (about.st_size > 0 && !holds_trace(t->fd)) {
        code = err_set(e, ERR_ARGUMENT,
                       "route.trace: %s is there and is no route trace; remove it or name another",
                       path);
        goto out;
    }
    /* One that was there may be open to others. */
    if (fchmod(t->fd, 0600) != 0 || ftruncate(t->fd, 0) != 0) {
        code = err_set_os(e, ERR_IO, errno, "route.trace: %s", path);
        goto out;
    }
    log_info("route_trace", "started", "path=%s overwritten_bytes=%lld", path,
             (long long)about.st_size);
    put_head(t, shape);
    *ret = t;
out:
    if (code != ERR_OK)
        route_trace_close(t);
    return code;
}

void route_trace_step(struct route_trace *t, uint32_t n_rows, const uint32_t *sequence,
                      const uint32_t *position, const uint32_t *const *layer_ids)
{
    assert(n_rows > 0 && n_rows <= ROUTE_TRACE_MAX_ROWS);
    if (t->fd < 0)
        return;
    put(t, n_rows, 4);
    for (uint32_t r = 0; r < n_rows; r++) {
        put(t, sequence[r], 4);
        put(t, position[r], 4);
        for (uint32_t l = 0; l < t->n_layer; l++)
            for (uint32_t k = 0; k < t->n_used; k++)
                put(t, layer_ids[l][(size_t)r * t->n_used + k], 2);
    }
}

void route_trace_close(struct route_trace *t)
{
    if (t == NULL)
        return;
    flush(t);
    if (t->fd >= 0)
        close(t->fd);
    alloc_free(t->path);
    alloc_free(t);
}

/* ---- reading ------------------------------------------------------------------------------- */

static uint64_t get(const uint8_t *data, unsigned bytes)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < bytes; i++)
        value |= (uint64_t)data[i] << (8 * i);
    return value;
}

static enum err_code parse_head(const uint8_t *data, size_t size, struct route_trace_file *f,
                                struct err *e)
{
    struct route_trace_shape *shape = &f->shape;
    if (size < HEAD_BYTES || memcmp(data, magic, sizeof magic) != 0)
        return err_set(e, ERR_FORMAT, "route trace: does not begin with ISLETRT1");
    shape->n_layer = (uint32_t)get(data + 8, 4);
    shape->n_expert = (uint32_t)get(data + 12, 4);
    shape->n_used = (uint32_t)get(data + 16, 4);
    if (shape->n_layer == 0 || shape->n_layer > ROUTE_TRACE_MAX_LAYERS || shape->n_expert == 0 ||
        shape->n_expert > ROUTE_TRACE_MAX_EXPERTS || shape->n_used == 0 ||
        shape->n_used > ROUTE_TRACE_MAX_USED || shape->n_used > shape->n_expert)
        return err_set(e, ERR_FORMAT,
                       "route trace: %u layers of %u experts, %u used; limits are %d, %d, %d",
                       shape->n_layer, shape->n_expert, shape->n_used, ROUTE_TRACE_MAX_LAYERS,
                       ROUTE_TRACE_MAX_EXPERTS, ROUTE_TRACE_MAX_USED);
    if (get(data + 20, 4) != 0)
        return err_set(e, ERR_FORMAT, "route trace: the reserved word is %u, not 0",
                       (unsigned)get(data + 20, 4));
    if ((size - HEAD_BYTES) / 8 < shape->n_layer)
        return err_set(e, ERR_FORMAT, "route trace: ends inside the table of %u layers",
                       shape->n_layer);
    f->layer_bytes = alloc_zero(ALLOC_MISC, shape->n_layer, sizeof *f->layer_bytes);
    if (f->layer_bytes == NULL)
        return err_set(e, ERR_NOMEM, "route trace: no memory");
    shape->layer_bytes = f->layer_bytes;
    for (uint32_t l = 0; l < shape->n_layer; l++) {
        f->layer_bytes[l] = get(data + HEAD_BYTES + 8 * (size_t)l, 8);
        if (f->layer_bytes[l] == 0 || f->layer_bytes[l] % ROUTE_TRACE_ALIGN != 0 ||
            f->layer_bytes[l] > 1ull << 40)
            return err_set(e, ERR_FORMAT,
                           "route trace: %llu bytes an expert in layer %u, not a multiple of %d "
                           "up to 1 TiB",
                           (unsigned long long)f->layer_bytes[l], l, ROUTE_TRACE_ALIGN);
    }
    return ERR_OK;
}

/* Counts whole steps and their rows. */
static enum err_code count_steps(const uint8_t *data, size_t size, uint64_t row_bytes,
                                 struct route_trace_file *f, struct err *e)
{
    size_t at = 0;
    while (size - at >= 4) {
        const uint64_t n = get(data + at, 4);
        if (n == 0 || n > ROUTE_TRACE_MAX_ROWS)
            return err_set(e, ERR_FORMAT, "route trace: step %llu has %llu rows, not 1 to %d",
                           (unsigned long long)f->n_steps, (unsigned long long)n,
                           ROUTE_TRACE_MAX_ROWS);
        if ((size - at - 4) / row_bytes < n)
            break;
        at += 4 + (size_t)(n * row_bytes);
        f->n_steps++;
        f->n_rows += n;
    }
    f->cut_bytes = size - at;
    return ERR_OK;
}

static enum err_code parse_row(const uint8_t *data, uint64_t row, struct route_trace_file *f,
                               struct err *e)
{
    const struct route_trace_shape *shape = &f->shape;
    uint16_t *ids = f->ids + row * shape->n_layer * shape->n_used;
    f->sequence[row] = (uint32_t)get(data, 4);
    f->position[row] = (uint32_t)get(data + 4, 4);
    data += 8;
    for (uint32_t l = 0; l < shape->n_layer; l++)
        for (uint32_t k = 0; k < shape->n_used; k++, data += 2) {
            uint16_t *id = &ids[(size_t)l * shape->n_used + k];
            *id = (uint16_t)get(data, 2);
            bool twice = false;
            for (uint32_t i = 1; i <= k; i++)
                twice |= id[0] == *(id - i);
            if (*id >= shape->n_expert || twice)
                return err_set(e, ERR_FORMAT, "route trace: row %llu, layer %u: expert %u %s",
                               (unsigned long long)row, l, *id, twice ? "twice" : "is not there");
        }
    return ERR_OK;
}

enum err_code route_trace_parse(const uint8_t *data, size_t size, struct route_trace_file *ret,
                                struct err *e)
{
    struct route_trace_file f = {.n_steps = 0};
    enum err_code code = parse_head(data, size, &f, e);
    if (code != ERR_OK)
        goto out;
    const uint64_t n_ids = (uint64_t)f.shape.n_layer * f.shape.n_used;
    const size_t head = HEAD_BYTES + 8 * (size_t)f.shape.n_layer;
    code = count_steps(data + head, size - head, 8 + 2 * n_ids, &f, e);
    if (code != ERR_OK)
        goto out;
    f.step_first = alloc_zero(ALLOC_MISC, f.n_steps + 1, sizeof *f.step_first);
    f.sequence = alloc_zero(ALLOC_MISC, f.n_rows + 1, sizeof *f.sequence);
    f.position = alloc_zero(ALLOC_MISC, f.n_rows + 1, sizeof *f.position);
    f.ids = alloc_zero(ALLOC_MISC, f.n_rows + 1, n_ids * sizeof *f.ids);
    if (f.step_first == NULL || f.sequence == NULL || f.position == NULL || f.ids == NULL) {
        code = err_set(e, ERR_NOMEM, "route trace: no memory for %llu rows",
                       (unsigned long long)f.n_rows);
        goto out;
    }
    const uint8_t *at = data + head;
    for (uint64_t s = 0; s < f.n_steps; s++) {
        const uint64_t n = get(at, 4);
        f.step_first[s + 1] = f.step_first[s] + n;
        at += 4;
        for (uint64_t r = 0; r < n && code == ERR_OK; r++, at += 8 + 2 * n_ids)
            code = parse_row(at, f.step_first[s] + r, &f, e);
        if (code != ERR_OK)
            goto out;
    }
    *ret = f;
    return ERR_OK;
out:
    route_trace_file_done(&f);
    return code;
}

/* All of a regular file. */
static enum err_code slurp(int fd, uint8_t **ret, size_t *ret_size, struct err *e)
{
    struct stat about;
    if (fstat(fd, &about) != 0)
        return err_set_os(e, ERR_IO, errno, "route trace");
    if (!S_ISREG(about.st_mode))
        return err_set(e, ERR_ARGUMENT, "route trace: not a regular file");
    const size_t size = (size_t)about.st_size;
    uint8_t *data = alloc_get(ALLOC_MISC, size);
    if (data == NULL)
        return err_set(e, ERR_NOMEM, "route trace: no memory for %zu bytes", size);
    size_t done = 0;
    while (done < size) {
        const ssize_t n = read(fd, data + done, size - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        done += (size_t)n;
    }
    if (done < size) {
        alloc_free(data);
        return err_set(e, ERR_IO, "route trace: %zu of %zu bytes could be read", done, size);
    }
    *ret = data;
    *ret_size = size;
    return ERR_OK;
}

enum err_code route_trace_read(const char *path, struct route_trace_file *ret, struct err *e)
{
    uint8_t *data = NULL;
    size_t size = 0;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_set_os(e, ERR_IO, errno, "%s", path);
    enum err_code code = slurp(fd, &data, &size, e);
    if (code == ERR_OK)
        code = route_trace_parse(data, size, ret, e);
    if (code != ERR_OK)
        code = err_wrap(e, "%s", path);
    alloc_free(data);
    close(fd);
    return code;
}

void route_trace_file_done(struct route_trace_file *f)
{
    alloc_free(f->layer_bytes);
    alloc_free(f->step_first);
    alloc_free(f->sequence);
    alloc_free(f->position);
    alloc_free(f->ids);
    *f = (struct route_trace_file){.n_steps = 0};
}

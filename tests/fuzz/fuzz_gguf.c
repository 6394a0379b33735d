/* GGUF headers: any bytes either make a model or one clear line, and leave nothing behind. The file
 * seems to have 256 KiB of zeros behind the input, so that the tensors of a header have room
 * without the corpus holding weights. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "alloc.h"
#include "gguf_file.h"
#include "shape.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum {
    FUZZ_ROOM = 256 * 1024
};

static void fuzz_check(int ok)
{
    if (!ok)
        abort();
}

static void fuzz_check_error(enum err_code rc, const struct err *e)
{
    fuzz_check(rc == e->code);
    fuzz_check((rc == ERR_OK) == (e->text[0] == '\0'));
    fuzz_check(strchr(e->text, '\n') == NULL);
}

/* Every value that a key gives must lie in memory: the sanitiser looks at what is read here. */
static uint64_t fuzz_read_keys(const struct gguf *g)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < gguf_n_keys(g); i++) {
        struct gguf_text key = gguf_key_at(g, i), text;
        char name[128];
        int64_t number;
        if (key.size >= sizeof name)
            continue;
        memcpy(name, key.data, key.size);
        name[key.size] = '\0';
        fuzz_check(gguf_has(g, name));
        const struct gguf_array *a = gguf_array_get(g, name);
        uint64_t n = a != NULL ? gguf_array_count(a) : 0;
        if (n > 0 && gguf_array_text_at(a, n - 1, &text) && text.size > 0)
            sum += (uint8_t)text.data[text.size - 1];
        if (n > 0 && gguf_array_i64_at(a, n - 1, &number))
            sum += (uint64_t)number;
        if (gguf_text(g, name, &text) && text.size > 0)
            sum += (uint8_t)text.data[text.size - 1];
    }
    return sum;
}

static void fuzz_parse(const uint8_t *data, size_t size, uint64_t file_size)
{
    struct gguf *g = NULL;
    struct err e = {.code = ERR_OK};
    uint64_t need = 0;
    enum err_code rc = gguf_parse(data, size, file_size, &g, &need, &e);
    fuzz_check_error(rc, &e);
    if (rc == ERR_LIMIT)
        fuzz_check(need > size && need <= file_size);
    if (rc != ERR_OK)
        return;
    (void)fuzz_read_keys(g);
    for (size_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        fuzz_check(t->offset <= file_size && t->bytes <= file_size - t->offset);
    }
    gguf_free(g);
}

static void fuzz_open(const uint8_t *data, size_t size)
{
    char path[64];
    struct gguf_file *f = NULL;
    struct model_shape shape;
    struct shape_tensors tensors = {.layers = NULL};
    struct err e = {.code = ERR_OK};
    uint8_t digest[16];
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    fuzz_check(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    fuzz_check(ftruncate(fd, (off_t)size + FUZZ_ROOM) == 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    enum err_code rc = gguf_file_open(path, &f, &e);
    if (rc == ERR_OK)
        rc = gguf_file_digest(f, digest, &e);
    if (rc == ERR_OK)
        rc = shape_from_file(f, &shape, &e);
    if (rc == ERR_OK)
        rc = shape_bind(f, &shape, &tensors, &e);
    if (rc == ERR_OK)
        gguf_file_shape_digest(f, &shape, digest);
    fuzz_check_error(rc, &e);
    shape_tensors_done(&tensors);
    gguf_file_close(f);
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t live = alloc_live_blocks();
    if (size > 1024 * 1024)
        return 0;
    fuzz_parse(data, size, size);
    fuzz_parse(data, size, size + FUZZ_ROOM);
    fuzz_open(data, size);
    fuzz_check(alloc_live_blocks() == live);
    return 0;
}

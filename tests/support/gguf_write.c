#include "gguf_write.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "buf.h"
#include "gguf.h"

enum {
    GGUF_WRITE_CEILING = 1 << 30
};

struct gguf_write {
    uint32_t version, alignment;
    uint64_t n_keys, n_tensors;
    struct buf keys, infos, data;
};

struct gguf_write *gguf_write_new(void)
{
    struct gguf_write *w = alloc_zero(ALLOC_MISC, 1, sizeof *w);
    if (w == NULL)
        abort();
    w->version = 3;
    w->alignment = 32;
    w->keys = w->infos = w->data = BUF_INIT(GGUF_WRITE_CEILING);
    return w;
}

void gguf_write_free(struct gguf_write *w)
{
    if (w == NULL)
        return;
    buf_done(&w->keys);
    buf_done(&w->infos);
    buf_done(&w->data);
    alloc_free(w);
}

void gguf_write_version(struct gguf_write *w, uint32_t version)
{
    w->version = version;
}

void gguf_write_alignment(struct gguf_write *w, uint32_t alignment)
{
    w->alignment = alignment;
    gguf_write_u32(w, "general.alignment", alignment);
}

static void gguf_write_u32_to(struct buf *b, uint32_t value)
{
    buf_append(b, &value, sizeof value);
}

static void gguf_write_u64_to(struct buf *b, uint64_t value)
{
    buf_append(b, &value, sizeof value);
}

static void gguf_write_text_to(struct buf *b, const char *text)
{
    gguf_write_u64_to(b, strlen(text));
    buf_text(b, text);
}

void gguf_write_raw(struct gguf_write *w, const char *key, uint32_t kind, const void *value,
                    size_t n)
{
    gguf_write_text_to(&w->keys, key);
    gguf_write_u32_to(&w->keys, kind);
    buf_append(&w->keys, value, n);
    w->n_keys++;
}

void gguf_write_u16(struct gguf_write *w, const char *key, uint16_t value)
{
    gguf_write_raw(w, key, GGUF_KIND_U16, &value, sizeof value);
}

void gguf_write_u32(struct gguf_write *w, const char *key, uint32_t value)
{
    gguf_write_raw(w, key, GGUF_KIND_U32, &value, sizeof value);
}

void gguf_write_u64(struct gguf_write *w, const char *key, uint64_t value)
{
    gguf_write_raw(w, key, GGUF_KIND_U64, &value, sizeof value);
}

void gguf_write_i32(struct gguf_write *w, const char *key, int32_t value)
{
    gguf_write_raw(w, key, GGUF_KIND_I32, &value, sizeof value);
}

void gguf_write_f32(struct gguf_write *w, const char *key, float value)
{
    gguf_write_raw(w, key, GGUF_KIND_F32, &value, sizeof value);
}

void gguf_write_bool(struct gguf_write *w, const char *key, bool value)
{
    gguf_write_raw(w, key, GGUF_KIND_BOOL, &(uint8_t){value}, 1);
}

void gguf_write_text(struct gguf_write *w, const char *key, const char *value)
{
    gguf_write_raw(w, key, GGUF_KIND_STRING, NULL, 0);
    gguf_write_text_to(&w->keys, value);
}

static void gguf_write_array(struct gguf_write *w, const char *key, uint32_t kind, uint64_t n)
{
    gguf_write_raw(w, key, GGUF_KIND_ARRAY, NULL, 0);
    gguf_write_u32_to(&w->keys, kind);
    gguf_write_u64_to(&w->keys, n);
}

void gguf_write_texts(struct gguf_write *w, const char *key, const char *const *values, size_t n)
{
    gguf_write_array(w, key, GGUF_KIND_STRING, n);
    for (size_t i = 0; i < n; i++)
        gguf_write_text_to(&w->keys, values[i]);
}

void gguf_write_i32s(struct gguf_write *w, const char *key, const int32_t *values, size_t n)
{
    gguf_write_array(w, key, GGUF_KIND_I32, n);
    buf_append(&w->keys, values, n * sizeof values[0]);
}

void gguf_write_f32s(struct gguf_write *w, const char *key, const float *values, size_t n)
{
    gguf_write_array(w, key, GGUF_KIND_F32, n);
    buf_append(&w->keys, values, n * sizeof values[0]);
}

static void gguf_write_pad(struct buf *b, size_t alignment)
{
    while (alignment > 0 && b->size % alignment != 0)
        buf_byte(b, 0);
}

void gguf_write_tensor_at(struct gguf_write *w, const char *name, uint32_t type, uint32_t n_dims,
                          const uint64_t *dims, const void *data, size_t n_data, uint64_t offset)
{
    gguf_write_text_to(&w->infos, name);
    gguf_write_u32_to(&w->infos, n_dims);
    for (uint32_t i = 0; i < n_dims; i++)
        gguf_write_u64_to(&w->infos, dims[i]);
    gguf_write_u32_to(&w->infos, type);
    gguf_write_u64_to(&w->infos, offset);
    w->n_tensors++;
    gguf_write_pad(&w->data, w->alignment);
    uint8_t *room = buf_room(&w->data, n_data);
    if (room == NULL)
        abort();
    if (data != NULL)
        memcpy(room, data, n_data);
    else
        memset(room, 0, n_data);
    buf_commit(&w->data, n_data);
}

void gguf_write_tensor(struct gguf_write *w, const char *name, uint32_t type, uint32_t n_dims,
                       const uint64_t *dims, const void *data, size_t n_data)
{
    gguf_write_pad(&w->data, w->alignment);
    gguf_write_tensor_at(w, name, type, n_dims, dims, data, n_data, w->data.size);
}

size_t gguf_write_tensor_bytes(uint32_t type, uint32_t n_dims, const uint64_t *dims)
{
    uint32_t block, bytes;
    const char *name;
    if (!gguf_type_info(type, &name, &block, &bytes))
        abort();
    size_t n = 1;
    for (uint32_t i = 0; i < n_dims; i++)
        n *= dims[i];
    return n / block * bytes;
}

uint8_t *gguf_write_bytes(struct gguf_write *w, size_t *ret_size, size_t *ret_header)
{
    struct buf out = BUF_INIT((size_t)2 * GGUF_WRITE_CEILING);
    buf_append(&out, "GGUF", 4);
    gguf_write_u32_to(&out, w->version);
    gguf_write_u64_to(&out, w->n_tensors);
    gguf_write_u64_to(&out, w->n_keys);
    buf_append(&out, w->keys.data, w->keys.size);
    buf_append(&out, w->infos.data, w->infos.size);
    size_t header = out.size;
    gguf_write_pad(&out, w->alignment);
    buf_append(&out, w->data.data, w->data.size);
    if (w->keys.failed || w->infos.failed || w->data.failed)
        abort();
    uint8_t *bytes = (uint8_t *)buf_give(&out, ret_size);
    if (bytes == NULL)
        abort();
    if (ret_header != NULL)
        *ret_header = header;
    return bytes;
}

void gguf_write_file(struct gguf_write *w, const char *path)
{
    size_t size;
    uint8_t *bytes = gguf_write_bytes(w, &size, NULL);
    FILE *f = fopen(path, "wbe");
    if (f == NULL || fwrite(bytes, 1, size, f) != size || fclose(f) != 0) {
        perror(path);
        abort();
    }
    alloc_free(bytes);
}

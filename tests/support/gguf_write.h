/* A small GGUF writer for tests: keys and tensors in, a file or its bytes out. Little-endian,
 * tensors in the order given, each at the next multiple of the alignment. It checks nothing, so
 * that bad files can be made too; running out of memory or an unwritable path ends the test. Not
 * for any thread but its owner's.
 *
 *     struct gguf_write *w = gguf_write_new();
 *     gguf_write_text(w, "general.architecture", "qwen3moe");
 *     gguf_write_u32(w, "qwen3moe.block_count", 2);
 *     gguf_write_tensor(w, "output_norm.weight", GGUF_F32, 1, dims, norm, sizeof norm);
 *     gguf_write_file(w, path);
 *     gguf_write_free(w); */
#ifndef ISLET_GGUF_WRITE_H
#define ISLET_GGUF_WRITE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gguf_write;

struct gguf_write *gguf_write_new(void); /* version 3, alignment 32 */
void gguf_write_free(struct gguf_write *w);
void gguf_write_version(struct gguf_write *w, uint32_t version);
/* Places tensors by this alignment and adds the key general.alignment. Before the first tensor. */
void gguf_write_alignment(struct gguf_write *w, uint32_t alignment);

void gguf_write_u32(struct gguf_write *w, const char *key, uint32_t value);
void gguf_write_u16(struct gguf_write *w, const char *key, uint16_t value);
void gguf_write_u64(struct gguf_write *w, const char *key, uint64_t value);
void gguf_write_i32(struct gguf_write *w, const char *key, int32_t value);
void gguf_write_f32(struct gguf_write *w, const char *key, float value);
void gguf_write_bool(struct gguf_write *w, const char *key, bool value);
void gguf_write_text(struct gguf_write *w, const char *key, const char *value);
void gguf_write_texts(struct gguf_write *w, const char *key, const char *const *values, size_t n);
void gguf_write_i32s(struct gguf_write *w, const char *key, const int32_t *values, size_t n);
void gguf_write_f32s(struct gguf_write *w, const char *key, const float *values, size_t n);
/* Any kind (enum gguf_kind, or a wrong number) with the bytes of its value as they shall stand in
 * the file. */
void gguf_write_raw(struct gguf_write *w, const char *key, uint32_t kind, const void *value,
                    size_t n);

/* dims[0] is the fastest one. `data` holds n_data bytes, copied; NULL gives n_data zero bytes. */
void gguf_write_tensor(struct gguf_write *w, const char *name, uint32_t type, uint32_t n_dims,
                       const uint64_t *dims, const void *data, size_t n_data);
/* The bytes that a tensor of this type and these dimensions takes. */
size_t gguf_write_tensor_bytes(uint32_t type, uint32_t n_dims, const uint64_t *dims);
/* As gguf_write_tensor, but says `offset` instead of the place where the data goes. */
void gguf_write_tensor_at(struct gguf_write *w, const char *name, uint32_t type, uint32_t n_dims,
                          const uint64_t *dims, const void *data, size_t n_data, uint64_t offset);

/* The whole file; the caller frees it with alloc_free. *ret_header: bytes before the padding; may
 * be NULL. */
uint8_t *gguf_write_bytes(struct gguf_write *w, size_t *ret_size, size_t *ret_header);
void gguf_write_file(struct gguf_write *w, const char *path);

#endif

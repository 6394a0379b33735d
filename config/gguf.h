/* GGUF v2/v3 header: bytes in memory to keys and tensors. No I/O, nothing trusted: every count,
 * length, offset and alignment is checked against the file size before use. Immutable after
 * gguf_parse; any thread. */
#ifndef ISLET_GGUF_H
#define ISLET_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"

/* Types of ggml that appear in files (numbers are the format's). Block sizes: gguf_type_info. */
enum gguf_type {
    GGUF_F32 = 0,
    GGUF_F16 = 1,
    GGUF_Q4_0 = 2,
    GGUF_Q4_1 = 3,
    GGUF_Q5_0 = 6,
    GGUF_Q5_1 = 7,
    GGUF_Q8_0 = 8,
    GGUF_Q2_K = 10,
    GGUF_Q3_K = 11,
    GGUF_Q4_K = 12,
    GGUF_Q5_K = 13,
    GGUF_Q6_K = 14,
    GGUF_IQ2_XXS = 16,
    GGUF_IQ2_XS = 17,
    GGUF_IQ3_XXS = 18,
    GGUF_IQ1_S = 19,
    GGUF_IQ4_NL = 20,
    GGUF_IQ3_S = 21,
    GGUF_IQ2_S = 22,
    GGUF_IQ4_XS = 23,
    GGUF_I8 = 24,
    GGUF_I16 = 25,
    GGUF_I32 = 26,
    GGUF_I64 = 27,
    GGUF_F64 = 28,
    GGUF_IQ1_M = 29,
    GGUF_BF16 = 30,
    GGUF_TQ1_0 = 34,
    GGUF_TQ2_0 = 35,
    GGUF_MXFP4 = 39,
};

/* Elements and bytes of one block; name as llama.cpp prints it ("q4_K"). False for a type that is
 * not known. */
bool gguf_type_info(uint32_t type, const char **ret_name, uint32_t *ret_block, uint32_t *ret_bytes);

enum gguf_kind {
    GGUF_KIND_U8,
    GGUF_KIND_I8,
    GGUF_KIND_U16,
    GGUF_KIND_I16,
    GGUF_KIND_U32,
    GGUF_KIND_I32,
    GGUF_KIND_F32,
    GGUF_KIND_BOOL,
    GGUF_KIND_STRING,
    GGUF_KIND_ARRAY,
    GGUF_KIND_U64,
    GGUF_KIND_I64,
    GGUF_KIND_F64,
};

struct gguf_text {
    const char *data; /* not NUL-terminated; lent by the gguf */
    size_t size;
};

struct gguf_tensor {
    struct gguf_text name;
    uint32_t type;    /* enum gguf_type; unknown numbers are refused by gguf_parse */
    uint32_t n_dims;  /* 1..4 */
    uint64_t dims[4]; /* dims[0] = inputs (fastest); missing ones are 1; none is 0 */
    uint64_t bytes;   /* whole tensor; dims[0] is a multiple of the block */
    uint64_t offset;  /* from the start of its file */
    uint32_t file;    /* index of the split file, 0 for a single one */
};

struct gguf; /* header of one file */

/* Parses a header. `header` holds the first n_header bytes of a file of file_size bytes and is
 * borrowed for the call only. If the header is longer than n_header but may be valid: ERR_LIMIT
 * with *ret_need = bytes to try next. Gives *ret; free with gguf_free. Errors: FORMAT (what,
 * where), LIMIT, NOMEM. */
enum err_code gguf_parse(const uint8_t *header, size_t n_header, uint64_t file_size,
                         struct gguf **ret, uint64_t *ret_need, struct err *e)
    __attribute__((warn_unused_result));
void gguf_free(struct gguf *g);

uint64_t gguf_header_bytes(const struct gguf *g); /* keys and tensor infos, before padding */
size_t gguf_n_tensors(const struct gguf *g);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i);
const struct gguf_tensor *gguf_tensor_find(const struct gguf *g,
                                           const char *name); /* NULL: none; O(log n) */

/* Keys. Each returns false when the key is missing or of a kind that does not convert without
 * loss. */
bool gguf_has(const struct gguf *g, const char *key);
bool gguf_u64(const struct gguf *g, const char *key,
              uint64_t *ret); /* any non-negative integer kind */
bool gguf_f64(const struct gguf *g, const char *key, double *ret); /* f32, f64 or an integer */
bool gguf_bool(const struct gguf *g, const char *key, bool *ret);
bool gguf_text(const struct gguf *g, const char *key, struct gguf_text *ret);
/* An array, so that the key is looked up once; NULL: there is none. Elements by index; text access is
 * O(1) (an index is built at parse). */
struct gguf_array;
const struct gguf_array *gguf_array_get(const struct gguf *g, const char *key);
uint64_t gguf_array_count(const struct gguf_array *a);
enum gguf_kind gguf_array_kind(const struct gguf_array *a);
bool gguf_array_text_at(const struct gguf_array *a, uint64_t i, struct gguf_text *ret);
bool gguf_array_i64_at(const struct gguf_array *a, uint64_t i, int64_t *ret);
bool gguf_array_f64_at(const struct gguf_array *a, uint64_t i, double *ret);

/* Keys in file order, for tools. */
size_t gguf_n_keys(const struct gguf *g);
struct gguf_text gguf_key_at(const struct gguf *g, size_t i);

#endif

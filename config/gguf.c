#include "gguf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "size.h"

enum {
    GGUF_MAX_KEYS = 1 << 16,
    GGUF_MAX_TENSORS = 1 << 17,
    GGUF_MAX_KEY_BYTES = 65535, /* the format's own limit */
    GGUF_MAX_NAME_BYTES = 255,
    GGUF_DEFAULT_ALIGNMENT = 32,
    GGUF_MAX_ALIGNMENT = 65536,
};

struct gguf_array {
    enum gguf_kind kind;
    uint64_t count;
    const uint8_t *data;   /* elements of a fixed size */
    const uint8_t *header; /* strings: element i begins at header + index[i] with its length */
    uint32_t *index;       /* [count], owned; NULL unless strings */
};

struct gguf_key {
    struct gguf_text name;
    enum gguf_kind kind;
    const uint8_t *value;  /* scalars */
    struct gguf_text text; /* strings */
    struct gguf_array array;
};

struct gguf {
    uint8_t *header; /* own copy: every name and value points into it */
    uint32_t version;
    uint64_t header_bytes, data_offset;
    size_t n_keys, n_tensors;
    struct gguf_key *keys;
    const struct gguf_key **keys_by_name;
    struct gguf_tensor *tensors;
    const struct gguf_tensor **tensors_by_name;
};

/* ---- types and kinds ------------------------------------------------------------------------- */

static const struct gguf_type_row {
    uint32_t type;
    const char *name;
    uint32_t block, bytes;
} gguf_types[] = {
    /* clang-format off */
    {GGUF_F32, "f32", 1, 4},              {GGUF_F16, "f16", 1, 2},
    {GGUF_BF16, "bf16", 1, 2},            {GGUF_F64, "f64", 1, 8},
    {GGUF_I8, "i8", 1, 1},                {GGUF_I16, "i16", 1, 2},
    {GGUF_I32, "i32", 1, 4},              {GGUF_I64, "i64", 1, 8},
    {GGUF_Q4_0, "q4_0", 32, 18},          {GGUF_Q4_1, "q4_1", 32, 20},
    {GGUF_Q5_0, "q5_0", 32, 22},          {GGUF_Q5_1, "q5_1", 32, 24},
    {GGUF_Q8_0, "q8_0", 32, 34},          {GGUF_IQ4_NL, "iq4_nl", 32, 18},
    {GGUF_MXFP4, "mxfp4", 32, 17},        {GGUF_Q2_K, "q2_K", 256, 84},
    {GGUF_Q3_K, "q3_K", 256, 110},        {GGUF_Q4_K, "q4_K", 256, 144},
    {GGUF_Q5_K, "q5_K", 256, 176},        {GGUF_Q6_K, "q6_K", 256, 210},
    {GGUF_IQ1_S, "iq1_s", 256, 50},       {GGUF_IQ1_M, "iq1_m", 256, 56},
    {GGUF_IQ2_XXS, "iq2_xxs", 256, 66},   {GGUF_IQ2_XS, "iq2_xs", 256, 74},
    {GGUF_IQ2_S, "iq2_s", 256, 82},       {GGUF_IQ3_XXS, "iq3_xxs", 256, 98},
    {GGUF_IQ3_S, "iq3_s", 256, 110},      {GGUF_IQ4_XS, "iq4_xs", 256, 136},
    {GGUF_TQ1_0, "tq1_0", 256, 54},       {GGUF_TQ2_0, "tq2_0", 256, 66},
    /* clang-format on */
};

bool gguf_type_info(uint32_t type, const char **ret_name, uint32_t *ret_block, uint32_t *ret_bytes)
{
    for (size_t i = 0; i < sizeof gguf_types / sizeof gguf_types[0]; i++) {
        if (gguf_types[i].type != type)
            continue;
        *ret_name = gguf_types[i].name;
        *ret_block = gguf_types[i].block;
        *ret_bytes = gguf_types[i].bytes;
        return true;
    }
    return false;
}

/* Bytes of one value; 0 for strings, arrays and unknown kinds. */
static size_t gguf_kind_bytes(uint32_t kind)
{
    static const uint8_t bytes[] = {
        [GGUF_KIND_U8] = 1,  [GGUF_KIND_I8] = 1,  [GGUF_KIND_U16] = 2, [GGUF_KIND_I16] = 2,
        [GGUF_KIND_U32] = 4, [GGUF_KIND_I32] = 4, [GGUF_KIND_F32] = 4, [GGUF_KIND_BOOL] = 1,
        [GGUF_KIND_U64] = 8, [GGUF_KIND_I64] = 8, [GGUF_KIND_F64] = 8,
    };
    return kind < sizeof bytes ? bytes[kind] : 0;
}

static uint32_t gguf_load_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t gguf_load_u64(const uint8_t *p)
{
    return gguf_load_u32(p) | (uint64_t)gguf_load_u32(p + 4) << 32;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Where the reader stands, and what it is reading, for the texts of errors. */
struct gguf_cursor {
    const uint8_t *data;
    uint64_t n, at; /* at <= n <= file_size */
    uint64_t file_size;
    uint64_t need; /* 0, or the bytes of the file that are wanted next */
    const char *part;
    uint64_t index, total;
    struct gguf_text name; /* size 0: not known yet */
    struct err *e;
};

static enum err_code __attribute__((format(printf, 3, 4)))
gguf_fail(const struct gguf_cursor *c, enum err_code code, const char *format, ...)
{
    char why[160];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    if (c->name.size > 0)
        (void)err_set(c->e, code, "%s %.*s: %s", c->part,
                      (int)(c->name.size < 64 ? c->name.size : 64), c->name.data, why);
    else if (c->total > 0)
        (void)err_set(c->e, code, "%s %llu of %llu: %s", c->part, (unsigned long long)c->index + 1,
                      (unsigned long long)c->total, why);
    else
        (void)err_set(c->e, code, "%s: %s", c->part, why);
    return code;
}

/* Lends the next n bytes and steps over them. */
static enum err_code gguf_take(struct gguf_cursor *c, uint64_t n, const uint8_t **ret)
{
    if (n > c->file_size - c->at)
        return gguf_fail(c, ERR_FORMAT, "needs %llu bytes at %llu, but the file has only %llu",
                         (unsigned long long)n, (unsigned long long)c->at,
                         (unsigned long long)c->file_size);
    if (n > c->n - c->at) {
        c->need = c->at + n;
        return gguf_fail(c, ERR_LIMIT, "the header is longer than the %llu bytes read of it",
                         (unsigned long long)c->n);
    }
    *ret = c->data + c->at;
    c->at += n;
    return ERR_OK;
}

static enum err_code gguf_take_u32(struct gguf_cursor *c, uint32_t *ret)
{
    const uint8_t *p = NULL;
    enum err_code rc = gguf_take(c, 4, &p);
    if (rc == ERR_OK)
        *ret = gguf_load_u32(p);
    return rc;
}

static enum err_code gguf_take_u64(struct gguf_cursor *c, uint64_t *ret)
{
    const uint8_t *p = NULL;
    enum err_code rc = gguf_take(c, 8, &p);
    if (rc == ERR_OK)
        *ret = gguf_load_u64(p);
    return rc;
}

static enum err_code gguf_take_text(struct gguf_cursor *c, struct gguf_text *ret)
{
    uint64_t size = 0;
    const uint8_t *p = NULL;
    enum err_code rc = gguf_take_u64(c, &size);
    if (rc == ERR_OK)
        rc = gguf_take(c, size, &p);
    if (rc == ERR_OK)
        *ret = (struct gguf_text){.data = (const char *)p, .size = size};
    return rc;
}

/* A key or tensor name: a text of 1..limit bytes without NUL, so that it can be printed and looked
 * up. */
static enum err_code gguf_take_name(struct gguf_cursor *c, uint64_t limit, struct gguf_text *ret)
{
    struct gguf_text name;
    uint64_t size = 0;
    if (c->n - c->at >= 8)
        size = gguf_load_u64(c->data + c->at);
    if (size > limit)
        return gguf_fail(c, ERR_FORMAT, "its name has %llu bytes; the limit is %llu",
                         (unsigned long long)size, (unsigned long long)limit);
    enum err_code rc = gguf_take_text(c, &name);
    if (rc != ERR_OK)
        return rc;
    if (name.size == 0 || memchr(name.data, '\0', name.size) != NULL)
        return gguf_fail(c, ERR_FORMAT, "its name is empty or holds a NUL");
    c->name = name;
    *ret = name;
    return ERR_OK;
}

/* Walks the strings of an array; `index` [count] gets where each begins, unless NULL. */
static enum err_code gguf_take_texts(struct gguf_cursor *c, uint64_t count, uint32_t *index)
{
    for (uint64_t i = 0; i < count; i++) {
        struct gguf_text text;
        if (index != NULL)
            index[i] = (uint32_t)c->at;
        enum err_code rc = gguf_take_text(c, &text);
        if (rc != ERR_OK)
            return rc;
    }
    return ERR_OK;
}

static enum err_code gguf_take_array(struct gguf_cursor *c, bool build, struct gguf_array *a)
{
    uint32_t kind = 0;
    uint64_t count = 0, bytes;
    enum err_code rc = gguf_take_u32(c, &kind);
    if (rc == ERR_OK)
        rc = gguf_take_u64(c, &count);
    if (rc != ERR_OK)
        return rc;
    size_t each = kind == GGUF_KIND_STRING ? 8 : gguf_kind_bytes(kind);
    if (kind == GGUF_KIND_ARRAY)
        return gguf_fail(c, ERR_FORMAT, "an array of arrays; Islet reads one level");
    if (each == 0)
        return gguf_fail(c, ERR_FORMAT, "array of unknown kind %u", kind);
    if (!size_mul(count, each, &bytes) || bytes > c->file_size - c->at)
        return gguf_fail(c, ERR_FORMAT, "array of %llu elements; the file has %llu bytes left",
                         (unsigned long long)count, (unsigned long long)(c->file_size - c->at));
    a->kind = (enum gguf_kind)kind;
    a->count = count;
    if (kind != GGUF_KIND_STRING)
        return gguf_take(c, bytes, &a->data);
    if (build) {
        a->header = c->data;
        a->index = alloc_get(ALLOC_MODEL, count * sizeof a->index[0]);
        if (a->index == NULL)
            return gguf_fail(c, ERR_NOMEM, "no memory for an array of %llu strings",
                             (unsigned long long)count);
    }
    return gguf_take_texts(c, count, a->index);
}

/* Reads one key. With `build` its array's index is allocated: the key then owns it, also after an
 * error. */
static enum err_code gguf_take_key(struct gguf_cursor *c, bool build, struct gguf_key *k)
{
    uint32_t kind = 0;
    enum err_code rc = gguf_take_name(c, GGUF_MAX_KEY_BYTES, &k->name);
    if (rc == ERR_OK)
        rc = gguf_take_u32(c, &kind);
    if (rc != ERR_OK)
        return rc;
    k->kind = (enum gguf_kind)kind;
    if (kind == GGUF_KIND_STRING)
        return gguf_take_text(c, &k->text);
    if (kind == GGUF_KIND_ARRAY)
        return gguf_take_array(c, build, &k->array);
    size_t bytes = gguf_kind_bytes(kind);
    if (bytes == 0)
        return gguf_fail(c, ERR_FORMAT, "value of unknown kind %u", kind);
    rc = gguf_take(c, bytes, &k->value);
    if (rc == ERR_OK && kind == GGUF_KIND_BOOL && k->value[0] > 1)
        return gguf_fail(c, ERR_FORMAT, "a bool of %u; it must be 0 or 1", k->value[0]);
    return rc;
}

/* Sizes of a tensor whose dimensions and type were read. */
static enum err_code gguf_measure(const struct gguf_cursor *c, struct gguf_tensor *t)
{
    const char *name;
    uint32_t block, block_bytes;
    uint64_t elements = 1;
    if (!gguf_type_info(t->type, &name, &block, &block_bytes))
        return gguf_fail(c, ERR_FORMAT, "type %u is not one that Islet knows", t->type);
    for (uint32_t i = 0; i < 4; i++) {
        if (t->dims[i] == 0)
            return gguf_fail(c, ERR_FORMAT, "dimension %u is 0", i);
        if (!size_mul(elements, t->dims[i], &elements) || elements > INT64_MAX)
            return gguf_fail(c, ERR_FORMAT, "dimensions %llu x %llu x %llu x %llu overflow",
                             (unsigned long long)t->dims[0], (unsigned long long)t->dims[1],
                             (unsigned long long)t->dims[2], (unsigned long long)t->dims[3]);
    }
    if (t->dims[0] % block != 0)
        return gguf_fail(c, ERR_FORMAT, "%llu inputs, not a multiple of %u as %s needs",
                         (unsigned long long)t->dims[0], block, name);
    if (!size_mul(elements / block, block_bytes, &t->bytes))
        return gguf_fail(c, ERR_FORMAT, "%llu elements overflow", (unsigned long long)elements);
    return ERR_OK;
}

/* t->offset is still relative to the data section. */
static enum err_code gguf_take_tensor(struct gguf_cursor *c, struct gguf_tensor *t)
{
    *t = (struct gguf_tensor){.dims = {1, 1, 1, 1}};
    enum err_code rc = gguf_take_name(c, GGUF_MAX_NAME_BYTES, &t->name);
    if (rc == ERR_OK)
        rc = gguf_take_u32(c, &t->n_dims);
    if (rc != ERR_OK)
        return rc;
    if (t->n_dims < 1 || t->n_dims > 4)
        return gguf_fail(c, ERR_FORMAT, "%u dimensions; 1 to 4 are possible", t->n_dims);
    for (uint32_t i = 0; i < t->n_dims && rc == ERR_OK; i++)
        rc = gguf_take_u64(c, &t->dims[i]);
    if (rc == ERR_OK)
        rc = gguf_take_u32(c, &t->type);
    if (rc == ERR_OK)
        rc = gguf_take_u64(c, &t->offset);
    return rc == ERR_OK ? gguf_measure(c, t) : rc;
}

/* Magic, version and counts. */
static enum err_code gguf_take_start(struct gguf_cursor *c, struct gguf *g)
{
    const uint8_t *p;
    uint64_t n_tensors = 0, n_keys = 0;
    c->part = "GGUF header";
    c->total = 0;
    if (c->file_size < 4 || (c->n >= 4 && memcmp(c->data, "GGUF", 4) != 0))
        return gguf_fail(c, ERR_FORMAT, "not a GGUF file: it does not begin with \"GGUF\"");
    enum err_code rc = gguf_take(c, 8, &p);
    if (rc != ERR_OK)
        return rc;
    g->version = gguf_load_u32(p + 4);
    if (__builtin_bswap32(g->version) >= 1 && __builtin_bswap32(g->version) <= 3)
        return gguf_fail(c, ERR_FORMAT, "a big-endian file; Islet reads little-endian ones");
    if (g->version != 2 && g->version != 3)
        return gguf_fail(c, ERR_FORMAT, "version %u; Islet reads 2 and 3", g->version);
    rc = gguf_take_u64(c, &n_tensors);
    if (rc == ERR_OK)
        rc = gguf_take_u64(c, &n_keys);
    if (rc != ERR_OK)
        return rc;
    if (n_keys > GGUF_MAX_KEYS)
        return gguf_fail(c, ERR_FORMAT, "%llu keys; the limit is %d", (unsigned long long)n_keys,
                         GGUF_MAX_KEYS);
    if (n_tensors > GGUF_MAX_TENSORS)
        return gguf_fail(c, ERR_FORMAT, "%llu tensors; the limit is %d",
                         (unsigned long long)n_tensors, GGUF_MAX_TENSORS);
    g->n_keys = n_keys;
    g->n_tensors = n_tensors;
    return ERR_OK;
}

/* Reads the whole header. Called twice: first with `build` false, where nothing is stored and
 * nothing allocated, so that counts are known to be true before memory is asked for; then to fill
 * g->keys and g->tensors. */
static enum err_code gguf_walk(struct gguf_cursor *c, bool build, struct gguf *g)
{
    enum err_code rc = gguf_take_start(c, g);
    c->part = "key";
    c->total = g->n_keys;
    for (size_t i = 0; i < g->n_keys && rc == ERR_OK; i++) {
        struct gguf_key skipped = {.value = NULL};
        c->index = i;
        c->name.size = 0;
        rc = gguf_take_key(c, build, build ? &g->keys[i] : &skipped);
    }
    if (rc != ERR_OK)
        return rc;
    c->part = "tensor";
    c->total = g->n_tensors;
    for (size_t i = 0; i < g->n_tensors && rc == ERR_OK; i++) {
        struct gguf_tensor skipped;
        c->index = i;
        c->name.size = 0;
        rc = gguf_take_tensor(c, build ? &g->tensors[i] : &skipped);
    }
    c->name.size = 0;
    c->total = 0;
    return rc;
}

/* ---- order and checks over the whole --------------------------------------------------------- */

static int gguf_compare(struct gguf_text a, struct gguf_text b)
{
    int order = memcmp(a.data, b.data, a.size < b.size ? a.size : b.size);
    return order != 0 ? order : (a.size > b.size) - (a.size < b.size);
}

static int gguf_compare_keys(const void *a, const void *b)
{
    const struct gguf_key *const *x = a, *const *y = b;
    return gguf_compare((*x)->name, (*y)->name);
}

static int gguf_compare_tensors(const void *a, const void *b)
{
    const struct gguf_tensor *const *x = a, *const *y = b;
    return gguf_compare((*x)->name, (*y)->name);
}

static int gguf_compare_offsets(const void *a, const void *b)
{
    const struct gguf_tensor *const *x = a, *const *y = b;
    return ((*x)->offset > (*y)->offset) - ((*x)->offset < (*y)->offset);
}

static enum err_code gguf_index_keys(struct gguf *g, struct gguf_cursor *c)
{
    for (size_t i = 0; i < g->n_keys; i++)
        g->keys_by_name[i] = &g->keys[i];
    qsort(g->keys_by_name, g->n_keys, sizeof g->keys_by_name[0], gguf_compare_keys);
    c->part = "key";
    for (size_t i = 1; i < g->n_keys; i++) {
        if (gguf_compare_keys(&g->keys_by_name[i - 1], &g->keys_by_name[i]) != 0)
            continue;
        c->name = g->keys_by_name[i]->name;
        return gguf_fail(c, ERR_FORMAT, "occurs twice");
    }
    return ERR_OK;
}

static enum err_code gguf_place_tensors(struct gguf *g, struct gguf_cursor *c)
{
    uint64_t alignment = GGUF_DEFAULT_ALIGNMENT, data_bytes;
    c->part = "key";
    c->name = (struct gguf_text){.data = "general.alignment", .size = 17};
    if (gguf_has(g, "general.alignment") && !gguf_u64(g, "general.alignment", &alignment))
        return gguf_fail(c, ERR_FORMAT, "not a non-negative integer");
    if (alignment < 1 || alignment > GGUF_MAX_ALIGNMENT || (alignment & (alignment - 1)) != 0)
        return gguf_fail(c, ERR_FORMAT, "%llu is not a power of two up to %d",
                         (unsigned long long)alignment, GGUF_MAX_ALIGNMENT);
    g->header_bytes = c->at;
    c->part = "tensor";
    if (!size_round_up(g->header_bytes, alignment, &g->data_offset))
        return gguf_fail(c, ERR_FORMAT, "the header's size overflows");
    data_bytes = g->data_offset < c->file_size ? c->file_size - g->data_offset : 0;
    for (size_t i = 0; i < g->n_tensors; i++) {
        struct gguf_tensor *t = &g->tensors[i];
        c->name = t->name;
        if (t->offset % alignment != 0)
            return gguf_fail(c, ERR_FORMAT, "offset %llu is not a multiple of the alignment %llu",
                             (unsigned long long)t->offset, (unsigned long long)alignment);
        if (t->offset > data_bytes || t->bytes > data_bytes - t->offset)
            return gguf_fail(c, ERR_FORMAT,
                             "its %llu bytes at offset %llu pass the end of the data (%llu bytes): "
                             "the file is cut short; fetch it again",
                             (unsigned long long)t->bytes, (unsigned long long)t->offset,
                             (unsigned long long)data_bytes);
        t->offset += g->data_offset;
    }
    return ERR_OK;
}

static enum err_code gguf_index_tensors(struct gguf *g, struct gguf_cursor *c)
{
    const struct gguf_tensor **order = g->tensors_by_name;
    for (size_t i = 0; i < g->n_tensors; i++)
        order[i] = &g->tensors[i];
    qsort(order, g->n_tensors, sizeof order[0], gguf_compare_offsets);
    for (size_t i = 1; i < g->n_tensors; i++) {
        if (order[i]->offset - order[i - 1]->offset >= order[i - 1]->bytes)
            continue;
        c->name = order[i]->name;
        return gguf_fail(c, ERR_FORMAT, "overlaps %.*s",
                         (int)(order[i - 1]->name.size < 64 ? order[i - 1]->name.size : 64),
                         order[i - 1]->name.data);
    }
    qsort(order, g->n_tensors, sizeof order[0], gguf_compare_tensors);
    for (size_t i = 1; i < g->n_tensors; i++) {
        if (gguf_compare_tensors(&order[i - 1], &order[i]) != 0)
            continue;
        c->name = order[i]->name;
        return gguf_fail(c, ERR_FORMAT, "occurs twice");
    }
    return ERR_OK;
}

/* Second walk, over our own copy; g->n_keys and g->n_tensors are known to be true. */
static enum err_code gguf_build(struct gguf *g, const struct gguf_cursor *walked)
{
    struct gguf_cursor c = *walked;
    g->header = alloc_get(ALLOC_MODEL, walked->at);
    g->keys = alloc_zero(ALLOC_MODEL, g->n_keys, sizeof g->keys[0]);
    g->keys_by_name = alloc_zero(ALLOC_MODEL, g->n_keys, sizeof g->keys_by_name[0]);
    g->tensors = alloc_zero(ALLOC_MODEL, g->n_tensors, sizeof g->tensors[0]);
    g->tensors_by_name = alloc_zero(ALLOC_MODEL, g->n_tensors, sizeof g->tensors_by_name[0]);
    if (g->header == NULL || g->keys == NULL || g->keys_by_name == NULL || g->tensors == NULL ||
        g->tensors_by_name == NULL)
        return gguf_fail(&c, ERR_NOMEM, "no memory for a header of %llu bytes",
                         (unsigned long long)walked->at);
    memcpy(g->header, walked->data, walked->at);
    c.data = g->header;
    c.n = walked->at;
    c.at = 0;
    enum err_code rc = gguf_walk(&c, true, g);
    if (rc == ERR_OK)
        rc = gguf_index_keys(g, &c);
    if (rc == ERR_OK)
        rc = gguf_place_tensors(g, &c);
    if (rc == ERR_OK)
        rc = gguf_index_tensors(g, &c);
    return rc;
}

enum err_code gguf_parse(const uint8_t *header, size_t n_header, uint64_t file_size,
                         struct gguf **ret, uint64_t *ret_need, struct err *e)
{
    struct gguf_cursor c = {
        .data = header,
        .n = n_header < file_size ? n_header : file_size,
        .file_size = file_size,
        .e = e,
    };
    *ret_need = 0;
    if (c.n > UINT32_MAX)
        c.n = UINT32_MAX; /* array indices are 32 bits wide */
    struct gguf *g = alloc_zero(ALLOC_MODEL, 1, sizeof *g);
    if (g == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a GGUF header");
    enum err_code rc = gguf_walk(&c, false, g);
    if (rc != ERR_OK)
        g->n_keys = g->n_tensors = 0;
    else
        rc = gguf_build(g, &c);
    if (rc != ERR_OK) {
        *ret_need = c.need;
        gguf_free(g);
        return rc;
    }
    *ret = g;
    return ERR_OK;
}

void gguf_free(struct gguf *g)
{
    if (g == NULL)
        return;
    for (size_t i = 0; g->keys != NULL && i < g->n_keys; i++)
        alloc_free(g->keys[i].array.index);
    alloc_free(g->header);
    alloc_free(g->keys);
    alloc_free(g->keys_by_name);
    alloc_free(g->tensors);
    alloc_free(g->tensors_by_name);
    alloc_free(g);
}

/* ---- what is there --------------------------------------------------------------------------- */

uint64_t gguf_header_bytes(const struct gguf *g)
{
    return g->header_bytes;
}

size_t gguf_n_tensors(const struct gguf *g)
{
    return g->n_tensors;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i)
{
    return i < g->n_tensors ? &g->tensors[i] : NULL;
}

const struct gguf_tensor *gguf_tensor_find(const struct gguf *g, const char *name)
{
    const struct gguf_tensor wanted = {.name = {.data = name, .size = strlen(name)}};
    const struct gguf_tensor *key = &wanted, **found;
    found = bsearch(&key, g->tensors_by_name, g->n_tensors, sizeof g->tensors_by_name[0],
                    gguf_compare_tensors);
    return found != NULL ? *found : NULL;
}

static const struct gguf_key *gguf_find(const struct gguf *g, const char *name)
{
    const struct gguf_key wanted = {.name = {.data = name, .size = strlen(name)}};
    const struct gguf_key *key = &wanted, **found;
    found = bsearch(&key, g->keys_by_name, g->n_keys, sizeof g->keys_by_name[0], gguf_compare_keys);
    return found != NULL ? *found : NULL;
}

/* ---- values ---------------------------------------------------------------------------------- */

static bool gguf_load_unsigned(enum gguf_kind kind, const uint8_t *p, uint64_t *ret)
{
    switch (kind) {
    case GGUF_KIND_U8:
    case GGUF_KIND_BOOL:
        *ret = p[0];
        return true;
    case GGUF_KIND_U16:
        *ret = (uint64_t)p[0] | (uint64_t)p[1] << 8;
        return true;
    case GGUF_KIND_U32:
        *ret = gguf_load_u32(p);
        return true;
    case GGUF_KIND_U64:
        *ret = gguf_load_u64(p);
        return true;
    default:
        return false;
    }
}

static bool gguf_load_signed(enum gguf_kind kind, const uint8_t *p, int64_t *ret)
{
    uint64_t value;
    switch (kind) {
    case GGUF_KIND_I8:
        *ret = (int8_t)p[0];
        return true;
    case GGUF_KIND_I16:
        *ret = (int16_t)(uint16_t)(p[0] | p[1] << 8);
        return true;
    case GGUF_KIND_I32:
        *ret = (int32_t)gguf_load_u32(p);
        return true;
    case GGUF_KIND_I64:
        *ret = (int64_t)gguf_load_u64(p);
        return true;
    default:
        if (!gguf_load_unsigned(kind, p, &value) || value > INT64_MAX)
            return false;
        *ret = (int64_t)value;
        return true;
    }
}

static bool gguf_load_real(enum gguf_kind kind, const uint8_t *p, double *ret)
{
    const int64_t exact = (int64_t)1 << 53; /* integers up to here are doubles */
    int64_t integer;
    if (kind == GGUF_KIND_F32) {
        uint32_t bits = gguf_load_u32(p);
        float value;
        memcpy(&value, &bits, sizeof value);
        *ret = (double)value;
        return true;
    }
    if (kind == GGUF_KIND_F64) {
        uint64_t bits = gguf_load_u64(p);
        memcpy(ret, &bits, sizeof bits);
        return true;
    }
    if (kind == GGUF_KIND_BOOL || !gguf_load_signed(kind, p, &integer))
        return false;
    if (integer > exact || integer < -exact)
        return false;
    *ret = (double)integer;
    return true;
}

bool gguf_has(const struct gguf *g, const char *key)
{
    return gguf_find(g, key) != NULL;
}

bool gguf_u64(const struct gguf *g, const char *key, uint64_t *ret)
{
    const struct gguf_key *k = gguf_find(g, key);
    int64_t value;
    if (k == NULL || k->value == NULL || k->kind == GGUF_KIND_BOOL)
        return false;
    if (gguf_load_unsigned(k->kind, k->value, ret))
        return true;
    if (!gguf_load_signed(k->kind, k->value, &value) || value < 0)
        return false;
    *ret = (uint64_t)value;
    return true;
}

bool gguf_f64(const struct gguf *g, const char *key, double *ret)
{
    const struct gguf_key *k = gguf_find(g, key);
    return k != NULL && k->value != NULL && gguf_load_real(k->kind, k->value, ret);
}

bool gguf_bool(const struct gguf *g, const char *key, bool *ret)
{
    const struct gguf_key *k = gguf_find(g, key);
    if (k == NULL || k->kind != GGUF_KIND_BOOL)
        return false;
    *ret = k->value[0] != 0;
    return true;
}

bool gguf_text(const struct gguf *g, const char *key, struct gguf_text *ret)
{
    const struct gguf_key *k = gguf_find(g, key);
    if (k == NULL || k->kind != GGUF_KIND_STRING)
        return false;
    *ret = k->text;
    return true;
}

const struct gguf_array *gguf_array_get(const struct gguf *g, const char *key)
{
    const struct gguf_key *k = gguf_find(g, key);
    return k != NULL && k->kind == GGUF_KIND_ARRAY ? &k->array : NULL;
}

uint64_t gguf_array_count(const struct gguf_array *a)
{
    return a->count;
}

enum gguf_kind gguf_array_kind(const struct gguf_array *a)
{
    return a->kind;
}

bool gguf_array_text_at(const struct gguf_array *a, uint64_t i, struct gguf_text *ret)
{
    if (a->kind != GGUF_KIND_STRING || i >= a->count)
        return false;
    const uint8_t *p = a->header + a->index[i];
    *ret = (struct gguf_text){.data = (const char *)p + 8, .size = gguf_load_u64(p)};
    return true;
}

bool gguf_array_i64_at(const struct gguf_array *a, uint64_t i, int64_t *ret)
{
    if (a->kind == GGUF_KIND_STRING || i >= a->count)
        return false;
    return gguf_load_signed(a->kind, a->data + i * gguf_kind_bytes(a->kind), ret);
}

bool gguf_array_f64_at(const struct gguf_array *a, uint64_t i, double *ret)
{
    if (a->kind == GGUF_KIND_STRING || i >= a->count)
        return false;
    return gguf_load_real(a->kind, a->data + i * gguf_kind_bytes(a->kind), ret);
}

size_t gguf_n_keys(const struct gguf *g)
{
    return g->n_keys;
}

struct gguf_text gguf_key_at(const struct gguf *g, size_t i)
{
    return i < g->n_keys ? g->keys[i].name : (struct gguf_text){.data = "", .size = 0};
}

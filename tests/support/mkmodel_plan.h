/* What a generated model file holds: options, and from them the tensors with their formats,
 * deviations and places, and the parts of a split file. An architecture is a row of a table in
 * mkmodel_plan.c. Immutable once made. */
#ifndef ISLET_MKMODEL_PLAN_H
#define ISLET_MKMODEL_PLAN_H

#include "err.h"
#include "kernels.h"

enum {
    MKMODEL_MAX_PARTS = 512,
    MKMODEL_MAX_THREADS = 64,
    MKMODEL_MIN_VOCAB = 259, /* bytes and control tokens */
    MKMODEL_MAX_TOPICS = 60,
    MKMODEL_ALIGN = 32
};
#define MKMODEL_ROPE_BASE 1000000.0f

struct mkmodel_options {
    const char *arch;
    const char *out, *donor; /* donor: a file whose tokenizer is taken, or NULL */
    uint64_t layers, hidden, experts, ff, top_k, heads, head_dim, kv_heads, vocab, context, seed;
    uint64_t threads, split;
    bool tied, sync;
    bool mixed;           /* as Q4_K_M; else all matrices of `format` */
    enum k_format format; /* Q4_K where mixed */
    double emb_std, res_std;
    /* The routers' statistics; set_router: they are made, else routers are plain noise. */
    bool set_router;
    double zipf, locality;
    uint64_t topics;
};

enum mkmodel_role {
    MKMODEL_EMBD,
    MKMODEL_OUTPUT_NORM,
    MKMODEL_OUTPUT,
    MKMODEL_ATTN_NORM, /* from here on: one a layer */
    MKMODEL_Q,
    MKMODEL_K,
    MKMODEL_V,
    MKMODEL_Q_NORM,
    MKMODEL_K_NORM,
    MKMODEL_ATTN_OUTPUT,
    MKMODEL_FFN_NORM,
    MKMODEL_ROUTER,
    MKMODEL_GATE,
    MKMODEL_UP,
    MKMODEL_DOWN
};

struct mkmodel_tensor {
    char name[64];
    enum mkmodel_role role;
    uint32_t layer;
    enum k_format format;
    uint32_t n_dims;
    uint64_t dims[3];
    uint64_t bytes, offset; /* offset: from the end of its part's header */
    float std;              /* 0: all ones */
};

struct mkmodel_part {
    char *path;
    size_t first, n;      /* tensors */
    uint8_t *header;      /* [data_offset], padded; mkmodel_keys_make */
    uint64_t data_offset; /* of the first tensor */
    uint64_t data_bytes;
};

struct mkmodel_plan {
    struct mkmodel_options o;
    struct mkmodel_tensor *tensors;
    size_t n;
    struct mkmodel_part *parts;
    size_t n_parts;
};

/* `o` and its texts are borrowed as long as the plan lives. ERR_ARGUMENT: a shape that cannot be.
 * The headers are still missing. Gives *ret; free with mkmodel_plan_free. */
enum err_code mkmodel_plan_new(const struct mkmodel_options *o, struct mkmodel_plan **ret,
                               struct err *e) __attribute__((warn_unused_result));
void mkmodel_plan_free(struct mkmodel_plan *p); /* NULL is fine */
/* Bytes of all parts together; headers count once they are there. */
uint64_t mkmodel_plan_bytes(const struct mkmodel_plan *p);
/* "qwen3moe, ...": the architectures there are. */
const char *mkmodel_plan_arch(size_t i); /* NULL: no more */
/* The n-th count that the architecture's keys state, without the prefix; NULL: no more. */
const char *mkmodel_plan_key(const struct mkmodel_plan *p, size_t n, uint64_t *ret_value);

#endif

/* What a model is: sizes and features, from the metadata of its file. An architecture is a row of
 * features and a table of tensor names (shape.c); there is one forward pass. Immutable once
 * filled. */
#ifndef ISLET_SHAPE_H
#define ISLET_SHAPE_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

struct gguf;
struct gguf_file;
struct gguf_tensor;

enum {
    SHAPE_MAX_LAYERS = 512,
    SHAPE_MAX_EXPERTS = 4096,
    SHAPE_MAX_TOPK = 64
};

struct model_shape {
    char arch[32];  /* "qwen3moe" */
    char name[128]; /* general.name, or the file's name without .gguf */
    uint32_t n_layer;
    uint32_t n_embd; /* hidden size */
    uint32_t n_vocab;
    uint32_t n_ctx_train;
    uint32_t n_head; /* query heads */
    uint32_t n_head_kv;
    uint32_t head_dim;      /* of q, k and v (equal in the supported architectures) */
    uint32_t rope_dim;      /* rotated dimensions of a head; rope pairs (i, i + rope_dim/2) */
    uint32_t n_expert;      /* per layer */
    uint32_t n_expert_used; /* top-k */
    uint32_t n_ff_expert;   /* width of an expert */
    double rope_base;
    float rms_eps;
    float attention_scale; /* 1 / sqrt(head_dim), rounded once to f32 */
    float router_scale;    /* factor on the chosen weights, 1 if none */
    /* features */
    bool qk_norm;          /* RMS norm of each q and k head before rope */
    bool router_normalise; /* chosen weights divided by their sum in rank order */
    bool tied_head;        /* no output.weight: the head is token_embd */
    uint64_t n_params;     /* elements of all tensors */
};

/* One layer's tensors, each checked for its dimensions and a supported type. Lent by the
 * gguf_file. */
struct shape_layer {
    const struct gguf_tensor *attn_norm, *q, *k, *v, *q_norm, *k_norm, *attn_output;
    const struct gguf_tensor *ffn_norm, *router, *gate, *up,
        *down; /* gate, up, down: [n_expert] slices */
};

struct shape_tensors {
    const struct gguf_tensor *token_embd, *output_norm,
        *output;                /* output == token_embd when tied */
    struct shape_layer *layers; /* [n_layer] */
};

/* Fills *ret from keys and tensor table. ERR_UNSUPPORTED: an architecture or feature that is not
 * built in, named, with the list of those that are; ERR_FORMAT: a missing or absurd key, named with
 * value and limit. */
enum err_code shape_from_file(const struct gguf_file *f, struct model_shape *ret, struct err *e)
    __attribute__((warn_unused_result));

/* Finds and checks every tensor the shape needs. Gives ret->layers; free with shape_tensors_done.
 * ERR_FORMAT names the tensor with its dimensions and those that would be right; ERR_UNSUPPORTED
 * names a type without kernels. */
enum err_code shape_bind(const struct gguf_file *f, const struct model_shape *shape,
                         struct shape_tensors *ret, struct err *e)
    __attribute__((warn_unused_result));
void shape_tensors_done(struct shape_tensors *t);

/* Bytes of one expert's slice of a gate, up or down tensor, and its offset in the file. */
uint64_t shape_slice_bytes(const struct gguf_tensor *t, const struct model_shape *shape);
uint64_t shape_slice_offset(const struct gguf_tensor *t, const struct model_shape *shape,
                            uint32_t expert);

#endif

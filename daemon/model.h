/* A model: shape, digests, the dense weights (all but the experts') in one buffer of the device that
 * computes with them, in the order of that device, and where each expert is in the file. The experts
 * themselves are engine_experts'. Immutable after model_load but for the slot tables; the engine
 * thread's. */
#ifndef ISLET_MODEL_H
#define ISLET_MODEL_H

#include "gguf_file.h"
#include "kernels.h"
#include "shape.h"
#include "tier_ssd.h"

struct model_layer {
    struct k_span attn_norm, q_norm, k_norm,
        ffn_norm; /* f32; q_norm, k_norm: buffer NULL if none */
    struct k_matrix q, k, v, attn_output, router;
    struct k_experts experts; /* those in RAM */
};

struct model {
    const struct k_ops *ops;      /* of the device of the dense weights */
    const struct k_ops *host_ops; /* of the CPU, which may be the same one */
    struct gguf_file *file;
    struct model_shape shape;
    struct shape_tensors tensors;
    struct k_buffer *weights; /* dense weights */
    struct k_buffer *tables;  /* of the CPU: the slot tables of the layers */
    uint64_t dense_bytes, tables_bytes;
    uint64_t weights_bytes;  /* the sum of both */
    uint64_t largest_matrix; /* bytes: of model_loading.staging */
    uint64_t *expert_bytes;  /* [shape.n_layer] of an expert's extent in the arena of slots */
    uint64_t experts_bytes;  /* extents of all experts */
    struct k_matrix token_embd, output;
    struct k_span output_norm;
    struct model_layer *layers; /* [shape.n_layer] */
    uint8_t file_digest[16], shape_digest[16];
};

struct model_loading {
    const char *path;
    struct k_device *device; /* of the dense weights */
    struct k_stream *stream;
    struct k_device *host; /* the CPU; NULL: the same device */
    struct k_span staging; /* of model_load, where the device arranges weights (k_ops.arrange):
                             * model.largest_matrix bytes of it that nobody else uses */
    struct tier_ssd *ssd;  /* of model_load: reads the file; no request is open */
    struct k_buffer
        *arena; /* of model_load: ssd's arena on the CPU, nothing in it yet; the reads land there
                              * first */
    uint64_t arena_bytes;
    uint64_t total_bytes; /* of dense weights and experts read at start: what progress counts
                           * against */
    void (*progress)(void *context, unsigned percent); /* called for each per cent at most once */
    bool (*stopped)(void *context); /* asked between pieces: true ends the load by CANCELLED */
    void *context;
};

/* Opens the file and checks it; no weights yet, so that the caller may size the rest first. Gives
 * *ret; free with model_close. Errors: IO, FORMAT, UNSUPPORTED, NOMEM. */
enum err_code model_open(const struct model_loading *loading, struct model **ret, struct err *e)
    __attribute__((warn_unused_result));
/* Reads the dense weights; the layers' experts will be computed in loading->arena. ERR_FORMAT names
 * a tensor with a value that is not finite; ERR_CANCELLED; ERR_IO. */
enum err_code model_load(struct model *m, const struct model_loading *loading, struct err *e)
    __attribute__((warn_unused_result));
void model_close(struct model *m); /* NULL is fine */

/* The slices of an expert, gate, up and down, as they lie in an extent at `place`: each at its file
 * offset modulo 4,096. */
void model_expert_parts(const struct model *m, uint32_t layer, uint32_t expert, uint64_t place,
                        struct tier_ssd_part ret[TIER_SSD_PARTS]);

#endif

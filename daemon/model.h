/* A model in memory: shape, digests, and all weights in one arena of the compute device, in the
 * file's own layout. Immutable after model_open; the engine thread's. */
#ifndef ISLET_MODEL_H
#define ISLET_MODEL_H

#include "gguf_file.h"
#include "kernels.h"
#include "shape.h"

struct model_layer {
    struct k_span attn_norm, q_norm, k_norm,
        ffn_norm; /* f32; q_norm, k_norm: buffer NULL if none */
    struct k_matrix q, k, v, attn_output, router;
    struct k_experts experts;
};

struct model {
    const struct k_ops *ops; /* of the device that holds the arena */
    struct gguf_file *file;
    struct model_shape shape;
    struct shape_tensors tensors;
    struct k_buffer *weights;
    uint64_t weights_bytes;
    struct k_matrix token_embd, output;
    struct k_span output_norm;
    struct model_layer *layers; /* [shape.n_layer] */
    uint8_t file_digest[16], shape_digest[16];
};

struct model_loading {
    const char *path;
    struct k_device *device;
    struct k_stream *stream;
    void (*progress)(void *context, unsigned percent); /* called for each per cent at most once */
    bool (*stopped)(void *context); /* asked between pieces: true ends the load by CANCELLED */
    void *context;
};

/* Opens the file and checks it; no weights yet, so that the caller may size the rest first. Gives
 * *ret; free with model_close. Errors: IO, FORMAT, UNSUPPORTED, NOMEM. */
enum err_code model_open(const struct model_loading *loading, struct model **ret, struct err *e)
    __attribute__((warn_unused_result));
/* Reads all weights. ERR_FORMAT names a tensor with a value that is not finite; ERR_CANCELLED. */
enum err_code model_load(struct model *m, const struct model_loading *loading, struct err *e)
    __attribute__((warn_unused_result));
void model_close(struct model *m); /* NULL is fine */

/* ERR_NOMEM with all figures when weights + kv + work do not fit into what the system says is
 * available (MemAvailable). */
enum err_code model_check_memory(const struct model *m, uint64_t kv_bytes, uint64_t work_bytes,
                                 struct err *e) __attribute__((warn_unused_result));
/* Bytes named by `key` in /proc/meminfo ("MemTotal"); 0: unknown. */
uint64_t model_memory_bytes(const char *key);

#endif

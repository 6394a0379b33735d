/* Steps that decode, recorded once and replayed: what the GPU computes between the experts of two
 * layers, and whole steps for a model all of whose experts are in islands. Rows, positions, pages and
 * experts' places are read from memory when a record runs, so it holds for the model's life; there is
 * one for each bound on rows. The engine thread's. */
#ifndef ISLET_ENGINE_RECORD_H
#define ISLET_ENGINE_RECORD_H

#include "kernels.h"

struct engine_forward;

enum {
    ENGINE_RECORD_SIZES = 4 /* 1, 2, 4, 8 rows, as many of them with logits */
};

struct engine_record {
    /* [n_layer + 1]; NULL: not recorded. With what the host is told about a layer. */
    struct k_graph **segments[ENGINE_RECORD_SIZES];
    struct k_graph **resident[ENGINE_RECORD_SIZES]; /* [n_layer]: a layer's experts in islands */
    /* [n_layer]: a segment and all of its layer's experts, of which the host is not told */
    struct k_graph **full[ENGINE_RECORD_SIZES];
    struct k_graph *whole[ENGINE_RECORD_SIZES];
    uint32_t n_segments;
};

/* Records all sizes that a step may have. Nothing where the device cannot. ERR_DEVICE, ERR_NOMEM:
 * end it with done. */
enum err_code engine_record_start(struct engine_record *r, struct engine_forward *f)
    __attribute__((warn_unused_result));
void engine_record_done(struct engine_record *r,
                        const struct k_ops *ops); /* a cleared one is fine */

/* The size for a step; ENGINE_RECORD_SIZES: it is not recorded. */
unsigned engine_record_size(const struct engine_record *r, uint32_t n_rows, uint32_t n_logits);
/* The whole step, or NULL: not recorded, or not every expert is in an island. */
struct k_graph *engine_record_whole(const struct engine_record *r, const struct engine_forward *f);

#endif

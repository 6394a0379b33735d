/* The CPU's half of a layer's experts where a GPU computes the rest: buffers of the CPU for the rows
 * and results, computing, and the way of the results to the GPU. What the CPU computes has the GPU's
 * bits, so who computes what is free. The engine thread's. */
#ifndef ISLET_ENGINE_HYBRID_H
#define ISLET_ENGINE_HYBRID_H

#include "engine_split.h"
#include "model.h"
#include "ticks.h"

struct engine_hybrid_options {
    struct k_device *cpu, *gpu;
    struct k_stream *cpu_stream;
    const struct model *model;
    uint32_t max_rows;
    struct ticks ticks;
    struct engine_split_rates rates; /* as measured or estimated at start */
};

struct engine_hybrid {
    const struct k_ops *ops; /* of the CPU */
    struct k_device *gpu;
    const struct k_ops *gpu_ops;
    struct k_stream *stream; /* of the CPU */
    const struct model *model;
    struct k_buffer *work;
    uint64_t work_bytes;
    bool pinned; /* work is registered with the GPU */
    struct ticks ticks;
    struct engine_split_rates rates; /* corrected by what is measured */

    struct k_rows rows;      /* n_rows and faults only */
    struct k_act norm_act;   /* [max_rows][n_embd] */
    struct k_act hidden_act; /* [max_rows * n_used][n_ff] */
    struct k_span groups, order, n_selected, selected;
    struct k_span sent; /* uint32 [max_rows * n_used]: results that were sent in this layer */
    uint32_t n_sent;
    struct k_span out; /* float [max_rows * n_used][n_embd] */
    uint32_t n_rows;
    bool quantised;       /* the layer's rows are there in the forms that experts read */
    bool took_part;       /* in the last layer that might have had it */
    bool rows_there;      /* the layer's rows */
    uint64_t gpu_wait_ns; /* time that the engine waited for the GPU, in all */
    uint64_t cpu_ns;      /* time spent computing, in all */
};

/* Bytes of the CPU's memory. */
uint64_t engine_hybrid_bytes(const struct k_device *cpu, const struct model *m, uint32_t max_rows);
/* ERR_NOMEM. End with engine_hybrid_done; `h` stays where it is until then. */
enum err_code engine_hybrid_start(struct engine_hybrid *h,
                                  const struct engine_hybrid_options *options, struct err *e)
    __attribute__((warn_unused_result));
void engine_hybrid_done(struct engine_hybrid *h); /* a cleared one is fine */

void engine_hybrid_step(struct engine_hybrid *h, uint32_t n_rows);
/* Where the rows that the experts read go, float [n_rows][n_embd]; lent. NULL: not yet, they are
 * many and probably not needed. */
float *engine_hybrid_layer(struct engine_hybrid *h);
/* Where they go when a recorded step sends them, all that a record has room for. */
float *engine_hybrid_recorded(const struct engine_hybrid *h);
/* They are needed: where they go, or NULL if they are there. */
float *engine_hybrid_rows(struct engine_hybrid *h);
/* Computes the selected groups of the layer, whose rows are there. */
enum err_code engine_hybrid_compute(struct engine_hybrid *h, uint32_t layer, uint32_t n_groups,
                                    const struct k_group *groups, const uint32_t *order,
                                    const uint32_t *selected, uint32_t n)
    __attribute__((warn_unused_result));
/* Sends what was computed for them to `to`, float [max_rows * n_used][n_embd] of the GPU; holds still
 * until the stream got there. */
void engine_hybrid_send(struct engine_hybrid *h, struct k_stream *stream, struct k_span to,
                        const struct k_group *groups, const uint32_t *order,
                        const uint32_t *selected, uint32_t n);
/* faults[i] |= the fault of row i of the step. */
void engine_hybrid_faults(const struct engine_hybrid *h, uint32_t *faults);

#endif

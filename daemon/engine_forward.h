/* The forward pass of one step: rows in, logits out. Holds every buffer of a step; nothing is
 * allocated after engine_forward_new. One pass for all architectures; engine_attention and
 * engine_moe are the halves of a layer. The engine thread's. */
#ifndef ISLET_ENGINE_FORWARD_H
#define ISLET_ENGINE_FORWARD_H

#include "engine_ahead.h"
#include "engine_experts.h"
#include "engine_guess.h"
#include "engine_hybrid.h"
#include "engine_islands.h"
#include "engine_record.h"
#include "kernels.h"
#include "model.h"

#define ENGINE_FORWARD_UNSEEN UINT32_MAX

struct engine_forward_sizes {
    uint32_t max_rows;      /* of a step */
    uint32_t max_logits;    /* rows of a step that may ask for logits */
    uint32_t max_sequences; /* rows of the page table */
    uint32_t max_pages;     /* of a sequence; positions: 64 times that */
    enum k_kv_type kv_type;
};

struct engine_forward {
    const struct model *model;
    struct engine_experts *experts; /* borrowed */
    /* Where the device is a GPU: experts in its memory, and the CPU's half. Borrowed; else NULL. */
    struct engine_islands *islands;
    struct engine_hybrid *hybrid;
    const struct k_ops *ops;
    struct k_stream *stream;
    struct engine_forward_sizes sizes;
    struct k_buffer *work;
    uint64_t work_bytes, inputs_bytes, faults_bytes;
    struct engine_record record; /* of a GPU: steps that are only replayed */

    /* On the device. *_act: a row in the forms that the next matrices read. */
    struct k_rows rows, logit_rows;
    struct k_kv kv; /* layer_offset is set per layer; the pool is the caller's */
    uint64_t kv_layer_bytes;
    struct k_span x;                     /* residual, f32 [max_rows][n_embd] */
    struct k_act norm_act;               /* [max_rows][n_embd] */
    struct k_span q, k, v, scratch, out; /* out: f32 [max_rows][n_embd] */
    struct k_act heads_act;              /* [max_rows][n_head * head_dim] */
    struct k_span rope;
    struct k_span router, weights, selected;
    struct k_span n_groups, groups, order; /* one behind the other */
    struct k_span n_selected;              /* uint32 [1], as n_groups */
    struct k_span everything;              /* uint32 [groups]: 0, 1, 2 ... */
    struct k_span ids;       /* uint32 [n_layer][max_rows][n_used]; kept until the next step */
    uint64_t ids_stride;     /* of the step, bytes of a layer */
    uint32_t *routes;        /* of the host, as ids */
    struct k_act hidden_act; /* [max_rows * n_used][n_ff] */
    struct k_span expert_out;
    struct k_span gather_index, gathered, device_logits;
    struct k_span pick_how, pick_ids, pick_scratch;
    struct k_act head_act; /* [max_logits][n_embd] */

    /* Of the host: the step's inputs, written by the caller, and its results. */
    void *host;  /* the block of all that is below; begins with the inputs, as on the device */
    bool pinned; /* it is registered with the GPU */
    uint32_t n_rows, n_logits;
    struct k_graph *const *recorded; /* the step's segments, or NULL: they are not recorded, */
    unsigned record_size;            /* and which size it is */
    bool guess;                      /* the step guesses the next layers' experts (engine_ahead) */
    struct engine_guess guesses;
    _Atomic uint64_t *heartbeat; /* counted up with every layer, so that a long step is no hang;
                                  * NULL: nobody looks */
    uint32_t *token, *position, *sequence; /* [max_rows] */
    uint32_t *logit_row;                   /* [max_logits]: rows whose logits are wanted */
    uint32_t *faults;                      /* [max_rows]: non-zero: a value was not finite */
    uint32_t *logit_faults;                /* [max_logits] */
    struct k_pick_row *how;                /* [max_logits]: how tokens are drawn, */
    uint32_t *picked;                      /* [max_logits] and which; where ops->pick is there */
    bool logits_stay;                      /* nobody looks at the logits */
    float *logits;                         /* [max_logits][n_vocab] */
    char *host_layer; /* of the layer: n_groups, groups and order, as on the device */
    const struct k_group *host_groups;       /* [n_expert] */
    const uint32_t *host_order;              /* [max_rows * n_used] */
    char *host_batch;                        /* n_selected and selected, as on the device; */
    char *host_resident;                     /* of those in islands, read as the record runs */
    uint32_t *host_selected;                 /* [2 * n_expert] of a batch, in two parts */
    uint32_t layer_groups[SHAPE_MAX_LAYERS]; /* distinct experts of each layer; while a step runs
                                              * ENGINE_FORWARD_UNSEEN where only the GPU knows */
};

/* Bytes of the device, and of the host beside it, that engine_forward_new takes. */
uint64_t engine_forward_bytes(const struct k_device *device, const struct model *m,
                              const struct engine_forward_sizes *sizes);
uint64_t engine_forward_host_bytes(const struct model *m, const struct engine_forward_sizes *sizes);
/* Bytes of one KV page. */
uint64_t engine_forward_page_bytes(const struct model *m, enum k_kv_type type);
/* What computes on a GPU, beside it; both NULL where the CPU is the only device. */
struct engine_forward_tiers {
    struct engine_experts *experts;
    struct engine_islands *islands;
    struct engine_hybrid *hybrid;
};
/* The tiers (with their model) and `pool` (KV pages) are borrowed. The weights may still be
 * missing. Gives *ret; free with engine_forward_free. */
enum err_code engine_forward_new(struct k_device *device, struct k_stream *stream,
                                 const struct engine_forward_tiers *tiers,
                                 const struct engine_forward_sizes *sizes, struct k_buffer *pool,
                                 struct engine_forward **ret, struct err *e)
    __attribute__((warn_unused_result));
void engine_forward_free(struct engine_forward *f); /* NULL is fine */

/* Sets the first n pages of a sequence in the device's page table. */
void engine_forward_set_pages(struct engine_forward *f, uint32_t sequence, const uint32_t *pages,
                              uint32_t n);
/* Records the steps that decode, once the weights are there; nothing where the device records
 * nothing. ERR_DEVICE. */
enum err_code engine_forward_record(struct engine_forward *f, struct err *e)
    __attribute__((warn_unused_result));
/* Computes the rows; logits, faults and logit_faults are there afterwards. ERR_DEVICE,
 * ERR_UNSUPPORTED: nothing of the step may be used. */
enum err_code engine_forward_step(struct engine_forward *f, struct err *e)
    __attribute__((warn_unused_result));

/* What the device computes between two layers' experts without the host: before those of `layer`,
 * or behind the last ones. Of engine_record, as engine_forward_bound, which bounds the rows. */
enum err_code engine_forward_segment(struct engine_forward *f, uint32_t layer)
    __attribute__((warn_unused_result));
void engine_forward_bound(struct engine_forward *f, uint32_t n_rows, uint32_t n_logits);
/* Of engine_moe: waits for the stream, and counts the time where a GPU computes. */
enum err_code engine_forward_wait(struct engine_forward *f) __attribute__((warn_unused_result));

/* Experts of the last step in `layer`, [n_rows][n_used] in rank order; lent until the next step. */
const uint32_t *engine_forward_routes(const struct engine_forward *f, uint32_t layer);

#endif

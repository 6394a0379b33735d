/* The VRAM tier: islands that hold copies of experts in the order in which the GPU computes, a
 * transit area for experts that are copied for one use only, and the tables through which the
 * kernels find them. What lies where is expert_cache's and engine_islands' affair: this copies.
 *
 * Copies run on streams of their own. Those of registered memory begin some at a time, in one
 * operation of the device (k_ops.bring), on two streams in turn: while what one of them got is
 * arranged, the link works for the other. Others come over the link into the staging area, are
 * arranged into their place, then the table. The stream that computes waits for them only where
 * tier_vram_await says so. Nothing is allocated after tier_vram_start. The engine
 * thread's. */
#ifndef ISLET_TIER_VRAM_H
#define ISLET_TIER_VRAM_H

#include "model.h"

enum {
    TIER_VRAM_TRANSIT = 48, /* experts of each half of the transit area at most */
    TIER_VRAM_SLICES = TIER_SSD_PARTS
};

struct tier_vram_options {
    struct k_device *device;
    struct k_stream *stream;   /* the one that computes; borrowed */
    const struct model *model; /* borrowed */
    uint64_t islands_bytes;    /* a multiple of EXPERT_CACHE_ALIGN; 0: transit only */
    uint64_t budget;           /* of the device's memory, as for tier_vram_fixed_bytes */
};

struct tier_vram {
    const struct k_ops *ops;
    const struct model *model;
    struct k_stream *stream, *copies[2];
    struct k_buffer *memory;                                 /* islands, transit, staging, tables */
    uint64_t islands_bytes, transit, transit_bytes, staging; /* transit_bytes: of an expert there */
    uint32_t chunks, chunks_held; /* of K_CHUNK_BYTES, wholly islands; those that have memory */
    unsigned n_transit;           /* experts of each half of the transit area */
    uint64_t *island_bytes;       /* [n_layer] of an expert, multiples of EXPERT_CACHE_ALIGN */
    struct k_experts *layers;     /* [n_layer] where the GPU finds its experts */
    struct k_event *copied[2]; /* after the last copy begun on each, and whatever began before it */
    unsigned last;             /* the one that began last */
    struct k_event *ready[2];  /* after the last copy to a half of the transit area, */
    struct k_event *used[2];   /* and after its last use */
    bool loose[2];             /* nothing was to wait for the last copies to a half yet */
    uint64_t begun, done;      /* copies */
    struct k_bring together;   /* copies that wait to begin with others of their layer; */
    uint32_t together_layer;   /* waiting for them begins them, and so does looking after them */
    uint32_t untimed;          /* copies since one was timed */
    struct k_event *from, *to; /* before and after a copy that is timed */
    uint64_t timed_bytes;      /* of it; 0: none is */
};

/* Of one expert of the layer as an island. */
uint64_t tier_vram_island_bytes(const struct model *m, uint32_t layer);
/* Bytes of the device beside the islands, where `budget` is all that it gives. */
uint64_t tier_vram_fixed_bytes(const struct model *m, uint64_t budget);
/* The least islands_bytes: the model's dense weights are staged there while it loads. */
uint64_t tier_vram_least(const struct model *m);
/* ERR_NOMEM, ERR_DEVICE. End with tier_vram_done; `v` stays where it is until then. */
enum err_code tier_vram_start(struct tier_vram *v, const struct tier_vram_options *options,
                              struct err *e) __attribute__((warn_unused_result));
void tier_vram_done(struct tier_vram *v); /* a cleared one is fine */

/* Gives the memory of a chunk of islands back to the device, or gets it again: ERR_NOMEM,
 * ERR_DEVICE. Nothing that was begun uses it. */
void tier_vram_give_back(struct tier_vram *v, uint32_t chunk);
enum err_code tier_vram_take_again(struct tier_vram *v, uint32_t chunk, struct err *e)
    __attribute__((warn_unused_result));

/* Has an expert's slices (gate, up, down, in the file's order) copied to `place`, an island's or
 * one of the transit area; `pinned`: they lie in registered memory and hold still until the copy is
 * done. It begins with the next call at the latest that is not another of these. */
void tier_vram_copy(struct tier_vram *v, uint32_t layer, uint32_t expert,
                    const uint8_t *const slices[TIER_VRAM_SLICES], bool pinned, uint64_t place);
/* What is computed from now on may use whatever was copied until now. */
void tier_vram_await(struct tier_vram *v);
/* Are all copies begun done? Never waits. */
bool tier_vram_settle(struct tier_vram *v);
/* Waits for them. ERR_DEVICE: it failed, which the stream that computes tells too. */
enum err_code tier_vram_wait(struct tier_vram *v);

/* Was a copy timed since the last call? Every few are. */
bool tier_vram_timed(struct tier_vram *v, uint64_t *ret_bytes, uint64_t *ret_ns);

/* Place of the i-th expert of a half of the transit area. */
uint64_t tier_vram_transit_place(const struct tier_vram *v, unsigned half, unsigned i);
/* The next copies overwrite the half: they wait for what used it. */
void tier_vram_transit_begin(struct tier_vram *v, unsigned half);
/* All that the half holds was copied, and what is computed from now on may use it. */
void tier_vram_transit_ready(struct tier_vram *v, unsigned half);
void tier_vram_transit_await(struct tier_vram *v, unsigned half);
/* All that uses the half was given to the stream that computes. */
void tier_vram_transit_used(struct tier_vram *v, unsigned half);

#endif

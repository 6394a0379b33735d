/* The experts of a step that are in VRAM: tells a layer's groups that the GPU can compute at once
 * from the others, copies experts to the GPU for one use or to stay, and keeps what those copies read
 * in RAM. Joins expert_cache (decides who stays), tier_vram (copies) and engine_experts (RAM, SSD).
 * The engine thread's.
 *
 * One layer whose experts are not all in islands:
 *   engine_islands_layer(is, &layer)       is->resident, is->early and is->rest
 *   for each group of the rest that engine_experts gives out, one of
 *     engine_islands_begin, engine_islands_copy ..., engine_islands_end    copied and computed now
 *     engine_islands_promote                      computed by the CPU; kept for later if it pays
 *   engine_islands_leave(is) */
#ifndef ISLET_ENGINE_ISLANDS_H
#define ISLET_ENGINE_ISLANDS_H

#include "engine_experts.h"
#include "engine_split.h"
#include "tier_vram.h"

struct engine_islands_options {
    struct k_device *device;
    struct k_stream *stream;        /* the one that computes */
    struct engine_experts *experts; /* borrowed; must outlive this */
    uint64_t islands_bytes;
    uint64_t budget;   /* of the device's memory */
    uint32_t max_rows; /* of a step */
    enum engine_placement placement;
};

struct engine_islands_counts {
    uint64_t copies, copied_bytes; /* experts that went over the link */
    uint64_t early;                /* of these: before their layer chose them, which it then did */
};

struct engine_islands {
    struct tier_vram vram;
    struct engine_experts *experts;
    struct k_device *device;
    struct expert_cache *cache; /* NULL: there is no island to be had */
    bool pinned;                /* the RAM arena is registered with the device */
    uint32_t n_layer, n_expert, n_used;
    uint64_t islands_bytes;
    enum engine_placement placement;
    struct engine_islands_counts counts;

    /* of the layer that is computed: indices into its groups */
    uint32_t layer, *resident, n_resident, *rest, n_rest;
    const struct k_group *groups;
    bool held;                /* no island is given away: copies landed while it is computed */
    uint32_t *row_hits;       /* [max_rows] of the step: uses of experts in islands */
    unsigned half, n_transit; /* of the transit area: the half in use, experts in it */
    /* Experts that were copied before their layer chose them, in both halves in this order; then
     * those of its groups that they are of. */
    struct engine_islands_early {
        unsigned half;
        uint64_t begun; /* copies when the last of them was */
        uint32_t n_experts, experts[TIER_VRAM_TRANSIT];
        uint32_t n_groups, groups[TIER_VRAM_TRANSIT];
    } early[2];
    uint32_t early_layer; /* of these experts; n_layer: there are none */

    /* Copies under way, in order: what they read in RAM is pinned, where they go is LOADING. The
     * first one is number `landed` + 1 of all. */
    struct engine_islands_flight {
        uint32_t layer, expert;
        bool stays;      /* goes to an island */
        bool background; /* nobody waits for it */
    } * flights;
    uint32_t n_flights, n_background, max_flights;
    uint32_t steps; /* in turn, so that asking for islands costs little and none is passed over */
    uint64_t landed;
    uint64_t awaited; /* so many of all were there before what was computed last */
    uint32_t next;    /* expert that an idle engine looks at */
};

/* Bytes of the host that engine_islands_start takes. */
uint64_t engine_islands_bytes(const struct model *m, uint32_t max_rows);
/* ERR_NOMEM, ERR_DEVICE. End with engine_islands_done, before the experts; `is` stays where it is
 * until then. */
enum err_code engine_islands_start(struct engine_islands *is,
                                   const struct engine_islands_options *options, struct err *e)
    __attribute__((warn_unused_result));
void engine_islands_done(struct engine_islands *is); /* a cleared one is fine */

void engine_islands_step(struct engine_islands *is, uint32_t n_rows);
/* Are all experts of the layer in islands? Then it needs none of the calls below. */
bool engine_islands_full(const struct engine_islands *is, uint32_t layer);
/* All of a full layer's uses are hits. */
void engine_islands_hit(struct engine_islands *is, uint32_t n_rows);
/* What is computed on the device after this may use the resident ones; and those of is->early[i] if
 * it lies between engine_islands_await_early and engine_islands_end_early. */
void engine_islands_layer(struct engine_islands *is, const struct engine_experts_layer *layer);
void engine_islands_await_early(struct engine_islands *is, unsigned i);
void engine_islands_end_early(struct engine_islands *is, unsigned i);
void engine_islands_leave(struct engine_islands *is);
/* Begins to copy experts of the next layer that lacks some, which will choose nearly all of its own:
 * the link does not rest until then. */
void engine_islands_ahead(struct engine_islands *is);

/* Copies of the next is->vram.n_transit groups at most, then what computes them. */
void engine_islands_begin(struct engine_islands *is);
void engine_islands_copy(struct engine_islands *is, uint32_t group);
void engine_islands_await(struct engine_islands *is); /* after the copies, before computing */
void engine_islands_end(struct engine_islands *is);   /* what computes was given to the stream */
/* Copies experts of these groups in the background, as far as they are worth islands and the link has
 * room: from one of them on, another one each time, until one is refused. */
void engine_islands_promote(struct engine_islands *is, const uint32_t *groups, uint32_t n);

/* Between steps: begins to copy an expert that is READY in RAM, to stay. False: no island is free
 * for it, and none holds what is worth less. */
bool engine_islands_bring(struct engine_islands *is, uint32_t layer, uint32_t expert);
/* An island of the layer's size is free, or may be: nothing need be given up for it. */
bool engine_islands_room(const struct engine_islands *is, uint32_t layer);
/* Between steps: takes notice of copies that are done; with `wait` waits for all. ERR_DEVICE. */
enum err_code engine_islands_settle(struct engine_islands *is, bool wait)
    __attribute__((warn_unused_result));

/* Between steps. Gives the memory of n chunks of islands back, those whose experts are used least, or
 * of as many as there are; the experts are where they came from. ERR_DEVICE. */
enum err_code engine_islands_give_back(struct engine_islands *is, uint32_t n)
    __attribute__((warn_unused_result));
/* Gets the memory of n of them again, or of as many as the device gives: ERR_NOMEM, ERR_DEVICE. */
enum err_code engine_islands_take_again(struct engine_islands *is, uint32_t n, struct err *e)
    __attribute__((warn_unused_result));

/* While the engine has nothing to do: fills islands. False: there is nothing left to do. ERR_DEVICE
 * goes to *ret_code. */
bool engine_islands_idle(struct engine_islands *is, enum err_code *ret_code);
/* Fills them now, while a model loads. ERR_CANCELLED, ERR_DEVICE, ERR_IO, ERR_FORMAT. */
enum err_code engine_islands_fill(struct engine_islands *is, const struct model_loading *loading,
                                  struct err *e) __attribute__((warn_unused_result));

#endif

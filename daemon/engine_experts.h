/* The experts of a step: finds those that its rows chose in memory, has the others read, and gives
 * them out for computing in the order in which they are there: hits first, then misses as they
 * arrive. Joins expert_cache (decides), tier_ram (memory) and tier_ssd (reads). The engine
 * thread's.
 *
 * One layer:
 *   engine_experts_layer(x, &layer)
 *   engine_experts_expect(x, layer, id)   if the choice of a layer behind it can be guessed
 *   while ((n = engine_experts_take(x)) > 0) compute the groups x->selected[0..n)
 * A group whose expert cannot be read is never given out: its rows are in x->row_failed, the reason
 * in x->error. */
#ifndef ISLET_ENGINE_EXPERTS_H
#define ISLET_ENGINE_EXPERTS_H

#include "expert_cache.h"
#include "model.h"
#include "tier_ram.h"
#include "tier_ssd.h"

struct engine_experts_options {
    uint64_t arena_bytes;
    enum tier_ssd_io io;
    uint32_t depth;                        /* of reads */
    uint32_t max_rows;                     /* of a step */
    const struct tier_read_source *source; /* NULL: by `io`; else a test's own reader */
};

/* What a layer needs. Lent until its last take. */
struct engine_experts_layer {
    uint32_t index, n_groups;
    const struct k_group *groups; /* of the host, as order */
    const uint32_t *order;
    const uint32_t *wanted; /* [n_wanted] those groups that are needed here; NULL: all */
    uint32_t n_wanted;
};

struct engine_experts {
    struct model *model;
    const struct k_ops *ops;
    struct k_stream *stream;
    struct expert_cache *cache;
    struct tier_ram ram;
    struct tier_ssd *ssd;
    bool all_fit;       /* the arena holds every expert */
    uint32_t n_experts; /* n_layer * n_expert */
    uint8_t *sound;     /* [n_experts] 1: its values were checked once (A3) */
    uint32_t warm;      /* next expert that an idle engine reads */
    bool idle_failed;   /* such a read failed, which was said */
    const struct expert_cache
        *above; /* experts that are READY there are not read ahead; NULL: none */
    /* Ends what else pins experts (copies to a GPU) when reads find no slot; NULL: nothing does. */
    void (*unpin)(void *context);
    void *unpin_context;
    /* Told of each expert (layer * n_expert + index) whose read failed. NULL: nobody asks. */
    void (*failed)(void *context, uint32_t id, const struct err *why);
    void *failed_context;
    _Atomic uint64_t *heartbeat; /* counted up as reads end, so that a layer that waits for many is
                                  * no hang; NULL: nobody looks */

    /* of the layer that is computed */
    uint32_t layer, n_rows;
    bool pinned; /* its groups hold pins; false: every expert is there for good */
    const struct k_group *groups;
    const uint32_t *order;
    uint32_t *group_of; /* [n_expert] group + 1 of an expert that is waited for; 0: none */
    uint32_t *missing, n_missing;      /* groups whose read has not begun, from next_missing on */
    uint32_t next_missing, n_waiting;  /* n_waiting: groups whose read is under way */
    uint32_t *ready, n_given, n_there; /* groups to compute: given out are [0, n_given) */
    uint32_t *selected, n_selected;    /* the last batch given out */
    bool ahead;                        /* the next layer is read ahead of its need */
    uint32_t next_ahead;               /* expert of the next layer to look at */
    /* Guesses, as layer * n_expert + expert: [n_experts] */
    uint32_t *expected, n_expected;  /* what layers behind this one may choose: reads of those */
    uint32_t next_expected;          /* from here on have not begun */
    uint32_t *held, n_held;          /* read for a guess, pinned until their layer has chosen */
    bool *is_held;                   /* [n_experts] */
    uint64_t guesses, guesses_right; /* experts read for a guess; of them chosen then */

    /* of the step, per row */
    uint32_t *row_misses;
    uint64_t *row_bytes;
    bool *row_failed;
    bool any_failed;
    struct err error; /* of the last read that failed; once rows did, of the last that failed one */
};

/* Bytes of the host that engine_experts_start takes beside the arena. */
uint64_t engine_experts_bytes(const struct model *m, uint32_t max_rows);
/* Opens the model's own files for reads of experts into `arena`, of options->arena_bytes, aligned
 * to TIER_SSD_ALIGN and lent until tier_ssd_close. Gives *ret. Errors: as tier_ssd_open. */
enum err_code engine_experts_open_ssd(const struct model *m,
                                      const struct engine_experts_options *options, void *arena,
                                      struct tier_ssd **ret, struct err *e)
    __attribute__((warn_unused_result));
/* Reserves the arena and opens the reads. The model's weights are loaded after this, through
 * x->ssd. Gives *ret; free with engine_experts_free. */
enum err_code engine_experts_new(struct k_device *device, struct k_stream *stream, struct model *m,
                                 const struct engine_experts_options *options,
                                 struct engine_experts **ret, struct err *e)
    __attribute__((warn_unused_result));
void engine_experts_free(struct engine_experts *x); /* NULL is fine */

/* A step of n_rows rows begins: forgets what was counted per row. */
void engine_experts_step(struct engine_experts *x, uint32_t n_rows);
void engine_experts_layer(struct engine_experts *x, const struct engine_experts_layer *layer);
/* A layer behind this one, or any before the first, will probably choose this expert. If it is not
 * in memory it is read when the disk would rest, in the order of the calls. */
void engine_experts_expect(struct engine_experts *x, uint32_t layer, uint32_t expert);
/* Gives out the next batch in x->selected, after the one before was computed; waits for reads if
 * there is nothing else to do. 0: the layer is done. */
uint32_t engine_experts_take(struct engine_experts *x);
/* Would it give some out at once? */
bool engine_experts_at_hand(const struct engine_experts *x);
/* The slices (gate, up, down) of an expert that is READY. */
void engine_experts_slices(const struct engine_experts *x, uint32_t layer, uint32_t expert,
                           const uint8_t *ret[TIER_SSD_PARTS]);
/* Keeps reads going while something else is computed; never waits. */
void engine_experts_poll(struct engine_experts *x);
/* While the engine has nothing to do: reads more experts if all of them have
 * room. False: there is nothing left. Waits some milliseconds at most. */
bool engine_experts_idle(struct engine_experts *x);
/* Nobody waits for such reads, and who needs an expert later has it read again: where x->error says
 * that one failed, that is warned of once. */
void engine_experts_idle_warn(struct engine_experts *x);
/* While no step runs: begins to read an ABSENT expert, pinned. False: no room for now. What fails
 * is ABSENT again and in x->error. */
bool engine_experts_fetch(struct engine_experts *x, uint32_t layer, uint32_t expert);
/* Between steps: begins to read an ABSENT expert. It takes the place of nothing that is worth more,
 * unless it only `passes` through. False: no room for now. */
bool engine_experts_bring(struct engine_experts *x, uint32_t layer, uint32_t expert, bool passes);
/* While no step runs: waits for a read that is under way and takes what arrived. x->error: the last
 * that failed. */
void engine_experts_land(struct engine_experts *x);
/* Reads every expert now, while a model loads; all of them have room. ERR_FORMAT, ERR_IO,
 * ERR_CANCELLED (stopped, as in struct model_loading). */
enum err_code engine_experts_fill(struct engine_experts *x, const struct model_loading *loading,
                                  struct err *e) __attribute__((warn_unused_result));

#endif

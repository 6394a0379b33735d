/* Which experts are in memory, and where: pure decisions, no I/O, no clock. The caller says what a
 * layer needs; the cache says what is there, where to read what is missing, and what it drops for
 * it. Its time is counted in layers and rows, so that a trace gives the same decisions every time
 * (cachesim replays them).
 *
 * Places are bytes of one arena. An expert's extent is a whole number of EXPERT_CACHE_ALIGN bytes;
 * extents of one size lie together in slabs, and a slab changes its size when that pays.
 *
 * One turn of the engine:
 *   expert_cache_layer(c, layer, n_rows)            the layer that is computed now
 *   expert_cache_need(c, layer, expert, rows)       for each group; a READY one is pinned and
 *                                                   counted as a hit, another as a miss
 *   expert_cache_reserve(...)                       for each miss: evicts, gives the place; LOADING
 *   expert_cache_arrived / expert_cache_failed      as reads end
 *   expert_cache_unpin                              when its group is computed
 * Needs of a layer come before its reserves, so that none evicts what another needs. The engine
 * thread's. */
#ifndef ISLET_EXPERT_CACHE_H
#define ISLET_EXPERT_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

enum {
    EXPERT_CACHE_ALIGN = 4096
};
#define EXPERT_CACHE_NONE UINT32_MAX

enum expert_cache_state {
    EXPERT_CACHE_ABSENT,
    EXPERT_CACHE_LOADING, /* has a place, its bytes are under way; never evicted */
    EXPERT_CACHE_READY
};

struct expert_cache_options {
    uint32_t n_layer, n_expert;  /* experts of each layer */
    uint32_t n_used;             /* top-k */
    const uint64_t *layer_bytes; /* [n_layer] bytes of an expert's extent, multiples of
                                  * EXPERT_CACHE_ALIGN; copied */
    uint64_t arena_bytes;        /* a multiple of EXPERT_CACHE_ALIGN */
    uint64_t unit_bytes;         /* so much of it at a time can be closed; 0: nothing is */
    float caution; /* reserved without a pin: an expert's chance must be so much more, as a share,
                    * than that of what goes; 0: any gain will do */
};

struct expert_cache_counts {
    uint64_t hits, misses; /* needs, one a (layer, expert) of a step */
    uint64_t evictions;
    uint64_t used_bytes;        /* extents of LOADING and READY experts */
    uint32_t resident, loading; /* experts */
};

struct expert_cache;

/* Gives *ret; free with expert_cache_free. ERR_LIMIT: the arena cannot hold the largest expert (the
 * text says the least that works); ERR_NOMEM. */
enum err_code expert_cache_new(const struct expert_cache_options *options,
                               struct expert_cache **ret, struct err *e)
    __attribute__((warn_unused_result));
void expert_cache_free(struct expert_cache *c); /* NULL is fine */

/* The engine is at `layer` of a step of n_rows rows. */
void expert_cache_layer(struct expert_cache *c, uint32_t layer, uint32_t n_rows);

/* The step needs this expert for `rows` of its rows: counts use, hit or miss, pins it when it is
 * READY or LOADING (a read ahead that has not ended counts as a miss). Once a step and expert. */
enum expert_cache_state expert_cache_need(struct expert_cache *c, uint32_t layer, uint32_t expert,
                                          uint32_t rows);

/* Makes room for an ABSENT expert and gives its place (offset of its extent in the arena, a
 * multiple of EXPERT_CACHE_ALIGN): it is LOADING then, and pinned if `pin` is set. Evicts what is
 * worth least among READY experts without pins. false: pinned and loading ones leave no room, or
 * reads enough are under way and what could go is worth more than what this pass will set free
 * itself; compute, wait for a read, ask again. It succeeds when nothing is pinned or loading. With
 * pin false (a read ahead) nothing is evicted that is worth more than the newcomer will be once its
 * pass is over: false then. */
bool expert_cache_reserve(struct expert_cache *c, uint32_t layer, uint32_t expert, bool pin,
                          uint64_t *ret_place);
void expert_cache_arrived(struct expert_cache *c, uint32_t layer, uint32_t expert);
/* The read failed: its extent is free again and all its pins are gone (no unpin follows). */
void expert_cache_failed(struct expert_cache *c, uint32_t layer, uint32_t expert);
/* Pins a READY expert once more: someone else reads it too. */
void expert_cache_pin(struct expert_cache *c, uint32_t layer, uint32_t expert);
/* Pins count; one for each need of a present expert, each reserve with pin and each pin. */
void expert_cache_unpin(struct expert_cache *c, uint32_t layer, uint32_t expert);

/* Forgets a READY expert, which is no eviction. False: it is pinned, or on its way. True also where
 * it is ABSENT. */
bool expert_cache_forget(struct expert_cache *c, uint32_t layer, uint32_t expert);

enum expert_cache_state expert_cache_state(const struct expert_cache *c, uint32_t layer,
                                           uint32_t expert);
/* Place of an expert that is not ABSENT. */
uint64_t expert_cache_place(const struct expert_cache *c, uint32_t layer, uint32_t expert);
/* Is there a place for an expert of the layer that nothing has to go for? */
bool expert_cache_has_room(const struct expert_cache *c, uint32_t layer);
/* Forgets what lies in one of the arena's units, the one that is used least, and puts nothing there
 * until it is opened. Gives its number; EXPERT_CACHE_NONE: each is closed or holds what is pinned
 * or LOADING. */
uint32_t expert_cache_close(struct expert_cache *c);
void expert_cache_open(struct expert_cache *c, uint32_t unit);
bool expert_cache_is_closed(const struct expert_cache *c, uint32_t unit);
/* READY experts of the layer. */
uint32_t expert_cache_resident(const struct expert_cache *c, uint32_t layer);
struct expert_cache_counts expert_cache_count(const struct expert_cache *c);

#endif

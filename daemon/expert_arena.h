/* The places of experts in one arena. Experts of one size are a class; the arena is cut into slabs,
 * each of which serves the experts of one class at a time, as many as it has room for. An empty
 * slab serves any class, so that places of one size become places of another without holes between
 * them. Slabs have one size that every class fills or, where the arena is too small for that, the
 * size of some experts of one class each, in the proportion of what the classes have. Offsets only:
 * no memory is touched. Units of it can be closed: nothing is placed there until they are opened.
 * The expert cache's.
 */
#ifndef ISLET_EXPERT_ARENA_H
#define ISLET_EXPERT_ARENA_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

#define EXPERT_ARENA_NONE UINT32_MAX

struct expert_arena_slab {
    uint64_t place, bytes;
    uint32_t own;           /* class that it was cut for; EXPERT_ARENA_NONE: all alike */
    uint32_t class;         /* EXPERT_ARENA_NONE: empty */
    uint32_t n_slots;       /* of its class */
    uint32_t n_used, free;  /* its first free slot, EXPERT_ARENA_NONE: full */
    uint32_t before, after; /* of its list */
};

struct expert_arena_slot {
    uint32_t owner; /* an expert, or EXPERT_ARENA_NONE */
    uint32_t after; /* the slab's next free slot */
};

struct expert_arena_class {
    uint64_t bytes;
    uint64_t share, cut; /* bytes of all its experts, and of the slabs that were cut for it */
    uint32_t open;       /* first of the slabs with used and free slots */
};

struct expert_arena {
    struct expert_arena_class *classes;
    struct expert_arena_slab *slabs;
    struct expert_arena_slot *slots; /* [n_slabs][stride] */
    uint32_t n_classes, n_slabs, stride;
    uint32_t empty;     /* first of the empty slabs */
    uint32_t n_strange; /* slabs that serve another class than their own */
    bool fixed;         /* all experts fit: each slab is a layer's for good */
    uint64_t bytes, unit_bytes;
    uint32_t n_units;
    bool *closed; /* [n_units] */
};

/* For n_expert experts in each layer, of layer_bytes[layer] bytes each; the largest one fits. If
 * all of them fit, so they do whatever the order. ERR_NOMEM. */
enum err_code expert_arena_start(struct expert_arena *a, uint64_t bytes,
                                 const uint64_t *layer_bytes, uint32_t n_layer, uint32_t n_expert,
                                 struct err *e) __attribute__((warn_unused_result));
/* From now on whole units of so many bytes can be closed. ERR_NOMEM. */
enum err_code expert_arena_divide(struct expert_arena *a, uint64_t unit_bytes, struct err *e)
    __attribute__((warn_unused_result));
void expert_arena_done(struct expert_arena *a); /* of zeroes is fine */

/* Class of experts of `bytes`, which some layer has. */
uint32_t expert_arena_class_of(const struct expert_arena *a, uint64_t bytes);
/* Slot now owned by `owner`; EXPERT_ARENA_NONE: neither a slot of the class nor a slab is free. */
uint32_t expert_arena_take(struct expert_arena *a, uint32_t class, uint32_t owner);
void expert_arena_return(struct expert_arena *a, uint32_t slot);
uint64_t expert_arena_place(const struct expert_arena *a, uint32_t slot);

/* Would take give a slot of the class? */
bool expert_arena_has(const struct expert_arena *a, uint32_t class);
/* Has the slab, once it is empty, a slot for the class? */
bool expert_arena_serves(const struct expert_arena *a, uint32_t slab, uint32_t class);
/* Units that the slot lies in, from *ret_first on; those behind the last whole one do not count. */
uint32_t expert_arena_units(const struct expert_arena *a, uint32_t slot, uint32_t *ret_first);
/* No slot that lies in the unit has an owner. */
void expert_arena_close(struct expert_arena *a, uint32_t unit);
void expert_arena_open(struct expert_arena *a, uint32_t unit);

#endif

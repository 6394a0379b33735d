/* Replays a trace's needs through policies of an expert cache, from an empty one on. Hits are
 * counted per (step, layer, expert). */
#ifndef ISLET_SIM_REPLAY_H
#define ISLET_SIM_REPLAY_H

#include "sim_trace.h"

enum sim_replay_kind {
    SIM_REPLAY_LRU,
    SIM_REPLAY_LFU,    /* counts that never decay; of equals the older goes */
    SIM_REPLAY_DECAY,  /* decayed counts with a half-life in tokens */
    SIM_REPLAY_STATIC, /* the experts most needed in this trace; each is read once */
    SIM_REPLAY_BELADY, /* evicts what is needed latest; reads what is not worth keeping past it */
    SIM_REPLAY_OURS    /* daemon/expert_cache.c, driven as the engine does */
};

struct sim_replay_result {
    uint64_t hits, needs;
    uint64_t read_bytes;
    double seconds; /* of OURS: CPU time of the cache and its driver */
};

/* Policies other than OURS have no pins and lose no room to the shape of free extents. */
enum err_code sim_replay_run(const struct sim_trace *t, enum sim_replay_kind kind, double half_life,
                             uint64_t capacity, struct sim_replay_result *ret, struct err *e)
    __attribute__((warn_unused_result));

#endif

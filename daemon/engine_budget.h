/* How memory.ram_budget and memory.vram_budget are divided: pure. The first covers everything of the
 * worker in RAM: dense weights, KV pages, the buffers of a step, and the arena of expert slots, which
 * takes the rest. The process itself (code, libraries, queues, file header) comes on top,
 * ENGINE_BUDGET_PROCESS at most. */
#ifndef ISLET_ENGINE_BUDGET_H
#define ISLET_ENGINE_BUDGET_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"

#define ENGINE_BUDGET_PROCESS (UINT64_C(64) << 20)

struct engine_budget_needs {
    uint64_t budget;    /* memory.ram_budget, or engine_budget_auto */
    bool automatic;     /* which of both */
    uint64_t available; /* bytes that the system can give; 0: unknown */
    uint64_t weights, kv, work;
    uint64_t experts;        /* extents of all experts */
    uint64_t largest_expert; /* an extent */
    uint64_t cycle;          /* extents that one token needs in all layers */
    uint64_t least;          /* the least budget that works where kv grows with it; 0: the sum */
};

struct engine_budget {
    uint64_t arena;    /* a multiple of 4,096 */
    uint64_t total;    /* what will be used of the budget */
    bool all_resident; /* every expert has room: nothing is ever evicted */
    bool below_cycle;  /* not even one token's experts fit: no policy can have hits */
};

/* The default: 70 % of what is available, so that the user's other programs have room. */
uint64_t engine_budget_auto(uint64_t available);
/* ERR_NOMEM with all figures and the least that works. */
enum err_code engine_budget_split(const struct engine_budget_needs *needs,
                                  struct engine_budget *ret, struct err *e)
    __attribute__((warn_unused_result));

/* The memory of a GPU: what computes all but experts, and islands for those with the rest. */
struct engine_budget_vram_needs {
    uint64_t budget;    /* memory.vram_budget, or engine_budget_vram_auto */
    bool automatic;     /* which of both */
    uint64_t available; /* bytes that the device has free; 0: unknown */
    uint64_t weights, kv, work;
    uint64_t fixed;         /* of the tier beside its islands */
    uint64_t experts;       /* islands of all experts */
    uint64_t least_islands; /* bytes of islands that there must be */
    uint64_t least;         /* the least budget that works where kv grows with it; 0: the sum */
};

struct engine_budget_vram {
    uint64_t islands; /* a multiple of 4,096 */
    uint64_t total;
    bool all_resident; /* every expert has an island */
};

/* The default: what is free of `total`, less room for the desktop and other programs. */
uint64_t engine_budget_vram_auto(uint64_t available, uint64_t total);
/* ERR_NOMEM with all figures and the least that works. */
enum err_code engine_budget_vram_split(const struct engine_budget_vram_needs *needs,
                                       struct engine_budget_vram *ret, struct err *e)
    __attribute__((warn_unused_result));

#endif

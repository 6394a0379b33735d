/* `isletd --plan`: what the model needs, what fits where on this machine and what speed to expect,
 * said before anything of it is loaded. Sizes are engine_plan's, so they are those of a start. */
#ifndef ISLET_WORKER_PLAN_H
#define ISLET_WORKER_PLAN_H

#include <stdbool.h>

#include "engine_plan.h"
#include "engine_rates.h"

struct settings;

enum {
    WORKER_PLAN_ROWS = 5,
    WORKER_PLAN_PROMPT = 32 /* tokens of the longer prompt of first_token_s */
};

/* A budget and what it gives. */
struct worker_plan_row {
    const char *name; /* "least", "two_tokens", "quarter", "half", "all"; "set": the settings' */
    struct engine_plan plan;
    bool fits;               /* in what is available */
    uint32_t slots;          /* experts that have room */
    double resident;         /* share of all experts */
    double misses;           /* tokens a second when every expert is read from the file, */
    double uniform;          /* when routing is uniform, */
    double usual;            /* and when it has the locality that is usual */
    double first_token_s[2]; /* from the start on, for a prompt of 1 and of WORKER_PLAN_PROMPT
                              * tokens */
};

struct worker_plan {
    const struct model *model;
    const char *level; /* of the kernels */
    uint32_t threads;
    uint64_t file_bytes, token_bytes; /* of the experts of a token */
    uint64_t ram, available;          /* of the machine; 0: unknown */
    bool group_limits;                /* available is what the cgroup leaves */
    double ram_rate;
    struct engine_rates_ssd ssd;
    const char *gpu;                /* what computes beside the CPU; NULL: nothing */
    uint64_t vram_free, vram_total; /* of it; 0: unknown */
    struct err gpu_refusal;         /* why there is none, if there could be one */
    struct worker_plan_row set;     /* its budget is 0 where refusal says why */
    struct err refusal;
    struct worker_plan_row rows[WORKER_PLAN_ROWS]; /* other budgets, growing */
    unsigned n_rows;
};

/* Prints the plan to standard output, as text or as one JSON object, and what is wrong to standard
 * error. Borrows the settings. Returns the exit status: 0, or WORKER_EXIT_CONFIG where the model
 * would not be served or the plan cannot be written. */
int worker_plan_run(const struct settings *s, bool json);

#endif

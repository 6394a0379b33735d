/* What a model will take in memory under given settings: the KV pool, the buffers of a step and how
 * memory.ram_budget is divided, before any of it is allocated. engine_run_start and `isletd --plan`
 * both take their sizes from here. Pure: the machine's figures are arguments. */
#ifndef ISLET_ENGINE_PLAN_H
#define ISLET_ENGINE_PLAN_H

#include "engine_budget.h"
#include "engine_forward.h"

struct engine_config;

/* What the plan is for. */
struct engine_plan_machine {
    const struct k_device *cpu, *gpu; /* gpu: NULL: none computes */
    uint64_t available; /* bytes of RAM that the machine can give; 0: unknown, not compared */
    uint64_t vram_free, vram_total; /* bytes of the GPU; 0: unknown */
};

struct engine_plan {
    uint32_t n_ctx;                    /* positions of a sequence at most */
    uint32_t n_pages;                  /* of the KV pool */
    uint64_t page_bytes;               /* of one KV page, K_PAGE positions */
    struct engine_forward_sizes sizes; /* of a step */
    struct engine_budget_needs needs;
    struct engine_budget budget;                /* of a plan that works; else all 0 */
    struct engine_budget_vram_needs vram_needs; /* of a GPU, else all 0; KV pages are there then, */
    struct engine_budget_vram vram;             /* and needs.kv is 0 */
};

/* Bytes of the slices that one token reads of the experts; without the padding of the slots. */
uint64_t engine_plan_token_bytes(const struct model *m);

/* Are all experts read while the model loads, so that no first answer waits for them? Only where
 * that is short; else they are read when they are needed. */
bool engine_plan_fills_at_start(const struct engine_budget *budget, uint64_t experts_bytes);

/* The least memory.ram_budget, in whole MiB, whose plan has at least `slots` bytes of expert slots
 * (all experts' if that is less); what the machine can give is not compared. ERR_LIMIT: no budget
 * does. ERR_NOMEM: the GPU has not enough memory. */
enum err_code engine_plan_least(const struct engine_config *config,
                                const struct engine_plan_machine *machine, const struct model *m,
                                uint64_t slots, struct engine_plan *ret, struct err *e)
    __attribute__((warn_unused_result));

/* The plan for `config`. *ret but for its budgets is written in any case. ERR_NOMEM, ERR_LIMIT: as
 * engine_budget_split and engine_budget_vram_split. */
enum err_code engine_plan_make(const struct engine_config *config,
                               const struct engine_plan_machine *machine, const struct model *m,
                               struct engine_plan *ret, struct err *e)
    __attribute__((warn_unused_result));

#endif

#include "engine_plan.h"

#include "engine.h"
#include "engine_hybrid.h"
#include "engine_islands.h"
#include "engine_run.h"
#include "kv_page.h"

#define MIB           (UINT64_C(1) << 20)
#define FILL_AT_START (512 * MIB)
#define STAGED        (256 * MIB)         /* of RAM, where all experts have islands in VRAM */
#define MOST          (UINT64_C(1) << 62) /* bytes of a budget that is looked at */

static uint32_t pages_of(uint32_t positions)
{
    return (uint32_t)(((uint64_t)positions + K_PAGE - 1) / K_PAGE);
}

/* Context = min(model, setting, what the pool holds). budget: of the memory that the pool is in. */
static void plan_pool(const struct engine_config *c, const struct model *m, uint64_t budget,
                      struct engine_plan *p)
{
    p->page_bytes = engine_forward_page_bytes(m, (enum k_kv_type)c->kv_type);
    p->n_ctx = m->shape.n_ctx_train;
    if (c->context != 0 && c->context < p->n_ctx)
        p->n_ctx = c->context;
    p->n_pages =
        kv_page_count(c->kv_budget, budget, p->page_bytes, pages_of(p->n_ctx), c->max_sequences);
    if (p->n_pages < pages_of(p->n_ctx))
        p->n_ctx = p->n_pages * K_PAGE;
}

static uint64_t largest_expert(const struct model *m)
{
    uint64_t largest = 0;
    for (uint32_t i = 0; i < m->shape.n_layer; i++)
        largest = m->expert_bytes[i] > largest ? m->expert_bytes[i] : largest;
    return largest;
}

/* Bytes of the slots of the experts that one token uses. */
static uint64_t cycle_bytes(const struct model *m)
{
    uint64_t cycle = 0;
    for (uint32_t i = 0; i < m->shape.n_layer; i++)
        cycle += m->expert_bytes[i] * m->shape.n_expert_used;
    return cycle;
}

uint64_t engine_plan_token_bytes(const struct model *m)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < m->shape.n_layer; i++) {
        const struct shape_layer *l = &m->tensors.layers[i];
        sum += (shape_slice_bytes(l->gate, &m->shape) + shape_slice_bytes(l->up, &m->shape) +
                shape_slice_bytes(l->down, &m->shape)) *
               m->shape.n_expert_used;
    }
    return sum;
}

bool engine_plan_fills_at_start(const struct engine_budget *budget, uint64_t experts_bytes)
{
    return budget->all_resident && experts_bytes <= FILL_AT_START;
}

/* What the GPU needs of its own memory. */
static void size_up_vram(const struct engine_plan_machine *machine, const struct model *m,
                         struct engine_plan *p)
{
    uint64_t islands = 0;
    for (uint32_t i = 0; i < m->shape.n_layer; i++)
        islands += tier_vram_island_bytes(m, i) * m->shape.n_expert;
    p->vram_needs.available = machine->vram_free;
    p->vram_needs.weights = m->dense_bytes;
    p->vram_needs.kv = p->n_pages * p->page_bytes;
    p->vram_needs.work = engine_forward_bytes(machine->gpu, m, &p->sizes);
    p->vram_needs.fixed = tier_vram_fixed_bytes(m, p->vram_needs.budget);
    p->vram_needs.experts = islands;
    p->vram_needs.least_islands = tier_vram_least(m);
}

/* RAM: what computes all but experts is there or on the GPU. */
static void size_up_ram(const struct engine_plan_machine *machine, const struct model *m,
                        struct engine_plan *p)
{
    const uint32_t rows = p->sizes.max_rows;
    p->needs.work = engine_forward_host_bytes(m, &p->sizes) + engine_experts_bytes(m, rows);
    if (machine->gpu == NULL) {
        p->needs.weights = m->weights_bytes;
        p->needs.kv = p->n_pages * p->page_bytes;
        p->needs.work += engine_forward_bytes(machine->cpu, m, &p->sizes);
    } else {
        p->needs.weights = m->tables_bytes;
        p->needs.work += engine_islands_bytes(m, rows) + engine_hybrid_bytes(machine->cpu, m, rows);
    }
}

/* All of a plan but how its memories are divided. */
static void size_up(const struct engine_config *config, const struct engine_plan_machine *machine,
                    const struct model *m, uint64_t available, struct engine_plan *ret)
{
    const bool automatic = config->ram_budget == 0, vram_automatic = config->vram_budget == 0;
    const uint64_t ram = automatic ? engine_budget_auto(available) : config->ram_budget;
    const uint64_t vram = vram_automatic
                              ? engine_budget_vram_auto(machine->vram_free, machine->vram_total)
                              : config->vram_budget;
    *ret = (struct engine_plan){.n_ctx = 0};
    plan_pool(config, m, machine->gpu != NULL ? vram : ram, ret);
    ret->sizes = (struct engine_forward_sizes){
        .max_rows = config->prefill_chunk + config->max_sequences,
        .max_logits = config->max_sequences + ENGINE_RUN_PROMPT_LOGITS,
        .max_sequences = config->max_sequences,
        .max_pages = pages_of(ret->n_ctx),
        .kv_type = (enum k_kv_type)config->kv_type};
    ret->needs = (struct engine_budget_needs){.budget = ram,
                                              .automatic = automatic,
                                              .available = available,
                                              .experts = m->experts_bytes,
                                              .largest_expert = largest_expert(m),
                                              .cycle = cycle_bytes(m)};
    size_up_ram(machine, m, ret);
    if (machine->gpu == NULL)
        return;
    ret->vram_needs =
        (struct engine_budget_vram_needs){.budget = vram, .automatic = vram_automatic};
    size_up_vram(machine, m, ret);
}

static bool vram_suffices(const struct engine_config *config,
                          const struct engine_plan_machine *machine, const struct model *m,
                          uint64_t mib)
{
    struct engine_config c = *config;
    struct engine_plan plan;
    c.vram_budget = mib * MIB;
    size_up(&c, machine, m, 0, &plan);
    plan.vram_needs.available = 0;
    return engine_budget_vram_split(&plan.vram_needs, &plan.vram, NULL) == ERR_OK;
}

/* The least memory.vram_budget that works, in bytes. */
static uint64_t least_vram(const struct engine_config *config,
                           const struct engine_plan_machine *machine, const struct model *m)
{
    uint64_t low = 0, high = 1; /* MiB */
    while (!vram_suffices(config, machine, m, high)) {
        low = high;
        if (high >= MOST / MIB)
            return 0;
        high *= 2;
    }
    while (high - low > 1) {
        const uint64_t middle = low + (high - low) / 2;
        if (vram_suffices(config, machine, m, middle))
            high = middle;
        else
            low = middle;
    }
    return high * MIB;
}

/* All of a plan but how its RAM is divided. */
static enum err_code plan_vram(const struct engine_config *config,
                               const struct engine_plan_machine *machine, const struct model *m,
                               uint64_t available, struct engine_plan *ret, struct err *e)
{
    size_up(config, machine, m, available, ret);
    if (machine->gpu == NULL)
        return ERR_OK;
    struct engine_budget_vram_needs *needs = &ret->vram_needs;
    enum err_code code = engine_budget_vram_split(needs, &ret->vram, NULL);
    /* KV pages grow with the budget: what is refused says one that is not refused again. */
    if (code != ERR_OK && e != NULL && config->kv_budget == 0)
        needs->least = least_vram(config, machine, m);
    if (code != ERR_OK)
        return engine_budget_vram_split(needs, &ret->vram, e);
    if (ret->vram.all_resident && ret->needs.experts > STAGED)
        ret->needs.experts =
            STAGED > ret->needs.largest_expert ? STAGED : ret->needs.largest_expert;
    return ERR_OK;
}

/* Has a budget of so many MiB that many bytes of slots? *ret is written if so. */
static bool suffices(const struct engine_config *config, const struct engine_plan_machine *machine,
                     const struct model *m, uint64_t mib, uint64_t slots, struct engine_plan *ret)
{
    struct engine_config c = *config;
    struct engine_plan plan;
    c.ram_budget = mib * MIB;
    if (plan_vram(&c, machine, m, 0, &plan, NULL) != ERR_OK ||
        engine_budget_split(&plan.needs, &plan.budget, NULL) != ERR_OK ||
        plan.budget.arena < (slots < plan.needs.experts ? slots : plan.needs.experts))
        return false;
    *ret = plan;
    return true;
}

/* Slots grow with the budget but for steps of a KV page, so that halving finds the edge. */
enum err_code engine_plan_least(const struct engine_config *config,
                                const struct engine_plan_machine *machine, const struct model *m,
                                uint64_t slots, struct engine_plan *ret, struct err *e)
{
    struct engine_plan plan;
    uint64_t low = 0, high = 1; /* MiB */
    const enum err_code code = plan_vram(config, machine, m, 0, &plan, e);
    if (code != ERR_OK)
        return code;
    while (!suffices(config, machine, m, high, slots, ret)) {
        if (high >= MOST / MIB)
            return err_set(e, ERR_LIMIT, "the model is larger than the address space");
        low = high;
        high *= 2;
    }
    while (high - low > 1) {
        const uint64_t middle = low + (high - low) / 2;
        if (suffices(config, machine, m, middle, slots, ret))
            high = middle;
        else
            low = middle;
    }
    return ERR_OK;
}

enum err_code engine_plan_make(const struct engine_config *config,
                               const struct engine_plan_machine *machine, const struct model *m,
                               struct engine_plan *ret, struct err *e)
{
    struct engine_plan least;
    enum err_code code = plan_vram(config, machine, m, machine->available, ret, e);
    if (code != ERR_OK)
        return code;
    code = engine_budget_split(&ret->needs, &ret->budget, NULL);
    if (code == ERR_OK)
        return ERR_OK;
    /* KV pages grow with the budget: what is refused says one that is not refused again. */
    if (config->kv_budget == 0 && machine->gpu == NULL &&
        engine_plan_least(config, machine, m, 1, &least, NULL) == ERR_OK)
        ret->needs.least = least.needs.budget;
    return engine_budget_split(&ret->needs, &ret->budget, e);
}

#include "engine_plan.h"

#include "engine.h"
#include "engine_run.h"
#include "kv_page.h"

#define MIB           (UINT64_C(1) << 20)
#define FILL_AT_START (512 * MIB)
#define MOST          (UINT64_C(1) << 62) /* bytes of a budget that is looked at */

static uint32_t pages_of(uint32_t positions)
{
    return (uint32_t)(((uint64_t)positions + K_PAGE - 1) / K_PAGE);
}

/* Context = min(model, setting, what the pool holds). ram: memory.ram_budget in bytes. */
static void plan_pool(const struct engine_config *c, const struct model *m, uint64_t ram,
                      struct engine_plan *p)
{
    p->page_bytes = engine_forward_page_bytes(m, (enum k_kv_type)c->kv_type);
    p->n_ctx = m->shape.n_ctx_train;
    if (c->context != 0 && c->context < p->n_ctx)
        p->n_ctx = c->context;
    p->n_pages =
        kv_page_count(c->kv_budget, ram, p->page_bytes, pages_of(p->n_ctx), c->max_sequences);
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

/* All of a plan but how its budget is divided. */
static void size_up(const struct engine_config *config, const struct k_device *device,
                    const struct model *m, uint64_t available, struct engine_plan *ret)
{
    const bool automatic = config->ram_budget == 0;
    const uint64_t ram = automatic ? engine_budget_auto(available) : config->ram_budget;
    *ret = (struct engine_plan){.n_ctx = 0};
    plan_pool(config, m, ram, ret);
    ret->sizes = (struct engine_forward_sizes){
        .max_rows = config->prefill_chunk + config->max_sequences,
        .max_logits = config->max_sequences + ENGINE_RUN_PROMPT_LOGITS,
        .max_sequences = config->max_sequences,
        .max_pages = pages_of(ret->n_ctx),
        .kv_type = (enum k_kv_type)config->kv_type};
    ret->needs = (struct engine_budget_needs){.budget = ram,
                                              .automatic = automatic,
                                              .available = available,
                                              .weights = m->weights_bytes,
                                              .kv = ret->n_pages * ret->page_bytes,
                                              .work = engine_forward_bytes(device, m, &ret->sizes) +
                                                      engine_forward_host_bytes(m, &ret->sizes) +
                                                      engine_experts_bytes(m, ret->sizes.max_rows),
                                              .experts = m->experts_bytes,
                                              .largest_expert = largest_expert(m),
                                              .cycle = cycle_bytes(m)};
}

/* Has a budget of so many MiB that many bytes of slots? *ret is written if so. */
static bool suffices(const struct engine_config *config, const struct k_device *device,
                     const struct model *m, uint64_t mib, uint64_t slots, struct engine_plan *ret)
{
    struct engine_config c = *config;
    struct engine_plan plan;
    c.ram_budget = mib * MIB;
    size_up(&c, device, m, 0, &plan);
    if (engine_budget_split(&plan.needs, &plan.budget, NULL) != ERR_OK || plan.budget.arena < slots)
        return false;
    *ret = plan;
    return true;
}

/* Slots grow with the budget but for steps of a KV page, so that halving finds the edge. */
enum err_code engine_plan_least(const struct engine_config *config, const struct k_device *device,
                                const struct model *m, uint64_t slots, struct engine_plan *ret,
                                struct err *e)
{
    const uint64_t wanted = slots < m->experts_bytes ? slots : m->experts_bytes;
    uint64_t low = 0, high = 1; /* MiB */
    while (!suffices(config, device, m, high, wanted, ret)) {
        if (high >= MOST / MIB)
            return err_set(e, ERR_LIMIT, "the model is larger than the address space");
        low = high;
        high *= 2;
    }
    while (high - low > 1) {
        const uint64_t middle = low + (high - low) / 2;
        if (suffices(config, device, m, middle, wanted, ret))
            high = middle;
        else
            low = middle;
    }
    return ERR_OK;
}

enum err_code engine_plan_make(const struct engine_config *config, const struct k_device *device,
                               const struct model *m, uint64_t available, struct engine_plan *ret,
                               struct err *e)
{
    struct engine_plan least;
    size_up(config, device, m, available, ret);
    enum err_code code = engine_budget_split(&ret->needs, &ret->budget, NULL);
    if (code == ERR_OK)
        return ERR_OK;
    /* KV pages grow with the budget: what is refused says one that is not refused again. */
    if (config->kv_budget == 0 && engine_plan_least(config, device, m, 1, &least, NULL) == ERR_OK)
        ret->needs.least = least.needs.budget;
    return engine_budget_split(&ret->needs, &ret->budget, e);
}

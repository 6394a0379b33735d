#include "engine_budget.h"

#include "size.h"
#include "units.h"

enum {
    PAGE = 4096,
    LEAST_ARENA = 1 << 20, /* reads of the dense weights land here first */
    VRAM_SHARE = 12, /* of the device that is left alone: the driver takes some of it later, and
                            * the governor warns when a 20th is left, */
    VRAM_LEAST = 256 << 20 /* and at least so much */
};

uint64_t engine_budget_auto(uint64_t available)
{
    return available / 10 * 7;
}

static enum err_code too_small(const struct engine_budget_needs *needs, uint64_t least_arena,
                               uint64_t least, struct err *e)
{
    const bool grows = needs->least > least;
    return err_set(e, ERR_NOMEM,
                   "memory.ram_budget %s%s is too small: dense weights %s + KV pages %s%s + work "
                   "%s + one expert %s%s%s is the least that works; raise it, or lower "
                   "%sbatch.prefill_chunk",
                   needs->automatic ? "(auto) " : "", units_bytes(needs->budget).s,
                   units_bytes(needs->weights).s, units_bytes(needs->kv).s, grows ? " (auto)" : "",
                   units_bytes(needs->work).s, units_bytes(least_arena).s, grows ? "; " : " = ",
                   units_bytes_up(grows ? needs->least : least).s,
                   needs->kv > 0 ? "memory.kv_budget or " : "");
}

enum err_code engine_budget_split(const struct engine_budget_needs *needs,
                                  struct engine_budget *ret, struct err *e)
{
    uint64_t fixed, least;
    const uint64_t wanted =
        (needs->experts > LEAST_ARENA ? needs->experts + PAGE - 1 : LEAST_ARENA) & ~(PAGE - 1ull);
    const uint64_t least_arena =
        needs->largest_expert > LEAST_ARENA ? needs->largest_expert : LEAST_ARENA;
    if (!size_add(needs->weights, needs->kv, &fixed) || !size_add(fixed, needs->work, &fixed) ||
        !size_add(fixed, least_arena, &least))
        return err_set(e, ERR_LIMIT, "the model is larger than the address space");
    if (needs->budget < least)
        return too_small(needs, least_arena, least, e);
    const uint64_t rest = (needs->budget - fixed) & ~(PAGE - 1ull);
    const uint64_t arena = rest < wanted ? rest : wanted;
    if (needs->available != 0 && fixed + arena > needs->available)
        return err_set(e, ERR_NOMEM,
                       "memory: weights %s + KV pages %s + work %s + expert slots %s "
                       "are more than the %s available; set memory.ram_budget (least here: %s), "
                       "or lower %sbatch.prefill_chunk",
                       units_bytes(needs->weights).s, units_bytes(needs->kv).s,
                       units_bytes(needs->work).s, units_bytes(arena).s,
                       units_bytes(needs->available).s,
                       units_bytes_up(needs->least != 0 ? needs->least : least).s,
                       needs->kv > 0 ? "memory.kv_budget or " : "");
    *ret = (struct engine_budget){.arena = arena,
                                  .total = fixed + arena,
                                  .all_resident = arena >= needs->experts,
                                  .below_cycle = arena < needs->cycle};
    return ERR_OK;
}

uint64_t engine_budget_vram_auto(uint64_t available, uint64_t total)
{
    const uint64_t share = (total > available ? total : available) / VRAM_SHARE;
    const uint64_t margin = share > VRAM_LEAST ? share : VRAM_LEAST;
    return available > margin ? available - margin : 0;
}

enum err_code engine_budget_vram_split(const struct engine_budget_vram_needs *needs,
                                       struct engine_budget_vram *ret, struct err *e)
{
    uint64_t fixed, least;
    if (!size_add(needs->weights, needs->kv, &fixed) || !size_add(fixed, needs->work, &fixed) ||
        !size_add(fixed, needs->fixed, &fixed) || !size_add(fixed, needs->least_islands, &least))
        return err_set(e, ERR_LIMIT, "the model is larger than the address space");
    const bool grows = needs->least > least;
    if (needs->budget < least)
        return err_set(e, ERR_NOMEM,
                       "memory.vram_budget %s%s is too small for the GPU: dense weights %s + KV "
                       "pages %s%s + work %s + copies %s%s%s is the least that works; raise it, "
                       "or lower memory.kv_budget or batch.prefill_chunk",
                       needs->automatic ? "(auto) " : "", units_bytes(needs->budget).s,
                       units_bytes(needs->weights).s, units_bytes(needs->kv).s,
                       grows ? " (auto)" : "", units_bytes(needs->work).s,
                       units_bytes(needs->fixed + needs->least_islands).s, grows ? "; " : " = ",
                       units_bytes_up(grows ? needs->least : least).s);
    const uint64_t rest = (needs->budget - fixed) & ~(PAGE - 1ull);
    uint64_t islands = (needs->experts + PAGE - 1) & ~(PAGE - 1ull);
    islands = islands < needs->least_islands ? needs->least_islands : islands;
    islands = rest < islands ? rest : islands;
    if (needs->available != 0 && fixed + islands > needs->available)
        return err_set(e, ERR_NOMEM,
                       "memory.vram_budget %s: the GPU has %s free; lower it (least here: %s)",
                       units_bytes(needs->budget).s, units_bytes(needs->available).s,
                       units_bytes_up(grows ? needs->least : least).s);
    *ret = (struct engine_budget_vram){
        .islands = islands, .total = fixed + islands, .all_resident = islands >= needs->experts};
    return ERR_OK;
}

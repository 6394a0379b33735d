#include "engine_pick.h"

#include "rng.h"

void engine_pick_begin(struct engine_run *run)
{
    run->forward->logits_stay = run->forward->ops->pick != NULL;
}

void engine_pick_ask(struct engine_run *run, struct engine_slot *slot)
{
    struct engine_forward *f = run->forward;
    const struct proto_run *r = &slot->job->request.run;
    slot->picked = false;
    if (slot->n_logits == 0)
        return;
    const bool next = slot->kv.computed + slot->rows == slot->n_tokens;
    if (f->ops->pick == NULL || slot->n_logits > 1 || !next || !sample_plain(r)) {
        f->logits_stay = false;
        return;
    }
    slot->picked = true;
    f->how[slot->first_logit] = (struct k_pick_row){
        .random = rng_draw(r->seed, slot->n_tokens - r->n_prompt), .temperature = r->temperature};
}

bool engine_pick_take(const struct engine_run *run, const struct engine_slot *slot, uint32_t *ret)
{
    if (slot->picked)
        *ret = run->forward->picked[slot->first_logit];
    return slot->picked;
}

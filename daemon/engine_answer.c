#include "engine_answer.h"

#include <math.h>

#include "engine_pick.h"
#include "fault.h"

bool engine_answer_ended(const struct engine_run *run, const struct proto_run *r,
                         const uint32_t *tokens, uint32_t n_tokens, enum proto_finish *ret)
{
    const uint32_t n_answer = n_tokens - r->n_prompt;
    if (n_answer > 0)
        for (uint8_t i = 0; i < r->n_end; i++)
            if (tokens[n_tokens - 1] == r->end[i]) {
                *ret = PROTO_FINISH_STOP;
                return true;
            }
    if (n_answer >= r->max_new)
        *ret = PROTO_FINISH_LENGTH;
    else if (n_tokens >= run->n_ctx)
        *ret = PROTO_FINISH_CONTEXT;
    else
        return false;
    return true;
}

static const float *logits_of(const struct engine_run *run, uint32_t i)
{
    return run->forward->logits + (size_t)i * run->model->shape.n_vocab;
}

/* Did a row of the slot meet a value that is not finite? *ret_position: the first. */
static bool faulted(const struct engine_run *run, const struct engine_slot *slot,
                    uint32_t *ret_position)
{
    for (uint32_t i = 0; i < slot->rows; i++)
        if (run->forward->faults[slot->first_row + i] != 0) {
            *ret_position = slot->kv.computed + i;
            return true;
        }
    for (uint32_t i = 0; i < slot->n_logits; i++)
        if (run->forward->logit_faults[slot->first_logit + i] != 0) {
            *ret_position = slot->logit_position + i;
            return true;
        }
    return false;
}

/* Did a row of the slot need an expert that cannot be read? */
static bool unreadable(const struct engine_run *run, const struct engine_slot *slot)
{
    for (uint32_t i = 0; i < slot->rows && run->experts->any_failed; i++)
        if (run->experts->row_failed[slot->first_row + i])
            return true;
    return false;
}

static void send_progress(struct engine_run *run, struct engine_slot *slot)
{
    struct engine_event *event =
        engine_mail_take(run->mail, ENGINE_PROGRESS, slot->job->request.handle);
    event->progress = (struct proto_progress){
        .prefilled = slot->kv.computed, .cached = slot->usage.cached, .total = slot->n_given};
    engine_mail_send(run->mail, event);
}

/* Prompt tokens whose logprobs are known by now, in events of a few each. */
static void send_prompt(struct engine_run *run, struct engine_slot *slot)
{
    const struct proto_run *r = &slot->job->request.run;
    const uint32_t known = slot->kv.computed + 1; /* the last row tells about the token behind it */
    const uint32_t end = known < r->n_prompt ? known : r->n_prompt;
    struct engine_event *event = NULL;
    for (; slot->prompt_told < end; slot->prompt_told++) {
        const uint32_t t = slot->prompt_told;
        if (event == NULL) {
            event = engine_mail_take(run->mail, ENGINE_TOKENS, slot->job->request.handle);
            event->tokens.first_index = t;
        }
        struct proto_token *token = &event->tokens.tokens[event->tokens.n++];
        *token = (struct proto_token){.id = slot->tokens[t], .flags = PROTO_TOKEN_PROMPT};
        if (t == 0) {
            token->flags |= PROTO_TOKEN_LOGPROB;
            token->logprob = NAN;
        } else {
            const uint32_t i = slot->first_logit + (t - 1 - slot->logit_position);
            sample_logprobs(logits_of(run, i), run->model->shape.n_vocab, r->n_top, token);
        }
        if (event->tokens.n == ENGINE_EVENT_TOKENS) {
            engine_mail_send(run->mail, event);
            event = NULL;
        }
    }
    if (event != NULL)
        engine_mail_send(run->mail, event);
}

/* Samples the next token from the slot's last row and sends it. */
static void answer(struct engine_run *run, struct engine_slot *slot, uint64_t now_ns)
{
    const struct proto_run *r = &slot->job->request.run;
    const uint32_t index = slot->n_tokens - r->n_prompt;
    const float *logits = logits_of(run, slot->first_logit + slot->n_logits - 1);
    struct proto_token token = {.id = 0};
    struct err e = {.code = ERR_OK};
    if (!engine_pick_take(run, slot, &token.id) &&
        sample_pick(&run->sample, logits, r, slot->tokens, slot->n_tokens, index, &token.id, &e) !=
            ERR_OK) {
        engine_run_fail(run, slot, &e);
        return;
    }
    if (r->flags & PROTO_RUN_LOGPROBS)
        sample_logprobs(logits, run->model->shape.n_vocab, r->n_top, &token);
    slot->tokens[slot->n_tokens++] = token.id;
    slot->usage.generated++;
    run->count.generated_tokens_total++;
    if (slot->first_token_ns == 0)
        slot->first_token_ns = now_ns;
    (void)fault_hit(FAULT_ENGINE_TOKEN);
    struct engine_event *event =
        engine_mail_take(run->mail, ENGINE_TOKENS, slot->job->request.handle);
    event->tokens.first_index = index;
    event->tokens.n = 1;
    event->tokens.tokens[0] = token;
    engine_mail_send(run->mail, event);
}

static void answer_slot(struct engine_run *run, struct engine_slot *slot, uint64_t now_ns)
{
    const struct proto_run *r = &slot->job->request.run;
    const struct model_shape *shape = &run->model->shape;
    const uint64_t uses = (uint64_t)slot->rows * shape->n_layer * shape->n_expert_used;
    const bool fresh = slot->usage.preempted == 0 && slot->n_tokens == slot->n_given;
    uint32_t position = 0;
    enum proto_finish finish;
    uint64_t misses = 0, bytes = 0, vram = 0;
    for (uint32_t i = slot->first_row; i < slot->first_row + slot->rows; i++) {
        misses += run->experts->row_misses[i];
        bytes += run->experts->row_bytes[i];
        vram += run->gpu ? run->islands.row_hits[i] : 0;
    }
    slot->usage.hits_vram += vram;
    slot->usage.hits_ram += uses - misses - vram;
    slot->usage.misses += misses;
    slot->usage.ssd_bytes += bytes;
    run->count.expert_hits_vram_total += vram;
    run->count.expert_hits_ram_total += uses - misses - vram;
    run->count.expert_misses_total += misses;
    if (unreadable(run, slot)) {
        engine_run_fail(run, slot, &run->experts->error);
        return;
    }
    if (faulted(run, slot, &position)) {
        struct err e = {.code = ERR_OK};
        (void)err_set(&e, ERR_FORMAT,
                      "the model gave a value that is not finite at position %u (token %u)",
                      position, slot->tokens[position]);
        engine_run_fail(run, slot, &e);
        return;
    }
    kv_sequence_advance(&slot->kv, &run->prefix, slot->tokens, slot->kv.computed + slot->rows);
    if (atomic_load(&slot->job->cancelled)) {
        engine_run_finish(run, slot, PROTO_FINISH_CANCELLED);
        return;
    }
    if (fresh) {
        run->count.prompt_tokens_total += slot->rows;
        send_progress(run, slot);
    }
    if (r->flags & PROTO_RUN_PROMPT_LOGPROBS)
        send_prompt(run, slot);
    if (slot->kv.computed < slot->n_tokens)
        return;
    if (!engine_answer_ended(run, r, slot->tokens, slot->n_tokens, &finish))
        answer(run, slot, now_ns);
    if (slot->job != NULL && engine_answer_ended(run, r, slot->tokens, slot->n_tokens, &finish))
        engine_run_finish(run, slot, finish);
}

void engine_answer_step(struct engine_run *run, uint64_t now_ns)
{
    for (uint32_t i = 0; i < run->n_slots; i++)
        if (run->slots[i].job != NULL && run->slots[i].rows > 0)
            answer_slot(run, &run->slots[i], now_ns);
}

#include "engine_run.h"

#include <string.h>

#include "alloc.h"
#include "engine_admit.h"
#include "engine_answer.h"
#include "engine_calibrate.h"
#include "engine_machine.h"
#include "engine_pick.h"
#include "engine_plan.h"
#include "fault.h"
#include "log.h"
#include "units.h"

size_t engine_run_events(const struct engine_config *config)
{
    /* progress and token of each sequence, and one prompt's logprobs */
    return 2 * (size_t)config->max_sequences + ENGINE_RUN_PROMPT_LOGITS / ENGINE_EVENT_TOKENS + 2;
}

/* ---- start ---- */

/* Gives slot i its arrays in `arrays`, with the tokens that it has. */
static void move_slot(struct engine_run *run, uint32_t i, uint32_t *arrays)
{
    struct engine_slot *slot = &run->slots[i];
    uint32_t *tokens = arrays + i * ((size_t)run->n_ctx + run->max_pages);
    if (slot->job != NULL && slot->n_tokens >= run->n_ctx) {
        struct err e = {.code = ERR_OK};
        (void)err_set(
            &e, ERR_DEVICE,
            "the GPU failed, and %u tokens leave no place in the context of %u without it; "
            "memory.ram_budget or memory.kv_budget would have to be larger",
            slot->n_tokens, run->n_ctx);
        engine_run_fail(run, slot, &e);
    }
    if (slot->job != NULL)
        memcpy(tokens, slot->tokens, slot->n_tokens * sizeof(*tokens));
    else
        *slot = (struct engine_slot){.job = NULL};
    slot->tokens = tokens;
    slot->kv.pages = tokens + run->n_ctx;
}

static enum err_code start_slots(struct engine_run *run, struct err *e)
{
    const size_t each = (size_t)run->n_ctx + run->max_pages;
    run->n_slots = run->config->max_sequences;
    uint32_t *arrays = alloc_zero(ALLOC_KV, run->n_slots, each * sizeof(uint32_t));
    if (arrays == NULL)
        return err_set(e, ERR_NOMEM, "no memory for %u sequences of %u tokens", run->n_slots,
                       run->n_ctx);
    for (uint32_t i = 0; i < run->n_slots; i++)
        move_slot(run, i, arrays);
    alloc_free(run->slot_arrays);
    run->slot_arrays = arrays;
    return ERR_OK;
}

/* A budget below what one token needs is said loudly: no policy can have hits then. */
static void warn_below_token(const struct engine_plan *plan)
{
    log_warn("engine", "budget_below_token",
             "slots_bytes=%llu token_bytes=%llu ram_budget=%llu hint=\"every token reads all of "
             "its experts from the SSD; %s more of ram_budget would keep some\"",
             (unsigned long long)plan->budget.arena, (unsigned long long)plan->needs.cycle,
             (unsigned long long)plan->needs.budget,
             units_bytes(2 * plan->needs.cycle - plan->budget.arena).s);
}

static enum err_code start_gpu(struct engine_run *run, const struct engine_run_devices *devices,
                               const struct engine_plan *plan, struct err *e)
{
    const uint32_t max_rows = plan->sizes.max_rows;
    struct engine_split_rates rates;
    const enum engine_placement placement = (enum engine_placement)run->config->placement;
    enum err_code code =
        engine_islands_start(&run->islands,
                             &(struct engine_islands_options){.device = devices->gpu,
                                                              .stream = devices->gpu_stream,
                                                              .experts = run->experts,
                                                              .islands_bytes = run->vram.islands,
                                                              .budget = plan->vram_needs.budget,
                                                              .max_rows = max_rows,
                                                              .placement = placement},
                             e);
    if (code == ERR_OK)
        code = engine_calibrate(devices->cpu, &run->islands, run->config->ticks, &rates, e);
    if (code == ERR_OK)
        code =
            engine_hybrid_start(&run->hybrid,
                                &(struct engine_hybrid_options){.cpu = devices->cpu,
                                                                .gpu = devices->gpu,
                                                                .cpu_stream = devices->cpu_stream,
                                                                .model = run->model,
                                                                .max_rows = max_rows,
                                                                .ticks = run->config->ticks,
                                                                .rates = rates},
                                e);
    return code;
}

/* Buffers that live as long as the model. */
static enum err_code start_buffers(struct engine_run *run, const struct engine_run_devices *devices,
                                   const struct engine_plan *plan, struct err *e)
{
    struct k_device *device = run->gpu ? devices->gpu : devices->cpu;
    const struct engine_forward_sizes *sizes = &plan->sizes;
    enum err_code code =
        run->ops->buffer_new(device, plan->n_pages * plan->page_bytes, &run->pool, e);
    if (code == ERR_OK)
        code = engine_experts_new(
            devices->cpu, devices->cpu_stream, run->model,
            &(struct engine_experts_options){.arena_bytes = run->budget.arena,
                                             .io = (enum tier_ssd_io)run->config->ssd_io,
                                             .depth = run->config->ssd_depth,
                                             .max_rows = sizes->max_rows},
            &run->experts, e);
    if (code == ERR_OK && run->gpu)
        code = start_gpu(run, devices, plan, e);
    const struct engine_forward_tiers tiers = {.experts = run->experts,
                                               .islands = run->gpu ? &run->islands : NULL,
                                               .hybrid = run->gpu ? &run->hybrid : NULL};
    if (code == ERR_OK)
        code = engine_forward_new(device, run->stream, &tiers, sizes, run->pool, &run->forward, e);
    return code;
}

/* A trace that cannot be written is no reason not to serve. */
static void start_trace(struct engine_run *run)
{
    const struct model_shape *shape = &run->model->shape;
    const struct route_trace_shape figures = {.n_layer = shape->n_layer,
                                              .n_expert = shape->n_expert,
                                              .n_used = shape->n_expert_used,
                                              .layer_bytes = run->model->expert_bytes};
    struct err e = {.code = ERR_OK};
    if (run->config->trace_path == NULL || run->config->trace_path[0] == '\0')
        return;
    if (route_trace_open(run->config->trace_path, &figures, &run->trace, &e) != ERR_OK)
        log_warn("engine", "no_trace", "reason=\"%s\"", e.text);
}

static void trace_step(struct engine_run *run)
{
    const struct engine_forward *f = run->forward;
    const uint32_t *layers[SHAPE_MAX_LAYERS];
    if (run->trace == NULL)
        return;
    for (uint32_t i = 0; i < run->model->shape.n_layer; i++)
        layers[i] = engine_forward_routes(f, i);
    route_trace_step(run->trace, f->n_rows, f->sequence, f->position, layers);
}

static void count_memory(struct engine_run *run, const struct engine_plan *plan)
{
    struct proto_status *c = &run->count;
    c->kv_pages_total = plan->n_pages;
    c->kv_page_bytes = plan->page_bytes;
    c->weights_bytes = run->model->weights_bytes;
    c->work_bytes = plan->needs.work + plan->vram_needs.work;
    c->ram_budget_bytes = plan->budget.total;
    c->ram_slots_bytes = plan->budget.arena;
    c->experts_total = run->model->shape.n_layer * run->model->shape.n_expert;
    c->vram_budget_bytes = plan->vram.total;
    c->vram_islands_bytes = plan->vram.islands;
}

enum err_code engine_run_start(struct engine_run *run, const struct engine_run_devices *devices,
                               struct model *model, struct err *e)
{
    struct engine_plan plan;
    struct engine_plan_machine machine = {
        .cpu = devices->cpu, .gpu = devices->gpu, .available = engine_machine_available()};
    run->model = model;
    run->gpu = devices->gpu != NULL;
    run->gpu_failed = false;
    run->batch_limit = 0;
    run->ops = k_ops(run->gpu ? devices->gpu : devices->cpu);
    run->stream = run->gpu ? devices->gpu_stream : devices->cpu_stream;
    if (run->gpu && run->ops->memory != NULL)
        run->ops->memory(devices->gpu, &machine.vram_free, &machine.vram_total);
    enum err_code code = engine_plan_make(run->config, &machine, model, &plan, e);
    run->budget = plan.budget;
    run->vram = plan.vram;
    run->n_ctx = plan.n_ctx;
    run->max_pages = plan.sizes.max_pages;
    if (code == ERR_OK && plan.budget.below_cycle && !plan.vram.all_resident)
        warn_below_token(&plan);
    if (code == ERR_OK)
        code = start_buffers(run, devices, &plan, e);
    if (code == ERR_OK)
        code = kv_page_start(&run->pages, plan.n_pages, e);
    if (code == ERR_OK)
        code = kv_prefix_start(&run->prefix, &run->pages, e);
    if (code == ERR_OK)
        code = sample_start(&run->sample, model->shape.n_vocab, e);
    if (code == ERR_OK)
        code = start_slots(run, e);
    if (code == ERR_OK)
        start_trace(run);
    engine_turns_start(&run->turns, !run->budget.all_resident, 1);
    engine_ahead_start(&run->ahead, !run->budget.all_resident && !run->gpu);
    count_memory(run, &plan);
    return code;
}

void engine_run_leave(struct engine_run *run)
{
    for (uint32_t i = 0; i < run->n_slots; i++) {
        struct engine_slot *slot = &run->slots[i];
        if (slot->job == NULL)
            continue;
        slot->kv = (struct kv_sequence){.pages = slot->kv.pages}; /* the pool goes as a whole */
        slot->paged = false;
        slot->rows = 0;
        slot->usage.preempted++;
        run->count.preemptions_total++;
    }
    route_trace_close(run->trace);
    run->trace = NULL;
    engine_forward_free(run->forward);
    engine_hybrid_done(&run->hybrid);
    engine_islands_done(&run->islands);
    engine_experts_free(run->experts);
    if (run->pool != NULL)
        run->ops->buffer_free(run->pool);
    kv_prefix_done(&run->prefix);
    kv_page_done(&run->pages);
    sample_done(&run->sample);
    run->forward = NULL;
    run->experts = NULL;
    run->pool = NULL;
    run->gpu = run->gpu_failed = false;
}

void engine_run_done(struct engine_run *run)
{
    engine_run_leave(run);
    alloc_free(run->slot_arrays);
    run->slot_arrays = NULL;
    run->n_slots = 0;
}

bool engine_run_idle(struct engine_run *run)
{
    enum err_code code = ERR_OK;
    if (run->gpu && engine_islands_idle(&run->islands, &code))
        return true;
    run->gpu_failed |= code != ERR_OK;
    return engine_experts_idle(run->experts);
}

/* ---- ends ---- */

static uint32_t ms_between(uint64_t from_ns, uint64_t to_ns)
{
    return from_ns == 0 || to_ns < from_ns ? 0 : (uint32_t)((to_ns - from_ns) / 1000000u);
}

static void send_last(struct engine_run *run, struct engine_job *job, enum engine_event_kind kind)
{
    job->last.kind = kind;
    job->last.handle = job->request.handle;
    engine_mail_send(run->mail, &job->last);
}

static void free_slot(struct engine_run *run, struct engine_slot *slot)
{
    kv_sequence_release(&slot->kv, &run->prefix, slot->tokens);
    slot->job = NULL;
    slot->paged = false;
    slot->rows = 0;
}

void engine_run_finish(struct engine_run *run, struct engine_slot *slot, enum proto_finish finish)
{
    const uint64_t now = ticks_ns(run->config->ticks);
    struct engine_job *job = slot->job;
    struct proto_usage *u = &slot->usage;
    u->prefill_ms =
        ms_between(slot->started_ns, slot->first_token_ns == 0 ? now : slot->first_token_ns);
    u->decode_ms = ms_between(slot->first_token_ns, now);
    job->last.done = (struct proto_done){.finish = (uint8_t)finish, .usage = *u};
    free_slot(run, slot);
    run->count.requests_done_total++;
    run->count.requests_cancelled_total += finish == PROTO_FINISH_CANCELLED;
    send_last(run, job, ENGINE_DONE);
}

void engine_run_fail_job(struct engine_run *run, struct engine_job *job, const struct err *cause)
{
    list_remove(&job->waiting);
    job->last.error = *cause;
    run->count.requests_failed_total++;
    send_last(run, job, ENGINE_ERROR);
}

void engine_run_fail(struct engine_run *run, struct engine_slot *slot, const struct err *cause)
{
    struct engine_job *job = slot->job;
    free_slot(run, slot);
    engine_run_fail_job(run, job, cause);
}

static void cancel_job(struct engine_run *run, struct engine_job *job)
{
    list_remove(&job->waiting);
    job->last.done = (struct proto_done){
        .finish = PROTO_FINISH_CANCELLED,
        .usage = {.prompt = job->request.run.n_prompt,
                  .queue_ms = ms_between(job->submitted_ns, ticks_ns(run->config->ticks))}};
    run->count.requests_done_total++;
    run->count.requests_cancelled_total++;
    send_last(run, job, ENGINE_DONE);
}

void engine_run_sweep(struct engine_run *run)
{
    list_each_safe(it, &run->waiting) {
        struct engine_job *job = list_entry(it, struct engine_job, waiting);
        if (atomic_load(&job->cancelled))
            cancel_job(run, job);
    }
    for (uint32_t i = 0; i < run->n_slots; i++)
        if (run->slots[i].job != NULL && atomic_load(&run->slots[i].job->cancelled))
            engine_run_finish(run, &run->slots[i], PROTO_FINISH_CANCELLED);
}

void engine_run_fail_all(struct engine_run *run, const struct err *cause)
{
    list_each_safe(it, &run->waiting)
        engine_run_fail_job(run, list_entry(it, struct engine_job, waiting), cause);
    for (uint32_t i = 0; i < run->n_slots; i++)
        if (run->slots[i].job != NULL)
            engine_run_fail(run, &run->slots[i], cause);
}

void engine_run_check_waiting(struct engine_run *run)
{
    list_each_safe(it, &run->waiting) {
        struct engine_job *job = list_entry(it, struct engine_job, waiting);
        struct err e = {.code = ERR_OK};
        if (job->checked_ctx == run->n_ctx)
            continue;
        job->checked_ctx = run->n_ctx;
        if (engine_request_check_model(&job->request.run, run->model->shape.n_vocab, run->n_ctx,
                                       &e) != ERR_OK)
            engine_run_fail_job(run, job, &e);
    }
}

bool engine_run_is_idle(const struct engine_run *run)
{
    bool idle = list_empty(&run->waiting);
    for (uint32_t i = 0; i < run->n_slots; i++)
        idle &= run->slots[i].job == NULL;
    return idle;
}

/* ---- the step ---- */

/* Rows of the slot whose logits are wanted: the last one if it is the last token known, and those
 * that tell about prompt tokens. */
static void fill_logits(struct engine_run *run, struct engine_slot *slot)
{
    struct engine_forward *f = run->forward;
    const struct proto_run *r = &slot->job->request.run;
    slot->first_logit = f->n_logits;
    slot->n_logits = 0;
    for (uint32_t i = 0; i < slot->rows; i++) {
        const uint32_t position = slot->kv.computed + i;
        const bool prompt = (r->flags & PROTO_RUN_PROMPT_LOGPROBS) && position + 1 < r->n_prompt &&
                            position + 1 >= slot->prompt_told;
        if (!prompt && position + 1 != slot->n_tokens)
            continue;
        if (slot->n_logits++ == 0)
            slot->logit_position = position;
        f->logit_row[f->n_logits++] = slot->first_row + i;
    }
    engine_pick_ask(run, slot);
}

static void fill_step(struct engine_run *run)
{
    struct engine_forward *f = run->forward;
    f->n_rows = f->n_logits = 0;
    engine_pick_begin(run);
    for (uint32_t k = 0; k < run->n_slots; k++) {
        struct engine_slot *slot = &run->slots[k];
        if (slot->rows == 0)
            continue;
        if (slot->kv.changed) {
            engine_forward_set_pages(f, k, slot->kv.pages, slot->kv.n_pages);
            slot->kv.changed = false;
        }
        slot->first_row = f->n_rows;
        for (uint32_t i = 0; i < slot->rows; i++) {
            f->token[f->n_rows] = slot->tokens[slot->kv.computed + i];
            f->position[f->n_rows] = slot->kv.computed + i;
            f->sequence[f->n_rows++] = k;
        }
        fill_logits(run, slot);
    }
}

static void count_step(struct engine_run *run, uint64_t ns, bool prompt)
{
    const uint32_t rows = run->forward->n_rows;
    for (uint32_t layer = 0; layer < run->model->shape.n_layer; layer++)
        run->count.expert_groups_total += run->forward->layer_groups[layer];
    run->count.steps_total++;
    run->count.rows_total += rows;
    run->count.step_us_last = ns / 1000;
    run->count.step_us_total += ns / 1000;
    if (!prompt)
        return;
    const uint64_t row_ns = ns / rows;
    run->row_ns = run->row_ns == 0 ? row_ns : (run->row_ns * 3 + row_ns) / 4;
    (void)fault_hit(FAULT_ENGINE_PREFILL);
}

/* Once a step: the requests concerned get the same text. */
static void log_failed_reads(const struct engine_run *run)
{
    const struct engine_experts *x = run->experts;
    uint32_t rows = 0;
    for (uint32_t i = 0; i < run->forward->n_rows && x->any_failed; i++)
        rows += x->row_failed[i];
    if (rows > 0)
        log_error("engine", "expert_read_failed", "rows=%u reason=\"%s\"", rows, x->error.text);
}

static void log_ahead(const struct engine_run *run)
{
    const struct engine_ahead *a = &run->ahead;
    log_info("engine", "read_ahead",
             "on=%d us_per_row_with=%llu us_per_row_without=%llu guesses=%llu right=%llu", a->on,
             (unsigned long long)(a->with.ns / a->with.rows / 1000),
             (unsigned long long)(a->without.ns / a->without.rows / 1000),
             (unsigned long long)run->experts->guesses,
             (unsigned long long)run->experts->guesses_right);
}

/* Time in which the engine's thread waited, or computed experts. */
static uint64_t away_ns(const struct engine_run *run)
{
    return run->hybrid.gpu_wait_ns + run->hybrid.cpu_ns + tier_ssd_count(run->experts->ssd).wait_ns;
}

static void count_host(struct engine_run *run, uint64_t start_ns, uint64_t away_before_ns)
{
    if (!run->gpu)
        return;
    run->host_ns += ticks_ns(run->config->ticks) - start_ns - (away_ns(run) - away_before_ns);
    run->count.host_us_total = run->host_ns / 1000;
}

/* Resumed answers that were complete already. */
static void end_complete(struct engine_run *run)
{
    enum proto_finish finish;
    for (uint32_t i = 0; i < run->n_slots; i++) {
        struct engine_slot *s = &run->slots[i];
        if (s->job != NULL && s->job->request.run.first_index > 0 && s->n_tokens == s->n_given &&
            engine_answer_ended(run, &s->job->request.run, s->tokens, s->n_tokens, &finish))
            engine_run_finish(run, s, finish);
    }
}

bool engine_run_step(struct engine_run *run)
{
    const uint64_t start = ticks_ns(run->config->ticks), away = away_ns(run);
    engine_admit_all(run, start);
    end_complete(run);
    if (engine_admit_rows(run, start) == 0)
        return false;
    uint32_t decode_rows = 0;
    for (uint32_t i = 0; i < run->n_slots; i++) {
        const struct engine_slot *s = &run->slots[i];
        decode_rows += s->rows == 1 && s->n_tokens > s->n_given;
    }
    fill_step(run);
    const uint32_t prompt_rows = run->forward->n_rows - decode_rows;
    run->forward->guess = engine_ahead_wanted(&run->ahead, decode_rows, prompt_rows);
    struct err e = {.code = ERR_OK};
    const enum err_code code = engine_forward_step(run->forward, &e);
    if (code == ERR_DEVICE && run->gpu) { /* the CPU will compute all of it again */
        run->gpu_failed = true;
        return true;
    }
    if (code != ERR_OK) {
        for (uint32_t i = 0; i < run->n_slots; i++)
            if (run->slots[i].job != NULL && run->slots[i].rows > 0)
                engine_run_fail(run, &run->slots[i], &e);
        return true;
    }
    const uint64_t now = ticks_ns(run->config->ticks);
    count_step(run, now - start, prompt_rows > 0);
    if (engine_ahead_done(&run->ahead, decode_rows, prompt_rows, now - start))
        log_ahead(run);
    engine_turns_done(&run->turns, decode_rows, prompt_rows, now - start);
    trace_step(run);
    log_failed_reads(run);
    engine_answer_step(run, now);
    for (uint32_t i = 0; i < run->n_slots; i++)
        run->slots[i].rows = 0;
    count_host(run, start, away);
    return true;
}

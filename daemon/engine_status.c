#include "engine_status.h"

#include <string.h>

#include "log.h"

static void describe_job(struct engine_snapshot *s, const struct engine_job *job, uint64_t now,
                         struct proto_sequence what)
{
    if (s->status.n_sequences == ENGINE_MAX_LISTED)
        return;
    const uint16_t i = s->status.n_sequences++;
    what.request_id = job->request.handle;
    what.prompt = job->request.run.n_prompt;
    what.age_ms = now > job->submitted_ns ? (now - job->submitted_ns) / 1000000u : 0;
    memcpy(s->clients[i], job->request.client, sizeof(s->clients[i]));
    s->sequences[i] = what;
}

void engine_status_sequences(const struct engine_run *run, uint64_t now_ns,
                             struct engine_snapshot *ret)
{
    ret->status.n_sequences = 0;
    ret->status.sequences_running = ret->status.sequences_waiting = 0;
    for (uint32_t i = 0; i < run->n_slots; i++) {
        const struct engine_slot *slot = &run->slots[i];
        if (slot->job == NULL)
            continue;
        const bool decodes = slot->n_tokens > slot->n_given;
        const enum proto_sequence_state state = !slot->paged ? PROTO_SEQUENCE_WAITING
                                                : decodes    ? PROTO_SEQUENCE_DECODE
                                                             : PROTO_SEQUENCE_PREFILL;
        *(slot->paged ? &ret->status.sequences_running : &ret->status.sequences_waiting) += 1;
        const uint32_t n_prompt = slot->job->request.run.n_prompt;
        describe_job(ret, slot->job, now_ns,
                     (struct proto_sequence){
                         .state = (uint8_t)state,
                         .prefilled = slot->kv.computed < n_prompt ? slot->kv.computed : n_prompt,
                         .generated = slot->n_tokens - n_prompt,
                         .kv_pages = slot->kv.n_pages});
    }
    list_each(it, &run->waiting) {
        ret->status.sequences_waiting++;
        describe_job(ret, list_entry(it, struct engine_job, waiting), now_ns,
                     (struct proto_sequence){.state = PROTO_SEQUENCE_WAITING});
    }
}

static void describe_tiers(const struct engine_run *run, struct proto_status *c)
{
    const struct engine_experts *x = run->experts;
    const struct proto_status *past = &run->past;
    const struct expert_cache_counts cache = expert_cache_count(x->cache);
    const struct tier_ssd_counts ssd = tier_ssd_count(x->ssd);
    c->ram_slots_used_bytes = cache.used_bytes;
    c->ram_locked = x->ram.locked;
    c->experts_resident = cache.resident;
    c->expert_evictions_total = past->expert_evictions_total + cache.evictions;
    c->ssd_bytes_total = past->ssd_bytes_total + ssd.bytes;
    c->ssd_reads_total = past->ssd_reads_total + ssd.reads;
    c->ssd_errors_total = past->ssd_errors_total + ssd.failures;
    c->ssd_wait_us_total = past->ssd_wait_us_total + ssd.wait_ns / 1000;
}

static void describe_gpu(const struct engine_run *run, struct proto_status *c)
{
    const struct proto_status *past = &run->past;
    struct expert_cache_counts islands = {.resident = 0};
    if (run->gpu && run->islands.cache != NULL)
        islands = expert_cache_count(run->islands.cache);
    c->vram_islands_used_bytes = islands.used_bytes;
    c->experts_in_vram = islands.resident;
    c->expert_copies_total = past->expert_copies_total + run->islands.counts.copies;
    c->expert_copy_bytes_total = past->expert_copy_bytes_total + run->islands.counts.copied_bytes;
    c->cpu_experts_us_total = past->cpu_experts_us_total + run->hybrid.cpu_ns / 1000;
    c->gpu_wait_us_total = past->gpu_wait_us_total + run->hybrid.gpu_wait_ns / 1000;
}

void engine_status_count(struct engine_run *run)
{
    struct proto_status *c = &run->count;
    c->kv_pages_cached = run->prefix.n_cached;
    c->kv_pages_used = run->pages.n - run->pages.n_free - run->prefix.n_cached;
    if (run->experts != NULL)
        describe_tiers(run, c);
    else /* the model went: what counts stays, what is there does not */
        c->ram_slots_used_bytes = c->ram_locked = c->experts_resident = 0;
    describe_gpu(run, c);
}

void engine_status_keep(struct engine_run *run)
{
    engine_status_count(run);
    run->past = run->count;
}

static const char *gpu_name(struct k_device *gpu)
{
    const struct k_ops *ops = k_ops(gpu);
    return ops->describe != NULL ? ops->describe(gpu) : ops->name;
}

void engine_status_log(const struct engine_run *run, const struct engine_run_devices *devices)
{
    const struct engine_experts *x = run->experts;
    log_info("engine", "tiers",
             "ram_budget=%llu slots_bytes=%llu experts=%u experts_bytes=%llu all_fit=%d locked=%d "
             "ssd=\"%s\"",
             (unsigned long long)run->budget.total, (unsigned long long)x->ram.bytes, x->n_experts,
             (unsigned long long)run->model->experts_bytes, x->all_fit, x->ram.locked,
             tier_ssd_about(x->ssd));
    if (run->gpu) {
        const struct engine_split_rates *r = &run->hybrid.rates;
        log_info("engine", "gpu",
                 "device=\"%s\" vram_budget=%llu islands_bytes=%llu all_fit=%d pinned=%d "
                 "link_mb_s=%.0f gpu_mb_s=%.0f cpu_mb_s=%.0f sync_us=%.1f",
                 gpu_name(devices->gpu), (unsigned long long)run->vram.total,
                 (unsigned long long)run->vram.islands, run->vram.all_resident, run->islands.pinned,
                 r->link / 1e6, r->gpu / 1e6, r->cpu / 1e6, r->sync_ns / 1e3);
    }
    if (!x->ram.locked)
        log_warn("engine", "not_locked", "reason=\"%s\" hint=\"the system may swap experts out\"",
                 x->ram.refusal);
    if (run->n_ctx < run->config->context)
        log_warn("engine", "context_smaller", "context=%u asked=%u model=%u kv_pages=%u",
                 run->n_ctx, run->config->context, run->model->shape.n_ctx_train, run->pages.n);
}

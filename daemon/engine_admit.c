#include "engine_admit.h"

#include <string.h>

#include "engine_sched.h"

enum {
    DEFER_MS = 10000 /* waiting for another's prefix, at most */
};

static uint64_t waited_ms(const struct engine_job *job, uint64_t now_ns)
{
    return now_ns > job->submitted_ns ? (now_ns - job->submitted_ns) / 1000000u : 0;
}

static uint32_t pages_of(uint32_t positions)
{
    return (positions + KV_PREFIX_PAGE - 1) / KV_PREFIX_PAGE;
}

static bool shares(const struct proto_run *r)
{
    return (r->flags & (PROTO_RUN_NO_CACHE | PROTO_RUN_PROMPT_LOGPROBS)) == 0;
}

/* ---- pages ---- */

static uint32_t holders(const struct engine_run *run, const struct engine_slot *except)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < run->n_slots; i++)
        n += &run->slots[i] != except && run->slots[i].job != NULL && run->slots[i].paged;
    return n;
}

/* Takes shared pages, and lets the sequence in if the rest of its tokens fit beside one more page
 * for each that runs; alone it always fits. */
static bool get_pages(struct engine_run *run, struct engine_slot *slot)
{
    struct kv_sequence_copy copy = {KV_PAGE_NONE, KV_PAGE_NONE};
    if (shares(&slot->job->request.run))
        kv_sequence_reuse(&slot->kv, &run->prefix, slot->tokens, slot->n_tokens - 1, &copy);
    if (copy.from != KV_PAGE_NONE) {
        const uint64_t bytes = run->forward->kv.page_bytes;
        run->ops->copy(run->stream, (struct k_span){run->pool, copy.to * bytes},
                       (struct k_span){run->pool, copy.from * bytes}, bytes);
    }
    const uint32_t others = holders(run, slot);
    const uint32_t need = pages_of(slot->n_tokens) - slot->kv.n_pages;
    slot->paged = others == 0 ||
                  (uint64_t)need + others + 1 <= (uint64_t)run->pages.n_free + run->prefix.n_cached;
    if (!slot->paged)
        kv_sequence_release(&slot->kv, &run->prefix, slot->tokens);
    return slot->paged;
}

static void preempt(struct engine_run *run, struct engine_slot *slot)
{
    kv_sequence_release(&slot->kv, &run->prefix, slot->tokens);
    slot->paged = false;
    slot->rows = 0;
    slot->usage.preempted++;
    run->count.preemptions_total++;
}

/* ---- admission ---- */

/* Length of the whole pages that a and b have in common. */
static uint32_t common_pages(const uint32_t *a, uint32_t n_a, const uint32_t *b, uint32_t n_b)
{
    uint32_t n = 0;
    const uint32_t limit = n_a < n_b ? n_a : n_b;
    while (limit - n >= KV_PREFIX_PAGE && memcmp(a + n, b + n, KV_PREFIX_PAGE * sizeof(*a)) == 0)
        n += KV_PREFIX_PAGE;
    return n;
}

/* Is someone computing a beginning of this prompt that is not there yet? */
static bool deferred(const struct engine_run *run, struct engine_job *job, uint64_t now_ns)
{
    const struct proto_run *r = &job->request.run;
    if (!shares(r) || (job->deferred_ns != 0 && now_ns - job->deferred_ns > DEFER_MS * 1000000ull))
        return false;
    uint32_t best = 0;
    for (uint32_t i = 0; i < run->n_slots; i++) {
        const struct engine_slot *s = &run->slots[i];
        if (s->job == NULL || !s->paged || s->n_tokens - s->kv.computed <= 1)
            continue;
        const uint32_t n = common_pages(r->tokens, r->n_tokens - 1, s->tokens, s->n_tokens);
        if (n > s->kv.computed && n > best)
            best = n;
    }
    if (best == 0 || best <= kv_sequence_reusable(&run->prefix, r->tokens, r->n_tokens - 1))
        return false;
    if (job->deferred_ns == 0)
        job->deferred_ns = now_ns;
    return true;
}

static struct engine_job *next_waiting(const struct engine_run *run, uint64_t now_ns)
{
    struct engine_job *best = NULL;
    int64_t best_urgency = 0;
    list_each(it, &run->waiting) {
        struct engine_job *job = list_entry(it, struct engine_job, waiting);
        const struct proto_run *r = &job->request.run;
        const int64_t urgency =
            engine_sched_urgency(r->n_tokens, r->priority, waited_ms(job, now_ns));
        if ((best == NULL || urgency < best_urgency) && !deferred(run, job, now_ns)) {
            best = job;
            best_urgency = urgency;
        }
    }
    return best;
}

static struct engine_slot *free_slot(struct engine_run *run)
{
    for (uint32_t i = 0; i < run->n_slots; i++)
        if (run->slots[i].job == NULL)
            return &run->slots[i];
    return NULL;
}

static bool admit(struct engine_run *run, struct engine_slot *slot, struct engine_job *job,
                  uint64_t now_ns)
{
    const struct proto_run *r = &job->request.run;
    slot->job = job;
    slot->n_tokens = slot->n_given = r->n_tokens;
    memcpy(slot->tokens, r->tokens, r->n_tokens * sizeof(*r->tokens));
    if (!get_pages(run, slot)) {
        slot->job = NULL;
        return false;
    }
    list_remove(&job->waiting);
    slot->prompt_told = 0;
    slot->served = 0;
    slot->started_ns = now_ns;
    slot->first_token_ns = 0;
    slot->usage =
        (struct proto_usage){.prompt = r->n_prompt, .queue_ms = (uint32_t)waited_ms(job, now_ns)};
    slot->usage.cached = slot->kv.computed < r->n_prompt ? slot->kv.computed : r->n_prompt;
    run->count.cached_tokens_total += slot->kv.computed;
    return true;
}

/* The oldest slot without pages, or NULL. */
static struct engine_slot *oldest_unpaged(struct engine_run *run)
{
    struct engine_slot *oldest = NULL;
    for (uint32_t i = 0; i < run->n_slots; i++) {
        struct engine_slot *s = &run->slots[i];
        if (s->job != NULL && !s->paged && (oldest == NULL || s->job->order < oldest->job->order))
            oldest = s;
    }
    return oldest;
}

void engine_admit_all(struct engine_run *run, uint64_t now_ns)
{
    struct engine_slot *slot;
    while ((slot = oldest_unpaged(run)) != NULL)
        if (!get_pages(run, slot))
            return;
    while (!list_empty(&run->waiting) && (slot = free_slot(run)) != NULL) {
        struct engine_job *job = next_waiting(run, now_ns);
        if (job == NULL || !admit(run, slot, job, now_ns))
            return;
    }
}

/* ---- rows ---- */

/* Fills seen[i] for slot i; a free slot wants no rows and is younger than all. */
static void describe(const struct engine_run *run, uint64_t now_ns,
                     struct engine_sched_sequence *seen)
{
    const struct engine_slot *logprobs = NULL; /* one prompt at a time: its logits are large */
    for (uint32_t i = 0; i < run->n_slots; i++) {
        const struct engine_slot *s = &run->slots[i];
        seen[i] = (struct engine_sched_sequence){.order = UINT64_MAX};
        if (s->job == NULL)
            continue;
        const struct proto_run *r = &s->job->request.run;
        const bool wants = (r->flags & PROTO_RUN_PROMPT_LOGPROBS) && s->prompt_told < r->n_prompt;
        seen[i].order = s->job->order;
        seen[i].waited_ms = waited_ms(s->job, now_ns);
        seen[i].remaining = s->n_tokens - s->kv.computed;
        seen[i].max_rows = s->paged ? UINT32_MAX : 0;
        if (wants && s->paged)
            seen[i].max_rows = logprobs == NULL ? ENGINE_RUN_PROMPT_LOGITS : 0;
        if (wants && s->paged)
            logprobs = s;
        seen[i].priority = r->priority;
        seen[i].decoding = s->n_tokens > s->n_given && seen[i].remaining == 1;
        seen[i].holds_pages = s->paged && s->kv.n_pages > 0;
        seen[i].served = s->served;
    }
}

/* Pages for the slot's rows; younger sequences, at last the slot itself, give theirs: never an
 * older one, whose rows are chosen already. */
static void ensure_pages(struct engine_run *run, struct engine_slot *slot,
                         struct engine_sched_sequence *seen)
{
    while (slot->rows > 0 &&
           !kv_sequence_grow(&slot->kv, &run->prefix, slot->kv.computed + slot->rows)) {
        seen[slot - run->slots].holds_pages = true; /* it may be the youngest itself */
        const uint32_t victim = engine_sched_victim(seen, run->n_slots);
        struct engine_slot *from = victim == run->n_slots ? slot : &run->slots[victim];
        preempt(run, from);
        seen[from - run->slots].holds_pages = false;
    }
}

/* Those whose turn it is not have no row in this step. */
static void take_turns(struct engine_run *run, struct engine_sched_sequence *seen)
{
    struct engine_turns_seen masks = {.present = 0};
    for (uint32_t i = 0; i < run->n_slots; i++) {
        const bool can = run->slots[i].job != NULL && seen[i].max_rows > 0;
        const bool prompt = can && !seen[i].decoding;
        masks.present |= (uint32_t)(run->slots[i].job != NULL) << i;
        masks.decoding |= (uint32_t)(can && seen[i].decoding) << i;
        masks.prompts |= (uint32_t)prompt << i;
        masks.long_prompts |= (uint32_t)(prompt && seen[i].remaining >= ENGINE_TURNS_LONG_ROWS)
                              << i;
    }
    const struct engine_turns_choice choice = engine_turns_pick(&run->turns, &masks);
    for (uint32_t i = 0; i < run->n_slots; i++)
        if (!((choice.decoding | choice.prompts) >> i & 1))
            seen[i].max_rows = 0;
}

static uint32_t plan_rows(struct engine_run *run, uint64_t now_ns)
{
    struct engine_sched_sequence seen[ENGINE_MAX_SEQUENCES];
    uint32_t rows[ENGINE_MAX_SEQUENCES];
    const struct engine_sched_limits limits = {.prefill_chunk = run->config->prefill_chunk,
                                               .row_ns = run->row_ns,
                                               .whole = run->turns.active};
    describe(run, now_ns, seen);
    take_turns(run, seen);
    engine_sched_limit(seen, run->n_slots, run->batch_limit);
    engine_sched_plan(seen, run->n_slots, &limits, rows);
    for (uint32_t i = 0; i < run->n_slots; i++)
        run->slots[i].rows = rows[i];
    bool done[ENGINE_MAX_SEQUENCES] = {false};
    uint32_t sum = 0;
    for (uint32_t k = 0; k < run->n_slots; k++) { /* oldest first */
        uint32_t next = run->n_slots;
        for (uint32_t i = 0; i < run->n_slots; i++)
            if (!done[i] && (next == run->n_slots || seen[i].order < seen[next].order))
                next = i;
        done[next] = true;
        ensure_pages(run, &run->slots[next], seen);
        sum += run->slots[next].rows;
        if (run->slots[next].rows > 0)
            run->slots[next].served = run->count.steps_total + 1;
    }
    return sum;
}

uint32_t engine_admit_rows(struct engine_run *run, uint64_t now_ns)
{
    uint64_t before;
    uint32_t rows;
    /* Those with rows may have lost their pages while an older one had none: it was another's turn,
     * or a shorter prompt went first. Each round takes pages from one at least, so that it ends. */
    do {
        before = run->count.preemptions_total;
        rows = plan_rows(run, now_ns);
    } while (rows == 0 && run->count.preemptions_total > before);
    return rows;
}

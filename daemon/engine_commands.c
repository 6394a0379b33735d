#include "engine_commands.h"

#include <string.h>

#include "alloc.h"
#include "engine_islands.h"

enum {
    LOOKS = 64 /* commands that one turn looks at: some microseconds each */
};

/* ---- both threads ---- */

enum err_code engine_commands_start(struct engine_commands *c, void (*notify)(void *context),
                                    void *notify_context, struct err *e)
{
    *c = (struct engine_commands){.notify = notify, .notify_context = notify_context};
    list_init(&c->waiting);
    list_init(&c->done);
    c->submitted = queue_new(ENGINE_COMMANDS_MAX);
    c->ended = queue_new(ENGINE_COMMANDS_MAX);
    if (c->submitted != NULL && c->ended != NULL)
        return ERR_OK;
    engine_commands_done(c);
    return err_set(e, ERR_NOMEM, "no memory for %d commands", ENGINE_COMMANDS_MAX);
}

static void free_queue(struct queue *q)
{
    struct engine_command *m;
    while (q != NULL && (m = queue_pop(q)) != NULL)
        alloc_free(m);
    queue_free(q);
}

static void free_list(struct list *list)
{
    list_each_safe(it, list)
        alloc_free(list_entry(it, struct engine_command, link));
}

void engine_commands_done(struct engine_commands *c)
{
    free_queue(c->submitted);
    free_queue(c->ended);
    if (c->waiting.next != NULL) {
        free_list(&c->waiting);
        free_list(&c->done);
    }
    for (uint32_t i = 0; i < c->n_active; i++)
        alloc_free(c->active[i]);
    *c = (struct engine_commands){.n_active = 0};
}

/* ---- the loop's side ---- */

enum err_code engine_commands_submit(struct engine_commands *c, struct engine_command *m,
                                     struct err *e)
{
    if (c->n_open >= ENGINE_COMMANDS_MAX)
        return err_set(e, ERR_BUSY, "%u commands about experts wait; the limit is %d", c->n_open,
                       ENGINE_COMMANDS_MAX);
    c->n_open++;
    (void)queue_push(c->submitted, m); /* holds as many as may be open */
    return ERR_OK;
}

void engine_commands_cancel(struct engine_commands *c, struct engine_command *m)
{
    atomic_store(&m->cancelled, true);
    atomic_store(&c->any_cancelled, true);
}

struct engine_command *engine_commands_next(struct engine_commands *c)
{
    struct engine_command *m = queue_pop(c->ended);
    c->n_open -= m != NULL;
    return m;
}

/* ---- the engine's side: one command ---- */

/* What became of a command in this turn. */
enum outcome {
    ENDED,
    UNDER_WAY, /* waits for a read, a copy or a pin */
    PUT_OFF    /* not begun: enough are under way */
};

/* What is known of an expert that a command names. */
struct place {
    uint32_t layer, expert;
    enum expert_cache_state vram, ram;
};

static bool has_islands(const struct engine_commands_tiers *t)
{
    return t->islands != NULL && t->islands->cache != NULL;
}

static struct place find(const struct engine_commands_tiers *t, const struct engine_command *m)
{
    const uint32_t n_expert = t->experts->model->shape.n_expert;
    struct place p = {.layer = m->expert.expert_id / n_expert,
                      .expert = m->expert.expert_id % n_expert,
                      .vram = EXPERT_CACHE_ABSENT};
    if (has_islands(t))
        p.vram = expert_cache_state(t->islands->cache, p.layer, p.expert);
    p.ram = expert_cache_state(t->experts->cache, p.layer, p.expert);
    return p;
}

static const char *name_of(const struct engine_command *m)
{
    return m->unload ? "unload_expert" : "load_expert";
}

/* Is there such an expert, and is it what the client takes it for? ERR_ARGUMENT. */
static enum err_code check(const struct engine_commands_tiers *t, struct engine_command *m)
{
    const struct model *model = t->experts->model;
    const struct model_shape *shape = &model->shape;
    const struct proto_load_expert *w = &m->expert;
    struct tier_ssd_part parts[TIER_SSD_PARTS];
    uint64_t bytes = 0;
    if (w->expert_id >= t->experts->n_experts)
        return err_set(&m->error, ERR_ARGUMENT,
                       "%s: expert_id is %u; the model has %u layers of %u experts, ids end at %u",
                       name_of(m), w->expert_id, shape->n_layer, shape->n_expert,
                       t->experts->n_experts - 1);
    const uint32_t layer = w->expert_id / shape->n_expert, expert = w->expert_id % shape->n_expert;
    const unsigned type = (unsigned)model->tensors.layers[layer].gate->type;
    model_expert_parts(model, layer, expert, 0, parts);
    for (int i = 0; i < TIER_SSD_PARTS; i++)
        bytes += parts[i].bytes;
    if ((w->quant_type != PROTO_ANY_QUANT_TYPE && w->quant_type != type) ||
        (w->weight_size != PROTO_ANY_WEIGHT_SIZE && w->weight_size != bytes))
        return err_set(
            &m->error, ERR_ARGUMENT,
            "%s: expert %u has quant_type %u and weight_size %llu in the file; %u and %u "
            "were given (%u and %u: any)",
            name_of(m), w->expert_id, type, (unsigned long long)bytes, w->quant_type,
            w->weight_size, PROTO_ANY_QUANT_TYPE, PROTO_ANY_WEIGHT_SIZE);
    return ERR_OK;
}

static enum outcome answer(struct engine_command *m, enum proto_tier tier)
{
    m->tier = (uint8_t)tier;
    return ENDED;
}

/* One that is in no memory is read, and through RAM goes to VRAM where an island is free or holds
 * what is worth less. One that was read and is in no memory again had the least worth of all: no
 * room. `last_try`: nothing is under way that may leave room. */
static enum outcome load(const struct engine_commands_tiers *t, struct engine_command *m,
                         bool may_begin, bool last_try)
{
    const struct place p = find(t, m);
    if (p.vram == EXPERT_CACHE_READY)
        return answer(m, PROTO_TIER_VRAM);
    if (p.vram == EXPERT_CACHE_LOADING || p.ram == EXPERT_CACHE_LOADING)
        return UNDER_WAY;
    if (p.ram == EXPERT_CACHE_ABSENT && m->begun)
        return answer(m, PROTO_TIER_SSD);
    if (p.ram == EXPERT_CACHE_READY && !has_islands(t))
        return answer(m, PROTO_TIER_RAM);
    if (!may_begin)
        return PUT_OFF;
    if (p.ram == EXPERT_CACHE_READY)
        return engine_islands_bring(t->islands, p.layer, p.expert) ? UNDER_WAY
                                                                   : answer(m, PROTO_TIER_RAM);
    const bool passes = has_islands(t) && engine_islands_room(t->islands, p.layer);
    if (!engine_experts_bring(t->experts, p.layer, p.expert, passes))
        return last_try ? answer(m, PROTO_TIER_SSD) : PUT_OFF;
    m->begun = true;
    return UNDER_WAY;
}

/* What is on its way arrives first, and pins end with the copy or step that holds them. */
static enum outcome unload(const struct engine_commands_tiers *t, struct engine_command *m)
{
    const struct place p = find(t, m);
    if (has_islands(t) && !expert_cache_forget(t->islands->cache, p.layer, p.expert))
        return UNDER_WAY;
    if (!expert_cache_forget(t->experts->cache, p.layer, p.expert))
        return UNDER_WAY;
    return answer(m, PROTO_TIER_SSD);
}

static enum outcome carry_out(const struct engine_commands_tiers *t, struct engine_command *m,
                              bool may_begin, bool last_try)
{
    if (m->error.code != ERR_OK || check(t, m) != ERR_OK)
        return ENDED;
    return m->unload ? unload(t, m) : load(t, m, may_begin, last_try);
}

/* A read failed. Only a load that waits for it is told; no two commands wait for one expert. */
static void on_failed(void *context, uint32_t id, const struct err *why)
{
    struct engine_commands *c = context;
    for (uint32_t i = 0; i < c->n_active; i++)
        if (!c->active[i]->unload && c->active[i]->expert.expert_id == id)
            c->active[i]->error = *why;
}

/* ---- the engine's side: all of them ---- */

static void end(struct engine_commands *c, struct engine_command *m)
{
    list_append(&c->done, &m->link);
}

static void end_cancelled(struct engine_commands *c, struct engine_command *m)
{
    (void)err_set(&m->error, ERR_CANCELLED, "%s of expert %u was cancelled", name_of(m),
                  m->expert.expert_id);
    end(c, m);
}

static void sweep(struct engine_commands *c)
{
    uint32_t n = 0;
    list_each_safe(it, &c->waiting) {
        struct engine_command *m = list_entry(it, struct engine_command, link);
        if (!atomic_load(&m->cancelled))
            continue;
        list_remove(&m->link);
        end_cancelled(c, m);
    }
    for (uint32_t i = 0; i < c->n_active; i++) {
        if (atomic_load(&c->active[i]->cancelled))
            end_cancelled(c, c->active[i]);
        else
            c->active[n++] = c->active[i];
    }
    c->n_active = n;
}

void engine_commands_take(struct engine_commands *c)
{
    const bool any = atomic_exchange(&c->any_cancelled, false);
    struct engine_command *m;
    while ((m = queue_pop(c->submitted)) != NULL)
        list_append(&c->waiting, &m->link);
    if (any)
        sweep(c);
}

/* Those that are under way: which have ended? */
static bool look_at_active(struct engine_commands *c, const struct engine_commands_tiers *t)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->n_active; i++) {
        if (carry_out(t, c->active[i], true, true) == ENDED)
            end(c, c->active[i]);
        else
            c->active[n++] = c->active[i];
    }
    const bool any = n < c->n_active;
    c->n_active = n;
    return any;
}

/* Does an earlier command concern the same expert? */
static bool is_second(const struct engine_commands *c, const struct engine_command *m)
{
    for (uint32_t i = 0; i < c->n_active; i++)
        if (c->active[i]->expert.expert_id == m->expert.expert_id)
            return true;
    for (const struct list *it = c->waiting.next; it != &m->link; it = it->next)
        if (list_entry(it, struct engine_command, link)->expert.expert_id == m->expert.expert_id)
            return true;
    return false;
}

/* Those that wait: what can be answered at once is, whatever waits before it. */
static bool look_at_waiting(struct engine_commands *c, const struct engine_commands_tiers *t)
{
    bool any = false;
    uint32_t looks = LOOKS;
    list_each_safe(it, &c->waiting) {
        struct engine_command *m = list_entry(it, struct engine_command, link);
        const bool may_begin = c->n_active < ENGINE_COMMANDS_UNDER_WAY;
        if (looks-- == 0)
            break;
        if (is_second(c, m))
            continue;
        const enum outcome outcome = carry_out(t, m, may_begin, c->n_active == 0);
        if (outcome == PUT_OFF || (outcome == UNDER_WAY && !may_begin))
            continue;
        any = true;
        list_remove(&m->link);
        if (outcome == ENDED)
            end(c, m);
        else
            c->active[c->n_active++] = m;
    }
    return any;
}

bool engine_commands_turn(struct engine_commands *c, const struct engine_commands_tiers *tiers,
                          bool idle, enum err_code *ret_code)
{
    struct engine_experts *x = tiers->experts;
    *ret_code = ERR_OK;
    if (c->n_active == 0 && list_empty(&c->waiting))
        return false;
    x->failed = on_failed;
    x->failed_context = c;
    const bool wait = idle && c->n_active > 0;
    if (has_islands(tiers))
        *ret_code = engine_islands_settle(tiers->islands, wait);
    if (*ret_code != ERR_OK)
        return false;
    if (wait)
        engine_experts_land(x);
    const bool ended = look_at_active(c, tiers);
    const bool begun = look_at_waiting(c, tiers);
    const bool copies = has_islands(tiers) && tiers->islands->n_flights > 0;
    const bool reads = expert_cache_count(x->cache).loading > 0;
    return ended || begun || (idle && c->n_active > 0 && (reads || copies));
}

void engine_commands_leave(struct engine_commands *c)
{
    while (c->n_active > 0) { /* the first comes to stand before all */
        struct engine_command *m = c->active[--c->n_active];
        m->begun = false;
        list_prepend(&c->waiting, &m->link);
    }
}

void engine_commands_refuse(struct engine_commands *c, const struct err *cause)
{
    list_each_safe(it, &c->waiting) {
        struct engine_command *m = list_entry(it, struct engine_command, link);
        list_remove(&m->link);
        m->error = *cause;
        end(c, m);
    }
}

void engine_commands_flush(struct engine_commands *c)
{
    if (list_empty(&c->done))
        return;
    list_each_safe(it, &c->done) {
        struct engine_command *m = list_entry(it, struct engine_command, link);
        list_remove(&m->link); /* the loop's from now on */
        (void)queue_push(c->ended, m);
    }
    c->notify(c->notify_context);
}

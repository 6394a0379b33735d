#include "engine_islands.h"

#include <assert.h>
#include <string.h>

#include "alloc.h"

enum {
    BACKGROUND = 2, /* copies under way that nobody waits for */
    SHARE = 8, /* of the experts copied for one use, every so many asks for an island in a step */
    IDLE_COPIES = 8
};

/* A copy takes the link from copies that somebody waits for: with a router without locality experts
 * came and went for nothing, a third of a step's time. */
static const float CAUTION = 0.5f;

/* ---- start ---- */

/* Bytes of the arrays, laid out in one block at `at`; NULL: only counts. */
static size_t lay_out(struct engine_islands *is, char *at, uint32_t n_expert, uint32_t max_rows)
{
    const uint32_t flights = n_expert + 2 * TIER_VRAM_TRANSIT + BACKGROUND + IDLE_COPIES;
    const struct {
        void **to;
        size_t bytes;
    } arrays[] = {{(void **)&is->resident, n_expert * sizeof(*is->resident)},
                  {(void **)&is->rest, n_expert * sizeof(*is->rest)},
                  {(void **)&is->row_hits, max_rows * sizeof(*is->row_hits)},
                  {(void **)&is->flights, flights * sizeof(*is->flights)}};
    size_t n = 0;
    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
        if (at != NULL)
            *arrays[i].to = at + n;
        n += (arrays[i].bytes + 7) & ~(size_t)7;
    }
    is->max_flights = flights;
    return n;
}

uint64_t engine_islands_bytes(const struct model *m, uint32_t max_rows)
{
    struct engine_islands is;
    return lay_out(&is, NULL, m->shape.n_expert, max_rows);
}

/* Copies end, so that reads find slots in RAM. */
static void unpin_all(void *context);

static enum err_code start_cache(struct engine_islands *is, struct err *e)
{
    uint64_t largest = 0;
    for (uint32_t l = 0; l < is->n_layer; l++)
        if (is->vram.island_bytes[l] > largest)
            largest = is->vram.island_bytes[l];
    if (is->islands_bytes < largest || is->placement == ENGINE_PLACEMENT_CPU)
        return ERR_OK;
    return expert_cache_new(
        &(struct expert_cache_options){.n_layer = is->n_layer,
                                       .n_expert = is->n_expert,
                                       .n_used = is->n_used,
                                       .layer_bytes = is->vram.island_bytes,
                                       .arena_bytes = is->islands_bytes,
                                       .unit_bytes = is->vram.chunks > 0 ? K_CHUNK_BYTES : 0,
                                       .caution = CAUTION},
        &is->cache, e);
}

enum err_code engine_islands_start(struct engine_islands *is,
                                   const struct engine_islands_options *options, struct err *e)
{
    struct engine_experts *x = options->experts;
    const struct model_shape *shape = &x->model->shape;
    const struct k_ops *ops = k_ops(options->device);
    *is = (struct engine_islands){.experts = x,
                                  .n_layer = shape->n_layer,
                                  .n_expert = shape->n_expert,
                                  .n_used = shape->n_expert_used,
                                  .islands_bytes = options->islands_bytes,
                                  .placement = options->placement,
                                  .early_layer = shape->n_layer};
    enum err_code code =
        tier_vram_start(&is->vram,
                        &(struct tier_vram_options){.device = options->device,
                                                    .stream = options->stream,
                                                    .model = x->model,
                                                    .islands_bytes = options->islands_bytes,
                                                    .budget = options->budget},
                        e);
    if (code != ERR_OK)
        return code;
    const size_t bytes = lay_out(is, NULL, is->n_expert, options->max_rows);
    char *block = alloc_zero(ALLOC_WORK, 1, bytes);
    if (block == NULL)
        code = err_set(e, ERR_NOMEM, "no memory for the table of islands");
    else
        lay_out(is, block, is->n_expert, options->max_rows);
    if (code == ERR_OK)
        code = start_cache(is, e);
    if (code != ERR_OK) {
        engine_islands_done(is);
        return code;
    }
    /* Without it the driver copies through memory of its own, at a fraction of the speed. */
    struct err refused = {.code = ERR_OK};
    is->device = options->device;
    is->pinned = ops->host_register != NULL &&
                 ops->host_register(options->device, x->ops->buffer_host(x->ram.arena),
                                    x->ram.bytes, &refused) == ERR_OK;
    x->above = is->cache;
    x->unpin = unpin_all;
    x->unpin_context = is;
    return ERR_OK;
}

void engine_islands_done(struct engine_islands *is)
{
    struct engine_experts *x = is->experts;
    if (x == NULL)
        return;
    if (is->vram.memory != NULL)
        (void)tier_vram_wait(&is->vram); /* nothing reads the arena any more */
    if (is->pinned)
        is->vram.ops->host_unregister(is->device, x->ops->buffer_host(x->ram.arena));
    x->above = NULL;
    x->unpin = NULL;
    tier_vram_done(&is->vram);
    expert_cache_free(is->cache);
    alloc_free(is->resident); /* all arrays are one block */
    *is = (struct engine_islands){.experts = NULL};
}

/* ---- copies ---- */

/* The first copies, up to number `until` of all, are done. Where RAM cannot hold all experts, what
 * has an island gives its slot to another one. */
static void land(struct engine_islands *is, uint64_t until)
{
    struct engine_experts *x = is->experts;
    uint32_t n = 0;
    for (; n < is->n_flights && is->landed + n < until; n++) {
        const struct engine_islands_flight *f = &is->flights[n];
        expert_cache_unpin(x->cache, f->layer, f->expert);
        if (f->stays)
            expert_cache_arrived(is->cache, f->layer, f->expert);
        if (f->stays && !x->all_fit)
            (void)expert_cache_forget(x->cache, f->layer, f->expert); /* unless it is in use */
        is->n_background -= f->background;
    }
    is->landed += n;
    is->n_flights -= n;
    memmove(is->flights, is->flights + n, is->n_flights * sizeof(*is->flights));
}

/* Takes notice of copies that are done; never waits. The stream that computes was waited for. */
static void settle(struct engine_islands *is)
{
    if (is->n_flights > 0)
        land(is, tier_vram_settle(&is->vram) ? is->vram.begun : is->awaited);
}

static void await_all(struct engine_islands *is)
{
    tier_vram_await(&is->vram);
    is->awaited = is->vram.begun;
}

static void unpin_all(void *context)
{
    struct engine_islands *is = context;
    is->held = true;
    (void)tier_vram_wait(&is->vram); /* an error shows again at the step's end */
    land(is, is->vram.begun);
}

/* Begins the copy of an expert that is READY in RAM. */
static struct engine_islands_flight *begin_copy(struct engine_islands *is, uint32_t layer,
                                                uint32_t expert, bool stays, uint64_t place)
{
    const uint8_t *slices[TIER_VRAM_SLICES];
    if (is->n_flights == is->max_flights)
        unpin_all(is);
    engine_experts_slices(is->experts, layer, expert, slices);
    expert_cache_pin(is->experts->cache, layer, expert);
    tier_vram_copy(&is->vram, layer, expert, slices, is->pinned, place);
    is->counts.copies++;
    is->counts.copied_bytes += is->vram.island_bytes[layer];
    struct engine_islands_flight *f = &is->flights[is->n_flights++];
    *f = (struct engine_islands_flight){.layer = layer, .expert = expert, .stays = stays};
    return f;
}

/* An island for an absent expert, if its worth is more than what would go for it: nothing that is
 * computed with. */
static bool reserve(struct engine_islands *is, uint32_t layer, uint32_t expert, uint64_t *ret_place)
{
    return is->cache != NULL && !is->held &&
           expert_cache_state(is->cache, layer, expert) == EXPERT_CACHE_ABSENT &&
           expert_cache_reserve(is->cache, layer, expert, false, ret_place);
}

void engine_islands_begin(struct engine_islands *is)
{
    is->half ^= 1;
    is->n_transit = 0;
    tier_vram_transit_begin(&is->vram, is->half);
}

static bool has_room(const struct engine_islands *is, uint32_t layer)
{
    return is->cache != NULL && expert_cache_has_room(is->cache, layer);
}

void engine_islands_copy(struct engine_islands *is, uint32_t group)
{
    const uint32_t expert = is->groups[group].expert;
    uint64_t place;
    const bool asks = has_room(is, is->layer) || (expert + is->steps) % SHARE == 0;
    const bool stays = asks && reserve(is, is->layer, expert, &place);
    assert(is->n_transit < is->vram.n_transit);
    if (!stays)
        place = tier_vram_transit_place(&is->vram, is->half, is->n_transit);
    is->n_transit++;
    (void)begin_copy(is, is->layer, expert, stays, place);
}

void engine_islands_await(struct engine_islands *is)
{
    await_all(is);
}

void engine_islands_end(struct engine_islands *is)
{
    tier_vram_transit_used(&is->vram, is->half);
}

void engine_islands_promote(struct engine_islands *is, const uint32_t *groups, uint32_t n)
{
    uint64_t place;
    if (is->placement == ENGINE_PLACEMENT_LAYERS)
        return;
    for (uint32_t i = 0; i < n && is->n_background < BACKGROUND; i++) {
        const uint32_t expert = is->groups[groups[(is->steps + i) % n]].expert;
        if (!reserve(is, is->layer, expert, &place))
            return;
        begin_copy(is, is->layer, expert, true, place)->background = true;
        is->n_background++;
    }
}

/* ---- a layer ---- */

void engine_islands_step(struct engine_islands *is, uint32_t n_rows)
{
    settle(is);
    is->steps++;
    memset(is->row_hits, 0, n_rows * sizeof(*is->row_hits));
}

bool engine_islands_full(const struct engine_islands *is, uint32_t layer)
{
    return is->cache != NULL && expert_cache_resident(is->cache, layer) == is->n_expert;
}

void engine_islands_hit(struct engine_islands *is, uint32_t n_rows)
{
    for (uint32_t i = 0; i < n_rows; i++)
        is->row_hits[i] += is->n_used;
}

/* A group whose expert is in an island, or on its way to one. */
static void take_resident(struct engine_islands *is, const struct engine_experts_layer *layer,
                          uint32_t g)
{
    is->resident[is->n_resident++] = g;
    for (uint32_t i = 0; i < layer->groups[g].count; i++)
        is->row_hits[layer->order[layer->groups[g].first + i] / is->n_used]++;
}

/* Was the expert copied ahead of its need? */
static bool take_early(struct engine_islands *is, uint32_t expert, uint32_t g)
{
    for (int i = 0; i < 2 && is->early_layer == is->layer; i++) {
        struct engine_islands_early *y = &is->early[i];
        for (uint32_t k = 0; k < y->n_experts; k++)
            if (y->experts[k] == expert) {
                y->groups[y->n_groups++] = g;
                is->counts.early++;
                return true;
            }
    }
    return false;
}

void engine_islands_layer(struct engine_islands *is, const struct engine_experts_layer *layer)
{
    settle(is);
    is->layer = layer->index;
    is->groups = layer->groups;
    is->n_resident = is->n_rest = is->early[0].n_groups = is->early[1].n_groups = 0;
    bool under_way = false;
    if (is->cache != NULL)
        expert_cache_layer(is->cache, layer->index, is->experts->n_rows);
    for (uint32_t g = 0; g < layer->n_groups; g++) {
        const struct k_group *group = &layer->groups[g];
        enum expert_cache_state state = EXPERT_CACHE_ABSENT;
        if (is->cache != NULL)
            state = expert_cache_need(is->cache, layer->index, group->expert, group->count);
        under_way |= state == EXPERT_CACHE_LOADING;
        if (state != EXPERT_CACHE_ABSENT)
            take_resident(is, layer, g);
        else if (!take_early(is, group->expert, g))
            is->rest[is->n_rest++] = g;
    }
    if (under_way)
        await_all(is);
}

void engine_islands_leave(struct engine_islands *is)
{
    for (uint32_t i = 0; i < is->n_resident; i++)
        expert_cache_unpin(is->cache, is->layer, is->groups[is->resident[i]].expert);
    is->n_resident = is->n_rest = 0;
    is->held = false; /* before the next copies begin, the stream that computes is waited for */
    is->early_layer = is->n_layer;
}

void engine_islands_await_early(struct engine_islands *is, unsigned i)
{
    tier_vram_transit_await(&is->vram, is->early[i].half);
    if (is->awaited < is->early[i].begun)
        is->awaited = is->early[i].begun;
}

void engine_islands_end_early(struct engine_islands *is, unsigned i)
{
    tier_vram_transit_used(&is->vram, is->early[i].half);
}

/* Fills a half of the transit area with experts of the layer, from *next on. */
static void copy_early(struct engine_islands *is, struct engine_islands_early *y, uint32_t layer,
                       uint32_t *next)
{
    tier_vram_transit_begin(&is->vram, y->half);
    for (; *next < is->n_expert && y->n_experts < is->vram.n_transit; ++*next) {
        const bool above =
            is->cache != NULL && expert_cache_state(is->cache, layer, *next) != EXPERT_CACHE_ABSENT;
        if (above || expert_cache_state(is->experts->cache, layer, *next) != EXPERT_CACHE_READY)
            continue;
        (void)begin_copy(is, layer, *next, false,
                         tier_vram_transit_place(&is->vram, y->half, y->n_experts));
        y->experts[y->n_experts++] = *next;
    }
    tier_vram_transit_ready(&is->vram, y->half);
    y->begun = is->vram.begun;
}

/* The half that is in use is the second to become free. */
void engine_islands_ahead(struct engine_islands *is)
{
    uint32_t next = 0, layer = is->layer + 1;
    while (layer < is->n_layer && engine_islands_full(is, layer))
        layer++;
    if (layer == is->n_layer)
        return;
    is->early_layer = layer;
    for (unsigned i = 0; i < 2; i++) {
        is->early[i] = (struct engine_islands_early){.half = is->half ^ 1 ^ i};
        copy_early(is, &is->early[i], is->early_layer, &next);
    }
}

/* ---- outside of steps ---- */

enum err_code engine_islands_give_back(struct engine_islands *is, uint32_t n)
{
    enum err_code code = tier_vram_wait(&is->vram);
    land(is, is->vram.begun);
    if (code == ERR_OK)
        code = is->vram.ops->wait(is->vram.stream);
    for (uint32_t i = 0; i < n && code == ERR_OK && is->cache != NULL; i++) {
        const uint32_t chunk = expert_cache_close(is->cache);
        if (chunk == EXPERT_CACHE_NONE)
            break;
        tier_vram_give_back(&is->vram, chunk);
    }
    return code;
}

enum err_code engine_islands_take_again(struct engine_islands *is, uint32_t n, struct err *e)
{
    enum err_code code = ERR_OK;
    for (uint32_t i = 0; i < is->vram.chunks && n > 0 && is->cache != NULL; i++) {
        if (!expert_cache_is_closed(is->cache, i))
            continue;
        code = tier_vram_take_again(&is->vram, i, e);
        if (code != ERR_OK)
            break;
        expert_cache_open(is->cache, i);
        n--;
    }
    is->next = 0; /* an idle engine fills them */
    return code;
}

bool engine_islands_bring(struct engine_islands *is, uint32_t layer, uint32_t expert)
{
    uint64_t place;
    if (!reserve(is, layer, expert, &place))
        return false;
    begin_copy(is, layer, expert, true, place)->background = true;
    is->n_background++;
    return true;
}

bool engine_islands_room(const struct engine_islands *is, uint32_t layer)
{
    return has_room(is, layer);
}

enum err_code engine_islands_settle(struct engine_islands *is, bool wait)
{
    if (!wait) {
        settle(is);
        return ERR_OK;
    }
    const enum err_code code = tier_vram_wait(&is->vram);
    land(is, is->vram.begun);
    return code;
}

/* The layer that is the i-th to be filled. Filled ones are whole, for they need no word from the
 * host, and lie between the others as evenly as they can, so that the link works for these while
 * those are computed: steps of about the golden section of n that reach every layer. */
static uint32_t layer_to_fill(uint32_t i, uint32_t n)
{
    uint32_t step = (uint32_t)(0.618 * n + 0.5), a, b;
    for (step = step < 1 ? 1 : step;; step++) {
        for (a = n, b = step; b != 0;) {
            const uint32_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1)
            return (uint32_t)((uint64_t)i * step % n);
    }
}

/* Experts of one turn of a fill. */
struct turn {
    uint32_t n, layers[IDLE_COPIES], experts[IDLE_COPIES];
    bool fetched[IDLE_COPIES]; /* pinned by a read of this turn */
};

/* Chooses the next experts that have free islands, and has those read that RAM lacks. */
static struct turn choose(struct engine_islands *is)
{
    struct engine_experts *x = is->experts;
    struct turn t = {.n = 0};
    for (; is->next < x->n_experts && t.n < IDLE_COPIES; is->next++) {
        const uint32_t layer = layer_to_fill(is->next / is->n_expert, is->n_layer);
        const uint32_t expert = is->next % is->n_expert;
        if (expert_cache_state(is->cache, layer, expert) != EXPERT_CACHE_ABSENT ||
            !has_room(is, layer))
            continue;
        const bool absent = expert_cache_state(x->cache, layer, expert) == EXPERT_CACHE_ABSENT;
        if (absent && !engine_experts_fetch(x, layer, expert)) {
            if (t.n > 0 || expert_cache_count(x->cache).loading > 0)
                break;
            continue; /* no slot in one piece, as after a read that failed */
        }
        t.layers[t.n] = layer;
        t.experts[t.n] = expert;
        t.fetched[t.n++] = absent;
    }
    return t;
}

/* False: there is nothing left to fill. */
static bool fill_some(struct engine_islands *is, enum err_code *ret_code)
{
    struct engine_experts *x = is->experts;
    const struct turn t = choose(is);
    while (expert_cache_count(x->cache).loading > 0)
        engine_experts_land(x);
    for (uint32_t i = 0; i < t.n; i++) {
        uint64_t place;
        if (expert_cache_state(x->cache, t.layers[i], t.experts[i]) != EXPERT_CACHE_READY)
            continue; /* its read failed */
        if (reserve(is, t.layers[i], t.experts[i], &place))
            (void)begin_copy(is, t.layers[i], t.experts[i], true, place);
        if (t.fetched[i])
            expert_cache_unpin(x->cache, t.layers[i], t.experts[i]);
    }
    *ret_code = tier_vram_wait(&is->vram);
    land(is, is->vram.begun);
    return *ret_code == ERR_OK && is->next < x->n_experts;
}

bool engine_islands_idle(struct engine_islands *is, enum err_code *ret_code)
{
    *ret_code = ERR_OK;
    if (is->cache == NULL || is->next >= is->experts->n_experts)
        return false;
    is->experts->error.code = ERR_OK;
    const bool more = fill_some(is, ret_code);
    engine_experts_idle_warn(is->experts);
    return more;
}

enum err_code engine_islands_fill(struct engine_islands *is, const struct model_loading *loading,
                                  struct err *e)
{
    struct engine_experts *x = is->experts;
    enum err_code code = ERR_OK;
    x->error.code = ERR_OK;
    while (is->cache != NULL && is->next < x->n_experts) {
        if (loading->stopped != NULL && loading->stopped(loading->context))
            return err_set(e, ERR_CANCELLED, "loading was stopped");
        (void)fill_some(is, &code);
        if (code != ERR_OK)
            return err_set(e, code, "the GPU failed while experts were copied to it");
        if (x->error.code != ERR_OK)
            return err_set(e, x->error.code, "%s", x->error.text);
    }
    return ERR_OK;
}

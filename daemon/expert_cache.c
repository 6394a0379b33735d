#include "expert_cache.h"

#include <assert.h>
#include <math.h>
#include <stddef.h>

#include "alloc.h"
#include "expert_arena.h"
#include "expert_policy.h"

#define NONE UINT32_MAX

/* Reads under way that keep a disk busy. Beyond them, and beyond this share of the slots, a pass
 * takes no slot that is worth more than those it will set free itself. */
enum {
    MAX_DEPTH = 4,
    DEPTH_SHARE = 16
};

#define SLAB_GAIN \
    1.5f /* a slab changes its size for so much over its cost: what is missed is noisy */

struct expert {
    uint32_t slot; /* of the arena, unless ABSENT */
    uint16_t pins;
    uint8_t state; /* enum expert_cache_state */
};

/* The READY expert without pins of the lowest odds, once it has been looked for. */
struct layer {
    uint64_t bytes;   /* of an expert */
    uint32_t n_ready; /* READY experts */
    uint32_t class;   /* of the arena */
    uint32_t n_free;  /* READY experts without pins */
    uint32_t weakest; /* expert of the layer; NONE: not known */
    bool scored;
    float chance; /* of the weakest, while steps have chance_rows rows */
    uint32_t chance_rows;
};

/* What the evictions of a class have cost beyond the cheapest of the others, in bytes to be read
 * again. Once that is more than emptying a slab of theirs costs, the class gets it. */
struct size {
    float missed;
    float price; /* of a slab when one was last looked for */
};

struct expert_cache {
    uint32_t n_layer, n_expert;
    float keep;     /* of the chance of what is reserved without a pin */
    uint32_t depth; /* reads under way before a pass waits for its own slots */
    struct layer *layers;
    struct size *sizes;     /* [classes of the arena] */
    struct expert *experts; /* [n_layer][n_expert] */
    struct expert_arena arena;
    struct expert_policy policy;
    struct expert_cache_counts counts;
    float *unit_costs; /* [units of the arena] scratch of expert_cache_close */
};

static struct expert *at(const struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    assert(layer < c->n_layer && expert < c->n_expert);
    return &c->experts[(size_t)layer * c->n_expert + expert];
}

static bool evictable(const struct expert *x)
{
    return x->state == EXPERT_CACHE_READY && x->pins == 0;
}

static enum err_code check(const struct expert_cache_options *o, uint64_t *ret_largest,
                           struct err *e)
{
    uint64_t largest = 0;
    for (uint32_t l = 0; l < o->n_layer; l++) {
        assert(o->layer_bytes[l] > 0 && o->layer_bytes[l] % EXPERT_CACHE_ALIGN == 0);
        if (o->layer_bytes[l] > largest)
            largest = o->layer_bytes[l];
    }
    if (o->arena_bytes < largest)
        return err_set(e, ERR_LIMIT,
                       "expert cache: %llu bytes for experts, the largest one alone needs %llu",
                       (unsigned long long)o->arena_bytes, (unsigned long long)largest);
    *ret_largest = largest;
    return ERR_OK;
}

enum err_code expert_cache_new(const struct expert_cache_options *options,
                               struct expert_cache **ret, struct err *e)
{
    uint64_t largest = 0;
    enum err_code code = check(options, &largest, e);
    if (code != ERR_OK)
        return code;
    const uint32_t n = options->n_layer * options->n_expert;
    struct expert_cache *c = alloc_zero(ALLOC_MISC, 1, sizeof *c);
    if (c == NULL)
        return err_set(e, ERR_NOMEM, "expert cache: no memory");
    c->n_layer = options->n_layer;
    c->n_expert = options->n_expert;
    c->layers = alloc_zero(ALLOC_MISC, c->n_layer, sizeof *c->layers);
    c->experts = alloc_zero(ALLOC_MISC, n, sizeof *c->experts);
    c->sizes = alloc_zero(ALLOC_MISC, c->n_layer, sizeof *c->sizes);
    if (c->layers == NULL || c->experts == NULL || c->sizes == NULL)
        code = err_set(e, ERR_NOMEM, "expert cache: no memory for %u experts", n);
    if (code == ERR_OK)
        code = expert_arena_start(&c->arena, options->arena_bytes, options->layer_bytes, c->n_layer,
                                  c->n_expert, e);
    if (code == ERR_OK && options->unit_bytes != 0) {
        code = expert_arena_divide(&c->arena, options->unit_bytes, e);
        c->unit_costs = alloc_zero(ALLOC_MISC, c->arena.n_units, sizeof *c->unit_costs);
        if (code == ERR_OK && c->unit_costs == NULL)
            code = err_set(e, ERR_NOMEM, "expert cache: no memory for %u units", c->arena.n_units);
    }
    if (code == ERR_OK)
        code = expert_policy_start(&c->policy, c->n_layer, c->n_expert, options->n_used, e);
    if (code != ERR_OK) {
        expert_cache_free(c);
        return code;
    }
    for (uint32_t l = 0; l < c->n_layer; l++) {
        const uint64_t bytes = options->layer_bytes[l];
        c->layers[l] = (struct layer){
            .bytes = bytes, .class = expert_arena_class_of(&c->arena, bytes), .weakest = NONE};
    }
    const uint64_t depth = options->arena_bytes / largest / DEPTH_SHARE;
    c->keep = 1.0f / (1.0f + options->caution);
    c->depth = depth < 1 ? 1 : depth < MAX_DEPTH ? (uint32_t)depth : MAX_DEPTH;
    *ret = c;
    return ERR_OK;
}

void expert_cache_free(struct expert_cache *c)
{
    if (c == NULL)
        return;
    expert_policy_done(&c->policy);
    expert_arena_done(&c->arena);
    alloc_free(c->experts);
    alloc_free(c->layers);
    alloc_free(c->sizes);
    alloc_free(c->unit_costs);
    alloc_free(c);
}

void expert_cache_layer(struct expert_cache *c, uint32_t layer, uint32_t n_rows)
{
    assert(layer < c->n_layer && n_rows > 0);
    expert_policy_pass(&c->policy, layer, n_rows);
    c->layers[layer].scored = false;
}

static void pin(struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    struct expert *x = at(c, layer, expert);
    struct layer *l = &c->layers[layer];
    if (evictable(x)) {
        l->n_free--;
        if (l->weakest == expert)
            l->weakest = NONE;
    }
    assert(x->pins < UINT16_MAX);
    x->pins++;
}

/* The expert can be evicted from now on. */
static void loosen(struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    struct layer *l = &c->layers[layer];
    l->n_free++;
    if (!l->scored)
        return;
    const float *odds = expert_policy_odds(&c->policy, layer);
    if (l->weakest != NONE && odds[expert] < odds[l->weakest]) {
        l->weakest = expert;
        l->chance_rows = 0;
    }
}

enum expert_cache_state expert_cache_need(struct expert_cache *c, uint32_t layer, uint32_t expert,
                                          uint32_t rows)
{
    const enum expert_cache_state state = at(c, layer, expert)->state;
    expert_policy_use(&c->policy, layer, expert, rows);
    c->layers[layer].scored = false;
    if (state == EXPERT_CACHE_READY)
        c->counts.hits++;
    else
        c->counts.misses++;
    if (state != EXPERT_CACHE_ABSENT)
        pin(c, layer, expert);
    return state;
}

static void score(struct expert_cache *c, uint32_t layer)
{
    struct layer *l = &c->layers[layer];
    if (l->scored)
        return;
    expert_policy_score(&c->policy, layer);
    l->scored = true;
    l->weakest = NONE;
}

/* Finds the layer's weakest expert; there is one that can be evicted. */
static uint32_t weakest(struct expert_cache *c, uint32_t layer)
{
    struct layer *l = &c->layers[layer];
    const struct expert *x = at(c, layer, 0);
    score(c, layer);
    if (l->weakest != NONE)
        return l->weakest;
    const float *odds = expert_policy_odds(&c->policy, layer);
    uint32_t best = NONE;
    for (uint32_t i = 0; i < c->n_expert; i++)
        if (evictable(&x[i]) && (best == NONE || odds[i] < odds[best]))
            best = i;
    l->weakest = best;
    l->chance_rows = 0;
    return best;
}

static float worth(const struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    const float odds = expert_policy_odds(&c->policy, layer)[expert];
    return expert_policy_worth(&c->policy, expert_policy_ahead(&c->policy, layer),
                               expert_policy_chance(&c->policy, odds));
}

/* Of the layer's weakest expert, which is known. */
static float weakest_worth(struct expert_cache *c, uint32_t layer)
{
    struct layer *l = &c->layers[layer];
    if (l->chance_rows != c->policy.n_rows) {
        const float odds = expert_policy_odds(&c->policy, layer)[l->weakest];
        l->chance = expert_policy_chance(&c->policy, odds);
        l->chance_rows = c->policy.n_rows;
    }
    return expert_policy_worth(&c->policy, expert_policy_ahead(&c->policy, layer), l->chance);
}

static void drop(struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    struct expert *x = at(c, layer, expert);
    struct layer *l = &c->layers[layer];
    expert_arena_return(&c->arena, x->slot);
    x->state = EXPERT_CACHE_ABSENT;
    l->n_free--;
    if (l->weakest == expert)
        l->weakest = NONE;
    l->n_ready--;
    c->counts.resident--;
    c->counts.used_bytes -= l->bytes;
}

static void evict(struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    drop(c, layer, expert);
    c->counts.evictions++;
}

/* The expert that is worth least, of a class and of the others; layer NONE: there is none. */
struct victims {
    uint32_t layer;
    float worth, others_worth; /* others_worth: INFINITY if there is none */
};

static struct victims find_victims(struct expert_cache *c, uint32_t class)
{
    struct victims found = {.layer = NONE, .worth = INFINITY, .others_worth = INFINITY};
    for (uint32_t l = 0; l < c->n_layer; l++) {
        if (c->layers[l].n_free == 0)
            continue;
        (void)weakest(c, l);
        const float w = weakest_worth(c, l);
        if (c->layers[l].class != class) {
            found.others_worth = fminf(found.others_worth, w);
        } else if (w < found.worth) {
            found.layer = l;
            found.worth = w;
        }
    }
    return found;
}

/* Bytes that would have to be read again if the slab were emptied; INFINITY: it cannot be. */
static float slab_cost(struct expert_cache *c, uint32_t slab)
{
    const struct expert_arena_slab *x = &c->arena.slabs[slab];
    const struct expert_arena_slot *slots = &c->arena.slots[(size_t)slab * c->arena.stride];
    float cost = 0.0f;
    for (uint32_t i = 0; i < x->n_slots; i++) {
        const uint32_t owner = slots[i].owner;
        if (owner == NONE)
            continue;
        if (!evictable(&c->experts[owner]))
            return INFINITY;
        const uint32_t layer = owner / c->n_expert;
        score(c, layer);
        cost += fmaxf(worth(c, layer, owner % c->n_expert), 0.0f) * (float)c->layers[layer].bytes;
    }
    return cost;
}

/* Of the slabs of other classes that have room for the class, or of those that are its own, the one
 * that costs least to empty for an expert that it then takes; *ret_cost, of all of it, is INFINITY
 * if none can be. */
static uint32_t cheapest_slab(struct expert_cache *c, uint32_t class, bool own, float *ret_cost)
{
    uint32_t best = NONE;
    float best_each = INFINITY;
    *ret_cost = INFINITY;
    for (uint32_t n = 0; n < c->arena.n_slabs; n++) {
        const struct expert_arena_slab *x = &c->arena.slabs[n];
        if (x->class == NONE || x->class == class || (own && x->own != class) ||
            !expert_arena_serves(&c->arena, n, class))
            continue;
        const float cost = slab_cost(c, n),
                    each = cost / (float)(x->bytes / c->arena.classes[class].bytes);
        if (each < best_each) {
            best = n;
            best_each = each;
            *ret_cost = cost;
        }
    }
    return best;
}

static void empty_slab(struct expert_cache *c, uint32_t slab)
{
    const struct expert_arena_slot *slots = &c->arena.slots[(size_t)slab * c->arena.stride];
    const uint32_t n = c->arena.slabs[slab].n_slots;
    for (uint32_t i = 0; i < n; i++)
        if (slots[i].owner != NONE)
            evict(c, slots[i].owner / c->n_expert, slots[i].owner % c->n_expert);
}

/* Empties a slab that was cut for the class and serves another one, which fills it badly, if what
 * is there is worth less than what the class would evict for as many. */
static bool take_own_slab(struct expert_cache *c, uint32_t class, const struct victims *v)
{
    float cost;
    if (c->arena.n_strange == 0 || v->layer == NONE)
        return false;
    const uint32_t slab = cheapest_slab(c, class, true, &cost);
    if (slab == NONE || cost >= v->worth * (float)c->arena.slabs[slab].bytes)
        return false;
    empty_slab(c, slab);
    return true;
}

/* Empties a slab of another class if the class has none to evict, or if its evictions have missed
 * as much as that costs. */
static bool take_slab(struct expert_cache *c, uint32_t class, const struct victims *v, float limit)
{
    struct size *s = &c->sizes[class];
    const float bytes = (float)c->arena.classes[class].bytes;
    float cost;
    if (c->arena.n_classes == 1 || c->arena.fixed)
        return false;
    if (v->layer != NONE) {
        if (v->others_worth == INFINITY)
            return false;
        s->missed = fmaxf(s->missed + (v->worth - v->others_worth) * bytes, 0.0f);
        if (s->missed <= s->price)
            return false;
        limit = s->missed / SLAB_GAIN;
    } else {
        limit *= bytes;
    }
    const uint32_t slab = cheapest_slab(c, class, false, &cost);
    s->price = SLAB_GAIN * (slab != NONE ? cost : s->missed);
    if (slab == NONE || cost >= limit)
        return false;
    empty_slab(c, slab);
    *s = (struct size){.missed = 0.0f};
    return true;
}

/* Frees a slot of the class, if what goes for it is worth less than `limit`. */
static bool make_room(struct expert_cache *c, uint32_t class, float limit)
{
    const struct victims v = find_victims(c, class);
    if (v.layer != NONE && v.worth >= limit)
        return false;
    if (take_own_slab(c, class, &v) || take_slab(c, class, &v, limit))
        return true;
    if (v.layer == NONE)
        return false;
    expert_policy_evicted(&c->policy, expert_policy_ahead(&c->policy, v.layer),
                          c->layers[v.layer].chance);
    evict(c, v.layer, c->layers[v.layer].weakest);
    return true;
}

/* What the least of the layer's pinned experts is worth once it is free; INFINITY: none is. */
static float worth_soon(struct expert_cache *c, uint32_t layer)
{
    uint32_t least = NONE;
    score(c, layer);
    const float *odds = expert_policy_odds(&c->policy, layer);
    for (uint32_t i = 0; i < c->n_expert; i++)
        if (at(c, layer, i)->pins > 0 && (least == NONE || odds[i] < odds[least]))
            least = i;
    return least == NONE ? INFINITY : worth(c, layer, least);
}

/* What an expert is worth when the pass that it is read ahead for is over. What is worth more than
 * that would be read again for nothing. */
static float worth_later(struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    score(c, layer);
    const float odds = expert_policy_odds(&c->policy, layer)[expert];
    const float chance = expert_policy_chance(&c->policy, odds);
    return expert_policy_worth(&c->policy, c->n_layer, c->keep * chance);
}

bool expert_cache_reserve(struct expert_cache *c, uint32_t layer, uint32_t expert, bool pin_it,
                          uint64_t *ret_place)
{
    struct expert *x = at(c, layer, expert);
    const uint32_t class = c->layers[layer].class, owner = layer * c->n_expert + expert;
    assert(x->state == EXPERT_CACHE_ABSENT);
    uint32_t slot = expert_arena_take(&c->arena, class, owner);
    if (slot == EXPERT_ARENA_NONE) {
        float limit = INFINITY;
        if (!pin_it)
            limit = worth_later(c, layer, expert);
        else if (c->counts.loading >= c->depth)
            limit = worth_soon(c, layer);
        if (!make_room(c, class, limit))
            return false;
        slot = expert_arena_take(&c->arena, class, owner);
        assert(slot != EXPERT_ARENA_NONE);
    }
    *x = (struct expert){.slot = slot, .pins = pin_it, .state = EXPERT_CACHE_LOADING};
    c->counts.loading++;
    c->counts.used_bytes += c->layers[layer].bytes;
    *ret_place = expert_arena_place(&c->arena, slot);
    return true;
}

void expert_cache_arrived(struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    struct expert *x = at(c, layer, expert);
    assert(x->state == EXPERT_CACHE_LOADING);
    x->state = EXPERT_CACHE_READY;
    c->counts.loading--;
    c->counts.resident++;
    c->layers[layer].n_ready++;
    if (x->pins == 0)
        loosen(c, layer, expert);
}

void expert_cache_failed(struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    struct expert *x = at(c, layer, expert);
    assert(x->state == EXPERT_CACHE_LOADING);
    expert_arena_return(&c->arena, x->slot);
    *x = (struct expert){.state = EXPERT_CACHE_ABSENT};
    c->counts.loading--;
    c->counts.used_bytes -= c->layers[layer].bytes;
}

void expert_cache_pin(struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    assert(at(c, layer, expert)->state == EXPERT_CACHE_READY);
    pin(c, layer, expert);
}

void expert_cache_unpin(struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    struct expert *x = at(c, layer, expert);
    assert(x->pins > 0);
    if (--x->pins == 0 && x->state == EXPERT_CACHE_READY)
        loosen(c, layer, expert);
}

bool expert_cache_forget(struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    const struct expert *x = at(c, layer, expert);
    if (x->state == EXPERT_CACHE_ABSENT)
        return true;
    if (!evictable(x))
        return false;
    drop(c, layer, expert);
    return true;
}

enum expert_cache_state expert_cache_state(const struct expert_cache *c, uint32_t layer,
                                           uint32_t expert)
{
    return (enum expert_cache_state)at(c, layer, expert)->state;
}

uint64_t expert_cache_place(const struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    const struct expert *x = at(c, layer, expert);
    assert(x->state != EXPERT_CACHE_ABSENT);
    return expert_arena_place(&c->arena, x->slot);
}

bool expert_cache_has_room(const struct expert_cache *c, uint32_t layer)
{
    return expert_arena_has(&c->arena, c->layers[layer].class);
}

/* What closing each unit costs: uses of its experts to be expected of a pass through each layer;
 * INFINITY where one has to stay. */
static void price_units(struct expert_cache *c)
{
    for (uint32_t u = 0; u < c->arena.n_units; u++)
        c->unit_costs[u] = c->arena.closed[u] ? INFINITY : 0.0f;
    for (uint32_t i = 0; i < c->n_layer * c->n_expert; i++) {
        const struct expert *x = &c->experts[i];
        const uint32_t layer = i / c->n_expert;
        uint32_t first = 0;
        if (x->state == EXPERT_CACHE_ABSENT)
            continue;
        const uint32_t n = expert_arena_units(&c->arena, x->slot, &first);
        if (n == 0)
            continue;
        score(c, layer);
        const float odds = expert_policy_odds(&c->policy, layer)[i % c->n_expert];
        const float cost = evictable(x) ? expert_policy_chance(&c->policy, odds) : INFINITY;
        for (uint32_t u = first; u < first + n; u++)
            c->unit_costs[u] += cost;
    }
}

uint32_t expert_cache_close(struct expert_cache *c)
{
    uint32_t best = NONE;
    price_units(c);
    for (uint32_t u = c->arena.n_units; u-- > 0;)
        if (c->unit_costs[u] < INFINITY && (best == NONE || c->unit_costs[u] < c->unit_costs[best]))
            best = u;
    if (best == NONE)
        return EXPERT_CACHE_NONE;
    for (uint32_t i = 0; i < c->n_layer * c->n_expert; i++) {
        uint32_t first = 0;
        if (c->experts[i].state == EXPERT_CACHE_ABSENT)
            continue;
        const uint32_t n = expert_arena_units(&c->arena, c->experts[i].slot, &first);
        if (n > 0 && best - first < n)
            drop(c, i / c->n_expert, i % c->n_expert);
    }
    expert_arena_close(&c->arena, best);
    return best;
}

void expert_cache_open(struct expert_cache *c, uint32_t unit)
{
    expert_arena_open(&c->arena, unit);
}

bool expert_cache_is_closed(const struct expert_cache *c, uint32_t unit)
{
    return c->arena.closed[unit];
}

uint32_t expert_cache_resident(const struct expert_cache *c, uint32_t layer)
{
    return c->layers[layer].n_ready;
}

struct expert_cache_counts expert_cache_count(const struct expert_cache *c)
{
    return c->counts;
}

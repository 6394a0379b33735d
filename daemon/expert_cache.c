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

struct expert {
    uint32_t extent; /* of the arena, unless ABSENT */
    uint16_t pins;
    uint8_t state; /* enum expert_cache_state */
};

/* The READY expert without pins of the lowest odds, once it has been looked for. */
struct layer {
    uint64_t bytes;   /* of an expert */
    uint32_t n_ready; /* READY experts */
    uint32_t n_free;  /* READY experts without pins */
    uint32_t weakest; /* expert of the layer; NONE: not known */
    bool scored;
    float chance; /* of the weakest, while steps have chance_rows rows */
    uint32_t chance_rows;
};

struct expert_cache {
    uint32_t n_layer, n_expert;
    uint32_t depth; /* reads under way before a pass waits for its own slots */
    bool mixed;     /* experts of more than one size */
    struct layer *layers;
    struct expert *experts; /* [n_layer][n_expert] */
    struct expert_arena arena;
    struct expert_policy policy;
    struct expert_cache_counts counts;
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
    if (c->layers == NULL || c->experts == NULL)
        code = err_set(e, ERR_NOMEM, "expert cache: no memory for %u experts", n);
    if (code == ERR_OK)
        code = expert_arena_start(&c->arena, options->arena_bytes, n, e);
    if (code == ERR_OK)
        code = expert_policy_start(&c->policy, c->n_layer, c->n_expert, options->n_used, e);
    if (code != ERR_OK) {
        expert_cache_free(c);
        return code;
    }
    for (uint32_t l = 0; l < c->n_layer; l++) {
        c->layers[l] = (struct layer){.bytes = options->layer_bytes[l], .weakest = NONE};
        c->mixed |= options->layer_bytes[l] != largest;
    }
    const uint64_t depth = options->arena_bytes / largest / DEPTH_SHARE;
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
    return expert_policy_worth(&c->policy, layer, expert_policy_chance(&c->policy, odds));
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
    return expert_policy_worth(&c->policy, layer, l->chance);
}

/* Evicts; gives the free extent that its bytes are in now. */
static uint32_t drop(struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    struct expert *x = at(c, layer, expert);
    struct layer *l = &c->layers[layer];
    const uint32_t extent = expert_arena_return(&c->arena, x->extent);
    x->state = EXPERT_CACHE_ABSENT;
    l->n_free--;
    if (l->weakest == expert)
        l->weakest = NONE;
    l->n_ready--;
    c->counts.evictions++;
    c->counts.resident--;
    return extent;
}

/* One expert whose going makes room: the least worth is lost, counting the bytes that would lie
 * idle beside the newcomer at the lowest worth there is. NONE: no single one suffices. */
static uint32_t victim_alone(struct expert_cache *c, uint64_t bytes, float *ret_cost)
{
    float lowest = 0.0f, best_cost = 0.0f;
    uint32_t best = NONE;
    for (uint32_t l = 0; c->mixed && l < c->n_layer; l++) {
        if (c->layers[l].n_free == 0)
            continue;
        (void)weakest(c, l);
        const float w = weakest_worth(c, l);
        if (lowest == 0.0f || w < lowest)
            lowest = w;
    }
    for (uint32_t l = 0; l < c->n_layer; l++) {
        const struct layer *y = &c->layers[l];
        if (y->n_free == 0)
            continue;
        const uint32_t i = weakest(c, l);
        if (c->mixed && expert_arena_span(&c->arena, at(c, l, i)->extent) < bytes)
            continue;
        const uint64_t idle = y->bytes > bytes ? y->bytes - bytes : 0;
        const float cost = weakest_worth(c, l) * (float)y->bytes + lowest * (float)idle;
        if (best == NONE || cost < best_cost) {
            best = l * c->n_expert + i;
            best_cost = cost;
        }
    }
    *ret_cost = best_cost;
    return best;
}

/* Extents in a row that together make room, at the least loss of worth. */
struct window {
    uint32_t first, last; /* extents; first NONE: there is none */
    float cost;
};

static struct window victim_window(struct expert_cache *c, uint64_t bytes)
{
    const struct expert_arena_extent *extents = c->arena.extents;
    struct window best = {.first = NONE};
    uint32_t first = c->arena.first;
    uint64_t sum = 0;
    double cost = 0.0;
    for (uint32_t n = c->arena.first; n != NONE; n = extents[n].after) {
        const uint32_t owner = extents[n].owner;
        if (owner != NONE && !evictable(&c->experts[owner])) {
            first = extents[n].after;
            sum = 0;
            cost = 0.0;
            continue;
        }
        sum += extents[n].bytes;
        if (owner != NONE)
            cost += (double)worth(c, owner / c->n_expert, owner % c->n_expert) *
                    (double)extents[n].bytes;
        while (sum - extents[first].bytes >= bytes) {
            const uint32_t gone = extents[first].owner;
            sum -= extents[first].bytes;
            if (gone != NONE)
                cost -= (double)worth(c, gone / c->n_expert, gone % c->n_expert) *
                        (double)extents[first].bytes;
            first = extents[first].after;
        }
        if (sum >= bytes && (best.first == NONE || (float)cost < best.cost))
            best = (struct window){.first = first, .last = n, .cost = (float)cost};
    }
    return best;
}

static void drop_window(struct expert_cache *c, struct window w)
{
    const struct expert_arena_extent *extents = c->arena.extents;
    const uint64_t end = extents[w.last].place + extents[w.last].bytes;
    for (uint32_t n = w.first; n != NONE && extents[n].place < end; n = extents[n].after) {
        const uint32_t owner = extents[n].owner;
        if (owner != NONE)
            n = drop(c, owner / c->n_expert, owner % c->n_expert);
    }
}

/* Evicts until `bytes` are free in one piece, if what goes is worth less than `limit` in sum. */
static bool make_room(struct expert_cache *c, uint64_t bytes, float limit)
{
    float cost;
    const uint32_t alone = victim_alone(c, bytes, &cost);
    if (alone != NONE) {
        if (cost >= limit)
            return false;
        (void)drop(c, alone / c->n_expert, alone % c->n_expert);
        return true;
    }
    if (!c->mixed)
        return false;
    const struct window w = victim_window(c, bytes);
    if (w.first == NONE || w.cost >= limit)
        return false;
    drop_window(c, w);
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
    return expert_policy_chance(&c->policy, odds) / (float)c->n_layer;
}

bool expert_cache_reserve(struct expert_cache *c, uint32_t layer, uint32_t expert, bool pin_it,
                          uint64_t *ret_place)
{
    struct expert *x = at(c, layer, expert);
    const uint64_t bytes = c->layers[layer].bytes;
    const uint32_t owner = layer * c->n_expert + expert;
    assert(x->state == EXPERT_CACHE_ABSENT);
    uint32_t extent = expert_arena_take(&c->arena, bytes, owner);
    if (extent == EXPERT_ARENA_NONE) {
        float limit = INFINITY;
        if (!pin_it)
            limit = worth_later(c, layer, expert);
        else if (c->counts.loading >= c->depth)
            limit = worth_soon(c, layer);
        if (!make_room(c, bytes, limit * (float)bytes))
            return false;
        extent = expert_arena_take(&c->arena, bytes, owner);
        assert(extent != EXPERT_ARENA_NONE);
    }
    *x = (struct expert){.extent = extent, .pins = pin_it, .state = EXPERT_CACHE_LOADING};
    c->counts.loading++;
    *ret_place = c->arena.extents[extent].place;
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
    (void)expert_arena_return(&c->arena, x->extent);
    *x = (struct expert){.state = EXPERT_CACHE_ABSENT};
    c->counts.loading--;
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

enum expert_cache_state expert_cache_state(const struct expert_cache *c, uint32_t layer,
                                           uint32_t expert)
{
    return (enum expert_cache_state)at(c, layer, expert)->state;
}

uint64_t expert_cache_place(const struct expert_cache *c, uint32_t layer, uint32_t expert)
{
    const struct expert *x = at(c, layer, expert);
    assert(x->state != EXPERT_CACHE_ABSENT);
    return c->arena.extents[x->extent].place;
}

uint32_t expert_cache_resident(const struct expert_cache *c, uint32_t layer)
{
    return c->layers[layer].n_ready;
}

struct expert_cache_counts expert_cache_count(const struct expert_cache *c)
{
    struct expert_cache_counts counts = c->counts;
    counts.used_bytes = c->arena.used_bytes;
    return counts;
}

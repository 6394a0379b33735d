#include "sim_replay.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "alloc.h"
#include "expert_cache.h"

enum {
    IN_FLIGHT = 16 /* reads under way at most, as the engine's */
};

/* ---- policies by a key: the resident expert of the smallest one goes
 * ------------------------- */

struct sim {
    const struct sim_trace *trace;
    enum sim_replay_kind kind;
    double half_life;
    uint64_t capacity, used;
    double *keys;    /* [experts of all layers] */
    uint32_t *slots; /* [experts] place in the heap + 1; 0: absent */
    uint32_t *heap;
    uint32_t n;
    uint64_t *next; /* BELADY: [needs] next need of the same expert */
    bool *listed;   /* STATIC */
};

static void swap(struct sim *s, uint32_t a, uint32_t b)
{
    const uint32_t x = s->heap[a];
    s->heap[a] = s->heap[b];
    s->heap[b] = x;
    s->slots[s->heap[a]] = a + 1;
    s->slots[s->heap[b]] = b + 1;
}

static void sink(struct sim *s, uint32_t at)
{
    for (;;) {
        uint32_t least = at;
        for (uint32_t child = 2 * at + 1; child <= 2 * at + 2 && child < s->n; child++)
            if (s->keys[s->heap[child]] < s->keys[s->heap[least]])
                least = child;
        if (least == at)
            return;
        swap(s, at, least);
        at = least;
    }
}

static void rise(struct sim *s, uint32_t at)
{
    while (at > 0 && s->keys[s->heap[at]] < s->keys[s->heap[(at - 1) / 2]]) {
        swap(s, at, (at - 1) / 2);
        at = (at - 1) / 2;
    }
}

static uint64_t bytes_of(const struct sim *s, uint32_t x)
{
    return s->trace->layer_bytes[x / s->trace->n_expert];
}

static void evict(struct sim *s)
{
    const uint32_t x = s->heap[0];
    s->used -= bytes_of(s, x);
    swap(s, 0, --s->n);
    s->slots[x] = 0;
    if (s->n > 0)
        sink(s, 0);
}

/* Room is there or made, of what has smaller keys than `below`. */
static void insert(struct sim *s, uint32_t x, double below)
{
    const uint64_t bytes = bytes_of(s, x);
    if (bytes > s->capacity)
        return;
    while (s->capacity - s->used < bytes) {
        if (s->keys[s->heap[0]] >= below)
            return;
        evict(s);
    }
    s->used += bytes;
    s->heap[s->n] = x;
    s->slots[x] = s->n + 1;
    rise(s, s->n++);
}

/* log2(2^a + 2^b) */
static double add_log2(double a, double b)
{
    const double high = a > b ? a : b, low = a > b ? b : a;
    return high + log2(1.0 + exp2(low - high));
}

/* Key of an expert after need number n, in the pass `pass`. */
static double key(const struct sim *s, uint32_t x, uint64_t n, double tokens)
{
    switch (s->kind) {
    case SIM_REPLAY_LFU:
        return floor(s->keys[x]) + 1.0 + (double)n / (double)(s->trace->n_needs + 1);
    case SIM_REPLAY_DECAY:
        return add_log2(s->keys[x], tokens / s->half_life);
    case SIM_REPLAY_BELADY:
        return -(double)s->next[n];
    default:
        return (double)n;
    }
}

static void use(struct sim *s, uint32_t x, uint64_t n, double tokens, struct sim_replay_result *ret)
{
    const bool hit = s->slots[x] > 0;
    ret->needs++;
    ret->hits += hit;
    ret->read_bytes += hit ? 0 : bytes_of(s, x);
    s->keys[x] = key(s, x, n, tokens);
    if (s->kind == SIM_REPLAY_STATIC && !s->listed[x])
        return;
    if (!hit) {
        insert(s, x, s->kind == SIM_REPLAY_BELADY ? s->keys[x] : INFINITY);
        return;
    }
    sink(s, s->slots[x] - 1);
    rise(s, s->slots[x] - 1);
}

static void look_ahead(struct sim *s, uint32_t n_all)
{
    const struct sim_trace *t = s->trace;
    for (uint32_t x = 0; x < n_all; x++)
        s->keys[x] = INFINITY;
    for (uint64_t p = (uint64_t)t->n_steps * t->n_layer; p-- > 0;)
        for (uint64_t i = t->first[p + 1]; i-- > t->first[p];) {
            const uint32_t x = (uint32_t)(p % t->n_layer) * t->n_expert + t->needs[i].expert;
            s->next[i] = s->keys[x] < INFINITY ? (uint64_t)s->keys[x] : t->n_needs;
            s->keys[x] = (double)i;
        }
}

/* The most needed experts, as many as fit; needs times bytes over bytes is
 * needs. */
static void make_list(struct sim *s, uint32_t n_all)
{
    const struct sim_trace *t = s->trace;
    uint64_t free_bytes = s->capacity;
    for (uint64_t p = 0; p < (uint64_t)t->n_steps * t->n_layer; p++)
        for (uint64_t i = t->first[p]; i < t->first[p + 1]; i++)
            s->keys[(uint32_t)(p % t->n_layer) * t->n_expert + t->needs[i].expert] -= 1.0;
    for (uint32_t x = 0; x < n_all; x++) {
        s->heap[s->n] = x;
        s->slots[x] = s->n + 1;
        rise(s, s->n++);
    }
    while (s->n > 0) {
        const uint32_t x = s->heap[0];
        if (bytes_of(s, x) <= free_bytes) {
            free_bytes -= bytes_of(s, x);
            s->listed[x] = true;
        }
        swap(s, 0, --s->n);
        s->slots[x] = 0;
        sink(s, 0);
    }
}

static enum err_code run_keys(struct sim *s, struct sim_replay_result *ret, struct err *e)
{
    const struct sim_trace *t = s->trace;
    const uint32_t n_all = t->n_layer * t->n_expert;
    double tokens = 0;
    s->keys = alloc_zero(ALLOC_MISC, n_all, sizeof *s->keys);
    s->slots = alloc_zero(ALLOC_MISC, n_all, sizeof *s->slots);
    s->heap = alloc_zero(ALLOC_MISC, n_all, sizeof *s->heap);
    s->next = alloc_zero(ALLOC_MISC, t->n_needs, sizeof *s->next);
    s->listed = alloc_zero(ALLOC_MISC, n_all, sizeof *s->listed);
    if (s->keys == NULL || s->slots == NULL || s->heap == NULL || s->next == NULL ||
        s->listed == NULL)
        return err_set(e, ERR_NOMEM, "no memory to replay %u experts", n_all);
    if (s->kind == SIM_REPLAY_BELADY)
        look_ahead(s, n_all);
    if (s->kind == SIM_REPLAY_STATIC)
        make_list(s, n_all);
    for (uint32_t x = 0; x < n_all && s->kind == SIM_REPLAY_DECAY; x++)
        s->keys[x] = -INFINITY;
    for (uint32_t step = 0; step < t->n_steps; step++) {
        for (uint32_t l = 0; l < t->n_layer; l++) {
            const uint64_t p = (uint64_t)step * t->n_layer + l;
            for (uint64_t i = t->first[p]; i < t->first[p + 1]; i++)
                use(s, l * t->n_expert + t->needs[i].expert, i, tokens, ret);
        }
        tokens += t->step_rows[step];
    }
    return ERR_OK;
}

/* ---- the real cache
 * -------------------------------------------------------------------------- */

struct pass {
    const struct sim_trace *trace;
    struct expert_cache *cache;
    uint32_t layer;
    uint32_t missing[ROUTE_TRACE_MAX_EXPERTS], hit[ROUTE_TRACE_MAX_EXPERTS];
    bool waits[ROUTE_TRACE_MAX_EXPERTS]; /* needed and under way */
    uint32_t n_missing, n_hit, n_waiting;
    uint32_t next_ahead;              /* expert of the next layer; n_expert: nothing is read
                          ahead */
    uint32_t open[IN_FLIGHT], n_open; /* reads under way, oldest first: experts of all layers */
    uint64_t read_bytes;
};

static void ask(struct pass *p, const struct sim_need *needs, uint64_t n)
{
    const uint32_t n_expert = p->trace->n_expert;
    p->n_missing = p->n_hit = p->n_waiting = 0;
    memset(p->waits, 0, sizeof p->waits);
    for (uint64_t i = 0; i < n; i++) {
        const uint16_t expert = needs[i].expert;
        switch (expert_cache_need(p->cache, p->layer, expert, needs[i].rows)) {
        case EXPERT_CACHE_READY:
            p->hit[p->n_hit++] = expert;
            break;
        case EXPERT_CACHE_LOADING:
            p->waits[expert] = true;
            p->n_waiting++;
            break;
        case EXPERT_CACHE_ABSENT:
            p->missing[p->n_missing++] = expert;
            break;
        }
    }
    /* As the engine does: where nearly all are needed, so they will be in the
   * next layer. */
    p->next_ahead = p->layer + 1 < p->trace->n_layer && n * 10 >= n_expert * 9ull ? 0 : n_expert;
}

static bool begin(struct pass *p, uint32_t layer, uint32_t expert, bool pin)
{
    uint64_t place;
    if (p->n_open == IN_FLIGHT || !expert_cache_reserve(p->cache, layer, expert, pin, &place))
        return false;
    p->open[p->n_open++] = layer * p->trace->n_expert + expert;
    p->read_bytes += p->trace->layer_bytes[layer];
    return true;
}

static void begin_ahead(struct pass *p)
{
    for (; p->next_ahead < p->trace->n_expert; p->next_ahead++)
        if (expert_cache_state(p->cache, p->layer + 1, p->next_ahead) == EXPERT_CACHE_ABSENT &&
            !begin(p, p->layer + 1, p->next_ahead, false))
            return;
}

/* The oldest read ends; what waits for it is computed. */
static void end_one(struct pass *p)
{
    const uint32_t layer = p->open[0] / p->trace->n_expert,
                   expert = p->open[0] % p->trace->n_expert;
    memmove(p->open, p->open + 1, --p->n_open * sizeof *p->open);
    expert_cache_arrived(p->cache, layer, expert);
    if (layer != p->layer || !p->waits[expert])
        return;
    expert_cache_unpin(p->cache, layer, expert);
    p->waits[expert] = false;
    p->n_waiting--;
}

/* Reads begin while there is room, then the hits are computed, then each read
 * that ends makes way for the next. */
static void fetch(struct pass *p)
{
    uint32_t asked = 0;
    do {
        while (asked < p->n_missing && begin(p, p->layer, p->missing[asked], true)) {
            p->waits[p->missing[asked++]] = true;
            p->n_waiting++;
        }
        if (asked == p->n_missing)
            begin_ahead(p);
        while (p->n_hit > 0)
            expert_cache_unpin(p->cache, p->layer, p->hit[--p->n_hit]);
        if (p->n_open > 0 && (p->n_waiting > 0 || asked < p->n_missing))
            end_one(p);
    } while (p->n_waiting > 0 || asked < p->n_missing);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static enum err_code run_ours(const struct sim_trace *t, uint64_t capacity,
                              struct sim_replay_result *ret, struct err *e)
{
    const struct expert_cache_options options = {.n_layer = t->n_layer,
                                                 .n_expert = t->n_expert,
                                                 .n_used = t->n_used,
                                                 .layer_bytes = t->layer_bytes,
                                                 .arena_bytes = capacity / EXPERT_CACHE_ALIGN *
                                                                EXPERT_CACHE_ALIGN};
    struct pass pass = {.trace = t};
    const enum err_code code = expert_cache_new(&options, &pass.cache, e);
    if (code != ERR_OK)
        return code;
    const double start = now();
    for (uint64_t p = 0; p < (uint64_t)t->n_steps * t->n_layer; p++) {
        pass.layer = (uint32_t)(p % t->n_layer);
        expert_cache_layer(pass.cache, pass.layer, t->step_rows[p / t->n_layer]);
        ask(&pass, t->needs + t->first[p], t->first[p + 1] - t->first[p]);
        fetch(&pass);
    }
    ret->seconds = now() - start;
    const struct expert_cache_counts counts = expert_cache_count(pass.cache);
    ret->read_bytes = pass.read_bytes;
    ret->hits = counts.hits;
    ret->needs = counts.hits + counts.misses;
    expert_cache_free(pass.cache);
    return ERR_OK;
}

enum err_code sim_replay_run(const struct sim_trace *t, enum sim_replay_kind kind, double half_life,
                             uint64_t capacity, struct sim_replay_result *ret, struct err *e)
{
    struct sim_replay_result result = {.hits = 0};
    struct sim s = {.trace = t, .kind = kind, .half_life = half_life, .capacity = capacity};
    const enum err_code code =
        kind == SIM_REPLAY_OURS ? run_ours(t, capacity, &result, e) : run_keys(&s, &result, e);
    alloc_free(s.keys);
    alloc_free(s.slots);
    alloc_free(s.heap);
    alloc_free(s.next);
    alloc_free(s.listed);
    if (code == ERR_OK)
        *ret = result;
    return code;
}

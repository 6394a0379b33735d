#include "expert_arena.h"

#include <assert.h>

#include "alloc.h"

#define NONE EXPERT_ARENA_NONE

enum {
    LEAST_SLABS = 5,  /* for each class, so that they can share the arena */
    MOST_LARGEST = 64 /* experts of the largest class in a slab */
};

/* ---- lists of slabs ------------------------------------------------------------------------- */

static void list_add(struct expert_arena *a, uint32_t *first, uint32_t n)
{
    a->slabs[n].before = NONE;
    a->slabs[n].after = *first;
    if (*first != NONE)
        a->slabs[*first].before = n;
    *first = n;
}

static void list_remove(struct expert_arena *a, uint32_t *first, uint32_t n)
{
    const struct expert_arena_slab *x = &a->slabs[n];
    if (x->after != NONE)
        a->slabs[x->after].before = x->before;
    if (x->before != NONE)
        a->slabs[x->before].after = x->after;
    else
        *first = x->after;
}

/* Units of n bytes from `place` on. */
static uint32_t units_of(const struct expert_arena *a, uint64_t place, uint64_t n,
                         uint32_t *ret_first)
{
    if (a->n_units == 0)
        return 0;
    const uint64_t first = place / a->unit_bytes, last = (place + n - 1) / a->unit_bytes;
    if (first >= a->n_units)
        return 0;
    *ret_first = (uint32_t)first;
    return (uint32_t)((last < a->n_units ? last + 1 : a->n_units) - first);
}

static bool is_open(const struct expert_arena *a, uint64_t place, uint64_t n)
{
    uint32_t first = 0;
    const uint32_t units = units_of(a, place, n, &first);
    for (uint32_t u = 0; u < units; u++)
        if (a->closed[first + u])
            return false;
    return true;
}

/* Puts the slab's slots that are open and nobody's on its list of free ones, in order. */
static void list_free(struct expert_arena *a, uint32_t n)
{
    struct expert_arena_slab *x = &a->slabs[n];
    const uint64_t bytes = a->classes[x->class].bytes;
    x->free = NONE;
    for (uint32_t i = x->n_slots; i-- > 0;) {
        struct expert_arena_slot *slot = &a->slots[n * a->stride + i];
        if (slot->owner != NONE || !is_open(a, x->place + i * bytes, bytes))
            continue;
        slot->after = x->free;
        x->free = n * a->stride + i;
    }
}

static bool is_strange(const struct expert_arena_slab *x)
{
    return x->class != NONE && x->own != NONE && x->class != x->own;
}

/* The empty slab serves the class from now on. */
static void dedicate(struct expert_arena *a, uint32_t n, uint32_t class)
{
    struct expert_arena_slab *x = &a->slabs[n];
    x->class = class;
    a->n_strange += is_strange(x);
    x->n_slots = (uint32_t)(x->bytes / a->classes[class].bytes);
    x->n_used = 0;
    for (uint32_t i = 0; i < x->n_slots; i++)
        a->slots[n * a->stride + i] = (struct expert_arena_slot){.owner = NONE, .after = NONE};
    list_free(a, n);
    if (x->free != NONE)
        list_add(a, &a->classes[class].open, n);
}

/* ---- start ---------------------------------------------------------------------------------- */

/* Shares of a slab's bytes: idle ones that are not worth a larger slab, and that are worth slabs of
 * several sizes. */
#define FEW_IDLE  (1.0 / 1024)
#define MUCH_IDLE (1.0 / 64)

/* Share of a slab of `bytes` that lies idle, over the layers, which have one vote each. */
static double waste(const uint64_t *layer_bytes, uint32_t n_layer, uint64_t bytes)
{
    double sum = 0;
    for (uint32_t l = 0; l < n_layer; l++)
        sum += (double)(bytes % layer_bytes[l]);
    return sum / (double)bytes / n_layer;
}

/* A multiple of the largest expert that the others fill best, small enough for all classes to have
 * some. 0: what lies idle then is too much; where few fit, an expert a slab is better. */
static uint64_t slab_bytes(const struct expert_arena *a, uint64_t bytes, uint64_t largest,
                           const uint64_t *layer_bytes, uint32_t n_layer)
{
    if (a->n_classes == 1)
        return bytes;
    const uint64_t fit = bytes / largest / LEAST_SLABS / a->n_classes;
    const uint64_t most = fit < MOST_LARGEST ? fit : MOST_LARGEST;
    uint64_t best = largest;
    double idle = waste(layer_bytes, n_layer, best);
    for (uint64_t n = 2; n <= most && idle > FEW_IDLE; n++) {
        const double x = waste(layer_bytes, n_layer, n * largest);
        if (x < idle) {
            best = n * largest;
            idle = x;
        }
    }
    return idle > MUCH_IDLE && bytes / largest >= LEAST_SLABS ? 0 : best;
}

static void set_classes(struct expert_arena *a, const uint64_t *layer_bytes, uint32_t n_layer)
{
    for (uint32_t l = 0; l < n_layer; l++) {
        uint32_t n = 0;
        while (n < a->n_classes && a->classes[n].bytes != layer_bytes[l])
            n++;
        if (n == a->n_classes)
            a->classes[a->n_classes++] =
                (struct expert_arena_class){.bytes = layer_bytes[l], .open = NONE};
        a->classes[n].share += layer_bytes[l];
    }
}

/* The class that has the least of its share. */
static uint32_t poorest(const struct expert_arena *a)
{
    const struct expert_arena_class *y = a->classes;
    uint32_t least = 0;
    for (uint32_t n = 1; n < a->n_classes; n++)
        if ((double)y[n].cut / (double)y[n].share < (double)y[least].cut / (double)y[least].share)
            least = n;
    return least;
}

/* Slabs from the lowest place on, of `slab` bytes, or for 0 of as many experts of one class as
 * every class finds room in; the last one has what is left. */
static void cut(struct expert_arena *a, uint64_t bytes, uint64_t slab, uint64_t largest)
{
    uint64_t place = 0;
    for (a->n_slabs = 0; place < bytes; a->n_slabs++) {
        struct expert_arena_slab x = {
            .place = place, .bytes = slab, .own = NONE, .class = NONE, .free = NONE};
        if (slab == 0) {
            struct expert_arena_class *y = &a->classes[x.own = poorest(a)];
            x.bytes = (largest + y->bytes - 1) / y->bytes * y->bytes;
            y->cut += x.bytes;
        }
        if (x.bytes > bytes - place) {
            x.bytes = bytes - place;
            x.own = NONE;
        }
        a->slabs[a->n_slabs] = x;
        place += x.bytes;
    }
    for (uint32_t n = a->n_slabs; n-- > 0;)
        list_add(a, &a->empty, n);
}

/* A slab for each layer. */
static void lay_out(struct expert_arena *a, const uint64_t *layer_bytes, uint32_t n_expert)
{
    uint64_t place = 0;
    for (uint32_t n = 0; n < a->n_slabs; n++) {
        const uint64_t bytes = layer_bytes[n] * n_expert;
        a->slabs[n] = (struct expert_arena_slab){.place = place, .bytes = bytes, .own = NONE};
        dedicate(a, n, expert_arena_class_of(a, layer_bytes[n]));
        place += bytes;
    }
}

enum err_code expert_arena_start(struct expert_arena *a, uint64_t bytes,
                                 const uint64_t *layer_bytes, uint32_t n_layer, uint32_t n_expert,
                                 struct err *e)
{
    uint64_t all = 0, largest = 0, smallest = UINT64_MAX;
    *a = (struct expert_arena){.empty = NONE, .bytes = bytes};
    a->classes = alloc_zero(ALLOC_MISC, n_layer, sizeof *a->classes);
    if (a->classes == NULL)
        return err_set(e, ERR_NOMEM, "expert cache: no memory for %u layers", n_layer);
    set_classes(a, layer_bytes, n_layer);
    for (uint32_t l = 0; l < n_layer; l++) {
        all += layer_bytes[l] * n_expert;
        largest = layer_bytes[l] > largest ? layer_bytes[l] : largest;
        smallest = layer_bytes[l] < smallest ? layer_bytes[l] : smallest;
    }
    assert(bytes >= largest);
    a->fixed = bytes >= all;
    const uint64_t slab = slab_bytes(a, bytes, largest, layer_bytes, n_layer);
    const uint64_t least = slab > 0 ? slab : largest, most = slab > 0 ? slab : 2 * largest;
    a->n_slabs = a->fixed ? n_layer : (uint32_t)((bytes + least - 1) / least);
    a->stride = a->fixed ? n_expert : (uint32_t)(most / smallest);
    a->slabs = alloc_zero(ALLOC_MISC, a->n_slabs, sizeof *a->slabs);
    a->slots = alloc_zero(ALLOC_MISC, (size_t)a->n_slabs * a->stride, sizeof *a->slots);
    if (a->slabs == NULL || a->slots == NULL)
        return err_set(e, ERR_NOMEM, "expert cache: no memory for %u slabs of %u slots", a->n_slabs,
                       a->stride);
    if (a->fixed)
        lay_out(a, layer_bytes, n_expert);
    else
        cut(a, bytes, slab, largest);
    return ERR_OK;
}

enum err_code expert_arena_divide(struct expert_arena *a, uint64_t unit_bytes, struct err *e)
{
    const uint32_t n = (uint32_t)(a->bytes / unit_bytes);
    a->closed = alloc_zero(ALLOC_MISC, n, sizeof *a->closed);
    if (a->closed == NULL)
        return err_set(e, ERR_NOMEM, "expert cache: no memory for %u units", n);
    a->unit_bytes = unit_bytes;
    a->n_units = n;
    return ERR_OK;
}

void expert_arena_done(struct expert_arena *a)
{
    alloc_free(a->closed);
    alloc_free(a->classes);
    alloc_free(a->slabs);
    alloc_free(a->slots);
    *a = (struct expert_arena){.n_slabs = 0};
}

/* ---- slots ---------------------------------------------------------------------------------- */

uint32_t expert_arena_class_of(const struct expert_arena *a, uint64_t bytes)
{
    uint32_t n = 0;
    while (n < a->n_classes && a->classes[n].bytes != bytes)
        n++;
    assert(n < a->n_classes);
    return n;
}

bool expert_arena_serves(const struct expert_arena *a, uint32_t slab, uint32_t class)
{
    const struct expert_arena_slab *x = &a->slabs[slab];
    const uint64_t bytes = a->classes[class].bytes;
    for (uint64_t at = 0; x->bytes - at >= bytes; at += bytes)
        if (is_open(a, x->place + at, bytes))
            return true;
    return false;
}

/* Of the empty slabs with room for one of the class the one that it fills best. */
static uint32_t empty_slab(const struct expert_arena *a, uint32_t class)
{
    uint32_t best = NONE;
    double idle = 1.0;
    for (uint32_t n = a->empty; n != NONE && idle > FEW_IDLE; n = a->slabs[n].after) {
        const uint64_t bytes = a->slabs[n].bytes;
        const double x = (double)(bytes % a->classes[class].bytes) / (double)bytes;
        if (x >= idle || !expert_arena_serves(a, n, class))
            continue;
        best = n;
        idle = x;
    }
    return best;
}

bool expert_arena_has(const struct expert_arena *a, uint32_t class)
{
    return a->classes[class].open != NONE || empty_slab(a, class) != NONE;
}

uint32_t expert_arena_take(struct expert_arena *a, uint32_t class, uint32_t owner)
{
    struct expert_arena_class *y = &a->classes[class];
    if (y->open == NONE) {
        const uint32_t n = empty_slab(a, class);
        if (n == NONE)
            return NONE;
        list_remove(a, &a->empty, n);
        dedicate(a, n, class);
    }
    const uint32_t n = y->open;
    struct expert_arena_slab *x = &a->slabs[n];
    const uint32_t slot = x->free;
    x->free = a->slots[slot].after;
    x->n_used++;
    a->slots[slot].owner = owner;
    if (x->free == NONE)
        list_remove(a, &y->open, n);
    return slot;
}

void expert_arena_return(struct expert_arena *a, uint32_t slot)
{
    const uint32_t n = slot / a->stride;
    struct expert_arena_slab *x = &a->slabs[n];
    assert(a->slots[slot].owner != NONE);
    if (x->free == NONE)
        list_add(a, &a->classes[x->class].open, n);
    a->slots[slot] = (struct expert_arena_slot){.owner = NONE, .after = x->free};
    x->free = slot;
    if (--x->n_used > 0 || a->fixed)
        return;
    list_remove(a, &a->classes[x->class].open, n);
    a->n_strange -= is_strange(x);
    x->class = NONE;
    list_add(a, &a->empty, n);
}

uint64_t expert_arena_place(const struct expert_arena *a, uint32_t slot)
{
    const struct expert_arena_slab *x = &a->slabs[slot / a->stride];
    return x->place + slot % a->stride * a->classes[x->class].bytes;
}

/* ---- units ---------------------------------------------------------------------------------- */

uint32_t expert_arena_units(const struct expert_arena *a, uint32_t slot, uint32_t *ret_first)
{
    const uint32_t class = a->slabs[slot / a->stride].class;
    return units_of(a, expert_arena_place(a, slot), a->classes[class].bytes, ret_first);
}

/* Slots of slabs that lie in the unit come to be free, or are so no more. */
static void list_again(struct expert_arena *a, uint32_t unit)
{
    const uint64_t from = unit * a->unit_bytes, to = from + a->unit_bytes;
    for (uint32_t n = 0; n < a->n_slabs; n++) {
        struct expert_arena_slab *x = &a->slabs[n];
        if (x->class == NONE || x->place >= to || x->place + x->bytes <= from)
            continue;
        if (x->free != NONE)
            list_remove(a, &a->classes[x->class].open, n);
        list_free(a, n);
        if (x->free != NONE)
            list_add(a, &a->classes[x->class].open, n);
    }
}

void expert_arena_close(struct expert_arena *a, uint32_t unit)
{
    assert(unit < a->n_units && !a->closed[unit]);
    a->closed[unit] = true;
    list_again(a, unit);
}

void expert_arena_open(struct expert_arena *a, uint32_t unit)
{
    assert(unit < a->n_units && a->closed[unit]);
    a->closed[unit] = false;
    list_again(a, unit);
}

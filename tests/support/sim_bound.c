#include "sim_bound.h"

#include <stdbool.h>
#include <stdlib.h>

#include "alloc.h"

struct likely {
    float chance;
    uint32_t expert; /* of all layers */
};

struct bound {
    const struct sim_trace *trace;
    bool *read;           /* [experts of all layers] in a step before */
    struct likely *order; /* [experts] those, the likeliest first */
    uint64_t *before;     /* [experts] bytes of those likelier; UINT64_MAX: not read before */
};

static int by_chance(const void *a, const void *b)
{
    const struct likely *x = a, *y = b;
    if (x->chance != y->chance)
        return x->chance < y->chance ? 1 : -1;
    return (x->expert > y->expert) - (x->expert < y->expert);
}

static void rank(struct bound *b, uint32_t step)
{
    const struct sim_trace *t = b->trace;
    const uint32_t n_all = t->n_layer * t->n_expert;
    const float *chances = t->chances + (size_t)step * n_all;
    uint64_t bytes = 0;
    uint32_t n = 0;
    for (uint32_t x = 0; x < n_all; x++)
        if (b->read[x])
            b->order[n++] = (struct likely){.chance = chances[x], .expert = x};
        else
            b->before[x] = UINT64_MAX;
    qsort(b->order, n, sizeof *b->order, by_chance);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t x = b->order[i].expert;
        b->before[x] = bytes;
        bytes += t->layer_bytes[x / t->n_expert];
    }
}

static void count_step(struct bound *b, uint32_t step, const uint64_t *capacities, uint32_t n,
                       struct sim_replay_result *ret)
{
    const struct sim_trace *t = b->trace;
    for (uint32_t l = 0; l < t->n_layer; l++) {
        const uint64_t pass = (uint64_t)step * t->n_layer + l;
        for (uint64_t i = t->first[pass]; i < t->first[pass + 1]; i++) {
            const uint32_t x = l * t->n_expert + t->needs[i].expert;
            for (uint32_t c = 0; c < n; c++) {
                const bool hit = b->before[x] < capacities[c];
                ret[c].needs++;
                ret[c].hits += hit;
                ret[c].read_bytes += hit ? 0 : t->layer_bytes[l];
            }
            b->read[x] = true;
        }
    }
}

enum err_code sim_bound_run(const struct sim_trace *t, const uint64_t *capacities, uint32_t n,
                            struct sim_replay_result *ret, struct err *e)
{
    const uint32_t n_all = t->n_layer * t->n_expert;
    if (t->chances == NULL)
        return err_set(e, ERR_ARGUMENT, "the trace tells no chances");
    struct bound b = {.trace = t,
                      .read = alloc_zero(ALLOC_MISC, n_all, sizeof *b.read),
                      .order = alloc_zero(ALLOC_MISC, n_all, sizeof *b.order),
                      .before = alloc_zero(ALLOC_MISC, n_all, sizeof *b.before)};
    enum err_code code = ERR_OK;
    if (b.read == NULL || b.order == NULL || b.before == NULL)
        code = err_set(e, ERR_NOMEM, "no memory to rank %u experts", n_all);
    for (uint32_t c = 0; c < n && code == ERR_OK; c++)
        ret[c] = (struct sim_replay_result){.hits = 0};
    for (uint32_t step = 0; step < t->n_steps && code == ERR_OK; step++) {
        rank(&b, step);
        count_step(&b, step, capacities, n, ret);
    }
    alloc_free(b.read);
    alloc_free(b.order);
    alloc_free(b.before);
    return code;
}

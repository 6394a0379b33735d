#include "engine_guess.h"

#include <string.h>

#include "engine_forward.h"

enum {
    ENOUGH = 2 /* experts whose reads wait for those under way: guessing farther is no use */
};

static uint32_t list_size(const struct model *m)
{
    return ENGINE_AHEAD_FAR * ENGINE_AHEAD_MOST_ROWS * m->shape.n_expert_used;
}

uint64_t engine_guess_host_bytes(const struct model *m)
{
    const uint64_t ids = sizeof(uint32_t) * ENGINE_AHEAD_MOST_ROWS * m->shape.n_expert_used;
    return ENGINE_AHEAD_FAR * (uint64_t)list_size(m) * sizeof(struct engine_guess_entry) + ids;
}

void engine_guess_start(struct engine_guess *g, const struct model *m, void *host)
{
    struct engine_guess_entry *entries = host;
    for (uint32_t i = 0; i < ENGINE_AHEAD_FAR; i++)
        g->lists[i].of = entries + (size_t)i * list_size(m);
    g->host_ids = (uint32_t *)(void *)(entries + (size_t)ENGINE_AHEAD_FAR * list_size(m));
    engine_ahead_odds_start(&g->odds);
}

void engine_guess_step(struct engine_forward *f)
{
    struct engine_guess *g = &f->guesses;
    const uint32_t n = f->n_rows <= ENGINE_AHEAD_MOST_ROWS ? f->n_rows : 0;
    g->ready = f->guess && n > 0 && n <= g->n_kept;
    for (uint32_t i = 0; i < n; i++) {
        g->ready &= g->sequence[i] == f->sequence[i];
        g->sequence[i] = f->sequence[i];
    }
    g->n_kept = n;
    for (uint32_t i = 0; i < ENGINE_AHEAD_FAR; i++)
        g->lists[i].n = 0;
}

static struct k_span kept(const struct engine_forward *f, uint32_t layer)
{
    const uint64_t row = f->model->shape.n_embd * sizeof(float);
    const struct k_span all = f->guesses.kept;
    return (struct k_span){all.buffer, all.offset + layer * ENGINE_AHEAD_MOST_ROWS * row};
}

static void learn(struct engine_guess *g, uint32_t layer, const struct k_group *groups,
                  uint32_t n_groups)
{
    struct engine_guess_list *list = &g->lists[layer % ENGINE_AHEAD_FAR];
    for (uint32_t i = 0; i < list->n && list->layer == layer; i++) {
        uint32_t k = 0;
        while (k < n_groups && groups[k].expert != list->of[i].expert)
            k++;
        engine_ahead_learn(&g->odds, list->of[i].kind, k < n_groups);
    }
    list->n = 0;
}

void engine_guess_layer(struct engine_forward *f, uint32_t layer, const struct k_group *groups,
                        uint32_t n_groups)
{
    struct engine_guess *g = &f->guesses;
    if (g->n_kept > 0)
        f->ops->copy(f->stream, kept(f, layer), f->out,
                     (size_t)g->n_kept * f->model->shape.n_embd * sizeof(float));
    if (g->ready)
        learn(g, layer, groups, n_groups);
}

/* Asks the layer's router for the rows in g->x. */
static enum err_code ask(struct engine_forward *f, const struct k_rows *rows, uint32_t layer)
{
    const struct model_shape *shape = &f->model->shape;
    const struct model_layer *l = &f->model->layers[layer];
    const struct engine_guess *g = &f->guesses;
    enum err_code code = f->ops->norm(&(struct k_norm){.rows = *rows,
                                                       .x = g->x,
                                                       .y = g->act.f32,
                                                       .weight = l->ffn_norm,
                                                       .n = shape->n_embd,
                                                       .groups = 1,
                                                       .eps = shape->rms_eps},
                                      f->stream);
    if (code == ERR_OK)
        code = f->ops->quantise(&(struct k_quantise){.rows = *rows, .act = g->act}, f->stream);
    if (code == ERR_OK)
        code = f->ops->matmul(
            &(struct k_matmul){
                .rows = *rows, .act = g->act, .n_matrices = 1, .w = {l->router}, .y = {g->logits}},
            f->stream);
    if (code == ERR_OK)
        code = f->ops->router(&(struct k_router){.rows = *rows,
                                                 .logits = g->logits,
                                                 .ids = g->ids,
                                                 .weights = g->weights,
                                                 .n_expert = shape->n_expert,
                                                 .n_used = shape->n_expert_used,
                                                 .normalise = false,
                                                 .scale = 1.0f},
                              f->stream);
    f->ops->download(f->stream, g->host_ids, g->ids,
                     (size_t)f->n_rows * shape->n_expert_used * sizeof(*g->host_ids));
    return code == ERR_OK ? f->ops->wait(f->stream) : code;
}

/* Has those read that pay, best ranks first; all that are missing are to be learned from. */
static void take_up(struct engine_forward *f, uint32_t layer, uint32_t far)
{
    struct engine_guess *g = &f->guesses;
    struct engine_guess_list *list = &g->lists[layer % ENGINE_AHEAD_FAR];
    struct engine_experts *x = f->experts;
    const uint32_t n_used = f->model->shape.n_expert_used;
    if (list->layer != layer)
        list->n = 0;
    list->layer = layer;
    for (uint32_t rank = 0; rank < n_used; rank++)
        for (uint32_t row = 0; row < f->n_rows; row++) {
            const uint32_t expert = g->host_ids[row * n_used + rank];
            const uint32_t kind = engine_ahead_kind(far, rank, n_used);
            if (expert_cache_state(x->cache, layer, expert) != EXPERT_CACHE_ABSENT)
                continue;
            list->of[list->n++] = (struct engine_guess_entry){expert, kind};
            if (engine_ahead_pays(&g->odds, kind))
                engine_experts_expect(x, layer, expert);
        }
}

/* Each guess takes some 40 us, which are free where the layer waits for reads anyway: with others
 * too a token took 44 ms instead of 43 where nearly all experts were there. */
static bool pays_farther(const struct engine_experts *x)
{
    const bool waits = x->n_waiting > 0 || x->next_missing < x->n_missing;
    return waits && x->n_expected - x->next_expected < ENOUGH;
}

enum err_code engine_guess_from(struct engine_forward *f, uint32_t layer)
{
    const struct model_shape *shape = &f->model->shape;
    struct engine_guess *g = &f->guesses;
    struct k_rows rows = f->rows;
    rows.max_rows = ENGINE_AHEAD_MOST_ROWS;
    rows.faults = g->faults;
    if (!g->ready)
        return ERR_OK;
    f->ops->copy(f->stream, g->x, f->x, (size_t)f->n_rows * shape->n_embd * sizeof(float));
    for (uint32_t far = 0; far < ENGINE_AHEAD_FAR && layer + far < shape->n_layer; far++) {
        if (far > 0 && !pays_farther(f->experts))
            break;
        enum err_code code = f->ops->add(
            &(struct k_add){.rows = rows, .x = g->x, .y = kept(f, layer + far), .n = shape->n_embd},
            f->stream);
        if (code == ERR_OK)
            code = ask(f, &rows, layer + far);
        if (code != ERR_OK)
            return code;
        take_up(f, layer + far, far);
    }
    return ERR_OK;
}

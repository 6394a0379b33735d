#include "engine_moe.h"

#include <string.h>

#include "engine_fused.h"

/* The attention's part of the residual, norm, and which experts the rows use. */
enum err_code engine_moe_route(struct engine_forward *f, uint32_t layer)
{
    const struct model_shape *shape = &f->model->shape;
    const struct model_layer *l = &f->model->layers[layer];
    const struct k_span ids = {f->ids.buffer, f->ids.offset + layer * f->ids_stride};
    return engine_fused_route(f,
                              &(struct k_enter){.rows = f->rows,
                                                .x = f->x,
                                                .out = f->out,
                                                .norm = l->ffn_norm,
                                                .act = f->norm_act,
                                                .eps = shape->rms_eps},
                              &(struct k_matmul){.rows = f->rows,
                                                 .act = f->norm_act,
                                                 .n_matrices = 1,
                                                 .w = {l->router},
                                                 .y = {f->router}},
                              &(struct k_router){.rows = f->rows,
                                                 .logits = f->router,
                                                 .ids = ids,
                                                 .weights = f->weights,
                                                 .n_expert = shape->n_expert,
                                                 .n_used = shape->n_expert_used,
                                                 .normalise = shape->router_normalise,
                                                 .scale = shape->router_scale},
                              &(struct k_grouping){.rows = f->rows,
                                                   .ids = ids,
                                                   .n_groups = f->n_groups,
                                                   .groups = f->groups,
                                                   .order = f->order,
                                                   .n_expert = shape->n_expert,
                                                   .n_used = shape->n_expert_used});
}

/* Computes the selected groups with the experts of `where`. */
static enum err_code compute(struct engine_forward *f, const struct k_experts *where,
                             struct k_span n_selected, struct k_span selected)
{
    enum err_code code = f->ops->moe_gate_up(&(struct k_moe_gate_up){.rows = f->rows,
                                                                     .experts = *where,
                                                                     .groups = f->groups,
                                                                     .order = f->order,
                                                                     .n_selected = n_selected,
                                                                     .selected = selected,
                                                                     .x = f->norm_act,
                                                                     .h = f->hidden_act},
                                             f->stream);
    if (code == ERR_OK)
        code = f->ops->moe_down(&(struct k_moe_down){.rows = f->rows,
                                                     .experts = *where,
                                                     .groups = f->groups,
                                                     .order = f->order,
                                                     .n_selected = n_selected,
                                                     .selected = selected,
                                                     .h = f->hidden_act,
                                                     .out = f->expert_out},
                                f->stream);
    return code;
}

/* Computes some of the groups that the host knows. */
static enum err_code compute_some(struct engine_forward *f, const struct k_experts *where,
                                  const uint32_t *selected, uint32_t n)
{
    const uint64_t gap = f->selected.offset - f->n_selected.offset;
    if (n == 0)
        return ERR_OK;
    memcpy(f->host_batch, &n, sizeof(n));
    memcpy(f->host_batch + gap, selected, n * sizeof(n));
    f->ops->upload(f->stream, f->n_selected, f->host_batch, gap + n * sizeof(n));
    return compute(f, where, f->n_selected, f->selected);
}

static void download_groups(struct engine_forward *f, uint32_t n_rows)
{
    const uint64_t pairs = (uint64_t)n_rows * f->model->shape.n_expert_used;
    f->ops->download(f->stream, f->host_layer, f->n_groups,
                     f->order.offset - f->n_groups.offset + pairs * sizeof(*f->host_order));
}

static void download_rows(struct engine_forward *f, uint32_t n_rows, float *rows)
{
    f->ops->download(f->stream, rows, f->norm_act.f32,
                     (size_t)n_rows * f->norm_act.n * sizeof(*rows));
}

/* Takes the layer's groups to the host, and with them the rows if `rows` is not NULL. */
static enum err_code download_layer(struct engine_forward *f, uint32_t layer, float *rows,
                                    struct engine_experts_layer *ret)
{
    if (f->recorded == NULL || !engine_moe_may_tell(f)) { /* otherwise they are on their way */
        download_groups(f, f->n_rows);
        if (rows != NULL)
            download_rows(f, f->n_rows, rows);
    }
    const enum err_code code = engine_forward_wait(f);
    if (code != ERR_OK)
        return code;
    memcpy(&f->layer_groups[layer], f->host_layer, sizeof(f->layer_groups[layer]));
    *ret = (struct engine_experts_layer){.index = layer,
                                         .n_groups = f->layer_groups[layer],
                                         .groups = f->host_groups,
                                         .order = f->host_order};
    return ERR_OK;
}

/* Has the groups computed as their experts are there. The sum comes later and runs in rank order,
 * so that the order here is free. */
static enum err_code compute_in_ram(struct engine_forward *f, uint32_t layer)
{
    struct engine_experts_layer groups;
    enum err_code code = download_layer(f, layer, NULL, &groups);
    if (code != ERR_OK)
        return code;
    engine_guess_layer(f, layer, groups.groups, groups.n_groups);
    engine_experts_layer(f->experts, &groups);
    code = engine_guess_from(f, layer + 1);
    /* After an error too, so that no read or pin of this layer is left over. */
    for (uint32_t n; (n = engine_experts_take(f->experts)) > 0;)
        if (code == ERR_OK)
            code = compute_some(f, &f->model->layers[layer].experts, f->experts->selected, n);
    return code;
}

/* ---- with a GPU ---- */

enum err_code engine_moe_in_vram(struct engine_forward *f, uint32_t layer)
{
    return compute(f, &f->islands->vram.layers[layer], f->n_groups, f->everything);
}

bool engine_moe_may_tell(const struct engine_forward *f)
{
    return f->pinned && f->hybrid->pinned;
}

void engine_moe_tell(struct engine_forward *f)
{
    download_groups(f, f->rows.max_rows);
    download_rows(f, f->rows.max_rows, engine_hybrid_recorded(f->hybrid));
}

/* Bytes from n_selected to the end of a list of n. */
static uint64_t selection_bytes(const struct engine_forward *f, uint64_t n)
{
    return f->selected.offset - f->n_selected.offset + n * sizeof(uint32_t);
}

enum err_code engine_moe_resident(struct engine_forward *f, uint32_t layer)
{
    const uint64_t pairs = (uint64_t)f->rows.max_rows * f->model->shape.n_expert_used;
    const uint64_t n = pairs < f->model->shape.n_expert ? pairs : f->model->shape.n_expert;
    f->ops->fetch(f->stream, f->n_selected, f->host_resident, selection_bytes(f, n));
    return compute(f, &f->islands->vram.layers[layer], f->n_selected, f->selected);
}

/* Computes groups whose experts are in islands or the transit area, by the layer's record if there
 * is one; once a layer, for the record reads their list when it runs. The stream was waited for
 * since the last layer. */
static enum err_code compute_recorded(struct engine_forward *f, uint32_t layer,
                                      const uint32_t *selected, uint32_t n)
{
    struct k_graph *graph = f->recorded != NULL ? f->record.resident[f->record_size][layer] : NULL;
    if (graph == NULL || n == 0)
        return compute_some(f, &f->islands->vram.layers[layer], selected, n);
    memcpy(f->host_resident, &n, sizeof(n));
    memcpy(f->host_resident + selection_bytes(f, 0), selected, n * sizeof(*selected));
    return f->ops->replay(graph, f->stream);
}

void engine_moe_unseen(struct engine_forward *f, uint32_t layer)
{
    f->layer_groups[layer] = ENGINE_FORWARD_UNSEEN;
    engine_islands_hit(f->islands, f->n_rows);
}

/* Has groups copied to the GPU, as many as the transit area takes at once. */
static void copy_some(struct engine_forward *f, const uint32_t *selected, uint32_t n)
{
    const uint64_t start = ticks_ns(f->hybrid->ticks);
    engine_islands_begin(f->islands);
    for (uint32_t k = 0; k < n; k++)
        engine_islands_copy(f->islands, selected[k]);
    engine_islands_await(f->islands);
    engine_split_learn_ns(&f->hybrid->rates.copy_ns, n, ticks_ns(f->hybrid->ticks) - start);
}

/* Groups that are copied to the GPU and computed there, some at a time: while some are computed,
 * the next ones are under way. */
static enum err_code compute_copied(struct engine_forward *f, uint32_t layer,
                                    const uint32_t *selected, uint32_t n)
{
    enum err_code code = ERR_OK;
    for (uint32_t i = 0, some; i < n && code == ERR_OK; i += some) {
        some = n - i < f->islands->vram.n_transit ? n - i : f->islands->vram.n_transit;
        copy_some(f, selected + i, some);
        code = compute_some(f, &f->islands->vram.layers[layer], selected + i, some);
        engine_islands_end(f->islands);
    }
    return code;
}

/* The same with the resident ones, all by one record: with few rows the link takes longer than
 * everything that is computed. */
static enum err_code compute_joined(struct engine_forward *f, uint32_t layer,
                                    const uint32_t *selected, uint32_t n)
{
    struct engine_islands *is = f->islands;
    if (n == 0 || n > is->vram.n_transit) {
        const enum err_code code = compute_recorded(f, layer, is->resident, is->n_resident);
        return code == ERR_OK ? compute_copied(f, layer, selected, n) : code;
    }
    copy_some(f, selected, n);
    memcpy(is->resident + is->n_resident, selected, n * sizeof(*selected));
    const enum err_code code = compute_recorded(f, layer, is->resident, is->n_resident + n);
    engine_islands_end(is);
    return code;
}

/* Splits a batch between the devices: those to copy, then the CPU's, in f->host_selected. */
static uint32_t split(struct engine_forward *f, const struct engine_experts_layer *groups,
                      const uint32_t *selected, uint32_t n, uint32_t n_resident)
{
    const struct model_shape *shape = &f->model->shape;
    uint32_t *rows = f->host_selected + shape->n_expert;
    for (uint32_t i = 0; i < n; i++)
        rows[i] = groups->groups[selected[i]].count;
    const struct engine_split_layer figures = {.expert_bytes =
                                                   f->islands->vram.island_bytes[groups->index],
                                               .row_bytes = shape->n_embd * sizeof(float),
                                               .n_resident = n_resident,
                                               .n = n,
                                               .n_rows = rows,
                                               .placement = f->islands->placement};
    const uint32_t copied = engine_split_plan(&f->hybrid->rates, &figures, f->host_selected);
    for (uint32_t i = 0; i < n; i++)
        f->host_selected[i] = selected[f->host_selected[i]];
    return copied;
}

/* What the CPU computes, while the GPU does its part. */
static enum err_code compute_on_cpu(struct engine_forward *f,
                                    const struct engine_experts_layer *groups,
                                    const uint32_t *selected, uint32_t n)
{
    enum err_code code = ERR_OK;
    if (n == 0)
        return code;
    float *rows = engine_hybrid_rows(f->hybrid);
    if (rows != NULL) {
        download_rows(f, f->n_rows, rows);
        code = engine_forward_wait(f);
    }
    if (code == ERR_OK)
        code = engine_hybrid_compute(f->hybrid, groups->index, groups->n_groups, groups->groups,
                                     groups->order, selected, n);
    if (code != ERR_OK)
        return code;
    engine_hybrid_send(f->hybrid, f->stream, f->expert_out, groups->groups, groups->order, selected,
                       n);
    engine_islands_promote(f->islands, selected, n);
    return ERR_OK;
}

/* Those that were copied before the layer chose them. */
static enum err_code compute_early(struct engine_forward *f, uint32_t layer)
{
    struct engine_islands *is = f->islands;
    enum err_code code = ERR_OK;
    for (unsigned i = 0; i < 2 && code == ERR_OK; i++) {
        if (is->early[i].n_groups == 0)
            continue;
        engine_islands_await_early(is, i);
        code = compute_some(f, &is->vram.layers[layer], is->early[i].groups, is->early[i].n_groups);
        engine_islands_end_early(is, i);
    }
    return code;
}

/* Resident experts on the GPU, the others where it is faster, both at the same time. */
static enum err_code compute_hybrid(struct engine_forward *f, uint32_t layer)
{
    struct engine_islands *is = f->islands;
    struct engine_experts_layer groups;
    enum err_code code = download_layer(f, layer, engine_hybrid_layer(f->hybrid), &groups);
    if (code != ERR_OK)
        return code;
    uint64_t bytes, ns;
    if (tier_vram_timed(&is->vram, &bytes, &ns))
        engine_split_learn(&f->hybrid->rates.link, bytes, ns);
    engine_islands_layer(is, &groups);
    groups.wanted = is->rest;
    groups.n_wanted = is->n_rest;
    bool joined = f->recorded != NULL && is->early[0].n_groups + is->early[1].n_groups == 0;
    if (!joined)
        code = compute_recorded(f, layer, is->resident, is->n_resident);
    if (code == ERR_OK)
        code = compute_early(f, layer);
    engine_experts_layer(f->experts, &groups);
    /* those in islands need not wait for reads */
    if (joined && !engine_experts_at_hand(f->experts)) {
        joined = false;
        code = compute_recorded(f, layer, is->resident, is->n_resident);
    }
    uint32_t n_resident = is->n_resident + is->early[0].n_groups + is->early[1].n_groups;
    uint32_t n_copied = 0;
    for (uint32_t n; (n = engine_experts_take(f->experts)) > 0;) {
        const uint32_t copied = split(f, &groups, f->experts->selected, n, n_resident);
        n_resident = 0; /* they are done by the next batch */
        n_copied += copied;
        if (code == ERR_OK && joined)
            code = compute_joined(f, layer, f->host_selected, copied);
        else if (code == ERR_OK)
            code = compute_copied(f, layer, f->host_selected, copied);
        joined = false;
        if (code == ERR_OK)
            code = compute_on_cpu(f, &groups, f->host_selected + copied, n - copied);
    }
    const bool all_chosen = groups.n_groups * 10ull >= f->model->shape.n_expert * 9ull;
    const bool most_copied = n_copied * 2ull >= is->n_rest;
    const bool any = n_copied > 0 || is->early[0].n_groups > 0;
    engine_islands_leave(is);
    if (code == ERR_OK && all_chosen && most_copied && any)
        engine_islands_ahead(is);
    return code;
}

enum err_code engine_moe_compute(struct engine_forward *f, uint32_t layer)
{
    if (f->islands == NULL)
        return compute_in_ram(f, layer);
    if (!engine_islands_full(f->islands, layer))
        return compute_hybrid(f, layer);
    engine_moe_unseen(f, layer);
    return engine_moe_in_vram(f, layer);
}

enum err_code engine_moe_sum(struct engine_forward *f)
{
    return f->ops->moe_sum(&(struct k_moe_sum){.rows = f->rows,
                                               .weights = f->weights,
                                               .out = f->expert_out,
                                               .x = f->x,
                                               .n = f->model->shape.n_embd,
                                               .n_used = f->model->shape.n_expert_used},
                           f->stream);
}

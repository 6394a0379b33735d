#include "engine_moe.h"

static enum err_code route(struct engine_forward *f, const struct model_layer *l, struct k_span ids)
{
    const struct model_shape *shape = &f->model->shape;
    enum err_code code = f->ops->norm(&(struct k_norm){.rows = f->rows,
                                                       .x = f->x,
                                                       .y = f->norm_act.f32,
                                                       .weight = l->ffn_norm,
                                                       .n = shape->n_embd,
                                                       .groups = 1,
                                                       .eps = shape->rms_eps},
                                      f->stream);
    if (code == ERR_OK)
        code =
            f->ops->quantise(&(struct k_quantise){.rows = f->rows, .act = f->norm_act}, f->stream);
    if (code == ERR_OK)
        code = f->ops->matmul(&(struct k_matmul){.rows = f->rows,
                                                 .act = f->norm_act,
                                                 .n_matrices = 1,
                                                 .w = {l->router},
                                                 .y = {f->router}},
                              f->stream);
    if (code == ERR_OK)
        code = f->ops->router(&(struct k_router){.rows = f->rows,
                                                 .logits = f->router,
                                                 .ids = ids,
                                                 .weights = f->weights,
                                                 .n_expert = shape->n_expert,
                                                 .n_used = shape->n_expert_used,
                                                 .normalise = shape->router_normalise,
                                                 .scale = shape->router_scale},
                              f->stream);
    if (code == ERR_OK)
        code = f->ops->grouping(&(struct k_grouping){.rows = f->rows,
                                                     .ids = ids,
                                                     .n_groups = f->n_groups,
                                                     .groups = f->groups,
                                                     .order = f->order,
                                                     .n_expert = shape->n_expert,
                                                     .n_used = shape->n_expert_used},
                                f->stream);
    return code;
}

/* Computes the selected groups. */
static enum err_code compute(struct engine_forward *f, const struct model_layer *l)
{
    enum err_code code = f->ops->moe_gate_up(&(struct k_moe_gate_up){.rows = f->rows,
                                                                     .experts = l->experts,
                                                                     .groups = f->groups,
                                                                     .order = f->order,
                                                                     .n_selected = f->n_selected,
                                                                     .selected = f->selected,
                                                                     .x = f->norm_act,
                                                                     .h = f->hidden_act},
                                             f->stream);
    if (code == ERR_OK)
        code = f->ops->moe_down(&(struct k_moe_down){.rows = f->rows,
                                                     .experts = l->experts,
                                                     .groups = f->groups,
                                                     .order = f->order,
                                                     .n_selected = f->n_selected,
                                                     .selected = f->selected,
                                                     .h = f->hidden_act,
                                                     .out = f->expert_out},
                                f->stream);
    return code;
}

/* What the next layer would choose for the residual as it is now, before this layer's experts, while
 * the reads of this layer are under way. Only the better half of the ranks is read for: of the
 * experts that were missing, 93 % of a quarter of the ranks were chosen then, 82 % of half of them,
 * 59 % of all (m89 at 2.73 GiB). */
static enum err_code guess_next(struct engine_forward *f, uint32_t layer)
{
    const struct model_shape *shape = &f->model->shape;
    const struct model_layer *next = &f->model->layers[layer + 1];
    struct k_rows rows = f->rows;
    rows.max_rows = ENGINE_AHEAD_MOST_ROWS;
    rows.faults = f->guess_faults;
    const uint32_t n_used = shape->n_expert_used, n = f->n_rows * n_used;
    enum err_code code = f->ops->norm(&(struct k_norm){.rows = rows,
                                                       .x = f->x,
                                                       .y = f->guess_act.f32,
                                                       .weight = next->ffn_norm,
                                                       .n = shape->n_embd,
                                                       .groups = 1,
                                                       .eps = shape->rms_eps},
                                      f->stream);
    if (code == ERR_OK)
        code = f->ops->quantise(&(struct k_quantise){.rows = rows, .act = f->guess_act}, f->stream);
    if (code == ERR_OK)
        code = f->ops->matmul(&(struct k_matmul){.rows = rows,
                                                 .act = f->guess_act,
                                                 .n_matrices = 1,
                                                 .w = {next->router},
                                                 .y = {f->guess_logits}},
                              f->stream);
    if (code == ERR_OK)
        code = f->ops->router(&(struct k_router){.rows = rows,
                                                 .logits = f->guess_logits,
                                                 .ids = f->guess_ids,
                                                 .weights = f->guess_weights,
                                                 .n_expert = shape->n_expert,
                                                 .n_used = shape->n_expert_used,
                                                 .normalise = false,
                                                 .scale = 1.0f},
                              f->stream);
    f->ops->download(f->stream, f->guesses, f->guess_ids, n * sizeof(*f->guesses));
    if (code == ERR_OK)
        code = f->ops->wait(f->stream);
    for (uint32_t row = 0; row < f->n_rows && code == ERR_OK; row++)
        engine_experts_expect(f->experts, f->guesses + (size_t)row * n_used, (n_used + 1) / 2);
    return code;
}

/* Takes the layer's groups to the host, and has them computed as their experts are there. The sum
 * comes later and runs in rank order, so that the order here is free. */
static enum err_code compute_all(struct engine_forward *f, uint32_t layer)
{
    const uint64_t pairs = (uint64_t)f->n_rows * f->model->shape.n_expert_used;
    uint32_t *n_groups = &f->layer_groups[layer];
    f->ops->download(f->stream, n_groups, f->n_groups, sizeof(*n_groups));
    enum err_code code = f->ops->wait(f->stream);
    if (code != ERR_OK)
        return code;
    f->ops->download(f->stream, f->host_groups, f->groups, *n_groups * sizeof(*f->host_groups));
    f->ops->download(f->stream, f->host_order, f->order, pairs * sizeof(*f->host_order));
    code = f->ops->wait(f->stream);
    if (code != ERR_OK)
        return code;
    engine_experts_layer(f->experts, layer, *n_groups, f->host_groups, f->host_order);
    if (f->guess && layer + 1 < f->model->shape.n_layer)
        code = guess_next(f, layer);
    /* After an error too, so that no read or pin of this layer is left over. */
    for (uint32_t n; (n = engine_experts_take(f->experts)) > 0;) {
        f->ops->upload(f->stream, f->n_selected, &n, sizeof(n));
        f->ops->upload(f->stream, f->selected, f->experts->selected, n * sizeof(n));
        if (code == ERR_OK)
            code = compute(f, &f->model->layers[layer]);
    }
    return code;
}

enum err_code engine_moe_run(struct engine_forward *f, uint32_t layer)
{
    const struct model_layer *l = &f->model->layers[layer];
    const struct k_span ids = {f->ids.buffer, f->ids.offset + layer * f->ids_stride};
    enum err_code code = route(f, l, ids);
    if (code == ERR_OK)
        code = compute_all(f, layer);
    if (code == ERR_OK)
        code = f->ops->moe_sum(&(struct k_moe_sum){.rows = f->rows,
                                                   .weights = f->weights,
                                                   .out = f->expert_out,
                                                   .x = f->x,
                                                   .n = f->model->shape.n_embd,
                                                   .n_used = f->model->shape.n_expert_used},
                               f->stream);
    return code;
}

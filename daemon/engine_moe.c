#include "engine_moe.h"

static enum err_code route(struct engine_forward *f, const struct model_layer *l, struct k_span ids,
                           struct k_span n_groups)
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
                                                     .n_groups = n_groups,
                                                     .groups = f->groups,
                                                     .order = f->order,
                                                     .n_expert = shape->n_expert,
                                                     .n_used = shape->n_expert_used},
                                f->stream);
    return code;
}

/* All experts are resident: every group is selected at once. */
static enum err_code compute(struct engine_forward *f, const struct model_layer *l,
                             struct k_span n_groups)
{
    enum err_code code = f->ops->moe_gate_up(&(struct k_moe_gate_up){.rows = f->rows,
                                                                     .experts = l->experts,
                                                                     .groups = f->groups,
                                                                     .order = f->order,
                                                                     .n_selected = n_groups,
                                                                     .selected = f->selected,
                                                                     .x = f->norm_act,
                                                                     .h = f->hidden_act},
                                             f->stream);
    if (code == ERR_OK)
        code = f->ops->moe_down(&(struct k_moe_down){.rows = f->rows,
                                                     .experts = l->experts,
                                                     .groups = f->groups,
                                                     .order = f->order,
                                                     .n_selected = n_groups,
                                                     .selected = f->selected,
                                                     .h = f->hidden_act,
                                                     .out = f->expert_out},
                                f->stream);
    return code;
}

enum err_code engine_moe_run(struct engine_forward *f, uint32_t layer)
{
    const struct model_layer *l = &f->model->layers[layer];
    const struct k_span n_groups = {f->n_groups.buffer, f->n_groups.offset + 64 * layer};
    const struct k_span ids = {f->ids.buffer, f->ids.offset + layer * f->ids_stride};
    enum err_code code = route(f, l, ids, n_groups);
    if (code == ERR_OK)
        code = compute(f, l, n_groups);
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

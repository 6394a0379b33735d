#include "engine_attention.h"

#include "engine_fused.h"

/* The sum of the layer before, norm, and q, k and v. */
static enum err_code project(struct engine_forward *f, uint32_t layer, const struct model_layer *l)
{
    const struct model_shape *shape = &f->model->shape;
    const struct k_span none = {.buffer = NULL};
    enum err_code code =
        engine_fused_enter(f, &(struct k_enter){.rows = f->rows,
                                                .x = f->x,
                                                .out = layer > 0 ? f->expert_out : none,
                                                .weights = layer > 0 ? f->weights : none,
                                                .norm = l->attn_norm,
                                                .act = f->norm_act,
                                                .n_used = shape->n_expert_used,
                                                .eps = shape->rms_eps});
    if (code == ERR_OK)
        code = f->ops->matmul(&(struct k_matmul){.rows = f->rows,
                                                 .act = f->norm_act,
                                                 .n_matrices = 3,
                                                 .w = {l->q, l->k, l->v},
                                                 .y = {f->q, f->k, f->v}},
                              f->stream);
    return code;
}

static enum err_code attend(struct engine_forward *f, const struct k_kv *kv)
{
    return engine_fused_attend(f,
                               &(struct k_attention){.rows = f->rows,
                                                     .q = f->q,
                                                     .y = f->heads_act.f32,
                                                     .scratch = f->scratch,
                                                     .kv = *kv,
                                                     .n_head = f->model->shape.n_head,
                                                     .scale = f->model->shape.attention_scale},
                               &f->heads_act);
}

enum err_code engine_attention_run(struct engine_forward *f, uint32_t layer)
{
    const struct model_shape *shape = &f->model->shape;
    const struct model_layer *l = &f->model->layers[layer];
    struct k_kv kv = f->kv;
    kv.layer_offset = layer * f->kv_layer_bytes;
    enum err_code code = project(f, layer, l);
    engine_experts_poll(f->experts); /* reads ahead of the layer's experts */
    if (code == ERR_OK)
        code = engine_fused_heads(f, &(struct k_heads){.rows = f->rows,
                                                       .q = f->q,
                                                       .k = f->k,
                                                       .v = f->v,
                                                       .q_norm = l->q_norm,
                                                       .k_norm = l->k_norm,
                                                       .table = f->rope,
                                                       .kv = kv,
                                                       .n_head = shape->n_head,
                                                       .rope_dim = shape->rope_dim,
                                                       .eps = shape->rms_eps});
    if (code == ERR_OK)
        code = attend(f, &kv);
    engine_experts_poll(f->experts);
    if (code == ERR_OK)
        code = f->ops->matmul(&(struct k_matmul){.rows = f->rows,
                                                 .act = f->heads_act,
                                                 .n_matrices = 1,
                                                 .w = {l->attn_output},
                                                 .y = {f->out}},
                              f->stream);
    return code;
}

#include "engine_attention.h"

static enum err_code project(struct engine_forward *f, const struct model_layer *l)
{
    const struct model_shape *shape = &f->model->shape;
    enum err_code code = f->ops->norm(&(struct k_norm){.rows = f->rows,
                                                       .x = f->x,
                                                       .y = f->norm_act.f32,
                                                       .weight = l->attn_norm,
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
                                                 .n_matrices = 3,
                                                 .w = {l->q, l->k, l->v},
                                                 .y = {f->q, f->k, f->v}},
                              f->stream);
    return code;
}

/* Norm of each head, where the model has it, and rope, in place. */
static enum err_code turn(struct engine_forward *f, struct k_span x, struct k_span weight,
                          uint32_t heads)
{
    const struct model_shape *shape = &f->model->shape;
    enum err_code code = ERR_OK;
    if (weight.buffer != NULL)
        code = f->ops->norm(&(struct k_norm){.rows = f->rows,
                                             .x = x,
                                             .y = x,
                                             .weight = weight,
                                             .n = shape->head_dim,
                                             .groups = heads,
                                             .eps = shape->rms_eps},
                            f->stream);
    if (code == ERR_OK)
        code = f->ops->rope(&(struct k_rope){.rows = f->rows,
                                             .x = x,
                                             .table = f->rope,
                                             .heads = heads,
                                             .head_dim = shape->head_dim,
                                             .rope_dim = shape->rope_dim},
                            f->stream);
    return code;
}

static enum err_code attend(struct engine_forward *f, const struct k_kv *kv)
{
    const struct model_shape *shape = &f->model->shape;
    enum err_code code = f->ops->kv_write(
        &(struct k_kv_write){.rows = f->rows, .k = f->k, .v = f->v, .kv = *kv}, f->stream);
    if (code == ERR_OK)
        code = f->ops->attention(&(struct k_attention){.rows = f->rows,
                                                       .q = f->q,
                                                       .y = f->heads_act.f32,
                                                       .scratch = f->scratch,
                                                       .kv = *kv,
                                                       .n_head = shape->n_head,
                                                       .scale = shape->attention_scale},
                                 f->stream);
    if (code == ERR_OK)
        code =
            f->ops->quantise(&(struct k_quantise){.rows = f->rows, .act = f->heads_act}, f->stream);
    return code;
}

enum err_code engine_attention_run(struct engine_forward *f, uint32_t layer)
{
    const struct model_shape *shape = &f->model->shape;
    const struct model_layer *l = &f->model->layers[layer];
    struct k_kv kv = f->kv;
    kv.layer_offset = layer * f->kv_layer_bytes;
    enum err_code code = project(f, l);
    engine_experts_poll(f->experts); /* reads ahead of the layer's experts */
    if (code == ERR_OK)
        code = turn(f, f->q, l->q_norm, shape->n_head);
    if (code == ERR_OK)
        code = turn(f, f->k, l->k_norm, shape->n_head_kv);
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
    if (code == ERR_OK)
        code = f->ops->add(
            &(struct k_add){.rows = f->rows, .x = f->x, .y = f->out, .n = shape->n_embd},
            f->stream);
    return code;
}

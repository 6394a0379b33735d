#include "engine_fused.h"

static enum err_code add_up(struct engine_forward *f, const struct k_enter *a)
{
    if (a->out.buffer == NULL)
        return ERR_OK;
    if (a->weights.buffer == NULL)
        return f->ops->add(&(struct k_add){.rows = a->rows, .x = a->x, .y = a->out, .n = a->act.n},
                           f->stream);
    return f->ops->moe_sum(&(struct k_moe_sum){.rows = a->rows,
                                               .weights = a->weights,
                                               .out = a->out,
                                               .x = a->x,
                                               .n = a->act.n,
                                               .n_used = a->n_used},
                           f->stream);
}

enum err_code engine_fused_enter(struct engine_forward *f, const struct k_enter *a)
{
    if (f->ops->enter != NULL)
        return f->ops->enter(a, f->stream);
    enum err_code code = add_up(f, a);
    if (code == ERR_OK)
        code = f->ops->norm(&(struct k_norm){.rows = a->rows,
                                             .x = a->x,
                                             .y = a->act.f32,
                                             .weight = a->norm,
                                             .n = a->act.n,
                                             .groups = 1,
                                             .eps = a->eps},
                            f->stream);
    if (code == ERR_OK)
        code = f->ops->quantise(&(struct k_quantise){.rows = a->rows, .act = a->act}, f->stream);
    return code;
}

/* Norm of each head, where the model has it, and rope, in place. */
static enum err_code turn(struct engine_forward *f, const struct k_heads *a, struct k_span x,
                          struct k_span weight, uint32_t heads)
{
    enum err_code code = ERR_OK;
    if (weight.buffer != NULL)
        code = f->ops->norm(&(struct k_norm){.rows = a->rows,
                                             .x = x,
                                             .y = x,
                                             .weight = weight,
                                             .n = a->kv.head_dim,
                                             .groups = heads,
                                             .eps = a->eps},
                            f->stream);
    if (code == ERR_OK)
        code = f->ops->rope(&(struct k_rope){.rows = a->rows,
                                             .x = x,
                                             .table = a->table,
                                             .heads = heads,
                                             .head_dim = a->kv.head_dim,
                                             .rope_dim = a->rope_dim},
                            f->stream);
    return code;
}

enum err_code engine_fused_heads(struct engine_forward *f, const struct k_heads *a)
{
    if (f->ops->heads != NULL)
        return f->ops->heads(a, f->stream);
    enum err_code code = turn(f, a, a->q, a->q_norm, a->n_head);
    if (code == ERR_OK)
        code = turn(f, a, a->k, a->k_norm, a->kv.n_head_kv);
    if (code == ERR_OK)
        code = f->ops->kv_write(
            &(struct k_kv_write){.rows = a->rows, .k = a->k, .v = a->v, .kv = a->kv}, f->stream);
    return code;
}

enum err_code engine_fused_attend(struct engine_forward *f, const struct k_attention *a,
                                  const struct k_act *y)
{
    if (f->ops->attend != NULL)
        return f->ops->attend(a, y, f->stream);
    const enum err_code code = f->ops->attention(a, f->stream);
    if (code != ERR_OK)
        return code;
    return f->ops->quantise(&(struct k_quantise){.rows = a->rows, .act = *y}, f->stream);
}

enum err_code engine_fused_route(struct engine_forward *f, const struct k_enter *enter,
                                 const struct k_matmul *matmul, const struct k_router *router,
                                 const struct k_grouping *grouping)
{
    if (f->ops->route != NULL)
        return f->ops->route(enter, matmul, router, grouping, f->stream);
    enum err_code code = engine_fused_enter(f, enter);
    if (code == ERR_OK)
        code = f->ops->matmul(matmul, f->stream);
    if (code == ERR_OK)
        code = f->ops->router(router, f->stream);
    return code == ERR_OK ? f->ops->grouping(grouping, f->stream) : code;
}

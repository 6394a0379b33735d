#include "engine_record.h"

#include "alloc.h"
#include "engine_forward.h"
#include "engine_moe.h"

typedef enum err_code piece(struct engine_forward *f, uint32_t layer);

static enum err_code full_layer(struct engine_forward *f, uint32_t layer)
{
    const enum err_code code = engine_forward_segment(f, layer);
    return code == ERR_OK ? engine_moe_in_vram(f, layer) : code;
}

static enum err_code whole_step(struct engine_forward *f, uint32_t layer)
{
    const uint32_t n = f->model->shape.n_layer;
    enum err_code code = ERR_OK;
    (void)layer;
    for (uint32_t i = 0; i < n && code == ERR_OK; i++)
        code = full_layer(f, i);
    return code == ERR_OK ? engine_forward_segment(f, n) : code;
}

static enum err_code segment(struct engine_forward *f, uint32_t layer)
{
    const enum err_code code = engine_forward_segment(f, layer);
    if (code == ERR_OK && layer < f->model->shape.n_layer && engine_moe_may_tell(f))
        engine_moe_tell(f);
    return code;
}

static enum err_code record(struct engine_forward *f, piece *what, uint32_t layer,
                            struct k_graph **ret)
{
    enum err_code code = f->ops->capture_begin(f->stream);
    if (code != ERR_OK)
        return code;
    code = what(f, layer);
    const enum err_code ended = f->ops->capture_end(f->stream, ret);
    return code != ERR_OK ? code : ended;
}

static enum err_code record_size(struct engine_record *r, struct engine_forward *f, int size)
{
    enum err_code code = ERR_OK;
    r->segments[size] = alloc_zero(ALLOC_WORK, r->n_segments, sizeof(**r->segments));
    r->resident[size] = alloc_zero(ALLOC_WORK, r->n_segments, sizeof(**r->resident));
    r->full[size] = alloc_zero(ALLOC_WORK, r->n_segments, sizeof(**r->full));
    if (r->segments[size] == NULL || r->resident[size] == NULL || r->full[size] == NULL)
        return ERR_NOMEM;
    f->n_rows = f->n_logits = 1u << size;
    engine_forward_bound(f, f->n_rows, f->n_logits);
    for (uint32_t i = 0; i < r->n_segments && code == ERR_OK; i++) {
        code = record(f, segment, i, &r->segments[size][i]);
        if (code == ERR_OK && i < f->model->shape.n_layer && engine_moe_may_tell(f))
            code = record(f, engine_moe_resident, i, &r->resident[size][i]);
        if (code == ERR_OK && i < f->model->shape.n_layer)
            code = record(f, full_layer, i, &r->full[size][i]);
    }
    return code == ERR_OK ? record(f, whole_step, 0, &r->whole[size]) : code;
}

enum err_code engine_record_start(struct engine_record *r, struct engine_forward *f)
{
    enum err_code code = ERR_OK;
    if (f->islands == NULL || f->ops->capture_begin == NULL)
        return ERR_OK;
    r->n_segments = f->model->shape.n_layer + 1;
    for (int i = 0; i < ENGINE_RECORD_SIZES && code == ERR_OK; i++)
        if (1u << i <= f->sizes.max_rows && 1u << i <= f->sizes.max_logits)
            code = record_size(r, f, i);
    return code;
}

static void free_all(struct k_graph **graphs, uint32_t n, const struct k_ops *ops)
{
    for (uint32_t i = 0; graphs != NULL && i < n; i++)
        if (graphs[i] != NULL)
            ops->graph_free(graphs[i]);
    alloc_free(graphs);
}

void engine_record_done(struct engine_record *r, const struct k_ops *ops)
{
    for (int i = 0; i < ENGINE_RECORD_SIZES; i++) {
        free_all(r->segments[i], r->n_segments, ops);
        free_all(r->resident[i], r->n_segments, ops);
        free_all(r->full[i], r->n_segments, ops);
        if (r->whole[i] != NULL)
            ops->graph_free(r->whole[i]);
    }
    *r = (struct engine_record){.n_segments = 0};
}

/* The least with room for both. Rows without logits ask for nothing: the head of a step with none
 * computes nothing. */
unsigned engine_record_size(const struct engine_record *r, uint32_t n_rows, uint32_t n_logits)
{
    unsigned i = 0;
    while (i < ENGINE_RECORD_SIZES && (1u << i < n_rows || 1u << i < n_logits))
        i++;
    return i < ENGINE_RECORD_SIZES && r->segments[i] != NULL ? i : ENGINE_RECORD_SIZES;
}

struct k_graph *engine_record_whole(const struct engine_record *r, const struct engine_forward *f)
{
    const unsigned size = engine_record_size(r, f->n_rows, f->n_logits);
    if (size == ENGINE_RECORD_SIZES)
        return NULL;
    for (uint32_t i = 0; i < f->model->shape.n_layer; i++)
        if (!engine_islands_full(f->islands, i))
            return NULL;
    return r->whole[size];
}

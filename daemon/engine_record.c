#include "engine_record.h"

#include "alloc.h"
#include "engine_forward.h"
#include "engine_moe.h"

static enum err_code whole_step(struct engine_forward *f)
{
    enum err_code code = ERR_OK;
    for (uint32_t i = 0; i <= f->model->shape.n_layer && code == ERR_OK; i++) {
        code = engine_forward_segment(f, i);
        if (code == ERR_OK && i < f->model->shape.n_layer)
            code = engine_moe_in_vram(f, i);
    }
    return code;
}

/* Segment `layer`, or for n_segments the whole step. */
static enum err_code record(const struct engine_record *r, struct engine_forward *f, uint32_t layer,
                            struct k_graph **ret)
{
    enum err_code code = f->ops->capture_begin(f->stream);
    if (code != ERR_OK)
        return code;
    code = layer == r->n_segments ? whole_step(f) : engine_forward_segment(f, layer);
    const enum err_code ended = f->ops->capture_end(f->stream, ret);
    return code != ERR_OK ? code : ended;
}

static enum err_code record_size(struct engine_record *r, struct engine_forward *f, int size)
{
    enum err_code code = ERR_OK;
    r->segments[size] = alloc_zero(ALLOC_WORK, r->n_segments, sizeof(**r->segments));
    if (r->segments[size] == NULL)
        return ERR_NOMEM;
    f->n_rows = f->n_logits = 1u << size;
    engine_forward_bound(f, f->n_rows, f->n_logits);
    for (uint32_t i = 0; i < r->n_segments && code == ERR_OK; i++)
        code = record(r, f, i, &r->segments[size][i]);
    return code == ERR_OK ? record(r, f, r->n_segments, &r->whole[size]) : code;
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

void engine_record_done(struct engine_record *r, const struct k_ops *ops)
{
    for (int i = 0; i < ENGINE_RECORD_SIZES; i++) {
        for (uint32_t k = 0; r->segments[i] != NULL && k < r->n_segments; k++)
            if (r->segments[i][k] != NULL)
                ops->graph_free(r->segments[i][k]);
        if (r->whole[i] != NULL)
            ops->graph_free(r->whole[i]);
        alloc_free(r->segments[i]);
    }
    *r = (struct engine_record){.n_segments = 0};
}

/* The least recorded size with room for both; ENGINE_RECORD_SIZES: none. Rows without logits ask for
 * nothing: the head of a step with none computes nothing. */
static int size_of(const struct engine_record *r, uint32_t n_rows, uint32_t n_logits)
{
    int i = 0;
    while (i < ENGINE_RECORD_SIZES && (1u << i < n_rows || 1u << i < n_logits))
        i++;
    return i < ENGINE_RECORD_SIZES && r->segments[i] != NULL ? i : ENGINE_RECORD_SIZES;
}

struct k_graph *const *engine_record_find(const struct engine_record *r, uint32_t n_rows,
                                          uint32_t n_logits)
{
    const int size = size_of(r, n_rows, n_logits);
    return size < ENGINE_RECORD_SIZES ? r->segments[size] : NULL;
}

struct k_graph *engine_record_whole(const struct engine_record *r, const struct engine_forward *f)
{
    const int size = size_of(r, f->n_rows, f->n_logits);
    if (size == ENGINE_RECORD_SIZES)
        return NULL;
    for (uint32_t i = 0; i < f->model->shape.n_layer; i++)
        if (!engine_islands_full(f->islands, i))
            return NULL;
    return r->whole[size];
}

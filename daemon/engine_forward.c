#include "engine_forward.h"

#include <stdatomic.h>
#include <string.h>

#include "alloc.h"
#include "engine_attention.h"
#include "engine_moe.h"
#include "fault.h"

enum {
    ALIGN = 256
};

static uint64_t aligned(uint64_t n)
{
    return (n + ALIGN - 1) & ~(uint64_t)(ALIGN - 1);
}

/* The forms that n matrices read, as bits of enum k_form. */
static unsigned forms_of(const struct gguf_tensor *const *tensors, unsigned n)
{
    unsigned forms = 0;
    for (unsigned i = 0; i < n; i++)
        forms |= k_format_form((enum k_format)tensors[i]->type);
    return forms;
}

uint64_t engine_forward_page_bytes(const struct model *m, enum k_kv_type type)
{
    return aligned(m->shape.n_layer *
                   k_kv_layer_bytes(type, m->shape.n_head_kv, m->shape.head_dim));
}

/* The next `bytes` of the work buffer. The first pass, without a buffer, only counts. */
static struct k_span take(struct engine_forward *f, uint64_t bytes)
{
    const struct k_span span = {f->work, f->work_bytes};
    f->work_bytes += aligned(bytes);
    return span;
}

static struct k_act take_act(struct engine_forward *f, uint32_t rows, uint32_t n, unsigned forms)
{
    struct k_act act = {.n = n};
    act.f32 = take(f, f->ops->act_bytes(K_FORM_F32, n, rows));
    if (forms & K_FORM_Q32)
        act.q32 = take(f, f->ops->act_bytes(K_FORM_Q32, n, rows));
    if (forms & K_FORM_Q256)
        act.q256 = take(f, f->ops->act_bytes(K_FORM_Q256, n, rows));
    return act;
}

static struct k_rows take_rows(struct engine_forward *f, uint32_t n)
{
    struct k_rows rows = {.max_rows = n};
    rows.n_rows = take(f, 4);
    rows.token = take(f, n * 4ull);
    rows.position = take(f, n * 4ull);
    rows.sequence = take(f, n * 4ull);
    rows.faults = take(f, n * 4ull);
    return rows;
}

/* What the layers' matrices read, over all layers: one set of buffers serves them all. */
static void all_forms(const struct model *m, unsigned *ret_norm, unsigned *ret_heads,
                      unsigned *ret_hidden)
{
    *ret_norm = *ret_heads = *ret_hidden = 0;
    for (uint32_t i = 0; i < m->shape.n_layer; i++) {
        const struct shape_layer *l = &m->tensors.layers[i];
        const struct gguf_tensor *const norm[] = {l->q, l->k, l->v, l->router, l->gate, l->up};
        *ret_norm |= forms_of(norm, 6);
        *ret_heads |= forms_of(&l->attn_output, 1);
        *ret_hidden |= forms_of(&l->down, 1);
    }
}

/* Distinct experts of a layer at most. */
static uint64_t n_groups(const struct engine_forward *f)
{
    const uint64_t pairs = (uint64_t)f->sizes.max_rows * f->model->shape.n_expert_used;
    return pairs < f->model->shape.n_expert ? pairs : f->model->shape.n_expert;
}

/* Bytes of a layer's ids in a step of so many rows: few where it decodes, since all layers' ids are
 * downloaded as one. */
static uint64_t ids_stride(const struct engine_forward *f, uint32_t max_rows)
{
    return aligned((uint64_t)max_rows * f->model->shape.n_expert_used * 4);
}

static void place_experts(struct engine_forward *f, unsigned hidden_forms)
{
    const struct model_shape *shape = &f->model->shape;
    const uint64_t rows = f->sizes.max_rows, pairs = rows * shape->n_expert_used;
    const uint64_t groups = n_groups(f);
    f->router = take(f, rows * shape->n_expert * 4);
    f->weights = take(f, pairs * 4);
    f->n_groups = take(f, 4); /* these three in this order: they are downloaded as one */
    f->groups = take(f, groups * sizeof(struct k_group));
    f->order = take(f, pairs * 4);
    f->n_selected = take(f, 4);
    f->selected = take(f, groups * 4);
    f->everything = take(f, groups * 4);
    f->ids = take(f, ids_stride(f, f->sizes.max_rows) * shape->n_layer);
    f->hidden_act = take_act(f, (uint32_t)pairs, shape->n_ff_expert, hidden_forms);
    f->expert_out = take(f, pairs * shape->n_embd * 4);
}

static void place_guess(struct engine_forward *f)
{
    const struct model_shape *shape = &f->model->shape;
    unsigned forms = 0;
    for (uint32_t i = 0; i < shape->n_layer; i++)
        forms |= forms_of(&f->model->tensors.layers[i].router, 1);
    f->guess_act = take_act(f, ENGINE_AHEAD_MOST_ROWS, shape->n_embd, forms);
    f->guess_faults = take(f, ENGINE_AHEAD_MOST_ROWS * 4ull);
    f->guess_logits = take(f, ENGINE_AHEAD_MOST_ROWS * (uint64_t)shape->n_expert * 4);
    f->guess_weights = take(f, ENGINE_AHEAD_MOST_ROWS * (uint64_t)shape->n_expert_used * 4);
    f->guess_ids = take(f, ENGINE_AHEAD_MOST_ROWS * (uint64_t)shape->n_expert_used * 4);
}

static void place(struct engine_forward *f, const struct k_device *device)
{
    const struct model_shape *shape = &f->model->shape;
    const struct engine_forward_sizes *z = &f->sizes;
    const uint64_t rows = z->max_rows;
    unsigned norm, heads, hidden;
    all_forms(f->model, &norm, &heads, &hidden);
    f->work_bytes = 0;
    f->rows = take_rows(f, z->max_rows);
    f->logit_rows = take_rows(f, z->max_logits);
    f->kv.table = take(f, (uint64_t)z->max_sequences * z->max_pages * 4);
    f->x = take(f, rows * shape->n_embd * 4);
    f->norm_act = take_act(f, z->max_rows, shape->n_embd, norm);
    f->q = take(f, rows * shape->n_head * shape->head_dim * 4);
    f->k = take(f, rows * shape->n_head_kv * shape->head_dim * 4);
    f->v = take(f, rows * shape->n_head_kv * shape->head_dim * 4);
    f->scratch = take(f, f->ops->attention_bytes(device, shape->n_head, shape->head_dim,
                                                 z->max_rows, z->max_pages));
    f->out = take(f, rows * shape->n_embd * 4);
    f->heads_act = take_act(f, z->max_rows, shape->n_head * shape->head_dim, heads);
    f->rope = take(f, (uint64_t)z->max_pages * K_PAGE * (shape->rope_dim / 2) * 8);
    place_experts(f, hidden);
    place_guess(f);
    f->gather_index = take(f, z->max_logits * 4ull);
    f->gathered = take(f, (uint64_t)z->max_logits * shape->n_embd * 4);
    f->head_act = take_act(f, z->max_logits, shape->n_embd, forms_of(&f->model->tensors.output, 1));
    f->device_logits = take(f, (uint64_t)z->max_logits * shape->n_vocab * 4);
}

/* Of n_groups, groups and order of a layer with so many pairs. */
static uint64_t layer_bytes(const struct engine_forward *f, uint64_t pairs)
{
    return f->order.offset - f->n_groups.offset + pairs * sizeof(uint32_t);
}

uint64_t engine_forward_host_bytes(const struct model *m, const struct engine_forward_sizes *z)
{
    const uint64_t uses = m->shape.n_layer * aligned(4ull * z->max_rows * m->shape.n_expert_used);
    const uint64_t layer = 3ull * ALIGN + 4ull * z->max_rows * m->shape.n_expert_used +
                           (sizeof(struct k_group) + 8) * (uint64_t)m->shape.n_expert;
    const uint64_t guesses = 4ull * ENGINE_AHEAD_MOST_ROWS * m->shape.n_expert_used;
    return 16ull * z->max_rows + uses + layer + guesses + 8ull * z->max_logits +
           4ull * z->max_logits * m->shape.n_vocab;
}

uint64_t engine_forward_bytes(const struct k_device *device, const struct model *m,
                              const struct engine_forward_sizes *sizes)
{
    struct engine_forward f = {.model = m, .ops = k_ops(device), .sizes = *sizes};
    place(&f, device);
    return f.work_bytes;
}

static enum err_code host_arrays(struct engine_forward *f, struct err *e)
{
    const uint32_t rows = f->sizes.max_rows, logits = f->sizes.max_logits;
    const uint64_t n = engine_forward_host_bytes(f->model, &f->sizes);
    uint32_t *at = alloc_aligned(ALLOC_WORK, ALIGN, (size_t)n);
    if (at == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the %llu bytes of a step's results",
                       (unsigned long long)n);
    memset(at, 0, (size_t)n);
    const struct model_shape *shape = &f->model->shape;
    f->host = at;
    f->host_layer = (char *)at;
    f->host_groups = (const void *)(f->host_layer + (f->groups.offset - f->n_groups.offset));
    f->host_order = (const void *)(f->host_layer + (f->order.offset - f->n_groups.offset));
    f->token = at + (layer_bytes(f, (uint64_t)rows * shape->n_expert_used) + 3) / 4;
    f->position = f->token + rows;
    f->sequence = f->position + rows;
    f->faults = f->sequence + rows;
    f->logit_row = f->faults + rows;
    f->logit_faults = f->logit_row + logits;
    f->routes = f->logit_faults + logits;
    f->host_selected = f->routes + ids_stride(f, rows) / sizeof(uint32_t) * shape->n_layer;
    f->guesses = f->host_selected + 2 * (size_t)shape->n_expert;
    f->logits =
        (float *)(void *)(f->guesses + (size_t)ENGINE_AHEAD_MOST_ROWS * shape->n_expert_used);
    return ERR_OK;
}

/* What does not change from step to step: the rope table, and the list of all groups. */
static enum err_code fill_tables(struct engine_forward *f, struct err *e)
{
    const struct model_shape *shape = &f->model->shape;
    const uint32_t positions = f->sizes.max_pages * K_PAGE;
    const size_t n = (size_t)positions * (shape->rope_dim / 2) * 2;
    float *table = alloc_get(ALLOC_WORK, n * sizeof(float));
    if (table == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the rope table of %u positions", positions);
    k_rope_table(shape->rope_base, shape->rope_dim, positions, table);
    f->ops->upload(f->stream, f->rope, table, n * sizeof(float));
    for (uint32_t i = 0; i < shape->n_expert; i++)
        f->host_selected[i] = i;
    f->ops->upload(f->stream, f->everything, f->host_selected, n_groups(f) * sizeof(uint32_t));
    const enum err_code code = f->ops->wait(f->stream);
    alloc_free(table);
    return code == ERR_OK ? code : err_set(e, code, "the device failed while it was set up");
}

enum err_code engine_forward_new(struct k_device *device, struct k_stream *stream,
                                 const struct engine_forward_tiers *tiers,
                                 const struct engine_forward_sizes *sizes, struct k_buffer *pool,
                                 struct engine_forward **ret, struct err *e)
{
    struct engine_forward *f = alloc_zero(ALLOC_WORK, 1, sizeof(*f));
    if (f == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the forward pass");
    const struct model *m = tiers->experts->model;
    f->model = m;
    f->experts = tiers->experts;
    f->islands = tiers->islands;
    f->hybrid = tiers->hybrid;
    f->ops = k_ops(device);
    f->stream = stream;
    f->sizes = *sizes;
    f->kv_layer_bytes = k_kv_layer_bytes(sizes->kv_type, m->shape.n_head_kv, m->shape.head_dim);
    place(f, device);
    enum err_code code = f->ops->buffer_new(device, f->work_bytes, &f->work, e);
    if (code == ERR_OK) {
        place(f, device);
        f->kv.pool = (struct k_span){pool, 0};
        f->kv.page_bytes = engine_forward_page_bytes(m, sizes->kv_type);
        f->kv.max_pages = sizes->max_pages;
        f->kv.type = sizes->kv_type;
        f->kv.n_head_kv = m->shape.n_head_kv;
        f->kv.head_dim = m->shape.head_dim;
        code = host_arrays(f, e);
    }
    if (code == ERR_OK)
        code = fill_tables(f, e);
    if (code == ERR_OK)
        *ret = f;
    else
        engine_forward_free(f);
    return code;
}

void engine_forward_free(struct engine_forward *f)
{
    if (f == NULL)
        return;
    if (f->work != NULL)
        f->ops->buffer_free(f->work);
    alloc_free(f->host); /* all host arrays are one block */
    alloc_free(f);
}

void engine_forward_set_pages(struct engine_forward *f, uint32_t sequence, const uint32_t *pages,
                              uint32_t n)
{
    const uint64_t at = (uint64_t)sequence * f->sizes.max_pages * 4;
    f->ops->upload(f->stream, (struct k_span){f->kv.table.buffer, f->kv.table.offset + at}, pages,
                   n * sizeof(*pages));
}

/* The bound on the rows of a step by which a backend may choose its kernels: few sizes. */
static uint32_t bound(uint32_t n, uint32_t most)
{
    for (uint32_t i = 1; i <= 8 && i <= most; i *= 2)
        if (n <= i)
            return i;
    return most;
}

static void upload_step(struct engine_forward *f)
{
    f->rows.max_rows = bound(f->n_rows, f->sizes.max_rows);
    f->logit_rows.max_rows = bound(f->n_logits, f->sizes.max_logits);
    f->ids_stride = ids_stride(f, f->rows.max_rows);
    const size_t n = f->n_rows * sizeof(uint32_t), n_logits = f->n_logits * sizeof(uint32_t);
    memset(f->faults, 0, n);
    memset(f->logit_faults, 0, n_logits);
    f->ops->upload(f->stream, f->rows.n_rows, &f->n_rows, sizeof(f->n_rows));
    f->ops->upload(f->stream, f->rows.token, f->token, n);
    f->ops->upload(f->stream, f->rows.position, f->position, n);
    f->ops->upload(f->stream, f->rows.sequence, f->sequence, n);
    f->ops->upload(f->stream, f->rows.faults, f->faults, n);
    f->ops->upload(f->stream, f->logit_rows.n_rows, &f->n_logits, sizeof(f->n_logits));
    f->ops->upload(f->stream, f->logit_rows.faults, f->logit_faults, n_logits);
    f->ops->upload(f->stream, f->gather_index, f->logit_row, n_logits);
}

const uint32_t *engine_forward_routes(const struct engine_forward *f, uint32_t layer)
{
    return f->routes + layer * (f->ids_stride / sizeof(uint32_t));
}

static void download_step(struct engine_forward *f)
{
    f->ops->download(f->stream, f->routes, f->ids, f->ids_stride * f->model->shape.n_layer);
    f->ops->download(f->stream, f->faults, f->rows.faults, f->n_rows * sizeof(uint32_t));
}

/* Distinct experts of a layer whose groups the host did not see. */
static uint32_t count_groups(const struct engine_forward *f, uint32_t layer)
{
    const uint32_t *ids = engine_forward_routes(f, layer);
    uint64_t seen[K_MAX_EXPERTS / 64] = {0};
    uint32_t n = 0;
    for (size_t i = 0; i < (size_t)f->n_rows * f->model->shape.n_expert_used; i++) {
        const uint64_t bit = 1ull << ids[i] % 64;
        n += (seen[ids[i] / 64] & bit) == 0;
        seen[ids[i] / 64] |= bit;
    }
    return n;
}

static enum err_code layers(struct engine_forward *f)
{
    enum err_code code = f->ops->embed(
        &(struct k_embed){.rows = f->rows, .table = f->model->token_embd, .x = f->x}, f->stream);
    for (uint32_t i = 0; i < f->model->shape.n_layer && code == ERR_OK; i++) {
        code = engine_attention_run(f, i);
        if (code == ERR_OK)
            code = engine_moe_run(f, i);
        if (f->heartbeat != NULL)
            atomic_fetch_add(f->heartbeat, 1);
        if (code == ERR_OK && fault_hit(FAULT_ENGINE_LAYER))
            code = ERR_DEVICE;
    }
    return code;
}

/* Final norm and output matrix of the rows that want logits. */
static enum err_code head(struct engine_forward *f)
{
    const struct model_shape *shape = &f->model->shape;
    enum err_code code = f->ops->gather(&(struct k_gather){.rows = f->rows,
                                                           .to_rows = f->logit_rows,
                                                           .index = f->gather_index,
                                                           .x = f->x,
                                                           .y = f->gathered,
                                                           .width = shape->n_embd},
                                        f->stream);
    if (code == ERR_OK)
        code = f->ops->norm(&(struct k_norm){.rows = f->logit_rows,
                                             .x = f->gathered,
                                             .y = f->head_act.f32,
                                             .weight = f->model->output_norm,
                                             .n = shape->n_embd,
                                             .groups = 1,
                                             .eps = shape->rms_eps},
                            f->stream);
    if (code == ERR_OK)
        code = f->ops->quantise(&(struct k_quantise){.rows = f->logit_rows, .act = f->head_act},
                                f->stream);
    if (code == ERR_OK)
        code = f->ops->matmul(&(struct k_matmul){.rows = f->logit_rows,
                                                 .act = f->head_act,
                                                 .n_matrices = 1,
                                                 .w = {f->model->output},
                                                 .y = {f->device_logits}},
                              f->stream);
    if (code == ERR_OK)
        code = f->ops->check(
            &(struct k_check){.rows = f->logit_rows, .x = f->device_logits, .n = shape->n_vocab},
            f->stream);
    return code;
}

/* What the host did not see while a GPU computed. */
static void complete(struct engine_forward *f)
{
    for (uint32_t i = 0; i < f->model->shape.n_layer; i++)
        if (f->layer_groups[i] == ENGINE_FORWARD_UNSEEN)
            f->layer_groups[i] = count_groups(f, i);
    engine_hybrid_faults(f->hybrid, f->faults);
    for (uint32_t i = 0; i < f->n_logits; i++)
        f->logit_faults[i] |= f->faults[f->logit_row[i]];
}

enum err_code engine_forward_step(struct engine_forward *f, struct err *e)
{
    upload_step(f);
    engine_experts_step(f->experts, f->n_rows);
    if (f->islands != NULL) {
        engine_islands_step(f->islands, f->n_rows);
        engine_hybrid_step(f->hybrid, f->n_rows);
    }
    enum err_code code = layers(f);
    if (code == ERR_OK && f->n_logits > 0) {
        code = head(f);
        f->ops->download(f->stream, f->logits, f->device_logits,
                         (size_t)f->n_logits * f->model->shape.n_vocab * sizeof(float));
        f->ops->download(f->stream, f->logit_faults, f->logit_rows.faults,
                         f->n_logits * sizeof(uint32_t));
    }
    download_step(f);
    const enum err_code waited = f->ops->wait(f->stream);
    if (code == ERR_OK)
        code = waited;
    if (code == ERR_OK && f->hybrid != NULL)
        complete(f);
    if (code == ERR_UNSUPPORTED)
        return err_set(e, code, "the %s kernels lack a weight format of this model", f->ops->name);
    return code == ERR_OK ? code : err_set(e, code, "the compute device failed during a step");
}

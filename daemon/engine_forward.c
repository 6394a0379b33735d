#include "engine_forward.h"

#include <stdatomic.h>
#include <string.h>

#include "alloc.h"
#include "engine_attention.h"
#include "engine_fused.h"
#include "engine_moe.h"
#include "fault.h"

enum {
    ALIGN = 256,
    HOST_ALIGN = 4096, /* whole pages can be pinned */
    FEW_ROWS = 32      /* up to here a step's bound follows its rows */
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

/* What a step is told, one behind the other, so that it is uploaded as one; then its faults and the
 * tokens drawn, which are uploaded with it, cleared, and downloaded as one. The host has the same
 * bytes (host_inputs). */
static void place_inputs(struct engine_forward *f)
{
    const uint64_t rows = f->sizes.max_rows * 4ull, logits = f->sizes.max_logits * 4ull;
    f->rows = (struct k_rows){.max_rows = f->sizes.max_rows};
    f->logit_rows = (struct k_rows){.max_rows = f->sizes.max_logits};
    f->rows.n_rows = take(f, 4);
    f->logit_rows.n_rows = take(f, 4);
    f->rows.token = take(f, rows);
    f->rows.position = take(f, rows);
    f->rows.sequence = take(f, rows);
    f->gather_index = take(f, logits);
    f->pick_how = take(f, f->sizes.max_logits * sizeof(struct k_pick_row));
    f->rows.faults = take(f, rows);
    f->logit_rows.faults = take(f, logits);
    f->pick_ids = take(f, logits);
    f->inputs_bytes = f->work_bytes - f->rows.n_rows.offset;
    f->faults_bytes = f->work_bytes - f->rows.faults.offset;
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
    f->n_selected = take(f, 4); /* these two as well: they are uploaded as one */
    f->selected = take(f, groups * 4);
    f->everything = take(f, groups * 4);
    f->ids = take(f, ids_stride(f, f->sizes.max_rows) * shape->n_layer);
    f->hidden_act = take_act(f, (uint32_t)pairs, shape->n_ff_expert, hidden_forms);
    f->expert_out = take(f, pairs * shape->n_embd * 4);
}

/* Only where the CPU computes. */
static void place_guess(struct engine_forward *f)
{
    const struct model_shape *shape = &f->model->shape;
    const uint64_t rows = ENGINE_AHEAD_MOST_ROWS, row = shape->n_embd * sizeof(float);
    struct engine_guess *g = &f->guesses;
    unsigned forms = 0;
    if (f->ops->memory != NULL)
        return;
    for (uint32_t i = 0; i < shape->n_layer; i++)
        forms |= forms_of(&f->model->tensors.layers[i].router, 1);
    g->act = take_act(f, ENGINE_AHEAD_MOST_ROWS, shape->n_embd, forms);
    g->faults = take(f, rows * 4);
    g->logits = take(f, rows * shape->n_expert * 4);
    g->weights = take(f, rows * shape->n_expert_used * 4);
    g->ids = take(f, rows * shape->n_expert_used * 4);
    g->x = take(f, rows * row);
    g->kept = take(f, shape->n_layer * rows * row);
}

static void place(struct engine_forward *f, const struct k_device *device)
{
    const struct model_shape *shape = &f->model->shape;
    const struct engine_forward_sizes *z = &f->sizes;
    const uint64_t rows = z->max_rows;
    unsigned norm, heads, hidden;
    all_forms(f->model, &norm, &heads, &hidden);
    f->work_bytes = 0;
    place_inputs(f);
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
    f->gathered = take(f, (uint64_t)z->max_logits * shape->n_embd * 4);
    f->head_act = take_act(f, z->max_logits, shape->n_embd, forms_of(&f->model->tensors.output, 1));
    f->device_logits = take(f, (uint64_t)z->max_logits * shape->n_vocab * 4);
    f->pick_scratch = take(f, 16ull * z->max_logits * (shape->n_vocab / K_PICK_PIECE + 1));
}

/* Bytes of the arrays of the host, in this order. */
struct host_layout {
    uint64_t inputs, layer, routes, selected, batch, resident, guesses, logits;
};

static struct host_layout host_layout(const struct model *m, const struct engine_forward_sizes *z)
{
    const struct engine_forward f = {.model = m, .sizes = *z};
    const uint64_t rows = aligned(z->max_rows * 4ull), logits = aligned(z->max_logits * 4ull);
    const uint64_t pairs = (uint64_t)z->max_rows * m->shape.n_expert_used;
    return (struct host_layout){
        .inputs = 2 * aligned(4) + 4 * rows + 3 * logits +
                  aligned(z->max_logits * sizeof(struct k_pick_row)),
        .layer = aligned(4) + aligned(n_groups(&f) * sizeof(struct k_group)) + aligned(pairs * 4),
        .routes = ids_stride(&f, z->max_rows) * m->shape.n_layer,
        .selected = aligned(8ull * m->shape.n_expert),
        .batch = aligned(4) + aligned(4ull * m->shape.n_expert),
        .resident = aligned(4) + aligned(4ull * m->shape.n_expert),
        .guesses = aligned(engine_guess_host_bytes(m)),
        .logits = aligned(4ull * z->max_logits * m->shape.n_vocab)};
}

static uint64_t host_bytes(const struct host_layout *l)
{
    return l->inputs + l->layer + l->routes + l->selected + l->batch + l->resident + l->guesses +
           l->logits;
}

uint64_t engine_forward_host_bytes(const struct model *m, const struct engine_forward_sizes *sizes)
{
    const struct host_layout layout = host_layout(m, sizes);
    return host_bytes(&layout);
}

uint64_t engine_forward_bytes(const struct k_device *device, const struct model *m,
                              const struct engine_forward_sizes *sizes)
{
    struct engine_forward f = {.model = m, .ops = k_ops(device), .sizes = *sizes};
    place(&f, device);
    return f.work_bytes;
}

/* Where the host has what the device has at `span` of the inputs. */
static uint32_t *input_at(const struct engine_forward *f, struct k_span span)
{
    return (uint32_t *)(void *)((char *)f->host + (span.offset - f->rows.n_rows.offset));
}

static enum err_code host_arrays(struct engine_forward *f, struct err *e)
{
    const struct host_layout layout = host_layout(f->model, &f->sizes);
    char *at = alloc_aligned(ALLOC_WORK, HOST_ALIGN, (size_t)host_bytes(&layout));
    if (at == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the %llu bytes of a step's results",
                       (unsigned long long)host_bytes(&layout));
    memset(at, 0, (size_t)host_bytes(&layout));
    f->host = at;
    f->token = input_at(f, f->rows.token);
    f->position = input_at(f, f->rows.position);
    f->sequence = input_at(f, f->rows.sequence);
    f->logit_row = input_at(f, f->gather_index);
    f->faults = input_at(f, f->rows.faults);
    f->logit_faults = input_at(f, f->logit_rows.faults);
    f->how = (struct k_pick_row *)(void *)input_at(f, f->pick_how);
    f->picked = input_at(f, f->pick_ids);
    f->host_layer = at += layout.inputs;
    f->host_groups = (const void *)(at + (f->groups.offset - f->n_groups.offset));
    f->host_order = (const void *)(at + (f->order.offset - f->n_groups.offset));
    f->routes = (uint32_t *)(void *)(at += layout.layer);
    f->host_selected = (uint32_t *)(void *)(at += layout.routes);
    f->host_batch = at += layout.selected;
    f->host_resident = at += layout.batch;
    engine_guess_start(&f->guesses, f->model, at += layout.resident);
    f->logits = (float *)(void *)(at + layout.guesses);
    /* Without it copies take longer; that is all. */
    struct err refused = {.code = ERR_OK};
    f->pinned =
        f->islands != NULL && f->ops->host_register != NULL &&
        f->ops->host_register(f->islands->device, f->host, host_bytes(&layout), &refused) == ERR_OK;
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
    engine_record_done(&f->record, f->ops);
    if (f->pinned)
        f->ops->host_unregister(f->islands->device, f->host);
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
    for (uint32_t i = 1; i <= FEW_ROWS && i <= most; i *= 2)
        if (n <= i)
            return i;
    return most;
}

void engine_forward_bound(struct engine_forward *f, uint32_t n_rows, uint32_t n_logits)
{
    f->rows.max_rows = bound(n_rows, f->sizes.max_rows);
    f->logit_rows.max_rows = bound(n_logits, f->sizes.max_logits);
    f->ids_stride = ids_stride(f, f->rows.max_rows);
}

static void upload_step(struct engine_forward *f)
{
    memset(f->faults, 0, f->faults_bytes);
    *input_at(f, f->rows.n_rows) = f->n_rows;
    *input_at(f, f->logit_rows.n_rows) = f->n_logits;
    if (f->pinned)
        f->ops->fetch(f->stream, f->rows.n_rows, f->host, f->inputs_bytes);
    else
        f->ops->upload(f->stream, f->rows.n_rows, f->host, f->inputs_bytes);
}

const uint32_t *engine_forward_routes(const struct engine_forward *f, uint32_t layer)
{
    return f->routes + layer * (f->ids_stride / sizeof(uint32_t));
}

static void download_step(struct engine_forward *f)
{
    f->ops->download(f->stream, f->routes, f->ids, f->ids_stride * f->model->shape.n_layer);
    f->ops->download(f->stream, f->faults, f->rows.faults, f->faults_bytes);
    if (f->logits_stay)
        return;
    f->ops->download(f->stream, f->logits, f->device_logits,
                     (size_t)f->n_logits * f->model->shape.n_vocab * sizeof(float));
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
        code = engine_fused_enter(f, &(struct k_enter){.rows = f->logit_rows,
                                                       .x = f->gathered,
                                                       .norm = f->model->output_norm,
                                                       .act = f->head_act,
                                                       .eps = shape->rms_eps});
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
    if (code == ERR_OK && f->ops->pick != NULL)
        code = f->ops->pick(&(struct k_pick){.rows = f->logit_rows,
                                             .logits = f->device_logits,
                                             .how = f->pick_how,
                                             .ids = f->pick_ids,
                                             .scratch = f->pick_scratch,
                                             .n_vocab = shape->n_vocab},
                            f->stream);
    return code;
}

enum err_code engine_forward_wait(struct engine_forward *f)
{
    if (f->hybrid == NULL)
        return f->ops->wait(f->stream);
    const uint64_t start = ticks_ns(f->hybrid->ticks);
    const enum err_code code = f->ops->wait(f->stream);
    f->hybrid->gpu_wait_ns += ticks_ns(f->hybrid->ticks) - start;
    return code;
}

enum err_code engine_forward_segment(struct engine_forward *f, uint32_t layer)
{
    enum err_code code = ERR_OK;
    if (layer == 0)
        code = f->ops->embed(
            &(struct k_embed){.rows = f->rows, .table = f->model->token_embd, .x = f->x},
            f->stream);
    else if (layer == f->model->shape.n_layer) /* before, attention takes the sum along */
        code = engine_moe_sum(f);
    if (code == ERR_OK && layer == 0)
        code = engine_guess_from(f, 0);
    if (code == ERR_OK && layer < f->model->shape.n_layer)
        code = engine_attention_run(f, layer);
    if (code == ERR_OK && layer < f->model->shape.n_layer)
        return engine_moe_route(f, layer);
    return code == ERR_OK && f->n_logits > 0 ? head(f) : code;
}

/* A layer, or behind the last one the head. */
static enum err_code layer(struct engine_forward *f, uint32_t i)
{
    const bool is_layer = i < f->model->shape.n_layer;
    enum err_code code;
    if (f->recorded != NULL && is_layer && engine_islands_full(f->islands, i)) {
        engine_experts_poll(f->experts);
        engine_moe_unseen(f, i);
        return f->ops->replay(f->record.full[f->record_size][i], f->stream);
    }
    code = f->recorded != NULL ? f->ops->replay(f->recorded[i], f->stream)
                               : engine_forward_segment(f, i);
    engine_experts_poll(f->experts);
    return code == ERR_OK && is_layer ? engine_moe_compute(f, i) : code;
}

/* The layers, and the head: a recorded piece at a time where there is a record. */
static enum err_code layers(struct engine_forward *f)
{
    const uint32_t n = f->model->shape.n_layer;
    const unsigned size = engine_record_size(&f->record, f->n_rows, f->n_logits);
    enum err_code code = ERR_OK;
    f->record_size = size;
    f->recorded = size < ENGINE_RECORD_SIZES ? f->record.segments[size] : NULL;
    for (uint32_t i = 0; i <= n && code == ERR_OK; i++) {
        code = layer(f, i);
        if (f->heartbeat != NULL)
            atomic_fetch_add(f->heartbeat, 1);
        if (code == ERR_OK && i < n && fault_hit(FAULT_ENGINE_LAYER))
            code = ERR_DEVICE;
    }
    return code;
}

/* All experts are in islands: the step is one recorded piece. */
static enum err_code replay_whole(struct engine_forward *f, struct k_graph *whole)
{
    for (uint32_t i = 0; i < f->model->shape.n_layer; i++) {
        engine_moe_unseen(f, i);
        if (fault_hit(FAULT_ENGINE_LAYER))
            return ERR_DEVICE;
    }
    if (f->heartbeat != NULL)
        atomic_fetch_add(f->heartbeat, 1);
    return f->ops->replay(whole, f->stream);
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

enum err_code engine_forward_record(struct engine_forward *f, struct err *e)
{
    const enum err_code code = engine_record_start(&f->record, f);
    return code == ERR_OK ? code : err_set(e, code, "the GPU failed while its steps were recorded");
}

enum err_code engine_forward_step(struct engine_forward *f, struct err *e)
{
    engine_forward_bound(f, f->n_rows, f->n_logits);
    upload_step(f);
    engine_experts_step(f->experts, f->n_rows);
    engine_guess_step(f);
    if (f->islands != NULL) {
        engine_islands_step(f->islands, f->n_rows);
        engine_hybrid_step(f->hybrid, f->n_rows);
    }
    struct k_graph *whole = engine_record_whole(&f->record, f);
    enum err_code code = whole != NULL ? replay_whole(f, whole) : layers(f);
    download_step(f);
    const enum err_code waited = engine_forward_wait(f);
    if (code == ERR_OK)
        code = waited;
    if (code == ERR_OK && f->hybrid != NULL)
        complete(f);
    if (code == ERR_UNSUPPORTED)
        return err_set(e, code, "the %s kernels lack a weight format of this model", f->ops->name);
    return code == ERR_OK ? code : err_set(e, code, "the compute device failed during a step");
}

#include "engine_hybrid.h"

#include <string.h>

enum {
    ALIGN = 128, /* lines of the link */
    FEW_ROWS =
        32 /* these come with the layer's groups in any case: it costs less than to ask again */
};

/* ---- start ---- */

static struct k_span take(struct engine_hybrid *h, uint64_t bytes)
{
    const struct k_span span = {h->work, h->work_bytes};
    h->work_bytes += (bytes + ALIGN - 1) & ~(uint64_t)(ALIGN - 1);
    return span;
}

static struct k_act take_act(struct engine_hybrid *h, uint32_t rows, uint32_t n, unsigned forms)
{
    struct k_act act = {.n = n};
    act.f32 = take(h, h->ops->act_bytes(K_FORM_F32, n, rows));
    if (forms & K_FORM_Q32)
        act.q32 = take(h, h->ops->act_bytes(K_FORM_Q32, n, rows));
    if (forms & K_FORM_Q256)
        act.q256 = take(h, h->ops->act_bytes(K_FORM_Q256, n, rows));
    return act;
}

/* The first pass, without a buffer, only counts. */
static void place(struct engine_hybrid *h, uint32_t max_rows)
{
    const struct model_shape *shape = &h->model->shape;
    const uint32_t pairs = max_rows * shape->n_expert_used;
    const uint32_t groups = pairs < shape->n_expert ? pairs : shape->n_expert;
    unsigned norm = 0, hidden = 0;
    for (uint32_t i = 0; i < shape->n_layer; i++) {
        const struct shape_layer *l = &h->model->tensors.layers[i];
        norm |= k_format_form((enum k_format)l->gate->type);
        norm |= k_format_form((enum k_format)l->up->type);
        hidden |= k_format_form((enum k_format)l->down->type);
    }
    h->work_bytes = 0;
    h->rows = (struct k_rows){.max_rows = max_rows};
    h->rows.n_rows = take(h, 4);
    h->rows.faults = take(h, max_rows * 4ull);
    h->norm_act = take_act(h, max_rows, shape->n_embd, norm);
    h->hidden_act = take_act(h, pairs, shape->n_ff_expert, hidden);
    h->groups = take(h, groups * sizeof(struct k_group));
    h->order = take(h, pairs * 4ull);
    h->n_selected = take(h, 4);
    h->selected = take(h, groups * 4ull);
    h->sent = take(h, pairs * 4ull);
    h->out = take(h, (uint64_t)pairs * shape->n_embd * 4);
}

uint64_t engine_hybrid_bytes(const struct k_device *cpu, const struct model *m, uint32_t max_rows)
{
    struct engine_hybrid h = {.ops = k_ops(cpu), .model = m};
    place(&h, max_rows);
    return h.work_bytes;
}

enum err_code engine_hybrid_start(struct engine_hybrid *h,
                                  const struct engine_hybrid_options *options, struct err *e)
{
    *h = (struct engine_hybrid){.ops = k_ops(options->cpu),
                                .gpu = options->gpu,
                                .gpu_ops = k_ops(options->gpu),
                                .stream = options->cpu_stream,
                                .model = options->model,
                                .ticks = options->ticks,
                                .rates = options->rates};
    place(h, options->max_rows);
    const enum err_code code = h->ops->buffer_new(options->cpu, h->work_bytes, &h->work, e);
    if (code != ERR_OK)
        return code;
    place(h, options->max_rows);
    struct err refused = {.code = ERR_OK};
    h->pinned = h->gpu_ops->host_register != NULL &&
                h->gpu_ops->host_register(h->gpu, h->ops->buffer_host(h->work), h->work_bytes,
                                          &refused) == ERR_OK;
    return ERR_OK;
}

void engine_hybrid_done(struct engine_hybrid *h)
{
    if (h->work == NULL)
        return;
    if (h->pinned)
        h->gpu_ops->host_unregister(h->gpu, h->ops->buffer_host(h->work));
    h->ops->buffer_free(h->work);
    *h = (struct engine_hybrid){.work = NULL};
}

/* ---- a step ---- */

static void *host_at(const struct engine_hybrid *h, struct k_span span)
{
    return (char *)h->ops->buffer_host(h->work) + span.offset;
}

void engine_hybrid_step(struct engine_hybrid *h, uint32_t n_rows)
{
    h->n_rows = n_rows;
    memset(host_at(h, h->rows.faults), 0, n_rows * sizeof(uint32_t));
    memcpy(host_at(h, h->rows.n_rows), &n_rows, sizeof(n_rows));
}

float *engine_hybrid_rows(struct engine_hybrid *h)
{
    if (h->rows_there)
        return NULL;
    h->rows_there = true;
    return host_at(h, h->norm_act.f32);
}

float *engine_hybrid_recorded(const struct engine_hybrid *h)
{
    return host_at(h, h->norm_act.f32);
}

float *engine_hybrid_layer(struct engine_hybrid *h)
{
    const bool probable = h->n_rows <= FEW_ROWS || h->took_part;
    h->quantised = h->rows_there = h->took_part = false;
    h->n_sent = 0;
    return probable ? engine_hybrid_rows(h) : NULL;
}

/* The rows in the forms that the experts read, and the layer's groups. */
static enum err_code prepare(struct engine_hybrid *h, uint32_t n_groups,
                             const struct k_group *groups, const uint32_t *order)
{
    const uint64_t pairs = (uint64_t)h->n_rows * h->model->shape.n_expert_used;
    h->ops->upload(h->stream, h->groups, groups, n_groups * sizeof(*groups));
    h->ops->upload(h->stream, h->order, order, pairs * sizeof(*order));
    h->quantised = true;
    return h->ops->quantise(&(struct k_quantise){.rows = h->rows, .act = h->norm_act}, h->stream);
}

/* What the rates of the CPU are, learned from a batch of experts. */
static void learn(struct engine_hybrid *h, uint64_t bytes, uint64_t rows, uint32_t n, uint64_t ns)
{
    h->cpu_ns += ns;
    if (rows == n)
        engine_split_learn(&h->rates.cpu, bytes, ns);
    else if (rows >= 8ull * n)
        engine_split_learn(&h->rates.cpu_row, bytes / n * rows, ns);
}

enum err_code engine_hybrid_compute(struct engine_hybrid *h, uint32_t layer, uint32_t n_groups,
                                    const struct k_group *groups, const uint32_t *order,
                                    const uint32_t *selected, uint32_t n)
{
    const struct k_experts *experts = &h->model->layers[layer].experts;
    const uint64_t start = ticks_ns(h->ticks);
    h->took_part = true;
    enum err_code code = h->quantised ? ERR_OK : prepare(h, n_groups, groups, order);
    h->ops->upload(h->stream, h->n_selected, &n, sizeof(n));
    h->ops->upload(h->stream, h->selected, selected, n * sizeof(n));
    if (code == ERR_OK)
        code = h->ops->moe_gate_up(&(struct k_moe_gate_up){.rows = h->rows,
                                                           .experts = *experts,
                                                           .groups = h->groups,
                                                           .order = h->order,
                                                           .n_selected = h->n_selected,
                                                           .selected = h->selected,
                                                           .x = h->norm_act,
                                                           .h = h->hidden_act},
                                   h->stream);
    if (code == ERR_OK)
        code = h->ops->moe_down(&(struct k_moe_down){.rows = h->rows,
                                                     .experts = *experts,
                                                     .groups = h->groups,
                                                     .order = h->order,
                                                     .n_selected = h->n_selected,
                                                     .selected = h->selected,
                                                     .h = h->hidden_act,
                                                     .out = h->out},
                                h->stream);
    if (code == ERR_OK)
        code = h->ops->wait(h->stream);
    uint64_t rows = 0;
    for (uint32_t i = 0; i < n; i++)
        rows += groups[selected[i]].count;
    learn(h, n * h->model->expert_bytes[layer], rows, n, ticks_ns(h->ticks) - start);
    return code;
}

void engine_hybrid_send(struct engine_hybrid *h, struct k_stream *stream, struct k_span to,
                        const struct k_group *groups, const uint32_t *order,
                        const uint32_t *selected, uint32_t n)
{
    const uint32_t bytes = h->model->shape.n_embd * sizeof(float);
    const char *from = host_at(h, h->out);
    uint32_t *rows = (uint32_t *)host_at(h, h->sent) + h->n_sent, count = 0;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < groups[selected[i]].count; k++)
            rows[count++] = order[groups[selected[i]].first + k];
    h->n_sent += count;
    if (h->pinned && h->gpu_ops->fetch_rows != NULL) {
        (void)h->gpu_ops->fetch_rows(&(struct k_fetch_rows){to, from, rows, count, bytes},
                                     stream); /* a wait tells */
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t at = rows[i] * (uint64_t)bytes;
        const struct k_span there = {to.buffer, to.offset + at};
        if (h->pinned)
            h->gpu_ops->fetch(stream, there, from + at, bytes);
        else
            h->gpu_ops->upload(stream, there, from + at, bytes);
    }
}

void engine_hybrid_faults(const struct engine_hybrid *h, uint32_t *faults)
{
    const uint32_t *own = host_at(h, h->rows.faults);
    for (uint32_t i = 0; i < h->n_rows; i++)
        faults[i] |= own[i];
}

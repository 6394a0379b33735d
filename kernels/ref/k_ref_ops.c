/* The table of operations by the oracle: each a plain loop over rows. */
#include <string.h>

#include "k_float.h"
#include "k_format.h"
#include "k_ref.h"

static void set_fault(const struct k_rows *rows, uint32_t row, bool fault)
{
    if (fault)
        ((uint32_t *)k_host_at(rows->faults))[row] = 1;
}

static uint8_t *row_of(struct k_span span, uint64_t stride, uint32_t row)
{
    return (uint8_t *)k_host_at(span) + stride * row;
}

static struct k_span form_span(const struct k_act *act, enum k_form form)
{
    return form == K_FORM_F32 ? act->f32 : form == K_FORM_Q32 ? act->q32 : act->q256;
}

static enum err_code embed(const struct k_embed *a, struct k_stream *s)
{
    (void)s;
    const uint32_t n = a->table.n_in, *tokens = k_host_at(a->rows.token);
    const uint64_t stride = k_format_bytes(a->table.format, 1, n);
    const uint8_t *table = k_host_at(a->table.data);
    float *x = k_host_at(a->x);
    for (uint32_t r = 0; r < k_host_count(a->rows.n_rows); r++)
        k_dequantise(a->table.format, table + stride * tokens[r], x + (size_t)n * r, n);
    return ERR_OK;
}

static enum err_code norm(const struct k_norm *a, struct k_stream *s)
{
    (void)s;
    const float *x = k_host_at(a->x), *weight = k_host_at(a->weight);
    float *y = k_host_at(a->y);
    const size_t vectors = (size_t)k_host_count(a->rows.n_rows) * a->groups;
    for (size_t v = 0; v < vectors; v++)
        k_ref_norm(x + v * a->n, weight, y + v * a->n, a->n, a->eps);
    return ERR_OK;
}

static void quantise_row(const struct k_rows *rows, const struct k_act *act, uint32_t row)
{
    const float *x = (const float *)(const void *)row_of(act->f32, (uint64_t)act->n * 4, row);
    if (act->q32.buffer != NULL)
        set_fault(rows, row,
                  k_ref_quantise32(x, act->n,
                                   row_of(act->q32, k_format_act_bytes(K_FORM_Q32, act->n), row)));
    if (act->q256.buffer != NULL)
        set_fault(rows, row,
                  k_ref_quantise256(
                      x, act->n, row_of(act->q256, k_format_act_bytes(K_FORM_Q256, act->n), row)));
}

static enum err_code quantise(const struct k_quantise *a, struct k_stream *s)
{
    (void)s;
    for (uint32_t r = 0; r < k_host_count(a->rows.n_rows); r++)
        quantise_row(&a->rows, &a->act, r);
    return ERR_OK;
}

static enum err_code matmul(const struct k_matmul *a, struct k_stream *s)
{
    (void)s;
    const uint32_t n_rows = k_host_count(a->rows.n_rows);
    for (uint32_t m = 0; m < a->n_matrices; m++) {
        const struct k_matrix *w = &a->w[m];
        const enum k_form form = k_format_form(w->format);
        const uint64_t x_stride =
            form == K_FORM_F32 ? (uint64_t)w->n_in * 4 : k_format_act_bytes(form, w->n_in);
        const uint64_t w_stride = k_format_bytes(w->format, 1, w->n_in);
        float *y = k_host_at(a->y[m]);
        for (uint32_t r = 0; r < n_rows; r++)
            for (uint32_t o = 0; o < w->n_out; o++)
                y[(size_t)r * w->n_out + o] =
                    k_ref_dot(w->format, row_of(w->data, w_stride, o),
                              row_of(form_span(&a->act, form), x_stride, r), w->n_in);
    }
    return ERR_OK;
}

static enum err_code rope(const struct k_rope *a, struct k_stream *s)
{
    (void)s;
    const uint32_t half = a->rope_dim / 2, *position = k_host_at(a->rows.position);
    const float *table = k_host_at(a->table);
    float *x = k_host_at(a->x);
    for (uint32_t r = 0; r < k_host_count(a->rows.n_rows); r++)
        for (uint32_t h = 0; h < a->heads; h++) {
            float *v = x + ((size_t)r * a->heads + h) * a->head_dim;
            for (uint32_t i = 0; i < half; i++) {
                const float *cs = table + ((size_t)position[r] * half + i) * 2;
                const float x0 = v[i], x1 = v[i + half];
                const float x1s = x1 * cs[1], x0s = x0 * cs[1];
                v[i] = k_float_fma(x0, cs[0], -x1s);
                v[i + half] = k_float_fma(x1, cs[0], x0s);
            }
        }
    return ERR_OK;
}

static uint8_t *page_layer(const struct k_kv *kv, uint32_t sequence, uint32_t page)
{
    const uint32_t *table = k_host_at(kv->table);
    const uint32_t id = table[(size_t)sequence * kv->max_pages + page];
    return (uint8_t *)k_host_at(kv->pool) + kv->page_bytes * id + kv->layer_offset;
}

static enum err_code kv_write(const struct k_kv_write *a, struct k_stream *s)
{
    (void)s;
    const uint32_t *position = k_host_at(a->rows.position), *sequence = k_host_at(a->rows.sequence);
    const size_t width = (size_t)a->kv.n_head_kv * a->kv.head_dim;
    const float *k = k_host_at(a->k), *v = k_host_at(a->v);
    for (uint32_t r = 0; r < k_host_count(a->rows.n_rows); r++)
        set_fault(&a->rows, r,
                  k_ref_kv_write(page_layer(&a->kv, sequence[r], position[r] / K_PAGE), a->kv.type,
                                 a->kv.n_head_kv, a->kv.head_dim, position[r] % K_PAGE,
                                 k + r * width, v + r * width));
    return ERR_OK;
}

/* Scratch of the oracle: page pointers of one row, then the work of one head. */
static uint64_t attention_bytes(const struct k_device *d, uint32_t n_head, uint32_t head_dim,
                                uint32_t max_rows, uint32_t max_pages)
{
    (void)d, (void)n_head, (void)max_rows;
    return (uint64_t)max_pages * sizeof(uint8_t *) + (3 * (uint64_t)head_dim + K_PAGE) * 4;
}

static enum err_code attention(const struct k_attention *a, struct k_stream *s)
{
    (void)s;
    const uint32_t *position = k_host_at(a->rows.position), *sequence = k_host_at(a->rows.sequence);
    const uint8_t **pages = k_host_at(a->scratch);
    float *work = (float *)(void *)(pages + a->kv.max_pages);
    const uint32_t dim = a->kv.head_dim, shared = a->n_head / a->kv.n_head_kv;
    const float *q = k_host_at(a->q);
    float *y = k_host_at(a->y);
    for (uint32_t r = 0; r < k_host_count(a->rows.n_rows); r++) {
        for (uint32_t p = 0; p <= position[r] / K_PAGE; p++)
            pages[p] = page_layer(&a->kv, sequence[r], p);
        for (uint32_t h = 0; h < a->n_head; h++) {
            const size_t at = ((size_t)r * a->n_head + h) * dim;
            set_fault(&a->rows, r,
                      k_ref_attention_head(q + at, pages, position[r] + 1, &a->kv, h / shared,
                                           a->scale, work, y + at));
        }
    }
    return ERR_OK;
}

static enum err_code add(const struct k_add *a, struct k_stream *s)
{
    (void)s;
    float *x = k_host_at(a->x);
    const float *y = k_host_at(a->y);
    for (size_t i = 0; i < (size_t)k_host_count(a->rows.n_rows) * a->n; i++)
        x[i] = x[i] + y[i];
    return ERR_OK;
}

static enum err_code router(const struct k_router *a, struct k_stream *s)
{
    (void)s;
    const float *logits = k_host_at(a->logits);
    uint32_t *ids = k_host_at(a->ids);
    float *weights = k_host_at(a->weights), work[K_MAX_EXPERTS];
    for (uint32_t r = 0; r < k_host_count(a->rows.n_rows); r++)
        set_fault(&a->rows, r,
                  k_ref_router(a, logits + (size_t)r * a->n_expert, work, ids + r * a->n_used,
                               weights + r * a->n_used));
    return ERR_OK;
}

static enum err_code grouping(const struct k_grouping *a, struct k_stream *s)
{
    (void)s;
    k_ref_grouping(a, k_host_count(a->rows.n_rows));
    return ERR_OK;
}

static const uint8_t *slice(const struct k_experts *x, uint32_t expert, int which)
{
    const uint64_t *slots = k_host_at(x->slots);
    return (const uint8_t *)x->arena->data + slots[3 * (size_t)expert + (size_t)which];
}

static const uint8_t *act_row(const struct k_act *act, enum k_format format, uint32_t row)
{
    const enum k_form form = k_format_form(format);
    const uint64_t stride =
        form == K_FORM_F32 ? (uint64_t)act->n * 4 : k_format_act_bytes(form, act->n);
    return row_of(form_span(act, form), stride, row);
}

static enum err_code moe_gate_up(const struct k_moe_gate_up *a, struct k_stream *s)
{
    (void)s;
    const struct k_experts *x = &a->experts;
    const struct k_group *groups = k_host_at(a->groups);
    const uint32_t *order = k_host_at(a->order), *selected = k_host_at(a->selected);
    const uint64_t gate_stride = k_format_bytes(x->gate, 1, x->n_embd);
    const uint64_t up_stride = k_format_bytes(x->up, 1, x->n_embd);
    for (uint32_t i = 0; i < k_host_count(a->n_selected); i++) {
        const struct k_group *g = &groups[selected[i]];
        const uint8_t *gate = slice(x, g->expert, 0), *up = slice(x, g->expert, 1);
        for (uint32_t p = g->first; p < g->first + g->count; p++) {
            const uint32_t pair = order[p], row = pair / x->n_used;
            float *h = (float *)(void *)row_of(a->h.f32, (uint64_t)x->n_ff * 4, pair);
            for (uint32_t o = 0; o < x->n_ff; o++)
                h[o] = k_float_swiglu(
                    k_ref_dot(x->gate, gate + gate_stride * o, act_row(&a->x, x->gate, row),
                              x->n_embd),
                    k_ref_dot(x->up, up + up_stride * o, act_row(&a->x, x->up, row), x->n_embd));
            bool fault = false;
            if (a->h.q32.buffer != NULL)
                fault |= k_ref_quantise32(
                    h, x->n_ff, row_of(a->h.q32, k_format_act_bytes(K_FORM_Q32, x->n_ff), pair));
            if (a->h.q256.buffer != NULL)
                fault |= k_ref_quantise256(
                    h, x->n_ff, row_of(a->h.q256, k_format_act_bytes(K_FORM_Q256, x->n_ff), pair));
            set_fault(&a->rows, row, fault);
        }
    }
    return ERR_OK;
}

static enum err_code moe_down(const struct k_moe_down *a, struct k_stream *s)
{
    (void)s;
    const struct k_experts *x = &a->experts;
    const struct k_group *groups = k_host_at(a->groups);
    const uint32_t *order = k_host_at(a->order), *selected = k_host_at(a->selected);
    const uint64_t stride = k_format_bytes(x->down, 1, x->n_ff);
    float *out = k_host_at(a->out);
    for (uint32_t i = 0; i < k_host_count(a->n_selected); i++) {
        const struct k_group *g = &groups[selected[i]];
        const uint8_t *down = slice(x, g->expert, 2);
        for (uint32_t p = g->first; p < g->first + g->count; p++)
            for (uint32_t o = 0; o < x->n_embd; o++)
                out[(size_t)order[p] * x->n_embd + o] = k_ref_dot(
                    x->down, down + stride * o, act_row(&a->h, x->down, order[p]), x->n_ff);
    }
    return ERR_OK;
}

static enum err_code moe_sum(const struct k_moe_sum *a, struct k_stream *s)
{
    (void)s;
    const float *weights = k_host_at(a->weights), *out = k_host_at(a->out);
    float *x = k_host_at(a->x);
    for (uint32_t r = 0; r < k_host_count(a->rows.n_rows); r++)
        for (uint32_t i = 0; i < a->n; i++) {
            float y = 0.0f;
            for (uint32_t k = 0; k < a->n_used; k++) {
                const size_t pair = (size_t)r * a->n_used + k;
                y = k_float_fma(weights[pair], out[pair * a->n + i], y);
            }
            x[(size_t)r * a->n + i] = x[(size_t)r * a->n + i] + y;
        }
    return ERR_OK;
}

static enum err_code gather(const struct k_gather *a, struct k_stream *s)
{
    (void)s;
    const uint32_t *index = k_host_at(a->index), *faults = k_host_at(a->rows.faults);
    for (uint32_t i = 0; i < k_host_count(a->to_rows.n_rows); i++) {
        memcpy(row_of(a->y, (uint64_t)a->width * 4, i),
               row_of(a->x, (uint64_t)a->width * 4, index[i]), (size_t)a->width * 4);
        set_fault(&a->to_rows, i, faults[index[i]] != 0);
    }
    return ERR_OK;
}

static enum err_code check(const struct k_check *a, struct k_stream *s)
{
    (void)s;
    const float *x = k_host_at(a->x);
    for (uint32_t r = 0; r < k_host_count(a->rows.n_rows); r++) {
        bool finite = true;
        for (uint32_t i = 0; i < a->n; i++)
            finite &= k_float_finite(x[(size_t)r * a->n + i]);
        set_fault(&a->rows, r, !finite);
    }
    return ERR_OK;
}

static const struct k_ops ops = {
    .name = "reference",
    .buffer_new = k_host_buffer_new,
    .buffer_free = k_host_buffer_free,
    .buffer_host = k_host_buffer_host,
    .upload = k_host_upload,
    .download = k_host_download,
    .copy = k_host_copy,
    .stream_new = k_host_stream_new,
    .stream_free = k_host_stream_free,
    .wait = k_host_wait,
    .act_bytes = k_host_act_bytes,
    .attention_bytes = attention_bytes,
    .embed = embed,
    .norm = norm,
    .quantise = quantise,
    .matmul = matmul,
    .rope = rope,
    .kv_write = kv_write,
    .attention = attention,
    .add = add,
    .router = router,
    .grouping = grouping,
    .moe_gate_up = moe_gate_up,
    .moe_down = moe_down,
    .moe_sum = moe_sum,
    .gather = gather,
    .check = check,
};

const struct k_ops *k_ref_ops(void)
{
    return &ops;
}

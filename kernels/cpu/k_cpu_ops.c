/* The threaded CPU backend: splits operations over outputs, rows, heads or experts, never a sum,
 * and calls the inner loops of its level. */
#include "k_cpu_ops.h"

#include <stdatomic.h>
#include <string.h>

#include "k_cpu_inner.h"
#include "k_float.h"
#include "k_format.h"
#include "k_host.h"
#include "k_pool.h"
#include "k_ref.h"

enum {
    /* A piece of a product reads about this much of the weights: small enough to spread, large
     * enough to stream. */
    PIECE_BYTES = 48 * 1024,
    MAX_ROW_TILE = K_CPU_TILE_ROWS,
    /* Inner outputs of an expert in a piece: whole blocks of either form, so that it quantises its
     * own. */
    UNIT = 256,
    /* Few experts: pieces are smaller until each thread has so many, but have so many outputs. */
    FEW_PIECES = 4,
    LEAST_OUTPUTS = 32
};

/* Per-thread scratch: the inner loops' work, then vectors of a unit of an expert. */
struct scratch {
    uint8_t work[K_CPU_WORK_BYTES];
    float up[MAX_ROW_TILE][UNIT];
    float experts[K_MAX_EXPERTS]; /* of the router */
    const void *x[MAX_ROW_TILE];
    float *y[MAX_ROW_TILE], *z[MAX_ROW_TILE];
};

size_t k_cpu_ops_scratch_bytes(void)
{
    return sizeof(struct scratch);
}

static void set_fault(const struct k_rows *rows, uint32_t row)
{
    __atomic_store_n((uint32_t *)k_host_at(rows->faults) + row, 1, __ATOMIC_RELAXED);
}

static struct k_span form_span(const struct k_act *act, enum k_form form)
{
    return form == K_FORM_F32 ? act->f32 : form == K_FORM_Q32 ? act->q32 : act->q256;
}

/* Start and stride of an activation's rows in the form that `format` reads. */
static const uint8_t *act_rows(const struct k_act *act, enum k_format format, uint64_t *ret_stride)
{
    const enum k_form form = k_format_form(format);
    *ret_stride = form == K_FORM_F32 ? (uint64_t)act->n * 4 : k_format_act_bytes(form, act->n);
    return k_host_at(form_span(act, form));
}

/* Outputs of one piece: a multiple of 16. */
static uint32_t piece_outputs(enum k_format format, uint32_t n_out, uint32_t n_in)
{
    const uint64_t row = k_format_bytes(format, 1, n_in);
    uint64_t n = PIECE_BYTES / row / 16 * 16;
    n = n < 16 ? 16 : n;
    return n > n_out ? n_out : (uint32_t)n;
}

struct job {
    const struct k_cpu_inner *inner;
    struct k_pool *pool;
    const void *args;
    uint32_t n_rows;
    uint32_t pieces[K_MATMUL_MAX];  /* matmul: of each matrix */
    uint32_t outputs[K_MATMUL_MAX]; /* of a piece; attention: its heads */
    _Atomic uint8_t *parts_done;    /* moe_gate_up: of each unit; NULL: a unit is one piece */
};

static struct job job_of(struct k_stream *s, const void *args, const struct k_rows *rows)
{
    const struct k_host *h = k_host_of(s->device);
    return (struct job){
        .inner = &h->inner, .pool = h->pool, .args = args, .n_rows = k_host_count(rows->n_rows)};
}

static void matmul_piece(const void *context, uint32_t piece, uint32_t thread)
{
    const struct job *job = context;
    const struct k_matmul *a = job->args;
    struct scratch *s = k_pool_scratch(job->pool, thread);
    uint32_t m = 0;
    while (piece >= job->pieces[m])
        piece -= job->pieces[m++];
    const struct k_matrix *w = &a->w[m];
    const uint32_t first = piece * job->outputs[m];
    const uint32_t n = w->n_out - first < job->outputs[m] ? w->n_out - first : job->outputs[m];
    const uint8_t *weights =
        (const uint8_t *)k_host_at(w->data) + k_format_bytes(w->format, first, w->n_in);
    uint64_t stride;
    const uint8_t *x = act_rows(&a->act, w->format, &stride);
    float *y = (float *)k_host_at(a->y[m]) + first;
    for (uint32_t r = 0; r < job->n_rows; r += MAX_ROW_TILE) {
        const uint32_t rows = job->n_rows - r < MAX_ROW_TILE ? job->n_rows - r : MAX_ROW_TILE;
        for (uint32_t i = 0; i < rows; i++) {
            s->x[i] = x + stride * (r + i);
            s->y[i] = y + (size_t)(r + i) * w->n_out;
        }
        job->inner->mul(w->format, weights, n, w->n_in, s->x, s->y, rows, s->work);
    }
}

static enum err_code matmul(const struct k_matmul *a, struct k_stream *s)
{
    struct job job = job_of(s, a, &a->rows);
    uint32_t n = 0;
    for (uint32_t m = 0; m < a->n_matrices; m++) {
        job.outputs[m] = piece_outputs(a->w[m].format, a->w[m].n_out, a->w[m].n_in);
        job.pieces[m] = (a->w[m].n_out + job.outputs[m] - 1) / job.outputs[m];
        n += job.pieces[m];
    }
    if (job.n_rows > 0)
        k_pool_run(job.pool, matmul_piece, &job, n);
    return ERR_OK;
}

/* ---- operations by row ----------------------------------------------------------------------- */

static void norm_piece(const void *context, uint32_t row, uint32_t thread)
{
    (void)thread;
    const struct job *job = context;
    const struct k_norm *a = job->args;
    const size_t at = (size_t)row * a->groups * a->n;
    const float *x = (const float *)k_host_at(a->x) + at;
    float *y = (float *)k_host_at(a->y) + at;
    for (uint32_t g = 0; g < a->groups; g++)
        job->inner->norm(x + (size_t)g * a->n, k_host_at(a->weight), y + (size_t)g * a->n, a->n,
                         a->eps);
}

static enum err_code norm(const struct k_norm *a, struct k_stream *s)
{
    const struct job job = job_of(s, a, &a->rows);
    k_pool_run(job.pool, norm_piece, &job, job.n_rows);
    return ERR_OK;
}

/* Elements first .. first + count - 1 of row `row` of act.f32 into the other forms. True: not
 * finite. */
static bool quantise_part(const struct k_cpu_inner *inner, const struct k_act *act, uint32_t row,
                          uint32_t first, uint32_t count)
{
    const float *x = (const float *)k_host_at(act->f32) + (size_t)act->n * row;
    bool fault = false;
    if (act->q32.buffer != NULL)
        fault |= inner->quantise32(x, act->n, first, count,
                                   (uint8_t *)k_host_at(act->q32) +
                                       k_format_act_bytes(K_FORM_Q32, act->n) * row);
    if (act->q256.buffer != NULL)
        fault |= inner->quantise256(x, act->n, first, count,
                                    (uint8_t *)k_host_at(act->q256) +
                                        k_format_act_bytes(K_FORM_Q256, act->n) * row);
    return fault;
}

static void quantise_piece(const void *context, uint32_t row, uint32_t thread)
{
    (void)thread;
    const struct job *job = context;
    const struct k_quantise *a = job->args;
    if (quantise_part(job->inner, &a->act, row, 0, a->act.n))
        set_fault(&a->rows, row);
}

static enum err_code quantise(const struct k_quantise *a, struct k_stream *s)
{
    const struct job job = job_of(s, a, &a->rows);
    k_pool_run(job.pool, quantise_piece, &job, job.n_rows);
    return ERR_OK;
}

static void embed_piece(const void *context, uint32_t row, uint32_t thread)
{
    (void)thread;
    const struct job *job = context;
    const struct k_embed *a = job->args;
    const uint32_t n = a->table.n_in, token = ((const uint32_t *)k_host_at(a->rows.token))[row];
    const uint8_t *table = k_host_at(a->table.data);
    k_dequantise(a->table.format, table + k_format_bytes(a->table.format, token, n),
                 (float *)k_host_at(a->x) + (size_t)n * row, n);
}

static enum err_code embed(const struct k_embed *a, struct k_stream *s)
{
    const struct job job = job_of(s, a, &a->rows);
    k_pool_run(job.pool, embed_piece, &job, job.n_rows);
    return ERR_OK;
}

static void rope_piece(const void *context, uint32_t row, uint32_t thread)
{
    (void)thread;
    const struct job *job = context;
    const struct k_rope *a = job->args;
    const uint32_t half = a->rope_dim / 2;
    const uint32_t position = ((const uint32_t *)k_host_at(a->rows.position))[row];
    const float *table = (const float *)k_host_at(a->table) + (size_t)position * half * 2;
    float *x = (float *)k_host_at(a->x) + (size_t)row * a->heads * a->head_dim;
    for (uint32_t h = 0; h < a->heads; h++)
        job->inner->rope(x + (size_t)h * a->head_dim, table, half);
}

static enum err_code rope(const struct k_rope *a, struct k_stream *s)
{
    const struct job job = job_of(s, a, &a->rows);
    k_pool_run(job.pool, rope_piece, &job, job.n_rows);
    return ERR_OK;
}

static void kv_write_piece(const void *context, uint32_t row, uint32_t thread)
{
    (void)thread;
    const struct job *job = context;
    const struct k_kv_write *a = job->args;
    const struct k_kv *kv = &a->kv;
    const uint32_t position = ((const uint32_t *)k_host_at(a->rows.position))[row];
    const uint32_t sequence = ((const uint32_t *)k_host_at(a->rows.sequence))[row];
    const uint32_t *table = k_host_at(kv->table);
    const uint32_t page = table[(size_t)sequence * kv->max_pages + position / K_PAGE];
    const size_t at = (size_t)row * kv->n_head_kv * kv->head_dim;
    uint8_t *layer = (uint8_t *)k_host_at(kv->pool) + kv->page_bytes * page + kv->layer_offset;
    const float *k = (const float *)k_host_at(a->k) + at, *v = (const float *)k_host_at(a->v) + at;
    if (kv->type == K_KV_F16
            ? job->inner->kv_write_f16(layer, kv->n_head_kv, kv->head_dim, position % K_PAGE, k, v)
            : k_ref_kv_write(layer, kv->type, kv->n_head_kv, kv->head_dim, position % K_PAGE, k, v))
        set_fault(&a->rows, row);
}

static enum err_code kv_write(const struct k_kv_write *a, struct k_stream *s)
{
    const struct job job = job_of(s, a, &a->rows);
    k_pool_run(job.pool, kv_write_piece, &job, job.n_rows);
    return ERR_OK;
}

static void add_piece(const void *context, uint32_t row, uint32_t thread)
{
    (void)thread;
    const struct job *job = context;
    const struct k_add *a = job->args;
    const size_t at = (size_t)row * a->n;
    job->inner->add((float *)k_host_at(a->x) + at, (const float *)k_host_at(a->y) + at, a->n);
}

static enum err_code add(const struct k_add *a, struct k_stream *s)
{
    const struct job job = job_of(s, a, &a->rows);
    k_pool_run(job.pool, add_piece, &job, job.n_rows);
    return ERR_OK;
}

static void router_piece(const void *context, uint32_t row, uint32_t thread)
{
    const struct job *job = context;
    const struct k_router *a = job->args;
    struct scratch *s = k_pool_scratch(job->pool, thread);
    const float *logits = (const float *)k_host_at(a->logits) + (size_t)row * a->n_expert;
    uint32_t *ids = (uint32_t *)k_host_at(a->ids) + (size_t)row * a->n_used;
    float *weights = (float *)k_host_at(a->weights) + (size_t)row * a->n_used;
    if (!job->inner->finite(logits, a->n_expert)) {
        k_ref_router_fault(a, ids, weights);
        set_fault(&a->rows, row);
        return;
    }
    const float sum = job->inner->softmax(logits, a->n_expert, s->experts);
    k_ref_router_choose(a, logits, s->experts, sum, ids, weights);
}

static enum err_code router(const struct k_router *a, struct k_stream *s)
{
    const struct job job = job_of(s, a, &a->rows);
    k_pool_run(job.pool, router_piece, &job, job.n_rows);
    return ERR_OK;
}

static void check_piece(const void *context, uint32_t row, uint32_t thread)
{
    (void)thread;
    const struct job *job = context;
    const struct k_check *a = job->args;
    if (!job->inner->finite((const float *)k_host_at(a->x) + (size_t)row * a->n, a->n))
        set_fault(&a->rows, row);
}

static enum err_code check(const struct k_check *a, struct k_stream *s)
{
    const struct job job = job_of(s, a, &a->rows);
    k_pool_run(job.pool, check_piece, &job, job.n_rows);
    return ERR_OK;
}

static void moe_sum_piece(const void *context, uint32_t row, uint32_t thread)
{
    (void)thread;
    const struct job *job = context;
    const struct k_moe_sum *a = job->args;
    const size_t pair = (size_t)row * a->n_used;
    job->inner->moe_sum((const float *)k_host_at(a->weights) + pair,
                        (const float *)k_host_at(a->out) + pair * a->n, a->n, a->n_used, a->n,
                        (float *)k_host_at(a->x) + (size_t)row * a->n);
}

static enum err_code moe_sum(const struct k_moe_sum *a, struct k_stream *s)
{
    const struct job job = job_of(s, a, &a->rows);
    k_pool_run(job.pool, moe_sum_piece, &job, job.n_rows);
    return ERR_OK;
}

/* ---- attention: a piece is some query heads of one row that share a kv head ------------------ */

/* Of each thread: page pointers of a sequence, then the work of K_CPU_HEADS heads. */
static uint64_t attention_pages_bytes(uint32_t max_pages)
{
    return ((uint64_t)max_pages * sizeof(uint8_t *) + 63) & ~UINT64_C(63);
}

static uint64_t attention_thread_bytes(uint32_t head_dim, uint32_t max_pages)
{
    const uint64_t work = K_CPU_HEADS * (3 * (uint64_t)head_dim + K_PAGE) * sizeof(float);
    return (attention_pages_bytes(max_pages) + work + 127) & ~UINT64_C(127);
}

static uint64_t attention_bytes(const struct k_device *d, uint32_t n_head, uint32_t head_dim,
                                uint32_t max_rows, uint32_t max_pages)
{
    (void)n_head, (void)max_rows;
    return attention_thread_bytes(head_dim, max_pages) * d->threads;
}

/* Query heads of a piece: as many as share a kv head, fewer where that would leave threads idle. */
static uint32_t attention_heads(const struct k_attention *a, uint32_t n_rows, uint32_t threads)
{
    const uint32_t shared = a->n_head / a->kv.n_head_kv;
    uint32_t heads = shared < K_CPU_HEADS ? shared : K_CPU_HEADS;
    while (heads > 1 && n_rows * (a->n_head / heads) < 2 * threads)
        heads /= 2;
    return heads;
}

static void attention_piece(const void *context, uint32_t piece, uint32_t thread)
{
    const struct job *job = context;
    const struct k_attention *a = job->args;
    const struct k_kv *kv = &a->kv;
    const uint32_t shared = a->n_head / kv->n_head_kv, heads = job->outputs[0];
    const uint32_t parts = (shared + heads - 1) / heads; /* of a kv head */
    const uint32_t row = piece / (parts * kv->n_head_kv);
    const uint32_t head_kv = piece / parts % kv->n_head_kv, first = piece % parts * heads;
    const uint32_t n = shared - first < heads ? shared - first : heads;
    const uint32_t position = ((const uint32_t *)k_host_at(a->rows.position))[row];
    const uint32_t sequence = ((const uint32_t *)k_host_at(a->rows.sequence))[row];
    const uint32_t *table =
        (const uint32_t *)k_host_at(kv->table) + (size_t)sequence * kv->max_pages;
    uint8_t *scratch = (uint8_t *)k_host_at(a->scratch) +
                       attention_thread_bytes(kv->head_dim, kv->max_pages) * thread;
    const uint8_t **pages = (const uint8_t **)(void *)scratch;
    float *work = (float *)(void *)(scratch + attention_pages_bytes(kv->max_pages));
    for (uint32_t p = 0; p <= position / K_PAGE; p++)
        pages[p] =
            (const uint8_t *)k_host_at(kv->pool) + kv->page_bytes * table[p] + kv->layer_offset;
    const size_t at = ((size_t)row * a->n_head + head_kv * shared + first) * kv->head_dim;
    if (job->inner->attention((const float *)k_host_at(a->q) + at, n, pages, position + 1, kv,
                              head_kv, a->scale, work, (float *)k_host_at(a->y) + at))
        set_fault(&a->rows, row);
}

static enum err_code attention(const struct k_attention *a, struct k_stream *s)
{
    struct job job = job_of(s, a, &a->rows);
    const uint32_t shared = a->n_head / a->kv.n_head_kv;
    const uint32_t heads = attention_heads(a, job.n_rows, s->device->threads);
    job.outputs[0] = heads;
    k_pool_run(job.pool, attention_piece, &job,
               job.n_rows * a->kv.n_head_kv * ((shared + heads - 1) / heads));
    return ERR_OK;
}

/* ---- experts: a piece is a range of outputs of one group ------------------------------------- */

static const uint8_t *slice(const struct k_experts *x, uint32_t expert, int which)
{
    const uint64_t *slots = k_host_at(x->slots);
    return (const uint8_t *)x->arena->data + slots[3 * (size_t)expert + (size_t)which];
}

/* Outputs first .. first + n - 1 of a group, not quantised. */
static void gate_up(const struct job *job, const struct k_group *g, uint32_t first, uint32_t n,
                    struct scratch *s)
{
    const struct k_moe_gate_up *a = job->args;
    const struct k_experts *x = &a->experts;
    const uint32_t *order = k_host_at(a->order);
    const uint8_t *gate = slice(x, g->expert, 0) + k_format_bytes(x->gate, first, x->n_embd);
    const uint8_t *up = slice(x, g->expert, 1) + k_format_bytes(x->up, first, x->n_embd);
    uint64_t stride_gate, stride_up;
    const uint8_t *x_gate = act_rows(&a->x, x->gate, &stride_gate);
    const uint8_t *x_up = act_rows(&a->x, x->up, &stride_up);
    for (uint32_t p = 0; p < g->count; p += MAX_ROW_TILE) {
        const uint32_t rows = g->count - p < MAX_ROW_TILE ? g->count - p : MAX_ROW_TILE;
        const uint32_t *pairs = order + g->first + p;
        for (uint32_t i = 0; i < rows; i++) {
            s->x[i] = x_gate + stride_gate * (pairs[i] / x->n_used);
            s->y[i] = (float *)k_host_at(a->h.f32) + (size_t)pairs[i] * x->n_ff + first;
            s->z[i] = s->up[i];
        }
        job->inner->mul(x->gate, gate, n, x->n_embd, s->x, s->y, rows, s->work);
        for (uint32_t i = 0; i < rows; i++)
            s->x[i] = x_up + stride_up * (pairs[i] / x->n_used);
        job->inner->mul(x->up, up, n, x->n_embd, s->x, s->z, rows, s->work);
        for (uint32_t i = 0; i < rows; i++)
            job->inner->swiglu(s->y[i], s->up[i], n);
    }
}

static void gate_up_piece(const void *context, uint32_t piece, uint32_t thread)
{
    const struct job *job = context;
    const struct k_moe_gate_up *a = job->args;
    const uint32_t n_ff = a->experts.n_ff, n_used = a->experts.n_used;
    const uint32_t units = (n_ff + UNIT - 1) / UNIT, outputs = job->outputs[0];
    const uint32_t parts = UNIT / outputs, unit = piece / parts;
    const uint32_t *selected = k_host_at(a->selected), *order = k_host_at(a->order);
    const struct k_group *g =
        &((const struct k_group *)k_host_at(a->groups))[selected[unit / units]];
    const uint32_t start = unit % units * UNIT, first = start + piece % parts * outputs;
    if (first < n_ff)
        gate_up(job, g, first, n_ff - first < outputs ? n_ff - first : outputs,
                k_pool_scratch(job->pool, thread));
    if (job->parts_done != NULL && atomic_fetch_add(&job->parts_done[unit], 1) + 1u < parts)
        return;
    const uint32_t n = n_ff - start < UNIT ? n_ff - start : UNIT;
    for (uint32_t i = 0; i < g->count; i++) {
        const uint32_t pair = order[g->first + i];
        if (quantise_part(job->inner, &a->h, pair, start, n))
            set_fault(&a->rows, pair / n_used);
    }
}

/* Whoever ends the last part of a unit quantises it. */
static enum err_code moe_gate_up(const struct k_moe_gate_up *a, struct k_stream *s)
{
    _Atomic uint8_t parts_done[FEW_PIECES * K_MAX_THREADS];
    struct job job = job_of(s, a, &a->rows);
    const uint32_t n = k_host_count(a->n_selected) * ((a->experts.n_ff + UNIT - 1) / UNIT);
    const uint32_t enough = FEW_PIECES * s->device->threads;
    job.outputs[0] = UNIT;
    while (s->device->threads > 1 && n * (UNIT / job.outputs[0]) < enough &&
           job.outputs[0] > LEAST_OUTPUTS)
        job.outputs[0] /= 2;
    if (job.outputs[0] < UNIT) {
        memset((void *)parts_done, 0, n);
        job.parts_done = parts_done;
    }
    k_pool_run(job.pool, gate_up_piece, &job, n * (UNIT / job.outputs[0]));
    return ERR_OK;
}

/* Of a piece of `n` experts for so many threads. */
static uint32_t down_outputs(const struct k_experts *x, uint32_t n, uint32_t threads)
{
    uint32_t outputs = piece_outputs(x->down, x->n_embd, x->n_ff);
    while (threads > 1 && n * (x->n_embd / outputs) < FEW_PIECES * threads &&
           outputs >= 2 * LEAST_OUTPUTS)
        outputs = outputs / 32 * 16;
    return outputs;
}

static void down_piece(const void *context, uint32_t piece, uint32_t thread)
{
    const struct job *job = context;
    const struct k_moe_down *a = job->args;
    const struct k_experts *x = &a->experts;
    struct scratch *s = k_pool_scratch(job->pool, thread);
    const uint32_t outputs = job->outputs[0], units = (x->n_embd + outputs - 1) / outputs;
    const uint32_t *selected = k_host_at(a->selected), *order = k_host_at(a->order);
    const struct k_group *g =
        &((const struct k_group *)k_host_at(a->groups))[selected[piece / units]];
    const uint32_t first = piece % units * outputs;
    const uint32_t n = x->n_embd - first < outputs ? x->n_embd - first : outputs;
    const uint8_t *down = slice(x, g->expert, 2) + k_format_bytes(x->down, first, x->n_ff);
    uint64_t stride;
    const uint8_t *h = act_rows(&a->h, x->down, &stride);
    for (uint32_t p = 0; p < g->count; p += MAX_ROW_TILE) {
        const uint32_t rows = g->count - p < MAX_ROW_TILE ? g->count - p : MAX_ROW_TILE;
        for (uint32_t i = 0; i < rows; i++) {
            const uint32_t pair = order[g->first + p + i];
            s->x[i] = h + stride * pair;
            s->y[i] = (float *)k_host_at(a->out) + (size_t)pair * x->n_embd + first;
        }
        job->inner->mul(x->down, down, n, x->n_ff, s->x, s->y, rows, s->work);
    }
}

static enum err_code moe_down(const struct k_moe_down *a, struct k_stream *s)
{
    struct job job = job_of(s, a, &a->rows);
    const uint32_t n = k_host_count(a->n_selected);
    const uint32_t outputs = down_outputs(&a->experts, n, s->device->threads);
    job.outputs[0] = outputs;
    k_pool_run(job.pool, down_piece, &job, n * ((a->experts.n_embd + outputs - 1) / outputs));
    return ERR_OK;
}

/* ---- the tables ------------------------------------------------------------------------------ */

void k_cpu_ops_fill(enum k_level level, struct k_cpu_inner *ret)
{
    k_avx2_rows_fill(ret); /* both levels; small beside the products */
    if (level == K_LEVEL_AVX2) {
        ret->name = "avx2";
        k_avx2_matmul_fill(ret);
        k_avx2_attention_fill(ret);
    } else {
        ret->name = "avx512";
        k_avx512_matmul_fill(ret);
        k_avx512_attention_fill(ret);
    }
}

void k_cpu_ops_table(const struct k_cpu_inner *inner, struct k_ops *ret)
{
    *ret = *k_ref_ops(); /* memory, grouping, gathering */
    ret->name = inner->name;
    ret->attention_bytes = attention_bytes;
    ret->embed = embed;
    ret->norm = norm;
    ret->quantise = quantise;
    ret->matmul = matmul;
    ret->rope = rope;
    ret->kv_write = kv_write;
    ret->attention = attention;
    ret->add = add;
    ret->router = router;
    ret->moe_gate_up = moe_gate_up;
    ret->moe_down = moe_down;
    ret->moe_sum = moe_sum;
    ret->check = check;
}

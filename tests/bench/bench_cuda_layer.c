/* A token's way through the layers of a 30B-A3B-shaped model (Q4_K_M: hidden 2048, 32 heads over 4 of
 * keys and values, 128 experts of 768, top-8), all experts resident, as the engine gives its
 * operations; and each operation by itself, to see what the layer is made of. */
#include <string.h>

#include "bench_cuda.h"
#include "k_format.h"

enum {
    LAYERS = 6, /* with weights of their own: more bytes than the cache holds */
    N_EMBD = 2048,
    N_FF = 768,
    HEADS = 32,
    HEADS_KV = 4,
    DIM = 128,
    EXPERTS = 128,
    USED = 8,
    MAX_ROWS = 8,
    MAX_PAGES = 160 /* of a sequence: 10,240 positions */
};

struct layer {
    struct k_matrix q, k, v, output, router;
    struct k_experts experts;
};

struct token {
    struct bench_cuda *b;
    struct k_rows rows;
    struct layer layers[LAYERS];
    struct k_kv kv;
    struct k_act normed, heads, hidden;
    struct k_span x, q, k, v, out, logits, ids, weights, n_groups, groups, order, everything,
        expert_out, scratch, rope, norm_weight;
};

static struct k_matrix matrix(struct bench_cuda *b, enum k_format format, uint32_t n_out,
                              uint32_t n_in)
{
    const struct k_matrix m = {format == K_F32
                                   ? bench_cuda_floats(b, (size_t)n_out * n_in)
                                   : bench_cuda_span(b, k_format_bytes(format, n_out, n_in)),
                               format, n_out, n_in};
    if (format != K_F32)
        bench_cuda_weights(b, format, n_out, n_in, m.data);
    return m;
}

/* All experts have the weights of the first. */
static void experts_new(struct bench_cuda *b, enum k_format down, struct k_experts *ret)
{
    const uint64_t gate = k_format_bytes(K_Q4_K, N_FF, N_EMBD),
                   one = 2 * gate + (k_format_bytes(down, N_EMBD, N_FF) + 255) / 256 * 256;
    const struct k_span arena = bench_cuda_span(b, one * EXPERTS);
    uint64_t slots[EXPERTS][3];
    bench_cuda_weights(b, K_Q4_K, N_FF, N_EMBD, arena);
    bench_cuda_weights(b, K_Q4_K, N_FF, N_EMBD, (struct k_span){arena.buffer, gate});
    bench_cuda_weights(b, down, N_EMBD, N_FF, (struct k_span){arena.buffer, 2 * gate});
    for (uint32_t e = 0; e < EXPERTS; e++) {
        if (e > 0)
            b->ops->copy(b->stream, (struct k_span){arena.buffer, e * one}, arena, one);
        for (uint32_t k = 0; k < 3; k++)
            slots[e][k] = e * one + k * gate;
    }
    *ret = (struct k_experts){.arena = arena.buffer,
                              .slots = bench_cuda_span_of(b, slots, sizeof slots),
                              .gate = K_Q4_K,
                              .up = K_Q4_K,
                              .down = down,
                              .n_embd = N_EMBD,
                              .n_ff = N_FF,
                              .n_expert = EXPERTS,
                              .n_used = USED};
}

/* Like Q4_K_M: Q6_K for v and down of every second layer. */
static void layer_new(struct bench_cuda *b, uint32_t i, struct layer *ret)
{
    const enum k_format some = i % 2 ? K_Q4_K : K_Q6_K;
    ret->q = matrix(b, K_Q4_K, HEADS * DIM, N_EMBD);
    ret->k = matrix(b, K_Q4_K, HEADS_KV * DIM, N_EMBD);
    ret->v = matrix(b, some, HEADS_KV * DIM, N_EMBD);
    ret->output = matrix(b, K_Q4_K, N_EMBD, HEADS * DIM);
    ret->router = matrix(b, K_F32, EXPERTS, N_EMBD);
    experts_new(b, some, &ret->experts);
}

static void kv_new(struct bench_cuda *b, uint32_t n_rows, struct k_kv *ret)
{
    static uint32_t table[MAX_ROWS * MAX_PAGES];
    const uint64_t bytes = k_kv_layer_bytes(K_KV_F16, HEADS_KV, DIM);
    for (uint32_t i = 0; i < n_rows * MAX_PAGES; i++)
        table[i] = i;
    *ret = (struct k_kv){.pool = bench_cuda_span(b, LAYERS * bytes * n_rows * MAX_PAGES),
                         .table = bench_cuda_span_of(b, table, sizeof table),
                         .page_bytes = LAYERS * bytes,
                         .max_pages = MAX_PAGES,
                         .type = K_KV_F16,
                         .n_head_kv = HEADS_KV,
                         .head_dim = DIM};
}

static void rows_new(struct token *t, uint32_t n_rows, uint32_t position)
{
    uint32_t positions[MAX_ROWS], sequences[MAX_ROWS];
    for (uint32_t i = 0; i < n_rows; i++) {
        positions[i] = position;
        sequences[i] = i;
    }
    t->rows = bench_cuda_rows(t->b, n_rows);
    t->b->ops->upload(t->b->stream, t->rows.position, positions, n_rows * 4);
    t->b->ops->upload(t->b->stream, t->rows.sequence, sequences, n_rows * 4);
}

/* Only in the form that K formats read. */
static struct k_act act_new(struct bench_cuda *b, uint32_t n, uint32_t n_rows)
{
    struct k_act act = bench_cuda_act(b, n, n_rows);
    b->ops->buffer_free(act.q32.buffer);
    act.q32.buffer = NULL;
    return act;
}

static void token_new(struct token *t, uint32_t n_rows, uint32_t position)
{
    struct bench_cuda *b = t->b;
    const uint32_t pairs = n_rows * USED;
    uint32_t all[EXPERTS];
    for (uint32_t i = 0; i < EXPERTS; i++)
        all[i] = i;
    rows_new(t, n_rows, position);
    kv_new(b, n_rows, &t->kv);
    for (uint32_t i = 0; i < LAYERS; i++)
        layer_new(b, i, &t->layers[i]);
    t->normed = act_new(b, N_EMBD, n_rows);
    t->heads = act_new(b, HEADS * DIM, n_rows);
    t->hidden = act_new(b, N_FF, pairs);
    t->x = bench_cuda_floats(b, (size_t)N_EMBD * n_rows);
    t->out = bench_cuda_span(b, N_EMBD * 4 * n_rows);
    t->q = bench_cuda_span(b, HEADS * DIM * 4 * n_rows);
    t->k = bench_cuda_span(b, HEADS_KV * DIM * 4 * n_rows);
    t->v = bench_cuda_span(b, HEADS_KV * DIM * 4 * n_rows);
    t->logits = bench_cuda_floats(b, EXPERTS * n_rows);
    t->ids = bench_cuda_span_of(b, all, pairs * 4);
    t->weights = bench_cuda_span(b, pairs * 4);
    t->n_groups = bench_cuda_span(b, 4);
    t->groups = bench_cuda_span(b, EXPERTS * sizeof(struct k_group));
    t->order = bench_cuda_span(b, pairs * 4);
    t->everything = bench_cuda_span_of(b, all, sizeof all);
    t->expert_out = bench_cuda_span(b, (uint64_t)pairs * N_EMBD * 4);
    t->scratch =
        bench_cuda_span(b, b->ops->attention_bytes(b->device, HEADS, DIM, n_rows, MAX_PAGES));
    t->rope = bench_cuda_floats(b, (size_t)MAX_PAGES * K_PAGE * DIM);
    t->norm_weight = bench_cuda_floats(b, HEADS * DIM);
    bench_cuda_must(b, b->ops->wait(b->stream), "a layer's weights");
}

static void token_free(struct token *t)
{
    const struct k_ops *ops = t->b->ops;
    const struct k_span spans[] = {
        t->x,       t->q,          t->k,        t->v,           t->out,     t->logits,
        t->ids,     t->weights,    t->n_groups, t->groups,      t->order,   t->everything,
        t->scratch, t->expert_out, t->rope,     t->norm_weight, t->kv.pool, t->kv.table};
    for (size_t i = 0; i < sizeof spans / sizeof spans[0]; i++)
        ops->buffer_free(spans[i].buffer);
    for (uint32_t i = 0; i < LAYERS; i++) {
        struct layer *l = &t->layers[i];
        const struct k_matrix *dense[] = {&l->q, &l->k, &l->v, &l->output, &l->router};
        for (size_t k = 0; k < sizeof dense / sizeof dense[0]; k++)
            ops->buffer_free(dense[k]->data.buffer);
        ops->buffer_free(l->experts.slots.buffer);
        ops->buffer_free(l->experts.arena);
    }
    bench_cuda_act_free(t->b, &t->normed);
    bench_cuda_act_free(t->b, &t->heads);
    bench_cuda_act_free(t->b, &t->hidden);
    bench_cuda_rows_free(t->b, &t->rows);
}

/* ---- operations ------------------------------------------------------------------------------ */

/* The sum of the experts before, norm and quantiser. */
static enum err_code enter(struct token *t, uint32_t layer)
{
    (void)layer;
    return t->b->ops->enter(&(struct k_enter){t->rows, t->x, t->expert_out, t->weights,
                                              t->norm_weight, t->normed, USED, 1e-6f},
                            t->b->stream);
}

static enum err_code project(struct token *t, uint32_t layer)
{
    const struct layer *l = &t->layers[layer];
    return t->b->ops->matmul(
        &(struct k_matmul){t->rows, t->normed, 3, {l->q, l->k, l->v}, {t->q, t->k, t->v}},
        t->b->stream);
}

static struct k_kv kv_of(const struct token *t, uint32_t layer)
{
    struct k_kv kv = t->kv;
    kv.layer_offset = layer * k_kv_layer_bytes(K_KV_F16, HEADS_KV, DIM);
    return kv;
}

static enum err_code turn(struct token *t, uint32_t layer)
{
    return t->b->ops->heads(&(struct k_heads){t->rows, t->q, t->k, t->v, t->norm_weight,
                                              t->norm_weight, t->rope, kv_of(t, layer), HEADS, DIM,
                                              1e-6f},
                            t->b->stream);
}

static enum err_code attend(struct token *t, uint32_t layer)
{
    return t->b->ops->attend(&(struct k_attention){t->rows, t->q, t->heads.f32, t->scratch,
                                                   kv_of(t, layer), HEADS, 0.088f},
                             &t->heads, t->b->stream);
}

static enum err_code output(struct token *t, uint32_t layer)
{
    return t->b->ops->matmul(
        &(struct k_matmul){t->rows, t->heads, 1, {t->layers[layer].output}, {t->out}},
        t->b->stream);
}

static enum err_code route(struct token *t, uint32_t layer)
{
    return t->b->ops->route(
        &(struct k_enter){
            .rows = t->rows,
            .x = t->x,
            .out = t->out,
            .norm = t->norm_weight,
            .act = t->normed,
            .eps = 1e-6f,
        },
        &(struct k_matmul){t->rows, t->normed, 1, {t->layers[layer].router}, {t->logits}},
        &(struct k_router){t->rows, t->logits, t->ids, t->weights, EXPERTS, USED, true, 1.0f},
        &(struct k_grouping){t->rows, t->ids, t->n_groups, t->groups, t->order, EXPERTS, USED},
        t->b->stream);
}

static enum err_code gate_up(struct token *t, uint32_t layer)
{
    return t->b->ops->moe_gate_up(&(struct k_moe_gate_up){t->rows, t->layers[layer].experts,
                                                          t->groups, t->order, t->n_groups,
                                                          t->everything, t->normed, t->hidden},
                                  t->b->stream);
}

static enum err_code down(struct token *t, uint32_t layer)
{
    return t->b->ops->moe_down(&(struct k_moe_down){t->rows, t->layers[layer].experts, t->groups,
                                                    t->order, t->n_groups, t->everything, t->hidden,
                                                    t->expert_out},
                               t->b->stream);
}

/* In the engine's order. */
static const struct {
    const char *name;
    enum err_code (*run)(struct token *t, uint32_t layer);
} steps[] = {
    {"sum, norm", enter}, {"q, k, v", project},        {"heads", turn},       {"attention", attend},
    {"output", output},   {"add, norm, route", route}, {"gate, up", gate_up}, {"down", down},
};
static const size_t N_STEPS = sizeof steps / sizeof steps[0];

static void step(struct token *t, size_t i, uint32_t layer)
{
    bench_cuda_must(t->b, steps[i].run(t, layer), steps[i].name);
}

void bench_cuda_layer(struct bench_cuda *b, uint32_t n_rows, uint32_t position)
{
    struct token t = {.b = b};
    token_new(&t, n_rows, position);
    bench_cuda_begin(b);
    for (uint32_t k = 0; k < BENCH_CUDA_LAUNCHES; k++)
        for (size_t i = 0; i < N_STEPS; i++)
            step(&t, i, k % LAYERS);
    const double us = bench_cuda_finish(b, BENCH_CUDA_LAUNCHES);
    printf("\nA layer, %u rows at position %u: %.1f us (48: %.2f ms). Its parts alone, us:", n_rows,
           position, us, 48e-3 * us);
    for (size_t i = 0; i < N_STEPS; i++) {
        bench_cuda_begin(b);
        for (uint32_t k = 0; k < BENCH_CUDA_LAUNCHES; k++)
            step(&t, i, k % LAYERS);
        printf(" %s %.1f%s", steps[i].name, bench_cuda_finish(b, BENCH_CUDA_LAUNCHES),
               i + 1 < N_STEPS ? ";" : ".\n");
    }
    uint32_t faults[MAX_ROWS] = {0};
    b->ops->download(b->stream, faults, t.rows.faults, n_rows * 4);
    bench_cuda_must(b, b->ops->wait(b->stream), "a layer");
    for (uint32_t i = 0; i < n_rows; i++)
        if (faults[i] != 0)
            bench_cuda_die("a value that is not finite: the layer's times say nothing");
    token_free(&t);
}

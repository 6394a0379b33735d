#include "fake_gpu_ops.h"

#include <string.h>

#include "alloc.h"
#include "fake_gpu_memory.h"
#include "fake_gpu_stream.h"

#define OPERATION(name, type, KIND, field)                                   \
    static enum err_code name(const struct type *a, struct k_stream *stream) \
    {                                                                        \
        fake_gpu_stream_push(stream, KIND)->field = *a;                      \
        return fake_gpu_stream_pushed(stream);                               \
    }
OPERATION(embed, k_embed, EMBED, embed)
OPERATION(norm, k_norm, NORM, norm)
OPERATION(quantise, k_quantise, QUANTISE, quantise)
OPERATION(matmul, k_matmul, MATMUL, matmul)
OPERATION(rope, k_rope, ROPE, rope)
OPERATION(kv_write, k_kv_write, KV_WRITE, kv_write)
OPERATION(attention, k_attention, ATTENTION, attention)
OPERATION(add, k_add, ADD, add)
OPERATION(router, k_router, ROUTER, router)
OPERATION(grouping, k_grouping, GROUPING, grouping)
OPERATION(moe_gate_up, k_moe_gate_up, GATE_UP, gate_up)
OPERATION(moe_down, k_moe_down, DOWN, down)
OPERATION(moe_sum, k_moe_sum, SUM, sum)
OPERATION(gather, k_gather, GATHER, gather)
OPERATION(check, k_check, CHECK, check)
OPERATION(pick, k_pick, PICK, pick)
OPERATION(arrange, k_arrange, ARRANGE, arrange)

/* The operations that are several in one. */
static enum err_code enter(const struct k_enter *a, struct k_stream *stream)
{
    enum err_code code = ERR_OK;
    if (a->out.buffer != NULL && a->weights.buffer != NULL)
        code = moe_sum(&(struct k_moe_sum){a->rows, a->weights, a->out, a->x, a->act.n, a->n_used},
                       stream);
    else if (a->out.buffer != NULL)
        code = add(&(struct k_add){a->rows, a->x, a->out, a->act.n}, stream);
    if (code == ERR_OK)
        code =
            norm(&(struct k_norm){a->rows, a->x, a->act.f32, a->norm, a->act.n, 1, a->eps}, stream);
    return code == ERR_OK ? quantise(&(struct k_quantise){a->rows, a->act}, stream) : code;
}

static enum err_code heads(const struct k_heads *a, struct k_stream *stream)
{
    const struct k_kv *kv = &a->kv;
    enum err_code code = ERR_OK;
    for (int i = 0; i < 2 && code == ERR_OK; i++) {
        const struct k_span x = i == 0 ? a->q : a->k, weight = i == 0 ? a->q_norm : a->k_norm;
        const uint32_t n = i == 0 ? a->n_head : kv->n_head_kv;
        if (weight.buffer != NULL)
            code = norm(&(struct k_norm){a->rows, x, x, weight, kv->head_dim, n, a->eps}, stream);
        if (code == ERR_OK)
            code =
                rope(&(struct k_rope){a->rows, x, a->table, n, kv->head_dim, a->rope_dim}, stream);
    }
    return code == ERR_OK ? kv_write(&(struct k_kv_write){a->rows, a->k, a->v, *kv}, stream) : code;
}

static enum err_code attend(const struct k_attention *a, const struct k_act *y,
                            struct k_stream *stream)
{
    const enum err_code code = attention(a, stream);
    if (code != ERR_OK)
        return code;
    return quantise(&(struct k_quantise){.rows = a->rows, .act = *y}, stream);
}

static enum err_code route(const struct k_enter *e, const struct k_matmul *m,
                           const struct k_router *a, const struct k_grouping *g,
                           struct k_stream *stream)
{
    enum err_code code = enter(e, stream);
    if (code == ERR_OK)
        code = matmul(m, stream);
    if (code == ERR_OK)
        code = router(a, stream);
    return code == ERR_OK ? grouping(g, stream) : code;
}

static void upload(struct k_stream *stream, struct k_span to, const void *from, size_t n)
{
    if (n == 0)
        return;
    if (fake_stream_of(stream)->captures)
        fake_gpu_die("upload while a graph is recorded");
    if (to.offset + n > to.buffer->bytes)
        fake_gpu_die("upload past the end");
    struct fake_command *c = fake_gpu_stream_push(stream, UPLOAD);
    c->move.to = to;
    c->move.memory = alloc_get(ALLOC_WORK, n);
    if (c->move.memory == NULL)
        fake_gpu_die("no memory");
    memcpy(c->move.memory, from, n);
    c->move.n = n;
    (void)fake_gpu_stream_pushed(stream);
}

static void fetch(struct k_stream *stream, struct k_span to, const void *from, size_t n)
{
    if (!fake_gpu_memory_is_pinned(fake_stream_of(stream)->gpu, from, n))
        fake_gpu_die("fetch from memory that is not pinned");
    struct fake_command *c = fake_gpu_stream_push(stream, FETCH);
    c->move.to = to;
    c->move.memory = (void *)(uintptr_t)from;
    c->move.n = n;
    (void)fake_gpu_stream_pushed(stream);
}

static enum err_code fetch_rows(const struct k_fetch_rows *a, struct k_stream *stream)
{
    for (uint32_t i = 0; i < a->n; i++) {
        const uint64_t at = a->rows[i] * (uint64_t)a->bytes;
        fetch(stream, (struct k_span){a->to.buffer, a->to.offset + at},
              (const uint8_t *)a->from + at, a->bytes);
    }
    return ERR_OK;
}

static enum err_code bring(const struct k_bring *a, struct k_stream *stream)
{
    const struct k_experts *l = &a->layer;
    const enum k_format formats[K_BRING_SLICES] = {l->gate, l->up, l->down};
    uint64_t at = a->staging.offset;
    enum err_code code = ERR_OK;
    for (uint32_t i = 0; i < a->n * K_BRING_SLICES && code == ERR_OK; i++) {
        const struct k_bring_expert *x = &a->experts[i / K_BRING_SLICES];
        const uint32_t k = i % K_BRING_SLICES;
        const struct k_span from = {a->staging.buffer, at};
        const struct k_arrange how = {from,
                                      {l->arena, x->to[k]},
                                      formats[k],
                                      k < 2 ? l->n_ff : l->n_embd,
                                      k < 2 ? l->n_embd : l->n_ff};
        const uint64_t bytes = k_format_bytes(how.format, how.n_out, how.n_in);
        at += (bytes + 255) / 256 * 256;
        fetch(stream, from, x->from[k], bytes);
        code = arrange(&how, stream);
        if (k == 0)
            upload(stream,
                   (struct k_span){l->slots.buffer, l->slots.offset + x->expert * sizeof(x->to)},
                   x->to, sizeof(x->to));
    }
    return code;
}

static void download(struct k_stream *stream, void *to, struct k_span from, size_t n)
{
    if (n == 0)
        return;
    struct fake_command *c = fake_gpu_stream_push(stream, DOWNLOAD);
    c->move.from = from;
    c->move.memory = to;
    c->move.n = n;
    (void)fake_gpu_stream_pushed(stream);
}

static void copy(struct k_stream *stream, struct k_span to, struct k_span from, size_t n)
{
    struct fake_command *c = fake_gpu_stream_push(stream, COPY);
    c->move.to = to;
    c->move.from = from;
    c->move.n = n;
    (void)fake_gpu_stream_pushed(stream);
}

void fake_gpu_ops_fill(const struct fake_gpu_options *options, struct k_ops *ops)
{
    ops->upload = upload;
    ops->download = download;
    ops->copy = copy;
    ops->embed = embed;
    ops->norm = norm;
    ops->quantise = quantise;
    ops->matmul = matmul;
    ops->rope = rope;
    ops->kv_write = kv_write;
    ops->attention = attention;
    ops->add = add;
    ops->router = router;
    ops->grouping = grouping;
    ops->moe_gate_up = moe_gate_up;
    ops->moe_down = moe_down;
    ops->moe_sum = moe_sum;
    ops->gather = gather;
    ops->check = check;
    ops->enter = enter;
    ops->heads = heads;
    ops->attend = attend;
    ops->route = route;
    ops->pick = pick;
    ops->fetch = fetch;
    ops->arrange = options->no_arrange ? NULL : arrange;
    ops->bring = options->no_bring ? NULL : bring;
    ops->fetch_rows = options->no_bring ? NULL : fetch_rows;
}

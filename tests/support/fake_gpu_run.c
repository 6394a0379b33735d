#include "fake_gpu_run.h"

#include <float.h>
#include <string.h>

#include "alloc.h"
#include "fake_gpu_memory.h"

/* The device's own order of weights: its own inverse. */
static void turn(const struct fake_gpu *g, struct k_span span, uint64_t bytes)
{
    uint8_t *at = k_host_at(span);
    for (uint64_t i = 0; i < bytes && !g->options.no_arrange; i++)
        at[i] ^= (uint8_t)(i * 31 + 7);
}

static void turn_matrix(const struct fake_gpu *g, const struct k_matrix *m)
{
    turn(g, m->data, k_format_bytes(m->format, m->n_out, m->n_in));
}

/* The slices of the selected groups' experts. */
static void turn_experts(const struct fake_gpu *g, const struct k_experts *x, struct k_span groups,
                         struct k_span n_selected, struct k_span selected, bool down)
{
    const uint32_t n = *(const uint32_t *)k_host_at(n_selected);
    const uint32_t *which = k_host_at(selected);
    const struct k_group *of = k_host_at(groups);
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t *slots = (const uint64_t *)k_host_at(x->slots) + 3ull * of[which[i]].expert;
        if (down) {
            turn(g, (struct k_span){x->arena, slots[2]},
                 k_format_bytes(x->down, x->n_embd, x->n_ff));
            continue;
        }
        turn(g, (struct k_span){x->arena, slots[0]}, k_format_bytes(x->gate, x->n_ff, x->n_embd));
        turn(g, (struct k_span){x->arena, slots[1]}, k_format_bytes(x->up, x->n_ff, x->n_embd));
    }
}

static enum err_code run_weights(struct fake_gpu *g, struct fake_command *c, struct k_stream *in)
{
    enum err_code code;
    switch (c->kind) {
    case EMBED:
        turn_matrix(g, &c->embed.table);
        code = g->ops->embed(&c->embed, in);
        turn_matrix(g, &c->embed.table);
        return code;
    case MATMUL:
        for (uint32_t i = 0; i < c->matmul.n_matrices; i++)
            turn_matrix(g, &c->matmul.w[i]);
        code = g->ops->matmul(&c->matmul, in);
        for (uint32_t i = 0; i < c->matmul.n_matrices; i++)
            turn_matrix(g, &c->matmul.w[i]);
        return code;
    case GATE_UP:
        for (int i = 0; i < 2; i++) {
            turn_experts(g, &c->gate_up.experts, c->gate_up.groups, c->gate_up.n_selected,
                         c->gate_up.selected, false);
            if (i == 0 && (code = g->ops->moe_gate_up(&c->gate_up, in)) != ERR_OK)
                fake_gpu_die("moe_gate_up failed");
        }
        return ERR_OK;
    case DOWN:
        for (int i = 0; i < 2; i++) {
            turn_experts(g, &c->down.experts, c->down.groups, c->down.n_selected, c->down.selected,
                         true);
            if (i == 0 && (code = g->ops->moe_down(&c->down, in)) != ERR_OK)
                fake_gpu_die("moe_down failed");
        }
        return ERR_OK;
    default:
        memmove(k_host_at(c->arrange.to), k_host_at(c->arrange.from),
                k_format_bytes(c->arrange.format, c->arrange.n_out, c->arrange.n_in));
        turn(g, c->arrange.to,
             k_format_bytes(c->arrange.format, c->arrange.n_out, c->arrange.n_in));
        return ERR_OK;
    }
}

static enum err_code run_pick(const struct k_pick *a)
{
    const uint32_t n = a->n_vocab, n_rows = *(const uint32_t *)k_host_at(a->rows.n_rows);
    const struct k_pick_row *how = k_host_at(a->how);
    uint32_t *ids = k_host_at(a->ids);
    uint64_t *w = alloc_get(ALLOC_WORK, n * sizeof(*w));
    if (w == NULL)
        fake_gpu_die("no memory");
    for (uint32_t row = 0; row < n_rows; row++) {
        const float *x = (const float *)k_host_at(a->logits) + (size_t)row * n;
        ids[row] = k_highest(x, n);
        if (how[row].temperature < FLT_MIN)
            continue;
        const uint64_t total = k_weigh(x, n, x[ids[row]], how[row].temperature, w);
        uint64_t r = (uint64_t)(((unsigned __int128)how[row].random * total) >> 64);
        uint32_t i = 0;
        while (i < n && r >= w[i])
            r -= w[i++];
        ids[row] = i < n ? i : ids[row];
    }
    alloc_free(w);
    return ERR_OK;
}

static enum err_code run_rows(const struct fake_gpu *g, struct fake_command *c, struct k_stream *in)
{
    switch (c->kind) {
    case NORM:
        return g->ops->norm(&c->norm, in);
    case QUANTISE:
        return g->ops->quantise(&c->quantise, in);
    case ROPE:
        return g->ops->rope(&c->rope, in);
    case KV_WRITE:
        return g->ops->kv_write(&c->kv_write, in);
    case ATTENTION:
        return g->ops->attention(&c->attention, in);
    case ADD:
        return g->ops->add(&c->add, in);
    case ROUTER:
        return g->ops->router(&c->router, in);
    case GROUPING:
        return g->ops->grouping(&c->grouping, in);
    case SUM:
        return g->ops->moe_sum(&c->sum, in);
    case GATHER:
        return g->ops->gather(&c->gather, in);
    case PICK:
        return run_pick(&c->pick);
    default:
        return g->ops->check(&c->check, in);
    }
}

void fake_gpu_run_command(struct fake_gpu *g, struct fake_command *c)
{
    struct k_stream in = {.device = g->inner};
    fake_gpu_memory_show(g, true);
    if (g->failed)
        ; /* nothing runs any more */
    else if (c->kind == UPLOAD || c->kind == FETCH)
        memcpy(k_host_at(c->move.to), c->move.memory, c->move.n);
    else if (c->kind == DOWNLOAD)
        memcpy(c->move.memory, k_host_at(c->move.from), c->move.n);
    else if (c->kind == COPY)
        memmove(k_host_at(c->move.to), k_host_at(c->move.from), c->move.n);
    else if (c->kind == EMBED || c->kind == MATMUL || c->kind == GATE_UP || c->kind == DOWN ||
             c->kind == ARRANGE) {
        if (run_weights(g, c, &in) != ERR_OK)
            fake_gpu_die("an operation on weights failed");
    } else if (run_rows(g, c, &in) != ERR_OK)
        fake_gpu_die("an operation on rows failed");
    if (c->kind == UPLOAD)
        alloc_free(c->move.memory);
    fake_gpu_memory_show(g, false);
}

/* Products, quantiser, norm, rope and the small operations. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bits.h"
#include "k_cuda_act.h"
#include "k_format.h"

static const enum k_format formats[] = {K_F32,  K_F16,  K_BF16, K_Q8_0,
                                        K_Q4_0, K_Q4_K, K_Q5_K, K_Q6_K};

static void *must(size_t n)
{
    void *p = calloc(1, n ? n : 1);
    if (p == NULL)
        abort();
    return p;
}

/* n rows in buffers for `room`. */
static struct k_rows rows_of(struct bits_side *side, uint32_t n, uint32_t room,
                             const uint32_t *token, const uint32_t *position)
{
    const size_t bytes = n * sizeof(uint32_t), total = room * sizeof(uint32_t);
    return (struct k_rows){.n_rows = bits_span(side, &n, sizeof n),
                           .token = bits_span_of(side, token, bytes, total),
                           .position = bits_span_of(side, position, bytes, total),
                           .sequence = bits_span(side, NULL, total),
                           .faults = bits_span(side, NULL, total),
                           .max_rows = room};
}

static bool rows_drop(struct bits_side *side, struct k_rows *r)
{
    const size_t bytes = r->max_rows * sizeof(uint32_t);
    bool ok = bits_drop(side, r->n_rows, sizeof(uint32_t));
    ok &= bits_drop(side, r->token, bytes);
    ok &= bits_drop(side, r->position, bytes);
    ok &= bits_drop(side, r->sequence, bytes);
    return bits_drop(side, r->faults, bytes) && ok;
}

static struct k_act act_of(struct bits_side *side, const float *x, uint32_t n, uint32_t n_rows,
                           uint32_t room)
{
    struct k_act act = {.n = n,
                        .f32 = bits_span_of(side, x, (size_t)n * n_rows * 4, (size_t)n * room * 4)};
    if (n % 32 == 0)
        act.q32 = bits_span(side, NULL, side->ops->act_bytes(K_FORM_Q32, n, room));
    if (n % 256 == 0)
        act.q256 = bits_span(side, NULL, side->ops->act_bytes(K_FORM_Q256, n, room));
    return act;
}

static bool act_drop(struct bits_side *side, struct k_act *act, uint32_t room)
{
    bool ok = bits_drop(side, act->f32, (size_t)act->n * room * 4);
    if (act->q32.buffer != NULL)
        ok &= bits_drop(side, act->q32, side->ops->act_bytes(K_FORM_Q32, act->n, room));
    if (act->q256.buffer != NULL)
        ok &= bits_drop(side, act->q256, side->ops->act_bytes(K_FORM_Q256, act->n, room));
    return ok;
}

struct matmul_case {
    uint32_t n_in, n_rows, n_matrices, bad; /* bad: a row with a value that is not finite */
    uint32_t room;                          /* rows that fit */
    struct k_matrix w[2];
    void *blocks[2];
    float *x;
};

/* y of the case's matrices on one side; false: an error, a guard, or a wrong fault. */
static bool matmul_on(struct bits_side *side, const struct matmul_case *c, float **y)
{
    struct k_rows rows = rows_of(side, c->n_rows, c->room, NULL, NULL);
    struct k_matmul a = {.rows = rows,
                         .act = act_of(side, c->x, c->n_in, c->n_rows, c->room),
                         .n_matrices = c->n_matrices};
    for (uint32_t m = 0; m < c->n_matrices; m++) {
        a.w[m] = c->w[m];
        a.w[m].data = bits_weights(side, c->w[m].format, c->w[m].n_out, c->n_in, c->blocks[m]);
        a.y[m] = bits_span(side, NULL, (size_t)c->w[m].n_out * c->room * 4);
    }
    bool ok = bits_begin(side);
    ok = ok && bits_done(side, "quantise",
                         side->ops->quantise(&(struct k_quantise){rows, a.act}, side->stream));
    ok = ok && bits_done(side, "matmul", side->ops->matmul(&a, side->stream));
    ok &= bits_end(side);
    if (ok && (a.act.q32.buffer != NULL || a.act.q256.buffer != NULL))
        ok &= bits_only_fault("matmul's input", bits_host(side, rows.faults), c->n_rows, c->bad);
    for (uint32_t m = 0; m < c->n_matrices; m++) {
        memcpy(y[m], bits_host(side, a.y[m]), (size_t)c->w[m].n_out * c->n_rows * 4);
        ok &= bits_drop(side, a.w[m].data, k_format_bytes(c->w[m].format, c->w[m].n_out, c->n_in));
        ok &= bits_drop(side, a.y[m], (size_t)c->w[m].n_out * c->room * 4);
    }
    ok &= act_drop(side, &a.act, c->room);
    return rows_drop(side, &rows) && ok;
}

/* Inputs of each granularity: super-blocks, 32-blocks only, or float weights of any length. */
static struct matmul_case matmul_random(struct bits_run *run, enum bits_kind kind)
{
    struct bits_random *r = &run->random;
    struct matmul_case c = {.n_matrices = bits_between(r, 1, 2), .bad = BITS_NO_ROW};
    const uint32_t grain = bits_below(r, 8);
    if (grain == 0)
        c.n_in = bits_between(r, 1, 400);
    else if (grain == 1)
        c.n_in = 32 * bits_between(r, 1, 40);
    else
        c.n_in = 256 * bits_between(r, 1, bits_below(r, 10) == 0 ? 16 : 5);
    const uint32_t n_formats = c.n_in % 256 == 0 ? 8 : c.n_in % 32 == 0 ? 5 : 3;
    c.n_rows = bits_below(r, 2) ? bits_between(r, 1, 4) : bits_between(r, 1, 64);
    if (run->device && bits_below(r, 16) == 0)
        c.n_rows = bits_between(r, 65, 600);
    c.room = bits_max_rows(run, c.n_rows);
    c.x = must((size_t)c.n_in * c.n_rows * 4);
    bits_fill(r, kind, c.x, (size_t)c.n_in * c.n_rows);
    if (c.n_rows > 1 && bits_below(r, 4) == 0) {
        c.bad = bits_below(r, c.n_rows);
        c.x[(size_t)c.bad * c.n_in + bits_below(r, c.n_in)] = bits_not_finite(r);
    }
    for (uint32_t m = 0; m < c.n_matrices; m++) {
        c.w[m] = (struct k_matrix){.format = formats[bits_below(r, n_formats)],
                                   .n_out = bits_between(r, 1, 90),
                                   .n_in = c.n_in};
        if (run->device && bits_below(r, 4) != 0) /* whole tiles */
            c.w[m].n_out = 16 * bits_between(r, 1, 20);
        const size_t n = (size_t)c.w[m].n_out * c.n_in / k_format_block_elements(c.w[m].format);
        c.blocks[m] = must(n * k_format_block_bytes(c.w[m].format));
        bits_blocks(r, c.w[m].format, c.blocks[m], n);
    }
    return c;
}

bool bits_matmul(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    const enum bits_kind kind = bits_below(r, BITS_KINDS);
    struct matmul_case c = matmul_random(run, kind), alone = c;
    float *y_ref[2] = {NULL}, *y[2] = {NULL}, *y_alone[2] = {NULL};
    for (uint32_t m = 0; m < c.n_matrices; m++) {
        y_ref[m] = must((size_t)c.w[m].n_out * c.n_rows * 4);
        y[m] = must((size_t)c.w[m].n_out * c.n_rows * 4);
        y_alone[m] = must((size_t)c.w[m].n_out * 4);
    }
    uint32_t row = bits_below(r, c.n_rows);
    row = row == c.bad ? (row + 1) % c.n_rows : row;
    alone.x = c.x + (size_t)row * c.n_in;
    alone.n_rows = alone.room = 1;
    alone.bad = BITS_NO_ROW;
    bool ok = matmul_on(&run->reference, &c, y_ref) && matmul_on(&run->tried, &c, y) &&
              matmul_on(&run->tried, &alone, y_alone);
    for (uint32_t m = 0; m < c.n_matrices; m++) {
        const uint32_t n_out = c.w[m].n_out;
        ok =
            ok && bits_rows_equal(run, "matmul", y_ref[m], y[m], n_out, c.n_rows, c.bad) &&
            bits_equal(run, "matmul, row alone", y_ref[m] + (size_t)row * n_out, y_alone[m], n_out);
        if (!ok)
            printf("matmul: format %d, %u outputs, %u inputs, %u rows of %u, input kind %d\n",
                   c.w[m].format, n_out, c.n_in, c.n_rows, c.room, kind);
        free(c.blocks[m]);
        free(y_ref[m]);
        free(y[m]);
        free(y_alone[m]);
    }
    free(c.x);
    return ok;
}

/* A device's quantised rows in the CPU's layout. */
static uint8_t *act_rows(struct bits_side *side, enum k_form form, struct k_span span, uint32_t n,
                         uint32_t n_rows)
{
    const uint8_t *from = bits_host(side, span);
    const uint64_t stride = k_format_act_bytes(form, n);
    uint8_t *to = must(stride * n_rows);
    if (strcmp(side->ops->name, "cuda") != 0) {
        memcpy(to, from, stride * n_rows);
        return to;
    }
    for (uint32_t r = 0; r < n_rows; r++, from += k_cuda_act_stride(form, n)) {
        const struct k_act_row row = k_format_act_row(form, to + stride * r, n);
        memcpy(row.q, from, n);
        memcpy(row.dx, from + k_cuda_act_dx_offset(n), k_cuda_act_blocks(form, n) * sizeof(float));
        memcpy(row.sum, from + k_cuda_act_sum_offset(form, n), n / 32 * sizeof(int16_t));
        for (uint32_t i = 0; form == K_FORM_Q256 && i < n; i++)
            row.sum16[i / 16] = (int16_t)(row.sum16[i / 16] + row.q[i]);
    }
    return to;
}

bool bits_quantise(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    const uint32_t n = 256 * bits_between(r, 1, 8), n_rows = bits_some_rows(run, 9),
                   room = bits_max_rows(run, n_rows);
    float *x = must((size_t)n * n_rows * 4);
    bits_fill(r, bits_below(r, BITS_KINDS), x, (size_t)n * n_rows);
    struct bits_side *sides[2] = {&run->reference, &run->tried};
    uint8_t *q32[2], *q256[2];
    bool ok = true;
    for (int s = 0; s < 2; s++) {
        struct k_rows rows = rows_of(sides[s], n_rows, room, NULL, NULL);
        struct k_act act = act_of(sides[s], x, n, n_rows, room);
        ok &= bits_begin(sides[s]);
        ok &= bits_done(sides[s], "quantise",
                        sides[s]->ops->quantise(&(struct k_quantise){rows, act}, sides[s]->stream));
        ok &= bits_end(sides[s]);
        q32[s] = act_rows(sides[s], K_FORM_Q32, act.q32, n, n_rows);
        q256[s] = act_rows(sides[s], K_FORM_Q256, act.q256, n, n_rows);
        ok &= act_drop(sides[s], &act, room);
        ok &= rows_drop(sides[s], &rows);
    }
    ok = ok && bits_equal(run, "quantise 32", (float *)(void *)q32[0], (float *)(void *)q32[1],
                          k_format_act_bytes(K_FORM_Q32, n) * n_rows / 4);
    ok = ok && bits_equal(run, "quantise 256", (float *)(void *)q256[0], (float *)(void *)q256[1],
                          k_format_act_bytes(K_FORM_Q256, n) * n_rows / 4);
    if (!ok)
        printf("quantise: %u values, %u rows of %u\n", n, n_rows, room);
    for (int s = 0; s < 2; s++) {
        free(q32[s]);
        free(q256[s]);
    }
    free(x);
    return ok;
}

bool bits_norm(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    const uint32_t n = bits_below(r, 4) ? 32 * bits_between(r, 1, 64) : bits_between(r, 1, 300);
    const uint32_t groups = bits_between(r, 1, 4), n_rows = bits_some_rows(run, 20),
                   room = bits_max_rows(run, n_rows);
    const size_t count = (size_t)n * groups * n_rows, total = (size_t)n * groups * room * 4;
    float *x = must(count * 4), *weight = must(n * 4);
    bits_fill(r, bits_below(r, BITS_WIDE), x, count); /* squares of the widest overflow */
    bits_fill(r, BITS_NORMAL, weight, n);
    struct bits_side *sides[2] = {&run->reference, &run->tried};
    struct k_span y[2];
    bool ok = true;
    for (int s = 0; s < 2; s++) {
        struct k_rows rows = rows_of(sides[s], n_rows, room, NULL, NULL);
        const struct k_span in = bits_span_of(sides[s], x, count * 4, total),
                            w = bits_span(sides[s], weight, n * 4);
        const bool in_place = bits_below(r, 2);
        y[s] = in_place ? in : bits_span(sides[s], NULL, total);
        ok &= bits_begin(sides[s]);
        ok &= bits_done(sides[s], "norm",
                        sides[s]->ops->norm(&(struct k_norm){rows, in, y[s], w, n, groups, 1e-6f},
                                            sides[s]->stream));
        ok &= bits_end(sides[s]);
        if (!in_place)
            ok &= bits_drop(sides[s], in, total);
        ok &= bits_drop(sides[s], w, n * 4) && rows_drop(sides[s], &rows);
    }
    ok = ok && bits_equal(run, "norm", bits_host(sides[0], y[0]), bits_host(sides[1], y[1]), count);
    if (!ok)
        printf("norm: %u values, %u groups, %u rows\n", n, groups, n_rows);
    for (int s = 0; s < 2; s++)
        ok &= bits_drop(sides[s], y[s], total);
    free(x);
    free(weight);
    return ok;
}

bool bits_rope(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    const uint32_t dim = 2 * bits_between(r, 1, 64),
                   rope_dim = bits_below(r, 2) ? dim : 2 * bits_between(r, 1, dim / 2);
    const uint32_t heads = bits_between(r, 1, 8), n_rows = bits_between(r, 1, 16),
                   n_positions = 200;
    float *x = must((size_t)n_rows * heads * dim * 4),
          *table = must((size_t)n_positions * rope_dim * 4);
    uint32_t position[16];
    k_rope_table(100000.0, rope_dim, n_positions, table);
    bits_fill(r, bits_below(r, BITS_KINDS), x, (size_t)n_rows * heads * dim);
    for (uint32_t i = 0; i < n_rows; i++)
        position[i] = bits_below(r, n_positions);
    struct bits_side *sides[2] = {&run->reference, &run->tried};
    struct k_span y[2];
    const uint32_t room = bits_max_rows(run, n_rows);
    const size_t bytes = (size_t)n_rows * heads * dim * 4, total = (size_t)room * heads * dim * 4,
                 table_bytes = (size_t)n_positions * rope_dim * 4;
    bool ok = true;
    for (int s = 0; s < 2; s++) {
        struct k_rows rows = rows_of(sides[s], n_rows, room, NULL, position);
        const struct k_span t = bits_span(sides[s], table, table_bytes);
        y[s] = bits_span_of(sides[s], x, bytes, total);
        ok &= bits_begin(sides[s]);
        ok &= bits_done(sides[s], "rope",
                        sides[s]->ops->rope(&(struct k_rope){rows, y[s], t, heads, dim, rope_dim},
                                            sides[s]->stream));
        ok &= bits_end(sides[s]);
        ok &= bits_drop(sides[s], t, table_bytes) && rows_drop(sides[s], &rows);
    }
    ok = ok &&
         bits_equal(run, "rope", bits_host(sides[0], y[0]), bits_host(sides[1], y[1]), bytes / 4);
    if (!ok)
        printf("rope: %u of %u values, %u heads, %u rows\n", rope_dim, dim, heads, n_rows);
    for (int s = 0; s < 2; s++)
        ok &= bits_drop(sides[s], y[s], total);
    free(x);
    free(table);
    return ok;
}

/* Embedding, addition and gathering of rows. */
bool bits_small(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    const enum k_format format = formats[bits_below(r, 8)];
    const uint32_t n = 256 * bits_between(r, 1, 3), vocab = 16 + bits_below(r, 2),
                   n_rows = bits_between(r, 1, 12);
    const size_t n_blocks = (size_t)vocab * n / k_format_block_elements(format);
    void *blocks = must(n_blocks * k_format_block_bytes(format));
    float *y = must((size_t)n * n_rows * 4);
    uint32_t token[12], index[12];
    bits_blocks(r, format, blocks, n_blocks);
    bits_fill(r, BITS_NORMAL, y, (size_t)n * n_rows);
    for (uint32_t i = 0; i < n_rows; i++) {
        token[i] = bits_below(r, vocab);
        index[i] = bits_below(r, n_rows);
    }
    struct bits_side *sides[2] = {&run->reference, &run->tried};
    struct k_span out[2];
    const uint32_t room = bits_max_rows(run, n_rows);
    const size_t bytes = (size_t)n * n_rows * 4, total = (size_t)n * room * 4;
    bool ok = true;
    for (int s = 0; s < 2; s++) {
        const struct k_ops *ops = sides[s]->ops;
        struct k_stream *stream = sides[s]->stream;
        struct k_rows rows = rows_of(sides[s], n_rows, room, token, NULL);
        const size_t table_bytes = k_format_bytes(format, vocab, n);
        const struct k_span table = bits_weights(sides[s], format, vocab, n, blocks);
        const struct k_span x = bits_span(sides[s], NULL, total),
                            plus = bits_span_of(sides[s], y, bytes, total);
        const struct k_span at = bits_span_of(sides[s], index, n_rows * 4, room * 4);
        out[s] = bits_span(sides[s], NULL, total);
        ok &= bits_begin(sides[s]);
        ok &= bits_done(sides[s], "embed",
                        ops->embed(&(struct k_embed){rows, {table, format, vocab, n}, x}, stream));
        ok &= bits_done(sides[s], "add", ops->add(&(struct k_add){rows, x, plus, n}, stream));
        ok &= bits_done(sides[s], "gather",
                        ops->gather(&(struct k_gather){rows, rows, at, x, out[s], n}, stream));
        ok &= bits_end(sides[s]);
        ok &= bits_drop(sides[s], table, table_bytes) && bits_drop(sides[s], x, total) &&
              bits_drop(sides[s], plus, total) && bits_drop(sides[s], at, room * 4) &&
              rows_drop(sides[s], &rows);
    }
    ok = ok && bits_equal(run, "embed, add, gather", bits_host(sides[0], out[0]),
                          bits_host(sides[1], out[1]), bytes / 4);
    if (!ok)
        printf("embed, add, gather: format %d, %u values, %u rows\n", format, n, n_rows);
    for (int s = 0; s < 2; s++)
        ok &= bits_drop(sides[s], out[s], total);
    free(blocks);
    free(y);
    return ok;
}

/* A NaN or an infinity in one row sets that row's fault and no other's. */
bool bits_nonfinite(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    const uint32_t n = 256 * bits_between(r, 1, 4), n_rows = bits_between(r, 2, 9);
    float *x = must((size_t)n * n_rows * 4);
    bits_fill(r, BITS_NORMAL, x, (size_t)n * n_rows);
    const uint32_t bad = bits_below(r, n_rows);
    x[(size_t)bad * n + bits_below(r, n)] = bits_not_finite(r);
    const uint32_t room = bits_max_rows(run, n_rows);
    struct bits_side *side = &run->tried;
    struct k_rows rows = rows_of(side, n_rows, room, NULL, NULL);
    struct k_act act = act_of(side, x, n, n_rows, room);
    const bool by_check = bits_next(r) & 1;
    const char *what = by_check ? "check" : "quantise";
    bool ok = bits_begin(side);
    ok &= bits_done(side, what,
                    by_check ? side->ops->check(&(struct k_check){rows, act.f32, n}, side->stream)
                             : side->ops->quantise(&(struct k_quantise){rows, act}, side->stream));
    ok &= bits_end(side);
    ok = bits_only_fault(what, bits_host(side, rows.faults), n_rows, bad) && ok;
    run->compared += n_rows;
    ok &= act_drop(side, &act, room);
    free(x);
    return rows_drop(side, &rows) && ok;
}

/* Operations that only a device has: several in one, against the same device's operations one after
 * the other, which the other cases compare with the reference; and the draw, against the host's. */
#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bits.h"

enum {
    SETS = 2, /* apart, and as one */
    MOST = 40
};

struct spans {
    struct bits_side *side;
    uint32_t n;
    struct k_span span[MOST];
    size_t bytes[MOST];
};

static struct k_span put(struct spans *p, const void *bytes, size_t n)
{
    p->bytes[p->n] = n;
    return p->span[p->n++] = bits_span(p->side, bytes, n);
}

static bool drop(struct spans *p)
{
    bool ok = true;
    while (p->n > 0) {
        p->n--;
        ok &= bits_drop(p->side, p->span[p->n], p->bytes[p->n]);
    }
    return ok;
}

static float *random_floats(struct bits_random *r, enum bits_kind kind, size_t n)
{
    float *x = calloc(n, sizeof(*x));
    if (x == NULL)
        abort();
    bits_fill(r, kind, x, n);
    return x;
}

static bool same(struct bits_run *run, const char *what, const struct k_span *a, size_t bytes)
{
    return bits_equal(run, what, bits_host(&run->tried, a[0]), bits_host(&run->tried, a[1]),
                      bytes / sizeof(float));
}

/* ---- enter ---- */

struct enter_case {
    uint32_t n, n_rows, room, n_used, summed; /* 0: nothing, 1: out as it is, 2: by weights */
    bool q32, q256;
    float *x, *out, *weights, *norm;
};

static bool enter_on(struct bits_side *side, const struct enter_case *c, bool fused,
                     struct spans *p, struct k_enter *ret)
{
    const size_t row = c->n * sizeof(float);
    struct k_enter a = {.n_used = c->n_used, .eps = 1e-6f, .act = {.n = c->n}};
    a.rows.max_rows = c->room;
    a.rows.n_rows = put(p, &c->n_rows, sizeof(c->n_rows));
    a.rows.faults = put(p, NULL, c->room * sizeof(uint32_t));
    a.x = put(p, c->x, c->room * row);
    a.norm = put(p, c->norm, row);
    if (c->summed > 0)
        a.out = put(p, c->out, c->room * row * (c->summed == 2 ? c->n_used : 1));
    if (c->summed == 2)
        a.weights = put(p, c->weights, (size_t)c->room * c->n_used * sizeof(float));
    a.act.f32 = put(p, NULL, c->room * row);
    if (c->q32)
        a.act.q32 = put(p, NULL, side->ops->act_bytes(K_FORM_Q32, c->n, c->room));
    if (c->q256)
        a.act.q256 = put(p, NULL, side->ops->act_bytes(K_FORM_Q256, c->n, c->room));
    *ret = a;
    const struct k_ops *ops = side->ops;
    bool ok = bits_begin(side);
    if (fused) {
        ok &= bits_done(side, "enter", ops->enter(&a, side->stream));
        return bits_end(side) && ok;
    }
    if (c->summed == 1)
        ok &= bits_done(side, "add",
                        ops->add(&(struct k_add){a.rows, a.x, a.out, c->n}, side->stream));
    if (c->summed == 2)
        ok &= bits_done(
            side, "moe_sum",
            ops->moe_sum(&(struct k_moe_sum){a.rows, a.weights, a.out, a.x, c->n, c->n_used},
                         side->stream));
    ok &= bits_done(
        side, "norm",
        ops->norm(&(struct k_norm){a.rows, a.x, a.act.f32, a.norm, c->n, 1, a.eps}, side->stream));
    ok &= bits_done(side, "quantise",
                    ops->quantise(&(struct k_quantise){a.rows, a.act}, side->stream));
    return bits_end(side) && ok;
}

bool bits_enter(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    struct enter_case c = {.n_rows = bits_some_rows(run, 12), .n_used = bits_between(r, 1, 10)};
    if (run->tried.ops->enter == NULL)
        return true;
    c.room = bits_max_rows(run, c.n_rows);
    c.n = bits_below(r, 3) ? 256 * bits_between(r, 1, 40) : 32 * bits_between(r, 1, 40);
    c.summed = bits_below(r, 3);
    c.q32 = bits_below(r, 2);
    c.q256 = c.n % 256 == 0 && bits_below(r, 4) > 0;
    const size_t count = (size_t)c.room * c.n;
    c.x = random_floats(r, bits_below(r, BITS_KINDS), count);
    c.out = random_floats(r, bits_below(r, BITS_WIDE), count * c.n_used);
    c.weights = random_floats(r, BITS_NORMAL, (size_t)c.room * c.n_used);
    c.norm = random_floats(r, BITS_NORMAL, c.n);
    if (bits_below(r, 4) == 0)
        c.x[bits_below(r, c.n_rows * c.n)] = bits_not_finite(r);
    struct spans p[SETS] = {{.side = &run->tried}, {.side = &run->tried}};
    struct k_enter a[SETS];
    bool ok = enter_on(&run->tried, &c, false, &p[0], &a[0]) &&
              enter_on(&run->tried, &c, true, &p[1], &a[1]);
    const struct k_span x[SETS] = {a[0].x, a[1].x}, y[SETS] = {a[0].act.f32, a[1].act.f32},
                        q32[SETS] = {a[0].act.q32, a[1].act.q32},
                        q256[SETS] = {a[0].act.q256, a[1].act.q256},
                        faults[SETS] = {a[0].rows.faults, a[1].rows.faults};
    const struct k_ops *ops = run->tried.ops;
    ok = ok && same(run, "enter: x", x, count * 4) && same(run, "enter: norm", y, count * 4) &&
         same(run, "enter: faults", faults, c.room * 4);
    if (ok && c.q32)
        ok = same(run, "enter: q32", q32, ops->act_bytes(K_FORM_Q32, c.n, c.room));
    if (ok && c.q256)
        ok = same(run, "enter: q256", q256, ops->act_bytes(K_FORM_Q256, c.n, c.room));
    if (!ok)
        printf("enter: %u values, %u rows of %u, sum %u of %u\n", c.n, c.n_rows, c.room, c.summed,
               c.n_used);
    ok &= drop(&p[0]);
    ok &= drop(&p[1]);
    free(c.x);
    free(c.out);
    free(c.weights);
    free(c.norm);
    return ok;
}

/* ---- heads ---- */

enum {
    PAGES = 3, /* of a sequence */
    SEQUENCES = 4,
    MOST_ROWS = 16
};

struct heads_case {
    struct k_kv kv;
    uint32_t n_head, n_rows, room, rope_dim, position[MOST_ROWS], sequence[MOST_ROWS];
    bool normed;
    float *q, *k, *v, *norm, *table;
};

static struct k_heads heads_of(const struct heads_case *c, struct spans *p)
{
    const uint32_t dim = c->kv.head_dim;
    const size_t kv_bytes = (size_t)c->room * c->kv.n_head_kv * dim * sizeof(float);
    struct k_heads a = {.kv = c->kv, .n_head = c->n_head, .rope_dim = c->rope_dim, .eps = 1e-6f};
    uint32_t table[SEQUENCES * PAGES];
    for (uint32_t i = 0; i < SEQUENCES * PAGES; i++)
        table[i] = i * 5 % (SEQUENCES * PAGES);
    a.rows.max_rows = c->room;
    a.rows.n_rows = put(p, &c->n_rows, sizeof(c->n_rows));
    a.rows.position = put(p, c->position, c->room * sizeof(uint32_t));
    a.rows.sequence = put(p, c->sequence, c->room * sizeof(uint32_t));
    a.rows.faults = put(p, NULL, c->room * sizeof(uint32_t));
    a.q = put(p, c->q, (size_t)c->room * c->n_head * dim * sizeof(float));
    a.k = put(p, c->k, kv_bytes);
    a.v = put(p, c->v, kv_bytes);
    a.table = put(p, c->table, (size_t)PAGES * K_PAGE * c->rope_dim * sizeof(float));
    if (c->normed) {
        a.q_norm = put(p, c->norm, dim * sizeof(float));
        a.k_norm = put(p, c->norm + dim, dim * sizeof(float));
    }
    a.kv.table = put(p, table, sizeof(table));
    a.kv.pool = put(p, NULL, a.kv.page_bytes * SEQUENCES * PAGES);
    return a;
}

static bool heads_turn(struct bits_side *side, const struct k_heads *a, struct k_span x,
                       struct k_span weight, uint32_t heads)
{
    const uint32_t dim = a->kv.head_dim;
    bool ok = true;
    if (weight.buffer != NULL)
        ok = bits_done(side, "norm",
                       side->ops->norm(&(struct k_norm){a->rows, x, x, weight, dim, heads, a->eps},
                                       side->stream));
    return ok && bits_done(side, "rope",
                           side->ops->rope(
                               &(struct k_rope){a->rows, x, a->table, heads, dim, a->rope_dim},
                               side->stream));
}

static bool heads_on(struct bits_side *side, const struct k_heads *a, bool fused)
{
    bool ok = bits_begin(side);
    if (fused)
        ok &= bits_done(side, "heads", side->ops->heads(a, side->stream));
    else
        ok = ok && heads_turn(side, a, a->q, a->q_norm, a->n_head) &&
             heads_turn(side, a, a->k, a->k_norm, a->kv.n_head_kv) &&
             bits_done(side, "kv_write",
                       side->ops->kv_write(&(struct k_kv_write){a->rows, a->k, a->v, a->kv},
                                           side->stream));
    return bits_end(side) && ok;
}

bool bits_heads(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    struct heads_case c = {.n_rows = bits_between(r, 1, 9), .normed = bits_below(r, 4) > 0};
    if (run->tried.ops->heads == NULL)
        return true;
    c.room = bits_below(r, 2) ? c.n_rows : bits_between(r, c.n_rows, MOST_ROWS);
    c.kv = (struct k_kv){.max_pages = PAGES,
                         .type = bits_below(r, 6) ? K_KV_F16 : K_KV_Q8_0,
                         .n_head_kv = bits_between(r, 1, 4),
                         .head_dim = bits_below(r, 4) ? 64u << bits_below(r, 3)
                                                      : 32 * bits_between(r, 1, 8)};
    const uint32_t dim = c.kv.head_dim;
    const uint64_t layer = k_kv_layer_bytes(c.kv.type, c.kv.n_head_kv, dim);
    c.kv.page_bytes = (2 * layer + 63) / 64 * 64;
    c.kv.layer_offset = bits_below(r, 2) * layer;
    c.n_head = c.kv.n_head_kv * bits_between(r, 1, 9);
    c.rope_dim = bits_below(r, 6) ? dim : dim / 2;
    for (uint32_t i = 0; i < MOST_ROWS; i++) {
        c.sequence[i] = i % SEQUENCES;
        c.position[i] = i / SEQUENCES * 37 + bits_below(r, 37);
    }
    const size_t q = (size_t)c.room * c.n_head * dim, kv = (size_t)c.room * c.kv.n_head_kv * dim;
    const enum bits_kind kind = bits_below(r, BITS_SPIKES);
    c.q = random_floats(r, kind, q);
    c.k = random_floats(r, kind, kv);
    c.v = random_floats(r, kind, kv);
    c.norm = random_floats(r, BITS_NORMAL, 2 * (size_t)dim);
    c.table = random_floats(r, BITS_NORMAL, (size_t)PAGES * K_PAGE * c.rope_dim);
    if (bits_below(r, 4) == 0)
        c.v[bits_below(r, (uint32_t)kv)] = bits_below(r, 2) ? 1e9f : bits_not_finite(r);
    struct spans p[SETS] = {{.side = &run->tried}, {.side = &run->tried}};
    const struct k_heads a[SETS] = {heads_of(&c, &p[0]), heads_of(&c, &p[1])};
    bool ok = heads_on(&run->tried, &a[0], false) && heads_on(&run->tried, &a[1], true);
    const struct k_span x[SETS] = {a[0].q, a[1].q}, pool[SETS] = {a[0].kv.pool, a[1].kv.pool},
                        faults[SETS] = {a[0].rows.faults, a[1].rows.faults};
    ok = ok && same(run, "heads: q", x, q * 4) &&
         same(run, "heads: pages", pool, a[0].kv.page_bytes * SEQUENCES * PAGES) &&
         same(run, "heads: faults", faults, c.room * 4);
    if (!ok)
        printf("heads: type %d, %u/%u heads of %u, rope %u, %u rows of %u\n", c.kv.type, c.n_head,
               c.kv.n_head_kv, dim, c.rope_dim, c.n_rows, c.room);
    ok &= drop(&p[0]);
    ok &= drop(&p[1]);
    free(c.q);
    free(c.k);
    free(c.v);
    free(c.norm);
    free(c.table);
    return ok;
}

/* ---- pick ---- */

static uint32_t picked(const float *x, uint32_t n, const struct k_pick_row *how, uint64_t *weights)
{
    const uint32_t best = k_highest(x, n);
    if (how->temperature < FLT_MIN)
        return best;
    const uint64_t total = k_weigh(x, n, x[best], how->temperature, weights);
    uint64_t left = (uint64_t)(((unsigned __int128)how->random * total) >> 64);
    uint32_t i = 0;
    while (i + 1 < n && left >= weights[i])
        left -= weights[i++];
    return i;
}

bool bits_pick(struct bits_run *run)
{
    static const float temperatures[] = {0.0f,  1.0f,        0.7f,    0.05f,  5.0f,
                                         -1.0f, FLT_MIN / 2, FLT_MIN, 1e-30f, 1e30f};
    static const float edges[] = {0.0f, -0.0f, 1e-45f, -1e-45f, FLT_MAX, -FLT_MAX, 1e-30f, -87.0f};
    struct bits_random *r = &run->random;
    struct bits_side *side = &run->tried;
    const uint32_t n_rows = bits_between(r, 1, 8), room = bits_max_rows(run, n_rows);
    const uint32_t n = bits_below(r, 3) ? bits_between(r, 1, 20000) : bits_between(r, 1, 200000);
    if (side->ops->pick == NULL)
        return true;
    struct k_pick_row how[256] = {{.random = 0}};
    if (room > sizeof(how) / sizeof(how[0]))
        return true;
    float *x = random_floats(r, BITS_NORMAL, (size_t)room * n);
    uint64_t *weights = calloc(n, sizeof(*weights));
    if (weights == NULL)
        abort();
    const uint64_t kind = bits_below(r, 5), most = kind == 0 ? bits_between(r, 1, 8) : 0;
    for (size_t i = 0; i < (size_t)room * n && kind < 2; i++) /* what may be -0 or huge, or ties */
        x[i] = kind == 0 ? edges[bits_below(r, most)] : (float)bits_below(r, 3);
    for (uint32_t i = 0; i < n_rows; i++)
        how[i] = (struct k_pick_row){.random = bits_below(r, 5) ? bits_next(r) : UINT64_MAX,
                                     .temperature = temperatures[bits_below(r, 10)]};
    /* with values that are not finite a row has any id of the vocabulary */
    const uint32_t spoilt = bits_below(r, 4) ? n_rows : bits_below(r, n_rows);
    for (uint32_t i = bits_below(r, 2) ? n : 1 + bits_below(r, 3); spoilt < n_rows && i > 0; i--)
        x[(size_t)spoilt * n + bits_below(r, n)] = bits_not_finite(r);
    struct spans p = {.side = side};
    struct k_pick a = {.n_vocab = n};
    a.rows.max_rows = room;
    a.rows.n_rows = put(&p, &n_rows, sizeof(n_rows));
    a.logits = put(&p, x, (size_t)room * n * sizeof(float));
    a.how = put(&p, how, room * sizeof(how[0]));
    a.ids = put(&p, NULL, room * sizeof(uint32_t));
    a.scratch = put(&p, NULL, 16ull * room * (n / K_PICK_PIECE + 1));
    bool ok = bits_begin(side);
    ok &= bits_done(side, "pick", side->ops->pick(&a, side->stream));
    ok &= bits_end(side);
    const uint32_t *ids = bits_host(side, a.ids);
    for (uint32_t i = 0; i < n_rows && ok; i++) {
        const uint32_t want =
            i == spoilt ? ids[i] % n : picked(x + (size_t)i * n, n, &how[i], weights);
        ok = ids[i] == want;
        run->compared++;
        if (!ok)
            printf("pick: row %u of %u, %u values, temperature %g: %u, not %u\n", i, n_rows, n,
                   (double)how[i].temperature, ids[i], want);
    }
    ok &= drop(&p);
    free(x);
    free(weights);
    return ok;
}

/* ---- attend ---- */

struct attend_case {
    struct k_kv kv;
    uint32_t n_head, n_rows, room, pages, position[MOST_ROWS], sequence[MOST_ROWS];
    bool q32, q256;
    uint8_t *pool;
    float *q;
};

static bool attend_on(struct bits_side *side, const struct attend_case *c, bool fused,
                      struct spans *p, struct k_attention *ret, struct k_act *ret_y)
{
    const struct k_ops *ops = side->ops;
    const uint32_t dim = c->kv.head_dim, width = c->n_head * dim;
    struct k_attention a = {.kv = c->kv, .n_head = c->n_head, .scale = 0.125f};
    struct k_act y = {.n = width};
    uint32_t *table = calloc((size_t)SEQUENCES * c->kv.max_pages, sizeof(*table));
    if (table == NULL)
        abort();
    for (uint32_t i = 0; i < SEQUENCES * c->kv.max_pages; i++)
        table[i] = i * 7 % c->pages;
    a.rows.max_rows = c->room;
    a.rows.n_rows = put(p, &c->n_rows, sizeof(c->n_rows));
    a.rows.position = put(p, c->position, c->room * sizeof(uint32_t));
    a.rows.sequence = put(p, c->sequence, c->room * sizeof(uint32_t));
    a.rows.faults = put(p, NULL, c->room * sizeof(uint32_t));
    a.q = put(p, c->q, (size_t)c->room * width * sizeof(float));
    a.kv.table = put(p, table, SEQUENCES * c->kv.max_pages * sizeof(*table));
    a.kv.pool = put(p, c->pool, a.kv.page_bytes * c->pages);
    a.y = y.f32 = put(p, NULL, (size_t)c->room * width * sizeof(float));
    a.scratch =
        put(p, NULL, ops->attention_bytes(side->device, c->n_head, dim, c->room, c->kv.max_pages));
    if (c->q32)
        y.q32 = put(p, NULL, ops->act_bytes(K_FORM_Q32, width, c->room));
    if (c->q256)
        y.q256 = put(p, NULL, ops->act_bytes(K_FORM_Q256, width, c->room));
    free(table);
    *ret = a;
    *ret_y = y;
    bool ok = bits_begin(side);
    if (fused) {
        ok &= bits_done(side, "attend", ops->attend(&a, &y, side->stream));
    } else {
        ok &= bits_done(side, "attention", ops->attention(&a, side->stream));
        ok &= bits_done(side, "quantise",
                        ops->quantise(&(struct k_quantise){a.rows, y}, side->stream));
    }
    return bits_end(side) && ok;
}

/* Pages of small finite numbers: the form of the values does not matter here. */
static void attend_pages(struct bits_random *r, struct attend_case *c)
{
    const size_t n = c->kv.page_bytes * c->pages / 2;
    uint16_t *half = calloc(n, sizeof(*half));
    if (half == NULL)
        abort();
    for (size_t i = 0; i < n; i++)
        half[i] = (uint16_t)(bits_next(r) & 0xb7ff); /* f16 below 2 in size */
    c->pool = (uint8_t *)half;
}

bool bits_attend(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    struct attend_case c = {.n_rows = bits_between(r, 1, 9)};
    if (run->tried.ops->attend == NULL)
        return true;
    c.room = bits_below(r, 2) ? c.n_rows : bits_between(r, c.n_rows, MOST_ROWS);
    c.kv = (struct k_kv){
        .max_pages = bits_below(r, 3) ? bits_between(r, 1, 20) : bits_between(r, 1, 140),
        .type = K_KV_F16,
        .n_head_kv = bits_between(r, 1, 4),
        .head_dim = bits_below(r, 4) ? 64u << bits_below(r, 3) : 32 * bits_between(r, 1, 8)};
    const uint32_t dim = c.kv.head_dim;
    c.kv.page_bytes = k_kv_layer_bytes(c.kv.type, c.kv.n_head_kv, dim);
    c.n_head = c.kv.n_head_kv * bits_between(r, 1, 9);
    c.pages = bits_between(r, 1, 12);
    const uint32_t most = bits_between(r, 1, c.kv.max_pages * K_PAGE);
    for (uint32_t i = 0; i < MOST_ROWS; i++) {
        c.sequence[i] = i % SEQUENCES;
        c.position[i] = bits_below(r, most);
    }
    const size_t width = (size_t)c.n_head * dim;
    c.q256 = width % 256 == 0 && bits_below(r, 4) > 0;
    c.q32 = !c.q256 || bits_below(r, 2);
    c.q = random_floats(r, BITS_NORMAL, width * c.room);
    if (bits_below(r, 4) == 0)
        c.q[bits_below(r, (uint32_t)width * c.n_rows)] = bits_not_finite(r);
    attend_pages(r, &c);
    struct spans p[SETS] = {{.side = &run->tried}, {.side = &run->tried}};
    struct k_attention a[SETS];
    struct k_act y[SETS];
    bool ok = attend_on(&run->tried, &c, false, &p[0], &a[0], &y[0]) &&
              attend_on(&run->tried, &c, true, &p[1], &a[1], &y[1]);
    const struct k_span f32[SETS] = {y[0].f32, y[1].f32}, q32[SETS] = {y[0].q32, y[1].q32},
                        q256[SETS] = {y[0].q256, y[1].q256},
                        faults[SETS] = {a[0].rows.faults, a[1].rows.faults};
    const struct k_ops *ops = run->tried.ops;
    ok = ok && same(run, "attend: y", f32, width * c.n_rows * 4) &&
         same(run, "attend: faults", faults, c.room * 4);
    if (ok && c.q32)
        ok = same(run, "attend: q32", q32, ops->act_bytes(K_FORM_Q32, y[0].n, c.n_rows));
    if (ok && c.q256)
        ok = same(run, "attend: q256", q256, ops->act_bytes(K_FORM_Q256, y[0].n, c.n_rows));
    if (!ok)
        printf("attend: %u/%u heads of %u, %u rows of %u, %u pages, %u positions\n", c.n_head,
               c.kv.n_head_kv, dim, c.n_rows, c.room, c.kv.max_pages, most);
    ok &= drop(&p[0]);
    ok &= drop(&p[1]);
    free(c.pool);
    free(c.q);
    return ok;
}

/* ---- route ---- */

struct route_case {
    uint32_t n_in, n_expert, n_used, n_rows, room;
    float *x, *out, *norm, *weights, scale; /* out: NULL, nothing is added */
    bool normalise;
};

struct route_spans {
    struct k_span x, y, q256, logits, ids, weights, n_groups, groups, order, faults;
};

static bool route_on(struct bits_side *side, const struct route_case *c, bool fused,
                     struct spans *p, struct route_spans *ret)
{
    const struct k_ops *ops = side->ops;
    const size_t pairs = (size_t)c->room * c->n_used * 4;
    struct k_rows rows = {.max_rows = c->room};
    rows.n_rows = put(p, &c->n_rows, sizeof(c->n_rows));
    rows.faults = ret->faults = put(p, NULL, c->room * 4);
    const size_t bytes = (size_t)c->room * c->n_in * 4;
    struct k_enter enter = {.rows = rows, .eps = 1e-6f, .act = {.n = c->n_in}};
    enter.x = ret->x = put(p, c->x, bytes);
    enter.norm = put(p, c->norm, c->n_in * sizeof(float));
    if (c->out != NULL)
        enter.out = put(p, c->out, bytes);
    enter.act.f32 = ret->y = put(p, NULL, bytes);
    if (c->n_in % 256 == 0)
        enter.act.q256 = ret->q256 = put(p, NULL, ops->act_bytes(K_FORM_Q256, c->n_in, c->room));
    const struct k_matrix w = {bits_weights(side, K_F32, c->n_expert, c->n_in, c->weights), K_F32,
                               c->n_expert, c->n_in};
    ret->logits = put(p, NULL, (size_t)c->room * c->n_expert * 4);
    ret->ids = put(p, NULL, pairs);
    ret->weights = put(p, NULL, pairs);
    ret->order = put(p, NULL, pairs);
    ret->n_groups = put(p, NULL, 4);
    ret->groups = put(p, NULL, (size_t)c->n_expert * sizeof(struct k_group));
    const struct k_matmul matmul = {rows, enter.act, 1, {w}, {ret->logits}};
    const struct k_router router = {rows,        ret->logits, ret->ids,     ret->weights,
                                    c->n_expert, c->n_used,   c->normalise, c->scale};
    const struct k_grouping grouping = {rows,       ret->ids,    ret->n_groups, ret->groups,
                                        ret->order, c->n_expert, c->n_used};
    bool ok = bits_begin(side);
    if (fused) {
        ok &=
            bits_done(side, "route", ops->route(&enter, &matmul, &router, &grouping, side->stream));
    } else {
        ok &= bits_done(side, "enter", ops->enter(&enter, side->stream));
        ok &= bits_done(side, "matmul", ops->matmul(&matmul, side->stream));
        ok &= bits_done(side, "router", ops->router(&router, side->stream));
        ok &= bits_done(side, "grouping", ops->grouping(&grouping, side->stream));
    }
    ok &= bits_end(side);
    return bits_drop(side, w.data, k_format_bytes(K_F32, c->n_expert, c->n_in)) && ok;
}

bool bits_route(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    struct route_case c = {.n_rows = bits_between(r, 1, 9), .normalise = bits_below(r, 2)};
    if (run->tried.ops->route == NULL)
        return true;
    c.room = bits_below(r, 2) ? c.n_rows : bits_between(r, c.n_rows, MOST_ROWS);
    if (bits_below(r, 2))
        c.n_rows = c.room = 1;
    c.n_in = bits_below(r, 3) ? 32 * bits_between(r, 1, 140) : 256 * bits_between(r, 1, 10);
    c.n_expert = bits_between(r, 1, bits_below(r, 3) ? 128 : 600);
    c.n_used = bits_between(r, 1, c.n_expert < 12 ? c.n_expert : 12);
    c.scale = bits_below(r, 2) ? 1.0f : 2.5f;
    c.x = random_floats(r, BITS_NORMAL, (size_t)c.room * c.n_in);
    c.out = bits_below(r, 4) ? random_floats(r, BITS_NORMAL, (size_t)c.room * c.n_in) : NULL;
    c.norm = random_floats(r, BITS_NORMAL, c.n_in);
    c.weights = random_floats(r, BITS_NORMAL, (size_t)c.n_expert * c.n_in);
    if (bits_below(r, 3) == 0) /* ties */
        for (size_t i = 0; i < (size_t)c.n_expert * c.n_in; i++)
            c.weights[i] = i % c.n_in == 0 ? (float)bits_below(r, 3) : 0.0f;
    if (bits_below(r, 4) == 0)
        c.x[bits_below(r, c.n_rows * c.n_in)] = bits_not_finite(r);
    struct spans p[SETS] = {{.side = &run->tried}, {.side = &run->tried}};
    struct route_spans a = {.x = {.buffer = NULL}}, b = a;
    bool ok =
        route_on(&run->tried, &c, false, &p[0], &a) && route_on(&run->tried, &c, true, &p[1], &b);
    const size_t pairs = (size_t)c.n_rows * c.n_used * 4;
    const uint32_t n = ok ? *(const uint32_t *)bits_host(&run->tried, a.n_groups) : 0;
    const struct {
        const char *what;
        struct k_span span[SETS];
        size_t bytes;
    } results[] = {{"route: x", {a.x, b.x}, (size_t)c.room * c.n_in * 4},
                   {"route: y", {a.y, b.y}, (size_t)c.n_rows * c.n_in * 4},
                   {"route: ids", {a.ids, b.ids}, pairs},
                   {"route: weights", {a.weights, b.weights}, pairs},
                   {"route: order", {a.order, b.order}, pairs},
                   {"route: groups", {a.n_groups, b.n_groups}, 4},
                   {"route: group", {a.groups, b.groups}, n * sizeof(struct k_group)},
                   {"route: faults", {a.faults, b.faults}, c.room * 4}};
    for (size_t i = 0; i < sizeof results / sizeof results[0] && ok; i++)
        ok = same(run, results[i].what, results[i].span, results[i].bytes);
    const struct k_span q256[SETS] = {a.q256, b.q256};
    if (ok && c.n_in % 256 == 0)
        ok = same(run, "route: q256", q256,
                  run->tried.ops->act_bytes(K_FORM_Q256, c.n_in, c.n_rows));
    if (!ok)
        printf("route: %u inputs, %u of %u experts, %u rows of %u\n", c.n_in, c.n_used, c.n_expert,
               c.n_rows, c.room);
    ok &= drop(&p[0]);
    ok &= drop(&p[1]);
    free(c.x);
    free(c.out);
    free(c.norm);
    free(c.weights);
    return ok;
}

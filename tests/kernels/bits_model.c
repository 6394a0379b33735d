/* Attention over paged KV, router, grouping and experts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bits.h"
#include "k_format.h"

static void *must(size_t n)
{
    void *p = calloc(1, n ? n : 1);
    if (p == NULL)
        abort();
    return p;
}

/* Spans of one case on one side, dropped together. */
struct pile {
    struct bits_side *side;
    struct {
        struct k_span span;
        size_t n;
    } item[40];
    uint32_t count;
};

static struct k_span keep(struct pile *p, struct k_span span, size_t n)
{
    p->item[p->count].span = span;
    p->item[p->count++].n = n;
    return span;
}

static struct k_span put(struct pile *p, const void *bytes, size_t n)
{
    return keep(p, bits_span(p->side, bytes, n), n);
}

/* n bytes in a buffer for `total`. */
static struct k_span put_of(struct pile *p, const void *bytes, size_t n, size_t total)
{
    return keep(p, bits_span_of(p->side, bytes, n, total), total);
}

static bool drop(struct pile *p)
{
    bool ok = true;
    for (uint32_t i = 0; i < p->count; i++)
        ok &= bits_drop(p->side, p->item[i].span, p->item[i].n);
    return ok;
}

/* n rows in buffers for `room`. */
static struct k_rows rows_of(struct pile *p, uint32_t n, uint32_t room, const uint32_t *position,
                             const uint32_t *sequence)
{
    struct k_rows rows = {.max_rows = room};
    rows.n_rows = put(p, &n, sizeof n);
    rows.token = put(p, NULL, room * 4);
    rows.position = put_of(p, position, n * 4, room * 4);
    rows.sequence = put_of(p, sequence, n * 4, room * 4);
    rows.faults = put(p, NULL, room * 4);
    return rows;
}

struct attention_case {
    struct k_kv kv;
    uint32_t n_head, length, sequences;
    float *q, *k, *v; /* [sequences * length] rows */
    uint32_t table[4 * 40];
    uint32_t n_pages;   /* of the pool */
    uint32_t room_over; /* 0, or rows that fit beyond those that are there */
};

/* Writes and attends to the rows of the case in chunks of `chunk` rows; y [rows][n_head * D],
 * faults [rows], a hash of all pages. */
static bool attend(struct bits_side *side, const struct attention_case *c, uint32_t chunk, float *y,
                   uint32_t *faults, uint64_t *ret_pages)
{
    struct pile all = {.side = side};
    const uint32_t dim = c->kv.head_dim, n = c->sequences * c->length;
    const size_t kv_width = (size_t)c->kv.n_head_kv * dim, q_width = (size_t)c->n_head * dim;
    struct k_kv kv = c->kv;
    kv.pool = put(&all, NULL, kv.page_bytes * c->n_pages);
    kv.table = put(&all, c->table, sizeof c->table);
    bool ok = true;
    for (uint32_t first = 0; first < n; first += chunk) {
        const uint32_t rows_n = n - first < chunk ? n - first : chunk;
        uint32_t *position = must(rows_n * 4), *sequence = must(rows_n * 4);
        for (uint32_t i = 0; i < rows_n; i++) {
            /* Sequences take turns, so that a chunk mixes them. */
            position[i] = (first + i) / c->sequences;
            sequence[i] = (first + i) % c->sequences;
        }
        struct pile p = {.side = side};
        const uint32_t room = rows_n + c->room_over;
        const struct k_rows rows = rows_of(&p, rows_n, room, position, sequence);
        const size_t kv_bytes = rows_n * kv_width * 4, q_bytes = rows_n * q_width * 4;
        const struct k_span k = put_of(&p, c->k + first * kv_width, kv_bytes, room * kv_width * 4);
        const struct k_span v = put_of(&p, c->v + first * kv_width, kv_bytes, room * kv_width * 4);
        const struct k_span q = put_of(&p, c->q + first * q_width, q_bytes, room * q_width * 4);
        const struct k_span out = put(&p, NULL, room * q_width * 4);
        const struct k_span scratch = put(
            &p, NULL, side->ops->attention_bytes(side->device, c->n_head, dim, room, kv.max_pages));
        ok &= bits_begin(side);
        ok &= bits_done(side, "kv_write",
                        side->ops->kv_write(&(struct k_kv_write){rows, k, v, kv}, side->stream));
        ok &= bits_done(
            side, "attention",
            side->ops->attention(
                &(struct k_attention){rows, q, out, scratch, kv, c->n_head, 0.125f}, side->stream));
        ok &= bits_end(side);
        memcpy(y + first * q_width, bits_host(side, out), rows_n * q_width * 4);
        memcpy(faults + first, bits_host(side, rows.faults), rows_n * 4);
        ok &= drop(&p);
        free(position);
        free(sequence);
    }
    const uint8_t *pages = bits_host(side, kv.pool);
    *ret_pages = UINT64_C(0xcbf29ce484222325);
    for (uint64_t i = 0; i < kv.page_bytes * c->n_pages; i++)
        *ret_pages = (*ret_pages ^ pages[i]) * UINT64_C(0x100000001b3);
    return drop(&all) && ok;
}

/* Rows without a fault have the same bits, and the faults are the same (set or not). */
static bool same_rows(struct bits_run *run, const char *what, const float *a, const float *b,
                      const uint32_t *faults_a, const uint32_t *faults_b, size_t width,
                      uint32_t n_rows)
{
    for (uint32_t i = 0; i < n_rows; i++) {
        if ((faults_a[i] != 0) != (faults_b[i] != 0)) {
            printf("%s: row %u of %u has fault %u, the reference %u\n", what, i, n_rows,
                   faults_b[i], faults_a[i]);
            return false;
        }
        if (faults_a[i] == 0 && !bits_equal(run, what, a + i * width, b + i * width, width))
            return false;
    }
    return true;
}

bool bits_attention(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    struct attention_case c = {0};
    c.kv.type = bits_below(r, 3) == 0 ? K_KV_Q8_0 : K_KV_F16;
    c.kv.n_head_kv = bits_between(r, 1, 3);
    c.kv.head_dim = bits_below(r, 4) == 0 ? 32 * bits_between(r, 1, 8) : 64 * bits_between(r, 1, 2);
    if (c.kv.type == K_KV_F16 && bits_below(r, 10) == 0)
        c.kv.head_dim = 2 * bits_between(r, 1, 60);
    c.n_head = c.kv.n_head_kv * bits_between(r, 1, bits_below(r, 4) == 0 ? 10 : 4);
    c.sequences = bits_between(r, 1, 4);
    c.length =
        bits_below(r, 6) == 0 ? bits_between(r, 500, 700) / c.sequences : bits_between(r, 1, 150);
    c.kv.max_pages = 40;
    c.room_over = run->device ? bits_below(r, 3) * bits_below(r, 6) : 0;
    const uint64_t layer = k_kv_layer_bytes(c.kv.type, c.kv.n_head_kv, c.kv.head_dim);
    c.kv.layer_offset = bits_below(r, 2) * layer;
    c.kv.page_bytes = (2 * layer + 63) / 64 * 64;
    /* Pages of all sequences in one permuted order. */
    const uint32_t per = (c.length + K_PAGE - 1) / K_PAGE;
    c.n_pages = per * c.sequences;
    for (uint32_t i = 0; i < c.n_pages; i++) {
        const uint32_t j = bits_below(r, i + 1);
        uint32_t *slot_i = &c.table[i / per * c.kv.max_pages + i % per];
        uint32_t *slot_j = &c.table[j / per * c.kv.max_pages + j % per];
        *slot_i = *slot_j;
        *slot_j = i;
    }
    const uint32_t n = c.sequences * c.length, dim = c.kv.head_dim;
    c.q = must((size_t)n * c.n_head * dim * 4);
    c.k = must((size_t)n * c.kv.n_head_kv * dim * 4);
    c.v = must((size_t)n * c.kv.n_head_kv * dim * 4);
    const enum bits_kind kind = bits_below(r, BITS_SPIKES);
    bits_fill(r, BITS_NORMAL, c.q, (size_t)n * c.n_head * dim);
    bits_fill(r, kind, c.k, (size_t)n * c.kv.n_head_kv * dim);
    bits_fill(r, kind, c.v, (size_t)n * c.kv.n_head_kv * dim);
    if (bits_below(r, 3) == 0) /* subnormal as f16 */
        for (size_t i = 0; i < (size_t)n * c.kv.n_head_kv * dim; i++) {
            c.k[i] *= 0x1p-14f;
            c.v[i] *= 0x1p-16f;
        }
    const bool bad_key = bits_below(r, 4) == 0;
    if (bits_below(r, 4) == 0) /* a query, or a key that the cache cannot hold */
        c.q[bits_below(r, n * c.n_head * dim)] = bits_not_finite(r);
    if (bad_key)
        c.k[bits_below(r, n * c.kv.n_head_kv * dim)] = bits_below(r, 2) ? 1e9f : bits_not_finite(r);
    const size_t width = (size_t)c.n_head * dim, count = n * width;
    float *y_ref = must(count * 4), *y = must(count * 4), *y_one = must(count * 4);
    uint32_t *faults_ref = must(n * 4), *faults = must(n * 4), *faults_one = must(n * 4);
    const uint32_t chunk = bits_between(r, 1, 64);
    uint64_t pages_ref, pages, pages_one;
    bool ok = attend(&run->reference, &c, n, y_ref, faults_ref, &pages_ref) &&
              attend(&run->tried, &c, n, y, faults, &pages) &&
              attend(&run->tried, &c, chunk, y_one, faults_one, &pages_one);
    if (ok && !bad_key && (pages != pages_ref || pages_one != pages_ref)) {
        printf("KV pages differ from the reference's\n");
        ok = false;
    }
    ok = ok && same_rows(run, "attention", y_ref, y, faults_ref, faults, width, n) &&
         same_rows(run, "attention in chunks", y_ref, y_one, faults_ref, faults_one, width, n);
    if (!ok)
        printf("attention: type %d, %u/%u heads of %u, %u sequences of %u, chunk %u\n", c.kv.type,
               c.n_head, c.kv.n_head_kv, dim, c.sequences, c.length, chunk);
    free(c.q);
    free(c.k);
    free(c.v);
    free(y_ref);
    free(y);
    free(y_one);
    free(faults_ref);
    free(faults);
    free(faults_one);
    return ok;
}

bool bits_router(struct bits_run *run)
{
    struct bits_random *r = &run->random;
    const uint32_t n_expert = bits_between(r, 2, 200), n_rows = bits_some_rows(run, 40);
    const uint32_t n_used = bits_between(r, 1, n_expert < 10 ? n_expert : 10);
    const uint32_t room = bits_max_rows(run, n_rows);
    float *logits = must((size_t)n_expert * n_rows * 4);
    bits_fill(r, bits_below(r, BITS_SPIKES), logits, (size_t)n_expert * n_rows);
    if (bits_below(r, 3) == 0) /* ties, 0 and -0 among them */
        for (size_t i = 0; i < (size_t)n_expert * n_rows; i++)
            logits[i] = bits_below(r, 2) ? (float)bits_below(r, 3) : -0.0f;
    const uint32_t bad = bits_below(r, 4) == 0 ? bits_below(r, n_rows) : BITS_NO_ROW;
    if (bad != BITS_NO_ROW)
        logits[(size_t)bad * n_expert + bits_below(r, n_expert)] = bits_not_finite(r);
    struct bits_side *sides[2] = {&run->reference, &run->tried};
    struct pile p[2] = {{.side = sides[0]}, {.side = sides[1]}};
    struct k_span ids[2], weights[2], order[2], groups[2], n_groups[2];
    const bool normalise = bits_next(r) & 1;
    const float scale = bits_next(r) & 1 ? 1.0f : 2.5f;
    bool ok = true;
    for (int s = 0; s < 2; s++) {
        const struct k_ops *ops = sides[s]->ops;
        const struct k_rows rows = rows_of(&p[s], n_rows, room, NULL, NULL);
        const struct k_span in =
            put_of(&p[s], logits, (size_t)n_expert * n_rows * 4, (size_t)n_expert * room * 4);
        const size_t pairs = (size_t)room * n_used;
        ids[s] = put(&p[s], NULL, pairs * 4);
        weights[s] = put(&p[s], NULL, pairs * 4);
        order[s] = put(&p[s], NULL, pairs * 4);
        groups[s] = put(&p[s], NULL, (size_t)n_expert * sizeof(struct k_group));
        n_groups[s] = put(&p[s], NULL, 4);
        ok &= bits_begin(sides[s]);
        const struct k_router router = {rows,     in,     ids[s],    weights[s],
                                        n_expert, n_used, normalise, scale};
        const struct k_grouping grouping = {rows,     ids[s],   n_groups[s], groups[s],
                                            order[s], n_expert, n_used};
        ok &= bits_done(sides[s], "router", ops->router(&router, sides[s]->stream));
        ok &= bits_done(sides[s], "grouping", ops->grouping(&grouping, sides[s]->stream));
        ok &= bits_end(sides[s]);
        ok &= bits_only_fault("router", bits_host(sides[s], rows.faults), n_rows, bad);
    }
    const size_t pairs = (size_t)n_rows * n_used;
    const struct {
        const char *what;
        struct k_span *span;
        size_t n;
    } result[] = {
        {"router ids", ids, pairs}, {"router weights", weights, pairs}, {"groups", n_groups, 1}};
    for (size_t i = 0; i < sizeof result / sizeof result[0] && ok; i++)
        ok = bits_equal(run, result[i].what, bits_host(sides[0], result[i].span[0]),
                        bits_host(sides[1], result[i].span[1]), result[i].n);
    const uint32_t n = *(const uint32_t *)bits_host(sides[0], n_groups[0]);
    ok = ok && bits_equal(run, "grouping order", bits_host(sides[0], order[0]),
                          bits_host(sides[1], order[1]), pairs);
    ok = ok && bits_equal(run, "groups", bits_host(sides[0], groups[0]),
                          bits_host(sides[1], groups[1]), (size_t)n * 3);
    if (!ok)
        printf("router: %u of %u experts, %u rows of %u\n", n_used, n_expert, n_rows, room);
    ok &= drop(&p[0]);
    ok &= drop(&p[1]);
    free(logits);
    return ok;
}

struct expert_case {
    enum k_format gate, up, down;
    uint32_t n_embd, n_ff, n_expert, n_used, n_rows, room;
    uint32_t *ids;
    float *weights, *x;
    uint8_t *arena;
    uint64_t *slots, arena_bytes;
};

static struct k_act act_of(struct pile *p, const float *x, uint32_t n, uint32_t n_rows,
                           uint32_t room)
{
    struct k_act act = {.n = n};
    act.f32 = put_of(p, x, (size_t)n * n_rows * 4, (size_t)n * room * 4);
    if (n % 32 == 0)
        act.q32 = put(p, NULL, p->side->ops->act_bytes(K_FORM_Q32, n, room));
    if (n % 256 == 0)
        act.q256 = put(p, NULL, p->side->ops->act_bytes(K_FORM_Q256, n, room));
    return act;
}

/* The experts out of the host's memory, some at a time and the last ones first, into arena and
 * slots. */
static void bring_all(struct pile *p, const struct expert_case *c, const struct k_experts *to)
{
    const struct k_ops *ops = p->side->ops;
    const size_t shift = c->arena_bytes / 256 % 8 * 2; /* blocks of the file are aligned to 2 */
    uint8_t *memory = must(c->arena_bytes + 16);
    struct err e;
    if (ops->host_register(p->side->device, memory, c->arena_bytes + 16, &e) != ERR_OK)
        exit(1);
    memcpy(memory + shift, c->arena, c->arena_bytes);
    /* the slices and what separates them are more than their rounded bytes */
    struct k_bring a = {.layer = *to, .staging = put(p, NULL, c->arena_bytes)};
    for (uint32_t i = c->n_expert; i-- > 0;) {
        struct k_bring_expert *x = &a.experts[a.n++];
        x->expert = i;
        for (int k = 0; k < K_BRING_SLICES; k++) {
            x->from[k] = memory + shift + c->slots[3 * i + (uint32_t)k];
            x->to[k] = BITS_GUARD + c->slots[3 * i + (uint32_t)k];
        }
        if (i > 0 && a.n <= i % K_BRING_MOST)
            continue;
        if (!bits_done(p->side, "bring", ops->bring(&a, p->side->stream)))
            exit(1);
        a.n = 0;
    }
    if (!bits_done(p->side, "bring", ops->wait(p->side->stream)))
        exit(1);
    ops->host_unregister(p->side->device, memory);
    free(memory);
}

/* The arena, each slice in the order in which the side computes. */
static struct k_span arena_of(struct pile *p, const struct expert_case *c)
{
    const enum k_format of[3] = {c->gate, c->up, c->down};
    const struct k_span arena = put(p, c->arena, c->arena_bytes);
    if (p->side->ops->arrange == NULL)
        return arena;
    const struct k_span arranged = put(p, NULL, c->arena_bytes);
    for (uint32_t i = 0; i < 3 * c->n_expert; i++) {
        const struct k_span from = {arena.buffer, arena.offset + c->slots[i]},
                            to = {arranged.buffer, arranged.offset + c->slots[i]};
        const bool down = i % 3 == 2;
        if (!bits_arrange(p->side, from, to, of[i % 3], down ? c->n_embd : c->n_ff,
                          down ? c->n_ff : c->n_embd))
            exit(1);
    }
    return arranged;
}

static struct k_experts place_experts(struct pile *p, const struct expert_case *c)
{
    const bool brought = p->side->ops->bring != NULL && c->n_rows % 2 == 0;
    const struct k_span arena = brought ? put(p, NULL, c->arena_bytes) : arena_of(p, c);
    uint64_t places[3 * 12];
    for (uint32_t i = 0; i < 3 * c->n_expert; i++)
        places[i] = c->slots[i] + arena.offset;
    const struct k_span slots = put(p, brought ? NULL : places, (size_t)c->n_expert * 24);
    const struct k_experts experts = {arena.buffer, slots,   c->gate,     c->up,    c->down,
                                      c->n_embd,    c->n_ff, c->n_expert, c->n_used};
    if (brought)
        bring_all(p, c, &experts);
    return experts;
}

/* x + weighted expert outputs; the groups are selected in two calls, so that arrival in parts is
 * tried as well. */
static bool experts_on(struct bits_side *side, const struct expert_case *c, bool backwards,
                       float *y, uint32_t *faults)
{
    struct pile p = {.side = side};
    const struct k_ops *ops = side->ops;
    const uint32_t pairs = c->n_rows * c->n_used * 4, room = c->room * c->n_used;
    const struct k_rows rows = rows_of(&p, c->n_rows, c->room, NULL, NULL);
    const struct k_span ids = put_of(&p, c->ids, pairs, room * 4),
                        weights = put_of(&p, c->weights, pairs, room * 4);
    const struct k_span order = put(&p, NULL, room * 4), n_groups = put(&p, NULL, 4);
    const struct k_span groups = put(&p, NULL, c->n_expert * sizeof(struct k_group));
    const struct k_act x = act_of(&p, c->x, c->n_embd, c->n_rows, c->room),
                       h = act_of(&p, NULL, c->n_ff, 0, room);
    bool ok = bits_begin(side);
    ok &= bits_done(side, "grouping",
                    ops->grouping(&(struct k_grouping){rows, ids, n_groups, groups, order,
                                                       c->n_expert, c->n_used},
                                  side->stream));
    ok &= bits_done(side, "quantise", ops->quantise(&(struct k_quantise){rows, x}, side->stream));
    ok &= bits_end(side);
    const struct k_experts experts = place_experts(&p, c);
    const struct k_span out = put(&p, NULL, (size_t)room * c->n_embd * 4);
    const struct k_span sum =
        put_of(&p, c->x, (size_t)c->n_rows * c->n_embd * 4, (size_t)c->room * c->n_embd * 4);
    const uint32_t n = *(const uint32_t *)bits_host(side, n_groups), half = n / 2;
    struct k_span n_selected[2], list[2];
    for (int part = 0; part < 2; part++) {
        uint32_t selected[16], count = 0;
        for (uint32_t i = part ? half : 0; i < (part ? n : half); i++)
            selected[count++] = backwards ? n - 1 - i : i;
        n_selected[part] = put(&p, &count, 4);
        list[part] = put_of(&p, selected, count * 4, c->n_expert * 4);
    }
    ok &= bits_begin(side);
    for (int part = 0; part < 2; part++) {
        ok &=
            bits_done(side, "moe_gate_up",
                      ops->moe_gate_up(&(struct k_moe_gate_up){rows, experts, groups, order,
                                                               n_selected[part], list[part], x, h},
                                       side->stream));
        ok &= bits_done(side, "moe_down",
                        ops->moe_down(&(struct k_moe_down){rows, experts, groups, order,
                                                           n_selected[part], list[part], h, out},
                                      side->stream));
    }
    ok &= bits_done(side, "moe_sum",
                    ops->moe_sum(&(struct k_moe_sum){rows, weights, out, sum, c->n_embd, c->n_used},
                                 side->stream));
    ok &= bits_end(side);
    memcpy(y, bits_host(side, sum), (size_t)c->n_rows * c->n_embd * 4);
    memcpy(faults, bits_host(side, rows.faults), c->n_rows * 4);
    return drop(&p) && ok;
}

bool bits_experts(struct bits_run *run)
{
    static const enum k_format formats[] = {K_F32,  K_F16,  K_BF16, K_Q8_0,
                                            K_Q4_0, K_Q4_K, K_Q5_K, K_Q6_K};
    struct bits_random *r = &run->random;
    struct expert_case c = {.n_embd = 256 * bits_between(r, 1, 2)};
    c.gate = formats[bits_below(r, 8)];
    c.up = bits_below(r, 2) ? c.gate : formats[bits_below(r, 8)];
    c.down = formats[bits_below(r, 8)];
    const uint32_t block = k_format_block_elements(c.down);
    c.n_ff = block * bits_between(r, 1, block == 256 ? 3 : 256 / block * 3);
    c.n_expert = bits_between(r, 2, 12);
    c.n_used = bits_between(r, 1, c.n_expert < 4 ? c.n_expert : 4);
    c.n_rows = bits_below(r, 2) ? bits_between(r, 1, 3) : bits_between(r, 1, 64);
    if (run->device && bits_below(r, 24) == 0)
        c.n_rows = bits_between(r, 65, 300);
    c.room = bits_max_rows(run, c.n_rows);
    const uint32_t pairs = c.n_rows * c.n_used;
    c.ids = must(pairs * 4);
    c.weights = must(pairs * 4);
    c.x = must((size_t)c.n_rows * c.n_embd * 4);
    bits_fill(r, bits_below(r, BITS_WIDE), c.x, (size_t)c.n_rows * c.n_embd);
    if (bits_below(r, 3) == 0) /* the gate may overflow: a fault of this row alone */
        for (uint32_t i = 0, row = bits_below(r, c.n_rows); i < c.n_embd; i++)
            c.x[(size_t)row * c.n_embd + i] *= 0x1p70f;
    bits_fill(r, BITS_NORMAL, c.weights, pairs);
    for (uint32_t row = 0; row < c.n_rows; row++) {
        const uint32_t first = bits_below(r, c.n_expert);
        for (uint32_t k = 0; k < c.n_used; k++)
            c.ids[row * c.n_used + k] = (first + k) % c.n_expert;
    }
    const enum k_format of[3] = {c.gate, c.up, c.down};
    const uint64_t slice[3] = {k_format_bytes(c.gate, c.n_ff, c.n_embd),
                               k_format_bytes(c.up, c.n_ff, c.n_embd),
                               k_format_bytes(c.down, c.n_embd, c.n_ff)};
    const uint64_t grain = run->device ? 256 : sizeof(float);
    c.arena_bytes = (slice[0] + slice[1] + slice[2] + 3 * grain) * c.n_expert;
    c.arena = must(c.arena_bytes);
    c.slots = must((size_t)c.n_expert * 24);
    uint64_t at = 0;
    for (uint32_t e = c.n_expert; e-- > 0;)
        for (int k = 0; k < 3; k++) {
            /* On a device each slice is aligned; on the CPU floats are, which blocks need not be.
             * */
            if (run->device || of[k] == K_F32)
                at = (at + grain - 1) / grain * grain;
            c.slots[3 * e + (uint32_t)k] = at;
            bits_blocks(r, of[k], c.arena + at, slice[k] / k_format_block_bytes(of[k]));
            at += slice[k];
        }
    const size_t count = (size_t)c.n_rows * c.n_embd;
    float *y_ref = must(count * 4), *y = must(count * 4);
    uint32_t *faults_ref = must(c.n_rows * 4), *faults = must(c.n_rows * 4);
    bool ok = experts_on(&run->reference, &c, false, y_ref, faults_ref) &&
              experts_on(&run->tried, &c, true, y, faults);
    /* Huge scales may overflow; then both must say so in the same places, and a NaN has no portable
     * bits. */
    for (size_t i = 0; i < count; i++)
        if (y_ref[i] != y_ref[i] && y[i] != y[i])
            y_ref[i] = y[i] = 0.0f;
    ok = ok && same_rows(run, "experts", y_ref, y, faults_ref, faults, c.n_embd, c.n_rows);
    if (!ok)
        printf("experts: formats %d %d %d, %u x %u, %u experts, top %u, %u rows of %u\n", c.gate,
               c.up, c.down, c.n_embd, c.n_ff, c.n_expert, c.n_used, c.n_rows, c.room);
    free(c.ids);
    free(c.weights);
    free(c.x);
    free(c.arena);
    free(c.slots);
    free(y_ref);
    free(y);
    free(faults_ref);
    free(faults);
    return ok;
}

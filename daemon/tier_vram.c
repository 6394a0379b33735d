#include "tier_vram.h"

#include <assert.h>

#include "alloc.h"
#include "expert_cache.h"

enum {
    TRANSIT_MOST = 128 << 20, /* bytes of each half of the transit area, or */
    TRANSIT_PART = 96,        /* such a part of the budget, unless an expert is larger */
    ALIGN = 256,              /* of whatever the device arranges */
    TIMED_EVERY = 16,         /* copies */
    SLOT_BYTES = TIER_VRAM_SLICES * sizeof(uint64_t)
};

static uint64_t aligned(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

static const struct gguf_tensor *tensor_of(const struct model *m, uint32_t layer, int slice)
{
    const struct shape_layer *l = &m->tensors.layers[layer];
    return slice == 0 ? l->gate : slice == 1 ? l->up : l->down;
}

uint64_t tier_vram_island_bytes(const struct model *m, uint32_t layer)
{
    uint64_t n = 0;
    for (int i = 0; i < TIER_VRAM_SLICES; i++)
        n += aligned(shape_slice_bytes(tensor_of(m, layer, i), &m->shape), ALIGN);
    return aligned(n, EXPERT_CACHE_ALIGN);
}

static uint64_t largest(const struct model *m)
{
    uint64_t most = 0;
    for (uint32_t l = 0; l < m->shape.n_layer; l++) {
        const uint64_t n = tier_vram_island_bytes(m, l);
        most = n > most ? n : most;
    }
    return most;
}

static uint64_t table_bytes(const struct model *m)
{
    return aligned((uint64_t)m->shape.n_expert * SLOT_BYTES, ALIGN);
}

/* The link works for a prompt while layers whose experts are all there are computed, as long as
 * what comes has room. */
static unsigned transit_of(const struct model *m, uint64_t budget)
{
    const uint64_t part = budget / TRANSIT_PART;
    const uint64_t n = (part < TRANSIT_MOST ? part : TRANSIT_MOST) / largest(m);
    return n < 1 ? 1 : n < TIER_VRAM_TRANSIT ? (unsigned)n : TIER_VRAM_TRANSIT;
}

uint64_t tier_vram_fixed_bytes(const struct model *m, uint64_t budget)
{
    /* both halves of the transit area and of the staging, then the tables */
    return 2 * (transit_of(m, budget) + K_BRING_MOST) * largest(m) +
           m->shape.n_layer * table_bytes(m);
}

uint64_t tier_vram_least(const struct model *m)
{
    return aligned(m->largest_matrix, EXPERT_CACHE_ALIGN);
}

/* Where the layers' tables are, behind all else. */
static void place_tables(struct tier_vram *v, uint64_t at)
{
    const struct model_shape *shape = &v->model->shape;
    for (uint32_t i = 0; i < shape->n_layer; i++) {
        const struct shape_layer *l = &v->model->tensors.layers[i];
        v->layers[i] = (struct k_experts){.arena = v->memory,
                                          .slots = {v->memory, at},
                                          .gate = (enum k_format)l->gate->type,
                                          .up = (enum k_format)l->up->type,
                                          .down = (enum k_format)l->down->type,
                                          .n_embd = shape->n_embd,
                                          .n_ff = shape->n_ff_expert,
                                          .n_expert = shape->n_expert,
                                          .n_used = shape->n_expert_used};
        v->island_bytes[i] = tier_vram_island_bytes(v->model, i);
        at += table_bytes(v->model);
    }
}

/* In chunks that can be given back, or in one piece where the device has none. */
static enum err_code take_memory(struct tier_vram *v, struct k_device *device, uint64_t bytes,
                                 struct err *e)
{
    const uint64_t n = bytes / K_CHUNK_BYTES + (bytes % K_CHUNK_BYTES != 0);
    struct err why = {.code = ERR_OK};
    enum err_code code = ERR_UNSUPPORTED;
    if (v->ops->range_new != NULL)
        code = v->ops->range_new(device, bytes, &v->memory, &why);
    if (code == ERR_UNSUPPORTED)
        return v->ops->buffer_new(device, bytes, &v->memory, e);
    if (code == ERR_OK)
        code = v->ops->chunks_take(v->memory, 0, n, &why);
    if (code != ERR_OK)
        return err_set(e, code, "%s", why.text);
    v->chunks = v->chunks_held = (uint32_t)(v->islands_bytes / K_CHUNK_BYTES);
    return ERR_OK;
}

enum err_code tier_vram_start(struct tier_vram *v, const struct tier_vram_options *options,
                              struct err *e)
{
    const struct model *m = options->model;
    const struct k_ops *ops = k_ops(options->device);
    const uint64_t islands = options->islands_bytes;
    const unsigned n_transit = transit_of(m, options->budget);
    *v = (struct tier_vram){.ops = ops,
                            .model = m,
                            .stream = options->stream,
                            .islands_bytes = islands,
                            .transit = islands,
                            .transit_bytes = largest(m),
                            .n_transit = n_transit,
                            .staging = islands + 2 * n_transit * largest(m)};
    v->layers = alloc_zero(ALLOC_WORK, m->shape.n_layer, sizeof(*v->layers));
    v->island_bytes = alloc_zero(ALLOC_WORK, m->shape.n_layer, sizeof(*v->island_bytes));
    enum err_code code = ERR_OK;
    if (v->layers == NULL || v->island_bytes == NULL)
        code = err_set(e, ERR_NOMEM, "no memory for %u layers", m->shape.n_layer);
    if (code == ERR_OK)
        code =
            take_memory(v, options->device, islands + tier_vram_fixed_bytes(m, options->budget), e);
    if (code == ERR_OK)
        code = ops->event_new(options->device, &v->from, e);
    if (code == ERR_OK)
        code = ops->event_new(options->device, &v->to, e);
    for (int i = 0; i < 2 && code == ERR_OK; i++) {
        code = ops->stream_new(options->device, &v->copies[i], e);
        if (code == ERR_OK)
            code = ops->event_new(options->device, &v->copied[i], e);
        if (code == ERR_OK)
            code = ops->event_new(options->device, &v->used[i], e);
        if (code == ERR_OK)
            code = ops->event_new(options->device, &v->ready[i], e);
    }
    if (code == ERR_OK)
        place_tables(v, v->staging + 2 * K_BRING_MOST * v->transit_bytes);
    else
        tier_vram_done(v);
    return code;
}

void tier_vram_done(struct tier_vram *v)
{
    for (int i = 0; i < 2; i++)
        if (v->copies[i] != NULL)
            v->ops->stream_free(v->copies[i]);
    struct k_event *const events[] = {v->copied[0], v->copied[1], v->used[0], v->used[1],
                                      v->ready[0],  v->ready[1],  v->from,    v->to};
    for (size_t i = 0; i < sizeof(events) / sizeof(events[0]); i++)
        if (events[i] != NULL)
            v->ops->event_free(events[i]);
    if (v->memory != NULL)
        v->ops->buffer_free(v->memory);
    alloc_free(v->layers);
    alloc_free(v->island_bytes);
    *v = (struct tier_vram){.begun = 0};
}

void tier_vram_give_back(struct tier_vram *v, uint32_t chunk)
{
    assert(chunk < v->chunks && v->chunks_held > 0);
    v->ops->chunks_return(v->memory, chunk, 1);
    v->chunks_held--;
}

enum err_code tier_vram_take_again(struct tier_vram *v, uint32_t chunk, struct err *e)
{
    assert(chunk < v->chunks && v->chunks_held < v->chunks);
    const enum err_code code = v->ops->chunks_take(v->memory, chunk, 1, e);
    v->chunks_held += code == ERR_OK;
    return code;
}

/* Every few are timed, if they have the link for themselves. Before a copy or several that are
 * begun together, on the stream that is v->last: */
static bool timed(struct tier_vram *v, uint32_t n)
{
    v->untimed += n;
    if (v->untimed < TIMED_EVERY || v->timed_bytes > 0 || !v->ops->event_passed(v->copied[0]) ||
        !v->ops->event_passed(v->copied[1]))
        return false;
    v->untimed = 0;
    v->ops->event_record(v->from, v->copies[v->last]);
    return true;
}

/* Those that wait to be begun together. */
static void begin(struct tier_vram *v)
{
    struct k_bring *a = &v->together;
    if (a->n == 0)
        return;
    struct k_event *const before = v->copied[v->last];
    v->last ^= 1;
    struct k_stream *s = v->copies[v->last];
    if (v->loose[0] || v->loose[1]) { /* their places and slots may be those of these */
        v->ops->event_after(before, s);
        v->loose[0] = v->loose[1] = false;
    }
    const bool is_timed = timed(v, a->n);
    a->staging = (struct k_span){v->memory, v->staging + v->last * K_BRING_MOST * v->transit_bytes};
    const enum err_code code = v->ops->bring(a, s);
    assert(code == ERR_OK || code == ERR_DEVICE); /* a wait tells of the latter */
    (void)code;
    if (is_timed) {
        v->ops->event_record(v->to, s);
        v->timed_bytes = a->n * tier_vram_island_bytes(v->model, v->together_layer);
    }
    v->ops->event_after(before, s);
    v->ops->event_record(v->copied[v->last], s);
    a->n = 0;
}

/* One slice over the link and into the device's order. */
static void copy_slice(struct tier_vram *v, const struct k_arrange *a, const uint8_t *from,
                       bool pinned)
{
    const uint64_t bytes = k_format_bytes(a->format, a->n_out, a->n_in);
    const bool arranges = v->ops->arrange != NULL;
    const struct k_span to = arranges ? a->from : a->to;
    if (pinned)
        v->ops->fetch(v->copies[0], to, from, bytes);
    else
        v->ops->upload(v->copies[0], to, from, bytes);
    const enum err_code code = arranges ? v->ops->arrange(a, v->copies[0]) : ERR_OK;
    assert(code == ERR_OK || code == ERR_DEVICE);
    (void)code;
}

/* Always on the first stream. */
static void copy_slices(struct tier_vram *v, uint32_t layer, const struct k_bring_expert *x,
                        bool pinned)
{
    const struct k_span table = v->layers[layer].slots;
    const bool is_timed = timed(v, 1);
    for (int i = 0; i < TIER_VRAM_SLICES; i++) {
        const struct gguf_tensor *t = tensor_of(v->model, layer, i);
        copy_slice(v,
                   &(struct k_arrange){.from = {v->memory, v->staging + x->to[i] - x->to[0]},
                                       .to = {v->memory, x->to[i]},
                                       .format = (enum k_format)t->type,
                                       .n_in = (uint32_t)t->dims[0],
                                       .n_out = (uint32_t)t->dims[1]},
                   x->from[i], pinned);
    }
    v->ops->upload(v->copies[0],
                   (struct k_span){table.buffer, table.offset + x->expert * (uint64_t)SLOT_BYTES},
                   x->to, SLOT_BYTES);
    v->ops->event_record(v->copied[0], v->copies[0]);
    if (!is_timed)
        return;
    v->ops->event_record(v->to, v->copies[0]);
    v->timed_bytes = tier_vram_island_bytes(v->model, layer);
}

void tier_vram_copy(struct tier_vram *v, uint32_t layer, uint32_t expert,
                    const uint8_t *const slices[TIER_VRAM_SLICES], bool pinned, uint64_t place)
{
    struct k_bring_expert x = {.expert = expert};
    for (int i = 0; i < TIER_VRAM_SLICES; i++) {
        x.from[i] = slices[i];
        x.to[i] = place;
        place += aligned(shape_slice_bytes(tensor_of(v->model, layer, i), &v->model->shape), ALIGN);
    }
    if (v->together_layer != layer || v->together.n == K_BRING_MOST)
        begin(v);
    v->begun++;
    if (!pinned || v->ops->bring == NULL) {
        copy_slices(v, layer, &x, pinned);
        return;
    }
    v->together_layer = layer;
    v->together.layer = v->layers[layer];
    v->together.experts[v->together.n++] = x;
}

bool tier_vram_timed(struct tier_vram *v, uint64_t *ret_bytes, uint64_t *ret_ns)
{
    if (v->timed_bytes == 0 || !v->ops->event_passed(v->to))
        return false;
    const double us = v->ops->event_us(v->from, v->to);
    *ret_bytes = v->timed_bytes;
    *ret_ns = us > 0 ? (uint64_t)(1000 * us) : 0;
    v->timed_bytes = 0;
    return *ret_ns > 0;
}

void tier_vram_await(struct tier_vram *v)
{
    begin(v);
    if (v->done < v->begun)
        v->ops->event_after(v->copied[v->last], v->stream);
}

bool tier_vram_settle(struct tier_vram *v)
{
    begin(v);
    if (v->done < v->begun && v->ops->event_passed(v->copied[v->last]))
        v->done = v->begun;
    return v->done == v->begun;
}

enum err_code tier_vram_wait(struct tier_vram *v)
{
    enum err_code code = ERR_OK;
    begin(v);
    for (int i = 0; i < 2; i++) {
        v->ops->event_record(v->copied[i], v->copies[i]); /* with an error, if there is one */
        const enum err_code waited = v->ops->wait(v->copies[i]);
        if (waited == ERR_OK)
            continue;
        code = waited;
        v->ops->event_after(v->copied[i], v->stream); /* computes nothing with what did not come */
    }
    v->done = v->begun;
    return code;
}

uint64_t tier_vram_transit_place(const struct tier_vram *v, unsigned half, unsigned i)
{
    return v->transit + (half * v->n_transit + i) * v->transit_bytes;
}

void tier_vram_transit_begin(struct tier_vram *v, unsigned half)
{
    begin(v);
    for (int i = 0; i < 2; i++)
        v->ops->event_after(v->used[half], v->copies[i]);
}

void tier_vram_transit_ready(struct tier_vram *v, unsigned half)
{
    begin(v);
    v->ops->event_record(v->ready[half], v->copies[v->last]);
    v->loose[half] = true;
}

void tier_vram_transit_await(struct tier_vram *v, unsigned half)
{
    v->ops->event_after(v->ready[half], v->stream);
    v->loose[half] = false;
}

void tier_vram_transit_used(struct tier_vram *v, unsigned half)
{
    v->ops->event_record(v->used[half], v->stream);
}

#include "model.h"

#include <string.h>

#include "alloc.h"
#include "fault.h"
#include "size.h"

enum {
    PIECE_BYTES = 4 << 20, /* of a read while loading */
    MAX_PIECES = 8,        /* in flight */
    ALIGN = 256
};

static uint64_t aligned(uint64_t n)
{
    return (n + ALIGN - 1) & ~(uint64_t)(ALIGN - 1);
}

static uint64_t in_pages(uint64_t n)
{
    return (n + TIER_SSD_ALIGN - 1) & ~(uint64_t)(TIER_SSD_ALIGN - 1);
}

static bool is_expert(const struct model *m, const struct gguf_tensor *t)
{
    for (uint32_t i = 0; i < m->shape.n_layer; i++) {
        const struct shape_layer *l = &m->tensors.layers[i];
        if (t == l->gate || t == l->up || t == l->down)
            return true;
    }
    return false;
}

/* Bytes of the dense weights, every tensor aligned, and of the slot tables of the layers. */
static enum err_code dense_bytes(struct model *m, struct err *e)
{
    const uint64_t tables = m->shape.n_layer * aligned(m->shape.n_expert * 24ull);
    uint64_t sum = 0, all = 0;
    bool fits = true;
    for (size_t i = 0; i < m->file->n_tensors && fits; i++) {
        const struct gguf_tensor *t = m->file->tensors[i];
        if (is_expert(m, t))
            continue;
        fits = t->bytes <= UINT64_MAX - ALIGN && size_add(sum, aligned(t->bytes), &sum);
        if (t->bytes > m->largest_matrix)
            m->largest_matrix = t->bytes;
    }
    if (!fits || !size_add(sum, tables, &all) || all > SIZE_MAX / 2)
        return err_set(e, ERR_LIMIT, "%s: weights are larger than the address space",
                       gguf_file_label(m->file->path));
    m->dense_bytes = sum;
    m->tables_bytes = tables;
    m->weights_bytes = all;
    return ERR_OK;
}

/* Lays the slices out one after the other; returns the end. */
static uint64_t lay_out(const struct model *m, uint32_t layer, uint32_t expert, uint64_t place,
                        struct tier_ssd_part ret[TIER_SSD_PARTS])
{
    const struct shape_layer *l = &m->tensors.layers[layer];
    const struct gguf_tensor *const tensors[TIER_SSD_PARTS] = {l->gate, l->up, l->down};
    for (int i = 0; i < TIER_SSD_PARTS; i++) {
        const uint64_t offset = shape_slice_offset(tensors[i], &m->shape, expert);
        const uint64_t bytes = shape_slice_bytes(tensors[i], &m->shape);
        const uint64_t below = offset % TIER_SSD_ALIGN;
        ret[i] = (struct tier_ssd_part){
            .file = tensors[i]->file, .offset = offset, .bytes = bytes, .place = place + below};
        place += in_pages(below + bytes);
    }
    return place;
}

void model_expert_parts(const struct model *m, uint32_t layer, uint32_t expert, uint64_t place,
                        struct tier_ssd_part ret[TIER_SSD_PARTS])
{
    (void)lay_out(m, layer, expert, place, ret);
}

/* Extents: one size a layer, that of its most awkwardly placed expert. File sizes were checked, so
 * that no sum of a layer overflows. */
static enum err_code expert_bytes(struct model *m, struct err *e)
{
    struct tier_ssd_part parts[TIER_SSD_PARTS];
    m->expert_bytes = alloc_zero(ALLOC_MODEL, m->shape.n_layer, sizeof(*m->expert_bytes));
    if (m->expert_bytes == NULL)
        return err_set(e, ERR_NOMEM, "no memory for %u layers", m->shape.n_layer);
    for (uint32_t l = 0; l < m->shape.n_layer; l++) {
        for (uint32_t x = 0; x < m->shape.n_expert; x++) {
            const uint64_t n = lay_out(m, l, x, 0, parts);
            if (n > m->expert_bytes[l])
                m->expert_bytes[l] = n;
        }
        uint64_t layer;
        if (!size_mul(m->expert_bytes[l], m->shape.n_expert, &layer) ||
            !size_add(m->experts_bytes, layer, &m->experts_bytes))
            return err_set(e, ERR_LIMIT, "%s: experts are larger than the address space",
                           gguf_file_label(m->file->path));
    }
    return ERR_OK;
}

enum err_code model_open(const struct model_loading *loading, struct model **ret, struct err *e)
{
    struct model *m = alloc_zero(ALLOC_MODEL, 1, sizeof(*m));
    if (m == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the model's description");
    m->ops = k_ops(loading->device);
    m->host_ops = loading->host != NULL ? k_ops(loading->host) : m->ops;
    enum err_code code = gguf_file_open(loading->path, &m->file, e);
    if (code == ERR_OK)
        code = shape_from_file(m->file, &m->shape, e);
    if (code == ERR_OK)
        code = shape_bind(m->file, &m->shape, &m->tensors, e);
    if (code == ERR_OK)
        code = gguf_file_digest(m->file, m->file_digest, e);
    if (code == ERR_OK)
        code = dense_bytes(m, e);
    if (code == ERR_OK)
        code = expert_bytes(m, e);
    if (code == ERR_OK) {
        gguf_file_shape_digest(m->file, &m->shape, m->shape_digest);
        m->layers = alloc_zero(ALLOC_MODEL, m->shape.n_layer, sizeof(*m->layers));
        if (m->layers == NULL)
            code = err_set(e, ERR_NOMEM, "no memory for %u layers", m->shape.n_layer);
    }
    if (code == ERR_OK)
        *ret = m;
    else
        model_close(m);
    return code;
}

void model_close(struct model *m)
{
    if (m == NULL)
        return;
    if (m->weights != NULL)
        m->ops->buffer_free(m->weights);
    if (m->tables != NULL)
        m->host_ops->buffer_free(m->tables);
    shape_tensors_done(&m->tensors);
    gguf_file_close(m->file);
    alloc_free(m->expert_bytes);
    alloc_free(m->layers);
    alloc_free(m);
}

/* ---- loading --------------------------------------------------------------------------------- */

/* A read on its way to `to` in the weights. */
struct piece {
    uint64_t done, bytes; /* of the tensor before this piece; of the piece */
    uint64_t staged;      /* where its first byte lands in the arena */
    bool busy;
};

/* State of one load: where the next tensor goes, and what was read so far. */
struct load {
    struct model *model;
    const struct model_loading *loading;
    uint64_t place; /* next free byte of the weights */
    uint64_t table; /* and of the slot tables */
    uint64_t read;
    unsigned percent; /* told last */
    uint64_t piece_bytes;
    uint32_t n_pieces, n_busy;
    struct piece pieces[MAX_PIECES];
};

static void tell(struct load *l, uint64_t n)
{
    l->read += n;
    const unsigned percent = (unsigned)((double)l->read / (double)l->loading->total_bytes * 100.0);
    if (percent > l->percent && l->loading->progress != NULL) {
        l->percent = percent;
        l->loading->progress(l->loading->context, percent);
    }
}

/* Values of a piece, which is whole blocks (A3). */
static enum err_code check_piece(const struct load *l, const struct gguf_tensor *t,
                                 const struct piece *p, const uint8_t *from, struct err *e)
{
    const enum k_format format = (enum k_format)t->type;
    const uint32_t block = k_format_block_bytes(format);
    const int64_t bad =
        k_find_invalid(format, from, p->bytes / block * k_format_block_elements(format));
    if (bad < 0)
        return ERR_OK;
    return err_set(e, ERR_FORMAT,
                   "%s: tensor %.*s has a value that is not finite in block %lld; the file is "
                   "damaged, download it again",
                   gguf_file_label(l->model->file->path), (int)t->name.size, t->name.data,
                   (long long)(p->done / block) + (long long)bad);
}

/* Takes one read that ended to `to` on the device of the weights, which has it on return. */
static enum err_code land(struct load *l, const struct gguf_tensor *t, struct k_span to,
                          struct err *e)
{
    const struct model *m = l->model;
    struct tier_ssd_result result;
    if (tier_ssd_wait(l->loading->ssd, true, &result, 1) == 0)
        return err_set(e, ERR_IO, "the model's reads ended early");
    struct piece *p = &l->pieces[result.id];
    p->busy = false;
    l->n_busy--;
    if (result.code != ERR_OK) {
        *e = result.error;
        return result.code;
    }
    const uint8_t *from = (const uint8_t *)m->host_ops->buffer_host(l->loading->arena) + p->staged;
    enum err_code code = check_piece(l, t, p, from, e);
    if (code != ERR_OK)
        return code;
    m->ops->upload(l->loading->stream, (struct k_span){to.buffer, to.offset + p->done}, from,
                   (size_t)p->bytes);
    tell(l, p->bytes);
    return ERR_OK;
}

/* Of a piece of `t`: whole blocks. */
static uint64_t piece_bytes(const struct load *l, const struct gguf_tensor *t)
{
    return l->piece_bytes - l->piece_bytes % k_format_block_bytes((enum k_format)t->type);
}

/* Begins the read of a piece of `t` if there is room for one. */
static bool start_piece(struct load *l, const struct gguf_tensor *t, uint64_t done)
{
    uint32_t i = 0;
    while (i < l->n_pieces && l->pieces[i].busy)
        i++;
    if (i == l->n_pieces || tier_ssd_room(l->loading->ssd) == 0)
        return false;
    const uint64_t left = t->bytes - done, offset = t->offset + done, most = piece_bytes(l, t);
    const uint64_t below = offset % TIER_SSD_ALIGN;
    struct piece *p = &l->pieces[i];
    *p = (struct piece){.done = done,
                        .bytes = left < most ? left : most,
                        .staged = i * (l->piece_bytes + 2ull * TIER_SSD_ALIGN) + below,
                        .busy = true};
    l->n_busy++;
    tier_ssd_start(l->loading->ssd, i,
                   &(struct tier_ssd_part){
                       .file = t->file, .offset = offset, .bytes = p->bytes, .place = p->staged},
                   1);
    return true;
}

/* Reads one tensor to `to`, in pieces that arrive in any order. */
static enum err_code read_tensor(struct load *l, const struct gguf_tensor *t, struct k_span to,
                                 struct err *e)
{
    enum err_code code = ERR_OK;
    for (uint64_t done = 0; (done < t->bytes && code == ERR_OK) || l->n_busy > 0;) {
        if (l->loading->stopped != NULL && code == ERR_OK &&
            l->loading->stopped(l->loading->context))
            code = err_set(e, ERR_CANCELLED, "loading was stopped");
        if (code == ERR_OK && done < t->bytes && start_piece(l, t, done)) {
            done += piece_bytes(l, t);
            continue;
        }
        struct err later = {.code = ERR_OK};
        const enum err_code landed = land(l, t, to, code == ERR_OK ? e : &later);
        code = code == ERR_OK ? landed : code;
    }
    return code;
}

/* Places one tensor among the weights; `arranged`: not null for a matrix that the device wants in
 * its own order, from the staging. */
static enum err_code place_tensor(struct load *l, const struct gguf_tensor *t,
                                  struct k_arrange *arranged, struct k_span *ret, struct err *e)
{
    const struct k_ops *ops = l->model->ops;
    const struct k_span place = {l->model->weights, l->place};
    enum err_code code = read_tensor(l, t, arranged == NULL ? place : l->loading->staging, e);
    if (code == ERR_OK && arranged != NULL) {
        arranged->from = l->loading->staging;
        arranged->to = place;
        code = ops->arrange(arranged, l->loading->stream);
        if (code == ERR_OK)
            code = ops->wait(l->loading->stream);
        if (code != ERR_OK)
            return err_set(e, code, "tensor %.*s: the compute device failed while it was placed",
                           (int)t->name.size, t->name.data);
    }
    if (code != ERR_OK)
        return code;
    *ret = place;
    l->place += aligned(t->bytes);
    if (fault_hit(FAULT_WORKER_LOAD))
        return err_set(e, ERR_IO, "tensor %.*s: a fault was asked for", (int)t->name.size,
                       t->name.data);
    return ERR_OK;
}

static enum err_code place_matrix(struct load *l, const struct gguf_tensor *t, struct k_matrix *ret,
                                  struct err *e)
{
    struct k_span place;
    struct k_arrange arranged = {.format = (enum k_format)t->type,
                                 .n_in = (uint32_t)t->dims[0],
                                 .n_out = (uint32_t)t->dims[1]};
    const enum err_code code =
        place_tensor(l, t, l->model->ops->arrange != NULL ? &arranged : NULL, &place, e);
    if (code == ERR_OK)
        *ret = (struct k_matrix){.data = place,
                                 .format = arranged.format,
                                 .n_in = arranged.n_in,
                                 .n_out = arranged.n_out};
    return code;
}

static enum err_code place_vector(struct load *l, const struct gguf_tensor *t, struct k_span *ret,
                                  struct err *e)
{
    if (t == NULL)
        return ERR_OK;
    return place_tensor(l, t, NULL, ret, e);
}

/* Room for the slot table; the slots are filled as experts arrive. */
static void place_experts(struct load *l, const struct shape_layer *from, struct k_experts *ret)
{
    const struct model_shape *shape = &l->model->shape;
    *ret = (struct k_experts){.arena = l->loading->arena,
                              .slots = {l->model->tables, l->table},
                              .gate = (enum k_format)from->gate->type,
                              .up = (enum k_format)from->up->type,
                              .down = (enum k_format)from->down->type,
                              .n_embd = shape->n_embd,
                              .n_ff = shape->n_ff_expert,
                              .n_expert = shape->n_expert,
                              .n_used = shape->n_expert_used};
    l->table += aligned(shape->n_expert * 24ull);
}

static enum err_code place_layer(struct load *l, const struct shape_layer *from,
                                 struct model_layer *ret, struct err *e)
{
    const struct {
        const struct gguf_tensor *from;
        struct k_matrix *to;
    } matrices[] = {{from->q, &ret->q},
                    {from->k, &ret->k},
                    {from->v, &ret->v},
                    {from->attn_output, &ret->attn_output},
                    {from->router, &ret->router}};
    const struct {
        const struct gguf_tensor *from;
        struct k_span *to;
    } vectors[] = {{from->attn_norm, &ret->attn_norm},
                   {from->q_norm, &ret->q_norm},
                   {from->k_norm, &ret->k_norm},
                   {from->ffn_norm, &ret->ffn_norm}};
    enum err_code code = ERR_OK;
    for (size_t i = 0; i < sizeof(matrices) / sizeof(matrices[0]) && code == ERR_OK; i++)
        code = place_matrix(l, matrices[i].from, matrices[i].to, e);
    for (size_t i = 0; i < sizeof(vectors) / sizeof(vectors[0]) && code == ERR_OK; i++)
        code = place_vector(l, vectors[i].from, vectors[i].to, e);
    if (code == ERR_OK)
        place_experts(l, from, &ret->experts);
    return code;
}

/* As many pieces in flight as the arena holds side by side; small arenas get small pieces. */
static void size_pieces(struct load *l)
{
    const uint64_t spare = 2ull * TIER_SSD_ALIGN, arena = l->loading->arena_bytes;
    l->piece_bytes = PIECE_BYTES;
    while (l->piece_bytes > TIER_SSD_ALIGN && arena < MAX_PIECES * (l->piece_bytes + spare))
        l->piece_bytes /= 2;
    const uint64_t fit = arena / (l->piece_bytes + spare);
    l->n_pieces = fit < MAX_PIECES ? (uint32_t)fit : MAX_PIECES;
}

enum err_code model_load(struct model *m, const struct model_loading *loading, struct err *e)
{
    struct load l = {.model = m, .loading = loading};
    size_pieces(&l);
    enum err_code code = m->ops->buffer_new(loading->device, m->dense_bytes, &m->weights, e);
    if (code == ERR_OK)
        code = m->host_ops->buffer_new(loading->host != NULL ? loading->host : loading->device,
                                       m->tables_bytes, &m->tables, e);
    if (code == ERR_OK)
        code = place_matrix(&l, m->tensors.token_embd, &m->token_embd, e);
    if (code == ERR_OK && m->shape.tied_head)
        m->output = m->token_embd;
    else if (code == ERR_OK)
        code = place_matrix(&l, m->tensors.output, &m->output, e);
    if (code == ERR_OK)
        code = place_vector(&l, m->tensors.output_norm, &m->output_norm, e);
    for (uint32_t i = 0; i < m->shape.n_layer && code == ERR_OK; i++)
        code = place_layer(&l, &m->tensors.layers[i], &m->layers[i], e);
    if (code == ERR_OK && m->ops->wait(loading->stream) != ERR_OK)
        return err_set(e, ERR_DEVICE, "the compute device failed while the model was loaded");
    return code;
}

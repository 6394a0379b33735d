#include "model.h"

#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "fault.h"
#include "size.h"

enum {
    PIECE_BYTES = 8 << 20,
    ALIGN = 64
};

/* State of one load: where the next tensor goes, and what was read so far. */
struct load {
    struct model *model;
    const struct model_loading *loading;
    uint64_t place; /* next free byte of the arena */
    uint64_t read;
    unsigned percent; /* told last */
};

static uint64_t aligned(uint64_t n)
{
    return (n + ALIGN - 1) & ~(uint64_t)(ALIGN - 1);
}

uint64_t model_memory_bytes(const char *key)
{
    FILE *f = fopen("/proc/meminfo", "re");
    if (f == NULL)
        return 0;
    char line[128];
    const size_t n = strlen(key);
    unsigned long long kib = 0;
    while (fgets(line, sizeof(line), f) != NULL)
        if (strncmp(line, key, n) == 0 && line[n] == ':' && sscanf(line + n + 1, "%llu", &kib) == 1)
            break;
    fclose(f);
    return (uint64_t)kib << 10;
}

static double gib(uint64_t n)
{
    return (double)n / (double)(1ull << 30);
}

enum err_code model_check_memory(const struct model *m, uint64_t kv_bytes, uint64_t work_bytes,
                                 struct err *e)
{
    const uint64_t available = model_memory_bytes("MemAvailable");
    uint64_t need;
    if (!size_add(m->weights_bytes, kv_bytes, &need) || !size_add(need, work_bytes, &need))
        need = UINT64_MAX;
    if (available == 0 || need <= available)
        return ERR_OK;
    return err_set(e, ERR_NOMEM,
                   "memory: weights %.2f GiB + KV pages %.2f GiB + work %.2f GiB are more than the "
                   "%.2f GiB available; a smaller memory.kv_budget, batch.prefill_chunk or model "
                   "is needed",
                   gib(m->weights_bytes), gib(kv_bytes), gib(work_bytes), gib(available));
}

/* Bytes of the arena: every tensor aligned, then the slot tables of the layers. */
static enum err_code arena_bytes(const struct model *m, uint64_t *ret, struct err *e)
{
    uint64_t sum = 0;
    bool fits = true;
    for (size_t i = 0; i < m->file->n_tensors; i++)
        fits = fits && m->file->tensors[i]->bytes <= UINT64_MAX - ALIGN &&
               size_add(sum, aligned(m->file->tensors[i]->bytes), &sum);
    fits = fits && size_add(sum, m->shape.n_layer * aligned(m->shape.n_expert * 24ull), &sum);
    if (!fits || sum > SIZE_MAX / 2)
        return err_set(e, ERR_LIMIT, "%s: weights are larger than the address space",
                       gguf_file_label(m->file->path));
    *ret = sum;
    return ERR_OK;
}

enum err_code model_open(const struct model_loading *loading, struct model **ret, struct err *e)
{
    struct model *m = alloc_zero(ALLOC_MODEL, 1, sizeof(*m));
    if (m == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the model's description");
    m->ops = k_ops(loading->device);
    enum err_code code = gguf_file_open(loading->path, &m->file, e);
    if (code == ERR_OK)
        code = shape_from_file(m->file, &m->shape, e);
    if (code == ERR_OK)
        code = shape_bind(m->file, &m->shape, &m->tensors, e);
    if (code == ERR_OK)
        code = gguf_file_digest(m->file, m->file_digest, e);
    if (code == ERR_OK)
        code = arena_bytes(m, &m->weights_bytes, e);
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
    shape_tensors_done(&m->tensors);
    gguf_file_close(m->file);
    alloc_free(m->layers);
    alloc_free(m);
}

static void tell(struct load *l, uint64_t n)
{
    l->read += n;
    const unsigned percent = (unsigned)((double)l->read / (double)l->model->weights_bytes * 100.0);
    if (percent > l->percent && l->loading->progress != NULL) {
        l->percent = percent;
        l->loading->progress(l->loading->context, percent);
    }
}

/* Reads one tensor to the next place, whole blocks a piece, each piece checked while it is in the
 * cache. */
static enum err_code place_tensor(struct load *l, const struct gguf_tensor *t, uint64_t *ret_place,
                                  struct err *e)
{
    const enum k_format format = (enum k_format)t->type;
    const uint32_t block = k_format_block_bytes(format);
    const uint32_t elements = k_format_block_elements(format);
    const uint64_t piece = PIECE_BYTES / block * block;
    uint8_t *to = (uint8_t *)l->model->ops->buffer_host(l->model->weights) + l->place;
    for (uint64_t done = 0; done < t->bytes;) {
        if (l->loading->stopped != NULL && l->loading->stopped(l->loading->context))
            return err_set(e, ERR_CANCELLED, "loading was stopped");
        const uint64_t n = t->bytes - done < piece ? t->bytes - done : piece;
        const enum err_code code =
            gguf_file_read(l->model->file, t->file, t->offset + done, to + done, (size_t)n, e);
        if (code != ERR_OK)
            return code;
        const int64_t bad = k_find_invalid(format, to + done, n / block * elements);
        if (bad >= 0)
            return err_set(e, ERR_FORMAT,
                           "%s: tensor %.*s has a value that is not finite in block %llu; the file "
                           "is damaged, download it again",
                           gguf_file_label(l->model->file->path), (int)t->name.size, t->name.data,
                           (unsigned long long)(done / block + (uint64_t)bad));
        done += n;
        tell(l, n);
    }
    *ret_place = l->place;
    l->place += aligned(t->bytes);
    if (fault_hit(FAULT_WORKER_LOAD))
        return err_set(e, ERR_IO, "tensor %.*s: a fault was asked for", (int)t->name.size,
                       t->name.data);
    return ERR_OK;
}

static enum err_code place_matrix(struct load *l, const struct gguf_tensor *t, struct k_matrix *ret,
                                  struct err *e)
{
    uint64_t place = 0;
    const enum err_code code = place_tensor(l, t, &place, e);
    if (code == ERR_OK)
        *ret = (struct k_matrix){.data = {l->model->weights, place},
                                 .format = (enum k_format)t->type,
                                 .n_in = (uint32_t)t->dims[0],
                                 .n_out = (uint32_t)t->dims[1]};
    return code;
}

static enum err_code place_vector(struct load *l, const struct gguf_tensor *t, struct k_span *ret,
                                  struct err *e)
{
    uint64_t place = 0;
    if (t == NULL)
        return ERR_OK;
    const enum err_code code = place_tensor(l, t, &place, e);
    if (code == ERR_OK)
        *ret = (struct k_span){l->model->weights, place};
    return code;
}

static enum err_code place_experts(struct load *l, const struct shape_layer *from,
                                   struct k_experts *ret, struct err *e)
{
    const struct model_shape *shape = &l->model->shape;
    const struct gguf_tensor *tensors[3] = {from->gate, from->up, from->down};
    uint64_t places[3] = {0};
    for (int i = 0; i < 3; i++) {
        const enum err_code code = place_tensor(l, tensors[i], &places[i], e);
        if (code != ERR_OK)
            return code;
    }
    const struct k_span slots = {l->model->weights, l->place};
    l->place += aligned(shape->n_expert * 24ull);
    for (uint32_t x = 0; x < shape->n_expert; x++) {
        uint64_t slot[3];
        for (int i = 0; i < 3; i++)
            slot[i] = places[i] + x * shape_slice_bytes(tensors[i], shape);
        l->model->ops->upload(l->loading->stream,
                              (struct k_span){slots.buffer, slots.offset + x * sizeof(slot)}, slot,
                              sizeof(slot));
    }
    *ret = (struct k_experts){.arena = l->model->weights,
                              .slots = slots,
                              .gate = (enum k_format)from->gate->type,
                              .up = (enum k_format)from->up->type,
                              .down = (enum k_format)from->down->type,
                              .n_embd = shape->n_embd,
                              .n_ff = shape->n_ff_expert,
                              .n_expert = shape->n_expert,
                              .n_used = shape->n_expert_used};
    return ERR_OK;
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
    return code == ERR_OK ? place_experts(l, from, &ret->experts, e) : code;
}

enum err_code model_load(struct model *m, const struct model_loading *loading, struct err *e)
{
    struct load l = {.model = m, .loading = loading};
    enum err_code code = m->ops->buffer_new(loading->device, m->weights_bytes, &m->weights, e);
    if (code != ERR_OK)
        return code;
    code = place_matrix(&l, m->tensors.token_embd, &m->token_embd, e);
    if (code == ERR_OK && m->shape.tied_head)
        m->output = m->token_embd;
    else if (code == ERR_OK)
        code = place_matrix(&l, m->tensors.output, &m->output, e);
    if (code == ERR_OK)
        code = place_vector(&l, m->tensors.output_norm, &m->output_norm, e);
    for (uint32_t i = 0; i < m->shape.n_layer && code == ERR_OK; i++)
        code = place_layer(&l, &m->tensors.layers[i], &m->layers[i], e);
    return code;
}

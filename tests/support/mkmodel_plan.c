#include "mkmodel_plan.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "size.h"

/* ---- architectures --------------------------------------------------------------------------- */

enum size {
    NONE,
    HIDDEN,
    WIDTH,    /* heads * head_dim */
    WIDTH_KV, /* kv_heads * head_dim */
    HEAD_DIM,
    EXPERTS,
    FF,
    VOCAB
};
enum choice {
    PLAIN, /* F32 */
    LOW,   /* Q4_K of Q4_K_M */
    HIGH,  /* Q4_K, in half of the layers Q6_K */
    HEAD   /* Q6_K */
};
enum spread {
    ONES,
    EMBEDDED,
    INNER, /* 1 / sqrt(inputs of the model's width) */
    RESIDUAL
};

struct row {
    enum mkmodel_role role;
    const char *name;
    enum choice choice;
    enum size n_in, n_out, n_expert;
    enum spread spread;
};

static const struct arch {
    const char *name;
    struct row rows[16]; /* the first: the embedding */
} archs[] = {
    {
        .name = "qwen3moe",
        .rows =
            {
                {MKMODEL_EMBD, "token_embd", LOW, HIDDEN, VOCAB, NONE, EMBEDDED},
                {MKMODEL_ATTN_NORM, "attn_norm", PLAIN, HIDDEN, NONE, NONE, ONES},
                {MKMODEL_Q, "attn_q", LOW, HIDDEN, WIDTH, NONE, INNER},
                {MKMODEL_K, "attn_k", LOW, HIDDEN, WIDTH_KV, NONE, INNER},
                {MKMODEL_V, "attn_v", HIGH, HIDDEN, WIDTH_KV, NONE, INNER},
                {MKMODEL_Q_NORM, "attn_q_norm", PLAIN, HEAD_DIM, NONE, NONE, ONES},
                {MKMODEL_K_NORM, "attn_k_norm", PLAIN, HEAD_DIM, NONE, NONE, ONES},
                {MKMODEL_ATTN_OUTPUT, "attn_output", LOW, WIDTH, HIDDEN, NONE, RESIDUAL},
                {MKMODEL_FFN_NORM, "ffn_norm", PLAIN, HIDDEN, NONE, NONE, ONES},
                {MKMODEL_ROUTER, "ffn_gate_inp", PLAIN, HIDDEN, EXPERTS, NONE, INNER},
                {MKMODEL_GATE, "ffn_gate_exps", LOW, HIDDEN, FF, EXPERTS, INNER},
                {MKMODEL_UP, "ffn_up_exps", LOW, HIDDEN, FF, EXPERTS, INNER},
                {MKMODEL_DOWN, "ffn_down_exps", HIGH, FF, HIDDEN, EXPERTS, RESIDUAL},
                {MKMODEL_OUTPUT_NORM, "output_norm", PLAIN, HIDDEN, NONE, NONE, ONES},
                {MKMODEL_OUTPUT, "output", HEAD, HIDDEN, VOCAB, NONE, INNER},
            },
    },
};
enum {
    N_ARCHS = sizeof(archs) / sizeof(archs[0]),
    N_ROWS = sizeof(archs[0].rows) / sizeof(archs[0].rows[0])
};

const char *mkmodel_plan_arch(size_t i)
{
    return i < N_ARCHS ? archs[i].name : NULL;
}

static const struct arch *arch_of(const char *name)
{
    for (size_t i = 0; i < N_ARCHS; i++)
        if (strcmp(archs[i].name, name) == 0)
            return &archs[i];
    return NULL;
}

const char *mkmodel_plan_key(const struct mkmodel_plan *p, size_t n, uint64_t *ret_value)
{
    const struct mkmodel_options *o = &p->o;
    const struct {
        const char *key;
        uint64_t value;
    } counts[] = {
        {"block_count", o->layers},
        {"context_length", o->context},
        {"embedding_length", o->hidden},
        {"feed_forward_length", o->ff * o->top_k},
        {"attention.head_count", o->heads},
        {"attention.head_count_kv", o->kv_heads},
        {"attention.key_length", o->head_dim},
        {"attention.value_length", o->head_dim},
        {"expert_count", o->experts},
        {"expert_used_count", o->top_k},
        {"expert_feed_forward_length", o->ff},
    };
    if (n >= sizeof(counts) / sizeof(counts[0]))
        return NULL;
    *ret_value = counts[n].value;
    return counts[n].key;
}

/* ---- tensors --------------------------------------------------------------------------------- */

static bool per_layer(const struct row *r)
{
    return r->role >= MKMODEL_ATTN_NORM;
}

static uint64_t size_of(const struct mkmodel_options *o, enum size size)
{
    switch (size) {
    case NONE:
        break;
    case HIDDEN:
        return o->hidden;
    case WIDTH:
        return o->heads * o->head_dim;
    case WIDTH_KV:
        return o->kv_heads * o->head_dim;
    case HEAD_DIM:
        return o->head_dim;
    case EXPERTS:
        return o->experts;
    case FF:
        return o->ff;
    case VOCAB:
        return o->vocab;
    }
    return 1;
}

/* llama.cpp's choice of the layers whose down projections get more bits. */
static bool more_bits(uint64_t layer, uint64_t n)
{
    return layer < n / 8 || layer >= 7 * n / 8 || (layer - n / 8) % 3 == 2;
}

static enum k_format format_of(const struct mkmodel_options *o, enum choice choice, uint64_t layer)
{
    if (choice == PLAIN)
        return K_F32;
    if (!o->mixed)
        return o->format;
    if (choice == HEAD || (choice == HIGH && more_bits(layer, o->layers)))
        return K_Q6_K;
    return K_Q4_K;
}

static float std_of(const struct mkmodel_options *o, enum spread spread)
{
    switch (spread) {
    case ONES:
        break;
    case EMBEDDED:
        return (float)o->emb_std;
    case INNER:
        return 1.0f / sqrtf((float)o->hidden);
    case RESIDUAL:
        return (float)o->res_std;
    }
    return 0.0f;
}

static enum err_code add_tensor(struct mkmodel_plan *p, const struct row *r, uint32_t layer,
                                struct err *e)
{
    struct mkmodel_tensor *t = &p->tensors[p->n];
    if (per_layer(r))
        snprintf(t->name, sizeof(t->name), "blk.%u.%s.weight", layer, r->name);
    else
        snprintf(t->name, sizeof(t->name), "%s.weight", r->name);
    t->role = r->role;
    t->layer = layer;
    t->n_dims = r->n_expert != NONE ? 3 : r->n_out != NONE ? 2 : 1;
    t->dims[0] = size_of(&p->o, r->n_in);
    t->dims[1] = size_of(&p->o, r->n_out);
    t->dims[2] = size_of(&p->o, r->n_expert);
    t->format = format_of(&p->o, r->choice, layer);
    t->std = std_of(&p->o, r->spread);
    const uint32_t block = k_format_block_elements(t->format);
    if (t->dims[0] % block != 0)
        return err_set(e, ERR_ARGUMENT, "%s: %llu inputs are not a multiple of the format's %u",
                       t->name, (unsigned long long)t->dims[0], block);
    t->bytes = k_format_bytes(t->format, t->dims[1] * t->dims[2], t->dims[0]);
    p->n++;
    return ERR_OK;
}

/* Fields up to the limits of the options: no product overflows. */
static enum err_code check_shape(const struct mkmodel_options *o, struct err *e)
{
    if (o->layers == 0 || o->hidden == 0 || o->ff == 0 || o->context == 0 || o->head_dim == 0 ||
        o->top_k == 0 || o->kv_heads == 0 || o->heads == 0)
        return err_set(e, ERR_ARGUMENT, "the shape cannot be: a size is 0");
    if (o->layers > 512 || o->hidden > 65536 || o->ff > 65536 || o->experts > 4096 ||
        o->heads > 1024 || o->head_dim > 512 || o->vocab > 1 << 20)
        return err_set(e, ERR_ARGUMENT, "the shape cannot be: a size is over the engine's limit");
    if (o->head_dim % 2 != 0 || o->heads % o->kv_heads != 0)
        return err_set(e, ERR_ARGUMENT,
                       "the shape cannot be: head-dim %llu must be even, heads %llu a multiple "
                       "of kv %llu",
                       (unsigned long long)o->head_dim, (unsigned long long)o->heads,
                       (unsigned long long)o->kv_heads);
    if (o->top_k > o->experts)
        return err_set(e, ERR_ARGUMENT, "the shape cannot be: top-k %llu of %llu experts",
                       (unsigned long long)o->top_k, (unsigned long long)o->experts);
    if (o->vocab < MKMODEL_MIN_VOCAB)
        return err_set(e, ERR_ARGUMENT, "the shape cannot be: vocab %llu; %d is the least",
                       (unsigned long long)o->vocab, MKMODEL_MIN_VOCAB);
    return ERR_OK;
}

static enum err_code make_tensors(struct mkmodel_plan *p, const struct arch *arch, struct err *e)
{
    enum err_code rc = ERR_OK;
    p->tensors = alloc_zero(ALLOC_MISC, (p->o.layers + 1) * N_ROWS, sizeof(*p->tensors));
    if (p->tensors == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the tensor table");
    rc = add_tensor(p, &arch->rows[0], 0, e);
    for (uint32_t layer = 0; layer < p->o.layers; layer++)
        for (size_t i = 0; rc == ERR_OK && i < N_ROWS && arch->rows[i].name != NULL; i++)
            if (per_layer(&arch->rows[i]))
                rc = add_tensor(p, &arch->rows[i], layer, e);
    for (size_t i = 1; rc == ERR_OK && i < N_ROWS && arch->rows[i].name != NULL; i++)
        if (!per_layer(&arch->rows[i]) && !(p->o.tied && arch->rows[i].role == MKMODEL_OUTPUT))
            rc = add_tensor(p, &arch->rows[i], 0, e);
    return rc;
}

/* ---- parts ----------------------------------------------------------------------------------- */

static char *part_path(const struct mkmodel_options *o, size_t i)
{
    const size_t n = strlen(o->out);
    const size_t stem = n > 5 && strcmp(o->out + n - 5, ".gguf") == 0 ? n - 5 : n;
    char *path = alloc_get(ALLOC_MISC, n + 32);
    if (path == NULL)
        return NULL;
    if (o->split <= 1)
        snprintf(path, n + 32, "%s", o->out);
    else
        snprintf(path, n + 32, "%.*s-%05zu-of-%05u.gguf", (int)stem, o->out, i + 1,
                 (unsigned)o->split);
    return path;
}

/* Parts of nearly equal bytes, each with one tensor at least. */
static enum err_code make_parts(struct mkmodel_plan *p, struct err *e)
{
    p->n_parts = p->o.split > 1 ? p->o.split : 1;
    if (p->n_parts > MKMODEL_MAX_PARTS || p->n_parts > p->n)
        return err_set(e, ERR_ARGUMENT, "split %zu: at most %zu parts", p->n_parts,
                       p->n < MKMODEL_MAX_PARTS ? p->n : (size_t)MKMODEL_MAX_PARTS);
    p->parts = alloc_zero(ALLOC_MISC, p->n_parts, sizeof(*p->parts));
    if (p->parts == NULL)
        return err_set(e, ERR_NOMEM, "no memory for %zu parts", p->n_parts);
    uint64_t left = 0;
    size_t at = 0;
    for (size_t i = 0; i < p->n; i++)
        left += p->tensors[i].bytes;
    for (size_t i = 0; i < p->n_parts; i++) {
        struct mkmodel_part *part = &p->parts[i];
        const size_t parts_left = p->n_parts - i;
        part->path = part_path(&p->o, i);
        if (part->path == NULL)
            return err_set(e, ERR_NOMEM, "no memory for a path");
        part->first = at;
        uint64_t held = 0;
        while (at < p->n - (parts_left - 1) &&
               (part->n == 0 || parts_left == 1 ||
                held + p->tensors[at].bytes / 2 <= left / parts_left)) {
            struct mkmodel_tensor *t = &p->tensors[at++];
            (void)size_round_up(part->data_bytes, MKMODEL_ALIGN, &t->offset);
            part->data_bytes = t->offset + t->bytes;
            held += t->bytes;
            part->n++;
        }
        left -= held;
    }
    return ERR_OK;
}

enum err_code mkmodel_plan_new(const struct mkmodel_options *o, struct mkmodel_plan **ret,
                               struct err *e)
{
    const struct arch *arch = arch_of(o->arch);
    struct mkmodel_plan *p = alloc_zero(ALLOC_MISC, 1, sizeof(*p));
    enum err_code rc = ERR_OK;
    if (p == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a plan");
    p->o = *o;
    if (arch == NULL)
        rc = err_set(e, ERR_ARGUMENT, "architecture %s is not known; there is: %s", o->arch,
                     archs[0].name);
    if (rc == ERR_OK)
        rc = check_shape(o, e);
    if (rc == ERR_OK)
        rc = make_tensors(p, arch, e);
    if (rc == ERR_OK)
        rc = make_parts(p, e);
    if (rc == ERR_OK)
        *ret = p;
    else
        mkmodel_plan_free(p);
    return rc;
}

void mkmodel_plan_free(struct mkmodel_plan *p)
{
    if (p == NULL)
        return;
    for (size_t i = 0; p->parts != NULL && i < p->n_parts; i++) {
        alloc_free(p->parts[i].path);
        alloc_free(p->parts[i].header);
    }
    alloc_free(p->parts);
    alloc_free(p->tensors);
    alloc_free(p);
}

uint64_t mkmodel_plan_bytes(const struct mkmodel_plan *p)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < p->n_parts; i++)
        bytes += p->parts[i].data_offset + p->parts[i].data_bytes;
    return bytes;
}

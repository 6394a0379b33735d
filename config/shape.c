#include "shape.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "gguf.h"
#include "gguf_file.h"

enum {
    SHAPE_MAX_EMBD = 65536,
    SHAPE_MAX_VOCAB = 1 << 20, /* the sampler's sums hold up to here (A21) */
    SHAPE_MAX_CONTEXT = 1 << 24,
    SHAPE_MAX_HEADS = 1024,
    SHAPE_MAX_HEAD_DIM = 512,
    SHAPE_MAX_FF = 65536,
};

/* ---- architectures --------------------------------------------------------------------------- */

enum shape_role {
    SHAPE_TOKEN_EMBD,
    SHAPE_OUTPUT_NORM,
    SHAPE_OUTPUT,
    SHAPE_ATTN_NORM, /* from here on: one a layer, named "blk.<layer>.<name>" */
    SHAPE_Q,
    SHAPE_K,
    SHAPE_V,
    SHAPE_Q_NORM,
    SHAPE_K_NORM,
    SHAPE_ATTN_OUTPUT,
    SHAPE_FFN_NORM,
    SHAPE_ROUTER,
    SHAPE_GATE,
    SHAPE_UP,
    SHAPE_DOWN,
    SHAPE_ROLES
};

/* Features of an architecture, and what its tensors are called. */
static const struct shape_row {
    const char *arch;
    bool qk_norm, router_normalise;
    const char *names[SHAPE_ROLES];
} shape_rows[] = {
    {
        .arch = "qwen3moe",
        .qk_norm = true,
        .router_normalise = true,
        .names =
            {
                [SHAPE_TOKEN_EMBD] = "token_embd.weight",
                [SHAPE_OUTPUT_NORM] = "output_norm.weight",
                [SHAPE_OUTPUT] = "output.weight",
                [SHAPE_ATTN_NORM] = "attn_norm.weight",
                [SHAPE_Q] = "attn_q.weight",
                [SHAPE_K] = "attn_k.weight",
                [SHAPE_V] = "attn_v.weight",
                [SHAPE_Q_NORM] = "attn_q_norm.weight",
                [SHAPE_K_NORM] = "attn_k_norm.weight",
                [SHAPE_ATTN_OUTPUT] = "attn_output.weight",
                [SHAPE_FFN_NORM] = "ffn_norm.weight",
                [SHAPE_ROUTER] = "ffn_gate_inp.weight",
                [SHAPE_GATE] = "ffn_gate_exps.weight",
                [SHAPE_UP] = "ffn_up_exps.weight",
                [SHAPE_DOWN] = "ffn_down_exps.weight",
            },
    },
};
enum {
    SHAPE_ROWS = sizeof shape_rows / sizeof shape_rows[0]
};

/* Keys that change results where they are not neutral, and that no forward pass of ours looks
 * at. */
static const struct {
    const char *key;
    double neutral, also_neutral;
} shape_neutral[] = {
    {"expert_shared_count", 0, 0},
    {"leading_dense_block_count", 0, 0},
    {"nextn_predict_layers", 0, 0},
    {"expert_group_count", 0, 1},
    {"expert_gating_func", 1, 0}, /* 1: softmax; 0: not said */
    {"expert_weights_scale", 1, 0},
    {"rope.scaling.factor", 1, 0},
    {"rope.scale_linear", 1, 0},
    {"attention.sliding_window", 0, 0},
    {"attention.clamp_kqv", 0, 0},
    {"attention.max_alibi_bias", 0, 0},
    {"attn_logit_softcapping", 0, 0},
    {"final_logit_softcapping", 0, 0},
    {"logit_scale", 1, 0},
};

static const struct {
    const char *key;
    bool neutral;
} shape_neutral_flags[] = {
    {"expert_weights_norm", true},
    {"attention.causal", true},
    {"use_parallel_residual", false},
};

/* ---- keys ------------------------------------------------------------------------------------ */

/* The keys of one file, seen under an architecture's prefix. */
struct shape_keys {
    const struct gguf *g;
    const char *path, *arch;
    struct err *e;
};

struct shape_name {
    char s[128];
};

static struct shape_name shape_key(const struct shape_keys *k, const char *key)
{
    struct shape_name name;
    snprintf(name.s, sizeof name.s, "%s.%s", k->arch, key);
    return name;
}

static enum err_code __attribute__((format(printf, 3, 4)))
shape_fail(const struct shape_keys *k, enum err_code code, const char *format, ...)
{
    char why[200];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    return err_set(k->e, code, "%s: %s", gguf_file_label(k->path), why);
}

static bool shape_has(const struct shape_keys *k, const char *key)
{
    return gguf_has(k->g, shape_key(k, key).s);
}

static enum err_code shape_range(const struct shape_keys *k, const char *key, uint64_t value,
                                 uint32_t low, uint32_t high, uint32_t *ret)
{
    if (value < low || value > high)
        return shape_fail(k, ERR_FORMAT, "%s is %llu; it must be %u to %u", shape_key(k, key).s,
                          (unsigned long long)value, low, high);
    *ret = (uint32_t)value;
    return ERR_OK;
}

static enum err_code shape_count(const struct shape_keys *k, const char *key, uint32_t low,
                                 uint32_t high, uint32_t *ret)
{
    uint64_t value;
    if (!shape_has(k, key))
        return shape_fail(k, ERR_FORMAT, "key %s is missing", shape_key(k, key).s);
    if (!gguf_u64(k->g, shape_key(k, key).s, &value))
        return shape_fail(k, ERR_FORMAT, "%s is not a non-negative integer", shape_key(k, key).s);
    return shape_range(k, key, value, low, high, ret);
}

static enum err_code shape_count_or(const struct shape_keys *k, const char *key, uint32_t low,
                                    uint32_t high, uint64_t missing, uint32_t *ret)
{
    if (shape_has(k, key))
        return shape_count(k, key, low, high, ret);
    return shape_range(k, key, missing, low, high, ret);
}

/* A number that must be finite and in (0, high]. */
static enum err_code shape_real(const struct shape_keys *k, const char *key, double high,
                                double *ret)
{
    double value;
    if (!gguf_f64(k->g, shape_key(k, key).s, &value))
        return shape_fail(k, ERR_FORMAT, "%s is not a number", shape_key(k, key).s);
    if (!(value > 0 && value <= high)) /* NaN fails too */
        return shape_fail(k, ERR_FORMAT, "%s is %g; it must be above 0 and at most %g",
                          shape_key(k, key).s, value, high);
    *ret = value;
    return ERR_OK;
}

/* A count that may also be given for each layer, if it is the same for all. */
static enum err_code shape_count_of_layers(const struct shape_keys *k, const char *key,
                                           uint32_t n_layer, uint32_t high, uint32_t *ret)
{
    int64_t first, other;
    const struct gguf_array *a = gguf_array_get(k->g, shape_key(k, key).s);
    if (a == NULL)
        return shape_count(k, key, 1, high, ret);
    if (gguf_array_count(a) != n_layer)
        return shape_fail(k, ERR_FORMAT, "%s has %llu values for %u layers", shape_key(k, key).s,
                          (unsigned long long)gguf_array_count(a), n_layer);
    if (!gguf_array_i64_at(a, 0, &first) || first < 0)
        return shape_fail(k, ERR_FORMAT, "%s does not hold counts", shape_key(k, key).s);
    for (uint32_t i = 1; i < n_layer; i++)
        if (!gguf_array_i64_at(a, i, &other) || other != first)
            return shape_fail(k, ERR_UNSUPPORTED, "%s differs between layers (0 and %u)",
                              shape_key(k, key).s, i);
    return shape_range(k, key, (uint64_t)first, 1, high, ret);
}

static const struct shape_row *shape_find(const char *arch)
{
    for (size_t i = 0; i < SHAPE_ROWS; i++)
        if (strcmp(shape_rows[i].arch, arch) == 0)
            return &shape_rows[i];
    return NULL;
}

static enum err_code shape_architecture(const struct shape_keys *k, struct model_shape *s,
                                        const struct shape_row **ret)
{
    struct gguf_text arch;
    char list[96] = "";
    if (!gguf_text(k->g, "general.architecture", &arch) || arch.size == 0)
        return shape_fail(k, ERR_FORMAT, "key general.architecture is missing: not a model");
    size_t n = arch.size < sizeof s->arch ? arch.size : sizeof s->arch - 1;
    snprintf(s->arch, sizeof s->arch, "%.*s", (int)n, arch.data);
    *ret = shape_find(s->arch);
    if (*ret != NULL && arch.size == n)
        return ERR_OK;
    for (size_t i = 0; i < SHAPE_ROWS; i++) {
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s", i > 0 ? ", " : "", shape_rows[i].arch);
    }
    return shape_fail(k, ERR_UNSUPPORTED, "architecture %s is not built in; this Islet runs: %s",
                      s->arch, list);
}

static enum err_code shape_refuse_features(const struct shape_keys *k)
{
    double value;
    bool flag;
    struct gguf_text text;
    for (size_t i = 0; i < sizeof shape_neutral / sizeof shape_neutral[0]; i++) {
        const char *key = shape_neutral[i].key;
        if (!shape_has(k, key))
            continue;
        if (!gguf_f64(k->g, shape_key(k, key).s, &value))
            return shape_fail(k, ERR_FORMAT, "%s is not a number", shape_key(k, key).s);
        if (value != shape_neutral[i].neutral && value != shape_neutral[i].also_neutral)
            return shape_fail(k, ERR_UNSUPPORTED, "%s = %g is not built in (only %g)",
                              shape_key(k, key).s, value, shape_neutral[i].neutral);
    }
    for (size_t i = 0; i < sizeof shape_neutral_flags / sizeof shape_neutral_flags[0]; i++) {
        const char *key = shape_neutral_flags[i].key;
        if (!shape_has(k, key))
            continue;
        if (!gguf_bool(k->g, shape_key(k, key).s, &flag))
            return shape_fail(k, ERR_FORMAT, "%s is not a bool", shape_key(k, key).s);
        if (flag != shape_neutral_flags[i].neutral)
            return shape_fail(k, ERR_UNSUPPORTED, "%s = %s is not built in", shape_key(k, key).s,
                              flag ? "true" : "false");
    }
    if (!shape_has(k, "rope.scaling.type"))
        return ERR_OK;
    if (!gguf_text(k->g, shape_key(k, "rope.scaling.type").s, &text))
        return shape_fail(k, ERR_FORMAT, "%s is not a text", shape_key(k, "rope.scaling.type").s);
    if (text.size != 4 || memcmp(text.data, "none", 4) != 0)
        return shape_fail(k, ERR_UNSUPPORTED, "%s = %.*s is not built in (only none)",
                          shape_key(k, "rope.scaling.type").s,
                          (int)(text.size < 32 ? text.size : 32), text.data);
    return ERR_OK;
}

static enum err_code shape_read_sizes(const struct shape_keys *k, struct model_shape *s)
{
    enum err_code rc = shape_count(k, "block_count", 1, SHAPE_MAX_LAYERS, &s->n_layer);
    if (rc == ERR_OK)
        rc = shape_count(k, "embedding_length", 1, SHAPE_MAX_EMBD, &s->n_embd);
    if (rc == ERR_OK)
        rc = shape_count(k, "context_length", 1, SHAPE_MAX_CONTEXT, &s->n_ctx_train);
    if (rc == ERR_OK)
        rc = shape_count_of_layers(k, "attention.head_count", s->n_layer, SHAPE_MAX_HEADS,
                                   &s->n_head);
    s->n_head_kv = s->n_head;
    if (rc == ERR_OK && shape_has(k, "attention.head_count_kv"))
        rc = shape_count_of_layers(k, "attention.head_count_kv", s->n_layer, s->n_head,
                                   &s->n_head_kv);
    if (rc == ERR_OK && s->n_head % s->n_head_kv != 0)
        rc = shape_fail(k, ERR_FORMAT, "%u heads are not a multiple of %u key-value heads",
                        s->n_head, s->n_head_kv);
    return rc;
}

static enum err_code shape_read_heads(const struct shape_keys *k, struct model_shape *s)
{
    uint32_t value_dim;
    enum err_code rc = shape_count_or(k, "attention.key_length", 2, SHAPE_MAX_HEAD_DIM,
                                      s->n_embd / s->n_head, &s->head_dim);
    if (rc == ERR_OK)
        rc = shape_count_or(k, "attention.value_length", 2, SHAPE_MAX_HEAD_DIM,
                            s->n_embd / s->n_head, &value_dim);
    if (rc == ERR_OK && value_dim != s->head_dim)
        rc = shape_fail(k, ERR_UNSUPPORTED,
                        "heads of %u for keys and %u for values are not built in", s->head_dim,
                        value_dim);
    if (rc == ERR_OK && s->head_dim % 2 != 0)
        rc = shape_fail(k, ERR_FORMAT, "%s is %u; it must be even",
                        shape_key(k, "attention.key_length").s, s->head_dim);
    if (rc == ERR_OK)
        rc = shape_count_or(k, "rope.dimension_count", 2, s->head_dim, s->head_dim, &s->rope_dim);
    if (rc == ERR_OK && s->rope_dim % 2 != 0)
        rc = shape_fail(k, ERR_FORMAT, "%s is %u; it must be even",
                        shape_key(k, "rope.dimension_count").s, s->rope_dim);
    if (rc != ERR_OK)
        return rc;
    s->attention_scale = (float)(1.0 / sqrt((double)s->head_dim));
    s->rope_base = 10000.0;
    return shape_has(k, "rope.freq_base") ? shape_real(k, "rope.freq_base", 1e12, &s->rope_base)
                                          : ERR_OK;
}

static enum err_code shape_read_experts(const struct shape_keys *k, struct model_shape *s)
{
    double eps = 0;
    uint64_t n_ff = 0;
    enum err_code rc = shape_count(k, "expert_count", 1, SHAPE_MAX_EXPERTS, &s->n_expert);
    if (rc == ERR_OK)
        rc = shape_count(k, "expert_used_count", 1,
                         s->n_expert < SHAPE_MAX_TOPK ? s->n_expert : SHAPE_MAX_TOPK,
                         &s->n_expert_used);
    if (rc == ERR_OK) {
        /* Older files give only the width of all the experts used together. */
        if (gguf_u64(k->g, shape_key(k, "feed_forward_length").s, &n_ff))
            n_ff /= s->n_expert_used;
        rc =
            shape_count_or(k, "expert_feed_forward_length", 1, SHAPE_MAX_FF, n_ff, &s->n_ff_expert);
    }
    if (rc == ERR_OK)
        rc = shape_real(k, "attention.layer_norm_rms_epsilon", 0.1, &eps);
    s->rms_eps = (float)eps;
    s->router_scale = 1.0f;
    return rc;
}

static enum err_code shape_read_vocabulary(const struct shape_keys *k, const struct gguf_file *f,
                                           const struct shape_row *row, struct model_shape *s)
{
    const struct gguf_tensor *t = gguf_file_tensor(f, row->names[SHAPE_TOKEN_EMBD]);
    if (t == NULL)
        return shape_fail(k, ERR_FORMAT, "tensor %s is missing", row->names[SHAPE_TOKEN_EMBD]);
    if (t->dims[1] > SHAPE_MAX_VOCAB)
        return shape_fail(k, ERR_FORMAT, "a vocabulary of %llu; the limit is %d",
                          (unsigned long long)t->dims[1], SHAPE_MAX_VOCAB);
    s->n_vocab = (uint32_t)t->dims[1];
    const struct gguf_array *tokens = gguf_array_get(k->g, "tokenizer.ggml.tokens");
    if (tokens != NULL && gguf_array_count(tokens) != s->n_vocab)
        return shape_fail(k, ERR_FORMAT, "tokenizer.ggml.tokens has %llu texts, but %s has %u rows",
                          (unsigned long long)gguf_array_count(tokens),
                          row->names[SHAPE_TOKEN_EMBD], s->n_vocab);
    s->tied_head = gguf_file_tensor(f, row->names[SHAPE_OUTPUT]) == NULL;
    for (size_t i = 0; i < f->n_tensors; i++) {
        const uint64_t *d = f->tensors[i]->dims;
        s->n_params += d[0] * d[1] * d[2] * d[3]; /* each product was checked by gguf_parse */
    }
    return ERR_OK;
}

/* general.name, or the file's name without ".gguf". */
static void shape_read_name(const struct gguf_file *f, struct model_shape *s)
{
    struct gguf_text text;
    const char *slash = strrchr(f->path, '/');
    const char *base = slash != NULL ? slash + 1 : f->path;
    size_t n = strlen(base);
    if (n > 5 && strcmp(base + n - 5, ".gguf") == 0)
        n -= 5;
    if (gguf_text(gguf_file_keys(f), "general.name", &text) && text.size > 0) {
        base = text.data;
        n = text.size;
    }
    if (n >= sizeof s->name)
        n = sizeof s->name - 1;
    memcpy(s->name, base, n);
    s->name[n] = '\0';
}

enum err_code shape_from_file(const struct gguf_file *f, struct model_shape *ret, struct err *e)
{
    struct model_shape s = {.n_layer = 0};
    const struct shape_row *row = NULL;
    struct shape_keys k = {.g = gguf_file_keys(f), .path = f->path, .arch = s.arch, .e = e};
    enum err_code rc = shape_architecture(&k, &s, &row);
    if (rc == ERR_OK)
        rc = shape_refuse_features(&k);
    if (rc == ERR_OK)
        rc = shape_read_sizes(&k, &s);
    if (rc == ERR_OK)
        rc = shape_read_heads(&k, &s);
    if (rc == ERR_OK)
        rc = shape_read_experts(&k, &s);
    if (rc == ERR_OK)
        rc = shape_read_vocabulary(&k, f, row, &s);
    if (rc != ERR_OK)
        return rc;
    s.qk_norm = row->qk_norm;
    s.router_normalise = row->router_normalise;
    shape_read_name(f, &s);
    *ret = s;
    return ERR_OK;
}

/* ---- tensors --------------------------------------------------------------------------------- */

/* Weight types that kernels exist for. */
static bool shape_type_supported(uint32_t gguf_type)
{
    switch (gguf_type) {
    case GGUF_F32:
    case GGUF_F16:
    case GGUF_BF16:
    case GGUF_Q8_0:
    case GGUF_Q4_0:
    case GGUF_Q4_K:
    case GGUF_Q5_K:
    case GGUF_Q6_K:
        return true;
    default:
        return false;
    }
}

struct shape_binder {
    const struct gguf_file *f;
    const struct model_shape *shape;
    const struct shape_row *row;
    bool *used; /* [f->n_tensors] */
    struct err *e;
};

/* Dimensions that a role's tensor must have; missing ones are 1. F32 alone for norms and the
 * router. */
static void shape_wanted(const struct model_shape *s, enum shape_role role, uint64_t ret_dims[3],
                         bool *ret_f32)
{
    const uint64_t embd = s->n_embd, ff = s->n_ff_expert, experts = s->n_expert;
    const uint64_t q = (uint64_t)s->n_head * s->head_dim, kv = (uint64_t)s->n_head_kv * s->head_dim;
    const struct {
        uint64_t dims[3];
        bool f32;
    } wanted[SHAPE_ROLES] = {
        [SHAPE_TOKEN_EMBD] = {{embd, s->n_vocab, 1}, false},
        [SHAPE_OUTPUT_NORM] = {{embd, 1, 1}, true},
        [SHAPE_OUTPUT] = {{embd, s->n_vocab, 1}, false},
        [SHAPE_ATTN_NORM] = {{embd, 1, 1}, true},
        [SHAPE_Q] = {{embd, q, 1}, false},
        [SHAPE_K] = {{embd, kv, 1}, false},
        [SHAPE_V] = {{embd, kv, 1}, false},
        [SHAPE_Q_NORM] = {{s->head_dim, 1, 1}, true},
        [SHAPE_K_NORM] = {{s->head_dim, 1, 1}, true},
        [SHAPE_ATTN_OUTPUT] = {{q, embd, 1}, false},
        [SHAPE_FFN_NORM] = {{embd, 1, 1}, true},
        [SHAPE_ROUTER] = {{embd, experts, 1}, true},
        [SHAPE_GATE] = {{embd, ff, experts}, false},
        [SHAPE_UP] = {{embd, ff, experts}, false},
        [SHAPE_DOWN] = {{ff, embd, experts}, false},
    };
    memcpy(ret_dims, wanted[role].dims, sizeof wanted[role].dims);
    *ret_f32 = wanted[role].f32;
}

/* Finds and checks the tensor of a role; `layer` is ignored by those that are not of a layer. */
static enum err_code shape_bind_one(const struct shape_binder *b, enum shape_role role,
                                    uint32_t layer, const struct gguf_tensor **ret)
{
    struct shape_name name;
    const char *path = b->f->path, *type = "?";
    uint64_t want[3];
    uint32_t block, bytes;
    bool f32;
    if (role >= SHAPE_ATTN_NORM)
        snprintf(name.s, sizeof name.s, "blk.%u.%s", layer, b->row->names[role]);
    else
        snprintf(name.s, sizeof name.s, "%s", b->row->names[role]);
    const struct gguf_tensor *t = gguf_file_tensor(b->f, name.s);
    if (t == NULL)
        return err_set(b->e, ERR_FORMAT, "%s: tensor %s is missing", gguf_file_label(path), name.s);
    shape_wanted(b->shape, role, want, &f32);
    if (t->dims[0] != want[0] || t->dims[1] != want[1] || t->dims[2] != want[2] || t->dims[3] != 1)
        return err_set(
            b->e, ERR_FORMAT,
            "%s: tensor %s is %llu x %llu x %llu x %llu; %llu x %llu x %llu x 1 is needed",
            gguf_file_label(path), name.s, (unsigned long long)t->dims[0],
            (unsigned long long)t->dims[1], (unsigned long long)t->dims[2],
            (unsigned long long)t->dims[3], (unsigned long long)want[0],
            (unsigned long long)want[1], (unsigned long long)want[2]);
    (void)gguf_type_info(t->type, &type, &block, &bytes);
    if (f32 && t->type != GGUF_F32)
        return err_set(b->e, ERR_UNSUPPORTED, "%s: tensor %s is %s; only f32 is built in here",
                       gguf_file_label(path), name.s, type);
    if (!shape_type_supported(t->type))
        return err_set(b->e, ERR_UNSUPPORTED,
                       "%s: tensor %s is %s; built in are f32 f16 bf16 q8_0 q4_0 q4_K q5_K q6_K",
                       gguf_file_label(path), name.s, type);
    b->used[t - b->f->tensors[0]] = true;
    *ret = t;
    return ERR_OK;
}

static enum err_code shape_bind_layer(const struct shape_binder *b, uint32_t layer,
                                      struct shape_layer *l)
{
    const struct {
        enum shape_role role;
        const struct gguf_tensor **place;
    } wanted[] = {
        {SHAPE_ATTN_NORM, &l->attn_norm},
        {SHAPE_Q, &l->q},
        {SHAPE_K, &l->k},
        {SHAPE_V, &l->v},
        {SHAPE_Q_NORM, &l->q_norm},
        {SHAPE_K_NORM, &l->k_norm},
        {SHAPE_FFN_NORM, &l->ffn_norm},
        {SHAPE_ATTN_OUTPUT, &l->attn_output},
        {SHAPE_ROUTER, &l->router},
        {SHAPE_GATE, &l->gate},
        {SHAPE_UP, &l->up},
        {SHAPE_DOWN, &l->down},
    };
    enum err_code rc = ERR_OK;
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0] && rc == ERR_OK; i++)
        rc = shape_bind_one(b, wanted[i].role, layer, wanted[i].place);
    return rc;
}

/* A tensor that the pass would not look at (a bias, say) means that the answers would be another
 * model's. */
static enum err_code shape_refuse_unused(const struct shape_binder *b)
{
    for (size_t i = 0; i < b->f->n_tensors; i++) {
        struct gguf_text name = b->f->tensors[i]->name;
        if (!b->used[i])
            return err_set(b->e, ERR_UNSUPPORTED, "%s: tensor %.*s has no use in architecture %s",
                           gguf_file_label(b->f->path), (int)(name.size < 80 ? name.size : 80),
                           name.data, b->shape->arch);
    }
    return ERR_OK;
}

enum err_code shape_bind(const struct gguf_file *f, const struct model_shape *shape,
                         struct shape_tensors *ret, struct err *e)
{
    struct shape_tensors t = {.layers = NULL};
    struct shape_binder b = {.f = f, .shape = shape, .row = shape_find(shape->arch), .e = e};
    enum err_code rc = ERR_OK;
    assert(b.row != NULL); /* shape_from_file gave the shape */
    b.used = alloc_zero(ALLOC_MODEL, f->n_tensors, sizeof b.used[0]);
    t.layers = alloc_zero(ALLOC_MODEL, shape->n_layer, sizeof t.layers[0]);
    if (b.used == NULL || t.layers == NULL) {
        rc = err_set(e, ERR_NOMEM, "%s: no memory for %u layers", gguf_file_label(f->path),
                     shape->n_layer);
        goto out;
    }
    rc = shape_bind_one(&b, SHAPE_TOKEN_EMBD, 0, &t.token_embd);
    if (rc == ERR_OK)
        rc = shape_bind_one(&b, SHAPE_OUTPUT_NORM, 0, &t.output_norm);
    t.output = t.token_embd;
    if (rc == ERR_OK && !shape->tied_head)
        rc = shape_bind_one(&b, SHAPE_OUTPUT, 0, &t.output);
    for (uint32_t i = 0; i < shape->n_layer && rc == ERR_OK; i++)
        rc = shape_bind_layer(&b, i, &t.layers[i]);
    if (rc == ERR_OK)
        rc = shape_refuse_unused(&b);
out:
    alloc_free(b.used);
    if (rc == ERR_OK)
        *ret = t;
    else
        shape_tensors_done(&t);
    return rc;
}

void shape_tensors_done(struct shape_tensors *t)
{
    alloc_free(t->layers);
    *t = (struct shape_tensors){.layers = NULL};
}

uint64_t shape_slice_bytes(const struct gguf_tensor *t, const struct model_shape *shape)
{
    return t->bytes / shape->n_expert; /* a slice is whole blocks, as dims[0] is */
}

uint64_t shape_slice_offset(const struct gguf_tensor *t, const struct model_shape *shape,
                            uint32_t expert)
{
    return t->offset + expert * shape_slice_bytes(t, shape);
}

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "alloc.h"
#include "gguf_file.h"
#include "gguf_write.h"
#include "shape.h"

enum {
    LAYERS = 2,
    EMBD = 64,
    VOCAB = 8,
    HEADS = 4,
    HEADS_KV = 2,
    HEAD = 32,
    EXPERTS = 4,
    USED = 2,
    FF = 32
};

/* One change to a correct model. kind: u f t b i (array) add or replace a key, '-' drops it, 'T'
 * gives a tensor another type and dims, 'D' drops it, 'A' adds one. */
struct change {
    char kind;
    const char *name;
    double number;
    const char *text;
    uint64_t dims[3];
};

static char root[64], path[96];

static int make_root(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "/tmp/islet-test-XXXXXX");
    if (mkdtemp(root) == NULL)
        return 1;
    snprintf(path, sizeof path, "%s/tiny.gguf", root);
    return 0;
}

static int drop_root(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(root) != 0 || alloc_live_blocks() != 0;
}

static bool touched(const struct change *c, const char *name, const char *kinds)
{
    return c != NULL && strchr(kinds, c->kind) != NULL && strcmp(c->name, name) == 0;
}

static void put_u32(struct gguf_write *w, const struct change *c, const char *key, uint32_t value)
{
    if (!touched(c, key, "uftbi-"))
        gguf_write_u32(w, key, value);
}

static void put_tensor(struct gguf_write *w, const struct change *c, const char *name, uint64_t d0,
                       uint64_t d1, uint64_t d2, uint32_t type)
{
    uint64_t dims[3] = {d0, d1, d2};
    if (touched(c, name, "D"))
        return;
    if (touched(c, name, "T")) {
        memcpy(dims, c->dims, sizeof dims);
        type = (uint32_t)c->number;
    }
    uint32_t n_dims = dims[2] > 1 ? 3 : dims[1] > 1 ? 2 : 1;
    gguf_write_tensor(w, name, type, n_dims, dims, NULL,
                      gguf_write_tensor_bytes(type, n_dims, dims));
}

static void put_layer(struct gguf_write *w, const struct change *c, unsigned layer)
{
    const struct {
        const char *name;
        uint64_t d0, d1, d2;
        uint32_t type;
    } rows[] = {
        {"attn_norm", EMBD, 1, 1, GGUF_F32},
        {"attn_q", EMBD, HEADS * HEAD, 1, GGUF_Q8_0},
        {"attn_k", EMBD, HEADS_KV * HEAD, 1, GGUF_F16},
        {"attn_v", EMBD, HEADS_KV * HEAD, 1, GGUF_Q4_0},
        {"attn_q_norm", HEAD, 1, 1, GGUF_F32},
        {"attn_k_norm", HEAD, 1, 1, GGUF_F32},
        {"attn_output", HEADS * HEAD, EMBD, 1, GGUF_BF16},
        {"ffn_norm", EMBD, 1, 1, GGUF_F32},
        {"ffn_gate_inp", EMBD, EXPERTS, 1, GGUF_F32},
        {"ffn_gate_exps", EMBD, FF, EXPERTS, GGUF_Q8_0},
        {"ffn_up_exps", EMBD, FF, EXPERTS, GGUF_Q8_0},
        {"ffn_down_exps", FF, EMBD, EXPERTS, GGUF_Q8_0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s.weight", layer, rows[i].name);
        put_tensor(w, c, name, rows[i].d0, rows[i].d1, rows[i].d2, rows[i].type);
    }
}

static void put_change(struct gguf_write *w, const struct change *c)
{
    const int32_t counts[3] = {(int32_t)c->number, (int32_t)c->number, (int32_t)c->dims[0]};
    if (c->kind == 'u')
        gguf_write_u32(w, c->name, (uint32_t)c->number);
    else if (c->kind == 'f')
        gguf_write_f32(w, c->name, (float)c->number);
    else if (c->kind == 'b')
        gguf_write_bool(w, c->name, c->number != 0);
    else if (c->kind == 't')
        gguf_write_text(w, c->name, c->text);
    else if (c->kind == 'i')
        gguf_write_i32s(w, c->name, c->dims[0] != 0 ? counts + 1 : counts, 2);
    else if (c->kind == 'A')
        gguf_write_tensor(w, c->name, GGUF_F32, 1, (const uint64_t[]){EMBD}, NULL, 4 * EMBD);
}

static void write_model(const struct change *c)
{
    static const char *const tokens[VOCAB] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    struct gguf_write *w = gguf_write_new();
    if (!touched(c, "general.architecture", "t-"))
        gguf_write_text(w, "general.architecture", "qwen3moe");
    put_u32(w, c, "qwen3moe.block_count", LAYERS);
    put_u32(w, c, "qwen3moe.context_length", 128);
    put_u32(w, c, "qwen3moe.embedding_length", EMBD);
    put_u32(w, c, "qwen3moe.attention.head_count", HEADS);
    put_u32(w, c, "qwen3moe.attention.head_count_kv", HEADS_KV);
    put_u32(w, c, "qwen3moe.attention.key_length", HEAD);
    put_u32(w, c, "qwen3moe.attention.value_length", HEAD);
    put_u32(w, c, "qwen3moe.expert_count", EXPERTS);
    put_u32(w, c, "qwen3moe.expert_used_count", USED);
    put_u32(w, c, "qwen3moe.expert_feed_forward_length", FF);
    put_u32(w, c, "qwen3moe.feed_forward_length", FF * USED);
    if (!touched(c, "qwen3moe.attention.layer_norm_rms_epsilon", "uft-"))
        gguf_write_f32(w, "qwen3moe.attention.layer_norm_rms_epsilon", 1e-6f);
    gguf_write_texts(w, "tokenizer.ggml.tokens", tokens, VOCAB);
    if (c != NULL)
        put_change(w, c);
    put_tensor(w, c, "token_embd.weight", EMBD, VOCAB, 1, GGUF_Q8_0);
    put_tensor(w, c, "output_norm.weight", EMBD, 1, 1, GGUF_F32);
    put_tensor(w, c, "output.weight", EMBD, VOCAB, 1, GGUF_Q8_0);
    for (unsigned i = 0; i < LAYERS; i++)
        put_layer(w, c, i);
    gguf_write_file(w, path);
    gguf_write_free(w);
}

/* Opens, fills and binds what write_model makes. */
static enum err_code shape_of(const struct change *c, struct model_shape *ret, struct err *e)
{
    struct gguf_file *f = NULL;
    struct shape_tensors t = {.layers = NULL};
    write_model(c);
    if (gguf_file_open(path, &f, e) != ERR_OK)
        fail_msg("%s", e->text);
    enum err_code rc = shape_from_file(f, ret, e);
    if (rc == ERR_OK)
        rc = shape_bind(f, ret, &t, e);
    shape_tensors_done(&t);
    gguf_file_close(f);
    return rc;
}

static void test_shape_of_a_correct_model(void **state)
{
    (void)state;
    struct model_shape s;
    struct err e = {.code = ERR_OK};
    if (shape_of(NULL, &s, &e) != ERR_OK)
        fail_msg("%s", e.text);
    assert_string_equal(s.arch, "qwen3moe");
    assert_string_equal(s.name, "tiny");
    assert_int_equal(s.n_layer, LAYERS);
    assert_int_equal(s.n_vocab, VOCAB);
    assert_int_equal(s.n_head_kv, HEADS_KV);
    assert_int_equal(s.head_dim, HEAD);
    assert_int_equal(s.rope_dim, HEAD);
    assert_int_equal(s.n_ff_expert, FF);
    assert_true(s.rope_base == 10000.0 && s.rms_eps == 1e-6f && s.router_scale == 1.0f);
    assert_true(s.attention_scale == (float)(1.0 / sqrt(32.0)));
    assert_true(s.qk_norm && s.router_normalise && !s.tied_head);
    /* embeddings and head, norms, then per layer */
    assert_int_equal(s.n_params, 2 * EMBD * VOCAB + EMBD +
                                     LAYERS * (2 * EMBD + 2 * HEAD + 2 * EMBD * HEADS * HEAD +
                                               2 * EMBD * HEADS_KV * HEAD + EMBD * EXPERTS +
                                               3 * EMBD * FF * EXPERTS));
}

static void test_shape_what_may_vary(void **state)
{
    (void)state;
    static const struct change fine[] = {
        {'D', "output.weight", 0, NULL, {0}},
        {'t', "general.name", 0, "A name", {0}},
        {'i', "qwen3moe.attention.head_count_kv", HEADS_KV, NULL, {0}},
        {'-', "qwen3moe.expert_feed_forward_length", 0, NULL, {0}},
        {'t', "qwen3moe.rope.scaling.type", 0, "none", {0}},
        {'f', "qwen3moe.rope.scaling.factor", 1, NULL, {0}},
        {'u', "qwen3moe.expert_shared_count", 0, NULL, {0}},
        {'f', "qwen3moe.rope.freq_base", 500000, NULL, {0}},
        {'u', "qwen3moe.rope.dimension_count", 16, NULL, {0}},
        {'T', "blk.1.ffn_up_exps.weight", GGUF_F32, NULL, {EMBD, FF, EXPERTS}},
    };
    for (size_t i = 0; i < sizeof fine / sizeof fine[0]; i++) {
        struct model_shape s;
        struct err e = {.code = ERR_OK};
        if (shape_of(&fine[i], &s, &e) != ERR_OK)
            fail_msg("%s: %s", fine[i].name, e.text);
        assert_int_equal(s.tied_head, i == 0);
        assert_string_equal(s.name, i == 1 ? "A name" : "tiny");
        assert_true(s.rope_base == (i == 7 ? 500000.0 : 10000.0));
        assert_int_equal(s.rope_dim, i == 8 ? 16 : HEAD);
        assert_int_equal(s.n_ff_expert, FF);
    }
}

static void test_shape_bad_models_are_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        struct change change;
        enum err_code code;
        const char *says;
    } cases[] = {
        {{'-', "general.architecture", 0, NULL, {0}},
         ERR_FORMAT,
         "general.architecture is missing"},
        {{'t', "general.architecture", 0, "gpt-oss", {0}},
         ERR_UNSUPPORTED,
         "architecture gpt-oss is not built in; this Islet runs: qwen3moe"},
        {{'-', "qwen3moe.block_count", 0, NULL, {0}},
         ERR_FORMAT,
         "key qwen3moe.block_count is missing"},
        {{'u', "qwen3moe.block_count", 0, NULL, {0}},
         ERR_FORMAT,
         "block_count is 0; it must be 1 to 512"},
        {{'u', "qwen3moe.block_count", 4e9, NULL, {0}}, ERR_FORMAT, "it must be 1 to 512"},
        {{'t', "qwen3moe.block_count", 0, "2", {0}}, ERR_FORMAT, "not a non-negative integer"},
        {{'u', "qwen3moe.block_count", 3, NULL, {0}},
         ERR_FORMAT,
         "tensor blk.2.attn_norm.weight is missing"},
        {{'u', "qwen3moe.block_count", 1, NULL, {0}},
         ERR_UNSUPPORTED,
         "tensor blk.1.attn_norm.weight has no use"},
        {{'u', "qwen3moe.attention.head_count_kv", 3, NULL, {0}},
         ERR_FORMAT,
         "not a multiple of 3"},
        {{'u', "qwen3moe.attention.head_count_kv", 8, NULL, {0}}, ERR_FORMAT, "must be 1 to 4"},
        {{'i', "qwen3moe.attention.head_count_kv", 2, NULL, {1}},
         ERR_UNSUPPORTED,
         "differs between layers"},
        {{'u', "qwen3moe.attention.key_length", 514, NULL, {0}}, ERR_FORMAT, "must be 2 to 512"},
        {{'u', "qwen3moe.attention.value_length", 64, NULL, {0}},
         ERR_UNSUPPORTED,
         "heads of 32 for keys and 64"},
        {{'u', "qwen3moe.rope.dimension_count", 15, NULL, {0}}, ERR_FORMAT, "it must be even"},
        {{'u', "qwen3moe.rope.dimension_count", 34, NULL, {0}}, ERR_FORMAT, "must be 2 to 32"},
        {{'f', "qwen3moe.rope.freq_base", NAN, NULL, {0}}, ERR_FORMAT, "rope.freq_base is"},
        {{'f', "qwen3moe.rope.freq_base", 0, NULL, {0}}, ERR_FORMAT, "above 0"},
        {{'f', "qwen3moe.attention.layer_norm_rms_epsilon", INFINITY, NULL, {0}},
         ERR_FORMAT,
         "at most 0.1"},
        {{'u', "qwen3moe.expert_used_count", 5, NULL, {0}}, ERR_FORMAT, "must be 1 to 4"},
        {{'u', "qwen3moe.expert_count", 5000, NULL, {0}}, ERR_FORMAT, "must be 1 to 4096"},
        {{'t', "qwen3moe.rope.scaling.type", 0, "yarn", {0}},
         ERR_UNSUPPORTED,
         "rope.scaling.type = yarn"},
        {{'f', "qwen3moe.rope.scaling.factor", 4, NULL, {0}},
         ERR_UNSUPPORTED,
         "rope.scaling.factor = 4"},
        {{'u', "qwen3moe.expert_shared_count", 1, NULL, {0}},
         ERR_UNSUPPORTED,
         "expert_shared_count = 1"},
        {{'f', "qwen3moe.expert_weights_scale", 2.5, NULL, {0}},
         ERR_UNSUPPORTED,
         "expert_weights_scale = 2.5"},
        {{'b', "qwen3moe.expert_weights_norm", 0, NULL, {0}},
         ERR_UNSUPPORTED,
         "expert_weights_norm = false"},
        {{'u', "qwen3moe.attention.sliding_window", 16, NULL, {0}},
         ERR_UNSUPPORTED,
         "sliding_window = 16"},
        {{'D', "token_embd.weight", 0, NULL, {0}},
         ERR_FORMAT,
         "tensor token_embd.weight is missing"},
        {{'T', "token_embd.weight", GGUF_F32, NULL, {EMBD, 9, 1}},
         ERR_FORMAT,
         "tokens has 8 texts"},
        {{'D', "blk.1.attn_v.weight", 0, NULL, {0}},
         ERR_FORMAT,
         "tensor blk.1.attn_v.weight is missing"},
        {{'T', "blk.0.attn_q.weight", GGUF_F32, NULL, {EMBD, 64, 1}},
         ERR_FORMAT,
         "blk.0.attn_q.weight is 64 x 64 x 1 x 1; 64 x 128 x 1 x 1 is needed"},
        {{'T', "blk.0.attn_q.weight", GGUF_Q4_1, NULL, {EMBD, 128, 1}},
         ERR_UNSUPPORTED,
         "blk.0.attn_q.weight is q4_1; built in are f32"},
        {{'T', "blk.0.ffn_norm.weight", GGUF_F16, NULL, {EMBD, 1, 1}}, ERR_UNSUPPORTED, "only f32"},
        {{'A', "blk.0.attn_q.bias", 0, NULL, {0}},
         ERR_UNSUPPORTED,
         "tensor blk.0.attn_q.bias has no use"},
        {{'A', "rope_freqs.weight", 0, NULL, {0}}, ERR_UNSUPPORTED, "rope_freqs.weight has no use"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct model_shape s;
        struct err e = {.code = ERR_OK};
        enum err_code rc = shape_of(&cases[i].change, &s, &e);
        if (rc != cases[i].code || strstr(e.text, cases[i].says) == NULL)
            fail_msg("%s gives %s: %s", cases[i].change.name, err_code_name(rc), e.text);
    }
}

static void test_shape_slices_cover_the_tensor(void **state)
{
    (void)state;
    struct gguf_file *f;
    struct model_shape s;
    struct shape_tensors t;
    write_model(NULL);
    assert_int_equal(gguf_file_open(path, &f, NULL), ERR_OK);
    assert_int_equal(shape_from_file(f, &s, NULL), ERR_OK);
    assert_int_equal(shape_bind(f, &s, &t, NULL), ERR_OK);
    const struct gguf_tensor *down = t.layers[1].down;
    assert_int_equal(shape_slice_bytes(down, &s), FF / 32 * 34 * EMBD);
    assert_int_equal(shape_slice_offset(down, &s, 0), down->offset);
    assert_int_equal(shape_slice_offset(down, &s, EXPERTS), down->offset + down->bytes);
    shape_tensors_done(&t);
    gguf_file_close(f);
}

static void test_shape_reads_the_shipped_models(void **state)
{
    (void)state;
    static const char *const models[] = {"tinymoe-q8_0.gguf", "tinymoe-q4_k_m.gguf",
                                         "random/qwen3moe-f32.gguf", "random/qwen3moe-q8_0.gguf"};
    for (size_t i = 0; i < 4; i++) {
        char name[512];
        struct gguf_file *f;
        struct model_shape s;
        struct shape_tensors t;
        struct err e = {.code = ERR_OK};
        snprintf(name, sizeof name, "%s/models/%s", ISLET_TEST_DIR, models[i]);
        if (gguf_file_open(name, &f, &e) != ERR_OK || shape_from_file(f, &s, &e) != ERR_OK ||
            shape_bind(f, &s, &t, &e) != ERR_OK)
            fail_msg("%s", e.text);
        assert_int_equal(s.n_params, i < 2 ? 15485696 : 235072);
        assert_int_equal(s.n_expert, i < 2 ? 16 : 8);
        shape_tensors_done(&t);
        gguf_file_close(f);
    }
}

#define IN_ROOT(test) cmocka_unit_test_setup_teardown(test, make_root, drop_root)

int main(void)
{
    const struct CMUnitTest tests[] = {
        IN_ROOT(test_shape_of_a_correct_model),
        IN_ROOT(test_shape_what_may_vary),
        IN_ROOT(test_shape_bad_models_are_refused_by_name),
        IN_ROOT(test_shape_slices_cover_the_tensor),
        cmocka_unit_test(test_shape_reads_the_shipped_models),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

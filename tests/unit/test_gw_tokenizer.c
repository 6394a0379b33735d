/* The shipped models against the vectors of their tokenizer; small vocabularies made here for the
 * rest. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "alloc.h"
#include "gguf_file.h"
#include "gguf_write.h"
#include "guard_page.h"
#include "gw_tokenizer.h"
#include "utf8.h"

#define MODELS ISLET_TEST_DIR "/models/"

static struct gw_tokenizer *of_model(const char *path)
{
    struct gguf_file *file;
    struct gw_tokenizer *t = NULL;
    struct err e = {0};
    if (gguf_file_open(path, &file, &e) != ERR_OK || gw_tokenizer_new(file, &t, &e) != ERR_OK)
        fail_msg("%s", e.text);
    gguf_file_close(file);
    return t;
}

static void encode(const struct gw_tokenizer *t, const char *text, size_t n, bool special,
                   struct gw_tokenizer_ids *ret)
{
    struct err e = {0};
    ret->n = 0;
    if (gw_tokenizer_encode(t, text, n, special, false, ret, &e) != ERR_OK)
        fail_msg("%s", e.text);
}

/* The pieces of the ids, joined, must be the text. */
static void assert_round_trip(const struct gw_tokenizer *t, const char *text, size_t n)
{
    struct gw_tokenizer_ids ids = {0};
    size_t at = 0, size;
    const char *piece;
    encode(t, text, n, true, &ids);
    for (size_t i = 0; i < ids.n; i++) {
        assert_true(gw_tokenizer_piece(t, ids.ids[i], true, &piece, &size));
        assert_true(size <= n - at);
        assert_memory_equal(piece, text + at, size);
        at += size;
    }
    assert_int_equal(at, n);
    gw_tokenizer_ids_done(&ids);
}

static void check_vectors(const char *model)
{
    struct gw_tokenizer *t = of_model(model);
    json_t *all = json_load_file(MODELS "tokenizer_vectors.json", JSON_ALLOW_NUL, NULL), *one;
    struct gw_tokenizer_ids ids = {0};
    size_t i;
    assert_int_equal(json_array_size(all), 82);
    json_array_foreach(all, i, one)
    {
        const json_t *text = json_object_get(one, "text"), *want = json_object_get(one, "tokens");
        size_t n = json_string_length(text);
        char *copy = (char *)guard_page_copy(json_string_value(text), n);
        encode(t, copy, n, true, &ids);
        assert_int_equal(ids.n, json_array_size(want));
        for (size_t k = 0; k < ids.n; k++)
            assert_int_equal(ids.ids[k], json_integer_value(json_array_get(want, k)));
        assert_round_trip(t, copy, n);
        guard_page_free((uint8_t *)copy, n);
    }
    gw_tokenizer_ids_done(&ids);
    json_decref(all);
    gw_tokenizer_free(t);
}

static void test_gw_tokenizer_vectors_are_exact_for_both_models(void **state)
{
    (void)state;
    check_vectors(MODELS "tinymoe-q8_0.gguf");
    check_vectors(MODELS "tinymoe-q4_k_m.gguf");
}

static void test_gw_tokenizer_any_bytes_come_back(void **state)
{
    (void)state;
    struct gw_tokenizer *t = of_model(MODELS "tinymoe-q8_0.gguf");
    uint32_t seed = 12345;
    char text[300];
    for (int round = 0; round < 300; round++) {
        for (size_t i = 0; i < sizeof text; i++) {
            seed = seed * 1664525u + 1013904223u;
            text[i] =
                round % 2 ? (char)(seed >> 24) : " \n\ta<|im_start|>\xC3\xA9'7"[(seed >> 24) % 21];
        }
        assert_round_trip(t, text, (size_t)round);
    }
    gw_tokenizer_free(t);
}

static void test_gw_tokenizer_a_mebibyte_of_one_character_comes_back(void **state)
{
    (void)state;
    struct gw_tokenizer *t = of_model(MODELS "tinymoe-q8_0.gguf");
    size_t n = 1 << 20;
    char *text = malloc(n);
    assert_non_null(text);
    for (const char *c = "a \n<\xFF'7"; *c; c++) {
        memset(text, *c, n);
        assert_round_trip(t, text, n);
    }
    free(text);
    gw_tokenizer_free(t);
}

static void test_gw_tokenizer_special_tokens_are_parsed_or_plain(void **state)
{
    (void)state;
    struct gw_tokenizer *t = of_model(MODELS "tinymoe-q8_0.gguf");
    struct gw_tokenizer_ids ids = {0};
    const char *piece;
    size_t size;
    uint32_t id;
    encode(t, "<|im_start|>", 12, true, &ids);
    assert_int_equal(ids.n, 1);
    assert_int_equal(ids.ids[0], 4094);
    encode(t, "<|im_start|>", 12, false, &ids);
    assert_true(ids.n > 1);
    assert_true(gw_tokenizer_piece(t, 4094, false, &piece, &size));
    assert_int_equal(size, 0);
    assert_true(gw_tokenizer_piece(t, 4094, true, &piece, &size));
    assert_int_equal(size, 12);
    assert_false(gw_tokenizer_piece(t, 4096, true, &piece, &size));
    assert_true(gw_tokenizer_find(t, "<|im_end|>", 10, &id));
    assert_int_equal(id, 4095);
    gw_tokenizer_ids_done(&ids);
    gw_tokenizer_free(t);
}

static void test_gw_tokenizer_ends_and_begin_are_the_models(void **state)
{
    (void)state;
    struct gw_tokenizer *t = of_model(MODELS "tinymoe-q8_0.gguf");
    struct gw_tokenizer_ids ids = {0};
    const uint32_t *ends;
    uint32_t id;
    assert_int_equal(gw_tokenizer_end_ids(t, &ends), 2);
    assert_int_equal(ends[0], 4093);
    assert_int_equal(ends[1], 4095);
    assert_true(gw_tokenizer_bos(t, &id));
    assert_int_equal(id, 4093);
    assert_true(gw_tokenizer_eos(t, &id));
    assert_int_equal(id, 4095);
    assert_false(gw_tokenizer_adds_bos(t));
    assert_int_equal(gw_tokenizer_n_vocab(t), 4096);
    assert_int_equal(gw_tokenizer_encode(t, "", 0, true, true, &ids, NULL), ERR_OK);
    assert_int_equal(ids.n, 1);
    assert_int_equal(ids.ids[0], 4093);
    gw_tokenizer_ids_done(&ids);
    gw_tokenizer_free(t);
}

/* ---- small vocabularies ---- */

enum {
    N_SMALL = 262
};

struct small {
    const char *model, *pre;
    bool no_tokens, drop_byte;
    const char *merge;
    int32_t last_type;
};

/* 256 bytes, "ab", "abc", three special tokens of which one begins another, and "<think>". */
static enum err_code small_new(const struct small *s, struct gw_tokenizer **ret, struct err *e)
{
    static char bytes[256][4];
    const char *texts[N_SMALL];
    int32_t types[N_SMALL];
    uint32_t other = 256;
    struct gguf_write *w = gguf_write_new();
    gguf_write_text(w, "general.architecture", "qwen3moe");
    for (unsigned b = 0; b < 256; b++) {
        bool itself = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        bytes[b][utf8_encode(itself ? b : other++, (uint8_t *)bytes[b])] = '\0';
        texts[b] = bytes[b];
        types[b] = 1;
    }
    if (s->drop_byte)
        texts[7] = "zz";
    static const char *const more[] = {"ab", "abc", "<u>", "<u>v", "<c>", "<think>"};
    static const int32_t more_types[] = {1, 1, 4, 3, 3, 3};
    for (size_t i = 0; i < 6; i++) {
        texts[256 + i] = more[i];
        types[256 + i] = more_types[i];
    }
    if (s->last_type)
        types[N_SMALL - 1] = s->last_type;
    if (s->model)
        gguf_write_text(w, "tokenizer.ggml.model", s->model);
    if (s->pre)
        gguf_write_text(w, "tokenizer.ggml.pre", s->pre);
    if (!s->no_tokens)
        gguf_write_texts(w, "tokenizer.ggml.tokens", texts, N_SMALL);
    gguf_write_i32s(w, "tokenizer.ggml.token_type", types, N_SMALL);
    gguf_write_texts(w, "tokenizer.ggml.merges",
                     (const char *const[]){s->merge ? s->merge : "a b", "ab c"}, 2);
    size_t n, n_header;
    uint8_t *data = gguf_write_bytes(w, &n, &n_header);
    struct gguf *keys;
    uint64_t need;
    assert_int_equal(gguf_parse(data, n, n, &keys, &need, e), ERR_OK);
    struct gguf_file file = {.headers = &keys};
    enum err_code code = gw_tokenizer_new(&file, ret, e);
    gguf_free(keys);
    alloc_free(data);
    gguf_write_free(w);
    return code;
}

static void assert_ids(const struct gw_tokenizer *t, const char *text, bool special,
                       const uint32_t *want, size_t n)
{
    struct gw_tokenizer_ids ids = {0};
    encode(t, text, strlen(text), special, &ids);
    assert_int_equal(ids.n, n);
    assert_memory_equal(ids.ids, want, n * sizeof *want);
    gw_tokenizer_ids_done(&ids);
}

static void test_gw_tokenizer_longest_special_token_wins(void **state)
{
    (void)state;
    struct gw_tokenizer *t;
    const struct small s = {.model = "gpt2", .pre = "qwen2"};
    const char *piece;
    size_t size;
    assert_int_equal(small_new(&s, &t, NULL), ERR_OK);
    assert_ids(t, "abcabb", true, (const uint32_t[]){257, 256, 'b'}, 3);
    assert_ids(t, "<u>v<u>w<c>", true, (const uint32_t[]){259, 258, 'w', 260}, 4);
    /* user-defined tokens are found either way */
    assert_ids(t, "<u>v<c>", false, (const uint32_t[]){258, 'v', '<', 'c', '>'}, 5);
    assert_true(gw_tokenizer_piece(t, 261, false, &piece, &size));
    assert_int_equal(size, 7); /* a thinking marker is text, though it is a control token */
    assert_true(gw_tokenizer_piece(t, 260, false, &piece, &size));
    assert_int_equal(size, 0);
    gw_tokenizer_free(t);
}

static void assert_refused(const struct small *s, enum err_code want, const char *part)
{
    struct gw_tokenizer *t;
    struct err e = {0};
    uint64_t before = alloc_live_blocks();
    assert_int_equal(small_new(s, &t, &e), want);
    if (!strstr(e.text, part))
        fail_msg("\"%s\" does not say \"%s\"", e.text, part);
    assert_int_equal(alloc_live_blocks(), before);
}

static void test_gw_tokenizer_what_it_cannot_do_is_named(void **state)
{
    (void)state;
    assert_refused(&(struct small){0}, ERR_UNSUPPORTED, "no tokenizer");
    assert_refused(&(struct small){.model = "llama", .pre = "qwen2"}, ERR_UNSUPPORTED, "\"llama\"");
    assert_refused(&(struct small){.model = "gpt2", .pre = "gpt-4o"}, ERR_UNSUPPORTED,
                   "\"gpt-4o\"");
    assert_refused(&(struct small){.model = "gpt2"}, ERR_UNSUPPORTED, "pre-tokenizer");
    assert_refused(&(struct small){.model = "gpt2", .pre = "qwen2", .no_tokens = true}, ERR_FORMAT,
                   "tokens");
    assert_refused(&(struct small){.model = "gpt2", .pre = "qwen2", .drop_byte = true}, ERR_FORMAT,
                   "byte 0x07");
    assert_refused(&(struct small){.model = "gpt2", .pre = "qwen2", .merge = "ab"}, ERR_FORMAT,
                   "merges[0]");
    assert_refused(&(struct small){.model = "gpt2", .pre = "qwen2", .merge = "a d"}, ERR_FORMAT,
                   "merges[0]");
    assert_refused(&(struct small){.model = "gpt2", .pre = "qwen2", .last_type = 9}, ERR_FORMAT,
                   "token_type[261]");
}

static void test_gw_tokenizer_no_memory_leaks_nothing(void **state)
{
    (void)state;
    struct gw_tokenizer *t = of_model(MODELS "tinymoe-q8_0.gguf");
    uint64_t before = alloc_live_blocks();
    bool done = false;
    for (uint64_t k = 1; !done; k++) {
        struct gw_tokenizer_ids ids = {0};
        alloc_fail_at(k, 0);
        enum err_code code =
            gw_tokenizer_encode(t, "Hello <|im_end|> world", 22, true, true, &ids, NULL);
        alloc_fail_at(0, 0);
        assert_true(code == ERR_OK || ids.n == 0);
        done = code == ERR_OK && k > 12;
        gw_tokenizer_ids_done(&ids);
        assert_int_equal(alloc_live_blocks(), before);
    }
    gw_tokenizer_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_tokenizer_vectors_are_exact_for_both_models),
        cmocka_unit_test(test_gw_tokenizer_any_bytes_come_back),
        cmocka_unit_test(test_gw_tokenizer_a_mebibyte_of_one_character_comes_back),
        cmocka_unit_test(test_gw_tokenizer_special_tokens_are_parsed_or_plain),
        cmocka_unit_test(test_gw_tokenizer_ends_and_begin_are_the_models),
        cmocka_unit_test(test_gw_tokenizer_longest_special_token_wins),
        cmocka_unit_test(test_gw_tokenizer_what_it_cannot_do_is_named),
        cmocka_unit_test(test_gw_tokenizer_no_memory_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "gguf.h"
#include "gguf_write.h"
#include "guard_page.h"

/* Parses the first n of `size` bytes next to an inaccessible page. */
static enum err_code parse(const uint8_t *bytes, size_t n, uint64_t size, struct gguf **ret,
                           uint64_t *ret_need, struct err *e)
{
    uint8_t *copy = guard_page_copy(bytes, n);
    *ret = NULL;
    enum err_code rc = gguf_parse(copy, n, size, ret, ret_need, e);
    guard_page_free(copy, n);
    return rc;
}

/* What a writer holds must be refused with a line that has `says` in it. Takes w. */
static void refuse(struct gguf_write *w, const char *says)
{
    size_t n;
    uint64_t need, live = alloc_live_blocks();
    uint8_t *bytes = gguf_write_bytes(w, &n, NULL);
    struct gguf *g = NULL;
    struct err e = {.code = ERR_OK};
    assert_int_equal(parse(bytes, n, n, &g, &need, &e), ERR_FORMAT);
    assert_null(g);
    assert_int_equal(need, 0);
    if (strstr(e.text, says) == NULL)
        fail_msg("got '%s', wanted '%s'", e.text, says);
    alloc_free(bytes);
    assert_int_equal(alloc_live_blocks(), live);
    gguf_write_free(w);
}

static struct gguf_write *sample(void)
{
    static const char *const texts[] = {"a", "", "xyz"};
    static const int32_t numbers[] = {-1, 0, 7};
    static const float reals[] = {0.5f, -2};
    struct gguf_write *w = gguf_write_new();
    gguf_write_text(w, "general.architecture", "qwen3moe");
    gguf_write_u32(w, "u32", 7);
    gguf_write_i32(w, "i32", -7);
    gguf_write_u64(w, "u64", UINT64_MAX);
    gguf_write_u16(w, "u16", 65535);
    gguf_write_f32(w, "f32", 0.5f);
    gguf_write_bool(w, "yes", true);
    gguf_write_texts(w, "texts", texts, 3);
    gguf_write_i32s(w, "numbers", numbers, 3);
    gguf_write_f32s(w, "reals", reals, 2);
    gguf_write_texts(w, "none", texts, 0);
    gguf_write_tensor(w, "b.weight", GGUF_F32, 2, (const uint64_t[]){4, 3}, NULL, 48);
    gguf_write_tensor(w, "a.weight", GGUF_Q8_0, 3, (const uint64_t[]){64, 2, 5}, NULL, 680);
    return w;
}

static void test_gguf_keys_and_tensors_come_back(void **state)
{
    (void)state;
    for (uint32_t version = 2; version <= 3; version++) {
        struct gguf_write *w = sample();
        size_t n, n_header;
        uint64_t need, u;
        struct gguf *g;
        struct gguf_text text;
        struct err e = {.code = ERR_OK};
        gguf_write_version(w, version);
        uint8_t *bytes = gguf_write_bytes(w, &n, &n_header);
        if (parse(bytes, n_header, n, &g, &need, &e) != ERR_OK)
            fail_msg("%s", e.text);
        assert_int_equal(gguf_header_bytes(g), n_header);
        assert_int_equal(gguf_n_keys(g), 11);
        assert_memory_equal(gguf_key_at(g, 1).data, "u32", 3);
        assert_true(gguf_text(g, "general.architecture", &text));
        assert_int_equal(text.size, 8);
        assert_true(gguf_u64(g, "u64", &u) && u == UINT64_MAX);
        const struct gguf_tensor *t = gguf_tensor_find(g, "a.weight");
        assert_non_null(t);
        assert_int_equal(t->bytes, 64 / 32 * 34 * 10);
        assert_int_equal(t->offset, (n_header + 31) / 32 * 32 + 64);
        assert_int_equal(t->dims[2] * 10 + t->dims[3], 51);
        assert_ptr_equal(t, gguf_tensor_at(g, 1));
        assert_null(gguf_tensor_find(g, "a.weigh"));
        assert_null(gguf_tensor_at(g, 2));
        gguf_free(g);
        alloc_free(bytes);
        gguf_write_free(w);
    }
}

static void test_gguf_values_convert_only_without_loss(void **state)
{
    (void)state;
    struct gguf_write *w = sample();
    size_t n;
    uint64_t need, u = 0;
    int64_t i = 0;
    double d = 0;
    bool b = false;
    struct gguf *g;
    struct gguf_text text;
    uint8_t *bytes = gguf_write_bytes(w, &n, NULL);
    assert_int_equal(parse(bytes, n, n, &g, &need, NULL), ERR_OK);
    assert_true(gguf_u64(g, "u16", &u) && u == 65535);
    assert_false(gguf_u64(g, "i32", &u));
    assert_false(gguf_u64(g, "f32", &u));
    assert_false(gguf_u64(g, "yes", &u));
    assert_false(gguf_u64(g, "missing", &u));
    assert_true(gguf_f64(g, "f32", &d) && d == 0.5);
    assert_true(gguf_f64(g, "i32", &d) && d == -7);
    assert_false(gguf_f64(g, "u64", &d));
    assert_false(gguf_f64(g, "yes", &d));
    assert_true(gguf_bool(g, "yes", &b) && b);
    assert_false(gguf_bool(g, "u32", &b));
    assert_false(gguf_text(g, "u32", &text));
    const struct gguf_array *texts = gguf_array_get(g, "texts");
    const struct gguf_array *numbers = gguf_array_get(g, "numbers");
    assert_true(gguf_array_text_at(texts, 2, &text) && text.size == 3);
    assert_memory_equal(text.data, "xyz", 3);
    assert_true(gguf_array_text_at(texts, 1, &text) && text.size == 0);
    assert_false(gguf_array_text_at(texts, 3, &text));
    assert_false(gguf_array_text_at(numbers, 0, &text));
    assert_true(gguf_array_i64_at(numbers, 0, &i) && i == -1);
    assert_false(gguf_array_i64_at(numbers, 3, &i));
    assert_false(gguf_array_i64_at(texts, 0, &i));
    assert_true(gguf_array_f64_at(gguf_array_get(g, "reals"), 1, &d) && d == -2);
    assert_int_equal(gguf_array_count(gguf_array_get(g, "none")), 0);
    assert_null(gguf_array_get(g, "u32"));
    gguf_free(g);
    alloc_free(bytes);
    gguf_write_free(w);
}

static void test_gguf_header_cut_at_every_position(void **state)
{
    (void)state;
    struct gguf_write *w = sample();
    size_t n, n_header;
    uint8_t *bytes = gguf_write_bytes(w, &n, &n_header);
    for (size_t cut = 0; cut < n; cut++) {
        struct gguf *g;
        uint64_t need;
        struct err e = {.code = ERR_OK};
        /* The file really ends there. */
        assert_int_equal(parse(bytes, cut, cut, &g, &need, &e), ERR_FORMAT);
        assert_true(e.text[0] != '\0' && need == 0);
        if (cut >= n_header)
            continue;
        /* Only so much of it was read: how much more is told, and it is never too much. */
        e.code = ERR_OK;
        assert_int_equal(parse(bytes, cut, n, &g, &need, &e), ERR_LIMIT);
        assert_true(need > cut && need <= n_header);
    }
    alloc_free(bytes);
    gguf_write_free(w);
}

static void test_gguf_every_byte_changed_never_crashes(void **state)
{
    (void)state;
    static const uint8_t changes[] = {0x01, 0x80, 0xFF, 0x20};
    struct gguf_write *w = sample();
    size_t n, n_header, accepted = 0;
    uint64_t live;
    uint8_t *bytes = gguf_write_bytes(w, &n, &n_header);
    live = alloc_live_blocks();
    for (size_t at = 0; at < n_header; at++)
        for (size_t i = 0; i < sizeof changes; i++) {
            struct gguf *g;
            uint64_t need;
            struct err e = {.code = ERR_OK};
            bytes[at] ^= changes[i];
            if (parse(bytes, n, n, &g, &need, &e) == ERR_OK)
                accepted++;
            else
                assert_true(e.text[0] != '\0');
            gguf_free(g);
            bytes[at] ^= changes[i];
        }
    assert_int_equal(alloc_live_blocks(), live);
    assert_true(accepted > 0 && accepted < n_header * sizeof changes);
    alloc_free(bytes);
    gguf_write_free(w);
}

/* The header of a shipped model, in a file of its true size: one line for every cut and every byte
 * changed. */
static void test_gguf_real_header_cut_and_changed_gives_one_line(void **state)
{
    (void)state;
    enum {
        HEADER = 7306,
        FILE_SIZE = 261792
    };
    static uint8_t bytes[HEADER];
    FILE *file = fopen(ISLET_TEST_DIR "/models/random/qwen3moe-q8_0.gguf", "re");
    assert_non_null(file);
    assert_int_equal(fread(bytes, 1, HEADER, file), HEADER);
    fclose(file);
    for (size_t at = 0; at <= HEADER; at++) {
        struct gguf *g;
        uint64_t need;
        struct err e = {.code = ERR_OK};
        enum err_code rc = parse(bytes, at, FILE_SIZE, &g, &need, &e);
        assert_int_equal(rc, at < HEADER ? ERR_LIMIT : ERR_OK);
        assert_true(at == HEADER || (need > at && need <= HEADER));
        gguf_free(g);
        if (at == HEADER)
            break;
        e.code = ERR_OK;
        e.text[0] = '\0';
        bytes[at] ^= 0xFF;
        rc = parse(bytes, HEADER, FILE_SIZE, &g, &need, &e);
        assert_true((rc == ERR_OK) == (e.text[0] == '\0') && strchr(e.text, '\n') == NULL);
        gguf_free(g);
        bytes[at] ^= 0xFF;
    }
}

static void test_gguf_start_of_the_file_is_checked(void **state)
{
    (void)state;
    struct gguf *g;
    uint64_t need;
    static const struct {
        const char *start;
        const char *says;
    } cases[] = {
        {"GGML\3\0\0\0", "does not begin with \"GGUF\""},
        {"GGUF\1\0\0\0", "version 1"},
        {"GGUF\4\0\0\0", "version 4"},
        {"GGUF\0\0\0\3", "big-endian"},
        {"GGUF\3\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\0\0\0\0\0\0\0\0", "tensors; the limit"},
        {"GGUF\3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x40", "keys; the limit"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint8_t bytes[24] = {0};
        struct err e = {.code = ERR_OK};
        memcpy(bytes, cases[i].start, i < 4 ? 8 : 24);
        assert_int_equal(parse(bytes, 24, 24, &g, &need, &e), ERR_FORMAT);
        if (strstr(e.text, cases[i].says) == NULL)
            fail_msg("%s", e.text);
    }
}

static void test_gguf_hostile_keys_are_refused(void **state)
{
    (void)state;
    struct gguf_write *w = gguf_write_new();
    gguf_write_u32(w, "k", 1);
    gguf_write_u32(w, "k", 1);
    refuse(w, "key k: occurs twice");
    w = gguf_write_new();
    gguf_write_raw(w, "k", 13, "", 0);
    refuse(w, "key k: value of unknown kind 13");
    w = gguf_write_new();
    gguf_write_raw(w, "k", GGUF_KIND_BOOL, "\2", 1);
    refuse(w, "key k: a bool of 2");
    w = gguf_write_new();
    gguf_write_u32(w, "", 1);
    refuse(w, "key 1 of 1: its name is empty");
    w = gguf_write_new();
    gguf_write_raw(w, "k", GGUF_KIND_STRING, "\xff\xff\xff\xff\xff\xff\xff\xff", 8);
    refuse(w, "key k: needs 18446744073709551615 bytes");
    w = gguf_write_new();
    gguf_write_raw(w, "k", GGUF_KIND_ARRAY, "\4\0\0\0\0\0\0\0\0\0\0\x40", 12);
    refuse(w, "key k: array of 4611686018427387904 elements");
    w = gguf_write_new();
    gguf_write_raw(w, "k", GGUF_KIND_ARRAY, "\x08\0\0\0\xff\xff\xff\0\0\0\0\0", 12);
    refuse(w, "key k: array of 16777215 elements");
    w = gguf_write_new();
    gguf_write_raw(w, "k", GGUF_KIND_ARRAY, "\x09\0\0\0\1\0\0\0\0\0\0\0", 12);
    refuse(w, "key k: an array of arrays");
    w = gguf_write_new();
    gguf_write_raw(w, "k", GGUF_KIND_ARRAY, "\x63\0\0\0\1\0\0\0\0\0\0\0", 12);
    refuse(w, "key k: array of unknown kind 99");
    for (uint32_t alignment = 0; alignment <= 131072; alignment = alignment * 2 + 3) {
        w = gguf_write_new();
        gguf_write_u32(w, "general.alignment", alignment);
        refuse(w, "not a power of two up to 65536");
    }
}

/* One tensor of 4-byte floats. */
static void refuse_tensor(uint32_t type, uint32_t n_dims, const uint64_t *dims, uint64_t offset,
                          const char *says)
{
    struct gguf_write *w = gguf_write_new();
    gguf_write_tensor_at(w, "t", type, n_dims, dims, NULL, 256, offset);
    refuse(w, says);
}

static void test_gguf_hostile_tensors_are_refused(void **state)
{
    (void)state;
    const uint64_t huge = UINT64_C(1) << 40;
    refuse_tensor(GGUF_F32, 0, NULL, 0, "tensor t: 0 dimensions; 1 to 4");
    refuse_tensor(GGUF_F32, 5, (const uint64_t[]){1, 1, 1, 1, 1}, 0, "tensor t: 5 dimensions");
    refuse_tensor(GGUF_F32, 2, (const uint64_t[]){4, 0}, 0, "dimension 1 is 0");
    refuse_tensor(GGUF_F32, 2, (const uint64_t[]){huge, huge}, 0, "overflow");
    refuse_tensor(GGUF_F64, 1, (const uint64_t[]){INT64_MAX}, 0, "overflow");
    refuse_tensor(GGUF_F32, 1, (const uint64_t[]){64}, 1, "not a multiple of the alignment 32");
    refuse_tensor(GGUF_F32, 1, (const uint64_t[]){65}, 0, "pass the end of the data (256 bytes)");
    refuse_tensor(GGUF_F32, 1, (const uint64_t[]){64}, 32, "pass the end of the data");
    refuse_tensor(GGUF_F32, 1, (const uint64_t[]){64}, UINT64_MAX - 31, "pass the end of the data");
    refuse_tensor(4, 1, (const uint64_t[]){64}, 0, "type 4 is not one");
    refuse_tensor(GGUF_Q4_K, 1, (const uint64_t[]){64}, 0,
                  "64 inputs, not a multiple of 256 as q4_K");
    struct gguf_write *w = gguf_write_new();
    gguf_write_tensor(w, "a", GGUF_F32, 1, (const uint64_t[]){64}, NULL, 256);
    gguf_write_tensor_at(w, "b", GGUF_F32, 1, (const uint64_t[]){64}, NULL, 256, 224);
    refuse(w, "tensor b: overlaps a");
    w = gguf_write_new();
    gguf_write_tensor(w, "a", GGUF_F32, 1, (const uint64_t[]){64}, NULL, 256);
    gguf_write_tensor(w, "a", GGUF_F32, 1, (const uint64_t[]){64}, NULL, 256);
    refuse(w, "tensor a: occurs twice");
}

static void test_gguf_alignment_of_the_file_is_kept(void **state)
{
    (void)state;
    struct gguf_write *w = gguf_write_new();
    size_t n;
    uint64_t need;
    struct gguf *g;
    gguf_write_alignment(w, 4096);
    gguf_write_tensor(w, "a", GGUF_F32, 1, (const uint64_t[]){1}, NULL, 4);
    gguf_write_tensor(w, "b", GGUF_F32, 1, (const uint64_t[]){1}, NULL, 4);
    uint8_t *bytes = gguf_write_bytes(w, &n, NULL);
    assert_int_equal(parse(bytes, n, n, &g, &need, NULL), ERR_OK);
    assert_int_equal(gguf_tensor_find(g, "b")->offset, 8192);
    gguf_free(g);
    alloc_free(bytes);
    gguf_write_free(w);
}

static void test_gguf_every_failed_allocation_is_nomem_without_leak(void **state)
{
    (void)state;
    struct gguf_write *w = sample();
    size_t n;
    uint64_t need;
    struct gguf *g = NULL;
    uint8_t *bytes = gguf_write_bytes(w, &n, NULL);
    uint64_t live = alloc_live_blocks();
    for (uint64_t nth = 1; g == NULL; nth++) {
        alloc_fail_at(nth, 0);
        enum err_code rc = gguf_parse(bytes, n, n, &g, &need, NULL);
        alloc_fail_at(0, 0);
        assert_int_equal(rc, g == NULL ? ERR_NOMEM : ERR_OK);
        if (g == NULL)
            assert_int_equal(alloc_live_blocks(), live);
    }
    gguf_free(g);
    alloc_free(bytes);
    gguf_write_free(w);
}

static void test_gguf_type_sizes_are_the_formats(void **state)
{
    (void)state;
    static const struct {
        uint32_t type, block, bytes;
        const char *name;
    } rows[] = {
        {0, 1, 4, "f32"},         {1, 1, 2, "f16"},         {2, 32, 18, "q4_0"},
        {3, 32, 20, "q4_1"},      {6, 32, 22, "q5_0"},      {7, 32, 24, "q5_1"},
        {8, 32, 34, "q8_0"},      {10, 256, 84, "q2_K"},    {11, 256, 110, "q3_K"},
        {12, 256, 144, "q4_K"},   {13, 256, 176, "q5_K"},   {14, 256, 210, "q6_K"},
        {16, 256, 66, "iq2_xxs"}, {17, 256, 74, "iq2_xs"},  {18, 256, 98, "iq3_xxs"},
        {19, 256, 50, "iq1_s"},   {20, 32, 18, "iq4_nl"},   {21, 256, 110, "iq3_s"},
        {22, 256, 82, "iq2_s"},   {23, 256, 136, "iq4_xs"}, {29, 256, 56, "iq1_m"},
        {30, 1, 2, "bf16"},       {34, 256, 54, "tq1_0"},   {35, 256, 66, "tq2_0"},
        {39, 32, 17, "mxfp4"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const char *name;
        uint32_t block, bytes;
        assert_true(gguf_type_info(rows[i].type, &name, &block, &bytes));
        assert_string_equal(name, rows[i].name);
        assert_int_equal(block, rows[i].block);
        assert_int_equal(bytes, rows[i].bytes);
    }
    const char *name;
    uint32_t block, bytes;
    for (uint32_t type = 40; type < 300; type++)
        assert_false(gguf_type_info(type, &name, &block, &bytes));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gguf_keys_and_tensors_come_back),
        cmocka_unit_test(test_gguf_values_convert_only_without_loss),
        cmocka_unit_test(test_gguf_header_cut_at_every_position),
        cmocka_unit_test(test_gguf_every_byte_changed_never_crashes),
        cmocka_unit_test(test_gguf_real_header_cut_and_changed_gives_one_line),
        cmocka_unit_test(test_gguf_start_of_the_file_is_checked),
        cmocka_unit_test(test_gguf_hostile_keys_are_refused),
        cmocka_unit_test(test_gguf_hostile_tensors_are_refused),
        cmocka_unit_test(test_gguf_alignment_of_the_file_is_kept),
        cmocka_unit_test(test_gguf_every_failed_allocation_is_nomem_without_leak),
        cmocka_unit_test(test_gguf_type_sizes_are_the_formats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

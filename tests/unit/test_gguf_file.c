#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "alloc.h"
#include "gguf_file.h"
#include "gguf_write.h"
#include "shape.h"

static char root[64];

static int make_root(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "/tmp/islet-test-XXXXXX");
    return mkdtemp(root) == NULL;
}

static int drop_root(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command) != 0 || alloc_live_blocks() != 0;
}

static const char *in_root(const char *name)
{
    static char paths[4][160];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", root, name);
    return path;
}

/* Part `no` (from 0) of `count`, one tensor of 8 floats equal to `no`, named t<no>. */
static void write_part(const char *name, unsigned no, unsigned count, const char *tensor)
{
    float data[8];
    char own[16];
    struct gguf_write *w = gguf_write_new();
    for (size_t i = 0; i < 8; i++)
        data[i] = (float)no;
    snprintf(own, sizeof own, "t%u", no);
    if (no == 0)
        gguf_write_text(w, "general.name", "whole");
    gguf_write_u16(w, "split.no", (uint16_t)no);
    gguf_write_u16(w, "split.count", (uint16_t)count);
    gguf_write_i32(w, "split.tensors.count", 3);
    gguf_write_tensor(w, tensor != NULL ? tensor : own, GGUF_F32, 1, (const uint64_t[]){8}, data,
                      32);
    gguf_write_file(w, in_root(name));
    gguf_write_free(w);
}

static void write_set(void)
{
    write_part("m-00001-of-00003.gguf", 0, 3, NULL);
    write_part("m-00002-of-00003.gguf", 1, 3, NULL);
    write_part("m-00003-of-00003.gguf", 2, 3, NULL);
}

static void refuse(const char *name, enum err_code code, const char *says)
{
    struct gguf_file *f = NULL;
    struct err e = {.code = ERR_OK};
    uint64_t live = alloc_live_blocks();
    enum err_code rc = gguf_file_open(in_root(name), &f, &e);
    if (rc != code || f != NULL || strstr(e.text, says) == NULL)
        fail_msg("%s gives %s: %s", name, err_code_name(rc), e.text);
    assert_int_equal(alloc_live_blocks(), live);
}

static void test_gguf_file_any_part_opens_the_set(void **state)
{
    (void)state;
    static const char *const names[] = {"m-00001-of-00003.gguf", "m-00002-of-00003.gguf",
                                        "m-00003-of-00003.gguf"};
    uint8_t first[16], digest[16];
    write_set();
    for (size_t i = 0; i < 3; i++) {
        struct gguf_file *f;
        struct gguf_text text;
        float data[8];
        struct err e = {.code = ERR_OK};
        if (gguf_file_open(in_root(names[i]), &f, &e) != ERR_OK)
            fail_msg("%s", e.text);
        assert_int_equal(f->n_files, 3);
        assert_int_equal(f->n_tensors, 3);
        assert_true(gguf_text(gguf_file_keys(f), "general.name", &text));
        const struct gguf_tensor *t = gguf_file_tensor(f, "t2");
        assert_ptr_equal(t, f->tensors[2]);
        assert_int_equal(t->file, 2);
        assert_int_equal(gguf_file_read(f, t->file, t->offset, data, sizeof data, &e), ERR_OK);
        assert_true(data[7] == 2.0f);
        assert_null(gguf_file_tensor(f, "t3"));
        assert_true(fcntl(f->fds[1], F_GETFD) & FD_CLOEXEC);
        assert_int_equal(gguf_file_digest(f, i == 0 ? first : digest, &e), ERR_OK);
        if (i > 0)
            assert_memory_equal(first, digest, 16);
        gguf_file_close(f);
    }
}

static void test_gguf_file_incomplete_sets_name_what_is_wrong(void **state)
{
    (void)state;
    write_set();
    assert_int_equal(rename(in_root("m-00002-of-00003.gguf"), in_root("other.gguf")), 0);
    refuse("m-00001-of-00003.gguf", ERR_IO, "part 2 of 3: model file");
    refuse("m-00003-of-00003.gguf", ERR_IO, "m-00002-of-00003.gguf: No such file");
    refuse("other.gguf", ERR_FORMAT, "its name must end in -00002-of-00003.gguf");
    write_part("m-00002-of-00003.gguf", 2, 3, NULL);
    refuse("m-00001-of-00003.gguf", ERR_FORMAT, "says that it is part 3 of 3; parts are mixed up");
    write_part("m-00002-of-00003.gguf", 1, 3, "t0");
    refuse("m-00001-of-00003.gguf", ERR_FORMAT, "tensor t0 is in parts 1 and 2");
    write_part("n-00001-of-00002.gguf", 0, 2, NULL);
    write_part("n-00002-of-00002.gguf", 1, 2, NULL);
    refuse("n-00001-of-00002.gguf", ERR_FORMAT, "split.tensors.count is 3, but the parts hold 2");
    write_part("o-00001-of-60000.gguf", 0, 60000, NULL);
    refuse("o-00001-of-60000.gguf", ERR_FORMAT, "split.count is 60000; the limit is 999");
    write_part("p-00003-of-00002.gguf", 2, 2, NULL);
    refuse("p-00003-of-00002.gguf", ERR_FORMAT, "split.no is missing or not below");
}

static void test_gguf_file_bad_places_are_one_line(void **state)
{
    (void)state;
    char longest[5000];
    struct gguf_file *f = NULL;
    struct err e = {.code = ERR_OK};
    refuse("missing.gguf", ERR_IO, "missing.gguf: No such file or directory");
    refuse(".", ERR_IO, "is a directory; name the .gguf file in it");
    assert_int_equal(mkfifo(in_root("fifo"), 0600), 0);
    refuse("fifo", ERR_IO, "is not a regular file");
    FILE *empty = fopen(in_root("empty"), "we");
    fclose(empty);
    refuse("empty", ERR_FORMAT, "does not begin with \"GGUF\"");
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    assert_int_equal(gguf_file_open(longest, &f, &e), ERR_IO);
    assert_non_null(strstr(e.text, "4999 bytes; the limit is"));
}

static void test_gguf_file_long_headers_are_read_in_steps(void **state)
{
    (void)state;
    enum {
        TEXTS = 60000
    };
    static const char *texts[TEXTS];
    struct gguf_write *w = gguf_write_new();
    struct gguf_file *f;
    struct gguf_text text;
    struct err e = {.code = ERR_OK};
    for (size_t i = 0; i < TEXTS; i++)
        texts[i] = i % 2 ? "odd" : "an even one";
    gguf_write_texts(w, "texts", texts, TEXTS);
    gguf_write_file(w, in_root("long.gguf"));
    gguf_write_free(w);
    if (gguf_file_open(in_root("long.gguf"), &f, &e) != ERR_OK)
        fail_msg("%s", e.text);
    assert_true(gguf_header_bytes(gguf_file_keys(f)) > 800000);
    assert_true(gguf_array_text_at(gguf_array_get(gguf_file_keys(f), "texts"), TEXTS - 1, &text));
    assert_int_equal(text.size, 3);
    assert_int_equal(f->n_tensors, 0);
    gguf_file_close(f);
}

static void test_gguf_file_header_over_the_limit_is_refused(void **state)
{
    (void)state;
    static const uint8_t start[] =
        "GGUF\3\0\0\0\0\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0k\x08\0\0\0"
        "\0\0\0\0\1\0\0\0";
    int fd = open(in_root("huge"), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_int_equal(write(fd, start, sizeof start - 1), sizeof start - 1);
    assert_int_equal(ftruncate(fd, INT64_C(1) << 33), 0);
    close(fd);
    refuse("huge", ERR_LIMIT, "the limit is 268435456");
}

static void test_gguf_file_that_shrank_is_said(void **state)
{
    (void)state;
    struct gguf_file *f;
    float data[8];
    write_part("one.gguf", 0, 1, NULL);
    assert_int_equal(gguf_file_open(in_root("one.gguf"), &f, NULL), ERR_OK);
    const struct gguf_tensor *t = f->tensors[0];
    struct err e = {.code = ERR_OK};
    assert_int_equal(gguf_file_read(f, 0, f->file_sizes[0] - 4, data, 8, &e), ERR_IO);
    assert_non_null(strstr(e.text, "pass its end"));
    assert_int_equal(truncate(in_root("one.gguf"), (off_t)t->offset + 8), 0);
    e.code = ERR_OK;
    assert_int_equal(gguf_file_read(f, 0, t->offset, data, sizeof data, &e), ERR_IO);
    assert_non_null(strstr(e.text, "became shorter since it was opened"));
    uint8_t digest[16];
    assert_int_equal(gguf_file_digest(f, digest, NULL), ERR_IO);
    gguf_file_close(f);
}

static void digests(const char *path, uint8_t ret_file[16], uint8_t ret_shape[16])
{
    struct gguf_file *f;
    struct model_shape s = {.n_layer = 2};
    assert_int_equal(gguf_file_open(path, &f, NULL), ERR_OK);
    assert_int_equal(gguf_file_digest(f, ret_file, NULL), ERR_OK);
    gguf_file_shape_digest(f, &s, ret_shape);
    gguf_file_close(f);
}

static void write_for_digest(const char *token, size_t flip)
{
    static uint8_t data[65536];
    struct gguf_write *w = gguf_write_new();
    memset(data, 1, sizeof data);
    if (flip < sizeof data)
        data[flip] ^= 1;
    gguf_write_texts(w, "tokenizer.ggml.tokens", &token, 1);
    gguf_write_tensor(w, "t", GGUF_I8, 1, (const uint64_t[]){sizeof data}, data, sizeof data);
    gguf_write_file(w, in_root("d.gguf"));
    gguf_write_free(w);
}

static void test_gguf_file_digests_see_what_they_should(void **state)
{
    (void)state;
    uint8_t file[16], shape[16], file2[16], shape2[16];
    write_for_digest("a", SIZE_MAX);
    digests(in_root("d.gguf"), file, shape);
    assert_int_equal(rename(in_root("d.gguf"), in_root("e.gguf")), 0);
    digests(in_root("e.gguf"), file2, shape2);
    assert_memory_equal(file, file2, 16);
    assert_memory_equal(shape, shape2, 16);
    static const size_t seen[] = {0, 4095, 65536 - 4096, 65535};
    for (size_t i = 0; i < 4; i++) {
        write_for_digest("a", seen[i]);
        digests(in_root("d.gguf"), file2, shape2);
        assert_memory_not_equal(file, file2, 16);
        assert_memory_equal(shape, shape2, 16);
    }
    write_for_digest("b", SIZE_MAX);
    digests(in_root("d.gguf"), file2, shape2);
    assert_memory_not_equal(file, file2, 16);
    assert_memory_not_equal(shape, shape2, 16);
}

static void test_gguf_file_every_failed_allocation_is_nomem_without_leak(void **state)
{
    (void)state;
    struct gguf_file *f = NULL;
    write_set();
    uint64_t live = alloc_live_blocks();
    for (uint64_t nth = 1; f == NULL; nth++) {
        struct err e = {.code = ERR_OK};
        alloc_fail_at(nth, 0);
        enum err_code rc = gguf_file_open(in_root("m-00002-of-00003.gguf"), &f, &e);
        alloc_fail_at(0, 0);
        assert_int_equal(rc, f == NULL ? ERR_NOMEM : ERR_OK);
        if (f == NULL)
            assert_int_equal(alloc_live_blocks(), live);
    }
    gguf_file_close(f);
}

#define IN_ROOT(test) cmocka_unit_test_setup_teardown(test, make_root, drop_root)

int main(void)
{
    const struct CMUnitTest tests[] = {
        IN_ROOT(test_gguf_file_any_part_opens_the_set),
        IN_ROOT(test_gguf_file_incomplete_sets_name_what_is_wrong),
        IN_ROOT(test_gguf_file_bad_places_are_one_line),
        IN_ROOT(test_gguf_file_long_headers_are_read_in_steps),
        IN_ROOT(test_gguf_file_header_over_the_limit_is_refused),
        IN_ROOT(test_gguf_file_that_shrank_is_said),
        IN_ROOT(test_gguf_file_digests_see_what_they_should),
        IN_ROOT(test_gguf_file_every_failed_allocation_is_nomem_without_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

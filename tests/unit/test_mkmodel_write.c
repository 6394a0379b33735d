#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "alloc.h"
#include "gguf_file.h"
#include "mkmodel_block.h"
#include "mkmodel_keys.h"
#include "mkmodel_router.h"
#include "mkmodel_write.h"
#include "shape.h"

static char root[64], out[128];

/* A model of some MiB, so that it has several pieces; in q8_0 blocks lie across their borders. */
static struct mkmodel_options small(void)
{
    return (struct mkmodel_options){.arch = "qwen3moe",
                                    .out = out,
                                    .layers = 3,
                                    .hidden = 512,
                                    .experts = 8,
                                    .ff = 256,
                                    .top_k = 2,
                                    .heads = 4,
                                    .head_dim = 64,
                                    .kv_heads = 2,
                                    .vocab = 1000,
                                    .context = 2048,
                                    .seed = 5,
                                    .threads = 1,
                                    .mixed = true,
                                    .format = K_Q4_K,
                                    .emb_std = 1,
                                    .res_std = 0.012,
                                    .locality = 0.3,
                                    .topics = 3,
                                    .zipf = 0.5};
}

static int make_root(void **state)
{
    (void)state;
    snprintf(root, sizeof(root), "/tmp/islet-test-XXXXXX");
    if (mkdtemp(root) == NULL)
        return 1;
    snprintf(out, sizeof(out), "%s/m.gguf", root);
    return 0;
}

static int drop_root(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", root);
    return system(command) != 0 || alloc_live_blocks() != 0;
}

static enum err_code make(const struct mkmodel_options *o, struct err *e)
{
    struct mkmodel_plan *plan = NULL;
    struct mkmodel_router *router = NULL;
    struct mkmodel_write_figures figures;
    enum err_code rc = mkmodel_plan_new(o, &plan, e);
    if (rc == ERR_OK)
        rc = mkmodel_keys_make(plan, NULL, e);
    if (rc == ERR_OK && o->set_router)
        rc = mkmodel_router_new(o, &router, e);
    if (rc == ERR_OK)
        rc = mkmodel_write_files(plan, router, false, &figures, e);
    mkmodel_router_free(router);
    mkmodel_plan_free(plan);
    return rc;
}

static uint8_t *contents(const char *path, size_t *ret_size)
{
    FILE *f = fopen(path, "rbe");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *ret_size = (size_t)ftell(f);
    rewind(f);
    uint8_t *bytes = alloc_get(ALLOC_MISC, *ret_size);
    assert_int_equal(fread(bytes, 1, *ret_size, f), *ret_size);
    fclose(f);
    return bytes;
}

static unsigned files_in_root(void)
{
    char command[128], text[16] = "";
    snprintf(command, sizeof(command), "ls %s | wc -l", root);
    FILE *f = popen(command, "re");
    assert_non_null(fgets(text, sizeof(text), f));
    pclose(f);
    return (unsigned)atoi(text);
}

static void test_mkmodel_write_threads_do_not_change_a_byte(void **state)
{
    (void)state;
    for (int set = 0; set < 2; set++) {
        struct mkmodel_options o = small();
        struct err e = {.code = ERR_OK};
        size_t n_one, n_many;
        o.set_router = set == 1;
        assert_int_equal(make(&o, &e), ERR_OK);
        uint8_t *one = contents(out, &n_one);
        o.threads = 7;
        assert_int_equal(make(&o, &e), ERR_OK);
        uint8_t *many = contents(out, &n_many);
        assert_int_equal(n_one, n_many);
        assert_memory_equal(one, many, n_one);
        alloc_free(many);
        o.seed++;
        assert_int_equal(make(&o, &e), ERR_OK);
        many = contents(out, &n_many);
        assert_memory_not_equal(one, many, n_one);
        alloc_free(one);
        alloc_free(many);
    }
}

static void check_pieces(const struct mkmodel_options *o)
{
    struct err e = {.code = ERR_OK};
    struct mkmodel_plan *plan = NULL;
    struct mkmodel_router *router = NULL;
    assert_int_equal(mkmodel_plan_new(o, &plan, &e), ERR_OK);
    assert_int_equal(mkmodel_keys_make(plan, NULL, &e), ERR_OK);
    if (o->set_router)
        assert_int_equal(mkmodel_router_new(o, &router, &e), ERR_OK);
    const size_t n = (size_t)mkmodel_plan_bytes(plan);
    uint8_t *whole = alloc_get(ALLOC_MISC, n), *pieces = alloc_get(ALLOC_MISC, n + 5000);
    mkmodel_write_range(plan, router, 0, 0, whole, n);
    for (size_t at = 0, size = 1; at < n; at += size, size = (size + 1013) % 4999 + 3)
        mkmodel_write_range(plan, router, 0, at, pieces + at, size);
    assert_memory_equal(whole, pieces, n);
    alloc_free(whole);
    alloc_free(pieces);
    mkmodel_router_free(router);
    mkmodel_plan_free(plan);
}

static void test_mkmodel_write_range_is_the_same_in_pieces_of_any_size(void **state)
{
    (void)state;
    struct mkmodel_options o = small();
    o.layers = 1;
    check_pieces(&o);
    o.set_router = true;
    check_pieces(&o);
    o.mixed = false;
    o.format = K_F16;
    check_pieces(&o);
    o.set_router = false;
    check_pieces(&o);
}

static void check_tensors(const char *path, unsigned n_files)
{
    struct gguf_file *f = NULL;
    struct model_shape shape;
    struct shape_tensors tensors;
    struct err e = {.code = ERR_OK};
    if (gguf_file_open(path, &f, &e) != ERR_OK || shape_from_file(f, &shape, &e) != ERR_OK ||
        shape_bind(f, &shape, &tensors, &e) != ERR_OK)
        fail_msg("%s", e.text);
    assert_int_equal(f->n_files, n_files);
    for (size_t i = 0; i < f->n_tensors; i++) {
        const struct gguf_tensor *t = f->tensors[i];
        uint8_t *data = alloc_get(ALLOC_MISC, t->bytes);
        const enum k_format format = (enum k_format)t->type;
        const uint64_t n =
            t->bytes / k_format_block_bytes(format) * k_format_block_elements(format);
        assert_int_equal(gguf_file_read(f, t->file, t->offset, data, t->bytes, &e), ERR_OK);
        if (k_find_invalid(format, data, n) != -1)
            fail_msg("%.*s is not valid", (int)t->name.size, t->name.data);
        alloc_free(data);
    }
    shape_tensors_done(&tensors);
    gguf_file_close(f);
}

static void test_mkmodel_write_every_format_is_valid(void **state)
{
    (void)state;
    const enum k_format formats[] = {K_F32, K_F16, K_BF16, K_Q4_0, K_Q8_0, K_Q4_K, K_Q5_K, K_Q6_K};
    for (size_t i = 0; i < 2 * sizeof(formats) / sizeof(formats[0]); i++) {
        struct mkmodel_options o = small();
        struct err e = {.code = ERR_OK};
        o.layers = 1;
        o.mixed = false;
        o.format = formats[i / 2];
        o.set_router = i % 2 == 1;
        o.tied = i % 3 == 0;
        assert_int_equal(make(&o, &e), ERR_OK);
        check_tensors(out, 1);
    }
}

static void test_mkmodel_write_split_parts_hold_the_same_weights(void **state)
{
    (void)state;
    struct mkmodel_options o = small();
    struct err e = {.code = ERR_OK};
    struct gguf_file *whole = NULL, *parts = NULL;
    char path[160];
    assert_int_equal(make(&o, &e), ERR_OK);
    o.split = 4;
    o.threads = 3;
    assert_int_equal(make(&o, &e), ERR_OK);
    snprintf(path, sizeof(path), "%s/m-00002-of-00004.gguf", root);
    check_tensors(path, 4);
    assert_int_equal(gguf_file_open(out, &whole, &e), ERR_OK);
    assert_int_equal(gguf_file_open(path, &parts, &e), ERR_OK);
    assert_int_equal(whole->n_tensors, parts->n_tensors);
    for (size_t i = 0; i < whole->n_tensors; i++) {
        const struct gguf_tensor *a = whole->tensors[i], *b = parts->tensors[i];
        uint8_t *x = alloc_get(ALLOC_MISC, a->bytes), *y = alloc_get(ALLOC_MISC, a->bytes);
        assert_int_equal(a->bytes, b->bytes);
        assert_int_equal(gguf_file_read(whole, 0, a->offset, x, a->bytes, &e), ERR_OK);
        assert_int_equal(gguf_file_read(parts, b->file, b->offset, y, b->bytes, &e), ERR_OK);
        assert_memory_equal(x, y, a->bytes);
        alloc_free(x);
        alloc_free(y);
    }
    gguf_file_close(whole);
    gguf_file_close(parts);
    assert_int_equal(files_in_root(), 5);
}

static void test_mkmodel_write_topics_are_in_the_keys(void **state)
{
    (void)state;
    struct mkmodel_options o = small();
    struct err e = {.code = ERR_OK};
    struct gguf_file *f = NULL;
    int64_t first = -1;
    o.set_router = true;
    assert_int_equal(make(&o, &e), ERR_OK);
    assert_int_equal(gguf_file_open(out, &f, &e), ERR_OK);
    const struct gguf_array *a = gguf_array_get(gguf_file_keys(f), "islet.topics");
    assert_non_null(a);
    assert_int_equal(gguf_array_count(a), 4);
    const int64_t wanted[] = {0, 334, 667, 1000};
    for (size_t i = 0; i < 4; i++) {
        assert_true(gguf_array_i64_at(a, i, &first));
        assert_int_equal(first, wanted[i]);
    }
    gguf_file_close(f);
}

/* A limit of the process stands for a full disk. */
static void test_mkmodel_write_failure_leaves_no_file(void **state)
{
    (void)state;
    struct mkmodel_options o = small();
    struct err e = {.code = ERR_OK};
    struct rlimit before, low;
    o.split = 2;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    low = (struct rlimit){1 << 20, before.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    const enum err_code rc = make(&o, &e);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(rc, ERR_IO);
    assert_non_null(strstr(e.text, "m-00001-of-00002.gguf"));
    assert_int_equal(files_in_root(), 0);
}

/* A file is renamed to its name in the end, which would put it in the place of a device. */
static void test_mkmodel_write_what_is_no_file_is_refused_and_stays(void **state)
{
    (void)state;
    struct mkmodel_options o = small();
    struct err e = {.code = ERR_OK};
    struct stat about;
    char path[256];
    snprintf(path, sizeof(path), "%s/fifo", root);
    assert_int_equal(mkfifo(path, 0600), 0);
    o.out = path;
    assert_int_equal(make(&o, &e), ERR_ARGUMENT);
    assert_non_null(strstr(e.text, "fifo is not a regular file"));
    assert_int_equal(stat(path, &about), 0);
    assert_true(S_ISFIFO(about.st_mode));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(files_in_root(), 0);
}

static void test_mkmodel_write_missing_folder_is_named(void **state)
{
    (void)state;
    struct mkmodel_options o = small();
    struct err e = {.code = ERR_OK};
    o.out = "/nowhere/at/all.gguf";
    assert_int_equal(make(&o, &e), ERR_IO);
    assert_non_null(strstr(e.text, "/nowhere/at/all.gguf.part: No such file"));
}

static void test_mkmodel_write_signal_stops_and_leaves_no_file(void **state)
{
    (void)state;
    const struct mkmodel_options o = small();
    struct err e = {.code = ERR_OK};
    sigset_t term, before;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    sigprocmask(SIG_BLOCK, &term, &before);
    kill(getpid(), SIGTERM); /* waits until someone takes it */
    const enum err_code rc = make(&o, &e);
    const int left = sigtimedwait(&term, NULL, &(struct timespec){0});
    sigprocmask(SIG_SETMASK, &before, NULL);
    assert_int_equal(left, -1);
    assert_int_equal(rc, ERR_CANCELLED);
    assert_int_equal(files_in_root(), 0);
}

#define WITH_ROOT(test) cmocka_unit_test_setup_teardown(test, make_root, drop_root)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_ROOT(test_mkmodel_write_threads_do_not_change_a_byte),
        WITH_ROOT(test_mkmodel_write_range_is_the_same_in_pieces_of_any_size),
        WITH_ROOT(test_mkmodel_write_every_format_is_valid),
        WITH_ROOT(test_mkmodel_write_split_parts_hold_the_same_weights),
        WITH_ROOT(test_mkmodel_write_topics_are_in_the_keys),
        WITH_ROOT(test_mkmodel_write_failure_leaves_no_file),
        WITH_ROOT(test_mkmodel_write_what_is_no_file_is_refused_and_stays),
        WITH_ROOT(test_mkmodel_write_missing_folder_is_named),
        WITH_ROOT(test_mkmodel_write_signal_stops_and_leaves_no_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

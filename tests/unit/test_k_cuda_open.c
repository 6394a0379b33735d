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
#include "k_cuda_entry.h"
#include "k_cuda_fault.h"
#include "kernels.h"

#define FAKE(name) ISLET_BUILD_DIR "/tests/fake-" name ".so"

static enum err_code open_file(const char *file, struct k_cuda_fault fault, struct k_device **ret,
                               struct err *e)
{
    const struct k_cuda_options o = {.file = file, .ordinal = -1, .fault = fault};
    return k_open_cuda(&o, ret, e);
}

static void refused(const char *file, enum err_code code, const char *part)
{
    struct k_device *d = NULL;
    struct err e = {0};
    assert_int_equal(open_file(file, (struct k_cuda_fault){0}, &d, &e), code);
    assert_null(d);
    assert_int_equal(e.code, code);
    if (strstr(e.text, part) == NULL)
        fail_msg("\"%s\" does not tell of \"%s\"", e.text, part);
}

static void test_k_cuda_open_missing_file_is_named(void **state)
{
    (void)state;
    refused("/nowhere/islet-cuda.so", ERR_UNSUPPORTED, "/nowhere/islet-cuda.so: no such file");
    char path[5000];
    memset(path, 'x', sizeof path);
    path[sizeof path - 1] = 0;
    refused(path, ERR_ARGUMENT, "4999 bytes, at most 4093");
}

static void test_k_cuda_open_foreign_file_is_refused(void **state)
{
    (void)state;
    refused(FAKE("empty"), ERR_UNSUPPORTED, "it lacks islet_cuda_entry");
    char path[] = "/tmp/islet-text-XXXXXX";
    const int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, "text", 4) == 4 && close(fd) == 0);
    refused(path, ERR_UNSUPPORTED, "cannot be loaded");
    unlink(path);
}

/* Its open function would abort. */
static void test_k_cuda_open_other_build_is_refused_with_both_versions(void **state)
{
    (void)state;
    char want[64];
    snprintf(want, sizeof want, "version %d.%d.%zu, this program needs %d.%d.%zu", K_CUDA_ABI,
             K_ARITHMETIC_VERSION, sizeof(struct k_ops) + 8, K_CUDA_ABI, K_ARITHMETIC_VERSION,
             sizeof(struct k_ops));
    refused(FAKE("other"), ERR_UNSUPPORTED, want);
}

static void test_k_cuda_open_gives_a_device_that_closes(void **state)
{
    (void)state;
    struct k_device *d = NULL;
    const uint64_t blocks = alloc_live_blocks();
    assert_int_equal(open_file(FAKE("cuda"), (struct k_cuda_fault){0}, &d, NULL), ERR_OK);
    assert_string_equal(k_ops(d)->name, "stand-in");
    assert_int_equal(k_threads(d), 1);
    assert_true(alloc_live_blocks() > blocks); /* what it keeps is counted here */
    k_close(d);
    assert_int_equal(alloc_live_blocks(), blocks);
}

/* Each call of opening fails once: the code says what can be done, nothing leaks. */
static void test_k_cuda_open_each_failing_call_refuses_cleanly(void **state)
{
    (void)state;
    static const struct {
        int error;
        enum err_code code;
    } kinds[] = {{2, ERR_NOMEM}, {35, ERR_UNSUPPORTED}, {100, ERR_UNSUPPORTED}, {700, ERR_DEVICE}};
    const uint64_t blocks = alloc_live_blocks();
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        uint64_t nth = 1;
        for (;; nth++) {
            struct k_device *d = NULL;
            struct err e = {0};
            const struct k_cuda_fault fault = {.nth = nth, .error = kinds[k].error};
            if (open_file(FAKE("cuda"), fault, &d, &e) == ERR_OK) {
                k_close(d);
                break;
            }
            assert_int_equal(e.code, kinds[k].code);
            assert_null(d);
            assert_int_equal(alloc_live_blocks(), blocks);
        }
        assert_true(nth > 2);
    }
    assert_int_equal(alloc_live_blocks(), blocks);
}

static void test_k_cuda_open_no_memory_for_the_device_is_an_error(void **state)
{
    (void)state;
    struct k_device *d = NULL;
    struct err e = {0};
    alloc_fail_at(1, 0);
    assert_int_equal(open_file(FAKE("cuda"), (struct k_cuda_fault){0}, &d, &e), ERR_NOMEM);
    alloc_fail_at(0, 0);
    assert_null(d);
}

/* x + x by upload, add and download; the code of what failed first. */
static enum err_code twice(struct k_device *d, float *x)
{
    const struct k_ops *ops = k_ops(d);
    struct k_stream *s = NULL;
    struct k_buffer *b = NULL;
    struct err e = {0};
    const uint32_t one = 1;
    enum err_code code = ops->stream_new(d, &s, &e);
    if (code == ERR_OK)
        code = ops->buffer_new(d, 4096, &b, &e);
    if (code == ERR_OK) {
        const struct k_span at = {b, 0}, count = {b, 256}, faults = {b, 512};
        assert_null(ops->buffer_host(b));
        ops->upload(s, at, x, 64 * sizeof *x);
        ops->upload(s, count, &one, sizeof one);
        const struct k_rows rows = {.n_rows = count, .faults = faults, .max_rows = 1};
        (void)ops->add(&(struct k_add){rows, at, at, 64}, s);
        ops->download(s, x, at, 64 * sizeof *x);
        code = ops->wait(s);
    }
    ops->buffer_free(b);
    ops->stream_free(s);
    return code;
}

static void test_k_cuda_open_first_error_sticks_until_wait_then_work_goes_on(void **state)
{
    (void)state;
    struct k_device *d = NULL;
    assert_int_equal(open_file(FAKE("cuda"), (struct k_cuda_fault){0}, &d, NULL), ERR_OK);
    const struct k_ops *ops = k_ops(d);
    uint64_t nth = 1;
    for (;; nth++) { /* an error that the device survives */
        float x[64] = {1.0f};
        ops->inject(d, &(struct k_cuda_fault){.nth = nth, .error = 2});
        const enum err_code code = twice(d, x);
        ops->inject(d, &(struct k_cuda_fault){0});
        if (code == ERR_OK) {
            assert_true(x[0] == 2.0f);
            break;
        }
        assert_true(code == ERR_DEVICE || code == ERR_NOMEM);
        assert_false(ops->lost(d, NULL));
        float again[64] = {3.0f};
        assert_int_equal(twice(d, again), ERR_OK);
        assert_true(again[0] == 6.0f);
    }
    assert_true(nth > 6);
    k_close(d);
}

static void test_k_cuda_open_lost_device_stays_lost_and_says_why(void **state)
{
    (void)state;
    struct k_device *d = NULL;
    assert_int_equal(open_file(FAKE("cuda"), (struct k_cuda_fault){0}, &d, NULL), ERR_OK);
    const struct k_ops *ops = k_ops(d);
    float x[64] = {1.0f};
    ops->inject(d, &(struct k_cuda_fault){.nth = 5, .error = 700});
    assert_int_equal(twice(d, x), ERR_DEVICE);
    struct err why = {0};
    assert_true(ops->lost(d, &why));
    assert_int_equal(why.code, ERR_DEVICE);
    assert_non_null(strstr(why.text, "700"));
    assert_int_equal(twice(d, x), ERR_DEVICE);
    k_close(d);
}

static void test_k_cuda_open_recorded_operations_run_at_each_replay(void **state)
{
    (void)state;
    struct k_device *d = NULL;
    assert_int_equal(open_file(FAKE("cuda"), (struct k_cuda_fault){0}, &d, NULL), ERR_OK);
    const struct k_ops *ops = k_ops(d);
    struct k_stream *s = NULL;
    struct k_buffer *b = NULL;
    struct k_graph *g = NULL;
    assert_int_equal(ops->stream_new(d, &s, NULL), ERR_OK);
    assert_int_equal(ops->buffer_new(d, 4096, &b, NULL), ERR_OK);
    const struct k_span at = {b, 0}, count = {b, 256}, faults = {b, 512};
    const float x[4] = {1.0f};
    const uint32_t one = 1;
    ops->upload(s, at, x, sizeof x);
    ops->upload(s, count, &one, sizeof one);
    assert_int_equal(ops->capture_begin(s), ERR_OK);
    const struct k_rows rows = {.n_rows = count, .faults = faults, .max_rows = 1};
    assert_int_equal(ops->add(&(struct k_add){rows, at, at, 4}, s), ERR_OK);
    assert_int_equal(ops->capture_end(s, &g), ERR_OK);
    for (int i = 0; i < 3; i++)
        assert_int_equal(ops->replay(g, s), ERR_OK);
    float y[4];
    ops->download(s, y, at, sizeof y);
    assert_int_equal(ops->wait(s), ERR_OK);
    assert_true(y[0] == 8.0f);
    ops->graph_free(g);
    ops->buffer_free(b);
    ops->stream_free(s);
    k_close(d);
}

static void test_k_cuda_open_range_gives_chunks_back_when_memory_ends(void **state)
{
    (void)state;
    struct k_device *d = NULL;
    setenv("ISLET_FAKE_CUDA_MIB", "100", 1); /* three chunks and a bit */
    assert_int_equal(open_file(FAKE("cuda"), (struct k_cuda_fault){0}, &d, NULL), ERR_OK);
    unsetenv("ISLET_FAKE_CUDA_MIB");
    const struct k_ops *ops = k_ops(d);
    struct k_buffer *range = NULL;
    struct err e = {0};
    uint64_t available, total;
    assert_int_equal(ops->range_new(d, UINT64_C(5) * K_CHUNK_BYTES, &range, &e), ERR_OK);
    assert_int_equal(ops->chunks_take(range, 1, 2, &e), ERR_OK);
    assert_int_equal(ops->chunks_take(range, 2, 1, &e), ERR_ARGUMENT);
    e.code = ERR_OK;
    assert_int_equal(ops->chunks_take(range, 3, 2, &e), ERR_NOMEM);
    ops->memory(d, &available, &total);
    assert_int_equal(available, (100 - 64) << 20);
    ops->chunks_return(range, 0, 5);
    ops->memory(d, &available, &total);
    assert_int_equal(available, total);
    ops->buffer_free(range);
    k_close(d);
}

static void test_k_cuda_open_fault_is_due_at_the_nth_call(void **state)
{
    (void)state;
    struct k_cuda_fault once = {.nth = 3, .error = 2}, for_ever = {.nth = 2, .forever = true},
                        never = {0};
    for (int i = 1; i <= 5; i++) {
        assert_int_equal(k_cuda_fault_due(&once), i == 3);
        assert_int_equal(k_cuda_fault_due(&for_ever), i >= 2);
        assert_false(k_cuda_fault_due(&never));
    }
}

static void test_k_cuda_open_errors_that_end_the_context_are_known(void **state)
{
    (void)state;
    static const int survived[] = {0, 1, 2, 9, 46, 100, 209, 600, 701, 712, 900, 901},
                     ending[] = {214, 700, 702, 710, 714, 715, 716, 717, 718, 719, 999, 12345};
    for (size_t i = 0; i < sizeof survived / sizeof survived[0]; i++)
        assert_false(k_cuda_fault_is_lost(survived[i]));
    for (size_t i = 0; i < sizeof ending / sizeof ending[0]; i++)
        assert_true(k_cuda_fault_is_lost(ending[i]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_k_cuda_open_missing_file_is_named),
        cmocka_unit_test(test_k_cuda_open_foreign_file_is_refused),
        cmocka_unit_test(test_k_cuda_open_other_build_is_refused_with_both_versions),
        cmocka_unit_test(test_k_cuda_open_gives_a_device_that_closes),
        cmocka_unit_test(test_k_cuda_open_each_failing_call_refuses_cleanly),
        cmocka_unit_test(test_k_cuda_open_no_memory_for_the_device_is_an_error),
        cmocka_unit_test(test_k_cuda_open_first_error_sticks_until_wait_then_work_goes_on),
        cmocka_unit_test(test_k_cuda_open_lost_device_stays_lost_and_says_why),
        cmocka_unit_test(test_k_cuda_open_recorded_operations_run_at_each_replay),
        cmocka_unit_test(test_k_cuda_open_range_gives_chunks_back_when_memory_ends),
        cmocka_unit_test(test_k_cuda_open_fault_is_due_at_the_nth_call),
        cmocka_unit_test(test_k_cuda_open_errors_that_end_the_context_are_known),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "alloc.h"
#include "log.h"
#include "route_trace.h"

enum {
    LAYERS = 3,
    EXPERTS = 16,
    USED = 2
};

struct rig {
    char folder[64], path[96];
    uint64_t live;
};

static int start(void **state)
{
    static const char folder[] = "/tmp/test_route_trace.XXXXXX";
    struct rig *r = test_calloc(1, sizeof *r);
    memcpy(r->folder, folder, sizeof folder);
    assert_non_null(mkdtemp(r->folder));
    snprintf(r->path, sizeof r->path, "%s/trace", r->folder);
    log_setup(LOG_LEVEL_ERROR, LOG_FORMAT_TEXT);
    r->live = alloc_live_blocks();
    *state = r;
    return 0;
}

static int stop(void **state)
{
    struct rig *r = *state;
    assert_int_equal(alloc_live_blocks(), r->live);
    unlink(r->path);
    rmdir(r->folder);
    test_free(r);
    return 0;
}

static struct route_trace *begin(const char *path)
{
    static const uint64_t bytes[LAYERS] = {4096, 8192, 4096};
    const struct route_trace_shape shape = {
        .n_layer = LAYERS, .n_expert = EXPERTS, .n_used = USED, .layer_bytes = bytes};
    struct route_trace *t = NULL;
    struct err e = {.code = ERR_OK};
    assert_int_equal(route_trace_open(path, &shape, &t, &e), ERR_OK);
    return t;
}

/* A step whose figures follow from `first`. */
static void add(struct route_trace *t, uint32_t n_rows, uint32_t first)
{
    uint32_t sequence[64], position[64], ids[LAYERS][64 * USED];
    const uint32_t *layer_ids[LAYERS];
    for (uint32_t r = 0; r < n_rows; r++) {
        sequence[r] = r % 3;
        position[r] = first + r;
        for (uint32_t l = 0; l < LAYERS; l++)
            for (uint32_t k = 0; k < USED; k++)
                ids[l][r * USED + k] = (first + r + 3 * l + 7 * k) % EXPERTS;
    }
    for (uint32_t l = 0; l < LAYERS; l++)
        layer_ids[l] = ids[l];
    route_trace_step(t, n_rows, sequence, position, layer_ids);
}

static void test_route_trace_what_is_written_is_read(void **state)
{
    struct rig *r = *state;
    struct route_trace_file f;
    struct err e = {.code = ERR_OK};
    struct route_trace *t = begin(r->path);
    add(t, 64, 0);
    add(t, 1, 1000);
    add(t, 2, 5);
    route_trace_close(t);
    assert_int_equal(route_trace_read(r->path, &f, &e), ERR_OK);
    assert_int_equal(f.shape.n_layer, LAYERS);
    assert_int_equal(f.shape.n_expert, EXPERTS);
    assert_int_equal(f.shape.n_used, USED);
    assert_int_equal(f.shape.layer_bytes[1], 8192);
    assert_int_equal(f.n_steps, 3);
    assert_int_equal(f.n_rows, 67);
    assert_int_equal(f.step_first[1], 64);
    assert_int_equal(f.step_first[3], 67);
    assert_int_equal(f.position[64], 1000);
    assert_int_equal(f.sequence[66], 1);
    assert_int_equal(f.ids[(66 * LAYERS + 2) * USED + 1], (6 + 6 + 7) % EXPERTS);
    assert_int_equal(f.cut_bytes, 0);
    route_trace_file_done(&f);
}

static void test_route_trace_more_than_the_buffer_is_read(void **state)
{
    struct rig *r = *state;
    struct route_trace_file f;
    struct err e = {.code = ERR_OK};
    struct route_trace *t = begin(r->path);
    for (uint32_t s = 0; s < 3000; s++)
        add(t, 1 + s % 64, s);
    route_trace_close(t);
    assert_int_equal(route_trace_read(r->path, &f, &e), ERR_OK);
    assert_int_equal(f.n_steps, 3000);
    for (uint64_t s = 0; s < 3000; s++)
        assert_int_equal(f.position[f.step_first[s]], s);
    route_trace_file_done(&f);
}

static void test_route_trace_an_old_file_is_overwritten_and_private(void **state)
{
    struct rig *r = *state;
    struct stat about;
    struct route_trace *t = begin(r->path);
    add(t, 64, 0);
    route_trace_close(t);
    assert_int_equal(chmod(r->path, 0644), 0);
    route_trace_close(begin(r->path));
    assert_int_equal(stat(r->path, &about), 0);
    assert_int_equal(about.st_size, 24 + 8 * LAYERS);
    assert_int_equal(about.st_mode & 0777, 0600);
}

static void test_route_trace_a_full_disk_ends_the_trace_alone(void **state)
{
    struct rig *r = *state;
    struct rlimit limit, small;
    struct route_trace_file f;
    struct err e = {.code = ERR_OK};
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    small = limit;
    small.rlim_cur = 300000;
    struct route_trace *t = begin(r->path);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    for (uint32_t s = 0; s < 3000; s++)
        add(t, 64, s);
    route_trace_close(t);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    assert_int_equal(route_trace_read(r->path, &f, &e), ERR_OK);
    assert_true(f.n_steps > 100 && f.n_steps < 3000);
    assert_true(f.cut_bytes > 0);
    route_trace_file_done(&f);
}

static void test_route_trace_what_is_no_file_is_refused(void **state)
{
    struct rig *r = *state;
    const uint64_t bytes = 4096;
    const struct route_trace_shape shape = {
        .n_layer = 1, .n_expert = 2, .n_used = 1, .layer_bytes = &bytes};
    struct route_trace *t = NULL;
    struct err e = {.code = ERR_OK};
    assert_int_equal(route_trace_open(r->folder, &shape, &t, &e), ERR_IO);
    assert_non_null(strstr(e.text, "route.trace"));
    e = (struct err){.code = ERR_OK};
    assert_int_equal(route_trace_open("/dev/null", &shape, &t, &e), ERR_ARGUMENT);
    e = (struct err){.code = ERR_OK};
    assert_int_equal(mkfifo(r->path, 0600), 0);
    assert_int_equal(route_trace_open(r->path, &shape, &t, &e), ERR_ARGUMENT);
    assert_null(t);
}

/* route.trace = model.gguf is a slip that must not cost the model. */
static void test_route_trace_another_kind_of_file_is_refused_and_stays(void **state)
{
    struct rig *r = *state;
    static const char *const contents[] = {"GGUF", "GGUF and more than the magic word", "ISLETRT"};
    const uint64_t bytes = 4096;
    const struct route_trace_shape shape = {
        .n_layer = 1, .n_expert = 2, .n_used = 1, .layer_bytes = &bytes};
    for (size_t i = 0; i < sizeof contents / sizeof contents[0]; i++) {
        struct route_trace *t = NULL;
        struct err e = {.code = ERR_OK};
        char left[64] = "";
        FILE *f = fopen(r->path, "w");
        assert_non_null(f);
        assert_true(fputs(contents[i], f) >= 0);
        assert_int_equal(fclose(f), 0);
        assert_int_equal(route_trace_open(r->path, &shape, &t, &e), ERR_ARGUMENT);
        assert_non_null(strstr(e.text, "is no route trace"));
        assert_null(t);
        f = fopen(r->path, "r");
        assert_non_null(f);
        assert_non_null(fgets(left, sizeof left, f));
        fclose(f);
        assert_string_equal(left, contents[i]);
    }
}

struct damage {
    size_t at;
    uint8_t value;
    const char *text;
};

static void test_route_trace_each_kind_of_damage_is_named(void **state)
{
    struct rig *r = *state;
    static const struct damage cases[] = {
        {0, 'X', "ISLETRT1"},        {8, 0, "0 layers"},
        {11, 1, "limits"},           {14, 1, "limits"},
        {16, 17, "limits"},          {20, 1, "reserved"},
        {24, 1, "not a multiple"},   {31, 1, "not a multiple"},
        {50, 255, "rows, not 1 to"}, {60, 16, "expert 16 is not"},
        {60, 7, "expert 7 twice"},
    };
    uint8_t data[256];
    struct route_trace *t = begin(r->path);
    add(t, 1, 0);
    route_trace_close(t);
    FILE *file = fopen(r->path, "rb");
    const size_t size = fread(data, 1, sizeof data, file);
    fclose(file);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct route_trace_file f;
        struct err e = {.code = ERR_OK};
        const uint8_t was = data[cases[i].at];
        data[cases[i].at] = cases[i].value;
        assert_int_equal(route_trace_parse(data, size, &f, &e), ERR_FORMAT);
        if (strstr(e.text, cases[i].text) == NULL)
            fail_msg("case %zu: %s", i, e.text);
        data[cases[i].at] = was;
    }
    for (size_t n = 0; n < size; n++) {
        struct route_trace_file f;
        struct err e = {.code = ERR_OK};
        const enum err_code code = route_trace_parse(data, n, &f, &e);
        assert_int_equal(code, n < 48 ? ERR_FORMAT : ERR_OK);
        if (code == ERR_OK) {
            assert_int_equal(f.n_steps, 0);
            assert_int_equal(f.cut_bytes, n - 48);
            route_trace_file_done(&f);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_route_trace_what_is_written_is_read, start, stop),
        cmocka_unit_test_setup_teardown(test_route_trace_more_than_the_buffer_is_read, start, stop),
        cmocka_unit_test_setup_teardown(test_route_trace_an_old_file_is_overwritten_and_private,
                                        start, stop),
        cmocka_unit_test_setup_teardown(test_route_trace_a_full_disk_ends_the_trace_alone, start,
                                        stop),
        cmocka_unit_test_setup_teardown(test_route_trace_another_kind_of_file_is_refused_and_stays,
                                        start, stop),
        cmocka_unit_test_setup_teardown(test_route_trace_what_is_no_file_is_refused, start, stop),
        cmocka_unit_test_setup_teardown(test_route_trace_each_kind_of_damage_is_named, start, stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

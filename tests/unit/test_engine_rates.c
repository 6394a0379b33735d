/* Measured rates are rates of what was really read, within the time that was given. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine_rates.h"

#define TINY ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf"

/* A clock that advances by 1 ms whenever it is asked. */
static uint64_t next_ms(void *context)
{
    return *(uint64_t *)context += 1000000;
}

static struct k_device *device;
static uint64_t clock_ns;
static const struct ticks clock_ticks = {next_ms, &clock_ns};

static int open_device(void **state)
{
    (void)state;
    struct err e = {0};
    return k_open(K_LEVEL_AUTO, 2, &device, &e) == ERR_OK ? 0 : -1;
}

static int close_device(void **state)
{
    (void)state;
    k_close(device);
    return 0;
}

static struct model *open_model(const char *path)
{
    struct model *m = NULL;
    struct err e = {0};
    if (model_open(&(struct model_loading){.path = path, .device = device}, &m, &e) != ERR_OK)
        fail_msg("%s", e.text);
    return m;
}

static void test_engine_rates_ram_is_bytes_over_time(void **state)
{
    (void)state;
    double rate = 0;
    struct err e = {0};
    assert_int_equal(engine_rates_ram(device, 1 << 20, UINT64_MAX, clock_ticks, &rate, &e), ERR_OK);
    assert_true(rate > 0.99 * (1 << 20) * 1000 && rate < 1.01 * (1 << 20) * 1000);
}

static void test_engine_rates_ssd_reads_each_expert_once(void **state)
{
    (void)state;
    struct engine_rates_ssd r;
    struct err e = {0};
    struct model *m = open_model(TINY);
    uint64_t least = 0, most = 0;
    for (uint32_t layer = 0; layer < m->shape.n_layer; layer++)
        for (uint32_t x = 0; x < m->shape.n_expert; x++) {
            struct tier_ssd_part parts[TIER_SSD_PARTS];
            model_expert_parts(m, layer, x, 0, parts);
            for (int i = 0; i < TIER_SSD_PARTS; i++)
                least += parts[i].bytes;
            most += m->expert_bytes[layer];
        }
    assert_int_equal(
        engine_rates_ssd(device, m, TIER_SSD_AUTO, 16, UINT64_MAX / 2, clock_ticks, &r, &e),
        ERR_OK);
    assert_true(r.bytes >= least && r.bytes <= most);
    assert_true(r.rate > 0);
    assert_true(strlen(r.about) > 0);
    model_close(m);
}

static void test_engine_rates_ssd_stops_when_the_time_is_over(void **state)
{
    (void)state;
    struct engine_rates_ssd r;
    struct err e = {0};
    struct model *m = open_model(TINY);
    assert_int_equal(engine_rates_ssd(device, m, TIER_SSD_AUTO, 16, 0, clock_ticks, &r, &e),
                     ERR_OK);
    assert_true(r.bytes > 0 && r.bytes <= m->shape.n_expert_used * m->expert_bytes[0]);
    model_close(m);
}

static void test_engine_rates_ssd_buffered_says_what_was_cached(void **state)
{
    (void)state;
    struct engine_rates_ssd r;
    struct err e = {0};
    struct model *m = open_model(TINY);
    for (int pass = 0; pass < 2; pass++)
        assert_int_equal(
            engine_rates_ssd(device, m, TIER_SSD_BUFFERED, 16, UINT64_MAX / 2, clock_ticks, &r, &e),
            ERR_OK);
    assert_false(r.direct);
    assert_true(r.cached < 0 || (r.cached > 0 && r.cached <= 1));
    model_close(m);
}

static void test_engine_rates_ssd_file_that_shrinks_is_an_error(void **state)
{
    (void)state;
    char path[] = "/tmp/islet-rates-XXXXXX", command[256];
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    snprintf(command, sizeof(command), "cp %s %s", TINY, path);
    assert_int_equal(system(command), 0);
    struct engine_rates_ssd r;
    struct err e = {0};
    struct model *m = open_model(path);
    assert_int_equal(ftruncate(fd, 1 << 20), 0);
    assert_int_equal(
        engine_rates_ssd(device, m, TIER_SSD_AUTO, 16, UINT64_MAX / 2, clock_ticks, &r, &e),
        ERR_IO);
    assert_non_null(strstr(e.text, "truncated"));
    model_close(m);
    close(fd);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_rates_ram_is_bytes_over_time),
        cmocka_unit_test(test_engine_rates_ssd_reads_each_expert_once),
        cmocka_unit_test(test_engine_rates_ssd_stops_when_the_time_is_over),
        cmocka_unit_test(test_engine_rates_ssd_buffered_says_what_was_cached),
        cmocka_unit_test(test_engine_rates_ssd_file_that_shrinks_is_an_error),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}

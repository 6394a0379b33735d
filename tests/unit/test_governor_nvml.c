/* NVML opened at run time: whatever version is there, and whatever it says. */
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
#include "governor_nvml.h"

#define FAKE(name) ISLET_BUILD_DIR "/tests/fake-" name ".so"
#define BUS        "0000:01:00.0"
#define MIB        (UINT64_C(1) << 20)

static char values[] = "/tmp/islet-nvml-XXXXXX";

static int make_values(void **state)
{
    (void)state;
    const int fd = mkstemp(values);
    if (fd < 0 || close(fd) != 0)
        return -1;
    return setenv("ISLET_FAKE_NVML", values, 1);
}

static int remove_values(void **state)
{
    (void)state;
    return unlink(values);
}

/* What the library says from now on. */
static void say(const char *text)
{
    FILE *f = fopen(values, "we");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void refused(const char *library, const char *bus_id, enum err_code code, const char *part)
{
    struct governor_nvml *n = NULL;
    struct err e = {.code = ERR_OK};
    assert_int_equal(governor_nvml_open(library, bus_id, &n, &e), code);
    assert_null(n);
    if (strstr(e.text, part) == NULL)
        fail_msg("\"%s\" does not tell of \"%s\"", e.text, part);
}

static struct governor_nvml *opened(const char *library)
{
    struct governor_nvml *n = NULL;
    struct err e = {.code = ERR_OK};
    if (governor_nvml_open(library, BUS, &n, &e) != ERR_OK)
        fail_msg("%s", e.text);
    return n;
}

static void check(const struct governor_readings *r, int32_t temperature, int32_t power,
                  int32_t use, uint64_t free_mib, uint64_t total_mib)
{
    assert_int_equal(r->temperature, temperature);
    assert_int_equal(r->power_mw, power);
    assert_int_equal(r->utilization_percent, use);
    assert_int_equal(r->vram_free, free_mib * MIB);
    assert_int_equal(r->vram_total, total_mib * MIB);
}

static void test_governor_nvml_that_is_not_there_is_unsupported(void **state)
{
    (void)state;
    refused("/nowhere/libnvidia-ml.so.1", BUS, ERR_UNSUPPORTED, "no NVML: /nowhere/libnvidia-ml");
    refused(FAKE("empty"), BUS, ERR_UNSUPPORTED, "lacks nvmlInit");
}

static void test_governor_nvml_that_does_not_start_says_why(void **state)
{
    (void)state;
    say("init=-18");
    refused(FAKE("nvml"), BUS, ERR_DEVICE, "does not start: Version mismatch (NVML error 18)");
    say("init=-9");
    refused(FAKE("nvml"), BUS, ERR_DEVICE, "does not start: no text (NVML error 9)");
    say("");
    refused(FAKE("nvml"), "0000:02:00.0", ERR_DEVICE,
            "GPU at 0000:02:00.0: no text (NVML error 6)");
    refused(FAKE("nvml_old"), "x", ERR_DEVICE, "GPU at x: no text (NVML error 6)");
}

static void test_governor_nvml_reads_what_there_is(void **state)
{
    (void)state;
    struct governor_readings r;
    say("temperature=61 power=115000 use=98 free=2000 total=12288");
    struct governor_nvml *n = opened(FAKE("nvml"));
    governor_nvml_read(n, &r);
    check(&r, 61, 115000, 98, 2000, 12288);
    say("temperature=-3 power=-3 use=7 free=2000 total=12288"); /* each is asked anew */
    governor_nvml_read(n, &r);
    check(&r, GOVERNOR_UNKNOWN, GOVERNOR_UNKNOWN, 7, 2000, 12288);
    say("temperature=4294967295 use=-999 power=0 free=1 total=-15");
    governor_nvml_read(n, &r);
    check(&r, GOVERNOR_UNKNOWN, 0, GOVERNOR_UNKNOWN, 0, 0);
    say(""); /* the GPU is lost */
    governor_nvml_read(n, &r);
    check(&r, GOVERNOR_UNKNOWN, GOVERNOR_UNKNOWN, GOVERNOR_UNKNOWN, 0, 0);
    governor_nvml_close(n);
}

static void test_governor_nvml_of_an_old_driver_tells_what_it_knows(void **state)
{
    (void)state;
    struct governor_readings r;
    struct governor_nvml *n = opened(FAKE("nvml_old"));
    governor_nvml_read(n, &r);
    check(&r, 44, GOVERNOR_UNKNOWN, GOVERNOR_UNKNOWN, 0, 0);
    governor_nvml_close(n);
    governor_nvml_close(NULL);
}

static void test_governor_nvml_can_be_opened_again(void **state)
{
    (void)state;
    struct governor_readings r;
    say("temperature=50");
    for (int i = 0; i < 3; i++) {
        struct governor_nvml *n = opened(FAKE("nvml"));
        governor_nvml_read(n, &r);
        check(&r, 50, GOVERNOR_UNKNOWN, GOVERNOR_UNKNOWN, 0, 0);
        governor_nvml_close(n);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_governor_nvml_that_is_not_there_is_unsupported),
        cmocka_unit_test(test_governor_nvml_that_does_not_start_says_why),
        cmocka_unit_test(test_governor_nvml_reads_what_there_is),
        cmocka_unit_test(test_governor_nvml_of_an_old_driver_tells_what_it_knows),
        cmocka_unit_test(test_governor_nvml_can_be_opened_again),
    };
    return cmocka_run_group_tests(tests, make_values, remove_values);
}

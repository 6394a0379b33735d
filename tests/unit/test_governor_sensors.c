/* The thread that reads sensors: what it hands out, how it ends, and what if a driver hangs. */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "governor_sensors.h"

/* A source under the test's control. */
static struct fake {
    _Atomic int opened, closed, reads;
    _Atomic bool refuses, hangs;
    char bus_id[32];
} fake;

static enum err_code fake_open(const char *bus_id, void **ret, struct err *e)
{
    strncpy(fake.bus_id, bus_id, sizeof fake.bus_id - 1);
    atomic_fetch_add(&fake.opened, 1);
    *ret = &fake;
    return atomic_load(&fake.refuses) ? err_set(e, ERR_UNSUPPORTED, "no sensors here") : ERR_OK;
}

static void fake_read(void *sensors, struct governor_readings *ret)
{
    struct fake *f = sensors;
    const int n = atomic_fetch_add(&f->reads, 1) + 1;
    while (atomic_load(&f->hangs))
        sched_yield();
    *ret = (struct governor_readings){.temperature = n};
}

static void fake_close(void *sensors)
{
    atomic_fetch_add(&((struct fake *)sensors)->closed, 1);
}

static const struct governor_source source = {
    .open = fake_open, .read = fake_read, .close = fake_close};

static struct governor_sensors *start(uint32_t period_ms)
{
    struct governor_sensors *s = NULL;
    struct err e = {.code = ERR_OK};
    fake = (struct fake){.opened = 0};
    assert_int_equal(governor_sensors_start(&source, "0000:01:00.0", period_ms, &s, &e), ERR_OK);
    return s;
}

static struct governor_readings next(struct governor_sensors *s)
{
    struct governor_readings r;
    while (!governor_sensors_take(s, &r))
        sched_yield();
    return r;
}

static void test_governor_sensors_hand_out_each_reading_once(void **state)
{
    (void)state;
    struct governor_sensors *s = start(1);
    int32_t last = 0;
    for (int i = 0; i < 20; i++) {
        const int32_t now = next(s).temperature;
        assert_true(now > last);
        last = now;
    }
    struct err why;
    assert_false(governor_sensors_failed(s, &why));
    governor_sensors_stop(s);
    assert_string_equal(fake.bus_id, "0000:01:00.0");
    assert_int_equal(fake.opened, 1);
    assert_int_equal(fake.closed, 1);
}

static void test_governor_sensors_end_at_once_however_long_the_period(void **state)
{
    (void)state;
    struct governor_sensors *s = start(60000);
    struct governor_readings r;
    assert_int_equal(next(s).temperature, 1);
    assert_false(governor_sensors_take(s, &r));
    governor_sensors_stop(s); /* the test's time limit is shorter than the period */
    assert_int_equal(fake.closed, 1);
    governor_sensors_stop(NULL);
}

static void test_governor_sensors_that_do_not_open_tell_why(void **state)
{
    (void)state;
    struct governor_sensors *s = NULL;
    struct err e = {.code = ERR_OK}, why = {.code = ERR_OK};
    struct governor_readings r;
    fake = (struct fake){.refuses = true};
    assert_int_equal(governor_sensors_start(&source, "", 1, &s, &e), ERR_OK);
    while (!governor_sensors_failed(s, &why))
        sched_yield();
    assert_string_equal(why.text, "no sensors here");
    assert_false(governor_sensors_take(s, &r));
    governor_sensors_stop(s);
    assert_int_equal(fake.closed, 0);
}

static void test_governor_sensors_that_hang_are_left_alone(void **state)
{
    (void)state;
    struct governor_sensors *s = start(1);
    (void)next(s);
    atomic_store(&fake.hangs, true);
    const int reads = atomic_load(&fake.reads);
    while (atomic_load(&fake.reads) == reads)
        sched_yield();
    governor_sensors_stop(s); /* comes back */
    assert_int_equal(fake.closed, 0);
    atomic_store(&fake.hangs, false); /* and the thread ends on its own, freeing what it had */
    while (atomic_load(&fake.closed) == 0)
        sched_yield();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_governor_sensors_hand_out_each_reading_once),
        cmocka_unit_test(test_governor_sensors_end_at_once_however_long_the_period),
        cmocka_unit_test(test_governor_sensors_that_do_not_open_tell_why),
        cmocka_unit_test(test_governor_sensors_that_hang_are_left_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

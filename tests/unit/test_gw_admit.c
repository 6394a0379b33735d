#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "gw_admit.h"
#include "rng.h"

#define S 1000000000ull

static struct gw_admit_ticket ticket(uint64_t key, int64_t priority)
{
    struct gw_admit_ticket t = {.key = key, .priority = priority};
    return t;
}

static void start_next(struct gw_admit *a, struct gw_admit_ticket *expected, uint64_t now)
{
    assert_ptr_equal(gw_admit_next(a, now), expected);
    gw_admit_start(a, expected, now);
}

static void test_gw_admit_is_first_in_first_out(void **state)
{
    (void)state;
    struct gw_admit a;
    struct gw_admit_ticket t[3] = {ticket(1, 0), ticket(1, 0), ticket(1, 0)};
    gw_admit_init(&a, 8, 4);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(gw_admit_request(&a, &t[i], i), GW_ADMIT_TAKEN);
    for (size_t i = 0; i < 3; i++)
        start_next(&a, &t[i], 10);
    assert_null(gw_admit_next(&a, 10));
    for (size_t i = 0; i < 3; i++)
        gw_admit_leave(&a, &t[i], 20);
    gw_admit_leave(&a, &t[0], 20);
    assert_int_equal(a.n_running, 0);
    assert_int_equal(a.n_waiting, 0);
}

static void test_gw_admit_queue_is_bounded_beyond_free_places(void **state)
{
    (void)state;
    struct gw_admit a;
    struct gw_admit_ticket t[5] = {ticket(1, 0), ticket(1, 0), ticket(1, 0), ticket(1, 0),
                                   ticket(1, 0)};
    gw_admit_init(&a, 1, 2);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(gw_admit_request(&a, &t[i], 0), GW_ADMIT_TAKEN);
    assert_int_equal(gw_admit_request(&a, &t[3], 0), GW_ADMIT_FULL);
    start_next(&a, &t[0], 0);
    start_next(&a, &t[1], 0);
    assert_int_equal(gw_admit_request(&a, &t[3], 0), GW_ADMIT_FULL);
    gw_admit_leave(&a, &t[2], 0);
    assert_int_equal(gw_admit_request(&a, &t[3], 0), GW_ADMIT_TAKEN);
    a.paused = true;
    assert_int_equal(gw_admit_request(&a, &t[4], 0), GW_ADMIT_PAUSED);
}

static void test_gw_admit_priority_goes_first_but_starves_nobody(void **state)
{
    (void)state;
    struct gw_admit a;
    struct gw_admit_ticket low = ticket(1, 100), high = ticket(1, -100);
    gw_admit_init(&a, 8, 1);
    assert_int_equal(gw_admit_request(&a, &low, 0), GW_ADMIT_TAKEN);
    assert_int_equal(gw_admit_request(&a, &high, S), GW_ADMIT_TAKEN);
    assert_ptr_equal(gw_admit_next(&a, S), &high);
    gw_admit_leave(&a, &high, S);
    /* 201 s later a new one of the highest priority does not get ahead any more. */
    assert_int_equal(gw_admit_request(&a, &high, 201 * S), GW_ADMIT_TAKEN);
    assert_ptr_equal(gw_admit_next(&a, 201 * S), &low);
}

static void test_gw_admit_keys_share(void **state)
{
    (void)state;
    struct gw_admit a;
    struct gw_admit_ticket many[4], one = ticket(2, 0);
    gw_admit_init(&a, 8, 3);
    for (size_t i = 0; i < 4; i++) {
        many[i] = ticket(1, 0);
        assert_int_equal(gw_admit_request(&a, &many[i], i), GW_ADMIT_TAKEN);
    }
    assert_int_equal(gw_admit_request(&a, &one, 5), GW_ADMIT_TAKEN);
    start_next(&a, &many[0], 6);
    start_next(&a, &one, 6);
    start_next(&a, &many[1], 6);
}

static void test_gw_admit_retry_after_follows_the_wait(void **state)
{
    (void)state;
    struct gw_admit a;
    struct gw_admit_ticket t[64];
    gw_admit_init(&a, 64, 1);
    assert_int_equal(gw_admit_retry_after_s(&a), 1);
    for (size_t i = 0; i < 64; i++) {
        t[i] = ticket(i, 0);
        assert_int_equal(gw_admit_request(&a, &t[i], 0), GW_ADMIT_TAKEN);
    }
    assert_int_equal(gw_admit_retry_after_s(&a), 30);
}

/* A long random life: every admitted request starts, in arrival order within key and priority, and
 * counts come back. */
static void test_gw_admit_random_life_starts_everything(void **state)
{
    (void)state;
    enum {
        N = 20000
    };
    static struct gw_admit_ticket t[N];
    struct gw_admit a;
    uint64_t now = 0, last_started[4] = {0};
    size_t next = 0, started = 0;
    gw_admit_init(&a, 32, 4);
    size_t taken = 0;
    struct gw_admit_ticket *running[4] = {NULL};
    for (uint32_t step = 0; step < 200000 && (next < N || a.n_waiting + a.n_running > 0); step++) {
        uint64_t draw = rng_draw(11, step);
        now += draw % (S / 10);
        if (next < N && draw % 3 != 0) {
            t[next] = ticket(draw / 7 % 4, 0);
            taken += gw_admit_request(&a, &t[next++], now) == GW_ADMIT_TAKEN;
        }
        unsigned slot = draw / 64 % 4;
        if (running[slot]) {
            gw_admit_leave(&a, running[slot], now);
            running[slot] = NULL;
            continue;
        }
        struct gw_admit_ticket *one = gw_admit_next(&a, now);
        if (!one)
            continue;
        assert_true(one->arrived_ns >= last_started[one->key]);
        last_started[one->key] = one->arrived_ns;
        gw_admit_start(&a, one, now);
        running[slot] = one;
        started++;
    }
    assert_int_equal(started, taken);
    assert_int_equal(a.n_waiting + a.n_running, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_admit_is_first_in_first_out),
        cmocka_unit_test(test_gw_admit_queue_is_bounded_beyond_free_places),
        cmocka_unit_test(test_gw_admit_priority_goes_first_but_starves_nobody),
        cmocka_unit_test(test_gw_admit_keys_share),
        cmocka_unit_test(test_gw_admit_retry_after_follows_the_wait),
        cmocka_unit_test(test_gw_admit_random_life_starts_everything),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <xmmintrin.h>

#include <cmocka.h>

#include "alloc.h"
#include "k_pool.h"
#include "kernels.h"

enum {
    MOST = 4096
};

struct counts {
    _Atomic uint32_t done[MOST];
    _Atomic uint32_t wrong_thread;
    uint32_t threads;
};

static void count_piece(const void *context, uint32_t piece, uint32_t thread)
{
    struct counts *c = (struct counts *)(uintptr_t)context;
    atomic_fetch_add(&c->done[piece], 1);
    if (thread >= c->threads)
        atomic_fetch_add(&c->wrong_thread, 1);
}

static void test_k_pool_each_piece_runs_once(void **state)
{
    (void)state;
    static struct counts c;
    for (uint32_t threads = 1; threads <= 8; threads++) {
        struct k_pool *pool;
        assert_int_equal(k_pool_new(threads, 64, &pool, NULL), ERR_OK);
        c.threads = threads;
        for (uint32_t job = 0; job < 300; job++) {
            const uint32_t n = job % 7 == 0 ? job * 11 % MOST : job % 13;
            memset(c.done, 0, sizeof c.done);
            k_pool_run(pool, count_piece, &c, n);
            for (uint32_t i = 0; i < MOST; i++)
                assert_int_equal(c.done[i], i < n ? 1 : 0);
        }
        k_pool_free(pool);
    }
    assert_int_equal(c.wrong_thread, 0);
}

struct slow {
    _Atomic uint32_t held; /* pieces begun by helpers */
    _Atomic uint32_t by_caller;
    uint32_t n;
};

/* The first piece that a helper takes lasts until the caller has done all others. */
static void hold_piece(const void *context, uint32_t piece, uint32_t thread)
{
    struct slow *s = (struct slow *)(uintptr_t)context;
    (void)piece;
    if (thread == 0) {
        atomic_fetch_add(&s->by_caller, 1);
        return;
    }
    atomic_fetch_add(&s->held, 1);
    while (atomic_load(&s->by_caller) + atomic_load(&s->held) < s->n)
        _mm_pause();
}

static void test_k_pool_late_helper_costs_one_piece(void **state)
{
    (void)state;
    struct k_pool *pool;
    assert_int_equal(k_pool_new(2, 64, &pool, NULL), ERR_OK);
    struct slow s = {.n = 100000};
    k_pool_run(pool, hold_piece, &s, s.n);
    assert_true(s.by_caller >= s.n - 1);
    k_pool_free(pool);
}

static void scratch_piece(const void *context, uint32_t piece, uint32_t thread)
{
    struct k_pool *pool = (struct k_pool *)(uintptr_t)context;
    (void)piece;
    uint8_t *mine = k_pool_scratch(pool, thread);
    memset(mine, (int)thread + 1, 1000);
    for (int i = 0; i < 1000; i++)
        if (mine[i] != thread + 1)
            abort();
}

static void test_k_pool_scratch_is_each_threads_own(void **state)
{
    (void)state;
    struct k_pool *pool;
    assert_int_equal(k_pool_new(4, 1000, &pool, NULL), ERR_OK);
    for (uint32_t t = 0; t < 4; t++)
        assert_int_equal((uintptr_t)k_pool_scratch(pool, t) % 64, 0);
    for (int i = 0; i < 200; i++)
        k_pool_run(pool, scratch_piece, pool, 40);
    k_pool_free(pool);
}

static void test_k_pool_no_memory_is_reported_and_leaks_nothing(void **state)
{
    (void)state;
    const uint64_t before = alloc_live_blocks();
    uint32_t failures = 0;
    for (uint64_t nth = 1; nth < 20; nth++) {
        struct k_pool *pool = NULL;
        struct err e = {.code = ERR_OK};
        alloc_fail_at(nth, 0);
        const enum err_code code = k_pool_new(3, 64, &pool, &e);
        alloc_fail_at(0, 0);
        if (code == ERR_OK) {
            k_pool_free(pool);
            break;
        }
        assert_int_equal(code, ERR_NOMEM);
        assert_int_equal(e.code, ERR_NOMEM);
        assert_null(pool);
        failures++;
    }
    assert_true(failures >= 4); /* the pool, its scratch, two helpers */
    assert_int_equal(alloc_live_blocks(), before);
}

static void test_k_pool_flushed_denormals_are_refused(void **state)
{
    (void)state;
    const unsigned csr = _mm_getcsr();
    static const unsigned bits[] = {0x8000 /* FTZ */, 0x0040 /* DAZ */, 0x2000 /* downwards */};
    for (size_t i = 0; i < sizeof bits / sizeof bits[0]; i++) {
        struct k_pool *pool = NULL;
        struct k_device *device = NULL;
        struct err e = {.code = ERR_OK};
        _mm_setcsr(csr | bits[i]);
        const enum err_code by_pool = k_pool_new(2, 64, &pool, NULL);
        const enum err_code by_open = k_open(K_LEVEL_REFERENCE, 1, &device, &e);
        _mm_setcsr(csr);
        assert_int_equal(by_pool, ERR_UNSUPPORTED);
        assert_int_equal(by_open, ERR_UNSUPPORTED);
        assert_non_null(strstr(e.text, "floating-point mode"));
    }
}

static void test_k_pool_more_threads_than_the_limit_are_refused(void **state)
{
    (void)state;
    struct k_device *device = NULL;
    struct err e = {.code = ERR_OK};
    assert_int_equal(k_open(K_LEVEL_AUTO, K_MAX_THREADS + 1, &device, &e), ERR_ARGUMENT);
    assert_non_null(strstr(e.text, "257"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_k_pool_each_piece_runs_once),
        cmocka_unit_test(test_k_pool_late_helper_costs_one_piece),
        cmocka_unit_test(test_k_pool_scratch_is_each_threads_own),
        cmocka_unit_test(test_k_pool_no_memory_is_reported_and_leaks_nothing),
        cmocka_unit_test(test_k_pool_flushed_denormals_are_refused),
        cmocka_unit_test(test_k_pool_more_threads_than_the_limit_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

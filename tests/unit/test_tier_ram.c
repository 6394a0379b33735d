/* The arena's pages are there at once or soon, a refused lock is said, and it may be given back at any
 * time. */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "tier_ram.h"

#define MIB (UINT64_C(1) << 20)

static struct k_device *device;

static int open_device(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    return k_open(K_LEVEL_AUTO, 1, &device, &e) == ERR_OK ? 0 : -1;
}

static int close_device(void **state)
{
    (void)state;
    k_close(device);
    return 0;
}

/* Pages of the arena that are in memory. */
static uint64_t resident_bytes(const struct tier_ram *t)
{
    static unsigned char there[(128 << 20) / 4096];
    uint64_t pages = 0;
    assert_int_equal(mincore(t->ops->buffer_host(t->arena), t->bytes, there), 0);
    for (uint64_t i = 0; i < t->bytes / 4096; i++)
        pages += there[i] & 1;
    return pages * 4096;
}

static void test_tier_ram_small_arena_is_there_at_once(void **state)
{
    (void)state;
    struct tier_ram t;
    struct err e = {.code = ERR_OK};
    assert_int_equal(tier_ram_start(&t, device, 3 * MIB, &e), ERR_OK);
    assert_int_equal(atomic_load(&t.reserved), 3 * MIB);
    assert_int_equal(resident_bytes(&t), 3 * MIB);
    assert_true(t.locked || t.refusal[0] != '\0');
    tier_ram_done(&t);
    tier_ram_done(&t);
}

static void test_tier_ram_large_arena_comes_by_and_by(void **state)
{
    (void)state;
    struct tier_ram t;
    struct err e = {.code = ERR_OK};
    assert_int_equal(tier_ram_start(&t, device, 96 * MIB, &e), ERR_OK);
    const time_t limit = time(NULL) + 300;
    while (atomic_load(&t.reserved) < t.bytes && time(NULL) < limit)
        sched_yield();
    assert_int_equal(atomic_load(&t.reserved), 96 * MIB);
    assert_int_equal(resident_bytes(&t), 96 * MIB);
    tier_ram_done(&t);
}

static void test_tier_ram_given_back_while_pages_come(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        struct tier_ram t;
        struct err e = {.code = ERR_OK};
        assert_int_equal(tier_ram_start(&t, device, 128 * MIB, &e), ERR_OK);
        memset(t.ops->buffer_host(t.arena), i, 4096); /* a read that comes first */
        tier_ram_done(&t);
        assert_null(t.arena);
    }
}

static void test_tier_ram_refused_lock_is_said(void **state)
{
    (void)state;
    const pid_t child = fork(); /* limits of this process stay */
    if (child == 0) {
        struct tier_ram t;
        struct err e = {.code = ERR_OK};
        const struct rlimit none = {.rlim_cur = 65536, .rlim_max = 65536};
        if (setrlimit(RLIMIT_MEMLOCK, &none) != 0 || (geteuid() == 0 && setuid(65534) != 0))
            _exit(2);
        if (tier_ram_start(&t, device, 3 * MIB, &e) != ERR_OK)
            _exit(3);
        const bool said = !t.locked && strstr(t.refusal, "64 KiB") != NULL;
        tier_ram_done(&t);
        _exit(said ? 0 : 4);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tier_ram_small_arena_is_there_at_once),
        cmocka_unit_test(test_tier_ram_large_arena_comes_by_and_by),
        cmocka_unit_test(test_tier_ram_given_back_while_pages_come),
        cmocka_unit_test(test_tier_ram_refused_lock_is_said),
    };
    return cmocka_run_group_tests(tests, open_device, close_device);
}

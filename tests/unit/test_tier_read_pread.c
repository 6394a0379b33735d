#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cmocka.h>

#include <linux/magic.h>

#include "ssd_rig.h"
#include "tier_read.h"

enum {
    MIB = 1 << 20,
    PAGE = 4096
};

static const uint64_t sizes[SSD_RIG_FILES] = {2 * MIB + 77, 100, 100};

static struct tier_read *open_pool(const struct ssd_rig *r, const int *fd, uint32_t depth,
                                   bool drop)
{
    struct tier_read *pool = NULL;
    struct err e = {.code = ERR_OK};
    const struct tier_read_setup setup = {.fds = fd,
                                          .n_fds = 1,
                                          .arena = r->arena,
                                          .arena_bytes = r->arena_bytes,
                                          .depth = depth,
                                          .drop = drop};
    if (tier_read_pread_open(&setup, &pool, &e) != ERR_OK)
        fail_msg("%s", e.text);
    return pool;
}

static uint32_t pages_cached(int fd, uint64_t size)
{
    unsigned char pages[2 * MIB / PAGE + 1];
    void *map = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(map != MAP_FAILED);
    assert_int_equal(mincore(map, (size_t)size, pages), 0);
    munmap(map, (size_t)size);
    uint32_t n = 0;
    for (uint64_t i = 0; i * PAGE < size; i++)
        n += pages[i] & 1;
    return n;
}

static int32_t read_one(struct tier_read *pool, const struct tier_read_op *op)
{
    struct tier_read_end end = {.token = op->token + 1};
    pool->start(pool, op, 1);
    while (pool->take(pool, true, &end, 1) == 0)
        continue;
    assert_int_equal(end.token, op->token);
    return end.result;
}

/* The last window included, whose page the file does not fill. */
static void test_tier_read_pread_drop_leaves_no_page_cached(void **state)
{
    (void)state;
    struct ssd_rig r;
    struct statfs s;
    ssd_rig_init(&r, "/var/tmp", sizes, 3 * MIB);
    const int fd = open(r.paths[0], O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0 && fstatfs(fd, &s) == 0);
    posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    for (uint32_t drop = 0; drop < 2 && s.f_type != TMPFS_MAGIC; drop++) {
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        assert_int_equal(pages_cached(fd, sizes[0]), 0);
        struct tier_read *pool = open_pool(&r, &fd, 2, drop != 0);
        const uint64_t offset = MIB + PAGE;
        const struct tier_read_op op = {3, 0, offset, MIB, r.arena};
        assert_int_equal(read_one(pool, &op), sizes[0] - offset);
        assert_memory_equal(r.arena, r.bytes[0] + offset, sizes[0] - offset);
        pool->close(pool);
        const uint32_t cached = pages_cached(fd, sizes[0]);
        if (drop)
            assert_int_equal(cached, 0);
        else
            assert_true(cached >= MIB / PAGE - 1);
    }
    close(fd);
    ssd_rig_done(&r);
}

/* Results are the system's: short at the end of the file, nothing behind it, an errno. */
static void test_tier_read_pread_results_are_the_systems(void **state)
{
    (void)state;
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, MIB);
    const int fd = open(r.paths[1], O_RDONLY | O_CLOEXEC);
    struct tier_read *pool = open_pool(&r, &fd, 3, false);
    assert_int_equal(read_one(pool, &(struct tier_read_op){1, 0, 0, PAGE, r.arena}), 100);
    assert_int_equal(read_one(pool, &(struct tier_read_op){2, 0, PAGE, PAGE, r.arena}), 0);
    pool->close(pool);
    const int none = -1;
    pool = open_pool(&r, &none, 3, false);
    assert_int_equal(read_one(pool, &(struct tier_read_op){3, 0, 0, PAGE, r.arena}), -EBADF);
    pool->close(pool);
    close(fd);
    ssd_rig_done(&r);
}

/* As many in flight as agreed, over and over: none is lost, none comes twice. */
static void test_tier_read_pread_full_depth_ends_each_once(void **state)
{
    (void)state;
    enum {
        DEPTH = 16,
        TOTAL = 4000
    };
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, DEPTH * PAGE);
    const int fd = open(r.paths[0], O_RDONLY | O_CLOEXEC);
    struct tier_read *pool = open_pool(&r, &fd, DEPTH, false);
    uint64_t at[DEPTH];
    bool busy[DEPTH] = {false};
    uint32_t started = 0, ended = 0;
    while (ended < TOTAL) {
        struct tier_read_op ops[DEPTH];
        struct tier_read_end ends[5];
        uint32_t n = 0;
        for (uint32_t t = 0; t < DEPTH && started < TOTAL; t++) {
            if (busy[t])
                continue;
            busy[t] = true;
            at[t] = (started++ * UINT64_C(7919)) % (2 * MIB - PAGE);
            ops[n++] = (struct tier_read_op){t, 0, at[t], PAGE, r.arena + t * PAGE};
        }
        pool->start(pool, ops, n);
        const uint32_t got = pool->take(pool, true, ends, 5);
        assert_true(got >= 1 && got <= 5);
        for (uint32_t i = 0; i < got; i++, ended++) {
            const uint32_t t = ends[i].token;
            assert_true(t < DEPTH && busy[t]);
            busy[t] = false;
            assert_int_equal(ends[i].result, PAGE);
            assert_memory_equal(r.arena + t * PAGE, r.bytes[0] + at[t], PAGE);
        }
    }
    struct tier_read_end none;
    assert_int_equal(pool->take(pool, false, &none, 1), 0);
    pool->close(pool);
    close(fd);
    ssd_rig_done(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tier_read_pread_drop_leaves_no_page_cached),
        cmocka_unit_test(test_tier_read_pread_results_are_the_systems),
        cmocka_unit_test(test_tier_read_pread_full_depth_ends_each_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

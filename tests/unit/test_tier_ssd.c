#include <errno.h>
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
#include "ssd_rig.h"
#include "tier_ssd.h"

enum {
    MIB = 1 << 20,
    WINDOW = TIER_SSD_ALIGN
};

static const uint64_t sizes[SSD_RIG_FILES] = {3 * MIB + 123, 700001, 5 * MIB};

/* Each way of reading: as set, and the test's reader with O_DIRECT and without. */
static const struct way {
    const char *parent;
    enum tier_ssd_io io;
    bool fake;
} ways[] = {
    {"/var/tmp", TIER_SSD_AUTO, false},     {"/var/tmp", TIER_SSD_PREAD, false},
    {"/var/tmp", TIER_SSD_BUFFERED, false}, {"/dev/shm", TIER_SSD_AUTO, false},
    {"/dev/shm", TIER_SSD_BUFFERED, false}, {"/var/tmp", TIER_SSD_PREAD, true},
    {"/var/tmp", TIER_SSD_BUFFERED, true},
};

enum {
    N_WAYS = sizeof(ways) / sizeof(ways[0])
};

static uint32_t draw(uint64_t *seed, uint32_t n)
{
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*seed >> 33) % n;
}

static void assert_ok(const struct tier_ssd_result *result)
{
    if (result->code != ERR_OK)
        fail_msg("%s", result->error.text);
}

static void assert_io_error(const struct tier_ssd_result *result, const char *a, const char *b)
{
    assert_int_equal(result->code, ERR_IO);
    assert_int_equal(result->error.code, ERR_IO);
    assert_null(strchr(result->error.text, '\n'));
    if (strstr(result->error.text, a) == NULL || strstr(result->error.text, b) == NULL)
        fail_msg("'%s' says neither '%s' nor '%s'", result->error.text, a, b);
}

/* All offsets modulo the window, 64 requests in flight. */
static void test_tier_ssd_every_offset_arrives_in_place(void **state)
{
    (void)state;
    enum {
        BATCH = 64
    };
    for (uint32_t w = 0; w < N_WAYS; w++) {
        struct ssd_rig r;
        ssd_rig_init(&r, ways[w].parent, sizes, BATCH * 5 * WINDOW);
        ssd_rig_open(&r, ways[w].io, 7, ways[w].fake);
        uint64_t seed = w + 1;
        for (uint32_t first = 0; first < WINDOW; first += BATCH) {
            struct tier_ssd_part parts[BATCH];
            struct tier_ssd_result results[BATCH];
            ssd_rig_clear(&r);
            for (uint32_t i = 0; i < BATCH; i++) {
                const uint64_t offset = draw(&seed, 600) * (uint64_t)WINDOW + first + i;
                parts[i] = ssd_rig_part(&r, i % 2 * 2, offset, 1 + draw(&seed, 3 * WINDOW));
                tier_ssd_start(r.ssd, i, &parts[i], 1);
            }
            bool seen[BATCH] = {false};
            for (uint32_t n = 0; n < BATCH;) {
                const uint32_t got = tier_ssd_wait(r.ssd, true, results, BATCH);
                assert_true(got > 0);
                for (uint32_t i = 0; i < got; i++, n++) {
                    assert_ok(&results[i]);
                    assert_false(seen[results[i].id]);
                    seen[results[i].id] = true;
                    ssd_rig_assert_part(&r, &parts[results[i].id]);
                }
            }
            ssd_rig_assert_rest(&r, parts, BATCH);
        }
        ssd_rig_done(&r);
    }
}

/* The three slices of an expert, in three files of a split model, the last bytes of each. */
static void test_tier_ssd_split_files_end_unaligned_arrive(void **state)
{
    (void)state;
    for (uint32_t w = 0; w < N_WAYS; w++) {
        struct ssd_rig r;
        ssd_rig_init(&r, ways[w].parent, sizes, 4 * MIB);
        ssd_rig_open(&r, ways[w].io, 4, ways[w].fake);
        struct tier_ssd_part parts[TIER_SSD_PARTS];
        for (uint32_t i = 0; i < TIER_SSD_PARTS; i++)
            parts[i] = ssd_rig_part(&r, 2 - i, sizes[2 - i] - 300001, 300001);
        const struct tier_ssd_result result = ssd_rig_read(&r, parts, TIER_SSD_PARTS);
        assert_ok(&result);
        for (uint32_t i = 0; i < TIER_SSD_PARTS; i++)
            ssd_rig_assert_part(&r, &parts[i]);
        ssd_rig_assert_rest(&r, parts, TIER_SSD_PARTS);
        ssd_rig_done(&r);
    }
}

/* A part of several read lengths: as a dense tensor, with all of `depth` in flight. */
static void test_tier_ssd_long_part_uses_depth(void **state)
{
    (void)state;
    for (uint32_t w = 0; w < N_WAYS; w++) {
        struct ssd_rig r;
        ssd_rig_init(&r, ways[w].parent, sizes, 6 * MIB);
        ssd_rig_open(&r, ways[w].io, 3, ways[w].fake);
        const struct tier_ssd_part part = ssd_rig_part(&r, 2, 4099, 5 * MIB - 4099);
        const struct tier_ssd_result result = ssd_rig_read(&r, &part, 1);
        assert_ok(&result);
        ssd_rig_assert_part(&r, &part);
        ssd_rig_assert_rest(&r, &part, 1);
        const struct tier_ssd_counts c = tier_ssd_count(r.ssd);
        assert_true(c.reads >= 10);
        assert_true(c.bytes == 5 * MIB - WINDOW);
        if (ways[w].fake)
            assert_int_equal(r.fake.most_open, 3);
        ssd_rig_done(&r);
    }
}

static uint64_t reads_of(struct ssd_rig *r, const struct tier_ssd_part *parts, uint32_t n)
{
    const uint64_t before = r->fake.n_reads;
    const struct tier_ssd_result result = ssd_rig_read(r, parts, n);
    assert_ok(&result);
    for (uint32_t i = 0; i < n; i++)
        ssd_rig_assert_part(r, &parts[i]);
    return r->fake.n_reads - before;
}

static void test_tier_ssd_touching_parts_are_one_read(void **state)
{
    (void)state;
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, MIB);
    ssd_rig_open(&r, TIER_SSD_PREAD, 4, true);
    /* Neighbours to the byte, in any order of the call. */
    struct tier_ssd_part abc[3] = {
        {0, 10000, 5000, 10000}, {0, 15000, 7000, 15000}, {0, 22000, 100, 22000}};
    static const uint8_t orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                         {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (uint32_t o = 0; o < 6; o++) {
        struct tier_ssd_part parts[3];
        for (uint32_t i = 0; i < 3; i++)
            parts[i] = abc[orders[o][i]];
        ssd_rig_clear(&r);
        assert_int_equal(reads_of(&r, parts, 3), 1);
        ssd_rig_assert_rest(&r, parts, 3);
    }
    /* Windows that only touch; one window between them; the same in another file. */
    struct tier_ssd_part near[2] = {{0, 8192, 4096, 8192}, {0, 12288, 4096, 12288}};
    assert_int_equal(reads_of(&r, near, 2), 1);
    struct tier_ssd_part apart[2] = {{0, 8192, 4096, 8192}, {0, 16384, 4096, 16384}};
    assert_int_equal(reads_of(&r, apart, 2), 2);
    struct tier_ssd_part elsewhere[2] = {{0, 8192, 4096, 8192}, {1, 12288, 4096, 12288}};
    assert_int_equal(reads_of(&r, elsewhere, 2), 2);
    /* Neighbours in the file, not in the arena. */
    struct tier_ssd_part split[2] = {{0, 10000, 5000, 10000},
                                     {0, 15000, 7000, 40960 + 15000 % WINDOW}};
    assert_int_equal(reads_of(&r, split, 2), 2);
    /* One within the other. */
    struct tier_ssd_part inner[2] = {{0, 8192, 40000, 8192}, {0, 20000, 10, 20000}};
    assert_int_equal(reads_of(&r, inner, 2), 1);
    ssd_rig_done(&r);
}

static void test_tier_ssd_nothing_to_read_ends_at_once(void **state)
{
    (void)state;
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, MIB);
    ssd_rig_open(&r, TIER_SSD_PREAD, 4, true);
    struct tier_ssd_result result;
    assert_int_equal(tier_ssd_wait(r.ssd, true, &result, 1), 0);
    result = ssd_rig_read(&r, NULL, 0);
    assert_ok(&result);
    const struct tier_ssd_part empty = {1, 5, 0, 5};
    result = ssd_rig_read(&r, &empty, 1);
    assert_ok(&result);
    assert_int_equal(r.fake.n_reads, 0);
    ssd_rig_assert_rest(&r, NULL, 0);
    ssd_rig_done(&r);
}

/* Many requests, results in a drawn order, every depth: each comes once and whole. */
static void test_tier_ssd_reordered_reads_end_each_once(void **state)
{
    (void)state;
    enum {
        N = 40
    };
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, 24 * MIB);
    for (uint64_t seed = 1; seed <= 60; seed++) {
        struct tier_ssd_part parts[N][TIER_SSD_PARTS];
        uint64_t s = seed;
        const uint32_t depth = 1 + draw(&s, 20);
        ssd_rig_open(&r, seed % 2 ? TIER_SSD_PREAD : TIER_SSD_BUFFERED, depth, true);
        ssd_rig_clear(&r);
        r.fake.seed = seed;
        r.fake.most_open = 0;
        for (uint32_t i = 0; i < N; i++) {
            for (uint32_t k = 0; k < TIER_SSD_PARTS; k++) {
                const uint64_t bytes = i == 7 && k == 2 ? 2 * MIB : 1 + draw(&s, 150000);
                parts[i][k] = ssd_rig_part(&r, k, draw(&s, (uint32_t)sizes[k] / 2), bytes);
            }
            tier_ssd_start(r.ssd, i, parts[i], TIER_SSD_PARTS);
        }
        bool seen[N] = {false};
        for (uint32_t n = 0; n < N; n++) {
            const struct tier_ssd_result result = ssd_rig_wait(&r);
            assert_ok(&result);
            assert_true(result.id < N && !seen[result.id]);
            seen[result.id] = true;
            for (uint32_t k = 0; k < TIER_SSD_PARTS; k++)
                ssd_rig_assert_part(&r, &parts[result.id][k]);
        }
        ssd_rig_assert_rest(&r, parts[0], N * TIER_SSD_PARTS);
        assert_int_equal(r.fake.most_open, depth);
        assert_int_equal(r.fake.n_open, 0);
    }
    ssd_rig_done(&r);
}

static void test_tier_ssd_room_counts_open_requests(void **state)
{
    (void)state;
    for (uint32_t w = 0; w < N_WAYS; w++) {
        struct ssd_rig r;
        ssd_rig_init(&r, ways[w].parent, sizes, TIER_SSD_REQUESTS * 2 * WINDOW);
        ssd_rig_open(&r, ways[w].io, TIER_SSD_MAX_DEPTH, ways[w].fake);
        for (uint32_t round = 0; round < 2; round++) {
            ssd_rig_clear(&r);
            for (uint32_t i = 0; i < TIER_SSD_REQUESTS; i++) {
                assert_int_equal(tier_ssd_room(r.ssd), TIER_SSD_REQUESTS - i);
                const struct tier_ssd_part part = ssd_rig_part(&r, 2, i * UINT64_C(5000), 90);
                tier_ssd_start(r.ssd, i, &part, 1);
            }
            assert_int_equal(tier_ssd_room(r.ssd), 0);
            for (uint32_t i = 0; i < TIER_SSD_REQUESTS; i++) {
                const struct tier_ssd_result result = ssd_rig_wait(&r);
                assert_ok(&result);
                assert_int_equal(tier_ssd_room(r.ssd), i + 1);
            }
            struct tier_ssd_result none;
            assert_int_equal(tier_ssd_wait(r.ssd, true, &none, 1), 0);
        }
        ssd_rig_done(&r);
    }
}

static void test_tier_ssd_wait_without_block_returns(void **state)
{
    (void)state;
    struct ssd_rig r;
    struct tier_ssd_result result;
    ssd_rig_init(&r, "/var/tmp", sizes, MIB);
    ssd_rig_open(&r, TIER_SSD_PREAD, 4, true);
    const struct tier_ssd_part part = ssd_rig_part(&r, 0, 100, 100);
    tier_ssd_start(r.ssd, 1, &part, 1);
    r.fake.idle_takes = 5;
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(tier_ssd_wait(r.ssd, false, &result, 1), 0);
    assert_true(tier_ssd_count(r.ssd).wait_ns == 0);
    r.fake.idle_takes = 3;
    assert_int_equal(tier_ssd_wait(r.ssd, true, &result, 1), 1);
    assert_int_equal(r.fake.idle_takes, 0);
    assert_true(tier_ssd_count(r.ssd).wait_ns > 0);
    ssd_rig_assert_part(&r, &part);
    ssd_rig_done(&r);
}

static void test_tier_ssd_close_waits_for_reads(void **state)
{
    (void)state;
    for (uint32_t w = 0; w < N_WAYS; w++) {
        struct ssd_rig r;
        ssd_rig_init(&r, ways[w].parent, sizes, 12 * MIB);
        ssd_rig_open(&r, ways[w].io, 2, ways[w].fake);
        struct tier_ssd_part parts[2] = {ssd_rig_part(&r, 2, 1, 5 * MIB - 1),
                                         ssd_rig_part(&r, 2, 0, 5 * MIB)};
        tier_ssd_start(r.ssd, 1, &parts[0], 1);
        tier_ssd_start(r.ssd, 2, &parts[1], 1);
        ssd_rig_close(&r);
        assert_int_equal(r.fake.n_open, 0);
        assert_int_equal(r.fake.n_closed, ways[w].fake ? 1 : 0);
        ssd_rig_clear(&r); /* nothing may still write here */
        ssd_rig_assert_rest(&r, NULL, 0);
        ssd_rig_done(&r);
    }
}

/* ---- what goes wrong ----------------------------------------------------------------------- */

/* One read is short, at each size it can have; with O_DIRECT and without. */
static void test_tier_ssd_short_read_at_every_size_is_continued(void **state)
{
    (void)state;
    for (uint32_t way = 0; way < 2; way++) {
        struct ssd_rig r;
        ssd_rig_init(&r, "/var/tmp", sizes, MIB);
        ssd_rig_open(&r, way == 0 ? TIER_SSD_PREAD : TIER_SSD_BUFFERED, 2, true);
        for (uint32_t at = 0; at < 3 * WINDOW; at++) {
            memset(r.arena, SSD_RIG_EMPTY, 4 * WINDOW);
            r.used = 0;
            const struct tier_ssd_part part = ssd_rig_part(&r, 0, 8192 + 77, 3 * WINDOW - 77);
            r.fake.short_nth = 1;
            r.fake.short_bytes = at;
            struct tier_ssd_result result;
            tier_ssd_start(r.ssd, at, &part, 1);
            while (tier_ssd_wait(r.ssd, false, &result, 1) == 0) /* without the pause of `block` */
                continue;
            assert_ok(&result);
            ssd_rig_assert_part(&r, &part);
        }
        assert_int_equal(tier_ssd_count(r.ssd).retries, 3 * WINDOW);
        ssd_rig_done(&r);
    }
}

/* Every read is short: the rest comes in as many more as it takes. */
static void test_tier_ssd_short_reads_for_ever_arrive(void **state)
{
    (void)state;
    static const struct {
        enum tier_ssd_io io;
        uint32_t most, bytes;
    } cases[] = {{TIER_SSD_BUFFERED, 1, 5000},           {TIER_SSD_BUFFERED, 4095, 400000},
                 {TIER_SSD_BUFFERED, 5000, 5 * MIB - 1}, {TIER_SSD_PREAD, 4096, 400000},
                 {TIER_SSD_PREAD, 4097, 400000},         {TIER_SSD_PREAD, 12287, 5 * MIB - 1}};
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, 6 * MIB);
    for (uint32_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        ssd_rig_open(&r, cases[c].io, 3, true);
        ssd_rig_clear(&r);
        r.fake.short_nth = 1;
        r.fake.short_forever = true;
        r.fake.short_bytes = cases[c].most;
        const struct tier_ssd_part part =
            ssd_rig_part(&r, 2, sizes[2] - cases[c].bytes, cases[c].bytes);
        const struct tier_ssd_result result = ssd_rig_read(&r, &part, 1);
        assert_ok(&result);
        ssd_rig_assert_part(&r, &part);
        ssd_rig_assert_rest(&r, &part, 1);
    }
    ssd_rig_done(&r);
}

static void test_tier_ssd_reads_without_progress_end_in_an_error(void **state)
{
    (void)state;
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, MIB);
    ssd_rig_open(&r, TIER_SSD_PREAD, 2, true);
    struct tier_ssd_part part = ssd_rig_part(&r, 0, 4096 + 9, 9000);
    r.fake.short_nth = 1;
    r.fake.short_forever = true;
    r.fake.short_bytes = 4095; /* no direct read can go on from there */
    struct tier_ssd_result result = ssd_rig_read(&r, &part, 1);
    assert_io_error(&result, "part0.gguf: reading 12288 bytes at 4096 stays short",
                    "check the disk");
    r.fake.short_nth = 0;
    r.fake.fail_errno = EAGAIN;
    r.fake.fail_nth = 1;
    r.fake.fail_forever = true;
    result = ssd_rig_read(&r, &part, 1);
    assert_io_error(&result, "part0.gguf: reading 12288 bytes at 4096 fails",
                    "Resource temporarily unavailable");
    r.fake.fail_nth = 0;
    result = ssd_rig_read(&r, &part, 1);
    assert_ok(&result);
    ssd_rig_assert_part(&r, &part);
    ssd_rig_done(&r);
}

static void test_tier_ssd_eio_is_tried_once_more(void **state)
{
    (void)state;
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, MIB);
    ssd_rig_open(&r, TIER_SSD_PREAD, 2, true);
    struct tier_ssd_part part = ssd_rig_part(&r, 1, 500000, 200001);
    r.fake.fail_errno = EIO;
    r.fake.fail_nth = 1;
    struct tier_ssd_result result = ssd_rig_read(&r, &part, 1);
    assert_ok(&result);
    ssd_rig_assert_part(&r, &part);
    struct tier_ssd_counts c = tier_ssd_count(r.ssd);
    assert_int_equal(r.fake.n_reads, 2);
    assert_true(c.retries == 1 && c.failures == 0);

    r.fake.fail_nth = 1;
    r.fake.fail_forever = true;
    result = ssd_rig_read(&r, &part, 1);
    assert_io_error(&result, "part1.gguf: reading 200704 bytes at 499712", "Input/output error");
    assert_int_equal(result.error.os_errno, EIO);
    c = tier_ssd_count(r.ssd);
    assert_int_equal(r.fake.n_reads, 4);
    assert_true(c.retries == 2 && c.failures == 1);
    ssd_rig_done(&r);
}

/* Three requests, of several reads each, with the Nth read failing: once, or it and all later ones.
 * What fails says so, the others are whole, and the next request is exact. */
static bool run_with_fault(struct ssd_rig *r, uint64_t nth, int failed, bool forever, uint64_t seed)
{
    struct tier_ssd_part parts[3][TIER_SSD_PARTS];
    ssd_rig_clear(r);
    r->fake.seed = seed;
    r->fake.n_faults = 0;
    r->fake.fail_nth = nth;
    r->fake.fail_errno = failed;
    r->fake.fail_forever = forever;
    for (uint32_t i = 0; i < 3; i++) {
        for (uint32_t k = 0; k < TIER_SSD_PARTS; k++)
            parts[i][k] = ssd_rig_part(r, k, 4096 * i + 13 * k, k == 2 ? 3 * MIB : 50000);
        tier_ssd_start(r->ssd, i, parts[i], TIER_SSD_PARTS);
    }
    uint32_t n_failed = 0;
    for (uint32_t n = 0; n < 3; n++) {
        const struct tier_ssd_result result = ssd_rig_wait(r);
        if (result.code == ERR_OK) {
            for (uint32_t k = 0; k < TIER_SSD_PARTS; k++)
                ssd_rig_assert_part(r, &parts[result.id][k]);
            continue;
        }
        assert_io_error(&result, ".gguf: reading ", strerror(failed));
        n_failed++;
    }
    const bool fired = r->fake.n_faults > 0;
    assert_int_equal(r->fake.n_open, 0);
    assert_int_equal(tier_ssd_room(r->ssd), TIER_SSD_REQUESTS);
    if (!forever || !fired)
        assert_int_equal(n_failed, 0);
    else if (nth == 1)
        assert_int_equal(n_failed, 3);
    else
        assert_true(n_failed >= 1);
    r->fake.fail_nth = 0;
    ssd_rig_clear(r);
    parts[0][0] = ssd_rig_part(r, 0, 99, 99999);
    const struct tier_ssd_result next = ssd_rig_read(r, parts[0], 1);
    assert_ok(&next);
    ssd_rig_assert_part(r, &parts[0][0]);
    return fired;
}

static void test_tier_ssd_nth_read_fails_alone(void **state)
{
    (void)state;
    static const int errors[] = {EIO, EINTR, EAGAIN, ENOMEM, EINVAL};
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, 12 * MIB);
    for (uint32_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
        for (uint64_t seed = 0; seed < 3; seed++) {
            ssd_rig_open(&r, seed == 1 ? TIER_SSD_BUFFERED : TIER_SSD_PREAD, 4, true);
            uint64_t nth = 1;
            while (run_with_fault(&r, nth, errors[i], false, seed))
                nth++;
            assert_true(nth > 3 * 5); /* so many reads there were, at least */
        }
    for (uint64_t seed = 0; seed < 3; seed++) {
        ssd_rig_open(&r, TIER_SSD_PREAD, 4, true);
        for (uint64_t nth = 1; run_with_fault(&r, nth, EIO, true, seed);)
            nth++;
    }
    ssd_rig_done(&r);
}

/* The rest of a long request that failed is not read, and what waits behind it comes. */
static void test_tier_ssd_failed_request_stops_reading(void **state)
{
    (void)state;
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, 6 * MIB);
    ssd_rig_open(&r, TIER_SSD_PREAD, 1, true);
    const struct tier_ssd_part parts[2] = {ssd_rig_part(&r, 2, 0, 5 * MIB),
                                           ssd_rig_part(&r, 0, 0, 5)};
    r.fake.fail_errno = EIO;
    r.fake.fail_nth = 2;
    r.fake.fail_forever = true;
    tier_ssd_start(r.ssd, 1, &parts[0], 1);
    tier_ssd_start(r.ssd, 2, &parts[1], 1);
    struct tier_ssd_result result = ssd_rig_wait(&r);
    assert_int_equal(result.id, 1);
    assert_io_error(&result, "part2.gguf: reading 524288 bytes at 524288", "Input/output");
    assert_int_equal(r.fake.n_reads, 3);
    r.fake.fail_nth = 0;
    result = ssd_rig_wait(&r);
    assert_int_equal(result.id, 2);
    assert_ok(&result);
    ssd_rig_assert_part(&r, &parts[1]);
    assert_int_equal(r.fake.n_reads, 4);
    ssd_rig_done(&r);
}

static void test_tier_ssd_part_behind_the_end_is_an_error(void **state)
{
    (void)state;
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, MIB);
    ssd_rig_open(&r, TIER_SSD_PREAD, 2, true);
    const struct tier_ssd_part parts[3] = {{0, 4096, 100, 4096},
                                           {1, 699999, 3, 699999 % WINDOW + 8192},
                                           {0, UINT64_MAX - 4095, UINT64_MAX, 1}};
    struct tier_ssd_result result = ssd_rig_read(&r, parts, 2);
    assert_io_error(&result, "part1.gguf ends at byte 700001", "was it truncated?");
    result = ssd_rig_read(&r, &parts[2], 1);
    assert_io_error(&result, "part0.gguf ends at byte 3145851", "was it truncated?");
    assert_int_equal(r.fake.n_reads, 0);
    ssd_rig_done(&r);
}

/* A file that becomes shorter while it is open: what is gone says so, what is there comes. */
static void test_tier_ssd_truncated_file_is_an_error(void **state)
{
    (void)state;
    for (uint32_t w = 0; w < N_WAYS; w++) {
        struct ssd_rig r;
        ssd_rig_init(&r, ways[w].parent, sizes, 8 * MIB);
        ssd_rig_open(&r, ways[w].io, 4, ways[w].fake);
        assert_int_equal(truncate(r.paths[2], 2 * MIB + 10), 0);
        const struct tier_ssd_part parts[5] = {
            ssd_rig_part(&r, 2, 2 * MIB - 5000, 5010), ssd_rig_part(&r, 2, 2 * MIB - 5000, 5011),
            ssd_rig_part(&r, 2, 3 * MIB, 1000), ssd_rig_part(&r, 2, MIB / 2, 4 * MIB),
            ssd_rig_part(&r, 0, 0, 1000)};
        for (uint32_t i = 0; i < 5; i++)
            tier_ssd_start(r.ssd, i, &parts[i], 1);
        for (uint32_t n = 0; n < 5; n++) {
            const struct tier_ssd_result result = ssd_rig_wait(&r);
            if (result.id >= 1 && result.id <= 3)
                assert_io_error(&result, "part2.gguf ends at byte 2097162", "was it truncated?");
            else
                assert_ok(&result);
            if (result.code == ERR_OK)
                ssd_rig_assert_part(&r, &parts[result.id]);
        }
        struct err e = {.code = ERR_OK};
        assert_int_equal(tier_ssd_check_files(r.ssd, &e), ERR_FORMAT);
        assert_non_null(strstr(e.text, "part2.gguf has 2097162 bytes and had 5242880"));
        ssd_rig_done(&r);
    }
}

/* The Nth allocation of opening fails: said, nothing leaked, and the next opening works. */
static void test_tier_ssd_open_without_memory_is_clean(void **state)
{
    (void)state;
    static const enum tier_ssd_io ios[] = {TIER_SSD_PREAD, TIER_SSD_BUFFERED, TIER_SSD_AUTO};
    for (uint32_t i = 0; i < 3; i++) {
        struct ssd_rig r;
        ssd_rig_init(&r, "/var/tmp", sizes, MIB);
        const char *paths[SSD_RIG_FILES];
        const struct tier_ssd_options o = ssd_rig_options(&r, paths, ios[i], 4, false);
        const uint64_t live = alloc_live_blocks();
        uint32_t n_failed = 0;
        for (uint32_t nth = 1; nth <= 30; nth++) {
            struct err e = {.code = ERR_OK};
            alloc_fail_at(nth, 0);
            const enum err_code code = tier_ssd_open(&o, &r.ssd, &e);
            alloc_fail_at(0, 0);
            if (code == ERR_OK) { /* none failed, or only one that reading can do without */
                ssd_rig_close(&r);
            } else {
                n_failed++;
                assert_int_equal(code, ERR_NOMEM);
                assert_non_null(strstr(e.text, "no memory"));
                assert_null(r.ssd);
            }
            assert_int_equal(alloc_live_blocks(), live);
        }
        assert_true(n_failed >= 5 && n_failed < 30);
        ssd_rig_open(&r, ios[i], 4, false);
        ssd_rig_done(&r);
    }
}

static void test_tier_ssd_files_that_cannot_be_opened_are_errors(void **state)
{
    (void)state;
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, MIB);
    const char *paths[SSD_RIG_FILES];
    struct tier_ssd_options o = ssd_rig_options(&r, paths, TIER_SSD_AUTO, 4, false);
    struct err e = {.code = ERR_OK};
    paths[1] = "/var/tmp/islet-there-is-no-such-file";
    assert_int_equal(tier_ssd_open(&o, &r.ssd, &e), ERR_IO);
    assert_non_null(strstr(e.text, "islet-there-is-no-such-file: No such file"));
    e.code = ERR_OK;
    paths[1] = r.dir;
    assert_int_equal(tier_ssd_open(&o, &r.ssd, &e), ERR_IO);
    assert_non_null(strstr(e.text, "is not a regular file"));
    assert_null(r.ssd);
    ssd_rig_done(&r);
}

static void test_tier_ssd_about_tells_the_way(void **state)
{
    (void)state;
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, MIB);
    ssd_rig_open(&r, TIER_SSD_PREAD, 5, false);
    assert_string_equal(tier_ssd_about(r.ssd), "pread with 5 threads, O_DIRECT, depth 5");
    ssd_rig_open(&r, TIER_SSD_BUFFERED, 2, false);
    assert_string_equal(tier_ssd_about(r.ssd),
                        "pread with 2 threads, through the page cache, depth 2");
    ssd_rig_done(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tier_ssd_every_offset_arrives_in_place),
        cmocka_unit_test(test_tier_ssd_split_files_end_unaligned_arrive),
        cmocka_unit_test(test_tier_ssd_long_part_uses_depth),
        cmocka_unit_test(test_tier_ssd_touching_parts_are_one_read),
        cmocka_unit_test(test_tier_ssd_nothing_to_read_ends_at_once),
        cmocka_unit_test(test_tier_ssd_reordered_reads_end_each_once),
        cmocka_unit_test(test_tier_ssd_room_counts_open_requests),
        cmocka_unit_test(test_tier_ssd_wait_without_block_returns),
        cmocka_unit_test(test_tier_ssd_close_waits_for_reads),
        cmocka_unit_test(test_tier_ssd_short_read_at_every_size_is_continued),
        cmocka_unit_test(test_tier_ssd_short_reads_for_ever_arrive),
        cmocka_unit_test(test_tier_ssd_reads_without_progress_end_in_an_error),
        cmocka_unit_test(test_tier_ssd_eio_is_tried_once_more),
        cmocka_unit_test(test_tier_ssd_nth_read_fails_alone),
        cmocka_unit_test(test_tier_ssd_failed_request_stops_reading),
        cmocka_unit_test(test_tier_ssd_part_behind_the_end_is_an_error),
        cmocka_unit_test(test_tier_ssd_truncated_file_is_an_error),
        cmocka_unit_test(test_tier_ssd_open_without_memory_is_clean),
        cmocka_unit_test(test_tier_ssd_files_that_cannot_be_opened_are_errors),
        cmocka_unit_test(test_tier_ssd_about_tells_the_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "ssd_rig.h"
#include "tier_ssd.h"

enum {
    MIB = 1 << 20,
    PIECE = 256 * MIB, /* of the arena that is pinned at once */
    SKIPPED = 77
};

static const uint64_t sizes[SSD_RIG_FILES] = {3 * MIB + 5, 700001, 100};

static bool reads_right(struct ssd_rig *r)
{
    ssd_rig_clear(r);
    const struct tier_ssd_part parts[3] = {ssd_rig_part(r, 0, 4099, 3 * MIB - 4094),
                                           ssd_rig_part(r, 1, 699999, 2),
                                           ssd_rig_part(r, 2, 1, 98)};
    const struct tier_ssd_result result = ssd_rig_read(r, parts, 3);
    bool right = result.code == ERR_OK;
    for (uint32_t i = 0; i < 3; i++)
        right = right && memcmp(r->arena + parts[i].place,
                                r->bytes[parts[i].file] + parts[i].offset, parts[i].bytes) == 0;
    return right;
}

/* Runs fn in a child and returns its exit code: what it does to itself stays there. */
static int in_child(int (*fn)(struct ssd_rig *r, int argument), struct ssd_rig *r, int argument)
{
    int status = 0;
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0)
        _exit(fn(r, argument));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == SKIPPED)
        print_message("skipped: this system has no io_uring\n");
    return WEXITSTATUS(status);
}

static bool has_uring(struct ssd_rig *r)
{
    const char *paths[SSD_RIG_FILES];
    const struct tier_ssd_options o = ssd_rig_options(r, paths, TIER_SSD_URING, 4, false);
    const bool has = tier_ssd_open(&o, &r->ssd, NULL) == ERR_OK;
    ssd_rig_close(r);
    return has;
}

/* From here on io_uring_setup fails with this errno, as containers do it. */
static bool refuse_uring(int error)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {sizeof(code) / sizeof(code[0]), code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static int read_refused(struct ssd_rig *r, int error)
{
    const char *paths[SSD_RIG_FILES];
    struct err e = {.code = ERR_OK};
    if (!refuse_uring(error))
        return 1;
    const struct tier_ssd_options o = ssd_rig_options(r, paths, TIER_SSD_URING, 4, false);
    if (tier_ssd_open(&o, &r->ssd, &e) != ERR_UNSUPPORTED || r->ssd != NULL)
        return 2;
    if (strstr(e.text, "ssd.io = uring") == NULL || strstr(e.text, strerror(error)) == NULL)
        return 3;
    ssd_rig_open(r, TIER_SSD_AUTO, 4, false);
    const char *about = tier_ssd_about(r->ssd);
    if (strstr(about, "pread with 4 threads, O_DIRECT") == NULL ||
        strstr(about, "io_uring refused") == NULL || strstr(about, strerror(error)) == NULL)
        return 4;
    if (!reads_right(r))
        return 5;
    ssd_rig_close(r);
    return 0;
}

static void test_tier_read_uring_refused_is_pread_and_said(void **state)
{
    (void)state;
    static const int errors[] = {EPERM, ENOSYS, ENOMEM};
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, 4 * MIB);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(in_child(read_refused, &r, errors[i]), 0);
    ssd_rig_done(&r);
}

/* Less memory may be locked than the arena has, and no privilege helps. */
static int read_unregistered(struct ssd_rig *r, int argument)
{
    (void)argument;
    const struct rlimit little = {MIB, MIB}; /* the ring itself needs some */
    if (!has_uring(r))
        return SKIPPED;
    if (chmod(r->dir, 0755) != 0 || setrlimit(RLIMIT_MEMLOCK, &little) != 0 ||
        (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0))
        return 1;
    ssd_rig_open(r, TIER_SSD_URING, 4, false);
    if (strstr(tier_ssd_about(r->ssd), "io_uring without registered buffers (") == NULL)
        return 2;
    if (!reads_right(r))
        return 3;
    ssd_rig_close(r);
    return 0;
}

static void test_tier_read_uring_locked_memory_refused_reads_unregistered(void **state)
{
    (void)state;
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, 4 * MIB);
    const int code = in_child(read_unregistered, &r, 0);
    assert_true(code == 0 || code == SKIPPED);
    ssd_rig_done(&r);
}

/* Pages are pinned piece by piece, with reads in flight: before, in between and after, in pinned
 * and other pieces and across their border, the bytes are right. */
static void test_tier_read_uring_pinned_pieces_read_right(void **state)
{
    (void)state;
    static const uint64_t steps[] = {0, 4096, PIECE - 1, PIECE, PIECE + MIB, 2 * PIECE};
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, PIECE + 2 * MIB);
    if (has_uring(&r)) {
        ssd_rig_open(&r, TIER_SSD_AUTO, 4, false);
        assert_non_null(strstr(tier_ssd_about(r.ssd), "io_uring"));
        assert_non_null(strstr(tier_ssd_about(r.ssd), "O_DIRECT, depth 4"));
        for (uint32_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
            struct tier_ssd_part parts[5];
            const uint64_t places[5] = {0, MIB, PIECE - 8 * 4096, PIECE + MIB,
                                        PIECE + MIB + MIB / 2};
            for (uint32_t k = 0; k < 5; k++) {
                parts[k] = (struct tier_ssd_part){0, k * UINT64_C(300000) + i, 200000,
                                                  places[k] + (k * 300000 + i) % 4096};
                memset(r.arena + places[k], SSD_RIG_EMPTY, 200000 + 2 * 4096);
                tier_ssd_start(r.ssd, k, &parts[k], 1);
                if (k == 2)
                    tier_ssd_reserved(r.ssd, steps[i]);
            }
            for (uint32_t k = 0; k < 5; k++) {
                const struct tier_ssd_result result = ssd_rig_wait(&r);
                assert_int_equal(result.code, ERR_OK);
                ssd_rig_assert_part(&r, &parts[result.id]);
            }
        }
        assert_int_equal(tier_ssd_count(r.ssd).retries, 0);
    } else {
        print_message("skipped: this system has no io_uring\n");
    }
    ssd_rig_done(&r);
}

/* The limit on locked memory allows some, not the first piece: it is read all the same. */
static int pin_part(struct ssd_rig *r, int argument)
{
    (void)argument;
    const struct rlimit some = {3 * MIB, 3 * MIB};
    if (!has_uring(r))
        return SKIPPED;
    if (chmod(r->dir, 0755) != 0 || setrlimit(RLIMIT_MEMLOCK, &some) != 0 ||
        (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0))
        return 1;
    ssd_rig_open(r, TIER_SSD_URING, 4, false);
    if (strstr(tier_ssd_about(r->ssd), "io_uring, O_DIRECT") == NULL)
        return 2;
    tier_ssd_reserved(r->ssd, r->arena_bytes);
    const struct tier_ssd_part parts[2] = {{0, 0, MIB, 0}, {0, 5, MIB, 2 * MIB + 5}};
    if (ssd_rig_read(r, parts, 2).code != ERR_OK)
        return 3;
    for (uint32_t i = 0; i < 2; i++)
        if (memcmp(r->arena + parts[i].place, r->bytes[0] + parts[i].offset, MIB) != 0)
            return 4;
    ssd_rig_close(r);
    return 0;
}

static void test_tier_read_uring_pin_refused_later_reads_on(void **state)
{
    (void)state;
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, 4 * MIB);
    const int code = in_child(pin_part, &r, 0);
    assert_true(code == 0 || code == SKIPPED);
    ssd_rig_done(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tier_read_uring_refused_is_pread_and_said),
        cmocka_unit_test(test_tier_read_uring_locked_memory_refused_reads_unregistered),
        cmocka_unit_test(test_tier_read_uring_pinned_pieces_read_right),
        cmocka_unit_test(test_tier_read_uring_pin_refused_later_reads_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

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

static void test_tier_read_uring_registered_reads_right(void **state)
{
    (void)state;
    struct ssd_rig r;
    ssd_rig_init(&r, "/var/tmp", sizes, 4 * MIB);
    if (has_uring(&r)) {
        ssd_rig_open(&r, TIER_SSD_AUTO, 4, false);
        assert_non_null(strstr(tier_ssd_about(r.ssd), "io_uring"));
        assert_non_null(strstr(tier_ssd_about(r.ssd), "O_DIRECT, depth 4"));
        assert_true(reads_right(&r));
    } else {
        print_message("skipped: this system has no io_uring\n");
    }
    ssd_rig_done(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tier_read_uring_refused_is_pread_and_said),
        cmocka_unit_test(test_tier_read_uring_locked_memory_refused_reads_unregistered),
        cmocka_unit_test(test_tier_read_uring_registered_reads_right),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "ssd_rig.h"
#include "tier_file.h"
#include "tier_ssd.h"

static const uint64_t sizes[SSD_RIG_FILES] = {300001, 8192, 100};

static struct tier_file open_file(const char *path)
{
    struct tier_file f = {.fd = -1};
    struct err e = {.code = ERR_OK};
    if (tier_file_open(path, -1, &f, &e) != ERR_OK)
        fail_msg("%s", e.text);
    return f;
}

static void write_at(const char *path, off_t offset, const void *bytes, size_t n)
{
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, bytes, n, offset), n);
    close(fd);
}

static void test_tier_file_unchanged_is_fine(void **state)
{
    (void)state;
    struct ssd_rig r;
    struct err e = {.code = ERR_OK};
    ssd_rig_init(&r, "/var/tmp", sizes, 4096);
    struct tier_file f = open_file(r.paths[0]);
    assert_int_equal(tier_file_check(&f, &e), ERR_OK);
    assert_true(f.size == sizes[0]);
    /* Another file in its place, or none: the open one is still the old one. */
    assert_int_equal(rename(r.paths[1], r.paths[0]), 0);
    assert_int_equal(tier_file_check(&f, &e), ERR_OK);
    assert_int_equal(unlink(r.paths[0]), 0);
    assert_int_equal(tier_file_check(&f, &e), ERR_OK);
    assert_int_equal(e.code, ERR_OK);
    tier_file_close(&f);
    ssd_rig_done(&r);
}

static void test_tier_file_changed_is_a_format_error(void **state)
{
    (void)state;
    struct ssd_rig r;
    struct err e = {.code = ERR_OK};
    ssd_rig_init(&r, "/var/tmp", sizes, 4096);
    /* Written in place, same size. Its time of change is set to be sure of a step of the clock. */
    struct tier_file f = open_file(r.paths[0]);
    write_at(r.paths[0], 5000, "x", 1);
    const struct timespec times[2] = {{.tv_sec = 1}, {.tv_sec = 1700000000, .tv_nsec = 5}};
    assert_int_equal(utimensat(AT_FDCWD, r.paths[0], times, 0), 0);
    assert_int_equal(tier_file_check(&f, &e), ERR_FORMAT);
    assert_non_null(strstr(e.text, "part0.gguf was written to since it was opened"));
    tier_file_close(&f);
    /* A nanosecond counts. */
    f = open_file(r.paths[0]);
    const struct timespec later[2] = {{.tv_sec = 1}, {.tv_sec = 1700000000, .tv_nsec = 6}};
    assert_int_equal(utimensat(AT_FDCWD, r.paths[0], later, 0), 0);
    assert_int_equal(tier_file_check(&f, NULL), ERR_FORMAT);
    tier_file_close(&f);
    /* Longer, and shorter. */
    for (uint32_t i = 0; i < 2; i++) {
        e.code = ERR_OK;
        f = open_file(r.paths[1]);
        assert_int_equal(truncate(r.paths[1], i == 0 ? 9000 : 10), 0);
        assert_int_equal(tier_file_check(&f, &e), ERR_FORMAT);
        assert_non_null(strstr(e.text, i == 0 ? "has 9000 bytes and had 8192" : "has 10 bytes"));
        assert_true(tier_file_size_now(&f) == (i == 0 ? 9000 : 10));
        tier_file_close(&f);
    }
    ssd_rig_done(&r);
}

/* The file whose headers were read is not the one that is opened now. */
static void test_tier_file_replaced_while_loading_is_refused(void **state)
{
    (void)state;
    struct ssd_rig r;
    struct err e = {.code = ERR_OK};
    ssd_rig_init(&r, "/var/tmp", sizes, 4096);
    const char *paths[SSD_RIG_FILES];
    int fds[SSD_RIG_FILES];
    struct tier_ssd_options o = ssd_rig_options(&r, paths, TIER_SSD_AUTO, 2, false);
    for (uint32_t i = 0; i < SSD_RIG_FILES; i++) {
        fds[i] = open(r.paths[i], O_RDONLY | O_CLOEXEC);
        assert_true(fds[i] >= 0);
    }
    o.fds = fds;
    assert_int_equal(tier_ssd_open(&o, &r.ssd, &e), ERR_OK);
    ssd_rig_close(&r);
    assert_int_equal(rename(r.paths[2], r.paths[1]), 0);
    o.n_files = 2;
    assert_int_equal(tier_ssd_open(&o, &r.ssd, &e), ERR_FORMAT);
    assert_non_null(strstr(e.text, "part1.gguf was replaced while it was loading"));
    assert_null(r.ssd);
    for (uint32_t i = 0; i < SSD_RIG_FILES; i++)
        close(fds[i]);
    ssd_rig_done(&r);
}

static void test_tier_file_not_regular_is_refused(void **state)
{
    (void)state;
    struct ssd_rig r;
    struct err e = {.code = ERR_OK};
    ssd_rig_init(&r, "/var/tmp", sizes, 4096);
    struct tier_file f;
    unlink(r.paths[0]);
    assert_int_equal(mkfifo(r.paths[0], 0600), 0);
    assert_int_equal(tier_file_open(r.paths[0], -1, &f, &e), ERR_IO); /* and does not hang */
    assert_non_null(strstr(e.text, "part0.gguf is not a regular file"));
    ssd_rig_done(&r);
}

/* A file system whose unit is larger than ours. Ours are made small here, theirs are as they are:
 * either the kernel tells the unit, or the trial read is refused. */
static void test_tier_file_larger_unit_is_said(void **state)
{
    (void)state;
    struct ssd_rig r;
    struct err e = {.code = ERR_OK};
    ssd_rig_init(&r, "/var/tmp", sizes, 4096);
    struct tier_file f = open_file(r.paths[0]);
    if (tier_file_direct(&f, 4096, NULL) != ERR_OK) {
        print_message("skipped: no O_DIRECT under /var/tmp\n");
        tier_file_close(&f);
        ssd_rig_done(&r);
        return;
    }
    assert_true(fcntl(f.fd, F_GETFL) & O_DIRECT);
    assert_false(fcntl(f.fd, F_GETFL) & O_NONBLOCK);
    assert_int_equal(tier_file_direct(&f, 128, &e), ERR_UNSUPPORTED);
    assert_non_null(strstr(e.text, "O_DIRECT refused: "));
    tier_file_buffered(&f);
    assert_false(fcntl(f.fd, F_GETFL) & (O_DIRECT | O_NONBLOCK));
    tier_file_close(&f);
    ssd_rig_done(&r);
}

/* ramfs has no O_DIRECT. In a child, for the mount; 77: no right to mount. */
static int refused_direct(void)
{
    if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0)
        return 77;
    char dir[] = "/tmp/islet-ramfs-XXXXXX";
    if (mkdtemp(dir) == NULL || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("none", dir, "ramfs", 0, NULL) != 0)
        return rmdir(dir), 77;
    struct ssd_rig r;
    ssd_rig_init(&r, dir, sizes, 400 << 10);
    struct err e = {.code = ERR_OK};
    const char *paths[SSD_RIG_FILES];
    const struct tier_ssd_options o = ssd_rig_options(&r, paths, TIER_SSD_URING, 2, false);
    int bad = tier_ssd_open(&o, &r.ssd, &e) == ERR_UNSUPPORTED ? 0 : 1;
    bad |= strstr(e.text, "ssd.io = uring") != NULL && strstr(e.text, "O_DIRECT refused") ? 0 : 2;
    ssd_rig_open(&r, TIER_SSD_AUTO, 2, false);
    bad |= strstr(tier_ssd_about(r.ssd), "pread with 2 threads, buffered") != NULL ? 0 : 4;
    bad |= strstr(tier_ssd_about(r.ssd), "O_DIRECT refused") != NULL ? 0 : 8;
    const struct tier_ssd_part parts[2] = {ssd_rig_part(&r, 0, 4099, sizes[0] - 4099),
                                           ssd_rig_part(&r, 2, 50, 50)};
    const struct tier_ssd_result result = ssd_rig_read(&r, parts, 2);
    bad |= result.code == ERR_OK ? 0 : 16;
    for (uint32_t i = 0; i < 2; i++)
        if (memcmp(r.arena + parts[i].place, r.bytes[parts[i].file] + parts[i].offset,
                   parts[i].bytes) != 0)
            bad |= 32;
    ssd_rig_done(&r);
    return umount2(dir, MNT_DETACH) | rmdir(dir) | bad;
}

static void test_tier_file_without_direct_reads_is_buffered_and_said(void **state)
{
    (void)state;
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0)
        _exit(refused_direct());
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        print_message("skipped: no right to mount a ramfs\n");
    else
        assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tier_file_unchanged_is_fine),
        cmocka_unit_test(test_tier_file_changed_is_a_format_error),
        cmocka_unit_test(test_tier_file_replaced_while_loading_is_refused),
        cmocka_unit_test(test_tier_file_not_regular_is_refused),
        cmocka_unit_test(test_tier_file_larger_unit_is_said),
        cmocka_unit_test(test_tier_file_without_direct_reads_is_buffered_and_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

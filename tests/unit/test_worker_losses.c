#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "worker_losses.h"

#define MINUTE (UINT64_C(60) * 1000000000)

static char dir[64], socket_path[80], file[96];

static int make_dir(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/islet-losses-XXXXXX");
    assert_non_null(mkdtemp(dir));
    snprintf(socket_path, sizeof socket_path, "%s/w.sock", dir);
    snprintf(file, sizeof file, "%s.gpu-lost", socket_path);
    return 0;
}

static int remove_dir(void **state)
{
    (void)state;
    unlink(file);
    return rmdir(dir);
}

static void note(uint64_t now_ns)
{
    struct err e = {.code = ERR_OK};
    if (worker_losses_note(socket_path, now_ns, &e) != ERR_OK)
        fail_msg("%s", e.text);
}

static void test_worker_losses_two_within_ten_minutes_are_many(void **state)
{
    (void)state;
    assert_false(worker_losses_are_many(socket_path, MINUTE));
    note(MINUTE);
    assert_false(worker_losses_are_many(socket_path, MINUTE));
    note(11 * MINUTE - 1);
    assert_true(worker_losses_are_many(socket_path, 11 * MINUTE - 1));
    assert_false(worker_losses_are_many(socket_path, 11 * MINUTE));
    note(12 * MINUTE);
    assert_true(worker_losses_are_many(socket_path, 20 * MINUTE));
}

/* The machine was started again since. */
static void test_worker_losses_of_the_future_do_not_count(void **state)
{
    (void)state;
    note(100 * MINUTE);
    note(101 * MINUTE);
    assert_false(worker_losses_are_many(socket_path, 99 * MINUTE));
}

static void test_worker_losses_any_file_is_read(void **state)
{
    (void)state;
    static const char *const texts[] = {"",
                                        "\n",
                                        "x",
                                        "-1 -1",
                                        "99999999999999999999999999 1",
                                        "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 "
                                        "23 24 25 26 27 28 29 30 31 32 33 34 35"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        FILE *f = fopen(file, "we");
        assert_non_null(f);
        fputs(texts[i], f);
        fclose(f);
        (void)worker_losses_are_many(socket_path, MINUTE);
        note(MINUTE);
        note(MINUTE);
        assert_true(worker_losses_are_many(socket_path, MINUTE));
    }
}

static void test_worker_losses_that_cannot_be_written_are_an_error(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    assert_int_equal(worker_losses_note("/nowhere/w.sock", MINUTE, &e), ERR_IO);
    assert_non_null(strstr(e.text, "/nowhere/w.sock.gpu-lost"));
    assert_int_equal(symlink("/etc/passwd", file), 0);
    assert_int_equal(worker_losses_note(socket_path, MINUTE, &(struct err){.code = ERR_OK}),
                     ERR_IO);
    unlink(file);
    assert_int_equal(mkfifo(file, 0600), 0); /* nobody reads it: this does not wait for one */
    assert_false(worker_losses_are_many(socket_path, MINUTE));
    assert_int_equal(worker_losses_note(socket_path, MINUTE, &(struct err){.code = ERR_OK}),
                     ERR_IO);
}

static void test_worker_losses_on_a_socket_without_a_path_are_an_error(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    assert_int_equal(chdir(dir), 0);
    assert_int_equal(worker_losses_note("", MINUTE, &e), ERR_IO);
    assert_int_equal(access(".gpu-lost", F_OK), -1);
    assert_false(worker_losses_are_many("", MINUTE));
    assert_int_equal(chdir("/"), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_dir, remove_dir)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_worker_losses_two_within_ten_minutes_are_many),
        TEST(test_worker_losses_of_the_future_do_not_count),
        TEST(test_worker_losses_any_file_is_read),
        TEST(test_worker_losses_that_cannot_be_written_are_an_error),
        TEST(test_worker_losses_on_a_socket_without_a_path_are_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

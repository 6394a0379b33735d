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

#include "paths.h"

static char root[64];

static int make_root(void **state)
{
    (void)state;
    snprintf(root, sizeof root, "/tmp/islet-test-XXXXXX");
    unsetenv("RUNTIME_DIRECTORY");
    unsetenv("STATE_DIRECTORY");
    return mkdtemp(root) == NULL;
}

static int drop_root(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

static void test_paths_runtime_is_made_private_under_xdg(void **state)
{
    (void)state;
    char got[200], want[100];
    struct stat st;
    struct err e = {.code = ERR_OK};
    setenv("XDG_RUNTIME_DIR", root, 1);
    snprintf(want, sizeof want, "%s/islet/s", root);
    for (unsigned i = 0; i < 2; i++) /* made, then found */
        assert_int_equal(paths_socket("auto", "s", got, sizeof got, &e), ERR_OK);
    assert_string_equal(got, want);
    want[strlen(want) - 2] = '\0'; /* the directory */
    assert_int_equal(stat(want, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
}

static void test_paths_runtime_takes_the_first_of_systemds(void **state)
{
    (void)state;
    char got[200], list[200], want[100];
    snprintf(want, sizeof want, "%s/one/s", root);
    snprintf(list, sizeof list, "%s/one:%s/two", root, root);
    setenv("RUNTIME_DIRECTORY", list, 1);
    assert_int_equal(paths_socket("auto", "s", got, sizeof got, NULL), ERR_OK);
    assert_string_equal(got, want);
    unsetenv("RUNTIME_DIRECTORY");
}

static void test_paths_state_is_made_with_its_parents(void **state)
{
    (void)state;
    char got[200], want[100];
    struct stat st;
    setenv("HOME", root, 1);
    snprintf(want, sizeof want, "%s/.local/state/islet", root);
    assert_int_equal(paths_state(got, sizeof got, NULL), ERR_OK);
    assert_string_equal(got, want);
    assert_int_equal(stat(got, &st), 0);
}

static void test_paths_bad_directories_are_refused(void **state)
{
    (void)state;
    char path[100], got[200];
    setenv("XDG_RUNTIME_DIR", root, 1);
    snprintf(path, sizeof path, "%s/islet", root);
    struct err e = {.code = ERR_OK};
    mkdir(path, 0700);
    chmod(path, 0777);
    assert_int_equal(paths_socket("auto", "s", got, sizeof got, &e), ERR_IO);
    assert_non_null(strstr(e.text, "written by everybody"));
    rmdir(path);
    e.code = ERR_OK;
    assert_int_equal(symlink("/tmp", path), 0);
    assert_int_equal(paths_socket("auto", "s", got, sizeof got, &e), ERR_IO);
    assert_non_null(strstr(e.text, "is not a directory"));
    unlink(path);
    if (geteuid() != 0)
        return;
    e.code = ERR_OK;
    mkdir(path, 0700);
    assert_int_equal(chown(path, 1234, 1234), 0);
    assert_int_equal(paths_socket("auto", "s", got, sizeof got, &e), ERR_IO);
    assert_non_null(strstr(e.text, "belongs to user 1234"));
    rmdir(path);
}

static void test_paths_socket_auto_given_and_too_long(void **state)
{
    (void)state;
    char got[300], want[100], longest[120];
    struct err e = {.code = ERR_OK};
    setenv("XDG_RUNTIME_DIR", root, 1);
    snprintf(want, sizeof want, "%s/islet/worker.sock", root);
    assert_int_equal(paths_socket("auto", "worker.sock", got, sizeof got, &e), ERR_OK);
    assert_string_equal(got, want);
    assert_int_equal(paths_socket("/x/y", "worker.sock", got, sizeof got, &e), ERR_OK);
    assert_string_equal(got, "/x/y");
    memset(longest, 'a', sizeof longest);
    longest[0] = '/';
    longest[107] = '\0';
    assert_int_equal(paths_socket(longest, "s", got, sizeof got, &e), ERR_OK);
    longest[107] = 'a';
    longest[108] = '\0';
    assert_int_equal(paths_socket(longest, "s", got, sizeof got, &e), ERR_ARGUMENT);
    assert_non_null(strstr(e.text, "has 108 bytes; the limit is 107"));
    assert_int_equal(paths_socket("", "s", got, sizeof got, NULL), ERR_ARGUMENT);
    assert_int_equal(paths_socket("/abc", "s", got, 4, NULL), ERR_LIMIT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_paths_runtime_is_made_private_under_xdg, make_root,
                                        drop_root),
        cmocka_unit_test_setup_teardown(test_paths_runtime_takes_the_first_of_systemds, make_root,
                                        drop_root),
        cmocka_unit_test_setup_teardown(test_paths_state_is_made_with_its_parents, make_root,
                                        drop_root),
        cmocka_unit_test_setup_teardown(test_paths_bad_directories_are_refused, make_root,
                                        drop_root),
        cmocka_unit_test_setup_teardown(test_paths_socket_auto_given_and_too_long, make_root,
                                        drop_root),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

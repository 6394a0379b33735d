#include <grp.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "worker_socket.h"

static int make_folder(void **state)
{
    char *path = strdup("/tmp/islet-test-socket-XXXXXX");
    if (path == NULL || mkdtemp(path) == NULL || chdir(path) != 0)
        return -1;
    *state = path;
    return 0;
}

static int remove_folder(void **state)
{
    unlink("w");
    unlink("w.lock");
    int failed = chdir("/") != 0 || rmdir(*state) != 0;
    free(*state);
    return failed;
}

static int dial(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "w"};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    if (connect(fd, (const struct sockaddr *)&address, sizeof address) == 0)
        return fd;
    close(fd);
    return -1;
}

static void test_worker_socket_is_private_to_user_and_group(void **state)
{
    (void)state;
    struct worker_socket s;
    struct err e = {0};
    struct stat st;
    mode_t old = umask(0077);
    assert_int_equal(worker_socket_open("w", &s, &e), ERR_OK);
    umask(old);
    assert_int_equal(stat("w", &st), 0);
    assert_int_equal(st.st_mode & 0777, 0660);
    int client = dial();
    assert_true(client >= 0);
    int served = accept(s.fd, NULL, NULL);
    assert_true(served >= 0);
    assert_true(worker_socket_peer_allowed(served));
    close(served);
    close(client);
    worker_socket_close(&s);
    assert_int_equal(access("w", F_OK), -1);
    worker_socket_close(&s);
}

static void test_worker_socket_second_one_names_the_first_and_leaves_it_alone(void **state)
{
    (void)state;
    struct worker_socket first, second;
    struct err e = {0};
    char pid[32];
    assert_int_equal(worker_socket_open("w", &first, &e), ERR_OK);
    assert_int_equal(worker_socket_open("w", &second, &e), ERR_BUSY);
    snprintf(pid, sizeof pid, "pid %d", (int)getpid());
    assert_non_null(strstr(e.text, pid));
    int client = dial();
    assert_true(client >= 0);
    close(client);
    worker_socket_close(&first);
}

static void test_worker_socket_stale_file_is_replaced(void **state)
{
    (void)state;
    struct worker_socket s;
    struct err e = {0};
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "w"};
    int dead = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(dead, (const struct sockaddr *)&address, sizeof address), 0);
    close(dead);
    assert_int_equal(worker_socket_open("w", &s, &e), ERR_OK);
    int client = dial();
    assert_true(client >= 0);
    close(client);
    worker_socket_close(&s);
}

static void test_worker_socket_other_programs_socket_is_kept(void **state)
{
    (void)state;
    struct worker_socket s;
    struct err e = {0};
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "w"};
    int other = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(other, (const struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(other, 4), 0);
    assert_int_equal(worker_socket_open("w", &s, &e), ERR_IO);
    assert_non_null(strstr(e.text, "another program listens there"));
    int client = dial();
    assert_true(client >= 0);
    close(client);
    close(other);
}

static void test_worker_socket_plain_file_is_kept(void **state)
{
    (void)state;
    struct worker_socket s;
    struct err e = {0};
    FILE *f = fopen("w", "w");
    assert_non_null(f);
    fclose(f);
    assert_int_equal(worker_socket_open("w", &s, &e), ERR_IO);
    assert_non_null(strstr(e.text, "is not a socket"));
    assert_int_equal(access("w", F_OK), 0);
}

static void test_worker_socket_root_the_user_and_the_group_are_allowed(void **state)
{
    (void)state;
    static const struct {
        uid_t uid;
        gid_t gid;
        bool allowed;
    } peers[] = {{0, 0, true},
                 {0, 77, true},
                 {1000, 1000, true},
                 {1000, 77, true},
                 {1001, 1000, true},
                 {1001, 1001, false},
                 {1001, 0, false},
                 {65534, 65534, false},
                 {65534, 1000, true},
                 {1001, 999, false},
                 {(uid_t)-1, (gid_t)-1, false}};
    for (size_t i = 0; i < sizeof peers / sizeof peers[0]; i++) {
        const struct ucred peer = {.pid = 1, .uid = peers[i].uid, .gid = peers[i].gid};
        assert_int_equal(worker_socket_user_allowed(&peer, 1000, 1000), peers[i].allowed);
    }
}

/* Another user's process, let through by the file's mode, is told apart by its credentials. */
static void test_worker_socket_stranger_is_not_allowed(void **state)
{
    (void)state;
    struct worker_socket s;
    struct err e = {0};
    int ended;
    if (geteuid() != 0)
        skip(); /* only root can become somebody else */
    assert_int_equal(worker_socket_open("w", &s, &e), ERR_OK);
    assert_int_equal(chmod(".", 0755), 0);
    assert_int_equal(chmod("w", 0666), 0);
    for (int same_group = 0; same_group < 2; same_group++) {
        const gid_t group = same_group ? getegid() : 54321;
        const pid_t pid = fork();
        if (pid == 0) {
            bool is_other = setgroups(0, NULL) == 0 && setresgid(group, group, group) == 0 &&
                            setresuid(54321, 54321, 54321) == 0;
            _exit(is_other && dial() >= 0 ? 0 : 1);
        }
        int served = accept(s.fd, NULL, NULL);
        for (int tries = 0; served < 0 && tries < 10000; tries++) {
            poll(NULL, 0, 1);
            served = accept(s.fd, NULL, NULL);
        }
        assert_true(served >= 0);
        assert_int_equal(worker_socket_peer_allowed(served), same_group);
        close(served);
        assert_int_equal(waitpid(pid, &ended, 0), pid);
        assert_int_equal(ended, 0);
    }
    worker_socket_close(&s);
}

static void test_worker_socket_adopted_one_stays_the_callers(void **state)
{
    (void)state;
    struct worker_socket bound, adopted;
    struct err e = {0};
    assert_int_equal(worker_socket_open("w", &bound, &e), ERR_OK);
    for (int times = 0; times < 2; times++) {
        assert_int_equal(worker_socket_adopt(bound.fd, &adopted, &e), ERR_OK);
        assert_int_not_equal(adopted.fd, bound.fd);
        assert_string_equal(adopted.path, "w");
        worker_socket_close(&adopted);
        int client = dial();
        assert_true(client >= 0);
        close(client);
    }
    worker_socket_close(&bound);
    assert_int_equal(worker_socket_adopt(-1, &adopted, &e), ERR_IO);
}

int main(void)
{
#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        IN_FOLDER(test_worker_socket_is_private_to_user_and_group),
        IN_FOLDER(test_worker_socket_second_one_names_the_first_and_leaves_it_alone),
        IN_FOLDER(test_worker_socket_stale_file_is_replaced),
        IN_FOLDER(test_worker_socket_other_programs_socket_is_kept),
        IN_FOLDER(test_worker_socket_plain_file_is_kept),
        IN_FOLDER(test_worker_socket_root_the_user_and_the_group_are_allowed),
        IN_FOLDER(test_worker_socket_stranger_is_not_allowed),
        IN_FOLDER(test_worker_socket_adopted_one_stays_the_callers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

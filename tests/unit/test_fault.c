#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "fault.h"

/* Runs fn in a child with ISLET_CRASH_AT = setting; gives its wait status and what it wrote on
 * stderr. */
static int in_child(const char *setting, void (*fn)(void), char *ret_text, size_t n)
{
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        setenv("ISLET_CRASH_AT", setting, 1);
        fn();
        _exit(0);
    }
    close(ends[1]);
    size_t used = 0;
    for (ssize_t got; used + 1 < n && (got = read(ends[0], ret_text + used, n - 1 - used)) > 0;)
        used += (size_t)got;
    ret_text[used] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

static void child_three_passes(void)
{
    fault_setup();
    for (unsigned i = 0; i < 3; i++) {
        fault_hit(FAULT_ENGINE_TOKEN);
        fault_hit(FAULT_WORKER_SENT);
        fprintf(stderr, "%u", i);
        fflush(stderr);
    }
}

static void test_fault_crash_at_kills_at_the_nth_pass(void **state)
{
    (void)state;
    char text[2000];
    int status = in_child("engine.token:2", child_three_passes, text, sizeof text);
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGKILL);
    assert_string_equal(text, "0");
    status = in_child("", child_three_passes, text, sizeof text);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_string_equal(text, "012");
}

static void test_fault_bad_crash_at_exits_78_with_one_line(void **state)
{
    (void)state;
    static const char *const bad[] = {"engine.token",
                                      "engine.tokens:1",
                                      "engine.token:0",
                                      "x:y",
                                      "engine.token:-1",
                                      "engine.token:1x",
                                      ":1"};
    char text[2000];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int status = in_child(bad[i], child_three_passes, text, sizeof text);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 78);
        assert_non_null(strstr(text, bad[i]));
        assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
    }
}

static void test_fault_arm_once_and_for_ever(void **state)
{
    (void)state;
    assert_false(fault_hit(FAULT_ENGINE_LAYER));
    fault_arm(FAULT_ENGINE_LAYER, 2, false);
    assert_false(fault_hit(FAULT_ENGINE_LAYER));
    assert_true(fault_hit(FAULT_ENGINE_LAYER));
    assert_false(fault_hit(FAULT_ENGINE_LAYER));
    fault_arm(FAULT_ENGINE_LAYER, 1, true);
    assert_true(fault_hit(FAULT_ENGINE_LAYER));
    assert_true(fault_hit(FAULT_ENGINE_LAYER));
    assert_false(fault_hit(FAULT_ENGINE_TOKEN));
    fault_arm(FAULT_ENGINE_LAYER, 0, false);
    assert_false(fault_hit(FAULT_ENGINE_LAYER));
}

static void test_fault_list_names_all_points(void **state)
{
    (void)state;
    char *text = NULL;
    size_t n = 0, lines = 0;
    FILE *out = open_memstream(&text, &n);
    fault_list(out);
    fclose(out);
    for (const char *p = text; (p = strchr(p, '\n')) != NULL; p++)
        lines++;
    assert_int_equal(lines, FAULT_N);
    assert_non_null(strstr(text, "engine.token "));
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fault_crash_at_kills_at_the_nth_pass),
        cmocka_unit_test(test_fault_bad_crash_at_exits_78_with_one_line),
        cmocka_unit_test(test_fault_arm_once_and_for_ever),
        cmocka_unit_test(test_fault_list_names_all_points),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <errno.h>
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "log.h"
#include "utf8.h"

static char captured[32768];
static int capture_fd, real_stderr;

static void capture_start(void)
{
    capture_fd = memfd_create("log", MFD_CLOEXEC);
    real_stderr = dup(STDERR_FILENO);
    assert_true(capture_fd >= 0 && real_stderr >= 0);
    dup2(capture_fd, STDERR_FILENO);
}

static const char *capture_end(void)
{
    dup2(real_stderr, STDERR_FILENO);
    close(real_stderr);
    ssize_t n = pread(capture_fd, captured, sizeof captured - 1, 0);
    close(capture_fd);
    assert_true(n >= 0);
    captured[n] = '\0';
    return captured;
}

static void test_log_text_line_has_level_component_event_pairs(void **state)
{
    (void)state;
    log_setup(LOG_LEVEL_INFO, LOG_FORMAT_TEXT);
    capture_start();
    log_info("gw", "ready", "port=%d path=%s n=%zu u=%" PRIu64 " t=%.*s x=%04x f=%.2f", 8484,
             "/a/b", (size_t)7, UINT64_MAX, 3, "abcdef", 255u, 1.5);
    log_warn("gw", "bare", "%s", "");
    assert_string_equal(capture_end(),
                        "info gw ready port=8484 path=/a/b n=7 u=18446744073709551615 t=abc "
                        "x=00ff f=1.50\nwarn gw bare\n");
}

static void test_log_every_length_takes_its_argument(void **state)
{
    (void)state;
    log_setup(LOG_LEVEL_INFO, LOG_FORMAT_TEXT);
    capture_start();
    log_info("a", "b",
             "c=%c hh=%hhd h=%hd l=%ld ll=%lld z=%zd j=%jd lu=%lu llu=%llu w=%3d p=%d%% e=%s", 'q',
             (signed char)-3, (short)-300, -3L, -4LL, (ssize_t)-5, (intmax_t)-6, 7UL, 8ULL, 9, 10,
             "end");
    assert_string_equal(capture_end(), "info a b c=q hh=-3 h=-300 l=-3 ll=-4 z=-5 j=-6 lu=7 llu=8 "
                                       "w=\"  9\" p=10% e=end\n");
}

static void test_log_hostile_value_cannot_forge(void **state)
{
    (void)state;
    log_setup(LOG_LEVEL_INFO, LOG_FORMAT_TEXT);
    capture_start();
    log_info("a", "b", "v=%s q=\"%s\" e=%s", "x\nerror a b y=1", "\" z=\"1", "");
    log_info("a", "b", "v=%s", "\x1b[2J\xff\xc2\x9b\\");
    assert_string_equal(capture_end(),
                        "info a b v=\"x\\nerror a b y=1\" q=\"\\\" z=\\\"1\" e=\"\"\n"
                        "info a b v=\"\\x1B[2J\\xFF\\xC2\\x9B\\\\\"\n");
}

static void test_log_json_is_one_object_a_line(void **state)
{
    (void)state;
    log_setup(LOG_LEVEL_INFO, LOG_FORMAT_JSON);
    capture_start();
    log_info("a", "b", "n=%d big=%" PRIu64 " s=%s q=\"%d\" h=%s", -5, UINT64_MAX, "\"\n\xff", 5,
             "007");
    const char *line = capture_end();
    assert_non_null(strstr(line, "\"level\":\"info\",\"component\":\"a\",\"event\":\"b\",\"n\":-5,"
                                 "\"big\":\"18446744073709551615\",\"s\":\"\\\"\\n\\ufffd\","
                                 "\"q\":\"5\",\"h\":\"007\"}\n"));
    assert_int_equal(strncmp(line, "{\"time\":\"20", 11), 0);
}

static void test_log_too_long_line_drops_whole_pairs_and_says_so(void **state)
{
    (void)state;
    static char big[3000];
    memset(big, '\x01', sizeof big - 1);
    for (int format = LOG_FORMAT_TEXT; format <= LOG_FORMAT_JSON; format++) {
        log_setup(LOG_LEVEL_INFO, (enum log_format)format);
        capture_start();
        log_info("a", "b", "v=%s w=%s x=%s y=%s z=%s last=%d", big, big, big, big, big, 1);
        const char *line = capture_end();
        size_t n = strlen(line);
        assert_true(n < 8192 && line[n - 1] == '\n' && strchr(line, '\n') == line + n - 1);
        assert_non_null(strstr(line, format == LOG_FORMAT_TEXT ? "\" cut=1\n" : "\",\"cut\":1}\n"));
    }
}

static void test_log_level_filters_and_errno_stays(void **state)
{
    (void)state;
    log_setup(LOG_LEVEL_WARN, LOG_FORMAT_TEXT);
    assert_int_equal(log_level(), LOG_LEVEL_WARN);
    capture_start();
    errno = EPIPE;
    log_info("a", "hidden", "%s", "");
    log_error("a", "shown", "%s", "");
    assert_int_equal(errno, EPIPE);
    assert_string_equal(capture_end(), "error a shown\n");
}

static void test_log_without_journal_falls_back_to_text(void **state)
{
    (void)state;
    if (access("/run/systemd/journal/socket", F_OK) == 0)
        skip();
    log_setup(LOG_LEVEL_INFO, LOG_FORMAT_JOURNAL);
    capture_start();
    log_info("a", "b", "c=%d", 1);
    assert_string_equal(capture_end(), "info a b c=1\n");
}

/* Its stream is there, its socket is not: the journal takes the priority from the line. */
static void test_log_into_the_journals_stream_has_the_priority_in_front(void **state)
{
    (void)state;
    char name[64];
    struct stat st;
    if (access("/run/systemd/journal/socket", F_OK) == 0)
        skip();
    capture_start();
    assert_int_equal(fstat(STDERR_FILENO, &st), 0);
    snprintf(name, sizeof name, "%llu:%llu", (unsigned long long)st.st_dev,
             (unsigned long long)st.st_ino);
    setenv("JOURNAL_STREAM", name, 1);
    const bool own = log_under_journal();
    log_setup(LOG_LEVEL_DEBUG, LOG_FORMAT_JOURNAL);
    log_error("a", "b", "c=%d", 1);
    log_warn("a", "b", "c=%d", 2);
    log_info("a", "b", "c=%d", 3);
    log_debug("a", "b", "c=%d", 4);
    setenv("JOURNAL_STREAM", "1:1", 1); /* a parent's: stderr is a pipe to it */
    const bool handed_down = log_under_journal();
    log_setup(LOG_LEVEL_INFO, LOG_FORMAT_JOURNAL);
    log_info("a", "b", "c=%d", 5);
    unsetenv("JOURNAL_STREAM");
    assert_string_equal(capture_end(), "<3>error a b c=1\n<4>warn a b c=2\n<6>info a b c=3\n"
                                       "<7>debug a b c=4\ninfo a b c=5\n");
    assert_true(own && !handed_down);
    assert_false(log_under_journal());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_log_text_line_has_level_component_event_pairs),
        cmocka_unit_test(test_log_every_length_takes_its_argument),
        cmocka_unit_test(test_log_hostile_value_cannot_forge),
        cmocka_unit_test(test_log_json_is_one_object_a_line),
        cmocka_unit_test(test_log_too_long_line_drops_whole_pairs_and_says_so),
        cmocka_unit_test(test_log_level_filters_and_errno_stays),
        cmocka_unit_test(test_log_without_journal_falls_back_to_text),
        cmocka_unit_test(test_log_into_the_journals_stream_has_the_priority_in_front),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

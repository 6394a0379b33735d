/* isletd as a process of its own: what a supervisor and a client see of it. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto_client.h"
#include "ticks.h"

enum {
    LIMIT_MS = 30000,
    LISTEN_FD = 3
};

struct rig {
    char folder[64], socket[96], model[96], conf[96], notify[96], log[96];
    int listener, notified; /* -1: none */
    pid_t pid;              /* 0: not running */
};

static void write_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static int bind_at(const char *path, int type)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    assert_true(strlen(path) < sizeof a.sun_path);
    memcpy(a.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

static int rig_open(void **state)
{
    struct rig *r = calloc(1, sizeof *r);
    assert_non_null(r);
    snprintf(r->folder, sizeof r->folder, "/tmp/islet-e2e-worker-XXXXXX");
    assert_non_null(mkdtemp(r->folder));
    snprintf(r->socket, sizeof r->socket, "%s/worker.sock", r->folder);
    snprintf(r->model, sizeof r->model, "%s/m.gguf", r->folder);
    snprintf(r->conf, sizeof r->conf, "%s/islet.conf", r->folder);
    snprintf(r->notify, sizeof r->notify, "%s/notify", r->folder);
    snprintf(r->log, sizeof r->log, "%s/log", r->folder);
    r->listener = r->notified = -1;
    *state = r;
    return 0;
}

static int rig_close(void **state)
{
    struct rig *r = *state;
    const char *const files[] = {r->socket, r->model, r->conf, r->notify, r->log};
    char lock[112];
    if (r->pid > 0) {
        kill(r->pid, SIGKILL);
        waitpid(r->pid, NULL, 0);
    }
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++)
        unlink(files[i]);
    snprintf(lock, sizeof lock, "%s.lock", r->socket);
    unlink(lock);
    if (r->listener >= 0)
        close(r->listener);
    if (r->notified >= 0)
        close(r->notified);
    const int failed = rmdir(r->folder);
    free(r);
    return failed;
}

static void model_appears(struct rig *r)
{
    assert_int_equal(symlink(ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf", r->model), 0);
}

/* In the child. */
static void become(const struct rig *r, const char *watchdog_us)
{
    char pid[24];
    const int fd = open(r->log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0)
        _exit(126);
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    setenv("RUNTIME_DIRECTORY", r->folder, 1);
    if (r->notified >= 0)
        setenv("NOTIFY_SOCKET", r->notify, 1);
    if (watchdog_us != NULL)
        setenv("WATCHDOG_USEC", watchdog_us, 1);
    if (r->listener >= 0) {
        const int flags =
            r->listener == LISTEN_FD ? fcntl(LISTEN_FD, F_SETFD, 0) : dup2(r->listener, LISTEN_FD);
        if (flags < 0)
            _exit(126);
        setenv("LISTEN_PID", pid, 1);
        setenv("LISTEN_FDS", "1", 1);
        setenv("LISTEN_FDNAMES", "worker", 1);
    }
    execl(ISLET_BUILD_DIR "/bin/isletd", "isletd", "--config", r->conf, NULL);
    _exit(127);
}

static void start(struct rig *r, const char *watchdog_us)
{
    r->pid = fork();
    assert_true(r->pid >= 0);
    if (r->pid == 0)
        become(r, watchdog_us);
}

static void good_settings(const struct rig *r)
{
    char text[256];
    snprintf(text, sizeof text, "[model]\npath = %s\n[compute]\nthreads = 1\n", r->model);
    write_text(r->conf, text);
}

static uint64_t now_ms(void)
{
    return ticks_ms(ticks_real());
}

/* Waits for the end; returns the exit status, or 1000 + the signal. */
static int ended(struct rig *r)
{
    const uint64_t end = now_ms() + LIMIT_MS;
    int status = 0;
    while (waitpid(r->pid, &status, WNOHANG) == 0) {
        assert_true(now_ms() < end);
        poll(NULL, 0, 5);
    }
    r->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static struct proto_client *dial(const struct rig *r)
{
    struct proto_client *c = NULL;
    struct err e = {0};
    const uint64_t end = now_ms() + LIMIT_MS;
    while (proto_client_connect(r->socket, "test", &c, &e) != ERR_OK) {
        assert_true(now_ms() < end);
        poll(NULL, 0, 5);
    }
    return c;
}

static void next(struct proto_client *c, struct proto_event *ret)
{
    struct err e = {0};
    if (proto_client_wait(c, LIMIT_MS, ret, &e) != 1)
        fail_msg("no event: %s", e.text);
}

/* The welcome that says so; others are passed over. */
static void wait_state(struct proto_client *c, enum proto_state state, struct proto_event *ret)
{
    do
        next(c, ret);
    while (ret->kind != PROTO_EVENT_WELCOME || ret->welcome.state != state);
}

static bool says(struct proto_text text, const char *part)
{
    char copy[PROTO_MAX_TEXT + 1];
    snprintf(copy, sizeof copy, "%.*s", (int)text.size, text.data);
    return strstr(copy, part) != NULL;
}

static uint64_t run_of(struct proto_client *c, uint32_t max_new)
{
    static const uint32_t tokens[] = {10, 11, 12};
    const struct proto_run run = {.tokens = tokens,
                                  .n_tokens = 3,
                                  .n_prompt = 3,
                                  .max_new = max_new,
                                  .top_p = 1,
                                  .repeat = 1};
    struct err e = {0};
    uint64_t id = 0;
    assert_int_equal(proto_client_run(c, &run, &id, &e), ERR_OK);
    return id;
}

static void stop_well(struct rig *r)
{
    kill(r->pid, SIGTERM);
    assert_int_equal(ended(r), 0);
}

/* ---- models and settings ---- */

static void test_worker_missing_model_that_appears_is_served(void **state)
{
    struct rig *r = *state;
    struct proto_event event;
    good_settings(r);
    start(r, NULL);
    struct proto_client *c = dial(r);
    wait_state(c, PROTO_FAILED, &event);
    assert_true(says(event.welcome.reason, "m.gguf"));
    model_appears(r);
    wait_state(c, PROTO_SERVING, &event); /* looked for every 10 s */
    run_of(c, 2);
    do
        next(c, &event);
    while (event.kind != PROTO_EVENT_DONE);
    proto_client_close(c);
    stop_well(r);
}

static void test_worker_missing_model_is_looked_for_at_hangup(void **state)
{
    struct rig *r = *state;
    struct proto_event event;
    good_settings(r);
    start(r, NULL);
    struct proto_client *c = dial(r);
    wait_state(c, PROTO_FAILED, &event);
    model_appears(r);
    kill(r->pid, SIGHUP);
    wait_state(c, PROTO_SERVING, &event);
    proto_client_close(c);
    stop_well(r);
}

static void test_worker_bad_settings_end_it_where_it_binds_itself(void **state)
{
    struct rig *r = *state;
    write_text(r->conf, "[model]\npth = x\n");
    start(r, NULL);
    assert_int_equal(ended(r), 78);
}

/* A client waits at a socket that systemd holds: an end would be a start, again and again. */
static void test_worker_bad_settings_with_an_inherited_socket_are_told(void **state)
{
    struct rig *r = *state;
    struct proto_event event;
    struct err e = {0};
    r->listener = bind_at(r->socket, SOCK_STREAM);
    assert_int_equal(listen(r->listener, 16), 0);
    write_text(r->conf, "[model]\npth = x\n");
    start(r, NULL);
    struct proto_client *c = dial(r);
    wait_state(c, PROTO_FAILED, &event);
    assert_true(says(event.welcome.reason, "islet.conf:2"));
    assert_true(says(event.welcome.reason, "pth"));
    run_of(c, 2);
    do
        next(c, &event);
    while (event.kind != PROTO_EVENT_ERROR);
    assert_int_equal(event.error.code, ERR_BUSY);
    assert_true(says(event.error.text, "pth"));

    write_text(r->conf, "[model]\npath =\n"); /* bad in another way */
    kill(r->pid, SIGHUP);
    while (proto_client_wait(c, LIMIT_MS, &event, &e) == 1)
        continue;
    proto_client_close(c);
    c = dial(r);
    wait_state(c, PROTO_FAILED, &event);
    assert_true(says(event.welcome.reason, "model.path"));

    model_appears(r);
    good_settings(r);
    kill(r->pid, SIGHUP);
    while (proto_client_wait(c, LIMIT_MS, &event, &e) == 1)
        continue;
    proto_client_close(c);
    c = dial(r);
    wait_state(c, PROTO_SERVING, &event);
    proto_client_close(c);
    stop_well(r);
    assert_int_equal(access(r->socket, F_OK), 0); /* not ours to remove */
}

static void test_worker_drain_of_an_idle_one_ends_it(void **state)
{
    struct rig *r = *state;
    struct proto_event event;
    struct err e = {0};
    good_settings(r);
    model_appears(r);
    start(r, NULL);
    struct proto_client *c = dial(r), *other = dial(r);
    wait_state(c, PROTO_SERVING, &event);
    wait_state(other, PROTO_SERVING, &event);
    assert_int_equal(proto_client_drain(c, &e), ERR_OK);
    wait_state(c, PROTO_DRAINING, &event);
    next(c, &event);
    assert_int_equal(event.kind, PROTO_EVENT_DRAINED);
    assert_int_equal(proto_client_wait(c, LIMIT_MS, &event, &e), -1);
    wait_state(other, PROTO_DRAINING, &event); /* it did not ask: no drained */
    assert_int_equal(proto_client_wait(other, LIMIT_MS, &event, &e), -1);
    proto_client_close(c);
    proto_client_close(other);
    assert_int_equal(ended(r), 0);
    assert_int_equal(access(r->socket, F_OK), -1);
}

/* ---- single experts ---- */

enum {
    N_EXPERTS = 64, /* of the model here, all of which its RAM holds */
    BURST = 640
};

static uint64_t load_of(struct proto_client *c, uint32_t expert)
{
    const struct proto_load_expert m = {.expert_id = expert, .quant_type = PROTO_ANY_QUANT_TYPE};
    struct err e = {0};
    uint64_t id = 0;
    assert_int_equal(proto_client_load_expert(c, &m, &id, &e), ERR_OK);
    return id;
}

static uint64_t unload_of(struct proto_client *c, uint32_t expert)
{
    const struct proto_unload_expert m = {.expert_id = expert};
    struct err e = {0};
    uint64_t id = 0;
    assert_int_equal(proto_client_unload_expert(c, &m, &id, &e), ERR_OK);
    return id;
}

/* The next event of that request. */
static void next_of(struct proto_client *c, uint64_t id, struct proto_event *ret)
{
    do
        next(c, ret);
    while (ret->request_id != id);
}

static void expect_tier(struct proto_client *c, uint64_t id, enum proto_event_kind kind,
                        uint32_t expert, enum proto_tier tier)
{
    struct proto_event event;
    next_of(c, id, &event);
    if (event.kind == PROTO_EVENT_ERROR)
        fail_msg("%.*s", (int)event.error.text.size, event.error.text.data);
    assert_int_equal(event.kind, kind);
    assert_int_equal(event.loaded.expert_id, expert);
    assert_int_equal(event.loaded.tier, tier);
}

static uint64_t resident(struct proto_client *c)
{
    struct proto_event event;
    struct err e = {0};
    assert_int_equal(proto_client_status(c, &e), ERR_OK);
    do
        next(c, &event);
    while (event.kind != PROTO_EVENT_STATUS);
    return event.status.experts_resident;
}

static void test_worker_experts_are_loaded_and_unloaded(void **state)
{
    struct rig *r = *state;
    struct proto_event event;
    good_settings(r);
    model_appears(r);
    start(r, NULL);
    struct proto_client *c = dial(r);
    expect_tier(c, load_of(c, 3), PROTO_EVENT_LOADED, 3, PROTO_TIER_RAM); /* once it is loaded */
    assert_int_equal(resident(c), N_EXPERTS);
    expect_tier(c, unload_of(c, 3), PROTO_EVENT_UNLOADED, 3, PROTO_TIER_SSD);
    assert_int_equal(resident(c), N_EXPERTS - 1);
    expect_tier(c, load_of(c, 3), PROTO_EVENT_LOADED, 3, PROTO_TIER_RAM);
    assert_int_equal(resident(c), N_EXPERTS);
    next_of(c, load_of(c, N_EXPERTS), &event);
    assert_int_equal(event.kind, PROTO_EVENT_ERROR);
    assert_int_equal(event.error.code, ERR_ARGUMENT);
    assert_true(says(event.error.text, "ids end at 63"));
    const struct proto_load_expert other = {.expert_id = 5, .quant_type = 2, .weight_size = 77};
    struct err e = {0};
    uint64_t id = 0;
    assert_int_equal(proto_client_load_expert(c, &other, &id, &e), ERR_OK);
    next_of(c, id, &event);
    assert_int_equal(event.kind, PROTO_EVENT_ERROR);
    assert_true(says(event.error.text, "has quant_type 8")); /* Q8_0 */
    expect_tier(c, unload_of(c, 5), PROTO_EVENT_UNLOADED, 5, PROTO_TIER_SSD);
    proto_client_close(c);
    stop_well(r);
}

/* Takes what comes, as a loop does, until n commands were answered and `run`, if not 0, is done.
 * Returns the sum of the run's ids by place. */
static uint64_t take_all(struct proto_client *c, unsigned n, uint64_t run)
{
    const uint64_t end = now_ms() + LIMIT_MS;
    struct proto_event event;
    struct err e = {0};
    uint64_t sum = 0;
    for (bool done = run == 0; n > 0 || !done;) {
        struct pollfd p = {.fd = proto_client_fd(c), .events = POLLIN};
        if (proto_client_wants_write(c))
            p.events |= POLLOUT;
        assert_true(now_ms() < end);
        (void)poll(&p, 1, 100);
        if ((p.revents & POLLOUT) != 0)
            assert_int_equal(proto_client_on_writable(c, &e), ERR_OK);
        if ((p.revents & POLLIN) != 0)
            assert_int_equal(proto_client_on_readable(c, &e), ERR_OK);
        while (proto_client_next(c, &event, &e) == 1) {
            if (event.kind == PROTO_EVENT_ERROR)
                fail_msg("%.*s", (int)event.error.text.size, event.error.text.data);
            n -= event.kind == PROTO_EVENT_LOADED || event.kind == PROTO_EVENT_UNLOADED;
            if (event.kind == PROTO_EVENT_LOADED)
                assert_int_equal(event.loaded.tier, PROTO_TIER_RAM);
            done |= event.kind == PROTO_EVENT_DONE && event.request_id == run;
            for (unsigned i = 0; event.kind == PROTO_EVENT_TOKENS && i < event.tokens.n; i++)
                sum = sum * 31 + event.tokens.tokens[i].id;
        }
    }
    return sum;
}

static void test_worker_hundreds_of_commands_change_no_answer(void **state)
{
    struct rig *r = *state;
    struct proto_event event;
    good_settings(r);
    model_appears(r);
    start(r, NULL);
    struct proto_client *c = dial(r), *gone = dial(r);
    wait_state(c, PROTO_SERVING, &event);
    const uint64_t undisturbed = take_all(c, 0, run_of(c, 40));
    const uint64_t run = run_of(c, 40);
    for (uint32_t i = 0; i < BURST; i++) {
        (void)unload_of(c, i * 7 % N_EXPERTS);
        (void)load_of(c, i * 5 % N_EXPERTS);
        (void)load_of(gone, i % N_EXPERTS);
    }
    proto_client_close(gone); /* with all of its commands */
    assert_true(take_all(c, 2 * BURST, run) == undisturbed);
    for (uint32_t i = 0; i < N_EXPERTS; i++)
        (void)load_of(c, i);
    (void)take_all(c, N_EXPERTS, 0);
    assert_int_equal(resident(c), N_EXPERTS);
    assert_true(take_all(c, 0, run_of(c, 40)) == undisturbed);
    proto_client_close(c);
    stop_well(r);
}

static void test_worker_drain_answers_commands_too(void **state)
{
    struct rig *r = *state;
    struct proto_event event;
    struct err e = {0};
    good_settings(r);
    model_appears(r);
    start(r, NULL);
    struct proto_client *c = dial(r);
    wait_state(c, PROTO_SERVING, &event);
    for (uint32_t i = 0; i < N_EXPERTS; i++)
        (void)unload_of(c, i);
    for (uint32_t i = 0; i < N_EXPERTS; i++)
        (void)load_of(c, i);
    assert_int_equal(proto_client_drain(c, &e), ERR_OK);
    const uint64_t late = load_of(c, 1);
    bool late_refused = false;
    unsigned n = 0;
    for (event.kind = PROTO_EVENT_WELCOME; event.kind != PROTO_EVENT_DRAINED; next(c, &event)) {
        n += event.kind == PROTO_EVENT_LOADED || event.kind == PROTO_EVENT_UNLOADED;
        if (event.kind != PROTO_EVENT_ERROR)
            continue;
        assert_int_equal(event.error.code, ERR_BUSY);
        late_refused |= event.request_id == late;
        n++;
    }
    assert_int_equal(n, 2 * N_EXPERTS + 1);
    assert_true(late_refused);
    proto_client_close(c);
    assert_int_equal(ended(r), 0);
}

/* ---- watchdog ---- */

/* Waits for a datagram that has the line; false: it did not come in that time. */
static bool notified(struct rig *r, const char *line, int limit_ms)
{
    const uint64_t end = now_ms() + (uint64_t)limit_ms;
    for (uint64_t now; (now = now_ms()) < end;) {
        char text[1024];
        struct pollfd p = {.fd = r->notified, .events = POLLIN};
        if (poll(&p, 1, (int)(end - now)) <= 0)
            continue;
        const ssize_t n = recv(r->notified, text, sizeof text - 1, MSG_DONTWAIT);
        text[n > 0 ? n : 0] = '\0';
        if (strstr(text, line) != NULL)
            return true;
    }
    return false;
}

/* The thread named "engine". */
static pid_t engine_thread(const struct rig *r)
{
    for (int i = 1; i < 64; i++) {
        char path[64], name[32] = "";
        snprintf(path, sizeof path, "/proc/%d/task/%d/comm", (int)r->pid, (int)r->pid + i);
        FILE *f = fopen(path, "r");
        if (f == NULL)
            continue;
        if (fgets(name, sizeof name, f) == NULL)
            name[0] = '\0';
        fclose(f);
        if (strcmp(name, "engine\n") == 0)
            return r->pid + i;
    }
    return 0;
}

/* One thread alone is stopped by tracing it: the loop lives, and must not say that all is well. */
static void test_worker_watchdog_is_fed_only_while_the_engine_moves(void **state)
{
    struct rig *r = *state;
    struct proto_event event;
    const int ping_ms = 1500; /* a third of the watchdog's time; an idle engine moves each second */
    good_settings(r);
    model_appears(r);
    r->notified = bind_at(r->notify, SOCK_DGRAM);
    start(r, "4500000");
    assert_true(notified(r, "READY=1", LIMIT_MS));
    struct proto_client *c = dial(r);
    wait_state(c, PROTO_SERVING, &event);
    for (int i = 0; i < 2; i++)
        assert_true(notified(r, "WATCHDOG=1", LIMIT_MS));
    const pid_t thread = engine_thread(r);
    assert_true(thread > 0);
    if (ptrace(PTRACE_SEIZE, thread, NULL, NULL) != 0)
        skip(); /* this system does not let a parent trace its child */
    assert_int_equal(ptrace(PTRACE_INTERRUPT, thread, NULL, NULL), 0);
    assert_int_equal(waitpid(thread, NULL, __WALL), thread);
    notified(r, "WATCHDOG=1", ping_ms); /* it may have moved before it was stopped */
    assert_false(notified(r, "WATCHDOG=1", 3 * ping_ms));
    assert_int_equal(ptrace(PTRACE_DETACH, thread, NULL, NULL), 0);
    assert_true(notified(r, "WATCHDOG=1", LIMIT_MS));
    proto_client_close(c);
    kill(r->pid, SIGTERM);
    assert_true(notified(r, "STOPPING=1", LIMIT_MS));
    assert_int_equal(ended(r), 0);
}

#define RIG_TEST(name) cmocka_unit_test_setup_teardown(name, rig_open, rig_close)

int main(void)
{
    const struct CMUnitTest tests[] = {
        RIG_TEST(test_worker_missing_model_that_appears_is_served),
        RIG_TEST(test_worker_missing_model_is_looked_for_at_hangup),
        RIG_TEST(test_worker_bad_settings_end_it_where_it_binds_itself),
        RIG_TEST(test_worker_bad_settings_with_an_inherited_socket_are_told),
        RIG_TEST(test_worker_drain_of_an_idle_one_ends_it),
        RIG_TEST(test_worker_experts_are_loaded_and_unloaded),
        RIG_TEST(test_worker_hundreds_of_commands_change_no_answer),
        RIG_TEST(test_worker_drain_answers_commands_too),
        RIG_TEST(test_worker_watchdog_is_fed_only_while_the_engine_moves),
    };
    signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

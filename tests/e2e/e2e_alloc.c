/* Allocations that fail, one after the other, in the whole gateway and in the whole worker: each
 * request ends in an answer, an error or a close; the next one is served; nothing is left over.
 * The program under test runs on a thread of this process, its peer where no allocation counts. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "alloc.h"
#include "buf.h"
#include "fake_worker.h"
#include "gw_api.h"
#include "gw_auth.h"
#include "gw_model.h"
#include "gw_service.h"
#include "log.h"
#include "proto_encode.h"
#include "settings.h"
#include "worker_loop.h"

enum {
    LIMIT_S = 60,
    ANSWER = 1 << 20,
    ECHOED = 800 /* prompt tokens; with 5 others each more than is rendered on the loop */
};

static char folder[64];

static int dial(const char *name)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    const struct timeval limit = {.tv_sec = LIMIT_S};
    snprintf(a.sun_path, sizeof a.sun_path, "%.60s/%s", folder, name);
    for (int tries = 0; tries < LIMIT_S * 200; tries++) {
        const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        assert_true(fd >= 0);
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        if (connect(fd, (const struct sockaddr *)&a, sizeof a) == 0)
            return fd;
        close(fd);
        usleep(5000);
    }
    fail_msg("nobody listens at %s", a.sun_path);
    return -1;
}

/* ---- the gateway ---- */

struct gateway {
    struct gw_service service;
    pthread_t thread;
};

static void on_draining(void *context)
{
    gw_service_drain(context);
}

static void on_deadline(void *context)
{
    gw_service_deadline(context);
}

static void on_stopped(void *context)
{
    gw_service_stop(context);
}

static void *gateway_main(void *argument)
{
    struct gateway *g = argument;
    gw_loop_run(g->service.loop);
    return NULL;
}

static void gateway_start(struct gateway *g)
{
    static const char *const sets[] = {"model.path=" ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf",
                                       "server.listen=none"};
    struct gw_service *s = &g->service;
    struct err e = {0};
    char path[96];
    snprintf(path, sizeof path, "%s/http.sock", folder);
    s->ticks = ticks_real();
    list_init(&s->status_waiters);
    assert_int_equal(settings_load("/dev/null", sets, 2, &s->settings, &e), ERR_OK);
    assert_int_equal(gw_auth_new("", "", "", &s->auth, &e), ERR_OK);
    const struct gw_loop_options o = {.listen = "none",
                                      .socket = path,
                                      .handle_signals = true,
                                      .limits = gw_limits_default(),
                                      .auth = s->auth,
                                      .routes = gw_api_routes(s),
                                      .drain_deadline_ms = 5000,
                                      .hooks = {s, NULL, on_draining, on_deadline, on_stopped}};
    assert_int_equal(gw_loop_new(&o, &s->loop, &e), ERR_OK);
    gw_service_start(s);
    assert_int_equal(pthread_create(&g->thread, NULL, gateway_main, g), 0);
}

/* The fake worker, in a process of its own. */
static pid_t fake_start(void)
{
    const pid_t pid = fork();
    if (pid != 0)
        return pid;
    struct gw_model *model = NULL;
    struct err e = {0};
    char path[96];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    snprintf(path, sizeof path, "%s/worker.sock", folder);
    if (gw_model_open(ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf", &model, &e) != ERR_OK)
        _exit(1);
    struct fake_worker_options o = fake_worker_defaults(path);
    memcpy(o.welcome.file_digest, model->file_digest, 16);
    memcpy(o.welcome.shape_digest, model->shape_digest, 16);
    fake_worker_start(&o);
    for (;;)
        pause();
}

enum outcome {
    WHOLE,
    REFUSED, /* 503, or an error event in a stream */
    CLOSED
};

enum kind {
    JSON,
    STREAM,
    ECHO_JSON,   /* a completion whose prompt's logprobs are made in the pool */
    ECHO_STREAM, /* the same as a stream */
    KIND_N
};

static void request_write(struct buf *out, enum kind kind)
{
    const bool echo = kind >= ECHO_JSON, stream = kind == STREAM || kind == ECHO_STREAM;
    struct buf body = BUF_INIT(ANSWER);
    buf_text(&body, echo ? "{\"prompt\":[10" : "{\"messages\":[{\"role\":\"user\",");
    for (unsigned i = 1; echo && i < ECHOED; i++)
        buf_format(&body, ",%u", 300 + i);
    buf_text(&body, echo ? "],\"echo\":true,\"logprobs\":5," : "\"content\":\"abc\"}],");
    buf_format(&body, "\"max_tokens\":12,\"ignore_eos\":true,\"temperature\":0,\"stream\":%s}",
               stream ? "true" : "false");
    buf_format(out,
               "POST /v1/%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
               "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
               echo ? "completions" : "chat/completions", body.size);
    buf_append(out, body.data, body.size);
    buf_byte(out, 0);
    assert_false(buf_failed(out) || buf_failed(&body));
    buf_done(&body);
}

static unsigned count(const char *answer, const char *word)
{
    unsigned n = 0;
    for (const char *p = answer; (p = strstr(p, word)) != NULL; p++)
        n++;
    return n;
}

/* The answer has all that it should have. */
static bool is_whole(const char *answer, enum kind kind)
{
    size_t n_offsets = 0;
    for (const char *p = answer; (p = strstr(p, "\"text_offset\":[")) != NULL; p++)
        for (const char *q = p; *q != ']'; q++)
            n_offsets += *q == ',';
    if (kind == ECHO_JSON && n_offsets != ECHOED + 12 - 1)
        return false;
    if (kind == STREAM || kind == ECHO_STREAM) { /* each event with its beginning and its end */
        const unsigned events = count(answer, "\"finish_reason\":");
        return strstr(answer, "\"finish_reason\":\"length\"") != NULL &&
               strstr(answer, "data: [DONE]\n\n\r\n0\r\n\r\n") != NULL &&
               count(answer, "data: {\"id\":\"") == events && count(answer, "}\n\n") == events;
    }
    const char *body = strstr(answer, "\r\n\r\n");
    json_t *root = body != NULL ? json_loads(body + 4, 0, NULL) : NULL;
    const bool whole = root != NULL && strstr(answer, "\"completion_tokens\":12") != NULL;
    json_decref(root);
    return whole;
}

/* One request on a connection of its own, the kth allocation from then on failing (0: none). */
static enum outcome ask(uint64_t k, enum kind kind)
{
    static char answer[ANSWER];
    static struct buf request = BUF_INIT(ANSWER);
    const int fd = dial("http.sock");
    size_t n = 0;
    buf_clear(&request);
    request_write(&request, kind);
    alloc_fail_at(k, 0);
    (void)!send(fd, request.data, request.size - 1, MSG_NOSIGNAL);
    for (ssize_t more; n < ANSWER - 1; n += (size_t)more) {
        more = recv(fd, answer + n, ANSWER - 1 - n, 0);
        if (more < 0 && errno == EAGAIN)
            fail_msg("k %llu: no end of the answer", (unsigned long long)k);
        if (more <= 0)
            break;
    }
    alloc_fail_at(0, 0);
    close(fd);
    buf_done(&request);
    answer[n] = '\0';
    if (strncmp(answer, "HTTP/1.1 503 ", 13) == 0 && strstr(answer, "\"overloaded\"") != NULL)
        return REFUSED;
    if (n > 0 && strncmp(answer, "HTTP/1.1 200 ", 13) != 0)
        fail_msg("k %llu: %.300s", (unsigned long long)k, answer);
    if (is_whole(answer, kind))
        return WHOLE;
    const bool stream = kind == STREAM || kind == ECHO_STREAM;
    if (!stream && strstr(answer, "\r\n\r\n{") != NULL)
        fail_msg("k %llu: half an answer: %.300s", (unsigned long long)k, answer);
    return stream && strstr(answer, "data: [DONE]") != NULL ? REFUSED : CLOSED;
}

static unsigned fail_each(enum kind kind)
{
    unsigned others = 0;
    bool failed = true; /* false: the kth call lies behind the request's last one */
    for (uint64_t k = 1; failed; k++) {
        const uint64_t refused = alloc_refused();
        const enum outcome got = ask(k, kind);
        failed = alloc_refused() != refused;
        others += got != WHOLE;
        if (got != WHOLE)
            assert_int_equal(ask(0, kind), WHOLE);
    }
    return others;
}

/* Blocks of an idle gateway: asked until they stay the same. */
static void test_alloc_gateway_survives_each_failure(void **state)
{
    (void)state;
    struct gateway *g = calloc(1, sizeof *g);
    assert_non_null(g);
    const pid_t worker = fake_start();
    const uint64_t before = alloc_live_blocks();
    gateway_start(g);
    for (enum kind kind = JSON; kind < KIND_N; kind++)
        assert_int_equal(ask(0, kind), WHOLE);
    for (enum kind kind = JSON; kind < KIND_N; kind++) {
        const unsigned n = fail_each(kind);
        print_message("failures that a client saw, kind %u: %u\n", (unsigned)kind, n);
        assert_true(n > 10);
    }
    for (enum kind kind = JSON; kind < KIND_N; kind++)
        assert_int_equal(ask(0, kind), WHOLE);
    kill(getpid(), SIGTERM);
    assert_int_equal(pthread_join(g->thread, NULL), 0);
    gw_service_done(&g->service);
    free(g);
    assert_int_equal(alloc_live_blocks(), before);
    kill(worker, SIGKILL);
    waitpid(worker, NULL, 0);
}

/* ---- the worker ---- */

static void *worker_main(void *argument)
{
    static const char *const sets[] = {"model.path=" ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf",
                                       "compute.threads=1", "memory.kv_budget=8 MiB"};
    const struct worker_loop_options o = {
        .config = "/dev/null", .sets = sets, .n_sets = 3, .inherited_fd = -1};
    struct settings *settings = NULL;
    int *status = argument;
    struct err e = {0};
    if (settings_load(o.config, o.sets, o.n_sets, &settings, &e) == ERR_OK)
        *status = worker_loop_run(settings, &o);
    return NULL;
}

static bool receive(int fd, uint8_t *to, size_t n)
{
    for (size_t got = 0; got < n;) {
        const ssize_t more = recv(fd, to + got, n - got, 0);
        if (more < 0 && errno == EAGAIN)
            fail_msg("no end of the answer");
        if (more <= 0)
            return false;
        got += (size_t)more;
    }
    return true;
}

/* The next frame's command, its payload in `payload`; 0: the connection is closed. */
static uint8_t frame_next(int fd, uint8_t payload[4096])
{
    uint8_t head[13];
    if (!receive(fd, head, sizeof head))
        return 0;
    const size_t n = ((size_t)head[2] << 8 | head[3]) - sizeof head;
    assert_true(head[0] == 0 && head[1] == 0 && n <= 4096);
    return receive(fd, payload, n) ? head[4] : 0;
}

/* Hello and a run on a connection of its own; the answer's ids are compared with `ids`, or kept
 * there when k is 0 and there are none. */
static enum outcome run(const struct buf *frames, uint64_t k, uint32_t *ids, unsigned *n_ids)
{
    static uint8_t payload[4096];
    const int fd = dial("worker.sock");
    const bool keeps = *n_ids == 0;
    enum outcome got = CLOSED;
    unsigned n = 0;
    alloc_fail_at(k, 0);
    assert_int_equal(send(fd, frames->data, frames->size, MSG_NOSIGNAL), frames->size);
    for (uint8_t cmd; got == CLOSED && (cmd = frame_next(fd, payload)) != 0;) {
        if (cmd == PROTO_TOKENS) {
            const uint8_t *p = payload + 6; /* one token a frame, no logprob */
            const uint32_t id =
                (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
            if (keeps)
                ids[n] = id;
            assert_int_equal(ids[n++], id);
        } else if (cmd == PROTO_DONE) {
            got = WHOLE;
        } else if (cmd == PROTO_ERROR) {
            assert_int_equal(payload[1], ERR_NOMEM);
            got = REFUSED;
        }
    }
    alloc_fail_at(0, 0);
    close(fd);
    if (keeps)
        *n_ids = n;
    assert_true(got != WHOLE || n == *n_ids);
    return got;
}

static void test_alloc_worker_survives_each_failure(void **state)
{
    (void)state;
    static const uint32_t prompt[] = {10, 11, 12, 13};
    const struct proto_run ask_for = {
        .tokens = prompt, .n_tokens = 4, .n_prompt = 4, .max_new = 6, .top_p = 1, .repeat = 1};
    const struct proto_hello hello = {.version = PROTO_VERSION, .client = proto_text_of("t")};
    uint32_t ids[8];
    unsigned n_ids = 0, others = 0;
    int status = -1;
    pthread_t thread;
    struct buf frames = BUF_INIT(1 << 16);
    proto_encode_hello(&frames, &hello);
    proto_encode_run(&frames, 1, &ask_for);
    const uint64_t before = alloc_live_blocks();
    assert_int_equal(pthread_create(&thread, NULL, worker_main, &status), 0);
    assert_int_equal(run(&frames, 0, ids, &n_ids), WHOLE);
    assert_int_equal(n_ids, 6);
    bool failed = true;
    for (uint64_t k = 1; failed; k++) {
        const uint64_t refused = alloc_refused();
        const enum outcome got = run(&frames, k, ids, &n_ids);
        failed = alloc_refused() != refused;
        others += got != WHOLE;
        if (got != WHOLE)
            assert_int_equal(run(&frames, 0, ids, &n_ids), WHOLE);
    }
    print_message("failures that a client saw: %u\n", others);
    assert_true(others > 3);
    kill(getpid(), SIGTERM);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(status, 0);
    assert_int_equal(alloc_live_blocks(), before);
    buf_done(&frames);
}

static void *json_get(size_t bytes)
{
    return alloc_get(ALLOC_REQUEST, bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alloc_gateway_survives_each_failure),
        cmocka_unit_test(test_alloc_worker_survives_each_failure),
    };
    char command[96];
    signal(SIGPIPE, SIG_IGN);
    json_set_alloc_funcs(json_get, alloc_free); /* as the gateway does */
    json_object_seed(0);
    log_setup(LOG_LEVEL_ERROR, LOG_FORMAT_TEXT);
    snprintf(folder, sizeof folder, "/tmp/islet-e2e-alloc-XXXXXX");
    if (mkdtemp(folder) == NULL || setenv("RUNTIME_DIRECTORY", folder, 1) != 0)
        return 1;
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) == 0 ? failed : 1;
}

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "alloc.h"
#include "proto_client.h"

/* A client on one end of a socket pair; the test is the worker on the other. */
struct pair {
    struct proto_client *client;
    int worker;
    struct proto_reader reader; /* of what the client sends */
};

static void pair_open(struct pair *p)
{
    int fds[2];
    struct err e = {0};
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    p->worker = fds[1];
    proto_reader_init(&p->reader, PROTO_MAX_FRAME);
    assert_int_equal(proto_client_adopt(fds[0], "test", &p->client, &e), ERR_OK);
}

static void pair_close(struct pair *p)
{
    proto_client_close(p->client);
    if (p->worker >= 0)
        close(p->worker);
    proto_reader_done(&p->reader);
}

/* The next frame that the client has sent; there must be one. */
static struct proto_frame pair_take(struct pair *p)
{
    struct proto_frame f;
    struct err e = {0};
    uint8_t bytes[4096];
    while (proto_reader_next(&p->reader, &f) != 1) {
        ssize_t n = recv(p->worker, bytes, sizeof bytes, MSG_DONTWAIT);
        assert_true(n > 0);
        assert_int_equal(proto_reader_feed(&p->reader, bytes, (size_t)n, &e), ERR_OK);
    }
    return f;
}

static void pair_say(struct pair *p, struct buf *b)
{
    assert_false(buf_failed(b));
    assert_int_equal(send(p->worker, b->data, b->size, MSG_NOSIGNAL), (ssize_t)b->size);
}

static const uint32_t prompt[] = {5, 6, 7};

static struct proto_run some_run(void)
{
    return (struct proto_run){
        .tokens = prompt, .n_tokens = 3, .n_prompt = 3, .max_new = 2, .top_p = 1, .repeat = 1};
}

/* What a worker says from hello to the end of request 1. */
static void script(struct buf *b)
{
    static const struct proto_token tokens[] = {{.id = 41}, {.id = 42}};
    struct proto_welcome welcome = {.version = PROTO_VERSION,
                                    .state = PROTO_SERVING,
                                    .progress = 100,
                                    .model = proto_text_of("m"),
                                    .max_frame = PROTO_MAX_FRAME};
    struct proto_status status = {.version = 1, .state = PROTO_SERVING, .steps_total = 3};
    *b = BUF_INIT(1 << 20);
    proto_encode_welcome(b, &welcome);
    proto_encode_progress(b, 1, &(struct proto_progress){.prefilled = 3, .total = 3});
    proto_encode_empty(b, 0xEE, 1); /* of a newer worker: skipped */
    proto_encode_tokens(b, 1, &(struct proto_tokens){.first_index = 0, .n = 2, .tokens = tokens});
    proto_encode_status(b, 0, &status);
    proto_encode_notice(b, &(struct proto_notice){.action = PROTO_NOTICE_PAUSE});
    proto_encode_loaded(b, 2, PROTO_LOADED, &(struct proto_loaded){.expert_id = 8, .tier = 1});
    proto_encode_loaded(b, 3, PROTO_UNLOADED, &(struct proto_loaded){.expert_id = 9});
    proto_encode_done(b, 1, &(struct proto_done){.finish = PROTO_FINISH_LENGTH});
    proto_encode_empty(b, PROTO_DRAINED, 0);
    proto_encode_error(b, 0, &(struct proto_error){.code = ERR_IO, .text = proto_text_of("bye")});
}

enum {
    SCRIPT_EVENTS = 10
};

static void expect_event(unsigned i, const struct proto_event *ev)
{
    static const enum proto_event_kind kinds[SCRIPT_EVENTS] = {
        PROTO_EVENT_WELCOME, PROTO_EVENT_PROGRESS, PROTO_EVENT_TOKENS,   PROTO_EVENT_STATUS,
        PROTO_EVENT_NOTICE,  PROTO_EVENT_LOADED,   PROTO_EVENT_UNLOADED, PROTO_EVENT_DONE,
        PROTO_EVENT_DRAINED, PROTO_EVENT_ERROR};
    static const uint64_t ids[SCRIPT_EVENTS] = {0, 1, 1, 0, 0, 2, 3, 1, 0, 0};
    assert_true(i < SCRIPT_EVENTS);
    assert_int_equal(ev->kind, kinds[i]);
    assert_int_equal(ev->request_id, ids[i]);
    if (ev->kind == PROTO_EVENT_TOKENS) {
        assert_int_equal(ev->tokens.n, 2);
        assert_int_equal(ev->tokens.tokens[0].id, 41);
        assert_int_equal(ev->tokens.tokens[1].id, 42);
    }
    if (ev->kind == PROTO_EVENT_STATUS)
        assert_int_equal(ev->status.steps_total, 3);
    if (ev->kind == PROTO_EVENT_LOADED) {
        assert_int_equal(ev->loaded.expert_id, 8);
        assert_int_equal(ev->loaded.tier, PROTO_TIER_RAM);
    }
    if (ev->kind == PROTO_EVENT_UNLOADED) {
        assert_int_equal(ev->loaded.expert_id, 9);
        assert_int_equal(ev->loaded.tier, PROTO_TIER_SSD);
    }
    if (ev->kind == PROTO_EVENT_ERROR)
        assert_memory_equal(ev->error.text.data, "bye", 3);
}

static void test_proto_client_requests_arrive_as_sent(void **state)
{
    (void)state;
    struct pair p;
    struct err e = {0};
    struct proto_hello hello;
    struct proto_run run = some_run(), got;
    struct proto_scratch scratch;
    uint64_t id = 0;
    pair_open(&p);
    proto_scratch_init(&scratch);
    struct proto_frame f = pair_take(&p);
    assert_int_equal(f.cmd, PROTO_HELLO);
    assert_int_equal(proto_decode_hello(&f, &hello, &e), ERR_OK);
    assert_int_equal(hello.version, PROTO_VERSION);
    assert_memory_equal(hello.client.data, "test", 4);
    for (uint64_t i = 1; i <= 3; i++) {
        assert_int_equal(proto_client_run(p.client, &run, &id, &e), ERR_OK);
        assert_int_equal(id, i);
        f = pair_take(&p);
        assert_int_equal(f.request_id, i);
        assert_int_equal(proto_decode_run(&f, &scratch, &got, &e), ERR_OK);
        assert_memory_equal(got.tokens, prompt, sizeof prompt);
    }
    assert_int_equal(proto_client_cancel(p.client, 2, &e), ERR_OK);
    f = pair_take(&p);
    assert_int_equal(f.cmd, PROTO_CANCEL);
    assert_int_equal(f.request_id, 2);
    assert_int_equal(proto_client_status(p.client, &e), ERR_OK);
    assert_int_equal(pair_take(&p).cmd, PROTO_STATUS_REQUEST);
    assert_int_equal(proto_client_drain(p.client, &e), ERR_OK);
    assert_int_equal(pair_take(&p).cmd, PROTO_DRAIN);
    struct proto_load_expert load = {.expert_id = 4, .quant_type = 0xFFFF};
    assert_int_equal(proto_client_load_expert(p.client, &load, &id, &e), ERR_OK);
    f = pair_take(&p);
    assert_int_equal(f.cmd, PROTO_LOAD_EXPERT);
    assert_int_equal(f.request_id, 4);
    struct proto_unload_expert unload = {.expert_id = 4};
    assert_int_equal(proto_client_unload_expert(p.client, &unload, &id, &e), ERR_OK);
    assert_int_equal(pair_take(&p).cmd, PROTO_UNLOAD_EXPERT);
    proto_scratch_done(&scratch);
    pair_close(&p);
}

static void test_proto_client_blocking_wait_gives_all_events_then_the_end(void **state)
{
    (void)state;
    struct pair p;
    struct buf b;
    struct err e = {0};
    struct proto_event ev;
    pair_open(&p);
    script(&b);
    assert_int_equal(pair_take(&p).cmd, PROTO_HELLO);
    pair_say(&p, &b);
    close(p.worker);
    p.worker = -1;
    for (unsigned i = 0; i < SCRIPT_EVENTS; i++) {
        assert_int_equal(proto_client_wait(p.client, -1, &ev, &e), 1);
        expect_event(i, &ev);
    }
    assert_int_equal(proto_client_wait(p.client, -1, &ev, &e), -1);
    assert_string_equal(e.text, "the worker closed the connection");
    e = (struct err){0};
    assert_int_equal(proto_client_wait(p.client, 0, &ev, &e), -1); /* it stays lost */
    buf_done(&b);
    pair_close(&p);
}

static void test_proto_client_blocking_wait_times_out(void **state)
{
    (void)state;
    struct pair p;
    struct err e = {0};
    struct proto_event ev;
    struct buf b;
    pair_open(&p);
    assert_int_equal(proto_client_wait(p.client, 0, &ev, &e), 0);
    assert_int_equal(proto_client_wait(p.client, 5, &ev, &e), 0);
    script(&b);
    b.size = 20; /* half a frame is no event */
    pair_say(&p, &b);
    assert_int_equal(proto_client_wait(p.client, 5, &ev, &e), 0);
    assert_int_equal(e.code, ERR_OK);
    buf_done(&b);
    pair_close(&p);
}

static void test_proto_client_event_loop_gets_events_byte_by_byte(void **state)
{
    (void)state;
    struct pair p;
    struct buf b;
    struct err e = {0};
    struct proto_event ev;
    unsigned seen = 0;
    pair_open(&p);
    script(&b);
    for (size_t i = 0; i < b.size; i++) {
        assert_int_equal(send(p.worker, b.data + i, 1, MSG_NOSIGNAL), 1);
        assert_int_equal(proto_client_on_readable(p.client, &e), ERR_OK);
        while (proto_client_next(p.client, &ev, &e) == 1)
            expect_event(seen++, &ev);
    }
    assert_int_equal(seen, SCRIPT_EVENTS);
    close(p.worker);
    p.worker = -1;
    assert_int_equal(proto_client_on_readable(p.client, &e), ERR_IO);
    assert_int_equal(proto_client_next(p.client, &ev, &e), 0);
    buf_done(&b);
    pair_close(&p);
}

static void test_proto_client_slow_worker_makes_bytes_wait(void **state)
{
    (void)state;
    struct pair p;
    struct err e = {0};
    uint64_t id, n_sent = 0;
    enum {
        N = 100000
    };
    uint32_t *tokens = alloc_zero(ALLOC_MISC, N, 4);
    struct proto_run run = some_run();
    assert_non_null(tokens);
    run.tokens = tokens;
    run.n_tokens = run.n_prompt = N;
    pair_open(&p);
    assert_false(proto_client_wants_write(p.client));
    enum err_code code;
    while ((code = proto_client_run(p.client, &run, &id, &e)) == ERR_OK)
        assert_int_equal(id, ++n_sent);
    assert_int_equal(code, ERR_BUSY); /* bounded */
    assert_true(n_sent * N * 4 > 60 << 20);
    assert_true(proto_client_wants_write(p.client));
    uint64_t n_got = 0;
    struct proto_frame f;
    uint8_t *bytes = alloc_get(ALLOC_MISC, 1 << 20);
    assert_non_null(bytes);
    e = (struct err){0};
    while (n_got < n_sent + 1) { /* hello first */
        ssize_t n = recv(p.worker, bytes, 1 << 20, MSG_DONTWAIT);
        if (n > 0)
            assert_int_equal(proto_reader_feed(&p.reader, bytes, (size_t)n, &e), ERR_OK);
        while (proto_reader_next(&p.reader, &f) == 1)
            assert_int_equal(f.request_id, n_got++);
        assert_int_equal(proto_client_on_writable(p.client, &e), ERR_OK);
    }
    assert_false(proto_client_wants_write(p.client));
    assert_int_equal(proto_client_run(p.client, &run, &id, &e), ERR_OK); /* good as before */
    assert_int_equal(id, n_sent + 1);
    alloc_free(bytes);
    alloc_free(tokens);
    pair_close(&p);
}

static void test_proto_client_frame_over_the_workers_limit_is_refused(void **state)
{
    (void)state;
    struct pair p;
    struct buf b = BUF_INIT(1 << 20);
    struct err e = {0};
    struct proto_event ev;
    struct proto_run run = some_run();
    uint64_t id;
    pair_open(&p);
    proto_encode_welcome(&b, &(struct proto_welcome){.version = PROTO_VERSION, .max_frame = 80});
    pair_say(&p, &b);
    assert_int_equal(proto_client_wait(p.client, -1, &ev, &e), 1);
    assert_int_equal(proto_client_run(p.client, &run, &id, &e), ERR_LIMIT);
    assert_non_null(strstr(e.text, "the worker takes 80"));
    e = (struct err){0};
    assert_int_equal(proto_client_cancel(p.client, 1, &e), ERR_OK);
    assert_int_equal(pair_take(&p).cmd, PROTO_HELLO);
    assert_int_equal(pair_take(&p).cmd, PROTO_CANCEL);
    buf_done(&b);
    pair_close(&p);
}

static void test_proto_client_bad_run_is_refused_without_a_frame(void **state)
{
    (void)state;
    struct pair p;
    struct err e = {0};
    struct proto_run run = some_run();
    uint64_t id = 77;
    pair_open(&p);
    run.first_index = 1;
    assert_int_equal(proto_client_run(p.client, &run, &id, &e), ERR_ARGUMENT);
    run = some_run();
    run.n_top = PROTO_MAX_TOP + 1;
    assert_int_equal(proto_client_run(p.client, &run, &id, &e), ERR_ARGUMENT);
    assert_int_equal(id, 77);
    assert_int_equal(pair_take(&p).cmd, PROTO_HELLO);
    assert_int_equal(recv(p.worker, &id, 1, MSG_DONTWAIT), -1);
    pair_close(&p);
}

static void expect_lost(struct buf *b, const char *text)
{
    struct pair p;
    struct err e = {0};
    struct proto_event ev;
    pair_open(&p);
    pair_say(&p, b);
    assert_int_equal(proto_client_wait(p.client, -1, &ev, &e), -1);
    assert_string_equal(e.text, text);
    pair_close(&p);
    buf_done(b);
}

static void test_proto_client_malformed_frames_end_the_connection(void **state)
{
    (void)state;
    struct buf b = BUF_INIT(1000);
    buf_append(&b, "\0\0\0\5", 4);
    expect_lost(&b, "from the worker: frame of 5 bytes: a frame has at least 13");
    proto_encode_empty(&b, PROTO_DONE, 1);
    expect_lost(&b, "done from the worker: finish: 1 bytes needed, the payload has 0 left");
    proto_encode_welcome(&b, &(struct proto_welcome){.version = 9});
    expect_lost(&b, "welcome from the worker: the worker speaks protocol 9, this program 1");
}

static void test_proto_client_dead_worker_is_an_error_not_a_signal(void **state)
{
    (void)state;
    struct pair p;
    struct err e = {0};
    struct proto_event ev;
    struct proto_run run = some_run();
    uint64_t id;
    struct buf b;
    pair_open(&p);
    script(&b);
    pair_say(&p, &b);
    close(p.worker);
    p.worker = -1;
    assert_int_equal(proto_client_run(p.client, &run, &id, &e), ERR_IO);
    e = (struct err){0};
    assert_int_equal(proto_client_run(p.client, &run, &id, &e), ERR_IO);
    assert_false(proto_client_wants_write(p.client));
    e = (struct err){0};
    /* What arrived, or a reset because the hello was never read. */
    int got = proto_client_wait(p.client, -1, &ev, &e);
    assert_true(got == 1 || (got == -1 && e.code == ERR_IO));
    buf_done(&b);
    pair_close(&p);
}

static void test_proto_client_connect_says_why_not(void **state)
{
    (void)state;
    struct proto_client *c = NULL;
    struct err e = {0};
    char path[64], longer[200];
    snprintf(path, sizeof path, "/tmp/islet-test-client-%d.sock", (int)getpid());
    assert_int_equal(proto_client_connect(path, "test", &c, &e), ERR_IO);
    assert_non_null(strstr(e.text, "no such socket"));
    e = (struct err){0};
    memset(longer, 'x', sizeof longer);
    longer[150] = '\0';
    assert_int_equal(proto_client_connect(longer, "test", &c, &e), ERR_IO);
    assert_string_equal(e.text, "socket path of 150 bytes: a path has 1 to 107");
    e = (struct err){0};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(proto_client_connect(path, "test", &c, &e), ERR_IO);
    assert_non_null(strstr(e.text, "nobody listens"));
    e = (struct err){0};
    assert_int_equal(listen(fd, 4), 0);
    assert_int_equal(proto_client_connect(path, "test", &c, &e), ERR_OK);
    assert_true((fcntl(proto_client_fd(c), F_GETFD) & FD_CLOEXEC) != 0);
    assert_true((fcntl(proto_client_fd(c), F_GETFL) & O_NONBLOCK) != 0);
    proto_client_close(c);
    close(fd);
    unlink(path);
}

static void test_proto_client_no_memory_is_reported_and_nothing_leaks(void **state)
{
    (void)state;
    uint64_t live = alloc_live_blocks();
    for (uint64_t nth = 1;; nth++) {
        int fds[2];
        struct proto_client *c = NULL;
        struct err e = {0};
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
        alloc_fail_at(nth, 0);
        enum err_code code = proto_client_adopt(fds[0], "test", &c, &e);
        alloc_fail_at(0, 0);
        close(fds[1]);
        if (code == ERR_OK)
            proto_client_close(c);
        else
            assert_int_equal(close(fds[0]), 0); /* still the caller's */
        assert_int_equal(alloc_live_blocks(), live);
        if (code == ERR_OK)
            break;
        assert_true(nth < 10);
    }
    proto_client_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_proto_client_requests_arrive_as_sent),
        cmocka_unit_test(test_proto_client_blocking_wait_gives_all_events_then_the_end),
        cmocka_unit_test(test_proto_client_blocking_wait_times_out),
        cmocka_unit_test(test_proto_client_event_loop_gets_events_byte_by_byte),
        cmocka_unit_test(test_proto_client_slow_worker_makes_bytes_wait),
        cmocka_unit_test(test_proto_client_frame_over_the_workers_limit_is_refused),
        cmocka_unit_test(test_proto_client_bad_run_is_refused_without_a_frame),
        cmocka_unit_test(test_proto_client_malformed_frames_end_the_connection),
        cmocka_unit_test(test_proto_client_dead_worker_is_an_error_not_a_signal),
        cmocka_unit_test(test_proto_client_connect_says_why_not),
        cmocka_unit_test(test_proto_client_no_memory_is_reported_and_nothing_leaks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

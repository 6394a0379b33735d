#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "cli_http.h"
#include "cli_server.h"

/* A server for one connection: waits for the end of a head, writes `answer` in pieces of `step`,
 * and closes; with `hold` it keeps the connection until the client closes. */
struct peer {
    pthread_t thread;
    int listener;
    const char *answer;
    size_t step;
    bool hold;
    char request[4096];
    struct cli_server server;
    char dir[32];
};

static void *peer_run(void *context)
{
    struct peer *p = context;
    size_t used = 0;
    int fd = accept(p->listener, NULL, NULL);
    while (fd >= 0 && strstr(p->request, "\r\n\r\n") == NULL) {
        ssize_t n = read(fd, p->request + used, sizeof p->request - 1 - used);
        if (n <= 0)
            break;
        used += (size_t)n;
    }
    size_t left = strlen(p->answer);
    for (const char *at = p->answer; left > 0;) {
        size_t n = p->step < left ? p->step : left;
        if (send(fd, at, n, MSG_NOSIGNAL) != (ssize_t)n)
            break;
        at += n;
        left -= n;
    }
    char byte;
    while (p->hold && read(fd, &byte, 1) > 0)
        ;
    close(fd);
    return NULL;
}

static void peer_start(struct peer *p, const char *answer, size_t step, bool hold)
{
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    char address[128];
    *p =
        (struct peer){.answer = answer, .step = step, .hold = hold, .dir = "/tmp/islet-cli-XXXXXX"};
    assert_non_null(mkdtemp(p->dir));
    snprintf(un.sun_path, sizeof un.sun_path, "%s/s", p->dir);
    p->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(p->listener, (struct sockaddr *)&un, sizeof un), 0);
    assert_int_equal(listen(p->listener, 1), 0);
    snprintf(address, sizeof address, "unix:%s", un.sun_path);
    assert_int_equal(cli_server_parse(address, &p->server, NULL), ERR_OK);
    assert_int_equal(pthread_create(&p->thread, NULL, peer_run, p), 0);
}

static void peer_stop(struct peer *p)
{
    pthread_join(p->thread, NULL);
    close(p->listener);
    unlink(p->server.path);
    rmdir(p->dir);
}

static enum err_code collect(void *context, const char *data, size_t n, struct err *e)
{
    (void)e;
    strncat(context, data, n);
    return ERR_OK;
}

static void test_cli_http_answers_are_read_in_any_pieces(void **state)
{
    static const char *const answers[] = {
        "HTTP/1.1 200 OK\r\nx-islet-seed: 7\r\nContent-Length: 5\r\n\r\nhello",
        ("HTTP/1.1 200 OK\r\nX-Islet-Seed: 7\r\nTransfer-Encoding: chunked\r\n\r\n"
         "2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"),
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nx-islet-seed:7\r\nContent-Length: 5\r\n\r\nhello",
        "HTTP/1.0 200 OK\r\nx-islet-seed: 7\r\n\r\nhello",
    };
    (void)state;
    for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++)
        for (size_t step = 1; step < 200; step = step * 3 + 1) {
            struct peer p;
            struct cli_http_response r;
            char body[64] = "";
            peer_start(&p, answers[i], step, false);
            struct cli_http_call call = {.method = "POST",
                                         .path = "/x",
                                         .body = "{}",
                                         .body_size = 2,
                                         .stop_fd = -1,
                                         .on_data = collect,
                                         .context = body};
            assert_int_equal(cli_http_send(&p.server, &call, &r, NULL), ERR_OK);
            assert_int_equal(r.status, 200);
            assert_string_equal(body, "hello");
            assert_string_equal(r.seed, "7");
            cli_http_response_done(&r);
            peer_stop(&p);
            assert_non_null(strstr(p.request, "POST /x HTTP/1.1\r\nHost: localhost\r\n"));
            assert_non_null(strstr(p.request, "Content-Length: 2\r\n"));
        }
}

static enum err_code send_once(struct peer *p, int stop_fd, int idle_ms, struct err *e)
{
    struct cli_http_response r;
    struct cli_http_call call = {
        .method = "GET", .path = "/x", .stop_fd = stop_fd, .idle_ms = idle_ms};
    enum err_code code = cli_http_send(&p->server, &call, &r, e);
    cli_http_response_done(&r);
    return code;
}

static void test_cli_http_broken_answers_are_errors(void **state)
{
    static const struct {
        const char *answer, *text;
        enum err_code code;
    } rows[] = {
        {"", "before the answer was complete", ERR_IO},
        {"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", "before the answer", ERR_IO},
        {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "before the answer",
         ERR_IO},
        {"220 mail ready\r\n", "does not speak HTTP/1.1", ERR_PROTOCOL},
    };
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct peer p;
        struct err e = {0};
        peer_start(&p, rows[i].answer, 1000, false);
        assert_int_equal(send_once(&p, -1, 0, &e), rows[i].code);
        assert_non_null(strstr(e.text, rows[i].text));
        peer_stop(&p);
    }
}

static void test_cli_http_stop_and_silence_end_the_call(void **state)
{
    struct peer p;
    struct err e = {0};
    (void)state;
    int stop = eventfd(1, EFD_CLOEXEC);
    peer_start(&p, "HTTP/1.1 200 OK\r\n", 1000, true);
    assert_int_equal(send_once(&p, stop, 0, &e), ERR_CANCELLED);
    peer_stop(&p);
    close(stop);
    e = (struct err){0};
    peer_start(&p, "HTTP/1.1 200 OK\r\n", 1000, true);
    assert_int_equal(send_once(&p, -1, 30, &e), ERR_IO);
    assert_non_null(strstr(e.text, "silent"));
    peer_stop(&p);
}

static void test_cli_http_error_body_gives_its_message(void **state)
{
    struct peer p;
    struct cli_http_response r;
    struct err e = {0};
    struct cli_http_call call = {.method = "GET", .path = "/x", .stop_fd = -1};
    (void)state;
    peer_start(&p,
               "HTTP/1.1 503 x\r\nContent-Length: 32\r\n\r\n{\"error\":{\"message\":\"too busy\"}}",
               7, false);
    assert_int_equal(cli_http_send(&p.server, &call, &r, &e), ERR_OK);
    assert_int_equal(cli_http_error(&p.server, &r, &e), ERR_BUSY);
    assert_string_equal(e.text, "too busy");
    cli_http_response_done(&r);
    peer_stop(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cli_http_answers_are_read_in_any_pieces),
        cmocka_unit_test(test_cli_http_broken_answers_are_errors),
        cmocka_unit_test(test_cli_http_stop_and_silence_end_the_call),
        cmocka_unit_test(test_cli_http_error_body_gives_its_message),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* The HTTP surface over real sockets, against islet-gateway and isletd. tests/e2e/wire/ holds a
 * folder per case:
 *   request  a line of the file is a line with CR LF on the wire; a '\' at its end leaves the CR LF
 *            out; \r \n \t \0 \\ \xNN stand for bytes
 *   expect   lines of: status N, header LINE, header-begins TEXT, no-header NAME, body TEXT,
 *            no-body, close, keep (a request behind it is answered), silent, via unix, whole (not
 *            byte by byte too)
 * Each case is sent whole and byte by byte, must carry x-request-id, and /livez must answer
 * afterwards. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "buf.h"
#include "http_mutate.h"
#include "http_shapes.h"
#include "spawn.h"

enum {
    ANSWER_BYTES = 1 << 20
};

static char answer[ANSWER_BYTES];

#define CHAT_BODY \
    "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\":4,\"temperature\":0}"
#define HEAD(path, more) \
    "POST " path " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" more "\r\n"

static void chat(struct buf *out, const char *more)
{
    buf_format(out, HEAD("/v1/chat/completions", "%sContent-Length: %zu\r\n") "%s", more,
               strlen(CHAT_BODY), CHAT_BODY);
}

static void put(int fd, const void *bytes, size_t n)
{
    for (size_t at = 0; at < n;) {
        ssize_t sent = send(fd, (const char *)bytes + at, n - at, MSG_NOSIGNAL);
        if (sent <= 0)
            return; /* the server closed early: what it said is still to be read */
        at += (size_t)sent;
    }
}

static unsigned status(void)
{
    return strncmp(answer, "HTTP/1.1 ", 9) == 0 ? (unsigned)atoi(answer + 9) : 0;
}

static int open_tcp(struct spawn *s)
{
    int fd = spawn_connect(s);
    int on = 1;
    assert_true(fd >= 0);
    assert_int_equal(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on), 0);
    return fd;
}

/* One request on a connection of its own. */
static unsigned ask(struct spawn *s, const void *bytes, size_t n)
{
    int fd = open_tcp(s);
    put(fd, bytes, n);
    spawn_read(fd, answer, sizeof answer, spawn_response_whole);
    close(fd);
    return status();
}

static void check_live(struct spawn *s)
{
    static const char request[] = "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
    assert_int_equal(ask(s, request, sizeof request - 1), 200);
}

/* ---- cases of the folder --------------------------------------------------------------------- */

static bool read_file(const char *name, const char *file, struct buf *out)
{
    char path[512];
    snprintf(path, sizeof path, "%s/e2e/wire/%s/%s", ISLET_TEST_DIR, name, file);
    FILE *f = fopen(path, "rb");
    int c;
    if (f == NULL)
        return false;
    while ((c = fgetc(f)) != EOF)
        buf_byte(out, (uint8_t)c);
    fclose(f);
    return true;
}

static void expand(const struct buf *text, struct buf *out)
{
    for (size_t i = 0; i < text->size; i++) {
        char c = (char)text->data[i], next = i + 1 < text->size ? (char)text->data[i + 1] : 0;
        if (c == '\n') {
            buf_text(out, "\r\n");
            continue;
        }
        if (c != '\\') {
            buf_byte(out, (uint8_t)c);
            continue;
        }
        i++;
        switch (next) {
        case 'r':
            buf_byte(out, '\r');
            break;
        case 'n':
            buf_byte(out, '\n');
            break;
        case 't':
            buf_byte(out, '\t');
            break;
        case '0':
            buf_byte(out, 0);
            break;
        case 'x': {
            char hex[3] = {(char)text->data[i + 1], (char)text->data[i + 2], 0};
            buf_byte(out, (uint8_t)strtoul(hex, NULL, 16));
            i += 2;
            break;
        }
        case '\n':
            break;
        default:
            buf_byte(out, (uint8_t)next);
        }
    }
}

/* A line of the head that begins with `text`, and with `whole` holds nothing more. */
static bool has_line(const char *text, bool whole)
{
    const char *end = strstr(answer, "\r\n\r\n");
    for (const char *at = answer; end != NULL && (at = strcasestr(at, text)) != NULL && at < end;
         at++)
        if (at > answer && at[-1] == '\n' && (!whole || at[strlen(text)] == '\r'))
            return true;
    return false;
}

static bool has_header(const char *begin)
{
    return has_line(begin, false);
}

/* The peer closes within the socket's limit, and sends nothing more. */
static bool is_closed(int fd)
{
    char byte;
    ssize_t got = recv(fd, &byte, 1, 0);
    return got == 0 || (got < 0 && errno == ECONNRESET);
}

/* Nothing more came, and a request behind it is answered. */
static bool is_kept(int fd)
{
    static const char request[] = "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
    static char next[4096];
    put(fd, request, sizeof request - 1);
    spawn_read(fd, next, sizeof next, spawn_response_whole);
    return strncmp(next, "HTTP/1.1 200 OK\r\n", 17) == 0 && strstr(next, "{\"status\":\"ok\"}");
}

/* One line of `expect`; false: not met. */
static bool meets(const char *line, int fd)
{
    const char *body = strstr(answer, "\r\n\r\n");
    if (strncmp(line, "status ", 7) == 0)
        return status() == (unsigned)atoi(line + 7);
    if (strncmp(line, "header ", 7) == 0)
        return has_line(line + 7, true);
    if (strncmp(line, "header-begins ", 14) == 0)
        return has_header(line + 14);
    if (strncmp(line, "no-header ", 10) == 0)
        return !has_header(line + 10);
    if (strncmp(line, "body ", 5) == 0)
        return body != NULL && strstr(body + 4, line + 5) != NULL;
    if (strcmp(line, "no-body") == 0)
        return body != NULL && body[4] == '\0';
    if (strcmp(line, "close") == 0)
        return is_closed(fd);
    if (strcmp(line, "keep") == 0)
        return is_kept(fd);
    if (strcmp(line, "silent") == 0)
        return answer[0] == '\0';
    return strncmp(line, "via ", 4) == 0 || strcmp(line, "whole") == 0;
}

static bool head_whole(const char *text, size_t n)
{
    (void)n;
    return strstr(text, "\r\n\r\n") != NULL;
}

static void run_case(struct spawn *s, const char *name, const struct buf *request,
                     const char *expect, size_t piece)
{
    char lines[4096], *rest = NULL;
    int fd = strstr(expect, "via unix") != NULL ? spawn_connect_unix(s) : open_tcp(s);
    assert_true(fd >= 0);
    for (size_t at = 0; at < request->size; at += piece)
        put(fd, request->data + at, piece < request->size - at ? piece : request->size - at);
    bool no_body = strstr(expect, "no-body") != NULL;
    spawn_read(fd, answer, sizeof answer, no_body ? head_whole : spawn_response_whole);
    snprintf(lines, sizeof lines, "%s", expect);
    for (char *line = strtok_r(lines, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest))
        if (!meets(line, fd))
            fail_msg("%s (pieces of %zu): expected '%s', got: %s", name, piece, line, answer);
    if (answer[0] != '\0' && strstr(answer, "\r\nx-request-id: ") == NULL)
        fail_msg("%s: no x-request-id: %s", name, answer);
    close(fd);
    check_live(s);
}

static unsigned run_cases(struct spawn *s, const char *prefix)
{
    char path[512];
    struct dirent **entries;
    unsigned n = 0;
    snprintf(path, sizeof path, "%s/e2e/wire", ISLET_TEST_DIR);
    int found = scandir(path, &entries, NULL, alphasort);
    assert_true(found > 0);
    for (int i = 0; i < found; i++) {
        const char *name = entries[i]->d_name;
        struct buf text = BUF_INIT(1 << 20), request = BUF_INIT(1 << 20), expect = BUF_INIT(4096);
        if (strncmp(name, prefix, strlen(prefix)) == 0 && read_file(name, "request", &text)) {
            assert_true(read_file(name, "expect", &expect));
            buf_byte(&expect, 0);
            expand(&text, &request);
            run_case(s, name, &request, (const char *)expect.data, request.size);
            if (strstr((const char *)expect.data, "whole") == NULL)
                run_case(s, name, &request, (const char *)expect.data, 1);
            n++;
        }
        buf_done(&text);
        buf_done(&request);
        buf_done(&expect);
        free(entries[i]);
    }
    free(entries);
    return n;
}

static void test_e2e_wire_cases_are_answered_as_expected(void **state)
{
    assert_true(run_cases(*state, "w") > 30);
}

/* ---- figures of the server ------------------------------------------------------------------- */

/* A number of /status, by its JSON key. */
static unsigned long figure(struct spawn *s, const char *key)
{
    static const char request[] = "GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n";
    char word[64];
    snprintf(word, sizeof word, "\"%s\":", key);
    assert_int_equal(ask(s, request, sizeof request - 1), 200);
    const char *at = strstr(answer, word);
    assert_non_null(at);
    return strtoul(at + strlen(word), NULL, 10);
}

static void wait_figure(struct spawn *s, const char *key, unsigned long value)
{
    unsigned tries = 0;
    for (unsigned long now; (now = figure(s, key)) != value; tries++) {
        if (tries >= 1000)
            fail_msg("%s stays %lu instead of %lu", key, now, value);
        poll(NULL, 0, 5);
    }
}

/* ---- what no file can say -------------------------------------------------------------------- */

static unsigned n_answers(void)
{
    unsigned n = 0;
    for (const char *at = answer; (at = strstr(at, "\r\nServer: islet/")) != NULL; at++)
        n++;
    return n;
}

/* The error's code is the one of malformed requests that goes with the status. */
static bool has_code(unsigned of)
{
    const char *code = of == 405   ? "method_not_allowed"
                       : of == 501 ? "not_implemented"
                       : of == 505 ? "http_version"
                                   : "bad_request";
    char word[64];
    snprintf(word, sizeof word, "\"code\":\"%s\"}}", code);
    return strstr(answer, word) != NULL;
}

/* The shape, then a good request on the same connection, in pieces of so many bytes. */
static void check_shape(struct spawn *s, const struct http_shape *shape, size_t piece)
{
    struct buf b = BUF_INIT(1 << 16);
    buf_append(&b, shape->bytes, shape->n);
    chat(&b, "");
    int fd = open_tcp(s);
    for (size_t at = 0; at < b.size; at += piece)
        put(fd, b.data + at, piece < b.size - at ? piece : b.size - at);
    buf_done(&b);
    spawn_read(fd, answer, sizeof answer, NULL);
    bool fine = is_closed(fd);
    close(fd);
    if (shape->status == 0)
        fine = fine && answer[0] == '\0';
    else
        fine = fine && has_line("Connection: close", true) && has_header("x-request-id: req_") &&
               has_code(shape->status) && n_answers() == 1;
    if (status() != shape->status || strstr(answer, "chatcmpl") != NULL || !fine)
        fail_msg("shape %zu (pieces of %zu): %u instead of %u: %s", (size_t)(shape - http_shapes),
                 piece, status(), shape->status, answer);
    check_live(s);
}

static void test_e2e_wire_bad_shapes_close_and_serve_nothing_behind(void **state)
{
    struct spawn *s = *state;
    unsigned long admitted = figure(s, "admitted_total"), runs = figure(s, "requests_done_total");
    for (size_t i = 0; i < http_shapes_count; i++) {
        const struct http_shape *shape = &http_shapes[i];
        if (shape->status == 200)
            continue;
        check_shape(s, shape, 1 << 16);
        check_shape(s, shape, 1);
    }
    assert_int_equal(figure(s, "admitted_total"), admitted);
    assert_int_equal(figure(s, "requests_done_total"), runs);
}

/* Requests of the shape that must be answered, with the one behind it: nothing is read behind one
 * that closes. */
static unsigned n_requests(const struct http_shape *shape)
{
    static const char version[] = " HTTP/1.";
    const size_t n = sizeof version - 1;
    const bool closes = memmem(shape->bytes, shape->n, "Connection: close", 17) != NULL ||
                        (memmem(shape->bytes, shape->n, "HTTP/1.0", 8) != NULL &&
                         memmem(shape->bytes, shape->n, "keep-alive", 10) == NULL);
    unsigned found = 1;
    for (size_t at = 0; at + n <= shape->n; at++)
        found += memcmp(shape->bytes + at, version, n) == 0;
    return closes ? 1 : found;
}

/* Framed as valid: what comes is the answer of a handler or a route, and the next request is
 * served. */
static void test_e2e_wire_good_shapes_reach_their_route(void **state)
{
    struct spawn *s = *state;
    struct buf b = BUF_INIT(1 << 16);
    static const char body[] = "\"code\":\"missing_field\"";
    for (size_t i = 0; i < http_shapes_count; i++) {
        const struct http_shape *shape = &http_shapes[i];
        const bool post = memcmp(shape->bytes, "POST", 4) == 0;
        if (shape->status != 200)
            continue;
        buf_clear(&b);
        buf_append(&b, shape->bytes, shape->n);
        buf_text(&b, "GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        int fd = open_tcp(s);
        put(fd, b.data, b.size);
        spawn_read(fd, answer, sizeof answer, NULL);
        const bool closed = is_closed(fd);
        close(fd);
        const bool fine =
            post ? status() == 400 : status() == 200 || status() == 204 || status() == 404;
        if (!fine || !closed || n_answers() != n_requests(shape) ||
            (post && strstr(answer, body) == NULL && strstr(answer, "invalid_json") == NULL))
            fail_msg("shape %zu: %u: %s", i, status(), answer);
    }
    buf_done(&b);
    check_live(s);
}

/* The answer's text between "content":" and the next quote. */
static void content(char ret[256])
{
    const char *at = strstr(answer, "\"content\":\"");
    snprintf(ret, 256, "%.*s", at != NULL ? (int)strcspn(at + 11, "\"") : 0,
             at != NULL ? at + 11 : "");
}

static void test_e2e_wire_chat_twice_on_one_socket_and_in_chunks_is_the_same(void **state)
{
    struct spawn *s = *state;
    char first[256], other[256];
    struct buf b = BUF_INIT(1 << 16);
    chat(&b, "");
    int fd = open_tcp(s);
    for (unsigned i = 0; i < 2; i++) {
        put(fd, b.data, b.size);
        spawn_read(fd, answer, sizeof answer, spawn_response_whole);
        assert_int_equal(status(), 200);
        content(i == 0 ? first : other);
    }
    assert_string_equal(first, other);
    buf_clear(&b);
    buf_text(&b, HEAD("/v1/chat/completions", "Transfer-Encoding: chunked\r\n"));
    for (const char *p = CHAT_BODY; *p != '\0'; p++)
        buf_format(&b, "1\r\n%c\r\n", *p);
    buf_text(&b, "0\r\n\r\n");
    put(fd, b.data, b.size);
    spawn_read(fd, answer, sizeof answer, spawn_response_whole);
    content(other);
    assert_string_equal(first, other);
    close(fd);
    buf_done(&b);
}

static bool two_answers(const char *text, size_t n)
{
    const char *second = strstr(text + (n > 0), "HTTP/1.1 ");
    return second != NULL && spawn_response_whole(second, n - (size_t)(second - text));
}

static void test_e2e_wire_pipelined_chats_are_answered_in_order(void **state)
{
    struct spawn *s = *state;
    struct buf b = BUF_INIT(1 << 16);
    chat(&b, "x-request-id: first\r\n");
    chat(&b, "x-request-id: second\r\n");
    int fd = open_tcp(s);
    put(fd, b.data, b.size);
    spawn_read(fd, answer, sizeof answer, two_answers);
    close(fd);
    buf_done(&b);
    const char *one = strstr(answer, "x-request-id: first"),
               *two = strstr(answer, "x-request-id: second");
    assert_true(one != NULL && two != NULL && one < two);
}

static void test_e2e_wire_413_is_readable_while_the_body_is_sent(void **state)
{
    struct spawn *s = *state;
    enum {
        BODY = (16 << 20) + 1
    };
    char *body = calloc(1, BODY);
    assert_non_null(body);
    for (unsigned chunked = 0; chunked < 2; chunked++) {
        const char *head =
            chunked ? HEAD("/v1/chat/completions", "Transfer-Encoding: chunked\r\n") "1000001\r\n"
                    : HEAD("/v1/chat/completions", "Content-Length: 16777217\r\n");
        int fd = open_tcp(s);
        put(fd, head, strlen(head));
        put(fd, body, BODY);
        spawn_read(fd, answer, sizeof answer, spawn_response_whole);
        assert_int_equal(status(), 413);
        close(fd);
    }
    free(body);
    check_live(s);
}

static void test_e2e_wire_rubbish_behind_a_stream_closes_it(void **state)
{
    struct spawn *s = *state;
    static const char body[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"stream\":true,\"ignore_eos\":true}";
    char rubbish[65 * 1024];
    struct buf b = BUF_INIT(1 << 17);
    memset(rubbish, 'x', sizeof rubbish);
    buf_format(&b, HEAD("/v1/chat/completions", "Content-Length: %zu\r\n") "%s", sizeof body - 1,
               body);
    unsigned long cancelled = figure(s, "cancelled_total");
    int fd = open_tcp(s);
    put(fd, b.data, b.size);
    spawn_read(fd, answer, sizeof answer, head_whole);
    assert_int_equal(status(), 200);
    wait_figure(s, "running", 1);
    put(fd, rubbish, sizeof rubbish);
    spawn_read(fd, answer, sizeof answer, NULL);
    assert_null(strstr(answer, "[DONE]"));
    assert_true(is_closed(fd));
    wait_figure(s, "running", 0);
    wait_figure(s, "sequences_running", 0);
    assert_int_equal(figure(s, "cancelled_total"), cancelled + 1);
    close(fd);
    buf_done(&b);
    check_live(s);
}

/* Opens 600 connections, asks on each and closes them; returns how many were served. */
static unsigned crowd(struct spawn *s)
{
    static int fds[600];
    static const char request[] = "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
    unsigned n_served = 0, n_refused = 0;
    for (unsigned i = 0; i < 600; i++)
        fds[i] = open_tcp(s);
    for (unsigned i = 0; i < 600; i++) {
        put(fds[i], request, sizeof request - 1);
        spawn_read(fds[i], answer, sizeof answer, spawn_response_whole);
        n_served += status() == 200;
        if (status() != 503)
            continue;
        assert_true(has_line("Connection: close", true) && has_line("Retry-After: 1", true));
        assert_true(has_header("x-request-id: req_"));
        assert_non_null(strstr(answer, "\"code\":\"overloaded\"}}"));
        assert_true(is_closed(fds[i]));
        n_refused++;
    }
    int other = spawn_connect_unix(s); /* the limit is each listener's own */
    assert_true(other >= 0 && is_kept(other));
    close(other);
    for (unsigned i = 0; i < 600; i++)
        close(fds[i]);
    assert_int_equal(n_served + n_refused, 600);
    assert_true(n_served <= 512);
    return n_served;
}

static void test_e2e_wire_600_connections_are_512_served_and_the_rest_503(void **state)
{
    struct spawn *s = *state;
    /* Connections of the test before may still be there for a moment; twice, because none may
     * leak. */
    for (unsigned round = 0; round < 2; round++) {
        unsigned tries = 0;
        while (crowd(s) != 512) {
            assert_true(tries++ < 50);
            poll(NULL, 0, 20);
        }
    }
}

static void test_e2e_wire_mutated_requests_end_in_a_status_or_a_close(void **state)
{
    struct spawn *s = *state;
    struct buf request = BUF_INIT(1 << 20);
    for (uint32_t i = 0; i < 2000; i++) {
        http_mutate(7, i, &request);
        int fd = open_tcp(s);
        put(fd, request.data, request.size);
        shutdown(fd, SHUT_WR); /* whatever it waits for does not come */
        spawn_read(fd, answer, sizeof answer, NULL);
        if (answer[0] != '\0' && status() == 0)
            fail_msg("request %u: %s", i, answer);
        close(fd);
    }
    buf_done(&request);
    check_live(s);
    assert_true(spawn_alive(s));
}

static void test_e2e_wire_key_cases_and_reload(void **state)
{
    struct spawn s;
    char set[128];
    char path[] = "/tmp/e2e_wire_keys.XXXXXX";
    const char *sets[] = {set, NULL};
    int fd = mkstemp(path);
    (void)state;
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "sk-right\n", 9), 9);
    snprintf(set, sizeof set, "server.api_key_file=%s", path);
    assert_true(spawn_start(&s, ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf", sets));
    assert_true(run_cases(&s, "k") > 5);
    static const char old[] =
        "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-right\r\n\r\n";
    static const char new[] =
        "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-newer\r\n\r\n";
    assert_int_equal(ask(&s, old, sizeof old - 1), 200);
    assert_int_equal(pwrite(fd, "sk-newer\n", 9, 0), 9);
    close(fd);
    assert_int_equal(kill(s.gateway, SIGHUP), 0);
    unsigned tries = 0;
    while (ask(&s, new, sizeof new - 1) != 200 && tries++ < 500)
        poll(NULL, 0, 10);
    assert_int_equal(ask(&s, old, sizeof old - 1), 401);
    assert_int_equal(ask(&s, new, sizeof new - 1), 200);
    unlink(path);
    assert_true(spawn_stop(&s));
}

/* ---- a client that leaves -------------------------------------------------------------------- */

enum leave {
    LEAVE_CLOSE,
    LEAVE_HALF,
    LEAVE_RESET,
    LEAVE_N
};

static void leave(int fd, enum leave how)
{
    struct linger now = {.l_onoff = 1};
    if (how == LEAVE_RESET)
        assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now), 0);
    if (how == LEAVE_HALF)
        assert_int_equal(shutdown(fd, SHUT_WR), 0);
    else
        close(fd);
}

/* Begins an answer of about 2,000 tokens, or with a long prompt one that is read for a while
 * first. */
static int begin_long(struct spawn *s, bool stream, bool long_prompt)
{
    struct buf body = BUF_INIT(1 << 20), b = BUF_INIT(1 << 20);
    buf_text(&body, "{\"messages\":[{\"role\":\"user\",\"content\":\"");
    for (unsigned i = 0; long_prompt && i < 1500; i++)
        buf_text(&body, i % 7 == 0 ? "x " : "is ");
    buf_format(&body, "hi\"}],\"ignore_eos\":true,\"cache_prompt\":false,\"stream\":%s}",
               stream ? "true" : "false");
    buf_format(&b, HEAD("/v1/chat/completions", "Content-Length: %zu\r\n"), body.size);
    buf_append(&b, body.data, body.size);
    int fd = open_tcp(s);
    put(fd, b.data, b.size);
    buf_done(&body);
    buf_done(&b);
    return fd;
}

static void check_leaving(struct spawn *s, enum leave how, bool stream)
{
    unsigned long cancelled = figure(s, "cancelled_total");
    int decoding = begin_long(s, stream, false);
    wait_figure(s, "running", 1);
    int queued = begin_long(s, stream, false);
    wait_figure(s, "queued", 1);
    leave(queued, how);
    wait_figure(s, "queued", 0);
    assert_int_equal(figure(s, "running"), 1); /* the other one is not disturbed */
    leave(decoding, how);
    wait_figure(s, "running", 0);
    int prefilling = begin_long(s, stream, true);
    wait_figure(s, "running", 1);
    leave(prefilling, how);
    wait_figure(s, "running", 0);
    wait_figure(s, "sequences_running", 0);
    wait_figure(s, "kv_pages_used", 0);
    wait_figure(s, "cancelled_total", cancelled + 3);
    if (how == LEAVE_HALF) { /* the server closes its side */
        assert_true(recv(queued, answer, 1, 0) <= 0 || stream);
        close(queued);
        close(decoding);
        close(prefilling);
    }
}

static void test_e2e_wire_client_gone_cancels_in_queue_prefill_and_decode(void **state)
{
    struct spawn s;
    static const char *const sets[] = {"batch.max_sequences=1", "batch.prefill_chunk=8", NULL};
    (void)state;
    assert_true(spawn_start(&s, ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf", sets));
    for (unsigned how = 0; how < LEAVE_N; how++)
        for (unsigned stream = 0; stream < 2; stream++)
            check_leaving(&s, (enum leave)how, stream);
    assert_true(spawn_stop(&s));
}

static int set_up(void **state)
{
    static struct spawn s;
    static const char *const sets[] = {"server.cors=app://*", "server.hosts=a", "model.alias=a/b:q",
                                       NULL};
    *state = &s;
    return spawn_start(&s, ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf", sets) ? 0 : -1;
}

static int tear_down(void **state)
{
    return spawn_stop(*state) ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_e2e_wire_cases_are_answered_as_expected),
        cmocka_unit_test(test_e2e_wire_bad_shapes_close_and_serve_nothing_behind),
        cmocka_unit_test(test_e2e_wire_good_shapes_reach_their_route),
        cmocka_unit_test(test_e2e_wire_chat_twice_on_one_socket_and_in_chunks_is_the_same),
        cmocka_unit_test(test_e2e_wire_pipelined_chats_are_answered_in_order),
        cmocka_unit_test(test_e2e_wire_413_is_readable_while_the_body_is_sent),
        cmocka_unit_test(test_e2e_wire_rubbish_behind_a_stream_closes_it),
        cmocka_unit_test(test_e2e_wire_600_connections_are_512_served_and_the_rest_503),
        cmocka_unit_test(test_e2e_wire_mutated_requests_end_in_a_status_or_a_close),
        cmocka_unit_test(test_e2e_wire_key_cases_and_reload),
        cmocka_unit_test(test_e2e_wire_client_gone_cancels_in_queue_prefill_and_decode),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}

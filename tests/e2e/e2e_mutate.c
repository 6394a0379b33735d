/* Mutated requests through the gateway's HTTP layer, in this process: each ends in a status or a
 * close, and none is framed otherwise than by h11. `e2e_mutate [COUNT [SEED]]`, 100,000 and 1 by
 * default. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "alloc.h"
#include "gw_conn.h"
#include "http_echo.h"
#include "http_mutate.h"
#include "log.h"

struct options {
    uint32_t count;
    uint64_t seed;
};

static void send_one(struct http_echo *echo, const struct buf *request, uint32_t index)
{
    struct gw_conn *c = http_echo_connect(echo);
    size_t piece = index % 3 == 0 ? 1 + index % 17 : request->size, n_out;
    uint64_t n_answered = 0;
    for (size_t at = 0; at < request->size; at += piece) {
        gw_conn_feed(c, request->data + at,
                     piece < request->size - at ? piece : request->size - at);
        gw_conn_run(c);
        const char *bytes = gw_conn_output(c, &n_out);
        if (n_out > 0 && n_answered == 0)
            assert_memory_equal(bytes, "HTTP/1.1 ", 9);
        n_answered += n_out;
        gw_conn_sent(c, n_out);
    }
    if (!http_echo_ends(echo, c))
        fail_msg("request %u neither answered nor closed: %.*s", index, (int)request->size,
                 request->data);
    gw_conn_free(c);
}

static void test_e2e_mutate_each_ends_in_a_status_or_a_close(void **state)
{
    const struct options *o = *state;
    struct http_echo echo;
    http_echo_init(&echo);
    struct buf request = BUF_INIT(1 << 20);
    uint64_t before = alloc_live_blocks();
    for (uint32_t i = 0; i < o->count; i++) {
        http_mutate(o->seed, i, &request);
        send_one(&echo, &request, i);
    }
    assert_int_equal(echo.shared.n_exchanges, 0);
    buf_done(&request);
    assert_true(alloc_live_blocks() <= before);
    print_message("%u requests, %llu with a sound head, %llu refused\n", o->count,
                  (unsigned long long)stats_get(&echo.shared.requests),
                  (unsigned long long)stats_get(&echo.shared.refused));
    http_echo_done(&echo);
}

/* Our framing of the bytes, in the words of h11_frames.py. */
static void frames(const struct buf *request, char *ret, size_t n_ret)
{
    struct gw_limits limits = gw_limits_default();
    struct gw_http *h = gw_http_new(&limits);
    size_t at = 0, used, length = 0;
    enum gw_http_event event;
    ret[0] = '\0';
    do {
        event = gw_http_feed(h, request->data + at, request->size - at, &used);
        at += used;
        if (event == GW_HTTP_COMPLETE) {
            struct gw_http_request *r = gw_http_take(h);
            length += (size_t)snprintf(ret + length, n_ret - length, "%s:%zu ",
                                       gw_http_method_name(r->method), r->body_bytes);
            bool go_on = r->keep_alive;
            gw_http_request_free(r);
            if (!go_on || length + 64 > n_ret)
                break;
        }
    } while (event == GW_HTTP_HEAD_READY || event == GW_HTTP_COMPLETE);
    gw_http_free(h);
}

/* Requests that both accept, one after the other, must have the same body. */
static unsigned compare(char *ours, char *theirs, uint32_t index, const struct buf *request)
{
    unsigned both = 0;
    char *our_rest = NULL, *their_rest = NULL;
    char *a = strtok_r(ours, " \n", &our_rest), *b = strtok_r(theirs, " \n", &their_rest);
    while (a != NULL && b != NULL && b[0] != '.' && b[0] != '!') {
        if (strcmp(a, b) != 0)
            fail_msg("request %u: %s here, %s in h11: %.*s", index, a, b, (int)request->size,
                     request->data);
        both++;
        a = strtok_r(NULL, " \n", &our_rest);
        b = strtok_r(NULL, " \n", &their_rest);
    }
    return both;
}

static void test_e2e_mutate_frames_are_those_of_h11(void **state)
{
    const struct options *o = *state;
    char folder[] = "/tmp/e2e_mutate.XXXXXX", in[64], out[64], command[400];
    assert_non_null(mkdtemp(folder));
    snprintf(in, sizeof in, "%s/in", folder);
    snprintf(out, sizeof out, "%s/out", folder);
    struct buf request = BUF_INIT(1 << 20);
    FILE *f = fopen(in, "wb");
    assert_non_null(f);
    for (uint32_t i = 0; i < o->count; i++) {
        http_mutate(o->seed, i, &request);
        uint32_t n = (uint32_t)request.size;
        fwrite(&n, sizeof n, 1, f);
        fwrite(request.data, 1, n, f);
    }
    assert_int_equal(fclose(f), 0);
    snprintf(command, sizeof command, "/usr/bin/python3 '%s/e2e/wire/h11_frames.py' '%s' '%s'",
             ISLET_TEST_DIR, in, out);
    int code = system(command);
    uint64_t both = 0;
    if (WEXITSTATUS(code) != 77) {
        char *theirs = NULL, ours[4096];
        size_t capacity = 0;
        assert_int_equal(code, 0);
        f = fopen(out, "r");
        assert_non_null(f);
        for (uint32_t i = 0; i < o->count; i++) {
            assert_true(getline(&theirs, &capacity, f) > 0);
            http_mutate(o->seed, i, &request);
            frames(&request, ours, sizeof ours);
            both += compare(ours, theirs, i, &request);
        }
        fclose(f);
        free(theirs);
        assert_true(both > o->count / 10);
        print_message("%u requests, %llu accepted by both, framed alike\n", o->count,
                      (unsigned long long)both);
    }
    buf_done(&request);
    unlink(in);
    unlink(out);
    rmdir(folder);
    if (WEXITSTATUS(code) == 77)
        skip();
}

int main(int argc, char **argv)
{
    static struct options o = {.count = 100000, .seed = 1};
    if (argc > 1)
        o.count = (uint32_t)strtoul(argv[1], NULL, 10);
    if (argc > 2)
        o.seed = strtoull(argv[2], NULL, 10);
    log_setup(LOG_LEVEL_ERROR, LOG_FORMAT_TEXT);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(test_e2e_mutate_each_ends_in_a_status_or_a_close, &o),
        cmocka_unit_test_prestate(test_e2e_mutate_frames_are_those_of_h11, &o),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

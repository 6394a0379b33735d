#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "fake_worker.h"
#include "proto_client.h"

static const uint32_t prompt[] = {5, 6, 7};

struct fixture {
    char path[64];
    struct fake_worker *worker;
    struct proto_client *client;
};

static void open_both(struct fixture *x, struct fake_worker_options o)
{
    struct err e = {0};
    snprintf(x->path, sizeof x->path, "/tmp/islet-test-fake-%d.sock", (int)getpid());
    o.path = x->path;
    x->worker = fake_worker_start(&o);
    assert_int_equal(proto_client_connect(x->path, "test", &x->client, &e), ERR_OK);
}

static void close_both(struct fixture *x)
{
    proto_client_close(x->client);
    fake_worker_stop(x->worker);
}

static uint64_t start(struct fixture *x, uint32_t max_new)
{
    struct proto_run run = {.tokens = prompt,
                            .n_tokens = 3,
                            .n_prompt = 3,
                            .max_new = max_new,
                            .top_p = 1,
                            .repeat = 1,
                            .flags = PROTO_RUN_LOGPROBS,
                            .n_top = 2};
    struct err e = {0};
    uint64_t id = 0;
    assert_int_equal(proto_client_run(x->client, &run, &id, &e), ERR_OK);
    return id;
}

static void expect_event(struct fixture *x, enum proto_event_kind kind, struct proto_event *ret)
{
    struct err e = {0};
    assert_int_equal(proto_client_wait(x->client, 10000, ret, &e), 1);
    assert_int_equal(ret->kind, kind);
}

static void test_fake_worker_answers_by_its_callback(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_event ev;
    open_both(&x, fake_worker_defaults(""));
    expect_event(&x, PROTO_EVENT_WELCOME, &ev);
    assert_int_equal(ev.welcome.state, PROTO_SERVING);
    uint64_t id = start(&x, 5);
    expect_event(&x, PROTO_EVENT_PROGRESS, &ev);
    for (uint32_t i = 0; i < 5; i++) {
        expect_event(&x, PROTO_EVENT_TOKENS, &ev);
        assert_int_equal(ev.request_id, id);
        assert_int_equal(ev.tokens.first_index, i);
        assert_int_equal(ev.tokens.tokens[0].id, prompt[i % 3]);
        assert_int_equal(ev.tokens.tokens[0].n_top, 2);
    }
    expect_event(&x, PROTO_EVENT_DONE, &ev);
    assert_int_equal(ev.done.finish, PROTO_FINISH_LENGTH);
    assert_int_equal(ev.done.usage.generated, 5);
    close_both(&x);
}

static bool one_open_run(const struct fake_worker_counts *c)
{
    return c->open_runs == 1;
}

static bool nobody_connected(const struct fake_worker_counts *c)
{
    return c->connections == 1 && c->connected == 0;
}

static void test_fake_worker_held_run_can_be_cancelled(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_event ev;
    struct err e = {0};
    open_both(&x, fake_worker_defaults(""));
    fake_worker_hold(x.worker, true);
    expect_event(&x, PROTO_EVENT_WELCOME, &ev);
    uint64_t id = start(&x, 5);
    assert_true(fake_worker_wait(x.worker, one_open_run, 10000));
    assert_int_equal(proto_client_cancel(x.client, id, &e), ERR_OK);
    expect_event(&x, PROTO_EVENT_DONE, &ev);
    assert_int_equal(ev.done.finish, PROTO_FINISH_CANCELLED);
    assert_int_equal(fake_worker_counts(x.worker).cancels, 1);
    start(&x, 5);
    proto_client_close(x.client); /* ends the run as well */
    x.client = NULL;
    assert_true(fake_worker_wait(x.worker, nobody_connected, 10000));
    assert_int_equal(fake_worker_counts(x.worker).open_runs, 0);
    close_both(&x);
}

static void test_fake_worker_dies_after_the_given_token(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_event ev;
    struct err e = {0};
    struct fake_worker_options o = fake_worker_defaults("");
    o.die_after = 3;
    open_both(&x, o);
    expect_event(&x, PROTO_EVENT_WELCOME, &ev);
    start(&x, 5);
    expect_event(&x, PROTO_EVENT_PROGRESS, &ev);
    for (uint32_t i = 0; i < 3; i++)
        expect_event(&x, PROTO_EVENT_TOKENS, &ev);
    assert_int_equal(proto_client_wait(x.client, 10000, &ev, &e), -1);
    proto_client_close(x.client);
    e = (struct err){0};
    assert_int_equal(proto_client_connect(x.path, "test", &x.client, &e), ERR_IO);
    x.client = NULL;
    close_both(&x);
}

static void test_fake_worker_lies_after_the_given_token(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_event ev;
    struct err e = {0};
    struct fake_worker_options o = fake_worker_defaults("");
    o.lie_after = 1;
    open_both(&x, o);
    expect_event(&x, PROTO_EVENT_WELCOME, &ev);
    start(&x, 5);
    expect_event(&x, PROTO_EVENT_PROGRESS, &ev);
    expect_event(&x, PROTO_EVENT_TOKENS, &ev);
    assert_int_equal(proto_client_wait(x.client, 10000, &ev, &e), -1);
    assert_int_equal(e.code, ERR_PROTOCOL);
    close_both(&x);
}

static void test_fake_worker_state_change_sends_welcome(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_event ev;
    struct fake_worker_options o = fake_worker_defaults("");
    o.refuse = ERR_BUSY;
    open_both(&x, o);
    expect_event(&x, PROTO_EVENT_WELCOME, &ev);
    fake_worker_set_state(x.worker, PROTO_FAILED, "no such file");
    expect_event(&x, PROTO_EVENT_WELCOME, &ev);
    assert_int_equal(ev.welcome.state, PROTO_FAILED);
    assert_memory_equal(ev.welcome.reason.data, "no such file", 12);
    start(&x, 1);
    expect_event(&x, PROTO_EVENT_ERROR, &ev);
    assert_int_equal(ev.error.code, ERR_BUSY);
    assert_int_equal(ev.error.retryable, 1);
    close_both(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fake_worker_answers_by_its_callback),
        cmocka_unit_test(test_fake_worker_held_run_can_be_cancelled),
        cmocka_unit_test(test_fake_worker_dies_after_the_given_token),
        cmocka_unit_test(test_fake_worker_lies_after_the_given_token),
        cmocka_unit_test(test_fake_worker_state_change_sends_welcome),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

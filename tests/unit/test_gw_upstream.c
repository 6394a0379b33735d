/* The link to the worker and what hangs on it (gw_dispatch), in one loop against a fake worker on a
 * thread. No sleeps: the loop turns until the event is there, with a limit. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <uv.h>

#include "alloc.h"
#include "fake_worker.h"
#include "gw_dispatch.h"
#include "gw_metrics.h"
#include "gw_model.h"
#include "gw_request.h"
#include "rng.h"

enum {
    LIMIT_MS = 10000
};

struct bed {
    uv_loop_t loop;
    char path[100];
    struct gw_model *model;
    struct gw_metrics metrics;
    struct gw_dispatch *dispatch;
    struct fake_worker_options options;
    struct fake_worker *worker;
};

static int bed_open(void **state)
{
    struct bed *b = calloc(1, sizeof *b);
    struct err e = {0};
    assert_non_null(b);
    assert_int_equal(uv_loop_init(&b->loop), 0);
    snprintf(b->path, sizeof b->path, "/tmp/islet-test-upstream-%d.sock", (int)getpid());
    assert_int_equal(gw_model_open(ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf", &b->model, &e),
                     ERR_OK);
    b->options = fake_worker_defaults(b->path);
    memcpy(b->options.welcome.file_digest, b->model->file_digest, 16);
    memcpy(b->options.welcome.shape_digest, b->model->shape_digest, 16);
    b->options.welcome.n_ctx = 2048;
    *state = b;
    return 0;
}

static void dispatch_open(struct bed *b, uint32_t max_sequences, int64_t resume_deadline_ms)
{
    struct err e = {0};
    struct gw_dispatch_options o = {.loop = &b->loop,
                                    .ticks = ticks_real(),
                                    .socket = b->path,
                                    .max_frame = PROTO_MAX_FRAME,
                                    .max_sequences = max_sequences,
                                    .queue = 4,
                                    .resume_deadline_ms = resume_deadline_ms,
                                    .model = b->model,
                                    .metrics = &b->metrics};
    assert_int_equal(gw_dispatch_new(&o, &b->dispatch, &e), ERR_OK);
}

static int bed_close(void **state)
{
    struct bed *b = *state;
    gw_dispatch_close(b->dispatch);
    uv_run(&b->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&b->loop), 0);
    fake_worker_stop(b->worker);
    gw_model_free(b->model);
    free(b);
    assert_int_equal(alloc_live_blocks(), 0);
    return 0;
}

static void on_limit(uv_timer_t *timer)
{
    *(bool *)timer->data = true;
}

/* Turns the loop until ready(user). */
static void turn_until(struct bed *b, bool (*ready)(void *user), void *user)
{
    uv_timer_t timer;
    bool late = false;
    uv_timer_init(&b->loop, &timer);
    timer.data = &late;
    uv_timer_start(&timer, on_limit, LIMIT_MS, 0);
    while (!ready(user) && !late)
        uv_run(&b->loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(&b->loop, UV_RUN_NOWAIT);
    assert_false(late);
}

static bool is_serving(void *user)
{
    return gw_dispatch_health(user) == GW_DISPATCH_SERVING;
}

static bool is_over(void *user)
{
    return gw_request_over(user);
}

static bool has_trouble(void *user)
{
    return gw_dispatch_health(user) == GW_DISPATCH_MODEL_ERROR;
}

static struct gw_request *request(struct bed *b, const char *fields)
{
    static const struct gw_chat_request_limits limits = {2048, 4096, 32};
    char text[256];
    struct gw_chat_request ask;
    struct gw_refusal refusal = {0};
    struct gw_request_prompt prompts[GW_CHAT_REQUEST_MAX_PROMPTS] = {0};
    snprintf(text, sizeof text, "{\"prompt\":[10,11,12],\"max_tokens\":9%s}", fields);
    json_t *body = json_loads(text, 0, NULL);
    assert_true(gw_chat_request_parse(body, GW_CHAT_REQUEST_COMPLETION, &limits, &ask, &refusal));
    json_decref(body);
    prompts[0] = (struct gw_request_prompt){.ids = ask.prompts[0].ids, .n = 3};
    ask.prompts[0].ids = NULL;
    struct gw_request *q = gw_request_new(&ask, prompts, 1, b->model->tokenizer);
    assert_non_null(q);
    return q;
}

static void assert_echo(const struct gw_request_choice *c, uint32_t n)
{
    assert_int_equal(c->state, GW_REQUEST_DONE);
    assert_int_equal(c->n_ids, n);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(c->ids[i], 10 + i % 3);
}

static void submit(struct bed *b, struct gw_request *q)
{
    struct gw_refusal refusal = {0};
    if (!gw_dispatch_submit(b->dispatch, q, &refusal))
        fail_msg("%s", refusal.message);
}

static void test_gw_upstream_worker_that_comes_late_is_found(void **state)
{
    struct bed *b = *state;
    dispatch_open(b, 4, 60000);
    struct gw_request *q = request(b, ",\"n\":3,\"temperature\":0");
    submit(b, q);
    uv_run(&b->loop, UV_RUN_NOWAIT);
    assert_int_equal(gw_dispatch_health(b->dispatch), GW_DISPATCH_WORKER_DOWN);
    b->worker = fake_worker_start(&b->options);
    turn_until(b, is_over, q);
    for (unsigned i = 0; i < 3; i++)
        assert_echo(&q->choices[i], 9);
    gw_request_drop(q);
}

static void test_gw_upstream_answer_goes_on_after_each_loss(void **state)
{
    struct bed *b = *state;
    dispatch_open(b, 4, 60000);
    for (uint64_t k = 1; k <= 9; k++) {
        b->options.die_after = k;
        b->worker = fake_worker_start(&b->options);
        struct gw_request *q = request(b, "");
        submit(b, q);
        uint64_t losses = b->metrics.worker_losses_total;
        while (b->metrics.worker_losses_total == losses)
            uv_run(&b->loop, UV_RUN_ONCE);
        fake_worker_stop(b->worker);
        b->options.die_after = 0;
        b->worker = fake_worker_start(&b->options);
        turn_until(b, is_over, q);
        assert_echo(&q->choices[0], 9);
        assert_int_equal(q->choices[0].resume.resumed, 1);
        gw_request_drop(q);
        fake_worker_stop(b->worker);
        b->worker = NULL;
    }
}

/* A worker that lies about its model is not given a request; the waiting ones end. */
static void test_gw_upstream_other_digests_end_the_request(void **state)
{
    struct bed *b = *state;
    struct gw_refusal refusal = {0};
    dispatch_open(b, 4, 60000);
    struct gw_request *q = request(b, ""), *later = request(b, "");
    submit(b, q);
    b->options.welcome.file_digest[5] ^= 1;
    b->worker = fake_worker_start(&b->options);
    turn_until(b, has_trouble, b->dispatch);
    assert_int_equal(q->choices[0].state, GW_REQUEST_FAILED);
    assert_int_equal(q->choices[0].failure.code, GW_ERROR_MODEL_ERROR);
    assert_false(gw_dispatch_submit(b->dispatch, later, &refusal));
    assert_int_equal(refusal.code, GW_ERROR_MODEL_ERROR);
    assert_int_equal(fake_worker_counts(b->worker).runs, 0);
    gw_request_drop(q);
    gw_request_drop(later);
}

static void test_gw_upstream_no_worker_within_the_deadline_fails(void **state)
{
    struct bed *b = *state;
    dispatch_open(b, 4, 150);
    struct gw_request *q = request(b, "");
    submit(b, q);
    turn_until(b, is_over, q);
    assert_int_equal(q->choices[0].failure.code, GW_ERROR_WORKER_UNAVAILABLE);
    gw_request_drop(q);
}

static void test_gw_upstream_places_and_queue_are_bounded(void **state)
{
    struct bed *b = *state;
    struct gw_request *all[6];
    struct gw_refusal refusal = {0};
    struct gw_metrics m = {0};
    b->worker = fake_worker_start(&b->options);
    fake_worker_hold(b->worker, true);
    dispatch_open(b, 2, 60000);
    turn_until(b, is_serving, b->dispatch);
    for (unsigned i = 0; i < 6; i++) {
        all[i] = request(b, "");
        submit(b, all[i]);
    }
    struct gw_request *q = request(b, "");
    assert_false(gw_dispatch_submit(b->dispatch, q, &refusal));
    assert_int_equal(refusal.code, GW_ERROR_OVERLOADED);
    assert_in_range(refusal.retry_after_s, 1, 30);
    gw_dispatch_gauges(b->dispatch, &m);
    assert_int_equal(m.sequences, 2);
    assert_int_equal(m.queued, 4);
    /* One that waits and one that runs go away; the others are answered. */
    gw_dispatch_abandon(b->dispatch, all[5]);
    gw_dispatch_abandon(b->dispatch, all[0]);
    fake_worker_hold(b->worker, false);
    for (unsigned i = 1; i < 5; i++) {
        turn_until(b, is_over, all[i]);
        assert_echo(&all[i]->choices[0], 9);
    }
    assert_int_equal(all[0]->choices[0].state, GW_REQUEST_IDLE);
    assert_int_equal(fake_worker_counts(b->worker).cancels, 1);
    /* Asked for again, it goes on. */
    assert_true(gw_dispatch_again(b->dispatch, all[0], &refusal));
    turn_until(b, is_over, all[0]);
    assert_echo(&all[0]->choices[0], 9);
    for (unsigned i = 0; i < 6; i++)
        gw_request_drop(all[i]);
    gw_request_drop(q);
}

static void test_gw_upstream_malformed_frames_lose_the_worker_only(void **state)
{
    struct bed *b = *state;
    dispatch_open(b, 4, 60000);
    b->options.lie_after = 4;
    b->worker = fake_worker_start(&b->options);
    struct gw_request *q = request(b, "");
    submit(b, q);
    turn_until(b, is_over, q);
    assert_echo(&q->choices[0], 9);
    assert_true(b->metrics.worker_losses_total >= 1);
    gw_request_drop(q);
}

static bool counts_dead(const struct fake_worker_counts *c)
{
    return c->dead;
}

/* Each worker dies as soon as it sees the request: it runs alone at last, then ends, and another is
 * answered. */
static void test_gw_upstream_poison_ends_after_three_losses(void **state)
{
    struct bed *b = *state;
    dispatch_open(b, 4, 60000);
    fake_worker_stop(b->worker);
    struct gw_request *poison = request(b, "");
    for (int life = 0; life < 3; life++) {
        b->worker = fake_worker_start(&b->options);
        fake_worker_hold(b->worker, true);
        turn_until(b, is_serving, b->dispatch);
        if (life == 0)
            submit(b, poison);
        uint64_t losses = b->metrics.worker_losses_total;
        while (fake_worker_counts(b->worker).open_runs == 0)
            uv_run(&b->loop, UV_RUN_NOWAIT);
        fake_worker_die(b->worker);
        assert_true(fake_worker_wait(b->worker, counts_dead, LIMIT_MS));
        while (b->metrics.worker_losses_total == losses)
            uv_run(&b->loop, UV_RUN_ONCE);
        fake_worker_stop(b->worker);
        b->worker = NULL;
    }
    assert_int_equal(poison->choices[0].state, GW_REQUEST_FAILED);
    assert_int_equal(poison->choices[0].failure.code, GW_ERROR_INTERNAL);
    assert_int_equal(b->metrics.poisoned_total, 1);
    b->worker = fake_worker_start(&b->options);
    struct gw_request *other = request(b, "");
    submit(b, other);
    turn_until(b, is_over, other);
    assert_echo(&other->choices[0], 9);
    gw_request_drop(poison);
    gw_request_drop(other);
}

static void test_gw_upstream_drain_ends_the_queue_and_lets_the_rest_finish(void **state)
{
    struct bed *b = *state;
    struct gw_refusal refusal = {0};
    b->worker = fake_worker_start(&b->options);
    fake_worker_hold(b->worker, true);
    dispatch_open(b, 1, 60000);
    turn_until(b, is_serving, b->dispatch);
    struct gw_request *runs = request(b, ""), *waits = request(b, "");
    submit(b, runs);
    submit(b, waits);
    gw_dispatch_drain(b->dispatch);
    assert_int_equal(waits->choices[0].failure.code, GW_ERROR_OVERLOADED);
    assert_int_equal(runs->choices[0].state, GW_REQUEST_RUNNING);
    assert_false(gw_dispatch_submit(b->dispatch, waits, &refusal));
    fake_worker_hold(b->worker, false);
    turn_until(b, is_over, runs);
    assert_echo(&runs->choices[0], 9);
    gw_request_drop(runs);
    gw_request_drop(waits);
}

static bool has_begun(void *user)
{
    return ((struct gw_request *)user)->choices[0].n_ids > 0;
}

/* The answer takes three times the deadline, which counts from when nobody works for it. */
static void test_gw_upstream_draining_worker_finishes_what_it_runs(void **state)
{
    struct bed *b = *state;
    b->options.interval_ms = 100;
    b->worker = fake_worker_start(&b->options);
    dispatch_open(b, 4, 250);
    turn_until(b, is_serving, b->dispatch);
    struct gw_request *q = request(b, "");
    submit(b, q);
    turn_until(b, has_begun, q);
    fake_worker_set_state(b->worker, PROTO_DRAINING, "");
    turn_until(b, is_over, q);
    assert_echo(&q->choices[0], 9);
    gw_request_drop(q);
}

/* ---- a link that breaks ---- */

/* When the link breaks: at frame `at[i]` of connection i + 1, or before a frame of the kind `cmd` of
 * the first one. */
struct breaks {
    uint64_t at[2];
    uint8_t cmd;
};

static bool breaks_now(void *context, uint64_t connection, uint64_t frame, uint8_t cmd)
{
    const struct breaks *k = context;
    if (k->cmd != 0)
        return connection == 1 && cmd == k->cmd;
    return connection <= 2 && frame == k->at[connection - 1];
}

static bool is_down(void *user)
{
    return gw_dispatch_health(user) == GW_DISPATCH_WORKER_DOWN;
}

/* The old worker's end is seen before anything is sent: a loss more would be one too many. */
static void worker_again(struct bed *b)
{
    fake_worker_stop(b->worker);
    b->worker = NULL;
    turn_until(b, is_down, b->dispatch);
    b->worker = fake_worker_start(&b->options);
}

static void link_breaks(struct bed *b, const struct breaks *k)
{
    b->options.drop = breaks_now;
    b->options.context = (void *)(uintptr_t)k;
    worker_again(b);
}

/* Two requests, three runs: hello, status, sending, sending again, tokens and ends are all cut. */
static void test_gw_upstream_link_that_breaks_at_any_frame_costs_nothing(void **state)
{
    struct bed *b = *state;
    struct breaks k = {.at = {0, 0}};
    dispatch_open(b, 4, 60000);
    for (k.at[0] = 0; k.at[0] < 34; k.at[0]++) {
        for (k.at[1] = 0; k.at[1] < 8; k.at[1] += 1 + k.at[0] / 4) {
            link_breaks(b, &k);
            struct gw_request *one = request(b, ""), *two = request(b, ",\"n\":2");
            submit(b, one);
            submit(b, two);
            turn_until(b, is_over, one);
            turn_until(b, is_over, two);
            assert_echo(&one->choices[0], 9);
            assert_echo(&two->choices[0], 9);
            assert_echo(&two->choices[1], 9);
            gw_request_drop(one);
            gw_request_drop(two);
        }
    }
}

/* Breaks before one frame in thirty, and loiters. */
static bool breaks_at_random(void *context, uint64_t connection, uint64_t frame, uint8_t cmd)
{
    (void)cmd;
    const uint64_t draw = rng_draw(*(const uint64_t *)context << 32 | connection, (uint32_t)frame);
    if (draw % 5 == 0)
        usleep((useconds_t)(draw >> 32) % 2000);
    return (draw >> 16) % 30 == 0;
}

/* Whole, or after three losses without a token between them ended as poison; then what came is
 * right as far as it goes. Returns whether it is whole. */
static bool check_ended(const struct gw_request *q)
{
    const struct gw_request_choice *failed = gw_request_failed(q);
    for (unsigned i = 0; i < q->n_choices; i++)
        for (uint32_t t = 0; t < q->choices[i].n_ids; t++)
            assert_int_equal(q->choices[i].ids[t], 10 + t % 3);
    for (unsigned i = 0; !failed && i < q->n_choices; i++)
        assert_echo(&q->choices[i], 70);
    bool poison = false;
    for (unsigned i = 0; failed && i < q->n_choices; i++)
        poison = poison || q->choices[i].resume.losses == GW_RESUME_ENDS_AFTER;
    assert_true(!failed || (poison && failed->failure.code == GW_ERROR_INTERNAL));
    return !failed;
}

static void test_gw_upstream_link_that_breaks_at_random_loses_no_request(void **state)
{
    struct bed *b = *state;
    struct gw_request *all[8];
    uint64_t seed = 20261130;
    unsigned whole = 0;
    dispatch_open(b, 4, 60000);
    b->options.drop = breaks_at_random;
    b->options.context = &seed;
    for (unsigned round = 0; round < 6; round++, seed++) {
        worker_again(b);
        for (unsigned i = 0; i < 8; i++) {
            all[i] = request(b, i % 4 == 3 ? ",\"max_tokens\":70,\"n\":2" : ",\"max_tokens\":70");
            submit(b, all[i]);
        }
        for (unsigned i = 0; i < 8; i++) {
            turn_until(b, is_over, all[i]);
            whole += check_ended(all[i]);
            gw_request_drop(all[i]);
        }
    }
    assert_true(whole > 30 && b->metrics.resumed_total > 50);
}

/* ---- listeners ---- */

struct ear {
    struct gw_request_listener listener;
    struct bed *b;
    struct gw_request *more, *leaves; /* to submit, to leave at the first end; or NULL */
};

static void on_end(void *user, struct gw_request_choice *c)
{
    struct ear *ear = user;
    struct gw_request *more = ear->more, *leaves = ear->leaves;
    if (c->state != GW_REQUEST_DONE)
        return;
    ear->more = ear->leaves = NULL;
    if (more)
        submit(ear->b, more);
    if (!leaves)
        return;
    list_remove(&ear->listener.link);
    gw_dispatch_abandon(ear->b->dispatch, leaves);
    gw_request_drop(leaves);
}

static void listen_to(struct ear *ear, struct gw_request *q)
{
    ear->listener = (struct gw_request_listener){.changed = on_end, .user = ear};
    list_append(&q->listeners, &ear->listener.link);
}

/* All tokens are there when the link breaks: the answer is whole. Who is told so asks for more while
 * the link goes down. */
static void test_gw_upstream_request_made_while_the_link_goes_down_is_answered(void **state)
{
    struct bed *b = *state;
    const struct breaks k = {.cmd = PROTO_DONE};
    dispatch_open(b, 4, 60000);
    link_breaks(b, &k);
    struct gw_request *first = request(b, ""), *more = request(b, "");
    struct ear ear = {.b = b, .more = more};
    listen_to(&ear, first);
    turn_until(b, is_serving, b->dispatch);
    submit(b, first);
    turn_until(b, is_over, first);
    assert_echo(&first->choices[0], 9);
    assert_null(ear.more);
    turn_until(b, is_over, more);
    assert_echo(&more->choices[0], 9);
    gw_request_drop(first);
    gw_request_drop(more);
}

/* The first choice's end makes the listener leave, which frees the request with the second. */
static void test_gw_upstream_listener_may_leave_while_the_link_goes_down(void **state)
{
    struct bed *b = *state;
    const struct breaks k = {.cmd = PROTO_DONE};
    dispatch_open(b, 4, 60000);
    link_breaks(b, &k);
    struct gw_request *two = request(b, ",\"n\":2"), *other = request(b, "");
    struct ear ear = {.b = b, .leaves = two};
    listen_to(&ear, two);
    turn_until(b, is_serving, b->dispatch);
    submit(b, two);
    while (ear.leaves)
        uv_run(&b->loop, UV_RUN_ONCE);
    submit(b, other);
    turn_until(b, is_over, other);
    assert_echo(&other->choices[0], 9);
    gw_request_drop(other);
}

#define BED_TEST(name) cmocka_unit_test_setup_teardown(name, bed_open, bed_close)

int main(void)
{
    const struct CMUnitTest tests[] = {
        BED_TEST(test_gw_upstream_worker_that_comes_late_is_found),
        BED_TEST(test_gw_upstream_answer_goes_on_after_each_loss),
        BED_TEST(test_gw_upstream_other_digests_end_the_request),
        BED_TEST(test_gw_upstream_no_worker_within_the_deadline_fails),
        BED_TEST(test_gw_upstream_places_and_queue_are_bounded),
        BED_TEST(test_gw_upstream_malformed_frames_lose_the_worker_only),
        BED_TEST(test_gw_upstream_poison_ends_after_three_losses),
        BED_TEST(test_gw_upstream_drain_ends_the_queue_and_lets_the_rest_finish),
        BED_TEST(test_gw_upstream_draining_worker_finishes_what_it_runs),
        BED_TEST(test_gw_upstream_link_that_breaks_at_any_frame_costs_nothing),
        BED_TEST(test_gw_upstream_link_that_breaks_at_random_loses_no_request),
        BED_TEST(test_gw_upstream_request_made_while_the_link_goes_down_is_answered),
        BED_TEST(test_gw_upstream_listener_may_leave_while_the_link_goes_down),
    };
    signal(SIGPIPE, SIG_IGN); /* as the program does */
    return cmocka_run_group_tests(tests, NULL, NULL);
}

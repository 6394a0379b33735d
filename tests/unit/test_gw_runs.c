/* Runs over a link that changes bytes: whatever comes, each request ends with an answer or an error
 * within a bound. No sleeps: the loop turns until they are over. */
#include <setjmp.h>
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
#include "flip_proxy.h"
#include "gw_dispatch.h"
#include "gw_metrics.h"
#include "gw_model.h"
#include "gw_request.h"
#include "gw_upstream.h"
#include "log.h"
#include "ticks.h"

enum {
    REQUESTS = 8,
    TOKENS = 40,
    SPEED = 20, /* the dispatcher's clock, so that its seconds are short */
    LIMIT_MS = 60000
};

struct bed {
    uv_loop_t loop;
    char path[100], far[100];
    struct gw_model *model;
    struct gw_metrics metrics;
    struct gw_dispatch *dispatch;
    struct fake_worker *worker;
    uint64_t jump_ns; /* of the dispatcher's clock */
};

static uint64_t fast_ns(void *context)
{
    const struct bed *b = context;
    return ticks_ns(ticks_real()) * SPEED + b->jump_ns;
}

static int bed_open(void **state)
{
    struct bed *b = calloc(1, sizeof *b);
    struct err e = {0};
    assert_non_null(b);
    log_setup(LOG_LEVEL_ERROR, LOG_FORMAT_TEXT);
    assert_int_equal(uv_loop_init(&b->loop), 0);
    snprintf(b->path, sizeof b->path, "/tmp/islet-test-runs-%d.sock", (int)getpid());
    snprintf(b->far, sizeof b->far, "/tmp/islet-test-runs-%d-far.sock", (int)getpid());
    assert_int_equal(gw_model_open(ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf", &b->model, &e),
                     ERR_OK);
    struct fake_worker_options o = fake_worker_defaults(b->far);
    memcpy(o.welcome.file_digest, b->model->file_digest, 16);
    memcpy(o.welcome.shape_digest, b->model->shape_digest, 16);
    o.welcome.n_ctx = 2048;
    o.interval_ms = 1;
    b->worker = fake_worker_start(&o);
    *state = b;
    return 0;
}

static int bed_close(void **state)
{
    struct bed *b = *state;
    fake_worker_stop(b->worker);
    assert_int_equal(uv_loop_close(&b->loop), 0);
    gw_model_free(b->model);
    free(b);
    assert_int_equal(alloc_live_blocks(), 0);
    return 0;
}

static struct gw_request *request(struct bed *b, unsigned i)
{
    static const struct gw_chat_request_limits limits = {2048, 4096, 32};
    char text[200];
    struct gw_chat_request ask;
    struct gw_refusal refusal = {0};
    struct gw_request_prompt prompts[GW_CHAT_REQUEST_MAX_PROMPTS] = {0};
    snprintf(text, sizeof text, "{\"prompt\":[10,11,12],\"max_tokens\":%d%s}", TOKENS,
             i % 3 == 0   ? ",\"logprobs\":2"
             : i % 3 == 1 ? ",\"echo\":true,\"logprobs\":0,\"n\":2"
                          : "");
    json_t *body = json_loads(text, 0, NULL);
    if (!gw_chat_request_parse(body, GW_CHAT_REQUEST_COMPLETION, &limits, &ask, &refusal))
        fail_msg("%s", refusal.message);
    json_decref(body);
    prompts[0] = (struct gw_request_prompt){.ids = ask.prompts[0].ids, .n = 3};
    ask.prompts[0].ids = NULL;
    struct gw_request *q = gw_request_new(&ask, prompts, 1, b->model->tokenizer);
    assert_non_null(q);
    return q;
}

static void on_limit(uv_timer_t *timer)
{
    *(bool *)timer->data = true;
}

static bool all_over(struct gw_request **list)
{
    for (unsigned i = 0; i < REQUESTS; i++)
        if (list[i] && !gw_request_over(list[i]))
            return false;
    return true;
}

static void turn_until_over(struct bed *b, struct gw_request **list)
{
    uv_timer_t timer;
    bool late = false;
    uv_timer_init(&b->loop, &timer);
    timer.data = &late;
    uv_timer_start(&timer, on_limit, LIMIT_MS, 0);
    while (!all_over(list) && !late)
        uv_run(&b->loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(&b->loop, UV_RUN_NOWAIT);
    if (late)
        fail_msg("requests hang: %s, %u losses", gw_dispatch_reason(b->dispatch),
                 (unsigned)b->metrics.worker_losses_total);
}

/* The worker serves, and has said all that it has to say. */
static void turn_until_quiet(struct bed *b)
{
    struct gw_upstream *u = gw_dispatch_upstream(b->dispatch);
    while (gw_dispatch_health(b->dispatch) != GW_DISPATCH_SERVING)
        uv_run(&b->loop, UV_RUN_ONCE);
    assert_true(gw_upstream_ask_status(u));
    while (gw_upstream_status_due_ns(u) != 0)
        uv_run(&b->loop, UV_RUN_ONCE);
}

/* The dispatcher looks at its runs, and asks, before the worker has said anything of them. */
static void tick_in_silence(struct bed *b, uint64_t since_ns)
{
    const struct gw_upstream *u = gw_dispatch_upstream(b->dispatch);
    while (gw_upstream_status_due_ns(u) < since_ns &&
           gw_upstream_get_status(u)->asked_ns < since_ns && b->metrics.worker_losses_total == 0)
        uv_run(&b->loop, UV_RUN_ONCE);
    fake_worker_hold(b->worker, false);
}

/* Requests come after the link has been idle for so long. Returns how many choices were answered
 * whole. */
static unsigned one_link(struct bed *b, uint64_t seed, unsigned percent, uint64_t idle_s)
{
    struct gw_request *list[REQUESTS] = {0};
    struct gw_refusal refusal;
    struct err e = {0};
    unsigned whole = 0;
    struct flip_proxy *proxy = flip_proxy_start(b->path, b->far, seed, percent);
    struct gw_dispatch_options o = {.loop = &b->loop,
                                    .ticks = {fast_ns, b},
                                    .socket = b->path,
                                    .max_frame = PROTO_MAX_FRAME,
                                    .max_sequences = 5,
                                    .queue = REQUESTS,
                                    .resume_deadline_ms = 4000 * SPEED,
                                    .model = b->model,
                                    .metrics = &b->metrics};
    assert_int_equal(gw_dispatch_new(&o, &b->dispatch, &e), ERR_OK);
    if (idle_s > 0)
        turn_until_quiet(b);
    if (idle_s > 0)
        fake_worker_hold(b->worker, true);
    b->jump_ns += idle_s * UINT64_C(1000000000);
    const uint64_t since_ns = fast_ns(b);
    for (unsigned i = 0; i < REQUESTS; i++) {
        list[i] = request(b, i);
        if (!gw_dispatch_submit(b->dispatch, list[i], &refusal)) {
            gw_request_drop(list[i]);
            list[i] = NULL;
        }
    }
    if (idle_s > 0)
        tick_in_silence(b, since_ns);
    turn_until_over(b, list);
    for (unsigned i = 0; i < REQUESTS; i++) {
        for (unsigned k = 0; list[i] && k < list[i]->n_choices; k++) {
            const struct gw_request_choice *c = &list[i]->choices[k];
            if (c->state == GW_REQUEST_DONE && c->finish == PROTO_FINISH_LENGTH)
                assert_int_equal(c->n_ids, TOKENS);
            whole += c->state == GW_REQUEST_DONE && c->n_ids == TOKENS;
        }
        gw_request_drop(list[i]);
    }
    gw_dispatch_close(b->dispatch);
    uv_run(&b->loop, UV_RUN_DEFAULT);
    uint64_t flips = flip_proxy_stop(proxy);
    assert_true(percent == 0 || percent < 5 || flips > 0);
    return whole;
}

static void test_gw_runs_sound_link_answers_all(void **state)
{
    assert_int_equal(one_link(*state, 1, 0, 0), REQUESTS + 3);
}

/* A worker that had nothing to say is not silent. */
static void test_gw_runs_after_an_idle_hour_all_are_answered(void **state)
{
    struct bed *b = *state;
    assert_int_equal(one_link(b, 1, 0, 3600), REQUESTS + 3);
    assert_int_equal(b->metrics.worker_losses_total, 0);
}

static void test_gw_runs_flipped_bits_leave_no_request_hanging(void **state)
{
    static const unsigned percents[] = {1, 3, 6, 12, 25};
    const char *more = getenv("ISLET_TEST_SEEDS");
    unsigned n = more ? (unsigned)atoi(more) : 20, whole = 0;
    for (unsigned i = 0; i < n; i++)
        whole += one_link(*state, i + 1, percents[i % 5], 0);
    assert_true(whole > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_gw_runs_sound_link_answers_all, bed_open, bed_close),
        cmocka_unit_test_setup_teardown(test_gw_runs_after_an_idle_hour_all_are_answered, bed_open,
                                        bed_close),
        cmocka_unit_test_setup_teardown(test_gw_runs_flipped_bits_leave_no_request_hanging,
                                        bed_open, bed_close),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "engine_commands.h"
#include "worker_announce.h"
#include "worker_peer.h"

/* ---- an engine that only writes down what it is asked ---- */

struct engine {
    struct engine_facts facts;
    uint64_t submitted[8], cancelled[8]; /* handles */
    unsigned n_submitted, n_cancelled, n_drains;
    enum err_code refuse;
    struct engine_command *commands[WORKER_PEER_MAX_COMMANDS]; /* taken */
    unsigned n_commands, n_called_off;
};

struct engine_request *engine_request_new(uint64_t handle, const struct proto_run *run,
                                          const char *client)
{
    struct engine_request *r = alloc_zero(ALLOC_REQUEST, 1, sizeof *r);
    if (r == NULL)
        return NULL;
    r->handle = handle;
    r->run = *run;
    memcpy(r->client, client, strnlen(client, sizeof r->client - 1));
    return r;
}

void engine_request_free(struct engine_request *r)
{
    alloc_free(r);
}

enum err_code engine_submit(struct engine *g, struct engine_request *request, struct err *e)
{
    if (g->refuse != ERR_OK)
        return err_set(e, g->refuse, "refused: %u tokens", request->run.n_tokens);
    assert_string_equal(request->client, "tester");
    g->submitted[g->n_submitted++] = request->handle;
    engine_request_free(request);
    return ERR_OK;
}

void engine_cancel(struct engine *g, uint64_t handle)
{
    g->cancelled[g->n_cancelled++] = handle;
}

enum err_code engine_submit_command(struct engine *g, struct engine_command *command, struct err *e)
{
    if (g->refuse != ERR_OK)
        return err_set(e, g->refuse, "refused: expert %u", command->expert.expert_id);
    g->commands[g->n_commands++] = command;
    return ERR_OK;
}

void engine_cancel_command(struct engine *g, struct engine_command *command)
{
    atomic_store(&command->cancelled, true);
    g->n_called_off++;
}

void engine_drain(struct engine *g)
{
    g->n_drains++;
    g->facts.state = PROTO_DRAINING;
}

void engine_get_facts(struct engine *g, struct engine_facts *ret)
{
    *ret = g->facts;
}

void engine_get_snapshot(struct engine *g, struct engine_snapshot *ret)
{
    *ret = (struct engine_snapshot){.taken_ns = 1000};
    ret->status.steps_total = 77;
    ret->status.n_sequences = (uint16_t)g->n_submitted;
    ret->status.sequences = ret->sequences;
    for (unsigned i = 0; i < g->n_submitted; i++)
        ret->sequences[i].request_id = g->submitted[i];
}

/* ---- fixture ---- */

struct fixture {
    struct engine engine;
    struct ticks_fake clock;
    struct worker_peers set;
    struct worker_peer *peer;
    struct buf in; /* frames to hand over */
    struct proto_reader reader;
    uint64_t live;
};

static const uint32_t prompt[] = {5, 6, 7};

static void open_all(struct fixture *x)
{
    struct err e = {0};
    memset(x, 0, sizeof *x);
    x->live = alloc_live_blocks();
    x->clock.now_ns = 2000000;
    x->engine.facts.state = PROTO_SERVING;
    worker_peer_set_init(&x->set, &x->engine, 4096, ticks_of_fake(&x->clock));
    assert_int_equal(worker_peer_open(&x->set, &x->peer, &e), ERR_OK);
    x->in = BUF_INIT(1 << 20);
    proto_reader_init(&x->reader, PROTO_MAX_FRAME);
}

static void close_all(struct fixture *x)
{
    worker_peer_set_done(&x->set);
    buf_done(&x->in);
    proto_reader_done(&x->reader);
    assert_int_equal(alloc_live_blocks(), x->live);
}

static void hand_over(struct fixture *x)
{
    worker_peer_on_bytes(x->peer, x->in.data, x->in.size);
    buf_clear(&x->in);
}

/* The next frame that waits for the client. False: none. */
static bool taken(struct fixture *x, struct proto_frame *ret)
{
    struct err e = {0};
    size_t n;
    const uint8_t *bytes = worker_peer_unsent(x->peer, &n);
    if (n > 0)
        assert_int_equal(proto_reader_feed(&x->reader, bytes, n, &e), ERR_OK);
    worker_peer_sent(x->peer, n);
    return proto_reader_next(&x->reader, ret) == 1;
}

static void expect_frame(struct fixture *x, uint8_t cmd, uint64_t id, struct proto_frame *ret)
{
    assert_true(taken(x, ret));
    assert_string_equal(proto_cmd_name(ret->cmd), proto_cmd_name(cmd));
    assert_true(ret->request_id == id);
}

static void expect_error(struct fixture *x, uint64_t id, enum err_code code, const char *text)
{
    struct proto_frame f;
    struct proto_error m;
    struct err e = {0};
    expect_frame(x, PROTO_ERROR, id, &f);
    assert_int_equal(proto_decode_error(&f, &m, &e), ERR_OK);
    assert_int_equal(m.code, code);
    assert_int_equal(m.retryable, err_code_retryable(code));
    assert_int_equal(m.text.size, strlen(text));
    assert_memory_equal(m.text.data, text, m.text.size);
}

static void greet(struct fixture *x)
{
    struct proto_hello hello = {.version = PROTO_VERSION, .client = proto_text_of("tester")};
    struct proto_frame f;
    proto_encode_hello(&x->in, &hello);
    hand_over(x);
    expect_frame(x, PROTO_WELCOME, 0, &f);
}

static struct proto_run some_run(void)
{
    return (struct proto_run){
        .tokens = prompt, .n_tokens = 3, .n_prompt = 3, .max_new = 2, .top_p = 1, .repeat = 1};
}

static void ask(struct fixture *x, uint64_t id)
{
    struct proto_run run = some_run();
    proto_encode_run(&x->in, id, &run);
    hand_over(x);
}

/* ---- tests ---- */

static void test_worker_peer_hello_gets_a_welcome_with_the_facts(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    struct proto_welcome m;
    struct err e = {0};
    open_all(&x);
    x.engine.facts = (struct engine_facts){
        .state = PROTO_LOADING, .progress = 37, .model = "m", .n_ctx = 9, .file_digest = {1}};
    proto_encode_hello(
        &x.in, &(struct proto_hello){.version = PROTO_VERSION, .client = proto_text_of("tester")});
    for (size_t i = 0; i < x.in.size; i++) /* byte by byte */
        worker_peer_on_bytes(x.peer, x.in.data + i, 1);
    buf_clear(&x.in);
    expect_frame(&x, PROTO_WELCOME, 0, &f);
    assert_int_equal(proto_decode_welcome(&f, &m, &e), ERR_OK);
    assert_int_equal(m.state, PROTO_LOADING);
    assert_int_equal(m.progress, 37);
    assert_int_equal(m.n_ctx, 9);
    assert_int_equal(m.max_frame, 4096);
    assert_int_equal(m.file_digest[0], 1);
    assert_true(m.incarnation != 0);
    close_all(&x);
}

static void test_worker_peer_first_message_must_be_hello(void **state)
{
    (void)state;
    struct fixture x;
    open_all(&x);
    ask(&x, 4);
    expect_error(&x, 4, ERR_PROTOCOL, "command 0x02 (run_inference) before hello");
    assert_true(x.peer->ending);
    assert_int_equal(x.engine.n_submitted, 0);
    close_all(&x);
}

static void test_worker_peer_other_version_is_refused(void **state)
{
    (void)state;
    struct fixture x;
    open_all(&x);
    proto_encode_hello(&x.in, &(struct proto_hello){.version = 2, .client = proto_text_of("t")});
    hand_over(&x);
    expect_error(&x, 0, ERR_UNSUPPORTED, "protocol version 2: this worker speaks 1");
    assert_true(x.peer->ending);
    close_all(&x);
}

static void test_worker_peer_request_is_answered_to_the_end(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    open_all(&x);
    greet(&x);
    ask(&x, 7);
    ask(&x, UINT64_MAX);
    assert_int_equal(x.engine.n_submitted, 2);
    assert_int_equal(x.set.n_requests, 2);
    struct engine_event event = {.kind = ENGINE_PROGRESS,
                                 .handle = x.engine.submitted[1],
                                 .progress = {.prefilled = 3, .total = 3}};
    assert_ptr_equal(worker_peer_on_event(&x.set, &event), x.peer);
    expect_frame(&x, PROTO_PROGRESS, UINT64_MAX, &f);
    event = (struct engine_event){.kind = ENGINE_TOKENS, .handle = x.engine.submitted[0]};
    event.tokens.n = 1;
    event.tokens.tokens[0].id = 44;
    worker_peer_on_event(&x.set, &event);
    expect_frame(&x, PROTO_TOKENS, 7, &f);
    event = (struct engine_event){.kind = ENGINE_DONE, .handle = x.engine.submitted[0]};
    worker_peer_on_event(&x.set, &event);
    expect_frame(&x, PROTO_DONE, 7, &f);
    event = (struct engine_event){.kind = ENGINE_ERROR,
                                  .handle = x.engine.submitted[1],
                                  .error = {.code = ERR_LIMIT, .text = "too much"}};
    worker_peer_on_event(&x.set, &event);
    expect_error(&x, UINT64_MAX, ERR_LIMIT, "too much");
    assert_int_equal(x.set.n_requests, 0);
    assert_null(worker_peer_on_event(&x.set, &event)); /* nobody waits any more */
    assert_false(taken(&x, &f));
    close_all(&x);
}

static void test_worker_peer_id_in_use_is_refused_and_free_afterwards(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    open_all(&x);
    greet(&x);
    ask(&x, 7);
    ask(&x, 7);
    expect_error(&x, 7, ERR_ARGUMENT, "request id 7 is in use");
    assert_false(x.peer->ending);
    assert_int_equal(x.set.n_requests, 1);
    struct engine_event event = {.kind = ENGINE_DONE, .handle = x.engine.submitted[0]};
    worker_peer_on_event(&x.set, &event);
    expect_frame(&x, PROTO_DONE, 7, &f);
    ask(&x, 7);
    assert_int_equal(x.engine.n_submitted, 2);
    ask(&x, 0);
    expect_error(&x, 0, ERR_ARGUMENT, "request id 0 is the connection's, ids begin at 1");
    close_all(&x);
}

static void test_worker_peer_engines_refusal_reaches_the_client(void **state)
{
    (void)state;
    struct fixture x;
    open_all(&x);
    greet(&x);
    x.engine.refuse = ERR_BUSY;
    ask(&x, 7);
    expect_error(&x, 7, ERR_BUSY, "refused: 3 tokens");
    assert_int_equal(x.set.n_requests, 0);
    assert_false(x.peer->ending);
    close_all(&x);
}

static void test_worker_peer_cancel_reaches_the_engine(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    open_all(&x);
    greet(&x);
    ask(&x, 7);
    proto_encode_empty(&x.in, PROTO_CANCEL, 8); /* unknown: ignored */
    proto_encode_empty(&x.in, PROTO_CANCEL, 7);
    hand_over(&x);
    assert_int_equal(x.engine.n_cancelled, 1);
    assert_true(x.engine.cancelled[0] == x.engine.submitted[0]);
    assert_false(taken(&x, &f));
    close_all(&x);
}

static void test_worker_peer_vanished_client_cancels_its_requests_only(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    struct err e = {0};
    open_all(&x);
    greet(&x);
    ask(&x, 7);
    ask(&x, 8);
    worker_peer_close(x.peer);
    assert_int_equal(x.engine.n_cancelled, 2);
    assert_int_equal(x.set.n_requests, 0);
    /* The next connection gets the same place, and must not get the old one's events. */
    assert_int_equal(worker_peer_open(&x.set, &x.peer, &e), ERR_OK);
    greet(&x);
    ask(&x, 7);
    struct engine_event event = {.kind = ENGINE_DONE, .handle = x.engine.submitted[0]};
    assert_null(worker_peer_on_event(&x.set, &event));
    assert_false(taken(&x, &f));
    event.handle = x.engine.submitted[2];
    assert_ptr_equal(worker_peer_on_event(&x.set, &event), x.peer);
    expect_frame(&x, PROTO_DONE, 7, &f);
    close_all(&x);
}

static void test_worker_peer_unknown_commands_are_unsupported_and_harmless(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    open_all(&x);
    greet(&x);
    proto_encode_empty(&x.in, PROTO_HINT, 5);
    proto_encode_empty(&x.in, PROTO_ROUTE, 6);
    proto_encode_empty(&x.in, 0x70, 9);
    proto_encode_empty(&x.in, PROTO_STATUS_REQUEST, 10);
    hand_over(&x);
    expect_error(&x, 5, ERR_UNSUPPORTED, "command 0x07 (hint) is not supported by this worker");
    expect_error(&x, 6, ERR_UNSUPPORTED, "command 0x08 (route) is not supported by this worker");
    expect_error(&x, 9, ERR_UNSUPPORTED, "command 0x70 (unknown) is not supported by this worker");
    expect_frame(&x, PROTO_STATUS, 10, &f);
    close_all(&x);
}

/* ---- commands about experts ---- */

static void ask_load(struct fixture *x, uint64_t id, uint32_t expert)
{
    proto_encode_load_expert(
        &x->in, id,
        &(struct proto_load_expert){.expert_id = expert, .quant_type = 12, .weight_size = 4096});
}

static void ask_unload(struct fixture *x, uint64_t id, uint32_t expert)
{
    proto_encode_unload_expert(&x->in, id, &(struct proto_unload_expert){.expert_id = expert});
}

/* The i-th command comes back as the engine would send it. */
static struct worker_peer *come_back(struct fixture *x, unsigned i, enum proto_tier tier)
{
    struct engine_command *m = x->engine.commands[i];
    m->tier = (uint8_t)tier;
    struct worker_peer *p = worker_peer_on_command(&x->set, m);
    alloc_free(m);
    return p;
}

static void expect_tier(struct fixture *x, uint8_t cmd, uint64_t id, uint32_t expert,
                        enum proto_tier tier)
{
    struct proto_frame f;
    struct proto_loaded m;
    struct err e = {0};
    expect_frame(x, cmd, id, &f);
    assert_int_equal(proto_decode_loaded(&f, &m, &e), ERR_OK);
    assert_int_equal(m.expert_id, expert);
    assert_int_equal(m.tier, tier);
}

static void test_worker_peer_commands_are_answered_under_their_ids(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    open_all(&x);
    greet(&x);
    ask_load(&x, 21, 7);
    ask_unload(&x, 22, 8);
    ask_load(&x, 23, 9);
    hand_over(&x);
    assert_false(taken(&x, &f));
    assert_int_equal(x.engine.n_commands, 3);
    assert_int_equal(x.set.n_commands, 3);
    const struct engine_command *m = x.engine.commands[0];
    assert_false(m->unload);
    assert_int_equal(m->expert.expert_id, 7);
    assert_int_equal(m->expert.quant_type, 12);
    assert_int_equal(m->expert.weight_size, 4096);
    m = x.engine.commands[1];
    assert_true(m->unload);
    assert_int_equal(m->expert.expert_id, 8);
    assert_int_equal(m->expert.quant_type, PROTO_ANY_QUANT_TYPE);
    assert_int_equal(m->expert.weight_size, PROTO_ANY_WEIGHT_SIZE);
    assert_ptr_equal(come_back(&x, 1, PROTO_TIER_SSD), x.peer);
    expect_tier(&x, PROTO_UNLOADED, 22, 8, PROTO_TIER_SSD);
    (void)err_set(&x.engine.commands[2]->error, ERR_IO, "blk.0.ffn_up_exps.weight: gone");
    assert_ptr_equal(come_back(&x, 2, PROTO_TIER_SSD), x.peer);
    expect_error(&x, 23, ERR_IO, "blk.0.ffn_up_exps.weight: gone");
    assert_ptr_equal(come_back(&x, 0, PROTO_TIER_VRAM), x.peer);
    expect_tier(&x, PROTO_LOADED, 21, 7, PROTO_TIER_VRAM);
    assert_int_equal(x.set.n_commands, 0);
    close_all(&x);
}

static void test_worker_peer_command_of_a_bad_id_is_refused(void **state)
{
    (void)state;
    struct fixture x;
    open_all(&x);
    greet(&x);
    ask(&x, 5);
    ask_load(&x, 6, 1);
    ask_load(&x, 0, 2);
    ask_load(&x, 5, 2);
    ask_unload(&x, 6, 2);
    hand_over(&x);
    assert_int_equal(x.engine.n_commands, 1);
    expect_error(&x, 0, ERR_ARGUMENT, "request id 0 is the connection's, ids begin at 1");
    expect_error(&x, 5, ERR_ARGUMENT, "request id 5 is in use");
    expect_error(&x, 6, ERR_ARGUMENT, "request id 6 is in use");
    ask(&x, 6);
    hand_over(&x);
    expect_error(&x, 6, ERR_ARGUMENT, "request id 6 is in use");
    (void)come_back(&x, 0, PROTO_TIER_RAM);
    expect_tier(&x, PROTO_LOADED, 6, 1, PROTO_TIER_RAM);
    close_all(&x);
}

static void test_worker_peer_command_that_the_engine_refuses_is_an_error(void **state)
{
    (void)state;
    struct fixture x;
    open_all(&x);
    greet(&x);
    x.engine.refuse = ERR_BUSY;
    ask_load(&x, 5, 33);
    hand_over(&x);
    expect_error(&x, 5, ERR_BUSY, "refused: expert 33");
    assert_int_equal(x.set.n_commands, 0);
    x.engine.refuse = ERR_OK;
    ask_load(&x, 5, 33); /* the id is free again */
    hand_over(&x);
    assert_int_equal(x.engine.n_commands, 1);
    (void)come_back(&x, 0, PROTO_TIER_RAM);
    expect_tier(&x, PROTO_LOADED, 5, 33, PROTO_TIER_RAM);
    close_all(&x);
}

static void test_worker_peer_too_many_commands_are_busy(void **state)
{
    (void)state;
    struct fixture x;
    open_all(&x);
    greet(&x);
    for (uint32_t i = 0; i <= WORKER_PEER_MAX_COMMANDS; i++)
        ask_load(&x, 1 + i, i);
    hand_over(&x);
    assert_int_equal(x.engine.n_commands, WORKER_PEER_MAX_COMMANDS);
    expect_error(&x, 1 + WORKER_PEER_MAX_COMMANDS, ERR_BUSY,
                 "2048 commands about experts of this connection wait already, the limit");
    for (uint32_t i = 0; i < WORKER_PEER_MAX_COMMANDS; i++) {
        (void)come_back(&x, i, PROTO_TIER_RAM);
        expect_tier(&x, PROTO_LOADED, 1 + i, i, PROTO_TIER_RAM);
    }
    close_all(&x);
}

static void test_worker_peer_cancel_reaches_a_command(void **state)
{
    (void)state;
    struct fixture x;
    open_all(&x);
    greet(&x);
    ask_load(&x, 5, 1);
    ask_load(&x, 6, 2);
    proto_encode_empty(&x.in, PROTO_CANCEL, 6);
    proto_encode_empty(&x.in, PROTO_CANCEL, 7);
    hand_over(&x);
    assert_int_equal(x.engine.n_called_off, 1);
    assert_false(atomic_load(&x.engine.commands[0]->cancelled));
    assert_true(atomic_load(&x.engine.commands[1]->cancelled));
    (void)err_set(&x.engine.commands[1]->error, ERR_CANCELLED, "cancelled");
    (void)come_back(&x, 1, PROTO_TIER_SSD);
    expect_error(&x, 6, ERR_CANCELLED, "cancelled");
    (void)come_back(&x, 0, PROTO_TIER_RAM);
    close_all(&x);
}

static void test_worker_peer_commands_of_a_lost_client_are_cancelled(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    struct err e = {0};
    open_all(&x);
    greet(&x);
    ask_load(&x, 5, 1);
    ask_unload(&x, 6, 2);
    hand_over(&x);
    worker_peer_close(x.peer);
    assert_int_equal(x.engine.n_called_off, 2);
    assert_int_equal(x.set.n_commands, 0);
    /* The next connection has the same place: the answers are not for it. */
    assert_int_equal(worker_peer_open(&x.set, &x.peer, &e), ERR_OK);
    assert_null(come_back(&x, 0, PROTO_TIER_RAM));
    greet(&x);
    ask_load(&x, 5, 3);
    hand_over(&x);
    assert_null(come_back(&x, 1, PROTO_TIER_SSD));
    assert_false(taken(&x, &f));
    (void)come_back(&x, 2, PROTO_TIER_RAM);
    expect_tier(&x, PROTO_LOADED, 5, 3, PROTO_TIER_RAM);
    close_all(&x);
}

static void test_worker_peer_drained_waits_for_commands(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    open_all(&x);
    greet(&x);
    ask_load(&x, 5, 1);
    proto_encode_empty(&x.in, PROTO_DRAIN, 0);
    hand_over(&x);
    expect_frame(&x, PROTO_WELCOME, 0, &f);
    worker_announce_drained(&x.set);
    assert_false(taken(&x, &f));
    (void)come_back(&x, 0, PROTO_TIER_RAM);
    worker_announce_drained(&x.set);
    expect_tier(&x, PROTO_LOADED, 5, 1, PROTO_TIER_RAM);
    expect_frame(&x, PROTO_DRAINED, 0, &f);
    close_all(&x);
}

static void test_worker_peer_short_command_ends_the_connection(void **state)
{
    (void)state;
    struct fixture x;
    open_all(&x);
    greet(&x);
    proto_encode_empty(&x.in, PROTO_LOAD_EXPERT, 3);
    hand_over(&x);
    expect_error(&x, 3, ERR_PROTOCOL, "expert_id: 4 bytes needed, the payload has 0 left");
    assert_true(x.peer->ending);
    close_all(&x);
}

static void test_worker_peer_malformed_payload_ends_the_connection(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    open_all(&x);
    greet(&x);
    proto_encode_empty(&x.in, PROTO_RUN_INFERENCE, 3);
    proto_encode_empty(&x.in, PROTO_STATUS_REQUEST, 4);
    hand_over(&x);
    expect_error(&x, 3, ERR_PROTOCOL, "n_tokens: 4 bytes needed, the payload has 0 left");
    assert_true(x.peer->ending);
    assert_false(taken(&x, &f)); /* what came behind is not looked at */
    close_all(&x);
}

static void test_worker_peer_bad_length_ends_the_connection(void **state)
{
    (void)state;
    struct fixture x;
    open_all(&x);
    greet(&x);
    worker_peer_on_bytes(x.peer, "\0\0\x10\x01", 4);
    expect_error(&x, 0, ERR_PROTOCOL, "frame of 4097 bytes: the limit is 4096");
    assert_true(x.peer->ending);
    close_all(&x);
}

static void test_worker_peer_slow_reader_is_cut_off(void **state)
{
    (void)state;
    struct fixture x;
    unsigned n = 0;
    open_all(&x);
    greet(&x);
    ask(&x, 7);
    struct engine_event event = {.kind = ENGINE_PROGRESS, .handle = x.engine.submitted[0]};
    while (x.peer->lost == NULL && n++ < 1000000)
        worker_peer_on_event(&x.set, &event);
    assert_non_null(x.peer->lost);
    assert_true(x.peer->out.size <= WORKER_PEER_QUEUE_BYTES);
    assert_true(n > 100000);
    close_all(&x);
}

static void test_worker_peer_stalled_reader_is_cut_off_after_a_minute(void **state)
{
    (void)state;
    struct fixture x;
    open_all(&x);
    greet(&x);
    ask(&x, 7);
    struct engine_event event = {.kind = ENGINE_PROGRESS, .handle = x.engine.submitted[0]};
    x.clock.now_ns += 500000000000u; /* silence is no stall */
    worker_peer_check_stall(x.peer, x.clock.now_ns / 1000000);
    assert_null(x.peer->lost);
    worker_peer_on_event(&x.set, &event);
    x.clock.now_ns += 40000000000u;
    worker_peer_sent(x.peer, 5); /* slow, but alive */
    x.clock.now_ns += 59000000000u;
    worker_peer_check_stall(x.peer, x.clock.now_ns / 1000000);
    assert_null(x.peer->lost);
    x.clock.now_ns += 1000000000u;
    worker_peer_check_stall(x.peer, x.clock.now_ns / 1000000);
    assert_non_null(x.peer->lost);
    close_all(&x);
}

static void test_worker_peer_status_names_only_the_own_requests(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    struct proto_status m;
    struct proto_scratch scratch;
    struct worker_peer *other = NULL;
    struct err e = {0};
    open_all(&x);
    proto_scratch_init(&scratch);
    greet(&x);
    ask(&x, 7);
    struct worker_peer *first = x.peer;
    assert_int_equal(worker_peer_open(&x.set, &other, &e), ERR_OK);
    x.peer = other;
    greet(&x);
    ask(&x, 9);
    x.peer = first;
    x.clock.now_ns = 5001000;
    proto_encode_empty(&x.in, PROTO_STATUS_REQUEST, 55);
    hand_over(&x);
    expect_frame(&x, PROTO_STATUS, 55, &f);
    assert_int_equal(proto_decode_status(&f, &scratch, &m, &e), ERR_OK);
    assert_int_equal(m.steps_total, 77);
    assert_int_equal(m.age_us, 5000);
    assert_int_equal(m.uptime_ms, 3);
    assert_true(m.resident_bytes > 0);
    assert_int_equal(m.n_sequences, 2);
    assert_int_equal(m.sequences[0].request_id, 7);
    assert_int_equal(m.sequences[1].request_id, 0);
    proto_scratch_done(&scratch);
    close_all(&x);
}

static void test_worker_peer_welcome_comes_again_when_it_changed(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    open_all(&x);
    worker_announce_welcome(&x.set); /* nobody said hello yet */
    assert_false(taken(&x, &f));
    greet(&x);
    worker_announce_welcome(&x.set);
    assert_false(taken(&x, &f));
    x.engine.facts.state = PROTO_FAILED;
    worker_announce_welcome(&x.set);
    expect_frame(&x, PROTO_WELCOME, 0, &f);
    assert_int_equal(f.payload[4], PROTO_FAILED);
    close_all(&x);
}

/* One that greets between a change and the news of it has heard it; when the state goes back, it
 * hears that too. */
static void test_worker_peer_welcome_comes_again_when_a_state_comes_back(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    open_all(&x);
    x.engine.facts.state = PROTO_FAILED;
    worker_announce_welcome(&x.set);
    x.engine.facts.state = PROTO_LOADING;
    greet(&x);
    x.engine.facts.state = PROTO_FAILED;
    worker_announce_welcome(&x.set);
    expect_frame(&x, PROTO_WELCOME, 0, &f);
    assert_int_equal(f.payload[4], PROTO_FAILED);
    close_all(&x);
}

static void expect_notice(struct fixture *x, enum proto_notice_action action, const char *text)
{
    struct proto_frame f;
    struct proto_notice m;
    struct err e = {0};
    expect_frame(x, PROTO_NOTICE, 0, &f);
    assert_int_equal(proto_decode_notice(&f, &m, &e), ERR_OK);
    assert_int_equal(m.action, action);
    assert_int_equal(m.text.size, strlen(text));
    assert_memory_equal(m.text.data, text, m.text.size);
}

static void test_worker_peer_notice_is_sent_when_admission_should_pause(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    open_all(&x);
    greet(&x);
    worker_announce_notice(&x.set);
    assert_false(taken(&x, &f)); /* nothing changed */
    x.engine.facts.paused = true;
    snprintf(x.engine.facts.pause_reason, sizeof x.engine.facts.pause_reason, "little memory");
    worker_announce_notice(&x.set);
    worker_announce_notice(&x.set);
    expect_notice(&x, PROTO_NOTICE_PAUSE, "little memory");
    assert_false(taken(&x, &f));
    x.engine.facts.paused = false;
    snprintf(x.engine.facts.pause_reason, sizeof x.engine.facts.pause_reason, "enough");
    worker_announce_notice(&x.set);
    expect_notice(&x, PROTO_NOTICE_RESUME, "enough");
    assert_false(taken(&x, &f));
    close_all(&x);
}

static void test_worker_peer_notice_reaches_one_that_comes_later(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    open_all(&x);
    x.engine.facts.paused = true;
    worker_announce_notice(&x.set); /* nobody said hello yet */
    assert_false(taken(&x, &f));
    greet(&x);
    expect_notice(&x, PROTO_NOTICE_PAUSE, "");
    assert_false(taken(&x, &f));
    close_all(&x);
}

static void test_worker_peer_drain_is_answered_when_nothing_runs(void **state)
{
    (void)state;
    struct fixture x;
    struct proto_frame f;
    open_all(&x);
    greet(&x);
    ask(&x, 7);
    proto_encode_empty(&x.in, PROTO_DRAIN, 0);
    hand_over(&x);
    assert_int_equal(x.engine.n_drains, 1);
    assert_true(x.set.drain_asked);
    expect_frame(&x, PROTO_WELCOME, 0, &f); /* draining */
    worker_announce_drained(&x.set);
    assert_false(taken(&x, &f));
    struct engine_event event = {.kind = ENGINE_DONE, .handle = x.engine.submitted[0]};
    worker_peer_on_event(&x.set, &event);
    worker_announce_drained(&x.set);
    expect_frame(&x, PROTO_DONE, 7, &f);
    expect_frame(&x, PROTO_DRAINED, 0, &f);
    worker_announce_drained(&x.set);
    assert_false(taken(&x, &f));
    close_all(&x);
}

static void test_worker_peer_too_many_connections_are_refused(void **state)
{
    (void)state;
    struct fixture x;
    struct worker_peer *p = NULL;
    struct err e = {0};
    open_all(&x);
    for (int i = 1; i < WORKER_PEER_MAX; i++)
        assert_int_equal(worker_peer_open(&x.set, &p, &e), ERR_OK);
    assert_int_equal(worker_peer_open(&x.set, &p, &e), ERR_LIMIT);
    close_all(&x);
}

/* Each allocation of a request fails once: the client hears of it or is cut off, nothing leaks,
 * others go on. */
static void test_worker_peer_no_memory_is_survived(void **state)
{
    (void)state;
    for (uint64_t nth = 1;; nth++) {
        struct fixture x;
        struct proto_frame f;
        struct proto_run run = some_run();
        open_all(&x);
        greet(&x);
        proto_encode_run(&x.in, 7, &run);
        alloc_fail_at(nth, 0);
        worker_peer_on_bytes(x.peer, x.in.data, x.in.size);
        alloc_fail_at(0, 0);
        bool accepted = x.set.n_requests == 1;
        assert_int_equal(x.engine.n_submitted, accepted ? 1 : 0);
        if (!accepted && x.peer->lost == NULL) {
            assert_true(taken(&x, &f));
            assert_int_equal(f.cmd, PROTO_ERROR);
        }
        close_all(&x);
        if (accepted)
            break;
        assert_true(nth < 20);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_worker_peer_hello_gets_a_welcome_with_the_facts),
        cmocka_unit_test(test_worker_peer_first_message_must_be_hello),
        cmocka_unit_test(test_worker_peer_other_version_is_refused),
        cmocka_unit_test(test_worker_peer_request_is_answered_to_the_end),
        cmocka_unit_test(test_worker_peer_id_in_use_is_refused_and_free_afterwards),
        cmocka_unit_test(test_worker_peer_engines_refusal_reaches_the_client),
        cmocka_unit_test(test_worker_peer_cancel_reaches_the_engine),
        cmocka_unit_test(test_worker_peer_vanished_client_cancels_its_requests_only),
        cmocka_unit_test(test_worker_peer_unknown_commands_are_unsupported_and_harmless),
        cmocka_unit_test(test_worker_peer_commands_are_answered_under_their_ids),
        cmocka_unit_test(test_worker_peer_command_of_a_bad_id_is_refused),
        cmocka_unit_test(test_worker_peer_command_that_the_engine_refuses_is_an_error),
        cmocka_unit_test(test_worker_peer_too_many_commands_are_busy),
        cmocka_unit_test(test_worker_peer_cancel_reaches_a_command),
        cmocka_unit_test(test_worker_peer_commands_of_a_lost_client_are_cancelled),
        cmocka_unit_test(test_worker_peer_drained_waits_for_commands),
        cmocka_unit_test(test_worker_peer_short_command_ends_the_connection),
        cmocka_unit_test(test_worker_peer_malformed_payload_ends_the_connection),
        cmocka_unit_test(test_worker_peer_bad_length_ends_the_connection),
        cmocka_unit_test(test_worker_peer_slow_reader_is_cut_off),
        cmocka_unit_test(test_worker_peer_stalled_reader_is_cut_off_after_a_minute),
        cmocka_unit_test(test_worker_peer_status_names_only_the_own_requests),
        cmocka_unit_test(test_worker_peer_welcome_comes_again_when_it_changed),
        cmocka_unit_test(test_worker_peer_welcome_comes_again_when_a_state_comes_back),
        cmocka_unit_test(test_worker_peer_notice_is_sent_when_admission_should_pause),
        cmocka_unit_test(test_worker_peer_notice_reaches_one_that_comes_later),
        cmocka_unit_test(test_worker_peer_drain_is_answered_when_nothing_runs),
        cmocka_unit_test(test_worker_peer_too_many_connections_are_refused),
        cmocka_unit_test(test_worker_peer_no_memory_is_survived),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

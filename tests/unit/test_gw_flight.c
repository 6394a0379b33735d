/* What the worker may say of a run, and what breaks the protocol. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "gw_flight.h"

enum {
    MS = 1000000
};

static struct gw_flights table(void)
{
    return (struct gw_flights){.n_vocab = 100};
}

/* A run of 3 prompt ids, 2 known ones, 6 at most. */
static uint64_t begin(struct gw_flights *fs, uint32_t flags)
{
    struct proto_run run = {
        .n_tokens = 5, .n_prompt = 3, .first_index = 2, .max_new = 6, .flags = flags};
    return gw_flight_begin(fs, NULL, &run, 0)->id;
}

static enum err_code tell(struct gw_flights *fs, uint64_t id, uint32_t index, uint16_t n,
                          uint32_t token, uint8_t flags)
{
    struct proto_token tokens[8];
    struct gw_flight *f;
    struct err e = {0};
    memset(tokens, 0, sizeof tokens);
    for (unsigned i = 0; i < n; i++)
        tokens[i] = (struct proto_token){.id = token, .flags = flags};
    return gw_flight_tokens(
        fs, id, &(struct proto_tokens){.first_index = index, .n = n, .tokens = tokens}, &f, &e);
}

static enum err_code end(struct gw_flights *fs, uint64_t id, enum proto_finish finish,
                         uint32_t generated)
{
    struct gw_flight *f;
    struct err e = {0};
    struct proto_done m = {.finish = (uint8_t)finish, .usage.generated = generated};
    enum err_code code = gw_flight_done(fs, id, &m, &f, &e);
    if (code == ERR_OK)
        gw_flight_end(fs, f);
    return code;
}

static void test_gw_flight_whole_answer_is_fine(void **state)
{
    struct gw_flights fs = table();
    uint64_t id = begin(&fs, 0);
    (void)state;
    assert_int_equal(tell(&fs, id, 2, 1, 99, 0), ERR_OK);
    assert_int_equal(tell(&fs, id, 3, 3, 0, 0), ERR_OK);
    assert_int_equal(end(&fs, id, PROTO_FINISH_LENGTH, 4), ERR_OK);
    assert_int_equal(fs.n, 0);
}

static void test_gw_flight_tokens_out_of_order_are_refused(void **state)
{
    struct gw_flights fs = table();
    uint64_t id = begin(&fs, 0);
    (void)state;
    assert_int_equal(tell(&fs, id, 0, 1, 5, 0), ERR_PROTOCOL);
    assert_int_equal(tell(&fs, id, 3, 1, 5, 0), ERR_PROTOCOL);
    assert_int_equal(tell(&fs, id, 2, 1, 5, 0), ERR_OK);
    assert_int_equal(tell(&fs, id, 2, 1, 5, 0), ERR_PROTOCOL);
}

static void test_gw_flight_tokens_beyond_a_bound_are_refused(void **state)
{
    struct gw_flights fs = table();
    uint64_t id = begin(&fs, 0), lp = begin(&fs, PROTO_RUN_LOGPROBS);
    (void)state;
    assert_int_equal(tell(&fs, id, 2, 1, 100, 0), ERR_PROTOCOL);
    assert_int_equal(tell(&fs, id, 2, 5, 5, 0), ERR_PROTOCOL);
    assert_int_equal(tell(&fs, id, 2, 4, 5, 0), ERR_OK);
    assert_int_equal(tell(&fs, id, 6, 1, 5, 0), ERR_PROTOCOL);
    assert_int_equal(tell(&fs, id, 0, 1, 5, PROTO_TOKEN_PROMPT), ERR_PROTOCOL);
    assert_int_equal(tell(&fs, lp, 2, 1, 5, 0), ERR_PROTOCOL);
    assert_int_equal(tell(&fs, lp, 2, 1, 5, PROTO_TOKEN_LOGPROB), ERR_OK);
}

static void test_gw_flight_prompt_tokens_are_due_once_and_all(void **state)
{
    struct gw_flights fs = table();
    uint64_t id = begin(&fs, PROTO_RUN_PROMPT_LOGPROBS);
    uint8_t flags = PROTO_TOKEN_PROMPT | PROTO_TOKEN_LOGPROB;
    (void)state;
    assert_int_equal(tell(&fs, id, 0, 2, 5, flags), ERR_OK);
    assert_int_equal(tell(&fs, id, 0, 2, 5, flags), ERR_PROTOCOL);
    assert_int_equal(tell(&fs, id, 2, 2, 5, flags), ERR_PROTOCOL);
    assert_int_equal(end(&fs, id, PROTO_FINISH_STOP, 0), ERR_PROTOCOL);
    assert_int_equal(tell(&fs, id, 2, 1, 5, flags), ERR_OK);
    assert_int_equal(end(&fs, id, PROTO_FINISH_STOP, 0), ERR_OK);
}

static void test_gw_flight_ends_once_and_with_what_came(void **state)
{
    struct gw_flights fs = table();
    uint64_t id = begin(&fs, 0);
    struct gw_flight *f;
    struct err e = {0};
    (void)state;
    assert_int_equal(end(&fs, id + 1, PROTO_FINISH_STOP, 0), ERR_PROTOCOL);
    assert_int_equal(tell(&fs, id, 2, 1, 5, 0), ERR_OK);
    assert_int_equal(end(&fs, id, PROTO_FINISH_STOP, 2), ERR_PROTOCOL); /* one was lost */
    assert_int_equal(end(&fs, id, PROTO_FINISH_LENGTH, 1), ERR_PROTOCOL);
    assert_int_equal(end(&fs, id, PROTO_FINISH_STOP, 1), ERR_OK);
    assert_int_equal(end(&fs, id, PROTO_FINISH_STOP, 1), ERR_PROTOCOL);
    assert_int_equal(tell(&fs, id, 3, 1, 5, 0), ERR_PROTOCOL);
    assert_int_equal(gw_flight_error(&fs, id, &f, &e), ERR_PROTOCOL);
    assert_int_equal(gw_flight_progress(&fs, id, &(struct proto_progress){.total = 5}, &f, &e),
                     ERR_PROTOCOL);
}

static void test_gw_flight_cancelled_run_may_end_anyhow(void **state)
{
    struct gw_flights fs = table();
    uint64_t id = begin(&fs, 0);
    (void)state;
    gw_flight_find(&fs, id)->cancelled = true;
    assert_int_equal(tell(&fs, id, 4, 1, 5, 0), ERR_OK);
    assert_int_equal(tell(&fs, id, 5, 1, 500, 0), ERR_PROTOCOL);
    assert_int_equal(end(&fs, id, PROTO_FINISH_CANCELLED, 9), ERR_OK);
}

/* Only answers to questions that came after the run count, and only records newer than each other. */
static void test_gw_flight_run_that_no_record_knows_is_lost(void **state)
{
    struct gw_flights fs = table();
    uint64_t id = begin(&fs, 0), other = begin(&fs, 0);
    struct proto_sequence both[2] = {{.request_id = other}, {.request_id = id}};
    const uint64_t sent = gw_flight_find(&fs, id)->sent_ns, second = 1000000;
    struct err e = {0};
    (void)state;
    for (unsigned i = 0; i < 9; i++) /* asked before, answered late */
        assert_int_equal(gw_flight_status(&fs, both, 1, sent, i * second, &e), ERR_OK);
    for (unsigned i = 0; i < 9; i++) /* one record, asked for again and again */
        assert_int_equal(gw_flight_status(&fs, both, 1, sent + MS * (1 + i), 50000 + i, &e),
                         ERR_OK);
    assert_int_equal(gw_flight_status(&fs, both, 1, sent + 2000ull * MS, 2 * second, &e), ERR_OK);
    assert_int_equal(gw_flight_status(&fs, both, 2, sent + 3000ull * MS, 3 * second, &e), ERR_OK);
    assert_int_equal(gw_flight_status(&fs, both, 1, sent + 4000ull * MS, 4 * second, &e), ERR_OK);
    assert_int_equal(gw_flight_status(&fs, both, 1, sent + 5000ull * MS, 5 * second, &e), ERR_OK);
    assert_int_equal(gw_flight_status(&fs, both, 1, sent + 6000ull * MS, 6 * second, &e),
                     ERR_PROTOCOL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_flight_whole_answer_is_fine),
        cmocka_unit_test(test_gw_flight_tokens_out_of_order_are_refused),
        cmocka_unit_test(test_gw_flight_tokens_beyond_a_bound_are_refused),
        cmocka_unit_test(test_gw_flight_prompt_tokens_are_due_once_and_all),
        cmocka_unit_test(test_gw_flight_ends_once_and_with_what_came),
        cmocka_unit_test(test_gw_flight_cancelled_run_may_end_anyhow),
        cmocka_unit_test(test_gw_flight_run_that_no_record_knows_is_lost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

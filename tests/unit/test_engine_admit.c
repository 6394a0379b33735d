/* Slots and pages under pressure, through the whole engine: far more work than the pool holds. What
 * ends must be what it would be alone, and everything must end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "engine_admit.h"
#include "engine_rig.h"
#include "rng.h"

enum {
    JOBS = 20,
    MAX_PROMPT = 330,
    MAX_ANSWER = 110
};

struct job {
    uint32_t prompt[MAX_PROMPT];
    struct proto_run run;
    uint32_t expected[MAX_ANSWER], n_expected;
};

struct world {
    struct engine_rig rig;
    struct job jobs[JOBS];
    uint32_t n_rolls;
    uint64_t page_bytes; /* 0 until known: a pool of the engine's choice */
};

static uint32_t roll(struct world *w, uint32_t sides)
{
    return (uint32_t)((rng_draw(4711, w->n_rolls++) >> 32) * sides >> 32);
}

static void start(struct world *w, uint32_t pages, uint32_t chunk, uint32_t sequences)
{
    struct engine_config config =
        engine_rig_config(ISLET_TEST_DIR "/models/random/qwen3moe-q8_0.gguf");
    config.kv_budget = pages * w->page_bytes;
    config.prefill_chunk = chunk;
    config.max_sequences = sequences;
    engine_rig_start(&w->rig, &config);
    assert_int_equal(engine_rig_wait_loaded(&w->rig), PROTO_SERVING);
}

/* Prompts of a few beginnings, long and short answers, greedy and sampled. */
static void write_jobs(struct world *w)
{
    for (uint32_t i = 0; i < JOBS; i++) {
        struct job *j = &w->jobs[i];
        const uint32_t n = 5 + roll(w, MAX_PROMPT - 5), story = roll(w, 3), fork = roll(w, n);
        for (uint32_t t = 0; t < n; t++)
            j->prompt[t] = t < fork ? story * 90 + t * 7 % 90 : roll(w, 280);
        j->run = engine_rig_run(j->prompt, n);
        j->run.max_new = 1 + roll(w, MAX_ANSWER - 1);
        j->run.temperature = i % 2 == 0 ? 0.0f : 1.1f;
        j->run.seed = i;
        j->run.presence = i % 4 == 1 ? 0.5f : 0.0f;
        j->run.flags = i % 5 == 2 ? PROTO_RUN_NO_CACHE : 0;
        j->run.priority = (int8_t)((int)roll(w, 5) - 2);
    }
}

static uint64_t page_bytes(struct world *w)
{
    struct engine_snapshot *s = alloc_zero(ALLOC_MISC, 1, sizeof(*s));
    assert_non_null(s);
    engine_get_snapshot(w->rig.engine, s);
    const uint64_t bytes = s->status.kv_page_bytes;
    alloc_free(s);
    return bytes;
}

static void answer_alone(struct world *w)
{
    start(w, 0, 512, 32);
    for (uint32_t i = 0; i < JOBS; i++) {
        const uint32_t at = engine_rig_submit(&w->rig, &w->jobs[i].run);
        engine_rig_finish(&w->rig);
        const struct engine_rig_answer *a = &w->rig.answers[at];
        assert_false(a->failed);
        w->jobs[i].n_expected = a->n_tokens;
        for (uint32_t t = 0; t < a->n_tokens; t++)
            w->jobs[i].expected[t] = a->tokens[t].id;
    }
    w->page_bytes = page_bytes(w);
    engine_rig_stop(&w->rig);
}

static void check(const struct job *j, const struct engine_rig_answer *a)
{
    assert_false(a->failed);
    if (a->done.finish == PROTO_FINISH_CANCELLED)
        assert_true(a->n_tokens <= j->n_expected);
    else
        assert_int_equal(a->n_tokens, j->n_expected);
    for (uint32_t t = 0; t < a->n_tokens; t++)
        assert_int_equal(a->tokens[t].id, j->expected[t]);
}

static uint64_t pages_in_use(struct world *w)
{
    struct engine_snapshot *s = alloc_zero(ALLOC_MISC, 1, sizeof(*s));
    assert_non_null(s);
    engine_get_snapshot(w->rig.engine, s);
    assert_true(s->status.kv_pages_used + s->status.kv_pages_cached <= s->status.kv_pages_total);
    const uint64_t used = s->status.kv_pages_used;
    alloc_free(s);
    return used;
}

/* The snapshot follows the last event by moments. */
static void wait_for_no_pages(struct world *w)
{
    const uint64_t beat = engine_heartbeat(w->rig.engine);
    while (pages_in_use(w) != 0)
        assert_true(engine_heartbeat(w->rig.engine) < beat + 10);
}

static int prepare(void **state)
{
    struct world *w = alloc_zero(ALLOC_MISC, 1, sizeof(*w));
    if (w == NULL)
        return -1;
    write_jobs(w);
    answer_alone(w);
    *state = w;
    return 0;
}

static int finish(void **state)
{
    alloc_free(*state);
    return 0;
}

static void test_engine_admit_few_pages_preempts_and_gives_the_same(void **state)
{
    struct world *w = *state;
    static const struct {
        uint32_t pages, chunk, sequences;
    } tight[] = {{8, 512, 32}, {8, 7, 4}, {9, 64, 3}, {14, 100, 32}, {8, 512, 1}};
    uint64_t preempted = 0;
    for (size_t k = 0; k < sizeof(tight) / sizeof(tight[0]); k++) {
        start(w, tight[k].pages, tight[k].chunk, tight[k].sequences);
        for (uint32_t i = 0; i < JOBS; i++)
            engine_rig_submit(&w->rig, &w->jobs[i].run);
        engine_rig_finish(&w->rig);
        for (uint32_t i = 0; i < JOBS; i++) {
            check(&w->jobs[i], &w->rig.answers[i]);
            assert_int_not_equal(w->rig.answers[i].done.finish, PROTO_FINISH_CANCELLED);
            preempted += w->rig.answers[i].done.usage.preempted;
        }
        wait_for_no_pages(w);
        engine_rig_stop(&w->rig);
    }
    assert_true(preempted > 10); /* else the pools were not tight */
}

static void test_engine_admit_the_oldest_is_never_preempted(void **state)
{
    struct world *w = *state;
    start(w, 8, 64, 8);
    for (uint32_t i = 0; i < JOBS; i++)
        engine_rig_submit(&w->rig, &w->jobs[i].run);
    engine_rig_finish(&w->rig);
    assert_int_equal(w->rig.answers[0].done.usage.preempted, 0);
    engine_rig_stop(&w->rig);
}

static void test_engine_admit_cancelled_at_random_leaves_nothing(void **state)
{
    struct world *w = *state;
    unsigned cancelled = 0, whole = 0;
    start(w, 10, 33, 6);
    for (uint32_t round = 0; round < 4; round++) {
        for (uint32_t i = 0; i < JOBS; i++)
            engine_rig_submit(&w->rig, &w->jobs[i].run);
        for (uint32_t i = 0; i < JOBS / 2; i++) {
            engine_rig_cancel(&w->rig, roll(w, JOBS));
            for (uint32_t turns = roll(w, 6); turns > 0 && !w->rig.answers[0].ended; turns--)
                engine_rig_pump(&w->rig);
        }
        engine_rig_finish(&w->rig);
        for (uint32_t i = 0; i < JOBS; i++) {
            check(&w->jobs[i], &w->rig.answers[i]);
            const bool gone = w->rig.answers[i].done.finish == PROTO_FINISH_CANCELLED;
            cancelled += gone;
            whole += !gone;
        }
        wait_for_no_pages(w);
        engine_rig_forget(&w->rig);
    }
    assert_true(cancelled > 8 && whole > 8);
    engine_rig_stop(&w->rig);
}

static void test_engine_admit_equal_prompts_are_computed_once(void **state)
{
    struct world *w = *state;
    uint32_t prompt[320];
    uint64_t cached = 0;
    for (uint32_t i = 0; i < 320; i++)
        prompt[i] = i * 11 % 280;
    struct proto_run run = engine_rig_run(prompt, 320);
    run.max_new = 2;
    start(w, 200, 64, 8);
    for (uint32_t i = 0; i < 4; i++)
        engine_rig_submit(&w->rig, &run);
    engine_rig_finish(&w->rig);
    for (uint32_t i = 0; i < 4; i++)
        cached += w->rig.answers[i].done.usage.cached;
    assert_true(cached >= 3 * 256); /* all but the page with the last token */
    engine_rig_stop(&w->rig);
}

/* ---- rows of one step, without an engine ---- */

enum {
    FEW_PAGES = 3,
    FEW_TOKENS = 2 * KV_PREFIX_PAGE
};

struct step {
    struct engine_run run;
    struct engine_config config;
    struct engine_job jobs[3];
    uint32_t tokens[3][FEW_TOKENS], pages[3][FEW_PAGES];
};

/* Slot i: let in as the i-th, with so many tokens of which so many are computed. */
static void fill_slot(struct step *s, uint32_t i, uint32_t n_given, uint32_t n_tokens,
                      uint32_t computed)
{
    struct engine_slot *slot = &s->run.slots[i];
    s->jobs[i].order = i;
    s->jobs[i].request.run = (struct proto_run){.n_prompt = n_given, .n_tokens = n_given};
    *slot = (struct engine_slot){.job = &s->jobs[i],
                                 .tokens = s->tokens[i],
                                 .n_tokens = n_tokens,
                                 .n_given = n_given,
                                 .paged = true};
    slot->kv.pages = s->pages[i];
    assert_true(kv_sequence_grow(&slot->kv, &s->run.prefix, computed));
    slot->kv.computed = computed;
}

/* The first takes the last page, the second has room. The third was let in when there was a page
 * for it, and holds none yet: it waits, and does not take those of the second, whose row is chosen
 * already. */
static void test_engine_admit_one_without_pages_takes_none_of_an_older_one(void **state)
{
    struct step *s = alloc_zero(ALLOC_MISC, 1, sizeof(*s));
    struct err e = {.code = ERR_OK};
    (void)state;
    assert_non_null(s);
    s->run.config = &s->config;
    s->run.n_slots = 3;
    s->config.prefill_chunk = 512;
    assert_int_equal(kv_page_start(&s->run.pages, FEW_PAGES, &e), ERR_OK);
    assert_int_equal(kv_prefix_start(&s->run.prefix, &s->run.pages, &e), ERR_OK);
    fill_slot(s, 0, 9, KV_PREFIX_PAGE + 1, KV_PREFIX_PAGE);
    fill_slot(s, 1, 9, 21, 20);
    fill_slot(s, 2, 30, 30, 0);
    const uint32_t rows = engine_admit_rows(&s->run, 0);
    const struct engine_slot *slots = s->run.slots;
    assert_int_equal(slots[0].rows, 1);
    assert_int_equal(slots[1].rows, 1);
    assert_true(slots[1].paged);
    assert_int_equal(slots[1].kv.n_pages, 1);
    assert_int_equal(slots[2].rows, 0);
    assert_false(slots[2].paged);
    assert_int_equal(rows, 2);
    assert_int_equal(s->run.count.preemptions_total, 1);
    kv_prefix_done(&s->run.prefix);
    kv_page_done(&s->run.pages);
    alloc_free(s);
}

/* It is the younger one's turn, and there is no page for it: the older one decodes instead, and
 * nobody waits for nothing. */
static void test_engine_admit_who_loses_its_pages_loses_its_turn(void **state)
{
    struct step *s = alloc_zero(ALLOC_MISC, 1, sizeof(*s));
    struct err e = {.code = ERR_OK};
    (void)state;
    assert_non_null(s);
    s->run.config = &s->config;
    s->run.n_slots = 2;
    s->config.prefill_chunk = 512;
    assert_int_equal(kv_page_start(&s->run.pages, 2, &e), ERR_OK);
    assert_int_equal(kv_prefix_start(&s->run.prefix, &s->run.pages, &e), ERR_OK);
    fill_slot(s, 0, 9, 21, 20);
    fill_slot(s, 1, 9, KV_PREFIX_PAGE + 1, KV_PREFIX_PAGE);
    engine_turns_start(&s->run.turns, true, 1);
    s->run.turns.known = 3;
    s->run.turns.last[0] = s->run.turns.clock = 1;
    assert_int_equal(engine_admit_rows(&s->run, 0), 1);
    assert_int_equal(s->run.slots[0].rows, 1);
    assert_int_equal(s->run.slots[1].rows, 0);
    assert_false(s->run.slots[1].paged);
    assert_int_equal(s->run.count.preemptions_total, 1);
    kv_prefix_done(&s->run.prefix);
    kv_page_done(&s->run.pages);
    alloc_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_admit_few_pages_preempts_and_gives_the_same),
        cmocka_unit_test(test_engine_admit_the_oldest_is_never_preempted),
        cmocka_unit_test(test_engine_admit_cancelled_at_random_leaves_nothing),
        cmocka_unit_test(test_engine_admit_equal_prompts_are_computed_once),
        cmocka_unit_test(test_engine_admit_one_without_pages_takes_none_of_an_older_one),
        cmocka_unit_test(test_engine_admit_who_loses_its_pages_loses_its_turn),
    };
    return cmocka_run_group_tests(tests, prepare, finish);
}

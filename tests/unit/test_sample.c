#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "kernels.h"
#include "rng.h"
#include "sample.h"

enum {
    VOCAB = 97,
    HISTORY = 40
};

static struct proto_run neutral(void)
{
    return (struct proto_run){.temperature = 1.0f, .top_p = 1.0f, .repeat = 1.0f, .seed = 7};
}

static struct sample started(uint32_t n_vocab)
{
    struct sample s;
    struct err e = {.code = ERR_OK};
    assert_int_equal(sample_start(&s, n_vocab, &e), ERR_OK);
    return s;
}

static uint32_t pick(struct sample *s, const float *logits, const struct proto_run *run,
                     uint32_t index)
{
    uint32_t token = UINT32_MAX;
    struct err e = {.code = ERR_OK};
    assert_int_equal(sample_pick(s, logits, run, NULL, 0, index, &token, &e), ERR_OK);
    return token;
}

/* ---- A21 once more, written down step by step with a whole sort ------------------------------ */

struct candidate {
    uint32_t id;
    float x;
    uint64_t f, w;
};

static int by_logit(const void *a, const void *b)
{
    const struct candidate *p = a, *q = b;
    if (p->x != q->x)
        return p->x > q->x ? -1 : 1;
    return p->id < q->id ? -1 : 1;
}

static int by_id(const void *a, const void *b)
{
    const struct candidate *p = a, *q = b;
    return p->id < q->id ? -1 : 1;
}

static uint32_t count_in(const uint32_t *tokens, uint32_t from, uint32_t to, uint32_t id)
{
    uint32_t n = 0;
    for (uint32_t i = from; i < to; i++)
        n += tokens[i] == id;
    return n;
}

static float adjusted(float x, uint32_t id, const struct proto_run *run, const uint32_t *tokens,
                      uint32_t n)
{
    for (uint16_t i = 0; i < run->n_bias; i++)
        if (run->bias[i].id == id)
            x = x + run->bias[i].value;
    const uint32_t last = run->repeat_last_n < 0 || (uint32_t)run->repeat_last_n > n
                              ? n
                              : (uint32_t)run->repeat_last_n;
    if (count_in(tokens, n - last, n, id) > 0)
        x = x > 0 ? x / run->repeat : x * run->repeat;
    const uint32_t c = count_in(tokens, run->n_prompt, n, id);
    if (c > 0) {
        volatile float product = (float)c * run->frequency;
        x = x - run->presence;
        x = x - product;
    }
    return x;
}

static uint64_t fixed40(float x)
{
    return (uint64_t)ldexp((double)k_exp32(x), 40);
}

static uint32_t slow_pick(const float *logits, uint32_t n_vocab, const struct proto_run *run,
                          const uint32_t *tokens, uint32_t n, uint32_t index)
{
    struct candidate *c = alloc_zero(ALLOC_MISC, n_vocab, sizeof(*c));
    assert_non_null(c);
    for (uint32_t i = 0; i < n_vocab; i++)
        c[i] = (struct candidate){.id = i, .x = adjusted(logits[i], i, run, tokens, n)};
    qsort(c, n_vocab, sizeof(*c), by_logit);
    const float best = c[0].x;
    uint32_t left = n_vocab, answer = c[0].id;
    for (uint32_t i = 0; i < n_vocab; i++)
        c[i].f = fixed40(c[i].x - best);
    if (run->top_k > 0 && (uint32_t)run->top_k < left)
        left = (uint32_t)run->top_k;
    if (run->top_p < 1.0f) {
        unsigned __int128 total = 0, sum = 0;
        for (uint32_t i = 0; i < left; i++)
            total += c[i].f;
        const uint64_t share = (uint64_t)ldexp((double)run->top_p, 30);
        uint32_t keep = 0;
        do
            sum += c[keep++].f;
        while (keep < left && (sum << 30) < total * share);
        left = keep;
    }
    if (run->min_p > 0.0f) {
        uint64_t least = (uint64_t)ldexp((double)run->min_p, 40);
        least = least < 1 ? 1 : least;
        while (c[left - 1].f < least) /* F falls with the logit */
            left--;
    }
    if (run->temperature >= 0x1p-126f) {
        uint64_t total = 0, sum = 0;
        qsort(c, left, sizeof(*c), by_id);
        for (uint32_t i = 0; i < left; i++) {
            c[i].w = fixed40((c[i].x - best) / run->temperature);
            total += c[i].w;
        }
        const unsigned __int128 product = (unsigned __int128)rng_draw(run->seed, index) * total;
        uint32_t i = 0;
        while ((sum += c[i].w) <= (uint64_t)(product >> 64))
            i++;
        answer = c[i].id;
    }
    alloc_free(c);
    return answer;
}

/* ---- a stream of settings -------------------------------------------------------------------- */

struct dice {
    uint64_t seed;
    uint32_t n;
};

static uint32_t roll(struct dice *d, uint32_t sides)
{
    return (uint32_t)((rng_draw(d->seed, d->n++) >> 32) * sides >> 32);
}

static float between(struct dice *d, float low, float high)
{
    return low + (high - low) * (float)roll(d, 1 << 20) * 0x1p-20f;
}

/* Logits of several kinds: spread, nearly equal, many ties, one far ahead, very low ones. */
static void roll_logits(struct dice *d, float *x, uint32_t n)
{
    const uint32_t kind = roll(d, 6);
    for (uint32_t i = 0; i < n; i++) {
        x[i] = between(d, -12.0f, 12.0f);
        if (kind == 1)
            x[i] = between(d, 3.0f, 3.001f);
        else if (kind == 2)
            x[i] = (float)roll(d, 4) - 2.0f;
        else if (kind == 3)
            x[i] = i == n / 3 ? 60.0f : x[i];
        else if (kind == 4)
            x[i] = roll(d, 3) == 0 ? x[i] : -300.0f;
        else if (kind == 5)
            x[i] = roll(d, 2) == 0 ? 0.0f : -0.0f;
    }
}

static void roll_run(struct dice *d, struct proto_run *run, struct proto_bias *bias)
{
    static const float temperatures[] = {0.0f, 1e-40f, 0x1p-126f, 0.01f, 0.3f,
                                         0.7f, 1.0f,   1.5f,      10.0f, -1.0f};
    static const float shares[] = {0.0f, 1e-9f, 0.1f, 0.5f, 0.9f, 0.95f, 0.999999f, 1.0f};
    static const float least[] = {0.0f, 1e-30f, 0.01f, 0.1f, 0.9f, 1.0f};
    static const int32_t counts[] = {-1, 0, 1, 2, 10, 40, VOCAB - 1, VOCAB, 1000};
    static const int32_t windows[] = {-1, 0, 1, 5, 1000};
    *run = neutral();
    run->n_prompt = roll(d, HISTORY);
    run->temperature = temperatures[roll(d, 10)];
    run->top_p = shares[roll(d, 8)];
    run->min_p = least[roll(d, 6)];
    run->top_k = counts[roll(d, 9)];
    run->seed = (uint64_t)roll(d, UINT32_MAX) << 32 | roll(d, UINT32_MAX);
    if (roll(d, 2) == 0) {
        run->repeat = between(d, 0.1f, 4.0f);
        run->repeat_last_n = windows[roll(d, 5)];
    }
    if (roll(d, 2) == 0) {
        run->presence = between(d, -2.0f, 2.0f);
        run->frequency = between(d, -2.0f, 2.0f);
    }
    run->bias = bias;
    run->n_bias = (uint16_t)roll(d, 5);
    for (uint16_t i = 0; i < run->n_bias; i++)
        bias[i] = (struct proto_bias){(uint32_t)i * 19 + roll(d, 19),
                                      roll(d, 3) == 0 ? -INFINITY : between(d, -100.0f, 100.0f)};
}

static void test_sample_pick_random_settings_equal_the_slow_way(void **state)
{
    (void)state;
    struct sample s = started(VOCAB);
    for (uint32_t round = 0; round < 40000; round++) {
        struct dice d = {.seed = 1000 + round};
        float logits[VOCAB];
        uint32_t tokens[HISTORY], got = UINT32_MAX;
        struct proto_run run;
        struct proto_bias bias[8];
        struct err e = {.code = ERR_OK};
        roll_logits(&d, logits, VOCAB);
        roll_run(&d, &run, bias);
        for (uint32_t i = 0; i < HISTORY; i++)
            tokens[i] = roll(&d, 12);
        const uint32_t index = roll(&d, 5000);
        assert_int_equal(sample_pick(&s, logits, &run, tokens, HISTORY, index, &got, &e), ERR_OK);
        const uint32_t want = slow_pick(logits, VOCAB, &run, tokens, HISTORY, index);
        if (got != want)
            fail_msg("round %u: token %u instead of %u (T %g, k %d, p %g, min %g)", round, got,
                     want, (double)run.temperature, run.top_k, (double)run.top_p,
                     (double)run.min_p);
    }
    sample_done(&s);
}

static void test_sample_pick_large_vocabulary_equals_the_slow_way(void **state)
{
    (void)state;
    enum {
        LARGE = 152064
    };
    struct sample s = started(LARGE);
    float *logits = alloc_zero(ALLOC_MISC, LARGE, sizeof(*logits));
    assert_non_null(logits);
    for (uint32_t round = 0; round < 8; round++) {
        struct dice d = {.seed = round};
        for (uint32_t i = 0; i < LARGE; i++)
            logits[i] = between(&d, -8.0f, 8.0f);
        struct proto_run run = neutral();
        run.top_k = round % 2 == 0 ? 0 : 5000;
        run.top_p = 0.9f;
        run.min_p = round % 3 == 0 ? 0.001f : 0.0f;
        run.temperature = 0.8f;
        assert_int_equal(pick(&s, logits, &run, round),
                         slow_pick(logits, LARGE, &run, NULL, 0, round));
    }
    alloc_free(logits);
    sample_done(&s);
}

/* ---- single rules ---------------------------------------------------------------------------- */

static void test_sample_pick_greedy_tie_takes_the_lowest_id(void **state)
{
    (void)state;
    struct sample s = started(5);
    const float logits[5] = {1.0f, 3.0f, 3.0f, -0.0f, 3.0f};
    const float zeros[5] = {-1.0f, -0.0f, 0.0f, 0.0f, -2.0f};
    struct proto_run run = neutral();
    static const float greedy[] = {0.0f, -0.0f, -1.0f, 1e-40f, 0x1.fffffcp-127f};
    for (size_t i = 0; i < sizeof(greedy) / sizeof(greedy[0]); i++) {
        run.temperature = greedy[i];
        assert_int_equal(pick(&s, logits, &run, 0), 1);
        assert_int_equal(pick(&s, zeros, &run, 0), 1);
    }
    sample_done(&s);
}

static void test_sample_pick_draw_is_known(void **state)
{
    (void)state;
    /* Two equal logits: W = 2^40 each, so the top bit of the draw decides. Seed 0, index 0 draws
     * e169c58d6627e8d5. */
    struct sample s = started(2);
    const float equal[2] = {1.5f, 1.5f};
    struct proto_run run = neutral();
    run.seed = 0;
    assert_int_equal(pick(&s, equal, &run, 0), 1);
    unsigned ones = 0;
    for (uint32_t i = 0; i < 4096; i++) {
        const uint32_t token = pick(&s, equal, &run, i);
        assert_int_equal(token, rng_draw(0, i) >> 63);
        ones += token;
    }
    assert_in_range(ones, 1900, 2200);
    sample_done(&s);
}

static void test_sample_pick_top_p_is_the_shortest_prefix(void **state)
{
    (void)state;
    /* F is equal for all four: with p = 1/2 the first two ids hold exactly half. */
    struct sample s = started(4);
    const float equal[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    struct proto_run run = neutral();
    bool seen[4] = {false};
    run.top_p = 0.5f;
    for (uint32_t i = 0; i < 200; i++)
        seen[pick(&s, equal, &run, i)] = true;
    assert_true(seen[0] && seen[1] && !seen[2] && !seen[3]);
    run.top_p = 0.5000001f; /* just above: one more */
    for (uint32_t i = 0; i < 200; i++)
        seen[pick(&s, equal, &run, i)] = true;
    assert_true(seen[2] && !seen[3]);
    run.top_p = 0.0f;
    for (uint32_t i = 0; i < 200; i++)
        assert_int_equal(pick(&s, equal, &run, i), 0);
    sample_done(&s);
}

static void test_sample_pick_neutral_filters_keep_tokens_without_weight(void **state)
{
    (void)state;
    /* A hot draw can reach a token whose F is 0; min-p, however small, takes it away. */
    struct sample s = started(2);
    const float logits[2] = {0.0f, -80.0f};
    struct proto_run run = neutral();
    unsigned low = 0;
    run.temperature = 80.0f;
    for (uint32_t i = 0; i < 1000; i++)
        low += pick(&s, logits, &run, i);
    assert_in_range(low, 200, 340); /* e^-1 / (1 + e^-1) = 0.269 */
    run.min_p = 1e-30f;
    for (uint32_t i = 0; i < 1000; i++)
        assert_int_equal(pick(&s, logits, &run, i), 0);
    sample_done(&s);
}

static void test_sample_pick_windows_of_penalties_differ(void **state)
{
    (void)state;
    struct sample s = started(4);
    const float logits[4] = {2.0f, 1.9f, 0.0f, -1.0f};
    const uint32_t tokens[4] = {0, 0, 1, 3}; /* two of the prompt, two of the answer */
    struct proto_run run = neutral();
    struct err e = {.code = ERR_OK};
    uint32_t got;
    run.temperature = 0.0f;
    run.n_prompt = 2;
    run.presence = 1.0f; /* counts the answer only: 1 falls to 0.9 */
    assert_int_equal(sample_pick(&s, logits, &run, tokens, 4, 2, &got, &e), ERR_OK);
    assert_int_equal(got, 0);
    run.presence = 0.0f;
    run.repeat = 4.0f;
    run.repeat_last_n = 2; /* 1 and 3, not 0 */
    assert_int_equal(sample_pick(&s, logits, &run, tokens, 4, 2, &got, &e), ERR_OK);
    assert_int_equal(got, 0);
    run.repeat_last_n = 4; /* 0 at 0.5, 1 at 0.475 */
    assert_int_equal(sample_pick(&s, logits, &run, tokens, 4, 2, &got, &e), ERR_OK);
    assert_int_equal(got, 0);
    run.repeat_last_n = -1;
    run.frequency = 0.0f;
    run.n_prompt = 0;
    run.frequency = 0.02f; /* 0 twice: 0.46, 1 once: 0.455 */
    assert_int_equal(sample_pick(&s, logits, &run, tokens, 4, 2, &got, &e), ERR_OK);
    assert_int_equal(got, 0);
    run.frequency = 0.03f; /* 0.44 and 0.445 */
    assert_int_equal(sample_pick(&s, logits, &run, tokens, 4, 2, &got, &e), ERR_OK);
    assert_int_equal(got, 1);
    sample_done(&s);
}

static void test_sample_pick_all_forbidden_is_refused(void **state)
{
    (void)state;
    struct sample s = started(3);
    const float logits[3] = {1.0f, 2.0f, 3.0f};
    const struct proto_bias bias[3] = {{0, -INFINITY}, {2, -INFINITY}, {1, -INFINITY}};
    struct proto_run run = neutral();
    struct err e = {.code = ERR_OK};
    uint32_t got = 99;
    run.bias = bias;
    run.n_bias = 3;
    assert_int_equal(sample_pick(&s, logits, &run, NULL, 0, 4, &got, &e), ERR_ARGUMENT);
    assert_int_equal(got, 99);
    assert_non_null(strstr(e.text, "-inf"));
    run.n_bias = 2; /* one is left, at any temperature */
    run.temperature = 10.0f;
    for (uint32_t i = 0; i < 50; i++)
        assert_int_equal(pick(&s, logits, &run, i), 1);
    sample_done(&s);
}

static void test_sample_pick_leaves_nothing_behind(void **state)
{
    (void)state;
    struct sample s = started(VOCAB);
    float logits[VOCAB];
    const uint32_t tokens[6] = {3, 3, 3, 4, 5, 6};
    struct dice d = {.seed = 5};
    struct proto_run plain = neutral(), heavy = neutral();
    struct err e = {.code = ERR_OK};
    uint32_t got;
    roll_logits(&d, logits, VOCAB);
    heavy.repeat = 2.0f;
    heavy.repeat_last_n = -1;
    heavy.presence = heavy.frequency = 2.0f;
    heavy.top_k = 3;
    const uint32_t before = pick(&s, logits, &plain, 9);
    assert_int_equal(sample_pick(&s, logits, &heavy, tokens, 6, 9, &got, &e), ERR_OK);
    assert_int_equal(pick(&s, logits, &plain, 9), before);
    for (uint32_t i = 0; i < VOCAB; i++)
        assert_int_equal(s.count[i], 0);
    sample_done(&s);
}

/* ---- log-probabilities ----------------------------------------------------------------------- */

static void test_sample_logprobs_equal_the_rule(void **state)
{
    (void)state;
    for (uint32_t round = 0; round < 300; round++) {
        struct dice d = {.seed = round};
        float logits[VOCAB];
        struct candidate sorted[VOCAB];
        struct proto_token t = {.id = roll(&d, VOCAB)};
        const uint8_t n_top = (uint8_t)roll(&d, PROTO_MAX_TOP + 1);
        uint64_t z = 0;
        roll_logits(&d, logits, VOCAB);
        for (uint32_t i = 0; i < VOCAB; i++)
            sorted[i] = (struct candidate){.id = i, .x = logits[i]};
        qsort(sorted, VOCAB, sizeof(sorted[0]), by_logit);
        for (uint32_t i = 0; i < VOCAB; i++)
            z += fixed40(logits[i] - sorted[0].x);
        const double log_z = k_log64(ldexp((double)z, -40)), m = (double)sorted[0].x;
        sample_logprobs(logits, VOCAB, n_top, &t);
        assert_true(t.flags & PROTO_TOKEN_LOGPROB);
        assert_true(t.logprob == (float)((double)logits[t.id] - m - log_z));
        assert_int_equal(t.n_top, n_top);
        for (uint8_t i = 0; i < n_top; i++) {
            assert_int_equal(t.top[i].id, sorted[i].id);
            assert_true(t.top[i].logprob == (float)((double)sorted[i].x - m - log_z));
        }
    }
}

static void test_sample_logprobs_more_than_the_vocabulary_gives_all(void **state)
{
    (void)state;
    const float logits[3] = {1.0f, 2.0f, 2.0f};
    struct proto_token t = {.id = 0};
    sample_logprobs(logits, 3, 20, &t);
    assert_int_equal(t.n_top, 3);
    assert_int_equal(t.top[0].id, 1);
    assert_int_equal(t.top[1].id, 2);
    assert_int_equal(t.top[2].id, 0);
}

static void test_sample_start_without_memory_frees_all(void **state)
{
    (void)state;
    const uint64_t blocks = alloc_live_blocks();
    struct sample s;
    for (uint64_t nth = 1;; nth++) {
        struct err e = {.code = ERR_OK};
        alloc_fail_at(nth, 0);
        const enum err_code code = sample_start(&s, 100, &e);
        alloc_fail_at(0, 0);
        if (code == ERR_OK)
            break;
        assert_int_equal(code, ERR_NOMEM);
        assert_int_equal(alloc_live_blocks(), blocks);
    }
    sample_done(&s);
    assert_int_equal(alloc_live_blocks(), blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sample_pick_random_settings_equal_the_slow_way),
        cmocka_unit_test(test_sample_pick_large_vocabulary_equals_the_slow_way),
        cmocka_unit_test(test_sample_pick_greedy_tie_takes_the_lowest_id),
        cmocka_unit_test(test_sample_pick_draw_is_known),
        cmocka_unit_test(test_sample_pick_top_p_is_the_shortest_prefix),
        cmocka_unit_test(test_sample_pick_neutral_filters_keep_tokens_without_weight),
        cmocka_unit_test(test_sample_pick_windows_of_penalties_differ),
        cmocka_unit_test(test_sample_pick_all_forbidden_is_refused),
        cmocka_unit_test(test_sample_pick_leaves_nothing_behind),
        cmocka_unit_test(test_sample_logprobs_equal_the_rule),
        cmocka_unit_test(test_sample_logprobs_more_than_the_vocabulary_gives_all),
        cmocka_unit_test(test_sample_start_without_memory_frees_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

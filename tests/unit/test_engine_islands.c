/* Experts in VRAM, some, all or none of them, and whatever the CPU computes beside it: the bits are
 * those of the CPU alone. The GPU is a stand-in whose operations run as late as they may. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "fake_gpu.h"
#include "forward_rig.h"

#define TINY ISLET_TEST_DIR "/models/tinymoe-q4_k_m.gguf"
#define MIB  (UINT64_C(1) << 20)

enum {
    ROWS = 8,
    STEPS = 6
};

static float *expected; /* [STEPS][ROWS][n_vocab] of the CPU alone */

/* Rates under which an expert is copied or computed by the CPU, whatever its rows. */
static const struct engine_split_rates copies = {1e15, 1e3, 1e3, 1e15, 0, 0},
                                       computes = {1e3, 1e15, 1e15, 1e15, 0, 0},
                                       mixes = {1e9, 1e9, 3e9, 1e12, 0, 0};

static void must(enum err_code code, const struct err *e)
{
    if (code != ERR_OK)
        fail_msg("%s", e->text);
}

static void rig_open(struct forward_rig *s, uint64_t arena, const struct forward_rig_gpu *gpu)
{
    struct err e = {.code = ERR_OK};
    const struct engine_forward_sizes sizes = {
        .max_rows = ROWS + 1, .max_logits = ROWS, .max_sequences = ROWS, .max_pages = 1};
    const enum err_code code = forward_rig_open(TINY, arena, NULL, &sizes, gpu, s, &e);
    must(code, &e);
}

/* Step `index`: some sequences' next tokens. */
static enum err_code step(struct forward_rig *s, uint32_t index, struct err *e)
{
    struct engine_forward *f = s->forward;
    f->n_rows = f->n_logits = index % 2 == 0 ? ROWS : 1 + index;
    for (uint32_t i = 0; i < f->n_rows; i++) {
        engine_forward_set_pages(f, i, &i, 1);
        f->token[i] = 40 + 31 * i + 97 * index;
        f->position[i] = index;
        f->logit_row[i] = f->sequence[i] = i;
    }
    return engine_forward_step(f, e);
}

static size_t vocab_bytes(const struct forward_rig *s)
{
    return s->model->shape.n_vocab * sizeof(float);
}

static struct k_counts counts_of(const struct forward_rig *s)
{
    struct k_counts counts;
    k_ops(s->gpu)->counts(s->gpu, &counts);
    return counts;
}

/* All steps, compared with the CPU's. Positions are counted by steps, so that rows of all but the
 * first see KV of all steps that had them: of those only the first ones are compared. */
static void check_steps(struct forward_rig *s)
{
    const size_t n = vocab_bytes(s);
    const uint64_t allocations = counts_of(s).allocations;
    for (uint32_t i = 0; i < STEPS; i++) {
        struct err e = {.code = ERR_OK};
        must(step(s, i, &e), &e);
        for (uint32_t row = 0; row < s->forward->n_rows; row++) {
            assert_int_equal(s->forward->logit_faults[row], 0);
            if (memcmp((char *)s->forward->logits + row * n,
                       (char *)expected + (i * ROWS + row) * n, n) != 0)
                fail_msg("step %u, row %u differs", i, row);
        }
        for (uint32_t l = 0; l < s->model->shape.n_layer; l++)
            assert_in_range(s->forward->layer_groups[l], s->model->shape.n_expert_used,
                            s->model->shape.n_expert);
    }
    assert_int_equal(counts_of(s).allocations, allocations);
}

static int set_expected(void **state)
{
    (void)state;
    struct forward_rig s;
    rig_open(&s, 0, NULL);
    const size_t n = vocab_bytes(&s);
    expected = alloc_zero(ALLOC_MISC, STEPS * ROWS, n);
    for (uint32_t i = 0; i < STEPS; i++) {
        struct err e = {.code = ERR_OK};
        must(step(&s, i, &e), &e);
        memcpy((char *)expected + i * ROWS * n, s.forward->logits, s.forward->n_rows * n);
    }
    forward_rig_close(&s);
    return 0;
}

static int free_expected(void **state)
{
    (void)state;
    alloc_free(expected);
    return 0;
}

static void gpu_rig(struct forward_rig *s, const struct fake_gpu_options *options, uint64_t arena,
                    uint64_t islands, const struct engine_split_rates *rates)
{
    struct err e = {.code = ERR_OK};
    struct forward_rig_gpu gpu = {.islands_bytes = islands, .rates = *rates};
    must(fake_gpu_open(options, &gpu.device, &e), &e);
    rig_open(s, arena, &gpu);
}

static void fill(struct forward_rig *s)
{
    enum err_code code = ERR_OK;
    while (engine_islands_idle(&s->islands, &code)) {
    }
    assert_int_equal(code, ERR_OK);
}

static void test_engine_islands_none_the_cpu_computes(void **state)
{
    (void)state;
    for (int eager = 0; eager < 2; eager++) {
        const struct fake_gpu_options o = {.eager = eager};
        struct forward_rig s;
        gpu_rig(&s, &o, 0, 0, &computes);
        check_steps(&s);
        forward_rig_close(&s);
    }
}

static void test_engine_islands_copies_for_one_use(void **state)
{
    (void)state;
    for (int eager = 0; eager < 2; eager++) {
        const struct fake_gpu_options o = {.eager = eager, .no_pinning = eager};
        struct forward_rig s;
        gpu_rig(&s, &o, 0, 0, &copies);
        check_steps(&s);
        assert_true(s.islands.counts.copies > STEPS * s.model->shape.n_layer);
        forward_rig_close(&s);
    }
}

static void test_engine_islands_all_fit_the_host_sees_no_layer(void **state)
{
    (void)state;
    const struct fake_gpu_options o = {.eager = false};
    struct forward_rig s;
    gpu_rig(&s, &o, 0, UINT64_MAX, &computes);
    fill(&s);
    for (uint32_t l = 0; l < s.model->shape.n_layer; l++)
        assert_true(engine_islands_full(&s.islands, l));
    const uint64_t copied = s.islands.counts.copies, calls = counts_of(&s).calls;
    check_steps(&s);
    /* pages, inputs, one replay, results */
    assert_in_range(counts_of(&s).calls - calls, STEPS * 6, STEPS * (ROWS + 6));
    assert_int_equal(s.islands.counts.copies, copied);
    assert_int_equal(s.hybrid.cpu_ns, 0);
    assert_int_equal(s.islands.row_hits[0], s.model->shape.n_layer * s.model->shape.n_expert_used);
    forward_rig_close(&s);
}

/* Layers are filled whole, and those that are lie between the others. */
static void test_engine_islands_for_some_layers_are_spread(void **state)
{
    (void)state;
    const struct fake_gpu_options o = {.eager = true};
    bool some = false;
    for (uint64_t islands = 0; islands <= 8 * MIB; islands += MIB) {
        struct forward_rig s;
        gpu_rig(&s, &o, 0, islands, &computes);
        fill(&s);
        const uint32_t n = s.model->shape.n_layer;
        uint32_t full = 0, neighbours = 0, parts = 0;
        for (uint32_t l = 0; l < n; l++) {
            const bool is = engine_islands_full(&s.islands, l);
            full += is;
            neighbours += is && l > 0 && engine_islands_full(&s.islands, l - 1);
            parts += !is && expert_cache_resident(s.islands.cache, l) > 0;
        }
        assert_in_range(parts, 0, 1);
        if (2 * full <= n)
            assert_int_equal(neighbours, 0);
        some |= full > 1 && 2 * full <= n;
        forward_rig_close(&s);
    }
    assert_true(some);
}

static void test_engine_islands_every_budget_gives_the_same_bits(void **state)
{
    (void)state;
    static const struct engine_split_rates *const rates[] = {&copies, &computes, &mixes};
    for (uint64_t islands = 0; islands <= 8 * MIB; islands += 2 * MIB)
        for (size_t r = 0; r < 3; r++)
            for (uint64_t arena = 0; arena <= 2 * MIB; arena += MIB) {
                const struct fake_gpu_options o = {.eager = islands % (4 * MIB) != 0,
                                                   .no_arrange = arena == MIB,
                                                   .no_bring = r == 2,
                                                   .no_pinning = arena == 2 * MIB && r == 0};
                struct forward_rig s;
                gpu_rig(&s, &o, arena, islands, rates[r]);
                if (r == 1)
                    fill(&s);
                check_steps(&s);
                forward_rig_close(&s);
            }
}

/* Layer 0 of a step, by hand: two experts, copied one after the other; in between reads find no slot,
 * so that the first copy ends. Returns whether its island was there, and then not any more. */
static bool lost_in_a_layer(struct forward_rig *s, uint32_t first, uint32_t second, uint32_t rows)
{
    struct engine_islands *is = &s->islands;
    static const uint32_t order[1 + ROWS] = {0};
    const struct k_group groups[2] = {{.expert = first, .count = 1},
                                      {.expert = second, .first = 1, .count = rows}};
    bool there = false;
    engine_experts_step(s->experts, 1);
    engine_islands_step(is, 1);
    engine_islands_layer(
        is, &(struct engine_experts_layer){.n_groups = 2, .groups = groups, .order = order});
    for (uint32_t i = 0; i < is->n_rest; i++) {
        engine_islands_begin(is);
        engine_islands_copy(is, is->rest[i]);
        engine_islands_await(is);
        engine_islands_end(is);
        s->experts->unpin(s->experts->unpin_context);
        there |= expert_cache_state(is->cache, 0, first) != EXPERT_CACHE_ABSENT;
    }
    const bool is_there = expert_cache_state(is->cache, 0, first) != EXPERT_CACHE_ABSENT;
    engine_islands_leave(is);
    if (k_ops(s->gpu)->wait(s->gpu_stream) != ERR_OK)
        fail_msg("the GPU failed");
    return there && !is_there;
}

/* An expert that was copied may be computed with until the layer's end. */
static void test_engine_islands_copied_for_a_layer_stay_while_it_is_computed(void **state)
{
    (void)state;
    const struct fake_gpu_options o = {.eager = true};
    struct forward_rig s;
    uint64_t place, seed = 1;
    gpu_rig(&s, &o, 0, 0, &copies);
    struct expert_cache *cache = s.islands.cache;
    while (engine_experts_idle(s.experts)) {
    }
    for (uint32_t i = 0; expert_cache_count(cache).used_bytes + 4 * s.islands.vram.island_bytes[0] <
                         s.islands.islands_bytes;
         i++) {
        assert_true(expert_cache_reserve(cache, 1, i, true, &place));
        expert_cache_arrived(cache, 1, i);
    }
    for (uint32_t i = 0; i < 4000; i++) {
        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
        /* those whose turn it is to ask for an island */
        const uint32_t first = (UINT32_MAX - s.islands.steps) % 8 + 8 * (seed >> 40 & 1);
        assert_false(lost_in_a_layer(&s, first, first ^ 8, 1 + (seed >> 50) % ROWS));
    }
    assert_true(expert_cache_count(cache).evictions > 0);
    forward_rig_close(&s);
}

/* With or without experts on their way to them. */
static void test_engine_islands_chunks_come_and_go_between_steps(void **state)
{
    (void)state;
    for (int eager = 0; eager < 2; eager++) {
        const struct fake_gpu_options o = {.eager = eager, .no_pinning = eager};
        struct forward_rig s;
        struct err e = {.code = ERR_OK};
        gpu_rig(&s, &o, 0, UINT64_C(2) * K_CHUNK_BYTES, eager ? &mixes : &computes);
        struct tier_vram *vram = &s.islands.vram;
        const uint64_t used = fake_gpu_used(s.gpu);
        assert_int_equal(vram->chunks, 2);
        for (int round = 0; round < 3; round++) {
            fill(&s);
            check_steps(&s);
            must(engine_islands_give_back(&s.islands, 1), &e); /* the one without experts */
            assert_int_equal(fake_gpu_used(s.gpu), used - K_CHUNK_BYTES);
            assert_true(engine_islands_full(&s.islands, 0));
            check_steps(&s);
            must(engine_islands_give_back(&s.islands, 9), &e);
            assert_int_equal(vram->chunks_held, 0);
            assert_int_equal(expert_cache_count(s.islands.cache).used_bytes, 0);
            assert_int_equal(fake_gpu_used(s.gpu), used - 2 * (uint64_t)K_CHUNK_BYTES);
            check_steps(&s);
            must(engine_islands_take_again(&s.islands, 1, &e), &e);
            assert_int_equal(vram->chunks_held, 1);
            for (uint32_t i = 0; i < 4; i++) /* and away again while experts are copied there */
                (void)engine_islands_bring(&s.islands, 0, i);
            must(engine_islands_give_back(&s.islands, 1), &e);
            must(engine_islands_take_again(&s.islands, 9, &e), &e);
            assert_int_equal(fake_gpu_used(s.gpu), used);
        }
        forward_rig_close(&s);
    }
}

static void test_engine_islands_chunks_that_are_refused_stay_away(void **state)
{
    (void)state;
    const struct fake_gpu_options o = {.eager = true};
    struct forward_rig s;
    struct err e = {.code = ERR_OK};
    gpu_rig(&s, &o, 0, UINT64_C(3) * K_CHUNK_BYTES, &computes);
    must(engine_islands_give_back(&s.islands, 3), &e);
    k_ops(s.gpu)->inject(s.gpu, &(struct k_cuda_fault){.nth = 2, .error = 2});
    assert_int_equal(engine_islands_take_again(&s.islands, 3, &e), ERR_NOMEM);
    assert_int_equal(s.islands.vram.chunks_held, 1);
    fill(&s);
    check_steps(&s);
    e.code = ERR_OK;
    must(engine_islands_take_again(&s.islands, 3, &e), &e);
    assert_int_equal(s.islands.vram.chunks_held, 3);
    forward_rig_close(&s);
}

static void test_engine_islands_of_a_device_without_ranges_stay_whole(void **state)
{
    (void)state;
    const struct fake_gpu_options o = {.eager = true, .no_ranges = true};
    struct forward_rig s;
    struct err e = {.code = ERR_OK};
    gpu_rig(&s, &o, 0, UINT64_C(2) * K_CHUNK_BYTES, &computes);
    const uint64_t used = fake_gpu_used(s.gpu);
    assert_int_equal(s.islands.vram.chunks, 0);
    must(engine_islands_give_back(&s.islands, 2), &e);
    must(engine_islands_take_again(&s.islands, 2, &e), &e);
    assert_int_equal(fake_gpu_used(s.gpu), used);
    fill(&s);
    check_steps(&s);
    forward_rig_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_islands_none_the_cpu_computes),
        cmocka_unit_test(test_engine_islands_copies_for_one_use),
        cmocka_unit_test(test_engine_islands_all_fit_the_host_sees_no_layer),
        cmocka_unit_test(test_engine_islands_for_some_layers_are_spread),
        cmocka_unit_test(test_engine_islands_every_budget_gives_the_same_bits),
        cmocka_unit_test(test_engine_islands_copied_for_a_layer_stay_while_it_is_computed),
        cmocka_unit_test(test_engine_islands_chunks_come_and_go_between_steps),
        cmocka_unit_test(test_engine_islands_chunks_that_are_refused_stay_away),
        cmocka_unit_test(test_engine_islands_of_a_device_without_ranges_stay_whole),
    };
    return cmocka_run_group_tests(tests, set_expected, free_expected);
}

/* load_expert and unload_expert: into the best tier with room, never more than a few reads at once,
 * never in place of what is worth more, in order where they concern the same expert. */
#include <errno.h>
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
#include "fake_gpu.h"
#include "fake_read.h"
#include "forward_rig.h"

#define TINY ISLET_TEST_DIR "/models/tinymoe-q4_k_m.gguf"

enum {
    ROWS = 4,
    N_EXPERT = 16,
    N_EXPERTS = 64,
    LIMIT = 100000 /* turns: none of these takes more */
};

struct rig {
    struct forward_rig s;
    struct fake_read fake;
    struct engine_commands c;
    struct engine_commands_tiers tiers;
    struct engine_command *ended[ENGINE_COMMANDS_MAX];
    uint32_t n_ended, n_notified, most_loading;
    uint64_t live;
};

static struct rig r;

static void must(enum err_code code, const struct err *e)
{
    if (code != ERR_OK)
        fail_msg("%s", e->text);
}

static void on_notify(void *context)
{
    ((struct rig *)context)->n_notified++;
}

/* arena: 0: room for all. islands: UINT64_MAX: room for all; 0: no GPU. */
static void rig_open(uint64_t arena, uint64_t islands)
{
    struct err e = {.code = ERR_OK};
    const struct engine_forward_sizes sizes = {
        .max_rows = ROWS, .max_logits = ROWS, .max_sequences = ROWS, .max_pages = 1};
    const struct fake_gpu_options options = {.memory = 0};
    struct forward_rig_gpu gpu = {.islands_bytes = islands, .rates = {1e9, 1e9, 3e9, 1e12, 0, 0}};
    memset(&r, 0, sizeof(r));
    r.live = alloc_live_blocks();
    fake_read_init(&r.fake);
    if (islands > 0)
        must(fake_gpu_open(&options, &gpu.device, &e), &e);
    must(forward_rig_open(TINY, arena, islands > 0 ? NULL : &r.fake.source, &sizes,
                          islands > 0 ? &gpu : NULL, &r.s, &e),
         &e);
    must(engine_commands_start(&r.c, on_notify, &r, &e), &e);
    assert_int_equal(r.s.experts->n_experts, N_EXPERTS);
    r.tiers = (struct engine_commands_tiers){.experts = r.s.experts,
                                             .islands = islands > 0 ? &r.s.islands : NULL};
}

static void forget_ended(void)
{
    for (uint32_t i = 0; i < r.n_ended; i++)
        alloc_free(r.ended[i]);
    r.n_ended = 0;
}

static void rig_close(void)
{
    forget_ended();
    engine_commands_done(&r.c);
    forward_rig_close(&r.s);
    assert_int_equal(alloc_live_blocks(), r.live);
}

static struct engine_command *give(bool unload, struct proto_load_expert expert)
{
    struct err e = {.code = ERR_OK};
    struct engine_command *m = alloc_zero(ALLOC_REQUEST, 1, sizeof(*m));
    assert_non_null(m);
    m->unload = unload;
    m->expert = expert;
    must(engine_commands_submit(&r.c, m, &e), &e);
    return m;
}

static struct engine_command *load(uint32_t id)
{
    return give(false,
                (struct proto_load_expert){.expert_id = id, .quant_type = PROTO_ANY_QUANT_TYPE});
}

static struct engine_command *unload(uint32_t id)
{
    return give(true,
                (struct proto_load_expert){.expert_id = id, .quant_type = PROTO_ANY_QUANT_TYPE});
}

/* One turn of the engine. */
static bool turn(bool idle)
{
    enum err_code code = ERR_OK;
    engine_commands_take(&r.c);
    const bool more = engine_commands_turn(&r.c, &r.tiers, idle, &code);
    assert_int_equal(code, ERR_OK);
    engine_commands_flush(&r.c);
    for (struct engine_command *m; (m = engine_commands_next(&r.c)) != NULL;)
        r.ended[r.n_ended++] = m;
    const uint32_t loading = expert_cache_count(r.s.experts->cache).loading;
    r.most_loading = loading > r.most_loading ? loading : r.most_loading;
    return more;
}

/* Turns of an idle engine until nothing more can be done. */
static void rest(void)
{
    for (uint32_t i = 0; turn(true); i++)
        assert_true(i < LIMIT);
}

static void expect_tier(uint32_t i, const struct engine_command *m, enum proto_tier tier)
{
    assert_true(i < r.n_ended);
    assert_ptr_equal(r.ended[i], m);
    if (m->error.code != ERR_OK)
        fail_msg("%s", m->error.text);
    assert_int_equal(m->tier, tier);
}

static enum expert_cache_state state_of(uint32_t id)
{
    return expert_cache_state(r.s.experts->cache, id / N_EXPERT, id % N_EXPERT);
}

static enum expert_cache_state island_of(uint32_t id)
{
    return expert_cache_state(r.s.islands.cache, id / N_EXPERT, id % N_EXPERT);
}

static void step(uint32_t token)
{
    struct engine_forward *f = r.s.forward;
    struct err e = {.code = ERR_OK};
    f->n_rows = f->n_logits = ROWS;
    for (uint32_t i = 0; i < ROWS; i++) {
        engine_forward_set_pages(f, i, &i, 1);
        f->token[i] = token + 31 * i;
        f->position[i] = 0;
        f->logit_row[i] = f->sequence[i] = i;
    }
    must(engine_forward_step(f, &e), &e);
}

/* ---- one expert ---- */

static void test_engine_commands_load_brings_an_absent_expert_to_ram(void **state)
{
    (void)state;
    rig_open(0, 0);
    const struct engine_command *m = load(37);
    assert_int_equal(state_of(37), EXPERT_CACHE_ABSENT);
    rest();
    expect_tier(0, m, PROTO_TIER_RAM);
    assert_int_equal(state_of(37), EXPERT_CACHE_READY);
    assert_int_equal(expert_cache_count(r.s.experts->cache).resident, 1);
    const uint64_t reads = r.fake.n_reads;
    m = load(37); /* again: it is there */
    assert_false(turn(false) && turn(false));
    expect_tier(1, m, PROTO_TIER_RAM);
    assert_int_equal(r.fake.n_reads, reads);
    assert_int_equal(r.n_notified, 2);
    rig_close();
}

static void test_engine_commands_load_between_steps_waits_for_nothing(void **state)
{
    (void)state;
    rig_open(0, 0);
    r.fake.idle_takes = 3;
    const struct engine_command *m = load(5);
    assert_true(turn(false));
    for (int i = 0; i < 3; i++) {
        assert_false(turn(false));
        assert_int_equal(state_of(5), EXPERT_CACHE_LOADING);
        engine_experts_poll(r.s.experts); /* as a step does */
    }
    while (state_of(5) == EXPERT_CACHE_LOADING)
        engine_experts_poll(r.s.experts);
    assert_int_equal(r.n_ended, 0);
    assert_true(turn(false));
    expect_tier(0, m, PROTO_TIER_RAM);
    rig_close();
}

static void test_engine_commands_unload_forgets_and_the_answers_stay(void **state)
{
    (void)state;
    rig_open(0, 0);
    step(40);
    const size_t bytes = ROWS * r.s.model->shape.n_vocab * sizeof(float);
    float *before = alloc_get(ALLOC_MISC, bytes);
    assert_non_null(before);
    memcpy(before, r.s.forward->logits, bytes);
    const uint32_t resident = expert_cache_count(r.s.experts->cache).resident;
    const uint64_t evictions = expert_cache_count(r.s.experts->cache).evictions;
    uint32_t n = 0;
    for (uint32_t id = 0; id < N_EXPERTS; id++) {
        n += state_of(id) == EXPERT_CACHE_READY;
        (void)unload(id);
    }
    assert_int_equal(n, resident);
    rest();
    assert_int_equal(r.n_ended, N_EXPERTS); /* absent ones too */
    for (uint32_t id = 0; id < N_EXPERTS; id++)
        expect_tier(id, r.ended[id], PROTO_TIER_SSD);
    const struct expert_cache_counts counts = expert_cache_count(r.s.experts->cache);
    assert_int_equal(counts.resident, 0);
    assert_int_equal(counts.used_bytes, 0);
    assert_int_equal(counts.evictions, evictions);
    step(40);
    assert_memory_equal(before, r.s.forward->logits, bytes);
    assert_int_equal(expert_cache_count(r.s.experts->cache).resident, resident);
    alloc_free(before);
    rig_close();
}

static void test_engine_commands_unload_waits_for_a_pin(void **state)
{
    (void)state;
    rig_open(0, 0);
    (void)load(18);
    rest();
    expert_cache_pin(r.s.experts->cache, 1, 2);
    const struct engine_command *m = unload(18);
    rest();
    assert_int_equal(r.n_ended, 1);
    assert_int_equal(state_of(18), EXPERT_CACHE_READY);
    expert_cache_unpin(r.s.experts->cache, 1, 2);
    rest();
    expect_tier(1, m, PROTO_TIER_SSD);
    assert_int_equal(state_of(18), EXPERT_CACHE_ABSENT);
    rig_close();
}

static void test_engine_commands_for_one_expert_keep_their_order(void **state)
{
    (void)state;
    rig_open(0, 0);
    const struct engine_command *m[] = {unload(9), load(9), load(9), unload(9), load(9)};
    rest();
    assert_int_equal(r.n_ended, 5);
    for (uint32_t i = 0; i < 5; i++)
        expect_tier(i, m[i], m[i]->unload ? PROTO_TIER_SSD : PROTO_TIER_RAM);
    assert_int_equal(state_of(9), EXPERT_CACHE_READY);
    rig_close();
}

/* ---- what is refused ---- */

static void expect_refusal(struct proto_load_expert expert, bool unloads, const char *text)
{
    (void)give(unloads, expert);
    rest();
    assert_int_equal(r.n_ended, 1);
    assert_int_equal(r.ended[0]->error.code, ERR_ARGUMENT);
    assert_string_equal(r.ended[0]->error.text, text);
    forget_ended();
}

static void test_engine_commands_that_do_not_match_the_file_say_its_values(void **state)
{
    (void)state;
    char text[240];
    rig_open(0, 0);
    const unsigned type = (unsigned)r.s.model->tensors.layers[1].gate->type;
    struct tier_ssd_part parts[TIER_SSD_PARTS];
    model_expert_parts(r.s.model, 1, 3, 0, parts);
    const uint32_t bytes = (uint32_t)(parts[0].bytes + parts[1].bytes + parts[2].bytes);
    snprintf(text, sizeof(text),
             "load_expert: expert 19 has quant_type %u and weight_size %u in the file; %u and 0 "
             "were given (65535 and 0: any)",
             type, bytes, type + 1);
    expect_refusal((struct proto_load_expert){.expert_id = 19, .quant_type = (uint16_t)(type + 1)},
                   false, text);
    snprintf(text, sizeof(text),
             "load_expert: expert 19 has quant_type %u and weight_size %u in the file; 65535 and "
             "%u were given (65535 and 0: any)",
             type, bytes, bytes - 1);
    expect_refusal(
        (struct proto_load_expert){.expert_id = 19, .quant_type = 0xFFFF, .weight_size = bytes - 1},
        false, text);
    expect_refusal((struct proto_load_expert){.expert_id = 64, .quant_type = 0xFFFF}, false,
                   "load_expert: expert_id is 64; the model has 4 layers of 16 experts, ids end at "
                   "63");
    expect_refusal((struct proto_load_expert){.expert_id = UINT32_MAX, .quant_type = 0xFFFF}, true,
                   "unload_expert: expert_id is 4294967295; the model has 4 layers of 16 experts, "
                   "ids end at 63");
    const struct engine_command *m =
        give(false, (struct proto_load_expert){
                        .expert_id = 19, .quant_type = (uint16_t)type, .weight_size = bytes});
    rest();
    expect_tier(0, m, PROTO_TIER_RAM);
    rig_close();
}

static void test_engine_commands_load_that_cannot_be_read_says_what_and_why(void **state)
{
    (void)state;
    rig_open(0, 0);
    r.fake.fail_nth = 1;
    r.fake.fail_forever = true;
    r.fake.fail_errno = EIO;
    (void)load(19);
    rest();
    assert_int_equal(r.n_ended, 1);
    const struct err *e = &r.ended[0]->error;
    assert_int_equal(e->code, ERR_IO);
    assert_non_null(strstr(e->text, "tinymoe-q4_k_m.gguf"));
    assert_non_null(strstr(e->text, "expert 3 of tensor blk.1.ffn_"));
    assert_non_null(strstr(e->text, "Input/output error"));
    assert_int_equal(state_of(19), EXPERT_CACHE_ABSENT);
    r.fake.fail_nth = 0; /* well again */
    r.fake.fail_forever = false;
    const struct engine_command *m = load(19);
    rest();
    expect_tier(1, m, PROTO_TIER_RAM);
    rig_close();
}

/* ---- many ---- */

static void test_engine_commands_all_experts_at_once_a_few_reads_at_a_time(void **state)
{
    (void)state;
    rig_open(0, 0);
    r.fake.seed = 7;
    for (uint32_t i = 0; i < 8 * N_EXPERTS; i++)
        (void)load(i * 29 % N_EXPERTS);
    rest();
    assert_int_equal(r.n_ended, 8 * N_EXPERTS);
    for (uint32_t i = 0; i < r.n_ended; i++)
        expect_tier(i, r.ended[i], PROTO_TIER_RAM);
    assert_int_equal(expert_cache_count(r.s.experts->cache).resident, N_EXPERTS);
    assert_in_range(r.most_loading, 2, ENGINE_COMMANDS_UNDER_WAY);
    rig_close();
}

static void test_engine_commands_resident_experts_are_answered_past_those_that_wait(void **state)
{
    (void)state;
    rig_open(0, 0);
    (void)load(50);
    rest();
    for (uint32_t id = 0; id < 20; id++)
        (void)load(id);
    const struct engine_command *m = load(50);
    assert_true(turn(false));
    assert_int_equal(r.n_ended, 2);
    expect_tier(1, m, PROTO_TIER_RAM);
    rest();
    assert_int_equal(r.n_ended, 22);
    rig_close();
}

static void test_engine_commands_no_room_is_said_and_what_is_used_stays(void **state)
{
    (void)state;
    bool used[N_EXPERTS];
    uint32_t n_loaded = 0, n_none = 0;
    rig_open(UINT64_C(1) << 20, 0);
    const struct expert_cache *cache = r.s.experts->cache;
    for (int i = 0; i < 6; i++)
        step(40);
    for (uint32_t id = 0; id < N_EXPERTS; id++)
        used[id] = state_of(id) == EXPERT_CACHE_READY;
    const uint32_t resident = expert_cache_count(cache).resident;
    assert_in_range(resident, 2, N_EXPERTS / 2);
    for (uint32_t id = 0; id < N_EXPERTS; id++)
        if (!used[id])
            (void)load(id);
    const uint32_t n = N_EXPERTS - resident;
    for (uint32_t i = 0; r.n_ended < n; i++) {
        assert_true(i < LIMIT);
        (void)turn(true);
        assert_true(expert_cache_count(cache).used_bytes <= r.s.experts->ram.bytes);
    }
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(r.ended[i]->error.code, ERR_OK);
        n_loaded += r.ended[i]->tier == PROTO_TIER_RAM;
        n_none += r.ended[i]->tier == PROTO_TIER_SSD;
    }
    assert_int_equal(n_loaded + n_none, n);
    assert_true(n_none > 0);
    uint32_t kept = 0;
    for (uint32_t id = 0; id < N_EXPERTS; id++)
        kept += used[id] && state_of(id) == EXPERT_CACHE_READY;
    assert_true(kept > 0);
    rig_close();
}

static void test_engine_commands_refuse_more_than_their_most(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    struct engine_command more = {.unload = true};
    rig_open(0, 0);
    for (uint32_t i = 0; i < ENGINE_COMMANDS_MAX; i++)
        (void)unload(i % N_EXPERTS);
    assert_int_equal(engine_commands_submit(&r.c, &more, &e), ERR_BUSY);
    assert_string_equal(e.text, "4096 commands about experts wait; the limit is 4096");
    rest();
    assert_int_equal(r.n_ended, ENGINE_COMMANDS_MAX);
    forget_ended();
    (void)unload(1);
    rest();
    assert_int_equal(r.n_ended, 1);
    rig_close();
}

/* ---- ends ---- */

static void test_engine_commands_cancelled_ones_end_the_others_go_on(void **state)
{
    (void)state;
    struct engine_command *m[8];
    rig_open(0, 0);
    for (uint32_t i = 0; i < 8; i++)
        m[i] = load(i);
    assert_true(turn(false));
    assert_int_equal(r.n_ended, 0);
    engine_commands_cancel(&r.c, m[1]); /* under way */
    engine_commands_cancel(&r.c, m[6]); /* waits */
    (void)turn(false);
    assert_int_equal(r.n_ended, 2);
    for (int i = 0; i < 2; i++) {
        assert_true(r.ended[i] == m[1] || r.ended[i] == m[6]);
        assert_int_equal(r.ended[i]->error.code, ERR_CANCELLED);
    }
    rest();
    assert_int_equal(r.n_ended, 8);
    for (uint32_t i = 2; i < 8; i++)
        expect_tier(i, r.ended[i], PROTO_TIER_RAM);
    assert_int_equal(state_of(6), EXPERT_CACHE_ABSENT);
    rig_close();
}

static void test_engine_commands_refused_ones_end_what_is_under_way_goes_on(void **state)
{
    (void)state;
    const struct err cause = {.code = ERR_BUSY, .text = "draining"};
    rig_open(0, 0);
    for (uint32_t i = 0; i < 10; i++)
        (void)load(i);
    assert_true(turn(false));
    engine_commands_refuse(&r.c, &cause);
    rest();
    assert_int_equal(r.n_ended, 10);
    for (uint32_t i = 0; i < 10; i++) {
        const bool begun = r.ended[i]->expert.expert_id < ENGINE_COMMANDS_UNDER_WAY;
        assert_int_equal(r.ended[i]->error.code, begun ? ERR_OK : ERR_BUSY);
    }
    rig_close();
}

/* A model that went and does not come again: nobody waits for ever. */
static void test_engine_commands_under_way_when_the_tiers_go_can_be_refused(void **state)
{
    (void)state;
    const struct err cause = {.code = ERR_BUSY, .text = "the model is not loaded"};
    rig_open(0, 0);
    for (uint32_t i = 0; i < 10; i++)
        (void)load(i);
    assert_true(turn(false));
    assert_int_equal(r.n_ended, 0);
    engine_commands_leave(&r.c);
    engine_commands_refuse(&r.c, &cause);
    (void)turn(false);
    assert_int_equal(r.n_ended, 10);
    for (uint32_t i = 0; i < 10; i++) {
        assert_int_equal(r.ended[i]->expert.expert_id, i);
        assert_int_equal(r.ended[i]->error.code, ERR_BUSY);
    }
    rig_close();
}

static void test_engine_commands_under_way_when_the_tiers_go_are_begun_again_in_order(void **state)
{
    (void)state;
    rig_open(0, 0);
    const struct engine_command *m[] = {load(9), unload(9), load(9), unload(9)};
    (void)load(3);
    assert_true(turn(false));
    engine_commands_leave(&r.c);
    rest();
    assert_int_equal(r.n_ended, 5);
    for (uint32_t i = 0, k = 0; i < 5; i++) {
        assert_int_equal(r.ended[i]->error.code, ERR_OK);
        if (r.ended[i]->expert.expert_id == 9)
            assert_ptr_equal(r.ended[i], m[k++]);
    }
    assert_int_equal(state_of(9), EXPERT_CACHE_ABSENT);
    assert_int_equal(state_of(3), EXPERT_CACHE_READY);
    rig_close();
}

static void test_engine_commands_that_are_never_taken_back_are_freed(void **state)
{
    (void)state;
    rig_open(0, 0);
    for (uint32_t i = 0; i < 10; i++)
        (void)load(i);
    enum err_code code;
    engine_commands_take(&r.c);
    (void)engine_commands_turn(&r.c, &r.tiers, true, &code);
    (void)engine_commands_turn(&r.c, &r.tiers, true, &code);
    engine_commands_flush(&r.c);
    (void)engine_commands_turn(&r.c, &r.tiers, true, &code);
    (void)unload(3);
    rig_close();
}

/* ---- a GPU ---- */

static void test_engine_commands_load_goes_to_vram_and_unload_takes_it_from_both(void **state)
{
    (void)state;
    rig_open(0, UINT64_MAX);
    const struct engine_command *m = load(33);
    rest();
    expect_tier(0, m, PROTO_TIER_VRAM);
    assert_int_equal(island_of(33), EXPERT_CACHE_READY);
    m = load(33);
    rest();
    expect_tier(1, m, PROTO_TIER_VRAM);
    m = unload(33);
    rest();
    expect_tier(2, m, PROTO_TIER_SSD);
    assert_int_equal(island_of(33), EXPERT_CACHE_ABSENT);
    assert_int_equal(state_of(33), EXPERT_CACHE_ABSENT);
    rig_close();
}

/* All experts in VRAM through a RAM that holds few, the layers are computed whole by the GPU;
 * without some of them they are not. The bits are the same. */
static void test_engine_commands_bits_do_not_depend_on_what_was_brought(void **state)
{
    (void)state;
    rig_open(UINT64_C(1) << 20, UINT64_MAX);
    const size_t bytes = ROWS * r.s.model->shape.n_vocab * sizeof(float);
    float *before = alloc_get(ALLOC_MISC, bytes);
    assert_non_null(before);
    step(40);
    memcpy(before, r.s.forward->logits, bytes);
    for (uint32_t id = 0; id < N_EXPERTS; id++)
        (void)load(id);
    rest();
    assert_int_equal(r.n_ended, N_EXPERTS);
    for (uint32_t i = 0; i < N_EXPERTS; i++)
        expect_tier(i, r.ended[i], PROTO_TIER_VRAM);
    assert_true(engine_islands_full(&r.s.islands, 0) && engine_islands_full(&r.s.islands, 3));
    step(40);
    assert_memory_equal(before, r.s.forward->logits, bytes);
    for (uint32_t id = 1; id < N_EXPERTS; id += 3)
        (void)unload(id);
    rest();
    assert_false(engine_islands_full(&r.s.islands, 0));
    step(40);
    assert_memory_equal(before, r.s.forward->logits, bytes);
    for (uint32_t id = 0; id < N_EXPERTS; id++) { /* between steps, without waiting */
        (void)load(id);
        (void)turn(false);
        step(40);
        assert_memory_equal(before, r.s.forward->logits, bytes);
    }
    rest();
    alloc_free(before);
    rig_close();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_commands_load_brings_an_absent_expert_to_ram),
        cmocka_unit_test(test_engine_commands_load_between_steps_waits_for_nothing),
        cmocka_unit_test(test_engine_commands_unload_forgets_and_the_answers_stay),
        cmocka_unit_test(test_engine_commands_unload_waits_for_a_pin),
        cmocka_unit_test(test_engine_commands_for_one_expert_keep_their_order),
        cmocka_unit_test(test_engine_commands_that_do_not_match_the_file_say_its_values),
        cmocka_unit_test(test_engine_commands_load_that_cannot_be_read_says_what_and_why),
        cmocka_unit_test(test_engine_commands_all_experts_at_once_a_few_reads_at_a_time),
        cmocka_unit_test(test_engine_commands_resident_experts_are_answered_past_those_that_wait),
        cmocka_unit_test(test_engine_commands_no_room_is_said_and_what_is_used_stays),
        cmocka_unit_test(test_engine_commands_refuse_more_than_their_most),
        cmocka_unit_test(test_engine_commands_cancelled_ones_end_the_others_go_on),
        cmocka_unit_test(test_engine_commands_refused_ones_end_what_is_under_way_goes_on),
        cmocka_unit_test(test_engine_commands_under_way_when_the_tiers_go_can_be_refused),
        cmocka_unit_test(test_engine_commands_under_way_when_the_tiers_go_are_begun_again_in_order),
        cmocka_unit_test(test_engine_commands_that_are_never_taken_back_are_freed),
        cmocka_unit_test(test_engine_commands_load_goes_to_vram_and_unload_takes_it_from_both),
        cmocka_unit_test(test_engine_commands_bits_do_not_depend_on_what_was_brought),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

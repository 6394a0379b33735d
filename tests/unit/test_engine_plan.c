/* A plan says what a start then takes, and the least budget is the least. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "engine_plan.h"
#include "engine_rig.h"
#include "fake_gpu.h"
#include "units.h"

#define TINY ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf"
#define MIB  (UINT64_C(1) << 20)

static struct k_device *device;
static struct engine_plan_machine machine;
static struct model *model;

static int open_model(void **state)
{
    (void)state;
    struct err e = {0};
    assert_int_equal(k_open(K_LEVEL_REFERENCE, 1, &device, &e), ERR_OK);
    machine.cpu = device;
    assert_int_equal(
        model_open(&(struct model_loading){.path = TINY, .device = device}, &model, &e), ERR_OK);
    return 0;
}

static int close_model(void **state)
{
    (void)state;
    model_close(model);
    k_close(device);
    return 0;
}

static struct engine_config config_of(uint64_t ram, uint64_t kv)
{
    struct engine_config c = engine_rig_config(TINY);
    c.cpu_level = K_LEVEL_REFERENCE;
    c.threads = 1;
    c.ram_budget = ram;
    c.kv_budget = kv;
    return c;
}

static struct engine_plan plan_of(const struct engine_config *c)
{
    struct engine_plan plan;
    struct err e = {0};
    if (engine_plan_make(c, &machine, model, &plan, &e) != ERR_OK)
        fail_msg("%s", e.text);
    return plan;
}

static void test_engine_plan_is_what_a_started_engine_takes(void **state)
{
    (void)state;
    static const struct {
        uint64_t ram, kv;
    } budgets[] = {{19 * MIB, 0}, {24 * MIB, MIB}, {64 * MIB, 0}, {64 * MIB, 3 * MIB + 1}};
    for (size_t i = 0; i < sizeof(budgets) / sizeof(budgets[0]); i++) {
        static struct engine_rig rig;
        static struct engine_snapshot s;
        const struct engine_config c = config_of(budgets[i].ram, budgets[i].kv);
        const struct engine_plan plan = plan_of(&c);
        engine_rig_start(&rig, &c);
        assert_int_equal(engine_rig_wait_loaded(&rig), PROTO_SERVING);
        do
            engine_get_snapshot(rig.engine, &s);
        while (s.status.ram_slots_bytes == 0);
        assert_int_equal(s.status.ram_slots_bytes, plan.budget.arena);
        assert_int_equal(s.status.ram_budget_bytes, plan.budget.total);
        assert_int_equal(s.status.kv_pages_total, plan.n_pages);
        assert_int_equal(s.status.kv_page_bytes, plan.page_bytes);
        assert_int_equal(s.status.work_bytes, plan.needs.work);
        assert_int_equal(s.status.weights_bytes, plan.needs.weights);
        engine_rig_stop(&rig);
    }
}

static void test_engine_plan_least_works_and_one_mib_less_does_not(void **state)
{
    (void)state;
    static const uint64_t kv[] = {0, MIB, 16 * MIB};
    for (size_t i = 0; i < sizeof(kv) / sizeof(kv[0]); i++) {
        struct engine_plan least, plan;
        struct err e = {0};
        struct engine_config c = config_of(0, kv[i]);
        assert_int_equal(engine_plan_least(&c, &machine, model, 1, &least, &e), ERR_OK);
        c.ram_budget = least.needs.budget;
        plan = plan_of(&c);
        assert_int_equal(plan.budget.total, least.budget.total);
        c.ram_budget -= MIB;
        assert_int_equal(engine_plan_make(&c, &machine, model, &plan, &e), ERR_NOMEM);
    }
}

static void test_engine_plan_least_for_slots_has_them(void **state)
{
    (void)state;
    const struct engine_config c = config_of(0, 0);
    struct err e = {0};
    uint64_t before = 0;
    for (uint64_t slots = MIB; slots < model->experts_bytes + 8 * MIB; slots += MIB) {
        struct engine_plan plan;
        assert_int_equal(engine_plan_least(&c, &machine, model, slots, &plan, &e), ERR_OK);
        assert_true(plan.budget.arena >= slots || plan.budget.all_resident);
        assert_true(plan.budget.total <= plan.needs.budget);
        assert_true(plan.needs.budget >= before);
        before = plan.needs.budget;
    }
}

/* The figure before " is the least that works", as a user would type it in. */
static uint64_t least_of(const char *text)
{
    char figure[32];
    uint64_t bytes = 0;
    struct err e = {0};
    const char *end = strstr(text, " is the least that works");
    assert_non_null(end);
    const char *start = end;
    while (start > text && strchr("0123456789. KMGiB", start[-1]) != NULL)
        start--;
    snprintf(figure, sizeof(figure), "%.*s", (int)(end - start), start + strspn(start, " "));
    if (units_parse_bytes(figure, &bytes, &e) != ERR_OK)
        fail_msg("%s", e.text);
    return bytes;
}

/* Its fractions of a MiB are rounded, but never down. */
static void test_engine_plan_refusal_of_set_kv_names_a_figure_that_works(void **state)
{
    (void)state;
    for (uint64_t kv = MIB; kv < 3 * MIB; kv += 12345) {
        struct engine_config c = config_of(MIB, kv);
        struct engine_plan plan;
        struct err e = {0};
        assert_int_equal(engine_plan_make(&c, &machine, model, &plan, &e), ERR_NOMEM);
        c.ram_budget = least_of(e.text);
        (void)plan_of(&c);
    }
}

static void test_engine_plan_refusal_names_a_budget_that_works(void **state)
{
    (void)state;
    struct engine_config c = config_of(MIB, 0);
    for (; c.ram_budget < 64 * MIB; c.ram_budget += MIB / 4) {
        struct engine_plan plan;
        struct err e = {0};
        if (engine_plan_make(&c, &machine, model, &plan, &e) == ERR_OK)
            break;
        assert_int_equal(e.code, ERR_NOMEM);
        assert_non_null(strstr(e.text, "is the least that works; raise it, or lower "
                                       "memory.kv_budget or batch.prefill_chunk"));
        assert_true(plan.needs.least > c.ram_budget);
        struct engine_config better = c;
        better.ram_budget = plan.needs.least;
        (void)plan_of(&better);
        better.ram_budget = least_of(e.text);
        (void)plan_of(&better);
    }
    assert_true(c.ram_budget < 64 * MIB);
}

/* What a text says of the least budget is a budget that works, with a GPU too. */
static void test_engine_plan_refusal_of_a_gpu_names_a_budget_that_works(void **state)
{
    (void)state;
    struct k_device *gpu = NULL;
    struct err e = {0};
    assert_int_equal(fake_gpu_open(&(struct fake_gpu_options){.memory = 4096 * MIB}, &gpu, &e),
                     ERR_OK);
    const struct engine_plan_machine both = {
        .cpu = device, .gpu = gpu, .vram_free = 4096 * MIB, .vram_total = 4096 * MIB};
    unsigned refused = 0;
    for (uint64_t kv = 0; kv <= 4 * MIB; kv += 2 * MIB)
        for (uint64_t vram = MIB; vram < 512 * MIB; vram += 3 * MIB + 12345) {
            struct engine_config c = config_of(64 * MIB, kv);
            struct engine_plan plan;
            c.vram_budget = vram;
            e = (struct err){0};
            if (engine_plan_make(&c, &both, model, &plan, &e) == ERR_OK)
                continue;
            c.vram_budget = least_of(e.text);
            assert_true(c.vram_budget > vram);
            e = (struct err){0};
            if (engine_plan_make(&c, &both, model, &plan, &e) != ERR_OK)
                fail_msg("at %llu: %s", (unsigned long long)vram, e.text);
            refused++;
        }
    assert_true(refused > 10);
    k_close(gpu);
}

static void test_engine_plan_more_than_available_is_refused(void **state)
{
    (void)state;
    struct engine_plan plan;
    struct err e = {0};
    const struct engine_config c = config_of(64 * MIB, 0);
    const struct engine_plan_machine small = {.cpu = device, .available = 20 * MIB};
    assert_int_equal(engine_plan_make(&c, &small, model, &plan, &e), ERR_NOMEM);
    assert_non_null(strstr(e.text, "20.00 MiB available"));
}

static void test_engine_plan_token_is_the_slices_of_its_experts(void **state)
{
    (void)state;
    /* 4 layers, top-4, and experts of 3 x 128 x 512 weights in Q8_0 (34 bytes for 32) */
    assert_int_equal(model->shape.n_layer * model->shape.n_expert_used, 16);
    assert_int_equal(engine_plan_token_bytes(model),
                     16u * (3u * model->shape.n_embd * model->shape.n_ff_expert / 32 * 34));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_plan_is_what_a_started_engine_takes),
        cmocka_unit_test(test_engine_plan_least_works_and_one_mib_less_does_not),
        cmocka_unit_test(test_engine_plan_least_for_slots_has_them),
        cmocka_unit_test(test_engine_plan_refusal_of_set_kv_names_a_figure_that_works),
        cmocka_unit_test(test_engine_plan_refusal_names_a_budget_that_works),
        cmocka_unit_test(test_engine_plan_refusal_of_a_gpu_names_a_budget_that_works),
        cmocka_unit_test(test_engine_plan_more_than_available_is_refused),
        cmocka_unit_test(test_engine_plan_token_is_the_slices_of_its_experts),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "engine_rig.h"
#include "mkmodel_keys.h"
#include "mkmodel_router.h"
#include "mkmodel_write.h"

enum {
    N_PROMPT = 512,
    ASIDE = 256 /* elements of the residual that the routers own */
};

static char root[64], out[128];
static struct engine_rig rig;

static struct mkmodel_options small(void)
{
    return (struct mkmodel_options){.arch = "qwen3moe",
                                    .out = out,
                                    .layers = 4,
                                    .hidden = 512,
                                    .experts = 64,
                                    .ff = 32,
                                    .top_k = 4,
                                    .heads = 4,
                                    .head_dim = 128,
                                    .kv_heads = 2,
                                    .vocab = 4000,
                                    .context = 2048,
                                    .seed = 5,
                                    .threads = 2,
                                    .format = K_Q8_0,
                                    .emb_std = 1,
                                    .res_std = 0.012,
                                    .set_router = true};
}

static int make_root(void **state)
{
    (void)state;
    snprintf(root, sizeof(root), "/tmp/islet-test-XXXXXX");
    if (mkdtemp(root) == NULL)
        return 1;
    snprintf(out, sizeof(out), "%s/m.gguf", root);
    return 0;
}

static int drop_root(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", root);
    return system(command) != 0;
}

/* ---- what is asked for ----------------------------------------------------------------------- */

static struct mkmodel_router_figures figures_of(const struct mkmodel_options *o)
{
    struct mkmodel_router *router = NULL;
    struct err e = {.code = ERR_OK};
    if (mkmodel_router_new(o, &router, &e) != ERR_OK)
        fail_msg("%s", e.text);
    const struct mkmodel_router_figures f = mkmodel_router_figures(router);
    mkmodel_router_free(router);
    return f;
}

static void near(double value, double wanted, double slack)
{
    if (!(fabs(value - wanted) <= slack))
        fail_msg("%g; wanted %g +- %g", value, wanted, slack);
}

static void test_mkmodel_router_even_and_independent_shares_by_chance(void **state)
{
    (void)state;
    const struct mkmodel_options o = small();
    const struct mkmodel_router_figures f = figures_of(&o);
    near(f.base, 4.0 / 64, 1e-6);
    near(f.locality, 4.0 / 64, 1e-6);
    near(f.window, 15, 10);
}

static void test_mkmodel_router_popularity_alone_makes_locality(void **state)
{
    (void)state;
    struct mkmodel_options o = small();
    double sum = 0, squares = 0;
    for (int r = 1; r <= 64; r++)
        sum += 1.0 / sqrt(r);
    for (int r = 1; r <= 64; r++)
        squares += pow(4.0 / sqrt(r) / sum, 2);
    o.zipf = 0.5;
    near(figures_of(&o).base, squares / 4, 1e-5);
}

static void test_mkmodel_router_locality_is_made_or_refused(void **state)
{
    (void)state;
    struct mkmodel_options o = small();
    struct mkmodel_router *router = NULL;
    struct err e = {.code = ERR_OK};
    for (o.topics = 0; o.topics <= 8; o.topics += 4)
        for (o.locality = 0.3; o.locality < 0.62; o.locality += 0.1)
            near(figures_of(&o).locality, o.locality, 1e-6);
    o.locality = 0.99;
    assert_int_equal(mkmodel_router_new(&o, &router, &e), ERR_ARGUMENT);
    assert_non_null(strstr(e.text, "locality 0.990: 0."));
}

static void test_mkmodel_router_shape_without_room_is_refused(void **state)
{
    (void)state;
    struct mkmodel_options o = small();
    struct mkmodel_router *router = NULL;
    struct err e = {.code = ERR_OK};
    o.hidden = 256;
    assert_int_equal(mkmodel_router_new(&o, &router, &e), ERR_ARGUMENT);
    assert_non_null(strstr(e.text, "hidden 256"));
}

static void test_mkmodel_router_lack_of_memory_leaks_nothing(void **state)
{
    (void)state;
    const struct mkmodel_options o = small();
    const uint64_t live = alloc_live_blocks();
    for (uint64_t nth = 1;; nth++) {
        struct err e = {.code = ERR_OK};
        struct mkmodel_router *router = NULL;
        alloc_fail_at(nth, 0);
        const enum err_code rc = mkmodel_router_new(&o, &router, &e);
        alloc_fail_at(0, 0);
        mkmodel_router_free(router);
        assert_int_equal(alloc_live_blocks(), live);
        if (rc == ERR_OK)
            break;
        assert_int_equal(rc, ERR_NOMEM);
    }
}

/* ---- what is written ------------------------------------------------------------------------- */

/* The values of a tensor's row; rows of all experts counted through. */
static void row_of(const struct mkmodel_plan *p, const struct mkmodel_router *router,
                   enum mkmodel_role role, uint32_t layer, uint64_t row, float *ret)
{
    for (size_t i = 0; i < p->n; i++) {
        const struct mkmodel_tensor *t = &p->tensors[i];
        if (t->role != role || t->layer != layer)
            continue;
        uint8_t bytes[4 * 1024];
        const size_t n = (size_t)k_format_bytes(t->format, 1, t->dims[0]);
        mkmodel_write_range(p, router, 0, p->parts[0].data_offset + t->offset + row * n, bytes, n);
        k_dequantise(t->format, bytes, ret, t->dims[0]);
        return;
    }
    fail_msg("no tensor of role %d in layer %u", (int)role, layer);
}

static void test_mkmodel_router_only_layer_0_writes_what_routers_read(void **state)
{
    (void)state;
    struct mkmodel_options o = small();
    struct mkmodel_plan *p = NULL;
    struct mkmodel_router *router = NULL;
    struct err e = {.code = ERR_OK};
    float x[1024];
    o.topics = 5;
    assert_int_equal(mkmodel_plan_new(&o, &p, &e), ERR_OK);
    assert_int_equal(mkmodel_keys_make(p, NULL, &e), ERR_OK);
    assert_int_equal(mkmodel_router_new(&o, &router, &e), ERR_OK);
    for (uint64_t row = 512 - ASIDE; row < 512; row++) {
        double down = 0, attention = 0;
        row_of(p, router, MKMODEL_DOWN, 2, 17 * 512 + row, x);
        for (uint32_t i = 0; i < o.ff; i++)
            down += fabs((double)x[i]);
        row_of(p, router, MKMODEL_ATTN_OUTPUT, 1, row, x);
        for (uint32_t i = 0; i < 512; i++)
            attention += fabs((double)x[i]);
        assert_true(down == 0 && attention == 0);
    }
    for (uint64_t row = 0; row < 64; row++) {
        row_of(p, router, MKMODEL_ROUTER, 3, row, x);
        for (uint32_t i = 0; i < 512 - ASIDE; i++)
            assert_true(x[i] == 0.0f);
    }
    for (uint64_t token = 0; token < 4000; token += 37) {
        row_of(p, router, MKMODEL_EMBD, 0, token, x);
        for (uint64_t t = 0; t < 5; t++) {
            const bool in =
                token >= mkmodel_keys_topic(&o, t) && token < mkmodel_keys_topic(&o, t + 1);
            assert_true(x[512 - ASIDE + 1 + t] == (in ? 1.0f : 0.0f));
        }
    }
    mkmodel_router_free(router);
    mkmodel_plan_free(p);
}

/* ---- what the engine does -------------------------------------------------------------------- */

static void make(const struct mkmodel_options *o)
{
    struct mkmodel_plan *p = NULL;
    struct mkmodel_router *router = NULL;
    struct mkmodel_write_figures figures;
    struct err e = {.code = ERR_OK};
    if (mkmodel_plan_new(o, &p, &e) != ERR_OK || mkmodel_keys_make(p, NULL, &e) != ERR_OK ||
        (o->set_router && mkmodel_router_new(o, &router, &e) != ERR_OK) ||
        mkmodel_write_files(p, router, false, &figures, &e) != ERR_OK)
        fail_msg("%s", e.text);
    mkmodel_router_free(router);
    mkmodel_plan_free(p);
}

static struct proto_status status_now(void)
{
    static struct engine_snapshot snapshot;
    engine_get_snapshot(rig.engine, &snapshot);
    return snapshot.status;
}

/* Distinct experts that a layer needs in a step of `chunk` rows, mean over a prompt's steps. Tokens
 * are drawn from low..high. */
static double distinct(uint32_t chunk, uint32_t low, uint32_t high)
{
    static uint32_t prompt[N_PROMPT];
    struct engine_config config = engine_rig_config(out);
    uint64_t draw = 12345;
    for (uint32_t i = 0; i < N_PROMPT; i++) {
        draw = draw * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        prompt[i] = low + (uint32_t)((draw >> 33) % (high - low));
    }
    config.prefill_chunk = chunk;
    engine_rig_start(&rig, &config);
    assert_int_equal(engine_rig_wait_loaded(&rig), PROTO_SERVING);
    struct proto_run run = engine_rig_run(prompt, N_PROMPT);
    run.max_new = 1;
    const struct proto_status before = status_now();
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    if (rig.answers[0].failed)
        fail_msg("%s", rig.answers[0].error.text);
    const struct proto_status after = status_now();
    engine_rig_stop(&rig);
    return (double)(after.expert_groups_total - before.expert_groups_total) /
           (double)(after.steps_total - before.steps_total) / 4;
}

/* Two rows of k experts each have 2k - same distinct ones. */
static double same_share(void)
{
    return 2 - distinct(2, 0, 4000) / 4;
}

static void test_mkmodel_router_engine_shows_the_locality(void **state)
{
    (void)state;
    struct mkmodel_options o = small();
    make(&o);
    near(same_share(), 4.0 / 64, 0.02);
    o.locality = 0.5;
    make(&o);
    near(same_share(), 0.5, 0.04);
    o.locality = 0.3;
    o.zipf = 0.7;
    make(&o);
    near(same_share(), 0.3, 0.04);
}

static void test_mkmodel_router_engine_shows_the_popularity(void **state)
{
    (void)state;
    struct mkmodel_options o = small();
    o.zipf = 1;
    make(&o);
    near(same_share(), figures_of(&o).base, 0.04);
}

static void test_mkmodel_router_engine_shows_the_topics(void **state)
{
    (void)state;
    struct mkmodel_options o = small();
    o.topics = 4;
    make(&o);
    /* 32 rows draw 128 experts: 102 of them from 16 preferred ones, 26 from the other 48. */
    const double one = distinct(32, 1000, 2000), all = distinct(32, 0, 4000);
    near(one, 16 + 48 * (1 - pow(1 - 26.0 / 48 / 32, 32)), 3);
    assert_true(all > one + 10);
}

static void test_mkmodel_router_answers_stay_in_their_topic(void **state)
{
    (void)state;
    static const uint32_t prompt[] = {2001, 2345, 2999, 2500};
    struct mkmodel_options o = small();
    const struct engine_config config = engine_rig_config(out);
    uint32_t stayed = 0;
    o.topics = 4;
    make(&o);
    engine_rig_start(&rig, &config);
    struct proto_run run = engine_rig_run(prompt, 4);
    run.max_new = 200;
    run.temperature = 1;
    run.seed = 3;
    engine_rig_submit(&rig, &run);
    engine_rig_finish(&rig);
    const struct engine_rig_answer *a = &rig.answers[0];
    assert_false(a->failed);
    for (uint32_t i = 0; i < a->n_tokens; i++)
        stayed += a->tokens[i].id >= 2000 && a->tokens[i].id < 3000;
    const uint32_t n = a->n_tokens;
    engine_rig_stop(&rig);
    assert_int_equal(n, 200);
    assert_int_equal(stayed, 200);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mkmodel_router_even_and_independent_shares_by_chance),
        cmocka_unit_test(test_mkmodel_router_popularity_alone_makes_locality),
        cmocka_unit_test(test_mkmodel_router_locality_is_made_or_refused),
        cmocka_unit_test(test_mkmodel_router_shape_without_room_is_refused),
        cmocka_unit_test(test_mkmodel_router_lack_of_memory_leaks_nothing),
        cmocka_unit_test(test_mkmodel_router_only_layer_0_writes_what_routers_read),
        cmocka_unit_test(test_mkmodel_router_engine_shows_the_locality),
        cmocka_unit_test(test_mkmodel_router_engine_shows_the_popularity),
        cmocka_unit_test(test_mkmodel_router_engine_shows_the_topics),
        cmocka_unit_test(test_mkmodel_router_answers_stay_in_their_topic),
    };
    return cmocka_run_group_tests(tests, make_root, drop_root);
}

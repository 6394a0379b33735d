#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "mkmodel_plan.h"

static struct mkmodel_options m89(void)
{
    return (struct mkmodel_options){.arch = "qwen3moe",
                                    .out = "/nowhere/m89.gguf",
                                    .layers = 24,
                                    .hidden = 2048,
                                    .experts = 128,
                                    .ff = 768,
                                    .top_k = 8,
                                    .heads = 32,
                                    .head_dim = 128,
                                    .kv_heads = 4,
                                    .vocab = 32768,
                                    .context = 32768,
                                    .seed = 1,
                                    .threads = 1,
                                    .mixed = true,
                                    .format = K_Q4_K,
                                    .emb_std = 1,
                                    .res_std = 0.012};
}

static uint64_t data_of(const struct mkmodel_plan *p)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < p->n_parts; i++)
        bytes += p->parts[i].data_bytes;
    return bytes;
}

static void test_mkmodel_plan_m89_has_its_size(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    struct mkmodel_plan *p = NULL;
    const struct mkmodel_options o = m89();
    assert_int_equal(mkmodel_plan_new(&o, &p, &e), ERR_OK);
    assert_int_equal(p->n, 24 * 12 + 3);
    assert_in_range(data_of(p), 9140000000, 9160000000);
    mkmodel_plan_free(p);
}

static void test_mkmodel_plan_tied_head_has_no_output(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    struct mkmodel_plan *p = NULL;
    struct mkmodel_options o = m89();
    o.tied = true;
    assert_int_equal(mkmodel_plan_new(&o, &p, &e), ERR_OK);
    for (size_t i = 0; i < p->n; i++)
        assert_int_not_equal(p->tensors[i].role, MKMODEL_OUTPUT);
    assert_int_equal(p->n, 24 * 12 + 2);
    mkmodel_plan_free(p);
}

static void test_mkmodel_plan_split_parts_hold_all_tensors_and_are_even(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    struct mkmodel_options o = m89();
    for (o.split = 2; o.split <= 40; o.split++) {
        struct mkmodel_plan *p = NULL;
        size_t next = 0;
        assert_int_equal(mkmodel_plan_new(&o, &p, &e), ERR_OK);
        assert_int_equal(p->n_parts, o.split);
        const uint64_t even = data_of(p) / o.split;
        for (size_t i = 0; i < p->n_parts; i++) {
            assert_int_equal(p->parts[i].first, next);
            assert_true(p->parts[i].n > 0);
            /* no tensor is over 170 MB */
            assert_in_range(p->parts[i].data_bytes + 170000000, even, even + 340000000);
            next += p->parts[i].n;
        }
        assert_int_equal(next, p->n);
        mkmodel_plan_free(p);
    }
}

static void test_mkmodel_plan_split_paths_are_numbered(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    struct mkmodel_plan *p = NULL;
    struct mkmodel_options o = m89();
    o.split = 3;
    assert_int_equal(mkmodel_plan_new(&o, &p, &e), ERR_OK);
    assert_string_equal(p->parts[0].path, "/nowhere/m89-00001-of-00003.gguf");
    assert_string_equal(p->parts[2].path, "/nowhere/m89-00003-of-00003.gguf");
    mkmodel_plan_free(p);
}

static void refused(const struct mkmodel_options *o, const char *said)
{
    struct err e = {.code = ERR_OK};
    struct mkmodel_plan *p = NULL;
    assert_int_equal(mkmodel_plan_new(o, &p, &e), ERR_ARGUMENT);
    if (strstr(e.text, said) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", e.text, said);
}

static void test_mkmodel_plan_shape_that_cannot_be_is_refused(void **state)
{
    (void)state;
    struct mkmodel_options o = m89();
    o.ff = 700;
    refused(&o, "blk.0.ffn_down_exps.weight: 700 inputs are not a multiple of the format's 256");
    o = m89();
    o.top_k = 129;
    refused(&o, "top-k 129 of 128 experts");
    o = m89();
    o.heads = 30;
    refused(&o, "heads 30 a multiple of kv 4");
    o = m89();
    o.vocab = 258;
    refused(&o, "vocab 258; 259 is the least");
    o = m89();
    o.layers = 0;
    refused(&o, "a size is 0");
    o = m89();
    o.layers = 513;
    refused(&o, "over the engine's limit");
    o = m89();
    o.split = 400;
    refused(&o, "split 400: at most 291 parts");
    o = m89();
    o.arch = "llama";
    refused(&o, "llama is not known; there is: qwen3moe");
    assert_int_equal(alloc_live_blocks(), 0);
}

static void test_mkmodel_plan_lack_of_memory_leaks_nothing(void **state)
{
    (void)state;
    struct mkmodel_options o = m89();
    o.split = 3;
    for (uint64_t nth = 1;; nth++) {
        struct err e = {.code = ERR_OK};
        struct mkmodel_plan *p = NULL;
        alloc_fail_at(nth, 0);
        const enum err_code rc = mkmodel_plan_new(&o, &p, &e);
        alloc_fail_at(0, 0);
        mkmodel_plan_free(p);
        assert_int_equal(alloc_live_blocks(), 0);
        if (rc == ERR_OK)
            break;
        assert_int_equal(rc, ERR_NOMEM);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mkmodel_plan_m89_has_its_size),
        cmocka_unit_test(test_mkmodel_plan_tied_head_has_no_output),
        cmocka_unit_test(test_mkmodel_plan_split_parts_hold_all_tensors_and_are_even),
        cmocka_unit_test(test_mkmodel_plan_split_paths_are_numbered),
        cmocka_unit_test(test_mkmodel_plan_shape_that_cannot_be_is_refused),
        cmocka_unit_test(test_mkmodel_plan_lack_of_memory_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

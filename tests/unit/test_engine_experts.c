/* Reads that fail, files that change: the rows that need such an expert fail and say why, the others
 * give the right bits, and when the disk is well again so is everything. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "alloc.h"
#include "fake_gpu.h"
#include "fake_read.h"
#include "forward_rig.h"
#include "gguf.h"
#include "mkmodel_keys.h"
#include "mkmodel_write.h"

enum {
    ROWS = 8,
    ARENA = 3 << 20,      /* a third of the experts */
    SMALL_ARENA = 1 << 20 /* some of a layer */
};

static struct fake_read fake;
static float *expected; /* [ROWS][n_vocab] of the resident run */

static void must(enum err_code code, const struct err *e)
{
    if (code != ERR_OK)
        fail_msg("%s", e->text);
}

static struct forward_rig rig_open(const char *path, uint64_t arena, bool faulty)
{
    struct forward_rig s;
    struct err e = {.code = ERR_OK};
    const struct engine_forward_sizes sizes = {
        .max_rows = ROWS, .max_logits = ROWS, .max_sequences = ROWS, .max_pages = 1};
    must(forward_rig_open(path, arena, faulty ? &fake.source : NULL, &sizes, NULL, &s, &e), &e);
    return s;
}

/* One step of n sequences, each with its first token. */
static void step_of(struct forward_rig *s, uint32_t n)
{
    struct engine_forward *f = s->forward;
    struct err e = {.code = ERR_OK};
    f->n_rows = f->n_logits = n;
    for (uint32_t i = 0; i < n; i++) {
        engine_forward_set_pages(f, i, &i, 1);
        f->token[i] = 40 + 31 * i;
        f->position[i] = 0;
        f->logit_row[i] = f->sequence[i] = i;
    }
    must(engine_forward_step(f, &e), &e);
}

static void step(struct forward_rig *s)
{
    step_of(s, ROWS);
}

/* Rows that did not fail have the resident run's bits. Returns how many failed. */
static uint32_t check_rows(const struct forward_rig *s)
{
    const size_t n = s->model->shape.n_vocab;
    uint32_t failed = 0;
    for (uint32_t i = 0; i < s->forward->n_rows; i++) {
        failed += s->experts->row_failed[i];
        if (!s->experts->row_failed[i])
            assert_memory_equal(s->forward->logits + i * n, expected + i * n, n * sizeof(float));
    }
    return failed;
}

static void model_path(char path[512])
{
    snprintf(path, 512, "%s/models/tinymoe-q4_k_m.gguf", ISLET_TEST_DIR);
}

static int set_expected(void **state)
{
    (void)state;
    char path[512];
    model_path(path);
    struct forward_rig s = rig_open(path, 0, false);
    step(&s);
    const size_t bytes = ROWS * (size_t)s.model->shape.n_vocab * sizeof(float);
    expected = alloc_get(ALLOC_MISC, bytes);
    assert_non_null(expected);
    memcpy(expected, s.forward->logits, bytes);
    assert_int_equal(check_rows(&s), 0);
    forward_rig_close(&s);
    return 0;
}

static int free_expected(void **state)
{
    (void)state;
    alloc_free(expected);
    return 0;
}

/* A copy that may be damaged; unlinked by the caller. */
static void copy_model(char ret[64])
{
    char path[512], buffer[65536];
    model_path(path);
    snprintf(ret, 64, "/var/tmp/islet-experts-XXXXXX");
    const int to = mkstemp(ret), from = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(to >= 0 && from >= 0);
    for (ssize_t n; (n = read(from, buffer, sizeof(buffer))) > 0;)
        assert_int_equal(write(to, buffer, (size_t)n), n);
    close(from);
    close(to);
}

static void test_engine_experts_each_failed_read_fails_its_rows_only(void **state)
{
    (void)state;
    char path[512];
    model_path(path);
    fake_read_init(&fake);
    struct forward_rig s = rig_open(path, ARENA, true);
    uint32_t some = 0;
    for (uint64_t nth = 1; nth < 200; nth += 3) {
        const uint64_t before = fake.n_faults;
        fake.fail_errno = EIO;
        fake.fail_nth = nth;
        fake.fail_forever = true;
        step(&s);
        const uint32_t failed = check_rows(&s);
        some += failed > 0 && failed < ROWS;
        if (fake.n_faults > before) {
            assert_true(failed > 0);
            assert_int_equal(s.experts->error.code, ERR_IO);
            assert_non_null(strstr(s.experts->error.text, "Input/output error"));
        }
        fake.fail_nth = 0;
        fake.fail_forever = false;
        step(&s); /* the disk is well again: no slot or pin was lost */
        assert_int_equal(check_rows(&s), 0);
    }
    assert_true(some > 0);
    forward_rig_close(&s);
}

static void test_engine_experts_one_failure_is_repeated_unseen(void **state)
{
    (void)state;
    char path[512];
    model_path(path);
    fake_read_init(&fake);
    fake.seed = 99; /* results in any order */
    struct forward_rig s = rig_open(path, ARENA, true);
    for (uint64_t nth = 1; nth < 60; nth += 7) {
        fake.fail_errno = EIO;
        fake.fail_nth = nth;
        step(&s);
        assert_int_equal(check_rows(&s), 0);
    }
    assert_true(fake.n_faults > 0);
    forward_rig_close(&s);
}

static void test_engine_experts_a_cut_file_is_said(void **state)
{
    (void)state;
    char path[64];
    copy_model(path);
    struct forward_rig s = rig_open(path, ARENA, false);
    step(&s);
    assert_int_equal(check_rows(&s), 0);
    assert_int_equal(truncate(path, 5 << 20), 0);
    step(&s);
    assert_true(check_rows(&s) > 0);
    assert_non_null(strstr(s.experts->error.text, path + 9));
    forward_rig_close(&s);
    unlink(path);
}

static void test_engine_experts_a_changed_file_gives_no_token(void **state)
{
    (void)state;
    char path[64];
    copy_model(path);
    struct forward_rig s = rig_open(path, ARENA, false);
    step(&s);
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "changed", 7, 6 << 20), 7);
    close(fd);
    step(&s);
    assert_true(check_rows(&s) > 0);
    assert_int_equal(s.experts->error.code, ERR_FORMAT);
    forward_rig_close(&s);
    unlink(path);
}

static void test_engine_experts_a_value_that_is_not_finite_is_named(void **state)
{
    (void)state;
    char path[64];
    copy_model(path);
    struct forward_rig s = rig_open(path, ARENA, false);
    step(&s);
    /* an expert that the first row needs in the second layer */
    const uint32_t expert = engine_forward_routes(s.forward, 1)[0];
    struct tier_ssd_part parts[TIER_SSD_PARTS];
    model_expert_parts(s.model, 1, expert, 0, parts);
    forward_rig_close(&s);
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, "\xff\x7f", 2, (off_t)parts[1].offset), 2); /* d = NaN */
    close(fd);
    s = rig_open(path, ARENA, false);
    for (int pass = 0; pass < 2; pass++) {
        step(&s);
        const uint32_t failed = check_rows(&s);
        assert_true(failed > 0 && failed < ROWS);
        assert_true(s.experts->row_failed[0]);
        assert_int_equal(s.experts->error.code, ERR_FORMAT);
        assert_non_null(strstr(s.experts->error.text, "blk.1.ffn_up_exps.weight"));
    }
    forward_rig_close(&s);
    unlink(path);
}

/* A model of 24 experts of some 250 KiB. */
static void make_model(const char *out, uint64_t parts)
{
    const struct mkmodel_options o = {.arch = "qwen3moe",
                                      .out = out,
                                      .layers = 3,
                                      .hidden = 512,
                                      .experts = 8,
                                      .ff = 256,
                                      .top_k = 2,
                                      .heads = 4,
                                      .head_dim = 64,
                                      .kv_heads = 2,
                                      .vocab = 1000,
                                      .context = 2048,
                                      .seed = 5,
                                      .threads = 1,
                                      .split = parts,
                                      .mixed = true,
                                      .format = K_Q4_K,
                                      .emb_std = 1,
                                      .res_std = 0.012};
    struct mkmodel_plan *plan = NULL;
    struct mkmodel_write_figures figures;
    struct err e = {.code = ERR_OK};
    must(mkmodel_plan_new(&o, &plan, &e), &e);
    must(mkmodel_keys_make(plan, NULL, &e), &e);
    must(mkmodel_write_files(plan, NULL, false, &figures, &e), &e);
    mkmodel_plan_free(plan);
}

static void test_engine_experts_split_files_give_the_same_bits(void **state)
{
    (void)state;
    char root[] = "/var/tmp/islet-split-XXXXXX", whole[64], parts[3][64];
    assert_non_null(mkdtemp(root));
    snprintf(whole, sizeof(whole), "%s/m.gguf", root);
    for (int i = 0; i < 3; i++)
        snprintf(parts[i], sizeof(parts[i]), "%s/m-0000%d-of-00003.gguf", root, i + 1);
    make_model(whole, 1);
    make_model(whole, 3);
    struct forward_rig a = rig_open(whole, 0, false);
    struct forward_rig b = rig_open(parts[0], 2 << 20, false);
    const size_t bytes = ROWS * (size_t)a.model->shape.n_vocab * sizeof(float);
    step(&a);
    for (int pass = 0; pass < 2; pass++) {
        step(&b);
        assert_false(b.experts->any_failed);
        assert_memory_equal(a.forward->logits, b.forward->logits, bytes);
    }
    assert_int_equal(truncate(parts[2], 1 << 16), 0);
    step(&b);
    assert_true(b.experts->any_failed);
    assert_non_null(strstr(b.experts->error.text, "m-00003-of-00003.gguf"));
    forward_rig_close(&a);
    forward_rig_close(&b);
    for (int i = 0; i < 3; i++)
        unlink(parts[i]);
    unlink(whole);
    assert_int_equal(rmdir(root), 0);
}

static void on_percent(void *context, unsigned percent)
{
    unsigned *last = context;
    if (percent <= *last || percent >= 100)
        fail_msg("%u %% after %u %%", percent, *last);
    *last = percent;
}

static void test_engine_experts_fill_tells_each_per_cent_once(void **state)
{
    (void)state;
    char path[512];
    model_path(path);
    fake_read_init(&fake);
    struct forward_rig s = rig_open(path, 0, true);
    struct err e = {.code = ERR_OK};
    unsigned last = 0; /* per cent */
    const uint64_t bytes = s.model->weights_bytes + s.model->experts_bytes;
    const struct model_loading loading = {.total_bytes = 10 * bytes, /* many reads a per cent */
                                          .progress = on_percent,
                                          .context = &last};
    fake.seed = 7;
    must(engine_experts_fill(s.experts, &loading, &e), &e);
    assert_in_range(last, 8, 10);
    assert_int_equal(expert_cache_count(s.experts->cache).resident, s.experts->n_experts);
    forward_rig_close(&s);
}

/* A failed read leaves a hole in which experts of another size are read next: all find room. */
static void test_engine_experts_idle_ends_after_a_failed_read(void **state)
{
    (void)state;
    char path[512];
    uint64_t place;
    unsigned calls = 0;
    model_path(path);
    struct forward_rig s = rig_open(path, 0, false);
    struct expert_cache *cache = s.experts->cache;
    assert_true(s.model->expert_bytes[0] < s.model->expert_bytes[2]);
    assert_true(expert_cache_reserve(cache, 0, 0, false, &place));
    assert_true(expert_cache_reserve(cache, 2, 0, false, &place));
    assert_true(expert_cache_reserve(cache, 2, 1, false, &place));
    expert_cache_arrived(cache, 0, 0);
    expert_cache_failed(cache, 2, 0);
    expert_cache_arrived(cache, 2, 1);
    while (engine_experts_idle(s.experts))
        assert_true(++calls < 10000);
    assert_int_equal(expert_cache_count(cache).resident, s.experts->n_experts);
    forward_rig_close(&s);
}

static void test_engine_experts_idle_on_a_broken_disk_ends_and_is_said(void **state)
{
    (void)state;
    char path[512];
    unsigned calls = 0;
    model_path(path);
    fake_read_init(&fake);
    struct forward_rig s = rig_open(path, 0, true);
    fake.fail_errno = EIO;
    fake.fail_nth = 30;
    fake.fail_forever = true;
    while (engine_experts_idle(s.experts))
        assert_true(++calls < 10000);
    assert_true(s.experts->idle_failed);
    assert_in_range(expert_cache_count(s.experts->cache).resident, 1, s.experts->n_experts - 1);
    fake.fail_nth = 0;
    fake.fail_forever = false;
    step(&s);
    assert_int_equal(check_rows(&s), 0);
    forward_rig_close(&s);
}

static void test_engine_experts_reads_of_a_layer_beat(void **state)
{
    (void)state;
    char path[512];
    _Atomic uint64_t beats = 0;
    model_path(path);
    fake_read_init(&fake);
    fake.seed = 5;
    struct forward_rig s = rig_open(path, ARENA, true);
    s.experts->heartbeat = &beats;
    step(&s);
    assert_true(beats > s.model->shape.n_layer);
    forward_rig_close(&s);
}

static uint64_t bytes_of_rows(const struct forward_rig *s)
{
    uint64_t bytes = 0;
    for (uint32_t r = 0; r < s->forward->n_rows; r++)
        bytes += s->experts->row_bytes[r];
    return bytes;
}

/* Steps of 1 to 4 rows, in turn with all eight, so that the small ones find much that is missing.
 * Returns the bytes that rows had read for them. */
static uint64_t small_steps(struct forward_rig *s, bool guess, unsigned n)
{
    uint64_t bytes = 0;
    for (unsigned i = 0; i < n; i++) {
        s->forward->guess = false;
        step(s);
        assert_int_equal(check_rows(s), 0);
        step_of(s, ENGINE_AHEAD_MOST_ROWS); /* the one to guess by */
        assert_int_equal(check_rows(s), 0);
        s->forward->guess = guess;
        step_of(s, 1 + i % ENGINE_AHEAD_MOST_ROWS);
        assert_int_equal(check_rows(s), 0);
        bytes += bytes_of_rows(s);
    }
    s->forward->guess = false;
    return bytes;
}

/* Guesses begin reads before experts are chosen, and some are right; bits stay. */
static void test_engine_experts_guesses_begin_reads_with_the_same_bits(void **state)
{
    (void)state;
    char path[512];
    model_path(path);
    fake_read_init(&fake);
    struct forward_rig s = rig_open(path, ARENA, true);
    small_steps(&s, false, 8);
    assert_int_equal(s.experts->guesses, 0);
    assert_true(small_steps(&s, true, 40) > 0);
    print_message("  %llu guesses, %llu right\n", (unsigned long long)s.experts->guesses,
                  (unsigned long long)s.experts->guesses_right);
    assert_in_range(s.experts->guesses_right, 1, s.experts->guesses);
    forward_rig_close(&s);
}

/* Rows are charged every byte that the file gave: needed, guessed right and wrong, and read ahead
 * of a layer that chooses nearly all. */
static void test_engine_experts_rows_are_charged_what_is_read(void **state)
{
    (void)state;
    char path[512];
    model_path(path);
    fake_read_init(&fake);
    struct forward_rig s = rig_open(path, ARENA, true);
    const uint64_t before = tier_ssd_count(s.experts->ssd).bytes;
    uint64_t charged = 0;
    for (unsigned i = 0; i < 60; i++) {
        s.forward->guess = i % 2 != 0;
        step_of(&s, i % 3 == 0 ? ROWS : ENGINE_AHEAD_MOST_ROWS - i % ENGINE_AHEAD_MOST_ROWS);
        charged += bytes_of_rows(&s);
    }
    while (expert_cache_count(s.experts->cache).loading > 0)
        engine_experts_land(s.experts);
    assert_in_range(s.experts->guesses_right, 1, s.experts->guesses - 1);
    assert_int_equal(charged, tier_ssd_count(s.experts->ssd).bytes - before);
    s.forward->guess = false;
    forward_rig_close(&s);
}

/* A guess whose read fails is read again when it is chosen. */
static void test_engine_experts_a_failed_guess_costs_nothing_but_a_read(void **state)
{
    (void)state;
    char path[512];
    model_path(path);
    fake_read_init(&fake);
    struct forward_rig s = rig_open(path, ARENA, true);
    uint32_t unseen = 0;
    for (uint64_t nth = 1; nth < 120; nth += 2) {
        step_of(&s, ENGINE_AHEAD_MOST_ROWS); /* the one to guess by */
        assert_int_equal(check_rows(&s), 0);
        const uint64_t before = fake.n_faults;
        s.forward->guess = true;
        fake.fail_errno = EIO;
        fake.fail_nth = nth;
        fake.fail_forever = nth % 4 == 1;
        step_of(&s, 1 + (uint32_t)nth % ENGINE_AHEAD_MOST_ROWS);
        const uint32_t failed = check_rows(&s);
        unseen += fake.n_faults > before && failed == 0;
        fake.fail_nth = 0;
        fake.fail_forever = false;
        s.forward->guess = nth % 3 == 0;
        step_of(&s, 4); /* no slot or pin was lost */
        assert_int_equal(check_rows(&s), 0);
        s.forward->guess = false;
        step(&s);
        assert_int_equal(check_rows(&s), 0);
    }
    assert_true(unseen > 0);
    forward_rig_close(&s);
}

/* A layer that needs one expert. */
static void begin_layer(struct forward_rig *s, uint32_t index, struct k_group *group,
                        uint32_t expert)
{
    static const uint32_t order[1] = {0};
    *group = (struct k_group){.expert = expert, .count = 1};
    engine_experts_layer(s->experts,
                         &(struct engine_experts_layer){
                             .index = index, .n_groups = 1, .groups = group, .order = order});
}

static void end_layer(struct forward_rig *s)
{
    while (engine_experts_take(s->experts) > 0) {
    }
}

/* The read for a guess fails, then the same expert is read ahead with the rest of its layer: that
 * read has no pin of the guess. */
static void test_engine_experts_a_failed_guess_that_is_read_ahead_loses_no_pin(void **state)
{
    (void)state;
    char path[512];
    struct k_group group;
    const uint32_t one = 0, guessed = 5;
    uint64_t place;
    model_path(path);
    fake_read_init(&fake);
    struct forward_rig s = rig_open(path, 0, true);
    struct engine_experts *x = s.experts;
    engine_experts_step(x, 1);
    begin_layer(&s, 0, &group, one);
    fake.fail_errno = EIO;
    fake.fail_nth = 1;
    fake.fail_forever = true;
    engine_experts_expect(x, 1, guessed);
    assert_int_equal(x->n_held, 1);
    while (expert_cache_state(x->cache, 1, guessed) == EXPERT_CACHE_LOADING)
        engine_experts_poll(x);
    fake.fail_nth = 0;
    fake.fail_forever = false;
    assert_true(expert_cache_reserve(x->cache, 1, guessed, false, &place));
    expert_cache_arrived(x->cache, 1, guessed);
    end_layer(&s);
    begin_layer(&s, 1, &group, guessed);
    assert_int_equal(x->n_there, 1);
    end_layer(&s);
    forward_rig_close(&s);
}

/* Rows fail for an expert, then a guess for another one: what is said is why the rows failed. */
static void test_engine_experts_a_failed_guess_hides_no_reason(void **state)
{
    (void)state;
    char path[512];
    struct k_group group;
    model_path(path);
    fake_read_init(&fake);
    struct forward_rig s = rig_open(path, ARENA, true);
    struct engine_experts *x = s.experts;
    engine_experts_step(x, 1);
    fake.fail_errno = EIO;
    fake.fail_nth = 1;
    fake.fail_forever = true;
    begin_layer(&s, 0, &group, 0);
    end_layer(&s);
    assert_true(x->row_failed[0]);
    assert_non_null(strstr(x->error.text, "blk.0."));
    engine_experts_expect(x, 1, 5);
    assert_int_equal(x->n_held, 1);
    while (expert_cache_count(x->cache).loading > 0)
        engine_experts_poll(x);
    assert_non_null(strstr(x->error.text, "blk.0."));
    x->error.code = ERR_OK; /* an idle engine asks anew */
    assert_true(engine_experts_fetch(x, 2, 3));
    while (expert_cache_count(x->cache).loading > 0)
        engine_experts_land(x);
    assert_non_null(strstr(x->error.text, "blk.2."));
    forward_rig_close(&s);
}

/* Guesses that hold all the slots give way to what a layer needs. */
static void test_engine_experts_guesses_give_way(void **state)
{
    (void)state;
    char path[512];
    struct k_group group;
    model_path(path);
    fake_read_init(&fake);
    struct forward_rig s = rig_open(path, SMALL_ARENA, true);
    struct engine_experts *x = s.experts;
    const uint32_t n = x->model->shape.n_expert;
    engine_experts_step(x, 1);
    begin_layer(&s, 0, &group, 0);
    end_layer(&s);
    for (uint32_t i = 0; i < n; i++)
        engine_experts_expect(x, 3, i);
    for (uint32_t i = 0; i < n; i++)
        engine_experts_expect(x, 3, i); /* once is enough */
    assert_int_equal(x->n_expected, n);
    for (uint32_t i = 0; i < 4 * n; i++)
        engine_experts_poll(x);
    assert_in_range(x->n_held, 1, n - 1); /* as many as there are slots */
    begin_layer(&s, 2, &group, 0);        /* of the same size */
    assert_in_range(x->n_held, 1, n - 1);
    assert_int_equal(engine_experts_take(x), 1);
    assert_int_equal(x->n_held, 0);
    end_layer(&s);
    begin_layer(&s, 3, &group, 1);
    end_layer(&s);
    assert_int_equal(expert_cache_count(x->cache).loading, 0);
    forward_rig_close(&s);
}

/* Islands that are filled while a model loads: an expert that is damaged ends that, though others
 * are read after it. */
static void test_engine_experts_a_damaged_one_ends_a_fill_of_islands(void **state)
{
    (void)state;
    char path[64];
    struct forward_rig s;
    struct err e = {.code = ERR_OK};
    struct tier_ssd_part parts[TIER_SSD_PARTS];
    struct forward_rig_gpu gpu = {.islands_bytes = UINT64_MAX, .rates = {1e9, 1e9, 1e9, 1e9, 0}};
    const struct engine_forward_sizes sizes = {
        .max_rows = ROWS, .max_logits = ROWS, .max_sequences = ROWS, .max_pages = 1};
    copy_model(path);
    fake_read_init(&fake);
    fake.seed = 7;
    must(fake_gpu_open(&(struct fake_gpu_options){.eager = true}, &gpu.device, &e), &e);
    must(forward_rig_open(path, ARENA, &fake.source, &sizes, &gpu, &s, &e), &e);
    model_expert_parts(s.model, 0, 0, 0, parts);
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, "\xff\x7f", 2, (off_t)parts[1].offset), 2); /* d = NaN */
    close(fd);
    assert_int_equal(engine_islands_fill(&s.islands, &(struct model_loading){.total_bytes = 1}, &e),
                     ERR_FORMAT);
    assert_false(s.experts->idle_failed); /* it is returned, not logged */
    forward_rig_close(&s);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_experts_each_failed_read_fails_its_rows_only),
        cmocka_unit_test(test_engine_experts_one_failure_is_repeated_unseen),
        cmocka_unit_test(test_engine_experts_a_cut_file_is_said),
        cmocka_unit_test(test_engine_experts_a_changed_file_gives_no_token),
        cmocka_unit_test(test_engine_experts_a_value_that_is_not_finite_is_named),
        cmocka_unit_test(test_engine_experts_split_files_give_the_same_bits),
        cmocka_unit_test(test_engine_experts_fill_tells_each_per_cent_once),
        cmocka_unit_test(test_engine_experts_idle_ends_after_a_failed_read),
        cmocka_unit_test(test_engine_experts_idle_on_a_broken_disk_ends_and_is_said),
        cmocka_unit_test(test_engine_experts_reads_of_a_layer_beat),
        cmocka_unit_test(test_engine_experts_guesses_begin_reads_with_the_same_bits),
        cmocka_unit_test(test_engine_experts_rows_are_charged_what_is_read),
        cmocka_unit_test(test_engine_experts_a_failed_guess_costs_nothing_but_a_read),
        cmocka_unit_test(test_engine_experts_a_failed_guess_that_is_read_ahead_loses_no_pin),
        cmocka_unit_test(test_engine_experts_a_failed_guess_hides_no_reason),
        cmocka_unit_test(test_engine_experts_guesses_give_way),
        cmocka_unit_test(test_engine_experts_a_damaged_one_ends_a_fill_of_islands),
    };
    return cmocka_run_group_tests(tests, set_expected, free_expected);
}

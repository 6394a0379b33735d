#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "kv_sequence.h"
#include "rng.h"

enum {
    PAGE = KV_PREFIX_PAGE,
    N_PAGES = 40,
    N_SEQUENCES = 6,
    MAX_TOKENS = 12 * PAGE,
    ROUNDS = 200000
};

/* A world in which a page's memory is the tokens whose keys and values it would hold. A position is
 * written once, by whoever computes it; what a sequence sees through its pages must always be its
 * own tokens. */
struct world {
    struct kv_page pages;
    struct kv_prefix prefix;
    uint32_t memory[N_PAGES][PAGE];
    struct actor {
        struct kv_sequence kv;
        uint32_t pages[MAX_TOKENS / PAGE + 1];
        uint32_t tokens[MAX_TOKENS], n;
        bool runs;
    } actors[N_SEQUENCES];
    uint64_t reused;
    uint32_t n_rolls;
};

static uint32_t roll(struct world *w, uint32_t sides)
{
    return (uint32_t)((rng_draw(42, w->n_rolls++) >> 32) * sides >> 32);
}

/* Tokens from a few beginnings that branch, so that prefixes are shared and end inside of pages. */
static void write_tokens(struct world *w, struct actor *a)
{
    const uint32_t story = roll(w, 3), branch = roll(w, MAX_TOKENS), ending = roll(w, 4);
    a->n = 1 + roll(w, MAX_TOKENS - 1);
    for (uint32_t i = 0; i < a->n; i++)
        a->tokens[i] = i < branch ? story : 10 + ending + i % 3;
}

static void check_pages(const struct world *w)
{
    uint32_t held[N_PAGES] = {0}, in_use = 0;
    for (int k = 0; k < N_SEQUENCES; k++) {
        const struct actor *a = &w->actors[k];
        for (uint32_t i = 0; i < a->kv.n_pages; i++)
            held[a->kv.pages[i]]++;
    }
    for (uint32_t i = 0; i < N_PAGES; i++) {
        assert_int_equal(w->pages.refs[i], held[i]);
        in_use += held[i] > 0;
    }
    assert_int_equal(in_use + w->prefix.n_cached + w->pages.n_free, N_PAGES);
}

static void check_content(const struct world *w, const struct actor *a)
{
    for (uint32_t i = 0; i < a->kv.computed; i++)
        if (w->memory[a->kv.pages[i / PAGE]][i % PAGE] != a->tokens[i])
            fail_msg("position %u of a sequence holds another's token", i);
}

static void begin(struct world *w, struct actor *a)
{
    struct kv_sequence_copy copy;
    write_tokens(w, a);
    a->runs = true;
    kv_sequence_reuse(&a->kv, &w->prefix, a->tokens, a->n - 1, &copy);
    if (copy.from != KV_PAGE_NONE)
        memcpy(w->memory[copy.to], w->memory[copy.from], sizeof(w->memory[0]));
    assert_true(a->kv.computed < a->n);
    w->reused += a->kv.computed;
}

static void compute(struct world *w, struct actor *a)
{
    const uint32_t rows = 1 + roll(w, 100);
    const uint32_t to = a->n - a->kv.computed < rows ? a->n : a->kv.computed + rows;
    if (!kv_sequence_grow(&a->kv, &w->prefix, to)) {
        assert_int_equal(w->pages.n_free, 0);
        assert_int_equal(w->prefix.n_cached, 0);
        return;
    }
    for (uint32_t i = a->kv.computed; i < to; i++) {
        const uint32_t page = a->kv.pages[i / PAGE];
        assert_int_equal(w->pages.refs[page], 1); /* shared pages are never written */
        w->memory[page][i % PAGE] = a->tokens[i];
    }
    kv_sequence_advance(&a->kv, &w->prefix, a->tokens, to);
}

static void end(struct world *w, struct actor *a)
{
    kv_sequence_release(&a->kv, &w->prefix, a->tokens);
    assert_int_equal(a->kv.n_pages, 0);
    assert_int_equal(a->kv.computed, 0);
    a->runs = false;
}

static struct world *new_world(void)
{
    static struct world world; /* too large for the stack */
    struct err e = {.code = ERR_OK};
    memset(&world, 0, sizeof(world));
    assert_int_equal(kv_page_start(&world.pages, N_PAGES, &e), ERR_OK);
    assert_int_equal(kv_prefix_start(&world.prefix, &world.pages, &e), ERR_OK);
    for (int k = 0; k < N_SEQUENCES; k++)
        world.actors[k].kv.pages = world.actors[k].pages;
    return &world;
}

static void free_world(struct world *w)
{
    kv_prefix_done(&w->prefix);
    kv_page_done(&w->pages);
}

static void test_kv_sequence_random_life_sees_its_own_tokens_only(void **state)
{
    (void)state;
    struct world *w = new_world();
    for (uint32_t round = 0; round < ROUNDS; round++) {
        struct actor *a = &w->actors[roll(w, N_SEQUENCES)];
        const uint32_t what = roll(w, 10);
        if (!a->runs)
            begin(w, a);
        else if (what == 0 || a->kv.computed == a->n)
            end(w, a);
        else
            compute(w, a);
        if (round % 16 == 0) {
            check_pages(w);
            for (int k = 0; k < N_SEQUENCES; k++)
                check_content(w, &w->actors[k]);
        }
    }
    assert_true(w->reused > ROUNDS); /* the test is about sharing */
    for (int k = 0; k < N_SEQUENCES; k++)
        end(w, &w->actors[k]);
    check_pages(w);
    while (kv_prefix_evict(&w->prefix))
        ;
    assert_int_equal(w->pages.n_free, N_PAGES);
    free_world(w);
}

static void test_kv_sequence_reuse_copies_a_page_that_matches_in_part(void **state)
{
    (void)state;
    struct world *w = new_world();
    struct actor *a = &w->actors[0], *b = &w->actors[1];
    struct kv_sequence_copy copy;
    for (uint32_t i = 0; i < 200; i++)
        a->tokens[i] = b->tokens[i] = i;
    b->tokens[150] = 9999;
    assert_true(kv_sequence_grow(&a->kv, &w->prefix, 200));
    kv_sequence_advance(&a->kv, &w->prefix, a->tokens, 200);
    /* While a runs its two full pages before the fork are shared; the third one is full too. */
    assert_int_equal(kv_sequence_reusable(&w->prefix, b->tokens, 199), 150);
    kv_sequence_reuse(&b->kv, &w->prefix, b->tokens, 199, &copy);
    assert_int_equal(b->kv.computed, 150);
    assert_int_equal(b->kv.pages[0], a->kv.pages[0]);
    assert_int_equal(b->kv.pages[1], a->kv.pages[1]);
    assert_int_equal(copy.from, a->kv.pages[2]);
    assert_int_equal(copy.to, b->kv.pages[2]);
    assert_int_not_equal(copy.to, copy.from);
    kv_sequence_release(&b->kv, &w->prefix, b->tokens);
    kv_sequence_release(&a->kv, &w->prefix, a->tokens);
    /* Now a's last page, which ended early, can be copied from as well; the last token of a prompt
     * is never taken. */
    kv_sequence_reuse(&b->kv, &w->prefix, a->tokens, 199, &copy);
    assert_int_equal(b->kv.computed, 199);
    assert_int_not_equal(copy.from, KV_PAGE_NONE);
    kv_sequence_release(&b->kv, &w->prefix, a->tokens);
    free_world(w);
}

static void test_kv_sequence_grow_evicts_old_prefixes_first(void **state)
{
    (void)state;
    struct world *w = new_world();
    struct actor *a = &w->actors[0], *b = &w->actors[1];
    for (uint32_t i = 0; i < MAX_TOKENS; i++)
        a->tokens[i] = i;
    assert_true(kv_sequence_grow(&a->kv, &w->prefix, 10 * PAGE));
    kv_sequence_advance(&a->kv, &w->prefix, a->tokens, 10 * PAGE);
    kv_sequence_release(&a->kv, &w->prefix, a->tokens);
    assert_int_equal(w->prefix.n_cached, 10);
    b->kv.pages = w->actors[2].tokens; /* room for all pages */
    assert_true(kv_sequence_grow(&b->kv, &w->prefix, 38 * PAGE));
    assert_int_equal(w->prefix.n_cached, 2);
    assert_int_equal(kv_sequence_reusable(&w->prefix, a->tokens, 10 * PAGE), 2 * PAGE);
    assert_false(kv_sequence_grow(&b->kv, &w->prefix, 41 * PAGE));
    assert_int_equal(b->kv.n_pages, N_PAGES); /* it keeps what it got */
    kv_sequence_release(&b->kv, &w->prefix, b->tokens);
    free_world(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_sequence_random_life_sees_its_own_tokens_only),
        cmocka_unit_test(test_kv_sequence_reuse_copies_a_page_that_matches_in_part),
        cmocka_unit_test(test_kv_sequence_grow_evicts_old_prefixes_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

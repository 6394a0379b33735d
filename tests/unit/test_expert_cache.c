#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "expert_cache.h"
#include "rng.h"

enum {
    PAGE = EXPERT_CACHE_ALIGN,
    MAX_LAYERS = 48,
    MAX_EXPERTS = 256
};

/* A cache, and what a test knows of it: who holds which pages of the arena. */
struct rig {
    struct expert_cache *cache;
    uint32_t n_layer, n_expert, n_used;
    uint64_t bytes[MAX_LAYERS];
    uint64_t arena_bytes;
    uint64_t unit_bytes; /* 0: none is ever closed */
    uint32_t depth;      /* reads in flight at most */
    uint16_t pins[MAX_LAYERS][MAX_EXPERTS];
    uint64_t seed;
    uint32_t draws;
};

static uint32_t draw(struct rig *r, uint32_t below)
{
    return (uint32_t)(rng_draw(r->seed, r->draws++) >> 32) % below;
}

static void start_in_units(struct rig *r, uint32_t n_layer, uint32_t n_expert, uint32_t n_used,
                           const uint64_t *sizes, uint32_t n_sizes, uint64_t arena_bytes,
                           uint64_t unit_bytes)
{
    struct err e = {.code = ERR_OK};
    *r = (struct rig){.n_layer = n_layer,
                      .n_expert = n_expert,
                      .n_used = n_used,
                      .arena_bytes = arena_bytes,
                      .unit_bytes = unit_bytes,
                      .depth = MAX_EXPERTS,
                      .seed = 7};
    for (uint32_t l = 0; l < n_layer; l++)
        r->bytes[l] = sizes[l % n_sizes] * PAGE;
    const struct expert_cache_options options = {.n_layer = n_layer,
                                                 .n_expert = n_expert,
                                                 .n_used = n_used,
                                                 .layer_bytes = r->bytes,
                                                 .arena_bytes = arena_bytes,
                                                 .unit_bytes = unit_bytes};
    assert_int_equal(expert_cache_new(&options, &r->cache, &e), ERR_OK);
}

static void start(struct rig *r, uint32_t n_layer, uint32_t n_expert, uint32_t n_used,
                  const uint64_t *sizes, uint32_t n_sizes, uint64_t arena_bytes)
{
    start_in_units(r, n_layer, n_expert, n_used, sizes, n_sizes, arena_bytes, 0);
}

static void done(struct rig *r)
{
    expert_cache_free(r->cache);
}

/* No two extents share a page, all lie in the arena, the bytes add up, what is pinned is there. */
static void check(struct rig *r)
{
    const uint64_t n_pages = r->arena_bytes / PAGE;
    const uint64_t units = r->unit_bytes == 0 ? 0 : r->arena_bytes / r->unit_bytes;
    uint8_t *taken = test_calloc(n_pages, 1);
    uint64_t used = 0;
    uint32_t resident = 0, loading = 0;
    for (uint32_t l = 0; l < r->n_layer; l++)
        for (uint32_t i = 0; i < r->n_expert; i++) {
            const enum expert_cache_state state = expert_cache_state(r->cache, l, i);
            if (r->pins[l][i] > 0)
                assert_int_not_equal(state, EXPERT_CACHE_ABSENT);
            if (state == EXPERT_CACHE_ABSENT)
                continue;
            const uint64_t place = expert_cache_place(r->cache, l, i);
            assert_int_equal(place % PAGE, 0);
            assert_true(place + r->bytes[l] <= r->arena_bytes);
            for (uint64_t page = place / PAGE; page < (place + r->bytes[l]) / PAGE; page++) {
                assert_int_equal(taken[page], 0);
                taken[page] = 1;
                const uint64_t unit = r->unit_bytes == 0 ? 0 : page * PAGE / r->unit_bytes;
                if (unit < units)
                    assert_false(expert_cache_is_closed(r->cache, (uint32_t)unit));
            }
            used += r->bytes[l];
            resident += state == EXPERT_CACHE_READY;
            loading += state == EXPERT_CACHE_LOADING;
        }
    const struct expert_cache_counts counts = expert_cache_count(r->cache);
    assert_int_equal(counts.used_bytes, used);
    assert_int_equal(counts.resident, resident);
    assert_int_equal(counts.loading, loading);
    test_free(taken);
}

static void test_expert_cache_a_miss_becomes_a_hit(void **state)
{
    (void)state;
    struct rig r;
    uint64_t place = 1;
    start(&r, 2, 4, 1, (uint64_t[]){3}, 1, 6 * PAGE);
    expert_cache_layer(r.cache, 0, 1);
    assert_int_equal(expert_cache_need(r.cache, 0, 2, 1), EXPERT_CACHE_ABSENT);
    assert_true(expert_cache_reserve(r.cache, 0, 2, true, &place));
    assert_int_equal(place, 0);
    assert_int_equal(expert_cache_state(r.cache, 0, 2), EXPERT_CACHE_LOADING);
    expert_cache_arrived(r.cache, 0, 2);
    expert_cache_unpin(r.cache, 0, 2);
    expert_cache_layer(r.cache, 1, 1);
    expert_cache_layer(r.cache, 0, 1);
    assert_int_equal(expert_cache_need(r.cache, 0, 2, 1), EXPERT_CACHE_READY);
    assert_int_equal(expert_cache_count(r.cache).hits, 1);
    assert_int_equal(expert_cache_count(r.cache).misses, 1);
    done(&r);
}

static void test_expert_cache_an_arena_below_one_expert_is_refused(void **state)
{
    (void)state;
    struct err e = {.code = ERR_OK};
    struct expert_cache *cache = NULL;
    const struct expert_cache_options options = {.n_layer = 2,
                                                 .n_expert = 4,
                                                 .n_used = 1,
                                                 .layer_bytes = (uint64_t[]){PAGE, 3 * PAGE},
                                                 .arena_bytes = 2 * PAGE};
    assert_int_equal(expert_cache_new(&options, &cache, &e), ERR_LIMIT);
    assert_non_null(strstr(e.text, "12288"));
    assert_null(cache);
}

static void test_expert_cache_each_failed_allocation_is_reported(void **state)
{
    (void)state;
    const struct expert_cache_options options = {.n_layer = 2,
                                                 .n_expert = 4,
                                                 .n_used = 1,
                                                 .layer_bytes = (uint64_t[]){PAGE, PAGE},
                                                 .arena_bytes = 2 * PAGE,
                                                 .unit_bytes = PAGE};
    const uint64_t before = alloc_live_blocks();
    for (uint64_t nth = 1;; nth++) {
        struct err e = {.code = ERR_OK};
        struct expert_cache *cache = NULL;
        alloc_fail_at(nth, 0);
        const enum err_code code = expert_cache_new(&options, &cache, &e);
        alloc_fail_at(0, 0);
        if (code == ERR_OK) {
            expert_cache_free(cache);
            assert_true(nth > 3);
            break;
        }
        assert_int_equal(code, ERR_NOMEM);
        assert_int_equal(alloc_live_blocks(), before);
    }
    assert_int_equal(alloc_live_blocks(), before);
}

static void unpin(struct rig *r, uint32_t layer, uint32_t expert)
{
    expert_cache_unpin(r->cache, layer, expert);
    r->pins[layer][expert]--;
}

/* Ends the read of each LOADING expert of `ids`, one in `fail_in` badly (0: none); those that came
 * are computed. */
static void finish(struct rig *r, uint32_t layer, const uint32_t *ids, uint32_t n, uint32_t fail_in)
{
    for (uint32_t k = 0; k < n; k++) {
        if (fail_in > 0 && draw(r, fail_in) == 0) {
            expert_cache_failed(r->cache, layer, ids[k]);
            r->pins[layer][ids[k]] = 0;
            continue;
        }
        expert_cache_arrived(r->cache, layer, ids[k]);
        unpin(r, layer, ids[k]);
    }
}

/* One layer of a step, as the engine does it: hits are pinned, misses are read while room is found,
 * then hits are computed, then what came, and so on in waves. `ids` are distinct. Gives the hits.
 */
static uint32_t step_layer(struct rig *r, uint32_t layer, uint32_t n_rows, const uint32_t *ids,
                           uint32_t n, uint32_t fail_in)
{
    uint32_t missing[MAX_EXPERTS], hit[MAX_EXPERTS], n_missing = 0, n_hit = 0;
    expert_cache_layer(r->cache, layer, n_rows);
    for (uint32_t k = 0; k < n; k++) {
        const enum expert_cache_state state = expert_cache_need(r->cache, layer, ids[k], 1);
        assert_int_not_equal(state, EXPERT_CACHE_LOADING);
        if (state == EXPERT_CACHE_ABSENT) {
            missing[n_missing++] = ids[k];
        } else {
            hit[n_hit++] = ids[k];
            r->pins[layer][ids[k]]++;
        }
    }
    const uint32_t hits = n_hit;
    for (uint32_t at = 0; at < n_missing || n_hit > 0;) {
        uint32_t to = at;
        uint64_t place;
        while (to < n_missing && to < at + r->depth &&
               expert_cache_reserve(r->cache, layer, missing[to], true, &place))
            r->pins[layer][missing[to++]]++;
        assert_true(to > at || n_hit > 0 || at == n_missing);
        while (n_hit > 0)
            unpin(r, layer, hit[--n_hit]);
        finish(r, layer, missing + at, to - at, fail_in);
        at = to;
    }
    return hits;
}

/* n distinct experts: mostly of a topic's own, which are few. */
static void choose(struct rig *r, uint32_t topic, uint32_t n, uint32_t *ids)
{
    for (uint32_t k = 0; k < n;) {
        const uint32_t own = (topic * 7 + draw(r, r->n_expert / 4)) % r->n_expert;
        const uint32_t id = draw(r, 4) > 0 ? own : draw(r, r->n_expert);
        bool again = false;
        for (uint32_t i = 0; i < k; i++)
            again |= ids[i] == id;
        if (!again)
            ids[k++] = id;
    }
}

static uint32_t step(struct rig *r, uint32_t topic, uint32_t n, uint32_t fail_in)
{
    uint32_t ids[MAX_EXPERTS], hits = 0;
    for (uint32_t l = 0; l < r->n_layer; l++) {
        choose(r, topic, n, ids);
        hits += step_layer(r, l, 1, ids, n, fail_in);
    }
    return hits;
}

static void test_expert_cache_any_budget_and_mix_keeps_its_books(void **state)
{
    (void)state;
    static const uint64_t mixes[][4] = {{7, 7, 7, 7}, {7, 8, 7, 8}, {3, 5, 11, 20}, {1, 64, 2, 9}};
    for (uint32_t mix = 0; mix < 4; mix++)
        for (uint32_t part = 1; part <= 12; part += 3) {
            struct rig r;
            uint64_t all = 0, largest = 0;
            for (uint32_t l = 0; l < 12; l++) {
                all += 32 * mixes[mix][l % 4];
                largest = mixes[mix][l % 4] > largest ? mixes[mix][l % 4] : largest;
            }
            const uint64_t pages = all * part / 12 < largest ? largest : all * part / 12;
            start(&r, 12, 32, 4, mixes[mix], 4, pages * PAGE);
            for (uint32_t s = 0; s < 400; s++) {
                step(&r, s / 50, s % 37 == 0 ? 32 : 4, s % 2 == 0 ? 9 : 0);
                check(&r);
            }
            done(&r);
        }
}

/* Millions of needs: topics come and go, chunks sweep through, reads fail. */
static void test_expert_cache_a_long_run_stays_in_its_budget(void **state)
{
    (void)state;
    struct rig r;
    const uint64_t sizes[] = {699, 699, 830};
    start(&r, 24, 128, 8, sizes, 3, 24ull * 128 * 250 * PAGE);
    for (uint32_t s = 0; s < 12000; s++) {
        step(&r, s / 500, s % 400 == 0 ? 128 : 8, 1000);
        assert_true(expert_cache_count(r.cache).used_bytes <= r.arena_bytes);
        if (s % 100 == 0)
            check(&r);
    }
    done(&r);
}

static void test_expert_cache_mixed_sizes_do_not_fragment_more_and_more(void **state)
{
    (void)state;
    struct rig r;
    const uint64_t sizes[] = {30, 35, 30, 70};
    uint64_t early = 0, late = 0;
    start(&r, 16, 64, 8, sizes, 4, 16ull * 64 * 41 / 3 * PAGE);
    for (uint32_t s = 0; s < 6000; s++) {
        step(&r, s / 20, 8, 0);
        const uint64_t idle = r.arena_bytes - expert_cache_count(r.cache).used_bytes;
        if (s >= 500 && s < 1500)
            early += idle;
        if (s >= 5000)
            late += idle;
    }
    assert_true(early / 1000 < r.arena_bytes / 50);
    assert_true(late / 1000 < r.arena_bytes / 50);
    done(&r);
}

/* A prompt of one size fills all of it first; then both sizes are used alike. */
static void test_expert_cache_few_places_go_to_the_size_that_they_were_cut_for(void **state)
{
    (void)state;
    struct rig r;
    const uint64_t sizes[] = {30, 30, 40, 40};
    uint64_t idle = 0;
    start(&r, 4, 16, 2, sizes, 4, 12 * 40 * PAGE);
    for (uint32_t s = 0; s < 1000; s++) {
        step(&r, s / 20, 2, 0);
        if (s >= 500)
            idle += r.arena_bytes - expert_cache_count(r.cache).used_bytes;
    }
    assert_true(idle / 500 < r.arena_bytes / 15);
    done(&r);
}

static void test_expert_cache_the_same_calls_give_the_same_places(void **state)
{
    (void)state;
    struct rig a, b;
    const uint64_t sizes[] = {7, 8};
    start(&a, 8, 64, 4, sizes, 2, 8ull * 64 * 2 * PAGE);
    start(&b, 8, 64, 4, sizes, 2, 8ull * 64 * 2 * PAGE);
    for (uint32_t s = 0; s < 2000; s++) {
        step(&a, s / 100, 4, 20);
        step(&b, s / 100, 4, 20);
    }
    for (uint32_t l = 0; l < 8; l++)
        for (uint32_t i = 0; i < 64; i++) {
            assert_int_equal(expert_cache_state(a.cache, l, i), expert_cache_state(b.cache, l, i));
            if (expert_cache_state(a.cache, l, i) != EXPERT_CACHE_ABSENT)
                assert_int_equal(expert_cache_place(a.cache, l, i),
                                 expert_cache_place(b.cache, l, i));
        }
    done(&a);
    done(&b);
}

static void test_expert_cache_pinned_and_loading_experts_stay(void **state)
{
    (void)state;
    struct rig r;
    uint64_t place;
    start(&r, 2, 8, 2, (uint64_t[]){1}, 1, 3 * PAGE);
    expert_cache_layer(r.cache, 0, 1);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(expert_cache_need(r.cache, 0, i, 1), EXPERT_CACHE_ABSENT);
        assert_true(expert_cache_reserve(r.cache, 0, i, true, &place));
    }
    assert_false(expert_cache_reserve(r.cache, 0, 3, true, &place));
    for (uint32_t i = 0; i < 3; i++) {
        expert_cache_arrived(r.cache, 0, i);
        assert_false(expert_cache_reserve(r.cache, 0, 3, true, &place));
    }
    assert_int_equal(expert_cache_need(r.cache, 0, 0, 1), EXPERT_CACHE_READY);
    expert_cache_unpin(r.cache, 0, 0);
    assert_false(expert_cache_reserve(r.cache, 0, 3, true, &place));
    expert_cache_unpin(r.cache, 0, 0);
    assert_true(expert_cache_reserve(r.cache, 0, 3, true, &place));
    assert_int_equal(expert_cache_state(r.cache, 0, 0), EXPERT_CACHE_ABSENT);
    done(&r);
}

static void test_expert_cache_forgets_what_is_there_and_not_pinned(void **state)
{
    (void)state;
    static const uint64_t size = 1;
    struct rig r;
    uint64_t place;
    start(&r, 2, 4, 1, &size, 1, 3 * PAGE);
    struct expert_cache *c = r.cache;
    expert_cache_layer(c, 0, 1);
    assert_true(expert_cache_forget(c, 0, 0)); /* ABSENT */
    for (uint32_t i = 0; i < 3; i++)
        assert_true(expert_cache_reserve(c, 0, i, i == 0, &place));
    assert_false(expert_cache_forget(c, 0, 1)); /* LOADING */
    for (uint32_t i = 0; i < 3; i++)
        expert_cache_arrived(c, 0, i);
    assert_false(expert_cache_forget(c, 0, 0)); /* pinned */
    assert_true(expert_cache_forget(c, 0, 1));
    assert_int_equal(expert_cache_state(c, 0, 1), EXPERT_CACHE_ABSENT);
    struct expert_cache_counts counts = expert_cache_count(c);
    assert_int_equal(counts.resident, 2);
    assert_int_equal(counts.evictions, 0);
    assert_int_equal(counts.used_bytes, 2 * PAGE);
    /* Its place is free, and whatever was the weakest is not taken for there. */
    assert_true(expert_cache_reserve(c, 1, 0, true, &place));
    expert_cache_arrived(c, 1, 0);
    assert_int_equal(expert_cache_count(c).evictions, 0);
    assert_true(expert_cache_reserve(c, 1, 1, true, &place)); /* in place of (0, 2) */
    assert_int_equal(expert_cache_state(c, 0, 2), EXPERT_CACHE_ABSENT);
    assert_int_equal(expert_cache_count(c).evictions, 1);
    expert_cache_arrived(c, 1, 1);
    expert_cache_unpin(c, 0, 0);
    assert_true(expert_cache_forget(c, 0, 0));
    assert_int_equal(expert_cache_resident(c, 0), 0);
    assert_int_equal(expert_cache_resident(c, 1), 2);
    done(&r);
}

static void test_expert_cache_a_failed_read_gives_its_bytes_back(void **state)
{
    (void)state;
    struct rig r;
    uint64_t place;
    start(&r, 1, 8, 2, (uint64_t[]){2}, 1, 2 * PAGE);
    expert_cache_layer(r.cache, 0, 1);
    assert_true(expert_cache_reserve(r.cache, 0, 5, true, &place));
    expert_cache_failed(r.cache, 0, 5);
    assert_int_equal(expert_cache_state(r.cache, 0, 5), EXPERT_CACHE_ABSENT);
    assert_int_equal(expert_cache_count(r.cache).used_bytes, 0);
    assert_true(expert_cache_reserve(r.cache, 0, 6, true, &place));
    assert_int_equal(place, 0);
    done(&r);
}

/* A read ahead takes what is worth less, never what is worth more. */
static void test_expert_cache_a_read_ahead_takes_only_what_is_worth_less(void **state)
{
    (void)state;
    struct rig r;
    uint64_t place;
    const uint32_t own[2] = {0, 1};
    start(&r, 1, 8, 2, (uint64_t[]){1}, 1, 2 * PAGE);
    for (uint32_t s = 0; s < 20; s++)
        step_layer(&r, 0, 1, own, 2, 0);
    assert_false(expert_cache_reserve(r.cache, 0, 5, false, &place));
    for (uint32_t s = 0; s < 20; s++) {
        expert_cache_layer(r.cache, 0, 1);
        (void)expert_cache_need(r.cache, 0, 5, 1);
    }
    assert_true(expert_cache_reserve(r.cache, 0, 5, false, &place));
    done(&r);
}

/* Chunks that use everything: a fixed part stays, as far as it reaches. */
static void test_expert_cache_a_cyclic_scan_keeps_a_fixed_part(void **state)
{
    (void)state;
    struct rig r;
    uint32_t all[32], hits = 0;
    for (uint32_t i = 0; i < 32; i++)
        all[i] = i;
    start(&r, 8, 32, 4, (uint64_t[]){1}, 1, 8ull * 32 / 2 * PAGE);
    r.depth = 4;
    for (uint32_t s = 0; s < 20; s++)
        for (uint32_t l = 0; l < 8; l++) {
            const uint32_t n = step_layer(&r, l, 64, all, 32, 0);
            hits += s >= 10 ? n : 0;
        }
    /* Of each 256 needs Belady hits 127. */
    assert_true(hits > 10 * 110);
    done(&r);
}

static void test_expert_cache_a_chunk_does_not_flush_what_decoding_uses(void **state)
{
    (void)state;
    struct rig r;
    uint32_t all[64], before = 0, after = 0;
    for (uint32_t i = 0; i < 64; i++)
        all[i] = i;
    start(&r, 8, 64, 4, (uint64_t[]){1}, 1, 8ull * 64 * 3 / 8 * PAGE);
    for (uint32_t s = 0; s < 300; s++) {
        const uint32_t n = step(&r, 3, 4, 0);
        before += s >= 290 ? n : 0;
    }
    for (uint32_t l = 0; l < 8; l++)
        step_layer(&r, l, 64, all, 64, 0);
    for (uint32_t s = 0; s < 10; s++)
        after += step(&r, 3, 4, 0);
    assert_true(before > 200);
    assert_true(after * 10 >= before * 8);
    done(&r);
}

/* Reads experts in that nobody waits for, while there is room and where something is worth less. */
static void read_ahead(struct rig *r, uint32_t n)
{
    for (uint32_t k = 0; k < n; k++) {
        const uint32_t layer = draw(r, r->n_layer), expert = draw(r, r->n_expert);
        uint64_t place;
        if (expert_cache_state(r->cache, layer, expert) != EXPERT_CACHE_ABSENT)
            continue;
        const bool room = expert_cache_has_room(r->cache, layer);
        const uint64_t evictions = expert_cache_count(r->cache).evictions;
        const bool got = expert_cache_reserve(r->cache, layer, expert, false, &place);
        if (room)
            assert_true(got && expert_cache_count(r->cache).evictions == evictions);
        if (got)
            expert_cache_arrived(r->cache, layer, expert);
    }
}

static void test_expert_cache_closed_units_hold_nothing_until_they_open(void **state)
{
    (void)state;
    static const uint64_t mixes[][4] = {{7, 7, 7, 7}, {7, 8, 7, 8}, {3, 5, 11, 20}};
    for (uint32_t mix = 0; mix < 3; mix++)
        for (uint32_t part = 4; part <= 12; part += 4) { /* of all: the last has a slab a layer */
            struct rig r;
            uint64_t all = 0;
            for (uint32_t l = 0; l < 8; l++)
                all += 16 * mixes[mix][l % 4];
            start_in_units(&r, 8, 16, 2, mixes[mix], 4, all * part / 12 * PAGE, 24 * PAGE);
            const uint32_t units = (uint32_t)(all * part / 12 / 24);
            for (uint32_t s = 0; s < 200; s++) {
                expert_cache_layer(r.cache, s % 8, 1);
                read_ahead(&r, 40);
                const uint32_t n = draw(&r, units + 2);
                for (uint32_t k = 0; k < n && s % 2 == 0; k++)
                    (void)expert_cache_close(r.cache);
                for (uint32_t u = 0; u < units && s % 2 == 1; u++)
                    if (expert_cache_is_closed(r.cache, u) && draw(&r, 2) == 0)
                        expert_cache_open(r.cache, u);
                check(&r);
            }
            while (expert_cache_close(r.cache) != EXPERT_CACHE_NONE)
                ;
            check(&r);
            for (uint32_t u = 0; u < units; u++)
                expert_cache_open(r.cache, u);
            for (uint32_t l = 0; l < 8; l++) /* all of it can be used again */
                for (uint32_t i = 0; i < 16; i++) {
                    uint64_t place;
                    if (expert_cache_state(r.cache, l, i) == EXPERT_CACHE_ABSENT &&
                        expert_cache_has_room(r.cache, l)) {
                        assert_true(expert_cache_reserve(r.cache, l, i, false, &place));
                        expert_cache_arrived(r.cache, l, i);
                    }
                }
            if (part == 12)
                assert_int_equal(expert_cache_count(r.cache).used_bytes, all * PAGE);
            check(&r);
            done(&r);
        }
}

static void test_expert_cache_closes_the_unit_that_is_used_least(void **state)
{
    (void)state;
    struct rig r;
    uint64_t place, used = 0;
    start_in_units(&r, 1, 16, 1, (uint64_t[]){4}, 1, 64 * PAGE, 8 * PAGE);
    for (uint32_t i = 0; i < 16; i++) {
        assert_true(expert_cache_reserve(r.cache, 0, i, false, &place));
        expert_cache_arrived(r.cache, 0, i);
    }
    for (uint32_t s = 0; s < 100; s++) { /* expert 5 and 14 are in use, the others are not */
        const uint32_t expert = s % 2 == 0 ? 5 : 14;
        (void)step_layer(&r, 0, 1, &expert, 1, 0);
    }
    expert_cache_pin(r.cache, 0, 9);
    for (uint32_t n = 0; n < 5; n++) {
        const uint32_t unit = expert_cache_close(r.cache);
        assert_true(unit < 8 && unit != expert_cache_place(r.cache, 0, 9) / (8 * PAGE));
    }
    assert_int_equal(expert_cache_state(r.cache, 0, 5), EXPERT_CACHE_READY);
    assert_int_equal(expert_cache_state(r.cache, 0, 14), EXPERT_CACHE_READY);
    used = expert_cache_count(r.cache).used_bytes;
    assert_int_equal(used, 3 * 8 * PAGE);
    assert_int_not_equal(expert_cache_close(r.cache), EXPERT_CACHE_NONE);
    assert_int_not_equal(expert_cache_close(r.cache), EXPERT_CACHE_NONE);
    assert_int_equal(expert_cache_close(r.cache), EXPERT_CACHE_NONE); /* one is pinned */
    assert_int_equal(expert_cache_state(r.cache, 0, 9), EXPERT_CACHE_READY);
    done(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_expert_cache_a_miss_becomes_a_hit),
        cmocka_unit_test(test_expert_cache_an_arena_below_one_expert_is_refused),
        cmocka_unit_test(test_expert_cache_each_failed_allocation_is_reported),
        cmocka_unit_test(test_expert_cache_closed_units_hold_nothing_until_they_open),
        cmocka_unit_test(test_expert_cache_closes_the_unit_that_is_used_least),
        cmocka_unit_test(test_expert_cache_pinned_and_loading_experts_stay),
        cmocka_unit_test(test_expert_cache_forgets_what_is_there_and_not_pinned),
        cmocka_unit_test(test_expert_cache_a_failed_read_gives_its_bytes_back),
        cmocka_unit_test(test_expert_cache_a_read_ahead_takes_only_what_is_worth_less),
        cmocka_unit_test(test_expert_cache_few_places_go_to_the_size_that_they_were_cut_for),
        cmocka_unit_test(test_expert_cache_the_same_calls_give_the_same_places),
        cmocka_unit_test(test_expert_cache_any_budget_and_mix_keeps_its_books),
        cmocka_unit_test(test_expert_cache_mixed_sizes_do_not_fragment_more_and_more),
        cmocka_unit_test(test_expert_cache_a_cyclic_scan_keeps_a_fixed_part),
        cmocka_unit_test(test_expert_cache_a_chunk_does_not_flush_what_decoding_uses),
        cmocka_unit_test(test_expert_cache_a_long_run_stays_in_its_budget),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

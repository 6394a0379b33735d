/* Readings of the GPU, one a second, and what they lead to. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "governor.h"
#include "rng.h"

#define MIB    (UINT64_C(1) << 20)
#define SECOND UINT64_C(1000000000)

enum {
    TOTAL = 10000, /* MiB of the device: a point is 100 */
    CHUNK = 32,
    CHUNKS = 20,
    NONE = GOVERNOR_UNKNOWN
};

static const struct governor_limits limits = {.warn_percent = 95,
                                              .critical_percent = 98,
                                              .temp_high = 85,
                                              .temp_low = 80,
                                              .chunk_bytes = CHUNK * MIB};

/* A governor, its islands, and the device's memory that others use. */
struct world {
    struct governor g;
    struct governor_actions a;
    uint32_t held;
    uint64_t now;
};

static struct world start(void)
{
    struct world w = {.held = CHUNKS, .now = SECOND};
    governor_start(&w.g, &limits);
    return w;
}

static void tell(struct world *w, const struct governor_readings *r)
{
    governor_update(&w->g, r, CHUNKS, w->held, w->now, &w->a);
    assert_true(w->a.chunks_return == 0 || w->a.chunks_take == 0);
    assert_true(w->a.chunks_return <= w->held && w->a.chunks_take <= CHUNKS - w->held);
    w->held = w->held - w->a.chunks_return + w->a.chunks_take;
    w->now += SECOND;
}

/* A second in which so many MiB are in use. */
static void use(struct world *w, uint64_t used)
{
    tell(w, &(struct governor_readings){
                .vram_free = (TOTAL - used) * MIB, .vram_total = TOTAL * MIB, .temperature = 50});
}

static void heat(struct world *w, int32_t celsius)
{
    tell(w, &(struct governor_readings){
                .vram_free = 5000 * MIB, .vram_total = TOTAL * MIB, .temperature = celsius});
}

/* ---- heat ---- */

static void test_governor_heat_limits_the_batch_with_hysteresis(void **state)
{
    (void)state;
    static const struct {
        int32_t celsius;
        uint32_t batch;
    } table[] = {{60, 0}, {85, 0}, {86, 2}, {85, 2}, {80, 2}, {79, 0},  {85, 0},
                 {84, 0}, {91, 2}, {81, 2}, {79, 0}, {86, 2}, {150, 2}, {20, 0}};
    struct world w = start();
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        heat(&w, table[i].celsius);
        if (w.a.batch != table[i].batch)
            fail_msg("reading %zu, %d C: %u, not %u", i, table[i].celsius, w.a.batch,
                     table[i].batch);
    }
}

static void test_governor_absurd_heat_changes_nothing(void **state)
{
    (void)state;
    static const int32_t absurd[] = {NONE, 0, -40, 151, 255, 65535, INT32_MAX, INT32_MIN};
    for (int hot = 0; hot < 2; hot++) {
        struct world w = start();
        heat(&w, hot ? 90 : 60);
        for (size_t i = 0; i < sizeof absurd / sizeof *absurd; i++) {
            heat(&w, absurd[i]);
            assert_int_equal(w.a.batch, hot ? GOVERNOR_BATCH : 0);
            assert_int_equal(w.g.temperature, hot ? 90 : 60);
        }
    }
}

static void test_governor_heat_without_readings_is_forgotten(void **state)
{
    (void)state;
    struct world w = start();
    heat(&w, 90);
    for (int s = 1; s < GOVERNOR_FORGET_MS / 1000; s++) {
        heat(&w, NONE);
        assert_int_equal(w.a.batch, GOVERNOR_BATCH);
    }
    heat(&w, NONE);
    assert_int_equal(w.a.batch, 0);
    assert_int_equal(w.g.temperature, GOVERNOR_UNKNOWN);
    heat(&w, 82); /* between both limits: not hot */
    assert_int_equal(w.a.batch, 0);
}

/* ---- memory ---- */

static void test_governor_memory_over_warn_gives_whole_chunks_back(void **state)
{
    (void)state;
    static const struct {
        uint64_t used;
        uint32_t back; /* so that 9,400 MiB are in use at most */
        bool pause;
    } table[] = {{9300, 0, false}, {9400, 0, false}, {9500, 0, false}, {9501, 4, true},
                 {9528, 4, true},  {9529, 5, true},  {9700, 10, true}, {9800, 13, true}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        struct world w = start();
        use(&w, table[i].used);
        assert_int_equal(w.a.chunks_return, table[i].back);
        assert_int_equal(w.a.pause, table[i].pause);
        assert_false(w.a.drop);
        assert_int_equal(w.a.batch, 0);
        if (table[i].back == 0)
            continue;
        use(&w, table[i].used - table[i].back * CHUNK);
        assert_int_equal(w.a.chunks_return, 0);
        assert_false(w.a.pause);
    }
}

static void test_governor_memory_between_goal_and_warn_stays_as_it_is(void **state)
{
    (void)state;
    struct world w = start();
    use(&w, 9600);
    assert_int_equal(w.a.chunks_return, 7);
    use(&w, 9450); /* warned, and not yet down to 9,400 */
    assert_true(w.a.pause);
    assert_int_equal(w.a.chunks_return, 0);
    use(&w, 9400);
    assert_false(w.a.pause);
    use(&w, 9450); /* and now it is fine */
    assert_false(w.a.pause);
}

static void test_governor_memory_that_stays_high_admits_again(void **state)
{
    (void)state;
    struct world w = start();
    w.held = 0;
    for (int i = 0; i < GOVERNOR_STEADY; i++) {
        use(&w, 9600 + i % 2); /* a MiB is no rise */
        assert_true(w.a.pause);
    }
    use(&w, 9601);
    assert_false(w.a.pause);
    assert_int_equal(w.a.batch, 0);
    use(&w, 9650); /* it rises still */
    assert_true(w.a.pause);
    assert_int_equal(w.a.batch, GOVERNOR_BATCH);
    for (int i = 0; i < GOVERNOR_STEADY; i++)
        use(&w, 9650);
    assert_false(w.a.pause);
    assert_int_equal(w.a.batch, GOVERNOR_BATCH);
    use(&w, 9300);
    assert_int_equal(w.a.batch, 0);
}

static void test_governor_critical_memory_drops_the_gpu_once_no_island_is_left(void **state)
{
    (void)state;
    struct world w = start();
    w.held = 3;
    use(&w, 9900);
    assert_int_equal(w.a.chunks_return, 3);
    assert_true(w.a.pause && !w.a.drop);
    use(&w, 9900);
    assert_true(w.a.pause && !w.a.drop);
    use(&w, 9790); /* not under 97 %: critical still */
    assert_true(w.a.pause && w.a.drop);

    w = start();
    w.held = 0;
    use(&w, 9900);
    use(&w, 9700); /* one reading alone is not believed */
    use(&w, 9900);
    assert_false(w.a.drop);
    use(&w, 9900);
    assert_true(w.a.drop);
}

static void test_governor_absurd_memory_changes_nothing(void **state)
{
    (void)state;
    static const struct governor_readings absurd[] = {
        {.vram_free = 0, .vram_total = 0},
        {.vram_free = 1, .vram_total = 0},
        {.vram_free = 2 * MIB, .vram_total = MIB},
        {.vram_free = UINT64_MAX, .vram_total = TOTAL * MIB},
        {.vram_free = 0, .vram_total = 99},
        {.vram_free = 1, .vram_total = UINT64_C(1) << 62}, /* no device has as much */
        {.vram_free = 0, .vram_total = UINT64_MAX}};
    struct world w = start();
    w.held = 0;
    use(&w, 9600);
    for (size_t i = 0; i < sizeof absurd / sizeof *absurd; i++) {
        tell(&w, &absurd[i]);
        assert_true(w.a.pause && !w.a.drop);
        assert_int_equal(w.a.chunks_return + w.a.chunks_take, 0);
    }
    for (int s = 0; s < GOVERNOR_FORGET_MS / 1000; s++)
        tell(&w, &absurd[0]);
    assert_false(w.a.pause);
    assert_int_equal(w.g.memory, GOVERNOR_MEMORY_FINE);
    const uint64_t most = UINT64_C(1) << 46;
    tell(&w, &(struct governor_readings){.vram_free = most / 30, .vram_total = most});
    assert_int_equal(w.g.memory, GOVERNOR_MEMORY_WARN);
}

static uint32_t seconds_until_taken(struct world *w, uint64_t used)
{
    for (uint32_t s = 1; s < 2000; s++) {
        use(w, used);
        if (w->a.chunks_take > 0)
            return s;
    }
    return 0;
}

static void test_governor_chunks_are_taken_again_once_there_is_room_for_long(void **state)
{
    (void)state;
    struct world w = start();
    use(&w, 9720);
    assert_int_equal(w.a.chunks_return, 10);
    assert_int_equal(seconds_until_taken(&w, 9380), 0); /* no room for one */
    assert_int_equal(seconds_until_taken(&w, 9304), GOVERNOR_HOLD_MS / 1000 + 1);
    assert_int_equal(w.a.chunks_take, 3); /* of 32 in 96 */
    for (int s = 0; s < 20; s++)
        use(&w, 9000);
    use(&w, 9390); /* begins anew */
    assert_int_equal(seconds_until_taken(&w, 9000), GOVERNOR_HOLD_MS / 1000 + 1);
    assert_int_equal(w.a.chunks_take, 7); /* no more than are missing */
    assert_int_equal(w.held, CHUNKS);
    assert_int_equal(seconds_until_taken(&w, 5000), 0);
}

static void test_governor_chunks_that_come_and_go_are_taken_ever_later(void **state)
{
    (void)state;
    struct world w = start();
    uint64_t hold_s = GOVERNOR_HOLD_MS / 1000;
    use(&w, 9800);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(seconds_until_taken(&w, 9000), hold_s + 1);
        use(&w, 9800);
        assert_true(w.a.chunks_return > 0);
        hold_s =
            hold_s * 2 < GOVERNOR_MOST_HOLD_MS / 1000 ? hold_s * 2 : GOVERNOR_MOST_HOLD_MS / 1000;
    }
    assert_int_equal(seconds_until_taken(&w, 9000), hold_s + 1);
    for (uint64_t s = 0; s <= hold_s; s++)
        use(&w, 9400);
    use(&w, 9800); /* that was long ago */
    assert_int_equal(seconds_until_taken(&w, 9000), GOVERNOR_HOLD_MS / 1000 + 1);
}

static void test_governor_refused_chunks_are_asked_for_later(void **state)
{
    (void)state;
    struct world w = start();
    use(&w, 9800);
    const uint32_t held = w.held;
    assert_true(seconds_until_taken(&w, 9000) > 0);
    w.held = held;
    governor_refused(&w.g, w.now);
    assert_int_equal(seconds_until_taken(&w, 9000), 2 * GOVERNOR_HOLD_MS / 1000 + 1);
}

static void test_governor_limits_of_100_never_act(void **state)
{
    (void)state;
    struct world w = start();
    struct governor_limits never = limits;
    never.warn_percent = never.critical_percent = 100;
    governor_start(&w.g, &never);
    use(&w, TOTAL);
    use(&w, TOTAL);
    use(&w, TOTAL);
    assert_false(w.a.pause || w.a.drop);
    assert_int_equal(w.a.chunks_return, 0);
}

static void test_governor_crossed_limits_are_cut(void **state)
{
    (void)state;
    struct world w = start();
    struct governor_limits crossed = limits;
    crossed.temp_low = 99;
    crossed.warn_percent = 99;
    governor_start(&w.g, &crossed);
    heat(&w, 86);
    assert_int_equal(w.a.batch, GOVERNOR_BATCH);
    heat(&w, 84);
    assert_int_equal(w.a.batch, 0);
    use(&w, 9801); /* critical, which gives back too */
    assert_true(w.a.chunks_return > 0);
}

static void test_governor_texts_say_what_is_slower(void **state)
{
    (void)state;
    char text[240];
    struct world w = start();
    use(&w, 5000);
    governor_describe(&w.g, CHUNKS, w.held, text, sizeof text);
    assert_string_equal(text, "");
    use(&w, 9501);
    governor_describe(&w.g, CHUNKS, w.held, text, sizeof text);
    assert_string_equal(text, "128.00 MiB of 640.00 MiB of islands given back to other programs");
    heat(&w, 90);
    governor_describe(&w.g, CHUNKS, w.held, text, sizeof text);
    assert_string_equal(text,
                        "128.00 MiB of 640.00 MiB of islands given back to other programs; the GPU "
                        "was over 85 C: 2 sequences a step until below 80 C");
    w = start();
    use(&w, 9600);
    governor_describe(&w.g, 0, 0, text, sizeof text);
    assert_string_equal(text, "over 95 % of the GPU's memory is in use");
}

/* A device that other programs come to and leave: use stays below what warns whenever islands can
 * see to that, and nothing is moved to and fro for nothing. */
static void test_governor_in_a_busy_machine_keeps_use_in_bounds(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct world w = start();
        uint64_t others = 8000, moves = 0;
        for (uint64_t s = 0; s < 3600; s++) {
            const uint64_t draw = rng_draw(seed, (uint32_t)s);
            if (draw % 60 == 0)
                others = 8000 + draw / 60 % 1500;
            const uint64_t rest = TOTAL - w.held * CHUNK;
            const uint64_t theirs = others < rest ? others : rest; /* they get no more */
            use(&w, theirs + w.held * CHUNK);
            moves += w.a.chunks_take > 0;
            assert_false(w.a.drop);
            if (w.held > 0)
                assert_true(theirs + w.held * CHUNK <= 9500);
        }
        assert_true(moves <= 3600 / (GOVERNOR_HOLD_MS / 1000) / 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_governor_heat_limits_the_batch_with_hysteresis),
        cmocka_unit_test(test_governor_absurd_heat_changes_nothing),
        cmocka_unit_test(test_governor_heat_without_readings_is_forgotten),
        cmocka_unit_test(test_governor_memory_over_warn_gives_whole_chunks_back),
        cmocka_unit_test(test_governor_memory_between_goal_and_warn_stays_as_it_is),
        cmocka_unit_test(test_governor_memory_that_stays_high_admits_again),
        cmocka_unit_test(test_governor_critical_memory_drops_the_gpu_once_no_island_is_left),
        cmocka_unit_test(test_governor_absurd_memory_changes_nothing),
        cmocka_unit_test(test_governor_chunks_are_taken_again_once_there_is_room_for_long),
        cmocka_unit_test(test_governor_chunks_that_come_and_go_are_taken_ever_later),
        cmocka_unit_test(test_governor_refused_chunks_are_asked_for_later),
        cmocka_unit_test(test_governor_limits_of_100_never_act),
        cmocka_unit_test(test_governor_crossed_limits_are_cut),
        cmocka_unit_test(test_governor_texts_say_what_is_slower),
        cmocka_unit_test(test_governor_in_a_busy_machine_keeps_use_in_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Every case is cut at each pair of places; the text must be the same, and no more held back than
 * may still change. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "gw_stop.h"

struct text_case {
    const char *stops[4];
    bool thinks, open, bare;
    const char *in;
    const char *content, *reasoning;
    int match; /* index, -1 none */
    int kept;  /* pushed bytes in front of the match; -1: all */
};

static const struct text_case cases[] = {
    {{0}, false, false, false, "plain", "plain", "", -1, -1},
    {{"END"}, false, false, false, "abEENDcd", "abE", "", 0, 3},
    {{"END"}, false, false, false, "abEN", "abEN", "", -1, -1},
    {{"bc", "abcd"}, false, false, false, "xabcdx", "x", "", 1, 1},
    {{"bc", "abcd"}, false, false, false, "xabce", "xa", "", 0, 2},
    {{"ab", "abcd"}, false, false, false, "xabcd", "x", "", 1, 1},
    {{"ab", "abcd"}, false, false, false, "xabc", "x", "", 0, 1},
    {{"", "aab"}, false, false, false, "aaab", "a", "", 1, 1},
    {{"\xE7\x8C\xAB"}, false, false, false, "\xE7\x8C\xAA\xE7\x8C\xAB!", "\xE7\x8C\xAA", "", 0, 3},
    {{0},
     false,
     false,
     false,
     "a\xF0\x9F\x99\x82"
     "b",
     "a\xF0\x9F\x99\x82"
     "b",
     "",
     -1,
     -1},
    {{0}, false, false, false, "a\xF0\x9F\x99", "a\xEF\xBF\xBD", "", -1, -1},
    {{"!"}, false, false, false, "\xFF\xE7\x8C!z", "\xEF\xBF\xBD\xEF\xBF\xBD", "", 0, 3},
    {{0}, false, false, false, "<think>a</think>b", "<think>a</think>b", "", -1, -1},
    {{0}, true, false, false, "<think>\nhm\n</think>\n\nyes", "\nyes", "hm", -1, -1},
    {{0}, true, false, false, "\n<think>hm</think>yes", "yes", "hm", -1, -1},
    {{0}, true, false, false, "yes <think>hm</think>", "yes <think>hm</think>", "", -1, -1},
    {{0}, true, false, false, "<thinly", "<thinly", "", -1, -1},
    {{0}, true, false, false, "<think>\n\n</think>\n\nyes", "\nyes", "", -1, -1},
    {{0},
     true,
     false,
     false,
     "<think>a\n\n</thin</think>b<think>",
     "b<think>",
     "a\n\n</thin",
     -1,
     -1},
    {{0}, true, false, false, "<think>a\n", "", "a\n", -1, -1},
    {{0}, true, true, false, "\na</think>\nb", "b", "\na", -1, -1},
    {{0}, true, true, true, "\na</think>\nb", "b", "a", -1, -1},
    {{"hm"}, true, false, false, "<think>ahmb</think>c", "", "a", 0, 8},
    {{"c"}, true, false, false, "<think>a</think>bcd", "b", "a", 0, 17},
    {{">b"}, true, false, false, "<think>a</think>bc", "", "a</think", 0, 15},
    {{">bx"}, true, false, false, "<think>a</think>bc", "bc", "a", -1, -1},
    {{"</think>"}, true, false, false, "<think>a</think>bc", "", "a", 0, 8},
};

struct made {
    char text[2][128];
    size_t n[2];
};

static struct gw_stop *start(const struct text_case *c)
{
    struct gw_stop_string stops[4];
    size_t n = 0;
    struct gw_stop *s;
    for (size_t i = 0; i < 4 && c->stops[i]; i++)
        stops[n++] = (struct gw_stop_string){c->stops[i], strlen(c->stops[i])};
    assert_int_equal(
        gw_stop_new(&(struct gw_stop_config){.stops = stops,
                                             .n_stops = n,
                                             .think_open = c->thinks ? "<think>" : NULL,
                                             .think_close = c->thinks ? "</think>" : NULL,
                                             .open = c->open,
                                             .open_bare = c->bare},
                    &s, NULL),
        ERR_OK);
    return s;
}

static void take(const struct gw_stop *s, struct made *m)
{
    const struct gw_stop_segment *segments;
    size_t n = gw_stop_segments(s, &segments);
    for (size_t i = 0; i < n; i++) {
        enum gw_stop_kind kind = segments[i].kind;
        assert_true(segments[i].size > 0);
        memcpy(m->text[kind] + m->n[kind], segments[i].text, segments[i].size);
        m->n[kind] += segments[i].size;
    }
}

static void push(struct gw_stop *s, const char *bytes, size_t n, struct made *m)
{
    assert_int_equal(gw_stop_push(s, bytes, n, NULL), ERR_OK);
    take(s, m);
}

static void check(const struct text_case *c, size_t first, size_t second)
{
    struct made m = {0};
    size_t n = strlen(c->in), index = 99;
    struct gw_stop *s = start(c);
    push(s, c->in, first, &m);
    push(s, c->in + first, second - first, &m);
    push(s, c->in + second, n - second, &m);
    assert_int_equal(gw_stop_finish(s, NULL), ERR_OK);
    take(s, &m);
    assert_string_equal(m.text[GW_STOP_CONTENT], c->content);
    assert_string_equal(m.text[GW_STOP_REASONING], c->reasoning);
    assert_int_equal(gw_stop_matched(s, &index), c->match >= 0);
    assert_int_equal(index, c->match >= 0 ? (size_t)c->match : 99);
    assert_int_equal(gw_stop_kept(s), c->kept < 0 ? n : (size_t)c->kept);
    gw_stop_free(s);
}

static void test_gw_stop_text_does_not_depend_on_the_cuts(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (size_t first = 0; first <= strlen(cases[i].in); first++)
            for (size_t second = first; second <= strlen(cases[i].in); second++)
                check(&cases[i], first, second);
}

static void test_gw_stop_byte_by_byte_gives_the_same_text(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct made m = {0};
        struct gw_stop *s = start(&cases[i]);
        for (const char *p = cases[i].in; *p; p++)
            push(s, p, 1, &m);
        assert_int_equal(gw_stop_finish(s, NULL), ERR_OK);
        take(s, &m);
        assert_string_equal(m.text[GW_STOP_CONTENT], cases[i].content);
        assert_string_equal(m.text[GW_STOP_REASONING], cases[i].reasoning);
        gw_stop_free(s);
    }
}

/* What must be out after each push of a byte. */
static void test_gw_stop_only_what_may_still_match_is_held(void **state)
{
    (void)state;
    const struct text_case c = {.stops = {"aab", "xyz"}};
    const char in[] = "qaaaxyq";
    const size_t out[] = {1, 1, 1, 2, 4, 4, 7};
    struct made m = {0};
    struct gw_stop *s = start(&c);
    for (size_t i = 0; i < 7; i++) {
        push(s, in + i, 1, &m);
        assert_int_equal(m.n[GW_STOP_CONTENT], out[i]);
    }
    gw_stop_free(s);
}

static void test_gw_stop_marker_prefix_is_held_no_longer_than_needed(void **state)
{
    (void)state;
    const struct text_case c = {.stops = {"XX"}, .thinks = true, .open = true};
    struct made m = {0};
    struct gw_stop *s = start(&c);
    push(s, "a\n</thX", 7, &m); /* no marker any more; the X may begin a stop string */
    assert_string_equal(m.text[GW_STOP_REASONING], "a\n</th");
    assert_true(gw_stop_in_reasoning(s));
    gw_stop_free(s);
}

static void test_gw_stop_no_memory_leaks_nothing(void **state)
{
    (void)state;
    uint64_t before = alloc_live_blocks();
    for (uint64_t k = 1; k < 20; k++) {
        struct gw_stop *s = NULL;
        const struct gw_stop_string stop = {"END", 3};
        const struct gw_stop_config config = {&stop, 1, "<think>", "</think>", false, false};
        alloc_fail_at(k, 0);
        if (gw_stop_new(&config, &s, NULL) == ERR_OK) {
            enum err_code code = gw_stop_push(s, "abc", 3, NULL);
            assert_true(code == ERR_OK || code == ERR_NOMEM);
        }
        alloc_fail_at(0, 0);
        gw_stop_free(s);
        assert_int_equal(alloc_live_blocks(), before);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_stop_text_does_not_depend_on_the_cuts),
        cmocka_unit_test(test_gw_stop_byte_by_byte_gives_the_same_text),
        cmocka_unit_test(test_gw_stop_only_what_may_still_match_is_held),
        cmocka_unit_test(test_gw_stop_marker_prefix_is_held_no_longer_than_needed),
        cmocka_unit_test(test_gw_stop_no_memory_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

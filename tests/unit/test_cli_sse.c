#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cli_sse.h"
#include "guard_page.h"

struct seen {
    char text[256];
    unsigned n;
    enum err_code answer;
};

static enum err_code on_event(void *context, const char *data, size_t n, struct err *e)
{
    struct seen *s = context;
    (void)e;
    assert_int_equal(data[n], '\0');
    strncat(s->text, data, sizeof s->text - strlen(s->text) - 2);
    strcat(s->text, "|");
    s->n++;
    return s->answer;
}

static const char sample[] =
    ":\n\ndata: one\n\n: a comment\ndata:two\r\ndata: three\r\n\r\n"
    "event: x\nid: 7\ndata: \xF0\x9F\x9A\x80\n\n\n\ndata: [DONE]\n\ndata: cut";
static const char wanted[] = "one|two\nthree|\xF0\x9F\x9A\x80|[DONE]|";

/* Feeds the sample in pieces of `step` bytes, the first one of `first`. */
static void feed(size_t first, size_t step)
{
    struct seen s = {0};
    struct cli_sse sse;
    cli_sse_init(&sse, on_event, &s);
    for (size_t at = 0, n; at < sizeof sample - 1; at += n) {
        n = at == 0 && first > 0 ? first : step;
        n = n < sizeof sample - 1 - at ? n : sizeof sample - 1 - at;
        char *piece = (char *)guard_page_copy(sample + at, n);
        assert_int_equal(cli_sse_feed(&sse, piece, n, NULL), ERR_OK);
        guard_page_free((uint8_t *)piece, n);
    }
    cli_sse_done(&sse);
    assert_string_equal(s.text, wanted);
}

static void test_cli_sse_whole_gives_events(void **state)
{
    (void)state;
    feed(0, sizeof sample);
}

static void test_cli_sse_byte_by_byte_gives_the_same(void **state)
{
    (void)state;
    feed(0, 1);
}

static void test_cli_sse_cut_anywhere_gives_the_same(void **state)
{
    (void)state;
    for (size_t cut = 1; cut < sizeof sample - 1; cut++)
        feed(cut, sizeof sample);
}

static void test_cli_sse_refused_event_ends_the_feed(void **state)
{
    struct seen s = {.answer = ERR_IO};
    struct cli_sse sse;
    (void)state;
    cli_sse_init(&sse, on_event, &s);
    assert_int_equal(cli_sse_feed(&sse, "data: a\n\ndata: b\n\n", 18, NULL), ERR_IO);
    assert_int_equal(s.n, 1);
    cli_sse_done(&sse);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cli_sse_whole_gives_events),
        cmocka_unit_test(test_cli_sse_byte_by_byte_gives_the_same),
        cmocka_unit_test(test_cli_sse_cut_anywhere_gives_the_same),
        cmocka_unit_test(test_cli_sse_refused_event_ends_the_feed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

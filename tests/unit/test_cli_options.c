#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cli_options.h"

/* Parses a line cut at spaces. */
static enum err_code parse(const char *line, struct cli_options *ret, struct err *e)
{
    static char copy[512];
    char *argv[32] = {"islet"}, *save = NULL;
    int argc = 1;
    snprintf(copy, sizeof copy, "%s", line);
    for (char *w = strtok_r(copy, " ", &save); w != NULL; w = strtok_r(NULL, " ", &save))
        argv[argc++] = w;
    *e = (struct err){0};
    return cli_options_parse(argc, argv, ret, e);
}

static void test_cli_options_good_lines_are_read(void **state)
{
    struct cli_options o;
    struct err e;
    (void)state;
    assert_int_equal(parse("run --max-tokens 5 --seed=7 --temperature 0.5 what is it", &o, &e),
                     ERR_OK);
    assert_int_equal(o.command, CLI_COMMAND_RUN);
    assert_int_equal(o.max_tokens, 5);
    assert_int_equal(o.seed, 7);
    assert_true(o.temperature == 0.5);
    assert_int_equal(o.n_words, 3);
    assert_int_equal(parse("run -- --model", &o, &e), ERR_OK);
    assert_string_equal(o.words[0], "--model");
    assert_true(isnan(o.temperature));
    assert_true(o.seed == CLI_NOT_GIVEN);
    assert_int_equal(parse("run -", &o, &e), ERR_OK);
    assert_string_equal(o.words[0], "-");
    assert_int_equal(parse("up --set a.b=c --set d.e=f --private", &o, &e), ERR_OK);
    assert_int_equal(o.n_sets, 2);
    assert_string_equal(o.sets[1], "d.e=f");
    assert_true(o.private_run);
    assert_int_equal(parse("ps -h", &o, &e), ERR_OK);
    assert_true(o.help);
    assert_int_equal(parse("-V", &o, &e), ERR_OK);
    assert_int_equal(o.command, CLI_COMMAND_VERSION);
}

static void test_cli_options_mistakes_are_named(void **state)
{
    static const struct {
        const char *line, *text;
    } rows[] = {
        {"rnu", "did you mean 'run'"},
        {"frobnicate", "`islet help` lists them"},
        {"run --modle x", "did you mean '--model'"},
        {"run --something-else", "see `islet help run`"},
        {"ps --model x", "unknown option '--model'"},
        {"run --seed", "--seed needs a value: --seed S"},
        {"run --max-tokens 1.5", "'1.5' is not a whole number from 0 to 1048576"},
        {"run --max-tokens -1", "'-1' is not a whole number"},
        {"run --seed 99999999999999999999", "is not a whole number"},
        {"run --temperature nan", "'nan' is not a number from 0 to 10"},
        {"status --json=1", "--json takes no value"},
        {"status now", "unexpected word 'now'"},
    };
    struct cli_options o = {.n_words = 77};
    struct err e;
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        assert_int_equal(parse(rows[i].line, &o, &e), ERR_ARGUMENT);
        if (strstr(e.text, rows[i].text) == NULL)
            fail_msg("%s: %s", rows[i].line, e.text);
        assert_int_equal(o.n_words, 77);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cli_options_good_lines_are_read),
        cmocka_unit_test(test_cli_options_mistakes_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

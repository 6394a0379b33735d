#include <signal.h>
#include <stdio.h>

#include "cli_bench.h"
#include "cli_chat.h"
#include "cli_options.h"
#include "cli_plan.h"
#include "cli_ps.h"
#include "cli_run.h"
#include "cli_status.h"
#include "cli_up.h"

enum {
    EXIT_USAGE = 2
};

static int help(const struct cli_options *o)
{
    enum cli_command about = CLI_COMMAND_HELP;
    struct err e = {0};
    if (o->n_words > 0 && cli_options_find(o->words[0], &about, &e) != ERR_OK) {
        fprintf(stderr, "islet: %s\n", e.text);
        return EXIT_USAGE;
    }
    cli_options_help(stdout, about);
    return 0;
}

static int version(const struct cli_options *o)
{
    (void)o;
    puts("islet " ISLET_VERSION);
    return 0;
}

int main(int argc, char **argv)
{
    static int (*const commands[CLI_COMMAND_N])(const struct cli_options *) = {
        [CLI_COMMAND_UP] = cli_up_run,        [CLI_COMMAND_PLAN] = cli_plan_main,
        [CLI_COMMAND_RUN] = cli_run_main,     [CLI_COMMAND_CHAT] = cli_chat_main,
        [CLI_COMMAND_PS] = cli_ps_main,       [CLI_COMMAND_STATUS] = cli_status_main,
        [CLI_COMMAND_BENCH] = cli_bench_main, [CLI_COMMAND_HELP] = help,
        [CLI_COMMAND_VERSION] = version,
    };
    struct cli_options o;
    struct err e = {0};
    signal(SIGPIPE, SIG_IGN);
    if (argc < 2) {
        cli_options_help(stderr, CLI_COMMAND_HELP);
        return EXIT_USAGE;
    }
    if (cli_options_parse(argc, argv, &o, &e) != ERR_OK) {
        fprintf(stderr, "islet: %s\n", e.text);
        return EXIT_USAGE;
    }
    if (o.help) {
        cli_options_help(stdout, o.command);
        return 0;
    }
    return commands[o.command](&o);
}

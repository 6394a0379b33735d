/* The command line of `islet`: one row per command and per option, from which parsing, --help and
 * "did you mean" come. Everything is lent by argv. */
#ifndef ISLET_CLI_OPTIONS_H
#define ISLET_CLI_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "err.h"

enum cli_command {
    CLI_COMMAND_UP,
    CLI_COMMAND_PLAN,
    CLI_COMMAND_RUN,
    CLI_COMMAND_CHAT,
    CLI_COMMAND_PS,
    CLI_COMMAND_STATUS,
    CLI_COMMAND_BENCH,
    CLI_COMMAND_HELP,
    CLI_COMMAND_VERSION,
    CLI_COMMAND_N
};

enum {
    CLI_MAX_SETS = 60,
    CLI_MAX_WORDS = 1024
};

/* Numbers that were not given are NAN (real) or CLI_NOT_GIVEN (whole). */
#define CLI_NOT_GIVEN INT64_MIN

struct cli_options {
    enum cli_command command;
    bool help;
    const char *server, *config, *model, *system, *clients;
    const char *sets[CLI_MAX_SETS]; /* "section.key=value" */
    unsigned n_sets;
    bool json, raw, quiet, private_run;
    int64_t max_tokens, seed, requests, watch;
    double temperature;
    const char *words[CLI_MAX_WORDS]; /* what is neither an option nor its value */
    unsigned n_words;
};

/* Reads argv[1..]. ERR_ARGUMENT names the word, the nearest known one and how to get help. */
enum err_code cli_options_parse(int argc, char **argv, struct cli_options *ret, struct err *e)
    __attribute__((warn_unused_result));

void cli_options_help(FILE *out, enum cli_command command); /* CLI_COMMAND_HELP: the list of all */
/* ERR_ARGUMENT for an unknown name, with the nearest known one. */
enum err_code cli_options_find(const char *name, enum cli_command *ret, struct err *e)
    __attribute__((warn_unused_result));

#endif

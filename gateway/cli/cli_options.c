#include "cli_options.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define BIT(command) (1u << CLI_COMMAND_##command)
#define SETTING_UP   (BIT(UP) | BIT(PLAN) | BIT(RUN) | BIT(CHAT) | BIT(PS) | BIT(STATUS) | BIT(BENCH))
#define CLIENTS      (BIT(RUN) | BIT(CHAT) | BIT(PS) | BIT(STATUS) | BIT(BENCH))
#define GENERATING   (BIT(RUN) | BIT(CHAT) | BIT(BENCH))

enum kind {
    FLAG,
    TEXT,
    LIST,
    WHOLE,
    REAL
};

struct option_row {
    const char *name, *argument; /* "--model", "FILE" */
    enum kind kind;
    size_t offset; /* in struct cli_options */
    unsigned commands;
    double low, high;
    const char *help;
};

#define AT(member) offsetof(struct cli_options, member)

static const struct option_row option_rows[] = {
    {"--model", "FILE", TEXT, AT(model), BIT(UP) | BIT(PLAN) | BIT(RUN), 0, 0,
     "GGUF file to serve (the setting model.path)"},
    {"--set", "KEY=VALUE", LIST, AT(sets), SETTING_UP, 0, 0,
     "one setting, as section.key=value; may stand several times"},
    {"--config", "FILE", TEXT, AT(config), SETTING_UP, 0, 0,
     "settings file instead of the default islet.conf"},
    {"--server", "ADDRESS", TEXT, AT(server), CLIENTS, 0, 0,
     "http://host:port or unix:/path; else $ISLET_SERVER, else as the settings say"},
    {"--private", NULL, FLAG, AT(private_run), BIT(UP), 0, 0,
     "a runtime directory of its own and no TCP port: cannot meet another Islet"},
    {"--quiet", NULL, FLAG, AT(quiet), BIT(UP) | BIT(RUN), 0, 0,
     "up: only warnings and errors of the log; run: no line of figures"},
    {"--system", "TEXT", TEXT, AT(system), BIT(RUN) | BIT(CHAT), 0, 0,
     "system message in front of the conversation"},
    {"--raw", NULL, FLAG, AT(raw), BIT(RUN), 0, 0,
     "complete the text as it is, without the chat template"},
    {"--max-tokens", "N", WHOLE, AT(max_tokens), GENERATING, 0, 1048576,
     "end the answer after N tokens"},
    {"--temperature", "T", REAL, AT(temperature), GENERATING, 0, 10,
     "0 is greedy, the default; larger is more varied"},
    {"--seed", "S", WHOLE, AT(seed), GENERATING, 0, 9223372036854774784.0,
     "seed of the draws: the same seed gives the same answer"},
    {"--watch", "SECONDS", WHOLE, AT(watch), BIT(PS), 1, 3600,
     "show again every so many seconds until Ctrl-C"},
    {"--clients", "LIST", TEXT, AT(clients), BIT(BENCH), 0, 0,
     "how many ask at the same time, e.g. 1,4,16 (the default)"},
    {"--requests", "N", WHOLE, AT(requests), BIT(BENCH), 1, 10000,
     "requests of each client, one after the other (4)"},
    {"--json", NULL, FLAG, AT(json), BIT(PLAN) | BIT(STATUS) | BIT(PS) | BIT(BENCH), 0, 0,
     "JSON instead of a table"},
    {"--help", NULL, FLAG, AT(help), ~0u, 0, 0, "this text"},
};

static const struct command_row {
    const char *name, *words, *summary, *more;
} command_rows[CLI_COMMAND_N] = {
    [CLI_COMMAND_UP] =
        {"up", "", "start the worker and the gateway, and keep them running",
         "Starts isletd and islet-gateway, shows both logs with the name of the process in front,\n"
         "restarts what dies, and prints one line `ready: ...` on standard output. Ctrl-C lets\n"
         "running answers finish; a second Ctrl-C ends at once.\n\n"
         "  islet up --model tinymoe-q8_0.gguf\n"
         "  islet up --model model.gguf --set memory.kv_budget='2 GiB' --set compute.threads=8\n"},
    [CLI_COMMAND_PLAN] =
        {"plan", "", "what a model needs, what fits, what speed to expect",
         "Says before anything is started what the model needs, how much of it fits under\n"
         "memory.ram_budget on this machine, and how fast it may decode: bytes a token over the\n"
         "rates of RAM and of this file's disk, which are measured within two seconds. Only the\n"
         "file's header and some experts are read. Speeds are given for no expert found in memory,\n"
         "for uniform routing, and for the locality usual for trained models.\n"
         "Exit status: 0 it would be served, 78 wrong settings or it would not: why is said.\n\n"
         "  islet plan --model model.gguf\n"
         "  islet plan --model model.gguf --set memory.ram_budget='3 GiB' --json\n"},
    [CLI_COMMAND_RUN] =
        {"run", "[PROMPT]", "ask one question and print the answer as it comes",
         "The answer goes to standard output, figures and errors to standard error. Without PROMPT,\n"
         "or with `-`, the prompt is read from standard input. With --model the file is served for\n"
         "this one question by processes of its own, whatever else runs.\n"
         "Exit status: 0 answered, 1 refused or failed, 2 usage, 69 no server, 130 interrupted.\n\n"
         "  islet run \"What is the capital of Norway?\"\n"
         "  islet run --temperature 0.8 --seed 7 \"Tell me a story.\"\n"
         "  islet run --model tinymoe-q8_0.gguf \"What is 64 - 27?\"\n"
         "  islet run - <question.txt >answer.txt\n"},
    [CLI_COMMAND_CHAT] =
        {"chat", "", "talk with the model; Ctrl-C stops an answer, Ctrl-D ends",
         "Lines are edited and remembered (history in the state directory). A line that begins\n"
         "with / is a command; /help lists them.\n\n"
         "  islet chat --system \"Answer briefly.\"\n"},
    [CLI_COMMAND_PS] = {"ps", "", "what runs now: sequences, memory, rates",
                        "Reads /status twice, half a second apart, for the rates.\n\n"
                        "  islet ps --watch 2\n"},
    [CLI_COMMAND_STATUS] =
        {"status", "", "all figures of the server",
         "The figures of /status as a table, or as the JSON that the server sent.\n"
         "Exit status: 0 serving, 1 up but not ready, 69 no server.\n\n"
         "  islet status --json\n"},
    [CLI_COMMAND_BENCH] =
        {"bench", "", "measure a running server: tokens/s, first token, gaps",
         "Each client asks different questions, one after the other, greedy and without an end\n"
         "token, so that every answer has --max-tokens tokens (64).\n\n"
         "  islet bench --clients 1,4,16 --requests 4\n"},
    [CLI_COMMAND_HELP] = {"help", "[COMMAND]", "this list, or more about one command", ""},
    [CLI_COMMAND_VERSION] = {"--version", "", "the version", ""},
};

enum {
    N_OPTIONS = sizeof option_rows / sizeof option_rows[0]
};

static size_t smallest(size_t a, size_t b, size_t c)
{
    size_t least = a < b ? a : b;
    return least < c ? least : c;
}

/* Edit distance of two short words. */
static size_t distance(const char *a, const char *b)
{
    size_t row[33], n = strlen(b);
    if (n > 32 || strlen(a) > 32)
        return SIZE_MAX;
    for (size_t j = 0; j <= n; j++)
        row[j] = j;
    for (size_t i = 1; a[i - 1] != '\0'; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            size_t above = row[j];
            row[j] = smallest(above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1]));
            diagonal = above;
        }
    }
    return row[n];
}

enum err_code cli_options_find(const char *name, enum cli_command *ret, struct err *e)
{
    size_t best = SIZE_MAX;
    const char *near = NULL;
    for (unsigned i = 0; i < CLI_COMMAND_N; i++) {
        if (strcmp(name, command_rows[i].name) == 0) {
            *ret = (enum cli_command)i;
            return ERR_OK;
        }
        size_t d = distance(name, command_rows[i].name);
        if (d < best) {
            best = d;
            near = command_rows[i].name;
        }
    }
    if (best <= 2)
        return err_set(e, ERR_ARGUMENT, "unknown command '%s'; did you mean '%s'?", name, near);
    return err_set(e, ERR_ARGUMENT, "unknown command '%s'; `islet help` lists them", name);
}

static const char *command_name(enum cli_command command)
{
    return command_rows[command].name;
}

static enum err_code option_find(enum cli_command command, const char *name, size_t n,
                                 const struct option_row **ret, struct err *e)
{
    char word[64];
    size_t best = SIZE_MAX;
    const char *near = NULL;
    snprintf(word, sizeof word, "%.*s", (int)(n < sizeof word ? n : sizeof word - 1), name);
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const struct option_row *row = &option_rows[i];
        if ((row->commands & (1u << command)) == 0)
            continue;
        if (strcmp(word, row->name) == 0) {
            *ret = row;
            return ERR_OK;
        }
        size_t d = distance(word, row->name);
        if (d < best) {
            best = d;
            near = row->name;
        }
    }
    if (best <= 3)
        return err_set(e, ERR_ARGUMENT, "%s: unknown option '%s'; did you mean '%s'?",
                       command_name(command), word, near);
    return err_set(e, ERR_ARGUMENT, "%s: unknown option '%s'; see `islet help %s`",
                   command_name(command), word, command_name(command));
}

static enum err_code number_read(const struct option_row *row, const char *text, void *at,
                                 struct err *e)
{
    char *end;
    errno = 0;
    if (row->kind == REAL) {
        double value = strtod(text, &end);
        if (end != text && *end == '\0' && value >= row->low && value <= row->high) {
            memcpy(at, &value, sizeof value);
            return ERR_OK;
        }
    } else {
        long long value = strtoll(text, &end, 10);
        if (end != text && *end == '\0' && errno == 0 && (double)value >= row->low &&
            (double)value <= row->high) {
            int64_t whole = value;
            memcpy(at, &whole, sizeof whole);
            return ERR_OK;
        }
    }
    return err_set(e, ERR_ARGUMENT, "%s: '%s' is not a %snumber from %.0f to %.0f", row->name, text,
                   row->kind == WHOLE ? "whole " : "", row->low, row->high);
}

static enum err_code value_store(struct cli_options *o, const struct option_row *row,
                                 const char *text, struct err *e)
{
    void *at = (char *)o + row->offset;
    switch (row->kind) {
    case FLAG:
        *(bool *)at = true;
        return ERR_OK;
    case TEXT:
        *(const char **)at = text;
        return ERR_OK;
    case LIST:
        if (o->n_sets == CLI_MAX_SETS)
            return err_set(e, ERR_LIMIT, "%s: more than %d times", row->name, CLI_MAX_SETS);
        o->sets[o->n_sets++] = text;
        return ERR_OK;
    default:
        return number_read(row, text, at, e);
    }
}

/* One option at argv[*i]; its value may be the next word, then *i moves on. */
static enum err_code option_read(struct cli_options *o, int argc, char **argv, int *i,
                                 struct err *e)
{
    const char *word = argv[*i], *equals = strchr(word, '=');
    const struct option_row *row = NULL;
    const char *value = NULL;
    enum err_code code = option_find(
        o->command, strcmp(word, "-h") == 0 ? "--help" : word,
        strcmp(word, "-h") == 0 ? 6 : (equals != NULL ? (size_t)(equals - word) : strlen(word)),
        &row, e);
    if (code != ERR_OK)
        return code;
    if (row->kind == FLAG) {
        if (equals != NULL)
            return err_set(e, ERR_ARGUMENT, "%s takes no value", row->name);
    } else if (equals != NULL) {
        value = equals + 1;
    } else if (*i + 1 < argc) {
        value = argv[++*i];
    } else {
        return err_set(e, ERR_ARGUMENT, "%s needs a value: %s %s", row->name, row->name,
                       row->argument);
    }
    return value_store(o, row, value, e);
}

static enum err_code words_check(const struct cli_options *o, struct err *e)
{
    bool takes_words = o->command == CLI_COMMAND_RUN || o->command == CLI_COMMAND_HELP;
    if (o->n_words > 0 && !takes_words)
        return err_set(e, ERR_ARGUMENT, "%s: unexpected word '%s'; see `islet help %s`",
                       command_name(o->command), o->words[0], command_name(o->command));
    return ERR_OK;
}

enum err_code cli_options_parse(int argc, char **argv, struct cli_options *ret, struct err *e)
{
    struct cli_options o = {.command = CLI_COMMAND_HELP,
                            .max_tokens = CLI_NOT_GIVEN,
                            .seed = CLI_NOT_GIVEN,
                            .requests = CLI_NOT_GIVEN,
                            .watch = CLI_NOT_GIVEN,
                            .temperature = NAN};
    enum err_code code = ERR_OK;
    bool only_words = false;
    if (argc < 2)
        return err_set(e, ERR_ARGUMENT, "a command is missing");
    const char *first = argv[1];
    if (strcmp(first, "-h") == 0 || strcmp(first, "--help") == 0)
        first = "help";
    if (strcmp(first, "-V") == 0 || strcmp(first, "version") == 0)
        first = "--version";
    code = cli_options_find(first, &o.command, e);
    for (int i = 2; code == ERR_OK && i < argc; i++) {
        if (!only_words && strcmp(argv[i], "--") == 0)
            only_words = true;
        else if (!only_words && argv[i][0] == '-' && argv[i][1] != '\0')
            code = option_read(&o, argc, argv, &i, e);
        else if (o.n_words < CLI_MAX_WORDS)
            o.words[o.n_words++] = argv[i];
        else
            code = err_set(e, ERR_LIMIT, "more than %d words", CLI_MAX_WORDS);
    }
    if (code == ERR_OK)
        code = words_check(&o, e);
    if (code == ERR_OK)
        *ret = o;
    return code;
}

static void help_all(FILE *out)
{
    fprintf(out, "Islet " ISLET_VERSION
                 " serves mixture-of-experts language models, with the same answer every time.\n\n"
                 "usage: islet COMMAND [OPTION...]\n\n");
    for (unsigned i = 0; i < CLI_COMMAND_N; i++)
        fprintf(out, "  %-10s %s\n", command_rows[i].name, command_rows[i].summary);
    fprintf(out, "\nTo begin:\n"
                 "  islet up --model FILE.gguf        in one terminal\n"
                 "  islet chat                        in another\n"
                 "\nThe server speaks the OpenAI API at http://127.0.0.1:8484/v1. "
                 "`islet help COMMAND` tells more.\n");
}

void cli_options_help(FILE *out, enum cli_command command)
{
    const struct command_row *row = &command_rows[command];
    if (command == CLI_COMMAND_HELP) {
        help_all(out);
        return;
    }
    fprintf(out, "usage: islet %s [OPTION...]%s%s\n\n%s\n\n%s\nOptions:\n", row->name,
            row->words[0] != '\0' ? " " : "", row->words, row->summary, row->more);
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const struct option_row *o = &option_rows[i];
        char left[48];
        if ((o->commands & (1u << command)) == 0)
            continue;
        snprintf(left, sizeof left, "%s%s%s", o->name, o->argument != NULL ? " " : "",
                 o->argument != NULL ? o->argument : "");
        fprintf(out, "  %-20s %s\n", left, o->help);
    }
}

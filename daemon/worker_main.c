/* isletd: the worker process. Options to exit status. */
#include <getopt.h>
#include <stdio.h>
#include <string.h>

#include "err.h"
#include "fault.h"
#include "settings.h"
#include "worker_loop.h"
#include "worker_plan.h"
#include "worker_socket.h"

enum {
    WORKER_MAIN_SETS = 64
};

static void worker_main_help(void)
{
    puts(
        "isletd: the worker of Islet. It holds the model and computes tokens; islet-gateway talks\n"
        "to it over a Unix socket and serves HTTP. `islet up` starts both.\n"
        "\n"
        "  isletd --set model.path=FILE.gguf        serve a model, all else at its default\n"
        "  isletd --config /etc/islet/islet.conf    settings from a file\n"
        "\n"
        "  --config FILE            read FILE instead of ~/.config/islet/islet.conf or\n"
        "                           /etc/islet/islet.conf\n"
        "  --set SECTION.KEY=VALUE  override a setting; may be given several times\n"
        "  --plan                   say what the model needs, what fits and what speed to expect,\n"
        "                           without loading it, and end; --json: as one JSON object\n"
        "  --check-config           read the settings, say what is wrong, and end\n"
        "  --help-config            every setting with its default, range and meaning\n"
        "  --list-crash-points      names for ISLET_CRASH_AT=name:n (tests)\n"
        "  --version, --help\n"
        "\n"
        "Signals: SIGTERM and SIGINT let running answers finish (server.drain_deadline); a second\n"
        "one ends at once. SIGHUP reads the settings again and looks for a missing model again.\n"
        "Exit status: 0 asked to stop, 64 wrong usage, 70 the GPU is lost to this process (start\n"
        "another one), 71 cannot listen, 75 already running, 78 wrong settings\n"
        "(or with --plan, a model that would not be served).");
}

static enum err_code worker_main_settings(const struct worker_loop_options *options,
                                          struct settings **ret, struct err *e)
{
    enum err_code code = settings_load(options->config, options->sets, options->n_sets, ret, e);
    if (code == ERR_OK && settings_text(*ret, SETTING_model_path)[0] == '\0') {
        settings_free(*ret);
        *ret = NULL;
        code = err_set(e, ERR_ARGUMENT,
                       "model.path is not set: use --set model.path=FILE.gguf, or set it under "
                       "[model] in islet.conf");
    }
    return code;
}

static int worker_main_check(const struct worker_loop_options *options)
{
    struct settings *settings = NULL;
    struct err e = {0};
    if (worker_main_settings(options, &settings, &e) != ERR_OK) {
        fprintf(stderr, "isletd: %s\n", e.text);
        return WORKER_EXIT_CONFIG;
    }
    const char *path = settings_path(settings);
    printf("isletd: settings are good (%s)\n", path[0] != '\0' ? path : "no file");
    settings_free(settings);
    return 0;
}

static int worker_main_plan(const struct worker_loop_options *options, bool json)
{
    struct settings *settings = NULL;
    struct err e = {0};
    if (worker_main_settings(options, &settings, &e) != ERR_OK) {
        fprintf(stderr, "isletd: %s\n", e.text);
        return WORKER_EXIT_CONFIG;
    }
    const int status = worker_plan_run(settings, json);
    settings_free(settings);
    return status;
}

static int worker_main_run(struct worker_loop_options *options)
{
    int status = WORKER_LOOP_AGAIN;
    while (status == WORKER_LOOP_AGAIN) {
        struct settings *settings = NULL;
        struct err e = {0}, ignored = {0};
        enum err_code code = worker_main_settings(options, &settings, &e);
        options->trouble = code != ERR_OK ? e.text : NULL;
        if (code != ERR_OK)
            fprintf(stderr, "isletd: %s\n", e.text);
        /* With a socket that somebody else holds open it stays, and says why it cannot serve. */
        if (code != ERR_OK && (options->inherited_fd < 0 ||
                               settings_load("/dev/null", NULL, 0, &settings, &ignored) != ERR_OK))
            return WORKER_EXIT_CONFIG;
        worker_loop_setup_log(settings);
        status = worker_loop_run(settings, options);
    }
    return status;
}

int main(int argc, char **argv)
{
    static const struct option known[] = {{"config", required_argument, NULL, 'c'},
                                          {"set", required_argument, NULL, 's'},
                                          {"help", no_argument, NULL, 'h'},
                                          {"version", no_argument, NULL, 'v'},
                                          {"check-config", no_argument, NULL, 'k'},
                                          {"plan", no_argument, NULL, 'p'},
                                          {"json", no_argument, NULL, 'j'},
                                          {"help-config", no_argument, NULL, 'H'},
                                          {"list-crash-points", no_argument, NULL, 'L'},
                                          {NULL, 0, NULL, 0}};
    const char *sets[WORKER_MAIN_SETS];
    struct worker_loop_options options = {.sets = sets, .inherited_fd = -1};
    bool check = false, plan = false, json = false;
    for (int c; (c = getopt_long(argc, argv, "h", known, NULL)) != -1;) {
        switch (c) {
        case 'c':
            options.config = optarg;
            break;
        case 's':
            if (options.n_sets == WORKER_MAIN_SETS) {
                fprintf(stderr, "isletd: more than %d --set\n", WORKER_MAIN_SETS);
                return WORKER_EXIT_USAGE;
            }
            sets[options.n_sets++] = optarg;
            break;
        case 'k':
            check = true;
            break;
        case 'p':
            plan = true;
            break;
        case 'j':
            json = true;
            break;
        case 'h':
            worker_main_help();
            return 0;
        case 'v':
            puts("isletd " ISLET_VERSION);
            return 0;
        case 'H':
            settings_print_help(stdout);
            return 0;
        case 'L':
            fault_list(stdout);
            return 0;
        default:
            fputs("isletd: see isletd --help\n", stderr);
            return WORKER_EXIT_USAGE;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "isletd: \"%s\" is not an option: see isletd --help\n", argv[optind]);
        return WORKER_EXIT_USAGE;
    }
    if (json && !plan) {
        fputs("isletd: --json goes with --plan\n", stderr);
        return WORKER_EXIT_USAGE;
    }
    if (plan)
        return worker_main_plan(&options, json);
    if (check)
        return worker_main_check(&options);
    fault_setup();
    options.inherited_fd = worker_socket_inherited();
    return worker_main_run(&options);
}

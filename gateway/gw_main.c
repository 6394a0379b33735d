/* islet-gateway: options to exit code. */
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#include "alloc.h"
#include "fault.h"
#include "gw_api.h"
#include "gw_auth.h"
#include "gw_config.h"
#include "gw_service.h"
#include "log.h"
#include "paths.h"
#include "settings.h"

enum {
    EXIT_SYSTEM = 71,  /* cannot bind */
    EXIT_RUNNING = 75, /* another gateway has the socket */
    EXIT_CONFIG = 78,
    MAX_SETS = 256,
    MMAP_BYTES = 512 * 1024 /* larger blocks go back to the system when they are freed */
};

struct options {
    const char *config; /* NULL: the usual places */
    const char *sets[MAX_SETS];
    unsigned n_sets;
};

struct gateway { /* what the hooks of the loop get */
    struct gw_service service;
    const struct options *options;
};

static void help_print(FILE *out)
{
    fputs(
        "islet-gateway: the HTTP server of Islet (OpenAI-style API), in front of the worker isletd\n"
        "\n"
        "usage: islet-gateway [--config FILE] [--set SECTION.KEY=VALUE]...\n"
        "\n"
        "  --config FILE         settings; without it $XDG_CONFIG_HOME/islet/islet.conf,\n"
        "                        ~/.config/islet/islet.conf or /etc/islet/islet.conf\n"
        "  --set SECTION.KEY=V   one setting, wins over the file; may be repeated\n"
        "  --help-config         every setting with its default and meaning\n"
        "  --print-config        a commented islet.conf with every default\n"
        "  --check-config FILE   says what is wrong in FILE, or nothing; exit code 0 or 78\n"
        "  --list-crash-points   names for ISLET_CRASH_AT (tests)\n"
        "  --version, --help\n"
        "\n"
        "Both programs need the same model.path. By hand:\n"
        "  isletd --set model.path=model.gguf &\n"
        "  islet-gateway --set model.path=model.gguf\n"
        "  curl localhost:8484/v1/chat/completions -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'\n"
        "or both at once: islet up --model model.gguf\n"
        "\n"
        "SIGHUP reads the settings again, SIGTERM lets running answers finish (server.drain_deadline).\n"
        "Exit codes: 0 asked to stop, 71 an address or socket cannot be had, 75 already running, 78 bad\n"
        "configuration.\n",
        out);
}

/* What is not said by a row of its own, and the keys. */
static enum err_code settings_verify(const struct settings *s, struct gw_auth **ret, struct err *e)
{
    enum err_code code = gw_config_check(s, e);
    if (code != ERR_OK)
        return code;
    return gw_auth_new(settings_text(s, SETTING_server_hosts),
                       settings_text(s, SETTING_server_cors),
                       settings_text(s, SETTING_server_api_key_file), ret, e);
}

static int check_config(const char *path)
{
    struct settings *settings = NULL;
    struct gw_auth *auth = NULL;
    struct err e = {0};
    enum err_code code = settings_load(path, NULL, 0, &settings, &e);
    if (code == ERR_OK)
        code = settings_verify(settings, &auth, &e);
    gw_auth_free(auth);
    settings_free(settings);
    if (code == ERR_OK)
        return 0;
    fprintf(stderr, "islet-gateway: %s\n", e.text);
    return EXIT_CONFIG;
}

/* Fills *o. Returns -1 to go on, else the exit code. */
static int options_read(int argc, char **argv, struct options *o)
{
    enum {
        CONFIG = 256,
        SET,
        HELP_CONFIG,
        PRINT_CONFIG,
        CHECK_CONFIG,
        CRASH_POINTS,
        VERSION
    };
    static const struct option table[] = {
        {"config", required_argument, NULL, CONFIG},
        {"set", required_argument, NULL, SET},
        {"help-config", no_argument, NULL, HELP_CONFIG},
        {"print-config", no_argument, NULL, PRINT_CONFIG},
        {"check-config", required_argument, NULL, CHECK_CONFIG},
        {"list-crash-points", no_argument, NULL, CRASH_POINTS},
        {"version", no_argument, NULL, VERSION},
        {"help", no_argument, NULL, 'h'},
        {0},
    };
    for (;;) {
        switch (getopt_long(argc, argv, "h", table, NULL)) {
        case -1:
            if (optind == argc)
                return -1;
            fprintf(stderr, "islet-gateway: what is \"%s\"? See --help\n", argv[optind]);
            return EXIT_CONFIG;
        case CONFIG:
            o->config = optarg;
            break;
        case SET:
            if (o->n_sets == MAX_SETS) {
                fprintf(stderr, "islet-gateway: --set: more than %d\n", MAX_SETS);
                return EXIT_CONFIG;
            }
            o->sets[o->n_sets++] = optarg;
            break;
        case HELP_CONFIG:
            settings_print_help(stdout);
            return 0;
        case PRINT_CONFIG:
            settings_print_example(stdout);
            return 0;
        case CHECK_CONFIG:
            return check_config(optarg);
        case CRASH_POINTS:
            fault_list(stdout);
            return 0;
        case VERSION:
            printf("islet-gateway %s\n", ISLET_VERSION);
            return 0;
        case 'h':
            help_print(stdout);
            return 0;
        default:
            fprintf(stderr, "islet-gateway: see --help\n");
            return EXIT_CONFIG;
        }
    }
}

/* ---- settings ---- */

static void log_apply(const struct settings *s)
{
    static const enum log_level levels[] = {LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO,
                                            LOG_LEVEL_DEBUG};
    static const enum log_format formats[] = {LOG_FORMAT_TEXT, LOG_FORMAT_TEXT, LOG_FORMAT_JSON,
                                              LOG_FORMAT_JOURNAL};
    unsigned format = settings_choice(s, SETTING_log_format);
    bool journal = format == 0 && log_under_journal();
    log_setup(levels[settings_choice(s, SETTING_log_level)],
              journal ? LOG_FORMAT_JOURNAL : formats[format]);
}

static bool sockets_inherited(void)
{
    const char *fds = getenv("LISTEN_FDS"), *pid = getenv("LISTEN_PID");
    return fds && pid && strtol(pid, NULL, 10) == (long)getpid() && strtol(fds, NULL, 10) > 0;
}

/* Settings and keys. False: bad, and *e says why. */
static bool configure(struct gw_service *s, const struct options *o, struct err *e)
{
    if (settings_load(o->config, o->sets, o->n_sets, &s->settings, e) != ERR_OK)
        return false;
    log_apply(s->settings);
    if (settings_verify(s->settings, &s->auth, e) == ERR_OK)
        return true;
    settings_free(s->settings);
    s->settings = NULL;
    return false;
}

/* ---- hooks of the loop ---- */

static void on_reload(void *context)
{
    struct gateway *g = context;
    struct settings *next = NULL;
    struct err e = {0};
    enum err_code code =
        settings_load(g->options->config, g->options->sets, g->options->n_sets, &next, &e);
    if (code == ERR_OK)
        code = gw_service_reload(&g->service, next, &e);
    if (code != ERR_OK) {
        settings_free(next);
        log_warn("settings", "reload_refused", "reason=\"%s\" continuing=\"the old values stay\"",
                 e.text);
        gw_loop_status(g->service.loop, "reload refused: %s", e.text);
        return;
    }
    log_apply(g->service.settings);
    log_info("settings", "reloaded", "path=%s", settings_path(g->service.settings));
}

static void on_draining(void *context)
{
    gw_service_drain(&((struct gateway *)context)->service);
}

static void on_deadline(void *context)
{
    gw_service_deadline(&((struct gateway *)context)->service);
}

static void on_stopped(void *context)
{
    gw_service_stop(&((struct gateway *)context)->service);
}

/* ---- start ---- */

static enum err_code loop_start(struct gateway *g, struct err *e)
{
    struct gw_service *s = &g->service;
    char path[108] = "";
    struct gw_loop_options o = {
        .listen = "none",
        .use_inherited = true,
        .handle_signals = true,
        .limits = gw_limits_default(),
        .auth = s->auth,
        .routes = gw_api_routes(s),
        .drain_deadline_ms = 1000,
        .hooks = {g, on_reload, on_draining, on_deadline, on_stopped},
    };
    if (s->settings) {
        const char *socket = settings_text(s->settings, SETTING_server_socket);
        o.listen = settings_text(s->settings, SETTING_server_listen);
        o.limits.max_body_bytes = settings_bytes(s->settings, SETTING_server_max_body);
        o.drain_deadline_ms = settings_ms(s->settings, SETTING_server_drain_deadline);
        if (strcmp(socket, "off") != 0 && !sockets_inherited()) {
            enum err_code code = paths_socket(socket, "http.sock", path, sizeof path, e);
            if (code != ERR_OK)
                return code;
            o.socket = path;
        }
    }
    return gw_loop_new(&o, &s->loop, e);
}

static int exit_code_of(const struct err *e)
{
    if (e->code == ERR_BUSY)
        return EXIT_RUNNING;
    return e->code == ERR_ARGUMENT || e->code == ERR_FORMAT ? EXIT_CONFIG : EXIT_SYSTEM;
}

static int serve(struct gateway *g)
{
    struct gw_service *s = &g->service;
    struct err e = {0};
    bool configured = configure(s, g->options, &e);
    if (configured && settings_text(s->settings, SETTING_model_path)[0] == '\0' &&
        !sockets_inherited()) {
        configured = false;
        err_set(&e, ERR_ARGUMENT,
                "model.path is not set; name the GGUF file to serve in islet.conf or by --set "
                "model.path=FILE");
    }
    if (!configured && !sockets_inherited()) {
        fprintf(stderr, "islet-gateway: %s\n", e.text);
        return EXIT_CONFIG;
    }
    if (!configured) {
        snprintf(s->trouble, sizeof s->trouble, "%s; correct it, then send SIGHUP", e.text);
        log_error("gateway", "configuration", "reason=\"%s\"", e.text);
        struct err again = {0};
        if (gw_auth_new("", "", "", &s->auth, &again) != ERR_OK)
            return EXIT_SYSTEM;
    }
    struct err start = {0};
    if (loop_start(g, &start) != ERR_OK) {
        fprintf(stderr, "islet-gateway: %s\n", start.text);
        return exit_code_of(&start);
    }
    gw_service_start(s);
    gw_loop_ready(s->loop);
    gw_loop_run(s->loop);
    return 0;
}

static void *json_get(size_t bytes)
{
    return alloc_get(ALLOC_REQUEST, bytes);
}

int main(int argc, char **argv)
{
    struct options options = {0};
    struct gateway gateway = {.options = &options};
    int code = options_read(argc, argv, &options);
    if (code >= 0)
        return code;
    fault_setup();
    signal(SIGPIPE, SIG_IGN);
    json_set_alloc_funcs(json_get, alloc_free);
    json_object_seed(0); /* now: later, several threads would do it at a time */
    mallopt(M_MMAP_THRESHOLD, MMAP_BYTES);
    mallopt(M_MXFAST, 0); /* freed blocks join at once, so that malloc_trim finds whole pages */
    gateway.service.ticks = ticks_real();
    gateway.service.started_ns = ticks_ns(gateway.service.ticks);
    list_init(&gateway.service.status_waiters);
    code = serve(&gateway);
    gw_service_done(&gateway.service);
    return code;
}

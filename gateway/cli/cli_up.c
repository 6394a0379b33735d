#include "cli_up.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <uv.h>

#include "alloc.h"
#include "cli_child.h"
#include "cli_figures.h"
#include "cli_options.h"
#include "cli_server.h"
#include "cli_term.h"
#include "settings.h"

enum {
    READY_POLL_MS = 50,
    GIVE_UP_AFTER = 5
};
enum {
    EXIT_USAGE = 64,
    EXIT_FAILED = 70,
    EXIT_SYSTEM = 71,
    EXIT_RUNNING = 75,
    EXIT_CONFIG = 78
};

struct up {
    const struct cli_options *o;
    struct cli_term term;
    struct settings *settings;
    struct cli_server server; /* where to look whether it is ready */
    uv_loop_t loop;
    uv_signal_t interrupt, terminate, hangup, child;
    uv_timer_t poll;
    struct cli_child worker, gateway;
    const char *args[CLI_CHILD_MAX_ARGS];
    unsigned n_args;
    char model_set[4200];
    char private_dir[64];
    unsigned stops; /* times that the end was asked for */
    bool was_ready, closed;
    int exit_status;
};

static void say(struct up *u, const char *name, const char *text, size_t n)
{
    bool redraw = u->term.progress_shown;
    cli_term_progress_clear(&u->term);
    fprintf(stderr, "%s%-7s |%s %.*s\n", cli_term_err(&u->term, CLI_TERM_DIM), name,
            cli_term_err(&u->term, CLI_TERM_PLAIN), (int)n, text);
    if (redraw)
        cli_term_progress(&u->term, "starting", -1);
}

static void say_text(struct up *u, const char *text)
{
    say(u, "islet", text, strlen(text));
}

static void on_line(void *context, struct cli_child *child, const char *line, size_t n)
{
    struct up *u = context;
    bool minor =
        (n >= 5 && memcmp(line, "info ", 5) == 0) || (n >= 6 && memcmp(line, "debug ", 6) == 0);
    if (!u->o->quiet || !minor)
        say(u, child->name, line, n);
}

static void close_all(struct up *u)
{
    if (u->closed)
        return;
    u->closed = true;
    uv_close((uv_handle_t *)&u->interrupt, NULL);
    uv_close((uv_handle_t *)&u->terminate, NULL);
    uv_close((uv_handle_t *)&u->hangup, NULL);
    uv_close((uv_handle_t *)&u->child, NULL);
    uv_close((uv_handle_t *)&u->poll, NULL);
    cli_child_close(&u->worker);
    cli_child_close(&u->gateway);
}

/* The gateway goes first: its answers need the worker. */
static void stop_next(struct up *u)
{
    if (u->gateway.pid > 0)
        cli_child_signal(&u->gateway, u->stops > 1 ? SIGKILL : SIGTERM);
    else if (u->worker.pid > 0)
        cli_child_signal(&u->worker, u->stops > 1 ? SIGKILL : SIGTERM);
    else
        close_all(u);
}

static void stop(struct up *u, int exit_status)
{
    if (u->stops == 0)
        u->exit_status = exit_status;
    u->stops++;
    uv_timer_stop(&u->poll);
    uv_timer_stop(&u->worker.timer);
    uv_timer_stop(&u->gateway.timer);
    cli_term_progress_clear(&u->term);
    stop_next(u);
}

static void status_text(int status, char *ret, size_t n)
{
    if (WIFSIGNALED(status))
        snprintf(ret, n, "ended by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        snprintf(ret, n, "ended with status %d", WEXITSTATUS(status));
}

static void on_exit_of(void *context, struct cli_child *child, int status)
{
    struct up *u = context;
    char how[64], text[160];
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
    if (u->stops > 0) {
        stop_next(u);
        return;
    }
    status_text(status, how, sizeof how);
    if (code == EXIT_USAGE || code == EXIT_CONFIG || code == EXIT_RUNNING || code == EXIT_SYSTEM ||
        code == 127) {
        snprintf(text, sizeof text, "%s %s: starting it again would not help, see its last line",
                 child->name, how);
        say_text(u, text);
        stop(u, code == 127 ? EXIT_FAILED : code);
        return;
    }
    if (!u->was_ready && child->early_ends >= GIVE_UP_AFTER) {
        snprintf(text, sizeof text, "%s %s, %d times in a row: giving up", child->name, how,
                 GIVE_UP_AFTER);
        say_text(u, text);
        stop(u, EXIT_FAILED);
        return;
    }
    snprintf(text, sizeof text, "%s %s: starting it again in %llu ms", child->name, how,
             (unsigned long long)child->backoff_ms);
    say_text(u, text);
    cli_child_restart(child);
    uv_timer_again(&u->poll);
}

static void ready_print(struct up *u, const json_t *status)
{
    struct cli_server tcp;
    if (u->was_ready) {
        say_text(u, "ready again");
        return;
    }
    bool has_tcp = cli_server_of_listen(u->settings, &tcp, NULL) == ERR_OK;
    cli_term_progress_clear(&u->term);
    printf("ready: %s%s (model %s, context %.0f tokens)\n", has_tcp ? tcp.name : u->server.name,
           has_tcp ? "/v1" : "", cli_figures_text(status, "model"),
           cli_figures_number(status, "n_ctx"));
    fflush(stdout);
    u->was_ready = true;
}

/* A model that cannot be served leaves both processes up and waiting; at the first start that is an
 * error of whoever typed the command. */
static void not_ready(struct up *u, const json_t *status)
{
    const char *state = cli_figures_text(status, "state");
    double percent = cli_figures_number(status, "progress");
    bool hopeless = strcmp(state, "configuration") == 0 || strcmp(state, "model_error") == 0;
    if (hopeless && !u->was_ready) {
        say_text(u, cli_figures_text(status, "reason"));
        stop(u, EXIT_CONFIG);
        return;
    }
    cli_term_progress(&u->term, strcmp(state, "loading") == 0 ? "loading" : "starting",
                      percent > 0 ? (int)percent : -1);
}

static void on_poll(uv_timer_t *timer)
{
    struct up *u = timer->data;
    json_t *status = NULL;
    if (u->gateway.pid <= 0 || u->worker.pid <= 0 ||
        cli_figures_status(&u->server, &status, NULL, NULL) != ERR_OK)
        return;
    if (cli_figures_is_serving(status)) {
        ready_print(u, status);
        uv_timer_stop(timer);
    } else {
        not_ready(u, status);
    }
    json_decref(status);
}

static void on_stop_signal(uv_signal_t *handle, int number)
{
    struct up *u = handle->data;
    (void)number;
    if (u->stops == 0 && !u->o->quiet)
        say_text(u, "stopping: running answers may finish; once more ends at once");
    stop(u, 0);
}

/* With a terminal it has gone; without one a service manager asks to read the settings again. */
static void on_hangup(uv_signal_t *handle, int number)
{
    struct up *u = handle->data;
    if (u->term.err_tty || u->term.in_tty) {
        stop(u, 0);
        return;
    }
    cli_child_signal(&u->gateway, number);
    cli_child_signal(&u->worker, number);
}

static void on_child(uv_signal_t *handle, int number)
{
    struct up *u = handle->data;
    (void)number;
    cli_child_reap(&u->worker);
    cli_child_reap(&u->gateway);
}

static void arg_add(struct up *u, const char *word)
{
    if (u->n_args < CLI_CHILD_MAX_ARGS)
        u->args[u->n_args++] = word;
}

/* What both children get: the settings file and every --set, --model among them. */
static enum err_code settings_read(struct up *u, struct err *e)
{
    const char *sets[CLI_MAX_SETS + 3];
    unsigned n = 0;
    for (; n < u->o->n_sets; n++)
        sets[n] = u->o->sets[n];
    if (u->o->model != NULL) {
        int used = snprintf(u->model_set, sizeof u->model_set, "model.path=%s", u->o->model);
        if (used < 0 || (size_t)used >= sizeof u->model_set)
            return err_set(e, ERR_ARGUMENT, "--model: the path is longer than 4,096 bytes");
        sets[n++] = u->model_set;
    }
    if (u->o->private_run)
        sets[n++] = "server.listen=none";
    if (u->o->config != NULL) {
        arg_add(u, "--config");
        arg_add(u, u->o->config);
    }
    for (unsigned i = 0; i < n; i++) {
        arg_add(u, "--set");
        arg_add(u, sets[i]);
    }
    enum err_code code = settings_load(u->o->config, sets, n, &u->settings, e);
    if (code != ERR_OK)
        return code;
    const char *model = settings_text(u->settings, SETTING_model_path);
    if (model[0] == '\0')
        return err_set(e, ERR_ARGUMENT, "no model is set: islet up --model FILE.gguf");
    if (access(model, R_OK) != 0)
        return err_set_os(e, ERR_ARGUMENT, errno, "model %s", model);
    code = cli_server_of_socket(u->settings, &u->server, NULL);
    if (code != ERR_OK)
        code = cli_server_of_listen(u->settings, &u->server, e);
    if (code == ERR_OK)
        cli_server_key(&u->server, u->settings);
    return code;
}

static enum err_code runtime_make(struct up *u, struct err *e)
{
    if (!u->o->private_run)
        return ERR_OK;
    snprintf(u->private_dir, sizeof u->private_dir, "/tmp/islet-XXXXXX");
    if (mkdtemp(u->private_dir) == NULL) {
        u->private_dir[0] = '\0';
        return err_set_os(e, ERR_IO, errno, "cannot make a directory in /tmp");
    }
    if (setenv("RUNTIME_DIRECTORY", u->private_dir, 1) != 0)
        return err_set_os(e, ERR_NOMEM, errno, "setenv");
    return ERR_OK;
}

static void runtime_remove(const struct up *u)
{
    struct dirent *entry;
    DIR *dir = u->private_dir[0] != '\0' ? opendir(u->private_dir) : NULL;
    if (dir == NULL)
        return;
    while ((entry = readdir(dir)) != NULL)
        if (entry->d_name[0] != '.')
            unlinkat(dirfd(dir), entry->d_name, 0);
    closedir(dir);
    rmdir(u->private_dir);
}

static void watch(struct up *u, uv_signal_t *handle, uv_signal_cb fn, int number)
{
    uv_signal_init(&u->loop, handle);
    handle->data = u;
    uv_signal_start(handle, fn, number);
}

static enum err_code children_start(struct up *u, struct err *e)
{
    enum err_code code =
        cli_child_init(&u->worker, &u->loop, "worker", "isletd", u->args, u->n_args, e);
    if (code == ERR_OK)
        code = cli_child_init(&u->gateway, &u->loop, "gateway", "islet-gateway", u->args, u->n_args,
                              e);
    u->worker.on_line = u->gateway.on_line = on_line;
    u->worker.on_exit = u->gateway.on_exit = on_exit_of;
    u->worker.context = u->gateway.context = u;
    if (code == ERR_OK)
        code = cli_child_start(&u->worker, e);
    if (code == ERR_OK)
        code = cli_child_start(&u->gateway, e);
    return code;
}

static enum err_code not_running_yet(const struct up *u, struct err *e)
{
    int fd;
    if (cli_server_connect(&u->server, &fd, NULL) != ERR_OK)
        return ERR_OK;
    close(fd);
    return err_set(e, ERR_BUSY, "a server runs already at %s; stop it, or use --private",
                   u->server.name);
}

static int failed(const struct err *e)
{
    fprintf(stderr, "islet up: %s\n", e->text);
    return e->code == ERR_BUSY ? EXIT_RUNNING : e->code == ERR_IO ? EXIT_SYSTEM : EXIT_CONFIG;
}

static int loop_run(struct up *u)
{
    struct err e = {0};
    uv_loop_init(&u->loop);
    watch(u, &u->interrupt, on_stop_signal, SIGINT);
    watch(u, &u->terminate, on_stop_signal, SIGTERM);
    watch(u, &u->hangup, on_hangup, SIGHUP);
    watch(u, &u->child, on_child, SIGCHLD);
    uv_timer_init(&u->loop, &u->poll);
    u->poll.data = u;
    if (children_start(u, &e) != ERR_OK)
        stop(u, failed(&e));
    else
        uv_timer_start(&u->poll, on_poll, READY_POLL_MS, READY_POLL_MS);
    uv_run(&u->loop, UV_RUN_DEFAULT);
    uv_loop_close(&u->loop);
    return u->exit_status;
}

int cli_up_run(const struct cli_options *o)
{
    struct err e = {0};
    int status;
    struct up *u = alloc_zero(ALLOC_MISC, 1, sizeof *u);
    if (u == NULL) {
        fputs("islet up: no memory\n", stderr);
        return EXIT_SYSTEM;
    }
    u->o = o;
    cli_term_init(&u->term);
    signal(SIGPIPE, SIG_IGN);
    if (runtime_make(u, &e) != ERR_OK || settings_read(u, &e) != ERR_OK ||
        not_running_yet(u, &e) != ERR_OK)
        status = failed(&e);
    else
        status = loop_run(u);
    runtime_remove(u);
    settings_free(u->settings);
    alloc_free(u);
    return status;
}

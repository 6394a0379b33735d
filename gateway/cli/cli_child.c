#include "cli_child.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ticks.h"

enum {
    BACKOFF_FIRST_MS = 50,
    BACKOFF_LAST_MS = 2000,
    RUN_OK_MS = 10000,
    MAX_LINE = 65536
};

static bool beside(const char *program, char *ret, size_t n)
{
    char self[4096];
    ssize_t size = readlink("/proc/self/exe", self, sizeof self - 1);
    if (size <= 0)
        return false;
    self[size] = '\0';
    char *slash = strrchr(self, '/');
    if (slash == NULL)
        return false;
    *slash = '\0';
    int used = snprintf(ret, n, "%s/%s", self, program);
    return used > 0 && (size_t)used < n && access(ret, X_OK) == 0;
}

static bool on_path(const char *program, char *ret, size_t n)
{
    const char *path = getenv("PATH");
    while (path != NULL && *path != '\0') {
        size_t size = strcspn(path, ":");
        int used = snprintf(ret, n, "%.*s/%s", (int)size, path, program);
        if (size > 0 && used > 0 && (size_t)used < n && access(ret, X_OK) == 0)
            return true;
        path += size + (path[size] == ':');
    }
    return false;
}

enum err_code cli_child_find(const char *program, char *ret, size_t n, struct err *e)
{
    if (beside(program, ret, n) || on_path(program, ret, n))
        return ERR_OK;
    return err_set(e, ERR_ARGUMENT, "%s is neither beside islet nor on PATH: build it with `make`",
                   program);
}

enum err_code cli_child_init(struct cli_child *c, uv_loop_t *loop, const char *name,
                             const char *program, const char *const *args, unsigned n_args,
                             struct err *e)
{
    *c = (struct cli_child){
        .name = name, .backoff_ms = BACKOFF_FIRST_MS, .loop = loop, .line = BUF_INIT(MAX_LINE)};
    enum err_code code = cli_child_find(program, c->program, sizeof c->program, e);
    if (code != ERR_OK)
        return code;
    if (n_args >= CLI_CHILD_MAX_ARGS)
        return err_set(e, ERR_LIMIT, "%u arguments for %s, the limit is %d", n_args, program,
                       CLI_CHILD_MAX_ARGS - 1);
    c->argv[0] = c->program;
    for (unsigned i = 0; i < n_args; i++)
        c->argv[i + 1] = args[i];
    uv_timer_init(loop, &c->timer);
    c->timer.data = c;
    return ERR_OK;
}

static void line_flush(struct cli_child *c)
{
    if (c->line.size > 0)
        c->on_line(c->context, c, (const char *)c->line.data, c->line.size);
    buf_clear(&c->line);
}

static void on_alloc(uv_handle_t *h, size_t wanted, uv_buf_t *ret)
{
    struct cli_child *c = h->data;
    (void)wanted;
    *ret = uv_buf_init(c->chunk, sizeof c->chunk);
}

static void on_output_closed(uv_handle_t *h)
{
    struct cli_child *c = h->data;
    c->output_open = false;
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *piece)
{
    struct cli_child *c = stream->data;
    if (n < 0) {
        line_flush(c);
        if (!uv_is_closing((uv_handle_t *)stream))
            uv_close((uv_handle_t *)stream, on_output_closed);
        return;
    }
    const char *at = piece->base;
    size_t left = (size_t)n;
    while (left > 0) {
        const char *end = memchr(at, '\n', left);
        size_t size = end != NULL ? (size_t)(end - at) : left;
        buf_append(&c->line, at, size);
        if (end != NULL || c->line.size > MAX_LINE / 2)
            line_flush(c);
        at += size + (end != NULL);
        left -= size + (end != NULL);
    }
}

/* In the child, between fork and exec: only calls that are safe there. Signals are blocked and
 * still ours to forget, or the parent's loop would see them. Its own process group keeps the
 * terminal's Ctrl-C from it; the death signal ends it if `islet up` is killed. */
static void become(const struct cli_child *c, int output, pid_t parent)
{
    static const int ours[] = {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGPIPE};
    sigset_t none;
    for (size_t i = 0; i < sizeof ours / sizeof ours[0]; i++)
        signal(ours[i], SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        _exit(1);
    int null = open("/dev/null", O_RDONLY);
    if (null >= 0)
        dup2(null, STDIN_FILENO);
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
    /* argv's strings are ours to lend; execv's signature only lacks the const. */
    execv(c->program, (char *const *)c->argv);
    _exit(127);
}

enum err_code cli_child_start(struct cli_child *c, struct err *e)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return err_set_os(e, ERR_IO, errno, "pipe for %s", c->name);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pid_t parent = getpid(), pid = fork();
    int saved = errno;
    if (pid == 0)
        become(c, ends[1], parent);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pid < 0) {
        close(ends[0]);
        close(ends[1]);
        return err_set_os(e, ERR_IO, saved, "fork for %s", c->name);
    }
    close(ends[1]);
    c->pid = pid;
    c->started_ms = ticks_ms(ticks_real());
    uv_pipe_init(c->loop, &c->output, 0);
    c->output.data = c;
    c->output_open = true;
    if (uv_pipe_open(&c->output, ends[0]) != 0 ||
        uv_read_start((uv_stream_t *)&c->output, on_alloc, on_read) != 0)
        return err_set(e, ERR_IO, "cannot read the output of %s", c->name);
    return ERR_OK;
}

static void on_timer(uv_timer_t *timer)
{
    struct cli_child *c = timer->data;
    struct err e = {0};
    if (c->output_open) { /* the old pipe is still being drained */
        uv_timer_start(timer, on_timer, BACKOFF_FIRST_MS, 0);
        return;
    }
    if (cli_child_start(c, &e) != ERR_OK) {
        c->on_line(c->context, c, e.text, strlen(e.text));
        cli_child_restart(c);
    }
}

void cli_child_restart(struct cli_child *c)
{
    uv_timer_start(&c->timer, on_timer, c->backoff_ms, 0);
    c->backoff_ms = c->backoff_ms * 2 > BACKOFF_LAST_MS ? BACKOFF_LAST_MS : c->backoff_ms * 2;
}

void cli_child_signal(struct cli_child *c, int number)
{
    uv_timer_stop(&c->timer);
    if (c->pid > 0)
        kill(c->pid, number);
}

void cli_child_reap(struct cli_child *c)
{
    int status;
    if (c->pid <= 0 || waitpid(c->pid, &status, WNOHANG) != c->pid)
        return;
    c->pid = 0;
    if (ticks_ms(ticks_real()) - c->started_ms >= RUN_OK_MS) {
        c->backoff_ms = BACKOFF_FIRST_MS;
        c->early_ends = 0;
    }
    c->early_ends++;
    c->on_exit(c->context, c, status);
}

void cli_child_close(struct cli_child *c)
{
    if (c->closing)
        return;
    c->closing = true;
    if (c->output_open && !uv_is_closing((uv_handle_t *)&c->output))
        uv_close((uv_handle_t *)&c->output, on_output_closed);
    if (c->timer.data != NULL)
        uv_close((uv_handle_t *)&c->timer, NULL);
    buf_done(&c->line);
}

#include "cli_private.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli_options.h"

static const char ready_word[] = "ready: ";

static void become(const struct cli_options *o, int output, pid_t parent)
{
    const char *argv[CLI_MAX_SETS * 2 + 12];
    size_t n = 0;
    sigset_t none;
    argv[n++] = "islet";
    argv[n++] = "up";
    argv[n++] = "--private";
    argv[n++] = "--quiet";
    argv[n++] = "--model";
    argv[n++] = o->model;
    if (o->config != NULL) {
        argv[n++] = "--config";
        argv[n++] = o->config;
    }
    for (unsigned i = 0; i < o->n_sets; i++) {
        argv[n++] = "--set";
        argv[n++] = o->sets[i];
    }
    argv[n] = NULL;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setpgid(0, 0); /* Ctrl-C is for us to see first */
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        _exit(1);
    dup2(output, STDOUT_FILENO);
    execv("/proc/self/exe", (char *const *)argv);
    _exit(127);
}

/* The first line that `islet up` prints, without its newline. */
static enum err_code line_read(int fd, int stop_fd, char *ret, size_t n, struct err *e)
{
    size_t used = 0;
    for (;;) {
        struct pollfd p[2] = {{.fd = fd, .events = POLLIN}, {.fd = stop_fd, .events = POLLIN}};
        if (poll(p, 2, -1) < 0 && errno != EINTR)
            return err_set_os(e, ERR_IO, errno, "poll");
        if ((p[1].revents & POLLIN) != 0)
            return err_set(e, ERR_CANCELLED, "interrupted");
        if (p[0].revents == 0)
            continue;
        ssize_t got = read(fd, ret + used, n - 1 - used);
        if (got <= 0)
            return err_set(e, ERR_IO, "the server did not start; the reason stands above");
        used += (size_t)got;
        ret[used] = '\0';
        char *end = strchr(ret, '\n');
        if (end != NULL) {
            *end = '\0';
            return ERR_OK;
        }
        if (used == n - 1)
            return err_set(e, ERR_PROTOCOL, "islet up printed a line that is too long");
    }
}

enum err_code cli_private_start(struct cli_private *p, const struct cli_options *o, int stop_fd,
                                struct err *e)
{
    int ends[2];
    char line[1024];
    *p = (struct cli_private){0};
    if (pipe2(ends, O_CLOEXEC) != 0)
        return err_set_os(e, ERR_IO, errno, "pipe");
    pid_t parent = getpid(), pid = fork();
    int saved = errno;
    if (pid == 0)
        become(o, ends[1], parent);
    close(ends[1]);
    if (pid < 0) {
        close(ends[0]);
        return err_set_os(e, ERR_IO, saved, "fork");
    }
    p->pid = pid;
    enum err_code code = line_read(ends[0], stop_fd, line, sizeof line, e);
    close(ends[0]);
    if (code != ERR_OK)
        return code;
    if (strncmp(line, ready_word, sizeof ready_word - 1) != 0)
        return err_set(e, ERR_PROTOCOL, "islet up printed '%s'", line);
    char *address = line + sizeof ready_word - 1;
    address[strcspn(address, " ")] = '\0';
    return cli_server_parse(address, &p->server, e);
}

void cli_private_stop(struct cli_private *p)
{
    if (p->pid <= 0)
        return;
    kill(p->pid, SIGTERM);
    while (waitpid(p->pid, NULL, 0) < 0 && errno == EINTR)
        ;
    p->pid = 0;
}

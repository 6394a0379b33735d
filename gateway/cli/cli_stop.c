#include "cli_stop.h"

#include <errno.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

static sigset_t both(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    return set;
}

enum err_code cli_stop_open(int *ret_fd, struct err *e)
{
    sigset_t set = both();
    int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0)
        return err_set_os(e, ERR_IO, errno, "signalfd");
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    *ret_fd = fd;
    return ERR_OK;
}

int cli_stop_take(int fd)
{
    struct signalfd_siginfo info;
    int last = 0;
    while (read(fd, &info, sizeof info) == (ssize_t)sizeof info)
        last = (int)info.ssi_signo;
    return last;
}

void cli_stop_close(int fd)
{
    sigset_t set = both();
    if (fd < 0)
        return;
    cli_stop_take(fd);
    close(fd);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
}

#include "worker_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>

#include "log.h"

enum {
    WORKER_SOCKET_BACKLOG = 256
};

/* ---- inherited ---- */

/* Other fds than the one asked for are closed: nobody else would. */
int worker_socket_inherited(void)
{
    char **names = NULL;
    int found = -1;
    int n = sd_listen_fds_with_names(1, &names);
    for (int i = 0; i < n; i++) {
        int fd = SD_LISTEN_FDS_START + i;
        bool usable = strcmp(names[i], "worker") == 0 && found < 0 &&
                      sd_is_socket(fd, AF_UNIX, SOCK_STREAM, 1) > 0;
        if (usable)
            found = fd;
        else
            close(fd);
        if (!usable)
            log_warn("socket", "inherited_fd_closed", "name=\"%s\" expected=worker", names[i]);
        free(names[i]);
    }
    free(names);
    if (found >= 0)
        fcntl(found, F_SETFL, fcntl(found, F_GETFL) | O_NONBLOCK);
    return found;
}

static void name_adopted(struct worker_socket *s)
{
    struct sockaddr_un address = {.sun_path = ""};
    socklen_t n = sizeof address;
    if (getsockname(s->fd, (struct sockaddr *)&address, &n) != 0)
        return;
    snprintf(s->path, sizeof s->path, "%.*s", (int)sizeof address.sun_path, address.sun_path);
}

enum err_code worker_socket_adopt(int fd, struct worker_socket *ret, struct err *e)
{
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return err_set_os(e, ERR_IO, errno, "the inherited socket");
    *ret = (struct worker_socket){.fd = own, .lock_fd = -1};
    name_adopted(ret);
    return ERR_OK;
}

/* ---- bound here ---- */

static enum err_code worker_socket_lock(const char *path, int *ret_fd, struct err *e)
{
    char name[128], pid[32] = "";
    snprintf(name, sizeof name, "%s.lock", path);
    int fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return err_set_os(e, ERR_IO, errno, "%s", name);
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
        int n = snprintf(pid, sizeof pid, "%d\n", (int)getpid());
        if (ftruncate(fd, 0) != 0 || pwrite(fd, pid, (size_t)n, 0) != n)
            log_warn("socket", "lock_without_pid", "path=\"%s\"", name);
        *ret_fd = fd;
        return ERR_OK;
    }
    int os_errno = errno;
    ssize_t n = pread(fd, pid, sizeof pid - 1, 0);
    close(fd);
    if (os_errno != EWOULDBLOCK)
        return err_set_os(e, ERR_IO, os_errno, "locking %s", name);
    if (n < 0)
        n = 0;
    pid[n] = '\0';
    pid[strcspn(pid, "\n")] = '\0';
    return err_set(e, ERR_BUSY, "%s: another isletd serves it already, pid %s", path,
                   pid[0] != '\0' ? pid : "unknown");
}

/* Removes what a dead worker left. The lock is ours, so nobody of our kind is about to listen
 * there. */
static enum err_code worker_socket_clear(const struct sockaddr_un *address, struct err *e)
{
    struct stat st;
    const char *path = address->sun_path;
    if (lstat(path, &st) != 0)
        return errno == ENOENT ? ERR_OK : err_set_os(e, ERR_IO, errno, "%s", path);
    if (!S_ISSOCK(st.st_mode))
        return err_set(e, ERR_IO,
                       "%s: exists and is not a socket: move it away or set worker.socket", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_set_os(e, ERR_IO, errno, "socket");
    int failed = connect(fd, (const struct sockaddr *)address, sizeof *address);
    int os_errno = errno;
    close(fd);
    if (failed == 0 || os_errno == EAGAIN)
        return err_set(e, ERR_IO, "%s: another program listens there: set worker.socket", path);
    if (os_errno != ECONNREFUSED)
        return err_set_os(e, ERR_IO, os_errno, "%s", path);
    if (unlink(path) != 0)
        return err_set_os(e, ERR_IO, errno, "removing the stale socket %s", path);
    log_info("socket", "stale_socket_replaced", "path=\"%s\"", path);
    return ERR_OK;
}

static enum err_code worker_socket_bind(const char *path, int *ret_fd, struct err *e)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, strlen(path) + 1);
    enum err_code code = worker_socket_clear(&address, e);
    if (code != ERR_OK)
        return code;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_set_os(e, ERR_IO, errno, "socket");
    /* bind obeys the umask; the mode is the gate, so it is set before anyone can connect. */
    if (bind(fd, (const struct sockaddr *)&address, sizeof address) != 0 ||
        chmod(path, 0660) != 0 || listen(fd, WORKER_SOCKET_BACKLOG) != 0) {
        err_set_os(e, ERR_IO, errno, "cannot listen on %s", path);
        close(fd);
        return e->code;
    }
    *ret_fd = fd;
    return ERR_OK;
}

enum err_code worker_socket_open(const char *path, struct worker_socket *ret, struct err *e)
{
    struct worker_socket s = {.fd = -1, .lock_fd = -1};
    if (strlen(path) >= sizeof s.path)
        return err_set(e, ERR_IO, "socket path of %zu bytes: the limit is %zu", strlen(path),
                       sizeof s.path - 1);
    memcpy(s.path, path, strlen(path) + 1);
    enum err_code code = worker_socket_lock(path, &s.lock_fd, e);
    if (code != ERR_OK)
        return code;
    code = worker_socket_bind(path, &s.fd, e);
    if (code != ERR_OK) {
        close(s.lock_fd);
        return code;
    }
    *ret = s;
    return ERR_OK;
}

void worker_socket_close(struct worker_socket *s)
{
    if (s->fd < 0)
        return;
    if (s->lock_fd >= 0)
        unlink(s->path);
    close(s->fd);
    if (s->lock_fd >= 0)
        close(s->lock_fd);
    *s = (struct worker_socket){.fd = -1, .lock_fd = -1};
}

bool worker_socket_peer_allowed(int fd)
{
    struct ucred peer;
    socklen_t n = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) != 0)
        return false;
    return worker_socket_user_allowed(&peer, geteuid(), getegid());
}

bool worker_socket_user_allowed(const struct ucred *peer, uid_t user, gid_t group)
{
    return peer->uid == 0 || peer->uid == user || peer->gid == group;
}

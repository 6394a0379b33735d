#include "gw_listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>

#include "alloc.h"
#include "gw_holder.h"
#include "log.h"

enum {
    BACKLOG = 4096
};

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_un un;
};

/* What the socket is bound to. */
static enum err_code add(struct gw_listen *l, int fd, struct err *e)
{
    union address a = {0};
    socklen_t n = sizeof a;
    if (l->n == GW_LISTEN_MOST)
        return err_set(e, ERR_LIMIT, "server.listen: more than %d addresses", GW_LISTEN_MOST);
    if (getsockname(fd, &a.any, &n) != 0)
        return err_set_os(e, ERR_IO, errno, "a listening socket cannot be read");
    struct gw_listen_socket *s = &l->sockets[l->n];
    *s = (struct gw_listen_socket){.fd = fd, .loopback = true};
    switch (a.any.sa_family) {
    case AF_UNIX:
        s->who.is_unix = true;
        break;
    case AF_INET:
        s->who.n_ip = 4;
        memcpy(s->who.ip, &a.v4.sin_addr, 4);
        s->port = ntohs(a.v4.sin_port);
        s->loopback = s->who.ip[0] == 127;
        break;
    case AF_INET6:
        s->who.n_ip = 16;
        memcpy(s->who.ip, &a.v6.sin6_addr, 16);
        s->port = ntohs(a.v6.sin6_port);
        s->loopback = IN6_IS_ADDR_LOOPBACK(&a.v6.sin6_addr);
        break;
    default:
        return err_set(e, ERR_UNSUPPORTED, "a listening socket of address family %d",
                       a.any.sa_family);
    }
    l->n++;
    return ERR_OK;
}

/* ---- TCP ------------------------------------------------------------------------------------- */

/* "host:port" or "[v6]:port" of n bytes. */
static enum err_code parse_address(const char *text, size_t n, union address *ret, socklen_t *ret_n,
                                   struct err *e)
{
    char copy[80];
    enum err_code bad = ERR_ARGUMENT;
    if (n >= sizeof copy)
        return err_set(e, bad, "server.listen: %.*s... is no address", 40, text);
    memcpy(copy, text, n);
    copy[n] = '\0';
    char *colon = strrchr(copy, ':');
    char *host = copy, *end = NULL;
    unsigned long port = colon != NULL ? strtoul(colon + 1, &end, 10) : 0;
    bool is_v6 = copy[0] == '[';
    if (colon == NULL || colon == copy || end == colon + 1 || *end != '\0' || port > 65535 ||
        colon[1] < '0' || colon[1] > '9' || (is_v6 && colon[-1] != ']'))
        return err_set(e, bad, "server.listen: %s must be ADDRESS:PORT or [IPv6]:PORT", copy);
    colon[is_v6 ? -1 : 0] = '\0';
    host += is_v6;
    memset(ret, 0, sizeof *ret);
    int fine;
    if (is_v6) {
        ret->v6.sin6_family = AF_INET6;
        ret->v6.sin6_port = htons((uint16_t)port);
        fine = inet_pton(AF_INET6, host, &ret->v6.sin6_addr);
        *ret_n = sizeof ret->v6;
    } else {
        ret->v4.sin_family = AF_INET;
        ret->v4.sin_port = htons((uint16_t)port);
        fine = inet_pton(AF_INET, strcmp(host, "localhost") == 0 ? "127.0.0.1" : host,
                         &ret->v4.sin_addr);
        *ret_n = sizeof ret->v4;
    }
    if (fine != 1)
        return err_set(e, bad, "server.listen: %s is no IP address", host);
    return ERR_OK;
}

static bool is_missing_v6_loopback(const union address *a, int code)
{
    return a->any.sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&a->v6.sin6_addr) &&
           (code == EADDRNOTAVAIL || code == EAFNOSUPPORT);
}

static enum err_code listen_one(struct gw_listen *l, const char *text, size_t n, struct err *e)
{
    union address a;
    socklen_t size = 0;
    enum err_code code = parse_address(text, n, &a, &size, e);
    if (code != ERR_OK)
        return code;
    int on = 1;
    char holder[80];
    int fd = socket(a.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool bound = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                 (a.any.sa_family != AF_INET6 ||
                  setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on) == 0) &&
                 bind(fd, &a.any, size) == 0 && listen(fd, BACKLOG) == 0;
    if (bound)
        code = add(l, fd, e);
    else if (is_missing_v6_loopback(&a, errno))
        log_warn("http", "no_ipv6", "address=%.*s continuing=1", (int)n, text);
    else if (errno == EADDRINUSE)
        code = err_set(
            e, ERR_IO, "%.*s is in use by %s; stop it or change server.listen", (int)n, text,
            gw_holder_name(gw_holder_of_port(ntohs(a.v4.sin_port)), holder, sizeof holder));
    else
        code = err_set_os(e, ERR_IO, errno, "cannot listen on %.*s (server.listen)", (int)n, text);
    if (fd >= 0 && (!bound || code != ERR_OK))
        close(fd);
    return code;
}

enum err_code gw_listen_tcp(struct gw_listen *l, const char *addresses, struct err *e)
{
    size_t before = l->n;
    enum err_code code = ERR_OK;
    if (strcmp(addresses, "none") == 0)
        return ERR_OK;
    for (const char *p = addresses; code == ERR_OK && *p != '\0';) {
        p += strspn(p, ", \t");
        size_t n = strcspn(p, ", \t");
        if (n > 0)
            code = listen_one(l, p, n, e);
        p += n;
    }
    while (code != ERR_OK && l->n > before)
        close(l->sockets[--l->n].fd);
    return code;
}

/* ---- Unix socket ----------------------------------------------------------------------------- */

/* Removes a socket file that nobody listens on. */
static enum err_code clear_path(const struct sockaddr_un *a, struct err *e)
{
    struct stat st;
    char holder[80];
    if (lstat(a->sun_path, &st) != 0)
        return errno == ENOENT ? ERR_OK : err_set_os(e, ERR_IO, errno, "%s", a->sun_path);
    if (!S_ISSOCK(st.st_mode))
        return err_set(e, ERR_ARGUMENT,
                       "%s exists and is no socket; remove it or change server.socket",
                       a->sun_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_set_os(e, ERR_IO, errno, "%s", a->sun_path);
    bool served = connect(fd, (const struct sockaddr *)a, sizeof *a) == 0 || errno != ECONNREFUSED;
    gw_holder_name(gw_holder_of_peer(fd), holder, sizeof holder);
    close(fd);
    if (served)
        return err_set(e, ERR_BUSY, "%s is served by %s; stop it or change server.socket",
                       a->sun_path, holder);
    if (unlink(a->sun_path) != 0 && errno != ENOENT)
        return err_set_os(e, ERR_IO, errno, "cannot remove the old socket %s", a->sun_path);
    return ERR_OK;
}

enum err_code gw_listen_unix(struct gw_listen *l, const char *path, struct err *e)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t n = strlen(path);
    if (n >= sizeof a.sun_path)
        return err_set(e, ERR_ARGUMENT,
                       "server.socket: the path has %zu bytes, at most %zu fit: %s", n,
                       sizeof a.sun_path - 1, path);
    memcpy(a.sun_path, path, n);
    enum err_code code = clear_path(&a, e);
    if (code != ERR_OK)
        return code;
    struct stat st;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    /* The mode that the file is born with, then what the umask took away. */
    bool bound = fd >= 0 && fchmod(fd, 0660) == 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0;
    char *copy = bound ? alloc_text(ALLOC_CONFIG, path, n) : NULL;
    if (!bound || chmod(path, 0660) != 0 || lstat(path, &st) != 0 || listen(fd, BACKLOG) != 0)
        code = err_set_os(e, ERR_IO, errno, "cannot listen on %s (server.socket)", path);
    else if (copy == NULL)
        code = err_set(e, ERR_NOMEM, "no memory for %s", path);
    else
        code = add(l, fd, e);
    if (code == ERR_OK) {
        l->path = copy;
        l->device = st.st_dev;
        l->inode = st.st_ino;
        return ERR_OK;
    }
    alloc_free(copy);
    if (bound)
        unlink(path);
    if (fd >= 0)
        close(fd);
    return code;
}

/* ---- systemd --------------------------------------------------------------------------------- */

static enum err_code take_inherited(struct gw_listen *l, int fd, const char *name, struct err *e)
{
    if (strcmp(name, "http") != 0 || sd_is_socket(fd, AF_UNSPEC, SOCK_STREAM, 1) <= 0) {
        log_warn("http", "inherited_unknown", "name=%s continuing=1", name);
        close(fd);
        return ERR_OK;
    }
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 ||
        fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
        int code = errno;
        close(fd);
        return err_set_os(e, ERR_IO, code, "inherited socket %s", name);
    }
    enum err_code code = add(l, fd, e);
    if (code != ERR_OK)
        close(fd);
    else
        l->inherited = true;
    return code;
}

enum err_code gw_listen_inherited(struct gw_listen *l, struct err *e)
{
    char **names = NULL;
    int n = sd_listen_fds_with_names(1, &names);
    enum err_code code = ERR_OK;
    if (n < 0)
        return err_set_os(e, ERR_IO, -n, "LISTEN_FDS");
    for (int i = 0; i < n; i++) {
        enum err_code one = take_inherited(l, SD_LISTEN_FDS_START + i, names[i], e);
        code = code == ERR_OK ? one : code;
        free(names[i]);
    }
    free(names);
    return code;
}

void gw_listen_done(struct gw_listen *l)
{
    struct stat st;
    for (size_t i = 0; i < l->n; i++)
        close(l->sockets[i].fd);
    l->n = 0;
    /* Another process may have put its own socket there since. */
    if (l->path != NULL && lstat(l->path, &st) == 0 && st.st_dev == l->device &&
        st.st_ino == l->inode)
        unlink(l->path);
    alloc_free(l->path);
    l->path = NULL;
}

bool gw_listen_beyond_loopback(const struct gw_listen *l)
{
    for (size_t i = 0; i < l->n; i++)
        if (!l->sockets[i].loopback)
            return true;
    return false;
}

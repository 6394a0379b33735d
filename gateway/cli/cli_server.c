#include "cli_server.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "cli_options.h"
#include "paths.h"
#include "settings.h"

enum {
    CONNECT_MS = 5000
};

static enum err_code set_unix(const char *path, struct cli_server *s, struct err *e)
{
    if (strlen(path) >= sizeof s->path)
        return err_set(e, ERR_ARGUMENT, "socket path '%s' has %zu bytes, the limit is %zu", path,
                       strlen(path), sizeof s->path - 1);
    s->is_unix = true;
    snprintf(s->path, sizeof s->path, "%s", path);
    snprintf(s->name, sizeof s->name, "unix:%s", path);
    return ERR_OK;
}

/* "host:port", "[::1]:port", "host", "[::1]", "::1", up to n bytes. */
static enum err_code set_tcp(const char *text, size_t n, struct cli_server *s, struct err *e)
{
    const char *host = text, *port = "8484";
    size_t host_size = n, port_size = 4;
    const char *colon = memrchr(text, ':', n), *bracket = memrchr(text, ']', n);
    if (text[0] == '[' && bracket != NULL) {
        host = text + 1;
        host_size = (size_t)(bracket - host);
        if (colon < bracket)
            colon = NULL;
    } else if (colon != NULL && memchr(text, ':', (size_t)(colon - text)) != NULL) {
        colon = NULL; /* an IPv6 address without brackets has no port */
    } else if (colon != NULL) {
        host_size = (size_t)(colon - text);
    }
    if (colon != NULL) {
        port = colon + 1;
        port_size = n - (size_t)(port - text);
    }
    bool digits = port_size > 0 && port_size <= 5;
    for (size_t i = 0; i < port_size; i++)
        digits = digits && port[i] >= '0' && port[i] <= '9';
    if (host_size == 0 || host_size >= sizeof s->host || !digits)
        return err_set(e, ERR_ARGUMENT,
                       "server address '%.*s': should be http://host:port or unix:/path", (int)n,
                       text);
    s->is_unix = false;
    snprintf(s->host, sizeof s->host, "%.*s", (int)host_size, host);
    snprintf(s->port, sizeof s->port, "%.*s", (int)port_size, port);
    bool v6 = strchr(s->host, ':') != NULL;
    snprintf(s->name, sizeof s->name, "http://%s%s%s:%s", v6 ? "[" : "", s->host, v6 ? "]" : "",
             s->port);
    return ERR_OK;
}

enum err_code cli_server_parse(const char *text, struct cli_server *ret, struct err *e)
{
    struct cli_server s = {0};
    enum err_code code;
    if (strncmp(text, "unix:", 5) == 0) {
        const char *path = text + 5;
        if (strncmp(path, "//", 2) == 0)
            path += 2;
        code = set_unix(path, &s, e);
    } else if (strncmp(text, "https://", 8) == 0) {
        code = err_set(e, ERR_UNSUPPORTED, "server address '%s': https is not spoken, use http://",
                       text);
    } else {
        const char *start = strncmp(text, "http://", 7) == 0 ? text + 7 : text;
        code = set_tcp(start, strcspn(start, "/?#"), &s, e);
    }
    if (code == ERR_OK)
        *ret = s;
    return code;
}

enum err_code cli_server_of_listen(const struct settings *settings, struct cli_server *ret,
                                   struct err *e)
{
    struct cli_server s = {0};
    const char *text = settings_text(settings, SETTING_server_listen);
    text += strspn(text, " \t,");
    size_t n = strcspn(text, ", \t");
    if (n == 0 || (n == 4 && strncmp(text, "none", 4) == 0))
        return err_set(e, ERR_ARGUMENT, "server.listen has no TCP address");
    enum err_code code = set_tcp(text, n, &s, e);
    if (code == ERR_OK)
        *ret = s;
    return code;
}

enum err_code cli_server_of_socket(const struct settings *settings, struct cli_server *ret,
                                   struct err *e)
{
    struct cli_server s = {0};
    char path[sizeof s.path];
    const char *text = settings_text(settings, SETTING_server_socket);
    if (text[0] == '\0' || strcmp(text, "off") == 0)
        return err_set(e, ERR_ARGUMENT, "server.socket is off");
    enum err_code code = paths_socket(text, "http.sock", path, sizeof path, e);
    if (code == ERR_OK)
        code = set_unix(path, &s, e);
    if (code == ERR_OK)
        *ret = s;
    return code;
}

static bool listens(const struct cli_server *s)
{
    int fd;
    if (cli_server_connect(s, &fd, NULL) != ERR_OK)
        return false;
    close(fd);
    return true;
}

void cli_server_key(struct cli_server *server, const struct settings *s)
{
    const char *key = getenv("ISLET_API_KEY");
    if (key != NULL && key[0] != '\0') {
        snprintf(server->key, sizeof server->key, "%s", key);
        return;
    }
    const char *path = s != NULL ? settings_text(s, SETTING_server_api_key_file) : "";
    FILE *f = path[0] != '\0' ? fopen(path, "re") : NULL;
    if (f == NULL)
        return;
    if (fgets(server->key, sizeof server->key, f) == NULL)
        server->key[0] = '\0';
    server->key[strcspn(server->key, "\r\n")] = '\0';
    fclose(f);
}

enum err_code cli_server_find(const struct cli_options *o, struct cli_server *ret, struct err *e)
{
    struct cli_server s = {0}, by_socket = {0};
    struct settings *settings = NULL;
    const char *given = o->server != NULL ? o->server : getenv("ISLET_SERVER");
    if (given != NULL && given[0] != '\0') {
        enum err_code code = cli_server_parse(given, &s, e);
        if (code != ERR_OK)
            return code;
        cli_server_key(&s, NULL);
        *ret = s;
        return ERR_OK;
    }
    enum err_code code = settings_load(o->config, o->sets, o->n_sets, &settings, e);
    if (code != ERR_OK)
        return code;
    bool have_socket = cli_server_of_socket(settings, &by_socket, NULL) == ERR_OK;
    bool have_tcp = cli_server_of_listen(settings, &s, NULL) == ERR_OK;
    if (have_socket && (!have_tcp || listens(&by_socket)))
        s = by_socket;
    else if (!have_tcp)
        code = err_set(e, ERR_ARGUMENT,
                       "neither server.listen nor server.socket is set; give --server");
    if (code == ERR_OK) {
        cli_server_key(&s, settings);
        *ret = s;
    }
    settings_free(settings);
    return code;
}

/* Waits for a connect in progress; returns 0 or an errno. */
static int connect_finish(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLOUT};
    int result = 0;
    socklen_t size = sizeof result;
    int n = poll(&p, 1, CONNECT_MS);
    if (n == 0)
        return ETIMEDOUT;
    if (n < 0 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &result, &size) != 0)
        return errno;
    return result;
}

static int connect_to(int family, const struct sockaddr *address, socklen_t size, int *ret_fd)
{
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return errno;
    int result = connect(fd, address, size) == 0 ? 0 : errno;
    if (result == EINPROGRESS)
        result = connect_finish(fd);
    if (result != 0) {
        close(fd);
        return result;
    }
    *ret_fd = fd;
    return 0;
}

enum err_code cli_server_connect(const struct cli_server *s, int *ret_fd, struct err *e)
{
    int result = EADDRNOTAVAIL;
    if (s->is_unix) {
        struct sockaddr_un un = {.sun_family = AF_UNIX};
        memcpy(un.sun_path, s->path, sizeof s->path);
        result = connect_to(AF_UNIX, (struct sockaddr *)&un, sizeof un, ret_fd);
    } else {
        struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *all = NULL;
        int found = getaddrinfo(s->host, s->port, &hints, &all);
        if (found != 0)
            return err_set(e, ERR_IO, "server %s: %s", s->name, gai_strerror(found));
        for (struct addrinfo *a = all; a != NULL && result != 0; a = a->ai_next)
            result = connect_to(a->ai_family, a->ai_addr, a->ai_addrlen, ret_fd);
        freeaddrinfo(all);
    }
    if (result == 0)
        return ERR_OK;
    return err_set(e, ERR_IO, "no server at %s (%s): start one with `islet up --model FILE`",
                   s->name, strerror(result));
}

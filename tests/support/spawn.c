#include "spawn.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    ARGUMENTS = 64,
    WAIT_MS = 120000
};

static unsigned free_port(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool fine = fd >= 0 && bind(fd, (struct sockaddr *)&a, n) == 0 &&
                getsockname(fd, (struct sockaddr *)&a, &n) == 0;
    if (fd >= 0)
        close(fd);
    return fine ? ntohs(a.sin_port) : 0;
}

static pid_t run(const struct spawn *s, const char *program, char *const *arguments)
{
    char path[512], log[96];
    snprintf(path, sizeof path, "%s/bin/%s", ISLET_BUILD_DIR, program);
    snprintf(log, sizeof log, "%s/%s.log", s->folder, program);
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    int fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0)
        _exit(126);
    setpgid(0, 0);
    setenv("RUNTIME_DIRECTORY", s->folder, 1);
    setenv("STATE_DIRECTORY", s->folder, 1);
    execv(path, arguments);
    fprintf(stderr, "error spawn exec path=%s\n", path);
    _exit(127);
}

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000u + (uint64_t)t.tv_nsec / 1000000u;
}

static bool answers_ready(const struct spawn *s)
{
    static const char request[] =
        "GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    char text[2048] = "";
    int fd = spawn_connect(s);
    if (fd < 0)
        return false;
    bool fine = send(fd, request, sizeof request - 1, MSG_NOSIGNAL) == (ssize_t)sizeof request - 1;
    if (fine)
        (void)spawn_read(fd, text, sizeof text, spawn_response_whole);
    close(fd);
    return fine && strncmp(text, "HTTP/1.1 200", 12) == 0;
}

bool spawn_alive(const struct spawn *s)
{
    return waitpid(s->gateway, NULL, WNOHANG) == 0 && waitpid(s->worker, NULL, WNOHANG) == 0;
}

bool spawn_start(struct spawn *s, const char *model, const char *const *sets)
{
    static char model_set[512], listen_set[64];
    char *arguments[ARGUMENTS] = {"",         "--set", model_set,          "--set",
                                  listen_set, "--set", "compute.threads=1"};
    size_t n = 7;
    memset(s, 0, sizeof *s);
    strcpy(s->folder, "/tmp/islet-spawn.XXXXXX");
    s->port = free_port();
    if (mkdtemp(s->folder) == NULL || s->port == 0) {
        perror("spawn");
        return false;
    }
    snprintf(s->socket, sizeof s->socket, "%s/http.sock", s->folder);
    snprintf(model_set, sizeof model_set, "model.path=%s", model);
    snprintf(listen_set, sizeof listen_set, "server.listen=127.0.0.1:%u", s->port);
    for (size_t i = 0; sets != NULL && sets[i] != NULL && n + 3 < ARGUMENTS; i++) {
        arguments[n++] = "--set";
        arguments[n++] = (char *)(uintptr_t)sets[i];
    }
    arguments[0] = "isletd";
    s->worker = run(s, "isletd", arguments);
    arguments[0] = "islet-gateway";
    s->gateway = run(s, "islet-gateway", arguments);
    for (uint64_t end = now_ms() + WAIT_MS; now_ms() < end && spawn_alive(s); poll(NULL, 0, 20))
        if (answers_ready(s))
            return true;
    fprintf(stderr, "spawn: not ready\n");
    (void)spawn_stop(s);
    return false;
}

/* Ends a process and waits, 10 s at most before it is killed. True: it ended by itself with 0. */
static bool end(pid_t pid)
{
    int status = 0;
    if (pid <= 0)
        return false;
    kill(pid, SIGTERM);
    for (uint64_t limit = now_ms() + 10000; now_ms() < limit; poll(NULL, 0, 10)) {
        pid_t done = waitpid(pid, &status, WNOHANG);
        if (done != 0)
            return done == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    kill(-pid, SIGKILL);
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    return false;
}

static bool log_clean(const struct spawn *s, const char *program, bool show)
{
    char path[128], line[2048];
    bool clean = true;
    snprintf(path, sizeof path, "%s/%s.log", s->folder, program);
    FILE *f = fopen(path, "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        bool error = strncmp(line, "error ", 6) == 0 || strstr(line, "ERROR: ") != NULL ||
                     strstr(line, "WARNING: ThreadSanitizer") != NULL ||
                     strstr(line, ": runtime error: ") != NULL;
        clean &= !error;
        if (error || show)
            fprintf(stderr, "%s | %s", program, line);
    }
    if (f != NULL)
        fclose(f);
    return clean;
}

bool spawn_stop(struct spawn *s)
{
    bool gateway = end(s->gateway), worker = end(s->worker);
    bool fine = gateway && worker;
    if (!fine)
        fprintf(stderr, "spawn: %s did not end well\n", gateway ? "isletd" : "islet-gateway");
    bool clean = log_clean(s, "isletd", !fine);
    clean &= log_clean(s, "islet-gateway", !fine);
    DIR *d = opendir(s->folder);
    for (struct dirent *entry; d != NULL && (entry = readdir(d)) != NULL;) {
        char path[400];
        snprintf(path, sizeof path, "%s/%s", s->folder, entry->d_name);
        if (entry->d_name[0] != '.')
            unlink(path);
    }
    if (d != NULL)
        closedir(d);
    rmdir(s->folder);
    return fine && clean;
}

/* ---- sockets --------------------------------------------------------------------------------- */

static int ready(int fd, const struct sockaddr *a, socklen_t n)
{
    struct timeval limit = {.tv_sec = 10};
    if (fd < 0)
        return -1;
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0 &&
        connect(fd, a, n) == 0)
        return fd;
    close(fd);
    return -1;
}

int spawn_connect(const struct spawn *s)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)s->port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    return ready(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), (struct sockaddr *)&a, sizeof a);
}

int spawn_connect_unix(const struct spawn *s)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%s", s->socket);
    return ready(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), (struct sockaddr *)&a, sizeof a);
}

size_t spawn_read(int fd, char *ret, size_t capacity, bool (*enough)(const char *text, size_t n))
{
    size_t n = 0;
    ret[0] = '\0';
    while (n + 1 < capacity && (enough == NULL || !enough(ret, n))) {
        ssize_t got = recv(fd, ret + n, capacity - 1 - n, 0);
        if (got <= 0)
            break;
        n += (size_t)got;
        ret[n] = '\0';
    }
    return n;
}

bool spawn_response_whole(const char *text, size_t n)
{
    const char *body = strstr(text, "\r\n\r\n");
    if (body == NULL)
        return false;
    body += 4;
    if (strncmp(text, "HTTP/1.1 100", 12) == 0)
        return spawn_response_whole(body, n - (size_t)(body - text));
    if (strncmp(text, "HTTP/1.1 204", 12) == 0)
        return true;
    const char *length = strcasestr(text, "\r\nContent-Length:");
    if (length != NULL && length < body)
        return n - (size_t)(body - text) >=
               strtoull(length + strlen("\r\nContent-Length:"), NULL, 10);
    const char *coding = strcasestr(text, "\r\nTransfer-Encoding: chunked");
    bool chunked = coding != NULL && coding < body; /* else the close is the end */
    return chunked && n - (size_t)(body - text) >= 5 && strcmp(text + n - 5, "0\r\n\r\n") == 0;
}

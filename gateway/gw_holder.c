#include "gw_holder.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Inode of the socket that listens at the port, from a table of /proc/net; 0: none. */
static unsigned long listener_of(const char *table, unsigned port)
{
    enum {
        LISTENS = 0x0A
    };
    char line[512];
    unsigned long inode = 0;
    FILE *in = fopen(table, "re");
    while (in && inode == 0 && fgets(line, sizeof line, in)) {
        unsigned at, state;
        unsigned long found;
        if (sscanf(line, " %*d: %*[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*s %*s %*s %*u %*u %lu", &at,
                   &state, &found) == 3 &&
            at == port && state == LISTENS)
            inode = found;
    }
    if (in)
        fclose(in);
    return inode;
}

static bool has_socket(const char *pid, unsigned long inode)
{
    char path[300], wanted[40], link[40];
    struct dirent *entry;
    bool found = false;
    snprintf(path, sizeof path, "/proc/%s/fd", pid);
    snprintf(wanted, sizeof wanted, "socket:[%lu]", inode);
    DIR *dir = opendir(path);
    while (dir && !found && (entry = readdir(dir)) != NULL) {
        ssize_t n = readlinkat(dirfd(dir), entry->d_name, link, sizeof link - 1);
        link[n > 0 ? n : 0] = '\0';
        found = strcmp(link, wanted) == 0;
    }
    if (dir)
        closedir(dir);
    return found;
}

pid_t gw_holder_of_port(unsigned port)
{
    struct dirent *entry;
    pid_t pid = 0;
    unsigned long inode = listener_of("/proc/net/tcp", port);
    if (inode == 0)
        inode = listener_of("/proc/net/tcp6", port);
    DIR *dir = inode != 0 ? opendir("/proc") : NULL;
    while (dir && pid == 0 && (entry = readdir(dir)) != NULL)
        if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && has_socket(entry->d_name, inode))
            pid = (pid_t)strtol(entry->d_name, NULL, 10);
    if (dir)
        closedir(dir);
    return pid;
}

pid_t gw_holder_of_peer(int fd)
{
    struct ucred peer;
    socklen_t n = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) == 0 ? peer.pid : 0;
}

const char *gw_holder_name(pid_t pid, char *text, size_t n)
{
    char path[40], name[32] = "";
    snprintf(path, sizeof path, "/proc/%ld/comm", (long)pid);
    FILE *in = pid > 0 ? fopen(path, "re") : NULL;
    if (in && fgets(name, sizeof name, in))
        name[strcspn(name, "\n")] = '\0';
    if (in)
        fclose(in);
    if (pid > 0)
        snprintf(text, n, "%s (pid %ld)", name[0] != '\0' ? name : "a process", (long)pid);
    else
        snprintf(text, n, "another process");
    return text;
}

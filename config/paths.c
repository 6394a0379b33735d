#include "paths.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    PATHS_SUN_BYTES = sizeof(((struct sockaddr_un *)0)->sun_path) - 1
};

/* The value of an environment variable that holds an absolute path; others are ignored, as the XDG
 * rules say. */
static const char *paths_environment(const char *name)
{
    const char *value = getenv(name);
    return value != NULL && value[0] == '/' ? value : NULL;
}

static enum err_code paths_join(char *ret, size_t n, struct err *e, const char *base, size_t n_base,
                                const char *rest)
{
    int length = snprintf(ret, n, "%.*s%s", (int)n_base, base, rest);
    if (length < 0 || (size_t)length >= n)
        return err_set(e, ERR_LIMIT, "path %.60s...%s is too long", base, rest);
    return ERR_OK;
}

/* Creates the directory and those above it, 0700, where missing; the last one must be ours and not
 * everybody's. */
static enum err_code paths_make(char *path, struct err *e)
{
    struct stat st;
    for (char *p = path + 1;; p++) {
        char was = *p;
        if (was != '/' && was != '\0')
            continue;
        *p = '\0';
        int failed = mkdir(path, 0700) != 0 ? errno : 0;
        if (failed != 0 && failed != EEXIST)
            return err_set_os(e, ERR_IO, failed, "directory %s cannot be made", path);
        *p = was;
        if (was == '\0')
            break;
    }
    if (lstat(path, &st) != 0)
        return err_set_os(e, ERR_IO, errno, "directory %s", path);
    if (!S_ISDIR(st.st_mode))
        return err_set(e, ERR_IO, "%s is not a directory", path);
    if (st.st_uid != geteuid())
        return err_set(e, ERR_IO, "directory %s belongs to user %u, not to user %u; refused", path,
                       (unsigned)st.st_uid, (unsigned)geteuid());
    if ((st.st_mode & S_IWOTH) != 0)
        return err_set(e, ERR_IO, "directory %s may be written by everybody; chmod 700 it", path);
    return ERR_OK;
}

static enum err_code paths_runtime(char *ret, size_t n, struct err *e)
{
    const char *systemd = paths_environment("RUNTIME_DIRECTORY");
    const char *xdg = paths_environment("XDG_RUNTIME_DIR");
    char own[48];
    enum err_code rc;
    if (systemd != NULL) {
        /* Several are separated by colons; the first is ours. */
        rc = paths_join(ret, n, e, systemd, strcspn(systemd, ":"), "");
    } else if (xdg != NULL) {
        rc = paths_join(ret, n, e, xdg, strlen(xdg), "/islet");
    } else {
        snprintf(own, sizeof own, geteuid() == 0 ? "/run/islet" : "/tmp/islet-%u",
                 (unsigned)geteuid());
        rc = paths_join(ret, n, e, own, strlen(own), "");
    }
    return rc == ERR_OK ? paths_make(ret, e) : rc;
}

enum err_code paths_state(char *ret, size_t n, struct err *e)
{
    const char *systemd = paths_environment("STATE_DIRECTORY");
    const char *home = paths_environment("HOME");
    enum err_code rc;
    if (systemd != NULL)
        rc = paths_join(ret, n, e, systemd, strcspn(systemd, ":"), "");
    else if (home != NULL)
        rc = paths_join(ret, n, e, home, strlen(home), "/.local/state/islet");
    else
        return err_set(e, ERR_IO, "no state directory: neither STATE_DIRECTORY nor HOME is set");
    return rc == ERR_OK ? paths_make(ret, e) : rc;
}

enum err_code paths_socket(const char *setting, const char *name, char *ret, size_t n,
                           struct err *e)
{
    char path[4096];
    enum err_code rc = ERR_OK;
    if (strcmp(setting, "auto") == 0) {
        rc = paths_runtime(path, sizeof path - 64, e);
        if (rc == ERR_OK) {
            size_t used = strlen(path);
            rc = paths_join(path + used, sizeof path - used, e, "/", 1, name);
        }
    } else {
        rc = paths_join(path, sizeof path, e, setting, strlen(setting), "");
    }
    if (rc != ERR_OK)
        return rc;
    if (path[0] == '\0')
        return err_set(e, ERR_ARGUMENT, "the path of a socket is empty");
    if (strlen(path) > PATHS_SUN_BYTES)
        return err_set(e, ERR_ARGUMENT, "socket path %.60s... has %zu bytes; the limit is %d", path,
                       strlen(path), (int)PATHS_SUN_BYTES);
    return paths_join(ret, n, e, path, strlen(path), "");
}

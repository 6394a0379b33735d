#include "engine_machine.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

uint64_t engine_machine_memory(const char *key)
{
    FILE *f = fopen("/proc/meminfo", "re");
    if (f == NULL)
        return 0;
    char line[128];
    const size_t n = strlen(key);
    unsigned long long kib = 0;
    while (fgets(line, sizeof(line), f) != NULL)
        if (strncmp(line, key, n) == 0 && line[n] == ':' && sscanf(line + n + 1, "%llu", &kib) == 1)
            break;
    fclose(f);
    return (uint64_t)kib << 10;
}

/* A file with one number. "max", a missing file: UINT64_MAX. */
static uint64_t read_number(const char *folder, const char *name)
{
    char path[PATH_MAX + 64];
    unsigned long long value = UINT64_MAX;
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return UINT64_MAX;
    if (fscanf(f, "%llu", &value) != 1)
        value = UINT64_MAX;
    fclose(f);
    return value;
}

/* The value of `key` in memory.stat; 0 if there is none. */
static uint64_t read_stat(const char *folder, const char *key)
{
    char path[PATH_MAX + 64], line[128];
    const size_t n = strlen(key);
    unsigned long long value = 0;
    snprintf(path, sizeof(path), "%s/memory.stat", folder);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return 0;
    while (fgets(line, sizeof(line), f) != NULL)
        if (strncmp(line, key, n) == 0 && line[n] == ' ' && sscanf(line + n, "%llu", &value) == 1)
            break;
    fclose(f);
    return value;
}

struct names {
    const char *root, *limit, *throttle, *usage, *cache; /* throttle: NULL, there is none */
};

/* Walks from the process' group up to the root; each level may limit. */
static uint64_t left_in(const struct names *names, char *group)
{
    uint64_t left = UINT64_MAX;
    for (;;) {
        char folder[PATH_MAX];
        snprintf(folder, sizeof(folder), "%s%s", names->root, group);
        uint64_t limit = read_number(folder, names->limit);
        const uint64_t throttle =
            names->throttle == NULL ? UINT64_MAX : read_number(folder, names->throttle);
        limit = throttle < limit ? throttle : limit;
        const uint64_t usage = read_number(folder, names->usage);
        const uint64_t cache = read_stat(folder, names->cache);
        if (limit < (uint64_t)1 << 62 && usage != UINT64_MAX) {
            const uint64_t held = usage > cache ? usage - cache : 0;
            const uint64_t here = limit > held ? limit - held : 0;
            left = here < left ? here : left;
        }
        char *slash = strrchr(group, '/');
        if (slash == NULL || group[0] == '\0' || strcmp(group, "/") == 0)
            return left;
        *slash = '\0';
    }
}

uint64_t engine_machine_cgroup_left(void)
{
    static const struct names v2 = {"/sys/fs/cgroup", "memory.max", "memory.high", "memory.current",
                                    "file"};
    static const struct names v1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", NULL,
                                    "memory.usage_in_bytes", "total_cache"};
    FILE *f = fopen("/proc/self/cgroup", "re");
    uint64_t left = UINT64_MAX;
    char line[PATH_MAX];
    if (f == NULL)
        return UINT64_MAX;
    while (fgets(line, sizeof(line), f) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *controllers = strchr(line, ':');
        char *group = controllers == NULL ? NULL : strchr(controllers + 1, ':');
        if (group == NULL)
            continue;
        *group++ = '\0';
        controllers++;
        uint64_t here = UINT64_MAX;
        if (controllers[0] == '\0')
            here = left_in(&v2, group);
        else if (strcmp(controllers, "memory") == 0)
            here = left_in(&v1, group);
        left = here < left ? here : left;
    }
    fclose(f);
    return left;
}

uint64_t engine_machine_available(void)
{
    const uint64_t machine = engine_machine_memory("MemAvailable");
    const uint64_t group = engine_machine_cgroup_left();
    if (machine == 0)
        return group == UINT64_MAX ? 0 : group;
    return group < machine ? group : machine;
}

uint64_t engine_machine_resident(int statm)
{
    char text[64];
    const ssize_t n = statm >= 0 ? pread(statm, text, sizeof(text) - 1, 0) : 0;
    unsigned long long size, resident;
    if (n <= 0)
        return 0;
    text[n] = '\0';
    if (sscanf(text, "%llu %llu", &size, &resident) != 2)
        return 0;
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

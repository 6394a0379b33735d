#include "fault.h"

#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct {
    const char *name, *help;
} fault_rows[FAULT_N] = {
#define FAULT_POINT(id, name, help) {name, help},
#include "fault_points.def"
#undef FAULT_POINT
};

static struct {
    _Atomic uint64_t left; /* passes until it happens: 0 never, 1 the next */
    _Atomic bool forever, crash;
} fault_armed[FAULT_N];

enum {
    FAULT_EXIT_CONFIGURATION = 78
};

static void __attribute__((noreturn)) fault_refuse(const char *setting)
{
    fprintf(stderr,
            "ISLET_CRASH_AT=%.60s: expected point:n, for example engine.token:3, with n from 1; "
            "points:",
            setting);
    for (size_t i = 0; i < FAULT_N; i++)
        fprintf(stderr, " %s", fault_rows[i].name);
    fprintf(stderr, "\n");
    exit(FAULT_EXIT_CONFIGURATION);
}

void fault_setup(void)
{
    const char *setting = getenv("ISLET_CRASH_AT");
    if (setting == NULL || setting[0] == '\0')
        return;
    const char *colon = strchr(setting, ':');
    if (colon == NULL || colon[1] < '0' || colon[1] > '9')
        fault_refuse(setting);
    char *end;
    unsigned long long nth = strtoull(colon + 1, &end, 10);
    if (*end != '\0' || nth == 0)
        fault_refuse(setting);
    size_t n = (size_t)(colon - setting);
    for (size_t i = 0; i < FAULT_N; i++) {
        if (strlen(fault_rows[i].name) != n || memcmp(fault_rows[i].name, setting, n) != 0)
            continue;
        atomic_store(&fault_armed[i].crash, true);
        fault_arm((enum fault_point)i, nth, false);
        return;
    }
    fault_refuse(setting);
}

bool fault_hit(enum fault_point point)
{
    uint64_t n = atomic_load(&fault_armed[point].left);
    while (n > 1)
        if (atomic_compare_exchange_weak(&fault_armed[point].left, &n, n - 1))
            return false;
    if (n == 0)
        return false;
    if (atomic_load(&fault_armed[point].crash)) {
        kill(getpid(), SIGKILL);
        for (;;)
            pause();
    }
    if (!atomic_load(&fault_armed[point].forever))
        atomic_store(&fault_armed[point].left, 0);
    return true;
}

void fault_arm(enum fault_point point, uint64_t nth, bool forever)
{
    atomic_store(&fault_armed[point].forever, forever);
    atomic_store(&fault_armed[point].left, nth);
}

void fault_list(FILE *out)
{
    for (size_t i = 0; i < FAULT_N; i++)
        fprintf(out, "%-16s %s\n", fault_rows[i].name, fault_rows[i].help);
}

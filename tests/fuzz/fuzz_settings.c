/* islet.conf and --set: any bytes either make settings or one clear line, and leave nothing
 * behind. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "alloc.h"
#include "settings.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void fuzz_check(int ok)
{
    if (!ok)
        abort();
}

static void fuzz_load(const char *path, const char *const *sets, unsigned n_set)
{
    struct settings *s = NULL;
    struct err e = {.code = ERR_OK};
    enum err_code rc = settings_load(path, sets, n_set, &s, &e);
    fuzz_check(rc == e.code && (rc == ERR_OK) == (e.text[0] == '\0') &&
               (rc == ERR_OK) == (s != NULL));
    fuzz_check(strchr(e.text, '\n') == NULL);
    for (unsigned i = 0; s != NULL && i < SETTING_N; i++)
        fuzz_check(settings_text(s, (enum setting_id)i) != NULL);
    settings_free(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t live = alloc_live_blocks();
    char path[64], set[512];
    const char *sets[] = {set};
    if (size > 65536)
        return 0;
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    fuzz_check(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    fuzz_load(path, NULL, 0);
    close(fd);
    size_t n = size < sizeof set ? size : sizeof set - 1;
    memcpy(set, data, n);
    set[n] = '\0';
    fuzz_load("/dev/null", sets, 1);
    fuzz_check(alloc_live_blocks() == live);
    return 0;
}

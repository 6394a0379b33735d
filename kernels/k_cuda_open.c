/* Finds islet-cuda.so, makes sure that it belongs to this program, and opens a GPU through it. */
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#include "alloc.h"
#include "k_cuda_entry.h"
#include "kernels.h"

enum {
    PATH_BYTES = 4096
};

static void *heap_zero(size_t bytes)
{
    return alloc_zero(ALLOC_WORK, 1, bytes);
}

static const struct k_cuda_heap heap = {heap_zero, alloc_free};

/* "../lib/islet-cuda.so" from the folder of the running program; false: unknown. */
static bool beside_program(char ret[PATH_BYTES])
{
    static const char tail[] = "/../lib/islet-cuda.so";
    const ssize_t n = readlink("/proc/self/exe", ret, PATH_BYTES - sizeof tail);
    if (n <= 0)
        return false;
    ret[n] = 0;
    char *slash = strrchr(ret, '/');
    if (slash == NULL)
        return false;
    memcpy(slash, tail, sizeof tail);
    return true;
}

/* The file that is to be opened: the one asked for, or the first that is there. */
static enum err_code find(const char *asked, char ret[PATH_BYTES], struct err *e)
{
    static const char installed[] = ISLET_LIBDIR "/islet-cuda.so";
    if (asked != NULL) {
        const size_t n = strlen(asked);
        if (n > PATH_BYTES - 3)
            return err_set(e, ERR_ARGUMENT, "the path of islet-cuda.so has %zu bytes, at most %d",
                           n, PATH_BYTES - 3);
        /* A name without a folder would be searched for in the system's. */
        memcpy(ret, "./", 2);
        memcpy(ret + (strchr(asked, '/') == NULL ? 2 : 0), asked, n + 1);
        if (access(ret, F_OK) == 0)
            return ERR_OK;
        return err_set(e, ERR_UNSUPPORTED, "%s: no such file, so no GPU", asked);
    }
    if (beside_program(ret) && access(ret, F_OK) == 0)
        return ERR_OK;
    memcpy(ret, installed, sizeof installed);
    if (access(ret, F_OK) == 0)
        return ERR_OK;
    return err_set(e, ERR_UNSUPPORTED,
                   "no islet-cuda.so beside the program's ../lib or in " ISLET_LIBDIR
                   ", so no GPU: make builds it where nvcc is found");
}

static enum err_code check_entry(const struct k_cuda_entry *entry, const char *path, struct err *e)
{
    if (entry == NULL)
        return err_set(e, ERR_UNSUPPORTED, "%s: not Islet's (it lacks " K_CUDA_ENTRY_SYMBOL ")",
                       path);
    if (entry->abi != K_CUDA_ABI || entry->arithmetic != K_ARITHMETIC_VERSION ||
        entry->ops_bytes != sizeof(struct k_ops))
        return err_set(e, ERR_UNSUPPORTED,
                       "%s belongs to another build: version %u.%u.%u, this program needs "
                       "%d.%d.%zu; build and install both together",
                       path, entry->abi, entry->arithmetic, entry->ops_bytes, K_CUDA_ABI,
                       K_ARITHMETIC_VERSION, sizeof(struct k_ops));
    return ERR_OK;
}

bool k_cuda_open_finds(const char *file)
{
    char path[PATH_BYTES];
    return find(file, path, NULL) == ERR_OK;
}

enum err_code k_open_cuda(const struct k_cuda_options *o, struct k_device **ret, struct err *e)
{
    char path[PATH_BYTES];
    enum err_code code = find(o->file, path, e);
    if (code != ERR_OK)
        return code;
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (lib == NULL)
        return err_set(e, ERR_UNSUPPORTED, "%s cannot be loaded: %s", path, dlerror());
    const struct k_cuda_entry *entry = dlsym(lib, K_CUDA_ENTRY_SYMBOL);
    code = check_entry(entry, path, e);
    if (code != ERR_OK) {
        dlclose(lib);
        return code;
    }
    /* From here on the library stays: the driver's threads may run its code until the process
     * ends, also after a device was refused. */
    return entry->open(o, &heap, ret, e);
}

#include "governor_nvml.h"

#include <dlfcn.h>

#include "alloc.h"

enum {
    NVML_GPU_SENSOR = 0, /* the one thermometer that all have */
    NVML_NOT_SUPPORTED = 3
};

/* As NVML defines them. */
struct nvml_memory {
    unsigned long long total, free, used;
};
struct nvml_utilization {
    unsigned gpu, memory;
};

struct governor_nvml {
    void *library;
    void *device;
    int (*shutdown)(void);
    const char *(*error_text)(int);
    /* NULL: the library is older than they are */
    int (*temperature)(void *device, int sensor, unsigned *ret);
    int (*memory)(void *device, struct nvml_memory *ret);
    int (*power)(void *device, unsigned *ret_mw);
    int (*utilization)(void *device, struct nvml_utilization *ret);
};

static const char *text_of(const struct governor_nvml *n, int code)
{
    const char *text = n->error_text != NULL ? n->error_text(code) : NULL;
    return text != NULL ? text : "no text";
}

/* The call, by its newer name if there is one. */
static void *find(const struct governor_nvml *n, const char *newer, const char *older)
{
    void *call = dlsym(n->library, newer);
    return call != NULL || older == NULL ? call : dlsym(n->library, older);
}

static enum err_code start(struct governor_nvml *n, const char *library, const char *bus_id,
                           struct err *e)
{
    int (*init)(void);
    int (*by_bus_id)(const char *, void **);
    n->library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (n->library == NULL)
        return err_set(e, ERR_UNSUPPORTED, "no NVML: %s", dlerror());
    *(void **)&init = find(n, "nvmlInit_v2", "nvmlInit");
    *(void **)&by_bus_id =
        find(n, "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetHandleByPciBusId");
    *(void **)&n->error_text = find(n, "nvmlErrorString", NULL);
    *(void **)&n->temperature = find(n, "nvmlDeviceGetTemperature", NULL);
    *(void **)&n->memory = find(n, "nvmlDeviceGetMemoryInfo", NULL);
    *(void **)&n->power = find(n, "nvmlDeviceGetPowerUsage", NULL);
    *(void **)&n->utilization = find(n, "nvmlDeviceGetUtilizationRates", NULL);
    if (init == NULL || by_bus_id == NULL)
        return err_set(e, ERR_UNSUPPORTED, "no NVML: %s lacks %s", library,
                       init == NULL ? "nvmlInit" : "nvmlDeviceGetHandleByPciBusId");
    int code = init();
    if (code != 0)
        return err_set(e, ERR_DEVICE, "NVML does not start: %s (NVML error %d)", text_of(n, code),
                       code);
    *(void **)&n->shutdown = find(n, "nvmlShutdown", NULL);
    code = by_bus_id(bus_id, &n->device);
    if (code != 0)
        return err_set(e, ERR_DEVICE, "NVML does not know the GPU at %s: %s (NVML error %d)",
                       bus_id, text_of(n, code), code);
    return ERR_OK;
}

enum err_code governor_nvml_open(const char *library, const char *bus_id,
                                 struct governor_nvml **ret, struct err *e)
{
    struct governor_nvml *n = alloc_zero(ALLOC_MISC, 1, sizeof *n);
    if (n == NULL)
        return err_set(e, ERR_NOMEM, "no memory for NVML");
    const enum err_code code = start(n, library != NULL ? library : "libnvidia-ml.so.1", bus_id, e);
    if (code == ERR_OK)
        *ret = n;
    else
        governor_nvml_close(n);
    return code;
}

void governor_nvml_close(struct governor_nvml *n)
{
    if (n == NULL)
        return;
    if (n->shutdown != NULL)
        (void)n->shutdown();
    if (n->library != NULL)
        dlclose(n->library);
    alloc_free(n);
}

static int32_t known(int code, unsigned value)
{
    return code == 0 && value <= INT32_MAX ? (int32_t)value : GOVERNOR_UNKNOWN;
}

void governor_nvml_read(struct governor_nvml *n, struct governor_readings *ret)
{
    unsigned celsius = 0, mw = 0;
    struct nvml_memory memory = {.total = 0};
    struct nvml_utilization use = {.gpu = 0};
    int code = n->temperature != NULL ? n->temperature(n->device, NVML_GPU_SENSOR, &celsius)
                                      : NVML_NOT_SUPPORTED;
    *ret = (struct governor_readings){.temperature = known(code, celsius)};
    code = n->power != NULL ? n->power(n->device, &mw) : NVML_NOT_SUPPORTED;
    ret->power_mw = known(code, mw);
    code = n->utilization != NULL ? n->utilization(n->device, &use) : NVML_NOT_SUPPORTED;
    ret->utilization_percent = known(code, use.gpu);
    if (n->memory != NULL && n->memory(n->device, &memory) == 0) {
        ret->vram_free = memory.free;
        ret->vram_total = memory.total;
    }
}

/* ---- as a source ---- */

static enum err_code source_open(const char *bus_id, void **ret, struct err *e)
{
    struct governor_nvml *n;
    const enum err_code code = governor_nvml_open(NULL, bus_id, &n, e);
    if (code == ERR_OK)
        *ret = n;
    return code;
}

static void source_read(void *sensors, struct governor_readings *ret)
{
    governor_nvml_read(sensors, ret);
}

static void source_close(void *sensors)
{
    governor_nvml_close(sensors);
}

const struct governor_source governor_nvml_source = {
    .open = source_open, .read = source_read, .close = source_close};

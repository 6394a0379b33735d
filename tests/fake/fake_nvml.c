/* A stand-in for libnvidia-ml.so.1. The environment's ISLET_FAKE_NVML names a file that is read at
 * each call: words `name=number` of init, handle, temperature (C), free and total (MiB), power (mW)
 * and use (percent). A negative number is an error of that number; a name that is not there is the
 * error "not supported". init and handle are fine when they are not there. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NOT_SUPPORTED = 3,
    SECRET = 4711
};

struct memory {
    unsigned long long total, free, used;
};
struct utilization {
    unsigned gpu, memory;
};

int nvmlInit_v2(void);
int nvmlShutdown(void);
const char *nvmlErrorString(int code);
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **ret);
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *ret);
int nvmlDeviceGetMemoryInfo(void *device, struct memory *ret);
int nvmlDeviceGetPowerUsage(void *device, unsigned *ret);
int nvmlDeviceGetUtilizationRates(void *device, struct utilization *ret);

static int started;

/* 0 and *ret, or the error. */
static int look_up(const char *name, long long otherwise, unsigned long long *ret)
{
    const char *path = getenv("ISLET_FAKE_NVML");
    char word[64];
    long long value = otherwise;
    FILE *f = path != NULL ? fopen(path, "re") : NULL;
    const size_t n = strlen(name);
    while (f != NULL && fscanf(f, "%63s", word) == 1)
        if (strncmp(word, name, n) == 0 && word[n] == '=')
            value = strtoll(word + n + 1, NULL, 10);
    if (f != NULL)
        fclose(f);
    if (value < 0)
        return (int)-value;
    *ret = (unsigned long long)value;
    return 0;
}

static void check(const void *device)
{
    if (started <= 0 || device != (void *)SECRET)
        abort(); /* used before the start, after the end, or with another's handle */
}

static int read_one(void *device, const char *name, unsigned *ret)
{
    unsigned long long value = 0;
    check(device);
    const int code = look_up(name, -NOT_SUPPORTED, &value);
    *ret = code == 0 ? (unsigned)value : 12345; /* what is written at an error is not to be used */
    return code;
}

int nvmlInit_v2(void)
{
    unsigned long long ignored;
    const int code = look_up("init", 0, &ignored);
    started += code == 0;
    return code;
}

int nvmlShutdown(void)
{
    started--;
    return 0;
}

const char *nvmlErrorString(int code)
{
    return code == NOT_SUPPORTED ? "Not Supported" : code == 18 ? "Version mismatch" : NULL;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **ret)
{
    unsigned long long ignored;
    *ret = (void *)SECRET;
    return strcmp(bus_id, "0000:01:00.0") == 0 ? look_up("handle", 0, &ignored) : 6;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *ret)
{
    return sensor == 0 ? read_one(device, "temperature", ret) : 2;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *ret)
{
    return read_one(device, "power", ret);
}

int nvmlDeviceGetUtilizationRates(void *device, struct utilization *ret)
{
    ret->memory = 1;
    return read_one(device, "use", &ret->gpu);
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *ret)
{
    check(device);
    const int code = look_up("free", -NOT_SUPPORTED, &ret->free);
    const int total_code = look_up("total", -NOT_SUPPORTED, &ret->total);
    ret->free <<= 20;
    ret->total <<= 20;
    ret->used = ret->total - ret->free;
    return code != 0 ? code : total_code;
}

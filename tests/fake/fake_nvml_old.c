/* As fake_nvml.c, of the oldest kind: first names of calls, no texts, nothing but a thermometer. */
int nvmlInit(void);
int nvmlDeviceGetHandleByPciBusId(const char *bus_id, void **ret);
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *ret);

int nvmlInit(void)
{
    return 0;
}

int nvmlDeviceGetHandleByPciBusId(const char *bus_id, void **ret)
{
    *ret = 0;
    return bus_id[0] == '0' ? 0 : 6;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *ret)
{
    (void)device;
    *ret = sensor == 0 ? 44 : 0;
    return 0;
}

/* Readings of an NVIDIA GPU by NVML, the library that comes with its driver: opened at run time, so
 * that nothing depends on it. Each thing that it does not know is unknown, the rest is told. */
#ifndef ISLET_GOVERNOR_NVML_H
#define ISLET_GOVERNOR_NVML_H

#include "governor_sensors.h"

struct governor_nvml;

/* library: NULL: libnvidia-ml.so.1. Gives *ret. ERR_UNSUPPORTED: there is none, or it lacks what it
 * takes to begin; ERR_DEVICE: it does not start, or does not know the GPU. */
enum err_code governor_nvml_open(const char *library, const char *bus_id,
                                 struct governor_nvml **ret, struct err *e)
    __attribute__((warn_unused_result));
void governor_nvml_read(struct governor_nvml *n, struct governor_readings *ret);
void governor_nvml_close(struct governor_nvml *n); /* NULL is fine */

extern const struct governor_source governor_nvml_source;

#endif

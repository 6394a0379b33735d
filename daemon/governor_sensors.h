/* Readings of a GPU, taken by a thread of their own: a driver may take its time, and neither a step
 * nor the loop should wait for it. The engine thread's. */
#ifndef ISLET_GOVERNOR_SENSORS_H
#define ISLET_GOVERNOR_SENSORS_H

#include "err.h"
#include "governor.h"

/* Where they come from; called by that thread. */
struct governor_source {
    /* Gives *ret. bus_id: "0000:1b:00.0", the GPU. ERR_UNSUPPORTED, ERR_DEVICE. */
    enum err_code (*open)(const char *bus_id, void **ret, struct err *e);
    void (*read)(void *sensors, struct governor_readings *ret); /* what fails is unknown */
    void (*close)(void *sensors);
};

struct governor_sensors;

/* Reads every period_ms. Gives *ret; end with governor_sensors_stop. ERR_NOMEM, ERR_IO (thread). */
enum err_code governor_sensors_start(const struct governor_source *source, const char *bus_id,
                                     uint32_t period_ms, struct governor_sensors **ret,
                                     struct err *e) __attribute__((warn_unused_result));
/* Does not wait for a driver that never answers. NULL is fine. */
void governor_sensors_stop(struct governor_sensors *s);
/* False: nothing new since the last call. */
bool governor_sensors_take(struct governor_sensors *s, struct governor_readings *ret);
/* The source could not be opened: there will be no readings. */
bool governor_sensors_failed(struct governor_sensors *s, struct err *ret_why);

#endif

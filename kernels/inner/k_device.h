/* What every backend's device begins with, and nothing else, so that k_ops(), k_threads() and
 * k_close() work on any of them. A backend's own device has this as its first member. */
#ifndef ISLET_K_DEVICE_H
#define ISLET_K_DEVICE_H

#include "kernels.h"

struct k_device {
    struct k_ops ops;
    uint32_t threads;
    void (*close)(struct k_device *d); /* frees the device; never NULL */
};

#endif

/* Error numbers of the CUDA library: which of them end the use of the device, and when one that a
 * test asked for is due. Plain C, so that it is tested without a GPU. */
#ifndef ISLET_K_CUDA_FAULT_H
#define ISLET_K_CUDA_FAULT_H

#include <stdbool.h>

#include "err.h"
#include "kernels.h"

/* Counts a call; true: it fails with fault->error. */
static inline bool k_cuda_fault_due(struct k_cuda_fault *fault)
{
    if (fault->nth == 0)
        return false;
    if (fault->nth > 1) {
        fault->nth--;
        return false;
    }
    if (!fault->forever)
        fault->nth = 0;
    return true;
}

/* True: the context is gone, each later call fails as well, and only a new process can use the
 * device (the numbers are cudaError_t's, which do not change). Unknown numbers count as such: going
 * on with a broken context is worse than a restart. */
static inline bool k_cuda_fault_is_lost(int error)
{
    switch (error) {
    case 0:   /* success */
    case 1:   /* invalid value */
    case 2:   /* no memory */
    case 9:   /* invalid configuration of a launch */
    case 13:  /* invalid symbol */
    case 34:  /* no driver behind the library */
    case 35:  /* driver older than the library */
    case 46:  /* device used by someone else alone */
    case 98:  /* invalid device function */
    case 100: /* no device */
    case 101: /* invalid device */
    case 209: /* no code for this architecture */
    case 222: /* PTX newer than the driver */
    case 400: /* invalid handle */
    case 600: /* not ready */
    case 701: /* a launch wants more than the device has */
    case 712: /* host memory already registered */
    case 713: /* host memory not registered */
    case 801: /* not supported */
    case 900: /* 900 to 908: a recording was not possible */
    case 901:
    case 902:
    case 903:
    case 904:
    case 905:
    case 906:
    case 907:
    case 908:
    case 910: /* a graph cannot be changed so */
        return false;
    default:
        return true;
    }
}

/* What the caller can do about it when a device is opened or memory is taken. */
static inline enum err_code k_cuda_fault_code(int error)
{
    switch (error) {
    case 2:
        return ERR_NOMEM;
    case 34:
    case 35:
    case 98:
    case 100:
    case 101:
    case 209:
    case 222:
    case 801:
        return ERR_UNSUPPORTED;
    default:
        return ERR_DEVICE;
    }
}

#endif

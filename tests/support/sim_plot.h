/* Curves over a common axis as a plain SVG file. */
#ifndef ISLET_SIM_PLOT_H
#define ISLET_SIM_PLOT_H

#include <stdint.h>

#include "err.h"

struct sim_plot_curve {
    const char *name;
    const double *y; /* [n] 0..100 */
};

/* x [n]: 0..100, rising. ERR_IO. */
enum err_code sim_plot_write(const char *path, const char *title, const double *x, uint32_t n,
                             const struct sim_plot_curve *curves, uint32_t n_curves, struct err *e)
    __attribute__((warn_unused_result));

#endif

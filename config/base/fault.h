/* Named fault points: places where a test build or ISLET_CRASH_AT makes the rare thing happen.
 *   ISLET_CRASH_AT=name:n   kill(getpid(), SIGKILL) at the nth pass of the point `name`
 *   fault_arm(name, n, forever)   fault_hit(name) returns true at the nth pass (and later ones)
 * Points are rows of fault_points.def, so that `--list-crash-points` cannot forget one. */
#ifndef ISLET_FAULT_H
#define ISLET_FAULT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum fault_point {
#define FAULT_POINT(id, name, help) FAULT_##id,
#include "fault_points.def"
#undef FAULT_POINT
    FAULT_N
};

/* Reads ISLET_CRASH_AT; call once from main. A bad value is one line on stderr and exit 78. */
void fault_setup(void);
/* Counts the pass; crashes or returns true if armed for this one. */
bool fault_hit(enum fault_point point);
void fault_arm(enum fault_point point, uint64_t nth, bool forever);
void fault_list(FILE *out);

#endif

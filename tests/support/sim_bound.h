/* What no cache does better on a trace whose making is known. An expert is needed once a step at
 * most, so what a step hits has been there since the step before: the hits are among the experts
 * that the cache holds when the step begins, all of them read before, and chosen by what was known
 * then. The bound holds those that are likeliest to be needed (t->chances), and pays nothing for
 * changing its choice: who knows no more than those chances cannot expect to read fewer bytes.
 * Reading ahead does not help, what it saves later it reads now. Being counted on the trace itself,
 * the bound has the same luck as the policies. */
#ifndef ISLET_SIM_BOUND_H
#define ISLET_SIM_BOUND_H

#include "sim_replay.h"

/* ret [n], for the capacities; an expert that fits one in part is given to it whole. ERR_ARGUMENT:
 * the trace has no chances. */
enum err_code sim_bound_run(const struct sim_trace *t, const uint64_t *capacities, uint32_t n,
                            struct sim_replay_result *ret, struct err *e)
    __attribute__((warn_unused_result));

#endif
